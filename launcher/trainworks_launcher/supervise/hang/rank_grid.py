"""Draw a hang: a line for each host, a letter for each rank and its place.

As text, and the same lines as SVG. Pure.
"""

from __future__ import annotations

import html
from itertools import chain
from typing import Callable, Sequence

from trainworks_launcher.contract.json_values import printable
from trainworks_launcher.supervise.hang.outlier_rank import Row

Line = Sequence["tuple[str, str]"]
"""Pieces of a line: a text, and the letter that has its colour; ``""`` for none."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Hosts that have a line, ranks in a line, and places in the legend.
_MAX_HOSTS = 20
_MAX_RANKS = 64
_MAX_PLACES = 8
_HEADING = "ranks, a letter for the place of each:"


def grid(rows: Sequence[Row], outliers: Sequence[Row], silent: Sequence[str] = ()) -> list[Line]:
    """Draw the places of the ranks of a job, host by host, with a legend of the letters.

    The place of most ranks is ``a``. A place of outliers has a capital letter. Of many hosts,
    those with outliers come first.

    Args:
        rows: Of all ranks of all hosts.
        outliers: The rows that differ.
        silent: Hosts that sent no rows.

    Returns:
        The lines; [] for a single rank.
    """
    if len(rows) + len(silent) < 2:
        return []
    places: dict[tuple[str, str, str], list[Row]] = {}
    hosts: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.rank, row.host)):
        places.setdefault(row.key, []).append(row)
        hosts.setdefault(row.host, []).append(row)
    differ = {row.key for row in outliers}
    by_size = sorted(places, key=lambda key: len(places[key]), reverse=True)
    # The letters in the order of the alphabet, then a star for each further place.
    letters = {}
    for key, letter in zip(by_size, chain(_LETTERS, "*" * len(by_size))):
        letters[key] = letter.upper() if key in differ else letter

    shown = list(hosts)
    if len(hosts) > _MAX_HOSTS:
        hosts_with_outliers = {row.host for row in rows if row.key in differ}
        shown = sorted(hosts, key=lambda host: host not in hosts_with_outliers)[:_MAX_HOSTS]
    width = max(map(len, shown), default=0)
    lines: list[Line] = [[(_HEADING, "")]]
    for host in shown:
        heading = f"  {host:<{width}}  {_numbers(hosts[host]):<9}  "
        cells = [(letters[row.key], letters[row.key]) for row in hosts[host][:_MAX_RANKS]]
        more = "..." if len(hosts[host]) > _MAX_RANKS else ""
        lines.append([(heading, ""), *cells, (more, "")])
    if len(hosts) > len(shown):
        lines.append([(f"  and {len(hosts) - len(shown)} more hosts", "")])
    lines += [[(f"  {host}: no answer", "")] for host in silent[:_MAX_HOSTS]]

    for key in sorted(by_size, key=lambda key: key not in differ)[:_MAX_PLACES]:
        group = places[key]
        meaning = f" = {len(group)} {group[0].words(many=len(group) > 1)}"
        if key in differ:
            meaning += " (differs)"
        lines.append([("  ", ""), (letters[key], letters[key]), (meaning, "")])
    if len(places) > _MAX_PLACES:
        lines.append([(f"  {len(places) - _MAX_PLACES} more places", "")])
    return lines


def _numbers(rows: Sequence[Row]) -> str:
    """Name the ranks of a host: ``8-15``, or ``-`` for programs without a number."""
    first, last = rows[0].rank, rows[-1].rank
    if first < 0:
        return "-"
    if first == last:
        return str(first)
    if last - first + 1 == len(rows):
        return f"{first}-{last}"
    return f"{first},..."


def as_text(lines: Sequence[Line]) -> str:
    """Join the lines for a log."""
    return "\n".join("".join(text for text, _ in line) for line in lines)


_COLUMNS, _LETTER, _LINE, _MARGIN = 120, 8, 20, 12
"""Width of the picture in letters; in pixels the width of a letter, the height of a line, and the
margin.
"""

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
"""Colours that people with any colour vision can distinguish.

Source: Okabe and Ito, Color Universal Design, 2008.
"""

_GREY = "#808080"
"""Colour of the places after those with a colour of their own."""

_BASE, _CELL = 14, 18
"""Pixels from the top of a line to the base of its letters, and the height of a background."""

_STYLE = (
    ":root{color:#1f2328;background:#fff}"
    "@media(prefers-color-scheme:dark){:root{color:#e6edf3;background:#0d1117}}"
    "text{fill:currentColor;white-space:pre}rect{fill-opacity:.45}"
)


def as_svg(lines: Sequence[Line], heading: str, redact: Callable[[str], str]) -> str:
    """Draw the lines as a picture, with a colour for each letter.

    Args:
        lines: From ``grid``.
        heading: Text above them.
        redact: Hides secrets.
    """
    elements: list[str] = []
    for number, line in enumerate([[(heading, "")], *lines]):
        column, y = 0, _MARGIN + _BASE + _LINE * number
        for text, letter in line:
            shown = printable(redact(text)).replace("\n", " ").replace("\t", " ")
            shown = shown[: _COLUMNS - column]
            if not shown:
                continue
            x = _MARGIN + column * _LETTER
            if letter:
                elements.append(_cell(letter, x, y))
            size = f'textLength="{len(shown) * _LETTER}" lengthAdjust="spacingAndGlyphs"'
            elements.append(f'<text x="{x}" y="{y}" {size}>{html.escape(shown)}</text>')
            column += len(shown)
    width, height = 2 * _MARGIN + _COLUMNS * _LETTER, 2 * _MARGIN + _LINE * (len(lines) + 1)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="monospace"'
        ' font-size="13">'
    )
    return "\n".join((head, f"<style>{_STYLE}</style>", *elements, "</svg>\n"))


def _cell(letter: str, x: int, y: int) -> str:
    """Draw the coloured background of one rank, with an edge for an outlier (a capital letter).

    x, y: pixels; y is the base of the letters.
    """
    place = _LETTERS.find(letter.lower())
    colour = _COLOURS[place] if 0 <= place < len(_COLOURS) else _GREY
    edge = ' stroke="currentColor"' if letter.isupper() else ""
    top, size = y - _BASE, f'width="{_LETTER}" height="{_CELL}"'
    return f'<rect x="{x}" y="{top}" {size} fill="{colour}"{edge}/>'
