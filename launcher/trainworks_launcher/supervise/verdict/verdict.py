"""What a host can say of a failure: from its ranks' last words, from the starter's report, from what other hosts sent.

What a host has seen of its own ranks counts: which ended first, and with which status. What the one who started them
prints only adds to that: a status that nobody saw, and which of several ends that were seen at one time was the first.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Callable, Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.looking import in_time
from trainworks_launcher.contract.masking import Masker
from trainworks_launcher.given import places
from trainworks_launcher.plan.plan import NodePlan
from trainworks_launcher.supervise.outcome.outcome import (
    EARLY_END,
    FAILED,
    OTHER_HOST_SECONDS,
    STOPPED,
    SUCCEEDED,
    Outcome,
    Suspect,
    describe_status,
    earlier_failure,
    exit_status,
    first_suspect,
    place_of,
    signal_of,
    suspect_of,
    with_status,
)
from trainworks_launcher.supervise.verdict import memory, outcome_files

if TYPE_CHECKING:
    from pathlib import Path

    from trainworks_launcher.supervise.children.output import Tail
    from trainworks_launcher.supervise.children.ranks import Rank, Ranks
    from trainworks_launcher.supervise.outcome.cause import Said
    from trainworks_launcher.supervise.outcome.records import Record
    from trainworks_launcher.supervise.outcome.starters import Report

OWN_STARTER_SECONDS = 5.0
"""As OTHER_HOST_SECONDS, where each host has a starter that the user's script started: it ends later than its ranks."""


