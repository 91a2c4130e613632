"""Suggest names to people who mistype one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainworks.errors import UnknownNameError
from trainworks.suggestions import alike, nearest

LISTED = 20
"""If more names than these are available, an error shows only the closest ones."""

SHOWN = 5

LIST = "`python build.py --list` shows every target"


def suggestion(
    name: str, known: Iterable[str], *, hidden: Iterable[str] = (), near: str = ""
) -> str:
    """Return what an error suggests instead of an unknown name: the closest
    known name, and what is available.

    Args:
        name: What was asked for.
        known: All names that would have been right, in the order to show them.
        hidden: Further names that may have been meant; suggested, not listed.
        near: What was meant, where the caller knows it better.
    """
    names = list(dict.fromkeys(known))
    near = near or nearest(name, [*names, *hidden])
    available = ", ".join(names) or "none"
    if len(names) > LISTED:
        closest = ", ".join(alike(name, names)[:SHOWN])
        available = f"{len(names)} names" + (f", the closest: {closest}" if closest else "")
    return f"did you mean {near}? (available: {available})" if near else f"available: {available}"


def unknown(
    kind: str, name: str, known: Iterable[str], *, hidden: Iterable[str] = (), near: str = ""
) -> UnknownNameError:
    """Return the error for a name that does not exist, with a suggestion.

    Args:
        kind: What was named, for people: ``framework``, ``--cuda``.
        name: What was asked for.
        known, hidden, near: See ``suggestion``.
    """
    return UnknownNameError(
        f"unknown {kind} {name!r}", hint=suggestion(name, known, hidden=hidden, near=near)
    )


def together(problems: Sequence[UnknownNameError], advice: str = "") -> UnknownNameError:
    """Return one error of all, with advice for all of them.

    Of several each is a line with its own hint.
    """
    if len(problems) == 1:
        (problem,) = problems
        return UnknownNameError(
            problem.message, hint="; ".join(filter(None, (problem.hint, advice)))
        )
    lines = "".join(f"\n  {problem.line}" for problem in problems)
    return UnknownNameError(f"{len(problems)} problems:{lines}", hint=advice)
