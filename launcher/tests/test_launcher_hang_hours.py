"""24 simulated hours of jobs of many kinds: the real watch of two hosts, with a
clock and processes that are made up.

A job is a list of its parts one after the other, each with its seconds, and prints after some of
them. Only rank 0, on the first host, prints. No alarm is right while it works; after a stop at any
moment the warning must come in time.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.supervise import event_loop as loops
from trainworks_launcher.supervise.hang import detector as watching
from trainworks_launcher.supervise.hang.detector import DetectorContext, HangDetector
from trainworks_launcher.supervise.hang.outlier_rank import RankSample, Row, row_of
from trainworks_launcher.supervise.hang.progress import BYTES_PER_SECOND, CpuTime, Process, Sample
from trainworks_launcher.supervise.hang.sampling import Root, Sampler
from trainworks_launcher.supervise.hang.stacks import Frame, Thread

C10D = "/site-packages/torch/distributed/distributed_c10d.py"
LIMIT = 600.0
HOUR = 3600.0
EACH = 24 * HOUR / 9
"""Parts of a job: nine of them are a day."""


class Part(NamedTuple):
    """Part of a job that takes a while.

    Attributes:
        seconds: How long.
        does: "steps" of Python on both hosts; "call", which shows nothing; "compiled", a call of
            compiled code on the second host, which only its stacks show; "writes" a checkpoint on
            the first host; "compiles" in another program there; "elsewhere": only the second host
            works.
        prints: Whether a line comes after it.
    """

    seconds: float
    does: str = "steps"
    prints: bool = True


Job = Callable[[random.Random], Iterator[Part]]


def every_step(draw: random.Random) -> Iterator[Part]:
    while True:
        yield Part(draw.uniform(0.3, 1.2))


def every_hundred_steps(draw: random.Random) -> Iterator[Part]:
    """Yield parts that print each hundred steps, and write a checkpoint each half hour."""
    for number in itertools.count(1):
        yield Part(draw.uniform(18, 28))
        if number % 78 == 0:
            yield Part(draw.uniform(60, 400), "writes")


def evaluation(draw: random.Random) -> Iterator[Part]:
    """Each epoch, on one rank of the second host; the others wait for it."""
    while True:
        for _ in range(300):
            yield Part(draw.uniform(1, 3))
        yield Part(draw.uniform(100, 900), "elsewhere")


def slow_start(draw: random.Random) -> Iterator[Part]:
    """A few lines, tokenization in calls that show nothing, then a compilation,
    and another one for a new shape.
    """
    for _ in range(20):
        yield Part(1)
    for _ in range(6):
        yield Part(draw.uniform(20, 90), "call")
    yield Part(draw.uniform(200, 500), "compiles")
    for number in itertools.count(1):
        yield Part(draw.uniform(1, 2))
        if number == 2000:
            yield Part(draw.uniform(200, 900), "compiles")


def growing_epochs(draw: random.Random) -> Iterator[Part]:
    """A line an epoch, of one call that shows nothing and takes longer each time."""
    seconds = 5.0
    while True:
        seconds = min(seconds * draw.uniform(1, 1.5), 140)
        yield Part(seconds, "call")


def buffered(draw: random.Random) -> Iterator[Part]:
    """Output of a pipe: nothing for more than a tenth of the limit, then many lines.

    The output is never steady.
    """
    while True:
        yield Part(draw.uniform(60, 100))
        for _ in range(30):
            yield Part(0.001)


def slow_data(draw: random.Random) -> Iterator[Part]:
    """Steps that now and then wait for a store, more than three times as long as ever before."""
    longest = 8.0
    while True:
        for _ in range(100):
            yield Part(draw.uniform(0.5, 8))
        longest = min(longest * draw.uniform(3, 3.8), 200)
        yield Part(longest, "call")


def a_line_an_epoch(draw: random.Random) -> Iterator[Part]:
    """Nor is this one."""
    while True:
        yield Part(draw.uniform(240, 2000))


def long_calls(draw: random.Random) -> Iterator[Part]:
    """Steps, and each some minutes a call of compiled code that does all its work at once."""
    while True:
        for _ in range(300):
            yield Part(draw.uniform(0.5, 1))
        yield Part(draw.uniform(40, 500), "compiled")


JOBS: Sequence[Job] = (
    every_step,
    every_hundred_steps,
    evaluation,
    slow_start,
    growing_epochs,
    buffered,
    slow_data,
    a_line_an_epoch,
    long_calls,
)
assert len(JOBS) == 9


class World(loops.Loop):
    """A loop whose seconds pass at once, and the two hosts of a job that runs in it.

    Attributes:
        now: Seconds of its clock.
        log_lines: Log of the leader: (when, line).
    """

    def __init__(self, job: Job, seed: int, until: float, stops: float = math.inf) -> None:
        super().__init__()
        self.now = self.begin = 1000.0
        self.log_lines: list[tuple[float, str]] = []
        self.stops = self.begin + stops
        self.ends: list[float] = []
        self.parts: list[Part] = []
        self.prints: list[float] = [self.begin]
        end = self.begin
        for part in job(random.Random(seed)):
            end += part.seconds
            self.ends.append(end)
            self.parts.append(part)
            self.prints += [end] if part.prints and end < self.stops else []
            if end > self.begin + until:
                break

    def monotonic(self) -> float:
        return self.now

    def printed(self, host: int) -> float:
        return self.prints[bisect.bisect(self.prints, self.now) - 1] if host == 0 else 0.0

    def run_until(self, seconds: float) -> None:
        """Let time pass. A thread that looks takes none of it."""
        end = self.begin + seconds
        while self._timers[0][0] <= end:
            due, _, action = heapq.heappop(self._timers)
            self.now = max(due, self.now + 1e-6)  # no clock stands still
            action()
            while self._selector.get_map():
                for key, events in self._selector.select():
                    key.data(events)
        self.now = end

    def works(self, host: int) -> tuple[int, int, int]:
        """Return the changes until now: of a stack, of bytes, of CPU time of other programs."""
        now = min(self.now, self.stops)
        part = bisect.bisect(self.ends, now)
        does = self.parts[part].does
        moves = (
            does == "steps"
            or does == ("writes", "elsewhere")[host]
            or (does == "compiles" and host == 0)
        )
        stack = int(now * 1000) if moves and does in ("steps", "elsewhere") else part + 1
        moved = int(now * 4 * BYTES_PER_SECOND) if moves and does == "writes" else 0
        return stack, moved, int(now) if moves and does == "compiles" else 0


class Made(Sampler):
    """The samples of one host of a world."""

    def __init__(self, world: World, host: int) -> None:
        super().__init__("", "")
        self.world, self.host = world, host

    def sample(self, roots: Sequence[Root], before: Sample | None = None) -> Sample:
        del before
        values, moved, cpu = self.world.works(self.host)
        call = () if self.world.now < self.world.stops else (Frame("all_reduce", C10D, 9),)
        threads = (
            Thread(True, (*call, Frame("train", "/opt/ml/code/train.py", 7)), values=values),
        )
        cpu_times = {10: CpuTime(int(self.world.now * 1e9), 0)}
        rank = Process(
            "1", python=True, cpu=self.world.now, threads=cpu_times, moved=moved, stack=threads
        )
        seen = {10: rank, 11: Process("2", cpu=cpu)}
        return Sample(self.world.now, (10,), seen, writes=self.writes(roots))

    def writes(self, roots: Sequence[Root]) -> Mapping[int, int]:
        del roots
        return {10: bisect.bisect(self.world.prints, self.world.now) if self.host == 0 else 0}

    def native_stacks(self, roots: Sequence[Root]) -> Mapping[int, tuple[Thread, ...]]:
        del roots
        return {}

    def rows(self, roots: Sequence[Root], host: str, look: Sample, natives: object) -> list[Row]:
        del natives
        return [row_of(roots[0].rank, host, RankSample(look.processes[10].stack, "S"))]

    def report(self, roots: Sequence[Root], look: Sample, natives: object) -> str:
        del roots, look, natives
        return "stacks"


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[World], None]:
    """Begins the watch of both hosts of a world, whose clock is theirs."""

    def begin(world: World) -> None:
        monkeypatch.setattr(loops, "time", world)
        monkeypatch.setattr(watching, "time", world)
        hosts: list[HangDetector] = []

        def tell(sender: int, message: Mapping[str, Json]) -> None:
            world.after(0.01, lambda: hosts[1 - sender].receive(f"algo-{sender + 1}", message))

        for number in range(2):
            around = DetectorContext(
                host=f"algo-{number + 1}",
                member=f"algo-{number + 1}",
                leader=number == 0,
                limit=LIMIT,
                fails=False,
                output=tmp_path,
                roots=lambda number=number: (Root(number, 10),),  # type: ignore[misc]
                printed=lambda number=number: world.printed(number),  # type: ignore[misc]
                others=lambda: ("algo-2",),
                tell=lambda message, number=number: tell(number, message),  # type: ignore[misc]
                end=lambda _: None,
                log=lambda line, number=number: (
                    world.log_lines.append((world.now, line)) if not number else None
                ),  # type: ignore[misc]
                redact=str,
            )
            hosts.append(HangDetector(world, Made(world, number), around))
        for host in hosts:
            host.begin(world.begin)

    return begin


@pytest.mark.parametrize("job", JOBS)
def test_a_day_of_jobs_that_work_has_no_alarm(live: Callable[[World], None], job: Job) -> None:
    world = World(job, 1, EACH)
    live(world)
    world.run_until(EACH)
    assert world.log_lines == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("job", JOBS)
def test_a_job_that_stops_is_seen_after_the_limit(
    live: Callable[[World], None], job: Job, seed: int
) -> None:
    """The looks of the second host take half as long again where one of them
    saw it work just before the stop.
    """
    stops = random.Random(seed).uniform(HOUR / 2, HOUR)
    world = World(job, seed, 2 * EACH, stops)
    live(world)
    world.run_until(stops + 2 * LIMIT)
    assert world.log_lines, "no alarm"
    when, line = world.log_lines[0]
    assert when - world.prints[-1] >= LIMIT, line
    assert 0 < when - world.stops <= LIMIT * 1.6, line
    assert re.match(r"no rank has made progress for \d+ s: .*\(train\.py:7\)", line)
