"""Ranges of versions in rows: a small language for the names that vendors give their releases.

A *range* limits a value: ``,`` is "and", ``|`` is "or", and "and" binds closer.

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
"""The values of properties, by name; a property without a value is absent."""

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

Besides: a framework's version by the framework's name, the version of a component or of a package
that artifacts and base images bring, ``NAME.flags`` (the options of an artifact, a set) and
``NAME.build`` (the text behind the ``+`` of a version).
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
"""Comparators, longer ones first, and their results for an order (-1, 0, 1) of two versions."""

VERSION = re.compile(r"\D*(?P<release>\d+(?:\.\d+)*)(?:\D+(?P<vendor>\d+(?:\.\d+)*))?")
"""A version: the release's numbers, and the vendor's own behind them."""

BOUND = re.compile(r"v?[0-9]+(\.[0-9]+)*([+-]?[a-z]*[0-9]+(\.[0-9]+)*)?\Z")
"""A version behind a comparator."""

WORD = re.compile(r"!?-{0,2}[A-Za-z0-9][A-Za-z0-9._+/:=-]*\Z")
"""A condition without a comparator: a version, a name or an option."""

REFERENCE = re.compile(r"\{([a-z0-9.-]+)\}")
"""The name of another property, in the place of its value."""

GRAMMAR = (
    f"write one of: {' '.join(COMPARATORS)} and a version; a version or name; !name; {{property}};"
    f" {PRESENT}; {ABSENT}"
)
"""The forms of a condition, for people."""

VersionKey = tuple[tuple[int, ...], tuple[int, ...]]
"""The sort key of a version: the release's numbers, then the vendor's own behind them.

For example ``((1, 22), (4,))`` for ``1.22amzn4``.
"""


def satisfies(value: Value | None, allowed: str, properties: Properties) -> bool:
    """Return whether a property's value is in a range.

    Args:
        value: The property's value; ``None`` if the property is absent.
        allowed: The range; ``problem_of`` accepts it.
        properties: The values of properties that the range refers to. A condition that refers to
            an absent property never holds.
    """
    for alternative in allowed.split("|"):
        conditions = alternative.split(",")
        if all(_holds(value, condition.strip(), properties) for condition in conditions):
            return True
    return False


def _holds(value: Value | None, condition: str, properties: Properties) -> bool:
    """Return whether a value meets one condition; arguments as of ``satisfies``."""
    if condition == PRESENT:
        return value is not None
    if condition == ABSENT:
        return value is None
    for name in REFERENCE.findall(condition):
        referred = properties.get(name)
        # Absent, or a set, which has no text.
        if not isinstance(referred, str):
            return False
        condition = condition.replace(f"{{{name}}}", referred)
    for comparator, accepts in COMPARATORS.items():
        if condition.startswith(comparator):
            if not isinstance(value, str):
                return False
            bound = condition.removeprefix(comparator).strip()
            return accepts(compare(value, bound))
    if condition.startswith("!"):
        return not _matches(value, condition[1:])
    return _matches(value, condition)


def _matches(value: Value | None, word: str) -> bool:
    """Return whether a value is a word or continues the word behind a dot, or a set has the word.

    ``12.1`` matches ``12``; ``12`` does not match ``1``.
    """
    if value is None:
        return False
    if isinstance(value, str):
        return value == word or value.startswith(f"{word}.")
    return word in value


def compare(version: str, bound: str) -> int:
    """Return -1, 0 or 1: a version is below, at or above a bound.

    The vendor's number counts if the bound has one.
    """
    version_key, bound_key = version_key_of(version), version_key_of(bound)
    _, vendor_numbers = bound_key
    if not vendor_numbers:
        version_key = (version_key[0], ())
    if version_key == bound_key:
        return 0
    return 1 if version_key > bound_key else -1


@cache
def version_key_of(version: str) -> VersionKey:
    """Return a version's sort key: ``1.22amzn4.0`` gives ((1, 22), (4,)), because 4.0 is 4.

    A text without a number is below every version: ((), ()).
    """
    match = VERSION.match(version)
    if match is None:
        return ((), ())
    return (_numbers(match["release"]), _numbers(match["vendor"]))


def _numbers(dotted: str | None) -> tuple[int, ...]:
    """Return the numbers between dots, without zeros at the end; empty for no text."""
    if not dotted:
        return ()
    numbers = [int(number) for number in dotted.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def references(allowed: str) -> tuple[str, ...]:
    """Return the names of the properties that a range refers to: ``cell`` for ``{cell}``."""
    return tuple(REFERENCE.findall(allowed))


def problem_of(allowed: str) -> str:
    """Return the first problem in the text of a range, for people; ``""`` for a valid range."""
    for alternative in allowed.split("|"):
        for condition in alternative.split(","):
            problem = _condition_problem(condition.strip())
            if problem:
                return problem
    return ""


def _condition_problem(condition: str) -> str:
    """Return the problem of one condition of a range; ``""`` for a valid one."""
    if not condition:
        return "a condition is empty; write what must hold on both sides of ',' and '|'"
    # A reference stands for a value that is known when the range is read.
    plain = REFERENCE.sub("1", condition)
    for comparator in COMPARATORS:
        if plain.startswith(comparator):
            bound = plain.removeprefix(comparator).strip()
            if BOUND.match(bound):
                return ""
            return f"{condition!r}: {comparator} needs a version, for example {comparator}1.22"
    if not WORD.match(plain):
        return f"{condition!r} is not a condition; {GRAMMAR}"
    return ""
