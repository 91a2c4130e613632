"""The phases of the two ends of the control channel, as tables: the events that count in a phase,
each with the phase that follows. Pure.

A role consults its table before it acts. An event that is not in the row of its phase does not
count, because it comes too early or too late: messages cross on the wire, and a time-out passes
when no host waits any more. An event that the program itself decides must be in the row (``must``).

Kinds of messages are events under their own names (``__init__``). The others:

========  =====================================================================================
late      the leader: a time limit for joining, or for the preparation, has passed
leave     the supervisor: no process runs on this host any more
part      the leader: waits no longer for hosts that never joined
left      this host knows of no host that still needs it
lost      a worker: the leader closed the connection
joined    a search: connected, and has asked to join
failed    a search: this connection is of no use
end       a search: the host does not search any more
========  =====================================================================================
"""

from __future__ import annotations

from enum import IntEnum
from typing import Generic, Mapping, TypeVar

P = TypeVar("P", bound=IntEnum)
Table = Mapping[P, Mapping[str, P]]
"""Phase -> event that counts -> phase that follows. The first phase stands first."""


class LeaderPhase(IntEnum):
    """The phase of the job, on the leader."""

    GATHERING = 0
    """Hosts join and prepare themselves. A host that leaves may join again."""
    RUNNING = 1
    """All hosts were told to start. A host that leaves is lost."""
    STOPPING = 2
    """Some host got a stop signal: all have their grace period, and their ends together are the
    outcome.
    """
    FINISHED = 3
    """The outcome is known and was sent."""
    LINGERING = 4
    """No process runs on the leader; late hosts may still join, and get the outcome."""
    LEAVING = 5
    """The other hosts end their processes, and say goodbye."""
    LEFT = 6
    """The supervisor may close the channel."""


class WorkerPhase(IntEnum):
    """The phase of a host, on this host."""

    JOINING = 0
    """The host searches for the leader (``rendezvous``)."""
    PREPARING = 1
    """The host has joined. A leader that leaves may restart."""
    READY = 2
    """The host is prepared, and waits for the start."""
    BOUND = 3
    """The host was told to start, was stopped, or has ended. A leader that leaves is lost."""
    FINISHED = 4
    """The outcome is known."""
    LEAVING = 5
    """No process runs on the host, which has said goodbye. The leader closes the connection."""
    LEFT = 6
    """The supervisor may close the channel."""


class SearchPhase(IntEnum):
    """The phase of one search for the leader."""

    CONNECTING = 0
    """Connects, or waits for the next try."""
    ASKED = 1
    """Has asked the other end to join. The other end may be any program."""
    ANSWERED = 2
    """The other end has proved that it is the leader; this host has sent its own proof."""
    OVER = 3
    """This host has joined, or searches no more."""


def _row(phase: P, stays: str, **moves: P) -> Mapping[str, P]:
    """Return the row of a phase: event -> phase that follows.

    Args:
        phase: The phase.
        stays: Events after which the phase stays, separated by blanks.
        moves: Other events, with the phase that follows.
    """
    return {**dict.fromkeys(stays.split(), phase), **moves}


_L, _W, _S = LeaderPhase, WorkerPhase, SearchPhase

LEADER: Table[LeaderPhase] = {
    _L.GATHERING: _row(
        _L.GATHERING,
        "ready suspect ended bye late",
        go=_L.RUNNING,
        stopping=_L.STOPPING,
        finish=_L.FINISHED,
    ),
    _L.RUNNING: _row(_L.RUNNING, "suspect ended bye", stopping=_L.STOPPING, finish=_L.FINISHED),
    _L.STOPPING: _row(_L.STOPPING, "ready suspect ended bye late", finish=_L.FINISHED),
    _L.FINISHED: _row(_L.FINISHED, "bye", leave=_L.LINGERING),
    _L.LINGERING: _row(_L.LINGERING, "bye", part=_L.LEAVING),
    _L.LEAVING: _row(_L.LEAVING, "bye", left=_L.LEFT),
    _L.LEFT: {},
}

_BEFORE_THE_START: Mapping[str, WorkerPhase] = {
    "stopping": _W.BOUND,
    "ended": _W.BOUND,
    "lost": _W.JOINING,
    "finish": _W.FINISHED,
}

WORKER: Table[WorkerPhase] = {
    _W.JOINING: _row(_W.JOINING, "ready stopping", welcome=_W.PREPARING, finish=_W.FINISHED),
    _W.PREPARING: _row(_W.PREPARING, "suspect stop without", ready=_W.READY, **_BEFORE_THE_START),
    _W.READY: _row(_W.READY, "suspect stop without", go=_W.BOUND, **_BEFORE_THE_START),
    _W.BOUND: _row(_W.BOUND, "suspect stopping ended stop without", finish=_W.FINISHED),
    _W.FINISHED: _row(_W.FINISHED, "", leave=_W.LEAVING),
    _W.LEAVING: _row(_W.LEAVING, "", left=_W.LEFT),
    _W.LEFT: {},
}

SEARCH: Table[SearchPhase] = {
    _S.CONNECTING: _row(_S.CONNECTING, "failed", joined=_S.ASKED, end=_S.OVER),
    _S.ASKED: _row(_S.ASKED, "refused", challenge=_S.ANSWERED, failed=_S.CONNECTING, end=_S.OVER),
    _S.ANSWERED: _row(
        _S.ANSWERED, "refused", welcome=_S.OVER, finish=_S.OVER, failed=_S.CONNECTING, end=_S.OVER
    ),
    _S.OVER: {},
}


class Phases(Generic[P]):
    """The phase of one role, which only its table changes."""

    def __init__(self, table: Table[P]) -> None:
        """Begin in the first phase of the table."""
        self._table = table
        self._now = next(iter(table))

    @property
    def now(self) -> P:
        """The present phase."""
        return self._now

    def take(self, event: str) -> bool:
        """Go to the phase that follows an event.

        Returns:
            False if the event does not count now; the phase stays.
        """
        follows = self._table[self._now].get(event)
        if follows is None:
            return False
        self._now = follows
        return True

    def must(self, event: str) -> None:
        """Go to the phase that follows an event that the program itself decides.

        Raises:
            RuntimeError: The event does not count now, which is a defect.
        """
        if not self.take(event):
            raise RuntimeError(
                f"{type(self._now).__name__}: no {event!r} in phase {self._now.name}"
            )
