"""The control channel between the hosts of one job: messages, connections, and the roles.

The leader listens, every other host joins. Messages are JSON objects, one per line, of bounded
size:

=========  =========  ==============================================================================
message    direction  meaning
=========  =========  ==============================================================================
join       to leader  host, its job (``identity``), protocol, a nonce, whether this host has a job
                      secret
challenge  to host    the leader's nonce, protocol, its proof, whether it has a job secret
answer     to leader  this host's proof
refused    both       reason for which a host of this job is not admitted, or does not trust the
                      leader; the host may try again
welcome    to host    joined; after the answer every message has a seal
                      (``message_authentication``)
ready      to leader  code and requirements are prepared
go         to all     every host is ready: start
suspect    to leader  a rank of this host ended, or has noted why it will: the evidence, and its age
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
any other  both       sent with ``Role.tell``, received by ``Events.told``
=========  =========  ==============================================================================

The first failure anywhere, or a lost host, is the outcome of the job, unless the job may go on with
fewer hosts (``Control.minimum_hosts``). After a stop signal all hosts get their grace period before
the outcome is sent. Connections of strangers are dropped, with a few lines in the log at most
(``pending_connections``). With a job secret on every host both sides prove that they know the
secret before either trusts the other (``handshake``). Texts of another host are sanitised where
they are read (``messages``). Tables say which events count in a phase, on either side (``phases``).

A new message needs no change in these files: a part of the supervisor sends it with ``Role.tell``
under a kind of its own, and receives it by that kind.

This file holds the parts that every job needs, also a job of a single host. Jobs of several hosts
load ``leader`` and ``worker`` too.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Protocol

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.supervise.outcome.evidence import Suspect
from trainworks_launcher.supervise.outcome.outcome import Outcome

HOLD, NO_MORE_TIME = "hold", "no_more_time"
"""Kinds of messages about a stop.

``hold``: a rank has failed during the stop, so each host stops its starter
(``processes.stopped_starters``).
``no_more_time``: hosts that got no stop signal of their own end their ranks now; with ``all`` every
host does.
"""


class Events(NamedTuple):
    """The supervisor's handlers for events of a role.

    Attributes:
        welcome: The channel is open. On a worker called again if the leader restarts before the
            job starts.
        go: Start.
        stop: Forward a stop signal.
        restart: A host is lost and the job goes on. End this host's ranks, which may wait for the
            lost host for ever; new ones start.
        suspect: A rank of some host ended; on the leader.
        inquire: Some host has failed, with this outcome: collect the evidence of all hosts, then
            call back; on the leader. May be called again before that.
        judge: Return the final outcome for a failure or a stop, before the other hosts get it; on
            the leader, and on a host that has lost the leader.
        finish: The outcome of the job.
        left: Every host has the outcome.
        told: Another host sent a message with ``Role.tell``: its name, the kind, the fields.
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
    """The part of the channel that decides the job's end: ``Alone``, ``Leader`` or ``Worker``.

    The supervisor calls these methods.
    """

    def begin(self) -> None:
        """Open the channel. Raises RefusalError if that fails."""

    def ready(self) -> None:
        """Note that this host is prepared."""

    def stopping(self) -> None:
        """Note a stop signal to this host."""

    def suspect(self, suspect: Suspect) -> None:
        """Note that a rank of this host ended, and perhaps failed."""

    def ended(self, outcome: Outcome) -> None:
        """Note that this host's own command ended, or never started."""

    def tell(self, kind: str, host: str = "", **fields: Json) -> None:
        """Send a message of a kind that the channel itself does not know.

        A worker sends to the leader. The message is lost if the other host is not connected.

        Args:
            kind: Kind of the message; ``Events.told`` of the other host gets it.
            host: Receiver, on the leader; default all hosts but itself.
            fields: At most ``messages.MESSAGE_LIMIT`` bytes as JSON.
        """

    def others(self) -> Mapping[str, str]:
        """Return the other hosts of the job, without lost ones: name -> address, "" if unknown.

        {} on a worker.
        """

    def leader_address(self) -> tuple[Any, ...] | None:
        """Return the socket address at which a worker reached the leader; None on the leader."""

    def name_missing(self) -> None:
        """Log which hosts have not joined yet."""

    def leave(self) -> None:
        """Note that no process runs on this host any more, after the outcome."""

    def close(self) -> None:
        """Close everything at once."""


class Alone:
    """The role of the only host of a job: each report comes back as an event at once."""

    def __init__(self, events: Events) -> None:
        """Connect to no host."""
        self._events = events
        self._finished = False

    def begin(self) -> None:
        """Welcome this host: there is no other one to wait for."""
        self._events.welcome()

    def ready(self) -> None:
        """Start."""
        if not self._finished:
            self._events.go()

    def stopping(self) -> None:
        """Do nothing: the supervisor has forwarded the signal itself."""

    def suspect(self, suspect: Suspect) -> None:
        """Return the evidence to the supervisor."""
        self._events.suspect(suspect)

    def ended(self, outcome: Outcome) -> None:
        """Finish the job with the outcome of the command."""
        if not self._finished:
            self._finished = True
            self._events.finish(self._events.judge(outcome))

    def tell(self, kind: str, host: str = "", **fields: Json) -> None:
        """Do nothing: there is no other host."""

    def others(self) -> Mapping[str, str]:
        """Return none."""
        return {}

    def leader_address(self) -> tuple[Any, ...] | None:
        """Return None: there is no leader to reach."""
        return None

    def name_missing(self) -> None:
        """Do nothing: no host is missing."""

    def leave(self) -> None:
        """Leave at once: there is no other host."""
        self._events.left()

    def close(self) -> None:
        """Do nothing: no connection is open."""
