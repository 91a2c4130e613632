"""The role of the first host: it gathers the others, decides the outcome, tells everybody."""

from __future__ import annotations

import time
from typing import Any, Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json, text
from trainworks_launcher.job.network import Limits
from trainworks_launcher.plan.plan import Control
from trainworks_launcher.supervise.control import NO_MORE_TIME, Events
from trainworks_launcher.supervise.control.admission import Admission
from trainworks_launcher.supervise.control.connection import Connection, heartbeat_interval
from trainworks_launcher.supervise.control.exit_aggregation import Ends
from trainworks_launcher.supervise.control.hosts import Hosts
from trainworks_launcher.supervise.control.messages import (
    Message,
    outcome_fields,
    read_outcome,
    read_suspect,
)
from trainworks_launcher.supervise.control.phases import LEADER, LeaderPhase, Phases
from trainworks_launcher.supervise.control.rivals import ASK_AFTER_SECONDS, Own, Rivals
from trainworks_launcher.supervise.event_loop import Loop
from trainworks_launcher.supervise.outcome.evidence import Suspect
from trainworks_launcher.supervise.outcome.outcome import FAILED, SUCCEEDED, Outcome

_MISSING_SECONDS = (20.0, 60.0)
"""After these seconds the log names the hosts that are missing.

The last time is at the join limit.
"""

_PREPARING_SECONDS = 5.0
"""After all hosts have joined, until the log says that some of them are still being prepared."""


