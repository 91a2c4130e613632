"""Finds files of an image that are not as delivered: by sums, links, rights, accounts and bytecode.

Part of the program that runs inside (``trainworks.imagetest.probe``).
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainworks.imagetest.probe.bytecode import bytecode_problems
from trainworks.imagetest.probe.files import (
    COMPILED,
    DOCUMENTATION,
    DamagedFile,
    Image,
    Owners,
    damaged,
    digest_of,
    pattern_of,
    rights_of,
)
from trainworks.imagetest.probe.libraries import DamagedElfError, read_elf
from trainworks.imagetest.probe.settings import (
    account_problems,
    authentication_problems,
    certificate_problems,
    environment_problems,
    locale_problems,
    package_problems,
    rights_problems,
)


class _Findings:
    """The damaged files of an image: the first problem of each path and owner."""

    def __init__(self, removed: re.Pattern[str]) -> None:
        """removed: paths that images leave out, about which nothing is reported."""
        self._removed = removed
        self._problems: dict[tuple[str, str], str] = {}

    def add(self, owner: str, path: str, problem: str) -> None:
        """Add a problem, unless the path has one already; ``""`` is not a problem."""
        if problem and not self._removed.fullmatch(path):
            self._problems.setdefault((path, owner), problem)

    def replace(self, path: str, problem: str) -> None:
        """Set the problem of a path without an owner, also of one that images leave out."""
        self._problems[path, ""] = problem

    def rows(self) -> list[DamagedFile]:
        """Return all damaged files, sorted by path."""
        rows = sorted(self._problems.items())
        return [damaged(owner, path, problem) for (path, owner), problem in rows]


def damaged_files(request: dict[str, Any], image: Image, owners: Owners) -> list[DamagedFile]:
    """Return the files that are not as delivered, by the sums that ``owners`` has read."""
    files = []
    folders = []
    for path, status in image.files():
        if stat.S_ISDIR(status.st_mode):
            folders.append((path, status))
        else:
            files.append((path, status))
    closed = pattern_of(request["closed"])
    findings = _Findings(pattern_of(request["removed"]))
    _check_sums(request, owners, findings)
    _check_copies(request, owners, findings)
    _check_presence(owners, findings)
    _check_alternatives(owners, findings)
    _check_recipe_links(request, owners.root, findings)
    _check_privileges(request, owners, findings)

    rights = request["rights"]
    rights_groups = {row["group"] for row in rights}
    rules = (
        rights_problems(owners.root, rights, closed, [*files, *folders]),
        locale_problems(owners.root),
        account_problems(owners.root, rights_groups),
        authentication_problems(owners.root),
        certificate_problems(owners.root),
        environment_problems(image),
        bytecode_problems(image),
        package_problems(owners.root),
    )
    for path, problem in itertools.chain(*rules):
        findings.add(owners.name(path), path, problem)

    _check_sourced_folders(request, files, owners, findings)
    _check_files(files, pattern_of(request["sourced"]), closed, owners, findings)
    for path, status in folders:
        mode = stat.S_IMODE(status.st_mode)
        if path in request["shared"] and mode != 0o1777:
            problem = f"has mode {mode:04o}, and should have 1777: every user has files there"
            findings.add("", path, problem)
        if mode & 0o005 != 0o005 and not closed.fullmatch(path):
            findings.add("", path, f"has mode {mode:04o}: only some users can enter the folder")
    for row in owners.problems:
        findings.add(row["owner"], row["path"], row["problem"])
    return findings.rows()


def _check_sums(request: dict[str, Any], owners: Owners, findings: _Findings) -> None:
    """Compare files with the sums of packages, distributions and recipes."""
    sums = list(owners.sums)
    for name, path, digest in request["digests"]:
        # What programs generate is not the same in every release of a distribution.
        if not name and not os.path.lexists(owners.root + path):
            continue
        owner = "recipe " + name if name else ""
        sums.append((owner, path, "sha256", digest, -1))

    def problem_of_sum(row: tuple[str, str, str, str, int]) -> str:
        _, path, algorithm, digest, size = row
        return problem_of(owners.root, path, algorithm, digest, size)

    # Threads help: hashlib lets others run while it reads a large block.
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        problems = pool.map(problem_of_sum, sums)
        for (owner, path, _, _, _), problem in zip(sums, problems):
            findings.add(owner, path, problem)


def _check_copies(request: dict[str, Any], owners: Owners, findings: _Findings) -> None:
    """Compare files that recipes copy with their originals."""
    for path, original in request["copies"]:
        if not os.path.isfile(owners.root + original):
            continue
        digest = digest_of(owners.root + original)
        problem = problem_of(owners.root, path, "sha256", digest, -1)
        if problem:
            problem = f"{problem}; it was made as a copy of {original}"
            findings.add(owners.name(original), path, problem)


def _check_presence(owners: Owners, findings: _Findings) -> None:
    """Report files of packages that are missing."""
    unchecked = (*DOCUMENTATION, "/run/", "/var/")
    for path, package in owners.packages.items():
        if path in owners.set_aside or path.startswith(unchecked):
            continue
        if not os.path.lexists(owners.root + path):
            findings.add("package " + package, path, "is missing")


def _check_alternatives(owners: Owners, findings: _Findings) -> None:
    """Report links of update-alternatives(1) that are missing or lead elsewhere."""
    for place, link, choices in owners.alternatives:
        for path in (place, link):
            if not path.startswith(DOCUMENTATION) and not os.path.exists(owners.root + path):
                problem = "is missing, or its target is: update-alternatives(1) made it"
                findings.add("", path, problem)
        for path, targets in ((place, choices), (link, [place])):
            target = _target_of(owners.root + path)
            if targets and target and target not in targets:
                expected = " or ".join(targets)
                problem = f"is a link to {target}, and should be one to {expected}"
                findings.add("", path, problem)


def _target_of(path: str) -> str:
    """Return the target of a link, or ``""`` for another file."""
    return os.readlink(path) if os.path.islink(path) else ""


def _check_recipe_links(request: dict[str, Any], root: str, findings: _Findings) -> None:
    """Report links of recipes that lead elsewhere, also where one replaces a package's file."""
    for path, expected in request["links"]:
        target = _target_of(root + path)
        if target and expected in ("", target):
            continue
        state = f"is a link to {target}" if target else "is not a link"
        goal = f" to {expected}" if expected else ""
        findings.replace(path, f"{state}, and should be one{goal}")


