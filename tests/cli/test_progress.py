"""Test the display of work that takes long: real programs on a real pseudo-terminal, and the
numbers behind it.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.terminal import Terminal
from engine.helpers import LOGS
from trainworks.terminal.formatting import clock
from trainworks.terminal.progress import BYTES, LOG_SECONDS, Display

# The numbers.


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (7.4, "0:07"),
        (59.6, "1:00"),
        (750, "12:30"),
        (3599.6, "1:00:00"),
        (3723, "1:02:03"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert clock(seconds) == text


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_time_left_follows_from_the_rate_of_what_was_done_now() -> None:
    ticks = Clock()
    with Display(io.StringIO(), clock=ticks).task("sending", 1000, BYTES) as task:
        task.skip(400)
        ticks.now += 2
        task.reach(450)
        assert not task.left, "two seconds say nothing"
        ticks.now += 8
        task.reach(500)
        assert task.left == 50
        assert task.rate == 10
        # An attempt broke off: its output counts for nothing.
        task.reach(400)
        assert not task.left
        assert not task.rate


def test_nobody_knows_when_unequal_things_are_done() -> None:
    ticks = Clock()
    with Display(io.StringIO(), clock=ticks).task("checking", 10, "checks") as task:
        ticks.now += 60
        task.advance(5)
        assert (task.left, task.rate, task.counts) == (None, 0, "5 of 10 checks")


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 500))))
def test_a_log_is_never_flooded_and_never_silent(moves: list[tuple[float, int]]) -> None:
    stream, ticks, last_line_time, now = io.StringIO(), Clock(), 0.0, 0.0
    expected = 0
    with Display(stream, clock=ticks).task("sending", 1000, BYTES) as task:
        for seconds, size in moves:
            ticks.now += seconds
            now = ticks.now - 1000
            task.advance(size)
            if now - last_line_time >= LOG_SECONDS:
                expected, last_line_time = expected + 1, now
    lines = stream.getvalue().splitlines()
    assert abs(len(lines) - expected) <= 1
    assert all(line.startswith("  sending: ") for line in lines)


def test_a_line_of_a_log_says_all_of_it() -> None:
    stream, ticks = io.StringIO(), Clock()
    with Display(stream, clock=ticks).task("pushing", 1_100_000_000, BYTES) as task:
        task.about = True
        ticks.now += 35
        task.reach(312_000_000)
    assert (
        stream.getvalue() == "  pushing: 312 MB of about 1.10 GB, 0:35, about 1:28 left, 9 MB/s\n"
    )


# On a terminal.

BUILD = f"""
import sys
from trainworks.terminal.build_progress import BuildProgress
from trainworks.engine.progress import BuildKitParser, StepTally
from trainworks.render.steps import build_steps

stages = {{"first": "system", "second": "torch", "final": "image"}}
steps = build_steps('''
FROM engtest:base AS first
RUN --mount=type=cache,target=/cache,id=engtest-cache echo hi > /cache/x && echo one
RUN --mount=type=secret,id=token cat /run/secrets/token > /dev/null; echo two; sleep 1; \\\\
    echo more
FROM engtest:base AS second
RUN echo sec > /two && sleep 2 && printf 'no newline'
FROM first AS final
COPY --from=second /two /two
COPY --chmod=0755 files/run /usr/bin/file
RUN --mount=type=bind,source=files,target=/src ls /src
''', stages)
tally = StepTally(steps)
progress, parser = BuildProgress(), BuildKitParser(stages)
with progress.following(tally):
    for line in open({str(LOGS / "buildkit-success.txt")!r}):
        for event in parser.feed(line.rstrip("\\n")):
            progress(event)
        if "#6 1.041 more" in line:
            progress.line("  十年樹木 " * 20)
            sys.stdin.readline()
