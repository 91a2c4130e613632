"""Compares the lists that an image has of its packages' files with those of the packages' makers.

A sum that an image has of its own file says nothing where both were changed. The maker's list is in
the wheel or Debian package, whose own sum the lock or the archive has (``inputs.makers``).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from trainworks.imagetest.inside.files import pattern_of
from trainworks.imagetest.inside.lists import DebianList, PackageLists, PythonList
from trainworks.imagetest.results import folded
from trainworks.plan.checks import MakersListsCheck

_WRITTEN_HERE = re.compile(r".*(\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json)|\.pyc)")
"""What an installation adds to the list of a wheel."""

_DATA = re.compile(r"[^/]+\.data/(purelib|platlib|data|scripts|headers)/(.+)")


@dataclass(frozen=True, kw_only=True)
class DebianName:
    """What a Debian package is known by; one of this name never changes in its archive."""

    name: str
    version: str
    architecture: str

    def __str__(self) -> str:
        """Return it as the archive names its file."""
        return f"{self.name}_{self.version}_{self.architecture}"


@dataclass(frozen=True, kw_only=True)
class WheelList:
    """The list of a wheel.

    Attributes:
        files: Path in the wheel to its sum, as RECORD has both.
        written: Programs that an installation writes, by their names: the sum
            of what they are then.
    """

    files: Mapping[str, str]
    written: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DebianContent:
    """What a Debian package has of itself, as ``inside.lists.DebianList``."""

    members: Mapping[str, str]
    conffiles: Mapping[str, str]
    links: Mapping[str, str] = field(default_factory=dict)


class Makers(Protocol):
    """Gives the lists of makers, as far as this machine can get them."""

    def wheels(self) -> Mapping[str, WheelList]:
        """Return the lists of the plan's wheels, by the names of their distributions."""

    def debian(self, packages: Iterable[DebianName]) -> Mapping[DebianName, DebianContent]:
        """Return what Debian packages have of themselves."""


def list_problems(check: MakersListsCheck, found: PackageLists, makers: Makers | None) -> list[str]:
    """Return a line for each package that the plan does not have, and for each
    list that is not its maker's.
    """
    lines = [
        f"{each['record']}: no package of the plan is called {each['name']}"
        for each in found["python"]
        if each["name"] not in check.distributions
    ]
    lines += [f"Debian package {name}: nothing of the plan needs it" for name in found["unneeded"]]
    if makers is None:
        return lines
    wheels = makers.wheels()
    for listed in found["python"]:
        if listed["name"] in wheels:
            lines += wheel_problems(check, listed, wheels[listed["name"]])
    named = {debian_name(each): each for each in found["debian"]}
    contents = makers.debian(named)
    for name, each in named.items():
        if name in contents:
            lines += debian_problems(each, contents[name])
    return lines


def wheel_problems(check: MakersListsCheck, found: PythonList, wheel: WheelList) -> Iterator[str]:
    """Yield how the list of an installed distribution differs from that of its wheel."""
    site_packages = posixpath.dirname(posixpath.dirname(found["record"]))
    trimmed, stripped = _below(check.trims), pattern_of([f"/{each}" for each in check.strips])
    wanted = {
        _place(path, site_packages, found["name"]): digest for path, digest in wheel.files.items()
    }
    written = dict(wheel.written)
    if found["name"] == "pip" and "pip" in written:
        # The one program that installers give another name besides: pip3.11.
        written[posixpath.basename(posixpath.dirname(site_packages)).replace("python", "pip")] = (
            written["pip"]
        )
    wanted |= {
        f"{_environment(site_packages)}/bin/{name}": digest for name, digest in written.items()
    }
    lacks: list[str] = []
    for path, digest in wanted.items():
        inside = path.removeprefix(site_packages)
        there = found["files"].get(path)
        if _WRITTEN_HERE.fullmatch(path):
            continue
        if there is None:
            if not trimmed.fullmatch(inside):
                lacks.append(path)
        elif there != digest and not stripped.fullmatch(inside):
            yield f"{found['record']} has another sum of {path} than its wheel"
    yield from (f"{found['record']} lacks {path}, which its wheel has" for path in folded(lacks))
    for path in found["files"]:
        if path not in wanted and not _WRITTEN_HERE.fullmatch(path):
            yield f"{found['record']} has {path}, which its wheel does not have"


def debian_problems(found: DebianList, content: DebianContent) -> Iterator[str]:
    """Yield how what dpkg keeps of a package differs from what the package has."""
    for member in sorted({*found["members"], *content.members}):
        path = f"/var/lib/dpkg/info/{found['name']}.{member}"
        if member not in content.members:
            yield (
                f"{path} is there, and package {found['name']} {found['version']} does not have it"
            )
        elif member not in found["members"]:
            yield f"{path} is missing, and package {found['name']} {found['version']} has it"
        elif found["members"][member] != content.members[member]:
            yield f"{path} is not the one of package {found['name']} {found['version']}"
    for path, digest in content.conffiles.items():
        if found["conffiles"].get(path, digest) != digest:
            yield (
                f"/var/lib/dpkg/status has another sum of {path} than package {found['name']}"
                f" {found['version']}"
            )
    for path, target in content.links.items():
        there = found["links"].get(path, target)
        if there != target:
            yield (
                f"{path} is a link to {there}, and to {target} in package {found['name']}"
                f" {found['version']}"
            )


def debian_name(found: DebianList) -> DebianName:
    """Return what a package of an image is known by."""
    return DebianName(
        name=found["name"], version=found["version"], architecture=found["architecture"]
    )


def _place(path: str, site_packages: str, name: str) -> str:
    """Return where a file of a wheel is installed (the wheel format, "Installing a wheel")."""
    moved = _DATA.fullmatch(path)
    environment = _environment(site_packages)
    if moved is None:
        place = f"{site_packages}/{path}"
    elif moved[1] in ("purelib", "platlib"):
        place = f"{site_packages}/{moved[2]}"
    elif moved[1] == "scripts":
        place = f"{environment}/bin/{moved[2]}"
    elif moved[1] == "headers":
        python = posixpath.basename(posixpath.dirname(site_packages))
        place = f"{environment}/include/site/{python}/{name}/{moved[2]}"
    else:
        place = f"{environment}/{moved[2]}"
    return posixpath.normpath(place)


def _environment(site_packages: str) -> str:
    """Return the environment of ``ENVIRONMENT/lib/pythonX.Y/site-packages``."""
    return posixpath.dirname(posixpath.dirname(posixpath.dirname(site_packages)))


def _below(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return one expression for what ``trim-python-packages --remove`` removes:
    what fits, and all that is below it.
    """
    translated = []
    for pattern in patterns:
        parts = re.split(r"(\*\*/|\*|\[[^\]]*\])", pattern)
        words = {"**/": "(?:.*/)?", "*": "[^/]*"}
        text = "".join(
            words.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts
        )
        translated.append(f"/{text}(?:/.*)?")
    return re.compile("|".join(translated) if translated else "(?!)")
