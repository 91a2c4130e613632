"""Prepares one host: its checks, then the steps one after the other, each a process of its own.

A step that fails ends the job, with a reason in one line where its output has one. Every method
runs in the loop's thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Callable, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.environment.environment import look_again
from trainworks_launcher.job.job import make_job
from trainworks_launcher.plan.modes import plan_host
from trainworks_launcher.supervise.attempt import Attempt, Command
from trainworks_launcher.supervise.outcome.outcome import (
    FAILED,
    STOPPED,
    Outcome,
    describe_status,
    shorten,
)
from trainworks_launcher.supervise.preparation.steps import Step, installation, steps

if TYPE_CHECKING:
    from trainworks_launcher.plan.plan import NodePlan


class Preparation:
    """The preparation of one host.

    Attributes:
        is_done: Whether this host is prepared.
    """

    def __init__(self, attempt: Attempt, done: Callable[[], None]) -> None:
        """Nothing is done before ``begin``.

        done: called when the last step has ended, unless ``proceed`` has returned True.
        """
        self.is_done = False
        self._attempt = attempt
        self._plan = attempt.plan
        self._done = done
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
            self._attempt.log(line_of(finding))
        failed = [str(finding) for finding in found if finding.severity == CHECK_FAILED]
        self._check_failed(failed)
        return not failed

    def begin(self) -> None:
        """Choose the steps. An earlier attempt may have prepared this host already."""
        environment = self._attempt.environment
        prepared = self._attempt.history.prepared
        if prepared is not None:
            self._finish(prepared)
            return
        launcher = (environment.launcher_python, "-I")
        self._steps = list(steps(self._plan, launcher, environment.launcher_directory))

    def proceed(self) -> bool:
        """Start the next step. Returns whether this host is prepared.

        Raises RefusalError, as ``when_ended`` of a step does, if the code turns out to be unusable.
        """
        attempt = self._attempt
        if self.is_done or attempt.is_over:
            return self.is_done
        if not self._steps and self._plan.code.fetch:
            # The code is on this host: plan again with what it is. What refuses a local archive at
            # the start refuses now, and only now is it known what is to be installed.
            job = make_job(look_again(attempt.environment), self._plan.host)
            self._plan = plan_host(job)
            self._steps = list(installation(self._plan))
        if not self._steps:
            self._finish(self._plan)
            return True
        step = self._steps.pop(0)
        attempt.log(step.what)
        cwd = self._plan.cwd if Path(self._plan.cwd).is_dir() else attempt.environment.output
        command = Command(step.argv, cwd, attempt.runtime.env, step.status)
        attempt.start_command(command, lambda code: self._ended(step, code))
        return False

    def _finish(self, plan: NodePlan) -> None:
        """Use a plan that knows the code, now and in later attempts."""
        attempt = self._attempt
        attempt.plan = attempt.history.prepared = plan
        if plan.shell is not None:
            # The other hosts run sshd, with keys that the platform has mounted.
            from trainworks_launcher.supervise.ssh import mounted_keys

            environment = attempt.environment
            program = f"{environment.launcher_directory}/programs/connect.py"
            connect = (environment.launcher_python, "-I", program, f"{plan.limits.join:g}")
            keys = mounted_keys.required()
            mounted_keys.write_client_files(attempt.runtime.path, plan.shell.ssh, keys, connect)
        self.is_done = True

    def _ended(self, step: Step, code: int) -> None:
        stopped = self._attempt.stop_signal
        if code == 0 and not stopped:
            self._go_on()
            return
        if step.status == names.EXIT_CHECK and not stopped:
            self._check_ended(code)
            return
        # Only a failure needs it.
        from trainworks_launcher.supervise.preparation.installing import reason_of

        tail = self._attempt.running.tail
        outcome = self._attempt.verdict.judge_command(step.what, code, tail, stopped)
        reason = "" if stopped else self._attempt.redactor.text(reason_of(tail.read()))
        if reason:
            # Before, it may be of a build that pip started.
            outcome = outcome._replace(memory="", cause=reason)
        status = 128 + stopped if stopped else step.status
        self._attempt.report(outcome._replace(kind=STOPPED if stopped else FAILED, status=status))

    def _go_on(self) -> None:
        if self.proceed():
            self._done()

    def _check_ended(self, code: int) -> None:
        """The process that checks this host has found something.

        A defect of its own does not end a job.
        """
        from trainworks_launcher.checks.run import failures_in

        failed = failures_in(self._attempt.running.tail.read())
        self._check_failed(failed)
        if not failed:
            self._attempt.log(
                "warning: the checks of this host broke off"
                f" ({describe_status(code)}); please report this"
            )
            self._go_on()

    def _check_failed(self, failed: Sequence[str]) -> None:
        if failed:
            cause, more = (
                f"a check of host {self._plan.host} failed: {failed[0]}",
                shorten("\n".join(failed[1:])),
            )
            self._attempt.report(
                Outcome(FAILED, names.EXIT_CHECK, self._plan.host, cause, message=more)
            )
