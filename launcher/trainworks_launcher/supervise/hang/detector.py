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

_LONGEST_PAUSE_AFTER_NONE = 600.0
_FILES = 20
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_TALKING = 3.0
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
        self._moved_at = 0.0
        self._spoke_at = 0.0
        self._writes: Mapping[int, int] | None = None
        self._before: Sample | None = None
        self._history = StackHistory()
        self._quiet = False
        self._turn = 0
        self._unanswered = 0
        self._over = False
        self._stacks = ""
        self._written = 0
        self.idle = 0.0
        # Of the leader:
        self._quiet_hosts: set[str] = set()
        self._round = 0
        self._is_round_open = False
        self._reported = False
        self._rows: dict[str, list[Row]] = {}
        self._records: list[Json] = []
        self._ras: list[str] = []

    def begin(self, started: float) -> None:
        """Start to take samples. started: start of the program (monotonic clock)."""
        self._moved_at = started
        self._tick()

    def end(self) -> None:
        """Take no more samples: the job ends."""
        self._over = True

    def receive(self, host: str, message: Mapping[str, Json]) -> None:
        """Handle a message of the leader, or on the leader of another host."""
        kind = message.get("what")
        if self._over:
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
        """Count writes if something was printed, then take a sample if one is due."""
        roots, printed = self._context.roots(), self._context.printed()
        if printed <= self._spoke_at or self._context.searching():
            self._sample_or_wait()
            return

        def counted(writes: Mapping[int, int] | None) -> None:
            self._note_output(printed, writes)
            self._sample_or_wait()

        self._in_thread(lambda: self._sampler.writes(roots), counted)

    def _sample_or_wait(self) -> None:
        waited = time.monotonic() - self._last_sign()
        first = self._context.limit * names.HANG_FIRST_LOOK
        if waited < first:
            self._before = None
            if self._spoke_at > self._moved_at:
                self._history = StackHistory()  # a new stall
            self._judge()
            # Sample soon while the job prints: the time of the main thread's last output is
            # known only as exactly as that.
            self._tick_in(min(first - waited, max(_pause(self._context.limit), _TALKING)))
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
        """Count output as progress, unless no main thread wrote anything.

        A thread beside the main one may print a progress bar for ever. If unknown, assume
        progress.

        Args:
            printed: Time of the last output.
            writes: As ``Sample.writes``.
            sample: The sample that was taken with them, if one was.
        """
        before, self._writes = self._writes, writes
        is_silent = before is not None and writes is not None and before == writes
        if sample is not None:
            for pid in sample.roots:
                process = sample.processes.get(pid)
                if process is None:
                    continue
                if not process.stack or waits_in_a_package(process.stack):
                    is_silent = False
        if not is_silent:
            self._spoke_at = max(self._spoke_at, printed)

    def _note_sample(self, sample: Sample) -> None:
        if self._before is not None:
            is_searching = self._context.searching()
            if not is_searching and find_progress(self._before, sample, self._history):
                self._moved_at = sample.at
            elif self._spoke_at <= self._before.at:
                self.idle += sample.at - self._before.at
        self._before = sample
        self._history.add(sample)
        self._judge()
        self._tick_in(_pause(self._context.limit))

    def _last_sign(self) -> float:
        return max(self._moved_at, self._spoke_at)

    def _judge(self) -> None:
        """Tell the leader when this host becomes quiet, or moves again."""
        quiet = time.monotonic() - self._last_sign() >= self._context.limit
        if quiet == self._quiet:
            return
        self._quiet = quiet
        if self._context.leader:
            self._note_quiet(self._context.member, quiet)
        else:
            self._context.tell({"what": "quiet", "quiet": quiet})

    def _take_final_sample(self, round_: int) -> None:
        """Answer the leader: is there still no progress, and where is each rank?

        The answer has no stacks: they are kept for this host's report.
        """
        roots, before, context = self._context.roots(), self._before, self._context
        history, printed = self._history, context.printed()

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

        def taken(final: _FinalSample) -> None:
            sample, self._stacks = final.sample, final.text
            self._note_output(printed, sample.writes, sample)
            # Again, for output while the stacks were read.
            self._note_output(context.printed(), final.writes, sample)
            self._before = sample
            if final.moved or self._last_sign() > sample.at:
                self._moved_at = max(self._moved_at, sample.at)
                self._judge()
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

        self._in_thread(take, taken)

    # --- the leader -------------------------------------------------------------------------------
    def _note_quiet(self, host: str, quiet: bool) -> None:
        """Note that a host, also this one, has become quiet or moves again."""
        if not quiet:
            self._quiet_hosts.discard(host)
            self._is_round_open = self._reported = False
            return
        self._quiet_hosts.add(host)
        if self._is_round_open or self._reported or not self._quiet_hosts.issuperset(self._all()):
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

    def _all(self) -> tuple[str, ...]:
        return (self._context.member, *self._context.others())

    def _note_answer(self, host: str, message: Mapping[str, Json]) -> None:
        """Collect the answer of a host, also of this one, in a round."""
        if number(message.get("round")) != self._round:
            return
        if message.get("what") == "records":
            records = message.get("records")
            if isinstance(records, list):
                self._records += records
            if not self._ras:
                self._ras = [one_line(line) for line in texts(message.get("ras"))]
            return
        self._rows[host] = read_documents(host, message.get("rows"))
        if self._is_round_open and set(self._rows) >= set(self._all()):
            self._decide(self._round)

    def _decide(self, round_: int) -> None:
        """Report the hang, when all hosts have answered or their time is over."""
        if not self._is_round_open or round_ != self._round:
            return
        self._is_round_open = False
        self._reported = True
        rows: list[Row] = []
        for host_rows in self._rows.values():
            rows += host_rows
        silent = sorted(set(self._all()) - set(self._rows))
        verdict = name_outliers(
            rows, silent, self._context.limit, find_missing_calls(self._records)
        )
        lines = grid(rows, verdict.outliers, silent)
        ras = [f"NCCL's RAS: {line}" for line in self._ras]
        text = "\n".join(filter(None, (verdict.text, *ras, as_text(lines))))
        self._context.tell({"what": "verdict", "text": text})
        svg = ""
        if lines:
            heading = verdict.cause.partition(":")[0]
            svg = as_svg(lines, heading, self._context.redact)
        written = self._report(text, svg)
        if self._context.fails:
            details = [*verdict.text.splitlines()[1:], *ras]
            if written:
                details.insert(0, f"stacks of the ranks of each host: {written}")
            self._fail(verdict, details)

    def _fail(self, verdict: Diagnosis, details: Iterable[str]) -> None:
        """End the job: its failure is that of the first outlier, or of no rank."""
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

        Returns:
            The place of the stacks below SageMaker's base directory; "" if none were written.
        """
        for line in text.splitlines():
            self._context.log(line)
        if not self._stacks or self._written >= _FILES:
            return ""
        self._written += 1
        stem = "hang"
        if self._written > 1:
            stem += f"-{self._written}"
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
        """Tick after so many seconds; replaces an earlier call that has not ticked yet."""
        self._turn += 1
        turn = self._turn

        def tick() -> None:
            if turn == self._turn:
                self._tick()

        self._after(seconds, tick)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        def act() -> None:
            if not self._over:
                action()

        self._loop.after(seconds, act)

    def _in_thread(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Work in a thread, then call ``then`` with the result, in the loop's thread.

        Work that fails or does not return shows nothing, and the next sample is taken as after
        any other: the detector runs for as long as the job.
        """

        def done(result: tuple[T] | None) -> None:
            if self._over:
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
            # Each sample that does not return keeps a thread, so they become rare.
            pause = _pause(self._context.limit) * 2 ** min(self._unanswered, 10)
            self._tick_in(min(pause, _LONGEST_PAUSE_AFTER_NONE))

        self._loop.look(lambda: (work(),), _NEVER_SECONDS, done)


def _pause(limit: float) -> float:
    """Return the seconds between two samples, for a limit of so many seconds."""
    return min(max(limit / _SAMPLES, _SHORTEST_PAUSE), _LONGEST_PAUSE)
