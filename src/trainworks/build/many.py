"""Many targets in one run. Each is a process of its own: one that fails, or is stopped, takes no other with it.

What two builds have in common is not said to the engines twice: targets that share stages follow each other, and how
two builds at once share a stage depends on the engine (``Engine.merges_running_steps``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, Final, Literal

import trainworks
from trainworks.engine.processes import GRACE, Child, clean, uninterrupted
from trainworks.errors import BuildError, ImageTestError, InterruptionError, LockError, OutputError, TrainworksError
from trainworks.facts.rows import Facts, TargetRow
from trainworks.inspect.listing import sorted_rows
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.names import unknown
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.render.dockerfile import Rendering, render
from trainworks.render.forecast import stage_keys
from trainworks.terminal.output import put, say
from trainworks.terminal.progress import DISPLAY, RELAY, Task
from trainworks.terminal.words import clock, megabytes

STOP_SECONDS: Final = 3 * GRACE
"""How long a target's process has to stop what it started: its engine's client may take ``GRACE`` seconds itself."""

PACKAGES: Final = os.pathsep.join(
    dict.fromkeys((str(Path(trainworks.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)))
)
"""Where the processes find this very package."""

Outcome = Literal["done", "unchanged", "failed", "skipped", "stopped", "not started"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One target's process.

    Attributes:
        name: The target's.
        argv: Program and arguments; it writes its result to stdout as JSON, its progress to stderr.
        stages: Keys of the stages that it builds or takes from the cache (``render.forecast.stage_keys``), in order.
    """

    name: str
    argv: tuple[str, ...]
    stages: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a target ended.

    Attributes:
        target: Its name.
        outcome: ``unchanged``: the engine had its image already. ``skipped``: it cannot be built yet, see ``cause``.
        seconds: From the start of its process to its end; 0 where none was started.
        size: Bytes of the image, uncompressed; 0 where none is known.
        cause: The first line of what went wrong.
        exit_status: That of the target alone.
        report: What its process wrote to stdout.
    """

    target: str
    outcome: Outcome
    seconds: float = 0
    size: int = 0
    cause: str = ""
    exit_status: int = 0
    report: Any = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A target that was asked for: its plan and rendering, or the error that they end with."""

    name: str
    request: Request
    plan: ImagePlan | None = None
    rendering: Rendering | None = None
    error: TrainworksError | None = None


# Choosing and ordering.


