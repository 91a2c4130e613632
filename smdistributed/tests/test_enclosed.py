"""Test the use of outer functions' variables by functions, as their instructions show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from smdistributed.modelparallel.torch.pipeline.enclosed import uses


def functions() -> dict[str, Callable[..., Any]]:
    items: Any = []
    count = 0

    def appends(value: Any) -> None:
        items.append(value)

    def stores_an_item(key: Any, value: Any) -> None:
        items[key.name, 0] = value

    def stores_a_slice(value: Any) -> None:
        items[1:2] = value

    def counts_an_item(key: Any) -> None:
        items[key] += 1

    def deletes_an_item(key: Any) -> None:
        del items[key]

    def counts() -> None:
        nonlocal count
        count += 1

    def adds(value: Any) -> None:
        nonlocal count
        count = count + abs(value)

    def appends_within() -> Any:
        return lambda value: items.append(value)

    def returns() -> Any:
        return items

    def reads_an_item(key: Any) -> Any:
        return items[key]

    def is_a_key(other: Any, value: Any) -> None:
        other[count] = value

    def is_a_value(other: Any, key: Any) -> None:
        other[key] = items

    def is_an_argument() -> int:
        return len(items)

    def pops() -> Any:
        return items.pop()

    def counts_and_returns() -> int:
        nonlocal count
        count += 1
        return count

    def counts_and_asks() -> None:
        nonlocal count
        count += 1
        if count > 5:
            print("five")

    def sets(value: Any) -> None:
        nonlocal count
        count = value

    def copies() -> None:
        other = items
        other.append(1)

    def item_of_an_item(key: Any, value: Any) -> None:
        items[key][0] = value

    def reads_within() -> Any:
        return [number + 1 for number in range(count)]

    return locals()


NOTES = {
    "appends": "",
    "stores_an_item": "",
    "stores_a_slice": "",
    "counts_an_item": "",
    "deletes_an_item": "",
    "item_of_an_item": "",
    "appends_within": "",
    "counts": "count",
    "adds": "count",
    "sets": "count",
}
"""Functions that use nothing, and the variable that they store to."""

USES = {
    "returns": "items",
    "reads_an_item": "items",
    "is_a_key": "count",
    "is_a_value": "items",
    "is_an_argument": "items",
    "pops": "items",
    "counts_and_returns": "count",
    "counts_and_asks": "count",
    "copies": "items",
    "reads_within": "count",
}
"""Functions, and the variable that they use."""


@pytest.mark.parametrize("name", NOTES)
def test_a_variable_that_is_only_written(name: str) -> None:
    variables_used = uses(functions()[name].__code__)
    assert variables_used.used == frozenset()
    assert variables_used.stored == frozenset(filter(None, [NOTES[name]]))


@pytest.mark.parametrize("name", USES)
def test_a_variable_that_is_used(name: str) -> None:
    assert uses(functions()[name].__code__).used == {USES[name]}


def test_every_function_is_in_a_table() -> None:
    function_names = {name for name in functions() if name not in ("items", "count")}
    assert function_names == NOTES.keys() | USES.keys()
