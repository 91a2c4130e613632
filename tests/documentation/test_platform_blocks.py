"""The command lines of docs/platforms (hosts.md, index.md, others.md, dstack-skypilot.md), and the
platforms of docs/debug.md: the launcher plans each of them, with the variables that the page or its
platform sets.

Nothing is started: `--plan` stands in front of the words that the page has.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from documentation.blocks import ROOT, Block
from documentation.planning import plan

DSTACK = {
    "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2",
    "DSTACK_NODES_NUM": "2",
    "DSTACK_NODE_RANK": "0",
    "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    "DSTACK_GPUS_PER_NODE": "8",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
"""Variables that each platform sets on the first of two hosts, as the table of the page lists them.
"""


@dataclass(frozen=True)
class Case:
    """The result that must follow from the line of a page, whose mark names the case.

    Attributes:
        hosts: How many hosts torchrun must be told of.
        variables: Environment variables of the platform, beside those of the line.
    """

    hosts: int
    variables: dict[str, str] = field(default_factory=dict)


CASES = {
    "hosts": Case(hosts=2),
    "index": Case(hosts=1),
    "others": Case(hosts=2),
    "dstack": Case(hosts=2, variables=DSTACK),
    "skypilot": Case(hosts=2, variables=SKYPILOT),
}


def command_line(block: str) -> list[str]:
    """Return the words of the first line of a block that starts `train`; a task file of YAML has
    it as one of its commands.
    """
    if not re.search(r"^(name|type): ", block, re.MULTILINE):
        words = shlex.split(block, comments=True)
        starts = [place for place, word in enumerate(words) if word == "train"]
        end = starts[1] if len(starts) > 1 else len(words)
        return words[:end]
    task = yaml.safe_load(block)
    lines = task["commands"] if "commands" in task else [task["run"]]
    (line,) = lines
    return shlex.split(line)


def variables_of(words: list[str]) -> dict[str, str]:
    """Return the variables that a line sets for `train`: `-e NAME=VALUE`, or `NAME=VALUE`."""
    assignments = [word for word in words if re.match(r"[A-Z_]+=", word)]
    return dict(word.split("=", 1) for word in assignments)


SIMULATED = [
    ("slurm", "gpu2", "--master-addr=gpu1", "--nproc-per-node=1"),
    (
        "kubeflow",
        "digits-node-0-1.digits",
        "--master-addr=digits-node-0-0.digits",
        "--nproc-per-node=8",
    ),
    ("hosts", "digits-1.digits", "--master-addr=digits-0.digits", "--nproc-per-node=1"),
    ("sagemaker", "algo-2", "--master-addr=algo-1", "--nproc-per-node=1"),
]
"""Of each plan in the block of docs/debug.md: platform, host, and words for torchrun."""


def test_the_platforms_of_the_page_on_debugging_are_recognised(
    page_blocks: list[Block], tmp_path: Path
) -> None:
    (block,) = page_blocks
    (tmp_path / "train.py").touch()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, line in (
        ("train", f'exec {sys.executable} -m trainworks_launcher "$@"'),
        ("torchrun", "exit 1"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    variables = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "launcher"),
    }
    done = subprocess.run(
        ("bash", "-euc", block.adapted(folder=tmp_path / "job")),
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    text, plans = done.stdout, []
    while text.strip():
        planned, end = json.JSONDecoder().raw_decode(text.lstrip())
        plans.append(planned)
        text = text.lstrip()[end:]
    assert len(plans) == len(SIMULATED)
    for planned, (platform, host, *words) in zip(plans, SIMULATED, strict=True):
        assert (planned["platform"], planned["host"]) == (platform, host)
        assert {"--nnodes=2", "--node-rank=1", *words} <= set(planned["argv"])


@pytest.mark.parametrize("name", CASES)
def test_the_line_of_a_page_is_planned(name: str, page_blocks: list[Block], tmp_path: Path) -> None:
    case = CASES[name]
    (block,) = page_blocks
    words = command_line(block.text)
    start = words.index("train")
    planned = plan(words[start:], {**case.variables, **variables_of(words[:start])}, tmp_path)
    if case.hosts > 1:
        assert f"--nnodes={case.hosts}" in planned["argv"]
    script = planned["argv"].index("train.py")
    assert planned["argv"][script + 1] == "--lr"
