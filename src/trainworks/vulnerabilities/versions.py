"""Which of two versions is newer, by the rules of whoever numbers them, and whether one lies in an advisory's range."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cmp_to_key

from debian_inspector.version import compare_versions
from packaging.version import InvalidVersion, Version

Compare = Callable[[str, str], int]
"""Takes an installed version and one that an advisory names; negative, zero or positive as the first is older."""

Event = tuple[str, str]
"""What happens at a version: ``introduced``, ``fixed``, ``last_affected`` or ``limit``, and the version."""

BEGINNING = "0"
"""The version before all others, as OSV writes it: in Debian's own order ``0~`` would be older."""

EVENTS = ("fixed", "introduced", "last_affected", "limit")
"""In the order in which they take effect at one and the same version."""


class UnreadableVersionError(ValueError):
    """A version that its scheme cannot read."""


def compare_python(installed: str, named: str) -> int:
    """Compare as PEP 440 has it; of an installed version the part behind ``+`` counts only against another one.

    A wheel ``VERSION+cpu`` is the release VERSION built for something; advisories name releases.
    """
    try:
        right = Version(named)
        left = Version(installed)
    except InvalidVersion as error:
        raise UnreadableVersionError(str(error)) from None
    if right.local is None:
        left = Version(left.public)
    return (left > right) - (left < right)


def compare_debian(installed: str, named: str) -> int:
    """Compare as dpkg does (Debian policy, the field Version)."""
    try:
        return int(compare_versions(installed, named))
    except ValueError as error:
        raise UnreadableVersionError(str(error)) from None


SCHEMES: Mapping[str, Compare] = {"deb": compare_debian, "pypi": compare_python}
"""By the type of package URLs."""


def in_range(version: str, events: Sequence[Event], compare: Compare) -> bool:
    """Say whether a range has a version, as OSV's schema evaluates one; raises ``UnreadableVersionError``."""

    def order(named: str) -> int:
        return 1 if named == BEGINNING else compare(version, named)

    inside = False
    for kind, named in in_order(events, compare):
        if kind == "introduced" and order(named) >= 0:
            inside = True
        elif (kind == "fixed" and order(named) >= 0) or (kind == "last_affected" and order(named) > 0):
            inside = False
    limits = [named for kind, named in events if kind == "limit" and named != "*"]
    return inside and (not limits or any(order(named) < 0 for named in limits))


def in_order(events: Sequence[Event], compare: Compare) -> list[Event]:
    """Return a range's events, oldest version first; raises ``UnreadableVersionError``."""

    def two(left: Event, right: Event) -> int:
        rank = EVENTS.index(left[0]) - EVENTS.index(right[0])
        if left[1] == right[1]:
            return rank
        if BEGINNING in (left[1], right[1]):
            return -1 if left[1] == BEGINNING else 1
        return compare(left[1], right[1]) or rank

    return sorted((event for event in events if event[1] != "*"), key=cmp_to_key(two))


def next_fix(version: str, events: Sequence[Event], compare: Compare) -> str:
    """Return the first version after this one in which a range ends by a fix; ``""`` where there is none."""
    for kind, named in in_order(events, compare):
        if kind == "fixed" and compare(version, named) < 0:
            return named
    return ""


def newest(versions: Sequence[str], compare: Compare) -> str:
    """Return the newest of some versions; ``""`` of none."""
    return max(versions, key=cmp_to_key(compare), default="")
