"""Test the table of keys: values at the edges, refusals past them and their texts, names, order,
warnings.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from smdistributed.modelparallel.torch.job.config import (
    IDLE,
    IGNORED,
    ORDERS,
    RANGES,
    REFUSED,
    Config,
    SMPConfigError,
)

PAGE = Path(__file__).parents[2] / "docs/smdistributed-names.md"

BOOLS = [key for key, value_range in RANGES.items() if value_range.kind is bool]

NEEDS: dict[str, dict[str, Any]] = {
    "default_partition": {"pipeline_parallel_degree": 8},
    "auto_partition": {"default_partition": 0},
    "ddp_port": {"ddp": True},
    "ddp_dist_backend": {"ddp": True},
    "tensor_parallel_degree": {"ddp": True},
}
"""Keys that have to be there beside a key."""

TAKEN: list[tuple[str, Any]] = [
    *(
        (key, boolean)
        for key in BOOLS
        for boolean in (True, False)
        if not (boolean and key in REFUSED)
    ),
    *(
        (key, value)
        for key, value_range in RANGES.items()
        if value_range.kind is int
        for value in (value_range.least, 7)
    ),
    *(("pipeline", value) for value in ("interleaved", "simple", "_only_forward")),
    *(("optimize", value) for value in ("memory", "speed")),
    *(("placement_strategy", value) for value in ("cluster", "spread", *ORDERS)),
    *(("memory_weight", value) for value in (0, 0.0, 0.5, 1, 1.0)),
    *(("ddp_dist_backend", value) for value in ("auto", "nccl")),
    *(("sdp_gradient_clipping", value) for value in (0, 2.5)),
    ("ddp_port", 65535),
    ("partition_file", "a file"),
]

NOT_INTEGERS: tuple[Any, ...] = (True, 1.0, "2", [])

WRONG: list[tuple[str, Any]] = [
    *((key, wrong) for key in BOOLS for wrong in (1, 0, "True", None)),
    *(
        (key, number)
        for key, value_range in RANGES.items()
        if value_range.kind is int and value_range.least is not None
        for number in (value_range.least - 1, *NOT_INTEGERS)
    ),
    *(("pipeline", value) for value in ("Simple", "", 1, True)),
    *(("optimize", value) for value in ("time", 0)),
    *(("placement_strategy", value) for value in ("dpt", "DP", "DDT", "DPTT", "packed", 3)),
    *(("memory_weight", value) for value in (-0.01, 1.01, float("nan"), True, "0.5")),
    *(("ddp_dist_backend", value) for value in ("gloo", True)),
    *(("sdp_gradient_clipping", value) for value in (-0.1, False)),
    ("ddp_port", 65536),
    ("partition_file", 1),
]


def resolve(
    parameters: dict[str, Any], launcher: dict[str, Any] | None = None, world: int | None = None
) -> Config:
    variables = {} if launcher is None else {"SM_HP_MP_PARAMETERS": json.dumps(launcher)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Config.resolve(parameters, variables, world)


def refused(
    parameters: dict[str, Any], launcher: dict[str, Any] | None = None, world: int | None = None
) -> str:
    with pytest.raises(SMPConfigError) as caught:
        resolve(parameters, launcher, world)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_each_key_of_the_table_is_an_attribute() -> None:
    assert {field.name for field in fields(Config)} == RANGES.keys()


def test_the_page_has_each_key_with_its_range_and_default() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for field in fields(Config):
        default = "not set" if field.default is None else f"`{field.default!r}`"
        assert f"\n| `{field.name}` | {RANGES[field.name]} | {default} | " in page, field.name
    table = page.partition("\n## Parameters\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == RANGES.keys()
    assert set(re.findall(r"`(\w+)`", table.partition("\n| ")[0])) == IGNORED | {
        "distribution",
        "parameters",
    }
    idle = re.findall(r"^\| `(\w+)` \|.*\| no effect[^|]*\|$", table, re.MULTILINE)
    assert set(idle) == IDLE


@pytest.mark.parametrize(("key", "value"), TAKEN)
def test_a_value_in_the_range_is_taken(key: str, value: Any) -> None:
    assert getattr(resolve({**NEEDS.get(key, {}), key: value}), key) == value


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_value_past_the_range_is_refused_with_key_value_and_range(key: str, value: Any) -> None:
    # The script and the launcher are read with the same rules.
    for error in (
        refused({**NEEDS.get(key, {}), key: value}),
        refused(NEEDS.get(key, {}), {key: value}),
    ):
        assert error.startswith(f"{key} = {value!r}: must be {RANGES[key]}")


def test_defaults() -> None:
    config = resolve({})
    assert (config.pipeline_parallel_degree, config.microbatches, config.placement) == (1, 1, "DPT")
    assert (config.active_microbatches, config.memory_weight, config.auto_partition) == (
        3,
        0.8,
        True,
    )
    assert resolve({"pipeline_parallel_degree": 4}).active_microbatches == 6
    assert resolve({"optimize": "speed"}).memory_weight == 0.2
    assert resolve({"active_microbatches": None, "memory_weight": None, "ddp_port": None}) == config
    assert resolve({"placement_strategy": "spread"}).placement == "TPD"


def test_the_launcher_wins_over_the_script_key_by_key() -> None:
    config = resolve(
        {"microbatches": 2, "partitions": 2, "ddp": True},
        {"pipeline_parallel_degree": 4, "partitions": 4},
    )
    assert (config.microbatches, config.pipeline_parallel_degree, config.ddp) == (2, 4, True)


def test_the_old_name_of_the_degree() -> None:
    assert resolve({"partitions": 3}).pipeline_parallel_degree == 3
    assert resolve({"partitions": 3, "pipeline_parallel_degree": 3}).pipeline_parallel_degree == 3
    error = refused({"partitions": 3, "pipeline_parallel_degree": 2})
    assert (
        error
        == "partitions = 3 and pipeline_parallel_degree = 2: must be the same, they are two names"
        " of one key"
    )


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        (
            {"auto_partition": False},
            "auto_partition = False: needs default_partition, an integer of at least 0",
        ),
        (
            {"pipeline_parallel_degree": 2, "default_partition": 2},
            (
                "default_partition = 2: must be an integer from 0 to 1, below"
                " pipeline_parallel_degree = 2"
            ),
        ),
        ({"ddp_port": 5000}, "ddp_port = 5000: needs ddp = True, which is not set"),
        (
            {"ddp_dist_backend": "nccl", "ddp": False},
            "ddp_dist_backend = 'nccl': needs ddp = True, which is not set",
        ),
        (
            {"tensor_parallel_degree": 2},
            "tensor_parallel_degree = 2: more than 1 needs ddp = True, which is not set",
        ),
        ({"fp16": True, "bf16": True}, "fp16 = True: must be False with bf16 = True"),
        (
            {"sharded_data_parallel_degree": 2, "pipeline_parallel_degree": 2},
            "pipeline_parallel_degree = 2: must be 1 with sharded_data_parallel_degree = 2",
        ),
        (
            {"load_partition": True, "partition_file": "a file"},
            (
                "load_partition = True: must be False, because AWS has not published what a"
                " partition file has in it; leave it out, and place modules with smp.set_partition"
                " or resume a partial checkpoint, which brings its partition"
            ),
        ),
        (
            {"sharded_data_parallel_degree": 2, "shard_optimizer_state": True},
            "shard_optimizer_state = True: must be False with sharded_data_parallel_degree = 2",
        ),
    ],
)
def test_rules_between_keys(parameters: dict[str, Any], error: str) -> None:
    assert refused(parameters) == error


def test_rules_about_the_number_of_ranks() -> None:
    degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True}
    assert resolve(degrees, world=8).ddp
    assert (
        refused(degrees, world=6)
        == "pipeline_parallel_degree = 2 and tensor_parallel_degree = 2: their product 4 must"
        " divide the number of ranks, which is 6"
    )
    assert (
        refused({"partitions": 2}, world=4)
        == "ddp = False: must be True, because 4 ranks are more than the 2 of"
        " pipeline_parallel_degree = 2 and tensor_parallel_degree = 1"
    )
    assert "must divide the data-parallel degree, which is 4" in refused(
        {"sharded_data_parallel_degree": 3, "ddp": True}, world=4
    )


def test_parameters_of_sharding_that_do_nothing_are_said_once() -> None:
    parameters = {
        "sharded_data_parallel_degree": 2,
        "ddp": True,
        "sdp_reduce_bucket_size": 5,
        "sdp_gradient_clipping": 1.0,
    }
    with pytest.warns(UserWarning, match="have no effect: sdp_reduce_bucket_size$"):
        assert Config.resolve(parameters, {}, 4).sdp_gradient_clipping == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.resolve({"sdp_reduce_bucket_size": 5}, {})


def test_one_error_has_all_problems() -> None:
    error = refused(
        {"microbatches": 0, "pipeline": "gpipe", "tensor_parallel_degree": 2}, {"fp16": 1}
    )
    assert (
        error == "the configuration has 4 problems\n"
        "  microbatches = 0: must be an integer of at least 1\n"
        "  pipeline = 'gpipe': must be 'interleaved', 'simple' or '_only_forward'\n"
        "  fp16 = 1: must be True or False\n"
        "  tensor_parallel_degree = 2: more than 1 needs ddp = True, which is not set"
    )


@pytest.mark.parametrize("text", ["{", "[1]", "3", '"a"', "null"])
def test_a_launcher_that_exports_something_else_is_refused(text: str) -> None:
    with pytest.raises(SMPConfigError, match=r"SM_HP_MP_PARAMETERS = .*must be a JSON object"):
        Config.resolve({}, {"SM_HP_MP_PARAMETERS": text})


@pytest.mark.parametrize("text", ["", "  ", "{}"])
def test_a_launcher_that_exports_nothing(text: str) -> None:
    assert Config.resolve(None, {"SM_HP_MP_PARAMETERS": text}) == Config()


def test_a_configuration_that_is_not_a_dictionary_is_refused() -> None:
    with pytest.raises(SMPConfigError, match=r"smp.init was given \[1\]: must be a dictionary"):
        Config.resolve([1], {})  # type: ignore[arg-type]


def test_unknown_keys_are_one_warning_with_the_nearest_key() -> None:
    with pytest.warns(UserWarning, match="does not know") as caught:
        config = Config.resolve({"microbatch": 4, "partition": 2, "xyz": 1, "microbatches": 2}, {})
    (warning,) = caught
    assert (
        str(warning.message)
        == "smp does not know these keys of its configuration: microbatch (did you mean"
        " microbatches?), partition (did you mean partitions?), xyz"
    )
    assert config == Config(microbatches=2)


def test_keys_without_effect_are_one_warning() -> None:
    with pytest.warns(UserWarning, match="no effect") as caught:
        config = Config.resolve(dict.fromkeys(IGNORED, True), {})
    (warning,) = caught
    assert (
        str(warning.message)
        == f"these keys of smp's configuration have no effect: {', '.join(sorted(IGNORED))}"
    )
    assert config == Config()


def test_no_warning_without_a_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.resolve(
            {key: getattr(Config(), key) for key in RANGES if key != "ddp_dist_backend"}, {}, 1
        )
