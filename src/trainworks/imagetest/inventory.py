"""Takes stock of an image's file system, from inside: who owns each file, and which have rights that few should have.

Like the probe, this file is sent into a container and run there by the image's ``/usr/bin/python3``: standard library
only, no syntax newer than Python 3.8, and no import of the rest of this package. It reads a ``Request`` and prints one
line, ``MARKER`` followed by an ``Answer`` as JSON.
"""

# ruff: noqa: PTH110, PTH112, PTH118, PTH119, PTH120, PTH123, PTH207
# A hundred thousand files are asked about: plain strings and os.path, no object for each.

from __future__ import annotations

import base64
import csv
import glob
import json
import os
import re
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import TypedDict

MARKER = "trainworks-inventory: "
RPM_TIMEOUT = 120.0


class Request(TypedDict):
    """All questions of one run: the folder that is the image's root, and patterns of files whose owner is known."""

    root: str
    owned: list[str]


class PrivilegedFile(TypedDict):
    """A file that gives its user other rights; ``package`` is the system package that brings it, or nothing."""

    path: str
    rights: str
    package: str


class Answer(TypedDict):
    """What was found.

    ``files`` is how many files and links were looked at, ``packages`` how many system packages there are: none of
    either is an inventory that looked at nothing. ``open`` has the paths that everybody may write to, with their modes.
    """

    files: int
    packages: int
    unowned: list[str]
    open: list[tuple[str, int]]
    privileged: list[PrivilegedFile]
    two_architectures: dict[str, list[str]]
    error: str


