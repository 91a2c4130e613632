"""Looks at this host now and then, agrees with the other hosts that the job hangs, and reports.

A host is quiet when nothing on it made progress for the limit. The leader hears when a host becomes
quiet or moves again. When all are quiet it asks each for a last look; if that shows no progress
either, it names the rank that differs and tells every host. All of it happens once for a stall:
again only after some host has made progress.

=======  =========  ===========================================================================
message  direction  meaning
=======  =========  ===========================================================================
quiet    to leader  ``quiet``: whether nothing on this host has made progress for the limit
look     to host    look once more; ``round`` comes back in the answer
records  to leader  what torch's flight recorder has of each rank, and NCCL's RAS of all; comes
                    before ``rows``
rows     to leader  nothing has moved: where each rank is
verdict  to host    the job hangs: write the stacks down; ``text`` for the log
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
from trainworks_launcher.supervise.hang.missing_collectives import lacking
from trainworks_launcher.supervise.hang.nccl import remarks
from trainworks_launcher.supervise.hang.outlier_rank import (
    Row,
    Verdict,
    documents,
    name_the_odd,
    read_documents,
    waits_in_a_package,
)
from trainworks_launcher.supervise.hang.progress import Look, Seen, sign_of_life
from trainworks_launcher.supervise.hang.rank_grid import as_svg, as_text, grid
from trainworks_launcher.supervise.hang.sampling import LONGEST_SECONDS, RECORD_SECONDS, Eyes, Root
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome, shorten

_ANSWER_SECONDS = LONGEST_SECONDS + 2.0
"""How long the leader waits for what the other hosts have seen.

With the time that a message may take.
"""

_NEVER_SECONDS = 2 * LONGEST_SECONDS
"""After this a look does not return any more: the longest one has as many seconds as
LONGEST_SECONDS. It is left alone, and another one is made.
"""

_LONGEST_PAUSE_AFTER_NONE = 600.0
_FILES = 20
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_TALKING = 3.0
_LOOKS = 20

T = TypeVar("T")


class _Last(NamedTuple):
    """What a last look at this host shows: see ``Watch._look_again``. wrote: as
    in ``Look``. text: for the file.
    """

    seen: Look
    wrote: Mapping[int, int] | None
    rows: Sequence[Row] = ()
    records: Sequence[Json] = ()
    ras: Sequence[str] = ()
    text: str = ""
    moved: bool = False


class Surroundings(NamedTuple):
    """What the watch sees and does.

    Attributes:
        host: This host, for people.
        member: This launcher's name on the control channel: a host may have several.
        leader: Whether it is the one that decides.
        limit: Seconds without progress.
        fails: Whether a hang ends the job.
        output: Directory for the stacks.
        roots: Returns what runs on this host: the ranks, or the only program; () if nothing does.
        printed: Returns when something was printed last (monotonic clock).
        others: Returns the other hosts of the job, on the leader.
        tell: Sends a message: the leader to every host, another host to the leader.
        end: Ends the job.
        log: Prints a line.
        mask: Hides secrets in a text.
        searching: Returns whether a rank of this host has not found the others
            yet: what it prints is not progress.
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
    mask: Callable[[str], str]
    searching: Callable[[], bool] = lambda: False


