"""The configuration of a job: the dictionary of ``smp.init``, overridden by the JSON of
``SM_HP_MP_PARAMETERS``.

Keys, types, ranges and rules between keys are in parameters.json, which the launcher reads, too.
They come from the public documentation (the SageMaker Python SDK,
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
from typing import Any, NamedTuple

from smdistributed.modelparallel.torch.exceptions import SMPConfigError

__all__ = ["Config", "SMPConfigError"]

VARIABLE = "SM_HP_MP_PARAMETERS"
"""The environment variable with the job's parameters, as a JSON object.

It overrides the dictionary of the script.
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

IDLE = frozenset(key for key, row in _TABLE["keys"].items() if row.get("has_no_effect"))
"""Keys of AWS's guide that have no effect here."""

IDLE_SHARDING = frozenset(key for key in IDLE if key.startswith("sdp_"))
"""Those of sharded data parallelism: PyTorch's fully_shard has no option for them."""

STRATEGIES = {"cluster": "DPT", "spread": "TPD"}
"""Names of placements, as letters: data, pipeline and tensor parallelism.

The last letter varies fastest over ranks.
"""

ORDERS = tuple("".join(letters) for letters in permutations("DPT"))


@dataclass(frozen=True)
class Range:
    """The valid values of a key.

    Attributes:
        kind: Their type. A bool is not an int; an int is a float.
        least: The smallest number; None: no limit.
        most: The largest number; None: no limit.
        choices: The valid strings; empty: any string.
    """

    kind: type
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()

    def has(self, value: object) -> bool:
        """Return whether a value is valid for the key.

        A NaN is valid for no number with a limit.
        """
        kinds: tuple[type, ...] = (int, float) if self.kind is float else (self.kind,)
        if not isinstance(value, kinds):
            return False
        if isinstance(value, bool) and self.kind is not bool:
            return False
        if isinstance(value, int | float):
            # Comparisons with NaN are false: it is in no range.
            is_large_enough = self.least is None or value >= self.least
            is_small_enough = self.most is None or value <= self.most
            return is_large_enough and is_small_enough
        return not self.choices or value in self.choices

    def __str__(self) -> str:
        """Return words that follow "must be", such as "an integer from 1 to 8"."""
        if self.kind is bool:
            return "True or False"
        if self.choices:
            *first, last = map(repr, self.choices)
            return f"{', '.join(first)} or {last}"
        noun = {int: "an integer", float: "a number", str: "a string"}[self.kind]
        if self.least is None:
            return noun
        if self.most is None:
            return f"{noun} of at least {self.least}"
        return f"{noun} from {self.least} to {self.most}"


_KINDS = {"switch": bool, "whole number": int, "number": float, "text": str}

RANGES: Mapping[str, Range] = {
    key: Range(
        _KINDS[row["type"]], row.get("least"), row.get("most"), tuple(row.get("choices", ()))
    )
    for key, row in _TABLE["keys"].items()
}
"""Key -> its valid values. ``Config`` has the same keys as attributes, with the defaults."""

UNSET = frozenset(key for key, row in _TABLE["keys"].items() if row.get("may_be_null"))
"""Keys for which None is the same as no value."""


