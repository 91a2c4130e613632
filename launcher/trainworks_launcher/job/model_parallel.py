"""The parameters of smp's first version, checked before a cluster's time is spent on them. Pure.

Keys, types, ranges and rules between keys are in smp_parameters.json, a copy of the file that the
library of this project reads (docs/smdistributed.md). Their source is the AWS guide, 'Required
parameters for smdistributed', and what public scripts pass. A key that is not known is a warning
and no refusal: scripts have keys of other versions.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Mapping, NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.json_values import Json, decode, mapping

_OLD, _NEW = "partitions", "pipeline_parallel_degree"
"""Two names of one parameter, by age. Hugging Face's Trainer looks for the old one only."""

_SHARDED = "sharded_data_parallel_degree"

OPEN_LIBRARY = "trainworks-smdistributed"
"""The distribution of this project that has smddp and smp.

The manifest of an image with it protects it.
"""


class _Range(NamedTuple):
    """Which values a key takes.

    Attributes:
        type: ``switch``, ``whole number``, ``number`` or ``text``.
        least: The smallest number.
        most: The largest number, if there is one.
        choices: The only texts that are taken; empty for any.
        may_be_null: Null is the same as no value.
    """

    type: str
    least: int = 0
    most: int | None = None
    choices: tuple[str, ...] = ()
    may_be_null: bool = False

    def has(self, value: Json) -> bool:
        """Return whether the key can have this value."""
        if self.type == "switch":
            return isinstance(value, bool)
        if self.type == "text":
            return isinstance(value, str) and (not self.choices or value in self.choices)
        kinds = (int,) if self.type == "whole number" else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        return self.least <= value and (self.most is None or value <= self.most)

    def advice(self, value: Json) -> str:
        """Return what to give instead of a value."""
        if self.type == "switch":
            return "give true or false"
        if self.choices:
            return (
                nearest(value, self.choices)
                if isinstance(value, str)
                else f"use one of: {', '.join(self.choices)}"
            )
        if self.type == "text":
            return "give a text"
        span = (
            f"of at least {self.least}"
            if self.most is None
            else f"from {self.least} to {self.most}"
        )
        return f"give a {self.type} {span}"


class _Table(NamedTuple):
    """The file: the range of each key, the keys that do nothing, rules (kind, key, other key).

    And what the image's own library asks: the first PyTorch for a degree above
    1, and switches that cannot be on.
    """

    ranges: Mapping[str, _Range]
    without_effect: tuple[str, ...]
    rules: tuple[tuple[str, str, str], ...]
    needs_torch: Mapping[str, str]
    refused: Mapping[str, Mapping[str, str]]


@lru_cache(maxsize=None)
def _table() -> _Table:
    import pkgutil  # jobs without smp do not pay for it

    data = json.loads(pkgutil.get_data("trainworks_launcher", "job/smp_parameters.json") or b"")
    ranges = {
        key: _Range(**{**row, "choices": tuple(row.get("choices", ()))})
        for key, row in data["keys"].items()
    }
    ranges.update({old: ranges[new] for old, new in data["old_names"].items()})
    rules = tuple((kind, key, other) for kind, key, other in data["rules"])
    return _Table(
        ranges, tuple(data["without_effect"]), rules, data["needs_torch"], data["refused"]
    )


def known() -> list[str]:
    """Return every parameter of smp."""
    return [*_table().ranges, *_table().without_effect]


def parameters(
    hyperparameters: Mapping[str, Json], variables: Mapping[str, str]
) -> tuple[Json, str]:
    """Return the parameters and where they are; (None, "") when there are none.

    An empty object counts as none (as sagemaker-training).
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


def complete(given: Mapping[str, Json]) -> dict[str, Json]:
    """Return the parameters with the pipeline degree under both of its names.

    1 where the model is only sharded.
    """
    degree = given.get(_NEW, given.get(_OLD, 1))
    return {**given, _OLD: degree, _NEW: degree}


def check(value: Json, where: str) -> list[Problem]:
    """Everything that is wrong with the parameters."""
    if not isinstance(value, dict):
        return [Problem(f"{value!r} is not an object of parameters", where, "give a JSON object")]
    ranges = _table().ranges
    nullable = {name for name, each in ranges.items() if each.may_be_null}
    given = {
        name: entry for name, entry in value.items() if entry is not None or name not in nullable
    }
    found = [
        (f"{name} is {given[name]!r}", each.advice(given[name]))
        for name, each in ranges.items()
        if name in given and not each.has(given[name])
    ]
    return [
        Problem(text, where, advice)
        for text, advice in (*found, *_no_degree(value), *_wrong_together(given))
    ]


def _no_degree(value: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Return (what is wrong, advice) where a client does not say into how many
    partitions the model is split.

    The guide requires it. Only its page on sharded data parallelism leaves it
    out, which splits in another way.
    """
    if _NEW in value or _OLD in value or _SHARDED in value:
        return []
    advice = f"give {_NEW}, or its older name {_OLD}: 1 keeps the model whole"
    return [(f"neither {_NEW} nor {_OLD} says into how many partitions the model is split", advice)]


