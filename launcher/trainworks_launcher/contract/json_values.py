"""JSON values, and reading them with a type: the small pure helpers that every
parser of outside input shares.
"""

from __future__ import annotations

import json
import re
from types import MappingProxyType
from typing import Dict, List, Mapping, Union

Json = Union[None, bool, int, float, str, List["Json"], Dict[str, "Json"]]
"""A decoded JSON value."""

NOTHING: Mapping[str, Json] = MappingProxyType({})
"""An empty JSON object that is read-only."""


NESTING_LIMIT = 100
"""Levels of lists and objects in a JSON text.

More would end in a RecursionError somewhere behind the decoder.
"""


def decode(text: str) -> Json:
    """Decode ``text`` as JSON. Raises ValueError with position and reason, also for more than
    NESTING_LIMIT levels.
    """
    try:
        value: Json = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"nested deeper than {NESTING_LIMIT} levels") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # of the conversion of a whole number, since Python 3.11
        raise ValueError("a whole number has too many digits") from error
    if text.count("[") + text.count("{") > NESTING_LIMIT and _depth(value) > NESTING_LIMIT:
        raise ValueError(f"nested deeper than {NESTING_LIMIT} levels")
    return value


def _depth(value: Json) -> int:
    """Levels of lists and objects, counted without recursion."""
    depth = 0
    level: list[Json] = [value]
    while level:
        inner: list[Json] = []
        for entry in level:
            if isinstance(entry, dict):
                inner.extend(entry.values())
            elif isinstance(entry, list):
                inner.extend(entry)
        depth += any(isinstance(entry, (dict, list)) for entry in level)
        level = inner
    return depth


def kind(value: Json) -> str:
    """Return what a value is, in JSON's words and with an article: "a text", "a
    number", "an object".
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    return {str: "a text", list: "a list", dict: "an object"}[type(value)]


def unusable(text: str) -> str:
    """Return why the kernel or a terminal cannot be given ``text`` as an argument or a variable.

    "" if they can.

    >>> unusable("straße"), unusable("a\\0b")
    ('', 'has a NUL character')
    """
    if "\0" in text:
        return "has a NUL character"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return (
            f"has half of a surrogate pair (U+{ord(text[error.start]):04X}),"
            " which is not a character"
        )
    return ""


def readable(text: str) -> str:
    """Return the text as UTF-8 can carry it: halves of surrogate pairs as their
    escapes, which JSON reads back.

    Python has such halves for bytes of variables and paths that are not UTF-8.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


_ESCAPES = re.compile(
    r"\x1b(?:\[[0-9:;<=>?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"
)
"""Commands to a terminal: colours, moves, titles. Source: ECMA-48, 5.4 and 5.6."""


def printable(text: str) -> str:
    """Return a text without what a terminal obeys: only characters that are
    seen, blanks, tabs and line ends are kept.

    >>> printable("\\x1b[31mred\\x1b[0m, \\x07loss\\r\\n")
    'red,  loss\\n'
    """
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return "".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text)


def compact(value: object) -> str:
    """Encode as JSON without spaces and with sorted keys: the text form of the SM_* variables
    (sagemaker-training).
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def text_form(value: Json) -> str:
    """Return a value as the text of an environment variable: a string as it is,
    null as ``""``, else compact JSON.
    """
    if value is None:
        return ""
    return value if isinstance(value, str) else compact(value)


def text(value: Json, default: str = "") -> str:
    """Return the value if it is a string, else ``default``."""
    return value if isinstance(value, str) else default


def texts(value: Json) -> tuple[str, ...]:
    """Return the strings of a list, in order; empty for anything that is not a list."""
    return (
        tuple(entry for entry in value if isinstance(entry, str)) if isinstance(value, list) else ()
    )


def mapping(value: Json) -> Mapping[str, Json]:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else NOTHING


def number(value: Json) -> int:
    """Return the value if it is a whole number, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


_BRACKETED = re.compile(r"\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\](?::\d+)?")


def without_brackets(hosts: str) -> str:
    """Return a host, or a list of them, with each IPv6 address alone.

    >>> without_brackets("[fd00::1],[fd00::2]:29500,gpu[08-10]")
    'fd00::1,fd00::2,gpu[08-10]'
    """
    return _BRACKETED.sub(r"\1", hosts)
