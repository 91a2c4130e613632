"""Test the variables of the script: the job's host, groups and log level.

A value that cannot be one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from launcher_support import environment, plan, write_inputs

from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.json_values import NESTING_LIMIT, Json, decode
from trainworks_launcher.environment.environment import Devices, read_environment
from trainworks_launcher.job.job import make_job
from trainworks_launcher.plan.script_environment import exported_variables

GROUPS: dict[str, Json] = {
    "current_host": "a",
    "current_instance_type": "ml.fast.xlarge",
    "current_group_name": "one",
    "hosts": ["a", "b", "c"],
    "network_interface_name": "eth0",
    "instance_groups": [
        {"instance_group_name": "one", "instance_type": "ml.fast.xlarge", "hosts": ["a", "b"]},
        {"instance_group_name": "two", "instance_type": "ml.plain.xlarge", "hosts": ["c"]},
    ],
}


def variables(
    config: Mapping[str, Json], host: str = "", **hyperparameters: Json
) -> Mapping[str, str]:
    job_environment = environment(hyperparameters, resource_config=MappingProxyType(dict(config)))
    return exported_variables(make_job(job_environment, host))


def problems(hyperparameters: Mapping[str, Json], **changes: object) -> tuple[str, ...]:
    with pytest.raises(RefusalError) as refused:
        plan(environment(hyperparameters, **changes))  # type: ignore[arg-type]
    return tuple(str(problem) for problem in refused.value.problems)


def test_each_host_is_told_its_own_group() -> None:
    first, last = variables(GROUPS, "a"), variables(GROUPS, "c")
    assert (first["SM_CURRENT_INSTANCE_GROUP"], last["SM_CURRENT_INSTANCE_GROUP"]) == ("one", "two")
    assert (first["SM_CURRENT_INSTANCE_GROUP_HOSTS"], last["SM_CURRENT_INSTANCE_GROUP_HOSTS"]) == (
        '["a","b"]',
        '["c"]',
    )
    assert (first["SM_CURRENT_INSTANCE_TYPE"], last["SM_CURRENT_INSTANCE_TYPE"]) == (
        "ml.fast.xlarge",
        "ml.plain.xlarge",
    )
    assert (first["SM_CURRENT_HOST_RANK"], last["SM_CURRENT_HOST_RANK"]) == ("0", "2")
    assert first["SM_HOST_COUNT"] == last["SM_HOST_COUNT"] == "3"
    assert json.loads(last["SM_RESOURCE_CONFIG"])["current_host"] == "c"


def test_a_group_name_is_not_needed_to_know_the_group() -> None:
    unnamed = {name: value for name, value in GROUPS.items() if name != "current_group_name"}
    assert variables(unnamed)["SM_CURRENT_INSTANCE_GROUP"] == "one"


def test_groups_take_part_only_if_something_is_distributed() -> None:
    assert variables(GROUPS)["SM_DISTRIBUTION_INSTANCE_GROUPS"] == "[]"
    group: dict[str, Json] = {
        "instance_group_name": "one",
        "instance_type": "ml.fast.xlarge",
        "hosts": ["a", "b"],
    }
    one: dict[str, Json] = {**GROUPS, "hosts": ["a", "b"], "instance_groups": [group]}
    exported = variables(one, sagemaker_torch_distributed_enabled=True)
    assert exported["SM_DISTRIBUTION_INSTANCE_GROUPS"] == '["one"]'
    assert json.loads(exported["SM_TRAINING_ENV"])["distribution_hosts"] == ["a", "b"]


@pytest.mark.parametrize(
    ("hyperparameter", "variable", "expected"),
    [
        (None, "", "20"),
        (10, "30", "10"),
        (None, "30", "30"),
        ("DEBUG", "", "10"),
        (None, "ERROR", "40"),
    ],
)
def test_the_log_level_is_the_jobs_else_the_containers(
    hyperparameter: Json, variable: str, expected: str
) -> None:
    job_environment = environment(
        {"sagemaker_container_log_level": hyperparameter},
        variables={"SAGEMAKER_CONTAINER_LOG_LEVEL": variable},
    )
    assert plan(job_environment).env["SM_LOG_LEVEL"] == expected


@pytest.mark.parametrize("value", ["loud", True, -1, 2.5, [20]])
def test_a_log_level_that_is_none_is_refused(value: Json) -> None:
    (text,) = problems({"sagemaker_container_log_level": value})
    assert (
        "is not a log level (hyperparameter sagemaker_container_log_level);"
        " give a number such as 20" in text
    )


def test_a_name_with_a_hyphen_has_a_second_variable_that_a_shell_can_read() -> None:
    env = plan(
        environment(
            {"batch-size": 64, "a-b": 1, "a_b": 2},
            input_data_config=MappingProxyType({"my-data": {}}),
        )
    ).env
    assert env["SM_HP_BATCH-SIZE"] == env["SM_HP_BATCH_SIZE"] == "64"
    assert (env["SM_HP_A-B"], env["SM_HP_A_B"]) == ("1", "2")
    assert env["SM_CHANNEL_MY_DATA"] == "/opt/ml/input/data/my-data"


def test_names_that_differ_in_case_share_a_variable_and_it_is_said() -> None:
    (warning,) = plan(environment({"lr": 1, "LR": 2})).warnings
    assert "'lr' and 'LR' share the variable SM_HP_LR, which has the value of 'LR'" in warning


def test_an_upload_that_does_not_happen_is_said() -> None:
    (warning,) = plan(environment({"sagemaker_s3_output": "s3://bucket/output"})).warnings
    assert warning.startswith(
        "sagemaker_s3_output is set, but this launcher uploads nothing while the job runs"
    )
    assert plan(environment({"sagemaker_s3_output": "file:///tmp"})).warnings == ()


@pytest.mark.parametrize(
    ("hyperparameters", "expected"),
    [
        ({"x": "a\0b"}, "its value has a NUL character (hyperparameter 'x')"),
        (
            {"x": "\ud800"},
            "its value has half of a surrogate pair (U+D800), which is not a character (hyper",
        ),
        ({"x": {"k": "a\0b"}}, "its value has a NUL character (hyperparameter 'x')"),
        (
            {"x": ["a\0b"], "sagemaker_argument_style": "key=value"},
            "its value has a NUL character (hyperparameter 'x')",
        ),
        ({"a\0b": 1}, r"the name of the hyperparameter has a NUL character"),
        (
            {"a=b": 1},
            (
                "the name of the hyperparameter has a '=', so no variable can have it"
                " (hyperparameter 'a=b')"
            ),
        ),
        ({"": 1}, "the name of the hyperparameter is empty"),
        (
            {"sagemaker_job_name": "a\0b"},
            "its value has a NUL character (hyperparameter sagemaker_job_name)",
        ),
    ],
)
def test_what_cannot_be_a_variable_or_an_argument_is_refused(
    hyperparameters: Mapping[str, Json], expected: str
) -> None:
    (text,) = problems(hyperparameters)
    assert text.startswith(expected)


def test_a_channel_that_cannot_be_a_variable_is_refused() -> None:
    (text,) = problems({}, input_data_config=MappingProxyType({"a=b": {}}))
    assert text.startswith("the name of the channel has a '='")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hosts": ["a", 5]}, "a host is a number, not a name"),
        ({"hosts": "a"}, "'hosts' is a text, not a list"),
        ({"current_instance_type": 5}, "'current_instance_type' is a number, not a text"),
        ({"network_interface_name": ["eth0"]}, "'network_interface_name' is a list, not a text"),
        ({"network_interface_name": "eth\0"}, "'network_interface_name' has a NUL character"),
        (
            {"instance_groups": [{"instance_group_name": "g\0"}]},
            "an instance group has a NUL character",
        ),
        (
            {"instance_groups": [{"instance_group_name": "g", "instance_type": "\0"}]},
            "an instance group has a NUL character",
        ),
        ({"instance_groups": {}}, "'instance_groups' is an object, not a list"),
        ({"instance_groups": [1]}, "is a number, not an object"),
        ({"instance_groups": [{"hosts": ["a"]}]}, "the group has no 'instance_group_name'"),
        (
            {"instance_groups": [{"instance_group_name": "g", "hosts": ["z"]}]},
            "'z' is not one of the job's hosts",
        ),
        (
            {"instance_groups": [{"instance_group_name": "g"}, {"instance_group_name": "g"}]},
            "there is another group 'g'",
        ),
    ],
)
def test_a_resource_config_of_the_wrong_types_is_refused(
    change: Mapping[str, Json], expected: str
) -> None:
    config: dict[str, Json] = {"current_host": "a", "hosts": ["a"], **change}
    assert expected in "\n".join(problems({}, resource_config=MappingProxyType(config)))


def test_the_usual_interface_is_named_where_the_platform_names_none() -> None:
    assert plan(environment()).env["SM_NETWORK_INTERFACE_NAME"] == "eth0"
    other = Devices(interfaces=("ens5", "lo"))
    assert plan(environment(devices=other)).env["SM_NETWORK_INTERFACE_NAME"] == ""


@pytest.mark.parametrize(
    ("hyperparameter", "region", "default", "expected"),
    [("h", "a", "d", "h"), ("", "a", "d", "a"), ("", "", "d", "d"), ("", "", "", "")],
)
def test_the_region_is_the_jobs_else_the_platforms(
    hyperparameter: str, region: str, default: str, expected: str
) -> None:
    host_variables = {"AWS_REGION": region, "AWS_DEFAULT_REGION": default}
    job_environment = environment({"sagemaker_region": hyperparameter}, variables=host_variables)
    assert plan(job_environment).env["SAGEMAKER_REGION"] == expected


@pytest.mark.parametrize("depth", [NESTING_LIMIT + 1, 100_000])
def test_json_that_is_nested_too_deep_is_a_value_error_and_no_crash(depth: int) -> None:
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        decode("[" * depth + "]" * depth)
    assert decode("[" * NESTING_LIMIT + "]" * NESTING_LIMIT)


def test_a_machine_without_the_platforms_directory_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RefusalError) as refused:
        make_job(
            read_environment(
                {"SAGEMAKER_BASE_DIR": str(tmp_path / "absent"), "PATH": "/usr/bin:/bin"}
            )
        )
    first = str(refused.value.problems[0])
    assert "directory not found" in first
    assert (
        "set SAGEMAKER_BASE_DIR to a directory with code/ and input/config/; see: train --help"
        in first
    )


def test_a_byte_order_mark_does_not_make_a_file_unreadable(tmp_path: Path) -> None:
    write_inputs(tmp_path, "", {"epochs": 3}, {})
    path = tmp_path / "input/config/hyperparameters.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    job_environment = read_environment(
        {"SAGEMAKER_BASE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    )
    assert (job_environment.problems, job_environment.hyperparameters["epochs"]) == ((), 3)
