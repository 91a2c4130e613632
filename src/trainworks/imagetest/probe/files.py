"""The files of an image: their owners, rights and contents.

Part of the program that runs inside (``trainworks.imagetest.probe``).
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

from trainworks.imagetest.probe.packages import debian_fields, lines_of, rpm

IMPORT_TIMEOUT = 120.0
"""Seconds that a program of a check may take."""

LINE_LIMIT = 20


DOCUMENTATION = tuple(
    f"/usr/share/{name}/" for name in ("doc", "man", "info", "locale", "groff", "linda", "lintian")
)
"""Folders that images leave out of packages, by an option of dpkg."""

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
    """The result of one walk.

    ``files`` is the number of files and links, ``packages`` that of system packages: none of either
    is an inventory of nothing. ``open`` has the paths that every user may write to, with their
    modes. ``damaged`` are the files that are not as delivered, sorted, if the request has them.
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

    ``files`` are path, bytes on disk (a second hard link has none), mode, content (``-> TARGET`` of
    a link, the SHA-256 of a file if the request wants digests) and its owner: ``package NAME``,
    ``python NAME`` or nothing. ``packages`` are those of dpkg, ``python`` the distributions
    of all environments: name and version, sorted.
    """

    files: list[tuple[str, int, int, str, str]]
    packages: list[tuple[str, str]]
    python: list[tuple[str, str]]
    manifest: str


class ProbedDistribution(TypedDict):
    """A Python distribution of the environment, under its normalised name."""

    name: str
    version: str
    folder: str


def told(problems: list[str], advice: str) -> list[str]:
    """Return the first problems, and how to mend them; nothing for no problems."""
    if not problems:
        return []
    lines = problems[:LINE_LIMIT]
    if len(problems) > LINE_LIMIT:
        lines.append(f"... and {len(problems) - LINE_LIMIT} more")
    return [*lines, advice]


def run(command: list[str], seconds: float = IMPORT_TIMEOUT) -> tuple[str, str]:
    """Run a child; return its stdout, and the reason of its failure: its stderr, or its status."""
    try:
        child = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    output = child.stdout.decode("utf-8", "replace")
    if child.returncode == 0:
        return output, ""
    error_output = child.stderr.decode("utf-8", "replace").strip()
    return output, error_output[-2000:] or f"ended with status {child.returncode}"


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
    paths = glob.glob(glob.escape(root) + pattern, recursive=True)
    # Some versions of glob answer FOLDER/ to FOLDER/** also where there is no such folder.
    return sorted(path[len(root) :] for path in paths if os.path.lexists(path))


class Image:
    """The image that checks read; each part is read once, when it is needed."""

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
        """Return every path with a library's name, links too."""
        return [path for path, _ in self.files() if _is_library_name(path)]

    def plain_libraries(self) -> list[tuple[str, os.stat_result]]:
        """Return every plain file with a library's name, and its status."""
        return [
            (path, status)
            for path, status in self.files()
            if _is_library_name(path) and stat.S_ISREG(status.st_mode)
        ]

    def debian_packages(self) -> Iterator[dict[str, str]]:
        """Yield the fields of every Debian package that is installed."""
        return debian_fields(self.root)

    def distributions(self) -> tuple[list[ProbedDistribution], str]:
        """Return the distributions of the environment's Python, those of ``PYTHONPATH`` too.

        And the reason why it does not list them, or ``""``.
        """
        if self._distributions is None:
            listed, error = ask(self.python, _DISTRIBUTIONS)
            if error:
                error = f"{self.python} does not list its distributions: {error}"
            self._distributions = (listed or [], error)
        return self._distributions


