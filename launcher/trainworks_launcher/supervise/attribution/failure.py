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
from trainworks_launcher.contract.inspection import run_in_time
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
    ProgramPlace,
    describe_status,
    exit_status,
    signal_of,
    with_status,
)

if TYPE_CHECKING:
    from pathlib import Path

    from trainworks_launcher.supervise.outcome.cause import ProcessEnd
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
        self._ends: Path | None = None
        if runtime is not None:
            self._ends = runtime / "ends"  # records.FILE, which only a failure needs
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
        suspect = self._suspect(said, rank.status, rank.number)
        if suspect is not None and (rank.status is not None or suspect.kind is not Kind.LEFT):
            return suspect
        failure = self._failure(None, said, self._place(rank.number))
        return Suspect(Kind.UNSEEN, rank.ended_at, rank.ended_at, failure)

    def of_running(self, rank: Rank) -> Suspect | None:
        """Return what the record of a rank says that still runs; None if it has noted nothing."""
        said = self._of_local(rank, "")._replace(ended_at=math.inf)
        return self._suspect(said, None, rank.number)

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
        from trainworks_launcher.supervise.outcome.cause import began_at, observe

        said = self._of_own(tail, pid, time.monotonic())
        kind = kind_of(observe(said, code, of_memory=bool(outcome.memory)))
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

    def _of_own(self, tail: Tail, pid: int, ended_at: float) -> ProcessEnd:
        """Return what is known of the program itself, without what it has started."""
        from trainworks_launcher.supervise.outcome.cause import ProcessEnd

        own = [row for row in self._records() if row.pid == pid]
        return ProcessEnd(tail.read(), tail.errors(), own, pid, ended_at)

    def _suspect(self, said: ProcessEnd, code: int | None, rank: int) -> Suspect | None:
        """Return a process as evidence; None if nothing says that it failed or ended."""
        # Only a failure needs it.
        from trainworks_launcher.supervise.outcome.cause import began_at, observe

        if code is None and said.own() is None:
            return None
        failure = self._failure(code, said, self._place(rank))
        kind = kind_of(observe(said, code, of_memory=bool(failure.memory)))
        if kind is None:
            return None
        if kind is Kind.LEFT:
            notes = []
            if failure.end != UNKNOWN_END:
                notes.append(f"its process: {failure.end}")
            failure = failure._replace(kind=SUCCEEDED, end=EARLY_LEAVE, notes=notes)
        return Suspect(kind, began_at(said, code), said.ended_at, failure)

    def _left_at(self, rank: Rank) -> float:
        """Return when a rank that ended well left its program, as far as that is known."""
        own = self._of_local(rank, "").own()
        if own is not None and own.left:
            return own.at
        return rank.ended_at

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
        suspects = [row for row in self._suspects if host in ("", row.outcome.host)]
        first = self._first(suspects)
        return first.failed.outcome if first is not None else None

    def is_certain(self) -> bool:
        """Return whether a failure is known that tells of itself: not of a
        peer, nor of a wait that took too long.
        """
        first = self._first(self._suspects)
        if first is None or first.cause.kind not in (Kind.RECORDED, Kind.DIED):
            return False
        return not has_waited(first.cause.outcome)

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
        from trainworks_launcher.supervise.outcome.starter_reports import Report, report_of

        if self.ranks is None and pid:
            of_process = [row for row in self._records() if row.pid == pid]
            exceptions = [row for row in of_process if row.message and not row.thread]
            if exceptions and not exceptions[-1].is_of_a_child:
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
        local: Rank | None = None
        suspect: Suspect | None = None
        if self.ranks is not None:
            if not stop_signal:
                report = self._as_seen(report, tail)
            local = self.ranks.latest(report.rank)
            suspect = suspect_of(self._suspects, report.rank)
            code = self._code_of_rank(report, local, stop_signal) or code

        # A record outlives a signal: only a stopped job keeps the code of its command.
        own_code = code
        if report.ended_early:
            host = report.host
            if suspect is not None:
                host = suspect.outcome.host
            elif local is not None:
                host = self._plan.host
            why = f"{report.starter} ended the job for that: {describe_status(code)}"
            outcome = self._early_end(host, report.rank, why)
        elif local is not None:
            place = self._place(report.rank, what)
            outcome = self._failure(code, self._of_local(local, what), place)
            own_code = outcome.status
        elif suspect is not None:
            outcome = with_status(suspect.outcome, code)
        elif report.starter:
            outcome = self._of_starter(what, code, tail, report)
        else:
            outcome = self._of_program(what, code, tail, pid)
            own_code = outcome.status
        if not stop_signal:
            code = own_code

        if self._plan.ranks_by == "mpirun" and not outcome.cause and not stop_signal:
            from trainworks_launcher.supervise.outcome.starter_reports import mpirun_unreached

            outcome = outcome._replace(cause=mpirun_unreached(tail.read()))
        written = run_in_time(
            lambda: outcome_files.users_own_failure(self._base, self._redactor), ""
        )
        if written:
            outcome = outcome._replace(own=written, frames="", message="")
        if stop_signal:
            name = signal.Signals(stop_signal).name
            outcome = outcome._replace(kind=STOPPED, stopped=f"stopped by {name}")
        else:
            outcome = outcome._replace(kind=FAILED)
        return outcome._replace(status=exit_status(code))

    def _code_of_rank(self, report: Report, local: Rank | None, stop_signal: int) -> int:
        """Return the code of the rank that a report names; 0 if it is not known.

        This host's own rank is believed before the report, unless the job was stopped.
        """
        if local is not None and local.status and not stop_signal:
            return local.status
        if not report.code and self.killed and stop_signal:
            # mpirun and torchrun end with a status of their own.
            return -signal.SIGKILL
        return report.code

    def of_ranks(self, tail: Tail) -> Outcome:
        """Return the outcome by what the hosts have seen of the ranks, whose
        starter does not end.
        """
        self.overdue = True
        ends = [suspect.outcome for suspect in self._suspects]
        if all(end.kind == SUCCEEDED and end.status == 0 for end in ends):
            return Outcome(SUCCEEDED, 0, self._plan.host)
        return self.of_command(name_of_program(self._plan), 1, tail)

    def _as_seen(self, report: Report, tail: Tail) -> Report:
        """Return a starter's report as the hosts have seen it: which rank
        failed first, and how it ended.
        """
        starter = Starter(
            report.rank,
            ended_itself=not report.starter and not self.overdue,
            ended_early=report.ended_early,
        )
        first = self._first(self._suspects, starter)
        if first is None or self.lost_daemon(tail):
            return report
        failed = first.failed.outcome
        code = failed.status
        if not code and report.rank == failed.rank:
            code = report.code
        return report._replace(rank=failed.rank, code=code, host=failed.host, ended_early=False)

    def _of_starter(self, what: str, code: int, tail: Tail, report: Report) -> Outcome:
        """Return the failure of a rank whose words are somewhere in the output of its starter."""
        from trainworks_launcher.supervise.outcome.cause import ProcessEnd

        note = ""
        if not self._plan.ranks_by:
            note = f", as {report.starter} reports"
            if code != report.code:
                note += f"; {what} itself: {describe_status(code)}"
        records = [row for row in self._records() if report.rank in (-1, row.rank)]
        said = ProcessEnd(tail.read(), records=records)
        return self._failure(report.code, said, self._place(report.rank, what), note=note)

    def _of_program(self, what: str, code: int, tail: Tail, pid: int) -> Outcome:
        """Return the failure of a command that names no rank of its own."""
        from trainworks_launcher.supervise.outcome.cause import ProcessEnd

        is_alone = self.ranks is None and self._plan.processes == 1
        said = ProcessEnd(
            output=tail.read(),
            errors=tail.errors() if is_alone else b"",
            records=self._records(),
            pid=pid,
            ended_at=time.monotonic(),
            shell=_is_shell(what),
            python=_is_python(what),
        )
        place = self._place(self._plan.rank, what)
        lost_host = self.lost_daemon(tail)
        if lost_host:
            cause = f"mpirun lost its daemon on host {lost_host}, or could not start it"
            failure = self._failure(names.EXIT_HOSTS, said, place, cause)
            return failure._replace(host=lost_host)

        cause = ""
        if not self._plan.ranks_by and code > 0:
            # The program may have called a mpirun of its own.
            from trainworks_launcher.supervise.outcome.starter_reports import mpirun_reason

            cause = mpirun_reason(tail.read())
        return self._failure(code, said, place, cause)

    def _of_local(self, rank: Rank, what: str) -> ProcessEnd:
        """Return what is known of a rank of this host, and of what it has started."""
        from trainworks_launcher.supervise.outcome.cause import ProcessEnd
        from trainworks_launcher.supervise.outcome.records import of_torch

        records = []
        for row in self._records():
            is_of_rank = row.pid == rank.pid or row.rank == rank.number
            if is_of_rank and row.at >= rank.began:
                records.append(row)
        has_own = any(row.pid == rank.pid and not row.thread for row in records)
        if not has_own:
            # The rank itself has left none, but maybe torch has.
            records += of_torch(rank.error, rank.pid, rank.ended_at, rank.number)
        program = what or name_of_program(self._plan)
        return ProcessEnd(
            output=rank.tail.read(),
            errors=rank.tail.errors(),
            records=records,
            pid=rank.pid,
            ended_at=rank.ended_at,
            shell=_is_shell(program),
            python=_is_python(program),
        )

    def _records(self) -> list[Record]:
        """Return how the Pythons of this host ended, as they have noted it."""
        from trainworks_launcher.supervise.outcome import records

        if self._ends is None:
            return []
        try:
            return records.read(self._ends.read_bytes())
        except OSError:
            return []

    def unheard(self, pid: int) -> str:
        """Return what the last Python of a command died of that ended with 0,
        and is no Python itself.
        """
        if self._ends is None or not self._ends.exists():
            return ""
        from trainworks_launcher.supervise.outcome.records import first_of_the_last

        pids = {pid}
        if self.ranks is not None:
            pids.update(rank.pid for rank in self.ranks.all)
        records = self._records()
        died = first_of_the_last(records)
        if died is None:
            return ""
        for row in records:
            ended_well_after = not row.message and row.at >= died.at
            if row.pid in pids or ended_well_after:
                return ""
        return self._redactor.text(died.cause)

    def _masked(self, said: ProcessEnd) -> ProcessEnd:
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
                exit_message=hide(row.exit_message),
            )
            for row in said.records
        ]
        return said._replace(
            output=without_secrets(said.output), errors=without_secrets(said.errors), records=rows
        )

    def _early_end(self, host: str, rank: int, why: str = "") -> Outcome:
        """Return what is known of a rank that ended with status 0."""
        place = self._place(rank)._replace(host=host).text
        notes = [why] if why else []
        return Outcome(SUCCEEDED, 0, host, rank=rank, place=place, end=EARLY_END, notes=notes)

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
            cause = left_before(reported, self._suspects)
            first = First(cause or reported, reported)
        failed, seen = outcome, first.failed.outcome
        is_same_rank = self.ranks is None or seen.rank == outcome.rank
        if seen.host != outcome.host or not is_same_rank:
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

        if run_in_time(lambda: has_younger(directory, self.started_at), True):
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

    def _place(self, rank: int, program: str = "") -> ProgramPlace:
        """Return the place of a rank. program: its name; "" for the job's program."""
        program = program or name_of_program(self._plan)
        return ProgramPlace(program, self._plan.host, self._plan.mode, rank)

    def _failure(
        self,
        code: int | None,
        said: ProcessEnd,
        place: ProgramPlace,
        cause: str = "",
        note: str = "",
    ) -> Outcome:
        # Only a failure needs it.
        from trainworks_launcher.supervise.outcome.cause import OutsideEvidence, failure_of
        from trainworks_launcher.supervise.outcome.starter_reports import mpirun_host

        self.full = _full_disks(self._plan.env)
        note += _full_memory(code)
        if self.full:
            note += f"; {self.full}"
        if self._plan.shell is not None:
            # No launcher on the other hosts can tell of their ranks.
            place = place._replace(host=mpirun_host(said.output) or place.host)
        oom_kills: int | None = None
        count = self._count_oom_kills()
        if count is not None and self._oom_kills is not None:
            oom_kills = count - self._oom_kills
        outside = OutsideEvidence(oom_kills, cause, note)
        return failure_of(place, code, self._masked(said), outside)


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
    from trainworks_launcher.checks.host_state import size_of
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
    from trainworks_launcher.checks.host_state import is_full

    variables = (*directories.RESULTS, names.CHECKPOINT_DIRECTORY_VARIABLE)
    places = [told[name] for name in variables if told.get(name)]
    places += directories.TEMPORARY
    nothing: list[str] = []
    full = run_in_time(lambda: directories.outermost(filter(is_full, places)), nothing)
    if not full:
        return ""
    return f"no space is left in {' and '.join(full)}"


def name_of_program(plan: NodePlan) -> str:
    """Return the user's program for a sentence."""
    entry_point = plan.env.get("SM_USER_ENTRY_POINT")
    if entry_point:
        return entry_point
    return plan.argv[0] if plan.argv else "the program"


def last_words(outcome: Outcome) -> str:
    """Return the log line that ends a job."""
    if outcome.kind not in (FAILED, STOPPED):
        return "job succeeded on every host"
    first = outcome.text.partition("\n")[0] or f"exit status {outcome.status}"
    return f"job {outcome.kind} (exit status {outcome.status}, host {outcome.host}): {first}"
