"""The files of an image: whose each is, what rights it gives, and what is in it.

Part of the program that runs inside (``trainworks.imagetest.inside``).
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import os
import re
import stat
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any, TypedDict

from trainworks.imagetest.inside.packages import debian_fields, lines_of, rpm

IMPORT_TIMEOUT = 120.0
"""Seconds that a program which a check starts may take."""

LINE_LIMIT = 20


DOCUMENTATION = tuple(
    f"/usr/share/{name}/" for name in ("doc", "man", "info", "locale", "groff", "linda", "lintian")
)
"""What images leave out of packages, by an option of dpkg."""

COMPILED = re.compile(r"(.*)/__pycache__/([^/]+?)\.[a-z]+-\d+(?:\.opt-\d)?\.pyc")
"""A file of bytecode: the folder and the name of its source."""

_METADATA = re.compile(r".*/(?:site|dist)-packages/[^/]+\.(?:dist-info/METADATA|egg-info/PKG-INFO)")
_RECORD = re.compile(
    r".*/(?:site|dist)-packages/[^/]+\.(?:dist-info/RECORD|egg-info/installed-files\.txt)"
)


class DamagedFile(TypedDict):
    """A file that is not as its maker delivered it.

    ``owner`` is ``package NAME``, ``python NAME``, ``recipe NAME`` or nothing;
    ``problem`` goes on after the path.
    """

    owner: str
    path: str
    problem: str


class PrivilegedFile(TypedDict):
    """A file that runs with other rights than its user's.

    ``package`` is the system package with it, or nothing.
    """

    path: str
    rights: str
    package: str


class InstalledFiles(TypedDict):
    """What was found in one walk.

    ``files`` is how many files and links were looked at, ``packages`` how many system packages
    there are: none of either is an inventory that looked at nothing. ``open`` has the paths that
    everybody may write to, with their modes. ``damaged`` are the files that are not as they were
    delivered, sorted, where that was asked.
    """

    files: int
    packages: int
    unowned: list[str]
    open: list[tuple[str, int]]
    privileged: list[PrivilegedFile]
    error: str
    damaged: list[DamagedFile]


class ImageContents(TypedDict):
    """Everything in an image.

    ``files`` are path, bytes on disk (a second hard link has none), mode, what is in it (``->
    TARGET`` of a link, the SHA-256 of a file where digests were asked for) and its owner: ``package
    NAME``, ``python NAME`` or nothing. ``packages`` are those of dpkg, ``python`` the distributions
    of all environments: name and version, sorted.
    """

    files: list[tuple[str, int, int, str, str]]
    packages: list[tuple[str, str]]
    python: list[tuple[str, str]]
    manifest: str


class ProbedDistribution(TypedDict):
    """A Python distribution that the environment finds, under its normalised name."""

    name: str
    version: str
    folder: str


def told(problems: list[str], advice: str) -> list[str]:
    """Return problems with what to do about them; of many the first ones."""
    more = [f"... and {len(problems) - LINE_LIMIT} more"] if len(problems) > LINE_LIMIT else []
    return [*problems[:LINE_LIMIT], *more, advice] if problems else []


def run(command: list[str], seconds: float = IMPORT_TIMEOUT) -> tuple[str, str]:
    """Run a child.

    Return what it printed to stdout, and why it failed: what it printed to stderr, or its status.
    """
    try:
        child = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    output, said = (text.decode("utf-8", "replace") for text in (child.stdout, child.stderr))
    if child.returncode == 0:
        return output, ""
    return output, said.strip()[-2000:] or f"ended with status {child.returncode}"


def ask(
    python: str, program: str, *arguments: str, seconds: float = IMPORT_TIMEOUT
) -> tuple[Any, str]:
    """Run a program that prints JSON between two marks, its first argument.

    Return that, and why there is none.
    """
    mark = os.urandom(16).hex()
    output, error = run([python, "-c", program, mark, *arguments], seconds)
    if error:
        return None, error
    parts = output.split(mark)
    if len(parts) != 3:
        return None, "it ended without an answer"
    try:
        return json.loads(parts[1]), ""
    except ValueError:
        return None, "its answer is malformed"


def matching(root: str, pattern: str) -> list[str]:
    """Return the paths that fit a pattern, dangling links too."""
    found = glob.glob(glob.escape(root) + pattern, recursive=True)
    # Some versions of glob answer FOLDER/ to FOLDER/** without looking whether
    # there is such a folder.
    return sorted(path[len(root) :] for path in found if os.path.lexists(path))


class Image:
    """What checks look at; each part is read once, when it is asked for."""

    def __init__(self, root: str, python: str) -> None:
        """Read nothing yet; ``root`` is ``/`` in an image (tests ask about a folder)."""
        self.root = root.rstrip("/")
        self.python = python
        self._distributions: tuple[list[ProbedDistribution], str] | None = None
        self._files: list[tuple[str, os.stat_result]] | None = None

    def files(self) -> list[tuple[str, os.stat_result]]:
        """Return every path of the image with its status, folders and links too."""
        if self._files is None:
            self._files = [*walk(self.root)]
        return self._files

    def libraries(self) -> list[str]:
        """Return every path whose name is that of a library, links too."""
        return [path for path, _ in self.files() if ".so" in path.rsplit("/", 1)[-1]]

    def plain_libraries(self) -> list[tuple[str, os.stat_result]]:
        """Return every plain file whose name is that of a library."""
        return [
            each
            for each in self.files()
            if ".so" in each[0].rsplit("/", 1)[-1] and stat.S_ISREG(each[1].st_mode)
        ]

    def debian_packages(self) -> Iterator[dict[str, str]]:
        """Yield the fields of every Debian package that is installed."""
        return debian_fields(self.root)

    def distributions(self) -> tuple[list[ProbedDistribution], str]:
        """Return the distributions of the environment's Python, ``PYTHONPATH``
        too, or why it does not list them.
        """
        if self._distributions is None:
            listed, error = ask(self.python, _DISTRIBUTIONS)
            found: list[ProbedDistribution] = listed or []
            self._distributions = (
                found,
                f"{self.python} does not list its distributions: {error}" if error else "",
            )
        return self._distributions


# Runs under the environment's own Python: sent as text.
_DISTRIBUTIONS = """
import importlib.metadata, json, os, re, sys
# The folder of -c is the current one, which is not part of the environment.
sys.path = [entry for entry in sys.path if entry]
found = []
for one in importlib.metadata.distributions():
    name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
    found.append({"name": name, "version": one.version, "folder": str(one.locate_file(""))})
