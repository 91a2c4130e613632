"""Cache keys for what steps mount, which buildah leaves out of its own.

``RUN --mount=type=bind`` shows files of the context, or of another stage, to a command. BuildKit makes their content
part of the step's cache key. buildah (1.28, tried) takes the instruction's text alone, so that after a change of a
mounted file the old layer is used again, silently. Here such steps get an ``ARG`` before them whose value is a hash of
what they mount; buildah has arguments in its keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ARGUMENT: Final = "TRAINWORKS_MOUNTED_CONTENT"
"""Name of the build argument; a step sees it in its environment and has no use for it."""

_MOUNT: Final = re.compile(r"--mount=(\S+)")
_FROM: Final = re.compile(r"FROM\s+(?:--\S+\s+)*(?P<base>\S+)(?:\s+AS\s+(?P<stage>\S+))?\s*$", re.IGNORECASE)
_SOURCE_STAGE: Final = re.compile(r"--from=(\S+)")


@dataclass(frozen=True, kw_only=True)
class _Instruction:
    """One instruction: the line it starts at, and its text with continued lines joined."""

    line: int
    text: str

    @property
    def word(self) -> str:
        return self.text.split(None, 1)[0].upper()


@dataclass(kw_only=True)
class _Stages:
    """Running hashes of the stages met so far, by name and by number."""

    hashes: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def of(self, name: str, identify: Callable[[str], str]) -> str:
        return self.hashes.get(name.lower()) or f"{name} {identify(name)}"


def with_content_keys(dockerfile: str, context: Path, *, identify: Callable[[str], str]) -> str:
    """Return the Dockerfile with an ``ARG`` before each step that mounts something.

    Args:
        dockerfile: The text; only the portable subset, no heredocs.
        context: The build context.
        identify: Returns the identifier of an image that is no stage of this file, empty where it is not known.

    Raises:
        OSError: A file of the context cannot be read.
    """
    lines = dockerfile.splitlines()
    before: dict[int, str] = {}
    stages = _Stages()
    current: list[str] = []
    names: tuple[str, ...] = ()
    for instruction in _instructions(lines):
        found = _FROM.match(instruction.text)
        if found is not None:
            names = tuple(name.lower() for name in (str(stages.count), found["stage"]) if name)
            stages.count += 1
            current = [stages.of(found["base"], identify)]
        else:
            mounted = "".join(_mounted(instruction, context, stages, identify))
            if mounted:
                before[instruction.line] = f"ARG {ARGUMENT}={hashlib.sha256(mounted.encode()).hexdigest()[:16]}"
            current += [instruction.text, mounted, *_copied(instruction, context, stages, identify)]
        for name in names:
            stages.hashes[name] = hashlib.sha256("\0".join(current).encode()).hexdigest()
    result = []
    for number, line in enumerate(lines):
        if number in before:
            result.append(before[number])
        result.append(line)
    return "\n".join(result) + "\n"


def content_hash(path: Path) -> str:
    """Return a hash of a file, or of a folder with all below it: names, kinds, execute bits and bytes, no times."""
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
    yield "", path
    if path.is_dir() and not path.is_symlink():
        for folder, folders, files in os.walk(path):
            for name in (*folders, *files):
                entry = Path(folder) / name
                yield str(entry.relative_to(path)), entry


def _instructions(lines: list[str]) -> Iterator[_Instruction]:
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
    instruction: _Instruction, context: Path, stages: _Stages, identify: Callable[[str], str]
) -> Iterator[str]:
    """Yield one text for each bind mount of a RUN instruction."""
    if instruction.word != "RUN":
        return
    for mount in _MOUNT.findall(instruction.text):
        options = dict(option.partition("=")[::2] for option in mount.split(","))
        if options.get("type", "bind") == "bind":
            source = options.get("source") or options.get("src") or "."
            if "from" in options:
                yield f"{source} of {stages.of(options['from'], identify)}\0"
            else:
                yield f"{source} {_content(context, source)}\0"
        elif options.get("type") == "cache" and "from" in options:
            yield f"cache of {stages.of(options['from'], identify)}\0"


def _copied(instruction: _Instruction, context: Path, stages: _Stages, identify: Callable[[str], str]) -> Iterator[str]:
    """Yield one text for each thing that a COPY or ADD brings in: it makes the stage what it is."""
    if instruction.word not in {"COPY", "ADD"}:
        return
    stage = _SOURCE_STAGE.search(instruction.text)
    if stage is not None:
        yield stages.of(stage[1], identify)
        return
    text = re.sub(r"^\S+\s+(?:--\S+\s+)*", "", instruction.text)
    words = json.loads(text) if text.startswith("[") else text.split()
    for source in words[:-1]:
        yield f"{source} {_content(context, source)}"


def _content(context: Path, source: str) -> str:
    """Return the hashes of what a source names; a pattern may name several, a missing one none."""
    relative = source.lstrip("/") or "."
    found = [context / relative] if (context / relative).exists() else sorted(context.glob(relative))
    return " ".join(content_hash(path) for path in found)
