"""What a host can say of a failure: from its ranks' last words, from the starter's report, from what other hosts sent.

The words of the one who started the ranks are believed where there are some: mpirun names the first of all ranks, each
torchrun the first of its own host. Whatever they do not say comes from the ranks themselves.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

from trainworks_launcher import names
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
    from trainworks_launcher.supervise.output import Tail
    from trainworks_launcher.supervise.ranks import Rank, Ranks

OTHER_HOST_SECONDS = 1.0
"""How long the words of one host may come after those of another about the same failure."""


class Verdict:
    """Gathers what is known, and words it.

    Attributes:
        ranks: Ranks of this host; None where there are none.
        killed: The command outlived the grace of a stop signal.
        started_at: When the program was started, in seconds since 1970; 0: it was not.
    """

    def __init__(self, plan: NodePlan, base_directory: str, masker: Masker) -> None:
        """At the start of a job: what the kernel has killed before does not count."""
        self.ranks: Ranks | None = None
        self.killed = False
        self.started_at = 0.0
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
        found = self._failure(rank.status, rank.tail.read(), rank.tail.errors(), rank.number)
        # The end of the rank that broke the connection may be seen a little later: its host may be busy.
        later = OTHER_HOST_SECONDS if self.died_of_a_peer(rank.number) else 0.0
        return Suspect(rank.began_to_fail() + later, found._replace(status=exit_status(code)), certain)

    def died_of_a_peer(self, rank: int) -> bool:
        """Return whether a rank of this host died of a connection that another rank broke.

        False under mpirun, which knows itself which rank of all hosts was the first.
        """
        if self._plan.ranks_by != "torchrun":
            return False
        from trainworks_launcher.supervise import reports  # only a failure needs it

        local = self.ranks.latest(rank) if self.ranks is not None else None
        return local is not None and reports.died_of_a_peer(local.tail.errors())

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
    def reported_rank(self, tail: Tail) -> tuple[int, int]:
        """Return (rank, return code) of the process that failed first, in the words of the command.

        (-1, 0) if it does not say.
        """
        from trainworks_launcher.supervise import reports  # only a failure needs it

        if self._plan.ranks_by == "mpirun":
            return reports.mpirun_report(tail.read())
        return reports.torchrun_report(tail.read()) if self._plan.ranks_by == "torchrun" else (-1, 0)

    def of_command(self, what: str, code: int, tail: Tail, stop_signal: int = 0) -> Outcome:
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
        if self.killed and stop_signal:
            reported = reported or -signal.SIGKILL  # mpirun and torchrun end with a status of their own
        code = reported or (told.outcome.status if told is not None and number < 0 else 0) or code
        if local is not None:
            found = self._failure(code, local.tail.read(), local.tail.errors(), number, what)
        elif told is not None:
            found = with_status(told.outcome, code)
        else:
            processes = self._plan.processes if self.ranks is None else 1
            errors = b"" if processes > 1 else tail.errors()
            number = number if number >= 0 else self._plan.rank
            lost = self.lost_daemon(tail) if number < 0 else ""
            code = names.EXIT_HOSTS if lost else code
            cause = f"mpirun lost its daemon on host {lost}, or could not start it" if lost else ""
            found = self._failure(code, tail.read(), errors, number, what, processes, cause)
            found = found._replace(host=lost or found.host)
        text = outcome_files.users_own_failure(self._base, self._masker) or found.text
        if stop_signal:
            text = f"stopped by {signal.Signals(stop_signal).name}\n{text}"
        kind = STOPPED if stop_signal else FAILED
        return found._replace(kind=kind, status=exit_status(code), text=text)

    def judge(self, outcome: Outcome) -> Outcome:
        """Return the leader's last word on an end that some host reported."""
        if outcome.kind == STOPPED:
            return self._with_checkpoints(outcome)
        if outcome.kind == FAILED and outcome.rank >= 0 and self._plan.ranks_by == "torchrun":
            return earlier_failure(outcome, self._suspects)
        return outcome

    def _with_checkpoints(self, outcome: Outcome) -> Outcome:
        """Say in the first line if nothing was saved that a next job could go on from."""
        directory = self._plan.env.get(names.CHECKPOINT_DIRECTORY_VARIABLE, "")
        if not directory or not self.started_at:
            return outcome
        if _has_younger(directory, self.started_at):
            return outcome
        first, newline, rest = outcome.text.partition("\n")
        note = f"no checkpoint was written: no file in {directory} is younger than the job"
        return outcome._replace(text=f"{first}; {note}{newline}{rest}")

    def lost_daemon(self, tail: Tail) -> str:
        """Return the host whose daemon mpirun lost; "" if that is not what it says. It may end with status 0 then."""
        if self._plan.ranks_by != "mpirun":
            return ""
        from trainworks_launcher.supervise import reports

        return reports.mpirun_daemon(tail.read())

    def _failure(
        self,
        code: int | None,
        tail: bytes,
        errors: bytes,
        rank: int = -1,
        what: str = "",
        processes: int = 1,
        cause: str = "",
    ) -> Outcome:
        from trainworks_launcher.supervise import reports  # only a failure needs it

        now = memory.oom_kills()
        host = self._plan.host
        if self._plan.shell is not None and self._plan.shell.mounted:  # no launcher is there to tell of it
            host = reports.mpirun_host(tail) or host
        text = reports.failure_text(
            what=what or name_of_program(self._plan),
            host=host,
            mode=self._plan.mode,
            returncode=code,
            tail=tail,
            errors=errors,
            cause=cause,
            processes=processes,
            rank=rank,
            oom_kills=None if now is None or self._oom_kills is None else now - self._oom_kills,
        )
        text = self._masker.text(text)
        return Outcome(FAILED, exit_status(code or 0), host, text, text.partition("\n")[0], rank)


_LOOK_SECONDS = 0.8
"""How long the directory of checkpoints is looked at. A dead network file system never answers, and the end of a job
must not wait for it."""


def _has_younger(directory: str, since: float) -> bool:
    """Return whether a file is younger; True where that cannot be told in time."""
    from trainworks_launcher.checkpoints import has_younger  # only a stop needs it

    found: list[bool] = []
    looking = threading.Thread(target=lambda: found.append(has_younger(directory, since)), daemon=True)
    looking.start()
    looking.join(_LOOK_SECONDS)
    return found != [False]


def name_of_program(plan: NodePlan) -> str:
    """Return the user's program for a sentence."""
    return plan.env.get("SM_USER_ENTRY_POINT") or (plan.argv[0] if plan.argv else "the program")


def last_words(outcome: Outcome) -> str:
    """Return the log line that ends a job."""
    if outcome.kind not in (FAILED, STOPPED):
        return "job succeeded on every host"
    first = outcome.text.partition("\n")[0] or f"exit status {outcome.status}"
    return f"job {outcome.kind} (exit status {outcome.status}, host {outcome.host}): {first}"
