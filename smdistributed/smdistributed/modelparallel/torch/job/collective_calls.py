"""Record the collective calls of this rank, and find ranks with different calls.

A script may call a collective function on one rank only, for example by
``if smp.rank() == 0: model.state_dict()``. Then this rank waits for ever, and soon the others do,
too. So each of these functions records its calls in this module. Nothing is sent for that. A rank
that waits for long reports its calls to rank 0 (transport/failure_watch.py), which compares the
reports of all ranks.

Two comparisons show that ranks cannot go on:
- The same call of a group, counted from the start, has two names: a rank made a call less or more.
- Two ranks wait in calls of two groups, and neither has made the other's call.
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
"""Number of the last calls of a group that a rank remembers.

More than one, because the call that differs may have returned.
"""


@dataclass(frozen=True)
class Call:
    """One call that all ranks of a group must make.

    Attributes:
        group: Kind of the group and its first rank, for example ``MP_GROUP/0``.
        number: Number of the call in this group on this rank, from 1.
        name: The function that the script has called.
    """

    group: str
    number: int
    name: str


@dataclass(frozen=True)
class Report:
    """The calls of a rank, as rank 0 compares them.

    Attributes:
        waits_in: The call that the rank is in, or None.
        counts: Group -> number of calls so far, for each group of the rank.
        names: Group -> names of the last calls, the newest last.
    """

    waits_in: Call | None
    counts: Mapping[str, int]
    names: Mapping[str, list[str]]

    def as_json(self) -> dict[str, Any]:
        """Return the report in a form that can be written as JSON.

        `from_json` reads it.
        """
        waits_in = None
        if self.waits_in is not None:
            waits_in = [self.waits_in.group, self.waits_in.number, self.waits_in.name]
        return {"waits_in": waits_in, "counts": dict(self.counts), "names": dict(self.names)}

    @classmethod
    def from_json(cls, report: Mapping[str, Any]) -> Report:
        """Return the report from the result of ``as_json``.

        Raises:
            KeyError: An entry is missing.
        """
        waits_in = None
        if report["waits_in"] is not None:
            waits_in = Call(*report["waits_in"])
        return cls(waits_in, report["counts"], report["names"])

    def name_of(self, group: str, number: int) -> str | None:
        """Return the name of a call of a group; None before the call, and for a forgotten one.

        Args:
            group: The group.
            number: Number of the call, from 1.
        """
        names = self.names.get(group, [])
        # The list has the last calls only: its first name belongs to call `oldest`.
        place = number - 1 - (self.counts.get(group, 0) - len(names))
        if 0 <= place < len(names):
            return names[place]
        return None

    def oldest(self, group: str) -> int:
        """Return the number of the oldest call of a group that is remembered."""
        return self.counts.get(group, 0) - len(self.names.get(group, [])) + 1


@dataclass
class CollectiveCalls:
    """The calls of one rank, in their order.

    One thread of the script adds calls, and the thread of the watch reads them.
    """

    # The calls that have not returned, the innermost last, with the time of entry (monotonic).
    _entered: list[tuple[Call, float]] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _names: dict[str, deque[str]] = field(default_factory=dict)
    _outer: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def inside(self, name: str, kind: CommGroup) -> Iterator[Call | None]:
        """Record that this rank is in a collective call until the block ends.

        Yields the call; None if this rank is alone in its group.

        The call is counted, gets the next number in its group, and its name is kept among the last
        16. Nothing is sent. If the block raises, the names of all groups are cleared, because the
        script may then make other calls than before, and two names for one number would look like a
        difference. The counts stay, because other ranks count this call, too.

        Args:
            name: The called function. Within ``part_of`` the name of the outer function is recorded
                in its place.
            kind: Kind of the group with the ranks that must make this call.

        Raises:
            BaseException: An error of the block.
        """
        if len(state.topo.members(kind)) == 1:
            yield None
            return
        group = _group_key(kind)
        name = self._outer[0] if self._outer else name
        self._counts[group] += 1
        self._names.setdefault(group, deque(maxlen=REMEMBERED)).append(name)
        call = Call(group, self._counts[group], name)
        entry = (call, time.monotonic())
        self._entered.append(entry)
        try:
            yield call
        except BaseException:
            # After an error the script may go on with other calls than before: forget the names.
            self._names.clear()
            raise
        finally:
            self._entered.remove(entry)

    @contextlib.contextmanager
    def part_of(self, name: str) -> Iterator[None]:
        """Record the calls within a block under the name of the function that the script called.

        ``with calls.part_of("smp.save_checkpoint()")`` lets an inner ``smp.allgather`` be told as
        ``smp.save_checkpoint()``, which the reader of an error knows. Of nested blocks the
        outermost name counts. It also works as a decorator.
        """
        self._outer.append(name)
        try:
            yield
        finally:
            self._outer.pop()

    def since(self) -> float | None:
        """Return the time at which this rank entered the innermost call, as of `time.monotonic`.

        None outside of all calls.

        The thread of the watch calls this.
        """
        try:
            _, since = self._entered[-1]
        except IndexError:
            return None
        return since

    def report(self) -> Report:
        """Return the report of this rank. The thread of the watch calls this.

        Nothing is sent or changed.
        """
        # Copies, because another thread adds calls meanwhile.
        entered, names_by_group = list(self._entered), list(self._names.items())
        waits_in = None
        if entered:
            waits_in, _ = entered[-1]
        counts = {group: self._counts[group] for group in map(_group_key, CommGroup)}
        names = {group: list(group_names) for group, group_names in names_by_group}
        return Report(waits_in, counts, names)


def _group_key(kind: CommGroup) -> str:
    """Return the kind and the first member of this rank's group, such as ``MP_GROUP/0``."""
    return f"{kind.name}/{state.topo.members(kind)[0]}"


