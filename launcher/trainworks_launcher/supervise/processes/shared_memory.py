"""What dead ranks leave in /dev/shm: a killed process removes neither its
shared memory nor the segments of NCCL.

Docker gives a container 64 MiB of it, so a job that starts again a dozen times would fill it.
Before a try, and after a restart of torchrun's own, the files are removed that this user owns, that
were not there when the job began, and that no process has mapped or open. That is done where
/dev/shm belongs to this container alone. Elsewhere other jobs of this user may be about to open
such a file: a line says what was left.

A file of another user's process can be seen as little as that process's
mappings (proc(5)); it is not ours to remove.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Iterator, Mapping, NamedTuple

from trainworks_launcher.contract.files import text_of

PLACE = "/dev/shm"  # noqa: S108  (the kernel's own, not a file of ours)

_IPC_OF_THE_HOST = f"ipc:[{0xEFFFFFFF}]"  # include/linux/proc_ns.h, PROC_IPC_INIT_INO


class Key(NamedTuple):
    """A file, whatever its name: the file system's device and the number of the file there."""

    device: int
    inode: int


class Leftovers(NamedTuple):
    """What a clean-up has found. number, size: of files, and their bytes.
    removed: whether they were removed.
    """

    number: int
    size: int
    removed: bool

    def __str__(self) -> str:
        """Return a line for the log."""
        files = f"{self.number} file(s), {self.size / (1 << 20):.0f} MiB, in {PLACE}"
        if self.removed:
            return f"removed what dead ranks left: {files}"
        return f"dead ranks have left {files}; other jobs may use it too, so it stays"


def files(place: str = PLACE) -> Mapping[Key, tuple[str, int]]:
    """Return this user's files there: which one -> its path and size."""
    found: dict[Key, tuple[str, int]] = {}
    for folder, _, names in os.walk(place):
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                status = path.lstat()
                if status.st_uid == os.geteuid():
                    found[Key(status.st_dev, status.st_ino)] = (str(path), status.st_blocks * 512)
    return found


def clean_up(before: frozenset[Key], place: str = PLACE, until: float = 0.0) -> Leftovers | None:
    """Remove what dead processes have left; None if that is nothing.

    May wait for a process: call it in a thread.

    Args:
        before: The files that were there when the job began.
        place: The directory.
        until: When the ranks that run now have started, in seconds since 1970; files that came
            later may be theirs. 0: none runs.
    """
    of_job = {}
    for key, (path, size) in files(place).items():
        if key in before or (until and _changed(path) >= until):
            continue
        of_job[key] = (path, size)
    if not of_job:
        return None
    for key in set(_used()):
        of_job.pop(key, None)
    if not of_job:
        return None

    own = is_own(place)
    total = 0
    for path, size in of_job.values():
        total += size
        if own:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
    return Leftovers(len(of_job), total, own)


def is_own(place: str = PLACE, mounts: str = "/proc/self/mountinfo") -> bool:
    """Return whether the place belongs to this container alone.

    A container's engine mounts a file system there that is named ``shm`` (Docker, Podman,
    containerd, CRI-O). With ``--ipc=host``, or in no container, the namespace of IPC is the host's;
    a mount of the host's directory has another name.
    """
    try:
        if os.readlink("/proc/self/ns/ipc") == _IPC_OF_THE_HOST:
            return False
    except OSError:
        return False
    source = ""
    for line in text_of(mounts).splitlines():
        mount, _, system = line.partition(" - ")
        if mount.split()[4:5] == [place]:  # the last one lies over those before
            source = " ".join(system.split()[:2])
    return source == "tmpfs shm"


def _used() -> Iterator[Key]:
    """Yield the files that a process has mapped or open."""
    for entry in os.listdir("/proc"):  # noqa: PTH208  (names, not paths)
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError):
            yield from _mapped(entry)
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{entry}/fd"):  # noqa: PTH208
                with contextlib.suppress(OSError):
                    yield _key(f"/proc/{entry}/fd/{number}")


def _mapped(entry: str) -> Iterator[Key]:
    """Yield the files in the list of a process's mappings."""
    for line in text_of(f"/proc/{entry}/maps").splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith("/"):
            major, _, minor = fields[3].partition(":")
            yield Key(os.makedev(int(major, 16), int(minor, 16)), int(fields[4]))


def _changed(path: str) -> float:
    try:
        return os.lstat(path).st_ctime
    except OSError:
        return 0.0


def _key(path: str) -> Key:
    status = os.stat(path)  # noqa: PTH116
    return Key(status.st_dev, status.st_ino)
