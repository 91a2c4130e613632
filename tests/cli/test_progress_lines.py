"""Test the output of a build that is not on a terminal: a line for each step that took time, none
for noise.
"""

from __future__ import annotations

import io

from trainworks.engine.progress import StepTally
from trainworks.engine.protocol import StepEvent
from trainworks.terminal.build_progress import BuildProgress

STEP = "RUN --mount=type=cache,id=x,target=/y     --mount=type=secret,id=z     make    all"


def lines(*events: StepEvent, verbose: bool = False) -> list[str]:
    stream = io.StringIO()
    progress = BuildProgress(stream, verbose=verbose)
    for event in events:
        progress(event)
    return stream.getvalue().splitlines()


def test_steps_are_shown_without_their_mounts() -> None:
    done = StepEvent(component="torch", step=STEP, state="done", seconds=12.34)
    cached = StepEvent(component="cuda", stage="cuda-nvidia-cublas-cu12", step=STEP, state="cached")
    failed = StepEvent(component="nccl", step=STEP, state="failed", seconds=0.1)
    assert lines(done, cached, failed) == [
        "  torch                  12.3 s  RUN make all",
        "  nccl                    0.1 s  FAILED: RUN make all",
    ]
    assert lines(done, cached, failed, verbose=True) == [
        "  torch                  12.3 s  RUN make all",
        "  cuda-nvidia-cublas-cu12 cached    RUN make all",
        "  nccl                    0.1 s  FAILED: RUN make all",
    ]


def test_steps_from_the_cache_are_counted() -> None:
    stream = io.StringIO()
    progress = BuildProgress(stream)
    with progress.following(StepTally(())):
        for _ in range(2):
            progress(StepEvent(component="metis", step=STEP, state="cached"))
    assert stream.getvalue() == "  steps from the cache: 2\n"


def test_steps_of_no_time_and_the_engines_own_are_not_shown() -> None:
    quick = StepEvent(component="torch", step="COPY a b", state="done", seconds=0.1)
    own = StepEvent(component="", step="exporting", state="done", seconds=9.0)
    step_event = StepEvent(component="torch", step="RUN x", state="output", text="a word")
    assert lines(quick, own, step_event) == []
    assert lines(step_event, verbose=True) == ["  torch                a word"]
