"""Chooses and makes the directories that a job writes to: results, checkpoints, HOME, TMPDIR.

The script reads these directories in variables such as SM_MODEL_DIR. A script saves its model at
the end, so a directory that is missing or not writable costs the training.
``supervise/supervisor.py`` makes the directories on every host before the hosts join each other,
and removes them if the job is refused.

Files outlive the job only on a mount, or on a host's own disk: a container's root, and memory, end
with the job. So the mount table decides between the candidates, and the log warns about a directory
that ends with the container.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError

OUTPUT = "SM_OUTPUT_DIR"
"""Variable of the directory for the job's output and for the launcher's reports."""

RESULTS: Mapping[str, str] = {
    "SM_MODEL_DIR": "model",
    OUTPUT: "output",
    "SM_OUTPUT_DATA_DIR": "output/data",
    "SM_OUTPUT_INTERMEDIATE_DIR": "output/intermediate",
}
"""Variable -> directory below the root of the job's results."""

TEMPORARY = (
    "/tmp",  # noqa: S108
    "/var/tmp",  # noqa: S108
    "/usr/tmp",
    "/dev/shm",  # noqa: S108
)
"""Candidates for temporary files, in order: those of Python's module tempfile, then memory.

The last candidate of tempfile is left out: the current directory has the user's code.
"""

_ADVICE = (
    f"mount a directory there that this user can write, or set {names.BASE_DIRECTORY_VARIABLE} to"
    " one that keeps the results"
)
_CHECKPOINT_ADVICE = (
    f"set {names.CHECKPOINT_DIRECTORY_VARIABLE} to a directory that this user can write"
)


def paths_below(results: str, checkpoints: str) -> Mapping[str, str]:
    """Return variable -> path of every directory that a script writes to.

    For example ``SM_MODEL_DIR`` -> ``/opt/ml/model``.

    Args:
        results: Root of the job's results.
        checkpoints: Directory of checkpoints; ``""`` if there is none.
    """
    directories = {variable: f"{results}/{place}" for variable, place in RESULTS.items()}
    if checkpoints:
        directories[names.CHECKPOINT_DIRECTORY_VARIABLE] = checkpoints
    return directories


class Results(NamedTuple):
    """The directories of a job's results.

    Attributes:
        paths: Variable of RESULTS -> path.
        why: Variable -> reason for another path than the platform's, or warning that its files end
            with the container.
        note: Line for the log if a path is not the platform's; ``""``: all are.
        warning: Line that names the paths that end with the container, and the mounts to add;
            ``""``: none does.
    """

    paths: Mapping[str, str]
    why: Mapping[str, str]
    note: str = ""
    warning: str = ""


def choose(
    roots: Sequence[str],
    settings: Mapping[str, str],
    checkpoints: str,
    is_kept: Callable[[str], bool],
) -> Results:
    """Choose a path for each variable of RESULTS by itself.

    The choice is the first path that can be written and outlives the container, else the first that
    can be written, else the first. Nothing is made or changed.

    Args:
        roots: Directories that may hold the results, in order; at least one.
        settings: Variable of RESULTS -> directory that a person has set, which is chosen.
        checkpoints: Directory of checkpoints, for the warning only; ``""`` if there is none.
        is_kept: Whether files in a directory outlive the container.
    """
    paths: dict[str, str] = {}
    why: dict[str, str] = {}
    moved: list[str] = []
    reason = ""
    for variable, place in RESULTS.items():
        setting = settings.get(variable, "").strip()
        if setting:
            paths[variable] = str(Path(setting).absolute())
            why[variable] = "the variable was set"
            continue
        candidates = [f"{root}/{place}" for root in roots]
        writable = [path for path in candidates if not why_not_writable(path)]
        default = (writable or candidates)[0]
        paths[variable] = next(filter(is_kept, writable), default)
        first = candidates[0]
        if paths[variable] != first:
            moved.append(paths[variable])
            problem = why_not_writable(first) or f"no mount keeps {first}"
            why[variable] = f"in the working directory, because {problem}"
            reason = reason or why[variable]

    written = dict(paths)
    if checkpoints:
        written[names.CHECKPOINT_DIRECTORY_VARIABLE] = checkpoints
    lost = {variable: path for variable, path in written.items() if not is_kept(path)}
    for variable in lost:
        why[variable] = "it ends with this container: no mount keeps it"
    note = warning = ""
    if moved:
        note = f"results go to {' and '.join(outermost(moved))}, {reason}"
    if lost:
        warning = _warning(outermost(lost.values()))
    return Results(paths, why, note, warning)


def outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that are below no other path, without duplicates."""
    unique = dict.fromkeys(paths)
    outer = []
    for path in unique:
        others = unique.keys() - {path}
        if not any(_is_in(path, other) for other in others):
            outer.append(path)
    return outer


def _warning(lost: Sequence[str]) -> str:
    """Return the warning about paths that end with the container."""
    mounts = " ".join(f'-v "$PWD/{Path(path).name}:{path}"' for path in lost)
    return (
        f"results end with this container: no mount keeps {' and '.join(lost)}; mount a directory"
        f" of the host or a volume there: docker run {mounts}"
    )


# --- mounts ---------------------------------------------------------------------------------------
MOUNTS = "/proc/self/mountinfo"
"""The kernel's table of this process's mounts (proc(5))."""

_IN_MEMORY = ("tmpfs", "ramfs", "rootfs", "devtmpfs")
"""Types of file systems that have their files in memory."""

_OF_ONE_CONTAINER = re.compile(r"/volumes/[0-9a-f]{64}/_data(/|$)|/kubernetes\.io~empty-dir/")
"""Directory of the host that is removed with the container: a Docker volume without a name, or an
emptyDir of Kubernetes.
"""


_MOUNT_FIELDS = 5
"""Fields of a row up to the mount point (proc(5), mountinfo)."""

_MOUNT_BLANKS = 8
"""Blanks in a row with all fields that are read, at least."""


class _Mount(NamedTuple):
    """A row of the mount table, for example ``36 35 98:0 / /data rw - ext4 /dev/sda1 rw``.

    Attributes:
        number: Number of the mount, ``36``.
        parent: Number of the mount that it is mounted on, ``35``.
        root: Mounted directory of the file system, ``/``.
        point: Mount point, ``/data``.
        kind: Type of the file system, ``ext4``.
    """

    number: str
    parent: str
    root: str
    point: str
    kind: str


def is_kept(path: str, table: str) -> bool:
    """Return whether a file at a path outlives this container.

    A file does on a mount, and on the root of a plain host; not on a mount in
    memory, on a volume without a name, or on an emptyDir. Without a table (no Linux) a file counts
    as kept.

    Args:
        path: The path; it need not exist.
        table: The text of MOUNTS.
    """
    mounts = _parse_mounts(table)
    mount = _find_mount(os.path.realpath(path), mounts)
    if mount is None:  # a chroot in a directory of a host
        return True
    if mount.kind in _IN_MEMORY or _OF_ONE_CONTAINER.search(mount.root):
        return False
    if mount.point != "/":
        return True
    # A container's root is made of layers, or it is a directory of the host (only btrfs has such
    # roots on hosts), or the engine has mounted the container's own name over the image's.
    if "overlay" in mount.kind or mount.kind == "aufs":
        return False
    if mount.root != "/" and mount.kind != "btrfs":
        return False
    return all(other.point != "/etc/hostname" for other in mounts)


def find_mount_kind(path: str, table: str) -> str:
    """Return the type of a path's file system, for example ``nfs4``; "" if it is not known.

    No link is followed, because the file system may not answer.

    Args:
        path: An absolute path.
        table: The text of MOUNTS.
    """
    mount = _find_mount(path, _parse_mounts(table))
    return mount.kind if mount is not None else ""


def _parse_mounts(table: str) -> list[_Mount]:
    """Return the rows of a mount table; lines of another form are left out."""
    mounts = []
    for line in table.splitlines():
        if line.count(" ") < _MOUNT_BLANKS:
            continue
        before, _, after = line.partition(" - ")
        number, parent, _, root, point = map(_unescape, before.split(" ")[:_MOUNT_FIELDS])
        kind, _, _ = after.partition(" ")
        mounts.append(_Mount(number, parent, root, point, kind))
    return mounts


def _unescape(word: str) -> str:
    """Return a word of the table with its real characters: ``a b`` for ``a\\040b``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def _find_mount(path: str, mounts: Sequence[_Mount]) -> _Mount | None:
    """Return the mount that has a path; None if no mount has it.

    Follow the mounts from the root down, each one on its parent, as the kernel does: a later mount
    may hide an earlier one.
    """
    numbers = {mount.number for mount in mounts}
    mount: _Mount | None = None
    # First the root, whose parent is outside of the table; then the mounts on the current one.
    inside = [row for row in mounts if row.parent not in numbers]
    while True:
        above = [row for row in inside if _is_in(path, row.point)]
        if not above:
            return mount
        # The outermost mount point comes first on the way down.
        mount = min(above, key=lambda row: len(row.point))
        inside = [row for row in mounts if row.parent == mount.number != row.number]


