"""Prepares one host: its checks, then the steps one after the other, each a process of its own.

A step that fails ends the job, with a reason in one line if its output has one. Every method runs
in the loop's thread.
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
        """Do nothing before ``begin``.

        Args:
            attempt: The state of the attempt.
            done: Called when the last step has ended, unless the caller of ``proceed`` knows that
                already.
        """
        self.is_done = False
        self._attempt = attempt
        self._plan = attempt.plan
        self._done = done
        self._steps: list[Step] = []

    def check(self) -> bool:
        """Run the checks of this host that take no time, and log their findings.

        A failed check is reported as this host's failure. Checks that may take long, such as those
        of GPUs, are the first of the steps instead.

        Returns:
            Whether the host may take part.
        """
        checks = self._plan.checks
        if checks is None or checks.needs_process:
            return True
        from trainworks_launcher.checks import FAILED as CHECK_FAILED
        from trainworks_launcher.checks.run import line_of, run_checks

        findings = run_checks(checks)
        for finding in findings:
            self._attempt.log(line_of(finding))
        failed = [str(finding) for finding in findings if finding.severity == CHECK_FAILED]
        self._report_failed_checks(failed)
        return not failed

    def begin(self) -> None:
        """Choose the steps; start none yet.

        If an earlier attempt has prepared this host, the preparation is done.
        """
        environment = self._attempt.environment
        prepared = self._attempt.history.prepared
        if prepared is not None:
            self._finish(prepared)
            return
        launcher = (environment.launcher_python, "-I")
        self._steps = list(steps(self._plan, launcher, environment.launcher_directory))

    def proceed(self) -> bool:
        """Start the next step; after the last one, use the plan.

        A step that ends well calls this again. Nothing is started if the job is over.

        Returns:
            Whether this host is prepared.

        Raises:
            RefusalError: The code that was fetched cannot be used.
        """
        attempt = self._attempt
        if self.is_done or attempt.is_over:
            return self.is_done
        if not self._steps and self._plan.code.fetch:
            # The code was fetched and unpacked: plan again. Only now are its entry point and its
            # requirements known.
            job = make_job(look_again(attempt.environment), self._plan.host)
            self._plan = plan_host(job)
            self._steps = list(installation(self._plan))
        if not self._steps:
            self._finish(self._plan)
            return True
        step = self._steps.pop(0)
        attempt.log(step.what)
        cwd = self._plan.cwd
        if not Path(cwd).is_dir():
            # The directory of the code exists only after a step.
            cwd = attempt.environment.output
        command = Command(step.argv, cwd, attempt.runtime.env, step.status)
        attempt.start_command(command, lambda code: self._ended(step, code))
        return False

    def _finish(self, plan: NodePlan) -> None:
        """Use a plan for this attempt and later ones, and note that this host is prepared.

        If mpirun reaches the other hosts by ssh, the files of its client are written.

        Raises:
            RefusalError: The keys for ssh are not mounted.
        """
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
        """Start the next step after one that ended well; else report this host's failure or stop.

        Args:
            step: The step.
            code: Return code of its process, negative after a signal.
        """
        stop_signal = self._attempt.stop_signal
        if code == 0 and not stop_signal:
            self._go_on()
            return
        if step.status == names.EXIT_CHECK and not stop_signal:
            self._take_failed_checks(code)
            return
        tail = self._attempt.running.tail
        outcome = self._attempt.verdict.judge_command(step.what, code, tail, stop_signal)
        if stop_signal:
            self._attempt.report(outcome._replace(kind=STOPPED, status=128 + stop_signal))
            return

        # Imported late, because only a failure needs it.
        from trainworks_launcher.supervise.preparation.installing import reason_of

        reason = self._attempt.redactor.text(reason_of(tail.read()))
        if reason:
            # The cause by the general rules may be that of a build which pip has started.
            outcome = outcome._replace(memory="", cause=reason)
        self._attempt.report(outcome._replace(kind=FAILED, status=step.status))

    def _go_on(self) -> None:
        """Start the next step; after the last one, call ``done``."""
        if self.proceed():
            self._done()

    def _take_failed_checks(self, code: int) -> None:
        """Report the failed checks in the output of the process that checks this host.

        Without one the process itself has failed: that is a warning, and the job goes on.

        Args:
            code: Return code of the process.
        """
        from trainworks_launcher.checks.run import failures_in

        failed = failures_in(self._attempt.running.tail.read())
        self._report_failed_checks(failed)
        if not failed:
            self._attempt.log(
                "warning: the checks of this host broke off"
                f" ({describe_status(code)}); please report this"
            )
            self._go_on()

    def _report_failed_checks(self, failed: Sequence[str]) -> None:
        """Report failed checks as this host's failure, the first one as the cause; none: nothing.

        Args:
            failed: A sentence for each check.
        """
        if not failed:
            return
        host = self._plan.host
        cause = f"a check of host {host} failed: {failed[0]}"
        others = shorten("\n".join(failed[1:]))
        self._attempt.report(Outcome(FAILED, names.EXIT_CHECK, host, cause, message=others))
