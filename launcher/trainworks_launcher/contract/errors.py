"""The launcher's refusals: one class, every problem in it, one exit status per kind.

A problem says what is wrong, where, which right value is nearest, and what to do. All problems of a
job are collected and raised together, so that a person corrects a job once and not once per
mistake.
"""

from __future__ import annotations

from typing import Iterable, NamedTuple

from trainworks_launcher.contract import names, suggestions
from trainworks_launcher.contract.json_values import readable


class Problem(NamedTuple):
    """One thing that is wrong with a job.

    Attributes:
        what: The mistake, one sentence without a full stop.
        where: The file, hyperparameter or variable that has it.
        advice: What to do about it, with the nearest right value where one exists; may be empty.
    """

    what: str
    where: str
    advice: str = ""

    def __str__(self) -> str:
        """``what (where); advice`` on one line, each shortened in its middle: a
        wrong value may be of any length.
        """
        what, where, advice = (_short(part) for part in (self.what, self.where, self.advice))
        return readable(f"{what} ({where})" + (f"; {advice}" if advice else ""))


_SHOWN = 350


def _short(part: str) -> str:
    half = _SHOWN // 2
    return part if len(part) <= _SHOWN else f"{part[:half]} ... {part[-half:]}"


class RefusalError(Exception):
    """The launcher will not start (or go on with) this job.

    ``status`` is the exit status, EXIT_* of names.py.
    """

    def __init__(self, problems: Iterable[Problem], status: int = names.EXIT_NOT_STARTED) -> None:
        """Keep the problems in the order in which they were found."""
        self.problems = tuple(problems)
        self.status = status
        super().__init__(str(self))

    def __str__(self) -> str:
        """Return the text for a person: a count, then one line per problem."""
        if len(self.problems) == 1:
            return f"cannot start the job: {self.problems[0]}"
        lines = "".join(
            f"\n  {number}. {problem}" for number, problem in enumerate(self.problems, 1)
        )
        return f"cannot start the job, {len(self.problems)} problems:{lines}"


def nearest(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the known word nearest to ``word``, else what is known.

    Empty if nothing is.
    """
    candidates = sorted(known)
    near = suggestions.nearest(word, candidates)
    if near:
        return f"did you mean {near!r}?"
    if not candidates:
        return ""
    shown = ", ".join(repr(candidate) for candidate in candidates[:8])
    return f"known: {shown}" + (f" and {len(candidates) - 8} more" if len(candidates) > 8 else "")
