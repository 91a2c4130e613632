"""Files that dead ranks leave in /dev/shm: a killed process removes neither its shared memory nor
the segments of NCCL.

Docker gives a container 64 MiB of it, so a dozen restarts would fill /dev/shm. Before an attempt,
and after a restart by torchrun, the launcher removes each file that this user owns, that is newer
than the job, and that no process has mapped or open.

The launcher does so where /dev/shm belongs to this container alone. Elsewhere another job of this
user may be about to open such a file, and the launcher only logs the leftovers. Files of another
user stay: the mappings of another user's processes cannot be read (proc(5)).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Iterator, Mapping, NamedTuple

from trainworks_launcher.contract.files import text_of

PLACE = "/dev/shm"  # noqa: S108  (the kernel's own, not a file of ours)

_IPC_OF_THE_HOST = f"ipc:[{0xEFFFFFFF}]"  # include/linux/proc_ns.h, PROC_IPC_INIT_INO
_BLOCK_BYTES = 512
"""Unit of ``st_blocks`` (inode(7)), whatever the blocks of the file system are."""

# Places of fields in a line of mountinfo before and after " - ", and of maps (proc(5)).
_MOUNT_POINT = slice(4, 5)
_TYPE_AND_SOURCE = slice(0, 2)
_MAP_FIELDS = 6
_MAP_DEVICE, _MAP_INODE, _MAP_PATH = 3, 4, 5


class Key(NamedTuple):
    """Identity of a file under any name: the device of its file system, and its number there."""

    device: int
    inode: int


class Leftovers(NamedTuple):
    """The result of a clean-up.

    Attributes:
        number: Number of files.
        size: Their bytes.
        removed: Whether the files were removed.
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
    """Return this user's files below a directory: identity -> (path, bytes on the disk)."""
    own_files: dict[Key, tuple[str, int]] = {}
    for folder, _, names in os.walk(place):
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                status = path.lstat()
                if status.st_uid == os.geteuid():
                    size = status.st_blocks * _BLOCK_BYTES
                    own_files[Key(status.st_dev, status.st_ino)] = (str(path), size)
    return own_files


def clean_up(before: frozenset[Key], place: str = PLACE, until: float = 0.0) -> Leftovers | None:
    """Remove the files that dead processes of the job have left in a directory.

    They are only counted if the directory is not this container's alone. Call this in a thread: it
    may wait for a process.

    Args:
        before: The files that existed when the job began.
        place: The directory.
        until: Start of the ranks that run now, in seconds since 1970. Files that were changed
            later may be theirs. 0 if no rank runs.

    Returns:
        The number and size of the files; None if there are none. A file that cannot be removed is
        counted, too.
    """
    of_job = {}
    for key, (path, size) in files(place).items():
        may_be_of_running_rank = until > 0 and _changed_at(path) >= until
        if key in before or may_be_of_running_rank:
            continue
        of_job[key] = (path, size)
    if not of_job:
        return None
    # Last, because reading all processes takes time.
    for key in set(_files_in_use()):
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
    """Return whether a directory belongs to this container alone.

    Engines of containers (Docker, Podman, containerd, CRI-O) mount a file system named ``shm``
    there. With ``--ipc=host``, or without a container, the namespace of IPC is the host's, and a
    mount of the host's directory has another name.
    """
    try:
        if os.readlink("/proc/self/ns/ipc") == _IPC_OF_THE_HOST:
            return False
    except OSError:
        # Without certainty the files of other jobs count more.
        return False
    source = ""
    for line in text_of(mounts).splitlines():
        mount, _, system = line.partition(" - ")
        # A later mount hides the earlier ones.
        if mount.split()[_MOUNT_POINT] == [place]:
            source = " ".join(system.split()[_TYPE_AND_SOURCE])
    return source == "tmpfs shm"


def _files_in_use() -> Iterator[Key]:
    """Yield the files that a process has mapped or open; a file may come several times."""
    for entry in os.listdir("/proc"):  # noqa: PTH208  (names, not paths)
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError):
            yield from _mapped_files(entry)
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{entry}/fd"):  # noqa: PTH208
                with contextlib.suppress(OSError):
                    yield _read_key(f"/proc/{entry}/fd/{number}")


def _mapped_files(entry: str) -> Iterator[Key]:
    """Yield the files in the list of a process's mappings (proc(5), maps).

    Args:
        entry: The process id as text.
    """
    # A line: 7f00-7f01 rw-s 00000000 00:1a 4711 /dev/shm/name
    for line in text_of(f"/proc/{entry}/maps").splitlines():
        fields = line.split(None, _MAP_PATH)
        # Memory without a file has no path, or a name such as [heap].
        if len(fields) == _MAP_FIELDS and fields[_MAP_PATH].startswith("/"):
            major, _, minor = fields[_MAP_DEVICE].partition(":")
            device = os.makedev(int(major, 16), int(minor, 16))
            yield Key(device, int(fields[_MAP_INODE]))


def _changed_at(path: str) -> float:
    """Return when a file was changed, in seconds since 1970; 0.0 if it is gone."""
    try:
        return os.lstat(path).st_ctime
    except OSError:
        return 0.0


def _read_key(path: str) -> Key:
    """Return the identity of the file that a path leads to. Raises OSError."""
    status = os.stat(path)  # noqa: PTH116
    return Key(status.st_dev, status.st_ino)
