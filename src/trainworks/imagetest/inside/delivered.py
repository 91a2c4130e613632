"""Which files of an image are not as they were delivered: by sums, links,
rights, accounts and bytecode.

Part of the program that runs inside (``trainworks.imagetest.inside``).
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainworks.imagetest.inside.bytecode import bytecode_problems
from trainworks.imagetest.inside.files import (
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
from trainworks.imagetest.inside.libraries import DamagedElfError, read_elf
from trainworks.imagetest.inside.settings import (
    account_problems,
    authentication_problems,
    certificate_problems,
    environment_problems,
    locale_problems,
    package_problems,
    rights_problems,
)


def damaged_files(request: dict[str, Any], image: Image, owners: Owners) -> list[DamagedFile]:
    """Return what is not as its maker delivered it, by the sums that ``owners`` has read."""
    files = [each for each in image.files() if not stat.S_ISDIR(each[1].st_mode)]
    folders = [each for each in image.files() if stat.S_ISDIR(each[1].st_mode)]
    root = owners.root
    removed = pattern_of(request["removed"])
    closed = pattern_of(request["closed"])
    found: dict[tuple[str, str], str] = {}

    def tell(owner: str, path: str, problem: str) -> None:
        if problem and not removed.fullmatch(path):
            found.setdefault((path, owner), problem)

    sums = [*owners.sums]
    sums += [
        ("recipe " + name if name else "", path, "sha256", digest, -1)
        for name, path, digest in request["digests"]
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        # hashlib lets other threads run while it reads a large block.
        judged = pool.map(lambda one: (one[0], one[1], problem_of(root, *one[1:])), sums)
        for owner, path, problem in judged:
            tell(owner, path, problem)
    for path, original in request["copies"]:
        if os.path.isfile(root + original):
            digest = digest_of(root + original)
            problem = problem_of(root, path, "sha256", digest, -1)
            tell(
                owners.name(original),
                path,
                problem and f"{problem}; it was made as a copy of {original}",
            )
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
                tell(
                    "",
                    path,
                    f"is a link to {os.readlink(root + path)}, and should be one to"
                    f" {' or '.join(targets)}",
                )
    for path, target in request["links"]:
        # The recipe's own, also where it replaces a file of a package.
        there = os.readlink(root + path) if os.path.islink(root + path) else ""
        if not there or target not in ("", there):
            said = f"is a link to {there}" if there else "is not a link"
            found[path, ""] = f"{said}, and should be one{' to ' if target else ''}{target}"
    for package, path in request["privileged"]:
        if owners.packages.get(path) == package and os.path.isfile(root + path):
            rights = rights_of(root + path, os.lstat(root + path))
            tell(
                "package " + package,
                path,
                "" if rights else "has no rights of its own, and should have",
            )
    for path, problem in rights_problems(root, request["rights"], closed, [*files, *folders]):
        tell(owners.name(path), path, problem)
    rules = [
        locale_problems(root),
        account_problems(root, {row["group"] for row in request["rights"]}),
    ]
    rules += [
        authentication_problems(root),
        certificate_problems(root),
        environment_problems(image),
    ]
    rules += [bytecode_problems(image), package_problems(root)]
    for path, problem in itertools.chain(*rules):
        tell(owners.name(path), path, problem)
    brought = {path for _, path, _ in request["digests"]}
    whole = [each[: -len("**")] for each in request["sourced"]]
    whole = [folder for folder in whole if any(path.startswith(folder) for path in brought)]
    for path, _ in files:
        if (
            path.startswith(tuple(whole))
            and owners.source(path) not in brought
            and path not in brought
        ):
            tell("", path, "is none of the files that its folder was made of")
    sourced = pattern_of(request["sourced"])
    programs = {entry for entry in os.environ.get("PATH", "").split(":") if entry}
    executable: dict[str, int] = {}
    scripts: dict[str, list[str]] = {}
    for path, status in files:
        if stat.S_ISLNK(status.st_mode):
            continue
        if not stat.S_ISREG(status.st_mode):
            # Opening a pipe would wait for whoever writes into it.
            tell(owners.name(path), path, "is not a file, a folder or a link")
            continue
        match = COMPILED.fullmatch(path)
        source = f"{match[1]}/{match[2]}.py" if match is not None else ""
        if sourced.fullmatch(source) and not os.path.isfile(root + source):
            tell(owners.name(path), source, "is missing, and its bytecode is there")
        if closed.fullmatch(path):
            continue
        mode = stat.S_IMODE(status.st_mode)
        if not mode & stat.S_IROTH:
            tell(owners.name(path), path, f"has mode {mode:04o}: only some users can read it")
        if mode & 0o111 != 0o111 and (
            (os.path.dirname(path) in programs and _starts(root + path, b"#!", b"\x7fELF"))
            or _is_program(root + path)
        ):
            tell(owners.name(path), path, f"has mode {mode:04o}: it cannot be executed")
        if mode & 0o111:
            executable[os.path.dirname(path)] = executable.get(os.path.dirname(path), 0) + 1
        elif _starts(root + path, b"#!"):
            scripts.setdefault(os.path.dirname(path), []).append(path)
    for folder, inside in scripts.items():
        # A folder of programs outside of PATH, such as git's own.
        for path in inside if executable.get(folder, 0) > 3 + len(inside) else ():
            tell(
                owners.name(path),
                path,
                "cannot be executed, as the other programs of its folder can",
            )
    for path, status in folders:
        mode = stat.S_IMODE(status.st_mode)
        if path in request["shared"] and mode != 0o1777:
            tell("", path, f"has mode {mode:04o}, and should have 1777: every user has files there")
        if mode & 0o005 != 0o005 and not closed.fullmatch(path):
            tell("", path, f"has mode {mode:04o}: only some users can enter the folder")
    for each in owners.problems:
        tell(each["owner"], each["path"], each["problem"])
    return [damaged(owner, path, problem) for (path, owner), problem in sorted(found.items())]


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


def _starts(path: str, *beginnings: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(5).startswith(beginnings)
    except OSError:
        return False


def _is_program(path: str) -> bool:
    """Say whether a file is a program of this machine that a loader starts, and
    is not called a library.
    """
    if ".so" in os.path.basename(path) or not _starts(path, b"\x7fELF"):
        return False
    try:
        elf = read_elf(path)
    except (DamagedElfError, OSError):
        return False
    return elf is not None and bool(elf.loader)
