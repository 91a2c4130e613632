"""The fenced blocks of the pages, for the tests that run them as they stand there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the comment in the line above it.

    The comment is ``run by FILE``, a test, or ``not run: WHY``.
    """

    language: str
    text: str
    mark: str


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, which is named from the root of the checkout."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(language=match["language"], text=match["text"], mark=match["mark"] or "")
        for match in FENCE.finditer(text)
    ]


def block_of(page: str, words: str) -> str:
    """Return the text of the one block of a page that has these words."""
    (block_text,) = [block.text for block in blocks_of(page) if words in block.text]
    return block_text
