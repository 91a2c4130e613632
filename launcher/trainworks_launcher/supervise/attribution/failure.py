"""What a host can say of a failure: from its ranks' last words, from the starter's report, from
what other hosts sent.

Each host makes evidence of what it has seen of its own ranks (``of_rank``, ``of_running``). Which
evidence counts, the table of ``outcome.evidence`` says; the leader has the evidence of all hosts
when it asks that table.
"""

from __future__ import annotations

import math
import signal
import time
from typing import TYPE_CHECKING, Callable, Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.inspection import in_time
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.environment import directories
from trainworks_launcher.plan.plan import NodePlan
from trainworks_launcher.supervise.attribution import memory, outcome_files
from trainworks_launcher.supervise.outcome.evidence import (
    KILL_SECONDS,
    First,
    Kind,
    Starter,
    Suspect,
    first_failure,
    has_waited,
    kind_of,
    left_before,
    of_command,
    suspect_of,
    tells_of_a_peer,
)
from trainworks_launcher.supervise.outcome.outcome import (
    EARLY_END,
    EARLY_LEAVE,
    FAILED,
    STOPPED,
    SUCCEEDED,
    UNKNOWN_END,
    Outcome,
    describe_status,
    exit_status,
    place_of,
    signal_of,
    with_status,
)

if TYPE_CHECKING:
    from pathlib import Path

    from trainworks_launcher.supervise.outcome.cause import Said
    from trainworks_launcher.supervise.outcome.records import Record
    from trainworks_launcher.supervise.outcome.starter_reports import Report
    from trainworks_launcher.supervise.processes.output import Tail
    from trainworks_launcher.supervise.processes.ranks import Rank, Ranks

DAEMON_SECONDS = 5.0
"""How long the end of a daemon beside the program (Ray's, mpirun's) is waited
for, which may be the reason.
"""


