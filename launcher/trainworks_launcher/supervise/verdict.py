"""What a host can say of a failure: from its ranks' last words, from the starter's report, from what other hosts sent.

The words of the one who started the ranks are believed where there are some: mpirun names the first of all ranks, each
torchrun the first of its own host. Whatever they do not say comes from the ranks themselves.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from trainworks_launcher.masking import Masker
from trainworks_launcher.plan import NodePlan
from trainworks_launcher.supervise import memory, outcome_files
from trainworks_launcher.supervise.outcome import (
    FAILED,
    STOPPED,
    Outcome,
    Suspect,
    earlier_failure,
    exit_status,
    first_suspect,
    with_status,
)

if TYPE_CHECKING:
    from trainworks_launcher.supervise.ranks import Rank, Ranks


class Verdict:
    """Gathers what is known, and words it. ``ranks``: of this host, None where there are none."""

    def __init__(self, plan: NodePlan, base_directory: str, masker: Masker) -> None:
        """At the start of a job: what the kernel has killed before does not count."""
        self.ranks: Ranks | None = None
        self._plan = plan
        self._base = base_directory
        self._masker = masker
        self._oom_kills = memory.oom_kills()
        self._suspects: list[Suspect] = []

    # ---------------------------------------------------------------------------------------------- before the end
    def of_rank(self, rank: Rank) -> Suspect | None:
        """Return what to tell the other hosts about a rank that has just ended.

        None if it ended well or was told to end.
        """
        if rank.status in (0, -signal.SIGTERM):
            return None
        certain = rank.status is not None or rank.has_traceback()
        if not certain and self._plan.ranks_by != "mpirun":
            return None
        code = rank.status or 0
        found = self._failure(rank.status, rank.tail.read(), rank.number)
        return Suspect(rank.began_to_fail(), replace(found, status=exit_status(code)), certain)

    def add(self, suspect: Suspect) -> None:
        """Remember what a host, also this one, said of a rank."""
        self._suspects.append(suspect)

    def forget(self) -> None:
        """The ranks begin again: earlier failures no longer count."""
        self._suspects.clear()

    def knows(self, rank: int) -> bool:
        """Return whether this host has the output of a rank, or its host has reported it."""
        local = self.ranks is not None and self.ranks.latest(rank) is not None
        return local or first_suspect(self._suspects, rank) is not None

    # ------------------------------------------------------------------------------------------------------ the end
    def reported_rank(self, tail: bytes) -> tuple[int, int]:
        """Return (rank, return code) of the process that failed first, in the words of the command.

        (-1, 0) if it does not say.
        """
        from trainworks_launcher.supervise import reports  # only a failure needs it

        if self._plan.ranks_by == "mpirun":
            return reports.mpirun_report(tail)
        return reports.torchrun_report(tail) if self._plan.ranks_by == "torchrun" else (-1, 0)

    def of_command(self, what: str, code: int, tail: bytes, stop_signal: int = 0) -> Outcome:
        """Return the outcome of a command that did not end with status 0.

        Args:
            what: A person's name of the command.
            code: Its return code, negative after a signal.
            tail: End of its output.
            stop_signal: Stop signal that came before; 0 for none.
        """
        number, reported = self.reported_rank(tail)
        local = self.ranks.latest(number) if self.ranks is not None else None
        told = first_suspect(self._suspects, number) if self.ranks is not None else None
        code = reported or (told.outcome.status if told is not None and number < 0 else 0) or code
        if local is not None:
            found = self._failure(code, local.tail.read(), number, what)
        elif told is not None:
            found = with_status(told.outcome, code)
        else:
            processes = self._plan.processes if self.ranks is None else 1
            found = self._failure(code, tail, number, what, processes)
        text = outcome_files.users_own_failure(self._base, self._masker) or found.text
        if stop_signal:
            text = f"stopped by {signal.Signals(stop_signal).name}\n{text}"
        kind = STOPPED if stop_signal else FAILED
        return replace(found, kind=kind, status=exit_status(code), text=text)

    def judge(self, outcome: Outcome) -> Outcome:
        """Return the leader's last word on a failure that some host reported."""
        if outcome.kind == FAILED and outcome.rank >= 0 and self._plan.ranks_by == "torchrun":
            return earlier_failure(outcome, self._suspects)
        return outcome

    def _failure(self, code: int | None, tail: bytes, rank: int = -1, what: str = "", processes: int = 1) -> Outcome:
        from trainworks_launcher.supervise import reports  # only a failure needs it

        now = memory.oom_kills()
        text = reports.failure_text(
            what=what or name_of_program(self._plan),
            host=self._plan.host,
            mode=self._plan.mode,
            returncode=code,
            tail=tail,
            processes=processes,
            rank=rank,
            oom_kills=None if now is None or self._oom_kills is None else now - self._oom_kills,
        )
        text = self._masker.text(text)
        return Outcome(FAILED, exit_status(code or 0), self._plan.host, text, text.partition("\n")[0], rank)


def name_of_program(plan: NodePlan) -> str:
    """Return the user's program for a sentence."""
    return plan.env.get("SM_USER_ENTRY_POINT") or (plan.argv[0] if plan.argv else "the program")


def last_words(outcome: Outcome) -> str:
    """Return the log line that ends a job."""
    if outcome.kind not in (FAILED, STOPPED):
        return "job succeeded on every host"
    first = outcome.text.partition("\n")[0] or f"exit status {outcome.status}"
    return f"job {outcome.kind} (exit status {outcome.status}, host {outcome.host}): {first}"
