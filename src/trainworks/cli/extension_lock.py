"""The hash-locked form of the requirements that an image is extended with: made once, kept while it fits."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainworks.cli.lock import run_uv
from trainworks.cli.output import say
from trainworks.errors import ExtendError, LockError, OutputError
from trainworks.host.pip import uv_configuration
from trainworks.host.settings import HostSettings
from trainworks.plan.requirements import BaseImage, Distribution


def lock_path_of(requirements: Path) -> Path:
    """Return where the hash-locked form of a requirements file lies: beside it."""
    return requirements.with_name(f"{requirements.stem}.locked{requirements.suffix}")


def lock_requirements(
    text: str,
    file: Path,
    base: BaseImage,
    settings: HostSettings,
    environment: Mapping[str, str],
    *,
    output: Path | None,
    resolving: bool,
) -> tuple[str, Path]:
    """Return hash-locked requirements and the file that they are in: kept from last time while it fits.

    Args:
        text: The requirements.
        file: Where they were read; the locked form lies beside it.
        base: What they have to go together with.
        settings: This machine's indexes.
        environment: The process's.
        output: A folder that gets the build context; nothing is written beside the requirements then.
        resolving: Whether requirements that have no lock, or another's, get a new one.

    Raises:
        ExtendError: There is a file in the lock's place that is not ours.
        LockError: There is no lock that fits and none may be made, or no set of wheels fits.
        OutputError: The lock cannot be written.
    """
    path = lock_path_of(file)
    inputs_digest = _inputs_digest(text, base)
    mark = f"# inputs: {inputs_digest}\n"
    try:
        there = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        there = ""
    if mark in there:
        return there, path
    if not resolving:
        raise LockError(
            f"{path} is not there, or not for these requirements and this base",
            hint="`build.py extend` with the same choice writes it",
        )
    if there and not there.startswith(HEADER):
        raise ExtendError(
            [f"{path} exists and is not ours to replace: the hash-locked requirements would be written there"]
        )
    resolved = resolve(text, base, settings, environment, where=str(file))
    head = f"{HEADER} for Python {base.version}\n# and what {base.reference} has; delete it to resolve again.\n"
    locked = f"{head}{mark}{resolved}"
    if output is None:
        try:
            path.write_text(locked, encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"{path} cannot be written: {error.strerror}", hint="name a folder with --output"
            ) from error
        say(f"  resolved and hashed: {path}")
        return locked, path
    return locked, output / "requirements.txt"


HEADER = "# Written by `python build.py extend`: every file by its hash,"


def _inputs_digest(text: str, base: BaseImage) -> str:
    """Return the hash of everything that decides what requirements resolve to, but for what indexes have."""
    parts = (text, base.version, base.glibc, base.machine, [asdict(row) for row in base.distributions])
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


def resolve(text: str, base: BaseImage, settings: HostSettings, environment: Mapping[str, str], *, where: str) -> str:
    """Resolve requirements for a base image's Python and return them hash-locked, without what the base has already.

    What is installed in the base takes part as a wheel of exactly its version that needs nothing more, so that versions
    which no index has (a vendor's own torch) count, and none is replaced.

    Raises:
        LockError: No set of wheels fits, or the index does not answer; with uv's own words.
    """
    with tempfile.TemporaryDirectory(prefix="trainworks-extend-") as name:
        folder = Path(name)
        installed = folder / "installed"
        installed.mkdir()
        pins = [_stand_in(row, installed) for row in base.distributions if _is_version(row.version)]
        (folder / "constraints.txt").write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
        (folder / "requirements.in").write_text(text, encoding="utf-8")
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
        for pin in pins:
            arguments += ["--no-emit-package", pin.partition("==")[0]]
        try:
            return run_uv(arguments, folder, f"{where} for {base.reference}", environment)
        except LockError as error:
            raise LockError(
                error.message,
                hint="what the base has installed is never replaced, and only wheels are installed: ask for versions "
                "that go with it, take another base, or put a wheel of your own into a folder of pip's find-links",
            ) from error


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _stand_in(row: Distribution, folder: Path) -> str:
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