class Verdict:
    """Gathers what is known.

    Attributes:
        ranks: Ranks of this host; None where there are none.
        killed: The command outlived the grace of a stop signal.
        overdue: The starter outlived its ranks.
        started_at: When the program was started, in seconds since 1970; 0: it was not.
        full: A line about places of the job without space, at this host's last
            failure; ``""`` for none.
    """

    def __init__(
        self,
        plan: NodePlan,
        base_directory: str,
        redactor: Redactor,
        runtime: Path | None = None,
        oom_kills: Callable[[], int | None] = memory.oom_kills,
    ) -> None:
        """At the start of a job: what the kernel has killed before does not count.

        runtime: the directory in which Pythons note their ends; None: there is
        none. oom_kills: the kernel's count.
        """
        self._ends = runtime and runtime / "ends"  # records.FILE, which only a failure needs
        self.ranks: Ranks | None = None
        self.killed = False
        self.overdue = False
        self.started_at = 0.0
        self.full = ""
        self._plan = plan
        self._base = base_directory
        self._redactor = redactor
        self._count_oom_kills = oom_kills
        self._oom_kills = oom_kills()
        self._by_rank: dict[tuple[str, int], Suspect] = {}

    # --- before the end ---------------------------------------------------------------------------
    def of_rank(self, rank: Rank) -> Suspect:
        """Return what to tell the other hosts about a rank that has just ended.

        One that ended well is remembered too: others may still need it.
        """
        if rank.status == 0:
            return Suspect(
                Kind.LEFT,
                self._left_at(rank),
                rank.ended_at,
                self._early_end(self._plan.host, rank.number),
            )
        said = self._of_local(rank, "")
        found = self._suspect(said, rank.status, rank.number)
        if found is not None and (rank.status is not None or found.kind is not Kind.LEFT):
            return found
        return Suspect(
            Kind.UNSEEN, rank.ended_at, rank.ended_at, self._failure(None, said, rank.number)
        )

    def of_running(self, rank: Rank) -> Suspect | None:
        """Return what the record of a rank says that still runs; None if it has noted nothing."""
        return self._suspect(
            self._of_local(rank, "")._replace(ended_at=math.inf), None, rank.number
        )

    def of_program(self, outcome: Outcome, code: int, tail: Tail, pid: int) -> Suspect:
        """Return the failed program of this host as evidence, where the
        launcher knows of no ranks below it.

        Args:
            outcome: Its end.
            code: Its return code.
            tail: End of its output.
            pid: Its process id.
        """
        # Only a failure needs it.
        from trainworks_launcher.supervise.outcome.cause import (
            began_at,
            seen_of,
        )

        said = self._of_own(tail, pid, time.monotonic())
        kind = kind_of(seen_of(said, code, of_memory=bool(outcome.memory)))
        if tells_of_a_peer(outcome):
            kind = Kind.PEER
        elif kind not in (Kind.RECORDED, Kind.TERMINATED):
            kind = Kind.DIED
        return Suspect(kind, began_at(said, code), said.ended_at, outcome)

    def of_running_program(self, tail: Tail, pid: int) -> Suspect | None:
        """Return what the record of a program says that still runs.

        None if it has noted nothing.
        """
        return self._suspect(self._of_own(tail, pid, math.inf), None, self._plan.rank)

    def _of_own(self, tail: Tail, pid: int, ended_at: float) -> Said:
        """Return what is known of the program itself, without what it has started."""
        from trainworks_launcher.supervise.outcome.cause import Said

        own = [row for row in self._records() if row.pid == pid]
        return Said(tail.read(), tail.errors(), own, pid, ended_at)

    def _suspect(self, said: Said, code: int | None, rank: int) -> Suspect | None:
        """Return a process as evidence; None if nothing says that it failed or ended."""
        # Only a failure needs it.
        from trainworks_launcher.supervise.outcome.cause import (
            began_at,
            seen_of,
        )

        if code is None and said.own() is None:
            return None
        found = self._failure(code, said, rank)
        kind = kind_of(seen_of(said, code, of_memory=bool(found.memory)))
        if kind is None:
            return None
        if kind is Kind.LEFT:
            last = "" if found.end == UNKNOWN_END else f"its process: {found.end}"
            found = found._replace(kind=SUCCEEDED, end=EARLY_LEAVE, notes=[last] if last else [])
        return Suspect(kind, began_at(said, code), said.ended_at, found)

    def _left_at(self, rank: Rank) -> float:
        """Return when a rank that ended well left its program, as far as that is known."""
        own = self._of_local(rank, "").own()
        return own.at if own is not None and own.left else rank.ended_at

    def add(self, suspect: Suspect) -> None:
        """Remember what a host, also this one, said of a rank: what it says last counts."""
        place = (suspect.outcome.host, suspect.outcome.rank)
        self._by_rank.pop(place, None)
        self._by_rank[place] = suspect

    @property
    def _suspects(self) -> Sequence[Suspect]:
        """All evidence there is, in the order in which it came."""
        return tuple(self._by_rank.values())

    def forget(self) -> Outcome | None:
        """The ranks begin again: earlier failures, and what the kernel has killed, no longer count.

        Return the first of the failures, None if none is known.
        """
        first = self.first()
        self._by_rank.clear()
        self._oom_kills = self._count_oom_kills()
        return first

    def first(self, host: str = "") -> Outcome | None:
        """Return the first failure of the ranks that run now, of one host or of all.

        None if none is known.
        """
        found = self._first([row for row in self._suspects if host in ("", row.outcome.host)])
        return found.failed.outcome if found is not None else None

    def is_certain(self) -> bool:
        """Return whether a failure is known that tells of itself: not of a
        peer, nor of a wait that took too long.
        """
        found = self._first(self._suspects)
        if found is None or found.cause.kind not in (Kind.RECORDED, Kind.DIED):
            return False
        return not has_waited(found.cause.outcome)

    def _first(self, suspects: Sequence[Suspect], starter: Starter = Starter()) -> First | None:  # noqa: B008
        """Return what came first, by the table. starter: what its end and its report say."""
        started_by = self._plan.ranks_by
        patience = KILL_SECONDS.get(started_by, math.inf)
        known = starter._replace(sees_all_hosts=started_by == "mpirun", kill_seconds=patience)
        return first_failure(suspects, known)

    def knows_all(self) -> bool:
        """Return whether the end of every rank is known: of all hosts under
        mpirun, else of this host.
        """
        return len({rank for _, rank in self._by_rank}) >= self._plan.processes

    # --- the end ----------------------------------------------------------------------------------
    def reported(self, tail: Tail, pid: int = 0) -> Report:
        """Return what the command says of the rank that failed first, also a starter that the
        user's script started.

        A command that died of an exception of its own started none, whatever it
        printed. pid: its process id.
        """
        # Only a failure needs it.
        from trainworks_launcher.supervise.outcome.starter_reports import (
            Report,
            report_of,
        )

        own = [
            row
            for row in self._records()
            if pid and row.pid == pid and row.message and not row.thread
        ]
        if self.ranks is None and own and not own[-1].is_of_a_child:
            return Report()
        return report_of(tail.read(), self._plan.ranks_by)

    def of_command(
        self, what: str, code: int, tail: Tail, stop_signal: int = 0, pid: int = 0
    ) -> Outcome:
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
            # mpirun and torchrun end with a status of their own.
            reported = reported or -signal.SIGKILL
        if self.ranks is not None:
            seen = local.status if local is not None and not stop_signal else None
            code = seen or reported or code
        if report.ended_early:
            host = (
                told.outcome.host
                if told is not None
                else self._plan.host
                if local is not None
                else report.host
            )
            found = self._early_end(
                host, number, f"{report.starter} ended the job for that: {describe_status(code)}"
            )
        elif local is not None:
            found = self._failure(code, self._of_local(local, what), number, what)
            code = code if stop_signal else found.status  # a record outlives a signal
        elif told is not None:
            found = with_status(told.outcome, code)
        elif report.starter:
            found = self._of_starter(what, code, tail, report)
        else:
            found = self._of_program(what, code, tail, pid)
            code = code if stop_signal else found.status
        if self._plan.ranks_by == "mpirun" and not found.cause and not stop_signal:
            from trainworks_launcher.supervise.outcome.starter_reports import mpirun_unreached

            found = found._replace(cause=mpirun_unreached(tail.read()))
        own = in_time(lambda: outcome_files.users_own_failure(self._base, self._redactor), "")
        if own:
            found = found._replace(own=own, frames="", message="")
        if stop_signal:
            found = found._replace(stopped=f"stopped by {signal.Signals(stop_signal).name}")
        return found._replace(kind=STOPPED if stop_signal else FAILED, status=exit_status(code))

    def of_ranks(self, tail: Tail) -> Outcome:
        """Return the outcome by what the hosts have seen of the ranks, whose
        starter does not end.
        """
        self.overdue = True
        if all(row.outcome.kind == SUCCEEDED and not row.outcome.status for row in self._suspects):
            return Outcome(SUCCEEDED, 0, self._plan.host)
        return self.of_command(name_of_program(self._plan), 1, tail)

    def _as_seen(self, report: Report, tail: Tail) -> Report:
        """Return a starter's report as the hosts have seen it: which rank
        failed first, and how it ended.
        """
        ended_itself = not report.starter and not self.overdue
        first = self._first(
            self._suspects,
            Starter(report.rank, ended_itself=ended_itself, ended_early=report.ended_early),
        )
        if first is None or self.lost_daemon(tail):
            return report
        failed = first.failed
        code = failed.outcome.status or (report.code if report.rank == failed.outcome.rank else 0)
        return report._replace(
            rank=failed.outcome.rank, code=code, host=failed.outcome.host, ended_early=False
        )

    def _of_starter(self, what: str, code: int, tail: Tail, report: Report) -> Outcome:
        """Return the failure of a rank whose words are somewhere in the output of its starter."""
        from trainworks_launcher.supervise.outcome.cause import Said

        itself = "" if code == report.code else f"; {what} itself: {describe_status(code)}"
        note = "" if self._plan.ranks_by else f", as {report.starter} reports{itself}"
        own = [row for row in self._records() if report.rank in (-1, row.rank)]
        return self._failure(
            report.code, Said(tail.read(), records=own), report.rank, what, note=note
        )

    def _of_program(self, what: str, code: int, tail: Tail, pid: int) -> Outcome:
        """Return the failure of a command that names no rank of its own."""
        from trainworks_launcher.supervise.outcome.cause import Said

        errors = tail.errors() if self.ranks is None and self._plan.processes == 1 else b""
        said = Said(
            tail.read(),
            errors,
            self._records(),
            pid,
            time.monotonic(),
            _is_shell(what),
            _is_python(what),
        )
        lost = self.lost_daemon(tail)
        cause = f"mpirun lost its daemon on host {lost}, or could not start it" if lost else ""
        if (
            not cause and not self._plan.ranks_by and code > 0
        ):  # the program may have called a mpirun of its own
            from trainworks_launcher.supervise.outcome.starter_reports import mpirun_reason

            cause = mpirun_reason(tail.read())
        found = self._failure(
            names.EXIT_HOSTS if lost else code, said, self._plan.rank, what, cause
        )
        return found._replace(host=lost or found.host)

    def _of_local(self, rank: Rank, what: str) -> Said:
        """Return what is known of a rank of this host, and of what it has started."""
        from trainworks_launcher.supervise.outcome.cause import Said
        from trainworks_launcher.supervise.outcome.records import of_torch

        of_it = [row for row in self._records() if rank.pid == row.pid or rank.number == row.rank]
        of_it = [row for row in of_it if row.at >= rank.began]
        if not any(
            row.pid == rank.pid and not row.thread for row in of_it
        ):  # it has left none, but maybe torch has
            of_it += of_torch(rank.error, rank.pid, rank.ended_at, rank.number)
        what = what or name_of_program(self._plan)
        shell, python = _is_shell(what), _is_python(what)
        return Said(
            rank.tail.read(), rank.tail.errors(), of_it, rank.pid, rank.ended_at, shell, python
        )

    def _records(self) -> list[Record]:
        """Return how the Pythons of this host ended, as they have noted it."""
        from trainworks_launcher.supervise.outcome import records

        try:
            return records.read(self._ends.read_bytes()) if self._ends is not None else []
        except OSError:
            return []

    def unheard(self, pid: int) -> str:
        """Return what the last Python of a command died of that ended with 0,
        and is no Python itself.
        """
        if self._ends is None or not self._ends.exists():
            return ""
        from trainworks_launcher.supervise.outcome.records import first_of_the_last

        rows, own = (
            self._records(),
            {pid, *(rank.pid for rank in (self.ranks.all if self.ranks is not None else ()))},
        )
        died = first_of_the_last(rows)
        if died is None or any(
            row.pid in own or (not row.message and row.at >= died.at) for row in rows
        ):
            return ""
        return self._redactor.text(died.cause)

    def _masked(self, said: Said) -> Said:
        """Return what was printed without secrets: before it is shortened,
        which may cut one in two.
        """

        def without_secrets(data: bytes) -> bytes:
            return self._redactor.text(data.decode("utf-8", "replace")).encode("utf-8", "replace")

        hide = self._redactor.text
        rows = [
            row._replace(
                message=hide(row.message),
                frames=hide(row.frames),
                origin=hide(row.origin),
                inner=hide(row.inner),
                said=hide(row.said),
            )
            for row in said.records
        ]
        return said._replace(
            output=without_secrets(said.output), errors=without_secrets(said.errors), records=rows
        )

    def _early_end(self, host: str, rank: int, why: str = "") -> Outcome:
        """Return what is known of a rank that ended with status 0."""
        place = place_of(name_of_program(self._plan), host, self._plan.mode, rank)
        return Outcome(
            SUCCEEDED, 0, host, rank=rank, place=place, end=EARLY_END, notes=(why,) if why else ()
        )

    def seconds_for_daemon(self, outcome: Outcome) -> float:
        """Return how long to wait for the end of Ray's daemon, before a failure
        is told that may be only its effect.
        """
        from trainworks_launcher.supervise.outcome.cause import tells_of_ray

        return DAEMON_SECONDS if self._plan.auxiliaries and tells_of_ray(outcome) else 0.0

    def judge(self, outcome: Outcome) -> Outcome:
        """Return the leader's last word on an end that some host reported."""
        if outcome.kind == STOPPED:
            return self._with_checkpoints(outcome)
        if outcome.kind != FAILED or not outcome.place:
            return outcome
        names_no_rank = self.ranks is not None and outcome.rank < 0
        starter = Starter(
            outcome.rank,
            ended_itself=names_no_rank and not self.overdue,
            ended_early=outcome.end == EARLY_END,
        )
        first = self._first(self._suspects, starter)
        if first is None or not self._is_stronger(first.failed, outcome):
            reported = of_command(outcome)
            first = First(left_before(reported, self._suspects) or reported, reported)
        failed, seen = outcome, first.failed.outcome
        is_reported = seen.host == outcome.host and (
            self.ranks is None or seen.rank == outcome.rank
        )
        if not is_reported:
            failed = seen._replace(kind=FAILED, status=seen.status or outcome.status)
        if first.cause is first.failed:
            return failed
        # Only such a failure needs it.
        from trainworks_launcher.supervise.outcome.cause import after_leaving

        return after_leaving(failed, first.cause)

    def _is_stronger(self, failed: Suspect, outcome: Outcome) -> bool:
        """Return whether a failure that a host has seen is stronger than the
        reported end of a command (row 4).

        A starter that names no rank has an end of its own, which its host has
        seen: only a record is stronger.
        """
        if self.ranks is None or outcome.rank >= 0 or tells_of_a_peer(outcome):
            return True
        return failed.kind is Kind.RECORDED

    def _with_checkpoints(self, outcome: Outcome) -> Outcome:
        """Say in the first line if nothing was saved that a next job could go
        on from, where that is known in time.
        """
        directory = self._plan.env.get(names.CHECKPOINT_DIRECTORY_VARIABLE, "")
        if not directory or not self.started_at:
            return outcome
        from trainworks_launcher.contract.checkpoints import has_younger  # only a stop needs it

        if in_time(lambda: has_younger(directory, self.started_at), True):
            return outcome
        return outcome._replace(
            unsaved=f"no checkpoint was written: no file in {directory} is younger than the job"
        )

    def lost_daemon(self, tail: Tail) -> str:
        """Return the host whose daemon mpirun lost; "" if that is not what it says.

        It may end with status 0 then.
        """
        if self._plan.ranks_by != "mpirun":
            return ""
        from trainworks_launcher.supervise.outcome.starter_reports import mpirun_daemon

        return mpirun_daemon(tail.read())

    def _failure(
        self,
        code: int | None,
        said: Said,
        rank: int = -1,
        what: str = "",
        cause: str = "",
        note: str = "",
    ) -> Outcome:
        # Only a failure needs it.
        from trainworks_launcher.supervise.outcome.cause import failure_of
        from trainworks_launcher.supervise.outcome.starter_reports import mpirun_host

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


