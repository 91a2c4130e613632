"""What programs make of a distribution's settings: accounts, logins,
certificates, environments, rights.

Part of the program that runs inside (``trainworks.imagetest.inside``).
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterator
from typing import Any

from trainworks.imagetest.inside.files import Image, ask, pattern_of, run
from trainworks.imagetest.inside.packages import lines_of, text_of

FIRST_SUBORDINATE = 100_000
"""The first number that login.defs(5) gives to users for their own namespaces."""


def account_problems(root: str, groups: set[str]) -> Iterator[tuple[str, str]]:
    """Yield what gives access: a password, a second root, a member of a group with rights.

    And what is missing.

    Args:
        groups: The groups that have rights of their own, besides root's.
    """
    accounts = [line.split(":") for line in lines_of(root + "/etc/passwd")]
    for row in accounts:
        if len(row) != 7 or (row[2] == "0") != (row[0] == "root") or row[1] != "x":
            yield "/etc/passwd", f"has an account that no distribution makes: {row[0]}"
    for row in (line.split(":") for line in lines_of(root + "/etc/shadow")):
        if len(row) > 1 and not row[1].startswith(("*", "!")):
            yield "/etc/shadow", f"has a password of {row[0]}, or none that is asked for"
    for row in (line.split(":") for line in lines_of(root + "/etc/group")):
        if len(row) == 4 and row[3] and (row[2] == "0" or row[0] in groups):
            yield "/etc/group", f"makes {row[3]} a member of {row[0]}, which has rights of its own"
    for line in lines_of(root + "/etc/gshadow"):
        # gshadow(5): NAME:PASSWORD:ADMINISTRATORS:MEMBERS
        fields = line.split(":")
        if len(fields) != 4:
            continue
        group, password, administrators, members = fields
        has_password = not password.startswith(("*", "!"))
        has_members = bool(members) and group in groups
        if has_password or administrators or has_members:
            yield "/etc/gshadow", f"has a password, an administrator or a member of {group}"
    for path in ("/etc/subuid", "/etc/subgid"):
        for row in (line.split(":") for line in lines_of(root + path)):
            if len(row) == 3 and (not row[1].isdigit() or int(row[1]) < FIRST_SUBORDINATE):
                yield (
                    path,
                    f"lets {row[0]} be a user or group of the system, from number {row[1]} on",
                )
    for name in ("passwd", "group"):
        there = set(lines_of(f"{root}/etc/{name}"))
        for line in lines_of(f"{root}/usr/share/base-passwd/{name}.master"):
            wanted = line.replace(":*:", ":x:", 1)
            # update-passwd(8) leaves members and shells of groups alone.
            if not any(each.startswith(wanted) for each in there):
                yield f"/etc/{name}", f"lacks the row {wanted} of the distribution"


def package_problems(root: str) -> Iterator[tuple[str, str]]:
    """Yield what dpkg would change at its next run: rights and places of files
    that are not what they are now.
    """
    path = "/var/lib/dpkg/statoverride"
    for line in lines_of(root + path):
        # dpkg-statoverride(1): USER GROUP MODE FILE
        fields = line.split()
        if len(fields) != 4 or not os.path.lexists(root + fields[3]):
            continue
        mode, file = fields[2:]
        found = stat.S_IMODE(os.lstat(root + file).st_mode)
        if f"{found:o}" != mode.lstrip("0"):
            yield path, f"gives {file} mode {mode}, which it does not have"
    path = "/var/lib/dpkg/diversions"
    lines = lines_of(root + path)
    # Three lines each: the path, where packages put it, and which package says so, ":" for none.
    for start in range(0, len(lines) - 2, 3):
        place, other, owner = lines[start : start + 3]
        if owner == ":" and not os.path.lexists(root + other):
            yield path, f"leads {place} to {other}, which is not there"


def authentication_problems(root: str) -> Iterator[tuple[str, str]]:
    """Yield files of PAM that pam-auth-update(8) would write otherwise: other
    modules, or in another order.

    Its state has the modules; behind the first of them it puts a refusal, and what takes that back.
    """
    for state in sorted(glob.glob(glob.escape(root) + "/var/lib/pam/*")):
        name = os.path.basename(state)
        path = "/etc/pam.d/common-" + name
        wanted = [_module(line) for line in lines_of(state) if ".so" in line]
        lines = [line.split("#")[0].split(None, 1) for line in lines_of(root + path)]
        found = [_module(line[1]) for line in lines if len(line) == 2]
        # The state does not say how many of them decide: one does in any case.
        places = range(1, len(wanted) + 1)
        if wanted and found not in [
            [*wanted[:place], *_FALLBACK, *wanted[place:]] for place in places
        ]:
            yield path, f"does not ask the modules of {state[len(root) :]}, in this order"


_FALLBACK = [("requisite", "pam_deny.so"), ("required", "pam_permit.so")]
"""What pam-auth-update(8) writes between the modules that decide and all others."""


def _module(line: str) -> tuple[str, str]:
    """Return control and name of a module, without its arguments.

    How many lines a success skips is left out.
    """
    match = re.match(r"\s*(\[[^\]]*\]|\S+)\s+(\S+)", line)
    if match is None:
        return "", line
    return re.sub(r"=(\d+|end)\b", "=N", " ".join(match[1].split())), match[2]


def locale_problems(root: str) -> Iterator[tuple[str, str]]:
    """Yield files that give logins a language which the distribution does not have."""
    for path in ("/etc/default/locale", "/etc/locale.conf"):
        for line in lines_of(root + path):
            name, equals, value = line.partition("=")
            value = value.strip("\"' ")
            folder = "/usr/lib/locale/" + value.replace("UTF-8", "utf8")
            known = value in ("", "C", "POSIX") or os.path.isdir(root + folder)
            if equals and not name.startswith("#") and not known:
                yield path, f"sets {name} to {value}, which is not in the image"


def certificate_problems(root: str) -> Iterator[tuple[str, str]]:
    """Yield what update-ca-certificates(8) would make otherwise of the
    distribution's certificates.
    """
    bundle = "/etc/ssl/certs/ca-certificates.crt"
    parts: list[str] = []
    names: list[str] = []
    for line in lines_of(root + "/etc/ca-certificates.conf"):
        if not line or line[0] in "#!":
            continue
        original = "/usr/share/ca-certificates/" + line
        link = (
            "/etc/ssl/certs/" + os.path.basename(line).rpartition(".")[0].replace(" ", "_") + ".pem"
        )
        parts.append("\n".join(lines_of(root + original)).strip())
        if not os.path.islink(root + link) or os.readlink(root + link) != original:
            yield link, f"is not a link to {original}"
        else:
            names.append(os.path.basename(link))
    found = "\n".join(lines_of(root + bundle)).strip()
    if parts and sorted(found.split("\n")) != sorted("\n".join(parts).split("\n")):
        yield bundle, "has other certificates than the distribution's"
    if glob.glob(glob.escape(root) + "/etc/ssl/certs/*.[0-9]") or os.path.isfile(
        root + "/usr/bin/openssl"
    ):
        yield from _hashed_problems(root, names)


def _hashed_problems(root: str, certificates: list[str]) -> Iterator[tuple[str, str]]:
    """Yield certificates that OpenSSL does not find in its folder of hashes, by
    which programs ask for one of them.
    """
    folder = "/etc/ssl/certs"
    names: dict[str, set[str]] = {}
    for path in glob.glob(glob.escape(root + folder) + "/*.[0-9]"):
        if os.path.islink(path):
            names.setdefault(os.readlink(path), set()).add(os.path.basename(path).partition(".")[0])
    # Its hash is that of a normal form of the name, which nothing else computes.
    program = root + "/usr/bin/openssl"
    for name in certificates:
        found = names.get(name, set())
        said = ""
        if os.path.isfile(program):
            said, _ = run(
                [program, "x509", "-noout", "-subject_hash", "-in", f"{root}{folder}/{name}"]
            )
        # Where nothing computes it, any hash will do.
        wanted = {said.strip()} if said else found or {"a hash"}
        if found != wanted:
            told = f"leads to it by {', '.join(sorted(found))}" if found else "has no link to it"
            yield f"{folder}/{name}", f"is not found by its hash: the folder {told}"


def environment_problems(image: Image) -> Iterator[tuple[str, str]]:
    """Yield what venv made otherwise of the environment that the image's
    contract gives to its users.
    """
    root, folder = image.root, "/opt/venv"
    settings = {
        key: value for key, equals, value in _settings(f"{root}{folder}/pyvenv.cfg") if equals
    }
    if not settings:
        return
    if settings.get("include-system-site-packages") != "false":
        yield f"{folder}/pyvenv.cfg", "lets the packages of the system's Python in"
    if not os.path.isdir(root + settings.get("home", "")):
        yield (
            f"{folder}/pyvenv.cfg",
            f"says that its Python is in {settings.get('home')}, which is no folder",
        )
    if not os.path.exists(f"{root}{folder}/bin/activate"):
        return
    scripts, error = ask(image.python, _SCRIPTS, folder)
    if error:
        yield (
            f"{folder}/pyvenv.cfg",
            f"is of a Python that does not say what it makes of an environment: {error}",
        )
    for name, text in sorted((scripts or {}).items()):
        if text_of(f"{root}{folder}/bin/{name}") != text:
            yield f"{folder}/bin/{name}", "is not what Python's venv makes"


def _settings(path: str) -> list[tuple[str, str, str]]:
    return [line.partition(" = ") for line in lines_of(path)]


# Runs under the environment's own Python: sent as text. It makes another
# environment, whose scripts name its folder.
_SCRIPTS = r"""
import sys
sys.path = [entry for entry in sys.path if entry]
import json, os, tempfile, venv
folder = sys.argv[2]
found = {}
with tempfile.TemporaryDirectory() as place:
    other = os.path.join(place, os.path.basename(folder))
    venv.EnvBuilder(symlinks=True).create(other)
    for name in sorted(os.listdir(other + "/bin")):
        path = os.path.join(other, "bin", name)
        if name.startswith("activate") and os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                found[name] = file.read().replace(other, folder)
