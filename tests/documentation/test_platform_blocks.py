"""The command lines of docs/platforms (hosts.md, index.md, others.md, dstack-skypilot.md): the
launcher plans each of them, with the variables that the page or its platform sets.

Nothing is started: `--plan` stands in front of the words that the page has.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from documentation.blocks import Block
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
