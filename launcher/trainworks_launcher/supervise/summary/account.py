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
    first, idle, gpus = message.get("first_output"), message.get("idle"), message.get("gpus")
    return Figures(
        None if first is None else seconds(first),
        max(0, number(message.get("restarts"))),
        None if idle is None else seconds(idle),
        max(0, number(message.get("memory"))),
        tuple(min(100, max(0, number(each))) for each in gpus[:_GPUS])
        if isinstance(gpus, list)
        else (),
    )


def line(took: float, hosts: Mapping[str, Figures | None]) -> str:
    """Return what a job took, for people. took: seconds.

    Hosts: host -> its figures, None for one that told nothing.
    """
    known = [figures for figures in hosts.values() if figures is not None]
    said = [f"{_duration(took)} on {len(hosts)} host{'' if len(hosts) == 1 else 's'}"]
    first = [figures.first_output for figures in known if figures.first_output is not None]
    said += [f"first output after {_duration(min(first))}"] if first else []
    restarts = max((figures.restarts for figures in known), default=0)
    said += [f"{restarts} restart{'' if restarts == 1 else 's'}"] if restarts else []
    idle = min((figures.idle for figures in known if figures.idle is not None), default=0.0)
    said += [f"{_duration(idle)} without progress"] if idle else []
    memory, host = max(
        ((figures.memory, host) for host, figures in hosts.items() if figures), default=(0, "")
    )
    if memory:
        where = f" ({host})" if len(hosts) > 1 else ""
        said.append(f"at most {_size(memory)} of memory{where}")
    gpus = [gpu for figures in known for gpu in figures.gpus]
    said += (
        [f"GPUs busy {sum(gpus) / len(gpus):.0f} %, the least busy one {min(gpus)} %"]
        if gpus
        else []
    )
    return f"summary: {', '.join(said)}"


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
    return f"{value / 60:.0f} min" if value < _HOURS else f"{value / 3600:.1f} h"


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
        for said in lines:
            with contextlib.suppress(ValueError):
                rows = decode(said.decode("ascii"))
                for row in rows if isinstance(rows, list) else ():
                    if isinstance(row, list) and len(row) > 1:
                        self._samples.setdefault(number(row[0]), []).append(number(row[1]))
        if not chunk:
            self._loop.unwatch(source)

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
        first = min(
            (tail.first_at - self._started for tail in tails if tail.first_at), default=None
        )
        gpus = tuple(round(sum(uses) / len(uses)) for uses in self._samples.values())
        memory = highest_bytes(contained=is_contained()) or 0
        own = Figures(first and max(0.0, first), restarts, idle, memory, gpus)
        self._known[self._member] = own
        return {**own._asdict(), "gpus": list(gpus)}

    def write(self) -> None:
        """The leader knows the figures of all hosts: print the line."""
        self._log(
            line(
                time.monotonic() - self._started,
                {host: self._known.get(host) for host in self._hosts},
            )
        )
