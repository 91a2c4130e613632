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
    """Return the parts of a host on which mpirun, or one of its daemons, may run.

    Either the launcher's own mpirun, or one that the user's program calls.
    """
    is_own = attempt.plan.ranks_by == "mpirun"
    if is_own:
        # The launcher's own mpirun runs on the host with a command.
        runs_mpirun = bool(attempt.plan.argv)
    else:
        runs_mpirun = attempt.plan.role == "leader"
    if runs_mpirun:
        return [MpirunAgents(attempt)]
    parts: list[Part] = []
    if not is_own:
        parts.append(MpirunOfACopy(attempt))
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
        """Return name -> address of the hosts on which daemons may start now.

        {} if the command has ended: an agent that comes later belongs to no job.
        """
        attempt = self._attempt
        if not attempt.running.is_active:
            return {}
        return attempt.role.others()

    def _tell(self, kind: str, host: str = "", **fields: Json) -> None:
        """Send a message to the launcher of a host."""
        self._attempt.role.tell(kind, host, **fields)

    def _daemon_lost(self, host: str, message: Mapping[str, Json]) -> None:
        """Report a failure of a host whose daemon has ended before it had a rank.

        If mpirun itself ends meanwhile, nothing is reported: its own end is the cause.

        Args:
            host: The host.
            message: With ``status``, ``text`` (end of the output) and ``certain``: false if another
                process may have ended, and mpirun gets some time.
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
        """Close the socket and the connections of agents."""
        self._agents.close()


class MpirunOfACopy(Part):
    """Lets the mpirun that this host's program calls wait: the leader's copy starts the ranks.

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
        """Let the program wait in its mpirun until the job ends, and report this host's success.

        Called when this host's mpirun asks for other hosts, as the leader's does.
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
        """Close the socket and the connections of agents."""
        self._agents.close()


class MpirunDaemons(Part):
    """Starts daemons for mpirun on the leader; present on the other hosts."""

    def __init__(self, attempt: Attempt) -> None:
        """Handle requests of the leader; start none yet."""
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
        """Return whether a rank of this host has reported."""
        ranks = self._attempt.running.ranks
        return ranks is not None and bool(ranks.all)

    def _requested(self, host: str, message: Mapping[str, Json]) -> None:
        """Start a daemon for mpirun, now or when this host has found its checkpoint.

        Args:
            host: The leader.
            message: As in ``mpirun_agents.Daemons.start``.
        """
        if self._attempt.awaits_checkpoint:
            # The daemon's ranks would start without the variables of the checkpoint.
            self._early_requests.append((host, message))
        else:
            self._daemons.start(host, message)

    def _start(self, argv: Sequence[str]) -> Child | None:
        """Start a daemon; None, without one, unless the program may run now. Raises OSError."""
        attempt, plan = self._attempt, self._attempt.plan
        if not attempt.may_start:
            return None
        command = Command(argv, plan.cwd, attempt.environment_of_program(), prefix=b"")
        return attempt.start_child(command)

    def starting(self) -> None:
        """Start the daemons that mpirun has asked for before the checkpoint was found."""
        requests, self._early_requests = self._early_requests, []
        for host, message in requests:
            self._daemons.start(host, message)

    def reap(self) -> None:
        """Report the daemons that have ended to the leader."""
        self._daemons.reap()

    def orphans_ended(self, statuses: Sequence[int]) -> None:
        """Note the ends of orphans: a daemon leaves its parent when it has started."""
        self._daemons.orphans_ended(statuses)

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the daemons that run."""
        return self._daemons.pids

    def finish(self, outcome: Outcome) -> None:
        """Log a warning if the job succeeded, and this host's mpirun has started nothing."""
        is_copy = self._attempt.running.is_copy
        if is_copy and not self._daemons.were_requested and outcome.kind == SUCCEEDED:
            self._attempt.log(
                "warning: mpirun was called on this host alone, not on the first one: it has"
                " started nothing"
            )

    def close(self) -> None:
        """End the daemons that run."""
        self._daemons.end()
