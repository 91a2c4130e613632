"""Lists the packages of an image: system packages, Python distributions, licences.

Part of the program that runs inside (``trainworks.imagetest.probe``).
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
"""Fields with the author of a Python distribution, the plainest first."""

OWN_FOLDER = "/usr/lib/python3/dist-packages"
"""The folder of Debian packages' Python distributions, which are system packages already."""


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
    the licences in its metadata. ``inside`` is the folder of the package that carries a copy
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
    """Return the text of a file, nothing if it cannot be read; ``errors`` is that of ``open``."""
    try:
        with open(path, encoding="utf-8", errors=errors) as file:
            return file.read()
    except OSError:
        return ""


def lines_of(path: str) -> list[str]:
    """Return the lines of a file, which may be paths of any bytes; none if it cannot be read."""
    return text_of(path, "surrogateescape").splitlines()


def release(root: str) -> dict[str, str]:
    """Return ``os-release`` as a table."""
    table = {}
    for line in text_of(root + "/etc/os-release").splitlines():
        key, equals, value = line.partition("=")
        if equals:
            table[key] = value.strip("\"'")
    return table


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
        source_name, source_version = name, version
        # "Source: gcc-12 (12.2.0-14)": with a version only if it differs from the package's.
        source = re.match(r"(\S+)(?: \((.*)\))?", fields.get("Source", ""))
        if source:
            source_name = source[1]
            source_version = source[2] or version
        yield {
            "name": name,
            "version": version,
            "architecture": fields.get("Architecture", ""),
            "source": source_name,
            "source_version": source_version,
            "licenses": debian_licenses(text_of(root + "/usr/share/doc/" + name + "/copyright")),
            "supplier": fields.get("Maintainer", ""),
        }


def debian_licenses(text: str) -> list[str]:
    """Return the short names of the licences in a machine-readable copyright file.

    Nothing for another one. The paragraphs of ``debian/`` files are left out: they are about the
    packaging, which is not in the package.
    """
    paragraphs = re.split(r"\n\s*\n", text.strip())
    if "copyright-format" not in paragraphs[0].split("\n", 1)[0]:
        return []
    licenses = set()
    for paragraph in paragraphs[1:]:
        files = re.search(r"^Files:((?:.*\n?)(?:[ \t].*\n?)*)", paragraph, re.MULTILINE)
        license_line = re.search(r"^License:[ \t]*(\S.*)$", paragraph, re.MULTILINE)
        if not files or not license_line:
            continue
        is_packaging = all(name.startswith("debian/") for name in files[1].split())
        if not is_packaging:
            licenses.add(license_line[1].strip())
    return sorted(licenses)


def rpm(root: str, form: str, errors: str = "replace") -> tuple[str, str]:
    """Return a line for each installed RPM package, or each of its files, and rpm's error message.

    The database is Berkeley DB, NDB or SQLite, by version: only rpm itself reads them all.
    """
    command = ["rpm", "--query", "--all", "--queryformat", form]
    if root:
        command += ["--root", root]
    try:
        child = subprocess.run(command, capture_output=True, timeout=RPM_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    message = ""
    if child.returncode:
        message = child.stderr.decode("utf-8", "replace").strip()[-2000:]
    return child.stdout.decode("utf-8", errors), message


def rpm_listing(text: str) -> list[SystemPackage]:
    """Return the packages in the lines that rpm prints, in the form of ``_RPM_PACKAGE``."""
    packages: list[SystemPackage] = []
    for line in text.splitlines():
        # A line that is cut off has empty columns.
        columns = [*line.split("\t"), *[""] * 5][:6]
        name, version, architecture, source, license_name, vendor = columns
        if not version or name == "gpg-pubkey":
            continue
        # "gcc-VERSION-RELEASE.src.rpm"
        source_name, source_version = name, version
        parts = re.sub(r"\.(?:no)?src\.rpm$", "", source).rsplit("-", 2)
        if len(parts) == 3:
            source_name, source_version = parts[0], f"{parts[1]}-{parts[2]}"
        packages.append(
            {
                "name": name,
                "version": version,
                "architecture": architecture,
                "source": source_name,
                "source_version": source_version,
                "licenses": [license_name] if license_name else [],
                "supplier": "" if vendor == "(none)" else vendor,
            }
        )
    return packages


def python_distributions(root: str) -> list[PythonDistribution]:
    """Return every Python distribution that does not come from a system
    package, also those inside other packages.
    """
    distributions: list[PythonDistribution] = []
    for folder, folder_names, _ in os.walk(root or "/"):
        place = folder[len(root) :] if root else folder
        folder_names[:] = sorted(
            name
            for name in folder_names
            if os.path.join(place, name) not in ("/proc", "/sys", "/dev")
        )
        packages_folder = re.search(r"/(?:site|dist)-packages(?:/(.+))?$", place)
        if packages_folder is None or (place + "/").startswith(OWN_FOLDER + "/"):
            continue
        inside = (packages_folder[1] or "").split("/")[0]
        pattern = os.path.join(glob.escape(folder), "*.dist-info", "METADATA")
        paths = sorted(glob.glob(pattern))
        distributions += [_distribution_at(path, root, inside) for path in paths]
    return distributions


def _distribution_at(path: str, root: str, inside: str) -> PythonDistribution:
    """Return the distribution of a ``METADATA`` file.

    Args:
        path: The file.
        root: The root of the image.
        inside: The folder of the package that carries a copy of the distribution, or ``""``.
    """
    fields = email.parser.HeaderParser().parsestr(text_of(path))
    folder = os.path.dirname(path)
    sboms = sorted(glob.glob(os.path.join(glob.escape(folder), "sboms", "*")))
    supplier = ""
    for key in SUPPLIERS:
        if fields[key]:
            supplier = " ".join(str(fields[key]).split())
            break
    licenses = set()
    for value in fields.get_all("Classifier", []):
        classifier = str(value)
        is_general = classifier.endswith(":: OSI Approved")
        if classifier.startswith("License :: ") and not is_general:
            licenses.add(classifier.rpartition(" :: ")[2])
    return {
        "name": str(fields["Name"] or ""),
        "version": str(fields["Version"] or ""),
        "path": folder[len(root) :],
        "inside": inside,
        "sboms": [sbom[len(root) :] for sbom in sboms],
        "supplier": supplier,
        "expression": str(fields["License-Expression"] or ""),
        "license": str(fields["License"] or ""),
        "classifiers": sorted(licenses),
    }


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
