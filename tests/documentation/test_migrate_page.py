"""The commands of docs/migrate.md: the check of a job on a laptop is run, and each line that
replaces a launch script is planned for two hosts.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from documentation.blocks import ROOT, Block
from documentation.planning import plan

TWO_HOSTS = {"TRAINWORKS_HOSTS": "node-a,node-b", "TRAINWORKS_HOST": "node-a"}


def test_the_check_of_the_job_before_it_leaves_the_laptop(
    page_blocks: list[Block], tmp_path: Path
) -> None:
    """Run the block where a checkout has a `launcher`, with a project beside it."""
    (block,) = page_blocks
    (tmp_path / "launcher").symlink_to(ROOT / "launcher")
    (tmp_path / "my-project").mkdir()
    (tmp_path / "my-project" / "train.py").touch()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ("bash", "-euc", block.text),
        cwd=tmp_path,
        env={"PATH": path, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torch_distributed" in done.stdout
    assert "16 in all" in done.stdout


@dataclass(frozen=True)
class Replacement:
    """A line of the page, and what its plan must have.

    Attributes:
        replaces: A text of the line's comment.
        mode: Mode of the plan.
        words: Ends of words that the command line of the plan has.
    """

    replaces: str
    mode: str
    words: tuple[str, ...]


REPLACEMENTS = (
    Replacement("# torchrun", "torch_distributed", ("--nnodes=2", "train.py", "--lr")),
    Replacement("# mpirun", "mpi", ("node-a:8,node-b:8", "16", "train.py", "--lr")),
    Replacement("# the first host", "none", ("/script.sh",)),
    Replacement("# srun torchrun", "torch_distributed", ("--nnodes=2", "train.py", "--lr")),
    Replacement("# a loop", "none", ("train.py", "--lr")),
)


@pytest.mark.parametrize("replacement", REPLACEMENTS, ids=lambda row: row.replaces)
def test_a_line_that_replaces_a_launch_script_is_planned(
    replacement: Replacement, page_blocks: list[Block], tmp_path: Path
) -> None:
    (block,) = page_blocks
    (line,) = [line for line in block.text.splitlines() if replacement.replaces in line]
    words = shlex.split(line, comments=True)
    planned = plan(words[words.index("train") :], TWO_HOSTS, tmp_path)
    assert planned["mode"] == replacement.mode
    for word in replacement.words:
        assert [argument for argument in planned["argv"] if argument.endswith(word)], word


def test_every_line_has_its_case(page_blocks: list[Block]) -> None:
    (block,) = page_blocks
    assert len(block.text.splitlines()) == len(REPLACEMENTS)
