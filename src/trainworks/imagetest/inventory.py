"""Lists the files of an image from inside: the owner and the rights of each, and what is not as it was delivered.

Like the probe, this file is sent into a container and run there by the image's ``/usr/bin/python3``: standard library
only, no syntax newer than Python 3.8, and no import of the rest of this package. It reads an ``InventoryRequest`` and
prints one line, ``MARKER`` followed by an ``InventoryAnswer`` as JSON.
"""

# ruff: noqa: PTH110, PTH112, PTH113, PTH114, PTH115, PTH118, PTH119, PTH120, PTH123, PTH207
# A hundred thousand files are asked about: plain strings and os.path, no object for each.

from __future__ import annotations

import base64
import csv
import glob
import hashlib
import importlib.util
import json
import marshal
import os
import re
import stat
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Optional, TypedDict

MARKER = "trainworks-inventory: "
RPM_TIMEOUT = 120.0


class InventoryRequest(TypedDict):
    """All questions of one run: the folder that is the image's root, and patterns of files whose owner is known.

    ``contents`` asks for all files: ``files`` (with their owners), ``digests`` (with what is in them too), or nothing.
    """

    root: str
    owned: list[str]
    contents: str
    delivered: Optional[DeliveredRequest]  # noqa: UP045 (read by Python 3.8)


class DeliveredRequest(TypedDict):
    """What decides how the files of the image should be: fields of ``trainworks.plan.checks.DeliveredFilesCheck``."""

    removed: list[str]
    digests: list[tuple[str, str, str]]
    copies: list[tuple[str, str]]
    closed: list[str]
    sourced: list[str]
    links: list[tuple[str, str]]
    privileged: list[tuple[str, str]]


class DamagedFile(TypedDict):
    """A file that is not as its maker delivered it.

    ``owner`` is ``package NAME``, ``python NAME``, ``recipe NAME`` or nothing; ``problem`` goes on after the path.
    """

    owner: str
    path: str
    problem: str


class PrivilegedFile(TypedDict):
    """A file that runs with other rights than its user's; ``package`` is the system package with it, or nothing."""

    path: str
    rights: str
    package: str


class InventoryContents(TypedDict):
    """Everything in an image.

    ``files`` are path, bytes on disk (a second hard link has none), mode, what is in it (``-> TARGET`` of a link, the
    SHA-256 of a file where digests were asked for) and its owner: ``package NAME``, ``python NAME`` or nothing.
    ``packages`` are those of dpkg, ``python`` the distributions of all environments: name and version, sorted.
    """

    files: list[tuple[str, int, int, str, str]]
    packages: list[tuple[str, str]]
    python: list[tuple[str, str]]
    manifest: str


