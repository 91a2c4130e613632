"""How a run is stopped: a signal of the platform or of another host is handed on, and what follows is bounded.

Every container gets the platform's signal, and every host tells the others. The ranks get it once; they have the grace
of ``Limits.stop_grace``, KILL after it, and what does not end after KILL is left behind.
"""

from __future__ import annotations

import signal
from typing import Callable

from trainworks_launcher.contract import names
from trainworks_launcher.contract.stop_signals import STOP_SIGNALS
from trainworks_launcher.plan.plan import NodePlan
from trainworks_launcher.supervise.children.running import Running
from trainworks_launcher.supervise.loop import Loop
from trainworks_launcher.supervise.outcome.outcome import FAILED, STOPPED, Outcome
from trainworks_launcher.supervise.phase import Phase
from trainworks_launcher.supervise.verdict.verdict import Verdict, name_of_program


class Stopping:
    """The stops of one run. Every method runs in the loop's thread.

    Attributes:
        signal: The stop signal that came first; 0: the job was not stopped.
    """

    def __init__(
        self,
        loop: Loop,
        plan: NodePlan,
        running: Running,
        verdict: Verdict,
        phase: Callable[[], Phase],
        report: Callable[[Outcome], None],
        begun: Callable[[], None],
        abandoned: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        """Nothing is stopped yet.

        Args:
            loop: The loop of the run.
            plan: The plan of the host.
            running: What runs on the host.
            verdict: Is told that KILL was needed.
            phase: Returns how far the run is.
            report: This host's end.
            begun: The job is being stopped.
            abandoned: The command hangs in the kernel, and the run goes on without it.
            log: Prints a line.
        """
        self.signal = 0
        self._loop = loop
        self._plan = plan
        self._running = running
        self._verdict = verdict
        self._phase = phase
        self._report = report
        self._begun = begun
        self._abandoned = abandoned
        self._log = log
        self._by_other_host = False

    def from_platform(self, number: int) -> None:
        """A stop signal to this container. Every container gets one: if another host's came first, the ranks have had
        theirs. A further one is passed on, because it is meant."""
        passed_on = self._by_other_host
        self._by_other_host = False
        if not passed_on:
            self._stop(number)

    def from_other_host(self) -> None:
        """Another host was stopped. Once only: a second signal would cut short what the first one started."""
        if not self.signal:
            self._by_other_host = True
            self._stop(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        """Hand a stop signal on, and bound what follows."""
        if self._phase() >= Phase.ENDING:
            return
        self._begun()
        first = not self.signal
        self.signal = self.signal or number
        if first:
            grace = self._plan.limits.stop_grace
            name, sent = signal.Signals(number).name, STOP_SIGNALS[number]
            as_what = f" as {sent.name}" if sent.name != name else ""
            self._log(f"{name}: passed on{as_what}; KILL follows in {grace:g} s")
            self._loop.after(grace, self.kill)
        self._running.send(STOP_SIGNALS[number])
        if self._phase() < Phase.RUNNING and not self._running.is_active:
            text = f"stopped by {signal.Signals(self.signal).name} before the program was started"
            self._report(Outcome(STOPPED, 128 + self.signal, self._plan.host, text))

    def kill(self) -> None:
        """The grace is over."""
        command = self._running.command
        if command is not None and command.running:
            self._log("the grace period is over: KILL")
            self._verdict.killed = True
            if self._plan.ranks_by and self._phase() < Phase.ENDING:
                # It is told first, so that mpirun's daemons on the other hosts end too. With an outcome it was told.
                command.signal(signal.SIGTERM)
                self._loop.after(names.FAILURE_GRACE_SECONDS, lambda: command.signal_group(signal.SIGKILL))
            else:
                command.signal_group(signal.SIGKILL)
        self._running.send_to_ranks(signal.SIGKILL)
        self._loop.after(names.KILL_LIMIT_SECONDS, self._abandon)

    def _abandon(self) -> None:
        """KILL did not end the command: it hangs inside the kernel. The job ends without it."""
        command = self._running.command
        if command is not None and command.running:
            self._log(f"process {command.pid} does not end after KILL; leaving without it")
            self._running.command = None
            text = f"{name_of_program(self._plan)} did not end {names.KILL_LIMIT_SECONDS:g} s after KILL"
            self._report(Outcome(FAILED, 128 + signal.SIGKILL, self._plan.host, text))
            self._abandoned()
