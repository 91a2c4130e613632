"""The steps of a Dockerfile that take time; pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

STAGE = re.compile(r"^FROM \S+ AS (?P<name>\S+)$")

WORDS = frozenset({"ADD", "COPY", "RUN"})
"""Instructions that are a step of their own with every engine."""


@dataclass(frozen=True, kw_only=True)
class BuildStep:
    """One instruction that takes time: its component, and its text on one line without double
    blanks.
    """

    component: str
    text: str


def build_steps(dockerfile: str, stage_components: Mapping[str, str]) -> tuple[BuildStep, ...]:
    """Return the steps of a Dockerfile of ours, in its order.

    Args:
        dockerfile: Its text. Each stage has a name; there are no here-documents.
        stage_components: Stage name to component.
    """
    steps: list[BuildStep] = []
    stage = ""
    for text in _instructions(dockerfile):
        first_line = STAGE.fullmatch(text)
        if first_line:
            stage = first_line["name"]
        elif text.partition(" ")[0].upper() in WORDS:
            steps.append(BuildStep(component=stage_components.get(stage, ""), text=text))
    return tuple(steps)


def image_steps(dockerfile: str) -> tuple[str, ...]:
    """Return the instructions that make the image's layers on its base, in the form of a history.

    A RUN has its command without mounts; of a COPY only the word counts, because engines write
    its arguments differently.
    """
    stages: dict[str, list[str]] = {}
    parents: dict[str, str] = {}
    name = ""
    for text in _instructions(dockerfile):
        word, _, arguments = text.partition(" ")
        first_line = STAGE.fullmatch(text)
        if first_line:
            name = first_line["name"]
            stages[name] = []
            parents[name] = arguments.split(" ")[0]
        elif word == "RUN":
            stages[name].append(f"RUN {without_flags(arguments)}")
        elif word in WORDS:
            stages[name].append(word)
    # The last stage is the image. Its parents come before it, down to the base image.
    steps: list[str] = []
    while name in stages:
        steps = [*stages[name], *steps]
        name = parents[name]
    return tuple(steps)


_FLAGS = re.compile(r"^(--\S+ )+")


def without_flags(command: str) -> str:
    """Return the command of a RUN without the flags before it, such as ``--mount=type=cache``."""
    return _FLAGS.sub("", command)


def _instructions(dockerfile: str) -> Iterator[str]:
    """Yield each instruction as engines show it: on one line, without comments."""
    lines = []
    for line in dockerfile.splitlines():
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            lines.append(line)
    # A backslash at the end of a line continues the instruction.
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    for instruction in joined.splitlines():
        yield " ".join(instruction.split())