class InventoryAnswer(TypedDict):
    """The answer of one run.

    ``files`` is how many files and links were looked at, ``packages`` how many system packages there are: none of
    either is an inventory that looked at nothing. ``open`` has the paths that everybody may write to, with their modes.
    ``damaged`` are the files that are not as they were delivered, sorted, where that was asked.
    """

    files: int
    packages: int
    unowned: list[str]
    open: list[tuple[str, int]]
    privileged: list[PrivilegedFile]
    error: str
    damaged: list[DamagedFile]
    contents: Optional[InventoryContents]  # noqa: UP045 (read by Python 3.8)


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
        self.others: dict[str, str] = {}
        self.names: set[str] = set()
        self.error = ""
        # Owner, path, algorithm, digest (hexadecimal, or base64url without padding as in RECORD), size or -1.
        self.sums: list[tuple[str, str, str, str, int]] = []
        self.problems: list[DamagedFile] = []
        # Link in /etc/alternatives, the link to it, and what the first may lead to.
        self.alternatives: list[tuple[str, str, list[str]]] = []
        self.diverted: dict[tuple[str, str], str] = {}
        self.set_aside: set[str] = set()
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
                self.diverted[self.real(place), diverted] = self.real(instead)
            elif diverted:
                self.packages[self.real(instead)] = by
                self.set_aside.add(self.real(instead))
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

    def read_sums(self) -> None:
        """Take dpkg's sums of the files of every package, and those of their configuration; RPM's are not read."""
        for path in sorted(glob.glob(glob.escape(self.root) + "/var/lib/dpkg/info/*.list")):
            sums = path[: -len("list")] + "md5sums"
            name = os.path.basename(path)[: -len(".list")].partition(":")[0]
            if not os.path.exists(sums):
                problem = "is missing: nothing says what the package's files are"
                self.problems.append(damaged("package " + name, sums[len(self.root) :], problem))
            for line in _lines(sums):
                digest, _, file = line.partition("  ")
                self._add_sum("/" + file, digest, name)
        installed = {fields.get("Package", ""): fields for fields in debian_packages(self.root)}
        for name, fields in installed.items():
            for line in fields.get("Conffiles", "").splitlines():
                words = line.split(" ")
                # With a third word, the package no longer has the file.
                if len(words) == 2 and words[0].startswith("/"):
                    self._add_sum(words[0], words[1], name)
        if installed:
            status = "/var/lib/dpkg/status"
            missing = sorted(self.names - installed.keys())
            self.problems += [damaged("package " + name, status, f"has no row of {name}") for name in missing]
            self._check_links(installed)

    def _check_links(self, installed: dict[str, dict[str, str]]) -> None:
        """Find links of packages that lead to other software, and files in the place of links: neither has a sum.

        A link leads to a file of its own source package, or of that of a package which its package needs or recommends,
        itself or by way of others; or to one in /etc.
        """
        summed = {path for _, path, *_ in self.sums}
        lists = {owner[len("package ") :] for owner, *_ in self.sums}
        source = {name: (fields.get("Source") or name).split(" ")[0] for name, fields in installed.items()}
        for path, name in self.packages.items():
            place = self.root + path
            if path.startswith(DOCUMENTATION) or path in summed or name not in installed:
                continue
            if not os.path.islink(place):
                if os.path.isfile(place) and path not in self.set_aside and name in lists:
                    self.problems.append(damaged("package " + name, path, "has no sum in its package: it was a link"))
                continue
            target = os.readlink(place)
            real = os.path.realpath(place)[len(self.root) :]
            other = self.packages.get(real, "")
            if not other or source.get(other) == source[name] or os.path.isdir(place) or real.startswith("/etc/"):
                continue
            if not target.startswith("/etc/alternatives/") and source.get(other, other) not in {
                source[each] for each in needed_by(name, installed)
            }:
                problem = f"is a link to {target}, which is of the package {other}"
                self.problems.append(damaged("package " + name, path, problem))

    def _add_sum(self, path: str, digest: str, name: str) -> None:
        path = self.real(path)
        path = self.diverted.get((path, name), path)
        # A file that another package took over stays in the sums of the first.
        if self.packages.get(path) == name and not path.startswith(DOCUMENTATION):
            self.sums.append(("package " + name, path, "md5", digest, -1))

    def _add_alternatives(self, name: str, lines: list[str]) -> None:
        """Take the links of one group: its name is the file's, its link the second line, then pairs of name, link."""
        # Behind an empty line, each choice has its path, its priority and one line for each further link.
        end = lines.index("") if "" in lines else len(lines)
        choices = lines[end + 1 :: 2 + (end - 2) // 2]
        self.alternatives += [
            ("/etc/alternatives/" + name, link, [each for each in choices if each.startswith("/")])
            for link in lines[1:2]
        ]
        links = [*lines[1:2]]
        names = [name]
        for index in range(2, len(lines) - 1, 2):
            if not lines[index]:
                break
            names.append(lines[index])
            links.append(lines[index + 1])
        self.others.update((self.real(link), "") for link in links)
        self.others.update(("/etc/alternatives/" + one, "") for one in names)

    def add_distribution(self, record: str) -> None:
        """Take the files of one Python distribution; ``record`` is its list of files."""
        # The paths of an egg's list start at its own folder.
        egg = record.endswith(".txt")
        folder = os.path.dirname(record) if egg else os.path.dirname(os.path.dirname(record))
        name = distribution_of(os.path.dirname(record))[0]
        try:
            with open(self.root + record, encoding="utf-8", errors="surrogateescape", newline="") as file:
                for row in csv.reader(file):
                    if not row:
                        continue
                    path = self.real(os.path.normpath(os.path.join(folder, row[0])))
                    self.others[path] = name
                    algorithm, _, digest = row[1].partition("=") if len(row) > 1 else ("", "", "")
                    if not egg and not digest and not path.endswith((".pyc", "/RECORD")):
                        self.problems.append(damaged("python " + name, path, "has no sum in the list of its wheel"))
                    # The distributions of system packages are changed by their makers; those have sums of their own.
                    if digest and algorithm in hashlib.algorithms_guaranteed and record not in self.packages:
                        size = int(row[2]) if len(row) > 2 and row[2].isdigit() else -1
                        self.sums.append(("python " + name, path, algorithm, digest, size))
        except OSError:
            pass

    def owns(self, path: str) -> bool:
        """Say whether a package or a distribution brings the file, or Python made it from one that is there."""
        source = self.source(path)
        return source in self.packages or source in self.others

    def name(self, path: str) -> str:
        """Return the owner of a file as ``InventoryContents`` has it, or nothing."""
        path = self.source(path)
        if self.others.get(path):
            return "python " + self.others[path]
        return "package " + self.packages[path] if path in self.packages else ""

    def source(self, path: str) -> str:
        """Return the file itself, or the source that Python compiled it from where only that has an owner."""
        if path in self.packages or path in self.others:
            return path
        compiled = _COMPILED.fullmatch(path)
        return path if compiled is None else f"{compiled[1]}/{compiled[2]}.py"


def damaged(owner: str, path: str, problem: str) -> DamagedFile:
    """Return a file that is not as it was delivered."""
    return {"owner": owner, "path": path, "problem": problem}


def distribution_of(folder: str) -> tuple[str, str]:
    """Return the normalised name and the version of a Python distribution, from its folder of metadata."""
    name, _, version = os.path.basename(folder).rpartition(".")[0].partition("-")
    return re.sub(r"[-_.]+", "-", name).lower(), re.sub(r"-py\d.*", "", version)


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


def debian_packages(root: str) -> Iterator[dict[str, str]]:
    """Yield the fields of every Debian package that is installed."""
    fields: dict[str, str] = {}
    key = ""
    for line in [*_lines(root + "/var/lib/dpkg/status"), ""]:
        if line.startswith(" "):
            fields[key] += "\n" + line[1:]
            continue
        if line:
            key, _, value = line.partition(":")
            fields[key] = value.strip()
            continue
        if fields.get("Status", "").endswith(" installed"):
            yield fields
        fields = {}


# --- rights ----------------------------------------------------------------------------------------------------------


def needed_by(name: str, installed: dict[str, dict[str, str]]) -> set[str]:
    """Return the installed packages that a package needs or recommends, and those that they do; and itself."""
    found, left = {name}, [name]
    while left:
        fields = installed[left.pop()]
        lines = ",".join(fields.get(field, "") for field in ("Depends", "Pre-Depends", "Recommends"))
        near = {re.split(r"[ (:]", each.strip())[0] for each in re.split(r"[,|]", lines)} & installed.keys() - found
        found |= near
        left += near
    return found


def rights_of(path: str, status: os.stat_result) -> str:
    """Return the rights that a file gives to every user who runs it, or nothing."""
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


# --- as delivered ----------------------------------------------------------------------------------------------------

SHARED = frozenset({"/tmp", "/var/tmp"})  # noqa: S108 - the image's own folders are looked at
"""The folders in which every user makes files, and changes nobody else's."""

DOCUMENTATION = tuple(f"/usr/share/{name}/" for name in ("doc", "man", "info", "locale", "groff", "linda", "lintian"))
"""What images leave out of packages, by an option of dpkg."""

PT_INTERP = 3
_COMPILED = re.compile(r"(.*)/__pycache__/([^/]+?)\.[a-z]+-\d+(?:\.opt-\d)?\.pyc")


def damaged_files(
    request: DeliveredRequest,
    owners: Owners,
    files: list[tuple[str, os.stat_result]],
    folders: dict[str, tuple[int, int]],
) -> list[DamagedFile]:
    """Return what is not as its maker delivered it, by the sums that ``owners`` has read.

    Args:
        files: The files and links of the image.
        folders: Its folders, with their modes and users.
    """
    root = owners.root
    removed = pattern_of(request["removed"])
    found: dict[tuple[str, str], str] = {}

    def tell(owner: str, path: str, problem: str) -> None:
        if problem and not removed.fullmatch(path):
            found.setdefault((path, owner), problem)

    sums = [*owners.sums]
    sums += [
        ("recipe " + name if name else "", path, "sha256", digest, -1) for name, path, digest in request["digests"]
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        # hashlib lets other threads run while it reads a large block.
        judged = pool.map(lambda one: (one[0], one[1], problem_of(root, *one[1:])), sums)
        for owner, path, problem in judged:
            tell(owner, path, problem)
    for path, original in request["copies"]:
        if os.path.isfile(root + original):
            digest = _digest(root + original)
            problem = problem_of(root, path, "sha256", digest, -1)
            tell(owners.name(original), path, problem and f"{problem}; it was made as a copy of {original}")
    for path, package in owners.packages.items():
        left_out = path in owners.set_aside or path.startswith((*DOCUMENTATION, "/run/", "/var/"))
        if not left_out and not os.path.lexists(root + path):
            tell("package " + package, path, "is missing")
    for place, link, choices in owners.alternatives:
        for path in (place, link):
            if not path.startswith(DOCUMENTATION) and not os.path.exists(root + path):
                tell("", path, "is missing, or leads nowhere: update-alternatives(1) made it")
        for path, targets in ((place, choices), (link, [place])):
            if targets and os.path.islink(root + path) and os.readlink(root + path) not in targets:
                tell("", path, f"is a link to {os.readlink(root + path)}, and should be one to {' or '.join(targets)}")
    for path, target in request["links"]:
        # The recipe's own, also where it replaces a file of a package.
        there = os.readlink(root + path) if os.path.islink(root + path) else ""
        if not there or target not in ("", there):
            said = f"is a link to {there}" if there else "is not a link"
            found[path, ""] = f"{said}, and should be one{' to ' if target else ''}{target}"
    for package, path in request["privileged"]:
        if owners.packages.get(path) == package and os.path.isfile(root + path):
            rights = rights_of(root + path, os.lstat(root + path))
            tell("package " + package, path, "" if rights else "has no rights of its own, and should have")
    for path, problem in [*account_problems(root), *authentication_problems(root), *certificate_problems(root)]:
        tell("", path, problem)
    brought = {path for _, path, _ in request["digests"]}
    whole = [each[: -len("**")] for each in request["sourced"]]
    whole = [folder for folder in whole if any(path.startswith(folder) for path in brought)]
    for path, _ in files:
        if path.startswith(tuple(whole)) and owners.source(path) not in brought and path not in brought:
            tell("", path, "is none of the files that its folder was made of")
    sourced = pattern_of(request["sourced"])
    closed = pattern_of(request["closed"])
    programs = {entry for entry in os.environ.get("PATH", "").split(":") if entry}
    executable: dict[str, int] = {}
    scripts: dict[str, list[str]] = {}
    for path, status in files:
        if status.st_uid != 0 and not closed.fullmatch(path):
            tell(owners.name(path), path, f"belongs to user {status.st_uid}: that user may change what root runs")
        if stat.S_ISLNK(status.st_mode):
            continue
        if not stat.S_ISREG(status.st_mode):
            # Opening a pipe would wait for whoever writes into it.
            tell(owners.name(path), path, "is not a file, a folder or a link")
            continue
        match = _COMPILED.fullmatch(path)
        if match is not None:
            source = f"{match[1]}/{match[2]}.py"
            if os.path.isfile(root + source) or sourced.fullmatch(source):
                tell(owners.name(path), *_bytecode_problem(root, path, source))
        if closed.fullmatch(path):
            continue
        mode = stat.S_IMODE(status.st_mode)
        if not mode & stat.S_IROTH:
            tell(owners.name(path), path, f"has mode {mode:04o}: only some users can read it")
        if mode & 0o111 != 0o111 and (
            (os.path.dirname(path) in programs and _starts(root + path, b"#!", b"\x7fELF")) or _is_program(root + path)
        ):
            tell(owners.name(path), path, f"has mode {mode:04o}: it cannot be executed")
        if mode & 0o111:
            executable[os.path.dirname(path)] = executable.get(os.path.dirname(path), 0) + 1
        elif _starts(root + path, b"#!"):
            scripts.setdefault(os.path.dirname(path), []).append(path)
    for folder, inside in scripts.items():
        # A folder of programs outside of PATH, such as git's own.
        for path in inside if executable.get(folder, 0) > 3 + len(inside) else ():
            tell(owners.name(path), path, "cannot be executed, as the other programs of its folder can")
    for path, (mode, user) in folders.items():
        if user != 0 and not closed.fullmatch(path):
            tell("", path, f"belongs to user {user}: that user may change what root runs")
        if path in SHARED and mode != 0o1777:
            tell("", path, f"has mode {mode:04o}, and should have 1777: every user has temporary files there")
        if mode & 0o005 != 0o005 and not closed.fullmatch(path):
            tell("", path, f"has mode {mode:04o}: only some users can enter the folder")
    for each in owners.problems:
        tell(each["owner"], each["path"], each["problem"])
    return [damaged(owner, path, problem) for (path, owner), problem in sorted(found.items())]


def account_problems(root: str) -> Iterator[tuple[str, str]]:
    """Yield what lets somebody in: a password, a second root; and accounts of the distribution that are not there."""
    accounts = [line.split(":") for line in _lines(root + "/etc/passwd")]
    for row in accounts:
        if len(row) != 7 or (row[2] == "0") != (row[0] == "root") or row[1] != "x":
            yield "/etc/passwd", f"has an account that no distribution makes: {row[0]}"
    for row in (line.split(":") for line in _lines(root + "/etc/shadow")):
        if len(row) > 1 and not row[1].startswith(("*", "!")):
            yield "/etc/shadow", f"has a password of {row[0]}, or none that is asked for"
    for name in ("passwd", "group"):
        there = set(_lines(f"{root}/etc/{name}"))
        for line in _lines(f"{root}/usr/share/base-passwd/{name}.master"):
            wanted = line.replace(":*:", ":x:", 1)
            # update-passwd(8) leaves members and shells of groups alone.
            if not any(each.startswith(wanted) for each in there):
                yield f"/etc/{name}", f"lacks the row {wanted} of the distribution"


def authentication_problems(root: str) -> Iterator[tuple[str, str]]:
    """Yield files of PAM in which a module is missing that pam-auth-update(8) has put there."""
    for state in sorted(glob.glob(glob.escape(root) + "/var/lib/pam/*")):
        name = os.path.basename(state)
        path = "/etc/pam.d/common-" + name
        modules = {word for line in _lines(state) for word in line.split() if word.endswith(".so")}
        text = "\n".join(line for line in _lines(root + path) if not line.startswith("#"))
        for module in sorted(modules):
            if module not in text:
                yield path, f"does not ask {module}, as {state[len(root) :]} says"


def certificate_problems(root: str) -> Iterator[tuple[str, str]]:
    """Yield what update-ca-certificates(8) would make otherwise of the distribution's certificates."""
    bundle, parts = "/etc/ssl/certs/ca-certificates.crt", []
    for line in _lines(root + "/etc/ca-certificates.conf"):
        if not line or line[0] in "#!":
            continue
        original = "/usr/share/ca-certificates/" + line
        link = "/etc/ssl/certs/" + os.path.basename(line).rpartition(".")[0].replace(" ", "_") + ".pem"
        parts.append("\n".join(_lines(root + original)).strip())
        if not os.path.islink(root + link) or os.readlink(root + link) != original:
            yield link, f"is not a link to {original}"
    found = "\n".join(_lines(root + bundle)).strip()
    if parts and sorted(found.split("\n")) != sorted("\n".join(parts).split("\n")):
        yield bundle, "has other certificates than the distribution's"


def problem_of(root: str, path: str, algorithm: str, digest: str, size: int) -> str:
    """Return how a file differs from its sum, or nothing; ``size`` is -1 where it is not known."""
    try:
        status = os.lstat(root + path)
        if stat.S_ISLNK(status.st_mode):
            return f"is a link to {os.readlink(root + path)}, and no plain file"
        if not stat.S_ISREG(status.st_mode):
            return "is not a plain file"
        if size >= 0 and status.st_size != size:
            return f"has {status.st_size} bytes, and should have {size}"
        found = hashlib.new(algorithm)
        with open(root + path, "rb") as file:
            for chunk in iter(lambda: file.read(1 << 20), b""):
                found.update(chunk)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if digest in (found.hexdigest(), base64.urlsafe_b64encode(found.digest()).decode().rstrip("=")):
        return ""
    return "is empty" if status.st_size == 0 else "has other contents"


def _bytecode_problem(root: str, path: str, source: str) -> tuple[str, str]:
    """Return which of a file of bytecode and its source is damaged, and how; no problem is an empty one.

    Python takes bytecode of the kind that these images have without a look at its source.
    """
    try:
        with open(root + path, "rb") as file:
            data = file.read()
        with open(root + source, "rb") as file:
            text = file.read()
    except FileNotFoundError:
        return source, "is missing, and its bytecode is there"
    except OSError as error:
        return path, f"cannot be read: {error.strerror}"
    if len(data) < 16:
        return path, f"has {len(data)} bytes, which is no bytecode"
    (flags,) = struct.unpack_from("<I", data, 4)
    if data[:4] != importlib.util.MAGIC_NUMBER:
        return path, ""
    if flags & 1 and data[8:16] != importlib.util.source_hash(text):
        return source, "has other contents than its bytecode was made of"
    try:
        marshal.loads(data[16:])
    except (ValueError, EOFError, TypeError) as error:
        return path, f"is damaged bytecode: {error}"
    return path, ""


def _starts(path: str, *beginnings: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(5).startswith(beginnings)
    except OSError:
        return False


def _is_program(path: str) -> bool:
    """Say whether a file is an ELF program: it names the loader that starts it, and is not called a library."""
    if ".so" in os.path.basename(path) or not _starts(path, b"\x7fELF\x02"):
        return False
    with open(path, "rb") as file:
        head = file.read(4096)
    try:
        (table,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        return any(struct.unpack_from("<I", head, table + size * index)[0] == PT_INTERP for index in range(count))
    except struct.error:
        return False


# --- contents --------------------------------------------------------------------------------------------------------


def contents_of(
    root: str, files: list[tuple[str, os.stat_result]], owners: Owners, *, digests: bool
) -> InventoryContents:
    """Return everything in an image; ``files`` are its files and links, in any order."""
    seen: set[tuple[int, int]] = set()
    found: list[tuple[str, int, int, str, str]] = []
    python: set[tuple[str, str]] = set()
    for path, status in sorted(files, key=lambda pair: pair[0]):
        if _METADATA.fullmatch(path):
            python.add(distribution_of(os.path.dirname(path)))
        inode = (status.st_dev, status.st_ino)
        size = 0 if inode in seen or not stat.S_ISREG(status.st_mode) else status.st_size
        seen.add(inode)
        what = ""
        if stat.S_ISLNK(status.st_mode):
            what = "-> " + os.readlink(root + path)
        elif digests and stat.S_ISREG(status.st_mode):
            what = _digest(root + path)
        found.append((path, size, stat.S_IMODE(status.st_mode), what, owners.name(path)))
    return {
        "files": found,
        "packages": sorted((row.get("Package", ""), row.get("Version", "")) for row in debian_packages(root)),
        "python": sorted(python),
        "manifest": "\n".join(_lines(root + "/opt/trainworks/image.json")),
    }


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(1 << 20), b""):
                digest.update(chunk)
    except OSError as error:
        # The file cannot be read, so only this fact is compared.
        return str(error.strerror)
    return digest.hexdigest()


_METADATA = re.compile(r".*/(?:site|dist)-packages/[^/]+\.(?:dist-info/METADATA|egg-info/PKG-INFO)")

_RECORD = re.compile(
    r".*/(?:site|dist)-packages/[^/]+\.(?:dist-info/RECORD|egg-info/installed-files\.txt)",
)


def answer_request(request: InventoryRequest) -> InventoryAnswer:
    """Answer everything in one walk over the file system, and a second one over files that no package brings."""
    root = request["root"].rstrip("/")
    owners = Owners(root)
    answer: InventoryAnswer = {
        "files": 0,
        "packages": len(owners.names),
        "unowned": [],
        "open": [],
        "privileged": [],
        "error": owners.error,
        "damaged": [],
        "contents": None,
    }
    folders: dict[str, tuple[int, int]] = {}
    rest: list[tuple[str, os.stat_result]] = []
    for path, status in walk(root):
        kind = status.st_mode
        if not stat.S_ISLNK(kind) and kind & stat.S_IWOTH:
            answer["open"].append((path, stat.S_IMODE(kind)))
        if stat.S_ISDIR(kind):
            folders[path] = (stat.S_IMODE(kind), status.st_uid)
            continue
        answer["files"] += 1
        if stat.S_ISREG(kind):
            rights = rights_of(root + path, status)
            if rights:
                package = owners.packages.get(path, "")
                answer["privileged"].append({"path": path, "rights": rights, "package": package})
            if _RECORD.fullmatch(path):
                owners.add_distribution(path)
        rest.append((path, status))
    declared = pattern_of(request["owned"])
    answer["unowned"] = [path for path, _ in rest if not owners.owns(path) and not declared.fullmatch(path)]
    if request["delivered"] is not None:
        owners.read_sums()
        answer["damaged"] = damaged_files(request["delivered"], owners, rest, folders)
    if request["contents"]:
        answer["contents"] = contents_of(root, rest, owners, digests=request["contents"] == "digests")
    return answer


if __name__ == "__main__":
    print(MARKER + json.dumps(answer_request(json.loads(sys.argv[1]))))