def _is_library_name(path: str) -> bool:
    return ".so" in path.rsplit("/", 1)[-1]


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
    """The package or Python distribution that each path belongs to."""

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
        """Return the path with links of its folder resolved.

        A package's ``/bin/ls`` is ``/usr/bin/ls``.
        """
        folder, name = os.path.split(path)
        if folder not in self._real_folders:
            resolved = os.path.realpath(self.root + folder)
            self._real_folders[folder] = resolved[len(self.root) :].rstrip("/")
        return self._real_folders[folder] + "/" + name

    def _read_dpkg(self) -> None:
        """Read the package of each path from dpkg's lists, diversions and alternatives."""
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
        """Report folders of packages that were moved behind a link, except links into /usr."""
        for folder, name in sorted(self._folders.items()):
            place = self.root + folder
            if not os.path.islink(place):
                continue
            target = os.readlink(place)
            if target not in ("usr" + folder, "/usr" + folder):
                problem = f"is a link to {target}, and was a folder"
                self.problems.append(damaged("package " + name, folder, problem))

    def _check_links(self, installed: dict[str, dict[str, str]]) -> None:
        """Report links of packages that lead to other software, and files in the place of links.

        Neither has a sum. A link may lead to a file of its own source package, to one of a package
        that its package needs or recommends, also indirectly, or to one in /etc.
        """
        summed_paths = {path for _, path, *_ in self.sums}
        packages_with_sums = {owner[len("package ") :] for owner, *_ in self.sums}
        sources = {}
        for name, fields in installed.items():
            sources[name] = (fields.get("Source") or name).split(" ")[0]
        for path, name in self.packages.items():
            if path.startswith(DOCUMENTATION) or path in summed_paths or name not in installed:
                continue
            if os.path.islink(self.root + path):
                problem = self._link_problem(path, name, sources, installed)
                if problem:
                    self.problems.append(damaged("package " + name, path, problem))
                continue
            has_sums = name in packages_with_sums and path not in self.set_aside
            if has_sums and os.path.isfile(self.root + path):
                problem = "has no sum in its package: it was a link"
                self.problems.append(damaged("package " + name, path, problem))

    def _link_problem(
        self,
        path: str,
        name: str,
        sources: dict[str, str],
        installed: dict[str, dict[str, str]],
    ) -> str:
        """Return the problem of a package's link that leads to other software, or ``""``.

        Args:
            path: The link.
            name: Its package.
            sources: The source package of each package.
            installed: The fields of each package.
        """
        place = self.root + path
        target = os.readlink(place)
        real = os.path.realpath(place)[len(self.root) :]
        other = self.packages.get(real, "")
        if not other or os.path.isdir(place) or real.startswith("/etc/"):
            return ""
        if target.startswith("/etc/alternatives/") or sources.get(other) == sources[name]:
            return ""
        needed_sources = {sources[needed] for needed in needed_by(name, installed)}
        if sources.get(other, other) in needed_sources:
            return ""
        return f"is a link to {target}, which is of the package {other}"

    def _add_sum(self, path: str, digest: str, name: str) -> None:
        """Add the MD5 sum of a package's file, at the place where the image has the file."""
        path = self.real(path)
        path = self.diverted.get((path, name), path)
        # A file that another package took over stays in the sums of the first.
        if self.packages.get(path) == name and not path.startswith(DOCUMENTATION):
            self.sums.append(("package " + name, path, "md5", digest, -1))

    def _add_alternatives(self, name: str, lines: list[str]) -> None:
        """Take the links of one group of update-alternatives(1).

        Its file has the group's name. The second line is its link, then follow pairs of a name and
        a link, up to an empty line. Behind the empty line, each choice has its path, its priority
        and one line for each further link.
        """
        end = lines.index("") if "" in lines else len(lines)
        choices = lines[end + 1 :: 2 + (end - 2) // 2]
        targets = [choice for choice in choices if choice.startswith("/")]
        links = lines[1:2]
        names = [name]
        for link in links:
            self.alternatives.append(("/etc/alternatives/" + name, link, targets))
        for index in range(2, len(lines) - 1, 2):
            if not lines[index]:
                break
            names.append(lines[index])
            links.append(lines[index + 1])
        for link in links:
            self.others[self.real(link)] = ""
        for link_name in names:
            self.others["/etc/alternatives/" + link_name] = ""

    def _add_distribution(self, record: str) -> None:
        """Take the files of one Python distribution; ``record`` is its list of files."""
        metadata_folder = os.path.dirname(record)
        # The paths of an egg's list start at its own folder.
        is_egg = record.endswith(".txt")
        folder = metadata_folder if is_egg else os.path.dirname(metadata_folder)
        name = distribution_of(metadata_folder)[0]
        try:
            with open(
                self.root + record, encoding="utf-8", errors="surrogateescape", newline=""
            ) as file:
                for row in csv.reader(file):
                    if row:
                        path = self.real(os.path.normpath(os.path.join(folder, row[0])))
                        self.others[path] = name
                        self._add_record_row(row, path, name, record)
        except OSError:
            pass

    def _add_record_row(self, row: list[str], path: str, name: str, record: str) -> None:
        """Take the sum in a row of ``RECORD``: path, ``ALGORITHM=DIGEST``, size.

        Args:
            row: The row.
            path: The path in the image.
            name: The distribution.
            record: The list of files.
        """
        algorithm, _, digest = row[1].partition("=") if len(row) > 1 else ("", "", "")
        is_egg = record.endswith(".txt")
        if not is_egg and not digest and not path.endswith((".pyc", "/RECORD")):
            problem = "has no sum in the list of its wheel"
            self.problems.append(damaged("python " + name, path, problem))
        # Makers of system packages change distributions; those packages have sums of their own.
        is_of_package = record in self.packages
        if digest and algorithm in hashlib.algorithms_guaranteed and not is_of_package:
            has_size = len(row) > 2 and row[2].isdigit()
            size = int(row[2]) if has_size else -1
            self.sums.append(("python " + name, path, algorithm, digest, size))

    def owns(self, path: str) -> bool:
        """Whether a package or a distribution has the file, or the source of its bytecode."""
        source = self.source(path)
        return source in self.packages or source in self.others

    def name(self, path: str) -> str:
        """Return the owner of a file as ``ImageContents`` has it, or nothing."""
        path = self.source(path)
        if self.others.get(path):
            return "python " + self.others[path]
        if path in self.packages:
            return "package " + self.packages[path]
        return ""

    def source(self, path: str) -> str:
        """Return the path itself, or that of the source for bytecode without an owner."""
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
    wildcards = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    expressions = []
    for pattern in patterns:
        parts = re.split(r"(\*\*|\*|\?)", pattern)
        translated = [wildcards.get(part) or re.escape(part) for part in parts]
        expressions.append("".join(translated))
    return re.compile("|".join(expressions) if expressions else "(?!)")


# --- rights ---------------------------------------------------------------------------------------


def needed_by(name: str, installed: dict[str, dict[str, str]]) -> set[str]:
    """Return a package and all installed packages that it needs or recommends, also indirectly."""
    needed = {name}
    pending = [name]
    while pending:
        fields = installed[pending.pop()]
        lines = [fields.get(field, "") for field in ("Depends", "Pre-Depends", "Recommends")]
        for dependency in re.split(r"[,|]", ",".join(lines)):
            # Without its version and architecture: `libc6:amd64 (>= 2.34)`.
            package = re.split(r"[ (:]", dependency.strip())[0]
            if package in installed and package not in needed:
                needed.add(package)
                pending.append(package)
    return needed


def rights_of(path: str, status: os.stat_result) -> str:
    """Return the rights that a file gives to every user who runs it, or nothing."""
    rights = []
    if status.st_mode & stat.S_ISUID:
        rights.append("setuid")
    if status.st_mode & stat.S_ISGID:
        rights.append("setgid")
    try:
        os.getxattr(path, "security.capability", follow_symlinks=False)
        rights.append("capabilities")
    except OSError:
        pass
    return ", ".join(rights)


# --- contents -------------------------------------------------------------------------------------


def contents_of(image: Image, owners: Owners, *, digests: bool) -> ImageContents:
    """Return everything in an image."""
    seen_inodes: set[tuple[int, int]] = set()
    files: list[tuple[str, int, int, str, str]] = []
    python: set[tuple[str, str]] = set()
    for path, status in sorted(image.files(), key=lambda pair: pair[0]):
        if stat.S_ISDIR(status.st_mode):
            continue
        if _METADATA.fullmatch(path):
            python.add(distribution_of(os.path.dirname(path)))
        is_plain = stat.S_ISREG(status.st_mode)
        inode = (status.st_dev, status.st_ino)
        # A second hard link takes no bytes.
        size = status.st_size if is_plain and inode not in seen_inodes else 0
        seen_inodes.add(inode)
        content = ""
        if stat.S_ISLNK(status.st_mode):
            content = "-> " + os.readlink(image.root + path)
        elif digests and is_plain:
            content = digest_of(image.root + path)
        files.append((path, size, stat.S_IMODE(status.st_mode), content, owners.name(path)))
    packages = [(row.get("Package", ""), row.get("Version", "")) for row in image.debian_packages()]
    return {
        "files": files,
        "packages": sorted(packages),
        "python": sorted(python),
        "manifest": "\n".join(lines_of(image.root + "/opt/trainworks/image.json")),
    }


def digest_of(path: str) -> str:
    """Return the SHA-256 of a file, or the reason why it cannot be read, to be compared instead."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(1 << 20), b""):
                digest.update(chunk)
    except OSError as error:
        return str(error.strerror)
    return digest.hexdigest()
