"""Each block of the pages that people follow is run by a test, or says why not; and those that need
no engine are run here, as they stand on their page.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from documentation.blocks import ROOT, block_of, blocks_of
from documentation.test_links import parse
from trainworks_launcher.command import options

PAGES = (
    "README.md",
    "docs/jobs.md",
    "docs/extend.md",
    "docs/ship.md",
    "docs/migrate.md",
    "docs/debug.md",
    *sorted(f"docs/platforms/{page.name}" for page in (ROOT / "docs" / "platforms").glob("*.md")),
)

PAGES_OF_USERS = (
    "README.md",
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
    *sorted(f"docs/platforms/{page.name}" for page in (ROOT / "docs" / "platforms").glob("*.md")),
)
"""All pages but those of decisions, and tables."""


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_by_a_test_or_says_why_not(page: str) -> None:
    """Find the file of tests in each block's mark; that file reads the page. Blocks of ``text`` are
    output.
    """
    for block in blocks_of(page):
        if block.language == "text":
            continue
        runs = re.match(r"run by ([\w/]+\.py)\b", block.mark)
        assert runs or block.mark.startswith("not run: "), block.text
        for name in re.findall(r"[\w/]+/test_\w+\.py", block.mark):
            assert (ROOT / name).is_file(), block.mark
        if runs:
            assert Path(page).name in (ROOT / runs[1]).read_text(encoding="utf-8"), block.mark


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_indented(page: str) -> None:
    """In an item of a list a block would not be seen by the tests."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.findall(r"^[ \t]+```.*$", text, re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES_OF_USERS)
def test_a_page_begins_with_what_its_reader_wants(page: str) -> None:
    """The first thing below the title is prose, not a command or a table. Comments, and the heading
    of a section, do not count.
    """
    headings = ("heading_open", "heading_close", "inline", "html_block")
    blocks = [token.type for token in parse(ROOT / page) if token.type not in headings]
    assert blocks[0] == "paragraph_open"


def run(block: str, folder: Path, **variables: str) -> str:
    """Run a block in a shell in which `python` is the one that has the builder."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ("bash", "-euc", block),
        cwd=folder,
        env={**os.environ, "PATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_list_and_the_plan_of_the_readme() -> None:
    printed = run(block_of("README.md", "python build.py --list"), ROOT)
    assert "pytorch-2.15.0-cu132-py311-debian12" in printed
    assert "downloads" in printed


def test_hyperparameters_of_the_page_on_jobs_become_these_arguments(tmp_path: Path) -> None:
    """The SDK sends each value as JSON. The page's comments say which arguments it becomes."""
    block = block_of("docs/jobs.md", "hyperparameters = {")
    page_names: dict[str, Any] = {}
    exec(block, page_names)  # noqa: S102 - the page's own lines
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    (tmp_path / "input" / "config").mkdir(parents=True)
    sent = {name: json.dumps(value) for name, value in page_names["hyperparameters"].items()}
    (tmp_path / "input" / "config" / "hyperparameters.json").write_text(
        json.dumps({"sagemaker_program": "train.py", **sent}), encoding="utf-8"
    )
    command = "python -m trainworks_launcher --plan"
    variables = {"PYTHONPATH": str(ROOT / "launcher"), "SAGEMAKER_BASE_DIR": str(tmp_path)}
    plan = run(f"{command} 2>/dev/null", ROOT, **variables)
    arguments = [
        word for option_line in re.findall(r"# (--.*)", block) for word in option_line.split()
    ]
    assert len(arguments) == 4
    words = json.loads(plan)["argv"]
    assert words[-len(arguments) :] == arguments


def test_the_handler_of_the_page_on_slurm_saves() -> None:
    saved: list[str] = []
    before = signal.getsignal(signal.SIGUSR1)
    names = {"signal": signal, "save_checkpoint": lambda: saved.append("a checkpoint")}
    try:
        exec(block_of("docs/platforms/slurm.md", "signal.signal("), names)  # noqa: S102
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert saved == ["a checkpoint"]


@pytest.mark.parametrize(
    "words", ["srun apptainer", "--ntasks-per-node=8", "--job-name=train", "enroot import"]
)
def test_the_words_behind_train_of_the_page_on_slurm_are_understood(words: str) -> None:
    block = block_of("docs/platforms/slurm.md", words)
    command_line = shlex.split(block, comments=True)
    arguments = command_line[command_line.index("train") + 1 :]
    end = arguments.index("--")
    _, _, invocation = options.read(arguments[:end], arguments[end:])
    assert invocation.program == ("train.py", "--lr", "0.05")


@pytest.mark.parametrize(("words", "mode"), [("SM_HP_MP_PARAMETERS", "mpi"), ("--mode ray", "ray")])
def test_the_lines_of_smp_and_ray_of_the_page_on_slurm_are_understood(
    words: str, mode: str
) -> None:
    block = block_of("docs/platforms/slurm.md", words)
    command_line = shlex.split(block, comments=True)
    arguments = command_line[command_line.index("train") + 1 :]
    end = arguments.index("--")
    _, _, invocation = options.read(arguments[:end], arguments[end:])
    assert (invocation.mode, invocation.program) == (mode, ("train.py",))