class _Rule(NamedTuple):
    """A rule between keys, applied to a configuration.

    Attributes:
        keys: The keys of the rule.
        is_broken: Whether the configuration breaks the rule.
        problem: The sentence for a broken rule.
    """

    keys: tuple[str, ...]
    is_broken: bool
    problem: str


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
        parameters: Mapping[str, Any] | None,
        environment: Mapping[str, str],
        world: int | None = None,
    ) -> Config:
        """Return the configuration of a job.

        Unknown keys, and keys without effect, cause a warning.

        Warnings are given by ``warnings.warn``, also before an error.

        Args:
            parameters: The dictionary that the script passed to ``smp.init``.
            environment: The environment variables; ``SM_HP_MP_PARAMETERS`` overrides
                ``parameters``.
            world: Number of ranks of the job; None: unknown, and not checked.

        Raises:
            SMPConfigError: The configuration cannot work. The error has all problems.
        """
        values, problems = _rename_old_keys(parameters or {}, "smp.init")
        job_values, job_problems = _read_environment(environment)
        values |= job_values
        problems += job_problems
        valid: dict[str, Any] = {}
        invalid_keys: set[str] = set()
        for key, value in values.items():
            if key not in RANGES:
                continue
            if RANGES[key].has(value):
                valid[key] = value
            else:
                invalid_keys.add(key)
                problems.append(f"{key} = {value!r}: must be {RANGES[key]}")
        _warn_of_keys(values)

        # Defaults that depend on other keys.
        optimizes_speed = valid.get("optimize") == "speed"
        valid.setdefault("memory_weight", 0.2 if optimizes_speed else cls.memory_weight)
        valid.setdefault("active_microbatches", valid.get("pipeline_parallel_degree", 1) + 2)
        config = cls(**valid)
        rules = _apply_rules(config, valid)
        if world is not None:
            rules += _apply_size_rules(config, world)
        for rule in rules:
            # A rule is only checked for values that are valid by themselves.
            if rule.is_broken and invalid_keys.isdisjoint(rule.keys):
                problems.append(rule.problem)
        for key, row in REFUSED.items():
            if getattr(config, key):
                problems.append(
                    f"{key} = True: must be False, because {row['because']}; {row['instead']}"
                )
        if problems:
            raise SMPConfigError(*problems)
        return config


