"""The picture of a hang as SVG: the same hosts, places and letters as the text (``grid``). Pure."""

from __future__ import annotations

import html
from typing import Callable

from trainworks_launcher.contract.values import printable
from trainworks_launcher.supervise.hang.grid import Picture

_HOSTS = 64
_RANKS = 128
_PLACES = 16
_COLUMNS = 32
_LETTER = 7.3
"""Width of a letter, in pixels."""

_CELL, _LINE, _MARGIN = 18, 20, 12
_HOST_LETTERS = 20
_CELLS = _MARGIN + 235
_WIDTH = _CELLS + _COLUMNS * _CELL + _MARGIN
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
"""Colours that people with any colour vision tell apart. Source: Okabe and Ito, Color Universal Design, 2008."""

_OTHER = "#808080"
_STYLE = (
    ":root{color:#1f2328;background:#fff}"
    "@media(prefers-color-scheme:dark){:root{color:#e6edf3;background:#0d1117}}"
    "text{fill:currentColor;white-space:pre}rect{fill-opacity:.45}.b{font-weight:bold}"
    ".differs{stroke:currentColor;stroke-width:2}.rank{text-anchor:middle}"
)


def chart(of: Picture, heading: str, mask: Callable[[str], str]) -> str:
    """Return an SVG: a row a host, a cell a rank, with the letter and colour of its place, and a legend.

    Its width is fixed, and its height bounded: of a larger job it shows the hosts with a rank that differs first.

    Args:
        of: Where the ranks are.
        heading: What is said above it.
        mask: Hides secrets in a text.
    """

    def words(text: str) -> str:
        return printable(mask(text)).replace("\n", " ").replace("\t", " ")

    def write(x: float, y: int, text: str, kind: str = "") -> None:
        most = int((_WIDTH - _MARGIN - x) / _LETTER)
        short = text if len(text) <= most else f"{text[: most - 3]}..."
        drawn.append(f'<text x="{x:g}" y="{y}"{kind}>{html.escape(short)}</text>')

    def box(x: int, y: int, letter: str, differs: bool, title: str = "") -> None:
        number = ord(letter.lower()) - ord("a")
        colour = _COLOURS[number] if 0 <= number < len(_COLOURS) else _OTHER
        kind = ' class="differs"' if differs else ""
        more = f"<title>{html.escape(title)}</title>" if title else ""
        size = f'width="{_CELL - 2}" height="{_CELL - 2}"'
        drawn.append(f'<rect x="{x}" y="{y - 13}" {size} rx="3" fill="{colour}"{kind}>{more}</rect>')
        write(x + _CELL / 2 - 1, y, letter, f' class="rank{" b" if differs else ""}"')

    drawn: list[str] = []
    at, shown, y = of.at, of.foremost(_HOSTS), _MARGIN + 14
    write(_MARGIN, y, words(heading), ' class="b"')
    y += _LINE + 6
    for host in shown:
        rows, name = of.hosts[host], words(host)
        short = name if len(name) <= _HOST_LETTERS else f"...{name[3 - _HOST_LETTERS :]}"
        write(_MARGIN, y, f"{short:<{_HOST_LETTERS}}  {of.numbers(host)}")
        for number, row in enumerate(rows[:_RANKS]):
            y += _LINE if number and number % _COLUMNS == 0 else 0
            place, rank = at[row.key], f"rank {row.rank} on " if row.rank >= 0 else ""
            box(_CELLS + number % _COLUMNS * _CELL, y, place.letter, place.differs, f"{rank}{name}")
        y += _LINE
        if len(rows) > _RANKS:
            write(_CELLS, y, f"and {len(rows) - _RANKS} more ranks")
            y += _LINE
    more = [f"and {len(of.hosts) - len(shown)} more hosts"] if len(of.hosts) > len(shown) else []
    for line in (*more, *(f"{words(host)}: no answer" for host in of.silent[:_HOSTS])):
        write(_MARGIN, y, line)
        y += _LINE
    y += 6
    for place in of.places[:_PLACES]:
        box(_MARGIN, y, place.letter, place.differs)
        write(_MARGIN + _CELL + 6, y, words(place.words))
        y += _LINE
    if len(of.places) > _PLACES:
        write(_MARGIN, y, f"{len(of.places) - _PLACES} more places")
        y += _LINE
    size = f'width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="monospace" font-size="12">'
    return "\n".join(
        (head, f"<title>{html.escape(words(heading))}</title>", f"<style>{_STYLE}</style>", *drawn, "</svg>\n")
    )
