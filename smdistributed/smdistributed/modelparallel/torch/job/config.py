"""What a job asks for, as one value: the dictionary of ``smp.init`` under the JSON of
``SM_HP_MP_PARAMETERS``.

Keys, types, ranges and rules between keys are in parameters.json, which the launcher reads, too.
They are those of the public documentation (the SageMaker Python SDK,
``smd_model_parallel_general.rst``; the ranges are those that its ``fw_utils.validate_mp_config``
checks), and the few more that AWS's own scripts pass.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.torch.exceptions import SMPConfigError

__all__ = ["Config", "SMPConfigError"]

VARIABLE = "SM_HP_MP_PARAMETERS"
"""The environment variable with the job's parameters, as a JSON object.

It wins over the script's.
"""

_TABLE = json.loads(Path(__file__).with_name("parameters.json").read_text(encoding="utf-8"))

OLD_NAMES: Mapping[str, str] = _TABLE["old_names"]
"""Old names of keys, and the keys."""

IGNORED = frozenset(_TABLE["without_effect"])
"""Keys that public scripts pass and that have no effect here."""

NEEDS_TORCH: Mapping[str, str] = _TABLE["needs_torch"]
"""The first PyTorch with which a degree can be above 1: 2.6 brought fully_shard to
torch.distributed.fsdp.
"""

REFUSED: Mapping[str, Mapping[str, str]] = _TABLE["refused"]
"""Switches that cannot be on: the reason, and what to do instead."""

IDLE_SHARDING = frozenset(
    {"sdp_hierarchical_allgather", "sdp_param_persistence_threshold", "sdp_reduce_bucket_size"}
)
"""Keys of sharded data parallelism to which nothing corresponds in PyTorch's fully_shard."""

STRATEGIES = {"cluster": "DPT", "spread": "TPD"}
"""Names of placements, as letters: data, pipeline and tensor parallelism.

The last letter varies fastest over ranks.
"""

ORDERS = tuple("".join(letters) for letters in permutations("DPT"))


@dataclass(frozen=True)
class Range:
    """Which values a key takes.

    Attributes:
        kind: Their type. A bool is not an int; an int is a float.
        least: The smallest number, if there is one.
        most: The largest number, if there is one.
        choices: The only strings that are taken; empty for any.
    """

    kind: type
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()

    def has(self, value: object) -> bool:
        """Return whether the key can have this value."""
        kinds: tuple[type, ...] = (int, float) if self.kind is float else (self.kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.kind is not bool):
            return False
        if isinstance(value, int | float):
            # Not a number is in no range.
            return (self.least is None or value >= self.least) and (
                self.most is None or value <= self.most
            )
        return not self.choices or value in self.choices

    def __str__(self) -> str:
        """Return the range as words that follow "must be"."""
        if self.kind is bool:
            return "True or False"
        if self.choices:
            return f"{', '.join(map(repr, self.choices[:-1]))} or {self.choices[-1]!r}"
        noun = {int: "an integer", float: "a number", str: "a string"}[self.kind]
        if self.least is not None and self.most is not None:
            return f"{noun} from {self.least} to {self.most}"
        return noun if self.least is None else f"{noun} of at least {self.least}"


_KINDS = {"switch": bool, "whole number": int, "number": float, "text": str}

RANGES: Mapping[str, Range] = {
    key: Range(
        _KINDS[row["type"]], row.get("least"), row.get("most"), tuple(row.get("choices", ()))
    )
    for key, row in _TABLE["keys"].items()
}
"""What each key takes; the attributes of ``Config`` are the same, with the defaults."""

UNSET = frozenset(key for key, row in _TABLE["keys"].items() if row.get("may_be_null"))
"""Keys for which None is the same as no value."""


