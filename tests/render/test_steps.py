"""Test the steps of a build: counted in the Dockerfile, and found again in the engines' output."""

from __future__ import annotations

import re

import pytest

from engine.helpers import LOGS, events_of
from trainworks.engine.progress import StepTally
from trainworks.engine.protocol import StepEvent
from trainworks.facts.rows import Facts
from trainworks.plan.resolve import plan_row
from trainworks.render.dockerfile import render
from trainworks.render.steps import BuildStep, build_steps

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


def test_steps_belong_to_the_component_of_their_stage() -> None:
    steps = build_steps(RECORDED, STAGES)
    assert [(step.component, step.text.split()[0]) for step in steps] == [
        ("system", "RUN"),
        ("system", "RUN"),
        ("torch", "RUN"),
        ("image", "COPY"),
        ("image", "COPY"),
        ("image", "RUN"),
    ]
    assert steps[1].text.endswith("sleep 1; echo more")


def test_every_instruction_of_every_target_is_one_step(facts: Facts) -> None:
    for row in facts.targets:
        text = render(plan_row(row, facts), facts, check=False).dockerfile
        stages = {name: name for name in re.findall(r"^FROM .* AS (\S+)$", text, re.MULTILINE)}
        steps = build_steps(text, stages)
        assert len(steps) == len(re.findall(r"^(?:RUN|COPY|ADD) ", text, re.MULTILINE)), row
        assert all(step.component for step in steps)


@pytest.mark.parametrize("engine", ["buildkit", "buildah"])
@pytest.mark.parametrize("log", ["success", "cached"])
def test_what_an_engine_says_ends_every_step_once(engine: str, log: str) -> None:
    tally = StepTally(build_steps(RECORDED, STAGES))
    counts = []
    for event in events_of(LOGS / f"{engine}-{log}.txt", STAGES):
        tally.add(event)
        counts.append(tally.done)
    assert counts == sorted(counts)
    assert tally.done == tally.total == 6


def test_a_step_whose_variables_the_engine_shows_with_their_values_is_found() -> None:
    first = BuildStep(component="image", text="COPY --from=a $X /")
    second = BuildStep(component="image", text="RUN b")
    tally = StepTally((first, second))
    tally.add(StepEvent(component="image", step="COPY --from=a /x /", state="done", seconds=3))
    tally.add(StepEvent(component="image", step="ENV A=b", state="done"))
    assert (tally.done, tally.total) == (1, 2)
