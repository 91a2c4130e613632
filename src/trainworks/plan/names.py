"""Helps people who mistype: the nearest existing name, and the list of what exists."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from itertools import takewhile

from trainworks.errors import UnknownNameError

LIKE_ENOUGH = 0.4
"""Below this share of common letters a suggestion confuses more than it helps."""

LISTED = 30
"""Of more names than these only the most alike are shown."""

SHOWN = 5


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like ``name``, ``""`` where none is; of equals the one that begins alike."""
    return next(iter(by_likeness(name, known)), "")


def by_likeness(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that are like enough to be meant, the most alike first."""
    ranked = [
        (SequenceMatcher(None, name, candidate).ratio(), _common_prefix(name, candidate), candidate)
        for candidate in known
    ]
    ranked.sort(key=lambda rank: rank[:2], reverse=True)
    return [candidate for ratio, _, candidate in ranked if ratio >= LIKE_ENOUGH]


def _common_prefix(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def unknown(
    kind: str, name: str, known: Iterable[str], *, hidden: Iterable[str] = (), more: str = ""
) -> UnknownNameError:
    """Return the error for a name that does not exist: the name, the nearest match, and the available names.

    Args:
        kind: What was named, for people: ``framework``, ``--cuda``.
        name: What was asked for.
        known: All names that would have been right, in the order to show them.
        hidden: Further names that may have been meant; suggested, not listed.
        more: A further sentence of advice.
    """
    names = list(dict.fromkeys(known))
    near = nearest(name, [*names, *hidden])
    if len(names) > LISTED:
        alike = ", ".join(by_likeness(name, names)[:SHOWN])
        available = f"{len(names)} available" + (f", the closest: {alike}" if alike else "")
    else:
        available = f"available: {', '.join(names) or 'none'}"
    hint = f"did you mean {near}? ({available})" if near else available
    return UnknownNameError(f"unknown {kind} {name!r}", hint=f"{hint}; {more}" if more else hint)
