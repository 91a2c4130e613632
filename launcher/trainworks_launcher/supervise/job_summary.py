"""The figures of this host and, on the leader, those of the others: one line of
the log at the end of the job.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from typing import Callable, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract.json_values import Json, decode, number
from trainworks_launcher.environment.cgroups import is_contained
from trainworks_launcher.supervise.attribution.memory import highest_bytes
from trainworks_launcher.supervise.control.messages import seconds
from trainworks_launcher.supervise.event_loop import READ, Loop
from trainworks_launcher.supervise.processes.output import Tail

MESSAGE = "figures"
"""The kind of this room's message to the leader: the fields of ``Figures``."""

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds between two looks at the GPUs: each pause is twice the one before, so
that a short job has some, too.
"""

_GPUS = 64
_END_SECONDS = 0.2
_MINUTES, _HOURS = 600, 36000


class Figures(NamedTuple):
    """What is known of one host.

    Attributes:
        first_output: Seconds from the start of the program to its first output.
        restarts: How often its ranks were started again.
        idle: Seconds without progress.
        memory: Bytes that its container used at most, with the page cache; 0 where the kernel does
            not say, or the figure is not the job's own.
        gpus: Percent of the time in which each GPU computed, on average; ()
            where there are none, or they do not say.
    """

    first_output: float | None = None
    restarts: int = 0
    idle: float | None = None
    memory: int = 0
    gpus: tuple[int, ...] = ()


def read_figures(message: Mapping[str, Json]) -> Figures:
    """Return the figures in the message of another host; what cannot be read is unknown."""
    first_output, idle = message.get("first_output"), message.get("idle")
    gpus = message.get("gpus")
    percents = []
    if isinstance(gpus, list):
        percents = [min(100, max(0, number(percent))) for percent in gpus[:_GPUS]]
    return Figures(
        first_output=None if first_output is None else seconds(first_output),
        restarts=max(0, number(message.get("restarts"))),
        idle=None if idle is None else seconds(idle),
        memory=max(0, number(message.get("memory"))),
        gpus=tuple(percents),
    )


def line(took: float, hosts: Mapping[str, Figures | None]) -> str:
    """Return what a job took, for people. took: seconds.

    Hosts: host -> its figures, None for one that told nothing.
    """
    known = {host: figures for host, figures in hosts.items() if figures is not None}
    parts = [f"{_duration(took)} on {_count(len(hosts), 'host')}"]

    outputs = [row.first_output for row in known.values() if row.first_output is not None]
    if outputs:
        parts.append(f"first output after {_duration(min(outputs))}")

    restarts = max((row.restarts for row in known.values()), default=0)
    if restarts:
        parts.append(_count(restarts, "restart"))

    idle = min((row.idle for row in known.values() if row.idle is not None), default=0.0)
    if idle:
        parts.append(f"{_duration(idle)} without progress")

    memory, host = max(((row.memory, host) for host, row in known.items()), default=(0, ""))
    if memory:
        where = f" ({host})" if len(hosts) > 1 else ""
        parts.append(f"at most {_size(memory)} of memory{where}")

    gpus: list[int] = []
    for row in known.values():
        gpus += row.gpus
    if gpus:
        mean = sum(gpus) / len(gpus)
        parts.append(f"GPUs busy {mean:.0f} %, the least busy one {min(gpus)} %")
    return f"summary: {', '.join(parts)}"


def _count(number_: int, noun: str) -> str:
    """Return ``1 host`` or ``2 hosts``."""
    return f"{number_} {noun}" if number_ == 1 else f"{number_} {noun}s"


def _size(count: int) -> str:
    """Return bytes for people: ``61.3 GiB``, ``38 MiB``."""
    gibibytes = count / (1 << 30)
    if gibibytes >= 0.1:
        return f"{gibibytes:.1f} GiB"
    return f"{-(-count // (1 << 20))} MiB"


def _duration(value: float) -> str:
    """Return seconds for people: ``3.2 s``, ``12 min``, ``5.1 h``."""
    if value < _MINUTES:
        return f"{value:.1f} s"
    if value < _HOURS:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


class Account:
    """The account of one run, from the start of the program.

    Every method runs in the loop's thread.
    """

    def __init__(
        self, loop: Loop, member: str, hosts: Sequence[str], log: Callable[[str], None]
    ) -> None:
        """The program starts now. member: this launcher's name. hosts: those of
        the job. log: prints a line.
        """
        self._loop = loop
        self._member = member
        self._hosts = hosts
        self._log = log
        self._started = time.monotonic()
        self._known: dict[str, Figures] = {}
        self._asking: subprocess.Popen[bytes] | None = None
        self._answer = b""
        self._samples: dict[int, list[int]] = {}

    def watch_gpus(self, program: Sequence[str], visible: Sequence[str]) -> None:
        """Ask for the use of the GPUs from now on: in a program of its own, for
        a broken driver may end its caller.

        program: the command that prints it. visible: the GPUs that the job may use; (): all.
        """
        with contextlib.suppress(OSError):
            words = (*program, f"{_FIRST_PAUSE:g}", f"{_LONGEST_PAUSE:g}", *visible)
            self._asking = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        if self._asking is not None and self._asking.stdout is not None:
            source = self._asking.stdout.fileno()
            os.set_blocking(source, False)
            self._loop.watch(source, READ, lambda _: self._hear(source))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids whose status is taken by ``close``."""
        return (self._asking.pid,) if self._asking is not None else ()

    def _hear(self, source: int) -> None:
        """Read lines: each is a list with [index, percent, bytes of memory] of each GPU."""
        try:
            chunk = os.read(source, 65536)
        except BlockingIOError:
            return
        *lines, self._answer = (self._answer + chunk).split(b"\n")
        for line_ in lines:
            with contextlib.suppress(ValueError):
                self._add_sample(decode(line_.decode("ascii")))
        if not chunk:
            self._loop.unwatch(source)

    def _add_sample(self, rows: Json) -> None:
        if not isinstance(rows, list):
            return
        for row in rows:
            if isinstance(row, list) and len(row) > 1:
                index, percent = number(row[0]), number(row[1])
                self._samples.setdefault(index, []).append(percent)

    def told(self, host: str, message: Mapping[str, Json]) -> None:
        """Another host has ended, and tells its figures."""
        self._known[host] = read_figures(message)

    def close(self, tails: Sequence[Tail], restarts: int, idle: float | None) -> Mapping[str, Json]:
        """Nothing runs on this host any more. Return the fields for the leader.

        Args:
            tails: What the program, or its ranks, printed.
            restarts: How often its ranks were started again.
            idle: Seconds without progress; None where that was not looked at.
        """
        asking, self._asking = self._asking, None
        if asking is not None and asking.stdout is not None and asking.stdin is not None:
            self._hear(asking.stdout.fileno())
            self._loop.unwatch(asking.stdout.fileno())
            asking.stdin.close()
            asking.stdout.close()
            asking.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                asking.wait(_END_SECONDS)  # a driver may hang in the kernel
        outputs = [tail.first_at - self._started for tail in tails if tail.first_at]
        gpus = [round(sum(uses) / len(uses)) for uses in self._samples.values()]
        own = Figures(
            first_output=max(0.0, min(outputs)) if outputs else None,
            restarts=restarts,
            idle=idle,
            memory=highest_bytes(contained=is_contained()) or 0,
            gpus=tuple(gpus),
        )
        self._known[self._member] = own
        return {**own._asdict(), "gpus": list(gpus)}

    def write(self) -> None:
        """The leader knows the figures of all hosts: print the line."""
        took = time.monotonic() - self._started
        hosts = {host: self._known.get(host) for host in self._hosts}
        self._log(line(took, hosts))
