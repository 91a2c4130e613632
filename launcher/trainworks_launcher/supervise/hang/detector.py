"""Sample this host at intervals, agree with the other hosts that the job hangs, and report.

A host is quiet when none of its processes made progress for the limit. The leader hears when a host
becomes quiet or moves again. When all hosts are quiet, the leader asks each for a final sample. If
that shows no progress either, the leader names the rank that differs, and tells every host. All of
this happens once for a stall, and again only after a host has made progress.

=======  =========  ===========================================================================
message  direction  meaning
=======  =========  ===========================================================================
quiet    to leader  ``quiet``: whether nothing on this host has made progress for the limit
look     to host    take a final sample; ``round`` comes back in the answer
records  to leader  records of torch's flight recorder for each rank, and of NCCL's RAS for all;
                    sent before ``rows``
rows     to leader  no process has moved: the place of each rank
verdict  to host    the job hangs: write the stacks to a file; ``text`` for the log
=======  =========  ===========================================================================
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Callable, Collection, Iterable, Mapping, NamedTuple, Sequence, TypeVar

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json, number, texts
from trainworks_launcher.supervise.control.messages import one_line, words
from trainworks_launcher.supervise.event_loop import Loop
from trainworks_launcher.supervise.hang.missing_collectives import find_missing_calls
from trainworks_launcher.supervise.hang.nccl import remarks
from trainworks_launcher.supervise.hang.outlier_rank import (
    Diagnosis,
    Row,
    documents,
    name_outliers,
    read_documents,
    waits_in_a_package,
)
from trainworks_launcher.supervise.hang.progress import Sample, StackHistory, find_progress
from trainworks_launcher.supervise.hang.rank_grid import as_svg, as_text, grid
from trainworks_launcher.supervise.hang.sampling import (
    LONGEST_SECONDS,
    RECORD_SECONDS,
    Root,
    Sampler,
)
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome, shorten

_ANSWER_SECONDS = LONGEST_SECONDS + 2.0
"""How long the leader waits for the answers of the other hosts, with the time of a message."""

_NEVER_SECONDS = 2 * LONGEST_SECONDS
"""After this time a sample is given up: the longest one takes LONGEST_SECONDS. The thread is left
alone, and a new sample is taken.
"""

_LONGEST_PAUSE_AFTER_FAILURES = 600.0
"""Seconds between two samples at most, where samples do not return."""

_MAX_DOUBLINGS = 10
"""How often the pause is doubled after samples that do not return."""

_MAX_REPORTS = 20
"""Limit of the hangs of one job whose stacks are written to files."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two samples."""

_TALKING_PAUSE = 3.0
"""Seconds between two looks while the job prints, unless samples are rarer."""

_SAMPLES = 20
"""Samples in the time of the limit."""

T = TypeVar("T")


class _FinalSample(NamedTuple):
    """A final sample of this host (``HangDetector._take_final_sample``).

    Attributes:
        sample: The sample.
        writes: As ``Sample.writes``, counted after the stacks were read.
        rows: The place of each rank.
        records: Records of torch's flight recorder.
        ras: Remarks of NCCL's RAS.
        text: Stacks of this host, for the file.
        moved: Whether a process made progress; the other fields are empty then.
    """

    sample: Sample
    writes: Mapping[int, int] | None
    rows: Sequence[Row] = ()
    records: Sequence[Json] = ()
    ras: Sequence[str] = ()
    text: str = ""
    moved: bool = False


class DetectorContext(NamedTuple):
    """The host and the job, as the detector needs them.

    Attributes:
        host: This host, for people.
        member: This launcher's name on the control channel: a host may have several.
        leader: Whether this launcher decides for the job.
        limit: Seconds without progress.
        fails: Whether a hang ends the job.
        output: Directory for the stacks.
        roots: Returns the processes that run on this host: the ranks, or the only program.
        printed: Returns the time of the last output (monotonic clock).
        others: Returns the other hosts of the job, on the leader.
        tell: Sends a message: the leader to every host, another host to the leader.
        end: Ends the job.
        log: Prints a line.
        redact: Hides secrets in a text.
        searching: Returns whether a rank of this host has not found the others yet: its output
            is not progress.
    """

    host: str
    member: str
    leader: bool
    limit: float
    fails: bool
    output: Path
    roots: Callable[[], Sequence[Root]]
    printed: Callable[[], float]
    others: Callable[[], Collection[str]]
    tell: Callable[[Mapping[str, Json]], None]
    end: Callable[[Outcome], None]
    log: Callable[[str], None]
    redact: Callable[[str], str]
    searching: Callable[[], bool] = lambda: False


