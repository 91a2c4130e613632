"""Ranges of versions in rows: a small language that fits the names that vendors
give their releases.

A *range* says what a value may be: ``,`` is "and", ``|`` is "or", and "and" binds closer.

=================  ================================================================================
``>=2.4,<3``       compared number by number: 1.9 comes before 1.10, and zeros at the end count for
                   nothing
``>=1.22amzn4``    1.22amzn3 is below it: where a bound has a vendor's own number, that counts as
                   well
``11.3``           this text, or one that continues it behind a dot
``!ubuntu20.04``   not this text, nor one that continues it
``--disable-ngc``  where the value is a set: it is in there; ``!--disable-ngc``: it is not
``{cell}``         the value of another property, put in its place before anything is compared
``present``        there, in any version
``absent``         not there
=================  ================================================================================

`packaging` reads PEP 440 and refuses what AWS calls its releases
(``1.22amzn4``, ``1.7-aws``): docs/adr/0016.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache

Value = str | frozenset[str]
"""The value of a property: a version, a name, or a set of words."""

Properties = Mapping[str, Value]
"""Everything that ranges can be asked about, by name; a property that is not in it is absent."""

PROPERTIES: Mapping[str, str] = {
    "framework": "the framework's name",
    "cell": "the CUDA cell's name: `cu121`, `cpu`",
    "cell.cuda": "the CUDA release that the cell is for: 12.1",
    "cuda": "the CUDA that the image has, with all its numbers",
    "cudnn": "the cuDNN that the image has",
    "driver": "the oldest NVIDIA driver that the cell promises to run on",
    "architectures": (
        "GPU architectures that code is compiled for, a set; absent where the cell names none"
    ),
    "python": "the target's Python, MAJOR.MINOR",
    "base": "the operating system: a row of images/bases.toml",
    "base.python": "the operating system's own Python, MAJOR.MINOR",
    "base.pythons": "every Python that the operating system has packages of, a set",
    "glibc": "the newest C library level that wheels are chosen for",
    "sources": "`packages` or `vendor`",
    "image.base": "the operating system of the target's base image, if it names one",
    "builder.base": "the operating system of its builder image, where it has one",
    "builder.cuda": "the CUDA of its builder image",
}
"""The properties of every target.

Besides: a framework's version by the framework's name, the version of a component or of what
artifacts and base images bring, ``NAME.flags`` (the options of an artifact, a set) and
``NAME.build`` (what stands behind the ``+`` of a version).
"""

PRESENT = "present"
ABSENT = "absent"

COMPARATORS: Mapping[str, Callable[[int], bool]] = {
    ">=": lambda order: order >= 0,
    "<=": lambda order: order <= 0,
    "==": lambda order: order == 0,
    "!=": lambda order: order != 0,
    ">": lambda order: order > 0,
    "<": lambda order: order < 0,
}
"""Comparators, longer ones first, and what they make of an order of two versions."""

VERSION = re.compile(r"\D*(?P<release>\d+(?:\.\d+)*)(?:\D+(?P<vendor>\d+(?:\.\d+)*))?")
BOUND = re.compile(r"v?[0-9]+(\.[0-9]+)*([+-]?[a-z]*[0-9]+(\.[0-9]+)*)?\Z")
WORD = re.compile(r"!?-{0,2}[A-Za-z0-9][A-Za-z0-9._+/:=-]*\Z")
REFERENCE = re.compile(r"\{([a-z0-9.-]+)\}")

GRAMMAR = (
    f"write one of: {' '.join(COMPARATORS)} and a version; a version or name; !name; {{property}};"
    f" {PRESENT}; {ABSENT}"
)
"""The forms of a condition, for people."""

Order = tuple[tuple[int, ...], tuple[int, ...]]
"""The parts by which versions are compared: the release's numbers, then the
vendor's own behind them.
"""


def satisfies(value: Value | None, allowed: str, properties: Properties) -> bool:
    """Return whether a property's value is in a range; ``None`` is the value of what is absent.

    Args:
        value: The property's value.
        allowed: The range; ``problem_of`` has found nothing wrong with it.
        properties: Where references to other properties are looked up; one to
            what is absent holds for nothing.
    """
    return any(
        all(_holds(value, condition.strip(), properties) for condition in alternative.split(","))
        for alternative in allowed.split("|")
    )


def _holds(value: Value | None, condition: str, properties: Properties) -> bool:
    if condition in {PRESENT, ABSENT}:
        return (value is not None) is (condition == PRESENT)
    for name in REFERENCE.findall(condition):
        other = properties.get(name)
        if not isinstance(other, str):
            return False
        condition = condition.replace(f"{{{name}}}", other)
    for comparator, accepts in COMPARATORS.items():
        if condition.startswith(comparator):
            return isinstance(value, str) and accepts(
                compare(value, condition.removeprefix(comparator).strip())
            )
    if condition.startswith("!"):
        return not _is(value, condition[1:])
    return _is(value, condition)


def _is(value: Value | None, word: str) -> bool:
    if isinstance(value, str):
        return value == word or value.startswith(f"{word}.")
    return value is not None and word in value


def compare(version: str, bound: str) -> int:
    """Return -1, 0 or 1: a version is below, at or above a bound.

    The vendor's number counts if the bound has one.
    """
    one, other = order_of(version), order_of(bound)
    if not other[1]:
        one = (one[0], ())
    return (one > other) - (one < other)


@cache
def order_of(version: str) -> Order:
    """Return what a version is compared by: ``1.22amzn4.0`` gives ((1, 22), (4,)), for 4.0 is 4."""
    match = VERSION.match(version)
    return (_numbers(match["release"]), _numbers(match["vendor"])) if match else ((), ())


def _numbers(dotted: str | None) -> tuple[int, ...]:
    numbers = [int(number) for number in dotted.split(".")] if dotted else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def references(allowed: str) -> tuple[str, ...]:
    """Return the names of the other properties that a range speaks of."""
    return tuple(REFERENCE.findall(allowed))


def problem_of(allowed: str) -> str:
    """Return what is wrong with the text of a range, ``""`` if nothing is."""
    for condition in (
        part.strip() for alternative in allowed.split("|") for part in alternative.split(",")
    ):
        plain = REFERENCE.sub("1", condition)
        comparator = next((each for each in COMPARATORS if plain.startswith(each)), "")
        bound = plain.removeprefix(comparator).strip()
        if not condition:
            return "a condition is empty; write what must hold on both sides of ',' and '|'"
        if comparator and not BOUND.match(bound):
            return f"{condition!r}: {comparator} needs a version, for example {comparator}1.22"
        if not comparator and not WORD.match(plain):
            return f"{condition!r} is not a condition; {GRAMMAR}"
    return ""
