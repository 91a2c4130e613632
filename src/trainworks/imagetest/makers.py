"""Compares the packages' lists of files in an image with those of the packages' makers.

A sum in an image proves nothing if file and sum were changed together. The maker's list is in the
wheel or Debian package, and the lock or the archive has the sum of that (``inputs.makers``).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from trainworks.imagetest.probe.files import pattern_of
from trainworks.imagetest.probe.lists import DebianList, PackageLists, PythonList
from trainworks.imagetest.results import folded
from trainworks.plan.checks import MakersListsCheck

_WRITTEN_HERE = re.compile(r".*(\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json)|\.pyc)")
"""Files that an installation adds to the list of a wheel."""

_DATA = re.compile(r"[^/]+\.data/(purelib|platlib|data|scripts|headers)/(.+)")


@dataclass(frozen=True, kw_only=True)
class DebianName:
    """The name of a Debian package in its archive, where such a package never changes."""

    name: str
    version: str
    architecture: str

    def __str__(self) -> str:
        """Return the name of its file in the archive."""
        return f"{self.name}_{self.version}_{self.architecture}"


@dataclass(frozen=True, kw_only=True)
class WheelList:
    """The list of a wheel.

    Attributes:
        files: Path in the wheel to its sum, in RECORD's form.
        written: The sums of programs that an installation writes, by name.
    """

    files: Mapping[str, str]
    written: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DebianContent:
    """The files about itself in a Debian package, as in ``probe.lists.DebianList``."""

    members: Mapping[str, str]
    conffiles: Mapping[str, str]
    links: Mapping[str, str] = field(default_factory=dict)


class Makers(Protocol):
    """Gives the lists of makers, as far as this machine can get them."""

    def wheels(self) -> Mapping[str, WheelList]:
        """Return the lists of the plan's wheels, by the names of their distributions."""

    def debian(self, packages: Iterable[DebianName]) -> Mapping[DebianName, DebianContent]:
        """Return the files about themselves in Debian packages."""


def list_problems(check: MakersListsCheck, lists: PackageLists, makers: Makers | None) -> list[str]:
    """Return a line for each package that is not in the plan, and for each list that differs.

    Args:
        check: The plan's packages.
        lists: The lists in the image.
        makers: Gives the makers' lists; ``None`` if they are not available.
    """
    foreign = [row for row in lists["python"] if row["name"] not in check.distributions]
    lines = [f"{row['record']}: no package of the plan is called {row['name']}" for row in foreign]
    lines += [f"Debian package {name}: nothing of the plan needs it" for name in lists["unneeded"]]
    if makers is None:
        return lines
    wheels = makers.wheels()
    for listed in lists["python"]:
        if listed["name"] in wheels:
            lines += wheel_problems(check, listed, wheels[listed["name"]])
    packages = {debian_name(package): package for package in lists["debian"]}
    contents = makers.debian(packages)
    for name, package in packages.items():
        if name in contents:
            lines += debian_problems(package, contents[name])
    return lines


def wheel_problems(check: MakersListsCheck, listed: PythonList, wheel: WheelList) -> Iterator[str]:
    """Yield the differences between the list of an installed distribution and that of its wheel."""
    record = listed["record"]
    site_packages = posixpath.dirname(posixpath.dirname(record))
    trimmed = _below(check.trims)
    stripped = pattern_of([f"/{pattern}" for pattern in check.strips])
    expected = _expected_files(listed, wheel)
    missing: list[str] = []
    for path, digest in expected.items():
        if _WRITTEN_HERE.fullmatch(path):
            continue
        inside = path.removeprefix(site_packages)
        listed_digest = listed["files"].get(path)
        if listed_digest is None:
            if not trimmed.fullmatch(inside):
                missing.append(path)
        elif listed_digest != digest and not stripped.fullmatch(inside):
            yield f"{record} has another sum of {path} than its wheel"
    for path in folded(missing):
        yield f"{record} lacks {path}, which its wheel has"
    for path in listed["files"]:
        if path not in expected and not _WRITTEN_HERE.fullmatch(path):
            yield f"{record} has {path}, which its wheel does not have"


def _expected_files(listed: PythonList, wheel: WheelList) -> dict[str, str]:
    """Return the paths that an installation of a wheel has, absolute, with their sums."""
    site_packages = posixpath.dirname(posixpath.dirname(listed["record"]))
    files = {}
    for path, digest in wheel.files.items():
        files[_place(path, site_packages, listed["name"])] = digest
    programs = dict(wheel.written)
    if listed["name"] == "pip" and "pip" in programs:
        # Installers give this one program a second name: pip3.11.
        python = posixpath.basename(posixpath.dirname(site_packages))
        programs[python.replace("python", "pip")] = programs["pip"]
    for name, digest in programs.items():
        files[f"{_environment(site_packages)}/bin/{name}"] = digest
    return files


def debian_problems(listed: DebianList, content: DebianContent) -> Iterator[str]:
    """Yield the differences between dpkg's files about a package and those in the package."""
    package = f"package {listed['name']} {listed['version']}"
    for member in sorted({*listed["members"], *content.members}):
        path = f"/var/lib/dpkg/info/{listed['name']}.{member}"
        if member not in content.members:
            yield f"{path} is there, and {package} does not have it"
        elif member not in listed["members"]:
            yield f"{path} is missing, and {package} has it"
        elif listed["members"][member] != content.members[member]:
            yield f"{path} is not the one of {package}"
    for path, digest in content.conffiles.items():
        if listed["conffiles"].get(path, digest) != digest:
            yield f"/var/lib/dpkg/status has another sum of {path} than {package}"
    for path, target in content.links.items():
        actual_target = listed["links"].get(path, target)
        if actual_target != target:
            yield f"{path} is a link to {actual_target}, and to {target} in {package}"


def debian_name(listed: DebianList) -> DebianName:
    """Return the name of a package in its archive."""
    return DebianName(
        name=listed["name"], version=listed["version"], architecture=listed["architecture"]
    )


def _place(path: str, site_packages: str, name: str) -> str:
    """Return the installed path of a wheel's file (the wheel format, "Installing a wheel").

    ``pkg.data/scripts/tool`` becomes ``ENVIRONMENT/bin/tool``.
    """
    data = _DATA.fullmatch(path)
    environment = _environment(site_packages)
    if data is None:
        place = f"{site_packages}/{path}"
    elif data[1] in ("purelib", "platlib"):
        place = f"{site_packages}/{data[2]}"
    elif data[1] == "scripts":
        place = f"{environment}/bin/{data[2]}"
    elif data[1] == "headers":
        python = posixpath.basename(posixpath.dirname(site_packages))
        place = f"{environment}/include/site/{python}/{name}/{data[2]}"
    else:
        place = f"{environment}/{data[2]}"
    return posixpath.normpath(place)


def _environment(site_packages: str) -> str:
    """Return the environment of ``ENVIRONMENT/lib/pythonX.Y/site-packages``."""
    return posixpath.dirname(posixpath.dirname(posixpath.dirname(site_packages)))


def _below(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return one expression for the paths that ``trim-python-packages --remove`` removes.

    They are those that fit a pattern, and all below them.
    """
    wildcards = {"**/": "(?:.*/)?", "*": "[^/]*"}
    expressions = []
    for pattern in patterns:
        text = ""
        for part in re.split(r"(\*\*/|\*|\[[^\]]*\])", pattern):
            if part in wildcards:
                text += wildcards[part]
            elif part.startswith("["):
                text += part
            else:
                text += re.escape(part)
        expressions.append(f"/{text}(?:/.*)?")
    return re.compile("|".join(expressions) if expressions else "(?!)")