def choose_rows(patterns: Sequence[str], facts: Facts) -> list[TargetRow]:
    """Return the rows whose names fit any of these patterns (``*`` and ``?``), all of them where there is none.

    Raises:
        UnknownNameError: A pattern fits no target.
    """
    rows = {facts.name_of(row): row for row in sorted_rows(facts)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in rows):
            raise unknown("target for --only", pattern, rows, more="`*` stands for anything in a name")
    return [
        row for name, row in rows.items() if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def chosen_targets(rows: Sequence[TargetRow], facts: Facts, like: Request | None = None) -> list[Chosen]:
    """Plan and render each row; what goes wrong with one target stays with it."""
    found = []
    for row in rows:
        chosen = Chosen(name=facts.name_of(row), request=request_for(row, facts, like))
        try:
            plan = make_plan(chosen.request, facts)
            found.append(replace(chosen, plan=plan, rendering=render(plan, facts)))
        except TrainworksError as error:
            found.append(replace(chosen, error=error))
    return found


def request_words(request: Request) -> tuple[str, ...]:
    """Return the words of a command line that ask for this, without its optional components."""
    words = {
        "--framework": request.framework,
        "--cuda": request.cuda,
        "--framework-version": request.version,
        "--python": request.python,
        "--sources": request.sources,
    }
    return tuple(word for flag, value in words.items() if value for word in (flag, value))


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs so that those which have the most stages in common follow each other.

    A stage stands on others: what two targets share is the beginning of their lists, as words share their first
    letters. They are sorted like words, whose letters are the stages in the order in which they first appear.
    """
    letters = {stage: number for number, stage in enumerate(dict.fromkeys(s for job in jobs for s in job.stages))}
    return sorted(jobs, key=lambda job: [letters[stage] for stage in job.stages])


def next_job(waiting: Sequence[Job], running: Collection[Job], built: Set[str], *, merges: bool) -> Job | None:
    """Return the job to start now; ``None``: better wait until one that runs has ended.

    Args:
        waiting: In the order in which they should run.
        running: Those that run.
        built: Stages that are in the engine's cache.
        merges: Whether the engine runs a step once that two builds want at the same time. Where it does not, a job
            waits for those that are building a stage which it shares: twice the same work is no gain.
    """
    if merges or not running:
        return waiting[0] if waiting else None
    in_work = {stage for job in running for stage in job.stages} - built
    return next((job for job in waiting if in_work.isdisjoint(job.stages)), None)


# Running.


class _Stopping(Exception):  # noqa: N818 - no error: it tells a thread that the user has had enough
    """Nothing is started any more."""


class Runner:
    """Runs jobs, so many at once, and stops all of them together."""

    def __init__(
        self, report: Callable[[str, str], None], moved: Callable[[str, str], None] = lambda _name, _state: None
    ) -> None:
        """Take what gets each line of progress, and each state in between: the target's name and the text."""
        self._report = report
        self._moved = moved
        self._lock = threading.Lock()
        self._children: dict[str, Child] = {}
        self._stopping = False
        self._ended: queue.SimpleQueue[tuple[Job, Result]] = queue.SimpleQueue()

    def run(self, jobs: Sequence[Job], at_once: int, *, merges: bool, take: Callable[[Result], None]) -> None:
        """Run all jobs and hand over each result as it comes.

        Ctrl-C stops every job, hands over how each of them ended, and is raised again then.
        """
        waiting, running, built = list(jobs), dict[str, Job](), set[str]()
        try:
            while waiting or running:
                while len(running) < at_once and (job := next_job(waiting, running.values(), built, merges=merges)):
                    waiting.remove(job)
                    running[job.name] = job
                    threading.Thread(target=self._work, args=(job,), daemon=True).start()
                job, result = self._ended.get()
                del running[job.name]
                if not result.exit_status:
                    built.update(job.stages)
                take(result)
        except BaseException:
            with uninterrupted():
                self._stop()
                for _ in range(len(running)):
                    with contextlib.suppress(queue.Empty):
                        _, result = self._ended.get(timeout=STOP_SECONDS)
                        take(result)
            raise

    def _work(self, job: Job) -> None:
        started = time.monotonic()
        try:
            status, output, last = self._follow(job)
            result = result_of(job.name, status, output, last, time.monotonic() - started)
        except _Stopping:
            result = Result(target=job.name, outcome="not started")
        except OSError as error:
            result = Result(target=job.name, outcome="failed", cause=f"{job.argv[0]}: {error.strerror}", exit_status=1)
        if self._stopping and result.outcome == "failed":
            result = replace(result, outcome="stopped", cause="")
        self._ended.put((job, result))

    def _follow(self, job: Job) -> tuple[int, bytes, str]:
        """Run a job to its end; returns exit status, stdout, and the last line of stderr that says something."""
        environment = {**os.environ, "PYTHONPATH": PACKAGES, RELAY: "1"}
        child = Child(job.argv, environment=environment, grace=STOP_SECONDS)
        with contextlib.ExitStack() as stack:
            with self._lock:
                if self._stopping:
                    raise _Stopping
                stack.enter_context(child)
                self._children[job.name] = child
            stack.callback(self._children.pop, job.name, None)
            output: list[bytes] = []
            pipe, errors = stack.enter_context(child.output), child.errors
            assert errors is not None
            reader = threading.Thread(target=lambda: output.append(pipe.read()), daemon=True)
            reader.start()
            last = ""
            self._moved(job.name, "begun")
            with errors:
                for text, is_line in texts_of(errors):
                    if is_line:
                        last = text
                    (self._report if is_line else self._moved)(job.name, text)
            status = child.wait()
            reader.join()
        assert status is not None
        return status, b"".join(output), last

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
            children = list(self._children.values())
        # Side by side: each may take as long as it is allowed to.
        threads = [threading.Thread(target=child.stop) for child in children]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def texts_of(pipe: IO[bytes]) -> Iterator[tuple[str, bool]]:
    """Yield what a process of ours says, and whether it is a line: else the next text replaces it (``RELAY``)."""
    rest = b""
    while chunk := os.read(pipe.fileno(), 1 << 16):
        *whole, rest = re.split(rb"(?<=[\r\n])", rest + chunk)
        for raw in whole:
            if text := clean(raw.rstrip(b"\r\n")):
                yield text, raw.endswith(b"\n")
    if text := clean(rest):
        yield text, True


def result_of(name: str, status: int, output: bytes, last: str, seconds: float) -> Result:
    """Return how a target ended, from what its process wrote.

    Args:
        name: The target's.
        status: The process's exit status.
        output: What it wrote to stdout: JSON, unless it fell over.
        last: The last line that it wrote to stderr.
        seconds: How long it ran.
    """
    try:
        report: Any = json.loads(output)
    except ValueError:
        report = None
    known: Mapping[str, Any] = report if isinstance(report, dict) else {}
    outcome: Outcome = "failed" if status else "unchanged" if known.get("unchanged") else "done"
    return Result(
        target=name,
        outcome=outcome,
        seconds=round(seconds, 1),
        size=int(known.get("size") or 0),
        cause=_cause(known, last, status) if status else "",
        exit_status=status,
        report=report,
    )


def _cause(report: Mapping[str, Any], last: str, status: int) -> str:
    broken = [check for check in report.get("checks", ()) if not check.get("passed", True)]
    if broken:
        first = f"{broken[0]['component']}: {broken[0]['title']}"
        return f"{len(broken)} of {len(report['checks'])} checks failed, first {first}"
    said = str(report.get("message") or last or f"ended with {status}")
    return said.splitlines()[0]


# Showing.


class Block:
    """What a person sees meanwhile: in a log all that the targets say, on a terminal one row for each that runs."""

    def __init__(self, *, verbose: bool) -> None:
        """Start with nothing running; ``verbose`` shows all that they say on a terminal too."""
        self._quiet = DISPLAY.live and not verbose
        self._running: dict[str, tuple[float, str]] = {}
        self._lines: dict[str, deque[str]] = {}
        self._counts: Counter[str] = Counter()
        self._task: Task | None = None

    @contextlib.contextmanager
    def shown(self, ended: Sequence[Result], total: int) -> Iterator[None]:
        """Show it for the time of the ``with`` block, with targets that have ended before."""
        with DISPLAY.task("running", total, "targets", log=False, rows=self._rows) as self._task:
            for result in ended:
                self._count(result)
            yield

    def said(self, target: str, line: str) -> None:
        """Take a line."""
        self._lines.setdefault(target, deque(maxlen=TAIL)).append(line)
        if self._quiet:
            self.moved(target, line.strip())
        else:
            say(f"{target}: {line}")

    def moved(self, target: str, state: str) -> None:
        """Take what a target does now."""
        began, _ = self._running.get(target, (DISPLAY.clock(), ""))
        self._running[target] = (began, state)

    def ended(self, result: Result) -> None:
        """Say how a target ended; of one that failed also what it said last."""
        self._running.pop(result.target, None)
        for line in self._lines.pop(result.target, ()) if self._quiet and result.exit_status else ():
            say(f"{result.target}: {line}")
        say(f"{result.target}: {result.outcome}{f': {result.cause}' if result.cause else ''}")
        self._count(result)

    def _count(self, result: Result) -> None:
        self._counts[result.outcome] += 1
        if self._task is not None:
            self._task.note = said_counts(self._counts)
            self._task.advance()

    def _rows(self) -> list[str]:
        now = DISPLAY.clock()
        return [f"  {clock(now - began):>7}  {name}  {state}" for name, (began, state) in tuple(self._running.items())]


TAIL: Final = 20
"""Lines of a failed target that a terminal shows."""


# Summing up.


def worst(results: Sequence[Result]) -> int:
    """Return the exit status of a run: that of the target that got least far.

    An image that breaks a promise was built; a failed build was begun; any other error ends a target before that.
    """
    order = {0: 0, ImageTestError.exit_status: 1, BuildError.exit_status: 2}
    statuses = [result.exit_status for result in results]
    return max(statuses, key=lambda status: (order.get(status, 3), status), default=0)


def as_text(results: Sequence[Result], seconds: float, at_once: int) -> str:
    """Return the table that ends a run."""
    rows = [("target", "outcome", "seconds", "size", "cause")]
    for result in results:
        took = f"{result.seconds:.1f}" if result.seconds else "-"
        rows.append((result.target, result.outcome, took, megabytes(result.size) if result.size else "-", result.cause))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join([*map(str.ljust, row[:4], widths), row[4]]).rstrip() for row in rows]
    said = said_counts(Counter(result.outcome for result in results))
    lines.append(f"{len(results)} targets in {seconds:.1f} s, {at_once} at once: {said}")
    return "\n".join(lines) + "\n"