@dataclass(frozen=True)
class Config:
    """A valid configuration: the keys of parameters.json, with the defaults of
    docs/smdistributed-names.md.
    """

    pipeline_parallel_degree: int = 1
    microbatches: int = 1
    pipeline: str = "interleaved"
    optimize: str = "memory"
    placement_strategy: str = "cluster"
    auto_partition: bool = True
    default_partition: int = 0
    memory_weight: float = 0.8
    ddp: bool = False
    ddp_port: int | None = None
    ddp_dist_backend: str = "auto"
    active_microbatches: int = 3
    deterministic_server: bool = False
    offload_activations: bool = False
    activation_loading_horizon: int = 4
    tensor_parallel_degree: int = 1
    fp16: bool = False
    bf16: bool = False
    fp16_params: bool = False
    shard_optimizer_state: bool = False
    prescaled_batch: bool = False
    skip_tracing: bool = False
    delayed_parameter_initialization: bool = False
    sharded_data_parallel_degree: int = 1
    sdp_reduce_bucket_size: int = 500_000_000
    sdp_param_persistence_threshold: int = 1_000_000
    sdp_max_live_parameters: int | None = None
    sdp_hierarchical_allgather: bool = True
    sdp_gradient_clipping: float = 1.0
    load_partition: bool = False
    partition_file: str | None = None

    @property
    def placement(self) -> str:
        """The placement as three letters; the last varies fastest over the global ranks."""
        return STRATEGIES.get(self.placement_strategy, self.placement_strategy)

    @classmethod
    def resolve(
        cls,
        given: Mapping[str, Any] | None,
        environment: Mapping[str, str],
        world: int | None = None,
    ) -> Config:
        """Return the configuration of a job.

        Unknown keys and keys without effect are one warning each time.

        Args:
            given: What the script passed to ``smp.init``.
            environment: The environment variables; ``SM_HP_MP_PARAMETERS`` wins over ``given``.
            world: Number of ranks of the job; None: not known yet, and not checked.

        Raises:
            SMPConfigError: Something cannot work. It names every problem that there is.
        """
        values, of_script = _with_new_names(given or {}, "smp.init")
        theirs, of_variable = _of_environment(environment)
        values |= theirs
        problems = of_script + of_variable
        problems += [
            f"{key} = {value!r}: must be {RANGES[key]}"
            for key, value in values.items()
            if key in RANGES and not RANGES[key].has(value)
        ]
        _warn(values)
        # Rules between keys are about values that are right in themselves.
        good = {
            key: value for key, value in values.items() if key in RANGES and RANGES[key].has(value)
        }
        unusable = values.keys() & RANGES.keys() - good.keys()
        good.setdefault(
            "memory_weight", 0.2 if good.get("optimize") == "speed" else cls.memory_weight
        )
        good.setdefault("active_microbatches", good.get("pipeline_parallel_degree", 1) + 2)
        config = cls(**good)
        problems += [
            text
            for keys, wrong, text in (
                *_rules(config, good),
                *(() if world is None else _rules_of(config, world)),
            )
            if wrong and not unusable & set(keys)
        ]
        problems += [
            f"{key} = True: must be False, because {row['because']}; {row['instead']}"
            for key, row in REFUSED.items()
            if getattr(config, key)
        ]
        if problems:
            raise SMPConfigError(*problems)
        return config