def _check_privileges(request: dict[str, Any], owners: Owners, findings: _Findings) -> None:
    """Report programs of packages that have lost their setuid, setgid or capabilities."""
    for package, path in request["privileged"]:
        place = owners.root + path
        if owners.packages.get(path) != package or not os.path.isfile(place):
            continue
        if not rights_of(place, os.lstat(place)):
            problem = "has no rights of its own, and should have"
            findings.add("package " + package, path, problem)


def _check_sourced_folders(
    request: dict[str, Any],
    files: list[tuple[str, os.stat_result]],
    owners: Owners,
    findings: _Findings,
) -> None:
    """Report added files in folders that a recipe has filled completely."""
    delivered = {path for _, path, _ in request["digests"]}
    filled_folders = []
    for pattern in request["sourced"]:
        folder = pattern[: -len("**")]
        if any(path.startswith(folder) for path in delivered):
            filled_folders.append(folder)
    for path, _ in files:
        if not path.startswith(tuple(filled_folders)):
            continue
        if path not in delivered and owners.source(path) not in delivered:
            findings.add("", path, "is none of the files that its folder was made of")


def _check_files(
    files: list[tuple[str, os.stat_result]],
    sourced: re.Pattern[str],
    closed: re.Pattern[str],
    owners: Owners,
    findings: _Findings,
) -> None:
    """Report files that users cannot read or execute, and bytecode without its source.

    Args:
        files: All paths but folders, with their status.
        sourced: Paths of sources that recipes bring.
        closed: Paths that packages keep from users.
        owners: The owners of files.
        findings: Gets the problems.
    """
    programs = {entry for entry in os.environ.get("PATH", "").split(":") if entry}
    executables: dict[str, int] = {}
    scripts: dict[str, list[str]] = {}
    for path, status in files:
        place = owners.root + path
        if stat.S_ISLNK(status.st_mode):
            continue
        if not stat.S_ISREG(status.st_mode):
            # To open a pipe would wait for its writer.
            findings.add(owners.name(path), path, "is not a file, a folder or a link")
            continue
        compiled = COMPILED.fullmatch(path)
        if compiled is not None:
            source = f"{compiled[1]}/{compiled[2]}.py"
            if sourced.fullmatch(source) and not os.path.isfile(owners.root + source):
                problem = "is missing, and its bytecode is there"
                findings.add(owners.name(path), source, problem)
        if closed.fullmatch(path):
            continue

        mode = stat.S_IMODE(status.st_mode)
        folder = os.path.dirname(path)
        if not mode & stat.S_IROTH:
            problem = f"has mode {mode:04o}: only some users can read it"
            findings.add(owners.name(path), path, problem)
        if mode & 0o111 != 0o111:
            is_on_path = folder in programs and _starts(place, b"#!", b"\x7fELF")
            if is_on_path or _is_program(place):
                problem = f"has mode {mode:04o}: it cannot be executed"
                findings.add(owners.name(path), path, problem)
        if mode & 0o111:
            executables[folder] = executables.get(folder, 0) + 1
        elif _starts(place, b"#!"):
            scripts.setdefault(folder, []).append(path)

    for folder, paths in scripts.items():
        # Most files of the folder are executable: a folder of programs outside of PATH, such as
        # git's own.
        if executables.get(folder, 0) > 3 + len(paths):
            for path in paths:
                problem = "cannot be executed, as the other programs of its folder can"
                findings.add(owners.name(path), path, problem)


def problem_of(root: str, path: str, algorithm: str, digest: str, size: int) -> str:
    """Return the difference of a file to its sum, or nothing; ``size`` is -1 if it is unknown."""
    try:
        status = os.lstat(root + path)
        if stat.S_ISLNK(status.st_mode):
            return f"is a link to {os.readlink(root + path)}, and no plain file"
        if not stat.S_ISREG(status.st_mode):
            return "is not a plain file"
        if size >= 0 and status.st_size != size:
            return f"has {status.st_size} bytes, and should have {size}"
        hasher = hashlib.new(algorithm)
        with open(root + path, "rb") as file:
            for chunk in iter(lambda: file.read(1 << 20), b""):
                hasher.update(chunk)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    base64_digest = base64.urlsafe_b64encode(hasher.digest()).decode().rstrip("=")
    if digest in (hasher.hexdigest(), base64_digest):
        return ""
    return "is empty" if status.st_size == 0 else "has other contents"


def _starts(path: str, *beginnings: bytes) -> bool:
    """Return whether a file begins with one of some bytes; ``False`` if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(5).startswith(beginnings)
    except OSError:
        return False


def _is_program(path: str) -> bool:
    """Whether a file is a program for this machine's loader, and not named as a library."""
    if ".so" in os.path.basename(path) or not _starts(path, b"\x7fELF"):
        return False
    try:
        elf = read_elf(path)
    except (DamagedElfError, OSError):
        return False
    return elf is not None and bool(elf.loader)
