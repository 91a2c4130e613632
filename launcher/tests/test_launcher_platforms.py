"""Platforms: from environment variables to the job's hosts, by table.

Real schedulers have tests of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from launcher_support import NO_GPU, REPOSITORY, environment, plan

from trainworks_launcher.command import cli
from trainworks_launcher.contract.json_values import texts
from trainworks_launcher.environment import platforms
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.environment.environment import read_environment
from trainworks_launcher.environment.platforms import Description, Sources, common
from trainworks_launcher.job.job import JobRefusedError, make_job
from trainworks_launcher.plan.plan import NodePlan

SLURM_NODE = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "fn[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "fn2",
}
SLURM_TASK = {
    **SLURM_NODE,
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
HOSTS = {"TRAINWORKS_HOSTS": "a,b,c", "TRAINWORKS_HOST": "b"}


def described(variables: Mapping[str, str], hostname: str = "box") -> Description:
    return platforms.describe(Sources(variables, hostname=hostname))


@pytest.mark.parametrize(
    ("variables", "restarts"),
    [
        ({}, 0),
        ({**SLURM_NODE, "SLURM_RESTART_COUNT": "2"}, 2),
        ({**SLURM_NODE, **HOSTS, "SLURM_RESTART_COUNT": "2"}, 2),
        # A job of one node has no other variable of AWS Batch than every job of it has.
        ({"AWS_BATCH_JOB_ID": "1a-2b", "AWS_BATCH_JOB_ATTEMPT": "3"}, 2),
        ({**HOSTS, "AWS_BATCH_JOB_ATTEMPT": "1"}, 0),
    ],
)
def test_restarts_are_the_schedulers_whatever_names_the_hosts(
    variables: Mapping[str, str], restarts: int
) -> None:
    assert described(variables).restarts == restarts


def planned(variables: Mapping[str, str], mode: str = "", **changes: object) -> NodePlan:
    """The plan of ``train [--mode MODE]`` on a host with these variables, as
    ``read_environment`` puts it together.
    """
    description = described(variables)
    assert not description.problems
    invocation = Invocation(("train.py", "--lr", "1e-3"), mode)
    job_environment = environment(
        dict(invocation.hyperparameters),
        variables={"PATH": "/usr/bin:/bin", **variables},
        resource_config=description.resource_config,
        platform=description,
        invocation=invocation,
        hostname="box",
    )
    return plan(job_environment._replace(**changes))  # type: ignore[arg-type]


# --- recognition ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variables", "config", "platform", "words"),
    [
        ({}, {}, "", "the job is this one host"),
        ({"SLURM_CONF": "/etc/slurm.conf"}, {}, "", "this one host"),
        (
            {},
            {"hosts": ["algo-1"], "current_host": "algo-1"},
            "sagemaker",
            "there is a resource config",
        ),
        (HOSTS, {}, "hosts", "TRAINWORKS_HOSTS is set"),
        (SLURM_NODE, {}, "slurm", "SLURM_JOB_ID is set"),
        (
            {**SLURM_NODE, **HOSTS},
            {},
            "hosts",
            "SLURM_JOB_ID alone would mean platform 'slurm', which counts after it",
        ),
        (
            SLURM_NODE,
            {"hosts": ["algo-1"], "current_host": "algo-1"},
            "sagemaker",
            "SLURM_JOB_ID alone would mean platform 'slurm'",
        ),
    ],
)
def test_platform_is_recognised(
    variables: dict[str, str], config: dict[str, object], platform: str, words: str
) -> None:
    description = platforms.describe(Sources(variables, config))  # type: ignore[arg-type]
    assert description.platform == platform
    assert words in description.why
    assert description.problems == ()


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "0",
                "PET_MASTER_ADDR": "job-node-0-0.job",
                "PET_MASTER_PORT": "29500",
            },
            "PET_NNODES is set",
        ),
        ({**SLURM_NODE, "SLURM_JOB_NUM_NODES": "2"}, "SLURM_JOB_ID is set"),
        ({"MASTER_ADDR": "a", "NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is set"),
    ],
)
def test_the_variables_of_one_platform_name_no_second_one(
    variables: dict[str, str], why: str
) -> None:
    description = platforms.describe(Sources(variables, hostname="job-node-0-0"))
    assert description.why.partition(";")[0] == why
    assert "would mean" not in description.why


def test_only_the_file_of_a_recognised_platform_is_loaded() -> None:
    import subprocess
    import sys

    from launcher_support import LAUNCHER

    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from trainworks_launcher.environment.environment import read_environment\n"
        "read_environment({'PATH': '/usr/bin'})\n"
        "print(*(name for name in sys.modules if"
        " name.startswith('trainworks_launcher.environment.platforms.')))"
    )
    words = [sys.executable, "-IS", "-c", program, str(LAUNCHER)]
    assert subprocess.run(words, capture_output=True, check=True, text=True).stdout.split() == []


# --- hosts ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variables", "hostname", "hosts", "host"),
    [
        (HOSTS, "box", ("a", "b", "c"), "b"),
        ({"TRAINWORKS_HOSTS": "a, b"}, "b", ("a", "b"), "b"),
        (
            {"TRAINWORKS_HOSTS": "10.0.0.1,10.0.0.2", "TRAINWORKS_HOST": "10.0.0.2"},
            "",
            ("10.0.0.1", "10.0.0.2"),
            "10.0.0.2",
        ),
        (SLURM_NODE, "box", ("fn1", "fn2"), "fn2"),
        (SLURM_TASK, "box", ("fn1", "fn2"), "fn2"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "fn9"},
            "box",
            ("fn9",),
            "fn9",
        ),
    ],
)
def test_hosts_of_a_platform(
    variables: dict[str, str], hostname: str, hosts: tuple[str, ...], host: str
) -> None:
    description = described(variables, hostname)
    assert description.problems == ()
    assert texts(description.resource_config["hosts"]) == hosts
    assert description.resource_config["current_host"] == host


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"TRAINWORKS_HOSTS": "a,b"}, ["TRAINWORKS_HOST is not set"]),
        ({"TRAINWORKS_HOST": "a"}, ["TRAINWORKS_HOSTS is not set"]),
        (
            {"TRAINWORKS_HOSTS": "node-1,node-2", "TRAINWORKS_HOST": "node1"},
            ["'node1'", "did you mean 'node-1'?"],
        ),
        (
            without(SLURM_NODE, "SLURM_NODEID", "SLURM_STEP_NODELIST"),
            ["SLURM_STEP_NODELIST, SLURM_NODEID are not set", "srun --ntasks-per-node=1"],
        ),
        (
            {
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_PROCID": "0",
                "SLURM_NODEID": "0",
            },
            [
                "SLURM_STEP_ID",
                "SLURM_STEP_NODELIST",
                "SLURM_STEP_NUM_NODES",
                "SLURM_STEP_TASKS_PER_NODE",
                "SLURM_LOCALID",
            ],
        ),
        ({**SLURM_NODE, "SLURM_STEP_NODELIST": "fn[1-3]"}, ["names 3 node(s)", "the step has 2"]),
        ({**SLURM_NODE, "SLURM_STEP_NODELIST": "fn[a-b]"}, ["'fn[a-b]' is not a list of nodes"]),
        (
            {**SLURM_NODE, "SLURM_NODEID": "x"},
            ["'x' is not a whole number of at least 0", "SLURM_NODEID"],
        ),
        ({**SLURM_NODE, "SLURM_NODEID": "2"}, ["task 0 of node 2"]),
        ({**SLURM_NODE, "SLURM_PROCID": "2"}, ["task 2 of 2"]),
        (
            {**SLURM_NODE, "SLURM_STEP_TASKS_PER_NODE": "many"},
            ["'many' is not a list of tasks per node"],
        ),
    ],
)
def test_incomplete_platform_is_refused_with_all_that_is_missing(
    variables: dict[str, str], words: list[str]
) -> None:
    description = described(variables)
    shown = "\n".join(map(str, description.problems))
    assert [word for word in words if word not in shown] == []
    job_environment = environment(
        resource_config=description.resource_config,
        platform=description,
        problems=description.problems,
    )
    with pytest.raises(JobRefusedError) as refused:
        make_job(job_environment)
    assert refused.value.status == 64


# --- Slurm ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("one", ["one"]),
        ("fn[1-3]", ["fn1", "fn2", "fn3"]),
        ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
        ("gpu[008-010,020]", ["gpu008", "gpu009", "gpu010", "gpu020"]),
        ("a,b[2,4],c", ["a", "b2", "b4", "c"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("x[1-2].dc", ["x1.dc", "x2.dc"]),
    ],
)
def test_node_list(listed: str, hosts: list[str]) -> None:
    assert list(common.expand_nodes(listed)) == hosts


@pytest.mark.parametrize(
    "listed",
    [
        "",
        ",",
        "fn[",
        "fn]1",
        "fn[]",
        "fn[3-1]",
        "fn[1-2-3]",
        "fn[a]",
        "n[0-99999]",
        "n[0-999]m[0-999]",
    ],
)
def test_what_is_not_a_node_list(listed: str) -> None:
    with pytest.raises(ValueError, match="node"):
        common.expand_nodes(listed)


def test_leader_of_a_slurm_job_is_its_first_node_and_ports_follow_from_the_job() -> None:
    node_plan = planned(SLURM_NODE, "torch_distributed")
    assert node_plan.platform == "slurm"
    assert node_plan.control is not None
    assert (node_plan.control.leader, node_plan.control.hosts, node_plan.role) == (
        "fn1",
        ("fn1", "fn2"),
        "worker",
    )
    assert {"--nnodes=2", "--master-addr=fn1", "--node-rank=1"} <= set(node_plan.argv)
    assert node_plan.argv[-3:] == ("train.py", "--lr", "1e-3")
    other = described({**SLURM_NODE, "SLURM_JOB_ID": "4712"})
    ports = {
        node_plan.control.port,
        int(node_plan.env["MASTER_PORT"]),
        other.control_port,
        other.master_port,
    }
    assert len(ports) == 4
    assert all(61000 <= port <= 65535 for port in ports)


def test_each_task_of_slurm_is_a_rank() -> None:
    node_plan = planned(SLURM_TASK, "torch_distributed")
    assert node_plan.argv == ("/usr/bin/python", "train.py", "--lr", "1e-3")
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "SM_CURRENT_HOST",
    )
    assert [node_plan.env[name] for name in names] == ["3", "1", "4", "2", "1", "fn1", "fn2"]
    assert node_plan.env["SM_HOSTS"] == '["fn1","fn2"]'
    assert node_plan.control is not None
    assert node_plan.control.hosts == ("task 0", "task 1", "task 2", "task 3")
    assert (node_plan.member, node_plan.rank, node_plan.control.address) == ("task 3", 3, "fn1")


def test_a_task_that_sees_one_gpu_is_warned() -> None:
    """srun --gpus-per-task=1: LOCAL_RANK 1 is then not the number of a GPU."""
    assert "sees 1 GPU(s)" in planned(SLURM_TASK, devices=NO_GPU._replace(gpus=1)).warnings[-1]
    assert not any(
        "GPU" in warning
        for warning in planned(SLURM_TASK, devices=NO_GPU._replace(gpus=2)).warnings
    )


def test_plan_of_another_node_is_that_of_its_first_task() -> None:
    description = described(SLURM_TASK)
    job_environment = environment(
        resource_config=description.resource_config, platform=description, hostname="fn2"
    )
    assert (
        plan(job_environment, "fn1").member,
        plan(job_environment, "fn1").env["RANK"],
        plan(job_environment).env["RANK"],
    ) == (
        "task 0",
        "0",
        "3",
    )


def test_tasks_of_one_node_have_a_control_channel() -> None:
    step_variables = {
        "SLURM_STEP_NODELIST": "fn1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4",
        "SLURM_NODEID": "0",
    }
    node_plan = planned({**SLURM_TASK, **step_variables, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert node_plan.control is not None
    assert (node_plan.role, node_plan.member, node_plan.env["MASTER_ADDR"]) == (
        "leader",
        "task 0",
        "127.0.0.1",
    )


def test_mpi_does_not_see_slurm_and_needs_one_task_per_node() -> None:
    assert planned(SLURM_NODE, "mpi").hidden == ("SLURM_", "PMI_", "PMIX_")
    assert planned(SLURM_NODE, "torch_distributed").hidden == ()
    with pytest.raises(
        JobRefusedError, match="mpi starts the ranks itself, and slurm starts several on each host"
    ):
        planned(SLURM_TASK, "mpi")


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,MIG-2,-1,3"}, 2),
    ],
)
def test_gpus_that_slurm_gives(variables: dict[str, str], gpus: int | None) -> None:
    assert described({**SLURM_NODE, **variables}).gpus == gpus


# --- command line ---------------------------------------------------------------------------------
def test_program_of_the_command_line_needs_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "requirements.txt").write_text("torch\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "trainworks_launcher.contract.names.BASE_DIRECTORY", str(tmp_path / "absent")
    )
    node_plan = plan(
        read_environment({"PATH": "/usr/bin:/bin"}, Invocation(("train.py", "--lr", "1e-3")))
    )
    assert node_plan.argv[1:] == ("train.py", "--lr", "1e-3")
    assert node_plan.cwd == str(tmp_path)
    assert node_plan.env["SM_MODEL_DIR"] == f"{tmp_path}/model"
    assert node_plan.requirements == ()


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (("-m", "pkg.train", "-x"), ("-m", "pkg.train", "-x")),
        (("./run.sh", "a b"), ("./run.sh", "a b")),
        (("tool",), ("./tool",)),
        (("true", "--help"), ("/true", "--help")),
        (("sub/train.py",), ("sub/train.py",)),
    ],
)
def test_programs_of_the_command_line(
    words: tuple[str, ...], argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("run.sh", "tool", "sub/train.py"):
        (tmp_path / name).touch()
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    node_plan = plan(
        read_environment(
            {"PATH": "/usr/bin:/bin", "SAGEMAKER_BASE_DIR": str(tmp_path)}, Invocation(words)
        )
    )
    assert " ".join(node_plan.argv).endswith(" ".join(argv))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "trian.py"], "did you mean 'train.py'?"),
        (["--", "-m", "a b"], "'a b' is not the name of a Python module"),
        (["--", "data.txt"], "'data.txt' is not executable"),
        (["--"], "no program after '--'"),
        (["--mode", "torch", "--", "train.py"], "did you mean"),
        (
            ["--mode=mpi", "--processes-per-host", "0", "--", "train.py"],
            "'0' is not a whole number of at least 1",
        ),
        (["train", "train.py"], "to start a program, write: train -- train.py"),
    ],
)
def test_wrong_command_lines(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "data.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    assert cli.main(words) == 64
    assert message in "".join(capfd.readouterr())


def test_the_table_of_platforms_has_their_order_and_their_pages() -> None:
    table = (
        (REPOSITORY / "docs/platforms/index.md")
        .read_text("utf-8")
        .partition("| platform |")[2]
        .partition("\n\n")[0]
    )
    rows = []
    for line in table.splitlines()[2:]:
        cells = line.split("|")[1:-1]
        rows.append([cell.strip() for cell in cells])
    listed = [row[0].strip("`") for row in rows]
    assert listed == list(platforms.PLATFORMS), "in the order in which they count"
    for row in rows:
        page = row[-1].rpartition("(")[2].rstrip(")")
        assert (REPOSITORY / "docs/platforms" / page).is_file(), row


def test_plan_names_the_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for name, value in {**HOSTS, "SAGEMAKER_BASE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["--plan", "--mode", "none", "--", "train.py", "--help", "--", "-h"]) == 0
    shown = capsys.readouterr().out
    assert '"platform": "hosts"' in shown
    assert "TRAINWORKS_HOSTS is set" in shown
    assert '"--help"' in shown


def test_processes_per_host_of_the_command_line() -> None:
    invocation = Invocation(("train.py",), "torch_distributed", 3)
    node_plan = plan(
        environment(dict(invocation.hyperparameters), invocation=invocation, devices=NO_GPU)
    )
    assert "--nproc-per-node=3" in node_plan.argv
    assert any("option --processes-per-host" in reason.why for reason in node_plan.why)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TRAINWORKS_HANGS", "TRAINWORKS_HANG"),
        ("TRAINWORKS_MAX_RESTART", "TRAINWORKS_MAX_RESTARTS"),
        ("TRAINWORKS_HANG_LIMIT", "TRAINWORKS_HANG_LIMIT_SECONDS"),
        ("TRAINWORKS_HANG", ""),
        ("TRAINWORKS_RUNTIME_DIRECTORY", ""),
        ("TRAINWORKS_OF_MY_OWN_COMPANY", ""),
        ("TRAINWORKS_PUBLIC_SCRIPTS", ""),
        ("TRAINWORK_HANG", ""),
    ],
)
def test_a_misspelt_variable_of_the_launcher_is_told(tmp_path: Path, name: str, meant: str) -> None:
    warnings = read_environment(
        {name: "fail", "SAGEMAKER_BASE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    ).warnings
    message = f"{name} is none of the launcher's variables; did you mean {meant}?"
    assert [warning for warning in warnings if name in warning] == ([message] if meant else [])
