"""The Python of a base image as a folder that uv reads as an environment: names and metadata, and no code."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainworks.errors import LockError
from trainworks.extend.requirements import ExtendedBase

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_LARGEST_METADATA = 64_000_000
"""Bytes of a file of metadata: the list of files of a large distribution is the longest."""


class Environment:
    """A folder with the metadata of distributions."""

    def __init__(self, folder: Path) -> None:
        """folder: a new one, of its own."""
        self.folder = folder
        folder.mkdir(parents=True)

    def __iter__(self) -> Iterator[metadata.Distribution]:
        """Yield what is in it."""
        metadata.MetadataPathFinder().invalidate_caches()
        return iter(metadata.distributions(path=[str(self.folder)]))

    def describe(self, base: ExtendedBase) -> None:
        """Put in what a base image has; what has no name or version that uv reads is left out, as uv does."""
        for row in base.distributions:
            try:
                version = str(Version(row.version))
            except InvalidVersion:
                continue
            if not _NAME.fullmatch(row.name):
                continue
            said = base.metadata.get(row.name) or f"Name: {row.name}\nVersion: {version}\n"
            self._write(row.name, version, {"METADATA": f"Metadata-Version: 2.1\n{said}".encode()})
            if build := base.builds.get(row.name):
                module = self.folder / row.name.replace("-", "_") / "version.py"
                module.parent.mkdir(exist_ok=True)
                module.write_text(f"__version__ = {build!r}\n", encoding="utf-8")

    def add(self, wheel: Path) -> None:
        """Put in the metadata of a wheel, in the place of what had its name. Raises ``LockError``."""
        name, version, _ = wheel.name.split("-", 2)
        found = {}
        try:
            with zipfile.ZipFile(wheel) as archive:
                for entry in archive.infolist():
                    parts = entry.filename.split("/")
                    wanted = len(parts) == 2 and parts[0].endswith(".dist-info") and parts[1] in ("METADATA", "RECORD")
                    if wanted and entry.file_size <= _LARGEST_METADATA:
                        found[parts[1]] = archive.read(entry)
        except (OSError, zipfile.BadZipFile) as error:
            raise LockError(f"{wheel.name} is not a wheel: {error}") from error
        if "METADATA" not in found:
            raise LockError(f"{wheel.name} is not a wheel: it has no metadata")
        self.remove(name)
        self._write(name, version, found)

    def remove(self, name: str) -> None:
        """Take out a distribution."""
        for path in self.folder.glob("*.dist-info"):
            if canonicalize_name(path.name.split("-")[0]) == canonicalize_name(name):
                shutil.rmtree(path)

    def _write(self, name: str, version: str, files: dict[str, bytes]) -> None:
        stem = f"{canonicalize_name(name).replace('-', '_')}-{version}.dist-info"
        folder = self.folder / stem
        folder.mkdir()
        own = "".join(f"{stem}/{each},,\n" for each in ("METADATA", "RECORD", "INSTALLER", "WHEEL"))
        wheel = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        for file, content in {"RECORD": own.encode(), "INSTALLER": b"uv", "WHEEL": wheel, **files}.items():
            (folder / file).write_bytes(content)
