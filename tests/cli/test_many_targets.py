"""Test many targets in one run: their choice, their order, the effects of one failure or Ctrl-C,
and the end.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.stand_in import write_stand_in
from trainworks.build.matrix import (
    PlannedTarget,
    RunSummary,
    TargetSummary,
    as_text,
    build_many,
    worst,
)
from trainworks.build.options import BuildOrder
from trainworks.build.session import BuildSession
from trainworks.cli import main
from trainworks.errors import UnknownNameError
from trainworks.facts.rows import Facts
from trainworks.inputs.sources import sources_of
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for, rows_like, select_row

CPU = "pytorch-2.13.0-cpu-py311-debian12"

# Choosing.


def test_every_target_can_be_asked_for_by_its_request(facts: Facts) -> None:
    assert [select_row(request_for(row, facts), facts) for row in facts.targets] == list(
        facts.targets
    )


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([CPU], {CPU}),
        (["*-cpu-*-debian12"], {CPU, "tensorflow-2.21.0-cpu-py311-debian12"}),
        (
            ["tensorflow-*-cpu-*-debian12", "pytorch-*-cpu-*-debian12"],
            {CPU, "tensorflow-2.21.0-cpu-py311-debian12"},
        ),
    ],
)
def test_patterns_choose_by_name(facts: Facts, patterns: list[str], expected: set[str]) -> None:
    assert {facts.name_of(row) for row in rows_like(patterns, facts)} == expected


def test_no_pattern_is_every_target_and_one_that_fits_none_is_an_error(facts: Facts) -> None:
    assert len(rows_like([], facts)) == len(facts.targets)
    with pytest.raises(UnknownNameError, match="pytroch"):
        rows_like(["pytorch-*", "pytroch-*"], facts)


# Running: real processes, with a program in the place of buildah.

SOME = "pytorch-2.1[3-5].*-debian12"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Targets whose sources are in a mirror, and a stand-in for buildah that builds them."""

    root: Path
    folder: Path
    names: tuple[str, ...]
    capsys: pytest.CaptureFixture[str]

    def command(self, *words: str) -> tuple[str, ...]:
        more = (
            "--mirror",
            str(self.folder / "mirror"),
            "--until",
            "build",
            "--engine",
            "buildah",
            "--format",
            "json",
        )
        return (sys.executable, str(self.root / "build.py"), "--only", SOME, *more, *words)

    def run(self, *words: str) -> tuple[int, list[dict[str, Any]], str]:
        status = main(self.command(*words)[2:], self.root)
        output, errors = self.capsys.readouterr()
        return status, json.loads(output)["targets"], errors

    def set(self, name: str, value: str) -> None:
        (self.folder / name).write_text(value, encoding="utf-8")


