"""Describes the Python that an image gives to a job, and its distributions.

That Python runs this file.

The source of this file is sent into a container (``imagetest.probe_request``). It has only the
standard library of a Python that may be as old as 3.8: import nothing else, and use no newer
syntax. An older Python answers with its version only.
"""

# ruff: noqa: PTH110, PTH118, PTH123
# The oldest interpreter decides, and this file does not need pathlib.

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import sysconfig
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from importlib.metadata import Distribution

SYSTEM_FOLDER = "/usr/lib/python3/dist-packages"
"""The folder of Debian's own distributions; its pip leaves them alone."""

MANIFEST = "/opt/trainworks/image.json"
OLDEST = (3, 8)


class InstalledDistribution(TypedDict):
    """The fields of ``trainworks.extend.requirements.BaseDistribution``."""

    name: str
    version: str
    removable: bool


class Interpreter(TypedDict):
    """The fields of ``trainworks.extend.requirements.ExtendedBase`` about the image's Python."""

    python: str
    version: str
    full_version: str
    glibc: str
    machine: str
    managed: bool
    distribution: str
    suite: str
    compiler: bool
    launcher: bool
    pip: bool
    uv: bool
    protected: dict[str, str]
    components: dict[str, str]
    missing: list[str]
    distributions: list[InstalledDistribution]
    metadata: dict[str, str]
    builds: dict[str, str]


def can_be_removed(distribution: Distribution) -> bool:
    """Return whether pip can replace a distribution.

    pip can if it has a list of the distribution's files, or if the distribution is the system's,
    which stays beside the new one.
    """
    for name in ("RECORD", "installed-files.txt"):
        if distribution.read_text(name) is not None:
            return True
    return str(distribution.locate_file("")).rstrip("/") == SYSTEM_FOLDER


DECIDING = ("Name", "Version", "Requires-Python", "Requires-Dist", "Provides-Extra")
"""Fields of a distribution's metadata that a resolver needs."""


def deciding_metadata(distribution: Distribution) -> str:
    """Return the fields of ``DECIDING`` in a distribution's metadata, as lines of ``METADATA``."""
    lines = []
    for name in DECIDING:
        for value in distribution.metadata.get_all(name) or ():
            one_line = " ".join(str(value).split())
            lines.append(f"{name}: {one_line}\n")
    return "".join(lines)


def build_of(distribution: Distribution) -> str:
    """Return the version with its build in a module's own file, such as ``VERSION+cu121``.

    Or ``""``.
    """
    name = distribution.metadata["Name"].replace("-", "_")
    path = str(distribution.locate_file(os.path.join(name, "version.py")))
    try:
        with open(path, encoding="utf-8", errors="replace") as opened:
            text = opened.read()
    except OSError:
        return ""
    match = re.search(r"(?m)^__version__\s*(?::[^=\n]+)?=\s*['\"]([^'\"]+)", text)
    if match is None:
        return ""
    version = match.group(1)
    return version if version.startswith(distribution.version + "+") else ""


def look() -> Interpreter:
    """Describe the running interpreter."""
    description: Interpreter = {
        "python": sys.executable,
        "version": ".".join(map(str, sys.version_info[:2])),
        "full_version": ".".join(map(str, sys.version_info[:3])),
        "glibc": platform.libc_ver()[1],
        "machine": platform.machine(),
        "managed": sys.prefix == sys.base_prefix
        and os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")),
        "distribution": "",
        "suite": "",
        "compiler": any(shutil.which(name) for name in ("cc", "gcc", "c++")),
        "launcher": os.path.exists(MANIFEST),
        "pip": False,
        "uv": bool(shutil.which("uv")),
        "protected": {},
        "components": {},
        "missing": [],
        "distributions": [],
        "metadata": {},
        "builds": {},
    }
    if os.path.exists("/etc/os-release"):
        with open("/etc/os-release", encoding="utf-8") as opened:
            release = dict(line.strip().split("=", 1) for line in opened if "=" in line)
        description["distribution"] = release.get("ID", "").strip('"')
        description["suite"] = release.get("VERSION_CODENAME", "").strip('"')
    if description["launcher"]:
        with open(MANIFEST, encoding="utf-8") as opened:
            manifest = json.load(opened)
        description["protected"] = manifest.get("protected", {})
        description["components"] = {
            name: row.get("version", "") for name, row in manifest.get("components", {}).items()
        }
        description["missing"] = [row["component"] for row in manifest.get("missing", [])]
    if sys.version_info[:2] < OLDEST:
        return description
    from importlib import metadata

    row_by_name = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        # The first on sys.path is the one that is imported; broken remainders have no name.
        if name and name.lower() not in row_by_name:
            row_by_name[name.lower()] = InstalledDistribution(
                name=name,
                version=distribution.version,
                removable=can_be_removed(distribution),
            )
            description["metadata"][name] = deciding_metadata(distribution)
            build = build_of(distribution)
            if build:
                description["builds"][name] = build
    description["distributions"] = sorted(row_by_name.values(), key=lambda row: row["name"].lower())
    description["pip"] = "pip" in row_by_name
    return description


def answer(_request: object) -> Interpreter:
    """Answer the one question that there is."""
    return look()
