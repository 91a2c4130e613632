"""The makers' lists of files in packages: RECORD of a wheel, md5sums and scripts of a Debian
package.

A file is downloaded once on a machine, compared with the sum in the lock or the archive, and read;
its list is stored in the user's cache. For a package that cannot be downloaded the image's own
list is the only one.
"""

from __future__ import annotations

import base64
import configparser
import csv
import gzip
import hashlib
import io
import json
import lzma
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TypeVar

from trainworks.errors import HostError, LockError, OutputError
from trainworks.facts.rows import LockedPackage
from trainworks.host.apt import make_source_lines, parse_one_line
from trainworks.host.archives import find_archive, find_snapshot_address
from trainworks.host.cache import cache_folder, write_cached
from trainworks.host.downloads import Client, Limits, UnreachableError
from trainworks.host.index import find_file_addresses
from trainworks.host.pip import find_local_file
from trainworks.host.settings import HostSettings
from trainworks.imagetest.makers import DebianContent, DebianName, WheelList
from trainworks.plan.model import ImagePlan

FORM = "2"
"""The version of the cached lists' form: lists of an older builder lack links."""

AT_ONCE = 8
"""Simultaneous downloads: most files are small."""

LIMITS = Limits(attempts=2, timeout=20)

ENVIRONMENT_PYTHON = "/opt/venv/bin/python"
"""The interpreter that an installation writes at the head of a program (``#!``)."""

_List = TypeVar("_List")
_Package = TypeVar("_Package")


@dataclass(kw_only=True)
class MakersLists:
    """``imagetest.makers.Makers`` for a plan, with this machine's settings.

    Attributes:
        plan: Has the wheels and the archives.
        settings: This machine's sources of files.
        environment: The process's environment, which names the user's cache.
        report: Receives a line with the number of lists.
    """

    plan: ImagePlan
    settings: HostSettings
    environment: Mapping[str, str] = field(repr=False)
    report: Callable[[str], None]

    def wheels(self) -> Mapping[str, WheelList]:
        """Return the lists of the plan's wheels, by the names of their distributions."""
        wheels: list[LockedPackage] = []
        for step in self.plan.steps:
            if step.in_image:
                wheels += [package for package in step.python if package.file.endswith(".whl")]
        with Client(self.settings, limits=LIMITS) as client:

            def read(package: LockedPackage) -> WheelList | None:
                path = self._make_cache_path("wheels", package.sha256)
                cached = _read_cached(path, WheelList)
                if cached is not None:
                    return cached
                with tempfile.TemporaryDirectory() as folder:
                    file = self._find_wheel(package, Path(folder) / package.file, client)
                    if file is None:
                        return None
                    return _write_to_cache(path, read_wheel_list(file))

            list_by_package = _read_all(wheels, read)
        self._report_count("wheels", len(wheels), len(list_by_package))
        return {package.name: files for package, files in list_by_package.items()}

    def debian(self, packages: Iterable[DebianName]) -> Mapping[DebianName, DebianContent]:
        """Return the lists of Debian packages; packages without a list are left out."""
        names = list(packages)
        contents: dict[DebianName, DebianContent] = {}
        for name in names:
            cached = _read_cached(self._make_cache_path("debian", str(name)), DebianContent)
            if cached is not None:
                contents[name] = cached
        missing = [name for name in names if name not in contents]
        if missing and self.plan.base.archives:
            with Client(self.settings, limits=LIMITS) as client:
                files = self._find_archive_files(client, missing)

                def read(name: DebianName) -> DebianContent | None:
                    if name not in files:
                        return None
                    with tempfile.TemporaryDirectory() as folder:
                        file = Path(folder) / "package.deb"
                        client.download(files[name].address, file, sha256=files[name].sha256)
                        return _write_to_cache(
                            self._make_cache_path("debian", str(name)), read_debian_content(file)
                        )

                contents |= _read_all(missing, read)
        self._report_count("Debian packages", len(names), len(contents))
        return contents

    def _find_wheel(self, package: LockedPackage, target: Path, client: Client) -> Path | None:
        """Return the file of a wheel, downloaded to ``target`` if this machine lacks it.

        ``None`` if no index gives the file.
        """
        local = find_local_file(package, self.settings.pip)
        if local is not None:
            return local
        for address in find_file_addresses(
            package, self.settings.pip, self.plan.wheel_index, client
        ):
            with suppress(UnreachableError):
                client.download(address, target, sha256=package.sha256)
                return target
        return None

    def _find_archive_files(
        self, client: Client, packages: list[DebianName]
    ) -> dict[DebianName, _ArchiveFile]:
        """Return the files of packages in the plan's archives.

        A package that no archive has, or with an archive that does not answer, is left out.
        """
        base = self.plan.base
        settings = find_archive(base, self.plan.archives, self.settings).settings
        lines = make_source_lines(base.suite, settings.apt.sources, settings.suite)
        sources = parse_one_line("\n".join(lines))
        suites = [(source.uri, source.suite) for source in sources]
        # Without an archive among this machine's sources, the public snapshots have the files.
        if not suites:
            with suppress(UnreachableError):
                addresses = [
                    find_snapshot_address(base, suite, self.settings) for suite in base.archives
                ]
                suites = list(zip(addresses, base.archives, strict=True))
        files: dict[DebianName, _ArchiveFile] = {}
        names = {package.name for package in packages}
        for uri, suite in dict.fromkeys(suites):
            archive = f"{uri.rstrip('/')} {suite}"
            with suppress(LockError, HostError):
                for package, file in find_archive_packages(
                    client, archive, base.architecture, names
                ):
                    # The first archive that has the package counts.
                    files.setdefault(package, file)
        return files

    def _make_cache_path(self, kind: str, name: str) -> Path | None:
        """Return the path of a list in the user's cache; ``None`` for a user without a home."""
        with suppress(RuntimeError):
            return cache_folder(self.environment, "makers", FORM, kind, f"{name}.json")
        return None

    def _report_count(self, kind: str, total: int, count: int) -> None:
        """Report the number of lists, for example ``lists of files from 98 of 100 wheels ...``."""
        missing = ""
        if total > count:
            missing = (
                f"; of {total - count} this machine reaches no file: only the image's own lists"
            )
        self.report(
            f"lists of files from {count} of {total} {kind} as their makers sent them{missing}"
        )


