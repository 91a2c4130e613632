"""Writes Markdown from texts that were written for terminals, docstrings and TOML files."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence

SPECIAL = re.compile(r"([\\*_\[\]<>|#~&{}$^])")
"""What Markdown, or an extension of it, gives a meaning to inside a line."""

CODE = re.compile(r"(``?)(.+?)\1")
PAGE = re.compile(r"(?<![\w/(\[])((?:docs|launcher|benchmarks)/[\w./-]+\.md|README\.md)")
"""The path of a page, as help texts and messages name it."""


def prose(text: str, page: str = "") -> str:
    """Return a text whose only markup is code in backticks as Markdown that shows it as it is.

    Args:
        text: The text; code stands in one or two backticks, as in our docstrings.
        page: Path of the page that the text stands in; where it is given, names of other pages become links.
    """
    parts = []
    end = 0
    for match in CODE.finditer(text):
        parts += [_plain(text[end : match.start()], page), code(match[2])]
        end = match.end()
    return "".join([*parts, _plain(text[end:], page)])


def _plain(text: str, page: str) -> str:
    escaped = SPECIAL.sub(r"\\\1", text)
    return PAGE.sub(lambda match: link(match[1], match[1], page), escaped) if page else escaped


def code(text: str) -> str:
    """Return a text as code within a line."""
    mark = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{mark}{pad}{text}{pad}{mark}"


def link(title: str, target: str, page: str, anchor: str = "") -> str:
    """Return a link from a page to another, or to a heading of it; both are paths from the root of the site."""
    path = posixpath.relpath(target, posixpath.dirname(page) or ".")
    return f"[{title}]({path}{f'#{anchor}' if anchor else ''})"


def block(text: str, language: str = "text") -> str:
    """Return lines of code."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already; a bar in one is escaped here."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split())) or "-"


def facts_list(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and what is to be said of each, as a list; what has nothing to say is left out."""
    return "".join(f"- **{name}**: {text}\n" for name, text in rows if text)


def directive(name: str, argument: str, content: str) -> str:
    """Return a directive of Sphinx, as MyST writes it."""
    return f"````{{{name}}} {argument}\n{content.rstrip()}\n````\n"


def definitions(rows: Iterable[tuple[str, str]]) -> str:
    """Return terms with what they mean, both Markdown."""
    return "".join(f"{term}\n: {meaning}\n\n" for term, meaning in rows)
