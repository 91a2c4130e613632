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
        self._prepared = False
        self._stopped = False  # perhaps before a leader has admitted this host

    # --- what the supervisor calls ----------------------------------------------------------------
    @property
    def phase(self) -> WorkerPhase:
        """The phase of this host."""
        return self._phases.now

    def begin(self) -> None:
        """Begin to search for the leader, which may not run yet."""
        self._loop.after(heartbeat_interval(self._limits.heartbeat), self._beat)
        self._look_for_leader(self._limits.join)

    def ready(self) -> None:
        """Report that this host is prepared."""
        self._prepared = True
        if self._phases.take("ready"):
            self._send("ready")

    def stopping(self) -> None:
        """Report a stop signal to this host."""
        self._stopped = True
        if self._phases.take("stopping"):
            self._send("stopping")

    def suspect(self, suspect: Suspect) -> None:
        """Report that a rank of this host ended."""
        if self._phases.take("suspect"):
            self._send("suspect", **suspect_fields(suspect, time.monotonic()))

    def ended(self, outcome: Outcome) -> None:
        """Report the end of this host's command; without a leader finish with its outcome."""
        if self._phases.take("ended"):
            self._send("ended", **outcome_fields(outcome))
        else:
            self._finish(outcome)

    def tell(self, kind: str, host: str = "", **fields: Json) -> None:
        """Send to the leader."""
        del host
        self._send(kind, **fields)

    def others(self) -> Mapping[str, str]:
        """Return none: only the leader knows the other hosts."""
        return {}

    def leader_address(self) -> tuple[Any, ...] | None:
        """Return the leader's end of the connection; None before the leader admits this host."""
        if self._connection is None:
            return None
        return self._connection.peer_address

    def name_missing(self) -> None:
        """Log the tries to reach the leader, and their results."""
        if self._search is not None:
            self._search.log_tries()

    def leave(self) -> None:
        """Say goodbye, and leave when the leader closes the connection."""
        self._phases.must("leave")
        if self._send("bye"):
            self._loop.after(names.LEAVE_LIMIT_SECONDS, self._leave_now)
        else:
            self._leave_now()

    def close(self) -> None:
        """Close everything at once."""
        if self._search is not None:
            self._search.end()
        if self._prober is not None:
            self._prober.close()
        if self._connection is not None:
            self._connection.close()

    def _send(self, kind: str, **fields: Json) -> bool:
        """Send to the leader; False if it has not admitted this host, or is gone."""
        connection = self._connection
        if connection is None or not connection.open:
            return False
        connection.send(kind, **fields)
        return connection.open

    # --- joining ----------------------------------------------------------------------------------
    def _look_for_leader(self, limit: float, lost: str = "") -> None:
        handlers = SearchHandlers(self._welcomed, self._finish, self._events.log)
        self._search = Search(self._loop, self._control, self._own, limit, handlers)
        self._search.begin(lost)

    def _welcomed(self, admitted: LeaderConnection) -> None:
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
        if self._stopped:
            self.stopping()
        elif self._prepared:
            self.ready()

    # --- messages of the leader -------------------------------------------------------------------
    def _message(self, _: Connection, message: Message) -> None:
        kind = text(message.get("type"))
        if kind == "alive":
            if self._prober is not None:
                self._prober.look(seconds(message.get("silent")))
        elif kind == "finish":
            self._finish(read_outcome(message, self._control.leader))
        elif kind not in _ORDERS:
            self._events.told(self._control.leader, kind, message)
        elif not self._phases.take(kind):
            return  # too early, too late, or repeated
        elif kind == "go":
            self._events.go()
        elif kind == "stop":
            self._events.stop()
        else:
            self._events.log(one_line(message.get("text"), 1000))
            self._events.restart()

    def _lost(self, _: Connection, reason: str) -> None:
        """Handle a connection that the leader has closed.

        Before the start the leader may be a container that restarts. It gets as long as a silent
        leader.
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
        connection, limit = self._connection, self._limits.heartbeat
        after = heartbeat_interval(limit)
        if connection is not None and connection.open:
            silent = connection.is_lost(limit)
            if silent:
                connection.close()
                self._gone(f"no message from it for {silent:.0f} s")
            else:
                connection.send("alive")
                if self._prober is not None:
                    self._prober.look()
                after = connection.next_look(limit)
        self._loop.after(after, self._beat)

    # --- ending -----------------------------------------------------------------------------------
    def _gone(self, reason: str) -> None:
        """Finish: the leader is lost, or has left at the job's end."""
        leader = self._control.leader
        lost = Outcome(FAILED, names.EXIT_HOSTS, leader, f"lost host {leader}: {reason}")
        self._finish(self._events.judge(lost))
        self._leave_now()

    def _finish(self, outcome: Outcome) -> None:
        """Pass on the first outcome; later ones do not count."""
        if self._phases.take("finish"):
            if self._search is not None:
                self._search.end()
            self._events.finish(outcome)

    def _leave_now(self) -> None:
        if self._phases.take("left"):
            self._events.left()
