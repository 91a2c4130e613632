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

from documentation.blocks import PAGES, ROOT, TEST, Block, block_of, blocks_of, is_output
from documentation.planning import plan
from documentation.test_links import parse
from trainworks_launcher.command import options

NODE = re.compile(
    r"^ +(?P<test>[\w/]+\.py::.*?)(?: \(fixtures used: (?P<fixtures>.*)\))?$", re.MULTILINE
)
"""A test, as ``pytest --setup-plan`` prints it, with its fixtures."""


@pytest.fixture(scope="module")
def fixtures_of() -> dict[str, list[set[str]]]:
    """Give the tests of the files that the marks name, as pytest collects them, with the fixtures
    of each case.

    A test has one entry for all its cases, and one for each of them.
    """
    marks = [block.mark for page in PAGES for block in blocks_of(page)]
    names = [name for mark in marks for name in TEST.findall(mark)]
    files = sorted({name.partition("::")[0] for name in names})
    command = (sys.executable, "-m", "pytest", "--setup-plan", "--quiet", "-m", "", *files)
    planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert planned.returncode == 0, planned.stdout
    fixtures: dict[str, list[set[str]]] = {}
    for match in NODE.finditer(planned.stdout):
        used = set((match["fixtures"] or "").split(", "))
        for name in {match["test"], match["test"].partition("[")[0]}:
            fixtures.setdefault(name, []).append(used)
    return fixtures


PAGES_OF_USERS = (
    "README.md",
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
    *sorted(f"docs/platforms/{page.name}" for page in (ROOT / "docs" / "platforms").glob("*.md")),
)
"""All pages but those of decisions, and tables."""


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_by_a_test_or_says_why_not(
    page: str, fixtures_of: dict[str, list[set[str]]]
) -> None:
    """Find the tests that each mark names. A test that runs a block gets it by its own name: it has
    the fixture ``page_blocks``.
    """
    for block in blocks_of(page):
        if is_output(block):
            continue
        is_left_out = block.mark.startswith("not run: ")
        assert is_left_out or block.tests, f"the line above says no test and no reason: {block}"
        assert not re.search(r"\.py(?!::)", block.mark), f"which test of the file? {block.mark}"
        for name in TEST.findall(block.mark):
            assert name in fixtures_of, f"no such test: {name}"
        for name in block.tests:
            assert all("page_blocks" in used for used in fixtures_of[name]), name
        for words in block.replacements:
            assert words in block.text, f"the block does not have {words!r}: {block.mark}"


PAGE = """\
- A list:

  <!-- run by tests/a.py::test_a[x]; cu121 -> cpu; --gpus all -> nothing; /tmp -> {folder}; why -->
  ```sh
  train --gpus all cu121 /tmp
  ```

<!-- not run: too far above -->

```yaml
a: 1
```
"""


def test_a_block_in_a_list_has_its_mark_and_no_indentation(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    in_list, unmarked = blocks_of(str(page))
    assert in_list.tests == ("tests/a.py::test_a[x]",)
    assert in_list.text == "train --gpus all cu121 /tmp\n"
    assert in_list.adapted(folder="/own") == "train  cpu /own\n"
    assert (unmarked.language, unmarked.mark, unmarked.tests) == ("yaml", "", ())


def test_words_that_a_block_does_not_have_are_not_replaced_in_silence() -> None:
    block = Block(language="sh", text="train cu126", mark="run by a.py::test_a; cu121 -> cpu")
    with pytest.raises(AssertionError, match="cu121"):
        block.adapted()


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


def test_the_list_and_the_plan_of_the_readme(page_blocks: list[Block]) -> None:
    (block,) = page_blocks
    printed = run(block.text, ROOT)
    assert "pytorch-2.15.0-cu132-py311-debian12" in printed
    assert "downloads" in printed


def test_hyperparameters_of_the_page_on_jobs_become_these_arguments(
    page_blocks: list[Block], tmp_path: Path
) -> None:
    """The SDK sends each value as JSON. The page's comments say which arguments it becomes."""
    (block,) = page_blocks
    page_names: dict[str, Any] = {}
    exec(block.text, page_names)  # noqa: S102 - the page's own lines
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
        word for option_line in re.findall(r"# (--.*)", block.text) for word in option_line.split()
    ]
    assert len(arguments) == 4
    words = json.loads(plan)["argv"]
    assert words[-len(arguments) :] == arguments


def test_the_handler_of_the_page_on_slurm_saves(page_blocks: list[Block]) -> None:
    (block,) = page_blocks
    saved: list[str] = []
    before = signal.getsignal(signal.SIGUSR1)
    names = {"signal": signal, "save_checkpoint": lambda: saved.append("a checkpoint")}
    try:
        exec(block.text, names)  # noqa: S102
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


@pytest.mark.parametrize(
    ("words", "mode"),
    [("SM_HP_MP_PARAMETERS", "smdistributed.modelparallel"), ("--mode ray", "ray")],
)
def test_the_lines_of_smp_and_ray_of_the_page_on_slurm_are_planned(
    words: str, mode: str, tmp_path: Path
) -> None:
    block = block_of("docs/platforms/slurm.md", words)
    command_line = shlex.split(block, comments=True)
    start = command_line.index("train")
    variables = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "gpu[1-2]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
    for word in command_line[:start]:
        name, is_assignment, value = word.partition("=")
        if is_assignment and not name.startswith("-"):
            variables[name] = value
    planned = plan(command_line[start:], variables, tmp_path)
    assert planned["mode"] == mode
