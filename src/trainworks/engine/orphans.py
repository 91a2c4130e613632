"""What builders that were killed left running: containers, known by their
names, and children, by their environment.

A process that is killed (SIGKILL, the machine's memory is full) removes nothing. The next one that
builds or makes a container ends what such processes left. Whose it is stands in a name or a
variable: the process with the time of its start, in a kernel since its boot, in a namespace of
process numbers. Of another machine, another boot and another namespace nothing is known, and
nothing is ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from trainworks.engine.subprocesses import uninterrupted

PREFIX: Final = "trainworks-"
"""The beginning of the name of every container that is made for a while."""

OWNER: Final = "TRAINWORKS_OWNER"
"""Variable of the children that build: the process that started them."""

_NAME: Final = re.compile(rf"{PREFIX}(?P<owner>[0-9a-f]{{8}}(\.\d+){{3}})\.[0-9a-f]{{12}}\Z")
_PROC: Final = Path("/proc")


def container_name() -> str:
    """Return a new name for a container of this process."""
    return f"{PREFIX}{owner()}.{uuid.uuid4().hex[:12]}"


def owner() -> str:
    """Return this process as words of a name: kernel, namespace, number, start.

    Without /proc it is nobody.
    """
    kernel = _kernel()
    started = _start_of(os.getpid())
    return (
        f"{kernel}.{os.getpid()}.{started}"
        if kernel and started
        else f"{uuid.uuid4().hex[:8]}.0.0.0"
    )


def is_left(of: str) -> bool:
    """Return whether a process, as ``owner`` wrote it, has ended.

    ``False`` where that cannot be known.
    """
    kernel, process, started = of.rsplit(".", 2)
    return kernel == _kernel() and _start_of(int(process)) != started


def remove_left_containers(names: Iterable[str], remove: Callable[[str], object]) -> None:
    """Call ``remove`` with each name of a container whose process has ended."""
    for name in names:
        found = _NAME.match(name)
        if found and is_left(found["owner"]):
            with uninterrupted():
                remove(name)


def end_left_children() -> None:
    """Interrupt what builders of this user that were killed had started: a
    build that nobody waits for goes on.
    """
    mark = f"{OWNER}=".encode()
    for folder in _PROC.glob("[0-9]*"):
        # A process that ends meanwhile, or another user's, has nothing that can be read.
        with contextlib.suppress(OSError, ValueError):
            if folder.stat().st_uid != os.geteuid():
                continue
            words = (folder / "environ").read_bytes().split(b"\0")
            of = next(
                (word.removeprefix(mark).decode() for word in words if word.startswith(mark)), ""
            )
            if of and is_left(of):
                os.kill(int(folder.name), signal.SIGINT)


def _kernel() -> str:
    """Return the kernel's boot and this process's namespace of process numbers.

    ``""`` where they cannot be read.
    """
    with contextlib.suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text()[:8]
        return f"{boot}.{''.join(filter(str.isdigit, str((_PROC / 'self/ns/pid').readlink())))}"
    return ""


def _start_of(process: int) -> str:
    """Return when a process started, in ticks since the boot.

    ``""`` if there is none, or it is dead and not reaped.
    """
    with contextlib.suppress(OSError):
        # proc(5): the name of the program, in brackets, may have blanks and brackets.
        state, *fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""
