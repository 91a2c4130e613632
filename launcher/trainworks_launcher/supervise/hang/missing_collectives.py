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


def lacking(documents: Sequence[Json]) -> Lacking:
    """Return which ranks lack a call in which others wait. documents: of the
    ranks of all hosts (``record_of``).
    """
    known = _parsed(documents)
    named: dict[str, str] = {}
    members: dict[str, set[int]] = {}
    for rank, (groups, _) in known.items():
        for name, (about, ranks, _) in groups.items():
            named[name] = about if about not in ("", "undefined") else f"group {name}"
            members.setdefault(name, {rank}).update(
                ranks or (known if about == "default_pg" else ())
            )
    calls: dict[Call, list[int]] = {}
    peers: dict[tuple[int, int], Call] = {}
    waits: dict[int, dict[int, Call]] = {}
    late: dict[Call, list[int]] = {}
    for rank, (_, open_) in known.items():
        for call, place in open_:
            of = members.get(call.group, set())
            if call.seq < 0:
                peers.update({(rank, sorted(of)[place]): call} if 0 <= place < len(of) else {})
                continue
            if call not in late:
                of_known = {
                    peer: known[peer][0].get(call.group, _NEVER)[2] for peer in of if peer in known
                }
                late[call] = [peer for peer in of if of_known.get(peer, -1) < call.seq]
            calls.setdefault(call, []).append(rank)
            for peer in late[call]:
                waits.setdefault(rank, {}).setdefault(peer, call)
    for (rank, peer), call in peers.items():
        if (peer, rank) not in peers:
            waits.setdefault(rank, {}).setdefault(peer, call)
    lacked = sorted({peer for row in waits.values() for peer in row})
    guilty = tuple(rank for rank in lacked if rank in known and rank not in waits)
    if (
        lacked and not guilty
    ):  # each waits for another one: the rank that most wait for has left out a call
        count = Counter(rank for row in waits.values() for rank in row)
        (most, times), *others = count.most_common(2)
        guilty = (most,) if most in known and all(fewer < times for _, fewer in others) else ()
    said: dict[Call, list[int]] = {}
    for rank in guilty or lacked:
        missed = Counter(row[rank] for row in waits.values() if rank in row)
        said.setdefault(max(missed, key=lambda call: (missed[call], -call.seq)), []).append(rank)
    lines = []
    for call, whose in said.items():
        waiting = [
            rank for rank, row in waits.items() if any(row.get(each) == call for each in whose)
        ]
        have = ("has" if len(whose) == 1 else "have") + " not called"
        what = have if known.keys() & set(whose) else "left no record of"
        wait = "wait" if len(waiting) > 1 else "waits"
        lines.append(f"{_who(whose)} {what} {_words(call, named)}, in which {_who(waiting)} {wait}")
    few, line = _other_call(calls, named)
    if line and not guilty:
        guilty, lines = few, [line, *lines]
    elif calls and not lacked:
        one = _words(next(iter(calls)), named)
        lines = [
            f"every rank has called {one}, which does not end: look at the network and the GPUs"
        ]
    return Lacking(tuple(map(printable, lines[:_LINES])), guilty)


_NEVER: tuple[str, set[int], int] = ("", set(), -1)


def _parsed(
    documents: Any,
) -> dict[int, tuple[dict[str, tuple[str, set[int], int]], list[tuple[Call, int]]]]:
    """Return rank -> (name of a group -> what it is, its ranks, number of the
    last call; open calls with the peer).
    """
    known = {}
    for row in documents:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):  # no record
            groups = {
                name: (str(about), _long(ranks), int(last))
                for name, (about, ranks, last) in row["groups"].items()
            }
            open_ = [
                (Call(str(name), int(seq), str(what)), int(place))
                for name, seq, what, place in row["open"]
            ]
            known[int(row["rank"])] = groups, open_
    return known


def _other_call(
    calls: Mapping[Call, Sequence[int]], named: Mapping[str, str]
) -> tuple[tuple[int, ...], str]:
    """Return (the fewer ranks, a line) where ranks make different calls as the same one of a group.

    ((), "") if not.
    """
    for call, ranks in calls.items():
        for other, most in calls.items():
            if other[:2] == call[:2] and other.what != call.what and len(ranks) <= len(most):
                line = f"{_who(ranks)} called {call.what}, and {_who(most)} {_words(other, named)}"
                return tuple(sorted(ranks)) if len(ranks) < len(most) else (), line
    return (), ""


def _who(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {short(ranks)}"


def _words(call: Call, named: Mapping[str, str]) -> str:
    return f"{call.what} of {named.get(call.group, call.group)}" + (
        f" (call {call.seq})" if call.seq >= 0 else ""
    )


def short(ranks: Iterable[int]) -> str:
    """Return ``0-7,9``: what ``_long`` reads.

    A step of more than one is written behind: ``0-56:8``.
    """
    rows, found = sorted(set(ranks)), []
    while rows:
        step = rows[1] - rows[0] if len(rows) > 1 else 1
        count = next((at for at, rank in enumerate(rows) if rank != rows[0] + at * step), len(rows))
        count = count if count > 2 else 1
        found.append(
            f"{rows[0]}-{rows[count - 1]}" + (f":{step}" if step > 1 else "")
            if count > 1
            else str(rows[0])
        )
        rows = rows[count:]
    return ",".join(found)


def _long(words: str) -> set[int]:
    found: set[int] = set()
    for first, until, step in re.findall(r"(\d{1,5})(?:-(\d{1,5}))?(?::(\d{1,5}))?", words):
        found.update(range(int(first), int(until or first) + 1, int(step or 1) or 1))
    return found