def _of_environment(environment: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values that the job gives, and what is wrong with them."""
    text = environment.get(VARIABLE, "").strip()
    try:
        values = json.loads(text or "{}")
    except ValueError as error:
        return {}, [f"{VARIABLE} = {text!r}: must be a JSON object ({error})"]
    if not isinstance(values, dict):
        return {}, [f"{VARIABLE} = {text!r}: must be a JSON object"]
    return _with_new_names(values, VARIABLE)


def _with_new_names(values: Any, source: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values under the keys' new names, without those that are not set.

    And what is wrong with them.
    """
    if not isinstance(values, Mapping):
        return {}, [f"{source} was given {values!r}: must be a dictionary"]
    problems = [
        f"{old} = {values[old]!r} and {new} = {values[new]!r}:"
        " must be the same, they are two names of one key"
        for old, new in OLD_NAMES.items()
        if old in values and new in values and values[old] != values[new]
    ]
    named: Mapping[str, Any] = values
    given = {
        OLD_NAMES.get(key, key): value
        for key, value in named.items()
        if not (value is None and key in UNSET)
    }
    return given, problems


def _rules(config: Config, given: Mapping[str, Any]) -> list[tuple[tuple[str, ...], bool, str]]:
    """Return what keys ask of each other: the keys, whether it is broken, and
    the sentence that says so.
    """
    return [
        ((key, other), *_rule(kind, key, other, config, given))
        for kind, key, other in _TABLE["rules"]
    ]


def _rule(
    kind: str, key: str, other: str, config: Config, given: Mapping[str, Any]
) -> tuple[bool, str]:
    value, beside = getattr(config, key), getattr(config, other)
    unset = f"needs {other} = True, which is not set"
    match kind:
        case "needs":
            return key in given and not beside, f"{key} = {value!r}: {unset}"
        case "above one needs":
            return value > 1 and not beside, f"{key} = {value}: more than 1 {unset}"
        case "off needs":
            return (
                not value and other not in given,
                f"{key} = False: needs {other}, {RANGES[other]}",
            )
        case "is below":
            return (
                value >= beside,
                (
                    f"{key} = {value}: must be an integer from 0 to {beside - 1},"
                    f" below {other} = {beside}"
                ),
            )
        case "excludes":
            off = False if RANGES[key].kind is bool else 1
            return (
                _is_on(value) and _is_on(beside),
                f"{key} = {value!r}: must be {off} with {other} = {beside!r}",
            )
    raise AssertionError(kind)


def _is_on(value: Any) -> bool:
    """Return whether a switch is on, or a degree above 1."""
    return value is True or value > 1


def _rules_of(config: Config, world: int) -> list[tuple[tuple[str, ...], bool, str]]:
    """Return what the number of ranks asks of the keys, in the same way."""
    pipeline, tensor = config.pipeline_parallel_degree, config.tensor_parallel_degree
    sharded = config.sharded_data_parallel_degree
    parallel = pipeline * tensor
    degrees = f"pipeline_parallel_degree = {pipeline} and tensor_parallel_degree = {tensor}"
    keys = ("pipeline_parallel_degree", "tensor_parallel_degree")
    return [
        (
            keys,
            world % parallel > 0,
            (
                f"{degrees}: their product {parallel} must"
                f" divide the number of ranks, which is {world}"
            ),
        ),
        (
            (*keys, "ddp"),
            world % parallel == 0 and world > parallel and not config.ddp,
            (
                "ddp = False: must be True,"
                f" because {world} ranks are more than the {parallel} of {degrees}"
            ),
        ),
        (
            (*keys, "sharded_data_parallel_degree"),
            sharded > 1 and world % parallel == 0 and world // parallel % sharded > 0,
            (
                f"sharded_data_parallel_degree = {sharded}: must divide the data-parallel degree, "
                f"which is {world // parallel}"
            ),
        ),
    ]


def _warn(values: Mapping[str, Any]) -> None:
    """Say which keys are not known, and which do nothing."""
    unknown = []
    for key in sorted((key for key in values if key not in RANGES and key not in IGNORED), key=str):
        near = difflib.get_close_matches(str(key), [*RANGES, *OLD_NAMES], n=1)
        unknown.append(f"{key} (did you mean {near[0]}?)" if near else str(key))
    if unknown:
        warnings.warn(
            f"smp does not know these keys of its configuration: {', '.join(unknown)}", stacklevel=3
        )
    silent = IGNORED & values.keys()
    if values.get("sharded_data_parallel_degree", 1) != 1:
        silent |= IDLE_SHARDING & values.keys()
    if values.get("partition_file"):
        silent |= {"partition_file"}
    if idle := sorted(silent):
        warnings.warn(
            f"these keys of smp's configuration have no effect: {', '.join(idle)}", stacklevel=3
        )
