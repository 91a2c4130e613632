"""Builds many targets in one run, a thread for each; a failed target does not stop the others.

A thread waits for its engine nearly all the time. Threads share the engine's store and its cache of
layers; each has an engine client of its own, and only image tests take turns (pytest keeps state of
its own in the process).
"""

from __future__ import annotations

import json
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from trainworks.build.image import ImageResult
from trainworks.build.options import BuildOrder
from trainworks.build.run import run_target
from trainworks.build.session import BuildSession
from trainworks.engine import choose
from trainworks.engine.subprocesses import Interruption, uninterrupted
from trainworks.errors import (
    BuildError,
    ImageTestError,
    InterruptionError,
    LockError,
    OutputError,
    TrainworksError,
)
from trainworks.facts.rows import Facts, TargetRow
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.terminal.formatting import describe, megabytes
from trainworks.terminal.output import labelled, say
from trainworks.terminal.progress import DISPLAY

Outcome = Literal["done", "unchanged", "failed", "skipped", "stopped", "not started"]

OUTCOMES: Final = ("done", "unchanged", "skipped", "failed", "stopped", "not started")
"""All outcomes, in the order of a summary."""


# Choosing.


@dataclass(frozen=True, kw_only=True)
class PlannedTarget:
    """A target of a run: its plan, or the error of planning."""

    name: str
    request: Request
    plan: ImagePlan | None = None
    error: TrainworksError | None = None


def plan_targets(
    rows: Sequence[TargetRow], facts: Facts, like: Request | None = None
) -> list[PlannedTarget]:
    """Plan each row; an error of planning is not raised, but stays with its target.

    Args:
        rows: The rows of the targets.
        facts: All rows.
        like: A request with the optional components and wheels for all of them.
    """
    targets = []
    for row in rows:
        target = PlannedTarget(name=facts.name_of(row), request=request_for(row, facts, like))
        try:
            targets.append(replace(target, plan=make_plan(target.request, facts)))
        except TrainworksError as error:
            targets.append(replace(target, error=error))
    return targets


# Building.


