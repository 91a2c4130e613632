"""JSON values, and reading them with a type: the small pure helpers that every parser of outside input shares."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Dict, List, Mapping, Union

Json = Union[None, bool, int, float, str, List["Json"], Dict[str, "Json"]]
"""A decoded JSON value."""

NOTHING: Mapping[str, Json] = MappingProxyType({})
"""An empty JSON object that nobody can add to."""


def decode(text: str) -> Json:
    """Decode ``text`` as JSON. Raises ValueError with position and reason."""
    value: Json = json.loads(text)
    return value


def compact(value: object) -> str:
    """Encode as JSON without spaces and with sorted keys: the text form of the SM_* variables (sagemaker-training)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def text(value: Json, default: str = "") -> str:
    """The value if it is a string, else ``default``."""
    return value if isinstance(value, str) else default


def texts(value: Json) -> tuple[str, ...]:
    """The strings of a list, in order; empty for anything that is not a list."""
    return tuple(entry for entry in value if isinstance(entry, str)) if isinstance(value, list) else ()


def mapping(value: Json) -> Mapping[str, Json]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else NOTHING


def number(value: Json) -> int:
    """The value if it is a whole number, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