class Verdict:
    """Gathers what is known.

    Attributes:
        ranks: Ranks of this host; None where there are none.
        killed: The command outlived the grace of a stop signal.
        overdue: The starter outlived its ranks.
        started_at: When the program was started, in seconds since 1970; 0: it was not.
        full: A line about places of the job without space, at this host's last failure; ``""`` for none.
    """

    def __init__(
        self,
        plan: NodePlan,
        base_directory: str,
        masker: Masker,
        runtime: Path | None = None,
        oom_kills: Callable[[], int | None] = memory.oom_kills,
    ) -> None:
        """At the start of a job: what the kernel has killed before does not count.

        runtime: the directory in which Pythons note their ends; None: there is none. oom_kills: the kernel's count.
        """
        self._ends = runtime and runtime / "ends"  # records.FILE, which only a failure needs
        self.ranks: Ranks | None = None
        self.killed = False
        self.overdue = False
        self.started_at = 0.0
        self.full = ""
        self._plan = plan
        self._base = base_directory
        self._masker = masker
        self._count_oom_kills = oom_kills
        self._oom_kills = oom_kills()
        self._suspects: list[Suspect] = []

    # ---------------------------------------------------------------------------------------------- before the end
    def of_rank(self, rank: Rank) -> Suspect:
        """Return what to tell the other hosts about a rank that has just ended.

        One that ended well is remembered too: others may still need it.
        """
        if rank.status == 0:
            return Suspect(rank.ended_at, self._early_end(self._plan.host, rank.number), certain=False)
        from trainworks_launcher.supervise.outcome.cause import died_of_a_peer, reason_of  # only a failure needs it

        said = self._of_local(rank, "")
        died_of = reason_of(said, rank.status).died_of
        # The end of the rank that broke the connection may be seen a little later: its host may be busy.
        later = OTHER_HOST_SECONDS if died_of_a_peer(died_of) else 0.0
        at = died_of.at if died_of is not None else rank.ended_at
        found = self._failure(rank.status, said, rank.number)
        return Suspect(at + later, found, rank.status is not None or died_of is not None)

    def add(self, suspect: Suspect) -> None:
        """Remember what a host, also this one, said of a rank."""
        self._suspects.append(suspect)

    def forget(self) -> Outcome | None:
        """The ranks begin again: earlier failures, and what the kernel has killed, no longer count.

        Return the first of the failures, None if none is known.
        """
        first = self.first()
        self._suspects.clear()
        self._oom_kills = self._count_oom_kills()
        return first

    def first(self, host: str = "") -> Outcome | None:
        """Return the first failure of the ranks that run now, of one host or of all; None if none is known."""
        first = first_suspect([row for row in self._suspects if host in ("", row.outcome.host)])
        return first.outcome if first is not None else None

    def knows_all(self) -> bool:
        """Return whether the end of every rank is known: of all hosts under mpirun, else of this host."""
        return len({row.outcome.rank for row in self._suspects}) >= self._plan.processes

    # ------------------------------------------------------------------------------------------------------ the end
    def reported(self, tail: Tail, pid: int = 0) -> Report:
        """Return what the command says of the rank that failed first, also a starter that the user's script started.

        A command that died of an exception of its own started none, whatever it printed. pid: its process id.
        """
        from trainworks_launcher.supervise.outcome.starters import Report, report_of  # only a failure needs it

        own = [row for row in self._records() if pid and row.pid == pid and row.message and not row.thread]
        if self.ranks is None and own and not own[-1].is_of_a_child:
            return Report()
        return report_of(tail.read(), self._plan.ranks_by)

    def of_command(self, what: str, code: int, tail: Tail, stop_signal: int = 0, pid: int = 0) -> Outcome:
        """Return the outcome of a command that did not end with status 0.

        Args:
            what: A person's name of the command.
            code: Its return code, negative after a signal.
            tail: End of its output.
            stop_signal: Stop signal that came before; 0 for none.
            pid: Its process id; 0 if it is none of a program of the user's.
        """
        report = self.reported(tail, pid)
        if self.ranks is not None and not stop_signal:
            report = self._as_seen(report, tail)
        number, reported = report.rank, report.code
        local = self.ranks.latest(number) if self.ranks is not None else None
        told = suspect_of(self._suspects, number) if self.ranks is not None else None
        if self.killed and stop_signal:
            reported = reported or -signal.SIGKILL  # mpirun and torchrun end with a status of their own
        if self.ranks is not None:
            seen = local.status if local is not None and not stop_signal else None
            code = seen or reported or code
        if report.ended_early:
            host = told.outcome.host if told is not None else self._plan.host if local is not None else report.host
            found = self._early_end(host, number, f"{report.starter} ended the job for that: {describe_status(code)}")
        elif local is not None:
            found = self._failure(code, self._of_local(local, what), number, what)
        elif told is not None:
            found = with_status(told.outcome, code)
        elif report.starter:
            found = self._of_starter(what, code, tail, report)
        else:
            found = self._of_program(what, code, tail, pid)
            code = found.status
        if self._plan.ranks_by == "mpirun" and not found.cause and not stop_signal:
            from trainworks_launcher.supervise.outcome.starters import mpirun_unreached

            found = found._replace(cause=mpirun_unreached(tail.read()))
        own = in_time(lambda: outcome_files.users_own_failure(self._base, self._masker), "")
        if own:
            found = found._replace(own=own, frames="", message="")
        if stop_signal:
            found = found._replace(stopped=f"stopped by {signal.Signals(stop_signal).name}")
        return found._replace(kind=STOPPED if stop_signal else FAILED, status=exit_status(code))

    def of_ranks(self, tail: Tail) -> Outcome:
        """Return the outcome by what the hosts have seen of the ranks, whose starter does not end."""
        self.overdue = True
        if all(row.outcome.kind == SUCCEEDED for row in self._suspects):
            return Outcome(SUCCEEDED, 0, self._plan.host)
        return self.of_command(name_of_program(self._plan), 1, tail)

    def _as_seen(self, report: Report, tail: Tail) -> Report:
        """Return a starter's report as the hosts have seen it: which rank failed first, and how it ended."""
        named = suspect_of(self._suspects, report.rank)
        first = first_suspect(self._suspects, report.rank)
        if (
            first is None
            or self.lost_daemon(tail)
            or (report.ended_early and named is not None and named.at <= first.at)
        ):
            return report
        status = first.outcome.status
        if report.rank < 0 and report.starter == "" and status == exit_status(-signal.SIGTERM) and not self.overdue:
            return report  # the starter was told to end, and has told its ranks
        code = status or (report.code if report.rank == first.outcome.rank else 0)
        return report._replace(rank=first.outcome.rank, code=code, host=first.outcome.host, ended_early=False)

    def _of_starter(self, what: str, code: int, tail: Tail, report: Report) -> Outcome:
        """Return the failure of a rank whose words are somewhere in the output of its starter."""
        from trainworks_launcher.supervise.outcome.cause import Said

        itself = "" if code == report.code else f"; {what} itself: {describe_status(code)}"
        note = "" if self._plan.ranks_by else f", as {report.starter} reports{itself}"
        own = [row for row in self._records() if report.rank in (-1, row.rank)]
        return self._failure(report.code, Said(tail.read(), records=own), report.rank, what, note=note)

    def _of_program(self, what: str, code: int, tail: Tail, pid: int) -> Outcome:
        """Return the failure of a command that names no rank of its own."""
        from trainworks_launcher.supervise.outcome.cause import Said

        errors = tail.errors() if self.ranks is None and self._plan.processes == 1 else b""
        shell = what.endswith(".sh") or what.rpartition("/")[2] in _SHELLS
        said = Said(tail.read(), errors, self._records(), pid, time.monotonic(), shell)
        lost = self.lost_daemon(tail)
        cause = f"mpirun lost its daemon on host {lost}, or could not start it" if lost else ""
        if not cause and not self._plan.ranks_by and code > 0:  # the program may have called a mpirun of its own
            from trainworks_launcher.supervise.outcome.starters import mpirun_reason

            cause = mpirun_reason(tail.read())
        found = self._failure(names.EXIT_HOSTS if lost else code, said, self._plan.rank, what, cause)
        return found._replace(host=lost or found.host)

    def _of_local(self, rank: Rank, what: str) -> Said:
        """Return what is known of a rank of this host, and of what it has started."""
        from trainworks_launcher.supervise.outcome.cause import Said
        from trainworks_launcher.supervise.outcome.records import of_torch

        of_it = [row for row in self._records() if rank.pid == row.pid or rank.number == row.rank]
        of_it = [row for row in of_it if row.at >= rank.began]
        if not any(row.pid == rank.pid and not row.thread for row in of_it):  # it has left none, but maybe torch has
            of_it += of_torch(rank.error, rank.pid, rank.ended_at, rank.number)
        return Said(rank.tail.read(), rank.tail.errors(), of_it, rank.pid, rank.ended_at, what.endswith(".sh"))

    def _records(self) -> list[Record]:
        """Return how the Pythons of this host ended, as they have noted it."""
        from trainworks_launcher.supervise.outcome import records

        try:
            return records.read(self._ends.read_bytes()) if self._ends is not None else []
        except OSError:
            return []

    def unheard(self, pid: int) -> str:
        """Return what the last Python of a command died of that ended with 0, and is no Python itself."""
        if self._ends is None or not self._ends.exists():
            return ""
        from trainworks_launcher.supervise.outcome.records import first_of_the_last

        rows, own = self._records(), {pid, *(rank.pid for rank in (self.ranks.all if self.ranks is not None else ()))}
        died = first_of_the_last(rows)
        if died is None or any(row.pid in own or (not row.message and row.at >= died.at) for row in rows):
            return ""
        return self._masker.text(died.cause)

    def _masked(self, said: Said) -> Said:
        """Return what was printed without secrets: before it is shortened, which may cut one in two."""

        def without_secrets(data: bytes) -> bytes:
            return self._masker.text(data.decode("utf-8", "replace")).encode("utf-8", "replace")

        hide = self._masker.text
        rows = [
            row._replace(message=hide(row.message), frames=hide(row.frames), origin=hide(row.origin))
            for row in said.records
        ]
        return said._replace(output=without_secrets(said.output), errors=without_secrets(said.errors), records=rows)

    def _early_end(self, host: str, rank: int, why: str = "") -> Outcome:
        """Return what is known of a rank that ended with status 0."""
        place = place_of(name_of_program(self._plan), host, self._plan.mode, rank)
        return Outcome(SUCCEEDED, 0, host, rank=rank, place=place, end=EARLY_END, notes=(why,) if why else ())

    def seconds_for_others(self, outcome: Outcome, tail: Tail) -> float:
        """Return how long to wait for what other hosts have seen, before a failure is told.

        mpirun tells of a rank of any host. Else it may be only that another host's rank has gone: that host tells why,
        and if it is lost, nobody does. A torchrun that the user's script started takes seconds to end after it has seen
        a failure; so does Ray's daemon, beside the program.
        """
        from trainworks_launcher.supervise.outcome.cause import tells_of_a_peer, tells_of_ray

        if self._plan.auxiliaries and tells_of_ray(outcome):
            return OWN_STARTER_SECONDS
        if self._plan.control is None:
            return 0.0
        named = self.reported(tail).rank >= 0
        if self._plan.ranks_by == "mpirun":
            return OTHER_HOST_SECONDS if (named or self._suspects) and not self.knows_all() else 0.0
        if not tells_of_a_peer(outcome):
            return 0.0
        return OWN_STARTER_SECONDS if self.ranks is None and named else OTHER_HOST_SECONDS

    def judge(self, outcome: Outcome) -> Outcome:
        """Return the leader's last word on an end that some host reported."""
        if outcome.kind == STOPPED:
            return self._with_checkpoints(outcome)
        if outcome.kind != FAILED:
            return outcome
        if outcome.rank >= 0 and self.ranks is not None:
            outcome = earlier_failure(outcome, self._suspects)
        from trainworks_launcher.supervise.outcome.cause import after_early_end  # only a failure needs it

        return after_early_end(outcome, self._suspects)

    def _with_checkpoints(self, outcome: Outcome) -> Outcome:
        """Say in the first line if nothing was saved that a next job could go on from, where that is known in time."""
        directory = self._plan.env.get(names.CHECKPOINT_DIRECTORY_VARIABLE, "")
        if not directory or not self.started_at:
            return outcome
        from trainworks_launcher.contract.checkpoints import has_younger  # only a stop needs it

        if in_time(lambda: has_younger(directory, self.started_at), True):
            return outcome
        return outcome._replace(unsaved=f"no checkpoint was written: no file in {directory} is younger than the job")

    def lost_daemon(self, tail: Tail) -> str:
        """Return the host whose daemon mpirun lost; "" if that is not what it says. It may end with status 0 then."""
        if self._plan.ranks_by != "mpirun":
            return ""
        from trainworks_launcher.supervise.outcome.starters import mpirun_daemon

        return mpirun_daemon(tail.read())

    def _failure(
        self, code: int | None, said: Said, rank: int = -1, what: str = "", cause: str = "", note: str = ""
    ) -> Outcome:
        from trainworks_launcher.supervise.outcome.cause import failure_of  # only a failure needs it
        from trainworks_launcher.supervise.outcome.starters import mpirun_host

        self.full = _full_disks(self._plan.env)
        now = self._count_oom_kills()
        host = self._plan.host
        if self._plan.shell is not None:  # no launcher is there to tell of it
            host = mpirun_host(said.output) or host
        return failure_of(
            what=what or name_of_program(self._plan),
            host=host,
            mode=self._plan.mode,
            returncode=code,
            said=self._masked(said),
            cause=cause,
            note=note + _full_memory(code) + (f"; {self.full}" if self.full else ""),
            rank=rank,
            oom_kills=None if now is None or self._oom_kills is None else now - self._oom_kills,
        )