@dataclass(frozen=True, kw_only=True)
class TargetSummary:
    """The outcome of a target.

    Attributes:
        target: The target's name.
        outcome: ``unchanged``: the engine had its image already. ``skipped``:
            the target cannot be built yet, see ``cause``.
        seconds: The duration; 0 if the target was not started.
        size: Bytes of the image, uncompressed; 0 without an image.
        cause: The first line of the failure.
        exit_status: The exit status of the target alone.
        report: The target's own result, or its error.
    """

    target: str
    outcome: Outcome
    seconds: float = 0
    size: int = 0
    cause: str = ""
    exit_status: int = 0
    report: Any = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The outcome of a run.

    Attributes:
        targets: Every target: those that were started, then the others.
        seconds: The duration.
        at_once: The number of parallel targets.
        interrupted: Whether Ctrl-C or SIGTERM ended the run.
    """

    targets: tuple[TargetSummary, ...]
    seconds: float
    at_once: int
    interrupted: bool = False


def build_many(
    targets: Sequence[PlannedTarget], session: BuildSession, order: BuildOrder, *, at_once: int
) -> RunSummary:
    """Build targets in parallel.

    An error of one target is part of the result. After Ctrl-C no target is started, those that run
    are ended, and the result says so.

    Args:
        targets: The targets.
        session: The run.
        order: The options; ``output`` and ``junit`` are folders that get an entry for each target.
        at_once: The number of parallel targets, one thread for each.

    Raises:
        EngineUnavailableError: No engine answers; nothing was started then.
        OutputError: A folder cannot be made.
    """
    started = time.monotonic()
    buildable = [target for target in targets if target.plan and not target.plan.unlocked]
    if buildable and order.until in ("build", "test"):
        # Once for all: no target gets another engine because this one does not answer for a moment.
        order = replace(order, engine=choose(order.engine, report=say).name)
    _make_folders(order)
    interruption, is_interrupted = Interruption(), False
    futures: list[Future[TargetSummary]] = []
    counts: Counter[str] = Counter()
    with (
        DISPLAY.task("running", len(targets), "targets", log=False) as task,
        ThreadPoolExecutor(at_once) as pool,
    ):
        try:
            for target in targets:
                futures.append(pool.submit(_work, target, session, order, interruption))
            for future in as_completed(futures):
                counts[future.result().outcome] += 1
                task.note = counts_text(counts)
                task.advance()
        except BaseException as error:
            # A second Ctrl-C must not leave builds behind: their ends are waited for.
            with uninterrupted():
                interruption.request()
                pool.shutdown(cancel_futures=True)
            if not isinstance(error, KeyboardInterrupt):
                raise
            is_interrupted = True
    summaries = [future.result() for future in futures if not future.cancelled()]
    started_names = {summary.target for summary in summaries}
    not_started = [target.name for target in targets if target.name not in started_names]
    summaries += [TargetSummary(target=name, outcome="not started") for name in not_started]
    return RunSummary(
        targets=tuple(summaries),
        seconds=time.monotonic() - started,
        at_once=at_once,
        interrupted=is_interrupted,
    )


def _work(
    target: PlannedTarget, session: BuildSession, order: BuildOrder, interruption: Interruption
) -> TargetSummary:
    """Build one target, and print its outcome; an error is part of the summary.

    Lines of this thread have the target's name before them meanwhile.

    Raises:
        BrokenPipeError: stderr is closed.
    """
    started = time.monotonic()
    with labelled(target.name), interruption.reaches_this_thread():
        try:
            summary = _run(target, session, order)
        except KeyboardInterrupt:
            status = InterruptionError.exit_status
            summary = TargetSummary(target=target.name, outcome="stopped", exit_status=status)
        except BrokenPipeError:
            # stderr is closed: the run as a whole ends.
            raise
        except OSError as error:
            problem = OutputError(f"{error.filename or 'error'}: {error.strerror or error}")
            summary = _report_error(target.name, problem)
        except TrainworksError as error:
            summary = _report_error(target.name, error)
        except Exception as error:  # noqa: BLE001 - a defect in one target's build must not end the others
            say(traceback.format_exc())
            defect = TrainworksError(f"{type(error).__name__}: {error}")
            summary = _report_error(target.name, defect)
        line: str = summary.outcome
        if summary.cause:
            line += f": {summary.cause}"
        say(line)
    return replace(summary, seconds=round(time.monotonic() - started, 1))


def _run(target: PlannedTarget, session: BuildSession, order: BuildOrder) -> TargetSummary:
    """Build one target, as far as the order says, and return its outcome.

    Raises:
        TrainworksError: The target has no plan, or its build failed.
    """
    name, plan = target.name, target.plan
    if plan is None:
        raise target.error or TrainworksError(f"{name} has no plan")
    if plan.unlocked and order.until in ("build", "test"):
        cause = f"{len(plan.unlocked)} inputs not locked, first {plan.unlocked[0]}"
        if order.strict:
            return TargetSummary(
                target=name, outcome="failed", cause=cause, exit_status=LockError.exit_status
            )
        return TargetSummary(target=name, outcome="skipped", cause=cause)
    # Each target has its own entries in the folders.
    if order.output is not None:
        order = replace(order, output=order.output / name)
    if order.junit is not None:
        order = replace(order, junit=order.junit / f"{name}.xml")
    result = run_target(target.request, plan, session, order)
    summary = TargetSummary(target=name, outcome="done", report=result.report)
    if result.image is not None:
        size, cause = result.image.image.size, _describe_failures(result.image)
        summary = replace(summary, size=size, cause=cause)
        if result.image.unchanged:
            summary = replace(summary, outcome="unchanged")
    if result.broken is not None:
        summary = replace(summary, outcome="failed", exit_status=result.broken.exit_status)
    return summary


def _report_error(name: str, error: TrainworksError) -> TargetSummary:
    """Print the error of a target, and return the summary of the failure."""
    say(describe(error))
    return TargetSummary(
        target=name,
        outcome="failed",
        cause=error.message.splitlines()[0],
        exit_status=error.exit_status,
        report=error.as_values(),
    )


def _describe_failures(result: ImageResult) -> str:
    """Return the number of failed checks and the first one, for people; ``""`` without any."""
    checks = result.checks or ()
    failed = [check for check in checks if not check.passed]
    if not failed:
        return ""
    return (
        f"{len(failed)} of {len(checks)} checks failed, first {failed[0].component}:"
        f" {failed[0].title}"
    )


def _make_folders(order: BuildOrder) -> None:
    """Create the folders of ``--output`` and ``--junit``; raises ``OutputError``."""
    for folder in (order.output, order.junit):
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"{folder}: {error.strerror}",
                hint="with many targets it is a folder, with one entry for each target",
            ) from error


# Summing up.


def worst(targets: Sequence[TargetSummary]) -> int:
    """Return the exit status of a run: that of the target that failed earliest in the pipeline.

    An image that fails a check was built; a failed build was started; any other error ends a
    target earlier.
    """
    rank_by_status = {0: 0, ImageTestError.exit_status: 1, BuildError.exit_status: 2}
    worst_status, worst_rank = 0, 0
    for target in targets:
        rank = rank_by_status.get(target.exit_status, 3)
        # Of two errors of one rank the higher status counts.
        if (rank, target.exit_status) > (worst_rank, worst_status):
            worst_status, worst_rank = target.exit_status, rank
    return worst_status


def as_text(run: RunSummary) -> str:
    """Return the table that ends a run: a line for each target, and the numbers of outcomes."""
    rows = [("target", "outcome", "seconds", "size", "cause")]
    for target in run.targets:
        seconds = f"{target.seconds:.1f}" if target.seconds else "-"
        size = megabytes(target.size) if target.size else "-"
        rows.append((target.target, target.outcome, seconds, size, target.cause))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for row in rows:
        # The last column is not padded.
        cells = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)]
        lines.append("  ".join([*cells, row[4]]).rstrip())
    counts: Counter[str] = Counter(target.outcome for target in run.targets)
    lines.append(
        f"{len(run.targets)} targets in {run.seconds:.1f} s, {run.at_once} at once:"
        f" {counts_text(counts)}"
    )
    return "\n".join(lines) + "\n"


def counts_text(counts: Mapping[str, int]) -> str:
    """Return the number of targets with each outcome: ``3 done, 1 failed``."""
    outcomes = [outcome for outcome in OUTCOMES if counts.get(outcome)]
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in outcomes)


def as_json(run: RunSummary) -> str:
    """Return a run as the text of a JSON document."""
    content = {
        "seconds": round(run.seconds, 1),
        "at_once": run.at_once,
        "exit_status": worst(run.targets),
        "targets": [asdict(summary) for summary in run.targets],
    }
    return json.dumps(content, indent=2) + "\n"
