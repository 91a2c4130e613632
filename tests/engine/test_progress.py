"""Test the parsers on the output of real engines."""

from __future__ import annotations

import pytest

from engine.helpers import LOGS, events_of, log_of
from trainworks.engine.progress import TAIL, BuildahParser, BuildKitParser, StepLog
from trainworks.engine.protocol import StepEvent

COMPONENTS = {"first": "python", "second": "metis", "final": "launcher"}
ENGINES = ("buildkit", "buildah")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_step_belongs_to_its_component(engine: str) -> None:
    events = events_of(LOGS / f"{engine}-success.txt", COMPONENTS)
    steps = {event.step: event.component for event in events if event.state == "started"}
    assert {component for step, component in steps.items() if "echo one" in step} == {"python"}
    assert {component for step, component in steps.items() if "echo sec" in step} == {"metis"}
    assert {component for step, component in steps.items() if step.startswith("COPY")} == {
        "launcher"
    }
    assert {
        component for step, component in steps.items() if step.startswith("RUN --mount=type=bind")
    } == {"launcher"}


@pytest.mark.parametrize("engine", ENGINES)
def test_output_lines_are_those_of_the_commands_only(engine: str) -> None:
    events = events_of(LOGS / f"{engine}-success.txt", COMPONENTS)
    lines = [event.text for event in events if event.state == "output" and event.component]
    assert sorted(lines) == ["more", "no newline", "one", "run", "two"]


@pytest.mark.parametrize("engine", ENGINES)
def test_started_comes_first_and_every_run_step_ends_once(engine: str) -> None:
    events = events_of(LOGS / f"{engine}-success.txt", COMPONENTS)
    for step in {event.step for event in events if event.step.startswith("RUN")}:
        states = [event.state for event in events if event.step == step]
        assert states[0] == "started"
        assert states[-1] == "done"
        assert states.count("done") == 1
        assert set(states[1:-1]) <= {"output"}


def test_buildkit_says_how_long_a_step_took() -> None:
    events = events_of(LOGS / "buildkit-success.txt", COMPONENTS)
    (seconds,) = [
        event.seconds for event in events if event.state == "done" and "echo sec" in event.step
    ]
    assert seconds is not None
    assert seconds > 2.0


def test_buildah_steps_of_two_stages_may_alternate() -> None:
    lines = (
        "[1/2] STEP 1/2: FROM base AS first",
        "[2/2] STEP 1/3: FROM base AS final",
        "[2/2] STEP 2/3: RUN one",
        "[1/2] STEP 2/2: RUN two",
        "[2/2] STEP 3/3: COPY --from=first / /",
    )
    parser = BuildahParser(COMPONENTS)
    events = [event for line in lines for event in parser.feed(line)]
    started = {event.step: event.component for event in events if event.state == "started"}
    assert started["RUN one"] == "launcher"
    assert started["RUN two"] == "python"
    assert started["COPY --from=first / /"] == "launcher"


def test_buildah_names_the_step_that_failed_though_another_stage_went_on() -> None:
    lines = (
        "[1/2] STEP 1/2: FROM base AS first",
        '[1/2] STEP 2/2: RUN one     "quoted": here',
        "its words",
        "[2/2] STEP 1/2: FROM base AS second",
        "[2/2] STEP 2/2: ARG x=1",
        'Error: building at STEP "RUN one "quoted": here": while running runtime: exit status 7',
    )
    parser = BuildahParser(COMPONENTS)
    events = [event for line in lines for event in parser.feed(line)]
    (failed,) = [event for event in events if event.state == "failed"]
    assert (failed.component, failed.step) == ("python", 'RUN one     "quoted": here')
    log = log_of(events)
    assert log.failed is not None
    assert log.failed.lines[-1:] == ("its words",)


@pytest.mark.parametrize("engine", ENGINES)
def test_cached_steps_are_cached(engine: str) -> None:
    events = events_of(LOGS / f"{engine}-cached.txt", COMPONENTS)
    states = {event.step: event.state for event in events if event.step.startswith(("RUN", "COPY"))}
    assert len(states) == 6
    assert set(states.values()) == {"cached"}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_failed_step_has_its_component_status_and_last_lines(engine: str) -> None:
    failed = log_of(events_of(LOGS / f"{engine}-failed.txt", COMPONENTS, finish=False)).failed
    assert failed is not None
    assert failed.component == "metis"
    assert failed.step.startswith("RUN for i in 1 2 3")
    assert failed.status == 7
    assert failed.lines == ("line 1", "line 2", "line 3", "exit code: 3", "unfinishederr")


def test_buildx_lines_without_digests_and_with_a_platform() -> None:
    # The shape of buildx 0.13 (`#0` header, no digest lines, timed context
    # transfer), which is not on every machine.
    lines = (
        '#0 building with "default" instance using docker driver',
        "#7 [linux/amd64 torch 2/3] RUN uv pip install torch",
        "#7 0.512 Resolved 12 packages",
        "#8 [metis 2/2] RUN make",
        "#8 0.1 cc",
        "#7 [linux/amd64 torch 2/3] RUN uv pip install torch",
        "#7 1.900 Installed 12 packages",
        "#7 DONE 2.0s",
        "#8 CANCELED",
    )
    parser = BuildKitParser({"torch": "torch", "metis": "metis"})
    events = [event for line in lines for event in parser.feed(line)]
    torch = [(event.state, event.text) for event in events if event.component == "torch"]
    assert torch == [
        ("started", ""),
        ("output", "Resolved 12 packages"),
        ("output", "Installed 12 packages"),
        ("done", ""),
    ]


def test_a_stage_without_a_name_has_no_component() -> None:
    parser = BuildKitParser({"torch": "torch", "metis": "metis"})
    assert [event.component for event in parser.feed("#3 [2/3] RUN true")] == [""]
    assert [event.component for event in parser.feed("#4 [stage-1 2/3] RUN true")] == [""]


def test_a_program_may_print_what_looks_like_buildah() -> None:
    parser = BuildahParser({"a": "torch"})
    lines = (
        "STEP 1/2: FROM x AS a",
        "STEP 2/2: RUN make",
        "Error: this is make's own",
        "Successfully built wheel",
    )
    events = [event for line in lines for event in parser.feed(line)]
    assert [event.text for event in events if event.state == "output"] == list(lines[2:])
    assert not [event for event in events if event.state == "failed"]


def test_the_log_keeps_the_last_lines_of_each_step_and_forgets_finished_ones() -> None:
    log = StepLog()
    for number in range(TAIL * 3):
        log.add(StepEvent(component="a", step="RUN a", state="output", text=str(number)))
        log.add(StepEvent(component="b", step="RUN b", state="output", text=f"b{number}"))
    log.add(StepEvent(component="b", step="RUN b", state="done"))
    log.add(StepEvent(component="a", step="RUN a", state="failed", text="x: exit code: 2"))
    log.add(StepEvent(component="b", step="RUN b", state="failed", text="later"))
    assert log.failed is not None
    assert log.failed.component == "a"
    assert log.failed.lines == tuple(str(number) for number in range(TAIL * 2, TAIL * 3))


def test_an_engine_that_ends_without_a_word_blames_the_running_step() -> None:
    log = log_of(events_of(LOGS / "buildkit-failed.txt", COMPONENTS)[:0])
    assert log.broken_off("gone") is None
    log.add(StepEvent(component="torch", step="RUN pip", state="started"))
    step = log.broken_off("gone")
    assert step is not None
    assert (step.component, step.reason, step.status) == ("torch", "gone", None)