@dataclass(frozen=True)
class Difference:
    """Two ranks that cannot go on.

    Attributes:
        rank: The rank that is named as the cause: of the two ranks the higher one.
        words: The calls of this rank and of the other.
    """

    rank: int
    words: str


def first_difference(reports: Mapping[int, Report]) -> Difference | None:
    """Return two ranks that can never go on, because their calls differ; None if none is known.

    Each rank is compared only with the first rank of each of its groups, because a job may have
    thousands of ranks.

    Args:
        reports: Global rank -> its report.

    Returns:
        The difference: of the two ranks the higher one, with words that name both. Of ranks that
        only wait long, without a difference, nothing is said.
    """
    first_of: dict[str, int] = {}
    waiting: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(reports):
        report = reports[rank]
        for group in report.counts:
            first = first_of.setdefault(group, rank)
            if first == rank:
                continue
            words = _find_different_name(group, first, reports[first], report)
            if words is not None:
                return Difference(rank, f"{words}. {_RULE}")
        if report.waits_in is not None:
            waiting[report.waits_in.group].append(rank)
    for rank in sorted(reports):
        crossed = _find_crossed_waits(rank, reports, waiting)
        if crossed is not None:
            return crossed
    return None


_RULE = "Every rank of a model must make these calls, in the same order."


def _find_different_name(
    group: str, first: int, first_report: Report, report: Report
) -> str | None:
    """Return words if the same call of a group has two names on two ranks; None if not.

    Only calls are compared that both ranks remember.

    Args:
        group: The group.
        first: First rank of the group.
        first_report: Report of this rank.
        report: Report of another rank of the group.
    """
    begin = max(first_report.oldest(group), report.oldest(group))
    end = min(first_report.counts[group], report.counts[group])
    for number in range(begin, end + 1):
        first_name, name = first_report.name_of(group, number), report.name_of(group, number)
        if first_name != name:
            return f"it called {name}, where rank {first} called {first_name}"
    return None


def _find_crossed_waits(
    rank: int, reports: Mapping[int, Report], waiting: Mapping[str, list[int]]
) -> Difference | None:
    """Return a difference if a rank and another one wait for each other, in calls of two groups.

    Neither has made the other's call yet. None if there is no such rank.

    Nothing is changed.

    Args:
        rank: The rank.
        reports: Global rank -> its report.
        waiting: Group -> ranks that are in a call of the group.
    """
    call = reports[rank].waits_in
    if call is None:
        return None
    for group, count in reports[rank].counts.items():
        if group == call.group:
            continue
        # One of the waiting ranks is enough: all are in the same call, or it has two names.
        members = [other for other in waiting.get(group, ()) if call.group in reports[other].counts]
        if not members:
            continue
        other = members[0]
        other_call = reports[other].waits_in
        assert other_call is not None
        if reports[other].counts[call.group] < call.number and count < other_call.number:
            pairs = sorted([(rank, call.name), (other, other_call.name)])
            (low, low_name), (high, high_name) = pairs
            return Difference(
                high, f"it is in {high_name}, where rank {low} is in {low_name}. {_RULE}"
            )
    return None


calls = CollectiveCalls()
"""The calls of this process."""
