"""Many targets in one run: what is chosen, in which order, what runs beside what, and how it all ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainworks.build.many import (
    Job,
    Result,
    Runner,
    as_text,
    choose_rows,
    chosen_targets,
    in_order,
    next_job,
    result_of,
    words_for_each,
    worst,
)
from trainworks.cli import main
from trainworks.cli.commands.build import parser
from trainworks.errors import UnknownNameError
from trainworks.facts.rows import Facts
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for, select_row
from trainworks.render.forecast import stage_keys

CPU = "pytorch-2.13.0-cpu-py311-debian12"


def job(name: str, *stages: str, program: str = "") -> Job:
    return Job(name=name, argv=(sys.executable, "-c", program), stages=stages)


# Choosing.


def test_every_target_can_be_asked_for_by_its_request(facts: Facts) -> None:
    assert [select_row(request_for(row, facts), facts) for row in facts.targets] == list(facts.targets)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([CPU], {CPU}),
        (["*-cpu-*"], {CPU, "tensorflow-2.21.0-cpu-py311-debian12"}),
        (["tensorflow-*-cpu-*", "pytorch-*-cpu-*"], {CPU, "tensorflow-2.21.0-cpu-py311-debian12"}),
    ],
)
def test_patterns_choose_by_name(facts: Facts, patterns: list[str], expected: set[str]) -> None:
    assert {facts.name_of(row) for row in choose_rows(patterns, facts)} == expected


def test_no_pattern_is_every_target_and_one_that_fits_none_is_an_error(facts: Facts) -> None:
    assert len(choose_rows([], facts)) == len(facts.targets)
    with pytest.raises(UnknownNameError, match="pytroch"):
        choose_rows(["pytorch-*", "pytroch-*"], facts)


# What targets share, and in which order they come.


def test_targets_share_the_stages_that_are_made_of_the_same(facts: Facts) -> None:
    keys = {
        target.name: stage_keys(target.plan, target.rendering)
        for target in chosen_targets(choose_rows(["pytorch-2.1*-debian1?"], facts), facts)
        if target.plan and target.rendering
    }
    first, second = keys["pytorch-2.14.1-cu130-py311-debian12"], keys["pytorch-2.15.0-cu132-py311-debian12"]
    assert first[:2] == second[:2], "system and builder"
    assert set(first) != set(second), "torch"
    assert set(first).isdisjoint(keys["pytorch-2.14.1-cu130-py313-debian13"]), "another base"


def test_targets_that_share_stages_follow_each_other() -> None:
    jobs = [job("a", "12", "x"), job("b", "13", "x"), job("c", "12", "y"), job("d", "13", "z"), job("e", "12", "x")]
    assert [each.name for each in in_order(jobs)] == ["a", "e", "c", "b", "d"]


STAGES = st.lists(st.sampled_from("abcd"), unique=True, max_size=3)


@given(st.lists(STAGES, max_size=6), st.integers(1, 4), st.booleans())
def test_every_job_runs_once_and_no_stage_is_built_twice_at_once(
    stages: list[list[str]], at_once: int, merges: bool
) -> None:
    waiting = [job(str(number), *names) for number, names in enumerate(stages)]
    running: list[Job] = []
    built: set[str] = set()
    ended = []
    while waiting or running:
        while len(running) < at_once and (chosen := next_job(waiting, running, built, merges=merges)):
            waiting.remove(chosen)
            running.append(chosen)
        if not merges:
            in_work = [stage for each in running for stage in each.stages if stage not in built]
            assert len(in_work) == len(set(in_work))
        assert running, "something always runs"
        done = running.pop(0)
        built.update(done.stages)
        ended.append(done.name)
    assert sorted(ended) == sorted(str(number) for number in range(len(stages)))


def test_the_command_line_goes_on_to_each_target_without_what_is_the_runs_own() -> None:
    words = ["--all", "--only", "a*", "-j", "4", "--jobs=3", "--format", "json", "--junit", "f", "--output", "d"]
    more = ["--until", "build", "--with", "rmm-python", "--no-cache", "--mirror", "/m", "--offline", "--strict"]
    assert words_for_each([*words, *more, "--engine", "buildah"]) == more


def test_every_option_is_either_the_runs_own_or_goes_on() -> None:
    flags = [flag for action in parser()._actions for flag in action.option_strings if flag.startswith("--")]
    bare = {"--all", "--bake"}
    own = {flag for flag in flags if not words_for_each([flag] if flag in bare else [flag, "1"])}
    assert own == {
        *("--all", "--bake", "--only", "--jobs"),
        *("--format", "--output", "--junit", "--engine", "--root"),
    }


# Running: real processes.


def run_all(jobs: Sequence[Job], at_once: int) -> tuple[dict[str, Result], list[tuple[str, str]]]:
    lines: list[tuple[str, str]] = []
    results: dict[str, Result] = {}

    def take(result: Result) -> None:
        results[result.target] = result

    Runner(lambda name, line: lines.append((name, line))).run(jobs, at_once, merges=True, take=take)
    return results, lines


def test_one_failure_takes_no_other_with_it() -> None:
    good = "import sys; print('step', file=sys.stderr); print('{\"size\": 12, \"unchanged\": true}')"
    bad = "import sys; print('error: no', file=sys.stderr); print('{\"message\": \"no\\\\nreally\"}'); sys.exit(7)"
    jobs = [
        job("fails", program=bad),
        job("falls over", program="import os; os.abort()"),
        Job(name="cannot start", argv=("/nonexistent/program",)),
        job("works", program=good),
    ]
    results, lines = run_all(jobs, 1)
    assert (results["fails"].outcome, results["fails"].exit_status, results["fails"].cause) == ("failed", 7, "no")
    assert (results["falls over"].outcome, results["falls over"].exit_status) == ("failed", 128 + signal.SIGABRT)
    assert "No such file" in results["cannot start"].cause
    assert (results["works"].outcome, results["works"].size) == ("unchanged", 12)
    assert ("works", "step") in lines
    assert ("fails", "error: no") in lines


MEETS = """
import pathlib, time
here = pathlib.Path({here!r})
mine = here / "{name}.running"
mine.touch()
assert len(list(here.glob("*.running"))) <= 2
end = time.monotonic() + 30
(here / "{name}.met").touch()
while not (here / "{other}.met").exists():
    assert time.monotonic() < end
    time.sleep(0.01)
