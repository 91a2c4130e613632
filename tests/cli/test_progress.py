"""What a person sees of work that takes long: real programs on a real pseudo-terminal, and the numbers behind it."""

from __future__ import annotations

import io
import os
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
from conftest import ROOT
from engine.helpers import LOGS
from trainworks.build.many import texts_of
from trainworks.terminal.progress import BYTES, LOG_SECONDS, RELAY, Display, counted
from trainworks.terminal.words import LONGEST_BAR, bar, clock, row

# The numbers.


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (750, "12:30"), (3599.6, "1:00:00"), (3723, "1:02:03")],
)
def test_times(seconds: float, text: str) -> None:
    assert clock(seconds) == text


PARTS = {"left": "~2:30 left", "elapsed": "1:12", "rate": "31 MB/s", "note": "torch"}


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (15, "23 of 48 steps"),
        (30, "building  23 of 48 steps  1:12"),
        (40, "building  23 of 48 steps  ~2:30 left"),
        (44, "building  ━━────  23 of 48 steps  ~2:30 left"),
        (60, "building  ━━━────  23 of 48 steps  31 MB/s  1:12  ~2:30 left"),
        (80, "building  ━━━━━━━━━───────────  23 of 48 steps  31 MB/s  1:12  ~2:30 left  torch"),
    ],
)
def test_a_narrow_terminal_is_told_what_matters_most(width: int, expected: str) -> None:
    assert row("building", 23 / 48, "23 of 48 steps", width=width, **PARTS) == expected


WORDS = st.text("abc 19", max_size=20)


@given(st.integers(1, 200), st.none() | st.floats(-1, 2), st.tuples(WORDS, WORDS, WORDS, WORDS, WORDS, WORDS))
def test_a_row_is_never_wider_than_the_terminal(width: int, fraction: float | None, words: tuple[str, ...]) -> None:
    title, amount, left, elapsed, rate, note = words
    drawn = row(title, fraction, amount, width=width, left=left, elapsed=elapsed, rate=rate, note=note)
    assert len(drawn) <= width


@given(st.floats(0, 1), st.integers(1, LONGEST_BAR))
def test_a_bar_is_full_only_when_everything_is_done(fraction: float, width: int) -> None:
    drawn = bar(fraction, width)
    assert len(drawn) == width
    assert ("─" not in drawn) == (fraction == 1)


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
        # An attempt broke off: what it sent counts for nothing.
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
    stream, ticks, said, now = io.StringIO(), Clock(), 0.0, 0.0
    expected = 0
    with Display(stream, clock=ticks).task("sending", 1000, BYTES) as task:
        for seconds, size in moves:
            ticks.now += seconds
            now = ticks.now - 1000
            task.advance(size)
            if now - said >= LOG_SECONDS:
                expected, said = expected + 1, now
    lines = stream.getvalue().splitlines()
    assert abs(len(lines) - expected) <= 1
    assert all(line.startswith("  sending: ") for line in lines)


def test_a_line_of_a_log_says_all_of_it() -> None:
    stream, ticks = io.StringIO(), Clock()
    with Display(stream, clock=ticks).task("pushing", 1_100_000_000, BYTES) as task:
        task.about = True
        ticks.now += 35
        task.reach(312_000_000)
    assert stream.getvalue() == "  pushing: 312 MB of about 1.10 GB, 9 MB/s, 0:35, about 1:28 left\n"


def test_a_file_tells_how_much_of_it_was_read() -> None:
    told: list[int] = []
    file = counted(io.BytesIO(b"12345"), told.append)
    assert (file.read(2), file.read(), file.read()) == (b"12", b"345", b"")
    assert told == [2, 5, 5]


# On a terminal.

