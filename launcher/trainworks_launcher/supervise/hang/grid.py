"""A hang as a picture: a line a host, a letter a rank, a letter for each place. Pure."""

from __future__ import annotations

from itertools import chain
from typing import Mapping, Sequence

from trainworks_launcher.supervise.hang.naming import Row

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_HOSTS = 20
_RANKS = 64
_PLACES = 8


def grid(rows: Sequence[Row], odd: Sequence[Row], silent: Sequence[str] = ()) -> str:
    """Return where the ranks of a job are: hosts below each other, and a legend of the letters.

    The place of most ranks is ``a``; that of a rank which differs has a capital letter. Hosts with such a rank come
    first where not all have room.

    Args:
        rows: Of all ranks of all hosts.
        odd: Those of them that differ.
        silent: Hosts whose rows did not come.

    Returns:
        ``""`` for a single rank.
    """
    if len(rows) + len(silent) < 2:
        return ""
    places: dict[tuple[str, str, str], list[Row]] = {}
    hosts: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.rank, row.host)):
        places.setdefault(row.key, []).append(row)
        hosts.setdefault(row.host, []).append(row)
    by_size = sorted(places.values(), key=len, reverse=True)
    letters = {group[0].key: letter for group, letter in zip(by_size, chain(_LETTERS, "*" * len(by_size)))}
    differ = {row.key for row in odd}
    letters.update({key: letters[key].upper() for key in differ})
    shown = [*hosts]
    if len(shown) > _HOSTS:
        shown = sorted(shown, key=lambda host: not any(row.key in differ for row in hosts[host]))[:_HOSTS]
    lines = [_line(host, hosts[host], letters, shown) for host in shown]
    lines += [f"  and {len(hosts) - len(shown)} more hosts"] if len(hosts) > len(shown) else []
    lines += [f"  {host}: no answer" for host in silent[:_HOSTS]]
    by_size.sort(key=lambda group: group[0].key not in differ)
    for group in by_size[:_PLACES]:
        differs = " (differs)" if group[0].key in differ else ""
        lines.append(f"  {letters[group[0].key]} = {len(group)} {group[0].words(many=len(group) > 1)}{differs}")
    lines += [f"  {len(by_size) - _PLACES} more places"] if len(by_size) > _PLACES else []
    return "\n".join(("ranks, a letter for the place of each:", *lines))


def _line(host: str, rows: Sequence[Row], letters: Mapping[tuple[str, str, str], str], hosts: Sequence[str]) -> str:
    width = max(map(len, hosts))
    first, last = rows[0].rank, rows[-1].rank
    through = f"{first}-{last}" if last - first + 1 == len(rows) > 1 else f"{first}{',...' if last > first else ''}"
    picture = "".join(letters[row.key] for row in rows[:_RANKS]) + ("..." if len(rows) > _RANKS else "")
    return f"  {host:<{width}}  {through if first >= 0 else '-':<9}  {picture}"
