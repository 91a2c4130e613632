"""The role of every host but the first: join, report, and end as the leader decides."""

from __future__ import annotations

import time
from typing import Any, Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json, text
from trainworks_launcher.job.network import Limits
from trainworks_launcher.plan.plan import Control
from trainworks_launcher.supervise.control import Events, handshake
from trainworks_launcher.supervise.control.connection import Connection, heartbeat_interval
from trainworks_launcher.supervise.control.keepalive import Prober
from trainworks_launcher.supervise.control.messages import (
    Message,
    one_line,
    outcome_fields,
    read_outcome,
    seconds,
    suspect_fields,
)
from trainworks_launcher.supervise.control.phases import WORKER, Phases, WorkerPhase
from trainworks_launcher.supervise.control.rendezvous import (
    LeaderConnection,
    Search,
    SearchHandlers,
)
from trainworks_launcher.supervise.event_loop import Loop
from trainworks_launcher.supervise.outcome.evidence import Suspect
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome

_ORDERS = ("go", "stop", "without")
"""Kinds of the leader's messages that count in some phases only."""

_TEXT_CHARACTERS = 1000
"""Length of the leader's text that is logged."""


class Worker:
    """Joins the leader, reports events of this host, and obeys the leader's messages."""

    def __init__(
        self,
        loop: Loop,
        control: Control,
        limits: Limits,
        own: handshake.Credentials,
        events: Events,
    ) -> None:
        """Open nothing before ``begin``.

        Args:
            loop: The loop of the run.
            control: Address and port of the leader.
            limits: Time limits.
            own: Name, job and secret of this host.
            events: The supervisor's handlers.
        """
        self._loop = loop
        self._control = control
        self._limits = limits
        self._own = own
        self._events = events
        self._phases = Phases(WORKER)
        self._search: Search | None = None
        self._connection: Connection | None = None
        self._prober: Prober | None = None
        # Events that may come before a leader has admitted this host.
        self._is_prepared = False
        self._is_stopped = False

    # --- what the supervisor calls ----------------------------------------------------------------
    @property
    def phase(self) -> WorkerPhase:
        """The phase of this host."""
        return self._phases.now

    def begin(self) -> None:
        """Begin to search for the leader, which may not run yet, and to send heartbeats."""
        self._loop.after(heartbeat_interval(self._limits.heartbeat), self._beat)
        self._look_for_leader(self._limits.join)

    def ready(self) -> None:
        """Report to the leader that this host is prepared, now or when the leader admits it."""
        self._is_prepared = True
        if self._phases.take("ready"):
            self._send("ready")

    def stopping(self) -> None:
        """Report a stop signal of this host to the leader, now or when the leader admits it."""
        self._is_stopped = True
        if self._phases.take("stopping"):
            self._send("stopping")

    def suspect(self, suspect: Suspect) -> None:
        """Send the leader the evidence about a rank of this host."""
        if self._phases.take("suspect"):
            self._send("suspect", **suspect_fields(suspect, time.monotonic()))

    def ended(self, outcome: Outcome) -> None:
        """Report the end of this host's command; without a leader, that is the job's outcome.

        "Without": no leader has admitted this host, or the leader is gone.
        """
        if self._phases.take("ended"):
            self._send("ended", **outcome_fields(outcome))
        else:
            self._finish(outcome)

    def tell(self, kind: str, host: str = "", **fields: Json) -> None:
        """Send a message to the leader, the only host that a worker can reach.

        Args:
            kind: Type of the message.
            host: Not used: the leader's method has it.
            fields: Other fields of the message.
        """
        del host
        self._send(kind, **fields)

    def others(self) -> Mapping[str, str]:
        """Return an empty mapping: only the leader has the addresses of the other hosts."""
        return {}

    def leader_address(self) -> tuple[Any, ...] | None:
        """Return the leader's socket address, for example ``("10.0.0.1", 7000)``.

        None before the leader admits this host.
        """
        if self._connection is None:
            return None
        return self._connection.peer_address

    def name_missing(self) -> None:
        """Log how often this host has tried to reach the leader, and the results."""
        if self._search is not None:
            self._search.log_tries()

    def leave(self) -> None:
        """Say goodbye, then call ``events.left`` when the leader closes the connection.

        That is at once without a connection, and at the latest after ``LEAVE_LIMIT_SECONDS``.
        """
        self._phases.must("leave")
        if self._send("bye"):
            self._loop.after(names.LEAVE_LIMIT_SECONDS, self._leave_now)
        else:
            self._leave_now()

    def close(self) -> None:
        """End the search and close all connections at once, without messages."""
        if self._search is not None:
            self._search.end()
        if self._prober is not None:
            self._prober.close()
        if self._connection is not None:
            self._connection.close()

    def _send(self, kind: str, **fields: Json) -> bool:
        """Send a message to the leader.

        Returns:
            Whether the connection is open after that. False before the leader has admitted this
            host, and if the leader is gone.
        """
        connection = self._connection
        if connection is None or not connection.open:
            return False
        connection.send(kind, **fields)
        return connection.open

    # --- joining ----------------------------------------------------------------------------------
    def _look_for_leader(self, limit: float, lost: str = "") -> None:
        """Begin to search for the leader.

        Args:
            limit: Seconds until the search is given up, and this host fails.
            lost: Why an earlier connection to the leader ended; ``""`` for none.
        """
        handlers = SearchHandlers(self._take_leader, self._finish, self._events.log)
        self._search = Search(self._loop, self._control, self._own, limit, handlers)
        self._search.begin(lost)

    def _take_leader(self, admitted: LeaderConnection) -> None:
        """Take over the connection to a leader that has admitted this host.

        This host fails if it has a secret and the leader has none: any program could be such a
        leader. Else the leader gets the events that it does not know yet.
        """
        self._connection = connection = admitted.connection
        leader, host = self._control.leader, self._own.host
        if admitted.has_no_secret:
            cause = f"host {host} has {names.JOB_SECRET_VARIABLE}, the leader {leader} has none"
            outcome = Outcome(
                FAILED, names.EXIT_HOSTS, host, f"{cause}: set it to one value on every host"
            )
            connection.send("ended", **outcome_fields(outcome))
            connection.hand_over(self._message, self._lost)
            self._finish(outcome)
            return
        connection.hand_over(self._message, self._lost)
        self._phases.must("welcome")
        self._prober = Prober(self._loop, host, connection, self._limits.heartbeat)
        self._events.log(f"joined {leader}")
        self._events.welcome()
        # Events from before the connection, which this leader does not know.
        if self._is_stopped:
            self.stopping()
        elif self._is_prepared:
            self.ready()

    # --- messages of the leader -------------------------------------------------------------------
    def _message(self, _: Connection, message: Message) -> None:
        """Handle a message of the leader; a kind that is not the worker's goes to ``events``."""
        kind = text(message.get("type"))
        if kind == "alive":
            if self._prober is not None:
                self._prober.look(seconds(message.get("silent")))
        elif kind == "finish":
            self._finish(read_outcome(message, self._control.leader))
        elif kind not in _ORDERS:
            self._events.told(self._control.leader, kind, message)
        elif not self._phases.take(kind):
            # The message is too early, too late, or repeated.
            return
        elif kind == "go":
            self._events.go()
        elif kind == "stop":
            self._events.stop()
        else:
            # "without": the job goes on without a lost host.
            self._events.log(one_line(message.get("text"), _TEXT_CHARACTERS))
            self._events.restart()

    def _lost(self, _: Connection, reason: str) -> None:
        """Handle a connection that the leader has closed.

        Before the start the leader may be a container that restarts: this host searches for it
        again, for as long as it would wait for a silent leader. Later the leader is gone.
        """
        if self._phases.take("lost"):
            limit = self._limits.heartbeat
            leader = self._control.leader
            self._events.log(
                f"{leader} left before the start: {reason}; it may come again within {limit:g} s"
            )
            self._look_for_leader(limit, reason)
        else:
            self._gone(reason)

    def _beat(self) -> None:
        """Send a heartbeat to the leader, notice its silence, and plan the next heartbeat."""
        connection, limit = self._connection, self._limits.heartbeat
        interval = heartbeat_interval(limit)
        if connection is not None and connection.open:
            # Seconds of silence; 0 while the leader is not lost.
            silent = connection.is_lost(limit)
            if silent:
                connection.close()
                self._gone(f"no message from it for {silent:.0f} s")
            else:
                connection.send("alive")
                if self._prober is not None:
                    self._prober.look()
                interval = connection.next_look(limit)
        self._loop.after(interval, self._beat)

    # --- ending -----------------------------------------------------------------------------------
    def _gone(self, reason: str) -> None:
        """Finish without the leader, which is lost or has left at the job's end.

        The outcome is ``lost host NAME``, unless this host knows an earlier outcome or cause.
        """
        leader = self._control.leader
        lost = Outcome(FAILED, names.EXIT_HOSTS, leader, f"lost host {leader}: {reason}")
        self._finish(self._events.judge(lost))
        self._leave_now()

    def _finish(self, outcome: Outcome) -> None:
        """Give the supervisor the first outcome of the job; later ones do not count."""
        if self._phases.take("finish"):
            if self._search is not None:
                self._search.end()
            self._events.finish(outcome)

    def _leave_now(self) -> None:
        """Tell the supervisor, once, that this host may end."""
        if self._phases.take("left"):
            self._events.left()
