"""The user's hyperparameters as command line arguments, in one of five styles. Pure.

A script reads its arguments in its own way, so the job says which: the hyperparameter
``sagemaker_argument_style``, else the variable TRAINWORKS_ARGUMENT_STYLE, else ``value``. The order
is that of the names, or the one of the platform's file (``sagemaker_argument_order``): parsers that
merge files and options read them in order. In every style names are kept as they are, and an
argument is never quoted, joined or split again on its way to the script.
"""

from __future__ import annotations

import json
import re
from types import MappingProxyType
from typing import Callable, Iterator, Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.settings import Reader

DEFAULT_STYLE = "value"
"""The style of sagemaker-training: scripts were written for it."""


ORDERS = ("name", "given")
"""By name, as sagemaker-training; or as the platform's file, or ModelTrainer's, has them."""


def choose_style(reader: Reader) -> str:
    """Return the style asked for, one of STYLES.

    A problem with the nearest name for anything else.
    """
    return _choose(
        reader, names.ARGUMENT_STYLE, names.ARGUMENT_STYLE_VARIABLE, [*STYLES], "argument style"
    )


def choose_order(reader: Reader) -> str:
    """Return the order asked for, one of ORDERS; a problem for anything else."""
    return _choose(
        reader, names.ARGUMENT_ORDER, names.ARGUMENT_ORDER_VARIABLE, ORDERS, "order of arguments"
    )


def _choose(
    reader: Reader, hyperparameter: str, variable: str, known: Sequence[str], what: str
) -> str:
    """Return one of the known words, the first by default.

    The hyperparameter belongs to one job, the variable is usually baked into an
    image, so the former wins.
    """
    value, where = reader.reserved.get(hyperparameter), f"hyperparameter {hyperparameter}"
    if value in (None, ""):
        value, where = reader.variables.get(variable, "").strip(), variable
    word = value or known[0]
    if not isinstance(word, str) or word not in known:
        reader.refuse(f"{word!r} is not an {what}", where, nearest(str(word), known))
        return known[0]
    return word


def to_arguments(
    user: Mapping[str, Json], style: str = DEFAULT_STYLE, order: str = ORDERS[0]
) -> tuple[str, ...]:
    """Return the arguments of all hyperparameters.

    >>> to_arguments({"lr": 0.1, "n": 3, "amp": True, "tag": None})
    ('--amp', 'True', '--lr', '0.1', '-n', '3', '--tag', '')
    """
    words = STYLES[style]
    return tuple(
        word
        for name in (sorted(user) if order == ORDERS[0] else user)
        for word in words(name, user[name])
    )


def check_sizes(user: Mapping[str, Json], style: str) -> tuple[Problem, ...]:
    """Return a problem for each hyperparameter that makes an argument longer
    than the kernel takes.
    """
    problems: list[Problem] = []
    words = STYLES[style]
    for name in sorted(user):
        size = max(
            (len(word.encode("utf-8", "surrogatepass")) for word in words(name, user[name])),
            default=0,
        )
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
    """``--name``, ``-n`` for a name of one letter; nothing to write for a name that is empty."""
    return f"-{name}" if len(name) == 1 else f"--{name}" if name else ""


def _value_text(value: Json) -> str:
    """True/False, "" for null, ``k=v,k=v`` for an object, else Python's own text of it."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ",".join(f"{key}={entry}" for key, entry in sorted(value.items()))
    return str(value)


def _value(name: str, value: Json) -> Iterator[str]:
    """``--name value``, every value as one word."""
    yield _option(name)
    yield _value_text(value)


def _flag(name: str, value: Json) -> Iterator[str]:
    """``--name`` for true, nothing for false, null and an empty list, ``--name a b`` for a list,
    else as in ``value``.

    "True" and "False" count as booleans: that is what an SDK sends that does not encode its values.
    """
    if value is None or value is False or value == "False" or value == []:
        return
    yield _option(name)
    if value is True or value == "True":
        return
    yield from (_value_text(entry) for entry in (value if isinstance(value, list) else [value]))


def _json(name: str, value: Json) -> Iterator[str]:
    """``--name`` and JSON text, a string as it is: what ModelTrainer of the
    SageMaker SDK gives a script.
    """
    yield f"--{name}"
    yield value if isinstance(value, str) else json.dumps(value)


def _assignment(name: str, value: Json) -> Iterator[str]:
    """``name=value`` in Hydra's override grammar, an object as one assignment
    for each of its entries.
    """
    if isinstance(value, dict) and value and all(re.fullmatch(_KEY, key) for key in value):
        for key, entry in value.items():
            yield from _assignment(f"{name}.{key}", entry)
        return
    yield f"{name}={_hydra_text(value)}"


def _none(_name: str, _value: Json) -> Iterator[str]:
    """No arguments: the script reads its environment."""
    yield from ()


STYLES: Mapping[str, Callable[[str, Json], Iterator[str]]] = MappingProxyType(
    {"value": _value, "flag": _flag, "json": _json, "key=value": _assignment, "none": _none}
)
"""Style -> the words of one hyperparameter."""


# --- Hydra's override grammar ---------------------------------------------------------------------
# Source: OverrideLexer.g4 and OverrideParser.g4 of hydra-core 1.3; a test has Hydra itself read
# what is written here.
_KEY = r"[A-Za-z_][A-Za-z0-9_-]*"
_PLAIN = r"[A-Za-z_][A-Za-z0-9_./-]*"
_READ_AS_SOMETHING_ELSE = frozenset(("true", "false", "null", "inf", "nan"))
_BACKSLASHES_BEFORE_QUOTE = r"\\+(?='|\Z)"


def _hydra_text(value: Json) -> str:
    """One value.

    Strings are quoted unless they are plain words that mean themselves, so that none is read as a
    number, a list or a sweep, and a word can still choose a config group. In a key what has a
    meaning is escaped.
    """
    if isinstance(value, list):
        return "[" + ",".join(_hydra_text(entry) for entry in value) + "]"
    if isinstance(value, dict):
        keys = (
            re.sub(r"[\\()\[\]{}:=, \t]", lambda found: f"\\{found.group()}", key) for key in value
        )
        return (
            "{"
            + ",".join(f"{key}:{_hydra_text(entry)}" for key, entry in zip(keys, value.values()))
            + "}"
        )
    if not isinstance(value, str):
        return json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")
    if re.fullmatch(_PLAIN, value) and value.lower() not in _READ_AS_SOMETHING_ELSE:
        return value
    # Backslashes count only before a quote, where each is doubled.
    doubled = re.sub(_BACKSLASHES_BEFORE_QUOTE, lambda found: found.group() * 2, value)
    return "'" + doubled.replace("'", "\\'") + "'"
