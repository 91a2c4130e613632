"""``--format json``: one document on stdout and nothing else, in every command and however it ends.

Docs/json.md.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from documented import DOCUMENTED, PAGE
from trainworks.attestation.verify import Verified
from trainworks.build.outdated import OutdatedReport
from trainworks.cli import main
from trainworks.cli.commands import BUILD, COMMANDS, grammar_of
from trainworks.cli.grammar import CPU_TARGET
from trainworks.inspect.image_difference import ImageDifference
from trainworks.inspect.size_report import SizeReport
from trainworks.registry.push import Pushed

CPU = ("--framework", "pytorch", "--cuda", "cpu")
ENGINE = ("--engine", "docker")

RESULTS = {
    "build --list": ("--list",),
    "build --until plan": (*CPU, "--until", "plan"),
    "build --until render": (*CPU, "--until", "render"),
    "build --bake": ("--bake", "--only", CPU_TARGET, "--output", "bake"),
    "check": ("check", "--only", CPU_TARGET),
    "help": ("help", "push"),
    "lock --check": ("lock", "--check", "--only", CPU_TARGET),
}
"""Command lines that need no engine and no network, by their row of docs/json.md."""

ERRORS: Sequence[tuple[tuple[str, ...], int]] = (
    (("extend", "--base", "a:1", "--tag", "b:1", "--source", "code", *ENGINE), 6),
    (("diff", "a", "b", *ENGINE), 6),
    (("report", "a", *ENGINE), 6),
    (("push", "a:1", "--repository", "r.example.org/a", *ENGINE), 6),
    (("prove", CPU_TARGET, "--output", "proof", *ENGINE), 6),
    ((*CPU, *ENGINE), 6),
    (("--only", CPU_TARGET, *ENGINE), 6),
    (("promote", "a b", "r.example.org/a"), 15),
    (("verify", f"sha256:{'0' * 64}", "absent.jsonl"), 9),
    (("lock", "--only", "nonsense"), 4),
    (("mirror", "folder", "--only", "nonsense"), 4),
    (("check", "--only", "nonsense"), 4),
    (("outdated", "a", *ENGINE), 6),
    (("--list", "--root", "/nonexistent"), 9),
    (("help", "nonsense"), 2),
    (("nonsense",), 2),
    (("--frame", "pytorch"), 2),
    ((*CPU, "--cuda"), 2),
)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of the test's own, where no engine answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()


def document(
    words: Sequence[str], root: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, Any]:
    status = main([*words, "--format", "json"], root)
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", RESULTS)
def test_results_are_as_documented(
    command: str, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, content = document(RESULTS[command], checkout, capsys)
    assert status == 0
    kind, keys = DOCUMENTED[command]
    assert type(content).__name__ == {"list": "list", "object": "dict"}[kind]
    value = content[0] if kind == "list" else content
    assert set(value) == keys


@pytest.mark.parametrize(("words", "status"), ERRORS, ids=[" ".join(words) for words, _ in ERRORS])
def test_errors_are_one_document(
    words: tuple[str, ...], status: int, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_status, content = document(words, root, capsys)
    assert (exit_status, content["exit_status"]) == (status, status), content
    assert content.keys() == {"error", "message", "hint", "exit_status"}
    name = words[0] if words[0] in COMMANDS else BUILD
    assert status in dict(grammar_of(name).manual.exit_statuses), (
        "an exit status that the help does not tell"
    )


def test_every_command_is_walked_and_takes_the_option() -> None:
    failing = [words for words, _ in ERRORS]
    walked = set()
    for words in (*RESULTS.values(), *failing):
        walked.add(words[0] if words[0] in COMMANDS else BUILD)
    assert walked == set(COMMANDS)
    for name in COMMANDS:
        assert any(
            "--format" in argument_row["names"] and "json" in argument_row["choices"]
            for argument_row in grammar_of(name).arguments()
        ), name


def test_every_command_is_documented() -> None:
    assert {row.split()[0] for row in DOCUMENTED} == set(COMMANDS)


def test_results_of_engines_and_registries_are_as_documented() -> None:
    def fields(kind: type) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    assert DOCUMENTED["diff"][1] == fields(ImageDifference) | {"folders"}
    assert DOCUMENTED["report"][1] == fields(SizeReport)
    assert DOCUMENTED["outdated"][1] == fields(OutdatedReport)
    assert DOCUMENTED["verify"][1] == fields(Verified) | {"image"}
    pushed = re.search(r"`push` .*a list with ((?:`\w+` ?)+)", PAGE)
    assert pushed is not None
    assert set(re.findall(r"`(\w+)`", pushed[1])) == fields(Pushed)


def test_a_lock_that_does_not_fit_is_the_result(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = checkout / "images" / "pytorch.toml"
    rows.write_text(
        rows.read_text(encoding="utf-8").replace('torch = "2.13.0+cpu"', 'torch = "2.13.1+cpu"')
    )
    status, content = document(("lock", "--check", "--only", CPU_TARGET), checkout, capsys)
    assert status == 11
    assert content.keys() == {"problems", "unlocked"}
    assert len(content["problems"]) >= 1


def test_an_error_is_one_document_where_nobody_reads_the_text(root: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    argv = [
        sys.executable,
        str(root / "build.py"),
        "check",
        "--only",
        "nonsense",
        "--format",
        "json",
    ]
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=writer, text=True, check=False, timeout=300
    )
    os.close(writer)
    assert (done.returncode, json.loads(done.stdout)["exit_status"]) == (4, 4)


def test_nothing_but_the_document_is_on_stdout_of_a_process(root: Path) -> None:
    argv = [sys.executable, str(root / "build.py"), "help", "push", "--format=json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    assert json.loads(done.stdout)["commands"][0]["command"] == "push"
