"""The steps of a Dockerfile that take time, and which of them wait for which; pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainworks.render.forecast import COPIED, STAGE

WORDS = frozenset({"ADD", "COPY", "RUN"})
"""Instructions that every engine does as a step of its own; it depends on the engine whether the others are one."""


@dataclass(frozen=True, kw_only=True)
class BuildStep:
    """One instruction that takes time.

    Attributes:
        component: Whose it is.
        text: The instruction on one line, its blanks made one.
        after: Positions of the steps that must have ended before it.
    """

    component: str
    text: str
    after: tuple[int, ...]

    @property
    def key(self) -> str:
        """A short name for it, the same in every build with this step."""
        return hashlib.sha256(f"{self.component} {self.text}".encode()).hexdigest()[:16]


def build_steps(dockerfile: str, stage_components: Mapping[str, str]) -> tuple[BuildStep, ...]:
    """Return the steps of a Dockerfile of ours, in its order.

    Args:
        dockerfile: Its text: each stage has a name, and nothing is a here-document.
        stage_components: Stage name to component.
    """
    steps: list[BuildStep] = []
    last: dict[str, tuple[int, ...]] = {}
    stage = ""
    for text in _instructions(dockerfile):
        if begun := STAGE.fullmatch(text):
            stage = begun["name"]
            last[stage] = last.get(begun["stand"], ())
        elif text.partition(" ")[0].upper() in WORDS:
            copied = [number for match in COPIED.finditer(text) for number in last.get(match["name"], ())]
            after = tuple(dict.fromkeys((*last.get(stage, ()), *copied)))
            steps.append(BuildStep(component=stage_components.get(stage, ""), text=text, after=after))
            last[stage] = (len(steps) - 1,)
    return tuple(steps)


def _instructions(dockerfile: str) -> Iterator[str]:
    """Yield each instruction as engines show it: on one line, without comments."""
    lines = (line for line in dockerfile.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    text = "\n".join(lines)
    for instruction in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        yield " ".join(instruction.split())


def seconds_left(steps: Sequence[BuildStep], left: Sequence[float], at_once: float) -> float:
    """Return how long the rest of a build takes, in seconds.

    That is what the longest chain of steps that wait for each other takes, or all that is left by as many hands as an
    earlier build had, whatever is longer.

    Args:
        steps: All steps of the build.
        left: For each of them the seconds that it still needs; 0 once it has ended.
        at_once: How many steps ran at the same time, on average, in the build that the seconds come from.
    """
    chains: list[float] = []
    for step, seconds in zip(steps, left, strict=True):
        chains.append(seconds + max((chains[number] for number in step.after), default=0.0))
    return max(max(chains, default=0.0), sum(left) / max(at_once, 1.0))
