"""The role of the first host: admit the others, decide the outcome, send it to every host."""

from __future__ import annotations

import time
from typing import Any, Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json, text
from trainworks_launcher.job.network import Limits
from trainworks_launcher.plan.plan import Control
from trainworks_launcher.supervise.control import NO_MORE_TIME, Events, handshake
from trainworks_launcher.supervise.control.admission import Admission
from trainworks_launcher.supervise.control.connection import Connection, heartbeat_interval
from trainworks_launcher.supervise.control.exit_aggregation import HostOutcomes
from trainworks_launcher.supervise.control.hosts import Hosts
from trainworks_launcher.supervise.control.messages import (
    Message,
    outcome_fields,
    read_outcome,
    read_suspect,
)
from trainworks_launcher.supervise.control.phases import LEADER, LeaderPhase, Phases
from trainworks_launcher.supervise.control.rivals import ASK_AFTER_SECONDS, Rivals
from trainworks_launcher.supervise.event_loop import Loop
from trainworks_launcher.supervise.outcome.evidence import Suspect
from trainworks_launcher.supervise.outcome.outcome import FAILED, SUCCEEDED, Outcome

_MISSING_SECONDS = (20.0, 60.0)
"""Times at which the log names the missing hosts, in seconds. The last such line comes at the join
limit.
"""

_PREPARING_SECONDS = 5.0
"""From the join of all hosts to the line in the log that some of them are still being prepared."""

_SHOWN_HOSTS = 10