def walk(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every path of the image, folders too; links are not followed, kernel file systems left out."""
    pending = [root or "/"]
    while pending:
        folder = pending.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            path = entry.path[len(root) :]
            if path in ("/proc", "/sys", "/dev"):
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            yield path, entry.stat(follow_symlinks=False)


# --- owners ----------------------------------------------------------------------------------------------------------


class Owners:
    """Which package, Python distribution or pattern a path belongs to."""

    def __init__(self, root: str) -> None:
        """Read the databases of the package manager."""
        self.root = root
        self.packages: dict[str, str] = {}
        self.others: set[str] = set()
        self.names: set[str] = set()
        self.error = ""
        self._real_folders: dict[str, str] = {}
        if os.path.isdir(root + "/var/lib/dpkg/info"):
            self._read_dpkg()
        elif os.path.exists(root + "/usr/bin/rpm"):
            self._read_rpm()

    def real(self, path: str) -> str:
        """Return the path with links of its folder resolved: a package's ``/bin/ls`` is ``/usr/bin/ls``."""
        folder, name = os.path.split(path)
        if folder not in self._real_folders:
            self._real_folders[folder] = os.path.realpath(self.root + folder)[len(self.root) :].rstrip("/")
        return self._real_folders[folder] + "/" + name

    def _read_dpkg(self) -> None:
        for path in glob.glob(glob.escape(self.root) + "/var/lib/dpkg/info/*.list"):
            name = os.path.basename(path)[: -len(".list")].partition(":")[0]
            self.names.add(name)
            for line in _lines(path):
                self.packages[self.real(line)] = name
        diversions = _lines(self.root + "/var/lib/dpkg/diversions")
        for index in range(0, len(diversions) - 2, 3):
            place, instead, by = diversions[index : index + 3]
            # What any other package brings as `place` lies at `instead`; only the one that diverts may bring `place`.
            diverted = self.packages.get(self.real(place), "")
            if diverted and diverted != by:
                del self.packages[self.real(place)]
                self.packages[self.real(instead)] = diverted
            elif diverted:
                self.packages[self.real(instead)] = by
        for path in glob.glob(glob.escape(self.root) + "/var/lib/dpkg/alternatives/*"):
            self._add_alternatives(os.path.basename(path), _lines(path))

    def _read_rpm(self) -> None:
        # The database is Berkeley DB, NDB or SQLite, by version: only rpm itself reads them all.
        command = ["rpm", "--query", "--all", "--queryformat", r"[%{=NAME}\t%{FILENAMES}\n]"]
        if self.root:
            command += ["--root", self.root]
        try:
            child = subprocess.run(command, capture_output=True, timeout=RPM_TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            self.error = str(error)
            return
        if child.returncode != 0:
            self.error = child.stderr.decode("utf-8", "replace").strip()[-2000:]
        self.add_rpm_listing(child.stdout.decode("utf-8", "surrogateescape"))
        for path in glob.glob(glob.escape(self.root) + "/var/lib/alternatives/*"):
            self._add_alternatives(os.path.basename(path), _lines(path))

    def add_rpm_listing(self, text: str) -> None:
        """Take the lines ``PACKAGE TAB PATH`` that rpm prints."""
        for line in text.splitlines():
            name, tab, path = line.partition("\t")
            if tab and path.startswith("/"):
                self.names.add(name)
                self.packages[self.real(path)] = name

    def _add_alternatives(self, name: str, lines: list[str]) -> None:
        """Take the links of one group: its name is the file's, its link the second line, then pairs of name, link."""
        links = [*lines[1:2]]
        names = [name]
        for index in range(2, len(lines) - 1, 2):
            if not lines[index]:
                break
            names.append(lines[index])
            links.append(lines[index + 1])
        self.others.update(self.real(link) for link in links)
        self.others.update("/etc/alternatives/" + one for one in names)

    def add_distribution(self, record: str) -> None:
        """Take the files of one Python distribution; ``record`` is its list of files."""
        # The paths of an egg's list start at its own folder.
        egg = record.endswith(".txt")
        folder = os.path.dirname(record) if egg else os.path.dirname(os.path.dirname(record))
        try:
            with open(self.root + record, encoding="utf-8", errors="surrogateescape", newline="") as file:
                for row in csv.reader(file):
                    if row:
                        self.others.add(self.real(os.path.normpath(os.path.join(folder, row[0]))))
        except OSError:
            pass

    def owns(self, path: str) -> bool:
        """Say whether a package or a distribution brings the file, or Python made it from one that is there."""
        if path in self.packages or path in self.others:
            return True
        compiled = re.fullmatch(r"(.*)/__pycache__/([^/]+?)\.[a-z]+-\d+(?:\.opt-\d)?\.pyc", path)
        if compiled is None:
            return False
        source = f"{compiled[1]}/{compiled[2]}.py"
        return source in self.packages or source in self.others


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:
        return []


def pattern_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return one expression for patterns in which ``*`` stays in a folder and ``**`` does not."""
    translated = []
    for pattern in patterns:
        parts = re.split(r"(\*\*|\*|\?)", pattern)
        words = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
        translated.append("".join(words[part] if part in words else re.escape(part) for part in parts))
    return re.compile("|".join(translated) if translated else "(?!)")


def two_architectures(root: str) -> dict[str, list[str]]:
    """Return the Debian packages that are installed for more than one architecture."""
    found: dict[str, list[str]] = {}
    fields: dict[str, str] = {}
    for line in [*_lines(root + "/var/lib/dpkg/status"), ""]:
        if line:
            key, _, value = line.partition(": ")
            fields[key] = value
            continue
        if fields.get("Status", "").endswith(" installed"):
            found.setdefault(fields.get("Package", ""), []).append(fields.get("Architecture", ""))
        fields = {}
    return {name: architectures for name, architectures in found.items() if len(architectures) > 1}


# --- rights ----------------------------------------------------------------------------------------------------------


def rights_of(path: str, status: os.stat_result) -> str:
    """Return which rights of others a file gives to whoever runs it, or nothing."""
    found = []
    if status.st_mode & stat.S_ISUID:
        found.append("setuid")
    if status.st_mode & stat.S_ISGID:
        found.append("setgid")
    try:
        os.getxattr(path, "security.capability", follow_symlinks=False)
        found.append("capabilities")
    except OSError:
        pass
    return ", ".join(found)


_RECORD = re.compile(
    r".*/(?:site|dist)-packages/[^/]+\.(?:dist-info/RECORD|egg-info/installed-files\.txt)",
)


def answer_request(request: Request) -> Answer:
    """Answer everything in one walk over the file system, and a second one over what no package brings."""
    root = request["root"].rstrip("/")
    owners = Owners(root)
    answer: Answer = {
        "files": 0,
        "packages": len(owners.names),
        "unowned": [],
        "open": [],
        "privileged": [],
        "two_architectures": two_architectures(root),
        "error": owners.error,
    }
    rest: list[str] = []
    for path, status in walk(root):
        kind = status.st_mode
        if not stat.S_ISLNK(kind) and kind & stat.S_IWOTH:
            answer["open"].append((path, stat.S_IMODE(kind)))
        if stat.S_ISDIR(kind):
            continue
        answer["files"] += 1
        if stat.S_ISREG(kind):
            rights = rights_of(root + path, status)
            if rights:
                package = owners.packages.get(path, "")
                answer["privileged"].append({"path": path, "rights": rights, "package": package})
            if _RECORD.fullmatch(path):
                owners.add_distribution(path)
        rest.append(path)
    declared = pattern_of(request["owned"])
    answer["unowned"] = [path for path in rest if not owners.owns(path) and not declared.fullmatch(path)]
    return answer


def decode(text: str) -> bytes:
    """Unpack one argument of the command line."""
    return zlib.decompress(base64.b64decode(text))


def main(arguments: list[str]) -> int:
    """Read the packed request from the first argument and print the answer."""
    request: Request = json.loads(decode(arguments[0]))
    print(MARKER + json.dumps(answer_request(request)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