print("\\n" + sys.argv[1] + json.dumps(found) + sys.argv[1])
"""


def walk(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every path of the image, folders too.

    Links are not followed, kernel file systems left out.
    """
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


# --- owners ---------------------------------------------------------------------------------------


class Owners:
    """Which package, Python distribution or pattern a path belongs to."""

    def __init__(self, image: Image) -> None:
        """Read the databases of the package manager, and the list of files of
        each Python distribution.
        """
        self.root = root = image.root
        self.packages: dict[str, str] = {}
        self.others: dict[str, str] = {}
        self.names: set[str] = set()
        self.error = ""
        # Owner, path, algorithm, digest (hexadecimal, or base64url without
        # padding as in RECORD), size or -1.
        self.sums: list[tuple[str, str, str, str, int]] = []
        self.problems: list[DamagedFile] = []
        # Link in /etc/alternatives, the link to it, and what the first may lead to.
        self.alternatives: list[tuple[str, str, list[str]]] = []
        self.diverted: dict[tuple[str, str], str] = {}
        self.set_aside: set[str] = set()
        self._real_folders: dict[str, str] = {}
        # Folders in which packages have something, as their lists write them.
        self._folders: dict[str, str] = {}
        if os.path.isdir(root + "/var/lib/dpkg/info"):
            self._read_dpkg()
        elif os.path.exists(root + "/usr/bin/rpm"):
            self._read_rpm()
        for path, status in image.files():
            if stat.S_ISREG(status.st_mode) and _RECORD.fullmatch(path):
                self._add_distribution(path)

    def real(self, path: str) -> str:
        """Return the path with links of its folder resolved: a package's
        ``/bin/ls`` is ``/usr/bin/ls``.
        """
        folder, name = os.path.split(path)
        if folder not in self._real_folders:
            self._real_folders[folder] = os.path.realpath(self.root + folder)[
                len(self.root) :
            ].rstrip("/")
        return self._real_folders[folder] + "/" + name

    def _read_dpkg(self) -> None:
        for path in glob.glob(glob.escape(self.root) + "/var/lib/dpkg/info/*.list"):
            name = os.path.basename(path)[: -len(".list")].partition(":")[0]
            self.names.add(name)
            for line in lines_of(path):
                self.packages[self.real(line)] = name
                self._folders.setdefault(os.path.dirname(line), name)
        diversions = lines_of(self.root + "/var/lib/dpkg/diversions")
        for index in range(0, len(diversions) - 2, 3):
            place, instead, by = diversions[index : index + 3]
            # What any other package brings as `place` lies at `instead`; only
            # the one that diverts may bring `place`.
            diverted = self.packages.get(self.real(place), "")
            if diverted and diverted != by:
                del self.packages[self.real(place)]
                self.packages[self.real(instead)] = diverted
                self.diverted[self.real(place), diverted] = self.real(instead)
            elif diverted:
                self.packages[self.real(instead)] = by
                self.set_aside.add(self.real(instead))
        for path in glob.glob(glob.escape(self.root) + "/var/lib/dpkg/alternatives/*"):
            self._add_alternatives(os.path.basename(path), lines_of(path))

    def _read_rpm(self) -> None:
        listing, self.error = rpm(self.root, r"[%{=NAME}\t%{FILENAMES}\n]", "surrogateescape")
        self.add_rpm_listing(listing)
        for path in glob.glob(glob.escape(self.root) + "/var/lib/alternatives/*"):
            self._add_alternatives(os.path.basename(path), lines_of(path))

    def add_rpm_listing(self, text: str) -> None:
        """Take the lines ``PACKAGE TAB PATH`` that rpm prints."""
        for line in text.splitlines():
            name, tab, path = line.partition("\t")
            if tab and path.startswith("/"):
                self.names.add(name)
                self.packages[self.real(path)] = name

    def read_sums(self) -> None:
        """Take dpkg's sums of the files of every package, and those of their configuration.

        RPM's are not read.
        """
        for path in sorted(glob.glob(glob.escape(self.root) + "/var/lib/dpkg/info/*.list")):
            sums = path[: -len("list")] + "md5sums"
            name = os.path.basename(path)[: -len(".list")].partition(":")[0]
            if not os.path.exists(sums):
                problem = "is missing: nothing says what the package's files are"
                self.problems.append(damaged("package " + name, sums[len(self.root) :], problem))
            for line in lines_of(sums):
                digest, _, file = line.partition("  ")
                self._add_sum("/" + file, digest, name)
        installed = {fields.get("Package", ""): fields for fields in debian_fields(self.root)}
        for name, fields in installed.items():
            for line in fields.get("Conffiles", "").splitlines():
                words = line.split(" ")
                # With a third word, the package no longer has the file.
                if len(words) == 2 and words[0].startswith("/"):
                    self._add_sum(words[0], words[1], name)
        if installed:
            status = "/var/lib/dpkg/status"
            missing = sorted(self.names - installed.keys())
            self.problems += [
                damaged("package " + name, status, f"has no row of {name}") for name in missing
            ]
            self._check_links(installed)
            self._check_folders()

    def _check_folders(self) -> None:
        """Find folders of packages that were moved away behind a link, but for
        those that are links into /usr.
        """
        for folder, name in sorted(self._folders.items()):
            place = self.root + folder
            if os.path.islink(place) and os.readlink(place) not in (
                "usr" + folder,
                "/usr" + folder,
            ):
                problem = f"is a link to {os.readlink(place)}, and was a folder"
                self.problems.append(damaged("package " + name, folder, problem))

    def _check_links(self, installed: dict[str, dict[str, str]]) -> None:
        """Find links of packages that lead to other software, and files in the
        place of links: neither has a sum.

        A link leads to a file of its own source package, or of that of a package which its package
        needs or recommends, itself or by way of others; or to one in /etc.
        """
        summed = {path for _, path, *_ in self.sums}
        lists = {owner[len("package ") :] for owner, *_ in self.sums}
        source = {
            name: (fields.get("Source") or name).split(" ")[0] for name, fields in installed.items()
        }
        for path, name in self.packages.items():
            place = self.root + path
            if path.startswith(DOCUMENTATION) or path in summed or name not in installed:
                continue
            if not os.path.islink(place):
                if os.path.isfile(place) and path not in self.set_aside and name in lists:
                    self.problems.append(
                        damaged("package " + name, path, "has no sum in its package: it was a link")
                    )
                continue
            target = os.readlink(place)
            real = os.path.realpath(place)[len(self.root) :]
            other = self.packages.get(real, "")
            if (
                not other
                or source.get(other) == source[name]
                or os.path.isdir(place)
                or real.startswith("/etc/")
            ):
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
        """Take the links of one group: its name is the file's, its link the
        second line, then pairs of name, link.
        """
        # Behind an empty line, each choice has its path, its priority and one
        # line for each further link.
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

    def _add_distribution(self, record: str) -> None:
        """Take the files of one Python distribution; ``record`` is its list of files."""
        # The paths of an egg's list start at its own folder.
        egg = record.endswith(".txt")
        folder = os.path.dirname(record) if egg else os.path.dirname(os.path.dirname(record))
        name = distribution_of(os.path.dirname(record))[0]
        try:
            with open(
                self.root + record, encoding="utf-8", errors="surrogateescape", newline=""
            ) as file:
                for row in csv.reader(file):
                    if not row:
                        continue
                    path = self.real(os.path.normpath(os.path.join(folder, row[0])))
                    self.others[path] = name
                    algorithm, _, digest = row[1].partition("=") if len(row) > 1 else ("", "", "")
                    if not egg and not digest and not path.endswith((".pyc", "/RECORD")):
                        self.problems.append(
                            damaged("python " + name, path, "has no sum in the list of its wheel")
                        )
                    # The distributions of system packages are changed by their
                    # makers; those have sums of their own.
                    if (
                        digest
                        and algorithm in hashlib.algorithms_guaranteed
                        and record not in self.packages
                    ):
                        size = int(row[2]) if len(row) > 2 and row[2].isdigit() else -1
                        self.sums.append(("python " + name, path, algorithm, digest, size))
        except OSError:
            pass

    def owns(self, path: str) -> bool:
        """Say whether a package or a distribution brings the file, or Python
        made it from one that is there.
        """
        source = self.source(path)
        return source in self.packages or source in self.others

    def name(self, path: str) -> str:
        """Return the owner of a file as ``InventoryContents`` has it, or nothing."""
        path = self.source(path)
        if self.others.get(path):
            return "python " + self.others[path]
        return "package " + self.packages[path] if path in self.packages else ""

    def source(self, path: str) -> str:
        """Return the file itself, or the source that Python compiled it from
        where only that has an owner.
        """
        if path in self.packages or path in self.others:
            return path
        compiled = COMPILED.fullmatch(path)
        return path if compiled is None else f"{compiled[1]}/{compiled[2]}.py"


