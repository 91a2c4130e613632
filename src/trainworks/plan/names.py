"""Makes the errors for mistyped names, with suggestions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainworks.errors import UnknownNameError
from trainworks.suggestions import alike, nearest

LISTED = 20
"""If more names than these are available, an error shows only the closest ones."""

SHOWN = 5

LIST = "`python build.py --list --all` shows every target"


def suggest_names(
    name: str, known: Iterable[str], *, hidden: Iterable[str] = (), near: str = ""
) -> str:
    """Return the hint for an unknown name: the closest known name, and all available names.

    For example ``did you mean torch? (available: torch, nccl)``.

    Args:
        name: The unknown name.
        known: All valid names, in the order to show them.
        hidden: Further names that are suggested and not listed.
        near: The closest name, if the caller knows a better one.
    """
    names = list(dict.fromkeys(known))
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 1 and {*names, *hidden}.issuperset(parts):
        return f"give one name at a time: {' and '.join(parts)}"
    near = near or nearest(name, [*names, *hidden])
    available = ", ".join(names) or "none"
    if len(names) > LISTED:
        available = f"{len(names)} names"
        closest = alike(name, names)[:SHOWN]
        if closest:
            available += f", the closest: {', '.join(closest)}"
    if near:
        return f"did you mean {near}? (available: {available})"
    return f"available: {available}"


def make_unknown_name_error(
    kind: str, name: str, known: Iterable[str], *, hidden: Iterable[str] = (), near: str = ""
) -> UnknownNameError:
    """Return the error for a name that does not exist, with a suggestion.

    Args:
        kind: The kind of name, for people: ``framework``, ``--cuda``.
        name: The unknown name.
        known: See ``suggest_names``.
        hidden: See ``suggest_names``.
        near: See ``suggest_names``.
    """
    hint = suggest_names(name, known, hidden=hidden, near=near)
    # Only targets have so many names that the hint gives their number alone.
    if hint.endswith(" names"):
        hint += f"; {LIST}"
    return UnknownNameError(f"unknown {kind} {name!r}", hint=hint)


def join_problems(problems: Sequence[UnknownNameError], advice: str = "") -> UnknownNameError:
    """Join problems to one error, with a line for each problem and its hint.

    Args:
        problems: The problems; one alone keeps its own message.
        advice: A further hint for all of them.
    """
    if len(problems) == 1:
        (problem,) = problems
        hints = [hint for hint in (problem.hint, advice) if hint]
        return UnknownNameError(problem.message, hint="; ".join(hints))
    lines = "".join(f"\n  {problem.line}" for problem in problems)
    return UnknownNameError(f"{len(problems)} problems:{lines}", hint=advice)
