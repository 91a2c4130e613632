"""Write the user's hyperparameters as command line arguments, in one of five styles. Pure.

The style is the hyperparameter ``sagemaker_argument_style``, else the variable
TRAINWORKS_ARGUMENT_STYLE, else ``value``. Arguments are sorted by name, or in the order of the
platform's file (``sagemaker_argument_order``), because parsers that merge files and options read
both in order. Every style keeps the names of the hyperparameters. An argument is never quoted,
joined or split on the way to the script.

For the hyperparameters ``{"lr": 0.1, "amp": true}``:

| style | arguments |
|---|---|
| value | ``--amp True --lr 0.1`` |
| flag | ``--amp --lr 0.1`` |
| json | ``--amp true --lr 0.1`` |
| key=value | ``amp=true lr=0.1`` |
| none | no arguments |
"""

from __future__ import annotations

import json
import re
from types import MappingProxyType
from typing import Callable, Iterator, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.settings import Reader

DEFAULT_STYLE = "value"
"""The style of sagemaker-training, which many scripts are written for."""

ORDERS = ("name", "given")
"""Sorted by name, as sagemaker-training; or in the order of the platform's file, or ModelTrainer's.
"""


class _Setting(NamedTuple):
    """A setting with a few possible values.

    Attributes:
        noun: The setting as a problem names it, such as ``argument style``.
        hyperparameter: Name of its hyperparameter.
        variable: Name of its variable.
        values: The possible values, the default first.
    """

    noun: str
    hyperparameter: str
    variable: str
    values: Sequence[str]


def choose_style(reader: Reader) -> str:
    """Return the style of the job, one of STYLES. Another word is a problem of the reader."""
    return _choose(
        _Setting(
            "argument style", names.ARGUMENT_STYLE, names.ARGUMENT_STYLE_VARIABLE, tuple(STYLES)
        ),
        reader,
    )


def choose_order(reader: Reader) -> str:
    """Return the order of the job, one of ORDERS. Another word is a problem of the reader."""
    return _choose(
        _Setting("order of arguments", names.ARGUMENT_ORDER, names.ARGUMENT_ORDER_VARIABLE, ORDERS),
        reader,
    )


def _choose(setting: _Setting, reader: Reader) -> str:
    """Return the value of the hyperparameter, else of the variable, else the default.

    The hyperparameter is first, because it belongs to one job; the variable is usually set in an
    image. For another word the reader gets a problem, and the default is returned.
    """
    value = reader.reserved.get(setting.hyperparameter)
    where = f"hyperparameter {setting.hyperparameter}"
    if value in (None, ""):
        value = reader.variables.get(setting.variable, "").strip()
        where = setting.variable
    default = setting.values[0]
    word = value or default
    if not isinstance(word, str) or word not in setting.values:
        advice = nearest(str(word), setting.values)
        reader.refuse(f"{word!r} is not an {setting.noun}", where, advice)
        return default
    return word


def to_arguments(
    user: Mapping[str, Json], style: str = DEFAULT_STYLE, order: str = ORDERS[0]
) -> tuple[str, ...]:
    """Return the arguments of all hyperparameters.

    Args:
        user: Name of a hyperparameter -> its value.
        style: One of STYLES.
        order: One of ORDERS.

    >>> to_arguments({"lr": 0.1, "n": 3, "amp": True, "tag": None})
    ('--amp', 'True', '--lr', '0.1', '-n', '3', '--tag', '')
    """
    write = STYLES[style]
    ordered = list(user)
    if order == ORDERS[0]:
        ordered.sort()
    arguments: list[str] = []
    for name in ordered:
        arguments += write(name, user[name])
    return tuple(arguments)


def check_sizes(user: Mapping[str, Json], style: str) -> tuple[Problem, ...]:
    """Return a problem for each hyperparameter with an argument longer than the kernel takes."""
    problems: list[Problem] = []
    write = STYLES[style]
    for name in sorted(user):
        sizes = [len(word.encode("utf-8", "surrogatepass")) for word in write(name, user[name])]
        # Of the longest word: the kernel's limit is for each. A NUL byte at its end counts, too.
        size = max(sizes, default=0)
        if size >= names.ARGUMENT_LIMIT_BYTES:
            variable = f"SM_HP_{name.upper()}"
            problem = (
                f"its argument has {size:,} bytes, and the kernel takes at most"
                f" {names.ARGUMENT_LIMIT_BYTES - 1:,}"
            )
            advice = (
                f"put the value into a file of a channel; or set {names.ARGUMENT_STYLE} to 'none'"
                f" and read it from the file that {variable}{names.FILE_SUFFIX} names, or with all"
                f" others from {names.HYPERPARAMETERS_VARIABLE} or the file of"
                f" {names.HYPERPARAMETERS_VARIABLE}{names.FILE_SUFFIX}"
            )
            problems.append(Problem(problem, f"hyperparameter {name}", advice))
    return tuple(problems)