def _read_environment(environment: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the job's variable ``SM_HP_MP_PARAMETERS``, and their problems.

    Text that is no JSON object is a problem, not an error.

    Returns:
        (key -> value, texts of the problems). Both are empty without the variable.
    """
    text = environment.get(VARIABLE, "").strip()
    try:
        values = json.loads(text or "{}")
    except ValueError as error:
        return {}, [f"{VARIABLE} = {text!r}: must be a JSON object ({error})"]
    if not isinstance(values, dict):
        return {}, [f"{VARIABLE} = {text!r}: must be a JSON object"]
    return _rename_old_keys(values, VARIABLE)


def _rename_old_keys(values: Any, source: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values with the new names of their keys, and their problems.

    The dictionary is not changed.

    Args:
        values: A dictionary. Keys for which None means no value are left out, if they have None.
        source: Words for the dictionary, in a problem, such as "smp.init".

    Returns:
        (key -> value, texts of the problems). Anything but a dictionary is a problem.
    """
    if not isinstance(values, Mapping):
        return {}, [f"{source} was given {values!r}: must be a dictionary"]
    problems = []
    for old, new in OLD_NAMES.items():
        if old in values and new in values and values[old] != values[new]:
            problems.append(
                f"{old} = {values[old]!r} and {new} = {values[new]!r}:"
                " must be the same, they are two names of one key"
            )
    renamed: dict[str, Any] = {}
    mapping: Mapping[str, Any] = values
    for key, value in mapping.items():
        if value is not None or key not in UNSET:
            renamed[OLD_NAMES.get(key, key)] = value
    return renamed, problems


def _apply_rules(config: Config, values: Mapping[str, Any]) -> list[_Rule]:
    """Return the rules of parameters.json, each applied to a configuration.

    Args:
        config: The configuration.
        values: The values that were set, without the defaults.
    """
    return [_apply_rule(kind, key, other, config, values) for kind, key, other in _TABLE["rules"]]


def _apply_rule(
    kind: str, key: str, other: str, config: Config, values: Mapping[str, Any]
) -> _Rule:
    """Return a rule between two keys, applied to a configuration.

    Args:
        kind: The kind of the rule, as in parameters.json, such as "needs".
        key: The first key.
        other: The second key.
        config: The configuration.
        values: The values that were set, without the defaults.

    Raises:
        AssertionError: parameters.json has an unknown kind.
    """
    value, other_value = getattr(config, key), getattr(config, other)
    unset = f"needs {other} = True, which is not set"
    match kind:
        case "needs":
            is_broken = key in values and not other_value
            problem = f"{key} = {value!r}: {unset}"
        case "above one needs":
            is_broken = value > 1 and not other_value
            problem = f"{key} = {value}: more than 1 {unset}"
        case "off needs":
            is_broken = not value and other not in values
            problem = f"{key} = False: needs {other}, {RANGES[other]}"
        case "is below":
            is_broken = value >= other_value
            problem = (
                f"{key} = {value}: must be an integer from 0 to {other_value - 1},"
                f" below {other} = {other_value}"
            )
        case "excludes":
            off = False if RANGES[key].kind is bool else 1
            is_broken = _is_on(value) and _is_on(other_value)
            problem = f"{key} = {value!r}: must be {off} with {other} = {other_value!r}"
        case _:
            raise AssertionError(kind)
    return _Rule((key, other), is_broken, problem)


def _is_on(value: Any) -> bool:
    """Return whether a switch is on, or a degree above 1."""
    return value is True or value > 1


def _apply_size_rules(config: Config, world: int) -> list[_Rule]:
    """Return the rules about the number of ranks, each applied to a configuration.

    A rule that is not broken is returned, too.

    Args:
        config: The configuration.
        world: Number of ranks of the job.
    """
    pipeline, tensor = config.pipeline_parallel_degree, config.tensor_parallel_degree
    sharded = config.sharded_data_parallel_degree
    parallel = pipeline * tensor
    divides = world % parallel == 0
    replicas = world // parallel
    degrees = f"pipeline_parallel_degree = {pipeline} and tensor_parallel_degree = {tensor}"
    keys = ("pipeline_parallel_degree", "tensor_parallel_degree")
    degrees_divide = _Rule(
        keys,
        not divides,
        f"{degrees}: their product {parallel} must divide the number of ranks, which is {world}",
    )
    replicas_need_ddp = _Rule(
        (*keys, "ddp"),
        divides and world > parallel and not config.ddp,
        f"ddp = False: must be True, because {world} ranks are more than the {parallel} of"
        f" {degrees}",
    )
    shards_divide = _Rule(
        (*keys, "sharded_data_parallel_degree"),
        sharded > 1 and divides and replicas % sharded > 0,
        f"sharded_data_parallel_degree = {sharded}: must divide the data-parallel degree, "
        f"which is {replicas}",
    )
    return [degrees_divide, replicas_need_ddp, shards_divide]


def _warn_of_keys(values: Mapping[str, Any]) -> None:
    """Warn of unknown keys, with a suggestion for a similar one, and of keys without effect.

    One warning for the unknown keys, and one for those without effect, by ``warnings.warn``.

    Args:
        values: Key -> value, as the script and the job have set them.
    """
    unknown = []
    unknown_keys = [key for key in values if key not in RANGES and key not in IGNORED]
    for key in sorted(unknown_keys, key=str):
        suggestions = difflib.get_close_matches(str(key), [*RANGES, *OLD_NAMES], n=1)
        if suggestions:
            unknown.append(f"{key} (did you mean {suggestions[0]}?)")
        else:
            unknown.append(str(key))
    if unknown:
        warnings.warn(
            f"smp does not know these keys of its configuration: {', '.join(unknown)}", stacklevel=3
        )
    without_effect = IGNORED & values.keys()
    if values.get("sharded_data_parallel_degree", 1) != 1:
        without_effect |= IDLE_SHARDING & values.keys()
    if values.get("partition_file"):
        without_effect |= {"partition_file"}
    if without_effect:
        warnings.warn(
            "these keys of smp's configuration have no effect:"
            f" {', '.join(sorted(without_effect))}",
            stacklevel=3,
        )
