"""hadolint finds nothing in the Dockerfiles that we render."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import pytest

NUMBER = re.compile(r"[0-9a-f]{12,}|\d[\w.]*")

HADOLINT = Path(sys.executable).parent / "hadolint"


def instructions_of(path: Path) -> Set[str]:
    """Return a Dockerfile's instructions, without the versions and digests that differ between targets."""
    return {NUMBER.sub("0", each) for each in re.split(r"\n(?=[A-Z]+ )", path.read_text(encoding="utf-8"))}


def few_with_all(instructions: Mapping[Path, Set[str]]) -> Sequence[Path]:
    """Return files that together have every instruction of all the files: always the one next that adds most."""
    missing = set().union(*instructions.values())
    chosen = []
    while missing:
        best = max(instructions, key=lambda path: len(instructions[path] & missing))
        chosen.append(best)
        missing -= instructions[best]
    return chosen


def findings(root: Path, paths: Sequence[Path]) -> list[dict[str, Any]]:
    argv = [str(HADOLINT), "--config", str(root / ".hadolint.yaml"), "--no-fail", "--format", "json", *map(str, paths)]
    done = subprocess.run(argv, cwd=root, capture_output=True, check=True, text=True, timeout=120)
    return list(json.loads(done.stdout))


@pytest.fixture(scope="module")
def paths(root: Path) -> Sequence[Path]:
    """Give golden Dockerfiles with every instruction that we render; hadolint takes 0.2 s for a file."""
    return few_with_all({path: instructions_of(path) for path in (root / "tests" / "golden").rglob("Dockerfile*")})


def test_hadolint_finds_nothing_in_any_instruction_that_we_render(root: Path, paths: Sequence[Path]) -> None:
    assert len(paths) > 5
    assert findings(root, paths) == []


def test_hadolint_finds_what_is_wrong_in_such_a_file(root: Path, paths: Sequence[Path], tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(paths[0].read_text(encoding="utf-8") + "RUN cd /tmp && pip install numpy\n", encoding="utf-8")
    assert {"DL3003", "DL3013"} <= {finding["code"] for finding in findings(root, [path])}
