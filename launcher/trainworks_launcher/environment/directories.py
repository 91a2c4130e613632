"""Where a job writes: the directories that its script is told of.

They exist, and can be written, before it starts.

A script saves its model as its last act, so a place that is missing costs the whole training.
``supervise`` makes the places on every host, before the hosts join each other; it takes back what
it made if the job is refused after all.

What is written is kept only on a mount, or on a host's own disk: a container's root, and memory,
end with the job. So the mount table chooses the places, and the log says what nothing keeps.
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
"""Variable of the place where the launcher's own reports go, too."""

RESULTS: Mapping[str, str] = {
    "SM_MODEL_DIR": "model",
    OUTPUT: "output",
    "SM_OUTPUT_DATA_DIR": "output/data",
    "SM_OUTPUT_INTERMEDIATE_DIR": "output/intermediate",
}
"""Variable that tells the script of a place -> the place, below the directory
of the job's results.
"""

TEMPORARY = (
    "/tmp",  # noqa: S108
    "/var/tmp",  # noqa: S108
    "/usr/tmp",
    "/dev/shm",  # noqa: S108
)
"""Where temporary files may be, in order: Python's own list (tempfile), then memory.

Never the current directory, which is the user's code.
"""

_ADVICE = (
    f"mount a directory there that this user can write, or set {names.BASE_DIRECTORY_VARIABLE} to"
    " one that keeps the results"
)
_CHECKPOINT_ADVICE = (
    f"set {names.CHECKPOINT_DIRECTORY_VARIABLE} to a directory that this user can write"
)


def named(results: str, checkpoints: str) -> Mapping[str, str]:
    """Return variable -> path of every place that a script writes to.

    Args:
        results: Root of the job's results.
        checkpoints: Directory of checkpoints; ``""`` if there is none.
    """
    directories = {variable: f"{results}/{place}" for variable, place in RESULTS.items()}
    if checkpoints:
        directories[names.CHECKPOINT_DIRECTORY_VARIABLE] = checkpoints
    return directories


class Results(NamedTuple):
    """Where a job's results go.

    Attributes:
        paths: Variable of RESULTS -> path.
        why: Variable -> why it is there, or that nothing keeps it; nothing for
            the platform's own place.
        note: Line for the log if they are not in the platform's own place; ``""``: they are.
        warning: Line that says what ends with the container, and what to mount; ``""`` for nothing.
    """

    paths: Mapping[str, str]
    why: Mapping[str, str]
    note: str = ""
    warning: str = ""


def choose(
    roots: Sequence[str], told: Mapping[str, str], checkpoints: str, keeps: Callable[[str], bool]
) -> Results:
    """Choose each place by itself: the first that is kept and can be written,
    else the first that can be written.

    Args:
        roots: Directories that may hold the results, in order; at least one.
        told: Variable of RESULTS -> directory that a person has set.
        checkpoints: Directory of checkpoints; ``""`` if there is none.
        keeps: Whether what is written to a path is still there when the job has ended.
    """
    paths: dict[str, str] = {}
    why: dict[str, str] = {}
    moved: list[str] = []
    reason = ""
    for variable, place in RESULTS.items():
        given = told.get(variable, "").strip()
        if given:
            paths[variable] = str(Path(given).absolute())
            why[variable] = "the variable was set"
            continue
        own = [f"{root}/{place}" for root in roots]
        writable = [path for path in own if not why_not_writable(path)]
        first = (writable or own)[0]
        paths[variable] = next(filter(keeps, writable), first)
        if paths[variable] != own[0]:
            moved.append(paths[variable])
            problem = why_not_writable(own[0]) or f"no mount keeps {own[0]}"
            why[variable] = f"in the working directory, because {problem}"
            reason = reason or why[variable]

    written = dict(paths)
    if checkpoints:
        written[names.CHECKPOINT_DIRECTORY_VARIABLE] = checkpoints
    lost = {variable: path for variable, path in written.items() if not keeps(path)}
    for variable in lost:
        why[variable] = "it ends with this container: no mount keeps it"
    note = warning = ""
    if moved:
        note = f"results go to {' and '.join(outermost(moved))}, {reason}"
    if lost:
        warning = _warning(outermost(lost.values()))
    return Results(paths, why, note, warning)


def outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that are in none of the others, each once."""
    unique = dict.fromkeys(paths)
    outer = []
    for path in unique:
        others = unique.keys() - {path}
        if not any(_is_in(path, other) for other in others):
            outer.append(path)
    return outer


def _warning(lost: Sequence[str]) -> str:
    """Return a line about paths that nothing keeps."""
    mounts = " ".join(f'-v "$PWD/{Path(path).name}:{path}"' for path in lost)
    return (
        f"results end with this container: no mount keeps {' and '.join(lost)}; mount a directory"
        f" of the host or a volume there: docker run {mounts}"
    )


# --- mounts ---------------------------------------------------------------------------------------
MOUNTS = "/proc/self/mountinfo"
"""The kernel's table of this process's mounts (proc(5))."""

_IN_MEMORY = ("tmpfs", "ramfs", "rootfs", "devtmpfs")
_ENDS_WITH_IT = re.compile(r"/volumes/[0-9a-f]{64}/_data(/|$)|/kubernetes\.io~empty-dir/")
"""Directory of a host that is made for one container and removed with it: a
volume without a name, an emptyDir.
"""


class _Mount(NamedTuple):
    """A row of the table: its number, its parent's, the directory that is
    mounted, where, and the file system.
    """

    number: str
    parent: str
    root: str
    point: str
    kind: str


def keeps(path: str, table: str) -> bool:
    """Return whether what is written to a path is still there when this container has ended.

    It is on a mount, or on the root of a host that is no container. Not on a mount in memory, of a
    volume without a name, of an emptyDir. Without a table (no Linux) nothing is known, and it
    counts as kept.

    Args:
        path: The path; it need not exist.
        table: The text of MOUNTS.
    """
    mounts = [_mount(line) for line in table.splitlines() if line.count(" ") > 7]
    mount = _mount_of(os.path.realpath(path), mounts)
    if mount is None:  # a chroot in a directory of a host
        return True
    if mount.kind in _IN_MEMORY or _ENDS_WITH_IT.search(mount.root):
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


def kind_of_mount(path: str, table: str) -> str:
    """Return the file system that a path is on by its words alone.

    ``""`` if the table does not say it.

    No link is followed: the file system may not answer.

    Args:
        path: An absolute path.
        table: The text of MOUNTS.
    """
    mounts = [_mount(line) for line in table.splitlines() if line.count(" ") > 7]
    mount = _mount_of(path, mounts)
    return mount.kind if mount is not None else ""


def _mount(line: str) -> _Mount:
    """Return a row of the table, such as ``36 35 98:0 / /data rw,noatime - ext4 /dev/sda1 rw``."""
    before, _, after = line.partition(" - ")
    number, parent, _, root, point = map(_unescaped, before.split(" ")[:5])
    return _Mount(number, parent, root, point, after.split(" ")[0])


def _unescaped(word: str) -> str:
    """Return a word of the table as it is: a space is written as ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def _mount_of(path: str, mounts: Sequence[_Mount]) -> _Mount | None:
    """Return the mount on which a path is, as the kernel finds it: from the
    root down, each in its parent.
    """
    numbers = {mount.number for mount in mounts}
    mount: _Mount | None = None
    inside = [row for row in mounts if row.parent not in numbers]
    while True:
        above = [row for row in inside if _is_in(path, row.point)]
        if not above:
            return mount
        mount = min(above, key=lambda row: len(row.point))
        inside = [row for row in mounts if row.parent == mount.number != row.number]


def _is_in(path: str, directory: str) -> bool:
    """Return whether a path is a directory, or below it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def problems_of(places: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what keeps a job from writing to its places: one problem for each reason, with the
    names of the places.
    """
    reasons: dict[str, list[str]] = {}
    for variable, path in places.items():
        reason = why_not_writable(path)
        if reason:
            reasons.setdefault(reason, []).append(variable)
    for reason, variables in reasons.items():
        advice = _ADVICE
        if variables == [names.CHECKPOINT_DIRECTORY_VARIABLE]:
            advice = _CHECKPOINT_ADVICE
        problem = f"nothing can be written to {', '.join(variables)}: {reason}"
        yield Problem(problem, places[variables[0]], advice)


