"""The job's program on this host: its command is started, and its end is reported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainworks_launcher.contract import names
from trainworks_launcher.supervise.attempt import STARTERS, Attempt, Command
from trainworks_launcher.supervise.attribution.failure import name_of_program
from trainworks_launcher.supervise.outcome.outcome import FAILED, STOPPED, SUCCEEDED, Outcome
from trainworks_launcher.supervise.part import CannotStartError
from trainworks_launcher.supervise.phase import Phase

if TYPE_CHECKING:
    from trainworks_launcher.plan.plan import NodePlan


class Program:
    """The program of one attempt. Every method runs in the loop's thread."""

    def __init__(self, attempt: Attempt) -> None:
        """Start nothing yet."""
        self._attempt = attempt
        self._reported: Outcome | None = None
        self._reported_code = 0

    def start(self) -> None:
        """Start the command of this host, after the files and parts that it needs.

        A host without a command reports success at once: mpirun of another host starts its ranks.
        A part that cannot start is this host's failure. Nothing is started if the job is over.
        """
        attempt = self._attempt
        if not attempt.may_start:
            return
        plan = attempt.plan
        if plan.ranks_by in STARTERS:
            attempt.runtime.write_rank_environment(plan.cwd, plan.hidden_from_ranks)
        _make_recorder_directories(plan)
        # In the next turn of the loop, because the program must not wait for it.
        attempt.loop.after(0.0, self._begin_summary)
        try:
            for part in attempt.parts:
                part.starting()
        except CannotStartError as error:
            attempt.report(Outcome(FAILED, names.EXIT_PREPARATION, plan.host, str(error)))
            return
        if not plan.argv:
            attempt.report(Outcome(SUCCEEDED, 0, plan.host))
            return
        command = Command(
            plan.argv, plan.cwd, attempt.environment_of_program(), prefix=self._prefix()
        )
        attempt.start_command(command, self._ended)

    def _begin_summary(self) -> None:
        """Add the part that writes the summary, unless a person has switched it off."""
        attempt = self._attempt
        if attempt.environment.variables.get(names.SUMMARY_VARIABLE, "").strip() != "off":
            from trainworks_launcher.supervise.parts.summary import Summary

            attempt.parts.append(Summary(attempt))

    def _prefix(self) -> bytes | None:
        """Return the prefix of the command's lines.

        Returns:
            ``b""`` for whole lines without a prefix; None if the output is copied byte for byte.
        """
        plan = self._attempt.plan
        if plan.rank >= 0:
            return self._attempt.prefix_of(plan.rank)
        # The lines of several processes must not mix.
        if self._attempt.running.ranks is not None or plan.auxiliaries:
            return b""
        return None

    # --- the end of the command -------------------------------------------------------------------
    def _ended(self, code: int) -> None:
        """Report the end of the command as this host's success, stop or failure.

        Args:
            code: Its return code, negative after a signal.
        """
        attempt = self._attempt
        host, running, verdict = attempt.plan.host, attempt.running, attempt.verdict
        # ``is_copy``: the command waits in its mpirun for the leader's copy of the program.
        if running.is_copy and attempt.phase < Phase.ENDING:
            # The copy of the program on the first host decides.
            return
        if attempt.stop_signal:
            if code == 0:
                text = "stopped by a signal; the program ended with status 0"
                self._report_success(Outcome(STOPPED, 0, host, text))
            else:
                self._report_failure(code)
            return
        # mpirun may end with status 0 although it has lost a daemon.
        if code == 0 and not verdict.lost_daemon(running.tail):
            death = verdict.find_hidden_death(running.pid)
            if death:
                advice = "in a shell, `set -o pipefail` lets a pipe fail with any part of it"
                attempt.log(
                    f"warning: the status is 0, and the last Python died of {death}; {advice}"
                )
            self._report_success(Outcome(SUCCEEDED, 0, host, ""))
            return
        # The end of a daemon of Ray may be the reason: it is waited for, in the loop.
        seconds = verdict.seconds_for_daemon(self._outcome_of(code))
        if seconds:
            attempt.loop.after(seconds, lambda: self._report_failure(code))
        else:
            self._report_failure(code)

    def _report_success(self, outcome: Outcome) -> None:
        """Report an end with status 0, with a line in the log if other hosts still run."""
        self._attempt.report(outcome)
        if self._attempt.phase < Phase.ENDING:
            self._attempt.log("this host has finished; it waits for the others")

    def _report_failure(self, code: int) -> None:
        """Report an end with another status; do nothing if the job has an outcome.

        Without ranks the program itself is sent as evidence, if the job has other hosts.
        """
        attempt = self._attempt
        if attempt.phase >= Phase.ENDING:
            return
        self._reported = outcome = self._outcome_of(code)
        self._reported_code = code
        running = attempt.running
        has_peers = attempt.plan.control is not None
        if running.ranks is None and has_peers and not attempt.stop_signal:
            attempt.suspect(
                attempt.verdict.suspect_program(outcome, code, running.tail, running.pid)
            )
        attempt.report(outcome)

    def _outcome_of(self, code: int) -> Outcome:
        """Return the outcome of the command, by the evidence that this host has now.

        Args:
            code: Return code of the command, negative after a signal.
        """
        attempt, running = self._attempt, self._attempt.running
        name = name_of_program(attempt.plan)
        return attempt.verdict.judge_command(
            name, code, running.tail, attempt.stop_signal, running.pid
        )

    def reconsider(self, outcome: Outcome) -> Outcome:
        """Return the outcome that this host has reported, by the evidence that it has now.

        Other hosts may have sent evidence since. An outcome of another host, and any outcome in a
        stop, is returned as it is.
        """
        if outcome is self._reported and not self._attempt.stop_signal:
            return self._outcome_of(self._reported_code)
        return outcome


def _make_recorder_directories(plan: NodePlan) -> None:
    """Make the directories of torch's flight recorder: torch does not make them itself.

    Nothing is made without the recorder's variables. A directory that cannot be made is left out:
    the job can go on without its record.
    """
    for name in names.RECORDER_FILES:
        if name in plan.env:
            try:
                Path(plan.env[name]).parent.mkdir(parents=True, exist_ok=True)
            except OSError:
                continue
