"""Test the error that a user reads, from the output of real engines and tools."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from engine.helpers import LOGS, events_of, log_of
from trainworks.engine.failures import Failure, explain, shorten
from trainworks.engine.progress import FailedStep, StepLog
from trainworks.engine.protocol import StepEvent
from trainworks.errors import (
    BuildError,
    EngineError,
    EngineUnavailableError,
    OutputError,
    TrainworksError,
)

COMPONENTS = {"first": "python", "second": "metis"}
LOOP = (
    'RUN for i in 1 2 3; do echo line $i; done; echo "exit code: 3"; echo err >&2; printf'
    " unfinished; exit 7"
)
SPACE = "/somewhere is on a disk with 0.01 GB free of 0.06 GB."


def explained(name: str, components: Mapping[str, str]) -> TrainworksError:
    log = LOGS / name
    lines = tuple(line for line in log.read_text().splitlines() if line.strip())[-20:]
    steps = log_of(events_of(log, components, finish=False))
    engine = "buildah" if name.startswith("buildah") else "docker"
    failure = Failure(
        target="cpu",
        engine=engine,
        status=1,
        daemon=not name.startswith("buildah"),
        step=steps.broken_off(lines[-1]),
        lines=lines,
    )
    return explain(failure, alive=str, space=lambda: SPACE)


@pytest.mark.parametrize("engine", ["buildkit", "buildah"])
def test_what_a_program_says_of_its_failure_is_shown_without_passwords(engine: str) -> None:
    error = explained(f"{engine}-uv-hash.txt", {"torch": "torch"})
    assert isinstance(error, BuildError)
    assert error.message.splitlines()[0] == "building cpu failed in component torch"
    assert "Hash mismatch for `demo==1.0`" in error.message
    assert "user:password" not in str(explained(f"{engine}-uv-unreachable.txt", {"torch": "torch"}))


@pytest.mark.parametrize("engine", ["buildkit", "buildah"])
def test_a_failing_step_is_shown_with_status_and_last_lines(engine: str) -> None:
    assert explained(f"{engine}-failed.txt", COMPONENTS).message.splitlines() == [
        "building cpu failed in component metis",
        f"  step: {LOOP}",
        "  end: exit status 7",
        "  its last lines:",
        "    line 1",
        "    line 2",
        "    line 3",
        "    exit code: 3",
        "    unfinishederr",
    ]


@pytest.mark.parametrize(
    "message",
    [
        (
            "  /tmp/build/csrc/softmax.cu:21:10: fatal error:"
            " cuda_profiler_api.h: No such file or directory"
        ),
        '  kernel.cu(7): error: identifier "blockDimm" is undefined',
        "csrc/x.cpp:3:1: error: expected unqualified-id before 'return'",
    ],
)
def test_a_compilers_error_is_shown_before_the_traceback_of_what_started_it(message: str) -> None:
    log = StepLog()
    for text in (message, *(f"  File x.py, line {number}, in build_ext" for number in range(100))):
        log.add(StepEvent(component="apex", step="RUN x", state="output", text=text))
    log.add(StepEvent(component="apex", step="RUN x", state="failed", text="x: exit code: 1"))
    build_failure = Failure(
        target="wheels", engine="docker", status=1, step=log.failed, lines=(), daemon=True
    )
    text = str(explain(build_failure, alive=str, space=lambda: SPACE))
    assert f"  the compiler's first errors:\n    {message.strip()}\n  its last lines:\n" in text
    assert "line 99, in build_ext" in text


def failure(
    *, lines: tuple[str, ...] = (), reason: str = "x: exit code: 1", engine: str = "docker"
) -> Failure:
    step = FailedStep(component="torch", step="RUN x", reason=reason, lines=lines)
    return Failure(
        target="cpu", engine=engine, status=1, step=step, lines=(), daemon=engine == "docker"
    )


def test_a_crash_of_the_engine_is_no_failure_of_the_step_that_had_begun() -> None:
    """The build is tried again then, and the stage that failed before the crash fails alone."""
    error = explained("buildah-panic.txt", {"python-environment": "python", "torch": "torch"})
    assert isinstance(error, EngineError)
    assert error.message.startswith(
        "buildah itself failed during the build of cpu, torch: ARG TRAINWORKS"
    )
    assert error.message.endswith(
        "panic: runtime error: invalid memory address or nil pointer dereference"
    )


def test_a_full_disk_says_how_much_is_free_and_where() -> None:
    error = explain(
        failure(lines=("tar: ./x: Cannot write: No space left on device",)),
        alive=str,
        space=lambda: SPACE,
    )
    assert isinstance(error, OutputError)
    assert error.message.startswith(
        "the disk is full: the build of cpu, torch: RUN x could not write"
    )
    assert SPACE in error.message


def test_a_dead_daemon_is_named_with_the_step_it_died_in() -> None:
    error = explain(
        failure(
            reason=(
                "failed to receive status: rpc error:"
                " code = Unavailable desc = error reading from server: EOF"
            )
        ),
        alive=lambda: "the docker daemon at unix:///x does not answer",
        space=str,
    )
    assert isinstance(error, EngineUnavailableError)
    assert error.message.startswith(
        "the docker daemon stopped answering during the build of cpu, torch: RUN x"
    )


def test_words_of_a_command_are_not_taken_for_its_output() -> None:
    reason = (
        "executor failed running [/bin/sh -c echo connection"
        " refused no space left on device]: exit code: 1"
    )
    error = explain(failure(reason=reason, lines=("something else",)), alive=str, space=str)
    assert isinstance(error, BuildError)


def test_a_build_that_fails_before_its_first_step_shows_the_engines_words() -> None:
    lines = ("dockerfile parse error line 3: unknown instruction: RUNN",)
    error = explain(
        Failure(target="cpu", engine="docker", status=1, step=None, lines=lines, daemon=True),
        alive=str,
        space=str,
    )
    assert lines[0] in error.message
    assert "docker ended with status 1" in error.message


def test_long_instructions_are_shortened_to_one_line() -> None:
    assert len(shorten("RUN " + "x " * 500)) == 160
    assert shorten("RUN a  \\\n   b") == "RUN a \\ b"
