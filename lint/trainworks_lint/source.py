"""Text that remembers which line of the file each of its characters comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A text and its places.

    Attributes:
        text: The characters.
        lines: For each character, its line in the file (from 1).
        first: The line to name if the text is empty.
    """

    text: str
    lines: Sequence[int]
    first: int

    @classmethod
    def on_one_line(cls, text: str, line: int) -> Source:
        """Return a text whose characters all belong to one line."""
        return cls(text, [line] * len(text), line)

    @classmethod
    def over_lines(cls, text: str, first: int) -> Source:
        """Return a text that begins on a line of the file and has the file's own line ends."""
        lines = []
        line = first
        for character in text:
            lines.append(line)
            line += character == "\n"
        return cls(text, lines, first)

    def line(self, offset: int) -> int:
        """Return the line of a character; of the nearest one if the offset is outside."""
        return self.lines[min(max(offset, 0), len(self.lines) - 1)] if self.lines else self.first

    def part(self, start: int, end: int) -> Source:
        """Return a slice."""
        return Source(self.text[start:end], self.lines[start:end], self.line(start))

    def without_escapes(self, escaped: str) -> Source:
        """Return the text without the backslashes before these characters, as a shell passes it on."""
        kept = []
        skip = False
        for number, character in enumerate(self.text):
            if skip or character != "\\" or self.text[number + 1 : number + 2] not in tuple(escaped):
                kept.append(number)
                skip = False
            else:
                skip = True
        return Source("".join(self.text[at] for at in kept), [self.lines[at] for at in kept], self.first)