print("built")
"""
"""A build that stops in its middle until a line is typed."""


@contextmanager
def building(columns: int = 100, **environment: str) -> Iterator[Terminal]:
    with Terminal((sys.executable, "-c", BUILD), columns=columns, environment=environment) as mine:
        yield mine


def waits(mine: Terminal) -> bool:
    return any("more" in line for line in mine.shown) and any(
        "1 of 6 steps" in line for line in mine.shown
    )


def test_a_build_on_a_terminal() -> None:
    with building() as mine:
        mine.read(waits)
        build_line, step = mine.shown[-2:]
        assert build_line.startswith("building ")
        assert re.search(r"━ +1 of 6 steps, 0:0\d$", build_line)
        assert re.fullmatch(r"system  more +━+ +0:0\d", step)
        assert mine.cursor_is_hidden()
        mine.type("\n")
        assert mine.finish() == 0
        assert not mine.cursor_is_hidden()
        lines = [line for line in mine.text.splitlines() if line]
    assert [line.split()[0] for line in lines] == ["十年樹木", "second", "steps", "built"], (
        "no bar is left over"
    )
    assert "  second                  2.1 s  RUN echo sec > /two" in lines[1]


@pytest.mark.parametrize("columns", [40, 80])
def test_no_line_of_a_build_wraps(columns: int) -> None:
    with building(columns) as mine:
        mine.read(lambda now: any("十年" in line for line in now.shown) and len(now.shown) >= 3)
        assert len([line for line in mine.shown if line]) == 3, (
            "a line, and a row for the build and for its step"
        )
        mine.type("\n")
        assert mine.finish() == 0
        lines = [line for line in mine.text.splitlines() if line]
    assert [line.split()[0] for line in lines] == ["十年樹木", "second", "steps", "built"]
    assert lines[0].endswith("…")


@pytest.mark.parametrize("columns", [40, 80], ids=["bars as wide as the terminal", "narrower bars"])
def test_ctrl_c_leaves_a_clean_terminal(columns: int) -> None:
    with Terminal((sys.executable, "-c", BUILD), columns=columns, echo=True) as mine:
        mine.read(lambda now: any("十年" in line for line in now.shown) and now.cursor_is_hidden())
        mine.type("\x03")
        assert mine.finish() != 0
        assert not mine.cursor_is_hidden()
        assert "building" not in mine.text
        assert mine.shown[-1] == "KeyboardInterrupt"


def test_without_colours() -> None:
    with building(NO_COLOR="1") as mine:
        mine.read(waits)
        mine.type("\n")
        mine.finish()
        assert b"\x1b[3" not in mine.raw


def test_a_dumb_terminal_gets_lines() -> None:
    with building(TERM="dumb") as mine:
        mine.read(lambda now: "十年" in now.text)
        mine.type("\n")
        assert mine.finish() == 0
        assert b"\x1b" not in mine.raw
        assert "building" not in mine.text


def test_a_file_gets_lines(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        subprocess.run(
            (sys.executable, "-c", BUILD), stdin=subprocess.DEVNULL, stderr=log, check=True
        )
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert "\x1b" not in text
    assert "\r" not in text
    assert text.splitlines()[-2:] == [
        "  second                  2.1 s  RUN echo sec > /two && sleep 2 && printf 'no newline'",
        "  steps from the cache: 1",
    ]


THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from trainworks.terminal.output import labelled, put, say
from trainworks.terminal.progress import DISPLAY

both = Barrier(3)

def work(name):
    with labelled(name), DISPLAY.task("building", 4, "steps") as task:
        task.advance(2)
        say("half of it")
        both.wait()
        both.wait()

with ThreadPoolExecutor(2) as pool:
    futures = [pool.submit(work, name) for name in ("one", "two")]
    both.wait()
    put("a result\\n")
    sys.stdin.readline()
    both.wait()
    for future in futures:
        future.result()
say("the end")
"""
"""Two targets in threads of one process, both half done until a line is typed."""


def test_targets_in_threads_have_their_names_before_lines_and_bars() -> None:
    with Terminal((sys.executable, "-c", THREADS)) as mine:
        mine.read(
            lambda now: (
                sum("2 of 4 steps" in line for line in now.shown) == 2 and "a result" in now.text
            )
        )
        assert {line.split()[0] for line in mine.shown[-2:]} == {"one:", "two:"}
        mine.type("\n")
        assert mine.finish() == 0
        lines = [line for line in mine.text.splitlines() if line]
    assert sorted(lines[:2]) == ["one: half of it", "two: half of it"]
    assert lines[2:] == ["a result", "the end"]
