"""The parameters of smp's first version, checked before a cluster's time is spent on them. Pure.

Source of the rules: AWS guide, 'Required parameters for smdistributed', and what public scripts pass; the library of
this project reads the same ones (docs/smdistributed.md). A key that is not known is a warning and no refusal: scripts
have keys of other versions.
"""

from __future__ import annotations

import math
from itertools import permutations
from typing import Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.values import Json, decode, mapping

_OLD, _NEW = "partitions", "pipeline_parallel_degree"
"""Two names of one parameter, by age. Hugging Face's Trainer looks for the old one only."""

_LEAST: Mapping[str, int] = {
    **dict.fromkeys((_OLD, _NEW, "microbatches", "active_microbatches", "activation_loading_horizon"), 1),
    **dict.fromkeys(("tensor_parallel_degree", "sharded_data_parallel_degree"), 1),
    **dict.fromkeys(("sdp_reduce_bucket_size", "sdp_param_persistence_threshold", "sdp_max_live_parameters"), 0),
}
"""Whole numbers, and the least that each may be."""

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "pipeline": ("simple", "interleaved", "_only_forward"),
    # Letters: data, pipeline and tensor parallelism; the last one varies fastest over the ranks.
    "placement_strategy": ("cluster", "spread", *("".join(letters) for letters in permutations("DPT"))),
    "optimize": ("speed", "memory"),
    "ddp_dist_backend": ("auto", "nccl"),
}
_SWITCHES = (
    *("auto_partition", "ddp", "deterministic_server", "load_partition", "offload_activations", "skip_tracing"),
    *("fp16", "bf16", "fp16_params", "shard_optimizer_state", "prescaled_batch", "delayed_parameter_initialization"),
    "sdp_hierarchical_allgather",
)
_WITHOUT_EFFECT = (
    *("checkpoint_attentions", "static_mode", "fast_mode", "_match_weights", "use_times", "attention_in_fp32"),
    *("contiguous", "horovod", "zero2d", "_fp32_grad_accumulation"),
)
"""What AWS's own scripts pass and the library takes without doing anything."""

_MAY_BE_NULL = ("active_microbatches", "ddp_port", "memory_weight", "partition_file")
"""Null is the same as no value."""

KEYS = frozenset(
    (
        *(*_LEAST, *_CHOICES, *_SWITCHES, *_WITHOUT_EFFECT),
        *("default_partition", "memory_weight", "sdp_gradient_clipping", "ddp_port", "partition_file"),
    )
)
"""Every parameter of smp."""


def parameters(hyperparameters: Mapping[str, Json], variables: Mapping[str, str]) -> tuple[Json, str]:
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
    """Return the parameters with the pipeline degree under both of its names; 1 where neither is given."""
    degree = given.get(_NEW, given.get(_OLD, 1))
    return {**given, _OLD: degree, _NEW: degree}


def check(value: Json, where: str) -> list[Problem]:
    """Everything that is wrong with the parameters."""
    if not isinstance(value, dict):
        return [Problem(f"{value!r} is not an object of parameters", where, "give a JSON object")]
    given = {name: entry for name, entry in value.items() if entry is not None or name not in _MAY_BE_NULL}
    found = [*_wrong_values(given), *_wrong_together(given)]
    return [Problem(text, where, advice) for text, advice in found]


def unknown(value: Json) -> list[str]:
    """Return a warning for each key that smp does not know: misspelt, or of another version."""
    return [
        f"{names.MODEL_PARALLEL_PARAMETERS} has {name!r}, which smp does not know; {nearest(name, KEYS)}"
        for name in mapping(value)
        if name not in KEYS
    ]