print("\n" + sys.argv[1] + json.dumps(found) + sys.argv[1])
"""


def more_rights(path: str) -> list[str]:
    """Return the names of a file's extended attributes, lists of access among them.

    Capabilities have a promise of their own. What hosts and engines set for
    themselves is not the image's.
    """
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        return []
    return sorted(
        name for name in names if not name.startswith(("security.", "trusted.", *_ENGINES))
    )


_ENGINES = ("user.overlay.", "user.containers.", "user.fuseoverlayfs.")
"""How the attributes begin in which engines without root keep what they cannot set."""


def rights_problems(
    root: str,
    rights: list[dict[str, Any]],
    closed: re.Pattern[str],
    files: list[tuple[str, os.stat_result]],
) -> Iterator[tuple[str, str]]:
    """Yield the files and folders that another user or group than root may
    change, or read where it should not.

    Args:
        rights: Rows of the table of rights: ``paths``, the most that their
            ``mode`` may be, and their ``group``.
        closed: Paths that packages keep from users; their owners may be users of services.
        files: All paths with their status.
    """
    rows = [(pattern_of(row["paths"]), int(row["mode"], 8), row["group"]) for row in rights]
    numbers = {}
    for line in lines_of(root + "/etc/group"):
        # group(5): NAME:PASSWORD:NUMBER:MEMBERS
        fields = line.split(":")
        if len(fields) > 3:
            numbers[fields[0]] = fields[2]
    for path, status in files:
        mode, group = stat.S_IMODE(status.st_mode), status.st_gid
        # A group that may write is named below, with what that means.
        writes = group != 0 and mode & stat.S_IWGRP and not stat.S_ISLNK(status.st_mode)
        if path.startswith("/opt/") and (group != 0 or mode & stat.S_ISGID) and not writes:
            yield (
                path,
                f"has mode {mode:04o} and group {group}: what recipes make belongs to root's group",
            )
        if status.st_uid != 0 and not closed.fullmatch(path):
            yield path, f"belongs to user {status.st_uid}: that user may change what root runs"
        if stat.S_ISLNK(status.st_mode):
            continue
        if more := more_rights(root + path):
            yield (
                path,
                f"has {', '.join(more)}: no package and no recipe gives a file more than its mode",
            )
        row = next((row for row in rows if row[0].fullmatch(path)), None)
        if row is None:
            if group != 0 and mode & stat.S_IWGRP:
                yield (
                    path,
                    f"has mode {mode:04o} and group {group}: that group may change what root runs",
                )
            continue
        if mode & ~row[1]:
            yield path, f"has mode {mode:04o}, and may have at most {row[1]:04o}"
        if str(group) != numbers.get(row[2], "0") and group != 0:
            yield path, f"belongs to group {group}, and should belong to {row[2]}"
