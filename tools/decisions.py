"""Write into each decision of docs/adr which later ones change it.

A decision that changes an older one says so by hand, in the line "Changes:" of its head, with a
link. The line "Changed by:" of the older one is written from these: it cannot be forgotten.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tool_start import FileError

LINK = re.compile(r"\[(\d+)\]\((\d{4}-[a-z0-9-]+\.md)\)")
CHANGES = "Changes: "
CHANGED_BY = "Changed by: "


class DecisionError(FileError):
    """The head of a decision has another form, or names a decision that is not there."""


def with_changed_by(pages: Mapping[str, str]) -> dict[str, str]:
    """Return the pages of all decisions with their lines "Changed by:".

    Args:
        pages: The text of each decision by the name of its file, like ``0082-statistics.md``.

    Raises:
        DecisionError: A page has no head, or its line "Changes:" names a decision that is
            not there, has another number, or is not an older one.
    """
    changed_by: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(pages):
        for changed in _changed_names(name, pages):
            changed_by[changed].append(name)
    return {name: _with_line(name, text, changed_by[name]) for name, text in pages.items()}


def _changed_names(name: str, pages: Mapping[str, str]) -> list[str]:
    """Return the files of the decisions that a decision says it changes."""
    changed = []
    for line in _head(name, pages[name]):
        if not line.startswith(CHANGES):
            continue
        for number, target in LINK.findall(line):
            if target not in pages or int(target[:4]) != int(number) or target >= name:
                raise DecisionError(
                    f"docs/adr/{name} changes {number} ({target}): no such older one"
                )
            changed.append(target)
    return changed


def _head(name: str, text: str) -> list[str]:
    """Return the lines of the paragraph below the title."""
    paragraphs = text.split("\n\n")
    if len(paragraphs) < 2 or not paragraphs[1].startswith("Date: "):
        raise DecisionError(
            f'docs/adr/{name}: below its title stands no line "Date: ... Status: ..."'
        )
    return paragraphs[1].splitlines()


def _with_line(name: str, text: str, later: list[str]) -> str:
    """Return a page whose head names the later decisions that change it."""
    head = [line for line in _head(name, text) if not line.startswith(CHANGED_BY)]
    if later:
        links = [f"[{int(other[:4])}]({other})" for other in later]
        head.append(f"{CHANGED_BY}{', '.join(links)}.")
    title, _, *body = text.split("\n\n")
    return "\n\n".join([title, "\n".join(head), *body])


def decision_pages(root: Path) -> dict[Path, str]:
    """Return what each file of docs/adr should hold.

    Args:
        root: The checkout.

    Raises:
        DecisionError: As :func:`with_changed_by` does.
    """
    folder = root / "docs" / "adr"
    pages = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("0*.md")}
    return {folder / name: text for name, text in with_changed_by(pages).items()}
