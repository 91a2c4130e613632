"""A hang in one sight: a line a host, a letter a rank and its place.

As text, and the same lines as SVG. Pure.
"""

from __future__ import annotations

import html
from itertools import chain
from typing import Callable, Sequence

from trainworks_launcher.contract.json_values import printable
from trainworks_launcher.supervise.hang.outlier_rank import Row

Line = Sequence["tuple[str, str]"]
"""Pieces of a line: a text, and the letter whose colour it has; ``""`` for none."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_HOSTS = 20
_RANKS = 64
_PLACES = 8
_HEADING = "ranks, a letter for the place of each:"


def grid(rows: Sequence[Row], odd: Sequence[Row], silent: Sequence[str] = ()) -> list[Line]:
    """Return where the ranks of a job are: hosts below each other, and a legend of the letters.

    The place of most ranks is ``a``; that of a rank which differs has a capital letter. Of many
    hosts those with a rank that differs come first.

    Args:
        rows: Of all ranks of all hosts.
        odd: Those of them that differ.
        silent: Hosts whose rows did not come.

    Returns:
        [] for a single rank.
    """
    if len(rows) + len(silent) < 2:
        return []
    places: dict[tuple[str, str, str], list[Row]] = {}
    hosts: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.rank, row.host)):
        places.setdefault(row.key, []).append(row)
        hosts.setdefault(row.host, []).append(row)
    differ = {row.key for row in odd}
    by_size = sorted(places, key=lambda key: len(places[key]), reverse=True)
    letters = {
        key: letter.upper() if key in differ else letter
        for key, letter in zip(by_size, chain(_LETTERS, "*" * len(by_size)))
    }
    shown = [*hosts]
    if len(hosts) > _HOSTS:
        shown = sorted(hosts, key=lambda host: not any(row.key in differ for row in hosts[host]))[
            :_HOSTS
        ]
    width = max(map(len, shown), default=0)
    lines: list[Line] = [[(_HEADING, "")]]
    for host in shown:
        cells = [(letters[row.key], letters[row.key]) for row in hosts[host][:_RANKS]]
        more = "..." if len(hosts[host]) > _RANKS else ""
        lines.append([(f"  {host:<{width}}  {_numbers(hosts[host]):<9}  ", ""), *cells, (more, "")])
    words = [f"and {len(hosts) - len(shown)} more hosts"] if len(hosts) > len(shown) else []
    lines += [
        [(f"  {each}", "")]
        for each in (*words, *(f"{host}: no answer" for host in silent[:_HOSTS]))
    ]
    for key in sorted(by_size, key=lambda key: key not in differ)[:_PLACES]:
        group = places[key]
        said = (
            f"{len(group)}"
            f" {group[0].words(many=len(group) > 1)}{' (differs)' if key in differ else ''}"
        )
        lines.append([("  ", ""), (letters[key], letters[key]), (f" = {said}", "")])
    lines += [[(f"  {len(places) - _PLACES} more places", "")]] if len(places) > _PLACES else []
    return lines


def _numbers(rows: Sequence[Row]) -> str:
    """Return the ranks of a host: ``8-15``, ``-`` for programs without a number."""
    first, last = rows[0].rank, rows[-1].rank
    through = (
        f"{first}-{last}"
        if last - first + 1 == len(rows) > 1
        else f"{first}{',...' if last > first else ''}"
    )
    return through if first >= 0 else "-"


def as_text(lines: Sequence[Line]) -> str:
    """Return the lines for a log."""
    return "\n".join("".join(text for text, _ in line) for line in lines)


_COLUMNS, _LETTER, _LINE, _MARGIN = 120, 8, 20, 12
"""The picture's width in letters.

The width of a letter, the height of a line and the margin in pixels.
"""

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
"""Colours that people with any colour vision tell apart.

Source: Okabe and Ito, Color Universal Design, 2008.
"""

_STYLE = (
    ":root{color:#1f2328;background:#fff}"
    "@media(prefers-color-scheme:dark){:root{color:#e6edf3;background:#0d1117}}"
    "text{fill:currentColor;white-space:pre}rect{fill-opacity:.45}"
)


def as_svg(lines: Sequence[Line], heading: str, mask: Callable[[str], str]) -> str:
    """Return the same lines as a picture, with a colour for each letter.
    heading: above them. mask: hides secrets.
    """
    drawn: list[str] = []
    for number, line in enumerate([[(heading, "")], *lines]):
        column, y = 0, _MARGIN + 14 + _LINE * number
        for text, letter in line:
            said = printable(mask(text)).replace("\n", " ").replace("\t", " ")[: _COLUMNS - column]
            x = _MARGIN + column * _LETTER
            if letter and said:
                place = _LETTERS.find(letter.lower())
                colour = _COLOURS[place] if 0 <= place < len(_COLOURS) else "#808080"
                edge = ' stroke="currentColor"' if letter.isupper() else ""
                drawn.append(
                    f'<rect x="{x}" y="{y - 14}" width="{_LETTER}" height="18"'
                    f' fill="{colour}"{edge}/>'
                )
            if said:
                size = f'textLength="{len(said) * _LETTER}" lengthAdjust="spacingAndGlyphs"'
                drawn.append(f'<text x="{x}" y="{y}" {size}>{html.escape(said)}</text>')
            column += len(said)
    width, height = 2 * _MARGIN + _COLUMNS * _LETTER, 2 * _MARGIN + _LINE * (len(lines) + 1)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="monospace"'
        ' font-size="13">'
    )
    return "\n".join((head, f"<style>{_STYLE}</style>", *drawn, "</svg>\n"))