def _is_in(path: str, directory: str) -> bool:
    """Return whether a path is a directory, or below it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def find_problems(places: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each reason why a directory cannot be written.

    Args:
        places: Variable -> path, as ``paths_below`` returns them. Variables with the same reason
            are named in one problem.
    """
    variables_of: dict[str, list[str]] = {}
    for variable, path in places.items():
        reason = why_not_writable(path)
        if reason:
            variables_of.setdefault(reason, []).append(variable)
    for reason, variables in variables_of.items():
        advice = _ADVICE
        if variables == [names.CHECKPOINT_DIRECTORY_VARIABLE]:
            advice = _CHECKPOINT_ADVICE
        problem = f"nothing can be written to {', '.join(variables)}: {reason}"
        yield Problem(problem, places[variables[0]], advice)


def why_not_writable(path: str) -> str:
    """Return why a directory can neither be written nor made; ``""`` if it can. Change nothing.

    access(2) decides: for the directory, or for its nearest parent that exists.
    """
    place = Path(path)
    for parent in (place, *place.parents):
        try:
            mode = parent.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if parent.is_symlink():
                return f"{parent} is a link whose target does not exist"
            continue
        except OSError as error:
            return f"{parent}: {error.strerror}"
        if not stat.S_ISDIR(mode):
            return f"{parent} is not a directory"
        if os.access(parent, os.W_OK | os.X_OK):
            return ""
        with contextlib.suppress(OSError):
            if os.statvfs(parent).f_flag & os.ST_RDONLY:
                return f"{parent} is on a read-only file system"
        return f"user {os.geteuid()} may not write into {parent}"
    return f"{path} has no directory above it"


# --- HOME, TMPDIR, locale -------------------------------------------------------------------------
def choose_home(variables: Mapping[str, str]) -> tuple[str, str]:
    """Return a home directory for the job's processes, and a warning for the log.

    Return two empty texts if the user's home can be written. Caches of Hugging Face, torch and
    Triton are below the home. In a container a user may have no account, and so ``HOME=/`` or no
    HOME. All launchers of one user on a host return the same directory, for example
    ``/tmp/trainworks-home-1000``, so that the jobs share downloaded models. ``make`` makes the
    directory.

    Args:
        variables: The process's environment.
    """
    setting = variables.get("HOME", "")
    home = setting or _home_of_account()
    reason = why_not_writable(home) if home else f"user {os.geteuid()} has no account"
    if not reason:
        return "", ""
    problem = f"HOME is not set ({reason})"
    if setting:
        problem = f"HOME={setting} cannot be used ({reason})"
    # Caches have compiled kernels: directories that forbid execution come last (False is less).
    for place in sorted((*_temporary(variables), *TEMPORARY), key=_forbids_execution):
        new_home = str(Path(place, f"trainworks-home-{os.geteuid()}").absolute())
        if not Path(place).is_dir() or why_not_writable(new_home):
            continue
        if _is_free_or_ours(new_home):
            return new_home, f"{problem}: the job's processes get HOME={new_home}, for their caches"
    advice = "caches of libraries cannot be kept; set HOME"
    return "", f"{problem}, and no temporary directory can be written: {advice}"


def choose_temporary(variables: Mapping[str, str]) -> tuple[str, str]:
    """Return a directory for temporary files that serves every program, and a warning for the log.

    Return two empty texts if the usual directory serves. torch.compile and Triton compile libraries
    there and load them, but Docker mounts a tmpfs with noexec. Programs make sockets there, and the
    kernel limits the length of a socket's path.

    Args:
        variables: The process's environment.
    """
    candidates = dict.fromkeys((*_temporary(variables), *TEMPORARY))
    present = [place for place in candidates if Path(place).is_dir()]
    usable = [place for place in present if not why_not_writable(place)]
    if not usable:
        return "", ""
    usual = usable[0]
    if is_too_long(usual):
        problem = f"the name of {usual} is too long for the sockets that programs make in it"
        advice = f"set TMPDIR to a directory whose name has at most {_NAME_BYTES} bytes"
    elif _forbids_execution(usual):
        problem = (
            f"files in {usual} cannot be executed (it is mounted noexec),"
            " which torch.compile and Triton do"
        )
        advice = f"mount it with exec, for example docker run --tmpfs {usual}:exec, or set TMPDIR"
    else:
        return "", ""
    for place in usable:
        if not _forbids_execution(place) and not is_too_long(place):
            return place, f"{problem}: the job's processes get TMPDIR={place}"
    return "", f"{problem}: {advice}"