def said_counts(counts: Mapping[str, int]) -> str:
    """Return how many targets ended in which way."""
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts.get(outcome))


OUTCOMES: Final = ("done", "unchanged", "skipped", "failed", "stopped", "not started")


def as_json(results: Sequence[Result], seconds: float, at_once: int) -> str:
    """Return the same for programs."""
    content = {
        "seconds": round(seconds, 1),
        "at_once": at_once,
        "exit_status": worst(results),
        "targets": [asdict(result) for result in results],
    }
    return json.dumps(content, indent=2) + "\n"


# The command.


def words_for_each(words: Sequence[str]) -> list[str]:
    """Return a command line without what only the run as a whole reads: the rest goes on to each target's process."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--all", "--bake"):
        parser.add_argument(flag, action="store_true")
    for flag in ("--only", "--format", "--output", "--junit", "--engine", "--root"):
        parser.add_argument(flag)
    parser.add_argument("-j", "--jobs")
    return parser.parse_known_args(words)[1]


def build_many(options: argparse.Namespace, facts: Facts, root: Path) -> int:
    """Do ``--until`` for each of the targets that were asked for.

    Args:
        options: The command line, parsed; ``words`` is the line itself.
        facts: The rows.
        root: The checkout.

    Returns:
        The exit status: see ``worst``.

    Raises:
        UnknownNameError: A pattern fits no target.
        EngineUnavailableError: No engine answers; asked once, before anything is started.
        InterruptionError: Ctrl-C or SIGTERM came; how each target ended until then has been written.
    """
    like = Request(
        framework="",
        cuda="",
        with_components=tuple(options.with_components),
        without_components=tuple(options.without_components),
    )
    builds = options.until in ("build", "test")
    targets = chosen_targets(choose_rows(options.only, facts), facts, like)
    jobs, results = _split(targets, options, words_for_each(options.words), root, builds=builds)
    merges = True
    if builds and jobs:
        from trainworks.engine import choose

        engine = choose(options.engine, report=say)
        merges = engine.merges_running_steps
        # All targets on the same one, whatever happens to an engine in between.
        jobs = [replace(job, argv=(*job.argv, "--engine", engine.name)) for job in jobs]
    _make_folders(options)
    started = time.monotonic()
    order = {target.name: number for number, target in enumerate(targets)}
    block = Block(verbose=options.verbose)

    def take(result: Result) -> None:
        results.append(result)
        block.ended(result)

    def finish() -> None:
        ended = {result.target for result in results}
        results.extend(Result(target=job.name, outcome="not started") for job in jobs if job.name not in ended)
        results.sort(key=lambda result: order[result.target])
        seconds = time.monotonic() - started
        put((as_json if options.format == "json" else as_text)(results, seconds, options.jobs))

    try:
        with block.shown(results, len(targets)):
            Runner(block.said, block.moved).run(in_order(jobs), options.jobs, merges=merges, take=take)
    except KeyboardInterrupt:
        with uninterrupted():
            finish()
        raise InterruptionError(reported=True) from None
    finish()
    return worst(results)


def _split(
    targets: Sequence[Chosen], options: argparse.Namespace, words: Sequence[str], root: Path, *, builds: bool
) -> tuple[list[Job], list[Result]]:
    """Return the jobs to run, and the results of targets that have none."""
    jobs: list[Job] = []
    results: list[Result] = []
    for target in targets:
        if target.error is not None or target.plan is None or target.rendering is None:
            message = target.error.message.splitlines()[0] if target.error else ""
            status = target.error.exit_status if target.error else 1
            results.append(Result(target=target.name, outcome="failed", cause=message, exit_status=status))
        elif builds and target.plan.unlocked:
            cause = f"{len(target.plan.unlocked)} inputs not locked, first {target.plan.unlocked[0]}"
            outcome: Outcome = "failed" if options.strict else "skipped"
            status = LockError.exit_status if options.strict else 0
            results.append(Result(target=target.name, outcome=outcome, cause=cause, exit_status=status))
        else:
            jobs.append(
                Job(
                    name=target.name,
                    argv=(
                        *(sys.executable, "-P", "-m", "trainworks", *request_words(target.request)),
                        *(*words, "--format", "json", "--root", str(root)),
                        *(("--output", str(options.output / target.name)) if options.output else ()),
                        *(("--junit", str(options.junit / f"{target.name}.xml")) if options.junit else ()),
                    ),
                    stages=stage_keys(target.plan, target.rendering),
                )
            )
    return jobs, results


def _make_folders(options: argparse.Namespace) -> None:
    for folder in (options.output, options.junit):
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"{folder}: {error.strerror}", hint="with many targets it is a folder, with one entry for each target"
            ) from error
