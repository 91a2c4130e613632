"""Links between pages, as a code host follows them: a file of the tree, and a heading of that file.

The site makes its own names of headings, so that a link may work there and be dead on a code host.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.anchors import anchors_plugin

MARKDOWN = MarkdownIt("commonmark").enable("table").use(anchors_plugin, max_level=6)
"""Gives each heading the id that code hosts give it: "What AWS's images have" is
``what-awss-images-have``.
"""


@cache
def parse(page: Path) -> tuple[Token, ...]:
    """Return the blocks of a page."""
    return tuple(MARKDOWN.parse(page.read_text(encoding="utf-8")))


def ids_of(page: Path) -> set[str]:
    """Return the names that a link to the page may have after its ``#``."""
    return {str(token.attrs["id"]) for token in parse(page) if "id" in token.attrs}


def links_of(page: Path) -> Iterator[str]:
    """Yield the targets of the page's links and pictures."""
    for block in parse(page):
        for token in block.children or ():
            target = token.attrs.get("href") or token.attrs.get("src")
            if target is not None:
                yield str(target)


def why_dead(page: Path, target: str) -> str:
    """Say why a link leads nowhere; ``""`` if it is good, or leads out of the tree."""
    address = urlsplit(target)
    if address.scheme or address.netloc:
        return ""
    file = (page.parent / unquote(address.path)).resolve() if address.path else page
    if not file.exists():
        return "no such file"
    if address.fragment and file.suffix == ".md" and address.fragment not in ids_of(file):
        return "no such heading"
    return ""


def test_every_link_of_every_page_leads_somewhere(root: Path) -> None:
    tracked = subprocess.check_output(("git", "ls-files", "*.md"), cwd=root, text=True)
    pages = [root / name for name in tracked.splitlines()]
    links = [(page, target) for page in pages for target in links_of(page)]
    assert len(links) > 500
    dead = []
    for page, target in links:
        reason = why_dead(page, target)
        if reason:
            dead.append(f"{page.relative_to(root)}: {target}: {reason}")
    assert dead == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# AWS's `images`\n\n# Twice\n\n# Twice\n", encoding="utf-8")
    assert ids_of(page) == {"awss-images", "twice", "twice-1"}
    assert why_dead(page, "page.md#awss-images") == ""
    assert why_dead(page, "#twice-1") == ""
    assert why_dead(page, "https://example.com/page#gone") == ""
    assert why_dead(page, "#aws-s-images") == "no such heading"
    assert why_dead(page, "gone.md") == "no such file"
