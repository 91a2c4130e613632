"""hadolint finds nothing in the Dockerfiles that we render."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainworks.facts.rows import Facts
from trainworks.plan.resolve import plan_row
from trainworks.render.dockerfile import render

NUMBER = re.compile(r"[0-9a-f]{12,}|\d[\w.]*")

HADOLINT = Path(sys.executable).parent / "hadolint"


def few_with_all(texts: Mapping[str, str]) -> dict[str, str]:
    """Return Dockerfiles that together have every instruction of all: the next
    is always the one that adds most.

    Each is without the RUN instructions that an earlier one has. Versions and
    digests make no difference.
    """
    instructions = {
        name: {
            NUMBER.sub("0", instruction): instruction
            for instruction in re.split(r"\n(?=[A-Z]+ )", text.strip())
        }
        for name, text in texts.items()
    }
    missing = set().union(*instructions.values())
    chosen = {}
    while missing:
        name = max(instructions, key=lambda name: len(instructions[name].keys() & missing))
        parts = instructions[name].items()
        chosen[name] = "\n".join(
            part for plain, part in parts if plain in missing or not part.startswith("RUN ")
        )
        missing -= instructions[name].keys()
    return chosen


def findings(root: Path, paths: Sequence[Path]) -> list[dict[str, Any]]:
    argv = [
        str(HADOLINT),
        "--config",
        str(root / ".hadolint.yaml"),
        "--no-fail",
        "--format",
        "json",
        *map(str, paths),
    ]
    done = subprocess.run(argv, cwd=root, capture_output=True, check=True, text=True, timeout=300)
    return list(json.loads(done.stdout))


@pytest.fixture(scope="module")
def rendered(root: Path, facts: Facts) -> Mapping[str, str]:
    """Give the Dockerfile of every target, and those of the extensions that are golden files."""
    targets = {
        facts.name_of(row): render(plan_row(row, facts), facts, check=False).dockerfile
        for row in facts.targets
    }
    extensions = (root / "tests" / "golden" / "extend").glob("*/Dockerfile")
    return targets | {path.parent.name: path.read_text(encoding="utf-8") for path in extensions}


def test_hadolint_finds_nothing_in_any_instruction_that_we_render_and_what_is_wrong_beside_them(
    root: Path, rendered: Mapping[str, str], tmp_path: Path
) -> None:
    """hadolint takes 0.2 s for a Dockerfile of ours, most of it for RUN."""
    texts = few_with_all(rendered)
    assert len(texts) > 5
    texts["wrong"] = min(texts.values(), key=len) + "\nRUN cd /tmp && pip install numpy\n"
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    lint_findings = findings(root, [tmp_path / name for name in texts])
    assert {(finding["file"], finding["code"]) for finding in lint_findings} == {
        (str(tmp_path / "wrong"), code) for code in ("DL3003", "DL3013", "DL3042")
    }
