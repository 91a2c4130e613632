"""A description of a base image's Python for uv: names and metadata, without code.

uv resolves to a lock without reading an environment. So each installed distribution becomes a
release that uv can find: a wheel with nothing but metadata.
"""

from __future__ import annotations

import io
import re
import shutil
import tarfile
import zipfile
from collections.abc import Collection, Iterator
from email.message import Message
from functools import cached_property
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainworks.errors import LockError
from trainworks.extend.requirements import ExtendedBase

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_LARGEST_METADATA = 64_000_000
"""Bytes of one metadata file; the longest are ``RECORD`` files of large distributions."""


_BUILD = 99999
"""The build number of wheels: uv prefers the highest."""

_WHEEL = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class _Distribution(metadata.PathDistribution):
    """A distribution that is parsed once: an installation reads all of them many times."""

    @cached_property
    def metadata(self) -> Message:  # type: ignore[override]
        """Its metadata."""
        return super().metadata  # type: ignore[return-value]


class Environment:
    """A folder with the metadata of distributions."""

    def __init__(self, folder: Path) -> None:
        """folder: a new folder of its own."""
        self.folder = folder
        self._distributions: dict[str, _Distribution] = {}
        folder.mkdir(parents=True)

    def __iter__(self) -> Iterator[metadata.Distribution]:
        """Yield the distributions."""
        return iter(list(self._distributions.values()))

    def releases(
        self, folder: Path, tag: str, *, without: Collection[str] = (), archives: bool = False
    ) -> Path:
        """Write a release of each distribution to a folder, with metadata and nothing else.

        Args:
            folder: A new folder.
            tag: The tag of wheels that fits best. uv hashes the file that it would install: this
                release, and not one of an index, which it would have to download.
            without: Names of distributions that are left out, as indexes write them.
            archives: Whether to write source archives, for a call that ignores wheels.
        """
        folder.mkdir()
        for name, distribution in self._distributions.items():
            if name in without:
                continue
            stem = f"{name.replace('-', '_')}-{distribution.version}"
            text = distribution.read_text("METADATA") or ""
            if archives:
                _write_archive(folder, stem, text)
            else:
                _write_wheel(folder / f"{stem}-{_BUILD}-{tag}.whl", stem, text)
        return folder

    def describe(self, base: ExtendedBase) -> None:
        """Add the distributions of a base image.

        A distribution without a valid name or version is left out, as uv does.
        """
        for row in base.distributions:
            try:
                version = str(Version(row.version))
            except InvalidVersion:
                continue
            if not _NAME.fullmatch(row.name):
                continue
            text = base.metadata.get(row.name) or f"Name: {row.name}\nVersion: {version}\n"
            self._write(row.name, version, {"METADATA": f"Metadata-Version: 2.1\n{text}".encode()})
            build = base.builds.get(row.name)
            if build:
                module = self.folder / row.name.replace("-", "_") / "version.py"
                module.parent.mkdir(exist_ok=True)
                module.write_text(f"__version__ = {build!r}\n", encoding="utf-8")

    def add(self, wheel: Path) -> None:
        """Add the metadata of a wheel, and remove an earlier distribution of its name.

        Raises ``LockError``.
        """
        name, version, _ = wheel.name.split("-", 2)
        try:
            files = _metadata_files(wheel)
        except (OSError, zipfile.BadZipFile) as error:
            raise LockError(f"{wheel.name} is not a wheel: {error}") from error
        if "METADATA" not in files:
            raise LockError(f"{wheel.name} is not a wheel: it has no metadata")
        self.remove(name)
        self._write(name, version, files)

    def remove(self, name: str) -> None:
        """Remove a distribution."""
        name = canonicalize_name(name)
        self._distributions.pop(name, None)
        for path in self.folder.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(path)

    def _write(self, name: str, version: str, files: dict[str, bytes]) -> None:
        """Write a distribution's ``.dist-info`` folder, as if it were installed.

        Args:
            name: The name of the distribution.
            version: Its version.
            files: Files of the folder besides those that are always there, such as ``METADATA``.
        """
        name = canonicalize_name(name)
        folder = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        own_files = ("METADATA", "RECORD", "INSTALLER", "WHEEL")
        record = "".join(f"{folder.name}/{file},,\n" for file in own_files)
        contents = {"RECORD": record.encode(), "INSTALLER": b"uv", "WHEEL": _WHEEL, **files}
        for file, content in contents.items():
            (folder / file).write_bytes(content)
        self._distributions[name] = _Distribution(folder)


def _metadata_files(wheel: Path) -> dict[str, bytes]:
    """Return ``METADATA`` and ``RECORD`` of a wheel, unless they are too large."""
    files = {}
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            folder, _, name = entry.filename.partition("/")
            is_metadata = folder.endswith(".dist-info") and name in ("METADATA", "RECORD")
            if is_metadata and entry.file_size <= _LARGEST_METADATA:
                files[name] = archive.read(entry)
    return files


def _write_wheel(file: Path, stem: str, metadata_text: str) -> None:
    """Write a wheel that has metadata and no code."""
    contents = {"METADATA": metadata_text.encode(), "WHEEL": _WHEEL, "RECORD": b""}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            archive.writestr(f"{stem}.dist-info/{name}", content)


def _write_archive(folder: Path, stem: str, metadata_text: str) -> None:
    """Write a source archive ``STEM.tar.gz`` that has metadata and no code."""
    # From version 2.2 on, an installer trusts an archive's metadata without a build.
    package_info = re.sub(r"^Metadata-Version: .*", "Metadata-Version: 2.2", metadata_text)
    files = {
        "PKG-INFO": package_info.encode(),
        "pyproject.toml": b"[build-system]\nrequires = []\n",
    }
    with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{stem}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