class Leader:
    """Gathers the hosts of the job and decides how it ends.

    What happens on this host and on another one is the same event: the
    supervisor calls what a message says.
    """

    def __init__(
        self,
        loop: Loop,
        control: Control,
        limits: Limits,
        job: Mapping[str, Json],
        secret: str,
        events: Events,
        starts: str = "the program",
    ) -> None:
        """Nothing is opened before ``begin``. job: its identity. secret: "" for
        none. starts: its name for the log.
        """
        self._loop = loop
        self._control = control
        self._limits = limits
        self._events = events
        self._phases = Phases(LEADER)
        self._hosts = Hosts(control.hosts[1:])
        self._rivals = Rivals(loop, Own(control.leader, job, secret), self._two_leaders)
        self._door = Admission(loop, self._hosts, job, secret, self._let_in, events.log)
        self._door.rival = self._rivals.heard
        self._door.other_launcher = self._will_not_join
        self._with_other_launcher: set[str] = set()
        self._ends = Ends()
        self._outcome: Outcome | None = None
        self._complete = 0  # how many times all had joined
        self._join_deadline = 0.0
        self._began = time.monotonic()
        self._starts = starts

    # --- what the supervisor calls ----------------------------------------------------------------
    @property
    def phase(self) -> LeaderPhase:
        """How far the job is."""
        return self._phases.now

    def begin(self) -> None:
        """Listen. Raises RefusalError if the port is taken."""
        self._door.open(self._control.port)
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
        """This host is prepared."""
        self._ready(self._control.leader)

    def stopping(self) -> None:
        """A stop signal came to this host, or to another one: all are told, once."""
        if self._phases.take("stopping"):
            self._send_all("stop")
            self._events.stop()

    def suspect(self, suspect: Suspect) -> None:
        """A rank of this host, or of another one, ended."""
        if self._phases.take("suspect"):
            self._events.suspect(suspect)

    def ended(self, outcome: Outcome) -> None:
        """This host's command ended, or it could not start."""
        self._ended(self._control.leader, outcome)

    def tell(self, kind: str, host: str = "", **fields: Json) -> None:
        """Tell one host, or all others."""
        if not host:
            self._send_all(kind, **fields)
        elif host in self._hosts.joined:
            self._hosts.joined[host].send(kind, **fields)

    def others(self) -> Mapping[str, str]:
        """Return the other hosts that the job still has, each with the address
        that it speaks from.
        """
        known = {
            name: joined.address
            for name, joined in self._hosts.joined.items()
            if joined.address != joined.local_address
        }
        return {name: known.get(name, "") for name in self._hosts.names()}

    def there(self) -> tuple[Any, ...] | None:
        """The leader joins no host."""
        return None

    def name_missing(self) -> None:
        """Say which hosts have not joined, and what has come to the port in their place."""
        missing = self._hosts.missing()
        if not missing or self.phase is not LeaderPhase.GATHERING:
            return
        came = self._door.came() or "nothing has come"
        self._events.log(
            f"still waiting for {some(self._with_refusals(missing))} after"
            f" {time.monotonic() - self._began:.0f} s: {came} to port {self._control.port} of"
            f" {self._control.leader}; check that these hosts are started, have the same list of"
            " hosts, and reach this port"
        )

    def leave(self) -> None:
        """This host is done; wait, bounded, until the others are."""
        self._phases.must("leave")
        late = (
            self._outcome is not None
            and self._outcome.kind == FAILED
            and not self._hosts.have_come()
        )
        left = min(names.REFUSAL_LIMIT_SECONDS, self._join_deadline - time.monotonic())
        if (
            late and left > 0 and self._door.is_open
        ):  # hosts that never joined would wait for us until the time-out
            self._loop.after(left, self._part)
        else:
            self._part()

    def close(self) -> None:
        """Close everything at once."""
        for connection in self._hosts.joined.values():
            connection.close()
        self._rivals.close()
        self._door.close()

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
            return  # the second: a host that was lost says goodbye
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
        asked = [self._control.address] if self._control.address else []
        self._rivals.ask([*asked, *missing], self._control.port)

    def _two_leaders(self, host: str, address: str) -> None:
        """Another host leads the same job: both would wait for each other."""
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
        """All have joined: from now on they have the time to prepare themselves."""
        if self._hosts.have_joined():
            self._complete += 1
            times = self._complete
            came, limit = self._came(), self._limits.prepare

            def time_out() -> None:  # a host that came again has its own time from then on
                if times == self._complete:
                    self._late(self._hosts.unprepared(), "were not prepared", limit)

            def still_prepared() -> None:  # installing takes minutes, and looks like a closed port
                if times == self._complete and self.phase is LeaderPhase.GATHERING:
                    self._events.log(f"{came}: waiting until they are prepared")

            self._loop.after(limit, time_out)
            self._loop.after(_PREPARING_SECONDS, still_prepared)

    def _came(self) -> str:
        count = f"{self._hosts.count + 1} of {len(self._control.hosts)} hosts"
        return f"{count} are here after {time.monotonic() - self._began:.0f} s"

    def _maybe_go(self) -> None:
        """All are ready: start."""
        if self._hosts.are_ready() and self._phases.take("go"):
            self._events.log(f"{self._came()}: starting {self._starts}")
            self._send_all("go")
            self._events.go()

    def _late(self, hosts: Sequence[str], reason: str, seconds: float) -> None:
        """Hosts that are late: the job goes on without them if it may."""
        if not hosts or not self._phases.take("late"):
            return
        words = f"{reason} within {seconds:g} s"
        if self._may_go_on_without(len(hosts)):
            for host in hosts:
                self._go_on_without(host, words)
            return
        cause = f"hosts that {words}: {some(self._with_refusals(hosts))}"
        self._finish(Outcome(FAILED, names.EXIT_HOSTS, self._control.leader, cause))

    def _will_not_join(self, host: str) -> None:
        """A host has another version of the launcher.

        It tries again as long as this, and then it ends.
        """
        if host in self._with_other_launcher:
            return
        self._with_other_launcher.add(host)
        seconds = names.REFUSAL_LIMIT_SECONDS

        def still_missing() -> None:  # it may have been started anew, with the right version
            self._with_other_launcher.discard(host)
            if host in self._hosts.missing():
                self._late([host], "did not join", seconds)

        self._loop.after(seconds, still_missing)

    def _with_refusals(self, hosts: Sequence[str]) -> list[str]:
        """Return the hosts' names, each with the reason if it was not let in."""
        refused = self._door.refused
        return [
            host + (f" (refused: {refused[host]})" if host in refused else "") for host in hosts
        ]

    # --- losing -----------------------------------------------------------------------------------
    def _beat(self) -> None:
        limit = self._limits.heartbeat
        for connection in list(self._hosts.joined.values()):
            silent = connection.is_lost(limit)
            if silent:
                self._lost(connection, f"no message from it for {silent:.0f} s")
            else:
                connection.send("alive", silent=round(time.monotonic() - connection.spoke, 1))
        self._door.sweep()
        looks = [
            connection.next_look(limit)
            for connection in self._hosts.joined.values()
            if connection.open
        ]
        self._loop.after(min(looks, default=heartbeat_interval(limit)), self._beat)

    def _lost(self, connection: Connection, reason: str) -> None:
        """A host closed its connection, or is silent for too long."""
        host = connection.host
        if not self._hosts.is_current(connection):
            return
        if self.phase >= LeaderPhase.FINISHED:
            connection.close()
            self._bye(host)
        elif self.phase is LeaderPhase.GATHERING and not connection.open:
            # It may be a container that starts anew. It has as long as one that is silent.
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
        self._ends.forget(host)

    def _lose(self, host: str, reason: str) -> None:
        """A host is lost: the job goes on without it if it may, else this is its end."""
        if self._may_go_on_without(1):
            self._go_on_without(host, reason)
            return
        if host in self._hosts.joined:
            self._hosts.joined[host].close()
        # A host may have reported success before: its part is done, or (in MPI jobs) it has no
        # command of its own. Lost is lost all the same, because no host knows any more what became
        # of its ranks.
        self._ends.replace(
            host, Outcome(FAILED, names.EXIT_HOSTS, host, f"lost host {host}: {reason}")
        )
        if self.phase is LeaderPhase.STOPPING:
            # Its platform may have ended it: hosts that were only told of the
            # stop have as long as that one had.
            self._events.told(host, NO_MORE_TIME, {})
        self._maybe_finish()

    def _go_on_without(self, host: str, reason: str) -> None:
        lost = f"lost host {host}: {reason}"
        connection = self._hosts.joined.get(host)
        self._hosts.without[host] = lost
        self._forget(host)
        told = f"{lost}; going on with {self._hosts.count + 1} of {len(self._control.hosts)} hosts"
        self._events.log(told)
        if connection is not None and connection.open:
            # It is silent, and reads this only if it wakes again.
            connection.send("finish", **outcome_fields(self._hosts.dismissal(host)))
            connection.close()
        self._send_all("without", text=told)
        if self.phase is LeaderPhase.GATHERING:
            self._maybe_complete()
            self._maybe_go()
        elif self.phase is LeaderPhase.RUNNING:
            self._events.restart()
            self._maybe_finish()

    # --- ending -----------------------------------------------------------------------------------
    def _ended(self, host: str, outcome: Outcome) -> None:
        if self._phases.take("ended"):
            self._ends.note(host, outcome)
            self._maybe_finish()

    def _maybe_finish(self) -> None:
        """Tell the outcome, once the ends that are known decide it."""
        leader, failure = self._control.leader, self._ends.failure()
        if self.phase >= LeaderPhase.FINISHED:
            return  # a host was lost while it was told of another one
        if self.phase is LeaderPhase.STOPPING:
            # Everybody has the grace to save something; the processes are
            # bounded by it on every host.
            if self._ends.include((*self._hosts.joined, leader)):
                self._finish(self._events.judge(self._ends.stopped(leader)))
        elif failure is not None:
            self._events.inquire(failure, self._conclude)
        elif self._ends.count > self._hosts.count and self._ends.include(
            (leader, *self._hosts.names())
        ):
            self._finish(Outcome(SUCCEEDED, 0, leader, ""))

    def _conclude(self) -> None:
        """All is known of the first failure: this is the end of the job, unless
        something else was meanwhile.
        """
        failure = self._ends.failure()
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
        """A host is done, or is gone after the outcome was told."""
        if self._phases.take("bye"):
            self._hosts.note_bye(host)
            if self.phase is LeaderPhase.LINGERING and self._hosts.have_come():
                self._part()
            elif self.phase is LeaderPhase.LEAVING:
                self._maybe_leave()

    def _part(self) -> None:
        """Wait no longer for late hosts, but for the goodbyes of the others, for a while."""
        if self._phases.take("part"):
            self._loop.after(names.LEAVE_LIMIT_SECONDS, self._leave_now)
            self._maybe_leave()

    def _maybe_leave(self) -> None:
        if self._hosts.have_left():
            self._leave_now()

    def _leave_now(self) -> None:
        if self._phases.take("left"):
            self._events.left()


def some(hosts: Sequence[str]) -> str:
    """Host names for a sentence, the first ten."""
    return ", ".join(hosts[:10]) + (f" and {len(hosts) - 10} more" if len(hosts) > 10 else "")
