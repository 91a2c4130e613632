"""Makes a text safe to print: what comes from an image, a registry or a job
must not command the terminal.
"""

from __future__ import annotations

import unicodedata
from typing import Final

_KEPT: Final = "\n\t"
"""Control codes that stay, because they only lay out the text."""

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of characters that are not seen themselves: control codes, the marks that turn the
direction of text or join characters, halves of a pair, and line ends that only some programs know.
"""


def visible(text: str) -> str:
    """Return a text with each hidden character as JSON writes it (``\\u001b``).

    Line ends and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    """Return a hidden character as JSON or Python writes it; another one unchanged."""
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return character
    number = ord(character)
    if number < 0x10000:
        return f"\\u{number:04x}"
    return f"\\U{number:08x}"
