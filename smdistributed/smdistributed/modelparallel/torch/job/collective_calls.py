"""The calls of this rank that all ranks of a group must make: their names, in their order.

A script that calls such a function on one rank only, as ``if smp.rank() == 0: model.state_dict()``
does, leaves this rank waiting for ever, and soon the others, too. So each of these functions says
here which call it is. Nothing is sent for it. A rank that waits for long tells its calls to rank 0
(transport/failure_watch.py), which compares those of all ranks.

Two comparisons show that ranks cannot go on:
- The same call of a group, counted from the start, has two names: some rank
  left one out, or made one more.
- Two ranks wait in calls of two groups, and neither has come to the other's call.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .state import state
from .topology import CommGroup

REMEMBERED = 16
"""How many of the last calls of a group a rank remembers.

More than one: the call that differs may have returned.
"""


@dataclass(frozen=True)
class Call:
    """One call that all ranks of a group must make.

    Attributes:
        group: Which group: its kind, and its first rank, as in ``MP_GROUP/0``.
        number: How many calls of this group the rank has made with this one.
        name: The function, as the script knows it.
    """

    group: str
    number: int
    name: str


@dataclass(frozen=True)
class Report:
    """What a rank says of its calls.

    Attributes:
        waits_in: The call that it is in, or None.
        counts: Number of calls so far, by group, of each group that this rank is a member of.
        names: The last names by group, the newest last.
    """

    waits_in: Call | None
    counts: Mapping[str, int]
    names: Mapping[str, list[str]]

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        waits_in = None
        if self.waits_in is not None:
            waits_in = [self.waits_in.group, self.waits_in.number, self.waits_in.name]
        return {"waits_in": waits_in, "counts": dict(self.counts), "names": dict(self.names)}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Report:
        """Return the report that ``as_json`` described."""
        waits_in = None
        if said["waits_in"] is not None:
            waits_in = Call(*said["waits_in"])
        return cls(waits_in, said["counts"], said["names"])

    def name_of(self, group: str, number: int) -> str | None:
        """Return the name of one call of a group, or None if it was not made
        yet, or is forgotten.
        """
        names = self.names.get(group, [])
        place = number - 1 - (self.counts.get(group, 0) - len(names))
        if 0 <= place < len(names):
            return names[place]
        return None

    def oldest(self, group: str) -> int:
        """Return the number of the oldest call of a group that is remembered."""
        return self.counts.get(group, 0) - len(self.names.get(group, [])) + 1


@dataclass
class CollectiveCalls:
    """The calls of one rank, in their order."""

    _entered: list[tuple[Call, float]] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _names: dict[str, deque[str]] = field(default_factory=dict)
    _outer: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def inside(self, name: str, kind: CommGroup) -> Iterator[Call | None]:
        """Note that this rank is in a call until the block ends.

        Yield the call; None: this rank is alone in its group.

        Args:
            name: The function that is called. Within ``part_of`` the outer
                function's name stands instead.
            kind: Whose ranks must make this call.

        Raises:
            BaseException: What the block raises.
        """
        if len(state.topo.members(kind)) == 1:
            yield None
            return
        group = _group(kind)
        name = self._outer[0] if self._outer else name
        self._counts[group] += 1
        self._names.setdefault(group, deque(maxlen=REMEMBERED)).append(name)
        call = Call(group, self._counts[group], name)
        entry = (call, time.monotonic())
        self._entered.append(entry)
        try:
            yield call
        except BaseException:
            # Ranks that fail in two calls, and whose scripts go on, were not in
            # the same ones: begin anew.
            self._names.clear()
            raise
        finally:
            self._entered.remove(entry)

    @contextlib.contextmanager
    def part_of(self, name: str) -> Iterator[None]:
        """Give the calls within a block the name of the function that the script called."""
        self._outer.append(name)
        try:
            yield
        finally:
            self._outer.pop()

    def since(self) -> float | None:
        """Return when this rank entered the innermost call (monotonic clock).

        None outside of all.
        """
        try:
            _, since = self._entered[-1]
        except IndexError:
            return None
        return since

    def report(self) -> Report:
        """Return what this rank says of its calls. The thread of the watch calls this."""
        entered = list(self._entered)
        waits_in = entered[-1][0] if entered else None
        counts = {group: self._counts[group] for group in map(_group, CommGroup)}
        return Report(
            waits_in, counts, {group: list(names) for group, names in list(self._names.items())}
        )


def _group(kind: CommGroup) -> str:
    """Return which group of a kind this rank is in, by its first member."""
    return f"{kind.name}/{state.topo.members(kind)[0]}"


@dataclass(frozen=True)
class Difference:
    """Two ranks that cannot go on.

    Attributes:
        rank: The one that is named as the cause: of two, that with the higher number.
        words: What it does, and what the other does.
    """

    rank: int
    words: str


def first_difference(reports: Mapping[int, Report]) -> Difference | None:
    """Return two ranks whose calls cannot meet, or None.

    Each rank is compared with the first one of each of its groups, and not with
    all: a job may have thousands of ranks.

    Args:
        reports: What ranks said of their calls, by global rank.
    """
    first_of: dict[str, int] = {}
    waiting: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(reports):
        report = reports[rank]
        for group in report.counts:
            first = first_of.setdefault(group, rank)
            words = None if first == rank else _other_name(group, first, reports[first], report)
            if words is not None:
                return Difference(rank, f"{words}. {_RULE}")
        if report.waits_in is not None:
            waiting[report.waits_in.group].append(rank)
    for rank in sorted(reports):
        crossed = _crossed(rank, reports, waiting)
        if crossed is not None:
            return crossed
    return None


_RULE = "Every rank of a model must make these calls, in the same order."


def _other_name(group: str, first: int, one: Report, other: Report) -> str | None:
    """Return words if the same call of a group has two names."""
    begin = max(one.oldest(group), other.oldest(group))
    end = min(one.counts[group], other.counts[group])
    for number in range(begin, end + 1):
        mine, theirs = one.name_of(group, number), other.name_of(group, number)
        if mine != theirs:
            return f"it called {theirs}, where rank {first} called {mine}"
    return None


def _crossed(
    rank: int, reports: Mapping[int, Report], waiting: Mapping[str, list[int]]
) -> Difference | None:
    """Return words if a rank and another one wait for each other, in calls of two groups.

    Args:
        rank: The rank.
        reports: What all said.
        waiting: Those that are in a call, by the call's group.
    """
    mine = reports[rank].waits_in
    if mine is None:
        return None
    for group, count in reports[rank].counts.items():
        # One of those that wait there is enough: they are in the same call, or it has two names.
        other = next(
            (each for each in waiting.get(group, ()) if mine.group in reports[each].counts), None
        )
        if other is None or group == mine.group:
            continue
        theirs = reports[other].waits_in
        assert theirs is not None
        if reports[other].counts[mine.group] < mine.number and count < theirs.number:
            (low, low_call), (high, high_call) = sorted([(rank, mine.name), (other, theirs.name)])
            return Difference(
                high, f"it is in {high_call}, where rank {low} is in {low_call}. {_RULE}"
            )
    return None


calls = CollectiveCalls()
"""The calls of this process."""
