"""Cache keys for what steps mount, which buildah leaves out of its own.

``RUN --mount=type=bind`` shows files of the context, or of an image, to a command. BuildKit makes
their content part of the step's cache key. buildah (1.28, tried) takes the instruction's text
alone, so that after a change of a mounted file the old layer is used again, silently. Here such
steps get an ``ARG`` before them whose value is a hash of what they mount; buildah has arguments in
its keys.

Mounting another *stage* is refused: buildah (1.28, tried) mounts the stage's base image instead
when the stage itself comes from the cache, so that a second build fails or is wrong. ``COPY
--from`` does the same on every engine.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainworks.errors import BuildError

ARGUMENT: Final = "TRAINWORKS_MOUNTED_CONTENT"
"""Name of the build argument. Steps see it in their environment and ignore it."""

_MOUNT: Final = re.compile(r"--mount=(\S+)")
_STAGE: Final = re.compile(r"FROM\s.*\sAS\s+(?P<stage>\S+)\s*$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class _Instruction:
    """One instruction: the line it starts at, and its text with continued lines joined."""

    line: int
    text: str


def with_content_keys(dockerfile: str, context: Path, *, identify: Callable[[str], str]) -> str:
    """Return the Dockerfile with an ``ARG`` before each step that mounts something.

    Args:
        dockerfile: The text; only the portable subset, no heredocs.
        context: The folder of the build context.
        identify: Returns the identifier of an image, empty where it is not known.

    Raises:
        BuildError: A step mounts a stage.
        OSError: A file of the context cannot be read.
    """
    lines = dockerfile.splitlines()
    arguments: dict[int, str] = {}
    stages: set[str] = set()
    number_of_stages = 0
    for instruction in _instructions(lines):
        word = instruction.text.split(None, 1)[0].upper()
        if word == "FROM":
            stages.add(str(number_of_stages))
            number_of_stages += 1
            stage = _STAGE.match(instruction.text)
            if stage:
                stages.add(stage["stage"].lower())
        elif word == "RUN":
            mounted = "".join(_mounted(instruction, context, stages, identify))
            if mounted:
                digest = hashlib.sha256(mounted.encode()).hexdigest()
                arguments[instruction.line] = f"ARG {ARGUMENT}={digest[:16]}"
    result = []
    for number, line in enumerate(lines):
        if number in arguments:
            result.append(arguments[number])
        result.append(line)
    return "\n".join(result) + "\n"


def content_hash(path: Path) -> str:
    """Return a hash of a file, or of a folder with all below it: names, kinds,
    execute bits and bytes, no times.
    """
    digest = hashlib.sha256()
    for relative, entry in sorted(_walk(path)):
        if entry.is_symlink():
            digest.update(f"link {relative}\0{entry.readlink()}\0".encode(errors="surrogateescape"))
        elif entry.is_dir():
            digest.update(f"folder {relative}\0".encode(errors="surrogateescape"))
        else:
            executable = os.access(entry, os.X_OK)
            digest.update(f"file {relative}\0{executable}\0".encode(errors="surrogateescape"))
            with entry.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _walk(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield a path and everything below it: the path relative to the first one, and the path."""
    yield "", path
    if path.is_dir() and not path.is_symlink():
        for folder, folders, files in os.walk(path):
            for name in (*folders, *files):
                entry = Path(folder) / name
                yield str(entry.relative_to(path)), entry


def _instructions(lines: list[str]) -> Iterator[_Instruction]:
    """Yield the instructions of a Dockerfile's lines; comments and empty lines are left out."""
    parts: list[str] = []
    start = 0
    for number, line in enumerate(lines):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if not parts:
            start = number
        continued = stripped.endswith("\\")
        parts.append(stripped.removesuffix("\\").strip())
        if not continued:
            yield _Instruction(line=start, text=" ".join(parts))
            parts = []
    if parts:
        yield _Instruction(line=start, text=" ".join(parts))


def _mounted(
    instruction: _Instruction, context: Path, stages: set[str], identify: Callable[[str], str]
) -> Iterator[str]:
    """Yield a text that identifies the content of each file or folder that a RUN step mounts.

    Args:
        instruction: The instruction.
        context: The folder of the build context.
        stages: The names and numbers of the stages so far, in small letters.
        identify: Returns the identifier of an image.

    Raises:
        BuildError: The step mounts a stage.
    """
    for mount in _MOUNT.findall(instruction.text):
        options = dict(option.partition("=")[::2] for option in mount.split(","))
        kind = options.get("type", "bind")
        source = options.get("source") or options.get("src") or "."
        origin = options.get("from")
        if origin is not None and origin.lower() in stages and kind in {"bind", "cache"}:
            raise BuildError(
                f"line {instruction.line + 1} of the Dockerfile mounts the stage {origin}, which"
                " buildah does wrong when that stage is cached",
                hint=f"use `COPY --from={origin}`, or `--engine docker`",
            )
        if origin is not None:
            yield f"{source} of {origin} {identify(origin)}\0"
        elif kind == "bind":
            yield f"{source} {_content(context, source)}\0"


def _content(context: Path, source: str) -> str:
    """Return the hash of a file or folder of the context; ``""`` if it is missing.

    The engine reports a missing one.
    """
    path = context / (source.lstrip("/") or ".")
    return content_hash(path) if path.exists() else ""