mine.unlink()
print("{{}}")
"""
"""A job that ends only when another one runs beside it, and fails when two do."""


def test_two_run_at_once_and_never_three(tmp_path: Path) -> None:
    pairs = {"a": "b", "b": "a", "c": "d", "d": "c"}
    jobs = [job(name, program=MEETS.format(here=str(tmp_path), name=name, other=pairs[name])) for name in pairs]
    results, _ = run_all(jobs, 2)
    assert {name: result.outcome for name, result in results.items()} == dict.fromkeys(pairs, "done")


INTERRUPTED = """
import sys
from trainworks.build.many import Job, Runner
waits = "import signal, sys; print('up', file=sys.stderr, flush=True); signal.pause()"
jobs = [Job(name=name, argv=(sys.executable, "-c", waits)) for name in "abc"]
def report(name, line):
    sys.stdout.write(f"{name} {line}\\n")
    sys.stdout.flush()
def take(result):
    # One write: `print` makes several, between which the threads of the jobs may write.
    report(result.target, result.outcome)
try:
    Runner(report).run(jobs, 2, merges=True, take=take)
except KeyboardInterrupt:
    print("raised", flush=True)
"""


def test_ctrl_c_stops_all_and_says_of_each_how_it_ended() -> None:
    process = subprocess.Popen((sys.executable, "-c", INTERRUPTED), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        up = {process.stdout.readline(), process.stdout.readline()}
        group = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        said = process.stdout.read().splitlines()
    assert up == {"a up\n", "b up\n"}
    assert len(group) == 2
    assert said[-1] == "raised"
    assert {line for line in said if line.endswith("stopped")} == {"a stopped", "b stopped"}
    assert [line for line in said if line.startswith("c ")] == [], "the third one was never started"
    assert [identifier for identifier in group if Path(f"/proc/{identifier}").exists()] == []


def children_of(identifier: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{identifier}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


# Summing up.


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [([], 0), ([0, 0], 0), ([0, 8], 8), ([8, 7, 0], 7), ([7, 11], 11), ([8, 4, 11], 11), ([1, 8], 1)],
)
def test_the_exit_status_is_that_of_the_target_that_got_least_far(statuses: list[int], expected: int) -> None:
    assert worst([Result(target="t", outcome="done", exit_status=status) for status in statuses]) == expected


def test_the_first_broken_promise_is_the_cause() -> None:
    checks = [
        {"component": "torch", "title": "imports", "passed": True, "detail": ""},
        {"component": "nccl", "title": "libnccl loads", "passed": False, "detail": "no such file"},
    ]
    result = result_of("t", 8, json.dumps({"size": 5, "checks": checks}).encode(), "hint: look", 3.21)
    assert (result.cause, result.size, result.seconds) == ("1 of 2 checks failed, first nccl: libnccl loads", 5, 3.2)


def test_the_table() -> None:
    results = [
        Result(target="one", outcome="done", seconds=43.2, size=1_140_000_000),
        Result(target="two-longer", outcome="failed", seconds=3, cause="torch: hash differs", exit_status=7),
        Result(target="three", outcome="skipped", cause="2 inputs not locked"),
    ]
    assert as_text(results, 46.21, 2) == (
        "target      outcome  seconds  size     cause\n"
        "one         done     43.2     1.14 GB\n"
        "two-longer  failed   3.0      -        torch: hash differs\n"
        "three       skipped  -        -        2 inputs not locked\n"
        "3 targets in 46.2 s, 2 at once: 1 done, 1 skipped, 1 failed\n"
    )


# The command.


def command(root: Path, *words: str) -> tuple[int, Any, str]:
    done = subprocess.run(
        (sys.executable, str(root / "build.py"), *words, "--format", "json"),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PATH": "", "DOCKER_HOST": "unix:///nonexistent/docker.sock"},
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def test_contexts_of_several_targets_in_one_run(root: Path, tmp_path: Path) -> None:
    status, report, said = command(
        root, "--only", "*-cpu-*", "-j", "2", "--until", "render", "--output", str(tmp_path), "--without", "mpi4py"
    )
    assert status == 0
    assert [target["outcome"] for target in report["targets"]] == ["done", "done"]
    assert {path.name for path in tmp_path.iterdir()} == {target["target"] for target in report["targets"]}
    assert not (tmp_path / CPU / "requirements" / "mpi4py.txt").exists()
    assert f"{CPU}: done\n" in said


def test_a_target_that_cannot_be_planned_fails_alone(root: Path) -> None:
    status, report, _ = command(root, "--only", "*-cpu-*", "--with", "horovod", "--until", "plan")
    assert status == 4
    assert {target["outcome"] for target in report["targets"]} == {"failed"}
    assert "horovod" in report["targets"][0]["cause"]


@pytest.mark.parametrize(("more", "outcome", "expected"), [((), "skipped", 0), (("--strict",), "failed", 11)])
def test_unlocked_targets_are_skipped_with_the_reason(
    root: Path, facts: Facts, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], outcome: str, expected: int
) -> None:
    name = next(facts.name_of(row) for row in facts.targets if make_plan(request_for(row, facts), facts).unlocked)
    assert main(["--only", name, "--format", "json", *more], root) == expected
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    assert target["outcome"] == outcome
    assert "inputs not locked, first " in target["cause"]


def test_no_engine_is_one_error_and_nothing_is_started(root: Path) -> None:
    status, report, said = command(root, "--only", "*-cpu-*")
    assert (status, report["error"]) == (6, "EngineUnavailableError")
    assert CPU not in said


@pytest.mark.parametrize("words", [("--all", "--cuda", "cpu"), ("--only", CPU, "--framework", "pytorch")])
def test_names_and_values_do_not_go_together(root: Path, words: tuple[str, ...]) -> None:
    assert main(words, root) == 2