@dataclass(frozen=True, kw_only=True)
class _ArchiveFile:
    """The file of a package in an archive: its address, and its sum in the archive's list."""

    address: str
    sha256: str


_UNPACKERS: Mapping[str, Callable[[bytes], bytes]] = {
    ".xz": lzma.decompress,
    ".gz": gzip.decompress,
    "": bytes,
}
"""The functions that unpack a list of packages, by the end of its name; the smallest form first."""


def find_archive_packages(
    client: Client, archive: str, architecture: str, names: Container[str]
) -> Iterator[tuple[DebianName, _ArchiveFile]]:
    """Yield packages of a suite, with their files.

    The suite's signed file has the sum of the list of packages.

    Args:
        client: Downloads both.
        archive: Address and suite, with a blank between them.
        architecture: The architecture of the packages: ``amd64``.
        names: The packages to yield; a list has tens of thousands.

    Raises:
        UnreachableError: The archive does not answer.
        HostError: The list is not the one that the suite names.
    """
    uri, suite = archive.split(" ")
    head = f"{uri}/dists/{suite}"
    release = client.get(f"{head}/InRelease").text
    sums = re.findall(r"^ ([0-9a-f]{64}) +\d+ (\S+)$", release, re.MULTILINE)
    sum_by_name = {name: digest for digest, name in sums}
    plain = f"main/binary-{architecture}/Packages"
    endings = [ending for ending in _UNPACKERS if plain + ending in sum_by_name]
    if not endings:
        raise HostError(f"{head}/InRelease does not list {plain}")
    ending = endings[0]
    list_name = plain + ending
    content = client.get(f"{head}/{list_name}").content
    if hashlib.sha256(content).hexdigest() != sum_by_name[list_name]:
        raise HostError(f"{head}/{list_name} is not the list that {suite} names")
    text = _UNPACKERS[ending](content).decode("utf-8", "replace")
    pattern = re.compile(r"^(Package|Version|Architecture|Filename|SHA256): *(.+)$", re.MULTILINE)
    for paragraph in text.split("\n\n"):
        # Only the paragraphs of wanted packages are parsed.
        first_line, _, _ = paragraph.partition("\n")
        if first_line.removeprefix("Package: ") not in names:
            continue
        fields = dict(pattern.findall(paragraph))
        # A package without a file or a hash cannot be read.
        if len(fields) != 5:
            continue
        package = DebianName(
            name=fields["Package"],
            version=fields["Version"],
            architecture=fields["Architecture"],
        )
        yield package, _ArchiveFile(address=f"{uri}/{fields['Filename']}", sha256=fields["SHA256"])


