"""The steps of a build: counted in the Dockerfile, found again in what engines say, timed for the next build."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.helpers import LOGS, events_of
from trainworks.build.history import last_build, record_build
from trainworks.engine.progress import StepTally, Timings
from trainworks.engine.protocol import StepEvent
from trainworks.facts.rows import Facts
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks.render.dockerfile import render
from trainworks.render.forecast import inputs_of, kept_components
from trainworks.render.steps import BuildStep, build_steps, seconds_left

STAGES = {"first": "system", "second": "torch", "final": "image"}

RECORDED = """\
FROM engtest:base AS first
RUN --mount=type=cache,target=/cache,id=engtest-cache echo hi > /cache/x && echo one
RUN --mount=type=secret,id=token cat /run/secrets/token > /dev/null; echo two; sleep 1; \\
    # a comment between two lines
    echo more

FROM engtest:base AS second
RUN echo sec > /two && sleep 2 && printf 'no newline'

FROM first AS final
COPY --from=second /two /two
COPY --chmod=0755 files/run /usr/bin/file
RUN --mount=type=bind,source=files,target=/src ls /src
ENV A=b
ENTRYPOINT ["/bin/env"]
"""
"""The file that ``tests/engine/logs/*-success.txt`` were recorded with."""


def test_steps_wait_for_what_stands_above_and_for_what_they_copy() -> None:
    steps = build_steps(RECORDED, STAGES)
    assert [(step.component, step.text.split()[0], step.after) for step in steps] == [
        ("system", "RUN", ()),
        ("system", "RUN", (0,)),
        ("torch", "RUN", ()),
        ("image", "COPY", (1, 2)),
        ("image", "COPY", (3,)),
        ("image", "RUN", (4,)),
    ]
    assert steps[1].text.endswith("sleep 1; echo more")


def test_every_instruction_of_every_target_is_one_step(root: Path) -> None:
    for path in (root / "tests" / "golden" / "render").glob("*/Dockerfile"):
        text = path.read_text(encoding="utf-8")
        stages = {name: name for name in re.findall(r"^FROM .* AS (\S+)$", text, re.MULTILINE)}
        steps = build_steps(text, stages)
        assert len(steps) == len(re.findall(r"^(?:RUN|COPY|ADD) ", text, re.MULTILINE)), path
        assert all(step.component for step in steps)
        assert len({step.key for step in steps}) == len(steps)


@pytest.mark.parametrize("engine", ["buildkit", "buildah"])
@pytest.mark.parametrize("log", ["success", "cached"])
def test_what_an_engine_says_ends_every_step_once(engine: str, log: str) -> None:
    tally = StepTally(build_steps(RECORDED, STAGES))
    counts = []
    for now, event in enumerate(events_of(LOGS / f"{engine}-{log}.txt", STAGES)):
        tally.add(event, now)
        counts.append(tally.done)
    assert counts == sorted(counts)
    assert tally.done == tally.total == 6
    assert len(tally.timings.seconds) == (0 if log == "cached" else 6)


A, B, C = (BuildStep(component=name, text=f"RUN {name}", after=()) for name in "abc")
LAST = BuildStep(component="image", text="COPY --from=a $X /", after=(0, 1, 2))


def event(step: BuildStep, state: str, text: str = "", seconds: float | None = None) -> StepEvent:
    return StepEvent(component=step.component, step=text or step.text, state=state, seconds=seconds)


def test_time_left_of_a_build() -> None:
    earlier = Timings(seconds={A.key: 60, B.key: 30, C.key: 30, LAST.key: 10}, at_once=2, ending=5)
    tally = StepTally((A, B, C, LAST), earlier)
    assert tally.left(0) == 75, "the longest chain, and the ending"
    tally.add(event(A, "cached"), 0)
    assert tally.left(0) == 45
    tally.add(event(B, "started"), 0)
    tally.add(event(C, "started"), 0)
    assert tally.left(20) == 25
    assert tally.left(90) == 15, "late, and nobody knows how late"
    tally.add(event(B, "done", seconds=30), 30)
    tally.add(event(C, "done", seconds=34), 34)
    # With the variable's value, as engines show it.
    tally.add(event(LAST, "started", "COPY --from=a /x /"), 34)
    tally.add(event(LAST, "done", "COPY --from=a /x /", 10), 44)
    assert (tally.done, tally.left(46)) == (4, 3)
    tally.finish(50)
    expected = {B.key: 30, C.key: 34, LAST.key: 10}
    assert tally.timings == Timings(seconds=expected, at_once=round(74 / 44, 2), ending=6)
    assert earlier.updated(tally.timings).seconds == {A.key: 60, **expected}
    assert earlier.updated(Timings()) == earlier


def test_a_step_that_was_never_timed_leaves_the_rest_unknown() -> None:
    tally = StepTally((A, B), Timings(seconds={B.key: 10}))
    assert tally.left(0) is None
    tally.add(event(A, "done", seconds=3), 3)
    assert tally.left(3) == 10


def test_what_the_cache_should_have_takes_no_time_until_it_proves_lost() -> None:
    earlier = Timings(seconds={A.key: 60, B.key: 60, C.key: 10, LAST.key: 10})
    tally = StepTally((A, B, C, LAST), earlier, kept=("a", "b"))
    assert tally.left(0) == 20
    tally.add(event(A, "started"), 0)
    tally.add(event(A, "done", seconds=55), 55)
    assert tally.left(55) == 80


@given(st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 9)), max_size=10), st.floats(1, 8))
def test_the_rest_takes_no_less_than_its_longest_step_and_no_more_than_all(
    rows: list[tuple[float, int]], at_once: float
) -> None:
    steps = [
        BuildStep(component="a", text=f"RUN {number}", after=(number - 1 - back,) if number > back else ())
        for number, (_, back) in enumerate(rows)
    ]
    left = [seconds for seconds, _ in rows]
    found = seconds_left(steps, left, at_once)
    assert max(left, default=0) <= found <= sum(left) + 1e-6


def test_times_of_steps_are_remembered_with_the_inputs(facts: Facts, tmp_path: Path) -> None:
    plan = make_plan(Request(framework="pytorch", cuda="cpu"), facts)
    rendering = render(plan, facts)
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    tag, inputs = plan.tags[0], inputs_of(plan, rendering)
    record_build(tag, inputs, home, Timings(seconds={"x": 10, "y": 5}, at_once=2, ending=3))
    record_build(tag, inputs, home, Timings(seconds={"y": 6}, at_once=1.5, ending=4))
    record_build(tag, inputs, home)
    found = last_build(tag, home)
    assert found is not None
    assert found.timings == Timings(seconds={"x": 10, "y": 6}, at_once=1.5, ending=4)
    assert set(kept_components(plan, rendering, found.inputs)) == set(inputs)
    # What earlier versions wrote has no times.
    (path,) = (tmp_path / "trainworks" / "builds").iterdir()
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["timings"]
    path.write_text(json.dumps(content), encoding="utf-8")
    before = last_build(tag, home)
    assert before is not None
    assert before.timings == Timings()