BUILD = f"""
import sys
from trainworks.terminal.build_progress import BuildProgress
from trainworks.engine.progress import BuildKitParser, StepTally, Timings
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
tally = StepTally(steps, Timings(seconds={{step.key: 100.0 for step in steps}}))
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
def building(columns: int = 80, **environment: str) -> Iterator[Terminal]:
    with Terminal((sys.executable, "-c", BUILD), columns=columns, environment=environment) as mine:
        yield mine


def waits(mine: Terminal) -> bool:
    return any("more" in line and "0:0" in line for line in mine.shown)


def test_a_build_on_a_terminal() -> None:
    with building() as mine:
        mine.read(waits)
        first, second = mine.shown[-2:]
        assert first.startswith("building  ━━━━━")
        assert "  1 of 6 steps  0:0" in first
        assert "~8:" in first, "five steps of 100 s each, less what the present one took"
        assert second.split() == ["system", second.split()[1], "more"]
        assert mine.cursor_is_hidden()
        # Narrower while it runs: nothing wraps.
        mine.resize(40)
        mine.read(lambda now: re.fullmatch(r"building  1 of 6 steps  0:\d\d  ~8:\d\d left", now.shown[-2]) is not None)
        assert mine.shown[-1].startswith("  system")
        mine.type("\n")
        assert mine.finish() == 0
        assert not mine.cursor_is_hidden()
        assert mine.shown[-1] == "built"
        assert "building" not in mine.text, "what moved is gone"
        assert "  torch                   2.1 s  RUN ec…" in mine.text


@pytest.mark.parametrize("columns", [40, 80])
def test_no_line_of_a_build_wraps(columns: int) -> None:
    with building(columns) as mine:
        mine.read(waits)
        mine.type("\n")
        mine.finish()
        lines = [line for line in mine.text.splitlines() if line]
    assert [line.split()[0] for line in lines] == ["system", "十年樹木", "system", "torch", "built"]
    assert lines[1].endswith("…")


def test_ctrl_c_leaves_a_clean_terminal() -> None:
    with Terminal((sys.executable, "-c", BUILD), echo=True) as mine:
        mine.read(waits)
        mine.type("\x03")
        assert mine.finish() != 0
        assert not mine.cursor_is_hidden()
        assert "building" not in mine.text
        assert mine.shown[-1] == "KeyboardInterrupt"


def test_without_colours_and_with_other_letters() -> None:
    with building(NO_COLOR="1", PYTHONIOENCODING="ascii:replace") as mine:
        mine.read(waits)
        assert mine.shown[-2].startswith("building  ######---")
        mine.type("\n")
        mine.finish()
        assert b"\x1b[3" not in mine.raw, "no colour"


def test_a_dumb_terminal_gets_lines() -> None:
    with building(TERM="dumb") as mine:
        mine.read(lambda now: "十年" in now.text)
        mine.type("\n")
        assert mine.finish() == 0
        assert b"\x1b" not in mine.raw
        assert "building" not in mine.text


def test_a_file_gets_lines(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        subprocess.run((sys.executable, "-c", BUILD), stdin=subprocess.DEVNULL, stderr=log, check=True)
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert "\x1b" not in text
    assert "\r" not in text
    assert (
        text.splitlines()[-1]
        == "  torch                   2.1 s  RUN echo sec > /two && sleep 2 && printf 'no newline'"
    )


def test_a_process_that_is_shown_by_another_one_tells_where_it_is() -> None:
    child = subprocess.Popen(
        (sys.executable, "-c", BUILD),
        env={**os.environ, RELAY: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    with child:
        assert child.stderr is not None
        texts = list(texts_of(child.stderr))
    assert child.returncode == 0
    states = [text for text, is_line in texts if not is_line]
    assert states[0] == "0 of 6 steps"
    assert "1 of 6 steps, system" in states
    assert states[-1] == "6 of 6 steps"
    assert [text.split()[0] for text, is_line in texts if is_line] == ["system", "十年樹木", "system", "torch"]


def test_a_failed_target_says_its_last_words_and_is_counted(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Terminal((sys.executable, "-c", BLOCK, str(gate)), columns=100) as mine:
        mine.read(lambda now: any("slow  3 of 6 steps" in line for line in now.shown))
        assert next(line for line in mine.shown if line.startswith("running")).endswith("1 failed")
        assert mine.shown[:3] == ["bad: step 1", "bad: error: no", "bad: failed: error: no"]
        gate.write_text("go on")
        assert mine.finish() == 0
        assert mine.shown[-1] == "slow: done"
        assert "step 7" not in mine.text


BLOCK = """
import sys
from trainworks.build.many import Block, Job, Runner

def job(name, program):
    return Job(name=name, argv=(sys.executable, "-c", program))

bad = "import sys; print('step 1', file=sys.stderr); print('error: no', file=sys.stderr); sys.exit(7)"
slow = "import sys; print('step 7', file=sys.stderr); print('3 of 6 steps', end=chr(13), file=sys.stderr, flush=True); "
slow += f"open({sys.argv[1]!r}).read(); print('{{}}')"
block = Block(verbose=False)
with block.shown([], 2):
    Runner(block.said, block.moved).run([job("bad", bad), job("slow", slow)], 1, merges=True, take=block.ended)
"""
"""Two targets, one after the other: one that fails, one that waits until a pipe is written to."""


def test_many_targets_have_a_row_each() -> None:
    """And of each that has ended there is a line above them."""
    names = ("pytorch-2.13.0-cpu-py311-debian12", "tensorflow-2.21.0-cpu-py311-debian12")
    words = [word for name in names for word in ("--only", name)]
    command = (sys.executable, str(ROOT / "build.py"), *words, "-j", "2", "--until", "plan")
    with Terminal(command, columns=100) as mine:
        mine.read(lambda now: any(line.startswith("running  ") for line in now.shown) and len(now.shown) == 3)
        assert "0 of 2 targets" in mine.shown[0]
        assert sorted(line.split()[1] for line in mine.shown[1:]) == sorted(names)
        assert mine.finish() == 0
        lines = mine.text.splitlines()
        assert sorted(lines[:2]) == [f"{name}: done" for name in sorted(names)]
        assert lines[2].split()[:2] == ["target", "outcome"], "the table"
        assert "running" not in mine.text
