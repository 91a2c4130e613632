"""The highest memory of a host, and the use of its GPUs: asked now and then, at most every half minute.

The kernel keeps the highest memory of a container itself. Where it does not, what the processes of the job hold is
summed up. GPUs are asked by a program of its own (``programs/gpu_use``): a broken driver may hang, or end its caller.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Callable, Iterator, Sequence

from trainworks_launcher.contract.values import Json, decode, number
from trainworks_launcher.supervise.loop import READ, Loop
from trainworks_launcher.supervise.summary.figures import Gpu
from trainworks_launcher.supervise.verdict.memory import highest_bytes

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds between two samples: each pause is twice the one before, so that a short job has samples, too."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_ANSWER_BYTES = 1 << 20


class Gauges:
    """The gauges of one host. Every method runs in the loop's thread."""

    def __init__(self, loop: Loop, highest: Callable[[], int | None] = highest_bytes) -> None:
        """Nothing is asked before ``begin``. highest: returns what the kernel says of the memory, or None."""
        self._loop = loop
        self._highest = highest
        self._summed = 0
        self._asking: subprocess.Popen[bytes] | None = None
        self._answer = b""
        self._samples: dict[int, list[tuple[int, int]]] = {}
        self._over = False

    def begin(self, program: Sequence[str], visible: Sequence[str] | None) -> None:
        """Ask from now on.

        Args:
            program: The command that prints the use of the GPUs; () where there are none.
            visible: The GPUs that the job may use; None: all.
        """
        if self._highest() is None:
            self._sum_up(FIRST_PAUSE)
        if program:
            with contextlib.suppress(OSError):
                words = (*program, f"{FIRST_PAUSE:g}", f"{LONGEST_PAUSE:g}", *(visible or ()))
                self._asking = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
        if self._asking is not None and self._asking.stdout is not None:
            source = self._asking.stdout.fileno()
            os.set_blocking(source, False)
            self._loop.watch(source, READ, lambda _: self._hear(source))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids whose status is taken by ``end``."""
        return (self._asking.pid,) if self._asking is not None else ()

    def memory(self) -> int | None:
        """Return the highest use of memory until now, in bytes; None if it is not known."""
        return self._highest() or self._summed or None

    def gpus(self) -> tuple[Gpu, ...] | None:
        """Return the use of the GPUs until now; None if nothing is known of them."""
        if self._asking is not None and self._asking.stdout is not None:
            self._hear(self._asking.stdout.fileno())
        found = []
        for index, samples in sorted(self._samples.items()):
            uses, memories = zip(*samples)
            found.append(Gpu(index, round(sum(uses) / len(uses)), max(uses), max(memories)))
        return tuple(found) or None

    def end(self) -> None:
        """Ask no more."""
        self._over = True
        asking, self._asking = self._asking, None
        if asking is not None:
            if asking.stdout is not None:
                self._loop.unwatch(asking.stdout.fileno())
            for pipe in filter(None, (asking.stdin, asking.stdout)):
                pipe.close()
            asking.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                asking.wait(_END_SECONDS)  # a driver may hang in the kernel

    def _hear(self, source: int) -> None:
        try:
            chunk = os.read(source, 65536)
        except BlockingIOError:
            return
        self._answer += chunk
        *lines, self._answer = self._answer.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                self._add(decode(line.decode("ascii")))
        if not chunk or len(self._answer) > _ANSWER_BYTES:
            self._loop.unwatch(source)

    def _add(self, sample: Json) -> None:
        """A line: [index, percent, bytes] of each GPU."""
        for row in sample if isinstance(sample, list) else ():
            if isinstance(row, list) and len(row) == _ROW:
                index, use, memory = map(number, row)
                self._samples.setdefault(index, []).append((use, memory))

    def _sum_up(self, pause: float) -> None:
        if not self._over:
            self._summed = max(self._summed, sum(map(_resident, _descendants())))
            self._loop.after(pause, lambda: self._sum_up(min(2 * pause, LONGEST_PAUSE)))


_ROW = 3
_END_SECONDS = 0.2


def _descendants() -> Iterator[int]:
    """Yield the processes that this one started, and theirs, in the kernel's own lists (proc(5), children)."""
    waiting = [os.getpid()]
    while waiting:
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
                with contextlib.suppress(OSError, ValueError):
                    found = [int(word) for word in path.read_text(encoding="ascii").split()]
                    waiting += found
                    yield from found


def _resident(pid: int) -> int:
    """Return the bytes of memory that a process holds, those that it shares with others included (proc(5), statm)."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0
