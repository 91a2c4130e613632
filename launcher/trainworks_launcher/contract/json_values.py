"""Decode JSON values, and read them by type: small pure helpers for parsers of outside input."""

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
"""Maximum of nested lists and objects in a JSON text.

A deeper value would raise RecursionError in code after the decoder.
"""


def decode(text: str) -> Json:
    """Decode a JSON text.

    Raises:
        ValueError: With position and reason; also for more than NESTING_LIMIT levels.
    """
    try:
        value: Json = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"nested deeper than {NESTING_LIMIT} levels") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        # Since Python 3.11 a whole number of too many digits raises ValueError.
        raise ValueError("a whole number has too many digits") from error
    if text.count("[") + text.count("{") > NESTING_LIMIT and _depth(value) > NESTING_LIMIT:
        raise ValueError(f"nested deeper than {NESTING_LIMIT} levels")
    return value


def _depth(value: Json) -> int:
    """Return the number of nested lists and objects, counted without recursion: 2 for ``[[1]]``."""
    depth = 0
    level: list[Json] = [value]
    while level:
        inner: list[Json] = []
        is_nested = False
        for entry in level:
            if isinstance(entry, dict):
                is_nested = True
                inner.extend(entry.values())
            elif isinstance(entry, list):
                is_nested = True
                inner.extend(entry)
        if is_nested:
            depth += 1
        level = inner
    return depth


def kind(value: Json) -> str:
    """Return the kind of a value in JSON's words, with an article: "a text", "a number"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    return {str: "a text", list: "a list", dict: "an object"}[type(value)]


def unusable(text: str) -> str:
    """Return the reason why a text cannot be an argument or a variable of a process, else ``""``.

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
    """Replace halves of surrogate pairs by escapes such as ``\\udcff``, for an output in UTF-8.

    Python uses such halves for bytes of variables and paths that are not UTF-8. JSON reads the
    escapes back.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


_ESCAPES = re.compile(
    r"\x1b(?:\[[0-9:;<=>?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"
)
"""Escape sequences of a terminal: colours, moves, titles. Source: ECMA-48, 5.4 and 5.6."""


def printable(text: str) -> str:
    """Remove escape sequences of a terminal; keep visible characters, blanks, tabs and line ends.

    >>> printable("\\x1b[31mred\\x1b[0m, \\x07loss\\r\\n")
    'red,  loss\\n'
    """
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    # One expression, because it is faster than a loop, and whole outputs of ranks pass here.
    return "".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text)


def compact(value: object) -> str:
    """Encode as JSON without blanks and with sorted keys, as sagemaker-training in SM_* variables.

    >>> compact({"b": [1, 2], "a": None})
    '{"a":null,"b":[1,2]}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def text_form(value: Json) -> str:
    """Return a value as the text of a variable: the string itself, ``""`` for null, else JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return compact(value)


def text(value: Json, default: str = "") -> str:
    """Return a string; the default for a value of another type."""
    if isinstance(value, str):
        return value
    return default


def texts(value: Json) -> tuple[str, ...]:
    """Return the strings of a list, in order; ``()`` for a value of another type."""
    if not isinstance(value, list):
        return ()
    return tuple(entry for entry in value if isinstance(entry, str))


def mapping(value: Json) -> Mapping[str, Json]:
    """Return an object; an empty object for a value of another type."""
    if not isinstance(value, dict):
        return NOTHING
    return value


def number(value: Json) -> int:
    """Return a whole number; 0 for a value of another type."""
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return value


_BRACKETED = re.compile(r"\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\](?::\d+)?")


def without_brackets(hosts: str) -> str:
    """Remove the brackets and ports of IPv6 addresses in a host, or in a list of hosts.

    >>> without_brackets("[fd00::1],[fd00::2]:29500,gpu[08-10]")
    'fd00::1,fd00::2,gpu[08-10]'
    """
    return _BRACKETED.sub(r"\1", hosts)
