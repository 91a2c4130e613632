"""What package managers keep of an image: system packages, Python distributions, licences.

Part of the program that runs inside (``trainworks.imagetest.inside``).
"""

from __future__ import annotations

import email.parser
import glob
import os
import re
import subprocess
from collections.abc import Iterator
from typing import TypedDict

RPM_TIMEOUT = 120.0

SUPPLIERS = ("Author", "Author-email", "Maintainer", "Maintainer-email")
"""Fields of a Python distribution's metadata that say whose it is, the plainest first."""

OWN_FOLDER = "/usr/lib/python3/dist-packages"
"""Where Debian packages install their Python distributions.

The list of system packages has these already.
"""


class SystemPackage(TypedDict):
    """One system package; ``licenses`` are the names in its machine-readable copyright file.

    ``supplier`` is the maintainer or vendor that its package names.
    """

    name: str
    version: str
    architecture: str
    source: str
    source_version: str
    licenses: list[str]
    supplier: str


class PythonDistribution(TypedDict):
    """One Python distribution.

    ``supplier`` is the author or maintainer. ``expression``, ``license`` and ``classifiers`` are
    what its metadata says of licences. ``inside`` is the folder of the package that carries a copy
    of it, such as ``setuptools``; ``""`` for one of its own. ``sboms`` are the bills of materials
    that its wheel brought (PEP 770).
    """

    name: str
    version: str
    path: str
    inside: str
    sboms: list[str]
    supplier: str
    expression: str
    license: str
    classifiers: list[str]


class PackagesAnswer(TypedDict):
    """All packages.

    ``kind`` is ``deb`` or ``rpm``, ``distribution`` and ``version`` come from ``os-release``.
    """

    kind: str
    distribution: str
    version: str
    system: list[SystemPackage]
    python: list[PythonDistribution]
    error: str


def text_of(path: str, errors: str = "replace") -> str:
    """Return a file as text, nothing where it cannot be read; ``errors`` is that of ``open``."""
    try:
        with open(path, encoding="utf-8", errors=errors) as file:
            return file.read()
    except OSError:
        return ""


def lines_of(path: str) -> list[str]:
    """Return the lines of a file, which may be paths of any bytes; none where it cannot be read."""
    return text_of(path, "surrogateescape").splitlines()


def release(root: str) -> dict[str, str]:
    """Return ``os-release`` as a table."""
    rows = (line.partition("=") for line in text_of(root + "/etc/os-release").splitlines())
    return {key: value.strip("\"'") for key, equals, value in rows if equals}


def debian_fields(root: str) -> Iterator[dict[str, str]]:
    """Yield the fields of every Debian package that is installed."""
    for paragraph in text_of(root + "/var/lib/dpkg/status").split("\n\n"):
        fields: dict[str, str] = {}
        key = ""
        for line in paragraph.strip("\n").split("\n"):
            if line.startswith((" ", "\t")):
                fields[key] = fields.get(key, "") + "\n" + line[1:]
            else:
                key, _, value = line.partition(":")
                fields[key] = value.strip()
        if fields.get("Status", "").endswith(" installed"):
            yield fields


def debian_packages(root: str) -> Iterator[SystemPackage]:
    """Yield the installed packages in dpkg's status file."""
    for fields in debian_fields(root):
        name, version = fields["Package"], fields["Version"]
        # "Source: gcc-12 (12.2.0-14)": the version only where it is another one than the package's.
        source = re.match(r"(\S+)(?: \((.*)\))?", fields.get("Source", ""))
        yield {
            "name": name,
            "version": version,
            "architecture": fields.get("Architecture", ""),
            "source": source[1] if source else name,
            "source_version": (source[2] if source else "") or version,
            "licenses": debian_licenses(text_of(root + "/usr/share/doc/" + name + "/copyright")),
            "supplier": fields.get("Maintainer", ""),
        }


def debian_licenses(text: str) -> list[str]:
    """Return the short names of the licences in a copyright file.

    None if it is not machine-readable.

    The paragraphs of ``debian/`` files are left out: they are about the
    packaging, which is not in the package.
    """
    paragraphs = re.split(r"\n\s*\n", text.strip())
    if "copyright-format" not in paragraphs[0].split("\n", 1)[0]:
        return []
    found = set()
    for paragraph in paragraphs[1:]:
        files = re.search(r"^Files:((?:.*\n?)(?:[ \t].*\n?)*)", paragraph, re.MULTILINE)
        named = re.search(r"^License:[ \t]*(\S.*)$", paragraph, re.MULTILINE)
        if files and named and not all(name.startswith("debian/") for name in files[1].split()):
            found.add(named[1].strip())
    return sorted(found)


