"""The control channel between the hosts of one job: messages, connections, and the roles.

The leader listens, every other host joins. Messages are JSON objects, one per
line, of bounded size:

=========  =========  ==============================================================================
message    direction  meaning
=========  =========  ==============================================================================
join       to leader  host, its job (``identity``), protocol, a nonce, whether this host has a job
                      secret
challenge  to host    the leader's nonce, protocol, its proof, whether it has a job secret
answer     to leader  this host's proof
refused    both       why a host of this job is not let in, or does not believe the leader; it may
                      try again
welcome    to host    joined; from the answer on every message has a seal
                      (``message_authentication``)
ready      to leader  code and requirements are prepared
go         to all     every host is ready: start
suspect    to leader  a rank of this host ended, or has noted why it will: the evidence, and for how
                      long
ended      to leader  this host's own command ended, with its outcome
stopping   to leader  a stop signal came to this host
stop       to all     some host was stopped: forward the signal to the processes
without    to all     a host is lost and the job goes on without it: end the ranks, torchrun starts
                      new ones
finish     to all     the outcome of the whole job, the same on every host
bye        to leader  outcome known, processes ended, files written
alive      both       heartbeat
probe      both       heartbeat on a connection of its own, while the other one is silent
                      (``keepalive``)
leads      both       between two hosts that both lead (``rivals``)
any other  both       what ``Role.tell`` sends and ``Events.told`` gets
=========  =========  ==============================================================================

The first failure anywhere, or a lost host, is the outcome of the job, unless the job may go on with
fewer hosts (``Control.minimum_hosts``). After a stop signal all hosts are given their grace before
the outcome is told. What comes from a stranger is dropped with a few lines in the log at most
(``pending_connections``). With a job secret on every host both sides prove that they know it before
either believes the other (``handshake``). Texts of another host are cleaned where they are read
(``messages``). What counts when, on either side, is in tables (``phases``).

A new message needs no change in these files: a part of the supervisor sends it with ``Role.tell``
under a kind of its own, and gets it by its kind.

This file holds what every job needs, also one of a single host; jobs of several
load ``leader`` and ``worker`` too.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Protocol

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.supervise.outcome.evidence import Suspect
from trainworks_launcher.supervise.outcome.outcome import Outcome

HOLD, NO_MORE_TIME = "hold", "no_more_time"
"""Kinds of messages about a stop.

``hold``: a rank has ended badly in it, so each host holds its starter
(``processes.stopped_starters``).
``no_more_time``: hosts that were only told of the stop end their ranks now; with ``all`` every host
does.
"""


class Events(NamedTuple):
    """What a role tells the supervisor.

    Attributes:
        welcome: The channel stands. On a worker once more if the leader starts
            anew before the job does.
        go: Start.
        stop: Forward a stop signal.
        restart: A host is lost and the job goes on. This host's ranks must begin again: they may
            wait for it for ever.
        suspect: A rank of some host ended; on the leader.
        inquire: Some host has failed, with this outcome: gather what all hosts know of it, and call
            back then; on the leader. It may be called again before that.
        judge: The leader's last word on a failure or a stop, before the other hosts learn of it; a
            host's own where the leader is lost.
        finish: The outcome of the job.
        left: Every host knows the outcome.
        told: What another host told with ``Role.tell``: its name, the kind, the fields.
        log: Print a line.
    """

    welcome: Callable[[], None]
    go: Callable[[], None]
    stop: Callable[[], None]
    restart: Callable[[], None]
    suspect: Callable[[Suspect], None]
    inquire: Callable[[Outcome, Callable[[], None]], None]
    judge: Callable[[Outcome], Outcome]
    finish: Callable[[Outcome], None]
    left: Callable[[], None]
    told: Callable[[str, str, Mapping[str, Json]], None]
    log: Callable[[str], None]


class Role(Protocol):
    """What the supervisor tells the role that decides the job's end: ``Alone``,
    ``Leader`` or ``Worker``.
    """

    def begin(self) -> None:
        """Open the channel. Raises RefusalError if that cannot be done."""

    def ready(self) -> None:
        """This host is prepared."""

    def stopping(self) -> None:
        """A stop signal came to this host."""

    def suspect(self, suspect: Suspect) -> None:
        """A rank of this host ended, and perhaps failed."""

    def ended(self, outcome: Outcome) -> None:
        """This host's own command ended, or never started."""

    def tell(self, kind: str, host: str = "", **fields: Json) -> None:
        """Send a message of a kind that the channel itself does not know.

        It is lost if the other host is not connected. A worker's goes to the
        leader, the leader's to one host.

        Args:
            kind: The message; ``Events.told`` of the other host gets it.
            host: Whom the leader tells; default all hosts but itself.
            fields: At most ``messages.MESSAGE_LIMIT`` bytes as JSON.
        """

    def others(self) -> Mapping[str, str]:
        """Return the other hosts that the job still has, each with its address, "" if unknown.

        {} on a worker.
        """

    def there(self) -> tuple[Any, ...] | None:
        """Return the socket address by which a worker has reached the leader.

        None on the leader.
        """

    def name_missing(self) -> None:
        """Say in the log who has not come, while the hosts gather."""

    def leave(self) -> None:
        """The outcome is known and nothing runs on this host any more."""

    def close(self) -> None:
        """Close everything at once."""


class Alone:
    """The role of the only host of a job: everything it reports comes back at once."""

    def __init__(self, events: Events) -> None:
        """Nothing to connect to."""
        self._events = events
        self._finished = False

    def begin(self) -> None:
        """There is no other host to wait for."""
        self._events.welcome()

    def ready(self) -> None:
        """Prepared: start."""
        if not self._finished:
            self._events.go()

    def stopping(self) -> None:
        """A stop signal came; the supervisor has forwarded it itself."""

    def suspect(self, suspect: Suspect) -> None:
        """It comes back at once."""
        self._events.suspect(suspect)

    def ended(self, outcome: Outcome) -> None:
        """The command's outcome is the job's."""
        if not self._finished:
            self._finished = True
            self._events.finish(self._events.judge(outcome))

    def tell(self, kind: str, host: str = "", **fields: Json) -> None:
        """There is no other host."""

    def others(self) -> Mapping[str, str]:
        """There is no other host."""
        return {}

    def there(self) -> tuple[Any, ...] | None:
        """There is no other host."""
        return None

    def name_missing(self) -> None:
        """There is no other host."""

    def leave(self) -> None:
        """There is no other host to take leave of."""
        self._events.left()

    def close(self) -> None:
        """Nothing is open."""
