"""Plan and render are values in, values out: no file, process, network, clock
or chance, watched by an audit hook.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainworks.facts.rows import Facts

CHILD = """
# Jinja reads strings with this codec, which Python loads when it is first named.
import encodings.unicode_escape, json, sys
from pathlib import Path

from trainworks.facts.load import load
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.render.dockerfile import render

facts = load(Path(sys.argv[1]))
rows = [request_for(row, facts) for row in facts.targets]
seen = []
watching = False
WATCHED = (
    "open",
    "socket.",
    "subprocess.",
    "os.",
    "shutil.",
    "tempfile.",
    "glob.",
    "pathlib.",
    "urllib.",
    "import",
)

def hook(event, arguments):
    if watching and event.startswith(WATCHED):
        seen.append(f"{event} {arguments}")

sys.addaudithook(hook)
watching = True
first = [(plan, render(plan, facts)) for plan in (make_plan(row, facts) for row in rows)]
second = [(plan, render(plan, facts)) for plan in (make_plan(row, facts) for row in rows)]
watching = False
pure, seen = seen, []
watching = True
Path(sys.argv[1], "build.py").read_bytes()
watching = False
print(
    json.dumps(
        {"plans": len(first), "equal": first == second, "seen": pure, "seen of an open file": seen}
    )
)
"""


@pytest.fixture(scope="module")
def watched(root: Path) -> dict[str, Any]:
    """Return the events that the hook saw while every target was planned and rendered twice, and
    then while a file was opened.
    """
    argv = [sys.executable, "-c", CHILD, str(root)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_planning_and_rendering_touch_nothing_and_answer_the_same_twice(
    watched: dict[str, Any], facts: Facts
) -> None:
    assert watched["seen"] == []
    assert watched["equal"] is True
    assert watched["plans"] == len(facts.targets)


def test_the_hook_would_see_an_open_file(watched: dict[str, Any]) -> None:
    """Open a file: without this test a hook that hears nothing would look like purity."""
    assert "build.py" in str(watched["seen of an open file"])


IMPURE = {
    *(
        "os",
        "sys",
        "io",
        "time",
        "datetime",
        "random",
        "secrets",
        "uuid",
        "socket",
        "subprocess",
        "tempfile",
    ),
    *(
        "pathlib",
        "shutil",
        "platform",
        "locale",
        "getpass",
        "threading",
        "asyncio",
        "urllib.request",
    ),
}


@pytest.mark.parametrize("layer", ["facts/rows.py", "plan", "render"])
def test_pure_layers_import_nothing_that_has_effects(layer: str, root: Path) -> None:
    place = root / "src" / "trainworks" / layer
    files = [place] if place.is_file() else sorted(place.glob("*.py"))
    assert files
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        calls = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert names & IMPURE == set(), file
        assert calls & {"print", "open", "input", "exec", "eval"} == set(), file
