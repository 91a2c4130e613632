"""Variables of outer functions: which functions use what is in them, and which store to them.

A hook may only note in such a variable what it saw, for the script to look at after the step: a
list that it appends to, a number that it counts up. That is common, and no business of other ranks.
So a variable matters only if code of modules uses what is in it. What code does with a variable is
read from its instructions.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Uses", "instructions", "is_augmented", "uses"]


class Uses(NamedTuple):
    """What a function does with the variables of its outer functions.

    Attributes:
        used: Those whose values it uses for more than to write them.
        stored: Those that it gives another value.
    """

    used: frozenset[str]
    stored: frozenset[str]


@functools.lru_cache(None)
def uses(code: types.CodeType) -> Uses:
    """Return what a function, and the functions in it, do with the variables of its outer ones."""
    used: set[str] = set()
    stored: set[str] = set()
    enclosed = set(code.co_freevars)
    for each in _codes(code):
        of_this = list(dis.get_instructions(each))
        outer = enclosed & set(each.co_freevars)
        for place, instruction in enumerate(of_this):
            name = instruction.argval
            if not instruction.opname.endswith("DEREF") or name not in outer:
                continue
            if not instruction.opname.startswith("LOAD"):
                stored.add(name)
            elif not _is_only_written(name, of_this[place + 1 :]):
                used.add(name)
    return Uses(frozenset(used), frozenset(stored))


def instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of a function, and of those in it."""
    for each in _codes(code):
        yield from dis.get_instructions(each)


def is_augmented(before: dis.Instruction | None) -> bool:
    """Return whether an attribute is loaded to be written again, as in ``x.n += 1``.

    Args:
        before: The instruction before the one that loads it.
    """
    return before is not None and before.opname in _COPIES


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


_COPIES = ("COPY", "DUP_TOP", "DUP_TOP_TWO")
_WRITING_METHODS = ("append", "appendleft", "add", "extend", "insert", "update", "clear")
"""Methods of containers that return None."""
_PUSHES = ("LOAD_FAST", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_SMALL_INT", "PUSH_NULL")
_IDLE = ("NOP", "CACHE", "EXTENDED_ARG", "RESUME", "NOT_TAKEN")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_STORES_INTO = {"STORE_SUBSCR": 2, "DELETE_SUBSCR": 2, "STORE_SLICE": 3}
"""Instructions that write into a container, and how far below the top of the stack it begins."""


def _is_only_written(name: str, following: Sequence[dis.Instruction]) -> bool:
    """Return whether a value that was just put on the stack is only written to: ``x.append(v)``,
    ``x[k] = v``, ``x[k] += v``, ``x = x + v``.

    Args:
        name: The variable that the value is from.
        following: The instructions after it.
    """
    if following[0].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return following[0].argval in _WRITING_METHODS
    depth = 1  # of the value, or of what was computed from it, below the top of the stack
    for each in following:
        if each.opname in _STORES_INTO:
            return depth == _STORES_INTO[each.opname]
        if depth == 1 and each.opname == "STORE_DEREF":
            return bool(each.argval == name)
        if each.opname in _COPIES and depth <= 2:
            return depth == 2
        if each.opcode in _JUMPS or each.opname == "SWAP":
            return False
        if each.opname in _IDLE:
            continue
        if depth == 1 and not each.opname.startswith(_PUSHES):
            return False
        depth += dis.stack_effect(each.opcode, each.arg)
        if depth < 1:
            return False
    return False
