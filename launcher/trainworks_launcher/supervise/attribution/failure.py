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
    EFFECTS,
    KILL_SECONDS,
    First,
    Kind,
    KnownFailure,
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
"""Seconds of the wait for the end of a daemon beside the program (Ray's, mpirun's), which may be
the reason of a failure.
"""


class Verdict:
    """Gathers the evidence about the job's failures on one host, and decides which one came first.

    Attributes:
        ranks: Ranks of this host; None if ranks do not report to this launcher.
        killed: Whether the command was killed after the grace period of a stop signal.
        overdue: Whether the starter went on after its ranks, and was ended.
        started_at: Start of the program, in seconds since 1970; 0 before the start.
        full: The directories without space at this host's last failure, for example ``no space
            is left in /tmp``; ``""`` for none.
    """

    def __init__(
        self,
        plan: NodePlan,
        output_directory: str,
        redactor: Redactor,
        runtime: Path | None = None,
        oom_kills: Callable[[], int | None] = memory.oom_kills,
    ) -> None:
        """Read the kernel's counter of killed processes: earlier ones are not of this job.

        Args:
            plan: The plan of this host.
            output_directory: Directory of the outcome, for example ``/opt/ml/output``.
            redactor: Hides the job's secrets.
            runtime: Directory in which each Python of the job notes its end; None for none.
            oom_kills: Returns the number of processes that the kernel has killed for lack of
                memory; None without a counter.
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
        self._output_directory = output_directory
        self._redactor = redactor
        self._count_oom_kills = oom_kills
        self._oom_kills = oom_kills()
        self._by_rank: dict[tuple[str, int], Suspect] = {}

    # --- before the end ---------------------------------------------------------------------------
    def suspect_ended_rank(self, rank: Rank) -> Suspect:
        """Return the evidence for the other hosts about a rank that has just ended.

        Returns:
            With exit status 0: LEFT, because other ranks may still need that rank. Else the kind
            that the rank's record and status show. UNSEEN if neither shows anything.
        """
        if rank.status == 0:
            return Suspect(
                Kind.LEFT,
                self._find_leave_time(rank),
                rank.ended_at,
                self._make_early_end(self._plan.host, rank.number),
                rank.restarts,
            )
        process_end = self._read_rank_end(rank, "")
        suspect = self._make_suspect(process_end, rank.status, rank.number)
        # A rank whose record says that it left its program may still have failed at its exit: that
        # shows only in its status, which is None if nothing has read it.
        is_unknown_end = rank.status is None and suspect is not None and suspect.kind is Kind.LEFT
        if suspect is not None and not is_unknown_end:
            return suspect._replace(restarts=rank.restarts)
        failure = self._make_failure(None, process_end, self._place(rank.number))
        return Suspect(Kind.UNSEEN, rank.ended_at, rank.ended_at, failure, rank.restarts)

    def suspect_running_rank(self, rank: Rank) -> Suspect | None:
        """Return the evidence in the record of a rank that still runs; None without a record."""
        process_end = self._read_rank_end(rank, "")._replace(ended_at=math.inf)
        suspect = self._make_suspect(process_end, None, rank.number)
        if suspect is None:
            return None
        return suspect._replace(restarts=rank.restarts)

    def suspect_program(self, outcome: Outcome, code: int, tail: Tail, pid: int) -> Suspect:
        """Return the failed program of this host as evidence, for a job whose ranks do not report.

        Args:
            outcome: The program's end.
            code: Return code of its process, negative after a signal.
            tail: End of its output.
            pid: Its process id.

        Returns:
            Evidence of the kind PEER, RECORDED, TERMINATED or DIED.
        """
        # Imported late, because only a failure needs it.
        from trainworks_launcher.supervise.outcome.cause import began_at, observe

        process_end = self._read_program_end(tail, pid, time.monotonic())
        kind = kind_of(observe(process_end, code, of_memory=bool(outcome.memory)))
        if tells_of_a_peer(outcome):
            kind = Kind.PEER
        elif kind not in (Kind.RECORDED, Kind.TERMINATED):
            # The outcome says that the program failed, even if its own record does not.
            kind = Kind.DIED
        return Suspect(kind, began_at(process_end, code), process_end.ended_at, outcome)

    def suspect_running_program(self, tail: Tail, pid: int) -> Suspect | None:
        """Return the evidence in the record of a program that still runs; None without a record."""
        process_end = self._read_program_end(tail, pid, math.inf)
        return self._make_suspect(process_end, None, self._plan.rank)

    def _read_program_end(self, tail: Tail, pid: int, ended_at: float) -> ProcessEnd:
        """Read the evidence about the program itself, without the processes below the program.

        Args:
            tail: End of its output.
            pid: Its process id.
            ended_at: Its end (monotonic clock); ``math.inf`` while it runs.
        """
        from trainworks_launcher.supervise.outcome.cause import ProcessEnd

        own = [row for row in self._read_records() if row.pid == pid]
        return ProcessEnd(tail.read(), tail.errors(), own, pid, ended_at)

    def _make_suspect(self, process_end: ProcessEnd, code: int | None, rank: int) -> Suspect | None:
        """Return a process as evidence.

        Args:
            process_end: What the process left.
            code: Its return code, negative after a signal; None while it runs, or if not known.
            rank: Its rank; -1 for the only program of a host.

        Returns:
            The evidence; None if nothing says that the process failed or ended.
        """
        # Imported late, because only a failure needs it.
        from trainworks_launcher.supervise.outcome.cause import began_at, observe

        # Neither a status nor a record of the process itself.
        if code is None and process_end.own() is None:
            return None
        failure = self._make_failure(code, process_end, self._place(rank))
        kind = kind_of(observe(process_end, code, of_memory=bool(failure.memory)))
        if kind is None:
            return None
        if kind is Kind.LEFT:
            # The rank itself did not fail. What is known of its process is a note.
            notes = []
            if failure.end != UNKNOWN_END:
                notes.append(f"its process: {failure.end}")
            failure = failure._replace(kind=SUCCEEDED, end=EARLY_LEAVE, notes=notes)
        return Suspect(kind, began_at(process_end, code), process_end.ended_at, failure)

    def _find_leave_time(self, rank: Rank) -> float:
        """Return when a rank with exit status 0 left its program (monotonic clock).

        The end of its process may come much later, because of exit handlers. Without a record of
        the rank, the end of its process counts.
        """
        own = self._read_rank_end(rank, "").own()
        if own is not None and own.left:
            return own.at
        return rank.ended_at

    def add(self, suspect: Suspect) -> None:
        """Keep the evidence of a host, in place of earlier evidence about the same rank.

        Nothing is decided or sent.
        """
        place = (suspect.outcome.host, suspect.outcome.rank)
        # Removed first, so that the rank comes last in the order.
        self._by_rank.pop(place, None)
        self._by_rank[place] = suspect

    @property
    def _suspects(self) -> Sequence[Suspect]:
        """All evidence, in the order in which it came."""
        return tuple(self._by_rank.values())

    def forget(self, restarts: int) -> KnownFailure | None:
        """Forget the evidence of earlier attempts, because the ranks start again.

        A rank of another host may have failed in the new attempt already: hosts start their ranks
        at about the same time. Its evidence stays.

        Processes that the kernel has killed so far do not count for a later failure.

        Args:
            restarts: Number of restarts of this host's ranks, with the present one.

        Returns:
            The first failure among the forgotten evidence; None for none.
        """
        earlier = [row for row in self._suspects if row.restarts < restarts]
        first = self._find_first(earlier)
        for row in earlier:
            del self._by_rank[row.outcome.host, row.outcome.rank]
        self._oom_kills = self._count_oom_kills()
        return _known(first)

    def first_failure(self, host: str = "") -> KnownFailure | None:
        """Return the first failure since the ranks started; None if none is known.

        Args:
            host: Only failures of this host count; ``""``: those of all hosts.
        """
        suspects = [row for row in self._suspects if host in ("", row.outcome.host)]
        return _known(self._find_first(suspects))

    def is_certain(self) -> bool:
        """Return whether a failure is known that is about the failed rank itself.

        A broken connection to a peer, or a timeout, is only the effect of another failure.
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
        """Return the first failure by the table in ``evidence``; None if the table has none.

        Args:
            suspects: The evidence.
            starter: The starter's own report; its fields about mpirun and torchrun are added.
        """
        started_by = self._plan.ranks_by
        # A job without a starter has none that kills: any KILL is a failure of its own.
        kill_seconds = KILL_SECONDS.get(started_by, math.inf)
        starter = starter._replace(sees_all_hosts=started_by == "mpirun", kill_seconds=kill_seconds)
        return first_failure(suspects, starter)

    def knows_all(self) -> bool:
        """Return whether there is evidence about every rank of the plan.

        These are the ranks of all hosts under mpirun, else those of this host.
        """
        ranks = {rank for _, rank in self._by_rank}
        return len(ranks) >= self._plan.processes

    # --- the end ----------------------------------------------------------------------------------
    def read_report(self, tail: Tail, pid: int = 0) -> Report:
        """Read the command's output for the rank that failed first.

        The command, or a program below the command, may be a starter such as torchrun. A command
        that died of an exception of its own is no starter, even if its output looks like one's.

        Args:
            tail: End of the command's output.
            pid: Process id of the command; 0 if not known.

        Returns:
            The report; an empty one if the output has none.
        """
        # Imported late, because only a failure needs it.
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
        """Return the outcome of a command that did not end with status 0: FAILED, or STOPPED.

        Reads the records of this host's processes, the failure text of the user's own, and mostly
        the free space of directories, which sets ``full``.

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
            lambda: outcome_files.users_own_failure(self._output_directory, self._redactor), ""
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
        """Return the return code of the rank that a report names; 0 if it is not known.

        The status that this host read counts before the report, unless the job was stopped.

        Args:
            report: The starter's report.
            local: The named rank, if this host has it.
            stop_signal: Stop signal that came before; 0 for none.
        """
        if local is not None and local.status and not stop_signal:
            return local.status
        if not report.code and self.killed and stop_signal:
            # mpirun and torchrun end with a status of their own, although their ranks were killed.
            return -signal.SIGKILL
        return report.code

    def judge_ranks(self, tail: Tail) -> Outcome:
        """Return the outcome by the ends of the ranks, because their starter does not end.

        Sets ``overdue``.

        Args:
            tail: End of the starter's output.
        """
        self.overdue = True
        ends = [suspect.outcome for suspect in self._suspects]
        if all(end.kind == SUCCEEDED and end.status == 0 for end in ends):
            return Outcome(SUCCEEDED, 0, self._plan.host)
        return self.judge_command(name_of_program(self._plan), 1, tail)

    def _correct_report(self, report: Report, tail: Tail) -> Report:
        """Return a starter's report with the rank that the hosts have seen to fail first.

        A starter often names another rank, which failed because of the first one. The report stays
        as it is if no host has evidence, or if mpirun lost a daemon.
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
            # No host could read the status, and the starter is the parent of that rank.
            code = report.code
        return report._replace(rank=failed.rank, code=code, host=failed.host, ended_early=False)

    def _make_failure_by_report(
        self, program: str, code: int, tail: Tail, report: Report
    ) -> Outcome:
        """Return the failure of a rank that only the report of its starter names.

        The rank's own lines are somewhere in the output of the starter.

        Args:
            program: Name of the command for people.
            code: Return code of the command.
            tail: End of the command's output.
            report: The report in that output.
        """
        from trainworks_launcher.supervise.outcome.cause import ProcessEnd

        note = ""
        if not self._plan.ranks_by:
            # The user's program has called a starter of its own.
            note = f", as {report.starter} reports"
            if code != report.code:
                note += f"; {program} itself: {describe_status(code)}"
        records = [row for row in self._read_records() if report.rank in (-1, row.rank)]
        process_end = ProcessEnd(tail.read(), records=records)
        return self._make_failure(
            report.code, process_end, self._place(report.rank, program), note=note
        )

    def _make_failure_of_program(self, program: str, code: int, tail: Tail, pid: int) -> Outcome:
        """Return the failure of a command whose output names no rank.

        If mpirun has lost a daemon, the failure is one of that daemon's host.

        Args:
            program: Name of the command for people.
            code: Return code of the command, negative after a signal.
            tail: End of its output.
            pid: Its process id; 0 if it is not a program of the user's.
        """
        from trainworks_launcher.supervise.outcome.cause import ProcessEnd

        # The standard error of several ranks is mixed: its last line is not of one program.
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
        """Read the evidence about a rank of this host, and about processes below that rank.

        Args:
            rank: The rank.
            program: Name of its program for people; ``""`` for the job's program.
        """
        from trainworks_launcher.supervise.outcome.cause import ProcessEnd
        from trainworks_launcher.supervise.outcome.records import read_torch_error

        records = []
        for row in self._read_records():
            # A child of the rank has the rank's number in its environment.
            is_of_rank = row.pid == rank.pid or row.rank == rank.number
            # Older records are of the rank's processes before a restart.
            if is_of_rank and row.at >= rank.began:
                records.append(row)
        has_own = any(row.pid == rank.pid and not row.thread for row in records)
        if not has_own:
            # torch may have noted the exception, where our record of it is missing.
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
        """Return the records that the Pythons of this host have made of their ends.

        ``[]`` without a file of records, or if the file cannot be read.
        """
        from trainworks_launcher.supervise.outcome import records

        if self._ends is None:
            return []
        try:
            return records.read(self._ends.read_bytes())
        except OSError:
            return []

    def find_hidden_death(self, pid: int) -> str:
        """Find the exception that ended a Python, although the command ended with status 0.

        A shell script may lose the status of its Python: ``python train.py | tee log``.

        Args:
            pid: Process id of the command.

        Returns:
            The exception without secrets, for example ``ValueError: label 17``. ``""`` if there is
            none, or if a Python of the job came to a good end afterwards: the script may have
            started its Python again.
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
            # The command or a rank that noted its own end is a Python, and kept its status.
            if row.pid in pids or ended_well_after:
                return ""
        return self._redactor.text(died.cause)

    def _hide_secrets(self, process_end: ProcessEnd) -> ProcessEnd:
        """Return the evidence without secrets.

        Called before a text is shortened, because the cut may leave half of a secret.
        """
        redact = self._redactor.text

        def redact_bytes(data: bytes) -> bytes:
            return redact(data.decode("utf-8", "replace")).encode("utf-8", "replace")

        records = []
        for record in process_end.records:
            records.append(
                record._replace(
                    message=redact(record.message),
                    frames=redact(record.frames),
                    origin=redact(record.origin),
                    inner=redact(record.inner),
                    exit_message=redact(record.exit_message),
                )
            )
        return process_end._replace(
            output=redact_bytes(process_end.output),
            errors=redact_bytes(process_end.errors),
            records=records,
        )

    def _make_early_end(self, host: str, rank: int, why: str = "") -> Outcome:
        """Return the outcome of a rank that ended with status 0, while other ranks went on.

        Args:
            host: The rank's host.
            rank: Its number.
            why: A line for people about what followed; ``""`` for none.
        """
        place = self._place(rank)._replace(host=host).text
        notes = [why] if why else []
        return Outcome(SUCCEEDED, 0, host, rank=rank, place=place, end=EARLY_END, notes=notes)

    def seconds_for_daemon(self, outcome: Outcome) -> float:
        """Return how many seconds to wait for the end of Ray's daemon before a failure is reported.

        The failure may be only the effect of that end. 0 if the job has no daemon, or if the
        failure is not about Ray.
        """
        from trainworks_launcher.supervise.outcome.cause import tells_of_ray

        if self._plan.auxiliaries and tells_of_ray(outcome):
            return DAEMON_SECONDS
        return 0.0

    def judge(self, outcome: Outcome) -> Outcome:
        """Return the outcome of the job, from the first end that a host reported.

        For the leader, which has the evidence of all hosts.

        Args:
            outcome: The reported end.

        Returns:
            The first failure of any host, if the evidence outweighs the report. A stop gets a note
            if no checkpoint was written. Any other end is returned as it is, and so is a failure
            for which the launcher itself has ended the job.
        """
        if outcome.kind == STOPPED:
            return self._with_checkpoints(outcome)
        if not outcome.may_be_an_effect:
            return outcome
        names_no_rank = self.ranks is not None and outcome.rank < 0
        starter = Starter(
            outcome.rank,
            ended_itself=names_no_rank and not self.overdue,
            ended_early=outcome.end == EARLY_END,
        )
        first = self._find_first(self._suspects, starter)
        if first is None or not self._is_stronger(first.failed, outcome):
            # Row 4 of the table: the report itself. A rank that had left may still be its cause.
            reported = suspect_command(outcome)
            cause = find_left_rank(reported, self._suspects)
            first = First(cause or reported, reported)
        # ``failed`` is the rank that failed first; ``cause`` may be another rank, which left it.
        failed, seen = outcome, first.failed.outcome
        is_same_rank = self.ranks is None or seen.rank == outcome.rank
        # The report about the same rank has more facts than the evidence.
        if seen.host != outcome.host or not is_same_rank:
            failed = seen._replace(kind=FAILED, status=seen.status or outcome.status)
        if first.cause is first.failed:
            return failed
        # Imported late, because only a rank that had left needs it.
        from trainworks_launcher.supervise.outcome.cause import after_leaving

        return after_leaving(failed, first.cause)

    def _is_stronger(self, failed: Suspect, outcome: Outcome) -> bool:
        """Return whether evidence of a host outweighs the reported end of a command (row 4).

        A starter that names no rank has an end of its own, which its host has seen: only a record
        outweighs that.

        Args:
            failed: The first failure by the evidence.
            outcome: The reported end.
        """
        if self.ranks is None or outcome.rank >= 0 or tells_of_a_peer(outcome):
            return True
        return failed.kind is Kind.RECORDED

    def _with_checkpoints(self, outcome: Outcome) -> Outcome:
        """Add to a stop that no checkpoint was written since the program started.

        The outcome stays as it is if there is a checkpoint, if the job has no directory for
        checkpoints, if the program did not start, or if the file system does not answer in time.
        """
        directory = self._plan.env.get(names.CHECKPOINT_DIRECTORY_VARIABLE, "")
        if not directory or not self.started_at:
            return outcome
        # Imported late, because only a stop needs it.
        from trainworks_launcher.contract.checkpoints import has_younger

        has_checkpoint = run_in_time(lambda: has_younger(directory, self.started_at), True)
        if has_checkpoint:
            return outcome
        return outcome._replace(
            unsaved=f"no checkpoint was written: no file in {directory} is younger than the"
            " program's start"
        )

    def lost_daemon(self, tail: Tail) -> str:
        """Return the host on which mpirun lost its daemon; "" if mpirun reports no such loss.

        mpirun may end with status 0 after such a loss.

        Args:
            tail: End of mpirun's output.
        """
        if self._plan.ranks_by != "mpirun":
            return ""
        from trainworks_launcher.supervise.outcome.starter_reports import find_lost_daemon

        return find_lost_daemon(tail.read())

    def _place(self, rank: int, program: str = "") -> ProgramPlace:
        """Return the place of a rank on this host.

        Args:
            rank: The rank; -1 for the whole program.
            program: Name of its program for people; ``""`` for the job's program.
        """
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
        """Return a failure with its cause and text, without secrets.

        Sets ``full``: reads the free space of the job's directories, with a time limit.

        Args:
            code: Return code, negative after a signal; None if it is not known.
            process_end: What the process left.
            place: The program, its host and rank.
            cause: The cause, if it is known; ``""``: it is found in ``process_end``.
            note: End of the sentence about the process's end, for example ``, as mpirun reports``.
        """
        # Imported late, because only a failure needs it.
        from trainworks_launcher.supervise.outcome.cause import OutsideEvidence, failure_of
        from trainworks_launcher.supervise.outcome.starter_reports import find_failed_host

        self.full = _describe_full_directories(self._plan.env)
        note += _describe_full_shared_memory(code)
        if self.full:
            note += f"; {self.full}"
        if self._plan.shell is not None:
            # No launcher on the other hosts can tell of their ranks.
            place = place._replace(host=find_failed_host(process_end.output) or place.host)
        oom_kills: int | None = None
        count = self._count_oom_kills()
        if count is not None and self._oom_kills is not None:
            # Since the job began, or since the last restart of the ranks.
            oom_kills = count - self._oom_kills
        outside = OutsideEvidence(oom_kills, cause, note)
        return failure_of(place, code, self._hide_secrets(process_end), outside)


def _known(first: First | None) -> KnownFailure | None:
    """Return the failed rank, and whether its failure may be an effect; None for None."""
    if first is None:
        return None
    return KnownFailure(first.failed.outcome, is_effect=first.cause.kind in EFFECTS)


_SHELLS = ("bash", "dash", "ksh", "sh", "zsh")


def _is_shell(program: str) -> bool:
    """Return whether a program is a shell or a script of one."""
    return program.endswith(".sh") or program.rpartition("/")[2] in _SHELLS


def _is_python(program: str) -> bool:
    """Return whether a program is a script of Python."""
    return program.endswith(".py")


def _describe_full_shared_memory(code: int | None) -> str:
    """Return the usual reason of an end by SIGBUS where /dev/shm is small.

    Args:
        code: Return code, negative after a signal; None if it is not known.

    Returns:
        The end of a sentence, for example ``; /dev/shm has 64 MiB and may be full: ...``. ``""``
        after another end, or if /dev/shm is large enough.
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


