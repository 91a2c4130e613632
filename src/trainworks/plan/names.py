"""Suggest names to people who mistype one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from itertools import takewhile

from trainworks.errors import UnknownNameError

LIKE_ENOUGH = 0.4
"""Below this share of common letters a suggestion confuses more than it helps."""

LISTED = 20
"""If more names than these are available, an error shows only the closest ones."""

SHOWN = 5


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the closest known name, of equals the one that begins alike; ``""`` if none is close."""
    return next(iter(by_likeness(name, known)), "")


def by_likeness(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that are close enough to be meant, the closest first."""
    ranked = [
        (SequenceMatcher(None, name, candidate).ratio(), _common_prefix(name, candidate), candidate)
        for candidate in known
    ]
    ranked.sort(key=lambda rank: rank[:2], reverse=True)
    return [candidate for ratio, _, candidate in ranked if ratio >= LIKE_ENOUGH]


def _common_prefix(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def suggestion(name: str, known: Iterable[str], *, hidden: Iterable[str] = ()) -> str:
    """Return what an error suggests instead of an unknown name: the closest known name, and what is available.

    Args:
        name: What was asked for.
        known: All names that would have been right, in the order to show them.
        hidden: Further names that may have been meant; suggested, not listed.
    """
    names = list(dict.fromkeys(known))
    near = nearest(name, [*names, *hidden])
    available = ", ".join(names) or "none"
    if len(names) > LISTED:
        alike = ", ".join(by_likeness(name, names)[:SHOWN])
        available = f"{len(names)} names" + (f", the closest: {alike}" if alike else "")
    return f"did you mean {near}? (available: {available})" if near else f"available: {available}"


def unknown(
    kind: str, name: str, known: Iterable[str], *, hidden: Iterable[str] = (), more: str = ""
) -> UnknownNameError:
    """Return the error for a name that does not exist, with a suggestion.

    Args:
        kind: What was named, for people: ``framework``, ``--cuda``.
        name: What was asked for.
        known: See ``suggestion``.
        hidden: See ``suggestion``.
        more: A further sentence of advice.
    """
    hint = suggestion(name, known, hidden=hidden)
    return UnknownNameError(f"unknown {kind} {name!r}", hint=f"{hint}; {more}" if more else hint)
