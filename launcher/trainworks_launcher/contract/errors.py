"""Refusals of the launcher: one class, with all problems of a job, and one exit status per kind.

A problem names the mistake, its place, the nearest right value, and the remedy. All problems of a
job are collected and raised together, so that a person corrects a job once.
"""

from __future__ import annotations

from typing import Iterable, NamedTuple

from trainworks_launcher.contract import names, suggestions
from trainworks_launcher.contract.json_values import readable


class Problem(NamedTuple):
    """One mistake in a job.

    Attributes:
        what: The mistake, one sentence without a full stop.
        where: The file, hyperparameter or variable that has it.
        advice: The remedy, with the nearest right value where one exists; may be empty.
    """

    what: str
    where: str
    advice: str = ""

    def __str__(self) -> str:
        """Return ``what (where); advice`` on one line.

        Each part is shortened in its middle, because a wrong value may have any length.
        """
        sentence = f"{_short(self.what)} ({_short(self.where)})"
        if self.advice:
            sentence += f"; {_short(self.advice)}"
        return readable(sentence)


_MAX_SHOWN_CHARACTERS = 350
"""Characters of each part of a problem in a message."""


def _short(part: str) -> str:
    """Return a text; a longer one than _MAX_SHOWN_CHARACTERS with dots in place of its middle."""
    if len(part) <= _MAX_SHOWN_CHARACTERS:
        return part
    half = _MAX_SHOWN_CHARACTERS // 2
    return f"{part[:half]} ... {part[-half:]}"


class RefusalError(Exception):
    """The launcher refuses to start (or to continue) a job.

    Attributes:
        problems: All problems of the job.
        status: The exit status, EXIT_* of names.py.
    """

    def __init__(self, problems: Iterable[Problem], status: int = names.EXIT_NOT_STARTED) -> None:
        """Hold the problems in the order in which they were found."""
        self.problems = tuple(problems)
        self.status = status
        super().__init__(str(self))

    def __str__(self) -> str:
        """Return the text for people: a count, then one line per problem."""
        if len(self.problems) == 1:
            return f"cannot start the job: {self.problems[0]}"
        lines = [f"cannot start the job, {len(self.problems)} problems:"]
        for number, problem in enumerate(self.problems, 1):
            lines.append(f"  {number}. {problem}")
        return "\n".join(lines)


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest a known word: ``did you mean 'x'?``, else a list of the known words.

    Empty without known words.
    """
    candidates = sorted(known)
    near = suggestions.nearest(word, candidates)
    if near:
        return f"did you mean {near!r}?"
    if not candidates:
        return ""
    suggestion = f"known: {', '.join(map(repr, candidates[:_MAX_CANDIDATES]))}"
    if len(candidates) > _MAX_CANDIDATES:
        suggestion += f" and {len(candidates) - _MAX_CANDIDATES} more"
    return suggestion


_MAX_CANDIDATES = 10
"""As many names are listed: all modes are."""
