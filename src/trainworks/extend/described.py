"""The Python of a base image as uv sees it: names and metadata, and no code.

uv resolves to a lock without looking at an environment. So what is installed is a release that it
finds: a wheel of nothing but metadata.
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
"""Bytes of a file of metadata: the list of files of a large distribution is the longest."""


_BUILD = 99999
"""The number of a build, of which the highest fits best."""

_WHEEL = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class _Distribution(metadata.PathDistribution):
    """A distribution that is parsed once: an installation looks at all of them again and again."""

    @cached_property
    def metadata(self) -> Message:  # type: ignore[override]
        """Its metadata."""
        return super().metadata  # type: ignore[return-value]


class Environment:
    """A folder with the metadata of distributions."""

    def __init__(self, folder: Path) -> None:
        """folder: a new one, of its own."""
        self.folder = folder
        self._there: dict[str, _Distribution] = {}
        folder.mkdir(parents=True)

    def __iter__(self) -> Iterator[metadata.Distribution]:
        """Yield what is in it."""
        return iter(list(self._there.values()))

    def releases(
        self, folder: Path, tag: str, *, without: Collection[str] = (), archives: bool = False
    ) -> Path:
        """Return a folder with a release of each that is in it: it has metadata, and nothing else.

        Args:
            folder: A new one.
            tag: The tag of wheels that fits best. uv hashes the file that it would install: this
                one, and not that of an index, which it would have to download.
            without: Names of those that are left out, as indexes write them.
            archives: Whether they are source archives, where wheels are not looked at.
        """
        folder.mkdir()
        for name, each in self._there.items():
            if name not in without:
                stem = f"{name.replace('-', '_')}-{each.version}"
                said = each.read_text("METADATA") or ""
                if archives:
                    _write_archive(folder, stem, said)
                else:
                    _write_wheel(folder / f"{stem}-{_BUILD}-{tag}.whl", stem, said)
        return folder

    def describe(self, base: ExtendedBase) -> None:
        """Put in what a base image has.

        What has no name or version that uv reads is left out, as uv does.
        """
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
        """Put in the metadata of a wheel, in the place of what had its name.

        Raises ``LockError``.
        """
        name, version, _ = wheel.name.split("-", 2)
        found = {}
        try:
            with zipfile.ZipFile(wheel) as archive:
                for entry in archive.infolist():
                    parts = entry.filename.split("/")
                    wanted = (
                        len(parts) == 2
                        and parts[0].endswith(".dist-info")
                        and parts[1] in ("METADATA", "RECORD")
                    )
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
        stem = canonicalize_name(name).replace("-", "_")
        self._there.pop(canonicalize_name(name), None)
        for path in self.folder.glob(f"{stem}-*.dist-info"):
            shutil.rmtree(path)

    def _write(self, name: str, version: str, files: dict[str, bytes]) -> None:
        stem = f"{canonicalize_name(name).replace('-', '_')}-{version}"
        folder = self.folder / f"{stem}.dist-info"
        folder.mkdir()
        own = "".join(
            f"{folder.name}/{each},,\n" for each in ("METADATA", "RECORD", "INSTALLER", "WHEEL")
        )
        for file, content in {
            "RECORD": own.encode(),
            "INSTALLER": b"uv",
            "WHEEL": _WHEEL,
            **files,
        }.items():
            (folder / file).write_bytes(content)
        self._there[canonicalize_name(name)] = _Distribution(folder)


def _write_wheel(file: Path, stem: str, said: str) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {"METADATA": said.encode(), "WHEEL": _WHEEL, "RECORD": b""}.items():
            archive.writestr(f"{stem}.dist-info/{name}", content)


def _write_archive(folder: Path, stem: str, said: str) -> None:
    # From this version on, what an archive says is what its build would say.
    content = re.sub(r"^Metadata-Version: .*", "Metadata-Version: 2.2", said).encode()
    files = {"PKG-INFO": content, "pyproject.toml": b"[build-system]\nrequires = []\n"}
    with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{stem}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
