"""Finds settings of an image that differ from the distribution's: accounts, logins, certificates,
environments, rights.

Part of the program that runs inside (``trainworks.imagetest.probe``).
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

from trainworks.imagetest.probe.files import Image, ask, pattern_of, run
from trainworks.imagetest.probe.packages import lines_of, text_of

FIRST_SUBORDINATE = 100_000
"""The first number that login.defs(5) gives to users for their own namespaces."""


def account_problems(root: str, groups: set[str]) -> Iterator[tuple[str, str]]:
    """Yield rows that give access: a password, a second root, a member of a group with rights.

    And rows of the distribution that are missing.

    Args:
        root: The root of the image.
        groups: The groups that have rights of their own, besides root's.
    """
    for row in _rows(root + "/etc/passwd"):
        if len(row) != 7 or (row[2] == "0") != (row[0] == "root") or row[1] != "x":
            yield "/etc/passwd", f"has an account that no distribution makes: {row[0]}"
    for row in _rows(root + "/etc/shadow"):
        if len(row) > 1 and not row[1].startswith(("*", "!")):
            yield "/etc/shadow", f"has a password of {row[0]}, or none that is asked for"
    for row in _rows(root + "/etc/group"):
        if len(row) == 4 and row[3] and (row[2] == "0" or row[0] in groups):
            yield "/etc/group", f"makes {row[3]} a member of {row[0]}, which has rights of its own"
    for row in _rows(root + "/etc/gshadow"):
        # gshadow(5): NAME:PASSWORD:ADMINISTRATORS:MEMBERS
        if len(row) != 4:
            continue
        group, password, administrators, members = row
        has_password = not password.startswith(("*", "!"))
        has_members = bool(members) and group in groups
        if has_password or administrators or has_members:
            yield "/etc/gshadow", f"has a password, an administrator or a member of {group}"
    for path in ("/etc/subuid", "/etc/subgid"):
        for row in _rows(root + path):
            if len(row) == 3 and (not row[1].isdigit() or int(row[1]) < FIRST_SUBORDINATE):
                yield (
                    path,
                    f"lets {row[0]} be a user or group of the system, from number {row[1]} on",
                )
    for name in ("passwd", "group"):
        present_lines = set(lines_of(f"{root}/etc/{name}"))
        for line in lines_of(f"{root}/usr/share/base-passwd/{name}.master"):
            expected = line.replace(":*:", ":x:", 1)
            # update-passwd(8) leaves members and shells of groups alone.
            if not any(present.startswith(expected) for present in present_lines):
                yield f"/etc/{name}", f"lacks the row {expected} of the distribution"


def _rows(path: str) -> list[list[str]]:
    """Return the fields of a file such as passwd(5)."""
    return [line.split(":") for line in lines_of(path)]


def package_problems(root: str) -> Iterator[tuple[str, str]]:
    """Yield rules of dpkg that do not fit the image: its next run would change rights or places."""
    path = "/var/lib/dpkg/statoverride"
    for line in lines_of(root + path):
        # dpkg-statoverride(1): USER GROUP MODE FILE
        fields = line.split()
        if len(fields) != 4 or not os.path.lexists(root + fields[3]):
            continue
        mode, file = fields[2:]
        actual_mode = stat.S_IMODE(os.lstat(root + file).st_mode)
        if f"{actual_mode:o}" != mode.lstrip("0"):
            yield path, f"gives {file} mode {mode}, which it does not have"
    path = "/var/lib/dpkg/diversions"
    lines = lines_of(root + path)
    # Three lines each: a path, the path of packages' files, and the package with the rule or ":".
    for start in range(0, len(lines) - 2, 3):
        place, other, owner = lines[start : start + 3]
        if owner == ":" and not os.path.lexists(root + other):
            yield path, f"leads {place} to {other}, which is not there"


def authentication_problems(root: str) -> Iterator[tuple[str, str]]:
    """Yield files of PAM with other modules than pam-auth-update(8) writes, or in another order.

    Its state has the modules of packages. It writes them into the distribution's template: the
    modules that decide in place of ``$..._primary``, the others in place of ``$..._additional``.
    """
    for state in sorted(glob.glob(glob.escape(root) + "/var/lib/pam/*")):
        name = os.path.basename(state)
        path = "/etc/pam.d/common-" + name
        wanted = [_module(line) for line in lines_of(state) if ".so" in line]
        if not wanted:
            continue
        fallback = _modules_of(f"{root}/usr/share/pam/common-{name}")
        # The state does not say how many of them decide: one does in any case.
        valid_orders = [
            [*wanted[:place], *fallback, *wanted[place:]] for place in range(1, len(wanted) + 1)
        ]
        if _modules_of(root + path) not in valid_orders:
            yield path, f"does not ask the modules of {state[len(root) :]}, in this order"


def _modules_of(path: str) -> list[tuple[str, str]]:
    """Return the modules of a file of PAM; of a template, those between the two places to fill."""
    modules = []
    for line in lines_of(path):
        words = line.split("#")[0].split(None, 1)
        # The places to fill are lines of one word.
        if len(words) == 2:
            modules.append(_module(words[1]))
    return modules


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
    """Yield certificates that differ from those that update-ca-certificates(8) would make."""
    folder = "/etc/ssl/certs"
    bundle = f"{folder}/ca-certificates.crt"
    originals: list[str] = []
    names: list[str] = []
    for line in lines_of(root + "/etc/ca-certificates.conf"):
        if not line or line[0] in "#!":
            continue
        original = "/usr/share/ca-certificates/" + line
        stem = os.path.basename(line).rpartition(".")[0].replace(" ", "_")
        link = f"{folder}/{stem}.pem"
        originals.append("\n".join(lines_of(root + original)).strip())
        if not os.path.islink(root + link) or os.readlink(root + link) != original:
            yield link, f"is not a link to {original}"
        else:
            names.append(os.path.basename(link))
    bundled_lines = "\n".join(lines_of(root + bundle)).strip().split("\n")
    original_lines = "\n".join(originals).split("\n")
    if originals and sorted(bundled_lines) != sorted(original_lines):
        yield bundle, "has other certificates than the distribution's"
    has_hashes = bool(glob.glob(f"{glob.escape(root)}{folder}/*.[0-9]"))
    if has_hashes or os.path.isfile(root + "/usr/bin/openssl"):
        yield from _hashed_problems(root, names)


def _hashed_problems(root: str, certificates: list[str]) -> Iterator[tuple[str, str]]:
    """Yield certificates that OpenSSL does not find in its folder by their hashes.

    A link ``HASH.0`` leads to each certificate.
    """
    folder = "/etc/ssl/certs"
    hashes_by_name: dict[str, set[str]] = {}
    for path in glob.glob(glob.escape(root + folder) + "/*.[0-9]"):
        if os.path.islink(path):
            link_hash = os.path.basename(path).partition(".")[0]
            hashes_by_name.setdefault(os.readlink(path), set()).add(link_hash)
    program = root + "/usr/bin/openssl"
    for name in certificates:
        hashes = hashes_by_name.get(name, set())
        # Only OpenSSL computes its hash of a name in normal form. Without it, any hash will do.
        expected = ""
        if os.path.isfile(program):
            command = [program, "x509", "-noout", "-subject_hash", "-in", f"{root}{folder}/{name}"]
            expected = run(command)[0].strip()
        is_linked = hashes == {expected} if expected else bool(hashes)
        if not is_linked:
            state = f"leads to it by {', '.join(sorted(hashes))}" if hashes else "has no link to it"
            yield f"{folder}/{name}", f"is not found by its hash: the folder {state}"


def environment_problems(image: Image) -> Iterator[tuple[str, str]]:
    """Yield files of ``/opt/venv`` that differ from those that Python's venv makes."""
    root, folder = image.root, "/opt/venv"
    settings = {}
    for line in lines_of(f"{root}{folder}/pyvenv.cfg"):
        key, equals, value = line.partition(" = ")
        if equals:
            settings[key] = value
    if not settings:
        return
    configuration = f"{folder}/pyvenv.cfg"
    if settings.get("include-system-site-packages") != "false":
        yield configuration, "lets the packages of the system's Python in"
    home = settings.get("home")
    if not os.path.isdir(root + (home or "")):
        yield configuration, f"says that its Python is in {home}, which is no folder"
    if not os.path.exists(f"{root}{folder}/bin/activate"):
        return
    scripts, error = ask(image.python, _SCRIPTS, folder)
    if error:
        yield (
            configuration,
            f"is of a Python that does not say what it makes of an environment: {error}",
        )
        return
    for name, text in sorted(scripts.items()):
        if text_of(f"{root}{folder}/bin/{name}") != text:
            yield f"{folder}/bin/{name}", "is not what Python's venv makes"


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

    Without capabilities, which have a check of their own, and without the attributes of hosts and
    engines.
    """
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        return []
    ignored = ("security.", "trusted.", *_ENGINES)
    return sorted(name for name in names if not name.startswith(ignored))


_ENGINES = ("user.overlay.", "user.containers.", "user.fuseoverlayfs.")
"""Prefixes of attributes in which engines without root keep rights that they cannot set."""


class _Rights(NamedTuple):
    """A row of the table of rights.

    Attributes:
        paths: The paths of the row.
        mode: The most that their mode may have.
        group: Their group.
        attributes: The extended attributes that they may have.
    """

    paths: re.Pattern[str]
    mode: int
    group: str
    attributes: list[str]


def rights_problems(
    root: str,
    rights: list[dict[str, Any]],
    closed: re.Pattern[str],
    files: list[tuple[str, os.stat_result]],
) -> Iterator[tuple[str, str]]:
    """Yield files and folders that another user or group than root may change, or must not read.

    Args:
        root: The root of the image.
        rights: Rows of the table of rights: ``paths``, the most that their
            ``mode`` may be, their ``group``, and the ``attributes`` that they may have.
        closed: Paths that packages keep from users; their owners may be users of services.
        files: All paths with their status.
    """
    rows = [
        _Rights(pattern_of(row["paths"]), int(row["mode"], 8), row["group"], row["attributes"])
        for row in rights
    ]
    # group(5): NAME:PASSWORD:NUMBER:MEMBERS
    numbers = {row[0]: row[2] for row in _rows(root + "/etc/group") if len(row) > 3}
    for path, status in files:
        mode, group = stat.S_IMODE(status.st_mode), status.st_gid
        is_link = stat.S_ISLNK(status.st_mode)
        is_writable = group != 0 and bool(mode & stat.S_IWGRP)
        has_other_group = group != 0 or bool(mode & stat.S_ISGID)
        # A group that may write is reported below, with the consequence.
        if path.startswith("/opt/") and has_other_group and (is_link or not is_writable):
            yield (
                path,
                f"has mode {mode:04o} and group {group}: what recipes make belongs to root's group",
            )
        if status.st_uid != 0 and not closed.fullmatch(path):
            yield path, f"belongs to user {status.st_uid}: that user may change what root runs"
        if is_link:
            continue
        row = next((row for row in rows if row.paths.fullmatch(path)), None)
        allowed = row.attributes if row is not None else []
        attributes = [name for name in more_rights(root + path) if name not in allowed]
        if attributes:
            names = ", ".join(attributes)
            problem = f"has {names}: no package and no recipe gives a file more than its mode"
            yield path, problem
        if row is None:
            if is_writable:
                yield (
                    path,
                    f"has mode {mode:04o} and group {group}: that group may change what root runs",
                )
            continue
        if mode & ~row.mode:
            yield path, f"has mode {mode:04o}, and may have at most {row.mode:04o}"
        if group != 0 and str(group) != numbers.get(row.group, "0"):
            yield path, f"belongs to group {group}, and should belong to {row.group}"