def why_not_writable(path: str) -> str:
    """Return why a directory can neither be written nor made, ``""`` if it can. Changes nothing.

    The kernel is asked about the directory, or about the nearest one above it
    that exists (access(2)).
    """
    place = Path(path)
    for parent in (place, *place.parents):
        try:
            mode = parent.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if parent.is_symlink():
                return f"{parent} is a link that leads nowhere"
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
def home_of(variables: Mapping[str, str]) -> tuple[str, str]:
    """Return a home directory for the job's processes, and a line about it.

    Both ``""`` if theirs can be written.

    Caches of Hugging Face, torch and Triton are below the home. A user without an account, as a
    container may have, gets ``HOME=/`` or none. The directory is the user's own, and the same for
    all launchers of a host: a model that is downloaded into its cache is there for each of them. It
    is not made here.

    Args:
        variables: The process's environment.
    """
    told = variables.get("HOME", "")
    home = told or _home_of_account()
    reason = why_not_writable(home) if home else f"user {os.geteuid()} has no account"
    if not reason:
        return "", ""
    problem = f"HOME={told} cannot be used ({reason})" if told else f"HOME is not set ({reason})"
    # Compiled kernels are in caches, too: where files cannot be executed is the last resort.
    for place in sorted((*_temporary(variables), *TEMPORARY), key=_forbids_execution):
        chosen = str(Path(place, f"trainworks-home-{os.geteuid()}").absolute())
        if not Path(place).is_dir() or why_not_writable(chosen):
            continue
        if _is_free_or_ours(chosen):
            return chosen, f"{problem}: the job's processes get HOME={chosen}, for their caches"
    advice = "caches of libraries cannot be kept; set HOME"
    return "", f"{problem}, and no temporary directory can be written: {advice}"


def temporary_of(variables: Mapping[str, str]) -> tuple[str, str]:
    """Return a directory for temporary files that serves every program, and a line about it.

    Both ``""`` if the usual one does. torch.compile and Triton compile there, and load what they
    compiled; Docker mounts a tmpfs so that nothing in it can be executed. Sockets are made there,
    whose paths have a limit.

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
"""Longest name of a directory for temporary files: a socket's path has at most 107 bytes (unix(7)),
and this is the longest that torch and Python's multiprocessing append. The launcher's own are
shorter.
"""


def is_too_long(place: str) -> bool:
    """Return whether the paths of sockets in a directory for temporary files
    would be too long for the kernel.
    """
    return len(os.fsencode(Path(place).absolute())) > _NAME_BYTES


def locale_of(variables: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """Return variables of the locale for the job's processes, and a line about them.

    Nothing where theirs exist.

    A scheduler hands on those of the host that submitted the job. A program that asks for a locale
    that the image lacks fails, or reads and writes ASCII.

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
"""Locales that glibc has itself since 2.35, and Debian before that."""


def _has_locale(name: str) -> bool:
    import locale  # few hosts name a locale of their own

    kept = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, name)
    except (locale.Error, ValueError):
        return False
    locale.setlocale(locale.LC_CTYPE, kept)
    return True


def _temporary(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the temporary directories that the environment names."""
    places = [variables.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    return tuple(place for place in places if place)


def _forbids_execution(place: str) -> bool:
    """Return whether files below a directory cannot be executed.

    Of one that does not exist, False.
    """
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
    """Return whether nothing is there, or a directory that only this user can
    write: others can guess the name.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return True
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_ours and not status.st_mode & 0o022


# --- making ---------------------------------------------------------------------------------------
def make(places: Mapping[str, str], home: str = "") -> tuple[str, ...]:
    """Make the directories that are missing, and write into each of them for a moment.

    Args:
        places: Variable -> path, as ``named`` returns them.
        home: A home directory, for this user only; ``""`` for none.

    Returns:
        What was made, each directory before those in it, for ``take_back``.

    Raises:
        RefusalError: One of them cannot be made or written. What was made is taken back.
    """
    problems = tuple(problems_of(places))
    if problems:
        raise RefusalError(problems)
    made: list[str] = []
    try:
        wanted = [*places.values()]
        if home:
            wanted.append(home)
        for path in wanted:
            for parent in reversed((Path(path), *Path(path).parents)):
                with contextlib.suppress(FileExistsError):
                    parent.mkdir(mode=0o700 if path == home else 0o777)
                    made.append(str(parent))
            _try(path)
    except OSError as error:
        take_back(made)
        problem = Problem(
            f"nothing can be written to {path}: {error.strerror or error}", path, _ADVICE
        )
        raise RefusalError([problem]) from error
    return tuple(made)


def _try(directory: str) -> None:
    """Make a file and remove it: what access(2) says is not the last word on a
    network file system.
    """
    import tempfile

    with tempfile.TemporaryFile(dir=directory, prefix=".trainworks-"):
        pass


def take_back(made: Iterable[str]) -> None:
    """Remove the directories of ``make`` that are still empty."""
    for path in reversed(tuple(made)):
        with contextlib.suppress(OSError):
            os.rmdir(path)  # noqa: PTH106  (the same, and quicker)
