"""Makes a text safe to print: what comes from an image, a registry or a job
must not command the terminal.
"""

from __future__ import annotations

import unicodedata
from typing import Final

_KEPT: Final = "\n\t"

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
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return character
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
