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
    """One instruction that takes time: whose it is, and its text on one line,
    each run of blanks made one.
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
        if begun := STAGE.fullmatch(text):
            stage = begun["name"]
        elif text.partition(" ")[0].upper() in WORDS:
            steps.append(BuildStep(component=stage_components.get(stage, ""), text=text))
    return tuple(steps)


def image_steps(dockerfile: str) -> tuple[str, ...]:
    """Return the instructions that make the layers of the image on its base,
    first one first, as a history has them.

    Of a RUN the whole command without its mounts; of a COPY the word, because
    engines tell the rest in their own way.
    """
    stages: dict[str, list[str]] = {}
    parents: dict[str, str] = {}
    name = ""
    for text in _instructions(dockerfile):
        word, _, rest = text.partition(" ")
        if begun := STAGE.fullmatch(text):
            name = begun["name"]
            stages[name] = []
            parents[name] = rest.split(" ")[0]
        elif word in WORDS:
            stages[name].append(f"RUN {without_flags(rest)}" if word == "RUN" else word)
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
    lines = (
        line
        for line in dockerfile.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    )
    text = "\n".join(lines)
    for instruction in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        yield " ".join(instruction.split())
