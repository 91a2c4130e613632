"""Names on the command line: what is chosen by them, what is said of unknown ones, and everything at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trainworks.cli import main
from trainworks.facts.rows import Facts

Fails = Callable[..., tuple[int, str]]


@pytest.fixture
def fails(root: Path, capsys: pytest.CaptureFixture[str]) -> Fails:
    """Give a command line that fails: its exit status and what it says."""

    def call(words: str) -> tuple[int, str]:
        status = main(words.split(), root)
        output, errors = capsys.readouterr()
        assert output == ""
        return status, errors

    return call


# Unknown names.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--framework pytorch --cuda cu999", "hint: available: cpu, cu121, "),
        ("--framework pytorch --cuda 12.1", "did you mean cu121?"),
        ("--framework tensorflow --cuda cu121", "hint: available: cpu, cu129"),
        ("--framework pytorch --cuda cu121 --framework-version 2.4", "did you mean 2.4.1? (available: 2.4.1)"),
        ("--framework pytorch --cuda cu121 --python 3.13", "hint: available: 3.11"),
        ("--framework torch --cuda cpu", "unknown framework 'torch'\n\nhint: did you mean pytorch? "),
        ("--framework keras --cuda cpu", "unknown framework 'keras'\n\nhint: available: mxnet, pytorch, tensorflow"),
        ("--only pytorch", "did you mean 'pytorch-*'? "),
        ("--only torch", "did you mean 'pytorch-*'? "),
        ("--only tf*", "did you mean 'tensorflow-*'? "),
        ("--only cpu", "did you mean '*-cpu-*'? "),
        ("--only 2.4", "did you mean pytorch-2.4.1-cu121-py311-debian12? "),
        ("check --only pytorch-2.4.1", "did you mean pytorch-2.4.1-cu121-py311-debian12? "),
    ],
)
def test_an_unknown_name(words: str, said: str, fails: Fails) -> None:
    status, errors = fails(words)
    assert (status, said in errors) == (4, True), errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("pytorch", "unknown command 'pytorch'\n\nhint: `python build.py help` lists"),
        ("images", "unknown command 'images'\n\nhint: `python build.py help` lists"),
        ("list", "unknown command 'list'\n\nhint: did you mean --list? "),
        ("reprot", "unknown command 'reprot'\n\nhint: did you mean report? "),
        ("--framework pytorch --cuda cu121 --version 2.4.1", "unknown option --version; did you mean --framework-ver"),
        ("--framework pytorch --cuda cu121 --tags 1", "unknown option --tags; did you mean --tag?"),
        ("--framework pytorch --cuda cu121 --nonsense", "error: unknown option --nonsense\n"),
    ],
)
def test_an_unknown_word(words: str, said: str, fails: Fails) -> None:
    status, errors = fails(words)
    assert (status, said in errors) == (2, True), errors


@pytest.mark.parametrize(
    ("status", "words", "said"),
    [
        (2, "--framework torch", ["2 problems", "--cuda must be given", "unknown framework 'torch'; did you mean"]),
        (2, "--cuda cu12", ["--framework must be given", "unknown --cuda 'cu12'; did you mean cu12"]),
        (
            2,
            "--framwork torch --cuda 12.1 --version 2.4 --sources vender",
            [
                "6 problems",
                "did you mean --framework?",
                "did you mean --framework-version?",
                "invalid choice: 'vender'; did you mean vendor?",
                "did you mean pytorch?",
                "did you mean cu121?",
                "did you mean 2.4.1?",
            ],
        ),
        (
            4,
            "--framework torch --cuda cu999 --python 2 --with nonsense --engine dokcer",
            [
                "5 problems",
                "did you mean pytorch?",
                "(available: mxnet, pytorch, tensorflow)",
                "unknown component in --with: 'nonsense'",
                "did you mean docker?",
            ],
        ),
        (2, "--offline --push", ["--offline needs", "--push needs", "--framework and --cuda must be given"]),
        (4, "check --only nothing --only nobody", ["'nothing'", "'nobody'"]),
        (2, "--list -j 2 --all --cuda cu999", ["--jobs: --list takes ", "unknown --cuda 'cu999'"]),
    ],
)  # fmt: skip
def test_all_that_is_wrong_is_said_at_once(status: int, words: str, said: list[str], fails: Fails) -> None:
    found, errors = fails(words)
    assert (found, [each for each in said if each not in errors]) == (status, []), errors


# A list of some targets.


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ("--cuda cu121", "*-cu121-*"),
        ("--framework tensorflow", "tensorflow-*"),
        ("--framework-version 2.13.0", "*-2.13.0-*"),
        ("--python 3.13", "*-py313-*"),
        ("--architecture arm64", "*-arm64"),
        ("--sources vendor", "*-vendor"),
        ("--only *cpu*", "*-cpu-*"),
        ("--framework pytorch --cuda cpu --only *arm64", "pytorch-*-cpu-*-arm64"),
    ],
)
def test_a_list_is_filtered(
    words: str, chosen: str, facts: Facts, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = {facts.name_of(row) for row in facts.targets if Path(facts.name_of(row)).match(chosen)}
    assert 0 < len(expected) < len(facts.targets)
    assert main(["--list", *words.split(), "--format", "json"], root) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == expected


def test_a_filtered_list_for_people(facts: Facts, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "*cpu*"], root) == 0
    assert len(capsys.readouterr().out.splitlines()) == sum("-cpu-" in facts.name_of(row) for row in facts.targets) + 1


@pytest.mark.parametrize("words", ["--until plan", "--engine docker", "--push", "--with metis", "-j 2"])
def test_a_list_refuses_what_cannot_filter(words: str, fails: Fails) -> None:
    status, errors = fails(f"--list {words}")
    assert (status, "--list takes --framework, " in errors) == (2, True), errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--cuda 12.1", "did you mean cu121?"),
        ("--framework mxnet --cuda cu121", "unknown --cuda for mxnet: 'cu121'"),
        ("--only *cu121* --cuda cpu", "unknown --cuda 'cpu'"),
    ],
)
def test_a_list_of_nothing_is_an_error(words: str, said: str, fails: Fails) -> None:
    status, errors = fails(f"--list {words}")
    assert (status, said in errors) == (4, True), errors