def _option(name: str) -> str:
    """Write ``--name``, ``-n`` for a name of one letter, and ``""`` for an empty name."""
    if not name:
        return ""
    if len(name) == 1:
        return f"-{name}"
    return f"--{name}"


def _value_text(value: Json) -> str:
    """Write a value as Python's ``str``, null as ``""``, and an object as ``k=v,k=v``."""
    if value is None:
        return ""
    if isinstance(value, dict):
        pairs = [f"{key}={entry}" for key, entry in sorted(value.items())]
        return ",".join(pairs)
    return str(value)


def _value(name: str, value: Json) -> Iterator[str]:
    """Write ``--name value``, every value as one word."""
    yield _option(name)
    yield _value_text(value)


def _flag(name: str, value: Json) -> Iterator[str]:
    """Write ``--name`` for true, ``--name a b`` for a list, and other values as in ``value``.

    False, null and an empty list have no arguments. The strings "True" and "False" are booleans,
    because some SDKs send booleans without JSON.
    """
    if value is None or value is False or value == "False" or value == []:
        return
    yield _option(name)
    if value is True or value == "True":
        return
    if not isinstance(value, list):
        value = [value]
    for entry in value:
        yield _value_text(entry)


def _json(name: str, value: Json) -> Iterator[str]:
    """Write ``--name`` and JSON, a string without quotes, as ModelTrainer of the SageMaker SDK."""
    yield f"--{name}"
    if isinstance(value, str):
        yield value
    else:
        yield json.dumps(value)


def _assignment(name: str, value: Json) -> Iterator[str]:
    """Write ``name=value`` in Hydra's override grammar; an object as several ``name.key=value``."""
    if isinstance(value, dict) and _has_plain_keys(value):
        for key, entry in value.items():
            yield from _assignment(f"{name}.{key}", entry)
        return
    yield f"{name}={_hydra_text(value)}"


def _none(_name: str, _value: Json) -> Iterator[str]:
    """Write no arguments: the script reads its environment."""
    yield from ()


STYLES: Mapping[str, Callable[[str, Json], Iterator[str]]] = MappingProxyType(
    {"value": _value, "flag": _flag, "json": _json, "key=value": _assignment, "none": _none}
)
"""Style -> the function that writes the arguments of one hyperparameter."""


# --- Hydra's override grammar ---------------------------------------------------------------------
# Source: OverrideLexer.g4 and OverrideParser.g4 of hydra-core 1.3; a test reads the arguments with
# Hydra itself.
_KEY = r"[A-Za-z_][A-Za-z0-9_-]*"
_PLAIN = r"[A-Za-z_][A-Za-z0-9_./-]*"
_CONSTANTS = frozenset(("true", "false", "null", "inf", "nan"))
"""Words that Hydra reads as a boolean, null or a number."""

_SPECIAL_IN_KEY = r"[\\()\[\]{}:=, \t]"
_BACKSLASHES_BEFORE_QUOTE = r"\\+(?='|\Z)"


def _has_plain_keys(value: Mapping[str, Json]) -> bool:
    """Return whether an object has entries, and each key can be a part of ``name.key=value``."""
    return bool(value) and all(re.fullmatch(_KEY, key) for key in value)


def _hydra_text(value: Json) -> str:
    """Write a value in Hydra's grammar, such as ``[1,'a b']`` or ``{k:1}``.

    A string is quoted, so that Hydra does not read a number, a list or a sweep. Plain words are not
    quoted, so that they can choose a config group.
    """
    if isinstance(value, list):
        entries = map(_hydra_text, value)
        return "[" + ",".join(entries) + "]"
    if isinstance(value, dict):
        pairs = []
        for key, entry in value.items():
            escaped = re.sub(_SPECIAL_IN_KEY, r"\\\g<0>", key)
            pairs.append(f"{escaped}:{_hydra_text(entry)}")
        return "{" + ",".join(pairs) + "}"
    if not isinstance(value, str):
        return json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")
    if re.fullmatch(_PLAIN, value) and value.lower() not in _CONSTANTS:
        return value
    # Hydra reads backslashes as escapes only before a quote.
    doubled = re.sub(_BACKSLASHES_BEFORE_QUOTE, r"\g<0>\g<0>", value)
    return "'" + doubled.replace("'", "\\'") + "'"