def read_wheel_list(path: Path) -> WheelList:
    """Read the list of a wheel, and compute the sums of the programs that an installation writes.

    Raises:
        LockError: The file is not a wheel.
    """
    try:
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            pattern = re.compile(r"[^/]+\.dist-info/RECORD")
            (record,) = [name for name in names if pattern.fullmatch(name)]
            rows = csv.reader(io.StringIO(wheel.read(record).decode("utf-8")))
            files = {row[0]: row[1] for row in rows if row and row[0] != record}
            # An installation writes scripts that begin with #!python anew.
            sum_by_program: dict[str, str] = {}
            scripts = [name for name in files if re.match(r"[^/]+\.data/scripts/", name)]
            for name in scripts:
                content = wheel.read(name)
                if re.match(rb"#!pythonw?\b", content):
                    del files[name]
                    program = re.sub(rb"\A#!pythonw?", b"#!" + ENVIRONMENT_PYTHON.encode(), content)
                    sum_by_program[name.rpartition("/")[2]] = _hash_for_record(program)
            entry_points = record.replace("RECORD", "entry_points.txt")
            if entry_points in files:
                text = wheel.read(entry_points).decode("utf-8")
                sum_by_program |= dict(_hash_entry_points(text))
    except (zipfile.BadZipFile, KeyError, ValueError, IndexError) as error:
        raise LockError(f"{path.name} is not a wheel: {error}") from error
    return WheelList(files=files, written=sum_by_program)


def _hash_entry_points(text: str) -> Iterator[tuple[str, str]]:
    """Yield the programs that a wheel declares, with the sum of uv's text for each.

    For example ``("torchrun", "sha256=...")`` for ``torchrun = torch.distributed.run:main``.
    """
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text)
    for section in ("console_scripts", "gui_scripts"):
        if not parser.has_section(section):
            continue
        for name, value in parser.items(section):
            # The form is MODULE:FUNCTION, and extras in brackets may follow.
            module, _, function = value.partition("[")[0].strip().partition(":")
            program = _PROGRAM.format(
                python=ENVIRONMENT_PYTHON,
                module=module.strip(),
                first=function.strip().partition(".")[0],
                function=function.strip(),
            )
            yield name, _hash_for_record(program.encode())


_PROGRAM = """\
#!{python}
# -*- coding: utf-8 -*-
import sys
from {module} import {first}
if __name__ == "__main__":
    if sys.argv[0].endswith("-script.pyw"):
        sys.argv[0] = sys.argv[0][:-11]
    elif sys.argv[0].endswith(".exe"):
        sys.argv[0] = sys.argv[0][:-4]
    sys.exit({function}())
"""
"""uv's text for a program that a wheel declares (uv 0.13, crates/uv-install-wheel)."""


