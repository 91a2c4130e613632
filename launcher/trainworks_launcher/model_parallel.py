"""The parameters of smp's first version, checked before a cluster's time is spent on them. Pure.

Source of the rules: the SDK checks the same when a job is made with it (``validate_mp_config``), and ModelTrainer and
hand-written jobs do not; AWS guide, 'Required parameters for smdistributed': the pipeline degree.
"""

from __future__ import annotations

from typing import Mapping

from trainworks_launcher import names
from trainworks_launcher.errors import Problem, nearest
from trainworks_launcher.values import Json, decode

_COUNTS = (
    *("pipeline_parallel_degree", "partitions", "microbatches", "active_microbatches"),
    *("tensor_parallel_degree", "sharded_data_parallel_degree"),
)
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "pipeline": ("simple", "interleaved", "_only_forward"),
    "placement_strategy": ("spread", "cluster"),
    "optimize": ("speed", "memory"),
}
_SWITCHES = ("auto_partition", "contiguous", "load_partition", "horovod", "ddp", "deterministic_server")


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


def check(value: Json, where: str) -> list[Problem]:
    """Everything that is wrong with the parameters."""
    if not isinstance(value, dict):
        return [Problem(f"{value!r} is not an object of parameters", where, "give a JSON object")]
    found = [*_wrong_values(value), *_wrong_together(value)]
    return [Problem(text, where, advice) for text, advice in found]


def _wrong_values(value: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Return (what is wrong, advice) of single parameters."""
    found = [
        (f"{name} is {value[name]!r}", "give a whole number of at least 1")
        for name in _COUNTS
        if name in value and not _is_whole(value[name], 1)
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
    weight = value.get("memory_weight", 0.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= 1:
        found.append((f"memory_weight is {weight!r}", "give a number from 0 to 1"))
    if "ddp_port" in value and (not _is_whole(value["ddp_port"], 0) or int(str(value["ddp_port"])) > 65535):
        found.append((f"ddp_port is {value['ddp_port']!r}", "give a TCP port"))
    return found


def _wrong_together(value: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Return (what is wrong, advice) of parameters that need or exclude each other."""
    found: list[tuple[str, str]] = []
    # Required by the guide. Where the model is split in another way only, smp's own default of 1 is what is meant.
    ways = ("pipeline_parallel_degree", "partitions", "tensor_parallel_degree", "sharded_data_parallel_degree")
    if not any(name in value for name in ways):
        found.append(("pipeline_parallel_degree is missing", "say into how many partitions the model is split"))
    old, new = value.get("partitions"), value.get("pipeline_parallel_degree")
    if old is not None and new is not None and old != new:
        advice = "they are the old and the new name of one parameter: keep pipeline_parallel_degree"
        found.append((f"partitions is {old!r} and pipeline_parallel_degree is {new!r}", advice))
    degree = 1 if new is None and old is None else old if new is None else new
    if value.get("auto_partition") is False and "default_partition" not in value:
        found.append(("auto_partition is off without a default_partition", "name the partition of all other modules"))
    if "default_partition" in value and isinstance(degree, int):
        default = value["default_partition"]
        if not _is_whole(default, 0) or int(str(default)) >= degree:
            found.append((f"default_partition is {default!r} of {degree} partition(s)", f"give 0 to {degree - 1}"))
    found += [
        (f"{name} is given without ddp", "set ddp as well, or leave it out")
        for name in ("ddp_port", "ddp_dist_backend")
        if name in value and "ddp" not in value
    ]
    if value.get("ddp") is True and value.get("horovod") is True:
        found.append(("ddp and horovod are both on", "keep one of them"))
    return found


def _is_whole(value: Json, least: int) -> bool:
    """Return whether a value is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
