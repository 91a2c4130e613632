"""Find collectives that ranks have not called, from the records of torch's flight recorder of all
ranks. Pure.

A rank is at fault if others wait in a call that it has not made, while the rank itself waits for no
other: all other ranks without the call only wait for that one. torch's own reader,
``torchfrtrace``, names these ranks too, and with them most of the ranks that wait.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract.json_values import Json, printable

_LINES = 4
"""Number of lines that a result has at most."""


class Call(NamedTuple):
    """A call of a process group.

    Attributes:
        group: Name of the group.
        seq: Number of the call in the group; -1 for a call to a single rank.
        name: The call, for example ``nccl:all_reduce``.
    """

    group: str
    seq: int
    name: str


class MissingCalls(NamedTuple):
    """The result: calls that ranks have not made.

    Attributes:
        lines: For people.
        ranks: The ranks for which the others wait; () if not known.
    """

    lines: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class _Group(NamedTuple):
    """A process group in the record of one rank.

    Attributes:
        about: Its description; ``""`` or ``undefined`` for none.
        ranks: Its ranks; empty if not known.
        last: Number of the rank's last call in the group.
    """

    about: str
    ranks: set[int]
    last: int


class _Open(NamedTuple):
    """A call that has not ended.

    Attributes:
        call: The call.
        peer: In a call to one rank, the place of that rank in the group; else -1.
    """

    call: Call
    peer: int


class _Record(NamedTuple):
    """What the flight recorder of one rank shows: the groups of the rank, and its open calls.

    Attributes:
        groups: Name -> group, for the groups that the rank is in.
        open_calls: The calls of the rank that have not ended, the earliest first.
    """

    groups: Mapping[str, _Group]
    open_calls: Sequence[_Open]


_Waits = Mapping[int, Mapping[int, Call]]
"""Rank that waits -> rank that it waits for -> the call."""


def find_missing_calls(documents: Sequence[Json]) -> MissingCalls:
    """Find the ranks that have not made a call in which others wait.

    Args:
        documents: Records of the ranks of all hosts (``flight_recorder.record_of``); those in
            another form are ignored.

    Returns:
        The ranks at fault, and lines for people. Without ranks that wait for others: a line about
        a call that all ranks wait in, if there is one.
    """
    records = _parse_records(documents)
    group_names = _names_of_groups(records)
    waits = _find_waits(records)
    missing = _missing_ranks(waits)
    at_fault = _ranks_at_fault(waits, records)
    lines = _write_lines(at_fault or missing, waits, records, group_names)

    calls = _collect_callers(records)
    mismatch = _find_mismatch(calls, group_names)
    if mismatch is not None and not at_fault:
        # Different calls with one number also look like ranks that wait for each other.
        at_fault = mismatch.ranks
        lines = [*mismatch.lines, *lines]
    elif calls and not missing:
        call = _describe_call(next(iter(calls)), group_names)
        lines = [
            f"every rank has called {call}, which does not end: look at the network and the GPUs"
        ]
    return MissingCalls(tuple(map(printable, lines[:_LINES])), at_fault)


def _parse_records(documents: Any) -> dict[int, _Record]:
    """Return rank -> its record; documents in another form are left out."""
    records = {}
    for document in documents:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            groups = {}
            for name, (about, ranks, last) in document["groups"].items():
                groups[name] = _Group(str(about), _parse_ranks(ranks), int(last))
            open_calls = []
            for name, seq, what, peer in document["open"]:
                open_calls.append(_Open(Call(str(name), int(seq), str(what)), int(peer)))
            records[int(document["rank"])] = _Record(groups, open_calls)
    return records


def _names_of_groups(records: Mapping[int, _Record]) -> dict[str, str]:
    """Return name of a group -> its name for people: its description, else ``group NAME``."""
    group_names = {}
    for record in records.values():
        for name, group in record.groups.items():
            has_name = group.about not in ("", "undefined")
            group_names[name] = group.about if has_name else f"group {name}"
    return group_names


def _collect_members(records: Mapping[int, _Record]) -> dict[str, set[int]]:
    """Return name of a group -> its ranks, as far as the records show them."""
    members: dict[str, set[int]] = {}
    for rank, record in records.items():
        for name, group in record.groups.items():
            ranks = members.setdefault(name, {rank})
            if group.ranks:
                ranks.update(group.ranks)
            elif group.about == "default_pg":
                # torch's name for the group of all ranks.
                ranks.update(records)
    return members


def _collect_callers(records: Mapping[int, _Record]) -> dict[Call, list[int]]:
    """Return collective that has not ended -> the ranks that wait in it.

    Calls to a single rank are left out.
    """
    callers: dict[Call, list[int]] = {}
    for rank, record in records.items():
        for call, _ in record.open_calls:
            if call.seq >= 0:
                callers.setdefault(call, []).append(rank)
    return callers


def _find_waits(records: Mapping[int, _Record]) -> _Waits:
    """Return rank that waits -> rank that it waits for -> the call.

    Of several calls between two ranks the first one counts.
    """
    waits: dict[int, dict[int, Call]] = {}
    late: dict[Call, list[int]] = {}  # collective -> the ranks that have not made it
    to_one: dict[tuple[int, int], Call] = {}  # (rank, the one rank that it calls) -> the call
    members = _collect_members(records)
    for rank, record in records.items():
        for call, peer in record.open_calls:
            group = members.get(call.group, set())
            if call.seq < 0:
                # A call to the rank at this place of the group.
                if 0 <= peer < len(group):
                    to_one[rank, sorted(group)[peer]] = call
                continue
            if call not in late:
                late[call] = _find_late_ranks(call, group, records)
            for other in late[call]:
                waits.setdefault(rank, {}).setdefault(other, call)
    for (rank, other), call in to_one.items():
        # Two ranks in calls to each other do not wait: the calls are about to end.
        if (other, rank) not in to_one:
            waits.setdefault(rank, {}).setdefault(other, call)
    return waits


def _find_late_ranks(call: Call, group: Iterable[int], records: Mapping[int, _Record]) -> list[int]:
    """Return the ranks of a group that have not made a call yet, or have no record."""
    late = []
    for rank in group:
        record = records.get(rank)
        own_group = record.groups.get(call.group) if record is not None else None
        if own_group is None or own_group.last < call.seq:
            late.append(rank)
    return late


def _missing_ranks(waits: _Waits) -> list[int]:
    """Return the ranks for which others wait."""
    missing: set[int] = set()
    for row in waits.values():
        missing.update(row)
    return sorted(missing)


def _ranks_at_fault(waits: _Waits, records: Mapping[int, _Record]) -> tuple[int, ...]:
    """Return the ranks that keep the others waiting; () if not known.

    These are the awaited ranks that wait for no other. If every awaited rank waits itself, it is
    the rank for which most wait: that rank has left out a call.
    """
    missing = _missing_ranks(waits)
    not_waiting = tuple(rank for rank in missing if rank in records and rank not in waits)
    if not_waiting or not missing:
        return not_waiting
    # A rank without a record may be the one that waits for no other. Nothing is said then.
    if any(rank not in records for rank in missing):
        return ()
    waiters: Counter[int] = Counter()
    for row in waits.values():
        waiters.update(row.keys())
    # At most one other rank: the one with the second most waiters.
    (most_awaited, count), *others = waiters.most_common(2)
    is_tie = any(other_count == count for _, other_count in others)
    if is_tie:
        return ()
    return (most_awaited,)


def _write_lines(
    ranks: Sequence[int],
    waits: _Waits,
    records: Mapping[int, _Record],
    group_names: Mapping[str, str],
) -> list[str]:
    """Write a line for each call that some of these ranks have not made.

    For example ``rank 3 has not called all_reduce of default_pg (call 17), in which ranks 0-2
    wait``. A rank is in one line only, also if others wait for it in several calls.

    Args:
        ranks: The ranks; others wait for each of them.
        waits: Rank that waits -> (rank that it waits for -> the call in which it waits).
        records: Rank -> what its flight recorder shows. A rank whose recorder left nothing is not
            a key, and has ``left no record of`` the call.
        group_names: Name of a group -> its name for people.
    """
    # A call, and whether the ranks have a record -> the ranks. Without a record nothing is known.
    missing_from: dict[tuple[Call, bool], list[int]] = {}
    for rank in ranks:
        # Call -> number of the ranks that wait in it for this rank.
        calls = Counter(row[rank] for row in waits.values() if rank in row)
        # The call that most ranks wait in; of several the earliest.
        call = max(calls, key=lambda call: (calls[call], -call.seq))
        missing_from.setdefault((call, rank in records), []).append(rank)

    lines = []
    for (call, has_record), absent in missing_from.items():
        # The ranks that wait in this call for one of the absent ones.
        waiting = []
        for rank, row in waits.items():
            if call in (row.get(other) for other in absent):
                waiting.append(rank)
        lack = "left no record of"
        if has_record:
            lack = "has not called" if len(absent) == 1 else "have not called"
        wait = "wait" if len(waiting) > 1 else "waits"
        name = _describe_call(call, group_names)
        late, waiters = _describe_ranks(absent), _describe_ranks(waiting)
        lines.append(f"{late} {lack} {name}, in which {waiters} {wait}")
    return lines


def _find_mismatch(
    calls: Mapping[Call, Sequence[int]], group_names: Mapping[str, str]
) -> MissingCalls | None:
    """Find different calls that have the same number in one group.

    Returns:
        A line, and the ranks with the rarer call, if one of the two is rarer; None for no
        mismatch.
    """
    for call, few in calls.items():
        for other, most in calls.items():
            is_same = (other.group, other.seq) == (call.group, call.seq)
            if not is_same or other.name == call.name or len(few) > len(most):
                continue
            minority, majority = _describe_ranks(few), _describe_ranks(most)
            other_call = _describe_call(other, group_names)
            line = f"{minority} called {call.name}, and {majority} {other_call}"
            if len(few) == len(most):
                return MissingCalls((line,))
            return MissingCalls((line,), tuple(sorted(few)))
    return None


def _describe_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for people: ``rank 3``, ``ranks 0-7,9``."""
    if len(ranks) > 1:
        return f"ranks {format_ranks(ranks)}"
    return f"rank {format_ranks(ranks)}"


