"""Reads the packages' own lists of files in an image, to be compared with those of their makers.

Part of the program that runs inside (``trainworks.imagetest.probe``).
"""

from __future__ import annotations

import csv
import fnmatch
import glob
import os
import re
import stat
from typing import TypedDict

from trainworks.imagetest.probe.files import Image, digest_of, distribution_of
from trainworks.imagetest.probe.packages import debian_fields, lines_of

_RECORD = re.compile(r".*/site-packages/[^/]+\.dist-info/RECORD")


class PythonList(TypedDict):
    """The list of a Python distribution.

    ``files`` are absolute paths to sums in RECORD's form, ``""`` for none.
    """

    name: str
    version: str
    record: str
    files: dict[str, str]


class DebianList(TypedDict):
    """The files of dpkg about a package.

    ``members`` are files beside its content, by name: its list of sums, its scripts; with their
    SHA-256. ``conffiles`` are paths to MD5 sums.
    """

    name: str
    version: str
    architecture: str
    members: dict[str, str]
    conffiles: dict[str, str]
    links: dict[str, str]


class PackageLists(TypedDict):
    """All lists. ``unneeded`` are Debian packages that no wanted package needs."""

    python: list[PythonList]
    debian: list[DebianList]
    unneeded: list[str]


def lists_of(image: Image, wanted: list[str]) -> PackageLists:
    """Return the lists of all packages.

    Args:
        image: The image.
        wanted: The Debian packages that the plan installs.
    """
    installed = list(debian_fields(image.root))
    records = []
    for path, status in image.files():
        if stat.S_ISREG(status.st_mode) and _RECORD.fullmatch(path):
            records.append(path)
    return {
        "python": [_python_list(image.root, path) for path in sorted(records)],
        "debian": [_debian_list(image.root, fields) for fields in installed],
        "unneeded": unneeded(installed, wanted),
    }


def _python_list(root: str, record: str) -> PythonList:
    """Read the list of a Python distribution from its ``RECORD``."""
    folder = os.path.dirname(os.path.dirname(record))
    name, version = distribution_of(os.path.dirname(record))
    files = {}
    with open(root + record, encoding="utf-8", errors="surrogateescape", newline="") as file:
        for row in csv.reader(file):
            if row:
                path = os.path.normpath(os.path.join(folder, row[0]))
                files[path] = row[1] if len(row) > 1 else ""
    return {"name": name, "version": version, "record": record, "files": files}


def _debian_list(root: str, fields: dict[str, str]) -> DebianList:
    """Read dpkg's files about a package, whose fields in the status file are given."""
    name, architecture = fields.get("Package", ""), fields.get("Architecture", "")
    members = {}
    links: dict[str, str] = {}
    for stem in (name, name + ":" + architecture):
        prefix = f"{root}/var/lib/dpkg/info/{stem}"
        # A package's name has dots, and a member's has none: `python3.11.list` is not of `python3`.
        for path in glob.glob(glob.escape(prefix) + ".*"):
            member = path[len(prefix) + 1 :]
            # dpkg makes the list itself, from the content.
            if member == "list":
                for line in lines_of(path):
                    if os.path.islink(root + line):
                        links[line] = os.readlink(root + line)
            elif "." not in member:
                members[member] = digest_of(path)
    conffiles = {}
    for line in fields.get("Conffiles", "").splitlines():
        words = line.split(" ")
        # A third word says that the package no longer has the file.
        if len(words) == 2:
            conffiles[words[0]] = words[1]
    return {
        "name": name,
        "version": fields.get("Version", ""),
        "architecture": architecture,
        "members": members,
        "conffiles": conffiles,
        "links": links,
    }


def unneeded(installed: list[dict[str, str]], wanted: list[str]) -> list[str]:
    """Return the packages that no wanted one needs or recommends, also indirectly.

    Essential and required packages are needed, and so is apt, to install others. A wanted name may
    be a pattern, such as ``libfabric*-aws``.
    """
    rows = {fields.get("Package", ""): fields for fields in installed}
    providers: dict[str, set[str]] = {name: {name} for name in rows}
    for name, fields in rows.items():
        for provided in _names(fields.get("Provides", "")):
            providers.setdefault(provided, set()).add(name)
    pending = ["apt"]
    for pattern in wanted:
        pending += fnmatch.filter(rows, pattern) if "*" in pattern else [pattern]
    for name, fields in rows.items():
        if fields.get("Essential") == "yes" or fields.get("Priority") == "required":
            pending.append(name)
    needed: set[str] = set()
    while pending:
        for name in providers.get(pending.pop(), set()) - needed:
            needed.add(name)
            for field in ("Depends", "Pre-Depends", "Recommends"):
                pending += _names(rows[name].get(field, ""))
    return sorted(rows.keys() - needed)


def _names(relation: str) -> list[str]:
    """Return the names of packages in a relation, such as ``a (>= 1) | b:any, c``."""
    alternatives = [text.strip() for text in re.split(r"[,|]", relation)]
    return [re.split(r"[ (:]", text)[0] for text in alternatives if text]