class Leader:
    """Gathers the hosts of the job and decides how it ends.

    An event on this host and on another one is handled in the same way: the supervisor calls the
    method for which another host sends a message.

    Attributes:
        program: Name of the program for the log.
    """

    program = "the program"

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
            control: The hosts and the port.
            limits: Time limits.
            own: Name, job and secret of this host.
            events: The supervisor's handlers.
        """
        self._loop = loop
        self._control = control
        self._limits = limits
        self._events = events
        self._phases = Phases(LEADER)
        self._hosts = Hosts(control.hosts[1:])
        self._rivals = Rivals(loop, own, self._two_leaders)
        self._admission = Admission(loop, self._hosts, own, self._let_in, events.log)
        self._admission.rival = self._rivals.receive
        self._admission.other_launcher = self._will_not_join
        self._with_other_launcher: set[str] = set()
        self._outcomes = HostOutcomes()
        self._outcome: Outcome | None = None
        self._complete = 0  # how often all hosts had joined
        self._join_deadline = 0.0
        self._began = time.monotonic()

    # --- what the supervisor calls ----------------------------------------------------------------
    @property
    def phase(self) -> LeaderPhase:
        """The phase of the job."""
        return self._phases.now

    def begin(self) -> None:
        """Listen. Raises RefusalError if the port is taken."""
        self._admission.open(self._control.port)
        self._events.log(
            f"waiting for {self._hosts.count} other host(s) on port {self._control.port}"
        )
        self._join_deadline = time.monotonic() + self._limits.join
        limit = self._limits.join
        self._loop.after(limit, lambda: self._late(self._hosts.missing(), "did not join", limit))
        for seconds in _MISSING_SECONDS:
            if seconds < limit:
                self._loop.after(seconds, self.name_missing)
        self._loop.after(ASK_AFTER_SECONDS, self._look_for_rivals)
        self._loop.after(heartbeat_interval(self._limits.heartbeat), self._beat)
        self._events.welcome()

    def ready(self) -> None:
        """Note that this host is prepared."""
        self._ready(self._control.leader)

    def stopping(self) -> None:
        """Send the stop to all hosts, once, after a stop signal on any of them."""
        if self._phases.take("stopping"):
            self._send_all("stop")
            self._events.stop()

    def suspect(self, suspect: Suspect) -> None:
        """Pass on that a rank of any host ended."""
        if self._phases.take("suspect"):
            self._events.suspect(suspect)

    def ended(self, outcome: Outcome) -> None:
        """Note that this host's command ended, or could not start."""
        self._ended(self._control.leader, outcome)

    def tell(self, kind: str, host: str = "", **fields: Json) -> None:
        """Send to one host, or to all others."""
        if not host:
            self._send_all(kind, **fields)
        elif host in self._hosts.joined:
            self._hosts.joined[host].send(kind, **fields)

    def others(self) -> Mapping[str, str]:
        """Return the other hosts of the job, each with the address of its connection."""
        addresses = dict.fromkeys(self._hosts.names(), "")
        for name, connection in self._hosts.joined.items():
            # A host on this machine connects from an address that means nothing elsewhere.
            is_remote = connection.address != connection.local_address
            if name in addresses and is_remote:
                addresses[name] = connection.address
        return addresses

    def leader_address(self) -> tuple[Any, ...] | None:
        """Return None: the leader joins no host."""
        return None

    def name_missing(self) -> None:
        """Log which hosts have not joined, and which connections came in their place."""
        missing = self._hosts.missing()
        if not missing or self.phase is not LeaderPhase.GATHERING:
            return
        came = self._admission.describe_strangers() or "nothing has come"
        self._events.log(
            f"still waiting for {shorten_list(self._with_refusals(missing))} after"
            f" {time.monotonic() - self._began:.0f} s: {came} to port {self._control.port} of"
            f" {self._control.leader}; check that these hosts are started, have the same list of"
            " hosts, and reach this port"
        )

    def leave(self) -> None:
        """Leave, when the other hosts have left or their time is over."""
        self._phases.must("leave")
        has_failed = self._outcome is not None and self._outcome.kind == FAILED
        left = min(names.REFUSAL_LIMIT_SECONDS, self._join_deadline - time.monotonic())
        has_late_hosts = has_failed and not self._hosts.have_come()
        if has_late_hosts and left > 0 and self._admission.is_open:
            # Hosts that have not joined yet get the outcome; else they would wait for the time-out.
            self._loop.after(left, self._part)
        else:
            self._part()

    def close(self) -> None:
        """Close everything at once."""
        for connection in self._hosts.joined.values():
            connection.close()
        self._rivals.close()
        self._admission.close()

    # --- gathering --------------------------------------------------------------------------------
    def _let_in(self, connection: Connection) -> None:
        connection.hand_over(self._message, self._lost)
        if self._outcome is not None:
            connection.send("finish", **outcome_fields(self._outcome))
        elif self.phase is LeaderPhase.STOPPING:
            connection.send("stop")
        self._maybe_complete()

    def _message(self, connection: Connection, message: Message) -> None:
        host, kind = connection.host, text(message.get("type"))
        if kind == "alive" or not self._hosts.is_current(connection):
            return  # a lost host that says goodbye is not current
        if kind == "ready":
            self._ready(host)
        elif kind == "ended":
            self._ended(host, read_outcome(message, host))
        elif kind == "suspect":
            self.suspect(read_suspect(message, host, time.monotonic()))
        elif kind == "stopping":
            self.stopping()
        elif kind == "bye":
            self._bye(host)
        else:
            self._events.told(host, kind, message)

    def _ready(self, host: str) -> None:
        if self._phases.take("ready"):
            self._hosts.note_ready(host)
            self._maybe_go()

    def _look_for_rivals(self) -> None:
        missing = self._hosts.missing()
        if not missing or self.phase is not LeaderPhase.GATHERING:
            return
        addresses = [self._control.address] if self._control.address else []
        self._rivals.ask([*addresses, *missing], self._control.port)

    def _two_leaders(self, host: str, address: str) -> None:
        """End the job: another host leads it, too, and both would wait for each other."""
        if self.phase is not LeaderPhase.GATHERING:
            return
        leader = self._control.leader
        other = f"{host or 'another host'} ({address})"
        cause = f"two hosts lead this job: {leader}, which is this host, and {other}"
        advice = (
            "give each host its own index (RANK, NODE_RANK, or what the platform calls it), 0 on"
            " one of them alone"
        )
        self._finish(Outcome(FAILED, names.EXIT_HOSTS, leader, f"{cause}; {advice}"))

    def _maybe_complete(self) -> None:
        """Start the time limit of the preparation, when all hosts have joined."""
        if not self._hosts.have_joined():
            return
        self._complete += 1
        times = self._complete
        joined, limit = self._describe_joined(), self._limits.prepare

        # A host that leaves and joins again starts both times anew.
        def end_preparation() -> None:
            if times == self._complete:
                self._late(self._hosts.unprepared(), "were not prepared", limit)

        # Installing takes minutes, and looks to people like a closed port.
        def log_preparation() -> None:
            if times == self._complete and self.phase is LeaderPhase.GATHERING:
                self._events.log(f"{joined}: waiting until they are prepared")

        self._loop.after(limit, end_preparation)
        self._loop.after(_PREPARING_SECONDS, log_preparation)

    def _describe_joined(self) -> str:
        count = f"{self._hosts.count + 1} of {len(self._control.hosts)} hosts"
        return f"{count} are here after {time.monotonic() - self._began:.0f} s"

    def _maybe_go(self) -> None:
        """Start the job, when all hosts are ready."""
        if self._hosts.are_ready() and self._phases.take("go"):
            self._events.log(f"{self._describe_joined()}: starting {self.program}")
            self._send_all("go")
            self._events.go()

    def _late(self, hosts: Sequence[str], reason: str, seconds: float) -> None:
        """Go on without late hosts if the job may, else end the job."""
        if not hosts or not self._phases.take("late"):
            return
        words = f"{reason} within {seconds:g} s"
        if self._may_go_on_without(len(hosts)):
            for host in hosts:
                self._go_on_without(host, words)
            return
        cause = f"hosts that {words}: {shorten_list(self._with_refusals(hosts))}"
        self._finish(Outcome(FAILED, names.EXIT_HOSTS, self._control.leader, cause))

    def _will_not_join(self, host: str) -> None:
        """Give a host with another version of the launcher less time to join.

        Such a host tries again for as long as this, and then ends.
        """
        if host in self._with_other_launcher:
            return
        self._with_other_launcher.add(host)
        seconds = names.REFUSAL_LIMIT_SECONDS

        # A host may be started again in this time, with the right version.
        def check() -> None:
            self._with_other_launcher.discard(host)
            if host in self._hosts.missing():
                self._late([host], "did not join", seconds)

        self._loop.after(seconds, check)

    def _with_refusals(self, hosts: Sequence[str]) -> list[str]:
        """Return the hosts' names, each with the reason if it was not admitted."""
        described: list[str] = []
        for host in hosts:
            if host in self._admission.refused:
                host = f"{host} (refused: {self._admission.refused[host]})"
            described.append(host)
        return described

    # --- losing -----------------------------------------------------------------------------------
    def _beat(self) -> None:
        limit = self._limits.heartbeat
        for connection in list(self._hosts.joined.values()):
            silent = connection.is_lost(limit)
            if silent:
                self._lost(connection, f"no message from it for {silent:.0f} s")
            else:
                connection.send("alive", silent=round(time.monotonic() - connection.spoke_at, 1))
        self._admission.sweep()
        interval = heartbeat_interval(limit)
        for connection in self._hosts.joined.values():
            if connection.open:
                interval = min(interval, connection.next_look(limit))
        self._loop.after(interval, self._beat)

    def _lost(self, connection: Connection, reason: str) -> None:
        """Handle a host that closed its connection, or that is silent for too long."""
        host = connection.host
        if not self._hosts.is_current(connection):
            return
        if self.phase >= LeaderPhase.FINISHED:
            connection.close()
            self._bye(host)
        elif self.phase is LeaderPhase.GATHERING and not connection.open:
            # It may be a container that restarts. It gets as long as a silent host.
            self._forget(host)
            limit = self._limits.heartbeat
            self._events.log(
                f"{host} left before the start: {reason}; it may come again within {limit:g} s"
            )

            def still_gone() -> None:
                if self.phase < LeaderPhase.FINISHED and host in self._hosts.missing():
                    self._lose(host, reason)

            self._loop.after(limit, still_gone)
        else:
            self._lose(host, reason)

    def _may_go_on_without(self, count: int) -> bool:
        left = self._hosts.count + 1 - count
        return 0 < self._control.minimum_hosts <= left and self.phase is not LeaderPhase.STOPPING

    def _forget(self, host: str) -> None:
        self._hosts.forget(host)
        self._outcomes.forget(host)

    def _lose(self, host: str, reason: str) -> None:
        """Go on without a lost host if the job may, else end the job."""
        if self._may_go_on_without(1):
            self._go_on_without(host, reason)
            return
        if host in self._hosts.joined:
            self._hosts.joined[host].close()
        # The host may have reported success before: its part is done, or (in MPI jobs) it has no
        # command of its own. It counts as lost all the same, because the fate of its ranks is not
        # known.
        self._outcomes.replace(
            host, Outcome(FAILED, names.EXIT_HOSTS, host, f"lost host {host}: {reason}")
        )
        if self.phase is LeaderPhase.STOPPING:
            # Its platform may have ended it. Hosts without a stop signal of their own get no more
            # time than that host had.
            self._events.told(host, NO_MORE_TIME, {})
        self._maybe_finish()

    def _go_on_without(self, host: str, reason: str) -> None:
        lost = f"lost host {host}: {reason}"
        connection = self._hosts.joined.get(host)
        self._hosts.without[host] = lost
        self._forget(host)
        message = (
            f"{lost}; going on with {self._hosts.count + 1} of {len(self._control.hosts)} hosts"
        )
        self._events.log(message)
        if connection is not None and connection.open:
            # The host is silent, and reads this only if it wakes again.
            connection.send("finish", **outcome_fields(self._hosts.dismissal(host)))
            connection.close()
        self._send_all("without", text=message)
        if self.phase is LeaderPhase.GATHERING:
            self._maybe_complete()
            self._maybe_go()
        elif self.phase is LeaderPhase.RUNNING:
            self._events.restart()
            self._maybe_finish()

    # --- ending -----------------------------------------------------------------------------------
    def _ended(self, host: str, outcome: Outcome) -> None:
        if self._phases.take("ended"):
            self._outcomes.note(host, outcome)
            self._maybe_finish()

    def _maybe_finish(self) -> None:
        """Finish the job, when the known ends decide its outcome."""
        leader, failure = self._control.leader, self._outcomes.failure()
        if self.phase >= LeaderPhase.FINISHED:
            return  # a host was lost while it was told of another one's loss
        if self.phase is LeaderPhase.STOPPING:
            # Every host has the grace period to save its work; the period bounds the processes.
            if self._outcomes.include((*self._hosts.joined, leader)):
                self._finish(self._events.judge(self._outcomes.stopped(leader)))
        elif failure is not None:
            self._events.inquire(failure, self._conclude)
        elif self._have_all_ended():
            self._finish(Outcome(SUCCEEDED, 0, leader, ""))

    def _have_all_ended(self) -> bool:
        # The counts first: they are compared at every end, and visit no host.
        if self._outcomes.count <= self._hosts.count:
            return False
        return self._outcomes.include((self._control.leader, *self._hosts.names()))

    def _conclude(self) -> None:
        """Finish the job with its first failure, unless it was stopped meanwhile.

        The evidence of all hosts has been collected.
        """
        failure = self._outcomes.failure()
        if failure is not None and self.phase < LeaderPhase.STOPPING:
            self._finish(self._events.judge(failure))

    def _finish(self, outcome: Outcome) -> None:
        self._phases.must("finish")
        self._outcome = outcome
        self._send_all("finish", **outcome_fields(outcome))
        self._events.finish(outcome)

    def _send_all(self, kind: str, **fields: Json) -> None:
        for connection in list(self._hosts.joined.values()):
            connection.send(kind, **fields)

    def _bye(self, host: str) -> None:
        """Note that a host is done, or is gone after the outcome was sent."""
        if self._phases.take("bye"):
            self._hosts.note_bye(host)
            if self.phase is LeaderPhase.LINGERING and self._hosts.have_come():
                self._part()
            elif self.phase is LeaderPhase.LEAVING:
                self._maybe_leave()

    def _part(self) -> None:
        """Wait for the goodbyes of joined hosts, for a while, and no longer for late hosts."""
        if self._phases.take("part"):
            self._loop.after(names.LEAVE_LIMIT_SECONDS, self._leave_now)
            self._maybe_leave()

    def _maybe_leave(self) -> None:
        if self._hosts.have_left():
            self._leave_now()

    def _leave_now(self) -> None:
        if self._phases.take("left"):
            self._events.left()


def shorten_list(hosts: Sequence[str]) -> str:
    """Name the first ten hosts, for a sentence; more of them are only counted."""
    shown = ", ".join(hosts[:_SHOWN_HOSTS])
    if len(hosts) > _SHOWN_HOSTS:
        shown += f" and {len(hosts) - _SHOWN_HOSTS} more"
    return shown
