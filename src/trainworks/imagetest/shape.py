"""Compares a value of JSON with the type in an annotation: an image may answer anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

LARGEST_NUMBER = 2**63 - 1


def misfit(value: object, annotation: Any, place: str = "the answer") -> str:
    """Return a sentence about the first part that does not fit, or ``""``.

    Args:
        value: The result of ``json.loads``.
        annotation: ``str``, ``int``, ``bool``, ``None``, ``Any``, ``Literal``, ``list``, ``tuple``,
            ``dict`` with strings as keys, a union, or a ``TypedDict``.
        place: The name of the value in the sentence.
    """
    kind, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return ""
    if is_typeddict(annotation):
        return _misfit_of_fields(value, annotation, place)
    if kind is Literal:
        return "" if value in arguments else f"{place} is none of its words"
    if kind is list:
        return _misfit_of_rows(value, arguments[0], place)
    if kind is tuple:
        return _misfit_of_columns(value, arguments, place)
    if kind is dict:
        return _misfit_of_table(value, arguments[1], place)
    if kind is Union or type(annotation).__name__ == "UnionType":
        misfits = [misfit(value, argument, place) for argument in arguments]
        return "" if "" in misfits else misfits[0]
    if annotation is type(None):
        return "" if value is None else f"{place} is not null"
    if type(value) is not annotation:
        return f"{place} is no {annotation.__name__}"
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        return f"{place} is too large a number"
    return ""


def _misfit_of_table(value: object, annotation: Any, place: str) -> str:
    """Return the first problem of an object with any keys, whose values have one type."""
    if not isinstance(value, dict):
        return f"{place} is no object"
    for name, item in value.items():
        problem = misfit(item, annotation, f"{place} {name!r:.40}")
        if problem:
            return problem
    return ""


def _misfit_of_fields(value: object, annotation: Any, place: str) -> str:
    """Return the first problem of an object with the keys of a ``TypedDict``."""
    if not isinstance(value, Mapping):
        return f"{place} is no object"
    hints = get_type_hints(annotation)
    unknown = [name for name in value if name not in hints]
    if unknown:
        return f"{place} has an unknown key {unknown[0]!r:.40}"
    missing = [name for name in annotation.__required_keys__ if name not in value]
    if missing:
        return f"{place} lacks {min(missing)!r}"
    for name, item in value.items():
        problem = misfit(item, hints[name], f"{place}'s {name}")
        if problem:
            return problem
    return ""


def _misfit_of_rows(value: object, annotation: Any, place: str) -> str:
    """Return the first problem of a list whose rows have one type."""
    if not isinstance(value, list):
        return f"{place} is no list"
    for row in value:
        problem = misfit(row, annotation, f"a row of {place}")
        if problem:
            return problem
    return ""


def _misfit_of_columns(value: object, annotations: tuple[Any, ...], place: str) -> str:
    """Return the first problem of a list with a fixed number of columns."""
    if not isinstance(value, list) or len(value) != len(annotations):
        return f"{place} is no list of {len(annotations)}"
    for column, annotation in zip(value, annotations, strict=True):
        problem = misfit(column, annotation, f"a column of {place}")
        if problem:
            return problem
    return ""
