#!/usr/bin/env python3
"""Measure how the Python code of each package reads, beside projects of the field.

    tools/reading.py              the packages of this repository
    tools/reading.py FOLDER...    other folders, for example a room, or a peer's package

The figures are a thermometer, not an aim: no line is broken and no comment is written for a
figure. A package far above the peers says where a reader stumbles. `make check` refuses only
lines above 100 columns.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = {
    "launcher": ("launcher/trainworks_launcher", "launcher/trainworks_preflight"),
    "src": ("src/trainworks",),
    "smdistributed": ("smdistributed/smdistributed", "smdistributed/trainworks_smdistributed"),
    "tests": ("tests", "launcher/tests", "smdistributed/tests"),
}
"""Name of a package -> its folders."""

LIMIT = 100
"""Columns of a line, as ``line-length`` in pyproject.toml."""

PRONOUN_NAMES = frozenset(("found", "each", "said", "asked", "given", "looked", "whole", "what"))
"""Names of variables that do not say which thing the variable holds."""

_PRONOUNS = frozenset(("it", "them"))
_NO_CODE = frozenset(
    (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    )
)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_QUOTED = re.compile(r"``.*?``|`.*?`|^\s*(?:>>>|\.\.\.).*$", re.DOTALL | re.MULTILINE)
"""Code in prose: between backquotes, or a doctest's line."""

_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_MARKS = re.compile(r"^#!|\b(?:noqa|type: ignore|fmt: skip)\b")
"""Comments that are written for a program."""


@dataclass
class Counts:
    """The sums over the files of a package."""

    lines: int = 0
    wide_lines: int = 0
    comment_lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    conditionals: int = 0
    comprehensions: int = 0
    names: int = 0
    pronoun_names: int = 0
    words: int = 0
    what: int = 0
    pronouns: int = 0

    def add(self, other: Counts) -> None:
        """Add the sums of another file or package."""
        for field in fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)


@dataclass(frozen=True)
class Figures:
    """What the table shows of a package; text, because a peer's figure may be a range.

    Attributes:
        tokens: Tokens in a line of code, without docstrings and comments.
        conditionals: Conditional expressions (``a if b else c``) in 1,000 lines.
        comprehensions: Comprehensions and generator expressions in 1,000 lines.
        comments: Lines that are only a comment, in percent of all lines.
        wide: Lines of more than 100 characters, in percent of all lines.
        names: Assigned names that are pronouns, in percent of all assigned names.
        what: The word "what" in 1,000 words of docstrings and comments.
        pronouns: The words "it" and "them" in 1,000 words of docstrings and comments.
    """

    tokens: str
    conditionals: str
    comprehensions: str
    comments: str
    wide: str = ""
    names: str = ""
    what: str = ""
    pronouns: str = ""


PEERS = {
    "cibuildwheel": Figures("5.8", "6", "10", "6.7"),
    "torchx": Figures("5.8", "2", "4", "6.2"),
    "torch elastic": Figures("5.7", "1", "3", "7.2"),
    "nox": Figures("6.1", "6", "9", "8.0"),
    "kubeflow sdk": Figures("5.6", "4", "5", "9.9"),
    "attrs": Figures("5.1", "9", "9", "3.5"),
    "httpx": Figures("6.2", "5", "6", "3.9"),
    "NVRx": Figures("5.7", "9", "9", "5.3"),
    "all peers": Figures(
        tokens="5.1-6.2",
        conditionals="1-9",
        comprehensions="3-10",
        comments="3.5-9.9",
        wide="0-0.8",
        names="0-0.5",
        what="0-1.5",
        pronouns="3-12",
    ),
}
"""Measured on 2026-11-28 from each project's own files, the last four columns over all of them."""


def measure(source: str) -> Counts:
    """Count the parts of one Python file."""
    counts = Counts()
    tree = ast.parse(source)
    strings = list(_bare_strings(tree))
    docstring_rows = _rows_of(strings)
    prose = [_text_of(string) for string in strings]

    lines = source.splitlines()
    counts.lines = len(lines)
    counts.wide_lines = sum(len(line) > LIMIT for line in lines)

    code_rows: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row = token.start[0]
        if token.type == tokenize.COMMENT:
            if token.line.lstrip().startswith("#"):
                counts.comment_lines += 1
            if not _MARKS.search(token.string):
                prose.append(token.string)
        elif token.type not in _NO_CODE and row not in docstring_rows:
            counts.tokens += 1
            code_rows.update(range(row, token.end[0] + 1))
    counts.code_lines = len(code_rows)

    _count_expressions(tree, counts)
    _count_words("\n".join(prose), counts)
    return counts