class Watch:
    """The watch of one host.

    Every method runs in the loop's thread; looks are in a thread of their own.

    Attributes:
        idle: Seconds between two looks that showed no sign of progress, in all.
    """

    def __init__(self, loop: Loop, eyes: Eyes, around: Surroundings) -> None:
        """Nothing is looked at before ``begin``."""
        self._loop = loop
        self._eyes = eyes
        self._around = around
        self._moved_at = 0.0
        self._spoke_at = 0.0
        self._wrote: Mapping[int, int] | None = None
        self._before: Look | None = None
        self._seen = Seen()
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
        self._asking = False
        self._reported = False
        self._rows: dict[str, list[Row]] = {}
        self._records: list[Json] = []
        self._ras: list[str] = []

    def begin(self, started: float) -> None:
        """Look from now on. started: when the program was started (monotonic clock)."""
        self._moved_at = started
        self._tick()

    def end(self) -> None:
        """The job ends: look no more."""
        self._over = True

    def told(self, host: str, message: Mapping[str, Json]) -> None:
        """Another host says something; on a host that is not the leader it is the leader."""
        what = message.get("what")
        if self._over:
            return
        if what == "look" and not self._around.leader:
            self._look_again(number(message.get("round")))
        elif what == "verdict" and not self._around.leader:
            self._report(words(message.get("text")))
        elif what == "quiet" and self._around.leader:
            self._heard(host, message.get("quiet") is True)
        elif self._around.leader:
            self._answer(host, message)

    # --- this host's looks ------------------------------------------------------------------------
    def _tick(self) -> None:
        """Look, unless something was printed a short while ago."""
        roots, printed = self._around.roots(), self._around.printed()
        if printed <= self._spoke_at or self._around.searching():
            self._look_or_wait()
            return

        def judged(wrote: Mapping[int, int] | None) -> None:
            self._hear(printed, wrote)
            self._look_or_wait()

        self._in_thread(lambda: self._eyes.wrote(roots), judged)

    def _look_or_wait(self) -> None:
        waited = time.monotonic() - self._last_sign()
        first = self._around.limit * names.HANG_FIRST_LOOK
        if waited < first:
            self._before = None
            if self._spoke_at > self._moved_at:
                self._seen = Seen()  # a new stall
            self._judge()
            # What goes on to print is asked again soon: the last word of a main
            # thread is not known more exactly.
            self._tick_in(min(first - waited, max(_pause(self._around.limit), _TALKING)))
            return
        roots, before, printed = self._around.roots(), self._before, self._around.printed()

        def looked(look: Look) -> None:
            if not self._around.searching():
                self._hear(printed, look.wrote, look)
            self._looked(look)

        self._in_thread(lambda: self._eyes.look(roots, before), looked)

    def _hear(
        self, printed: float, wrote: Mapping[int, int] | None, look: Look | None = None
    ) -> None:
        """Output is a sign, unless no main thread wrote anything: a thread
        beside it may print a bar for ever.

        What cannot be told speaks for the job.
        """
        before, self._wrote = self._wrote, wrote
        is_silent = before is not None and wrote is not None and before == wrote
        if look is not None:
            for pid in look.roots:
                process = look.processes.get(pid)
                if process is None:
                    continue
                if not process.stack or waits_in_a_package(process.stack):
                    is_silent = False
        if not is_silent:
            self._spoke_at = max(self._spoke_at, printed)

    def _looked(self, look: Look) -> None:
        if self._before is not None:
            if not self._around.searching() and sign_of_life(self._before, look, self._seen):
                self._moved_at = look.at
            elif self._spoke_at <= self._before.at:
                self.idle += look.at - self._before.at
        self._before = look
        self._seen.add(look)
        self._judge()
        self._tick_in(_pause(self._around.limit))

    def _last_sign(self) -> float:
        return max(self._moved_at, self._spoke_at)

    def _judge(self) -> None:
        """Tell the leader whether this host is quiet, where that is news."""
        quiet = time.monotonic() - self._last_sign() >= self._around.limit
        if quiet == self._quiet:
            return
        self._quiet = quiet
        if self._around.leader:
            self._heard(self._around.member, quiet)
        else:
            self._around.tell({"what": "quiet", "quiet": quiet})

    def _look_again(self, round_: int) -> None:
        """The leader asks: is it so, and where is each rank? The stacks are
        read while the answer is on its way.
        """
        roots, before, around, known = self._around.roots(), self._before, self._around, self._seen
        printed = around.printed()

        def look() -> _Last:
            seen = self._eyes.look(roots, before)
            moved = sign_of_life(before, seen, known) if before is not None else ""
            if moved:
                return _Last(seen, seen.wrote, moved=True)
            # Before the stacks of compiled code, for which a rank is held: it
            # could not write meanwhile.
            records = self._eyes.recorder.of_ranks([root.rank for root in roots], RECORD_SECONDS)
            natives = self._eyes.natives(roots)
            rows = self._eyes.rows(roots, around.host, seen, natives)
            ras = self._eyes.ras()
            text = self._eyes.report(roots, seen, natives)
            if ras:
                text += f"=== NCCL's RAS\n{ras}\n"
            return _Last(seen, self._eyes.wrote(roots), rows, records, remarks(ras), text)

        def looked(last: _Last) -> None:
            seen, self._stacks = last.seen, last.text
            self._hear(printed, seen.wrote, seen)
            self._hear(around.printed(), last.wrote, seen)  # while the stacks were read
            self._before = seen
            if last.moved or self._last_sign() > seen.at:
                self._moved_at = max(self._moved_at, seen.at)
                self._judge()
                return
            records: dict[str, Json] = {
                "what": "records",
                "round": round_,
                "records": [*last.records],
                "ras": [*last.ras],
            }
            rows: dict[str, Json] = {
                "what": "rows",
                "round": round_,
                "rows": documents(last.rows),
            }
            if around.leader:
                self._answer(around.member, records)
                self._answer(around.member, rows)
                return
            if last.records or last.ras:
                around.tell(records)
            around.tell(rows)

        self._in_thread(look, looked)

    # --- the leader -------------------------------------------------------------------------------
    def _heard(self, host: str, quiet: bool) -> None:
        """A host, also this one, has become quiet or moves again."""
        if not quiet:
            self._quiet_hosts.discard(host)
            self._asking = self._reported = False
            return
        self._quiet_hosts.add(host)
        if self._asking or self._reported or not self._quiet_hosts.issuperset(self._all()):
            return
        self._asking = True
        self._round += 1
        self._rows = {}
        self._records = []
        self._ras = []
        self._around.tell({"what": "look", "round": self._round})
        self._look_again(self._round)
        round_ = self._round
        self._after(_ANSWER_SECONDS, lambda: self._decide(round_))

    def _all(self) -> tuple[str, ...]:
        return (self._around.member, *self._around.others())

    def _answer(self, host: str, message: Mapping[str, Json]) -> None:
        """A host, also this one, answers the question of a round."""
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
        if self._asking and set(self._rows) >= set(self._all()):
            self._decide(self._round)

    def _decide(self, round_: int) -> None:
        """All have answered, or have had the time to."""
        if not self._asking or round_ != self._round:
            return
        self._asking = False
        self._reported = True
        rows: list[Row] = []
        for host_rows in self._rows.values():
            rows += host_rows
        silent = sorted(set(self._all()) - set(self._rows))
        verdict = name_the_odd(rows, silent, self._around.limit, lacking(self._records))
        drawn = grid(rows, verdict.odd, silent)
        ras = [f"NCCL's RAS: {line}" for line in self._ras]
        text = "\n".join(filter(None, (verdict.text, *ras, as_text(drawn))))
        self._around.tell({"what": "verdict", "text": text})
        heading = verdict.cause.partition(":")[0]
        svg = as_svg(drawn, heading, self._around.mask) if drawn else ""
        written = self._report(text, svg)
        if self._around.fails:
            details = [*verdict.text.splitlines()[1:], *ras]
            if written:
                details.insert(0, f"stacks of the ranks of each host: {written}")
            self._fail(verdict, details)

    def _fail(self, verdict: Verdict, details: Iterable[str]) -> None:
        """End the job: its failure is that of the first odd rank, or of no rank."""
        host, rank = self._around.host, -1
        if verdict.odd:
            host, rank = verdict.odd[0].host, verdict.odd[0].rank
        message = "\n".join(filter(None, details))
        self._around.end(
            Outcome(
                FAILED,
                names.EXIT_HANG,
                host,
                self._around.mask(verdict.cause),
                rank,
                message=shorten(self._around.mask(message)),
            )
        )

    # --- the report -------------------------------------------------------------------------------
    def _report(self, said: str, svg: str = "") -> str:
        """Print what the leader found, write this host's stacks and the picture of the whole job.

        Return the place of the stacks below the base.
        """
        for line in said.splitlines():
            self._around.log(line)
        if not self._stacks or self._written >= _FILES:
            return ""
        self._written += 1
        stem = "hang"
        if self._written > 1:
            stem += f"-{self._written}"
        folder, host, member = self._around.output, self._around.host, self._around.member
        name = f"{stem}-{host}.txt"
        if member != host:
            name = f"{stem}-{host}-{member.replace(' ', '-')}.txt"
        text = self._around.mask(f"{said}\n\n{self._stacks}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
            if svg:
                picture = folder / f"{stem}.svg"
                picture.write_text(svg, encoding="utf-8", errors="replace")
        except OSError as error:
            self._around.log(f"cannot write the stacks to {folder}: {error}")
            return ""
        self._around.log(f"stacks of this host's ranks: {folder / name}")
        return f"output/{names.HANG_DIRECTORY}/{stem}-HOST.txt"

    # --- helpers ----------------------------------------------------------------------------------
    def _tick_in(self, seconds: float) -> None:
        """Look next after so many seconds, and not before."""
        self._turn += 1
        turn = self._turn
        self._after(seconds, lambda: self._tick() if turn == self._turn else None)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._loop.after(seconds, lambda: None if self._over else action())

    def _in_thread(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do what may take a while in a thread, and go on in the loop's.

        A look that fails or does not return shows nothing, and the next one is made as after any
        other: the watch goes on for as long as the job.
        """

        def done(found: tuple[T] | None) -> None:
            if self._over:
                return
            if found is not None:
                self._unanswered = 0
                then(found[0])
                return
            self._unanswered += 1
            if self._unanswered == 1:
                self._around.log(
                    "a look for a hang shows nothing: it failed, or has not returned; looking again"
                )
            # Each look that does not return keeps a thread: there are fewer and fewer of them.
            pause = _pause(self._around.limit) * 2 ** min(self._unanswered, 10)
            self._tick_in(min(pause, _LONGEST_PAUSE_AFTER_NONE))

        self._loop.look(lambda: (work(),), _NEVER_SECONDS, done)


def _pause(limit: float) -> float:
    """Return the seconds between two looks for a silence of so many seconds."""
    return min(max(limit / _LOOKS, _SHORTEST_PAUSE), _LONGEST_PAUSE)
