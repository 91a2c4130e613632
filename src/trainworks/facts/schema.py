"""Reads a table of TOML into a frozen dataclass, and reports all problems of the table.

A field's annotation is its rule: ``str``, ``int``, ``bool``, a ``Literal`` of strings, ``tuple[X,
...]``, ``Mapping[str, X]``, ``object``, and one of ``field_types``: a ``str`` with its form, an
``int`` with its range. Nothing is converted but an array into a tuple, and no number is negative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from trainworks.facts.field_types import Form

Row = TypeVar("Row")

LARGEST_NUMBER = 2**63 - 1
"""The range that TOML promises; Python cannot even print a number of thousands of digits."""

LONGEST_VALUE = 200
"""Characters of a value that an error shows."""

PLAIN: Mapping[type, str] = {str: "a string", bool: "true or false", int: "an integer"}
"""The types of single values, and their names in errors."""


_SHAPES: dict[type[Any], Shape[Any]] = {}


class Shape(Generic[Row]):
    """The keys that a table must have for a dataclass.

    Args:
        row_type: The dataclass; its fields are the keys.
    """

    def __init__(self, row_type: type[Row]) -> None:
        """Read the annotations, once."""
        hints = get_type_hints(row_type, include_extras=True)
        self.row_type = row_type
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(row_type)  # type: ignore[arg-type]
        self.types: Mapping[str, Any] = {field.name: hints[field.name] for field in fields}
        self.required = tuple(field.name for field in fields if not _has_default(field))
        self._checks = {name: _check_of(annotation) for name, annotation in self.types.items()}

    def read(self, raw: Mapping[str, Any]) -> tuple[Row | None, list[str]]:
        """Return the row of a table, and its problems.

        Args:
            raw: The table, as the TOML parser gives it.

        Returns:
            The row and no problems; for a malformed table ``None``, and a sentence for each
            problem: ``key 'name' is missing``.
        """
        problems: list[str] = []
        values: dict[str, Any] = {}
        checks = self._checks
        for key, value in raw.items():
            check = checks.get(key)
            if check is None:
                problems.append(f"unknown key '{key}'")
            else:
                values[key] = check(value, key, problems)
        problems += [f"key '{key}' is missing" for key in self.required if key not in raw]
        problems += [f"key '{key}': is empty" for key in self.required if raw.get(key) == ""]
        if problems:
            return None, problems
        return self.row_type(**values), []


def _has_default(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field of a dataclass may be left out."""
    has_value = field.default is not dataclasses.MISSING
    return has_value or field.default_factory is not dataclasses.MISSING


def shape_of(row_type: type[Row]) -> Shape[Row]:
    """Return the shape of a dataclass, the same one in each call.

    It is kept, because looking at annotations takes longer than reading a row.
    """
    if row_type not in _SHAPES:
        _SHAPES[row_type] = Shape(row_type)
    return _SHAPES[row_type]


def short(value: object) -> str:
    """Return a value for a message: as Python writes it, cut to ``LONGEST_VALUE`` characters."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    except RecursionError:
        return "a value that is nested too deeply"
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[:LONGEST_VALUE]}..."


_Check = Callable[[Any, str, list[str]], Any]
"""Takes a value, its place and the list of problems; returns the value for the row.

A malformed value becomes a problem in the list; the returned value does not count then.
"""


def _check_of(annotation: Any) -> _Check:
    """Return the check of a field's values, which its annotation decides."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _plain_check(*arguments)
    if origin is tuple:
        return _array_check(_check_of(arguments[0]))
    if origin is Literal:
        return _choice_check(arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        value_type = arguments[1]
        has_form = get_origin(value_type) is Annotated
        return _table_check(_check_of(value_type), empty=not has_form)
    if annotation in PLAIN:
        return _plain_check(annotation)
    return _any_value


def _any_value(value: Any, _place: str, _problems: list[str]) -> Any:
    """Accept every value: a check for the annotation ``object``."""
    return value


def _plain_check(kind: Any, rule: Form | range | None = None) -> _Check:
    """Return the check of a single value.

    Args:
        kind: Its type, a key of ``PLAIN``.
        rule: The form of a text, or the range of a number.
    """

    def check(value: Any, place: str, problems: list[str]) -> Any:
        # Python's True is a number too; TOML's is not.
        if type(value) is not kind:
            problems.append(f"key '{place}': must be {PLAIN[kind]}, got {short(value)}")
        elif kind is int and abs(value) > LARGEST_NUMBER:
            problems.append(f"key '{place}': a number has too many digits")
        elif kind is int and value < 0:
            problems.append(f"key '{place}': {value} is negative")
        elif isinstance(rule, range) and value not in rule:
            numbers = f"{rule.start} to {rule[-1]}"
            problems.append(f"key '{place}': {value} is not from {numbers}, which can be meant")
        elif kind is str and value.isspace():
            problems.append(f"key '{place}': is blank")
        elif isinstance(rule, Form) and value and not rule.pattern.fullmatch(value):
            problems.append(f"key '{place}': {short(value)} is not {rule.words}")
        return value

    return check


def _choice_check(choices: tuple[str, ...]) -> _Check:
    """Return the check of a value that must be one of several texts."""

    def check(value: Any, place: str, problems: list[str]) -> Any:
        if value not in choices:
            words = " or ".join(repr(choice) for choice in choices)
            problems.append(f"key '{place}': must be {words}, got {short(value)}")
        return value

    return check


def _array_check(item: _Check) -> _Check:
    """Return the check of an array, whose elements are checked by ``item``."""

    def check(value: Any, place: str, problems: list[str]) -> Any:
        if not isinstance(value, list):
            problems.append(f"key '{place}': must be an array, got {short(value)}")
            return ()
        problems += [
            f"key '{place}.{number}': is empty"
            for number, element in enumerate(value)
            if element == ""
        ]
        items = [
            item(element, f"{place}.{number}", problems) for number, element in enumerate(value)
        ]
        return tuple(items)

    return check


def _table_check(item: _Check, *, empty: bool) -> _Check:
    """Return the check of a table.

    Args:
        item: The check of each of its values.
        empty: Whether its texts may be empty, as those without a form may.
    """

    def check(value: Any, place: str, problems: list[str]) -> Any:
        if not isinstance(value, dict):
            problems.append(f"key '{place}': must be a table, got {short(value)}")
            return {}
        if not empty:
            empty_keys = [key for key, text in value.items() if text == ""]
            problems += [f"key '{place}.{key}': is empty" for key in empty_keys]
        return {key: item(text, f"{place}.{key}", problems) for key, text in value.items()}

    return check
