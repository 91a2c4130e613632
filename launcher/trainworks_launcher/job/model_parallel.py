"""Check the parameters of smp's first version before a cluster starts. Pure.

smp_parameters.json has the names, types, ranges and rules of the parameters, and is a copy of the
file that this project's own smp reads (docs/smdistributed.md). Sources: the AWS guide, 'Required
parameters for smdistributed', and public scripts. An unknown parameter is only a warning, because
scripts have parameters of other versions.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Mapping, NamedTuple

from trainworks_launcher.contract import names, suggestions
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.json_values import Json, decode, mapping

_OLD_DEGREE, _NEW_DEGREE = "partitions", "pipeline_parallel_degree"
"""The old and the new name of one parameter. Hugging Face's Trainer reads only the old name."""

_SHARDED_DEGREE = "sharded_data_parallel_degree"

_NAMES_OF_DEGREES = (_NEW_DEGREE, _OLD_DEGREE, _SHARDED_DEGREE)
"""Parameters of which a job of smp needs one."""

OPEN_LIBRARY = "trainworks-smdistributed"
"""The distribution with this project's own smddp and smp; the image's manifest protects it."""


class _Range(NamedTuple):
    """The possible values of a parameter.

    Attributes:
        type: ``switch``, ``whole number``, ``number`` or ``text``.
        least: The smallest number.
        most: The largest number; None for no limit.
        choices: The possible texts; empty for any text.
        may_be_null: Whether null is the same as no value.
        has_no_effect: Whether this project's smp accepts the parameter, and does nothing with it.
    """

    type: str
    least: int = 0
    most: int | None = None
    choices: tuple[str, ...] = ()
    may_be_null: bool = False
    has_no_effect: bool = False

    def has(self, value: Json) -> bool:
        """Return whether the parameter can have this value."""
        if self.type == "switch":
            return isinstance(value, bool)
        if self.type == "text":
            return isinstance(value, str) and (not self.choices or value in self.choices)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if self.type == "whole number" and not isinstance(value, int):
            return False
        if self.most is not None and value > self.most:
            return False
        return value >= self.least

    def advice(self, value: Json) -> str:
        """Return the remedy for a wrong value, such as ``give a whole number of at least 1``."""
        if self.type == "switch":
            return "give true or false"
        if self.choices and isinstance(value, str):
            return nearest(value, self.choices)
        if self.choices:
            return f"use one of: {', '.join(self.choices)}"
        if self.type == "text":
            return "give a text"
        if self.most is None:
            return f"give a {self.type} of at least {self.least}"
        return f"give a {self.type} from {self.least} to {self.most}"


class _Rule(NamedTuple):
    """A rule between two parameters.

    Attributes:
        kind: ``needs``, ``off needs``, ``is below``, ``excludes`` or ``above one needs``.
        key: Name of the parameter that has the rule.
        other: Name of the other parameter.
    """

    kind: str
    key: str
    other: str


class _Table(NamedTuple):
    """The content of smp_parameters.json.

    Attributes:
        ranges: Parameter -> its possible values.
        without_effect: Parameters that are known and do nothing.
        rules: Rules between two parameters.
        needs_torch: Parameter -> the first PyTorch with which this project's smp reads a degree
            above 1.
        refused: Switch that this project's smp does not have -> the keys ``because`` and
            ``instead``.
    """

    ranges: Mapping[str, _Range]
    without_effect: tuple[str, ...]
    rules: tuple[_Rule, ...]
    needs_torch: Mapping[str, str]
    refused: Mapping[str, Mapping[str, str]]


@lru_cache(maxsize=None)
def _table() -> _Table:
    """Read smp_parameters.json of this package, once. Old names have the ranges of the new ones."""
    import pkgutil  # takes time, and only jobs with smp need it

    data = json.loads(pkgutil.get_data("trainworks_launcher", "job/smp_parameters.json") or b"")
    ranges: dict[str, _Range] = {}
    for name, row in data["keys"].items():
        choices = tuple(row.pop("choices", ()))
        ranges[name] = _Range(**row, choices=choices)
    for old, new in data["old_names"].items():
        ranges[old] = ranges[new]
    return _Table(
        ranges=ranges,
        without_effect=tuple(data["without_effect"]),
        rules=tuple(_Rule(*rule) for rule in data["rules"]),
        needs_torch=data["needs_torch"],
        refused=data["refused"],
    )


def known() -> list[str]:
    """Return the names of all parameters of smp."""
    return [*_table().ranges, *_table().without_effect]