def unknown(value: Json) -> list[str]:
    """Return a warning for each key that smp does not know: misspelt, or of another version."""
    return [
        f"{names.MODEL_PARALLEL_PARAMETERS} has {name!r}, which smp does not know;"
        f" {nearest(name, known())}"
        for name in mapping(value)
        if name not in known()
    ]


def check_processes(value: Json, where: str, processes: int) -> list[Problem]:
    """Everything that is wrong with the parameters for this number of processes.

    What ``check`` finds is not told.

    Where ``ddp`` is missing, the script may give it to ``smp.init``, which asks for it.
    """
    given = complete(mapping(value))
    degrees = [given.get(name, 1) for name in (_NEW, "tensor_parallel_degree", _SHARDED)]
    if not all(_is_whole(degree, 1) for degree in degrees):
        return []
    pipeline, tensor, sharded = (int(str(degree)) for degree in degrees)
    split, no_ddp = pipeline * tensor, given.get("ddp") is False
    found: list[tuple[str, str]] = []
    if processes % split:
        text = (
            f"{processes} process(es) for models of {split}: {_NEW} {pipeline} x"
            f" tensor_parallel_degree {tensor}"
        )
        found.append((text, f"start a multiple of {split} processes, or change a degree"))
    elif processes > split and no_ddp:
        text = (
            f"{processes} processes train {processes // split}"
            " copies of the model, and ddp is false"
        )
        found.append((text, f"set ddp to true, or start {split} process(es)"))
    elif tensor > 1 and no_ddp:
        found.append((f"tensor_parallel_degree is {tensor}, and ddp is false", "set ddp to true"))
    if sharded > 1 and split == 1 and processes % sharded:
        text = f"sharded_data_parallel_degree is {sharded} of {processes} process(es)"
        found.append((text, f"give a divisor of {processes}"))
    return [Problem(text, where, advice) for text, advice in found]


def check_library(value: Json, where: str, protected: Mapping[str, str]) -> list[Problem]:
    """Everything that the image's own library refuses on every rank, after all hosts have started.

    protected: Distributions of the image, from its manifest.
    """
    if OPEN_LIBRARY not in protected:
        return []
    given = mapping(value)
    refused = [
        Problem(
            f"{key} is true, and the image's smp cannot do it: {row['because']}",
            where,
            row["instead"],
        )
        for key, row in _table().refused.items()
        if given.get(key) is True
    ]
    torch = protected.get("torch", "")
    return refused + [
        Problem(
            f"{key} is {given[key]}, and needs PyTorch {least}; the image has {torch}",
            where,
            f"take an image with PyTorch {least} or later, or set it to 1; shard_optimizer_state"
            " saves memory as well",
        )
        for key, least in _table().needs_torch.items()
        if torch and _is_on(given.get(key)) and _release(torch) < _release(least)
    ]


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what follows them."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def _wrong_together(value: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Return (what is wrong, advice) of parameters that need or exclude each other."""
    found: list[tuple[str, str]] = []
    old, new = value.get(_OLD), value.get(_NEW)
    if old is not None and new is not None and old != new:
        advice = f"they are the old and the new name of one parameter: keep {_NEW}"
        found.append((f"{_OLD} is {old!r} and {_NEW} is {new!r}", advice))
    whole = complete(value)
    for kind, key, other in _table().rules:
        here, beside = whole.get(key), whole.get(other)
        if kind == "needs" and key in value and beside is not True:
            found.append(
                (f"{key} is given without {other}", f"set {other} as well, or leave it out")
            )
        elif kind == "off needs" and here is False and other not in value:
            found.append((f"{key} is off without a {other}", f"give {other}"))
        elif (
            kind == "is below"
            and _is_whole(here, 0)
            and _is_whole(beside, 1)
            and int(str(here)) >= int(str(beside))
        ):
            found.append(
                (
                    f"{key} is {here!r}, and {other} is {beside!r}",
                    f"give 0 to {int(str(beside)) - 1}",
                )
            )
        elif kind == "excludes" and _is_on(here) and _is_on(beside):
            found.append((f"{key} is {here!r} beside {other} {beside!r}", "keep one of them"))
        # "above one needs": the script may give it to `smp.init`.
        # `check_processes` refuses what is switched off.
    return found


def _is_on(value: Json) -> bool:
    """Return whether a switch is on, or a degree above 1."""
    return value is True or _is_whole(value, 2)


def _is_whole(value: Json, least: int) -> bool:
    """Return whether a value is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