def _describe_full_directories(variables: Mapping[str, str]) -> str:
    """Return which directories of the job have no space left.

    Args:
        variables: The job's variables, which name the directories of results and checkpoints.

    Returns:
        For example ``no space is left in /opt/ml/model and /tmp``; ``""`` for none, or if the file
        systems do not answer in time.
    """
    from trainworks_launcher.checks.host_state import is_full

    candidates: list[str] = []
    for name in (*directories.RESULTS, names.CHECKPOINT_DIRECTORY_VARIABLE):
        if variables.get(name):
            candidates.append(variables[name])
    candidates += directories.TEMPORARY

    def find_full_directories() -> list[str]:
        return directories.outermost(filter(is_full, candidates))

    unknown: list[str] = []
    full_directories = run_in_time(find_full_directories, unknown)
    if not full_directories:
        return ""
    return f"no space is left in {' and '.join(full_directories)}"


def name_of_program(plan: NodePlan) -> str:
    """Return the name of the user's program for people: the entry point, else argv[0]."""
    entry_point = plan.env.get("SM_USER_ENTRY_POINT")
    if entry_point:
        return entry_point
    if plan.argv:
        return plan.argv[0]
    return "the program"


def last_words(outcome: Outcome) -> str:
    """Return the last line of a job's log.

    For example ``job failed (exit status 1, host algo-1): ValueError: label 17``.
    """
    if outcome.kind not in (FAILED, STOPPED):
        return "job succeeded on every host"
    first = outcome.text.partition("\n")[0] or f"exit status {outcome.status}"
    return f"job {outcome.kind} (exit status {outcome.status}, host {outcome.host}): {first}"
