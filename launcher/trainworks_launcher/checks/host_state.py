"""Read the state of a host from the kernel's own files, none of which can hang on a device.

The driver may hang: ``gpus`` queries the driver by processes that can be left behind.
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

_IFF_UP = 1
"""Bit of an interface that is up (netdevice(7))."""

_FULL_BYTES = 1 << 16
"""Free bytes on a disk that counts as full: a program that writes in blocks may leave so much."""


class HostState(NamedTuple):
    """The state of a host.

    Attributes:
        driver: Version of the NVIDIA driver; ``""`` for none, or if not known.
        gpus: GPUs by nvidia-smi; None if it was not queried.
        shared_memory: Size of /dev/shm in bytes; None if there is none.
        free: Directory -> free bytes of its file system.
        interface_up: Whether the interface is up and has a carrier; None if there is no such
            interface.
    """

    driver: str = ""
    gpus: Gpus | None = None
    shared_memory: int | None = None
    free: Mapping[str, int] = MappingProxyType({})
    interface_up: bool | None = None


def driver_version(text: str) -> str:
    """Parse the driver's version in the text of /proc/driver/nvidia/version.

    Returns:
        For example ``535.183.01``; ``""`` if the text has none.
    """
    match = _VERSION.search(text)
    if match is None:
        return ""
    return match.group(1)


def read_host_state(
    interface: str, directories: Sequence[str], gpus: Gpus | None = None
) -> HostState:
    """Read the state of this host from the kernel's files.

    A figure that cannot be read has the value for "not known".

    Args:
        interface: Network interface; ``""`` for none.
        directories: Directories to which the job writes.
        gpus: GPUs by nvidia-smi; None if it was not queried.
    """
    driver = driver_version(text_of("/proc/driver/nvidia/version"))
    # A container may not see that file.
    if not driver and gpus is not None:
        driver = gpus.driver
    free = {}
    for directory in directories:
        file_system = _read_file_system(directory)
        # A file system without blocks, such as one of the network, does not report its space.
        if file_system is not None and file_system.f_blocks:
            free[directory] = file_system.f_frsize * file_system.f_bavail
    return HostState(
        driver=driver,
        gpus=gpus,
        shared_memory=size_of("/dev/shm"),  # noqa: S108  (the kernel's own, not a file of ours)
        free=free,
        interface_up=_is_up(interface) if interface else None,
    )


def _is_up(interface: str) -> bool | None:
    """Return whether a network interface is up and has a carrier; None if it does not exist.

    Source: Linux, Documentation/ABI/testing/sysfs-class-net.
    """
    flags = text_of(f"/sys/class/net/{interface}/flags").strip()
    if not flags:
        return None
    # The carrier cannot be read while the interface is down.
    carrier = text_of(f"/sys/class/net/{interface}/carrier").strip()
    return bool(int(flags, 16) & _IFF_UP) and carrier != "0"


def size_of(path: str) -> int | None:
    """Return the size of the file system at a path in bytes; None if the path does not exist."""
    try:
        file_system = os.statvfs(path)
    except OSError:
        return None
    return file_system.f_frsize * file_system.f_blocks


def is_full(path: str) -> bool:
    """Return whether the file system of a path has less than 64 KiB, or no inode, left.

    False for a read-only file system, and for one that cannot be examined.

    Args:
        path: The path, which need not exist.
    """
    file_system = _read_file_system(path)
    if file_system is None or file_system.f_flag & os.ST_RDONLY:
        return False
    # root may use blocks and inodes that are reserved.
    blocks, inodes = file_system.f_bfree, file_system.f_ffree
    if os.geteuid():
        blocks, inodes = file_system.f_bavail, file_system.f_favail
    # A file system without a fixed number of inodes reports 0 of them.
    if file_system.f_files > 0 and not inodes:
        return True
    return file_system.f_blocks > 0 and blocks * file_system.f_frsize < _FULL_BYTES


def _read_file_system(path: str) -> os.statvfs_result | None:
    """Examine the file system of a path, or of its nearest existing parent.

    None if none can be examined.
    """
    absolute = Path(path).absolute()
    for parent in (absolute, *absolute.parents):
        with contextlib.suppress(OSError):
            return os.statvfs(str(parent))
    return None