def parameters(
    hyperparameters: Mapping[str, Json], variables: Mapping[str, str]
) -> tuple[Json, str]:
    """Return (the parameters, the setting that has them); ``(None, "")`` without parameters.

    The setting is ``hyperparameter NAME`` or ``variable NAME``. An empty object means no parameters
    (as sagemaker-training). A variable that is not JSON is returned as its text, which ``check``
    refuses.
    """
    value = hyperparameters.get(names.MODEL_PARALLEL_PARAMETERS)
    if value not in (None, "", {}, "{}"):
        return value, f"hyperparameter {names.MODEL_PARALLEL_PARAMETERS}"
    text = variables.get(names.MODEL_PARALLEL_VARIABLE, "").strip()
    if text in ("", "{}"):
        return None, ""
    try:
        return decode(text), f"variable {names.MODEL_PARALLEL_VARIABLE}"
    except ValueError:
        return text, f"variable {names.MODEL_PARALLEL_VARIABLE}"


def complete(parameters: Mapping[str, Json]) -> dict[str, Json]:
    """Return the parameters with the pipeline degree under both of its names; default: 1."""
    degree = parameters.get(_NEW_DEGREE, parameters.get(_OLD_DEGREE, 1))
    return {**parameters, _OLD_DEGREE: degree, _NEW_DEGREE: degree}


def check(value: Json, where: str) -> list[Problem]:
    """Return the problems of the parameters; ``[]`` for none, and none for unknown parameters.

    value: the parameters. where: the setting that has the parameters, for the problems.
    """
    if not isinstance(value, dict):
        return [Problem(f"{value!r} is not an object of parameters", where, "give a JSON object")]
    ranges = _table().ranges
    nullable = {name for name, possible in ranges.items() if possible.may_be_null}
    absent = {name for name in nullable if value.get(name) is None}
    present = {name: parameter for name, parameter in value.items() if name not in absent}
    problems: list[Problem] = []
    for name, possible in ranges.items():
        if name in present and not possible.has(present[name]):
            advice = possible.advice(present[name])
            problems.append(Problem(f"{name} is {present[name]!r}", where, advice))
    problems += _check_degree(value, where)
    problems += _check_rules(present, where)
    return problems


def _check_degree(value: Mapping[str, Json], where: str) -> list[Problem]:
    """Return a problem for parameters without the number of partitions of the model.

    The guide requires this number. Only its page on sharded data parallelism has none, because
    sharding splits the model in another way.
    """
    if any(name in value for name in _NAMES_OF_DEGREES):
        return []
    problem = (
        f"neither {_NEW_DEGREE} nor {_OLD_DEGREE} says into how many partitions the model is split"
    )
    advice = f"give {_NEW_DEGREE}, or its older name {_OLD_DEGREE}: 1 keeps the model whole"
    for name in value:
        name_of_degree = suggestions.nearest(name, known())
        if name not in known() and name_of_degree in _NAMES_OF_DEGREES:
            advice = f"write {name_of_degree!r} in the place of {name!r}"
    return [Problem(problem, where, advice)]


def unknown(value: Json) -> list[str]:
    """Return a warning for each unknown parameter: misspelt, or of another version."""
    warnings = []
    for name in mapping(value):
        if name not in known():
            warnings.append(
                f"{names.MODEL_PARALLEL_PARAMETERS} has {name!r}, which smp does not know;"
                f" {nearest(name, known())}"
            )
    return warnings


def without_effect(value: Json, protected: Mapping[str, str]) -> list[str]:
    """Return the names of the parameters with which this project's smp does nothing, sorted.

    ``[]`` for an image with another smp. Unknown parameters are not among them.

    Args:
        value: The parameters.
        protected: Distribution of the image -> its version, from the manifest.
    """
    if OPEN_LIBRARY not in protected:
        return []
    table = _table()
    idle = set(table.without_effect)
    idle.update(name for name, possible in table.ranges.items() if possible.has_no_effect)
    return sorted(idle & mapping(value).keys())


