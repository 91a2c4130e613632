"""The lock of the requirements that an image is extended with: made once for each base."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from trainworks.errors import ExtendError, LockError, OutputError
from trainworks.extend.requirements import ExtendedBase, Wheel, wrong_builds
from trainworks.extend.resolving.releases import Archive, BuildArchives, LockedRelease, Resolution, Resolvable
from trainworks.extend.resolving.search import resolve
from trainworks.host.settings import HostSettings
from trainworks.terminal.output import say


def lock_path_of(requirements: Path, base: str) -> Path:
    """Return where the hash-locked form of a requirements file lies: beside it, one for each base."""
    name = re.sub(r"[/:@]", "+", base)
    return requirements.with_name(f"{requirements.stem}.{name}.locked.txt")


def locks_of(requirements: Path) -> list[str]:
    """Return the names of all locks that lie beside a requirements file, whatever their base."""
    return [path.name for path in requirements.parent.glob(f"{glob.escape(requirements.stem)}.*.locked.txt")]


def locked_commits(path: Path) -> dict[str, str]:
    """Return the commits that a lock has: git requirement to commit."""
    return dict(_COMMIT.findall(_text_of(path)))


def locked_archives(text: str) -> tuple[Archive, ...]:
    """Return what a lock's text has to be built from source archives."""
    return tuple(Archive(**found.groupdict()) for found in _ARCHIVE.finditer(text))


def locked_removals(text: str) -> tuple[str, ...]:
    """Return the names of what of the base a lock's text removes."""
    return tuple(_REMOVED.findall(text))


def locked_notes(text: str) -> tuple[str, ...]:
    """Return what a lock's text says for the user: what moves, what is built, what is older than it could be."""
    return tuple(_NOTE.findall(text))


def release_dates(text: str) -> dict[str, str]:
    """Return when what a lock's text has was released, by name, as far as its index said so."""
    return {found["name"]: found["date"] for found in _RELEASED.finditer(text)}


_RELEASED = re.compile(
    r"^(?P<name>[a-z0-9-]+)==\S+(?: \\\n    --hash=sha256:[0-9a-f]{64})+  # (?P<date>\d{4}-\d\d-\d\d)$", re.MULTILINE
)


def with_pins(text: str, wheels: Mapping[str, Wheel]) -> str:
    """Return a lock's text as pip installs it: a source archive's pin is that of the wheel that was built from it."""
    for each, wheel in wheels.items():
        name, _, version = each.partition(" ")
        text = re.sub(
            rf"^{re.escape(name)}=={re.escape(version)} (?:\\\n)?.*\n", f"{wheel.pin}\n", text, flags=re.MULTILINE
        )
    return text


_COMMIT = re.compile(r"^# (git\+\S+) is commit ([0-9a-f]{40})$", re.MULTILINE)


_ARCHIVE = re.compile(
    r"^# (?P<name>[a-z0-9-]+) (?P<version>\S+) is built from (?P<file>\S+) sha256:(?P<sha256>[0-9a-f]{64})$",
    re.MULTILINE,
)
_REMOVED = re.compile(r"^# ([a-z0-9-]+) \S+ of the base is removed", re.MULTILINE)
_NOTE = re.compile(
    r"^# (\S+ \S+ (?:-> \S+, .*|is built from \S+|of the base is removed.*|is not the newest .*))",
    re.MULTILINE,
)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return ""


