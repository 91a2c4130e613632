"""Find the functions that use, or assign to, variables of their outer functions.

A hook may collect observations in such a variable, for the script to read after the step: a list
that it appends to, a number that it counts up. That is common, and other ranks need not know it. So
a variable matters only if code of modules uses its value. The use of a variable is read from the
instructions of the code.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Uses", "instructions", "is_augmented", "uses"]


class Uses(NamedTuple):
    """The variables of outer functions that a function uses.

    Attributes:
        used: Names of the variables with a value that is used, and not only written to.
        stored: Names of the variables that get another value.
    """

    used: frozenset[str]
    stored: frozenset[str]


@functools.lru_cache(None)
def uses(code: types.CodeType) -> Uses:
    """Return the variables of outer functions that a function, and the functions in it, use.

    The instructions are read; the function is not called.

    The answer is cached for the life of the process. Functions are those that are defined within
    this one.
    """
    used: set[str] = set()
    stored: set[str] = set()
    enclosed = set(code.co_freevars)
    for function_code in _codes(code):
        function_instructions = list(dis.get_instructions(function_code))
        outer = enclosed & set(function_code.co_freevars)
        for place, instruction in enumerate(function_instructions):
            name = instruction.argval
            if not instruction.opname.endswith("DEREF") or name not in outer:
                continue
            # STORE_DEREF or DELETE_DEREF.
            if not instruction.opname.startswith("LOAD"):
                stored.add(name)
            elif not _is_only_written(name, function_instructions[place + 1 :]):
                used.add(name)
    return Uses(frozenset(used), frozenset(stored))


def instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of a function, and of the functions in it."""
    for function_code in _codes(code):
        yield from dis.get_instructions(function_code)


def is_augmented(before: dis.Instruction | None) -> bool:
    """Return whether an attribute is loaded to be written again, as in ``x.n += 1``.

    Args:
        before: The instruction before the one that loads the attribute.
    """
    return before is not None and before.opname in _COPIES


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


_COPIES = ("COPY", "DUP_TOP", "DUP_TOP_TWO")
"""Instructions that copy items of the stack; the names differ among releases of Python."""
_WRITING_METHODS = ("append", "appendleft", "add", "extend", "insert", "update", "clear")
"""Methods of containers that return None."""
_PUSHES = ("LOAD_FAST", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_SMALL_INT", "PUSH_NULL")
"""Beginnings of instructions that push a value, and take none from the stack."""
_IDLE = ("NOP", "CACHE", "EXTENDED_ARG", "RESUME", "NOT_TAKEN")
"""Instructions that leave the stack as it is."""
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_STORES_INTO = {"STORE_SUBSCR": 2, "DELETE_SUBSCR": 2, "STORE_SLICE": 3}
"""Instruction that writes into a container -> depth of the container below the top of the stack."""


def _is_only_written(name: str, following: Sequence[dis.Instruction]) -> bool:
    """Return whether a value on the top of the stack is only written to.

    Such code is ``x.append(v)``, ``x[k] = v``, ``x[k] += v`` and ``x = x + v``.

    False where that is not certain, as after a jump.

    Args:
        name: The variable with the value.
        following: The instructions after the one that loaded the value.
    """
    if following[0].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return following[0].argval in _WRITING_METHODS
    # Depth of the value, or of a value computed from it, below the top of the stack; 1 is the top.
    depth = 1
    for instruction in following:
        opname = instruction.opname
        if opname in _STORES_INTO:
            return depth == _STORES_INTO[opname]
        if depth == 1 and opname == "STORE_DEREF":
            return bool(instruction.argval == name)
        # ``x[k] += v`` copies the container and the key, and stores into the copy at the end.
        if opname in _COPIES and depth <= 2:
            return depth == 2
        if instruction.opcode in _JUMPS or opname == "SWAP":
            return False
        if opname in _IDLE:
            continue
        if depth == 1 and not opname.startswith(_PUSHES):
            return False
        depth += dis.stack_effect(instruction.opcode, instruction.arg)
        if depth < 1:
            return False
    return False
