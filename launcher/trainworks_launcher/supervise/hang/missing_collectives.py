"""Which rank lacks which collective, from the records that torch's flight
recorder has of all ranks. Pure.

A rank is at fault if others wait in a call that it has not made, and it waits for nobody itself:
the others that lack a call only wait for that one. torch's own reader, ``torchfrtrace``, names
these too, and with them most of the ranks that wait.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract.json_values import Json, printable

_LINES = 4


class Call(NamedTuple):
    """A call of a group. group: its name. seq: number of the call there.

    -1 for one to a single rank.
    """

    group: str
    seq: int
    what: str


class Lacking(NamedTuple):
    """What the records say. lines: for a person. ranks: those that keep the others waiting.

    () if that is not known.
    """

    lines: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class _Group(NamedTuple):
    """A process group, as one rank has recorded it.

    Attributes:
        about: Its description; ``""`` or ``undefined`` if it has none.
        ranks: Its ranks; empty if that is not known.
        last: Number of the last call of this rank.
    """

    about: str
    ranks: set[int]
    last: int


class _Open(NamedTuple):
    """A call that has not ended. peer: place of the other rank in the group, for a call to one."""

    call: Call
    peer: int


class _Record(NamedTuple):
    """The record of one rank. groups: by their names."""

    groups: Mapping[str, _Group]
    open_calls: Sequence[_Open]


_Waits = Mapping[int, Mapping[int, Call]]
"""Rank that waits -> rank that it waits for -> the call."""


def lacking(documents: Sequence[Json]) -> Lacking:
    """Return which ranks lack a call in which others wait. documents: of the
    ranks of all hosts (``record_of``).
    """
    records = _parsed(documents)
    group_names = _names_of_groups(records)
    waits = _waits(records)
    lacked = _lacked(waits)
    guilty = _guilty(waits, records)
    lines = _lines(guilty or lacked, waits, records, group_names)

    calls = _callers(records)
    few, line = _other_call(calls, group_names)
    if line and not guilty:
        guilty = few
        lines.insert(0, line)
    elif calls and not lacked:
        call = _words(next(iter(calls)), group_names)
        lines = [
            f"every rank has called {call}, which does not end: look at the network and the GPUs"
        ]
    return Lacking(tuple(map(printable, lines[:_LINES])), guilty)


def _parsed(documents: Any) -> dict[int, _Record]:
    """Return rank -> its record; documents in another form are left out."""
    records = {}
    for document in documents:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            groups = {}
            for name, (about, ranks, last) in document["groups"].items():
                groups[name] = _Group(str(about), _long(ranks), int(last))
            open_calls = []
            for name, seq, what, peer in document["open"]:
                open_calls.append(_Open(Call(str(name), int(seq), str(what)), int(peer)))
            records[int(document["rank"])] = _Record(groups, open_calls)
    return records


def _names_of_groups(records: Mapping[int, _Record]) -> dict[str, str]:
    """Return name of a group -> how a line calls it."""
    group_names = {}
    for record in records.values():
        for name, group in record.groups.items():
            has_name = group.about not in ("", "undefined")
            group_names[name] = group.about if has_name else f"group {name}"
    return group_names


def _members(records: Mapping[int, _Record]) -> dict[str, set[int]]:
    """Return name of a group -> its ranks."""
    members: dict[str, set[int]] = {}
    for rank, record in records.items():
        for name, group in record.groups.items():
            ranks = members.setdefault(name, {rank})
            if group.ranks:
                ranks.update(group.ranks)
            elif group.about == "default_pg":
                ranks.update(records)
    return members


def _callers(records: Mapping[int, _Record]) -> dict[Call, list[int]]:
    """Return collective that has not ended -> the ranks that wait in it."""
    callers: dict[Call, list[int]] = {}
    for rank, record in records.items():
        for call, _ in record.open_calls:
            if call.seq >= 0:
                callers.setdefault(call, []).append(rank)
    return callers


def _waits(records: Mapping[int, _Record]) -> _Waits:
    """Return who waits for whom: of several calls the first one."""
    waits: dict[int, dict[int, Call]] = {}
    late: dict[Call, list[int]] = {}
    to_one: dict[tuple[int, int], Call] = {}
    members = _members(records)
    for rank, record in records.items():
        for call, peer in record.open_calls:
            group = members.get(call.group, set())
            if call.seq < 0:
                if 0 <= peer < len(group):
                    to_one[rank, sorted(group)[peer]] = call
                continue
            if call not in late:
                late[call] = _late(call, group, records)
            for other in late[call]:
                waits.setdefault(rank, {}).setdefault(other, call)
    for (rank, other), call in to_one.items():
        # Two ranks that are in calls to each other wait for none of the two.
        if (other, rank) not in to_one:
            waits.setdefault(rank, {}).setdefault(other, call)
    return waits


def _late(call: Call, group: Iterable[int], records: Mapping[int, _Record]) -> list[int]:
    """Return the ranks of a group that have not made a call yet, or have no record."""
    late = []
    for rank in group:
        record = records.get(rank)
        own = record.groups.get(call.group) if record is not None else None
        if own is None or own.last < call.seq:
            late.append(rank)
    return late


def _lacked(waits: _Waits) -> list[int]:
    """Return the ranks for which others wait."""
    return sorted({rank for row in waits.values() for rank in row})


def _guilty(waits: _Waits, records: Mapping[int, _Record]) -> tuple[int, ...]:
    """Return the ranks that keep the others waiting; () if that is not known."""
    lacked = _lacked(waits)
    free = tuple(rank for rank in lacked if rank in records and rank not in waits)
    if free or not lacked:
        return free
    # Each waits for another one: the rank that most wait for has left out a call.
    times = Counter(rank for row in waits.values() for rank in row)
    (most, count), *others = times.most_common(2)
    if most not in records or any(fewer == count for _, fewer in others):
        return ()
    return (most,)


def _lines(
    ranks: Sequence[int],
    waits: _Waits,
    records: Mapping[int, _Record],
    group_names: Mapping[str, str],
) -> list[str]:
    """Return a line for each call that some of these ranks lack."""
    lacked_by: dict[Call, list[int]] = {}
    for rank in ranks:
        missed = Counter(row[rank] for row in waits.values() if rank in row)
        call = max(missed, key=lambda call: (missed[call], -call.seq))
        lacked_by.setdefault(call, []).append(rank)

    lines = []
    for call, absent in lacked_by.items():
        waiting = []
        for rank, row in waits.items():
            if call in (row.get(other) for other in absent):
                waiting.append(rank)
        if records.keys().isdisjoint(absent):
            lack = "left no record of"
        else:
            lack = "has not called" if len(absent) == 1 else "have not called"
        wait = "wait" if len(waiting) > 1 else "waits"
        name = _words(call, group_names)
        lines.append(f"{_who(absent)} {lack} {name}, in which {_who(waiting)} {wait}")
    return lines


def _other_call(
    calls: Mapping[Call, Sequence[int]], named: Mapping[str, str]
) -> tuple[tuple[int, ...], str]:
    """Return (the fewer ranks, a line) where ranks make different calls as the same one of a group.

    ((), "") if not.
    """
    for call, few in calls.items():
        for other, most in calls.items():
            is_same = (other.group, other.seq) == (call.group, call.seq)
            if not is_same or other.what == call.what or len(few) > len(most):
                continue
            line = f"{_who(few)} called {call.what}, and {_who(most)} {_words(other, named)}"
            if len(few) == len(most):
                return (), line
            return tuple(sorted(few)), line
    return (), ""


def _who(ranks: Sequence[int]) -> str:
    if len(ranks) > 1:
        return f"ranks {short(ranks)}"
    return f"rank {short(ranks)}"


def _words(call: Call, named: Mapping[str, str]) -> str:
    words = f"{call.what} of {named.get(call.group, call.group)}"
    if call.seq >= 0:
        words += f" (call {call.seq})"
    return words


def short(ranks: Iterable[int]) -> str:
    """Return ``0-7,9``: what ``_long`` reads.

    A step of more than one is written behind: ``0-56:8``.
    """
    parts = []
    rest = sorted(set(ranks))
    while rest:
        count, step = _run_at_start(rest)
        if count < 3:
            parts.append(str(rest.pop(0)))
            continue
        part = f"{rest[0]}-{rest[count - 1]}"
        if step > 1:
            part += f":{step}"
        parts.append(part)
        rest = rest[count:]
    return ",".join(parts)


def _run_at_start(ranks: Sequence[int]) -> tuple[int, int]:
    """Return how many ranks at the start have equal distances, and the distance."""
    if len(ranks) < 2:
        return 1, 1
    step = ranks[1] - ranks[0]
    for index, rank in enumerate(ranks):
        if rank != ranks[0] + index * step:
            return index, step
    return len(ranks), step


def _long(text: str) -> set[int]:
    """Return the ranks that ``short`` has written."""
    ranks: set[int] = set()
    for first, until, step in re.findall(r"(\d{1,5})(?:-(\d{1,5}))?(?::(\d{1,5}))?", text):
        last = int(until or first)
        ranks.update(range(int(first), last + 1, int(step or 1) or 1))
    return ranks