@pytest.fixture
def bench(
    root: Path,
    facts: Facts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Bench:
    write_stand_in(tmp_path)
    for name in ("PATH", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mirror").mkdir()
    rows = rows_like([SOME], facts)
    for row in rows:
        for _, artifact in sources_of(make_plan(request_for(row, facts), facts)):
            (tmp_path / "mirror" / artifact.file).touch()
    assert len(rows) >= 3
    return Bench(
        root=root, folder=tmp_path, names=tuple(facts.name_of(row) for row in rows), capsys=capsys
    )


def test_one_failure_takes_no_other_with_it_and_the_next_run_goes_on(bench: Bench) -> None:
    bench.set("fails", "2.14.1")
    broken = {name for name in bench.names if "2.14.1" in name}
    assert broken
    expected = {name: "failed" if name in broken else "done" for name in bench.names}
    status, targets, output = bench.run()
    assert {target["target"]: target["outcome"] for target in targets} == expected
    assert {target["exit_status"] for target in targets} == {0, 7}
    assert status == 7
    for target in targets:
        assert f"{target['target']}: {target['outcome']}" in output
        if target["outcome"] == "failed":
            assert target["report"]["error"] == "BuildError"
            assert f"{target['target']}: failed: {target['cause']}\n" in output
    bench.set("fails", "")
    status, targets, _ = bench.run("-j", "3")
    now = {name: "done" if name in broken else "unchanged" for name in bench.names}
    assert {target["target"]: target["outcome"] for target in targets} == now
    assert status == 0


def test_an_unchanged_image_needs_no_sources(bench: Bench) -> None:
    status, targets, output = bench.run()
    assert status == 0, output
    for path in (bench.folder / "mirror").iterdir():
        path.unlink()
    status, targets, output = bench.run()
    assert {target["outcome"] for target in targets} == {"unchanged"}
    assert (status, "downloading" in output) == (0, False)


def test_two_run_at_once_and_never_three(bench: Bench) -> None:
    bench.set("meets", "2")
    status, targets, _ = bench.run("-j", "2")
    assert status == 0, targets
    assert (bench.folder / "most").read_text(encoding="utf-8") == "2"


def test_ctrl_c_stops_all_and_says_of_each_how_it_ended(bench: Bench) -> None:
    bench.set("waits", "pytorch")
    process = subprocess.Popen(
        bench.command("-j", "2", "--verbose"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stdout, process.stderr:
        up: set[str] = set()
        while len(up) < 2:
            line = process.stderr.readline()
            assert line, "it ended before two builds ran"
            target, _, output = line.partition(":")
            if output.strip() == "up":
                up.add(target)
        builds = [int(path.name) for path in (bench.folder / "running").iterdir()]
        process.send_signal(signal.SIGINT)
        targets = json.loads(process.stdout.read())["targets"]
        printed_output = process.stderr.read()
    assert process.returncode == 130
    assert {target["target"] for target in targets if target["outcome"] == "stopped"} == up
    assert {target["outcome"] for target in targets if target["target"] not in up} == {
        "not started"
    }
    assert len(builds) == 2
    assert [number for number in builds if Path(f"/proc/{number}").exists()] == []
    assert "Traceback" not in printed_output


def test_a_defect_of_one_target_is_its_own(facts: Facts, root: Path, tmp_path: Path) -> None:
    rows = rows_like(["*-cpu-*-debian12"], facts)
    good, other = (request_for(row, facts) for row in rows)
    targets = [
        PlannedTarget(
            name="no plan", request=other, error=UnknownNameError("there is no such component")
        ),
        PlannedTarget(name="good", request=good, plan=make_plan(good, facts)),
    ]
    order = BuildOrder(until="render", output=tmp_path)
    run_result = build_many(targets, BuildSession(root=root, facts=facts), order, at_once=2)
    assert [target.outcome for target in run_result.targets] == ["failed", "done"]
    assert run_result.targets[0].cause == "there is no such component"


# Summing up.


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([], 0),
        ([0, 0], 0),
        ([0, 8], 8),
        ([8, 7, 0], 7),
        ([7, 11], 11),
        ([8, 4, 11], 11),
        ([1, 8], 1),
    ],
)
def test_the_exit_status_is_that_of_the_target_that_failed_earliest(
    statuses: list[int], expected: int
) -> None:
    assert (
        worst(
            [TargetSummary(target="t", outcome="done", exit_status=status) for status in statuses]
        )
        == expected
    )


def test_the_table() -> None:
    results = (
        TargetSummary(target="one", outcome="done", seconds=43.2, size=1_140_000_000),
        TargetSummary(
            target="two-longer",
            outcome="failed",
            seconds=3,
            cause="torch: hash differs",
            exit_status=7,
        ),
        TargetSummary(target="three", outcome="skipped", cause="2 inputs not locked"),
    )
    assert as_text(RunSummary(targets=results, seconds=46.21, at_once=2)) == (
        "target      outcome  seconds  size     cause\n"
        "one         done     43.2     1.14 GB\n"
        "two-longer  failed   3.0      -        torch: hash differs\n"
        "three       skipped  -        -        2 inputs not locked\n"
        "3 targets in 46.2 s, 2 at once: 1 done, 1 skipped, 1 failed\n"
    )


# The command.


Command = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def command(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Give the command line with JSON, on a machine without an engine."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")

    def run(*words: str) -> tuple[int, Any, str]:
        status = main((*words, "--format", "json"), root)
        output, errors = capsys.readouterr()
        return status, json.loads(output), errors

    return run


def test_contexts_of_several_targets_in_one_run(command: Command, tmp_path: Path) -> None:
    status, report, output = command(
        "--only",
        "*-cpu-*-debian12",
        "-j",
        "2",
        "--until",
        "render",
        "--output",
        str(tmp_path),
        "--without",
        "mpi4py",
    )
    assert status == 0
    assert [target["outcome"] for target in report["targets"]] == ["done", "done"]
    assert {path.name for path in tmp_path.iterdir()} == {
        target["target"] for target in report["targets"]
    }
    assert not (tmp_path / CPU / "requirements" / "mpi4py.txt").exists()
    assert f"{CPU}: done\n" in output


def test_a_target_that_cannot_be_planned_fails_alone(command: Command) -> None:
    status, report, _ = command("--only", "*-cpu-*", "--with", "horovod", "--until", "plan")
    assert status == 4
    assert {target["outcome"] for target in report["targets"]} == {"failed"}
    assert "horovod" in report["targets"][0]["cause"]


@pytest.mark.parametrize(
    ("more", "outcome", "expected"), [((), "skipped", 0), (("--strict",), "failed", 11)]
)
def test_unlocked_targets_are_skipped_with_the_reason(
    root: Path,
    facts: Facts,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    outcome: str,
    expected: int,
) -> None:
    name = next(
        facts.name_of(row)
        for row in facts.targets
        if make_plan(request_for(row, facts), facts).unlocked
    )
    assert main(["--only", name, "--format", "json", *more], root) == expected
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    assert target["outcome"] == outcome
    assert "inputs not locked, first " in target["cause"]


def test_no_engine_is_one_error_and_nothing_is_started(command: Command) -> None:
    status, report, output = command("--only", "*-cpu-*")
    assert (status, report["error"]) == (6, "EngineUnavailableError")
    assert CPU not in output


@pytest.mark.parametrize(
    "words", [("--all", "--cuda", "cpu"), ("--only", CPU, "--framework", "pytorch")]
)
def test_names_and_values_do_not_go_together(root: Path, words: tuple[str, ...]) -> None:
    assert main(words, root) == 2
