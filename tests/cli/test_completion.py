"""Test completion as a shell asks for it: argcomplete's own functions in a real bash, and the
answers that they get.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainworks.cli.commands import COMMANDS
from trainworks.cli.grammar import CPU_TARGET
from trainworks.engine import ENGINES
from trainworks.facts.rows import Facts

BIN = Path(sys.executable).parent

PRESS_TAB = """
eval "$({register})"
cd "$1"
COMP_LINE="$2"; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9
COMP_WORDS=($2); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
{function} "${{COMP_WORDS[0]}}" "${{COMP_WORDS[COMP_CWORD]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
"""Script with bash's steps of a pressed TAB, without a terminal."""


def offered(line: str, folder: Path, register: str, function: str) -> set[str]:
    """Return the words that TAB offers at the end of a line."""
    script = PRESS_TAB.format(register=register, function=function)
    done = subprocess.run(
        ("bash", "--norc", "-c", script, "bash", str(folder), line),
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return {word.strip() for word in done.stdout.splitlines() if word.strip()}


Answer = Callable[[str], set[str]]


@pytest.fixture(scope="module")
def answer(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Give the words that TAB offers after ``./build.py``.

    The output that registers the function is asked for once.
    """
    script = tmp_path_factory.mktemp("completion") / "register"
    with script.open("wb") as file:
        subprocess.run(
            (BIN / "register-python-argcomplete", "build.py"), stdout=file, check=True, timeout=300
        )
    return lambda words: offered(
        f"./build.py {words}", root, f"cat '{script}'", "_python_argcomplete"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("pr", {"promote", "prove"}),
        ("help pr", {"promote", "prove"}),
        ("push x --rep", {"--repository"}),
        ("--until p", {"plan"}),
        ("report --engine ", set(ENGINES)),
        ("--cuda cu129 --framework ", {"tensorflow"}),
        ("--cuda cu129 --framework=", {"tensorflow"}),
        ("build --framework pytorch --cuda cu121 --python ", {"3.11"}),
        (f"check --only {CPU_TARGET[:-3]}", {CPU_TARGET}),
        ("--with rmm-p", {"rmm-python"}),
    ],
)
def test_tab(words: str, expected: set[str], answer: Answer) -> None:
    assert answer(words) == expected


def test_commands_and_options_come_first(answer: Answer) -> None:
    completions = answer("")
    assert set(COMMANDS) <= completions
    assert "--framework" in completions


def test_targets_are_those_of_the_facts(answer: Answer, facts: Facts) -> None:
    names = {facts.name_of(row) for row in facts.targets}
    assert {word for word in answer("report ") if not word.startswith("-")} == names


def test_python_build_py_completes_with_the_global_hook(root: Path) -> None:
    register, function = "activate-global-python-argcomplete --dest=-", "_python_argcomplete_global"
    assert offered("python build.py pus", root, register, function) == {"push"}


def test_spoiled_facts_offer_nothing(checkout: Path, answer: Answer) -> None:
    (checkout / "images" / "tensorflow.toml").write_text("framework = \n", encoding="utf-8")
    assert answer(f"--root {checkout} --framework t") == set()
