"""What the kernel's own files say about a host. Reads only; nothing of it can hang on a device.

The driver may: ``gpus`` asks it by processes that can be left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract.files import text_of

if TYPE_CHECKING:
    from trainworks_launcher.checks.gpus import Gpus

_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")

_FULL_BYTES = 1 << 16
"""What a program that writes in blocks may leave on a disk that is full."""


class Seen(NamedTuple):
    """What was seen on a host.

    Attributes:
        driver: Version of the NVIDIA driver; ``""`` if there is none, or it does not say.
        gpus: What nvidia-smi says; None if it was not asked.
        shared_memory: Size of /dev/shm in bytes; None if there is none.
        free: Directory -> bytes that can be written there, by its longest existing parent.
        interface_up: Whether the interface is up and has a carrier; None if it
            is not there, or none was asked for.
    """

    driver: str = ""
    gpus: Gpus | None = None
    shared_memory: int | None = None
    free: Mapping[str, int] = MappingProxyType({})
    interface_up: bool | None = None


def driver_version(text: str) -> str:
    """Return the version in the text of /proc/driver/nvidia/version; ``""`` for none."""
    match = _VERSION.search(text)
    return match.group(1) if match else ""


def look(interface: str, directories: Sequence[str], gpus: Gpus | None = None) -> Seen:
    """Look at this host.

    Args:
        interface: Network interface; ``""`` for none.
        directories: Where the job writes.
        gpus: What nvidia-smi said; None if it was not asked.
    """
    driver = driver_version(text_of("/proc/driver/nvidia/version"))
    if not driver and gpus is not None:
        driver = gpus.driver
    free = {}
    for directory in directories:
        file_system = _file_system(directory)
        if file_system is not None and file_system.f_blocks:
            free[directory] = file_system.f_frsize * file_system.f_bavail
    return Seen(
        driver=driver,
        gpus=gpus,
        shared_memory=size_of("/dev/shm"),  # noqa: S108  (the kernel's own, not a file of ours)
        free=free,
        interface_up=_is_up(interface) if interface else None,
    )


def _is_up(interface: str) -> bool | None:
    """Return whether a network interface is up and has a carrier; None if the kernel has none.

    Source: Linux, Documentation/ABI/testing/sysfs-class-net.
    """
    flags = text_of(f"/sys/class/net/{interface}/flags").strip()
    if not flags:
        return None
    carrier = text_of(f"/sys/class/net/{interface}/carrier").strip()
    return bool(int(flags, 16) & 1) and carrier != "0"


def size_of(path: str) -> int | None:
    """Return the size of a file system in bytes; None if there is none."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def is_full(path: str) -> bool:
    """Return whether the file system of a path can be written, and has less
    than _FULL_BYTES, or no inode, left.
    """
    found = _file_system(path)
    if found is None or found.f_flag & os.ST_RDONLY:
        return False
    blocks = found.f_bavail if os.geteuid() else found.f_bfree
    no_inode = found.f_files > 0 and not (found.f_favail if os.geteuid() else found.f_ffree)
    return no_inode or (found.f_blocks > 0 and blocks * found.f_frsize < _FULL_BYTES)


def _file_system(path: str) -> os.statvfs_result | None:
    place = Path(path).absolute()
    for parent in (place, *place.parents):
        with contextlib.suppress(OSError):
            return os.statvfs(str(parent))
    return None
