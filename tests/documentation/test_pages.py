"""Test the pages: command lines and examples have the effects that the page promises, and the
launcher's page lists every setting.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import trainworks
from documentation.blocks import Block
from trainworks.cli.commands import BUILD, COMMANDS, grammar_of
from trainworks_launcher.contract import names


def test_the_failing_job_of_the_page_on_debugging(
    page_blocks: list[Block], root: Path, tmp_path: Path
) -> None:
    (block,) = page_blocks
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        ("bash", "-euc", block.adapted(folder=tmp_path / "job")),
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"mode": "none"' in done.stdout
    assert "the entry point, a script" in done.stdout
    assert "ended with 3\n" in done.stdout
    assert done.stdout.endswith("exit status 3\n")


SAVES_OR_FAILS = """
import os, sys
if "--fail" in sys.argv:
    raise ValueError("before anything was saved")
for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR"):
    open(os.path.join(os.environ[name], "saved"), "w").close()
"""


def test_a_failed_run_keeps_what_the_run_before_it_saved(root: Path, tmp_path: Path) -> None:
    """docs/jobs.md and docs/platforms/index.md say so: only `output/success` tells them apart."""
    (tmp_path / "train.py").write_text(SAVES_OR_FAILS, encoding="utf-8")
    variables = {**os.environ, "PYTHONPATH": str(root / "launcher")}
    train = (sys.executable, "-m", "trainworks_launcher", "--", "train.py")
    for more, status, outcome in (
        ((), 0, {"success"}),
        (("--fail",), 1, {"failure", "failure.json"}),
        ((), 0, {"success"}),
    ):
        done = subprocess.run((*train, *more), cwd=tmp_path, env=variables, check=False)
        assert done.returncode == status
        files = {path.name for path in (tmp_path / "output").iterdir() if path.is_file()}
        assert files == outcome
        assert (tmp_path / "model" / "saved").exists()
        assert (tmp_path / "output" / "data" / "saved").exists()


def commands(path: Path) -> list[tuple[str, ...]]:
    """Return the words of every line of a page that calls build.py, without
    comments, pipes and redirections.
    """
    text = re.sub(
        r"<!-- generated: .*?<!-- end of generated -->",
        "",
        path.read_text("utf-8"),
        flags=re.DOTALL,
    )
    text = re.sub(r"^image=\$\((.*)\)", r"\1", text, flags=re.MULTILINE)
    lines = re.findall(r"^python build\.py .*$", text.replace("\\\n", " "), re.MULTILINE)
    return [tuple(shlex.split(re.split(r" [|>] ", line)[0], comments=True)[2:]) for line in lines]


def test_every_command_line_of_every_page_is_understood(root: Path) -> None:
    pages = [
        root / "README.md",
        root / "launcher" / "README.md",
        *sorted((root / "docs").rglob("*.md")),
    ]
    command_lines = [words for page in pages for words in commands(page)]
    assert len(command_lines) > 30
    for words in command_lines:
        name, words = (words[0], words[1:]) if words[0] in COMMANDS else (BUILD, words)
        grammar_of(name).parse_args(words)


def test_the_job_that_is_checked_before_a_cluster_is_paid_for(
    page_blocks: list[Block], root: Path, tmp_path: Path
) -> None:
    (block,) = page_blocks
    done = subprocess.run(
        ("bash", "-euc", block.adapted(folder=tmp_path / "check")),
        cwd=root,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torch_distributed" in done.stdout
    assert "16 in all" in done.stdout


def test_the_changelog_begins_with_the_version_of_the_builder(root: Path) -> None:
    text = (root / "CHANGELOG.md").read_text("utf-8")
    assert re.findall(r"^## ([\w.]+), ", text, re.MULTILINE)[0] == trainworks.__version__


def test_every_file_that_a_walk_names_exists(root: Path) -> None:
    words = set(
        re.findall(
            r"`([\w.-]+(?:/[\w.-]+)+/?)`", (root / "docs" / "architecture.md").read_text("utf-8")
        )
    )
    # FRAMEWORK and NAME stand for the reader's own.
    paths = {
        word for word in words if not re.search(r"[A-Z]{3,}", Path(word).stem.replace("README", ""))
    }
    assert len(paths) > 9
    assert {path for path in paths if not (root / path).exists()} == set()


def test_the_page_on_what_a_script_is_given_has_every_default_of_mpirun(root: Path) -> None:
    page = (
        (root / "docs" / "environment.md")
        .read_text("utf-8")
        .partition("\n## The command line of mpirun\n")[2]
    )
    plans = [
        json.loads(path.read_text("utf-8"))
        for path in sorted((root / "launcher/tests/golden").glob("*.json"))
    ]
    reasons = [
        row
        for plan in plans
        if plan["ranks_by"] == "mpirun"
        for row in plan["why"]
        if row["origin"] != "user"
    ]
    variable_names = {
        reason["subject"].split()[-1] for reason in reasons if reason["subject"].startswith("--")
    }
    assert len(variable_names) > 12
    assert {name for name in variable_names if not re.search(rf"`{name}\b", page)} == set()


def rows(path: Path, heading: str) -> dict[str, str]:
    """Return the first table below a heading: the first cell of each row, and the others."""
    section = path.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    matches = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return {first.strip("`"): rest for first, rest in matches[1:]}


def test_the_launchers_page_has_every_setting_with_its_default_and_every_exit_status(
    root: Path,
) -> None:
    page = root / "launcher" / "README.md"
    settings, statuses = rows(page, "Settings"), rows(page, "Exit status")
    # Each constant of names.py is followed by the text that documents it.
    _, _, after = inspect.getsource(names).partition("\n# --- variables that are read -")
    section, _, _ = after.partition("\n# --- ")
    constants = re.findall(r'^\w+ = "(\w+)"\n"""(.*?)"""$', section, re.DOTALL | re.MULTILINE)
    own = {
        name for name, _ in constants if name.startswith("TRAINWORKS_") and name != "TRAINWORKS_"
    }
    assert len(own) > 8
    assert own - settings.keys() == set()
    for name, text in constants:
        default = re.search(r"default ([A-Z_]{2,})\b", text)
        value = getattr(names, default[1]) if default else None
        if name in settings and isinstance(value, int | float):
            assert settings[name].startswith(f"{value:g} |"), name
    numbers = {int(number) for status in statuses for number in re.findall(r"\d+", status)}
    assert numbers == {0} | {
        value for name, value in vars(names).items() if name.startswith("EXIT_")
    }


# --- the launcher's seconds -----------------------------------------------------------------------
WAITS = (
    "contract/names.py",
    "contract/inspection.py",
    "environment/patience.py",
    "programs/guard.py",
    "programs/rank.py",
)
"""Modules outside of ``supervise`` whose seconds it waits by."""


def seconds_in(file: Path, launcher: Path) -> dict[str, str]:
    """Return the constants in seconds at the top of a module -> the value, as the page has it.

    For example ``0.8``, ``(10.0, 60.0)``, or ``torchrun 30, mpirun 1`` for a table of two.
    """
    module = importlib.import_module(
        ".".join(file.relative_to(launcher.parent).with_suffix("").parts)
    )
    values: dict[str, str] = {}
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        names_ = [
            node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
        ]
        for name in names_:
            if name.endswith("_SECONDS"):
                values[name] = in_words(getattr(module, name))
    return values


def in_words(seconds: object) -> str:
    """Return the value of a constant as the page has it."""
    if isinstance(seconds, dict):
        return ", ".join(f"{name} {value:g}" for name, value in seconds.items())
    return repr(seconds)


def test_the_page_on_timing_has_a_row_for_each_constant_in_seconds(root: Path) -> None:
    launcher = root / "launcher/trainworks_launcher"
    files = [*sorted((launcher / "supervise").rglob("*.py")), *(launcher / name for name in WAITS)]
    defined = {
        f"`{file.relative_to(launcher)}` `{name}`": value
        for file in files
        for name, value in seconds_in(file, launcher).items()
    }
    page = (root / "docs/timing.md").read_text(encoding="utf-8")
    rows = []
    for line in page.splitlines():
        if line.startswith("| `"):
            cells = line.split("|")[1:-1]
            rows.append([cell.strip() for cell in cells])
    documented = {row[0]: row[1] for row in rows}
    assert len(documented) == len(rows)
    assert documented.keys() == defined.keys(), (
        "a new constant needs a row: what it decides, and what a slow machine does"
    )
    assert documented == defined
