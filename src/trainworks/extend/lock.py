"""The lock of an extension's requirements: uv's lines with hashes, and what else the image was made of as comments."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainworks.errors import ExtendError, OutputError
from trainworks.extend.plan import WheelSource
from trainworks.extend.requirements import ExtendedBase
from trainworks.extend.wanted import Wanted

HEADER = "# Written by `python build.py extend`: every file by its hash,"
_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+)((?: \\\n    --hash=\S+)*)$", re.MULTILINE)
_COMMIT = re.compile(r"^# (git\+\S+) is commit ([0-9a-f]{40})$", re.MULTILINE)
_LOCAL = re.compile(r"^# (\S+)==(\S+) is built or taken from files of this machine$", re.MULTILINE)
_PROJECT = re.compile(r"^# (\S+) is the code itself$", re.MULTILINE)
_BUILT = re.compile(r"^# (\S+) is built from its source archive$", re.MULTILINE)
_COMPLAINT = re.compile(r"^# pip check: (.+)$", re.MULTILINE)
_NOTE = re.compile(r"^# note: (.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class ExtensionLock:
    """What is installed.

    Attributes:
        pins: Lines with hashes, as uv writes them, below the options that say where they come from.
        local: What comes from files of this machine, name to version.
        built: Names of what is built from a source archive of an index.
        commits: Git requirement to commit.
        project: The distribution that the code itself is; ``""`` for none.
        notes: What the user was told.
        complaints: What ``pip check`` says of what stays although it does not go with the requirements.
    """

    pins: str = ""
    local: Mapping[str, str] = field(default_factory=dict)
    built: tuple[str, ...] = ()
    commits: Mapping[str, str] = field(default_factory=dict)
    project: str = ""
    notes: tuple[str, ...] = ()
    complaints: tuple[str, ...] = ()

    @property
    def locked(self) -> tuple[tuple[str, str], ...]:
        """Name and version of everything that is installed, sorted."""
        return tuple(sorted([*((name, version) for name, version, _ in _PIN.findall(self.pins)), *self.local.items()]))


def locked_hashes(text: str) -> Mapping[tuple[str, str], tuple[str, ...]]:
    """Return the sha256 of every file that a lock allows, by name and version."""
    return {
        (name, version): tuple(re.findall(r"sha256:([0-9a-f]{64})", hashes))
        for name, version, hashes in _PIN.findall(text)
    }


def lock_path_of(requirements: Path, base: str) -> Path:
    """Return where the lock of a requirements file lies: beside it, one for each base."""
    name = re.sub(r"[/:@]", "+", base)
    return requirements.with_name(f"{requirements.stem}.{name}.locked.txt")


def locks_of(requirements: Path) -> list[str]:
    """Return the names of all locks that lie beside a requirements file, whatever their base."""
    return [path.name for path in requirements.parent.glob(f"{glob.escape(requirements.stem)}.*.locked.txt")]


def locked_commits(path: Path | None) -> dict[str, str]:
    """Return the commits that a lock has, whatever else it fits."""
    return dict(_COMMIT.findall(_text(path)))


def read_lock(path: Path | None, digest: str) -> ExtensionLock | None:
    """Return a lock; ``None`` where there is none, or one of other requirements or another base.

    Raises:
        ExtendError: Another file is in its place.
    """
    text = _text(path)
    if text and not text.startswith(HEADER):
        raise ExtendError([f"{path} exists and was not written by extend: the lock would replace it"])
    if f"# inputs: {digest}\n" not in text:
        return None
    return ExtensionLock(
        pins="".join(f"{line}\n" for line in text.splitlines() if not line.startswith("#")),
        local=dict(_LOCAL.findall(text)),
        built=tuple(_BUILT.findall(text)),
        commits=dict(_COMMIT.findall(text)),
        project="".join(_PROJECT.findall(text)),
        notes=tuple(_NOTE.findall(text)),
        complaints=tuple(_COMPLAINT.findall(text)),
    )


def write_lock(path: Path, lock: ExtensionLock, digest: str, base: ExtendedBase) -> None:
    """Write a lock; raises ``OutputError``."""
    text = "".join(
        (
            f"{HEADER} for Python {base.version}\n# and what {base.reference} has; delete it to resolve again.\n",
            f"# inputs: {digest}\n",
            *(f"# {source} is commit {commit}\n" for source, commit in sorted(lock.commits.items())),
            *(f"# note: {note}\n" for note in lock.notes),
            *(f"# pip check: {line}\n" for line in lock.complaints),
            *(
                f"# {name}=={version} is built or taken from files of this machine\n"
                for name, version in lock.local.items()
            ),
            *([f"# {lock.project} is the code itself\n"] if lock.project else []),
            *(f"# {name} is built from its source archive\n" for name in lock.built),
            lock.pins,
        )
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}", hint="name a folder with --output") from error


def inputs_digest(
    wanted: Wanted, sources: Sequence[WheelSource], chosen: Mapping[str, object], base: ExtendedBase
) -> str:
    """Return the hash of everything that decides what is installed, but for what indexes have.

    Args:
        wanted: The requirements.
        sources: What wheels are built from.
        chosen: Options of the command.
        base: The base image.
    """
    files = sorted((name, hashlib.sha256(file.content).hexdigest()) for name, file in wanted.files.items())
    parts = (
        wanted.lines,
        wanted.constraints,
        files,
        [(source.origin, source.subdirectory, source.extras, source.identity) for source in sources],
        chosen,
        (base.full_version, base.glibc, base.machine, [asdict(row) for row in base.distributions], dict(base.kept)),
    )
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


def _text(path: Path | None) -> str:
    try:
        return path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return ""
