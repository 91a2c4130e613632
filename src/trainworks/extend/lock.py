"""The lock of the requirements that an image is extended with: made once for each base."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import re
import zipfile
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainworks.engine.scratch import private_folder
from trainworks.errors import ExtendError, LockError, OutputError
from trainworks.extend.reading.lines import locked_versions, read_requirements
from trainworks.extend.reading.options import Choice
from trainworks.extend.reading.selection import with_hashes_of
from trainworks.extend.requirements import BaseDistribution, ExtendedBase, Wheel, wrong_builds
from trainworks.host.pip import uv_configuration
from trainworks.host.settings import HostSettings
from trainworks.inputs.lock_python import run_uv
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


_COMMIT = re.compile(r"^# (git\+\S+) is commit ([0-9a-f]{40})$", re.MULTILINE)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return ""


@dataclass(frozen=True, kw_only=True)
class Resolvable:
    """What a lock is made for.

    Attributes:
        lines: Requirements of names and versions, as pip reads them.
        constraints: Lines of the same form.
        wheels: Wheels that are installed whatever an index has.
        commits: Git requirement to its commit.
        options: Lines that say where packages come from, for the digest of the inputs.
        choice: Which versions and files count.
        hashes: Name and version to the hashes of the files that a lock of another tool has.
    """

    lines: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    wheels: tuple[Wheel, ...] = ()
    commits: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    choice: Choice = field(default_factory=Choice)
    hashes: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)


def lock_requirements(
    wanted: Resolvable,
    path: Path,
    base: ExtendedBase,
    settings: HostSettings,
    environment: Mapping[str, str],
    *,
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
        with_index: The same with the index that the base was built from, which is asked only where the others have
            another build of what goes with torch.
        output: A folder that gets the build context; nothing is written beside the requirements then.
        companions: See ``wrong_builds``.
        resolving: Whether requirements that have no lock, or another's, get a new one.

    Raises:
        ExtendError: Another file is in the lock's place, or no index has the base's build.
        LockError: No lock fits and none may be made, or no set of wheels fits.
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
    resolved = resolve(wanted, base, settings, environment, where=str(path))
    wrong = _wrong_builds(resolved, base, companions)
    if wrong and with_index != settings:
        with contextlib.suppress(LockError):
            resolved = resolve(wanted, base, with_index, environment, where=str(path))
            wrong = _wrong_builds(resolved, base, companions)
    if wrong:
        # Not written: with another index the same requirements have another lock.
        raise ExtendError(wrong, hint="nothing was built")
    resolved, wrong = with_hashes_of(resolved, wanted.hashes)
    if wrong:
        raise ExtendError(wrong, hint="lock them again; nothing was built")
    locked = (
        f"{HEADER} for Python {base.version}\n# and what {base.reference} has; delete it to resolve again.\n{mark}"
        + "".join(f"# {source} is commit {commit}\n" for source, commit in sorted(wanted.commits.items()))
        + resolved
        + "".join(f"{wheel.pin}\n" for wheel in wanted.wheels if not wheel.built)
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


def _wrong_builds(resolved: str, base: ExtendedBase, companions: Container[str]) -> list[str]:
    return wrong_builds(locked_versions(read_requirements(resolved, "").requirements, base), base, companions)


def _inputs_digest(wanted: Resolvable, base: ExtendedBase) -> str:
    """Return the hash of everything that decides what requirements resolve to, but for what indexes have."""
    wheels = [
        (wheel.name, wheel.version, wheel.extras, wheel.requires, "" if wheel.built else wheel.sha256)
        for wheel in wanted.wheels
    ]
    commits = sorted(wanted.commits.items())
    of_base = (base.version, base.glibc, base.machine, [asdict(row) for row in base.distributions])
    # Only where there are some: locks from before there were options stay valid.
    options: list[object] = [wanted.options] if wanted.options else []
    options += [sorted(wanted.hashes.items())] if wanted.hashes else []
    parts = (wanted.lines, wanted.constraints, wheels, commits, of_base, *options)
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


def resolve(
    wanted: Resolvable, base: ExtendedBase, settings: HostSettings, environment: Mapping[str, str], *, where: str
) -> str:
    """Resolve requirements for a base image's Python and return them hash-locked, without what the base has already.

    What is installed in the base takes part as a wheel of exactly its version that needs nothing more, so that versions
    which no index has (a vendor's own torch) count, and none is replaced. Wheels of this machine take part with what
    they ask for, and are not in the result.

    Raises:
        LockError: No set of wheels fits, or the index does not answer; with uv's own words.
    """
    with private_folder() as folder:
        installed = folder / "installed"
        installed.mkdir()
        pins = [_stand_in(row, installed) for row in base.distributions if _is_version(row.version)]
        lines = list(wanted.lines)
        for number, wheel in enumerate(wanted.wheels):
            path = folder / str(number) / wheel.file
            path.parent.mkdir()
            path.write_bytes(wheel.content)
            lines.append(f"{wheel.name}{wheel.extras} @ {path.as_uri()}")
        _write_lines(folder / "constraints.txt", (*pins, *wanted.constraints))
        _write_lines(folder / "requirements.in", lines)
        folders = [str(installed), *map(str, settings.pip.local_folders)]
        (folder / "uv.toml").write_text(uv_configuration(settings.pip, folders=folders), encoding="utf-8")
        arguments = [
            *(
                "pip",
                "compile",
                "requirements.in",
                "--quiet",
                "--no-header",
                "--no-annotate",
                "--generate-hashes",
            ),
            # A source distribution is built with whatever its build asks for: nothing of that is pinned.
            *("--no-build", "--constraint", "constraints.txt", "--config-file", "uv.toml"),
            *("--python-version", base.version),
            *("--python-platform", f"{base.machine}-manylinux_{base.glibc.replace('.', '_')}"),
        ]
        if wanted.choice.prereleases:
            arguments += ["--prerelease", "allow"]
        for name in (*(pin.partition("==")[0] for pin in pins), *(wheel.name for wheel in wanted.wheels)):
            arguments += ["--no-emit-package", name]
        try:
            return run_uv(arguments, folder, f"{where} for {base.reference}", environment)
        except LockError as error:
            raise LockError(
                error.message,
                hint="the base's packages are never replaced, and only wheels are installed: ask for versions that fit "
                "the base, use another base, or put a wheel of your own into a folder of pip's find-links",
            ) from error


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _stand_in(row: BaseDistribution, folder: Path) -> str:
    """Write a wheel with nothing but the metadata of an installed distribution, and return its pin."""
    name, version = canonicalize_name(row.name), str(Version(row.version))
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {text}\n" for text in row.extras)
    extras = {found for text in row.extras for found in re.findall(r"extra\s*==\s*[\"']([^\"']+)", text)}
    metadata += "".join(f"Provides-Extra: {extra}\n" for extra in sorted(extras))
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return f"{name}=={version}"