def _bare_strings(tree: ast.Module) -> Iterator[ast.Expr]:
    """Give the docstrings, those below an attribute included."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            yield node


def _text_of(string: ast.Expr) -> str:
    assert isinstance(string.value, ast.Constant)
    return str(string.value.value)


def _rows_of(strings: Sequence[ast.Expr]) -> set[int]:
    rows: set[int] = set()
    for string in strings:
        last = string.end_lineno or string.lineno
        rows.update(range(string.lineno, last + 1))
    return rows


def _count_expressions(tree: ast.Module, counts: Counts) -> None:
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.IfExp):
            counts.conditionals += 1
        elif isinstance(node, _COMPREHENSIONS):
            counts.comprehensions += 1
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name:
            counts.names += 1
            counts.pronoun_names += name.strip("_") in PRONOUN_NAMES


def _count_words(prose: str, counts: Counts) -> None:
    words = _WORD.findall(_QUOTED.sub(" ", prose).lower())
    counts.words = len(words)
    counts.what = words.count("what")
    counts.pronouns = sum(word in _PRONOUNS for word in words)


def measure_folders(folders: Sequence[Path]) -> Counts:
    """Add up the Python files below some folders; a file counts as itself."""
    total = Counts()
    for folder in folders:
        files = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
        for file in files:
            total.add(measure(file.read_text(encoding="utf-8")))
    return total


def figures_of(counts: Counts) -> Figures:
    """Make the table's figures of a package's sums."""
    return Figures(
        tokens=_ratio(counts.tokens, counts.code_lines, 1, digits=1),
        conditionals=_ratio(counts.conditionals, counts.lines, 1000),
        comprehensions=_ratio(counts.comprehensions, counts.lines, 1000),
        comments=_ratio(counts.comment_lines, counts.lines, 100, digits=1),
        wide=_ratio(counts.wide_lines, counts.lines, 100, digits=1),
        names=_ratio(counts.pronoun_names, counts.names, 100, digits=1),
        what=_ratio(counts.what, counts.words, 1000, digits=1),
        pronouns=_ratio(counts.pronouns, counts.words, 1000),
    )


def _ratio(part: int, whole: int, scale: int, *, digits: int = 0) -> str:
    if whole == 0:
        return "-"
    return f"{part / whole * scale:.{digits}f}"


HEADINGS = ("tokens", "if-else", "compreh.", "comment", "wide", "names", "what", "it, them")
UNITS = ("/line", "/1000", "/1000", "%", "%", "%", "/1000", "/1000")


def table(rows: dict[str, Figures]) -> str:
    """Lay out the figures of packages, the peers below them."""
    lines = [_row("", HEADINGS), _row("", UNITS)]
    for name, figures in rows.items():
        lines.append(_row(name, _values(figures)))
    lines.append("")
    for name, figures in PEERS.items():
        lines.append(_row(name, _values(figures)))
    return "\n".join(lines)


def _values(figures: Figures) -> list[str]:
    return [getattr(figures, field.name) for field in fields(figures)]


def _row(name: str, cells: Sequence[str]) -> str:
    padded = [cell.rjust(9) for cell in cells]
    return f"{name[:22]:22}{''.join(padded)}"


def main(arguments: Sequence[str]) -> int:
    """Print the table; the status is 0 whatever it says."""
    parser = argparse.ArgumentParser(description="Measure how packages read.")
    parser.add_argument("folder", nargs="*", type=Path, help="measure these folders instead")
    options = parser.parse_args(arguments)
    rows = {}
    if options.folder:
        for folder in options.folder:
            if not folder.is_dir():
                parser.error(f"{folder} is not a folder")
            rows[folder.name] = figures_of(measure_folders([folder]))
    else:
        for package, folders in PACKAGES.items():
            rows[package] = figures_of(measure_folders([ROOT / name for name in folders]))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