_NAME_BYTES = 107 - len("/torch-shm-dir-XXXXXX/manager.sock")
"""Longest name of a directory for temporary files, in bytes.

A socket's path has at most 107 bytes (unix(7)). The text is the longest one that torch and Python's
multiprocessing append to the directory; the launcher's own are shorter.
"""


def is_too_long(place: str) -> bool:
    """Return whether the paths of sockets in a directory would be too long for the kernel."""
    return len(os.fsencode(Path(place).absolute())) > _NAME_BYTES


def choose_locale(variables: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """Return variables of the locale for the job's processes, and a warning for the log.

    Return nothing if the image has the locales of all variables. A scheduler hands on the variables
    of the host that submitted the job, for example LC_ALL=de_DE.UTF-8. A program that requests a
    locale that the image lacks fails, or reads and writes ASCII.

    Args:
        variables: The process's environment.
    """
    missing = []
    for name, value in variables.items():
        is_locale = name == "LANG" or name.startswith("LC_")
        if is_locale and value and value not in _LOCALES and not _has_locale(value):
            missing.append(name)
    if not missing:
        return {}, ""
    listed = ", ".join(f"{name}={variables[name]}" for name in missing)
    line = f"the locale of {listed} is not installed: the job's processes get {_LOCALES[0]}"
    return dict.fromkeys(missing, _LOCALES[0]), line


_LOCALES = ("C.UTF-8", "C.utf8", "C", "POSIX")
"""Locales that glibc has since 2.35, and Debian before that."""


def _has_locale(name: str) -> bool:
    """Return whether the image has a locale. Sets this process's locale, and resets it."""
    import locale  # needed on few hosts

    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, name)
    except (locale.Error, ValueError):
        return False
    locale.setlocale(locale.LC_CTYPE, before)
    return True


def _temporary(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the directories of TMPDIR, TEMP and TMP."""
    places = [variables.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    return tuple(place for place in places if place)


def _forbids_execution(place: str) -> bool:
    """Return whether a directory is mounted noexec; False if it does not exist."""
    try:
        return bool(os.statvfs(place).f_flag & os.ST_NOEXEC)
    except OSError:
        return False


def _home_of_account() -> str:
    """Return the home directory of this user's account, "" for a user without one."""
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


def _is_free_or_ours(path: str) -> bool:
    """Return whether a path is free, or a directory that only this user can write.

    Another user can guess the path and make a directory there first.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return True
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    others_may_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_ours and not others_may_write


# --- making ---------------------------------------------------------------------------------------
def make(places: Mapping[str, str], home: str = "") -> tuple[str, ...]:
    """Make the missing directories, and try to write into each directory.

    Args:
        places: Variable -> path, as ``paths_below`` returns them.
        home: A home directory, for this user only; ``""`` for none.

    Returns:
        The new directories, parents first, for ``take_back``.

    Raises:
        RefusalError: A directory cannot be made or written. The new directories are removed.
    """
    problems = tuple(find_problems(places))
    if problems:
        raise RefusalError(problems)
    made: list[str] = []
    try:
        paths = [*places.values()]
        if home:
            paths.append(home)
        for path in paths:
            mode = 0o700 if path == home else 0o777
            for parent in reversed((Path(path), *Path(path).parents)):
                # It exists, or another host that shares the file system has just made it.
                with contextlib.suppress(FileExistsError):
                    parent.mkdir(mode=mode)
                    made.append(str(parent))
            _try_to_write(path)
    except OSError as error:
        take_back(made)
        problem = Problem(
            f"nothing can be written to {path}: {error.strerror or error}", path, _ADVICE
        )
        raise RefusalError([problem]) from error
    return tuple(made)


def _try_to_write(directory: str) -> None:
    """Make a file in a directory, and remove it. Raises OSError if that fails.

    On a network file system open(2) may fail where access(2) succeeds.
    """
    import tempfile

    with tempfile.TemporaryFile(dir=directory, prefix=".trainworks-"):
        pass


def take_back(made: Iterable[str]) -> None:
    """Remove the directories that ``make`` has returned, if they are still empty."""
    for path in reversed(tuple(made)):
        with contextlib.suppress(OSError):
            os.rmdir(path)  # noqa: PTH106  (the same, and quicker)
