"""Lists the steps of a Dockerfile that take time; pure."""

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
    for text in _split_instructions(dockerfile):
        first_line = STAGE.fullmatch(text)
        if first_line:
            stage = first_line["name"]
        elif text.partition(" ")[0].upper() in WORDS:
            steps.append(BuildStep(component=stage_components.get(stage, ""), text=text))
    return tuple(steps)


def image_steps(dockerfile: str) -> tuple[str, ...]:
    """Return the instructions that make the image's layers on its base, in the form of a history.

    For example ``("RUN apt-get update", "COPY")``.
    """
    stages: dict[str, list[str]] = {}
    parents: dict[str, str] = {}
    name = ""
    for text in _split_instructions(dockerfile):
        word, _, arguments = text.partition(" ")
        first_line = STAGE.fullmatch(text)
        if first_line:
            name = first_line["name"]
            stages[name] = []
            parents[name] = arguments.split(" ")[0]
        elif word == "RUN":
            stages[name].append(f"RUN {strip_flags(arguments)}")
        elif word in WORDS:
            # Engines write the arguments of a COPY differently into the history.
            stages[name].append(word)
    # The last stage is the image. Its parents come before it, down to the base image.
    steps: list[str] = []
    while name in stages:
        steps = [*stages[name], *steps]
        name = parents[name]
    return tuple(steps)


_FLAGS = re.compile(r"^(--\S+ )+")


def strip_flags(command: str) -> str:
    """Return the command of a RUN without its flags, such as ``--mount=type=cache``."""
    return _FLAGS.sub("", command)


def _split_instructions(dockerfile: str) -> Iterator[str]:
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
