"""Gather the evidence about a failure on one host, and decide which rank failed first.

The evidence of a host: the records of its ranks, the report of their starter, and messages of other
hosts. Each host makes evidence of its own ranks (``suspect_ended_rank``, ``suspect_running_rank``)
and sends that to the leader. The leader decides by the table in ``outcome.evidence``.
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
    find_left_rank,
    first_failure,
    has_waited,
    kind_of,
    suspect_command,
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
    """Gathers the evidence about the job's failures on one host, and decides which one came first.

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
        """Begin with the job: processes that the kernel has killed before do not count.

        Args:
            plan: The plan of this host.
            base_directory: The base directory, for example ``/opt/ml``.
            redactor: Hides the job's secrets.
            runtime: Directory in which Pythons note their ends; None: there is none.
            oom_kills: Returns the kernel's count of killed processes; None without a counter.
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
    def suspect_ended_rank(self, rank: Rank) -> Suspect:
        """Return the evidence for the other hosts about a rank that has just ended.

        A rank that ended well counts as well: other ranks may still need that rank.
        """
        if rank.status == 0:
            return Suspect(
                Kind.LEFT,
                self._find_leave_time(rank),
                rank.ended_at,
                self._make_early_end(self._plan.host, rank.number),
            )
        process_end = self._read_rank_end(rank, "")
        suspect = self._make_suspect(process_end, rank.status, rank.number)
        if suspect is not None and (rank.status is not None or suspect.kind is not Kind.LEFT):
            return suspect
        failure = self._make_failure(None, process_end, self._place(rank.number))
        return Suspect(Kind.UNSEEN, rank.ended_at, rank.ended_at, failure)

    def suspect_running_rank(self, rank: Rank) -> Suspect | None:
        """Return the evidence in the record of a rank that still runs; None without a record."""
        process_end = self._read_rank_end(rank, "")._replace(ended_at=math.inf)
        return self._make_suspect(process_end, None, rank.number)

    def suspect_program(self, outcome: Outcome, code: int, tail: Tail, pid: int) -> Suspect:
        """Return the failed program of this host as evidence, if no ranks have reported.

        Args:
            outcome: The program's end.
            code: Return code of its process.
            tail: End of its output.
            pid: Its process id.
        """
        # Only a failure needs it.
        from trainworks_launcher.supervise.outcome.cause import began_at, observe

        process_end = self._read_program_end(tail, pid, time.monotonic())
        kind = kind_of(observe(process_end, code, of_memory=bool(outcome.memory)))
        if tells_of_a_peer(outcome):
            kind = Kind.PEER
        elif kind not in (Kind.RECORDED, Kind.TERMINATED):
            kind = Kind.DIED
        return Suspect(kind, began_at(process_end, code), process_end.ended_at, outcome)

    def suspect_running_program(self, tail: Tail, pid: int) -> Suspect | None:
        """Return the evidence in the record of a program that still runs; None without a record."""
        return self._make_suspect(
            self._read_program_end(tail, pid, math.inf), None, self._plan.rank
        )

    def _read_program_end(self, tail: Tail, pid: int, ended_at: float) -> ProcessEnd:
        """Read the evidence about the program itself, without the processes below the program."""
        from trainworks_launcher.supervise.outcome.cause import ProcessEnd

        own = [row for row in self._read_records() if row.pid == pid]
        return ProcessEnd(tail.read(), tail.errors(), own, pid, ended_at)

    def _make_suspect(self, process_end: ProcessEnd, code: int | None, rank: int) -> Suspect | None:
        """Return a process as evidence; None if nothing says that it failed or ended."""
        # Only a failure needs it.
        from trainworks_launcher.supervise.outcome.cause import began_at, observe

        if code is None and process_end.own() is None:
            return None
        failure = self._make_failure(code, process_end, self._place(rank))
        kind = kind_of(observe(process_end, code, of_memory=bool(failure.memory)))
        if kind is None:
            return None
        if kind is Kind.LEFT:
            notes = []
            if failure.end != UNKNOWN_END:
                notes.append(f"its process: {failure.end}")
            failure = failure._replace(kind=SUCCEEDED, end=EARLY_LEAVE, notes=notes)
        return Suspect(kind, began_at(process_end, code), process_end.ended_at, failure)

    def _find_leave_time(self, rank: Rank) -> float:
        """Return when a rank that ended well left its program, as far as that is known."""
        own = self._read_rank_end(rank, "").own()
        if own is not None and own.left:
            return own.at
        return rank.ended_at

    def add(self, suspect: Suspect) -> None:
        """Keep evidence of a host, also of this one. The last evidence about a rank counts."""
        place = (suspect.outcome.host, suspect.outcome.rank)
        self._by_rank.pop(place, None)
        self._by_rank[place] = suspect

    @property
    def _suspects(self) -> Sequence[Suspect]:
        """All evidence there is, in the order in which it came."""
        return tuple(self._by_rank.values())

    def forget(self) -> Outcome | None:
        """Forget all failures, because the ranks begin again; killed processes no longer count.

        Return the first of the failures; None without one.
        """
        first = self.first_known()
        self._by_rank.clear()
        self._oom_kills = self._count_oom_kills()
        return first

    def first_known(self, host: str = "") -> Outcome | None:
        """Return the first failure of the ranks that run now, of one host or of all.

        None if none is known.
        """
        suspects = [row for row in self._suspects if host in ("", row.outcome.host)]
        first = self._find_first(suspects)
        return first.failed.outcome if first is not None else None

    def is_certain(self) -> bool:
        """Return whether a failure is known that tells of itself: not of a
        peer, nor of a wait that took too long.
        """
        first = self._find_first(self._suspects)
        if first is None or first.cause.kind not in (Kind.RECORDED, Kind.DIED):
            return False
        return not has_waited(first.cause.outcome)

    def _find_first(
        self,
        suspects: Sequence[Suspect],
        starter: Starter = Starter(),  # noqa: B008  (a constant)
    ) -> First | None:
        """Return the first failure by the table in ``evidence``.

        starter: the starter's own report.
        """
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
    def read_report(self, tail: Tail, pid: int = 0) -> Report:
        """Read the command's output for the rank that failed first.

        The command, or a program below the command, may be a starter such as torchrun. A command
        that died of an exception of its own is no starter, even if its output looks like one's.

        Args:
            tail: End of the command's output.
            pid: Process id of the command; 0 if not known.
        """
        # Only a failure needs it.
        from trainworks_launcher.supervise.outcome.starter_reports import Report, report_of

        if self.ranks is None and pid:
            of_process = [row for row in self._read_records() if row.pid == pid]
            exceptions = [row for row in of_process if row.message and not row.thread]
            if exceptions and not exceptions[-1].is_of_a_child:
                return Report()
        return report_of(tail.read(), self._plan.ranks_by)

    def judge_command(
        self, program: str, code: int, tail: Tail, stop_signal: int = 0, pid: int = 0
    ) -> Outcome:
        """Return the outcome of a command that did not end with status 0.

        Args:
            program: Name of the command for people, for example ``train.py``.
            code: Its return code, negative after a signal.
            tail: End of its output.
            stop_signal: Stop signal that came before; 0 for none.
            pid: Its process id; 0 if it is none of a program of the user's.
        """
        report = self.read_report(tail, pid)
        local: Rank | None = None
        suspect: Suspect | None = None
        if self.ranks is not None:
            if not stop_signal:
                report = self._correct_report(report, tail)
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
            outcome = self._make_early_end(host, report.rank, why)
        elif local is not None:
            place = self._place(report.rank, program)
            outcome = self._make_failure(code, self._read_rank_end(local, program), place)
            own_code = outcome.status
        elif suspect is not None:
            outcome = with_status(suspect.outcome, code)
        elif report.starter:
            outcome = self._make_failure_by_report(program, code, tail, report)
        else:
            outcome = self._make_failure_of_program(program, code, tail, pid)
            own_code = outcome.status
        if not stop_signal:
            code = own_code

        if self._plan.ranks_by == "mpirun" and not outcome.cause and not stop_signal:
            from trainworks_launcher.supervise.outcome.starter_reports import (
                describe_unreached_address,
            )

            outcome = outcome._replace(cause=describe_unreached_address(tail.read()))
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

    def judge_ranks(self, tail: Tail) -> Outcome:
        """Return the outcome by the ends of the ranks, because their starter does not end."""
        self.overdue = True
        ends = [suspect.outcome for suspect in self._suspects]
        if all(end.kind == SUCCEEDED and end.status == 0 for end in ends):
            return Outcome(SUCCEEDED, 0, self._plan.host)
        return self.judge_command(name_of_program(self._plan), 1, tail)

    def _correct_report(self, report: Report, tail: Tail) -> Report:
        """Return a starter's report as the hosts have seen it: which rank
        failed first, and how it ended.
        """
        starter = Starter(
            report.rank,
            ended_itself=not report.starter and not self.overdue,
            ended_early=report.ended_early,
        )
        first = self._find_first(self._suspects, starter)
        if first is None or self.lost_daemon(tail):
            return report
        failed = first.failed.outcome
        code = failed.status
        if not code and report.rank == failed.rank:
            code = report.code
        return report._replace(rank=failed.rank, code=code, host=failed.host, ended_early=False)

    def _make_failure_by_report(
        self, program: str, code: int, tail: Tail, report: Report
    ) -> Outcome:
        """Return the failure of a rank whose words are somewhere in the output of its starter."""
        from trainworks_launcher.supervise.outcome.cause import ProcessEnd

        note = ""
        if not self._plan.ranks_by:
            note = f", as {report.starter} reports"
            if code != report.code:
                note += f"; {program} itself: {describe_status(code)}"
        records = [row for row in self._read_records() if report.rank in (-1, row.rank)]
        process_end = ProcessEnd(tail.read(), records=records)
        return self._make_failure(
            report.code, process_end, self._place(report.rank, program), note=note
        )

    def _make_failure_of_program(self, program: str, code: int, tail: Tail, pid: int) -> Outcome:
        """Return the failure of a command that names no rank of its own."""
        from trainworks_launcher.supervise.outcome.cause import ProcessEnd

        is_alone = self.ranks is None and self._plan.processes == 1
        process_end = ProcessEnd(
            output=tail.read(),
            errors=tail.errors() if is_alone else b"",
            records=self._read_records(),
            pid=pid,
            ended_at=time.monotonic(),
            shell=_is_shell(program),
            python=_is_python(program),
        )
        place = self._place(self._plan.rank, program)
        lost_host = self.lost_daemon(tail)
        if lost_host:
            cause = f"mpirun lost its daemon on host {lost_host}, or could not start it"
            failure = self._make_failure(names.EXIT_HOSTS, process_end, place, cause)
            return failure._replace(host=lost_host)

        cause = ""
        if not self._plan.ranks_by and code > 0:
            # The program may have called a mpirun of its own.
            from trainworks_launcher.supervise.outcome.starter_reports import find_mpirun_reason

            cause = find_mpirun_reason(tail.read())
        return self._make_failure(code, process_end, place, cause)

    def _read_rank_end(self, rank: Rank, program: str) -> ProcessEnd:
        """Read the evidence about a rank of this host, and about processes below that rank."""
        from trainworks_launcher.supervise.outcome.cause import ProcessEnd
        from trainworks_launcher.supervise.outcome.records import read_torch_error

        records = []
        for row in self._read_records():
            is_of_rank = row.pid == rank.pid or row.rank == rank.number
            if is_of_rank and row.at >= rank.began:
                records.append(row)
        has_own = any(row.pid == rank.pid and not row.thread for row in records)
        if not has_own:
            # The rank itself has left none, but maybe torch has.
            records += read_torch_error(rank.error, rank.pid, rank.ended_at, rank.number)
        program = program or name_of_program(self._plan)
        return ProcessEnd(
            output=rank.tail.read(),
            errors=rank.tail.errors(),
            records=records,
            pid=rank.pid,
            ended_at=rank.ended_at,
            shell=_is_shell(program),
            python=_is_python(program),
        )

    def _read_records(self) -> list[Record]:
        """Return how the Pythons of this host ended, as they have noted it."""
        from trainworks_launcher.supervise.outcome import records

        if self._ends is None:
            return []
        try:
            return records.read(self._ends.read_bytes())
        except OSError:
            return []

    def find_hidden_death(self, pid: int) -> str:
        """Return the exception that ended the last Python of a command which ended with status 0.

        A shell script may lose the status of its Python: ``python train.py | tee log``. "" for
        none.
        """
        if self._ends is None or not self._ends.exists():
            return ""
        from trainworks_launcher.supervise.outcome.records import find_first_exception

        pids = {pid}
        if self.ranks is not None:
            pids.update(rank.pid for rank in self.ranks.all)
        records = self._read_records()
        died = find_first_exception(records)
        if died is None:
            return ""
        for row in records:
            ended_well_after = not row.message and row.at >= died.at
            if row.pid in pids or ended_well_after:
                return ""
        return self._redactor.text(died.cause)

    def _hide_secrets(self, process_end: ProcessEnd) -> ProcessEnd:
        """Return the evidence without secrets.

        Done before a text is shortened, because the cut may leave half of a secret.
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
            for row in process_end.records
        ]
        return process_end._replace(
            output=without_secrets(process_end.output),
            errors=without_secrets(process_end.errors),
            records=rows,
        )

    def _make_early_end(self, host: str, rank: int, why: str = "") -> Outcome:
        """Return the outcome of a rank that ended with status 0, while other ranks went on."""
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
        first = self._find_first(self._suspects, starter)
        if first is None or not self._is_stronger(first.failed, outcome):
            reported = suspect_command(outcome)
            cause = find_left_rank(reported, self._suspects)
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
        """Return the host on which mpirun lost its daemon; "" if mpirun reports no such loss.

        It may end with status 0 then.
        """
        if self._plan.ranks_by != "mpirun":
            return ""
        from trainworks_launcher.supervise.outcome.starter_reports import find_lost_daemon

        return find_lost_daemon(tail.read())

    def _place(self, rank: int, program: str = "") -> ProgramPlace:
        """Return the place of a rank. program: its name; "" for the job's program."""
        program = program or name_of_program(self._plan)
        return ProgramPlace(program, self._plan.host, self._plan.mode, rank)

    def _make_failure(
        self,
        code: int | None,
        process_end: ProcessEnd,
        place: ProgramPlace,
        cause: str = "",
        note: str = "",
    ) -> Outcome:
        # Only a failure needs it.
        from trainworks_launcher.supervise.outcome.cause import OutsideEvidence, failure_of
        from trainworks_launcher.supervise.outcome.starter_reports import find_failed_host

        self.full = _full_disks(self._plan.env)
        note += _full_memory(code)
        if self.full:
            note += f"; {self.full}"
        if self._plan.shell is not None:
            # No launcher on the other hosts can tell of their ranks.
            place = place._replace(host=find_failed_host(process_end.output) or place.host)
        oom_kills: int | None = None
        count = self._count_oom_kills()
        if count is not None and self._oom_kills is not None:
            oom_kills = count - self._oom_kills
        outside = OutsideEvidence(oom_kills, cause, note)
        return failure_of(place, code, self._hide_secrets(process_end), outside)


_SHELLS = ("bash", "dash", "ksh", "sh", "zsh")


def _is_shell(program: str) -> bool:
    """Return whether a program is a shell or a script of one."""
    return program.endswith(".sh") or program.rpartition("/")[2] in _SHELLS


def _is_python(program: str) -> bool:
    """Return whether a program is a script of Python."""
    return program.endswith(".py")


def _full_memory(code: int | None) -> str:
    """Return the usual reason of a death by SIGBUS, where /dev/shm is small.

    The end of a sentence; ``""`` for other deaths.
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