def check_processes(value: Json, where: str, processes: int) -> list[Problem]:
    """Everything that is wrong with the parameters for this number of processes; what ``check`` finds is not told.

    Where ``ddp`` is missing, the script may give it to ``smp.init``, which asks for it.
    """
    given = complete(mapping(value))
    degrees = [given.get(name, 1) for name in (_NEW, "tensor_parallel_degree", "sharded_data_parallel_degree")]
    if not all(_is_whole(degree, 1) for degree in degrees):
        return []
    pipeline, tensor, sharded = (int(str(degree)) for degree in degrees)
    split, no_ddp = pipeline * tensor, given.get("ddp") is False
    found: list[tuple[str, str]] = []
    if processes % split:
        text = f"{processes} process(es) for models of {split}: {_NEW} {pipeline} x tensor_parallel_degree {tensor}"
        found.append((text, f"start a multiple of {split} processes, or change a degree"))
    elif processes > split and no_ddp:
        text = f"{processes} processes train {processes // split} copies of the model, and ddp is false"
        found.append((text, f"set ddp to true, or start {split} process(es)"))
    elif tensor > 1 and no_ddp:
        found.append((f"tensor_parallel_degree is {tensor}, and ddp is false", "set ddp to true"))
    if sharded > 1 and split == 1 and processes % sharded:
        text = f"sharded_data_parallel_degree is {sharded} of {processes} process(es)"
        found.append((text, f"give a divisor of {processes}"))
    return [Problem(text, where, advice) for text, advice in found]


def _wrong_values(value: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Return (what is wrong, advice) of single parameters."""
    found = [
        (f"{name} is {value[name]!r}", f"give a whole number of at least {least}")
        for name, least in _LEAST.items()
        if name in value and not _is_whole(value[name], least)
    ]
    for name, choices in _CHOICES.items():
        if name in value and value[name] not in choices:
            given = value[name]
            advice = nearest(given, choices) if isinstance(given, str) else f"use one of: {', '.join(choices)}"
            found.append((f"{name} is {given!r}", advice))
    found += [
        (f"{name} is {value[name]!r}", "give true or false")
        for name in _SWITCHES
        if name in value and not isinstance(value[name], bool)
    ]
    if "partition_file" in value and not isinstance(value["partition_file"], str):
        found.append((f"partition_file is {value['partition_file']!r}", "give the path as a text"))
    for name, most in (("memory_weight", 1), ("sdp_gradient_clipping", None)):
        if name in value and not _is_number(value[name], most):
            found.append((f"{name} is {value[name]!r}", f"give a number from 0{f' to {most}' if most else ''}"))
    if "ddp_port" in value and (not _is_whole(value["ddp_port"], 1) or int(str(value["ddp_port"])) > 65535):
        found.append((f"ddp_port is {value['ddp_port']!r}", "give a TCP port"))
    return found


def _wrong_together(value: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Return (what is wrong, advice) of parameters that need or exclude each other."""
    found: list[tuple[str, str]] = []
    old, new = value.get(_OLD), value.get(_NEW)
    if old is not None and new is not None and old != new:
        advice = f"they are the old and the new name of one parameter: keep {_NEW}"
        found.append((f"{_OLD} is {old!r} and {_NEW} is {new!r}", advice))
    degree = complete(value)[_NEW]
    if value.get("auto_partition") is False and "default_partition" not in value:
        found.append(("auto_partition is off without a default_partition", "name the partition of all other modules"))
    if "default_partition" in value and _is_whole(degree, 1):
        default = value["default_partition"]
        if not _is_whole(default, 0) or int(str(default)) >= int(str(degree)):
            advice = f"give 0 to {int(str(degree)) - 1}"
            found.append((f"default_partition is {default!r} of {degree} partition(s)", advice))
    found += [
        (f"{name} is given without ddp", "set ddp as well, or leave it out")
        for name in ("ddp_port", "ddp_dist_backend")
        if name in value and value.get("ddp") is not True
    ]
    if value.get("fp16") is True and value.get("bf16") is True:
        found.append(("fp16 and bf16 are both on", "keep one of them"))
    others = [name for name in (_OLD, _NEW, "tensor_parallel_degree") if _is_whole(value.get(name), 2)]
    others += ["shard_optimizer_state"] if value.get("shard_optimizer_state") is True else []
    if others and _is_whole(value.get("sharded_data_parallel_degree"), 2):
        text = f"sharded_data_parallel_degree is {value['sharded_data_parallel_degree']} beside {others[0]}"
        found.append((text, "keep one of them"))
    return found


def _is_whole(value: Json, least: int) -> bool:
    """Return whether a value is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Json, most: float | None) -> bool:
    """Return whether a value is a number from 0 on, and at most ``most``."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return 0 <= value <= (math.inf if most is None else most)
