"""Prepares one host: its checks, then the steps one after the other, each a process of its own.

A step that fails ends the job, with a reason in one line where its output has one. Every method
runs in the loop's thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.environment.environment import Environment, look_again
from trainworks_launcher.job.job import make_job
from trainworks_launcher.plan.modes import plan_host
from trainworks_launcher.plan.plan import NodePlan
from trainworks_launcher.supervise.attribution.failure import Verdict
from trainworks_launcher.supervise.outcome.outcome import (
    FAILED,
    STOPPED,
    Outcome,
    describe_status,
    shorten,
)
from trainworks_launcher.supervise.phase import Phase
from trainworks_launcher.supervise.preparation.steps import Step, installation, steps
from trainworks_launcher.supervise.processes.command import HostCommand
from trainworks_launcher.supervise.shutdown import Stopping

Start = Callable[[Sequence[str], str, Callable[[int], None], int], None]
"""Starts a command: its words, its directory, what is done when it has ended,
the job's status if it cannot start.
"""


class Preparation:
    """The preparation of one host."""

    def __init__(
        self,
        plan: NodePlan,
        environment: Environment,
        running: HostCommand,
        stopping: Stopping,
        verdict: Verdict,
        redactor: Redactor,
        phase: Callable[[], Phase],
        start: Start,
        report: Callable[[Outcome], None],
        done: Callable[[NodePlan], None],
        log: Callable[[str], None],
    ) -> None:
        """Nothing is done before ``begin``.

        Args:
            plan: The plan of the host.
            environment: What was read on the host.
            running: Has the output of the step that has just ended.
            stopping: Whether the job is being stopped: then no further step begins.
            verdict: Words a failure.
            redactor: Hides the secrets of the job.
            phase: Returns how far the run is.
            start: Starts a step.
            report: This host's end.
            done: The host is prepared, for this plan.
            log: Prints a line.
        """
        self._plan = plan
        self._environment = environment
        self._launcher = (environment.launcher_python, "-I")
        self._running = running
        self._stopping = stopping
        self._verdict = verdict
        self._redactor = redactor
        self._phase = phase
        self._start = start
        self._report = report
        self._done = done
        self._log = log
        self._steps: list[Step] = []

    def check(self) -> bool:
        """Look at this host; False if it cannot take part.

        What may take longer is the first of the steps.
        """
        asked = self._plan.checks
        if asked is None or asked.needs_process:
            return True
        from trainworks_launcher.checks import FAILED as CHECK_FAILED
        from trainworks_launcher.checks.run import line_of, run_checks

        found = run_checks(asked)
        for finding in found:
            self._log(line_of(finding))
        failed = [str(finding) for finding in found if finding.severity == CHECK_FAILED]
        self._check_failed(failed)
        return not failed

    def begin(self) -> None:
        """Do all steps.

        Raises RefusalError, as ``when_ended`` of a step does, if the code turns out to be unusable.
        """
        self._steps = list(steps(self._plan, self._launcher, self._environment.launcher_directory))
        self._next()

    def _next(self) -> None:
        if self._phase() >= Phase.ENDING or self._stopping.signal:
            return
        if not self._steps and self._plan.code.fetch:
            # The code is on this host: plan again with what it is. What refuses a local archive at
            # the start refuses now, and only now is it known what is to be installed.
            self._plan = plan_host(make_job(look_again(self._environment), self._plan.host))
            self._steps = list(installation(self._plan))
        if not self._steps:
            self._done(self._plan)
            return
        step = self._steps.pop(0)
        self._log(step.what)
        directory = self._plan.cwd if Path(self._plan.cwd).is_dir() else self._environment.output
        self._start(step.argv, directory, lambda code: self._ended(step, code), step.status)

    def _ended(self, step: Step, code: int) -> None:
        stopped = self._stopping.signal
        if code == 0 and not stopped:
            self._next()
            return
        if step.status == names.EXIT_CHECK and not stopped:
            self._check_ended(code)
            return
        # Only a failure needs it.
        from trainworks_launcher.supervise.preparation.installing import reason_of

        tail = self._running.tail
        outcome = self._verdict.of_command(step.what, code, tail, stopped)
        reason = "" if stopped else self._redactor.text(reason_of(tail.read()))
        if reason:
            # Before, it may be of a build that pip started.
            outcome = outcome._replace(memory="", cause=reason)
        status = 128 + stopped if stopped else step.status
        self._report(outcome._replace(kind=STOPPED if stopped else FAILED, status=status))

    def _check_ended(self, code: int) -> None:
        """The process that checks this host has found something.

        A defect of its own does not end a job.
        """
        from trainworks_launcher.checks.run import failures_in

        failed = failures_in(self._running.tail.read())
        self._check_failed(failed)
        if not failed:
            self._log(
                "warning: the checks of this host broke off"
                f" ({describe_status(code)}); please report this"
            )
            self._next()

    def _check_failed(self, failed: Sequence[str]) -> None:
        if failed:
            cause, more = (
                f"a check of host {self._plan.host} failed: {failed[0]}",
                shorten("\n".join(failed[1:])),
            )
            self._report(Outcome(FAILED, names.EXIT_CHECK, self._plan.host, cause, message=more))