class HangDetector:
    """The detector of one host.

    Every method runs in the loop's thread; samples are taken in a thread of their own.

    Attributes:
        idle: Seconds between two samples without progress, in all.
    """

    def __init__(self, loop: Loop, sampler: Sampler, context: DetectorContext) -> None:
        """Take no sample before ``begin``."""
        self._loop = loop
        self._sampler = sampler
        self._context = context
        # Monotonic clock: the last progress in a sample, and the last output that counts.
        self._moved_at = 0.0
        self._spoke_at = 0.0
        self._writes: Mapping[int, int] | None = None  # as of the last look at the output
        self._before: Sample | None = None  # the last sample of this stall
        self._history = StackHistory()
        self._is_quiet = False  # as the leader knows it
        self._turn = 0  # number of the tick that is planned
        self._unanswered = 0  # samples in a row that did not return
        self._is_over = False  # ``end`` was called
        self._stacks = ""  # of the last final sample, for the report
        self._written_reports = 0
        self.idle = 0.0
        # Of the leader:
        self._quiet_hosts: set[str] = set()
        self._round = 0  # number of the last question
        self._is_round_open = False  # answers to that question are awaited
        self._reported = False  # the present hang
        self._rows: dict[str, list[Row]] = {}
        self._records: list[Json] = []
        self._ras: list[str] = []

    def begin(self, started: float) -> None:
        """Start to take samples.

        Args:
            started: Start of the program (monotonic clock), which counts as the first progress.
        """
        self._moved_at = started
        self._tick()

    def end(self) -> None:
        """Take no more samples and report nothing: the job ends."""
        self._is_over = True

    def receive(self, host: str, message: Mapping[str, Json]) -> None:
        """Handle a message of the leader, or on the leader of another host.

        Args:
            host: The sender.
            message: With ``what``: ``look`` or ``verdict`` of the leader; ``quiet``, ``records`` or
                ``rows`` of another host.
        """
        kind = message.get("what")
        if self._is_over:
            return
        if kind == "look" and not self._context.leader:
            self._take_final_sample(number(message.get("round")))
        elif kind == "verdict" and not self._context.leader:
            self._report(words(message.get("text")))
        elif kind == "quiet" and self._context.leader:
            self._note_quiet(host, message.get("quiet") is True)
        elif self._context.leader:
            self._note_answer(host, message)

    # --- samples of this host ---------------------------------------------------------------------
    def _tick(self) -> None:
        """Count the writes of the ranks if there is new output, then take a sample if one is due.

        Returns at once: both are done in a thread. The next tick is planned at the end.
        """
        roots, printed = self._context.roots(), self._context.printed()
        # The output of ranks that search for the others repeats the same warning.
        if printed <= self._spoke_at or self._context.searching():
            self._sample_or_wait()
            return

        def counted(writes: Mapping[int, int] | None) -> None:
            self._note_output(printed, writes)
            self._sample_or_wait()

        self._in_thread(lambda: self._sampler.writes(roots), counted)

    def _sample_or_wait(self) -> None:
        """Take a sample if there was no sign of progress for a part of the limit; else wait.

        That part is ``names.HANG_FIRST_LOOK``: a job that prints is never sampled.
        """
        waited = time.monotonic() - self._last_sign()
        first = self._context.limit * names.HANG_FIRST_LOOK
        if waited < first:
            self._before = None
            if self._spoke_at > self._moved_at:
                # The output ended the last stall: stacks of a later one are compared anew.
                self._history = StackHistory()
            self._tell_change()
            # Look soon while the job prints: the time of the main thread's last output is known
            # only as exactly as that.
            pause = max(_pause(self._context.limit), _TALKING_PAUSE)
            self._tick_in(min(first - waited, pause))
            return
        roots, before, printed = self._context.roots(), self._before, self._context.printed()

        def sampled(sample: Sample) -> None:
            if not self._context.searching():
                self._note_output(printed, sample.writes, sample)
            self._note_sample(sample)

        self._in_thread(lambda: self._sampler.sample(roots, before), sampled)

    def _note_output(
        self, printed: float, writes: Mapping[int, int] | None, sample: Sample | None = None
    ) -> None:
        """Count output as progress, unless no main thread wrote anything since the last call.

        A thread beside the main one may print a progress bar for ever. Without knowledge of the
        writes, the output counts.

        Args:
            printed: Time of the last output (monotonic clock).
            writes: As ``Sample.writes``.
            sample: The sample that was taken with them; None for none.
        """
        before, self._writes = self._writes, writes
        is_silent = before is not None and writes is not None and before == writes
        if sample is not None:
            for pid in sample.roots:
                process = sample.processes.get(pid)
                if process is None:
                    continue
                # Another thread or process may print for the work of such a rank.
                if not process.stack or waits_in_a_package(process.stack):
                    is_silent = False
        if not is_silent:
            self._spoke_at = max(self._spoke_at, printed)

    def _note_sample(self, sample: Sample) -> None:
        """Compare a sample with the one before, tell the leader of a change, plan the next tick.

        Adds to ``idle`` if neither the samples nor output showed progress.
        """
        if self._before is not None:
            is_searching = self._context.searching()
            if not is_searching and find_progress(self._before, sample, self._history):
                self._moved_at = sample.at
            elif self._spoke_at <= self._before.at:
                self.idle += sample.at - self._before.at
        self._before = sample
        self._history.add(sample)
        self._tell_change()
        self._tick_in(_pause(self._context.limit))

    def _last_sign(self) -> float:
        """Return the time of the last sign of progress (monotonic clock)."""
        return max(self._moved_at, self._spoke_at)

    def _tell_change(self) -> None:
        """Tell the leader if this host has become quiet, or makes progress again.

        A host is quiet after ``limit`` seconds without a sign of progress.
        """
        is_quiet = time.monotonic() - self._last_sign() >= self._context.limit
        if is_quiet == self._is_quiet:
            return
        self._is_quiet = is_quiet
        if self._context.leader:
            self._note_quiet(self._context.member, is_quiet)
        else:
            self._context.tell({"what": "quiet", "quiet": is_quiet})

    def _take_final_sample(self, round_: int) -> None:
        """Sample this host for a report, and send the leader the place of each rank.

        Returns at once: ``take`` runs in a thread, and ``answer`` later in the loop. Nothing is
        sent if there was progress meanwhile. The stacks are not sent, but kept for this host's
        report. The place of a rank is what it does, with its line of code (``Row``).

        Args:
            round_: Number of the leader's question, which the answer repeats.
        """
        roots, before, context = self._context.roots(), self._before, self._context
        history, printed = self._history, context.printed()

        # In a thread.
        def take() -> _FinalSample:
            sample = self._sampler.sample(roots, before)
            if before is not None and find_progress(before, sample, history):
                return _FinalSample(sample, sample.writes, moved=True)
            # First the records: py-spy holds a rank while it reads compiled code's stacks, and
            # the rank could not write its record meanwhile.
            ranks = [root.rank for root in roots]
            records = self._sampler.recorder.request_records(ranks, RECORD_SECONDS)
            native_stacks = self._sampler.native_stacks(roots)
            rows = self._sampler.rows(roots, context.host, sample, native_stacks)
            ras = self._sampler.ras()
            text = self._sampler.report(roots, sample, native_stacks)
            if ras:
                text += f"=== NCCL's RAS\n{ras}\n"
            writes = self._sampler.writes(roots)
            return _FinalSample(sample, writes, rows, records, remarks(ras), text)

        # In the loop's thread.
        def answer(final: _FinalSample) -> None:
            sample, self._stacks = final.sample, final.text
            self._note_output(printed, sample.writes, sample)
            # Again, for output while the stacks were read.
            self._note_output(context.printed(), final.writes, sample)
            self._before = sample
            if final.moved or self._last_sign() > sample.at:
                self._moved_at = max(self._moved_at, sample.at)
                self._tell_change()
                return
            records: dict[str, Json] = {
                "what": "records",
                "round": round_,
                "records": [*final.records],
                "ras": [*final.ras],
            }
            rows: dict[str, Json] = {
                "what": "rows",
                "round": round_,
                "rows": documents(final.rows),
            }
            if context.leader:
                self._note_answer(context.member, records)
                self._note_answer(context.member, rows)
                return
            if final.records or final.ras:
                context.tell(records)
            context.tell(rows)

        self._in_thread(take, answer)

    # --- the leader -------------------------------------------------------------------------------
    def _note_quiet(self, host: str, quiet: bool) -> None:
        """Note that a host, also this one, has become quiet or makes progress again.

        When all hosts are quiet, each is asked for the places of its ranks, once for each hang.
        """
        if not quiet:
            self._quiet_hosts.discard(host)
            # The hang is over, or was none: a later one is reported anew.
            self._is_round_open = self._reported = False
            return
        self._quiet_hosts.add(host)
        if self._is_round_open or self._reported:
            return
        if not self._quiet_hosts.issuperset(self._members()):
            return
        self._is_round_open = True
        self._round += 1
        self._rows = {}
        self._records = []
        self._ras = []
        self._context.tell({"what": "look", "round": self._round})
        self._take_final_sample(self._round)
        round_ = self._round
        self._after(_ANSWER_SECONDS, lambda: self._decide(round_))

    def _members(self) -> tuple[str, ...]:
        """Return all launchers that the job still has, this one first."""
        return (self._context.member, *self._context.others())

    def _note_answer(self, host: str, message: Mapping[str, Json]) -> None:
        """Keep an answer of a host, also of this one; report the hang when all have answered.

        Args:
            host: The host.
            message: With ``what``: ``records`` (flight recorder and RAS, may be left out), then
                ``rows`` (the places of its ranks). An answer to an earlier question is ignored.
        """
        if number(message.get("round")) != self._round:
            return
        if message.get("what") == "records":
            records = message.get("records")
            if isinstance(records, list):
                self._records += records
            # Any rank knows all of NCCL's communicators, so the first answer has everything.
            if not self._ras:
                self._ras = [one_line(line) for line in texts(message.get("ras"))]
            return
        self._rows[host] = read_documents(host, message.get("rows"))
        if self._is_round_open and set(self._rows) >= set(self._members()):
            self._decide(self._round)

    def _decide(self, round_: int) -> None:
        """Report the hang on every host, and end the job if a hang is to end it.

        Called when all hosts have answered, or when their time is over.

        Args:
            round_: Number of the question; a question that is over is ignored.
        """
        if not self._is_round_open or round_ != self._round:
            return
        self._is_round_open = False
        self._reported = True
        rows: list[Row] = []
        for host_rows in self._rows.values():
            rows += host_rows
        silent = sorted(set(self._members()) - set(self._rows))
        missing_calls = find_missing_calls(self._records)
        verdict = name_outliers(rows, silent, self._context.limit, missing_calls)
        lines = grid(rows, verdict.outliers, silent)
        ras = [f"NCCL's RAS: {line}" for line in self._ras]
        text = "\n".join(filter(None, (verdict.text, *ras, as_text(lines))))
        self._context.tell({"what": "verdict", "text": text})
        svg = ""
        if lines:
            heading = verdict.cause.partition(":")[0]
            svg = as_svg(lines, heading, self._context.redact)
        stacks_path = self._report(text, svg)
        if self._context.fails:
            # The first line of the text is the cause itself.
            details = [*verdict.text.splitlines()[1:], *ras]
            if stacks_path:
                details.insert(0, f"stacks of the ranks of each host: {stacks_path}")
            self._fail(verdict, details)

    def _fail(self, verdict: Diagnosis, details: Iterable[str]) -> None:
        """End the job with status ``names.EXIT_HANG``.

        The failure is that of the first outlier, or of this host and no rank.

        Args:
            verdict: The diagnosis.
            details: Lines below the cause.
        """
        host, rank = self._context.host, -1
        if verdict.outliers:
            host, rank = verdict.outliers[0].host, verdict.outliers[0].rank
        message = "\n".join(filter(None, details))
        self._context.end(
            Outcome(
                FAILED,
                names.EXIT_HANG,
                host,
                self._context.redact(verdict.cause),
                rank,
                message=shorten(self._context.redact(message)),
            )
        )

    # --- the report -------------------------------------------------------------------------------
    def _report(self, text: str, svg: str = "") -> str:
        """Log the leader's text, and write this host's stacks and the picture of the job.

        Args:
            text: The diagnosis.
            svg: The picture; ``""`` for none.

        Returns:
            The place of the stacks below SageMaker's base directory, with HOST for the host's name.
            ``""`` if no file was written: no stacks, too many reports, or an error, which is
            logged.
        """
        for line in text.splitlines():
            self._context.log(line)
        if not self._stacks or self._written_reports >= _MAX_REPORTS:
            return ""
        self._written_reports += 1
        stem = "hang"
        if self._written_reports > 1:
            stem += f"-{self._written_reports}"
        folder, host, member = self._context.output, self._context.host, self._context.member
        name = f"{stem}-{host}.txt"
        if member != host:
            name = f"{stem}-{host}-{member.replace(' ', '-')}.txt"
        content = self._context.redact(f"{text}\n\n{self._stacks}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content, encoding="utf-8", errors="replace")
            if svg:
                picture = folder / f"{stem}.svg"
                picture.write_text(svg, encoding="utf-8", errors="replace")
        except OSError as error:
            self._context.log(f"cannot write the stacks to {folder}: {error}")
            return ""
        self._context.log(f"stacks of this host's ranks: {folder / name}")
        return f"output/{names.HANG_DIRECTORY}/{stem}-HOST.txt"

    # --- helpers ----------------------------------------------------------------------------------
    def _tick_in(self, seconds: float) -> None:
        """Tick after so many seconds, in place of an earlier tick that has not come yet."""
        self._turn += 1
        turn = self._turn

        def tick() -> None:
            if turn == self._turn:
                self._tick()

        self._after(seconds, tick)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call an action after so many seconds, unless the detector has ended by then."""

        def act() -> None:
            if not self._is_over:
                action()

        self._loop.after(seconds, act)

    def _in_thread(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Work in a thread, then call ``then`` with the result, in the loop's thread.

        After work that failed or did not return, ``then`` is not called: the first time is logged,
        and the next tick is planned. So the detector runs for as long as the job.

        Args:
            work: Takes a sample; None is a result like any other.
            then: Takes the result; not called after ``end``.
        """

        def done(result: tuple[T] | None) -> None:
            if self._is_over:
                return
            if result is not None:
                self._unanswered = 0
                then(result[0])
                return
            self._unanswered += 1
            if self._unanswered == 1:
                self._context.log(
                    "a look for a hang shows nothing: it failed, or has not returned; looking again"
                )
            # Each sample that does not return keeps a thread, so they become rare. The exponent is
            # bounded, because a job may run for weeks.
            pause = _pause(self._context.limit) * 2 ** min(self._unanswered, _MAX_DOUBLINGS)
            self._tick_in(min(pause, _LONGEST_PAUSE_AFTER_FAILURES))

        # A tuple, because the loop reports work without a result as None.
        self._loop.look(lambda: (work(),), _NEVER_SECONDS, done)


def _pause(limit: float) -> float:
    """Return the seconds between two samples, for a limit in seconds: 0.5 to 30."""
    return min(max(limit / _SAMPLES, _SHORTEST_PAUSE), _LONGEST_PAUSE)