_SHELLS = ("bash", "dash", "ksh", "sh", "zsh")


def _full_memory(code: int | None) -> str:
    """Return what a death by SIGBUS mostly means where /dev/shm is small, as the end of a sentence."""
    if code is None or signal_of(code) != signal.SIGBUS:
        return ""
    from trainworks_launcher.checks.look import size_of
    from trainworks_launcher.checks.rules import SHARED_MEMORY_BYTES

    size = size_of("/dev/shm")  # noqa: S108  (the kernel's own, not a file of ours)
    if size is None or size >= SHARED_MEMORY_BYTES:
        return ""
    return f"; /dev/shm has {size >> 20} MiB and may be full: start the container with a larger --shm-size"


def _full_disks(told: Mapping[str, str]) -> str:
    """Return which places of the job have no space left, ``""`` for none. told: the job's variables."""
    from trainworks_launcher.checks.look import is_full

    named = (*filter(None, map(told.get, (*places.RESULTS, names.CHECKPOINT_DIRECTORY_VARIABLE))), *places.TEMPORARY)
    nothing: list[str] = []
    full = in_time(lambda: places.outermost(filter(is_full, named)), nothing)
    return f"no space is left in {' and '.join(full)}" if full else ""


def name_of_program(plan: NodePlan) -> str:
    """Return the user's program for a sentence."""
    return plan.env.get("SM_USER_ENTRY_POINT") or (plan.argv[0] if plan.argv else "the program")


def last_words(outcome: Outcome) -> str:
    """Return the log line that ends a job."""
    if outcome.kind not in (FAILED, STOPPED):
        return "job succeeded on every host"
    first = outcome.text.partition("\n")[0] or f"exit status {outcome.status}"
    return f"job {outcome.kind} (exit status {outcome.status}, host {outcome.host}): {first}"
