"""The lists that makers of packages give with them: RECORD in a wheel, md5sums
and scripts in a Debian package.

A file is downloaded once on a machine, held to the sum that the lock or the archive has of it, and
read; its list is kept in the user's cache. What cannot be reached is not known: then an image's own
lists are all that there is.
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
from trainworks.host.apt import parse_one_line, sources_for
from trainworks.host.archives import find_archive, snapshot_address
from trainworks.host.cache import cache_folder, write_cached
from trainworks.host.downloads import Client, Limits, UnreachableError
from trainworks.host.index import file_addresses
from trainworks.host.pip import find_local_file
from trainworks.host.settings import HostSettings
from trainworks.imagetest.makers import DebianContent, DebianName, WheelList
from trainworks.plan.model import ImagePlan

FORM = "2"
"""Which form the cached lists have: what an older builder kept lacks links."""

AT_ONCE = 8
"""How many files are downloaded at once: most of them are small."""

LIMITS = Limits(attempts=2, timeout=20)

ENVIRONMENT_PYTHON = "/opt/venv/bin/python"
"""What an installation writes at the head of a program (``#!``)."""

_Found = TypeVar("_Found")
_Wanted = TypeVar("_Wanted")


@dataclass(kw_only=True)
class MakersLists:
    """``imagetest.makers.Makers`` for a plan, with this machine's settings.

    Attributes:
        plan: Has the wheels and the archives.
        settings: Where this machine gets files from.
        environment: The process's environment, which says where the user's cache is.
        report: Told how many lists are known, and of how many packages nothing is.
    """

    plan: ImagePlan
    settings: HostSettings
    environment: Mapping[str, str] = field(repr=False)
    report: Callable[[str], None]

    def wheels(self) -> Mapping[str, WheelList]:
        """Return the lists of the plan's wheels, by the names of their distributions."""
        packages = [each for step in self.plan.steps if step.in_image for each in step.python]
        wheels = [each for each in packages if each.file.endswith(".whl")]
        with Client(self.settings, limits=LIMITS) as client:

            def read(package: LockedPackage) -> WheelList | None:
                path = self._cached("wheels", package.sha256)
                kept = _kept(path, WheelList)
                if kept is not None:
                    return kept
                with tempfile.TemporaryDirectory() as folder:
                    file = self._wheel(package, Path(folder) / package.file, client)
                    return _keep(path, wheel_list(file)) if file is not None else None

            found = _all_of(wheels, read)
        self._tell("wheels", len(wheels), len(found))
        return {package.name: listed for package, listed in found.items()}

    def debian(self, packages: Iterable[DebianName]) -> Mapping[DebianName, DebianContent]:
        """Return what Debian packages have of themselves."""
        wanted = list(packages)
        kept = {name: _kept(self._cached("debian", str(name)), DebianContent) for name in wanted}
        found = {name: content for name, content in kept.items() if content is not None}
        missing = [name for name in wanted if name not in found]
        if missing and self.plan.base.archives:
            with Client(self.settings, limits=LIMITS) as client:
                places = self._places(client, missing)

                def read(name: DebianName) -> DebianContent | None:
                    if name not in places:
                        return None
                    with tempfile.TemporaryDirectory() as folder:
                        file = Path(folder) / "package.deb"
                        client.download(places[name].address, file, sha256=places[name].sha256)
                        return _keep(self._cached("debian", str(name)), debian_content(file))

                found |= _all_of(missing, read)
        self._tell("Debian packages", len(wanted), len(found))
        return found

    def _wheel(self, package: LockedPackage, target: Path, client: Client) -> Path | None:
        local = find_local_file(package, self.settings.pip)
        if local is not None:
            return local
        for address in file_addresses(package, self.settings.pip, self.plan.wheel_index, client):
            with suppress(UnreachableError):
                client.download(address, target, sha256=package.sha256)
                return target
        return None

    def _places(self, client: Client, wanted: list[DebianName]) -> dict[DebianName, _Place]:
        """Return where the archives of the plan have packages, and what their sums are."""
        base = self.plan.base
        settings = find_archive(base, self.plan.archives, self.settings).settings
        sources = parse_one_line(
            "\n".join(sources_for(base.suite, settings.apt.sources, settings.suite))
        )
        places = [(each.uri, each.suite) for each in sources]
        if not places:
            with suppress(UnreachableError):
                places = [
                    (snapshot_address(base, suite, self.settings), suite) for suite in base.archives
                ]
        found: dict[DebianName, _Place] = {}
        names = {name.name for name in wanted}
        for uri, suite in dict.fromkeys(places):
            with suppress(LockError, HostError):
                for name, place in packages_of(
                    client, f"{uri.rstrip('/')} {suite}", base.architecture, names
                ):
                    found.setdefault(name, place)
        return found

    def _cached(self, kind: str, name: str) -> Path | None:
        with suppress(RuntimeError):
            return cache_folder(self.environment, "makers", FORM, kind, f"{name}.json")
        return None

    def _tell(self, what: str, wanted: int, found: int) -> None:
        missing = (
            f"; of {wanted - found} this machine reaches no file: only the image's own lists"
            if wanted > found
            else ""
        )
        self.report(
            f"lists of files from {found} of {wanted} {what} as their makers sent them{missing}"
        )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where an archive has a package: its address, and the sum that the archive says."""

    address: str
    sha256: str


_UNPACK: Mapping[str, Callable[[bytes], bytes]] = {
    ".xz": lzma.decompress,
    ".gz": gzip.decompress,
    "": bytes,
}
"""The forms of a list of packages, by the ends of their names, the smallest first."""


def packages_of(
    client: Client, archive: str, architecture: str, names: Container[str]
) -> Iterator[tuple[DebianName, _Place]]:
    """Yield packages of a suite, as its list has them.

    The suite's signed file has the sum of that list.

    Args:
        client: Downloads both.
        archive: Address and suite, with a blank between them.
        architecture: Whose packages.
        names: The packages that are wanted; a list has tens of thousands.

    Raises:
        UnreachableError: The archive does not answer.
        HostError: The list is not the one that the suite names.
    """
    uri, suite = archive.split(" ")
    head = f"{uri}/dists/{suite}"
    release = client.get(f"{head}/InRelease").text
    sums = {
        name: digest
        for digest, name in re.findall(r"^ ([0-9a-f]{64}) +\d+ (\S+)$", release, re.MULTILINE)
    }
    plain = f"main/binary-{architecture}/Packages"
    name = next((plain + ending for ending in _UNPACK if plain + ending in sums), "")
    if not name:
        raise HostError(f"{head}/InRelease does not list {plain}")
    content = client.get(f"{head}/{name}").content
    if hashlib.sha256(content).hexdigest() != sums[name]:
        raise HostError(f"{head}/{name} is not the list that {suite} names")
    text = _UNPACK[name.removeprefix(plain)](content).decode("utf-8", "replace")
    for paragraph in text.split("\n\n"):
        if paragraph.partition("\n")[0].removeprefix("Package: ") not in names:
            continue
        fields = dict(
            re.findall(
                r"^(Package|Version|Architecture|Filename|SHA256): *(.+)$", paragraph, re.MULTILINE
            )
        )
        if len(fields) == 5:
            key = DebianName(
                name=fields["Package"],
                version=fields["Version"],
                architecture=fields["Architecture"],
            )
            yield key, _Place(address=f"{uri}/{fields['Filename']}", sha256=fields["SHA256"])


def wheel_list(path: Path) -> WheelList:
    """Read the list of a wheel, and what an installation makes of its programs.

    Raises:
        LockError: It is not a wheel.
    """
    try:
        with zipfile.ZipFile(path) as wheel:
            (record,) = (
                name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)
            )
            rows = csv.reader(io.StringIO(wheel.read(record).decode("utf-8")))
            files = {row[0]: row[1] for row in rows if row and row[0] != record}
            written: dict[str, str] = {}
            for name in [name for name in files if re.match(r"[^/]+\.data/scripts/", name)]:
                content = wheel.read(name)
                if re.match(rb"#!pythonw?\b", content):
                    del files[name]
                    program = re.sub(rb"\A#!pythonw?", b"#!" + ENVIRONMENT_PYTHON.encode(), content)
                    written[name.rpartition("/")[2]] = _record_sum(program)
            points = record.replace("RECORD", "entry_points.txt")
            if points in files:
                written |= dict(_entry_points(wheel.read(points).decode("utf-8")))
    except (zipfile.BadZipFile, KeyError, ValueError, IndexError) as error:
        raise LockError(f"{path.name} is not a wheel: {error}") from error
    return WheelList(files=files, written=written)


def _entry_points(text: str) -> Iterator[tuple[str, str]]:
    """Yield the programs that a wheel declares, with the sum of what uv writes for each."""
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text)
    for section in ("console_scripts", "gui_scripts"):
        for name, value in parser.items(section) if parser.has_section(section) else ():
            module, _, function = value.partition("[")[0].strip().partition(":")
            yield (
                name,
                _record_sum(
                    _PROGRAM.format(
                        python=ENVIRONMENT_PYTHON,
                        module=module.strip(),
                        first=function.strip().partition(".")[0],
                        function=function.strip(),
                    ).encode()
                ),
            )


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
"""What uv writes for a program that a wheel declares (uv 0.13, crates/uv-install-wheel)."""


def _record_sum(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip(
        "="
    )


def debian_content(path: Path) -> DebianContent:
    """Read what a Debian package has of itself.

    Raises ``LockError`` for a form that Python cannot unpack (zstd).
    """
    try:
        with path.open("rb") as package:
            parts = dict(_archive_members(package))
            control = _unpacked(parts, "control.tar", None)
            members = {name: content for name, content in control.items() if name != "control"}
            listed = members.get("conffiles", b"").decode("utf-8", "surrogateescape").split("\n")
            # A line may begin with a word, such as remove-on-upgrade: the
            # package does not have that file.
            paths = {line.lstrip("/") for line in listed if line.startswith("/")}
            content = _unpacked(parts, "data.tar", paths)
            links = _links(parts)
    except (tarfile.TarError, lzma.LZMAError, OSError, ValueError) as error:
        raise LockError(f"{path.name} cannot be read: {error}") from error
    return DebianContent(
        members={name: hashlib.sha256(each).hexdigest() for name, each in members.items()},
        conffiles={
            f"/{name}": hashlib.md5(each, usedforsecurity=False).hexdigest()
            for name, each in content.items()
        },
        links=links,
    )


def _archive_members(package: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield the parts of a Debian package, which is an ar(5) archive: a head of
    60 bytes, content, an even end.
    """
    if package.read(8) != b"!<arch>\n":
        message = "it is not a Debian package"
        raise ValueError(message)
    while head := package.read(60):
        size = int(head[48:58])
        yield head[:16].decode().strip().rstrip("/"), package.read(size)
        package.read(size % 2)


def _part(parts: Mapping[str, bytes], beginning: str) -> tarfile.TarFile:
    (name,) = (each for each in parts if each.startswith(beginning))
    return tarfile.open(fileobj=io.BytesIO(parts[name]), mode="r:*")


def _unpacked(
    parts: Mapping[str, bytes], beginning: str, wanted: set[str] | None
) -> dict[str, bytes]:
    """Return the plain files of a part, or those of them that are wanted, by
    their names without ``./``.
    """
    found = {}
    with _part(parts, beginning) as archive:
        for member in archive:
            path = member.name.removeprefix("./")
            file = (
                archive.extractfile(member)
                if member.isreg() and (wanted is None or path in wanted)
                else None
            )
            if file is not None:
                found[path] = file.read()
    return found


def _links(parts: Mapping[str, bytes]) -> dict[str, str]:
    """Return where each link of a package leads: no list of sums has it."""
    with _part(parts, "data.tar") as archive:
        return {
            f"/{member.name.removeprefix('./')}": member.linkname
            for member in archive
            if member.issym()
        }


def _all_of(
    wanted: Iterable[_Wanted], read: Callable[[_Wanted], _Found | None]
) -> dict[_Wanted, _Found]:
    """Return what was read, several at once; what cannot be reached or read is left out."""

    def attempt(each: _Wanted) -> _Found | None:
        with suppress(LockError, HostError, OutputError):
            return read(each)
        return None

    wanted = list(wanted)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pairs = zip(wanted, pool.map(attempt, wanted), strict=True)
        return {each: found for each, found in pairs if found is not None}


def _kept(path: Path | None, kind: type[_Found]) -> _Found | None:
    with suppress(OSError, ValueError, TypeError):
        return kind(**json.loads(path.read_bytes())) if path is not None else None
    return None


def _keep(path: Path | None, found: _Found) -> _Found:
    if path is not None:
        with suppress(OSError):
            write_cached(path, json.dumps(asdict(found)).encode())  # type: ignore[call-overload]
    return found