def _describe_call(call: Call, group_names: Mapping[str, str]) -> str:
    """Return a call for people: ``nccl:all_reduce of default_pg (call 17)``.

    A call to a single rank has no number.
    """
    words = f"{call.name} of {group_names.get(call.group, call.group)}"
    if call.seq >= 0:
        words += f" (call {call.seq})"
    return words


_SHORTEST_RUN = 3
"""Ranks with equal distances from which a range is written."""


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as ``0-7,9``, the form that ``_parse_ranks`` reads.

    A step above 1 follows a colon: ``0-56:8``.
    """
    parts = []
    rest = sorted(set(ranks))
    while rest:
        count, step = _run_at_start(rest)
        # Two ranks with any distance are no run: they are written one by one.
        if count < _SHORTEST_RUN:
            parts.append(str(rest.pop(0)))
            continue
        part = f"{rest[0]}-{rest[count - 1]}"
        if step > 1:
            part += f":{step}"
        parts.append(part)
        rest = rest[count:]
    return ",".join(parts)


def _run_at_start(ranks: Sequence[int]) -> tuple[int, int]:
    """Return the number of ranks at the start with equal distances, and the distance.

    >>> _run_at_start([0, 8, 16, 17])
    (3, 8)
    """
    if len(ranks) < 2:
        return 1, 1
    step = ranks[1] - ranks[0]
    for index, rank in enumerate(ranks):
        if rank != ranks[0] + index * step:
            return index, step
    return len(ranks), step


def _parse_ranks(text: str) -> set[int]:
    """Parse ranks in the form of ``format_ranks``; other parts of the text are ignored.

    >>> sorted(_parse_ranks("0-2,8"))
    [0, 1, 2, 8]
    """
    ranks: set[int] = set()
    for first, until, step in re.findall(r"(\d{1,5})(?:-(\d{1,5}))?(?::(\d{1,5}))?", text):
        last = int(until or first)
        ranks.update(range(int(first), last + 1, int(step or 1) or 1))
    return ranks
