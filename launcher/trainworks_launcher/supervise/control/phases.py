"""The phases of the two ends of the control channel, as tables: what counts in a phase, and which
phase follows. Pure.

A role asks its table before it acts. What is not in the row of its phase does not count, because it
comes too early or too late: messages cross on the wire, and a time-out passes when nobody waits any
more. What only the program itself decides has to be in the row (``must``).

Kinds of messages are events under their own names (``__init__``). The others:

========  =====================================================================================
late      the leader: a time limit for joining, or for the preparation, has passed
leave     the supervisor: nothing runs on this host any more
part      the leader: waits no longer for hosts that never joined
left      this host knows nobody who needs it
lost      a worker: the leader closed the connection
joined    a search: connected, and asked to be let in
failed    a search: this connection leads nowhere
end       a search: the host does not look any more
========  =====================================================================================
"""

from __future__ import annotations

from enum import IntEnum
from typing import Generic, Mapping, TypeVar

P = TypeVar("P", bound=IntEnum)
Table = Mapping[P, Mapping[str, P]]
"""By phase, the first one first: the events that count, each with the phase that follows it."""


class LeaderPhase(IntEnum):
    """How far the job is, for the leader."""

    GATHERING = 0
    """Hosts join and prepare themselves. One that leaves may come again."""
    RUNNING = 1
    """All were told to start. A host that leaves is lost."""
    STOPPING = 2
    """Some host got a stop signal: all have their grace, and their ends
    together are the outcome.
    """
    FINISHED = 3
    """The outcome is known and told."""
    LINGERING = 4
    """Nothing runs here; hosts that never joined may still come to hear the outcome."""
    LEAVING = 5
    """The others end what runs there, and say goodbye."""
    LEFT = 6
    """The supervisor may close the channel."""


class WorkerPhase(IntEnum):
    """How far a host is, for itself."""

    JOINING = 0
    """It looks for the leader (``rendezvous``)."""
    PREPARING = 1
    """The leader has let it in. A leader that leaves may start anew."""
    READY = 2
    """It is prepared, and waits for the start."""
    BOUND = 3
    """It was told to start, was stopped, or has ended: a leader that leaves is lost."""
    FINISHED = 4
    """The outcome is known."""
    LEAVING = 5
    """Nothing runs here; it has said goodbye, and waits for the leader to close the connection."""
    LEFT = 6
    """The supervisor may close the channel."""


class SearchPhase(IntEnum):
    """How far one search for the leader is."""

    CONNECTING = 0
    """It connects, or waits to try again."""
    ASKED = 1
    """The other end is asked to let this host in. It may be anybody."""
    ANSWERED = 2
    """The other end has proved that it is the leader, and this host has
    answered with its own proof.
    """
    OVER = 3
    """This host was let in, or looks no more."""


def _row(phase: P, stays: str, **moves: P) -> Mapping[str, P]:
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
    """The phase of one role: it changes by the role's table, and by nothing else."""

    def __init__(self, table: Table[P]) -> None:
        """Begin in the first phase of the table."""
        self._table = table
        self._now = next(iter(table))

    @property
    def now(self) -> P:
        """The present phase."""
        return self._now

    def take(self, event: str) -> bool:
        """Go to the phase that follows the event.

        Returns False, and stays, if the event does not count now.
        """
        follows = self._table[self._now].get(event)
        if follows is None:
            return False
        self._now = follows
        return True

    def must(self, event: str) -> None:
        """As ``take``, for what the program itself decides.

        Raises RuntimeError if it does not count: a defect.
        """
        if not self.take(event):
            raise RuntimeError(
                f"{type(self._now).__name__}: no {event!r} in phase {self._now.name}"
            )
