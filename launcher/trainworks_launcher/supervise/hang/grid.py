"""A hang as a picture: a line a host, a letter a rank, a letter for each place. Pure."""

from __future__ import annotations

from itertools import chain
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.supervise.hang.naming import Row

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_HOSTS = 20
_RANKS = 64
_PLACES = 8


class Place(NamedTuple):
    """Where some ranks are. letter: a capital one where they differ. rows: those ranks. differs: whether they do."""

    letter: str
    rows: Sequence[Row]
    differs: bool

    @property
    def words(self) -> str:
        """What the legend says beside the letter."""
        several = len(self.rows) > 1
        return f"{len(self.rows)} {self.rows[0].words(many=several)}{' (differs)' if self.differs else ''}"


class Picture(NamedTuple):
    """Which rank is in which place: what every drawing of it shows.

    Attributes:
        hosts: Host -> its ranks, in their order.
        places: All places; those of ranks that differ come first, then the largest.
        silent: Hosts whose rows did not come.
    """

    hosts: Mapping[str, Sequence[Row]]
    places: Sequence[Place]
    silent: Sequence[str]

    @property
    def at(self) -> Mapping[tuple[str, str, str], Place]:
        """Key of a row -> its place."""
        return {place.rows[0].key: place for place in self.places}

    def foremost(self, most: int) -> list[str]:
        """Return so many hosts; those with a rank that differs come first where not all have room."""
        if len(self.hosts) <= most:
            return [*self.hosts]
        at = self.at
        return sorted(self.hosts, key=lambda host: not any(at[row.key].differs for row in self.hosts[host]))[:most]

    def numbers(self, host: str) -> str:
        """Return the ranks of a host: ``8-15``, ``-`` for programs without a number."""
        rows = self.hosts[host]
        first, last = rows[0].rank, rows[-1].rank
        through = f"{first}-{last}" if last - first + 1 == len(rows) > 1 else f"{first}{',...' if last > first else ''}"
        return through if first >= 0 else "-"


def picture(rows: Sequence[Row], odd: Sequence[Row], silent: Sequence[str] = ()) -> Picture | None:
    """Return where the ranks of a job are.

    The place of most ranks is ``a``; that of a rank which differs has a capital letter.

    Args:
        rows: Of all ranks of all hosts.
        odd: Those of them that differ.
        silent: Hosts whose rows did not come.

    Returns:
        None for a single rank.
    """
    if len(rows) + len(silent) < 2:
        return None
    places: dict[tuple[str, str, str], list[Row]] = {}
    hosts: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.rank, row.host)):
        places.setdefault(row.key, []).append(row)
        hosts.setdefault(row.host, []).append(row)
    differ = {row.key for row in odd}
    by_size = sorted(places.items(), key=lambda item: len(item[1]), reverse=True)
    found = [
        Place(letter.upper() if key in differ else letter, group, key in differ)
        for (key, group), letter in zip(by_size, chain(_LETTERS, "*" * len(by_size)))
    ]
    return Picture(hosts, sorted(found, key=lambda place: not place.differs), silent)


def grid(of: Picture) -> str:
    """Return a picture as text: hosts below each other, and a legend of the letters."""
    at, shown = of.at, of.foremost(_HOSTS)
    width = max(map(len, shown), default=0)
    lines = []
    for host in shown:
        letters = "".join(at[row.key].letter for row in of.hosts[host][:_RANKS])
        more = "..." if len(of.hosts[host]) > _RANKS else ""
        lines.append(f"  {host:<{width}}  {of.numbers(host):<9}  {letters}{more}")
    lines += [f"  and {len(of.hosts) - len(shown)} more hosts"] if len(of.hosts) > len(shown) else []
    lines += [f"  {host}: no answer" for host in of.silent[:_HOSTS]]
    lines += [f"  {place.letter} = {place.words}" for place in of.places[:_PLACES]]
    lines += [f"  {len(of.places) - _PLACES} more places"] if len(of.places) > _PLACES else []
    return "\n".join(("ranks, a letter for the place of each:", *lines))
