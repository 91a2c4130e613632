"""The fenced blocks of the pages, for the tests that run them as they stand there.

The comment in the line above a block is its mark. It names the tests, as pytest does, and the words
that they replace::

    <!-- run by tests/sdk/test_snippets.py::test_the_examples_of_the_page_on_jobs[v2] -->
    <!-- run by tests/FILE.py::test_one and tests/FILE.py::test_two; cu121 -> cpu; a note -->
    <!-- not run: WHY -->

A test gets the blocks that name it by the fixture ``page_blocks``.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]

PAGES = (
    "README.md",
    "docs/jobs.md",
    "docs/extend.md",
    "docs/any-image.md",
    "docs/ship.md",
    "docs/migrate.md",
    "docs/debug.md",
    "docs/status.md",
    *sorted(f"docs/platforms/{page.name}" for page in (ROOT / "docs" / "platforms").glob("*.md")),
)
"""Pages that people follow: each of their blocks has a mark."""

TEST = re.compile(r"[\w/]+\.py::\w+(?:\[[^\]\s]*\])?")


@dataclass(frozen=True)
class Block:
    """A block of code in a page.

    Attributes:
        language: The word behind its fence, for example ``sh``; ``""`` without one.
        text: Its lines, without the indentation of the list that it is in.
        mark: The comment in the line above it; ``""`` without one.
    """

    language: str
    text: str
    mark: str

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests that run it, for example ``("tests/FILE.py::test_name[case]",)``."""
        if not self.mark.startswith("run by "):
            return ()
        return tuple(TEST.findall(self.mark.partition(";")[0]))

    @property
    def replacements(self) -> dict[str, str]:
        """The words that the tests replace, and the words in their place, as the mark has them."""
        pairs = [part.split(" -> ") for part in self.mark.split("; ")[1:] if " -> " in part]
        return {old: "" if new == "nothing" else new for old, new in pairs}

    def adapted(self, **values: object) -> str:
        """Return the text with the replacements of the mark.

        Args:
            values: Values of the names in braces: the mark has ``/tmp/job -> {folder}``, and the
                test gives ``folder``.

        Raises:
            AssertionError: The text does not have the words that the mark replaces.
        """
        text = self.text
        for old, new in self.replacements.items():
            assert old in text, f"the block does not have {old!r}: {self.mark}"
            text = text.replace(old, new.format(**values))
        return text


def is_output(block: Block) -> bool:
    """Return whether a block shows what a program prints, or is a directive of Sphinx."""
    return block.language == "text" or block.language.startswith("{")


@functools.cache
def blocks_of(page: str) -> tuple[Block, ...]:
    """Return the blocks of a page, which is named from the root of the checkout.

    Blocks in lists and quotes, and those that are only indented, are among them.
    """
    tokens = MarkdownIt("commonmark").parse((ROOT / page).read_text(encoding="utf-8"))
    blocks = []
    before: Token | None = None
    for token in tokens:
        if token.type in ("fence", "code_block"):
            mark = _mark_of(before, token)
            blocks.append(Block(language=token.info.strip(), text=token.content, mark=mark))
        before = token
    return tuple(blocks)


def _mark_of(before: Token | None, block: Token) -> str:
    """Return the text of a comment that ends in the line above a block; ``""`` if none does."""
    if before is None or before.type != "html_block" or before.map is None or block.map is None:
        return ""
    comment = re.fullmatch(r"<!-- (.*) -->", before.content.strip())
    return comment[1] if comment and before.map[1] == block.map[0] else ""


def block_of(page: str, words: str) -> str:
    """Return the text of the one block of a page that has these words."""
    (block_text,) = [block.text for block in blocks_of(page) if words in block.text]
    return block_text


def blocks_run_by(test: str) -> list[Block]:
    """Return the blocks that name a test, in the order of the pages.

    Args:
        test: As pytest names it, for example ``tests/FILE.py::test_name[case]``. A mark without
            ``[case]`` names every case.
    """
    names = {test, test.partition("[")[0]}
    return [block for page in PAGES for block in blocks_of(page) if names & set(block.tests)]
