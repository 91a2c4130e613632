"""The summary of a job: figures of this host and, on the leader, of all others, as one line of the
log at the job's end.
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
"""Seconds between two samples of the GPUs. Each pause is twice the one before, so that a short job
has samples, too.
"""

_MAX_GPUS = 64
"""GPUs of a host that are read from a message."""

_END_SECONDS = 0.2
"""Limit of the wait for the end of the sampler after KILL."""

_READ_BYTES = 65536
_MINUTES, _HOURS = 600, 36000
"""Seconds from which a duration is shown in minutes, and in hours."""

_LEAST_GIBIBYTES = 0.1
"""Less is shown in MiB."""


class Figures(NamedTuple):
    """The figures of one host.

    Attributes:
        first_output: Seconds from the start of the program to its first output.
        restarts: Number of restarts of its ranks.
        idle: Seconds without progress.
        memory: Highest bytes of its container, with the page cache; 0 if the kernel does not
            count them, or the figure is not the job's own.
        gpus: Mean use of each GPU in percent of the time; () without GPUs, or if they do not
            report their use.
    """

    first_output: float | None = None
    restarts: int = 0
    idle: float | None = None
    memory: int = 0
    gpus: tuple[int, ...] = ()


def read_figures(message: Mapping[str, Json]) -> Figures:
    """Read the figures in the message of another host.

    A value in another form is like one that is not known. Percents are limited to 0 to 100.
    """
    gpus = message.get("gpus")
    percents = []
    if isinstance(gpus, list):
        percents = [min(100, max(0, number(percent))) for percent in gpus[:_MAX_GPUS]]
    return Figures(
        first_output=_seconds(message.get("first_output")),
        restarts=max(0, number(message.get("restarts"))),
        idle=_seconds(message.get("idle")),
        memory=max(0, number(message.get("memory"))),
        gpus=tuple(percents),
    )


def _seconds(value: Json) -> float | None:
    """Return seconds from another host; None if it does not know them."""
    if value is None:
        return None
    return seconds(value)


def line(took: float, hosts: Mapping[str, Figures | None]) -> str:
    """Return the summary for people, as one line.

    For example ``summary: 12 min on 2 hosts, first output after 3.2 s, 1 restart``. A figure that
    no host knows is left out.

    Args:
        took: Seconds of the job.
        hosts: Host -> its figures; None for a host that sent none.
    """
    known = [figures for figures in hosts.values() if figures is not None]
    parts = [f"{_duration(took)} on {_count(len(hosts), 'host')}"]

    outputs = [row.first_output for row in known if row.first_output is not None]
    if outputs:
        parts.append(f"first output after {_duration(min(outputs))}")

    restarts = max((row.restarts for row in known), default=0)
    if restarts:
        parts.append(_count(restarts, "restart"))

    # The smallest: a host that only waits for another one shows no progress either.
    idle = min((row.idle for row in known if row.idle is not None), default=0.0)
    if idle:
        parts.append(f"{_duration(idle)} without progress")

    memory, largest_host = 0, ""
    for host, figures in hosts.items():
        if figures is not None and (figures.memory, host) > (memory, largest_host):
            memory, largest_host = figures.memory, host
    if memory:
        where = f" ({largest_host})" if len(hosts) > 1 else ""
        parts.append(f"at most {_size(memory)} of memory{where}")

    gpus: list[int] = []
    for row in known:
        gpus += row.gpus
    if gpus:
        mean = sum(gpus) / len(gpus)
        parts.append(f"GPUs busy {mean:.0f} %, the least busy one {min(gpus)} %")
    return f"summary: {', '.join(parts)}"


def _count(number_: int, noun: str) -> str:
    """Write ``1 host`` or ``2 hosts``."""
    if number_ == 1:
        return f"{number_} {noun}"
    return f"{number_} {noun}s"


def _size(count: int) -> str:
    """Write bytes for people: ``61.3 GiB``, ``38 MiB``."""
    gibibytes = count / (1 << 30)
    if gibibytes >= _LEAST_GIBIBYTES:
        return f"{gibibytes:.1f} GiB"
    # Rounded up, so that a little memory is not 0 MiB.
    return f"{-(-count // (1 << 20))} MiB"


def _duration(value: float) -> str:
    """Write seconds for people: ``3.2 s``, ``12 min``, ``5.1 h``."""
    if value < _MINUTES:
        return f"{value:.1f} s"
    if value < _HOURS:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


class JobSummary:
    """Collects the figures of one run, from the start of the program.

    Every method runs in the loop's thread.
    """

    def __init__(
        self, loop: Loop, member: str, hosts: Sequence[str], log: Callable[[str], None]
    ) -> None:
        """Begin at the start of the program.

        Args:
            loop: The loop of the run.
            member: This launcher's name.
            hosts: Names of the job's launchers.
            log: Prints a line.
        """
        self._loop = loop
        self._member = member
        self._hosts = hosts
        self._log = log
        self._started = time.monotonic()
        self._figures: dict[str, Figures] = {}
        self._sampler: subprocess.Popen[bytes] | None = None
        self._answer = b""
        self._samples: dict[int, list[int]] = {}

    def watch_gpus(self, program: Sequence[str], visible: Sequence[str]) -> None:
        """Start a process that samples the use of the GPUs, and read its output in the loop.

        It is a process of its own, because a broken driver may end its caller. Nothing is sampled
        if the process cannot be started.

        Args:
            program: Command that prints the samples.
            visible: The GPUs that the job may use; () for all.
        """
        with contextlib.suppress(OSError):
            words = (*program, f"{_FIRST_PAUSE:g}", f"{_LONGEST_PAUSE:g}", *visible)
            # The end of its standard input tells the sampler that the launcher is gone.
            self._sampler = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        if self._sampler is not None and self._sampler.stdout is not None:
            source = self._sampler.stdout.fileno()
            os.set_blocking(source, False)
            self._loop.watch(source, READ, lambda _: self._read(source))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of the sampler; ``close`` reads its status."""
        if self._sampler is None:
            return ()
        return (self._sampler.pid,)

    def _read(self, source: int) -> None:
        """Read the sampler's lines that have come, and add them to the samples.

        A line is a JSON list with [index, percent, bytes of memory] of each GPU. Other lines are
        ignored.

        Args:
            source: The sampler's standard output; watched no more after its end.
        """
        try:
            chunk = os.read(source, _READ_BYTES)
        except BlockingIOError:
            return
        *lines, self._answer = (self._answer + chunk).split(b"\n")
        for line_ in lines:
            with contextlib.suppress(ValueError):
                self._add_sample(decode(line_.decode("ascii")))
        if not chunk:
            self._loop.unwatch(source)

    def _add_sample(self, rows: Json) -> None:
        """Add the use of each GPU in one line of the sampler."""
        if not isinstance(rows, list):
            return
        for row in rows:
            if isinstance(row, list) and len(row) > 1:
                index, percent = number(row[0]), number(row[1])
                self._samples.setdefault(index, []).append(percent)

    def receive(self, host: str, message: Mapping[str, Json]) -> None:
        """Keep the figures of another host, on which no process runs any more."""
        self._figures[host] = read_figures(message)

    def close(self, tails: Sequence[Tail], restarts: int, idle: float | None) -> Mapping[str, Json]:
        """End the sampler, and return the figures of this host, on which no process runs any more.

        Args:
            tails: Tails of the program's output, or of the ranks'.
            restarts: Number of restarts of its ranks.
            idle: Seconds without progress; None if the host was not watched.

        Returns:
            The fields for the leader.
        """
        sampler, self._sampler = self._sampler, None
        if sampler is not None and sampler.stdout is not None and sampler.stdin is not None:
            self._read(sampler.stdout.fileno())
            self._loop.unwatch(sampler.stdout.fileno())
            sampler.stdin.close()
            sampler.stdout.close()
            sampler.kill()
            # A process that hangs in a driver does not end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                sampler.wait(_END_SECONDS)
        outputs = [tail.first_at - self._started for tail in tails if tail.first_at]
        gpus = [round(sum(uses) / len(uses)) for uses in self._samples.values()]
        own = Figures(
            first_output=max(0.0, min(outputs)) if outputs else None,
            restarts=restarts,
            idle=idle,
            memory=highest_bytes(contained=is_contained()) or 0,
            gpus=tuple(gpus),
        )
        self._figures[self._member] = own
        return {**own._asdict(), "gpus": list(gpus)}

    def write(self, job_began: float) -> None:
        """Log the summary, on the leader, which has the figures of all hosts.

        Args:
            job_began: First start of the job's program (monotonic clock).
        """
        seconds_of_job = time.monotonic() - job_began
        figures_of_hosts = {host: self._figures.get(host) for host in self._hosts}
        self._log(line(seconds_of_job, figures_of_hosts))
