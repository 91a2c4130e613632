"""Starts mpirun's daemons on the other hosts through the launchers (``processes.mpirun_agents``).

mpirun is the launcher's own, or one that the program of the leader calls. Only the launcher's own
has ranks that report to the launchers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import number
from trainworks_launcher.supervise.attempt import Attempt, Command
from trainworks_launcher.supervise.attribution.failure import DAEMON_SECONDS
from trainworks_launcher.supervise.control.messages import words
from trainworks_launcher.supervise.outcome.outcome import (
    FAILED,
    SUCCEEDED,
    Outcome,
    describe_status,
)
from trainworks_launcher.supervise.part import Part
from trainworks_launcher.supervise.processes import mpirun_agents

if TYPE_CHECKING:
    from trainworks_launcher.contract.json_values import Json
    from trainworks_launcher.supervise.processes.processes import Child


def parts_for_mpirun(attempt: Attempt) -> list[Part]:
    """Return the parts of a host on which mpirun, or one of its daemons, may run."""
    is_own = attempt.plan.ranks_by == "mpirun"
    leads = bool(attempt.plan.argv) if is_own else attempt.plan.role == "leader"
    parts: list[Part] = []
    if leads:
        parts.append(MpirunAgents(attempt))
    elif not is_own:
        parts.append(MpirunOfACopy(attempt))
    if not leads:
        parts.append(MpirunDaemons(attempt))
    return parts


class MpirunAgents(Part):
    """Takes the requests of mpirun's agents; present on the leader."""

    def __init__(self, attempt: Attempt) -> None:
        """Listen for agents."""
        self._attempt = attempt
        self._agents = mpirun_agents.Agents(
            attempt.loop,
            attempt.runtime.path,
            mpirun_agents.AgentHandlers(self._other_hosts, self._tell),
            wait=attempt.plan.ranks_by != "mpirun",
        )
        attempt.handlers[mpirun_agents.LOST] = self._daemon_lost
        attempt.handlers[mpirun_agents.ENDED] = self._agents.ended

    def _other_hosts(self) -> Mapping[str, str]:
        """Return the hosts on which daemons may start now."""
        attempt = self._attempt
        return attempt.role.others() if attempt.running.is_active else {}

    def _tell(self, kind: str, host: str = "", **fields: Json) -> None:
        self._attempt.role.tell(kind, host, **fields)

    def _daemon_lost(self, host: str, message: Mapping[str, Json]) -> None:
        """A daemon ended before it had a rank.

        It may be mpirun that has failed, and ends: then that is the cause.
        """
        attempt = self._attempt
        status = describe_status(number(message.get("status")))
        cause = f"mpirun's daemon on host {host} ended before it had started a rank: {status}"
        output = words(message.get("text")).strip()
        lost = Outcome(FAILED, names.EXIT_HOSTS, host, cause, message=output)

        def report() -> None:
            if attempt.running.is_active and not attempt.stop_signal:
                attempt.report(lost)

        if message.get("certain") is True:
            report()
        else:
            attempt.loop.after(DAEMON_SECONDS, report)

    def close(self) -> None:
        """Listen no more."""
        self._agents.close()


class MpirunOfACopy(Part):
    """Lets mpirun of this host's program wait, where the leader's copy of the program calls it.

    Present on the other hosts of a job whose program may call mpirun itself.
    """

    def __init__(self, attempt: Attempt) -> None:
        """Listen for agents."""
        self._attempt = attempt
        self._agents = mpirun_agents.Agents(
            attempt.loop,
            attempt.runtime.path,
            mpirun_agents.AgentHandlers(others=dict, tell=attempt.tell, copied=self._wait),
            wait=True,
        )

    def _wait(self) -> None:
        """mpirun here asks for other hosts, as the leader's does: that one starts the ranks.

        The program waits in its mpirun until the job ends, and ends as the leader's does.
        """
        attempt = self._attempt
        if attempt.running.is_copy or not attempt.may_start:
            return
        attempt.running.is_copy = True
        leader = attempt.plan.control.leader if attempt.plan.control is not None else ""
        attempt.log(
            f"mpirun starts its ranks from host {leader} alone:"
            " the program here waits, and ends as it does there"
        )
        attempt.report(Outcome(SUCCEEDED, 0, attempt.plan.host))

    def close(self) -> None:
        """Listen no more."""
        self._agents.close()


class MpirunDaemons(Part):
    """Starts daemons for mpirun on the leader; present on the other hosts."""

    def __init__(self, attempt: Attempt) -> None:
        """None runs yet."""
        self._attempt = attempt
        self._early_requests: list[tuple[str, Mapping[str, Json]]] = []
        self._daemons = mpirun_agents.Daemons(
            self._start,
            has_ranks=self._has_ranks,
            may_start_ranks=lambda: attempt.family.has_others(attempt.own_pids()),
            tell=attempt.tell,
        )
        attempt.handlers[mpirun_agents.START] = self._requested

    def _has_ranks(self) -> bool:
        ranks = self._attempt.running.ranks
        return ranks is not None and bool(ranks.all)

    def _requested(self, host: str, message: Mapping[str, Json]) -> None:
        """mpirun asks for a daemon, perhaps before this host knows where the ranks go on."""
        if self._attempt.awaits_checkpoint:
            self._early_requests.append((host, message))
        else:
            self._daemons.start(host, message)

    def _start(self, argv: Sequence[str]) -> Child | None:
        """Start a daemon while the ranks run or start. Returns None at another time."""
        attempt, plan = self._attempt, self._attempt.plan
        if not attempt.may_start:
            return None
        command = Command(argv, plan.cwd, attempt.environment_of_program(), prefix=b"")
        return attempt.start_child(command)

    def starting(self) -> None:
        """Start the daemons that mpirun asked for early."""
        requests, self._early_requests = self._early_requests, []
        for host, message in requests:
            self._daemons.start(host, message)

    def reap(self) -> None:
        """Tell the leader of daemons that have ended."""
        self._daemons.reap()

    def orphans_ended(self, statuses: Sequence[int]) -> None:
        """A daemon leaves its parent when it has started: its end is that of an orphan."""
        self._daemons.orphans_ended(statuses)

    @property
    def pids(self) -> Sequence[int]:
        """Those that run."""
        return self._daemons.pids

    def finish(self, outcome: Outcome) -> None:
        """Warn of a job whose mpirun has started nothing."""
        is_copy = self._attempt.running.is_copy
        if is_copy and not self._daemons.were_requested and outcome.kind == SUCCEEDED:
            self._attempt.log(
                "warning: mpirun was called on this host alone, not on the first one: it has"
                " started nothing"
            )

    def close(self) -> None:
        """End those that run."""
        self._daemons.end()
