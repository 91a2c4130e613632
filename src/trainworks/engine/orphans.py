"""Ends containers and children that killed builders left running.

A process that is killed (SIGKILL, the machine's memory is full) removes nothing. The next builder
that builds or makes a container ends the leftovers. The owner of a leftover stands in the
container's name or in the child's environment: a process with the time of its start, in a kernel
since its boot, in a namespace of process numbers. Leftovers of another machine, boot or namespace
stay: whether their owner lives is unknown.
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
    """Return a new name for a container of this process: its owner and twelve random digits."""
    return f"{PREFIX}{owner()}.{uuid.uuid4().hex[:12]}"


def owner() -> str:
    """Return this process as words of a name: ``BOOT.NAMESPACE.NUMBER.START``.

    Without /proc the owner is random, and matches no process.
    """
    kernel = _kernel()
    started = _start_of(os.getpid())
    if kernel and started:
        return f"{kernel}.{os.getpid()}.{started}"
    return f"{uuid.uuid4().hex[:8]}.0.0.0"


def has_ended(owner: str) -> bool:
    """Return whether a process, in the form of ``owner()``, has ended.

    ``False`` where that cannot be known.
    """
    kernel, process, started = owner.rsplit(".", 2)
    return kernel == _kernel() and _start_of(int(process)) != started


def remove_left_containers(names: Iterable[str], remove: Callable[[str], object]) -> None:
    """Call ``remove`` with each name of a container whose process has ended."""
    for name in names:
        container = _NAME.match(name)
        if container and has_ended(container["owner"]):
            with uninterrupted():
                remove(name)


def end_left_children() -> None:
    """Send SIGINT to the children of killed builders of this user: their builds would go on.

    They are found by the variable ``OWNER`` in their environment. Nothing is waited for.
    """
    mark = f"{OWNER}=".encode()
    for folder in _PROC.glob("[0-9]*"):
        # A process that ends meanwhile, or another user's, cannot be read.
        with contextlib.suppress(OSError, ValueError):
            if folder.stat().st_uid != os.geteuid():
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
            for variable in variables:
                if variable.startswith(mark):
                    # The first one counts, as for getenv.
                    starter = variable.removeprefix(mark).decode()
                    if starter and has_ended(starter):
                        os.kill(int(folder.name), signal.SIGINT)
                    break


def _kernel() -> str:
    """Return the kernel's boot and this process's namespace of process numbers.

    ``BOOT.NAMESPACE``, such as ``0123abcd.4026531836``; ``""`` where they cannot be read.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text()[:8]
        namespace = str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return ""
    # The link has the form pid:[4026531836].
    digits = "".join(filter(str.isdigit, namespace))
    return f"{boot}.{digits}"


def _start_of(process: int) -> str:
    """Return when a process started, in clock ticks since the boot, as text.

    ``""`` if there is no such process, or it is dead and not reaped.
    """
    try:
        stat = (_PROC / str(process) / "stat").read_text()
    except OSError:
        return ""
    # proc(5): the name of the program, in brackets, may have blanks and brackets.
    _, _, after_name = stat.rpartition(")")
    state, *fields = after_name.split()
    # Z is a zombie, X a dead process.
    return "" if state in "ZX" else fields[18]