def damaged(owner: str, path: str, problem: str) -> DamagedFile:
    """Return a file that is not as it was delivered."""
    return {"owner": owner, "path": path, "problem": problem}


def distribution_of(folder: str) -> tuple[str, str]:
    """Return the normalised name and the version of a Python distribution, from
    its folder of metadata.
    """
    name, _, version = os.path.basename(folder).rpartition(".")[0].partition("-")
    return re.sub(r"[-_.]+", "-", name).lower(), re.sub(r"-py\d.*", "", version)


def pattern_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return one expression for patterns in which ``*`` stays in a folder and ``**`` does not."""
    translated = []
    for pattern in patterns:
        parts = re.split(r"(\*\*|\*|\?)", pattern)
        words = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
        translated.append(
            "".join(words[part] if part in words else re.escape(part) for part in parts)
        )
    return re.compile("|".join(translated) if translated else "(?!)")


# --- rights ---------------------------------------------------------------------------------------


def needed_by(name: str, installed: dict[str, dict[str, str]]) -> set[str]:
    """Return the installed packages that a package needs or recommends, and those that they do.

    And itself.
    """
    found, left = {name}, [name]
    while left:
        fields = installed[left.pop()]
        lines = ",".join(
            fields.get(field, "") for field in ("Depends", "Pre-Depends", "Recommends")
        )
        near = {
            re.split(r"[ (:]", each.strip())[0] for each in re.split(r"[,|]", lines)
        } & installed.keys() - found
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


# --- contents -------------------------------------------------------------------------------------


def contents_of(image: Image, owners: Owners, *, digests: bool) -> ImageContents:
    """Return everything in an image."""
    seen: set[tuple[int, int]] = set()
    found: list[tuple[str, int, int, str, str]] = []
    python: set[tuple[str, str]] = set()
    for path, status in sorted(image.files(), key=lambda pair: pair[0]):
        if stat.S_ISDIR(status.st_mode):
            continue
        if _METADATA.fullmatch(path):
            python.add(distribution_of(os.path.dirname(path)))
        inode = (status.st_dev, status.st_ino)
        size = 0 if inode in seen or not stat.S_ISREG(status.st_mode) else status.st_size
        seen.add(inode)
        what = ""
        if stat.S_ISLNK(status.st_mode):
            what = "-> " + os.readlink(image.root + path)
        elif digests and stat.S_ISREG(status.st_mode):
            what = digest_of(image.root + path)
        found.append((path, size, stat.S_IMODE(status.st_mode), what, owners.name(path)))
    return {
        "files": found,
        "packages": sorted(
            (row.get("Package", ""), row.get("Version", "")) for row in image.debian_packages()
        ),
        "python": sorted(python),
        "manifest": "\n".join(lines_of(image.root + "/opt/trainworks/image.json")),
    }


def digest_of(path: str) -> str:
    """Return the SHA-256 of a file; of one that cannot be read, why: then this fact is compared."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(1 << 20), b""):
                digest.update(chunk)
    except OSError as error:
        return str(error.strerror)
    return digest.hexdigest()