def check_processes(value: Json, where: str, processes: int) -> list[Problem]:
    """Return the problems of the parameters with this number of processes.

    ``check`` returns the other problems. A missing ``ddp`` is no problem, because the script may
    pass ``ddp`` to ``smp.init``.

    Args:
        value: The parameters.
        where: The setting that has the parameters, for the problems.
        processes: Number of ranks of the job.
    """
    parameters = complete(mapping(value))
    degrees: list[int] = []
    for name in (_NEW_DEGREE, "tensor_parallel_degree", _SHARDED_DEGREE):
        degree = parameters.get(name, 1)
        if not _is_whole(degree, 1):
            # ``check`` refuses it.
            return []
        degrees.append(int(str(degree)))
    pipeline, tensor, sharded = degrees
    split = pipeline * tensor  # processes of one copy of the model
    is_ddp_off = parameters.get("ddp") is False
    problems: list[Problem] = []
    if processes % split:
        problem = (
            f"{processes} process(es) for models of {split}: {_NEW_DEGREE} {pipeline} x"
            f" tensor_parallel_degree {tensor}"
        )
        advice = f"start a multiple of {split} processes, or change a degree"
        problems.append(Problem(problem, where, advice))
    elif processes > split and is_ddp_off:
        copies = processes // split
        problem = f"{processes} processes train {copies} copies of the model, and ddp is false"
        advice = f"set ddp to true, or start {split} process(es)"
        problems.append(Problem(problem, where, advice))
    elif tensor > 1 and is_ddp_off:
        problem = f"tensor_parallel_degree is {tensor}, and ddp is false"
        problems.append(Problem(problem, where, "set ddp to true"))
    if sharded > 1 and split == 1 and processes % sharded:
        problem = f"sharded_data_parallel_degree is {sharded} of {processes} process(es)"
        problems.append(Problem(problem, where, f"give a divisor of {processes}"))
    return problems


def check_library(value: Json, where: str, protected: Mapping[str, str]) -> list[Problem]:
    """Return the problems with which this project's smp would end every rank of a started job.

    ``[]`` for an image with another smp.

    Args:
        value: The parameters.
        where: The setting that has the parameters.
        protected: Distribution of the image -> its version, from the manifest.
    """
    if OPEN_LIBRARY not in protected:
        return []
    parameters = mapping(value)
    problems: list[Problem] = []
    for name, row in _table().refused.items():
        if parameters.get(name) is True:
            problem = f"{name} is true, and the image's smp cannot do it: {row['because']}"
            problems.append(Problem(problem, where, row["instead"]))
    torch = protected.get("torch", "")
    if not torch:
        return problems
    for name, least in _table().needs_torch.items():
        if _is_on(parameters.get(name)) and _release(torch) < _release(least):
            problem = (
                f"{name} is {parameters[name]}, and needs PyTorch {least}; the image has {torch}"
            )
            advice = (
                f"take an image with PyTorch {least} or later, or set it to 1;"
                " shard_optimizer_state saves memory as well"
            )
            problems.append(Problem(problem, where, advice))
    return problems


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: ``2.9.1+cu130`` is ``(2, 9, 1)``."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def _check_rules(present: Mapping[str, Json], where: str) -> list[Problem]:
    """Return the problems of parameters that need or exclude each other.

    present: the parameters without those that are null and may be null. where: the setting that
    has the parameters, for the problems.
    """
    problems: list[Problem] = []
    old, new = present.get(_OLD_DEGREE), present.get(_NEW_DEGREE)
    if old is not None and new is not None and old != new:
        problem = f"{_OLD_DEGREE} is {old!r} and {_NEW_DEGREE} is {new!r}"
        advice = f"they are the old and the new name of one parameter: keep {_NEW_DEGREE}"
        problems.append(Problem(problem, where, advice))
    # With the pipeline degree under both names: a rule may be about either.
    parameters = complete(present)
    for kind, key, other in _table().rules:
        value, other_value = parameters.get(key), parameters.get(other)
        if kind == "needs" and key in present and other_value is not True:
            problem = f"{key} is given without {other}"
            problems.append(Problem(problem, where, f"set {other} as well, or leave it out"))
        elif kind == "off needs" and value is False and other not in present:
            problems.append(Problem(f"{key} is off without a {other}", where, f"give {other}"))
        elif kind == "is below" and _is_whole(value, 0) and _is_whole(other_value, 1):
            limit = int(str(other_value))
            if int(str(value)) >= limit:
                problem = f"{key} is {value!r}, and {other} is {other_value!r}"
                problems.append(Problem(problem, where, f"give 0 to {limit - 1}"))
        elif kind == "excludes" and _is_on(value) and _is_on(other_value):
            problem = f"{key} is {value!r} beside {other} {other_value!r}"
            problems.append(Problem(problem, where, "keep one of them"))
        # The rules "above one needs" are not checked: the script may pass the other parameter to
        # smp.init. check_processes refuses a ddp that is off.
    return problems


def _is_on(value: Json) -> bool:
    """Return whether a switch is on, or a degree above 1."""
    return value is True or _is_whole(value, 2)


def _is_whole(value: Json, least: int) -> bool:
    """Return whether a value is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