def _is_shell(what: str) -> bool:
    """Return whether a program is a shell or a script of one."""
    return what.endswith(".sh") or what.rpartition("/")[2] in _SHELLS


def _is_python(what: str) -> bool:
    """Return whether a program is a script of Python."""
    return what.endswith(".py")


def _full_memory(code: int | None) -> str:
    """Return what a death by SIGBUS mostly means where /dev/shm is small, as
    the end of a sentence.
    """
    if code is None or signal_of(code) != signal.SIGBUS:
        return ""
    from trainworks_launcher.checks.look import size_of
    from trainworks_launcher.checks.rules import SHARED_MEMORY_BYTES

    size = size_of("/dev/shm")  # noqa: S108  (the kernel's own, not a file of ours)
    if size is None or size >= SHARED_MEMORY_BYTES:
        return ""
    return (
        f"; /dev/shm has {size >> 20} MiB and may be full:"
        " start the container with a larger --shm-size"
    )


def _full_disks(told: Mapping[str, str]) -> str:
    """Return which places of the job have no space left, ``""`` for none. told:
    the job's variables.
    """
    from trainworks_launcher.checks.look import is_full

    named = (
        *filter(None, map(told.get, (*directories.RESULTS, names.CHECKPOINT_DIRECTORY_VARIABLE))),
        *directories.TEMPORARY,
    )
    nothing: list[str] = []
    full = in_time(lambda: directories.outermost(filter(is_full, named)), nothing)
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
