"""Test names on the command line: the targets that they choose (``test_refusals.py`` has unknown
ones).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainworks.cli import main
from trainworks.facts.rows import Facts

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
    expected = {
        facts.name_of(row) for row in facts.targets if Path(facts.name_of(row)).match(chosen)
    }
    assert 0 < len(expected) < len(facts.targets)
    assert main(["--list", *words.split(), "--format", "json"], root) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == expected


def test_a_filtered_list_for_people(
    facts: Facts, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--list", "--only", "*cpu*"], root) == 0
    assert (
        len(capsys.readouterr().out.splitlines())
        == sum("-cpu-" in facts.name_of(row) for row in facts.targets) + 1
    )
