"""Reads JSON that has one meaning only: a document that two parsers would read differently is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence


def read_json(text: str | bytes) -> object:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is not JSON, names a key twice in one object, or is nested too deeply.
    """
    try:
        value: object = json.loads(text, object_pairs_hook=_table)
        # A value that is nested too deeply to be written is refused too: it could not be compared.
        canonical(value)
    except RecursionError:
        message = "nested too deeply"
        raise ValueError(message) from None
    return value


def canonical(value: object) -> str:
    """Return the one text of a value: equal values of different types, such as ``false`` and ``0``, differ."""
    return json.dumps(value, sort_keys=True)


def _table(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    # RFC 8259 leaves open which of two equal keys counts: some parsers take the first, Python the last.
    table = dict(pairs)
    if len(table) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        message = f"the key {twice!r:.60} stands twice in one object"
        raise ValueError(message)
    return table
