"""Figures of the hosts of a job become one object for programs and one line for people. Pure.

Each figure may be unknown, which is null in the file and is not mentioned in the line.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.values import Json, number
from trainworks_launcher.supervise.control.messages import seconds
from trainworks_launcher.supervise.outcome.outcome import Outcome

_GPUS = 64
_RANKS = 4096


class Gpu(NamedTuple):
    """Use of one GPU in the samples that were taken.

    Attributes:
        number: Its index in the container.
        mean: Percent of the time in which it computed, on average.
        highest: The same, of the busiest sample.
        memory: Bytes of its memory in use, at most.
    """

    number: int
    mean: int
    highest: int
    memory: int


class Looked(NamedTuple):
    """How often a rank was looked at while its host said nothing, and how often it waited for others then."""

    looks: int
    waited: int


class Figures(NamedTuple):
    """What is known of one host.

    Attributes:
        first_output: Seconds from the start of the program to its first output.
        restarts: How often its ranks were started again.
        idle: Seconds without progress.
        memory: Bytes, the highest use.
        gpus: Its GPUs; None where there are none, or they do not say.
        ranks: Rank -> what looks at it showed.
    """

    first_output: float | None = None
    restarts: int = 0
    idle: float | None = None
    memory: int | None = None
    gpus: tuple[Gpu, ...] | None = None
    ranks: Mapping[int, Looked] = MappingProxyType({})

    def fields(self) -> dict[str, Json]:
        """Return them as the fields of a message."""
        return {
            "first_output": self.first_output,
            "restarts": self.restarts,
            "idle": self.idle,
            "memory": self.memory,
            "gpus": None if self.gpus is None else [list(gpu) for gpu in self.gpus],
            "ranks": [[rank, *looked] for rank, looked in list(self.ranks.items())[:_RANKS]],
        }


def read_figures(message: Mapping[str, Json]) -> Figures:
    """Return the figures in the message of another host; what cannot be read is unknown."""
    gpus = _rows(message.get("gpus"), len(Gpu._fields))[:_GPUS]
    ranks = _rows(message.get("ranks"), 1 + len(Looked._fields))[:_RANKS]
    return Figures(
        first_output=None if message.get("first_output") is None else seconds(message.get("first_output")),
        restarts=max(0, number(message.get("restarts"))),
        idle=None if message.get("idle") is None else seconds(message.get("idle")),
        memory=max(0, number(message.get("memory"))) or None,
        gpus=None if message.get("gpus") is None else tuple(Gpu(*row) for row in gpus),
        ranks={rank: Looked(looks, waited) for rank, looks, waited in ranks},
    )


def _rows(value: Json, length: int) -> list[list[int]]:
    """Return the lists of so many whole numbers that are not negative."""
    rows = [row for row in value if isinstance(row, list)] if isinstance(value, list) else []
    found = [[number(cell) for cell in row] for row in rows if len(row) == length]
    return [row for row in found if min(row) >= 0]


class Summary(NamedTuple):
    """What a job took.

    Attributes:
        outcome: How it ended.
        mode: Its mode.
        seconds: From the start of the program to the end of the job.
        hosts: Host -> its figures, the leader first; None for one that told nothing.
    """

    outcome: Outcome
    mode: str
    seconds: float
    hosts: Mapping[str, Figures | None]

    @property
    def first_output(self) -> float | None:
        """Seconds until some host printed something."""
        return min((f.first_output for f in self._known() if f.first_output is not None), default=None)

    @property
    def restarts(self) -> int:
        """How often ranks were started again, on the host that has the most."""
        return max((figures.restarts for figures in self._known()), default=0)

    @property
    def idle(self) -> float | None:
        """Seconds without progress: at most, for one host's progress is the job's."""
        return min((figures.idle for figures in self._known() if figures.idle is not None), default=None)

    def waited_for(self) -> tuple[str, int, Looked] | None:
        """Return the rank that the others waited for most, with its host.

        None where the looks do not show one: it waited itself in less than half as many looks as the rank that waited
        most, was seen outside of a collective in half as many or more, and no other rank waited so seldom. Looks in
        which nobody waited, as at the start, count for nothing.
        """
        ranks = [
            (looked.waited, looked.waited - looked.looks, host, rank, looked)
            for host, figures in self.hosts.items()
            for rank, looked in (figures.ranks if figures is not None else {}).items()
        ]
        if len(ranks) < 2:
            return None
        first, second, *_ = sorted(ranks)
        half = max(ranks)[0] / 2
        if not first[0] < half <= -first[1] or second[:2] == first[:2]:
            return None
        return first[2:]

    def _known(self) -> Sequence[Figures]:
        return [figures for figures in self.hosts.values() if figures is not None]

    def document(self) -> dict[str, Json]:
        """Return it as a JSON object."""
        most = self.waited_for()
        return {
            "schema": names.SUMMARY_SCHEMA,
            "writer": names.SUMMARY_WRITER,
            "kind": self.outcome.kind,
            "status": self.outcome.status,
            "mode": self.mode,
            "seconds": _rounded(self.seconds),
            "seconds_to_first_output": _rounded(self.first_output),
            "restarts": self.restarts,
            "seconds_without_progress": _rounded(self.idle),
            "waited_for": most and {"rank": most[1], "host": most[0], **most[2]._asdict()},
            "hosts": [_host_document(host, figures or Figures()) for host, figures in self.hosts.items()],
        }

    def line(self) -> str:
        """Return it as a line of the log."""
        count = len(self.hosts)
        said = [f"{_duration(self.seconds)} on {count} host{'' if count == 1 else 's'}"]
        if self.first_output is not None:
            said.append(f"first output after {_duration(self.first_output)}")
        if self.restarts:
            said.append(f"{self.restarts} restart{'' if self.restarts == 1 else 's'}")
        if self.idle:
            said.append(f"{_duration(self.idle)} without progress")
        most = self.waited_for()
        if most is not None:
            host, rank, _ = most
            said.append(f"the others waited most for rank {rank} on {host}")
        memory = [(figures.memory, host) for host, figures in self.hosts.items() if figures and figures.memory]
        if memory:
            highest, host = max(memory)
            said.append(f"at most {highest / (1 << 30):.1f} GiB of memory" + (f" ({host})" if count > 1 else ""))
        gpus = [gpu.mean for figures in self._known() for gpu in figures.gpus or ()]
        if gpus:
            said.append(f"GPUs busy {sum(gpus) / len(gpus):.0f} %, the least busy one {min(gpus)} %")
        return f"summary: {', '.join(said)}"


def _host_document(host: str, figures: Figures) -> dict[str, Json]:
    gpus = figures.gpus
    return {
        "host": host,
        "seconds_to_first_output": _rounded(figures.first_output),
        "restarts": figures.restarts,
        "seconds_without_progress": _rounded(figures.idle),
        "highest_memory_bytes": figures.memory,
        "gpus": None
        if gpus is None
        else [
            {
                "index": gpu.number,
                "mean_use_percent": gpu.mean,
                "highest_use_percent": gpu.highest,
                "highest_memory_bytes": gpu.memory,
            }
            for gpu in gpus
        ],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _duration(value: float) -> str:
    """Return seconds for people: ``3.2 s``, ``12 min``, ``5.1 h``."""
    if value < _MINUTES:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < _HOURS else f"{value / 3600:.1f} h"


_MINUTES, _HOURS = 600, 36000
