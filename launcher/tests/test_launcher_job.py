"""Test the way from the environment to a job: accepted values, refused values, and that all
problems are told at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from launcher_support import environment, manifest_document, plan, write_inputs

from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.modes import SWITCHES
from trainworks_launcher.environment.entry_point import (
    Code,
    EntryPoint,
    parse_entry_point,
    program_words,
)
from trainworks_launcher.environment.environment import Devices, read_environment
from trainworks_launcher.environment.manifest import parse_manifest
from trainworks_launcher.job.job import make_job

MPI = "sagemaker_mpi_enabled"
TORCH = "sagemaker_torch_distributed_enabled"
PER_HOST = "sagemaker_mpi_num_of_processes_per_host"
EIGHT = Devices(gpus=8, cpus=96, interfaces=("eth0", "lo"))


def refusal(hyperparameters: Mapping[str, Json], **changes: object) -> str:
    with pytest.raises(RefusalError) as refused:
        plan(environment(hyperparameters, **changes))  # type: ignore[arg-type]
    assert refused.value.status == 64
    return str(refused.value)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    write_inputs(
        tmp_path,
        "",
        {"sagemaker_program": "tran.py", MPI: "true", TORCH: "true", PER_HOST: "none"},
        {"hosts": ["algo-1", "algo-1", "al go"], "current_host": "algo-3"},
    )
    (tmp_path / "input/config/inputdataconfig.json").write_text("{", encoding="utf-8")
    (tmp_path / "bin").mkdir()
    for program in ("mpirun", "sshd"):
        (tmp_path / "bin" / program).touch(mode=0o755)
    variables = {
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "TRAINWORKS_IMAGE_MANIFEST": str(tmp_path / "absent.json"),
        "TRAINWORKS_CONTROL_PORT": "none",
        "TRAINWORKS_STOP_GRACE_SECONDS": "-1",
    }
    with pytest.raises(RefusalError) as refused:
        make_job(read_environment(variables))
    text = str(refused.value)
    expected = (
        "inputdataconfig.json",
        "TRAINWORKS_IMAGE_MANIFEST",
        "did you mean 'train.py'?",
        "'algo-1' is listed more than once",
        "'al go' is not a host name",
        "'algo-3' is not one of the job's hosts",
        "did you mean 'algo-1'?",
        "mpi and torch_distributed are both switched on",
        "'none' is not a count",
        "'none' is not a TCP port",
        "'-1' is not a number of seconds",
    )
    assert [words for words in expected if words not in text] == []
    assert len(refused.value.problems) == 10


def test_switches_that_are_off_change_nothing() -> None:
    off: dict[str, Json] = dict.fromkeys(SWITCHES, "false")
    assert make_job(environment({**off, "mp_parameters": {}})).placement.mode == "none"


def test_an_unknown_switch_is_not_ignored() -> None:
    text = refusal({"sagemaker_torch_distribute_enabled": True})
    assert "did you mean 'sagemaker_torch_distributed_enabled'?" in text


@pytest.mark.parametrize(
    ("processes", "gpus", "expected"),
    [(None, 0, 1), (None, 8, 8), (2, 0, 2), (2, 8, 2), ("2", 8, 2), (8, 8, 8)],
)
def test_processes_per_host(processes: Json, gpus: int, expected: int) -> None:
    job_environment = environment({TORCH: True, PER_HOST: processes}, devices=Devices(gpus=gpus))
    assert make_job(job_environment).placement.processes_per_host == expected


def test_more_processes_than_gpus_are_refused() -> None:
    assert "give at most 4: one process per GPU" in refusal(
        {MPI: True, PER_HOST: 8}, devices=Devices(gpus=4)
    )


def test_more_processes_than_fit_are_refused() -> None:
    text = refusal(
        {MPI: True, PER_HOST: 2, "sagemaker_mpi_num_processes": 5}, hosts=("a", "b"), host="a"
    )
    assert "5 processes do not fit on 2 host(s) with 2 each" in text


def test_a_missing_program_is_refused_and_named() -> None:
    text = refusal({TORCH: True}, programs=MappingProxyType({"python": "/usr/bin/python3"}))
    assert "torchrun is not installed" in text
    assert "image 'made-up', which declares it at /usr/bin/torchrun" in text


def test_a_job_of_several_hosts_needs_mpirun_and_no_ssh() -> None:
    text = refusal(
        {MPI: True},
        hosts=("a", "b"),
        host="a",
        programs=MappingProxyType({"python": "/usr/bin/python3"}),
    )
    assert "mpirun is not installed" in text
    assert "ssh" not in text  # the launchers start mpirun's daemons


@pytest.mark.parametrize(
    ("program", "kind", "name"),
    [
        ("train.py", "script", "train.py"),
        ("deep/train.py", "script", "deep/train.py"),
        ("run.sh", "shell", "run.sh"),
        ("tool", "command", "tool"),
        ("-m package.module", "module", "package.module"),
    ],
)
def test_kinds_of_entry_points(program: str, kind: str, name: str) -> None:
    assert (parse_entry_point(program).kind, parse_entry_point(program).name) == (kind, name)


@pytest.mark.parametrize(
    "program", ["../train.py", "/train.py", "-c", "a b.py", "a//b.py", "./x.py", "-m a;b", "x$y.py"]
)
def test_names_that_could_leave_the_code_are_refused(program: str) -> None:
    with pytest.raises(ValueError, match=r"is not|starts with|has"):
        parse_entry_point(program)


def test_argv_of_each_kind() -> None:
    assert plan(environment({"x": 1})).argv == ("/usr/bin/python", "train.py", "-x", "1")
    assert plan(environment({"sagemaker_program": "run.sh"})).argv == ("/usr/bin/bash", "run.sh")
    assert plan(environment({"sagemaker_program": "tool"})).argv == ("./tool",)
    assert plan(environment({"sagemaker_program": "-m a.b"})).argv == (
        "/usr/bin/python",
        "-m",
        "a.b",
    )
    executable = Code("/opt/ml/code", entries=("run.sh",), executable=("run.sh",))
    assert plan(environment({"sagemaker_program": "run.sh"}, code=executable)).argv == ("./run.sh",)


def test_a_program_that_begins_with_the_folder_is_started_as_it_is_written() -> None:
    code = Code("/opt/ml/code", entries=("./run.sh",), executable=("./run.sh",))
    words = program_words(EntryPoint("shell", "./run.sh"), code, "python3", "sh")
    assert words == ("./run.sh",)


def test_a_command_has_to_be_executable() -> None:
    code = Code("/opt/ml/code", entries=("tool",))
    assert "make it executable (chmod +x)" in refusal({"sagemaker_program": "tool"}, code=code)


def test_no_entry_point_offers_what_is_there() -> None:
    assert "set it to one of: train.py" in refusal({"sagemaker_program": ""})


def test_the_variable_wins_over_the_hyperparameter() -> None:
    job_environment = environment(
        {"sagemaker_program": "absent.py"}, variables={"SAGEMAKER_PROGRAM": "train.py"}
    )
    assert make_job(job_environment).program.entry.name == "train.py"


def test_the_submit_directory_is_honoured(tmp_path: Path) -> None:
    write_inputs(tmp_path, "", {}, {})
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.py").write_text("", encoding="utf-8")
    variables = {
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "SAGEMAKER_SUBMIT_DIRECTORY": str(other),
        "PATH": "/usr/bin:/bin",
    }
    node_plan = plan(read_environment(variables))
    assert node_plan.cwd == str(other)
    assert node_plan.env["SM_MODULE_DIR"] == str(other)
    assert node_plan.env["PYTHONPATH"].split(":")[0] == str(other)


def test_a_missing_interface_is_replaced_and_said() -> None:
    devices = Devices(interfaces=("eth0", "lo"), reaching="eth0")
    node_plan = plan(
        environment({MPI: True}, hosts=("a", "b"), host="a", interface="ethwe", devices=devices)
    )
    assert node_plan.env["NCCL_SOCKET_IFNAME"] == "eth0"
    assert node_plan.env["SM_NETWORK_INTERFACE_NAME"] == "eth0"
    assert (
        "the network interface 'ethwe' does not exist on this host;"
        " using 'eth0', which routes to the leader" in node_plan.warnings
    )


def test_no_resource_config_is_one_host() -> None:
    job = make_job(environment(host="laptop"))
    assert (job.placement.hosts, job.placement.host, job.placement.leader) == (
        ("laptop",),
        "laptop",
        "laptop",
    )


def test_exported_variables_have_their_compatible_text_forms() -> None:
    job_environment = environment(
        {"batch-size": 64, "name": "x y", "nothing": None, "flag": True, "sagemaker_job_name": "j"},
        hosts=("algo-1", "algo-2"),
        host="algo-2",
        input_data_config=MappingProxyType({"train": {}, "test": {}}),
    )
    env = plan(job_environment).env
    expected = {
        "SM_HPS": '{"batch-size":64,"flag":true,"name":"x y","nothing":null}',
        "SM_HP_BATCH-SIZE": "64",
        "SM_HP_NAME": "x y",
        "SM_HP_NOTHING": "",
        "SM_HP_FLAG": "true",
        "SM_USER_ARGS": '["--batch-size","64","--flag","True","--name","x y","--nothing",""]',
        "SM_HOSTS": '["algo-1","algo-2"]',
        "SM_CURRENT_HOST": "algo-2",
        "SM_CHANNELS": '["test","train"]',
        "SM_CHANNEL_TRAIN": "/opt/ml/input/data/train",
        "SM_MODEL_DIR": "/opt/ml/model",
        "SM_MODULE_NAME": "train",
        "SM_MODULE_DIR": "/opt/ml/code",
        "SM_USER_ENTRY_POINT": "train.py",
        "SM_NUM_GPUS": "0",
        "SM_NUM_CPUS": "4",
        "SM_LOG_LEVEL": "20",
        "SM_FRAMEWORK_PARAMS": "{}",
        "MASTER_ADDR": "algo-1",
        "MASTER_PORT": "7777",
        "SAGEMAKER_JOB_NAME": "j",
    }
    assert {name: env[name] for name in expected} == expected
    assert json.loads(env["SM_TRAINING_ENV"])["is_master"] is False
    assert json.loads(env["SM_TRAINING_ENV"])["hyperparameters"]["batch-size"] == 64


def test_the_hostname_shim_is_preloaded_only_where_names_differ() -> None:
    same = plan(environment(hosts=("algo-1", "algo-2"))).env
    assert "LD_PRELOAD" not in same
    other = plan(
        environment(
            hosts=("algo-1", "algo-2"), hostname="aws", variables={"LD_PRELOAD": "/lib/mine.so"}
        )
    ).env
    assert other["LD_PRELOAD"] == "/opt/trainworks/lib/libhostname.so:/lib/mine.so"
    assert other["TRAINWORKS_HOSTNAME"] == "algo-1"
    absent = plan(environment(hosts=("algo-1", "algo-2"), hostname="aws", hostname_shim="")).env
    assert "LD_PRELOAD" not in absent


def test_one_host_needs_no_name_that_resolves() -> None:
    node_plan = plan(environment({MPI: True}, hosts=("algo-1",), hostname="f00d"))
    assert node_plan.env["MASTER_ADDR"] == "127.0.0.1"
    assert node_plan.env["SM_CURRENT_HOST"] == "algo-1"
    assert "LD_PRELOAD" not in node_plan.env
    assert node_plan.argv[node_plan.argv.index("--host") + 1] == "localhost:1"


def test_a_value_in_the_container_is_the_users() -> None:
    env = plan(
        environment(
            hosts=("a", "b"), host="a", variables={"NCCL_DEBUG": "TRACE", "PYTHONUNBUFFERED": ""}
        )
    ).env
    assert "NCCL_DEBUG" not in env
    assert "PYTHONUNBUFFERED" not in env


def test_another_schema_of_the_manifest_is_a_clear_error() -> None:
    with pytest.raises(RefusalError, match="has schema 2, this launcher reads schema 1"):
        parse_manifest(json.dumps(manifest_document() | {"schema": 2}), "image.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "1"}'])
def test_a_broken_manifest_is_refused(text: str) -> None:
    with pytest.raises(RefusalError, match=r"image\.json"):
        parse_manifest(text, "image.json")


@pytest.mark.parametrize(
    ("kind", "families", "warned"),
    [
        ("ml.faster.xlarge", ["ml.m5"], True),
        ("ml.fast.xlarge", ["ml.m5"], False),
        ("ml.m5.xlarge", ["ml.m5"], False),
        ("local", ["ml.m5"], False),
        ("ml.faster.xlarge", [], False),
    ],
    ids=["newer", "known", "family", "not the platform's", "an image that does not say"],
)
def test_a_type_that_the_image_does_not_know_is_a_warning(
    kind: str, families: list[Json], warned: bool
) -> None:
    """Let the devices decide: eight GPUs are eight ranks, and no mode is refused."""
    table = parse_manifest(json.dumps(manifest_document(families=families)), "made-up")
    job_environment = environment(
        {TORCH: True}, hosts=("a", "b"), host="a", instance_type=kind, devices=EIGHT
    )
    job = plan(job_environment._replace(manifest=table))
    assert "--nproc-per-node=8" in job.argv
    matching_warnings = [
        warning for warning in job.warnings if "is not in the instance table" in warning
    ]
    assert [f"the instance type {kind} " in warning for warning in matching_warnings] == [
        True
    ] * warned


def test_unknown_keys_of_the_manifest_are_ignored() -> None:
    parsed = parse_manifest(json.dumps(manifest_document() | {"later": {"x": 1}}), "image.json")
    assert parsed.components["open-mpi"] == "5.0.11"
    assert parsed.instances["ml.fast.xlarge"].efa_rdma


def test_a_file_of_hyperparameters_that_cannot_be_read_is_one_problem(tmp_path: Path) -> None:
    """The script may be named in it, so a missing name is not a second problem."""
    write_inputs(tmp_path, "", {}, {})
    variables = {"SAGEMAKER_BASE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for document, reason in (
        (f'{{"n": {"1" * 5000}}}', "a whole number has too many digits"),
        ("{", "line 1 column 2"),
    ):
        (tmp_path / "input/config/hyperparameters.json").write_text(document, encoding="utf-8")
        with pytest.raises(RefusalError) as refused:
            make_job(read_environment(variables))
        (problem,) = refused.value.problems
        assert reason in problem.what
        assert "sys." not in str(problem)
    (tmp_path / "input/config/hyperparameters.json").unlink()
    os.mkfifo(tmp_path / "input/config/hyperparameters.json")
    with pytest.raises(RefusalError, match="is not a file"):
        make_job(read_environment(variables))