def _hash_for_record(content: bytes) -> str:
    """Return a sum as RECORD has it: ``sha256=`` and base64url without padding."""
    digest = hashlib.sha256(content).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def read_debian_content(path: Path) -> DebianContent:
    """Read the lists of a Debian package: scripts, configuration files and links.

    Raises ``LockError`` for a form that Python cannot unpack (zstd).
    """
    try:
        with path.open("rb") as package:
            parts = dict(_read_archive_members(package))
            control = _read_files(parts, "control.tar", None)
            members = {name: content for name, content in control.items() if name != "control"}
            lines = members.get("conffiles", b"").decode("utf-8", "surrogateescape").split("\n")
            # The package does not have a file with a word before its path, such as
            # remove-on-upgrade.
            paths = {line.lstrip("/") for line in lines if line.startswith("/")}
            configuration = _read_files(parts, "data.tar", paths)
            links = _read_links(parts)
    except (tarfile.TarError, lzma.LZMAError, OSError, ValueError) as error:
        raise LockError(f"{path.name} cannot be read: {error}") from error
    conffiles = {}
    for name, content in configuration.items():
        # The image's own list, which dpkg writes, has MD5.
        digest = hashlib.md5(content, usedforsecurity=False)
        conffiles[f"/{name}"] = digest.hexdigest()
    member_sums = {name: hashlib.sha256(content).hexdigest() for name, content in members.items()}
    return DebianContent(members=member_sums, conffiles=conffiles, links=links)


def _read_archive_members(package: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the parts of a Debian package, an ar(5) archive: ``data.tar.xz``.

    Each part has a head of 60 bytes, its content, and a byte more if the size is odd.
    """
    if package.read(8) != b"!<arch>\n":
        message = "it is not a Debian package"
        raise ValueError(message)
    while head := package.read(60):
        size = int(head[48:58])
        yield head[:16].decode().strip().rstrip("/"), package.read(size)
        package.read(size % 2)


def _open_part(parts: Mapping[str, bytes], beginning: str) -> tarfile.TarFile:
    """Open the part with this beginning of its name, such as ``data.tar`` of ``data.tar.xz``."""
    (name,) = [name for name in parts if name.startswith(beginning)]
    return tarfile.open(fileobj=io.BytesIO(parts[name]), mode="r:*")


def _read_files(
    parts: Mapping[str, bytes], beginning: str, paths: set[str] | None
) -> dict[str, bytes]:
    """Return plain files of a part by their names without ``./``.

    Args:
        parts: The parts of a package.
        beginning: The beginning of the part's name: ``data.tar``.
        paths: The files to return; ``None``: all.
    """
    content_by_path = {}
    with _open_part(parts, beginning) as archive:
        for member in archive:
            path = member.name.removeprefix("./")
            is_wanted = paths is None or path in paths
            if not member.isreg() or not is_wanted:
                continue
            file = archive.extractfile(member)
            if file is not None:
                content_by_path[path] = file.read()
    return content_by_path


def _read_links(parts: Mapping[str, bytes]) -> dict[str, str]:
    """Return the target of each link of a package, by path: lists of sums have no links.

    For example ``{"/usr/lib/libz.so.1": "libz.so.1.3"}``.
    """
    targets = {}
    with _open_part(parts, "data.tar") as archive:
        for member in archive:
            if member.issym():
                path = member.name.removeprefix("./")
                targets[f"/{path}"] = member.linkname
    return targets


def _read_all(
    packages: Iterable[_Package], read: Callable[[_Package], _List | None]
) -> dict[_Package, _List]:
    """Read the lists of packages in parallel; lists that cannot be read are left out."""

    def attempt(package: _Package) -> _List | None:
        with suppress(LockError, HostError, OutputError):
            return read(package)
        return None

    packages = list(packages)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        lists = list(pool.map(attempt, packages))
    pairs = zip(packages, lists, strict=True)
    return {package: files for package, files in pairs if files is not None}


def _read_cached(path: Path | None, kind: type[_List]) -> _List | None:
    """Return the list in a file of the cache; ``None`` for a missing or malformed file."""
    if path is None:
        return None
    with suppress(OSError, ValueError, TypeError):
        return kind(**json.loads(path.read_bytes()))
    return None


def _write_to_cache(path: Path | None, files: _List) -> _List:
    """Write a list to its file in the cache, and return the list."""
    if path is not None:
        with suppress(OSError):
            write_cached(path, json.dumps(asdict(files)).encode())  # type: ignore[call-overload]
    return files
