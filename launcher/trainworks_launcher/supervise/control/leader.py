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
"""Seconds after the begin at which the log names the missing hosts. The last such line comes at the
join limit.
"""

_PREPARING_SECONDS = 5.0
"""Seconds from the join of all hosts to the line in the log that some of them are still being
prepared.
"""

_MAX_SHOWN_HOSTS = 10


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
        self._rivals = Rivals(loop, own, self._end_for_rival)
        self._admission = Admission(loop, self._hosts, own, self._let_in, events.log)
        self._admission.rival = self._rivals.receive
        self._admission.other_launcher = self._limit_other_launcher
        self._with_other_launcher: set[str] = set()
        self._outcomes = HostOutcomes()
        self._outcome: Outcome | None = None
        self._full_joins = 0  # how often all hosts had joined
        self._join_deadline = 0.0  # monotonic clock, as ``_began``
        self._began = time.monotonic()

    # --- what the supervisor calls ----------------------------------------------------------------
    @property
    def phase(self) -> LeaderPhase:
        """The phase of the job."""
        return self._phases.now

    def begin(self) -> None:
        """Listen for the other hosts, and set the time limits of the joins.

        Raises:
            RefusalError: The port is taken.
        """
        self._admission.open(self._control.port)
        self._events.log(
            f"waiting for {self._hosts.count} other host(s) on port {self._control.port}"
        )
        self._join_deadline = time.monotonic() + self._limits.join
        limit = self._limits.join
        self._loop.after(
            limit, lambda: self._handle_late_hosts(self._hosts.missing(), "did not join", limit)
        )
        for seconds in _MISSING_SECONDS:
            if seconds < limit:
                self._loop.after(seconds, self.name_missing)
        self._loop.after(ASK_AFTER_SECONDS, self._look_for_rivals)
        self._loop.after(heartbeat_interval(self._limits.heartbeat), self._beat)
        self._events.welcome()

    def ready(self) -> None:
        """Note that this host is prepared; start the job if all hosts are."""
        self._ready(self._control.leader)

    def stopping(self) -> None:
        """Send the stop to all hosts, once, after a stop signal on any of them."""
        if self._phases.take("stopping"):
            self._send_all("stop")
            self._events.stop()

    def suspect(self, suspect: Suspect) -> None:
        """Give the supervisor the evidence about a rank of any host."""
        if self._phases.take("suspect"):
            self._events.suspect(suspect)

    def ended(self, outcome: Outcome) -> None:
        """Note that this host's command ended, or could not start; this may end the job."""
        self._ended(self._control.leader, outcome)

    def tell(self, kind: str, host: str = "", **fields: Json) -> None:
        """Send a message to one host, or to all others that have joined.

        Args:
            kind: Type of the message.
            host: The host; ``""`` for all. A host that has not joined gets nothing.
            fields: Other fields of the message.
        """
        if not host:
            self._send_all(kind, **fields)
        elif host in self._hosts.joined:
            self._hosts.joined[host].send(kind, **fields)

    def others(self) -> Mapping[str, str]:
        """Return name -> address of the other hosts that the job still has.

        The address is that of the host's connection, for example ``10.0.0.2``. It is ``""`` for a
        host that has not joined, and for one on this machine.
        """
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
        """Log which hosts have not joined, and which connections came in their place.

        Nothing is logged if all have joined, or after the start.
        """
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
        """Wait for the goodbyes of the other hosts, bounded, then call ``events.left``.

        After a failure the port stays open for hosts that have not come yet, until the join limit
        but at most ``names.REFUSAL_LIMIT_SECONDS``: they get the outcome when they join.
        """
        self._phases.must("leave")
        has_failed = self._outcome is not None and self._outcome.kind == FAILED
        seconds = min(names.REFUSAL_LIMIT_SECONDS, self._join_deadline - time.monotonic())
        expects_hosts = has_failed and not self._hosts.have_come() and self._admission.is_open
        if expects_hosts and seconds > 0:
            self._loop.after(seconds, self._await_goodbyes)
        else:
            self._await_goodbyes()

    def close(self) -> None:
        """Close the port and all connections at once, without messages."""
        for connection in self._hosts.joined.values():
            connection.close()
        self._rivals.close()
        self._admission.close()

    # --- gathering --------------------------------------------------------------------------------
    def _let_in(self, connection: Connection) -> None:
        """Take over the connection of a host that has joined, and send what it has missed."""
        connection.hand_over(self._message, self._lost)
        if self._outcome is not None:
            connection.send("finish", **outcome_fields(self._outcome))
        elif self.phase is LeaderPhase.STOPPING:
            connection.send("stop")
        self._limit_preparation()

    def _message(self, connection: Connection, message: Message) -> None:
        """Handle a message of a joined host; a kind that is not the leader's goes to ``events``."""
        host, kind = connection.host, text(message.get("type"))
        if kind == "alive":
            # The connection itself has noted the time.
            return
        if not self._hosts.is_current(connection):
            # The goodbye of a lost host, for example.
            return
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
        """Note that a host, or the leader, is prepared; start the job if all hosts are."""
        if self._phases.take("ready"):
            self._hosts.note_ready(host)
            self._go_if_ready()

    def _look_for_rivals(self) -> None:
        """Ask the hosts that have not joined whether they lead the job, too."""
        missing = self._hosts.missing()
        if not missing or self.phase is not LeaderPhase.GATHERING:
            return
        hosts = list(missing)
        if self._control.address:
            # The settings may name another host as the leader than the list of hosts does.
            hosts.insert(0, self._control.address)
        self._rivals.ask(hosts, self._control.port)

    def _end_for_rival(self, host: str, address: str) -> None:
        """End the job: another host leads it, too, and both would wait for each other.

        Args:
            host: Name of the other leader; ``""`` if not known.
            address: Its address.
        """
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

    def _limit_preparation(self) -> None:
        """Start the time limit of the preparation, if all hosts have joined."""
        if not self._hosts.have_joined():
            return
        self._full_joins += 1
        full_joins = self._full_joins
        joined, limit = self._describe_joined(), self._limits.prepare

        # A host that leaves and joins again starts both times anew, so these do nothing then.
        def end_preparation() -> None:
            if full_joins == self._full_joins:
                self._handle_late_hosts(self._hosts.unprepared(), "were not prepared", limit)

        # Installing takes minutes, and looks to people like a closed port.
        def log_preparation() -> None:
            if full_joins == self._full_joins and self.phase is LeaderPhase.GATHERING:
                self._events.log(f"{joined}: waiting until they are prepared")

        self._loop.after(limit, end_preparation)
        self._loop.after(_PREPARING_SECONDS, log_preparation)

    def _describe_joined(self) -> str:
        """Describe who has joined, for example ``2 of 2 hosts are here after 3 s``."""
        count = f"{self._hosts.count + 1} of {len(self._control.hosts)} hosts"
        return f"{count} are here after {time.monotonic() - self._began:.0f} s"

    def _go_if_ready(self) -> None:
        """Start the job on every host, if all hosts are prepared."""
        if self._hosts.are_ready() and self._phases.take("go"):
            self._events.log(f"{self._describe_joined()}: starting {self.program}")
            self._send_all("go")
            self._events.go()

    def _handle_late_hosts(self, hosts: Sequence[str], reason: str, seconds: float) -> None:
        """Go on without late hosts if the job may, else end the job.

        Args:
            hosts: The late hosts; nothing happens without one, or after the start.
            reason: What they did not do, for example ``did not join``.
            seconds: The limit that is over.
        """
        if not hosts or not self._phases.take("late"):
            return
        words = f"{reason} within {seconds:g} s"
        if self._may_go_on_without(len(hosts)):
            for host in hosts:
                self._go_on_without(host, words)
            return
        cause = f"hosts that {words}: {shorten_list(self._with_refusals(hosts))}"
        self._finish(Outcome(FAILED, names.EXIT_HOSTS, self._control.leader, cause))

    def _limit_other_launcher(self, host: str) -> None:
        """Give a host with another version of the launcher ``REFUSAL_LIMIT_SECONDS`` to join.

        Such a host tries again for that long itself, and then ends.
        """
        if host in self._with_other_launcher:
            return
        self._with_other_launcher.add(host)
        seconds = names.REFUSAL_LIMIT_SECONDS

        # A host may be started again in this time, with the right version.
        def check() -> None:
            self._with_other_launcher.discard(host)
            if host in self._hosts.missing():
                self._handle_late_hosts([host], "did not join", seconds)

        self._loop.after(seconds, check)

    def _with_refusals(self, hosts: Sequence[str]) -> list[str]:
        """Return the names of hosts, with the reason if one was not admitted.

        For example ``algo-2 (refused: it has already joined)``.
        """
        described: list[str] = []
        for host in hosts:
            if host in self._admission.refused:
                host = f"{host} (refused: {self._admission.refused[host]})"
            described.append(host)
        return described

    # --- losing -----------------------------------------------------------------------------------
    def _beat(self) -> None:
        """Send a heartbeat to each host, find the silent ones, and plan the next heartbeat.

        A silent host is lost (``_lost``). Connections that have not joined in time are closed.
        """
        limit = self._limits.heartbeat
        for connection in list(self._hosts.joined.values()):
            silent = connection.is_lost(limit)
            if silent:
                self._lost(connection, f"no message from it for {silent:.0f} s")
            else:
                # The other end compares this with its own times: one direction may be broken.
                silent_seconds = round(time.monotonic() - connection.spoke_at, 1)
                connection.send("alive", silent=silent_seconds)
        self._admission.sweep()
        interval = heartbeat_interval(limit)
        for connection in self._hosts.joined.values():
            if connection.open:
                interval = min(interval, connection.next_look(limit))
        self._loop.after(interval, self._beat)

    def _lost(self, connection: Connection, reason: str) -> None:
        """Handle a host that closed its connection, or that is silent for too long.

        After the outcome that is its goodbye. Before the start it may join again. Else it is lost.

        Args:
            connection: Its connection.
            reason: End of a sentence, for example ``it closed the connection``.
        """
        host = connection.host
        if not self._hosts.is_current(connection):
            return
        if self.phase >= LeaderPhase.FINISHED:
            connection.close()
            self._bye(host)
        elif self.phase is LeaderPhase.GATHERING and not connection.open:
            # The host may be a container that restarts. It gets as long as a silent host.
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
        """Return whether the job may go on with so many hosts fewer.

        False for a job without a minimum of hosts, and for one that is being stopped.
        """
        remaining = self._hosts.count + 1 - count
        is_elastic = self._control.minimum_hosts > 0
        if not is_elastic or self.phase is LeaderPhase.STOPPING:
            return False
        return remaining >= self._control.minimum_hosts

    def _forget(self, host: str) -> None:
        """Forget that a host has joined, and its outcome."""
        self._hosts.forget(host)
        self._outcomes.forget(host)

    def _lose(self, host: str, reason: str) -> None:
        """Go on without a lost host if the job may, else note its loss as a failure.

        That ends the job, in a stop when the other hosts have ended.

        Args:
            host: The host.
            reason: Why it is lost: end of a sentence.
        """
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
        self._finish_if_decided()

    def _go_on_without(self, host: str, reason: str) -> None:
        """Take a host out of the job, and tell the others, whose ranks start again.

        Args:
            host: The host.
            reason: Why it is lost, for example ``did not join within 600 s``.
        """
        lost = f"lost host {host}: {reason}"
        connection = self._hosts.joined.get(host)
        self._hosts.without[host] = lost
        self._forget(host)
        message = (
            f"{lost}; continuing with {self._hosts.count + 1} of {len(self._control.hosts)} hosts"
        )
        self._events.log(message)
        if connection is not None and connection.open:
            # The host is silent, and reads this only if it wakes again.
            connection.send("finish", **outcome_fields(self._hosts.dismissal(host)))
            connection.close()
        self._send_all("without", text=message)
        if self.phase is LeaderPhase.GATHERING:
            # The missing host may have been the last one.
            self._limit_preparation()
            self._go_if_ready()
        elif self.phase is LeaderPhase.RUNNING:
            self._events.restart()
            self._finish_if_decided()

    # --- ending -----------------------------------------------------------------------------------
    def _ended(self, host: str, outcome: Outcome) -> None:
        """Note the end of a host's command, and finish the job if that decides the outcome.

        Does nothing after the outcome.
        """
        # False in a phase in which this event does not count (``phases``).
        if self._phases.take("ended"):
            self._outcomes.note(host, outcome)
            self._finish_if_decided()

    def _finish_if_decided(self) -> None:
        """Finish the job, if the known ends of hosts decide its outcome.

        - A stopped job ends when every joined host has ended.
        - A failure of one host ends the job, after all hosts were asked for evidence.
        - Else the job succeeds when every host has ended.
        """
        leader, failure = self._control.leader, self._outcomes.failure()
        if self.phase >= LeaderPhase.FINISHED:
            # A host was lost while the loss of another one was sent to it.
            return
        if self.phase is LeaderPhase.STOPPING:
            # Every host has the grace period to save its work; the period bounds the processes.
            if self._outcomes.include((*self._hosts.joined, leader)):
                self._finish(self._events.judge(self._outcomes.stopped(leader)))
        elif failure is not None:
            self._events.inquire(failure, self._conclude)
        elif self._have_all_ended():
            self._finish(Outcome(SUCCEEDED, 0, leader, ""))

    def _have_all_ended(self) -> bool:
        """Return whether the leader and every other host have an outcome."""
        # The counts first: this is called at every end, and a job has thousands of hosts.
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
        """Send the job's outcome to all hosts, and give it to the supervisor.

        Raises RuntimeError, a defect, if the job has an outcome already.
        """
        self._phases.must("finish")
        self._outcome = outcome
        self._send_all("finish", **outcome_fields(outcome))
        self._events.finish(outcome)

    def _send_all(self, kind: str, **fields: Json) -> None:
        """Send a message to all hosts that have joined."""
        # A copy, because a connection that is lost in the send may leave the mapping.
        for connection in list(self._hosts.joined.values()):
            connection.send(kind, **fields)

    def _bye(self, host: str) -> None:
        """Note that a host is done, or is gone after the outcome was sent; leave if all are."""
        if self._phases.take("bye"):
            self._hosts.note_bye(host)
            if self.phase is LeaderPhase.LINGERING and self._hosts.have_come():
                self._await_goodbyes()
            elif self.phase is LeaderPhase.LEAVING:
                self._leave_if_alone()

    def _await_goodbyes(self) -> None:
        """Leave when the joined hosts have said goodbye, or after ``LEAVE_LIMIT_SECONDS``.

        Hosts that have not joined are no longer awaited.
        """
        if self._phases.take("part"):
            self._loop.after(names.LEAVE_LIMIT_SECONDS, self._leave_now)
            self._leave_if_alone()

    def _leave_if_alone(self) -> None:
        """Leave now, if every connected host has said goodbye."""
        if self._hosts.have_left():
            self._leave_now()

    def _leave_now(self) -> None:
        """Tell the supervisor, once, that this host may end."""
        if self._phases.take("left"):
            self._events.left()


def shorten_list(hosts: Sequence[str]) -> str:
    """Return the first ten hosts as text: ``algo-1, algo-2``, then ``... and 5 more``."""
    shown = ", ".join(hosts[:_MAX_SHOWN_HOSTS])
    if len(hosts) > _MAX_SHOWN_HOSTS:
        shown += f" and {len(hosts) - _MAX_SHOWN_HOSTS} more"
    return shown
