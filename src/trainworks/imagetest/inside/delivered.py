"""Which files of an image are not as they were delivered: by sums, links, rights, accounts and bytecode.

Part of the program that runs inside (``trainworks.imagetest.inside``).
"""

from __future__ import annotations

import base64
import glob
import hashlib
import importlib.util
import marshal
import os
import stat
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainworks.imagetest.inside.files import (
    COMPILED,
    DOCUMENTATION,
    DamagedFile,
    Owners,
    damaged,
    digest_of,
    pattern_of,
    rights_of,
)
from trainworks.imagetest.inside.libraries import DamagedElfError, read_elf
from trainworks.imagetest.inside.packages import lines_of

SHARED = frozenset({"/tmp", "/var/tmp"})  # noqa: S108 - the image's own folders are looked at
"""The folders in which every user makes files, and changes nobody else's."""


def damaged_files(
    request: dict[str, Any],
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
            digest = digest_of(root + original)
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
    for problems in (account_problems, authentication_problems, certificate_problems, environment_problems):
        for path, problem in problems(root):
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
        match = COMPILED.fullmatch(path)
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
    accounts = [line.split(":") for line in lines_of(root + "/etc/passwd")]
    for row in accounts:
        if len(row) != 7 or (row[2] == "0") != (row[0] == "root") or row[1] != "x":
            yield "/etc/passwd", f"has an account that no distribution makes: {row[0]}"
    for row in (line.split(":") for line in lines_of(root + "/etc/shadow")):
        if len(row) > 1 and not row[1].startswith(("*", "!")):
            yield "/etc/shadow", f"has a password of {row[0]}, or none that is asked for"
    for name in ("passwd", "group"):
        there = set(lines_of(f"{root}/etc/{name}"))
        for line in lines_of(f"{root}/usr/share/base-passwd/{name}.master"):
            wanted = line.replace(":*:", ":x:", 1)
            # update-passwd(8) leaves members and shells of groups alone.
            if not any(each.startswith(wanted) for each in there):
                yield f"/etc/{name}", f"lacks the row {wanted} of the distribution"


def authentication_problems(root: str) -> Iterator[tuple[str, str]]:
    """Yield files of PAM in which a module is missing that pam-auth-update(8) has put there."""
    for state in sorted(glob.glob(glob.escape(root) + "/var/lib/pam/*")):
        name = os.path.basename(state)
        path = "/etc/pam.d/common-" + name
        modules = {word for line in lines_of(state) for word in line.split() if word.endswith(".so")}
        text = "\n".join(line for line in lines_of(root + path) if not line.startswith("#"))
        for module in sorted(modules):
            if module not in text:
                yield path, f"does not ask {module}, as {state[len(root) :]} says"


def certificate_problems(root: str) -> Iterator[tuple[str, str]]:
    """Yield what update-ca-certificates(8) would make otherwise of the distribution's certificates."""
    bundle, parts = "/etc/ssl/certs/ca-certificates.crt", []
    for line in lines_of(root + "/etc/ca-certificates.conf"):
        if not line or line[0] in "#!":
            continue
        original = "/usr/share/ca-certificates/" + line
        link = "/etc/ssl/certs/" + os.path.basename(line).rpartition(".")[0].replace(" ", "_") + ".pem"
        parts.append("\n".join(lines_of(root + original)).strip())
        if not os.path.islink(root + link) or os.readlink(root + link) != original:
            yield link, f"is not a link to {original}"
    found = "\n".join(lines_of(root + bundle)).strip()
    if parts and sorted(found.split("\n")) != sorted("\n".join(parts).split("\n")):
        yield bundle, "has other certificates than the distribution's"


def environment_problems(root: str) -> Iterator[tuple[str, str]]:
    """Yield what venv made otherwise of the environment that the image's contract gives to its users."""
    folder = "/opt/venv"
    settings = [line.partition(" = ") for line in lines_of(f"{root}{folder}/pyvenv.cfg")]
    if settings and ("include-system-site-packages", " = ", "false") not in settings:
        yield f"{folder}/pyvenv.cfg", "lets the packages of the system's Python in"
    if settings and folder not in "\n".join(lines_of(f"{root}{folder}/bin/activate")):
        yield f"{folder}/bin/activate", f"does not name {folder}"


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
    """Say whether a file is a program of this machine that a loader starts, and is not called a library."""
    if ".so" in os.path.basename(path) or not _starts(path, b"\x7fELF"):
        return False
    try:
        elf = read_elf(path)
    except (DamagedElfError, OSError):
        return False
    return elf is not None and bool(elf.loader)