def rpm(root: str, form: str, errors: str = "replace") -> tuple[str, str]:
    """Return a line for each installed RPM package, or each of its files, and rpm's error message.

    The database is Berkeley DB, NDB or SQLite, by version: only rpm itself reads them all.
    """
    command = ["rpm", "--query", "--all", "--queryformat", form] + (
        ["--root", root] if root else []
    )
    try:
        child = subprocess.run(command, capture_output=True, timeout=RPM_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    complaint = child.stderr.decode("utf-8", "replace").strip()[-2000:] if child.returncode else ""
    return child.stdout.decode("utf-8", errors), complaint


def rpm_listing(text: str) -> list[SystemPackage]:
    """Return the packages in the lines that rpm prints."""
    found: list[SystemPackage] = []
    for line in text.splitlines():
        name, version, architecture, source, named, vendor = [
            *line.split("\t"),
            "",
            "",
            "",
            "",
            "",
        ][:6]
        if not version or name == "gpg-pubkey":
            continue
        parts = re.sub(r"\.(?:no)?src\.rpm$", "", source).rsplit("-", 2)
        split = len(parts) == 3
        found.append(
            {
                "name": name,
                "version": version,
                "architecture": architecture,
                "source": parts[0] if split else name,
                "source_version": "-".join(parts[1:]) if split else version,
                "licenses": [named] if named else [],
                "supplier": "" if vendor == "(none)" else vendor,
            }
        )
    return found


def python_distributions(root: str) -> list[PythonDistribution]:
    """Return every Python distribution that does not come from a system
    package, also those inside other packages.
    """
    found: list[PythonDistribution] = []
    for folder, folders, _ in os.walk(root or "/"):
        place = folder[len(root) :] if root else folder
        folders[:] = sorted(
            name for name in folders if os.path.join(place, name) not in ("/proc", "/sys", "/dev")
        )
        installed = re.search(r"/(?:site|dist)-packages(?:/(.+))?$", place)
        if installed is None or (place + "/").startswith(OWN_FOLDER + "/"):
            continue
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.dist-info", "METADATA"))):
            fields = email.parser.HeaderParser().parsestr(text_of(path))
            name = str(fields["Name"] or "")
            sboms = sorted(
                glob.glob(os.path.join(glob.escape(os.path.dirname(path)), "sboms", "*"))
            )
            found.append(
                {
                    "name": name,
                    "version": str(fields["Version"] or ""),
                    "path": os.path.dirname(path)[len(root) :],
                    "inside": (installed[1] or "").split("/")[0],
                    "sboms": [each[len(root) :] for each in sboms],
                    "supplier": next(
                        (" ".join(str(fields[key]).split()) for key in SUPPLIERS if fields[key]), ""
                    ),
                    "expression": str(fields["License-Expression"] or ""),
                    "license": str(fields["License"] or ""),
                    "classifiers": sorted(
                        {
                            str(value).rpartition(" :: ")[2]
                            for value in fields.get_all("Classifier", [])
                            if str(value).startswith("License :: ")
                            and not str(value).endswith(":: OSI Approved")
                        }
                    ),
                }
            )
    return found


_RPM_PACKAGE = (
    r"%{NAME}\t%|EPOCH?{%{EPOCH}:}|%{VERSION}-%{RELEASE}"
    r"\t%{ARCH}\t%{SOURCERPM}\t%{LICENSE}\t%{VENDOR}\n"
)


def all_packages(root: str) -> PackagesAnswer:
    """Return everything, sorted by name and place."""
    system = release(root)
    kind, error = "deb", ""
    if os.path.exists(root + "/var/lib/dpkg/status"):
        packages = [*debian_packages(root)]
    else:
        kind = "rpm"
        listing, error = rpm(root, _RPM_PACKAGE)
        packages = rpm_listing(listing)
    return {
        "kind": kind,
        "distribution": system.get("ID", ""),
        "version": system.get("VERSION_ID", ""),
        "system": sorted(
            packages, key=lambda row: (row["name"], row["architecture"], row["version"])
        ),
        "python": sorted(
            python_distributions(root), key=lambda row: (row["name"].lower(), row["path"])
        ),
        "error": error,
    }