def lock_requirements(
    wanted: Resolvable,
    path: Path,
    base: ExtendedBase,
    settings: HostSettings,
    environment: Mapping[str, str],
    *,
    build: BuildArchives,
    with_index: HostSettings,
    companions: Container[str],
    output: Path | None,
    resolving: bool,
) -> tuple[str, Path]:
    """Return hash-locked requirements and the file that they are in: kept from last time while it fits.

    Args:
        wanted: The requirements.
        path: Where the lock lies.
        base: What they have to go together with.
        settings: This machine's indexes.
        environment: The process's.
        build: Builds source archives in the base image.
        with_index: The same with the index that the base was built from, which is asked only where the others have
            another build of what goes with torch.
        output: A folder that gets the build context; nothing is written beside the requirements then.
        companions: See ``wrong_builds``.
        resolving: Whether requirements that have no lock, or another's, get a new one.

    Raises:
        ExtendError: Another file is in the lock's place, or no index has the base's build.
        LockError: No lock fits and none may be made, or no set of releases fits.
        BuildError: A source archive cannot be built.
        OutputError: The lock cannot be written.
    """
    mark = f"# inputs: {_inputs_digest(wanted, base)}\n"
    there = _text_of(path)
    if mark in there:
        if resolving:
            say(f"  locked already: {path}")
        return there, path
    if not resolving:
        raise LockError(
            f"no lock for these requirements and this base: {path}",
            hint="`build.py extend` with the same choice writes it",
        )
    if there and not there.startswith(HEADER):
        raise ExtendError(
            [f"{path} exists and was not written by extend: the hash-locked requirements would replace it"]
        )
    attempts = [settings, *([with_index] if with_index != settings else [])]
    for number, attempt in enumerate(attempts, start=1):
        try:
            resolution = resolve(wanted, base, attempt, environment, where=str(path), build=build)
        except LockError:
            if number == len(attempts):
                raise
            continue
        wrong = wrong_builds([(each.name, each.version) for each in resolution.releases], base, companions)
        if not wrong:
            break
    else:
        # Not written: with another index the same requirements have another lock.
        raise ExtendError(wrong, hint="nothing was built")
    releases, wrong = with_hashes_of(resolution.releases, wanted.hashes)
    if wrong:
        raise ExtendError(wrong, hint="lock them again; nothing was built")
    locked = "".join(
        (
            f"{HEADER} for Python {base.version}\n# and what {base.reference} has; delete it to resolve again.\n{mark}",
            *(f"# {source} is commit {commit}\n" for source, commit in sorted(wanted.commits.items())),
            *(f"# {line}\n" for line in _comments(resolution)),
            *map(_pin, releases),
            *(f"{wheel.pin}\n" for wheel in wanted.wheels if not wheel.built),
        )
    )
    if output is None:
        try:
            path.write_text(locked, encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"{path} cannot be written: {error.strerror}", hint="name a folder with --output"
            ) from error
        say(f"  resolved and hashed: {path}")
        return locked, path
    say(f"  resolved and hashed: {output / 'requirements.txt'}")
    return locked, output / "requirements.txt"


HEADER = "# Written by `python build.py extend`: every file by its hash,"


def with_hashes_of(
    releases: Iterable[LockedRelease], hashes: Mapping[tuple[str, str], tuple[str, ...]]
) -> tuple[list[LockedRelease], list[str]]:
    """Return releases with no other files than a lock has, and a problem for each that has none left.

    Args:
        releases: The releases, with the files that an index has.
        hashes: Name and version to the hashes of a lock.
    """
    found: list[LockedRelease] = []
    problems: list[str] = []
    for release in releases:
        allowed = hashes.get((release.name, release.version), release.hashes)
        kept = tuple(each for each in release.hashes if each in allowed)
        found.append(replace(release, hashes=kept))
        if not kept:
            problems.append(f"{release.name} {release.version}: the index has other files than the lock")
    return found, problems


def _comments(resolution: Resolution) -> list[str]:
    archives = [each.archive for each in resolution.releases if each.archive]
    return [
        *(f"{each} is built from {each.file} sha256:{each.sha256}" for each in archives),
        *resolution.notes,
    ]


def _pin(release: LockedRelease) -> str:
    hashes = "".join(f" \\\n    --hash=sha256:{each}" for each in release.hashes)
    return f"{release.name}=={release.version}{hashes}{f'  # {release.released}' if release.released else ''}\n"


def _inputs_digest(wanted: Resolvable, base: ExtendedBase) -> str:
    """Return the hash of everything that decides what requirements resolve to, but for what indexes have."""
    wheels = [
        (wheel.name, wheel.version, wheel.extras, wheel.requires, "" if wheel.built else wheel.sha256)
        for wheel in wanted.wheels
    ]
    commits = sorted(wanted.commits.items())
    of_base = (
        base.full_version or base.version,
        base.glibc,
        base.machine,
        [asdict(row) for row in base.distributions],
        base.kept,
    )
    chosen = (asdict(wanted.choice), wanted.options, sorted(wanted.hashes.items()))
    parts = (wanted.lines, wanted.constraints, wheels, commits, chosen, of_base)
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"
