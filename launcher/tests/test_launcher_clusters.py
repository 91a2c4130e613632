"""Kubernetes' operators, AWS Batch, dstack and SkyPilot: from the variables
that they set to the plan, by table.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from launcher_support import NO_GPU, environment, plan

from trainworks_launcher.contract.json_values import texts
from trainworks_launcher.environment import platforms
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.environment.environment import Devices
from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.job.job import JobRefusedError
from trainworks_launcher.plan.plan import NodePlan

TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "{index}",
    "PET_MASTER_ADDR": "pi-node-0-0.pi",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "{index}",
}
"""kubeflow/trainer at 2026-08-21: pkg/runtime/framework/plugins/torch/torch.go, EnforceMLPolicy.

The last is set by Kubernetes, for a JobSet is made of Indexed Jobs.
"""

PYTORCH_JOB = {
    "PYTHONUNBUFFERED": "1",
    "MASTER_PORT": "23456",
    "PET_MASTER_PORT": "23456",
    "MASTER_ADDR": "pi-master-0",
    "PET_MASTER_ADDR": "pi-master-0",
    "WORLD_SIZE": "2",
    "RANK": "{index}",
    "PET_NODE_RANK": "{index}",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NNODES": "2",
}
"""kubeflow/training-operator, release-1.9: pkg/controller.v1/pytorch/envvar.go,
setPodEnv, and master.go.
"""

ELASTIC = {
    "PYTHONUNBUFFERED": "1",
    "PET_RDZV_ENDPOINT": "pi-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "2:2",
    "PET_NPROC_PER_NODE": "1",
}
"""The same with an elasticPolicy and no master: elastic.go, Generate.

A pod's host name is its own name.
"""

BATCH = {
    "AWS_BATCH_JOB_ID": "11111111-2222-3333-4444-555555555555#{index}",
    "AWS_BATCH_JOB_ATTEMPT": "1",
    "AWS_BATCH_JOB_NUM_NODES": "2",
    "AWS_BATCH_JOB_NODE_INDEX": "{index}",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "{others}",
}
"""AWS Batch user guide, mnp-env-vars.html: the address is not set on the main node."""

DSTACK = {
    "DSTACK_RUN_NAME": "pi",
    "DSTACK_NODES_IPS": "10.77.0.1\n10.77.0.2",
    "DSTACK_MASTER_NODE_IP": "10.77.0.1",
    "DSTACK_NODE_RANK": "{index}",
    "DSTACK_NODES_NUM": "2",
    "DSTACK_GPUS_PER_NODE": "0",
    "DSTACK_GPUS_NUM": "0",
}
"""dstackai/dstack, runner/internal/executor/executor.go, execJob."""

SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.77.0.1\n10.77.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "{index}",
    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
    "SKYPILOT_TASK_ID": "sky-2026-11-22-00-00-00-000000_pi_1",
}
"""docs.skypilot.co, running-jobs/environment-variables."""

INDEXED = {"JOB_COMPLETION_INDEX": "{index}", "TRAINWORKS_HOSTS": "pi-[0-1].pi"}
"""Kubernetes sets the first; docs/platforms/jobset.md has the second."""

MPI_JOB = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "OMPI_MCA_orte_set_default_slots": "4",
    "NVIDIA_VISIBLE_DEVICES": "",
    "NVIDIA_DRIVER_CAPABILITIES": "",
}
"""kubeflow/mpi-operator, mpi_job_controller.go: launcherEnvVars, ompiEnvVars, openMPISlotsEnv,
nvidiaDisableEnvVars.
"""

HOSTFILE = "pi-worker-0.pi.default.svc slots=4\npi-worker-1.pi.default.svc slots=4\n"
"""The same, newConfigMap."""


def of_host(platform: Mapping[str, str], index: int, main: str = "10.0.0.1") -> dict[str, str]:
    """The variables of one host. main: address of the main node."""
    others = main if index else ""
    filled = {name: value.format(index=index, others=others) for name, value in platform.items()}
    return {
        name: value for name, value in filled.items() if value or not platform[name].startswith("{")
    }


def described(
    platform: Mapping[str, str], index: int = 1, hostname: str = "box", hostfile: str = HOSTFILE
) -> Description:
    return platforms.describe(
        Sources(
            of_host(platform, index),
            hostname=hostname,
            read=lambda _: hostfile,
            address=lambda: "10.0.0.1",
        )
    )


@pytest.mark.parametrize(
    ("platform", "name", "hosts", "address"),
    [
        (TRAIN_JOB, "kubeflow", ("pi-node-0-0.pi", "pi-node-0-1.pi"), "pi-node-0-0.pi"),
        (PYTORCH_JOB, "kubeflow", ("pi-master-0", "pi-worker-0"), "pi-master-0"),
        (ELASTIC, "kubeflow", ("pi-worker-0", "pi-worker-1"), "pi-worker-0"),
        ({**TRAIN_JOB, "PET_MASTER_ADDR": "leader"}, "kubeflow", ("node-0", "node-1"), "leader"),
        (BATCH, "batch", ("node-0", "node-1"), "10.0.0.1"),
        (DSTACK, "dstack", ("10.77.0.1", "10.77.0.2"), ""),
        (SKYPILOT, "skypilot", ("10.77.0.1", "10.77.0.2"), ""),
        (INDEXED, "hosts", ("pi-0.pi", "pi-1.pi"), ""),
    ],
)
def test_every_host_of_a_platform_says_the_same(
    platform: dict[str, str], name: str, hosts: tuple[str, ...], address: str
) -> None:
    for index in (0, 1):
        description = described(platform, index, hostname=f"pi-worker-{index}")
        assert description.problems == ()
        assert description.platform == name
        assert texts(description.resource_config["hosts"]) == hosts
        assert (description.resource_config["current_host"], description.leader_address) == (
            hosts[index],
            address,
        )


def test_the_main_node_of_aws_batch_is_the_leader_whatever_its_index() -> None:
    moved = {**BATCH, "AWS_BATCH_JOB_NUM_NODES": "3", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1"}
    main = platforms.describe(Sources(of_host(moved, 1), address=lambda: "10.0.0.9"))
    other = described({**moved, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.9"}, 2)
    assert (
        texts(main.resource_config["hosts"])
        == texts(other.resource_config["hosts"])
        == ("node-1", "node-0", "node-2")
    )
    assert main.leader_address == other.leader_address == "10.0.0.9"


def test_an_mpi_jobs_launcher_starts_ranks_on_hosts_that_serve_ssh() -> None:
    node_plan = planned_here(MPI_JOB)
    assert (node_plan.platform, node_plan.mode, node_plan.role, node_plan.control) == (
        "mpi_operator",
        "mpi",
        "alone",
        None,
    )
    line = " ".join(node_plan.argv)
    assert "--host pi-worker-0.pi.default.svc:4,pi-worker-1.pi.default.svc:4 -np 8 " in line
    assert "--prtemca prte_keep_fqdn_hostnames true" in line
    assert "--prtemca prte_keep_fqdn_hostnames 1" in " ".join(
        planned_here(TRAIN_JOB, "mpi", index=0).argv
    )
    assert "rank.py --size 8 -- " in line
    assert " -x SM_MODEL_DIR " in line
    assert " -x SM_CURRENT_HOST " not in line
    assert node_plan.shell is not None
    assert set(node_plan.hidden) < set(MPI_JOB)


@pytest.mark.parametrize("platform", [TRAIN_JOB, PYTORCH_JOB])
def test_kubeflows_torch_jobs_are_torchruns_without_its_variables(platform: dict[str, str]) -> None:
    node_plan = planned_here(platform)
    leader = platform["PET_MASTER_ADDR"]
    port = platform["PET_MASTER_PORT"]
    assert node_plan.mode == "torch_distributed"
    expected_words = {
        "--nnodes=2",
        "--node-rank=1",
        f"--master-addr={leader}",
        f"--master-port={port}",
        "--nproc-per-node=1",
    }
    assert expected_words <= set(node_plan.argv)
    assert node_plan.hidden == ("PET_",)
    assert (node_plan.env["MASTER_ADDR"], node_plan.env["MASTER_PORT"]) == (leader, port)
    assert planned_here(platform, "none").argv == ("/usr/bin/python", "train.py")


@pytest.mark.parametrize(
    ("message", "devices", "expected_processes"),
    [
        ("auto", NO_GPU, 1),
        ("auto", Devices(gpus=4), 4),
        ("gpu", Devices(gpus=4), 4),
        ("2", Devices(gpus=4), 2),
        ("3", NO_GPU, 3),
    ],
)
def test_processes_of_a_pod(message: str, devices: Devices, expected_processes: int) -> None:
    node_plan = planned_here({**TRAIN_JOB, "PET_NPROC_PER_NODE": message}, devices=devices)
    assert f"--nproc-per-node={expected_processes}" in node_plan.argv


@pytest.mark.parametrize("platform", [TRAIN_JOB, BATCH, DSTACK, SKYPILOT])
def test_one_host_is_a_job_of_one_host(platform: dict[str, str]) -> None:
    count = next(name for name in platform if name.endswith(("NNODES", "NUM_NODES", "NODES_NUM")))
    one_host = {**platform, count: "1"}
    for name in ("DSTACK_NODES_IPS", "DSTACK_MASTER_NODE_IP", "SKYPILOT_NODE_IPS"):
        if name in one_host:
            one_host[name] = ""  # not every backend gives an only node an address
    node_plan = planned_here(one_host, "torch_distributed", index=0)
    assert (node_plan.control, "--master-addr=127.0.0.1" in node_plan.argv) == (None, True)


def test_hosts_without_an_address_are_not_told_to_programs_that_need_one() -> None:
    node_plan = planned_here(BATCH, "torch_distributed")
    assert "--master-addr=10.0.0.1" in node_plan.argv
    assert node_plan.control is not None
    assert (node_plan.control.leader, node_plan.control.address) == ("node-0", "10.0.0.1")
    with pytest.raises(
        JobRefusedError,
        match="parameter_server tells each host the others' names, and batch does not",
    ):
        planned_here(BATCH, "parameter_server")
    with pytest.raises(JobRefusedError, match="restarts need the hosts' names"):
        planned_here({**BATCH, "TRAINWORKS_MAX_RESTARTS": "1"}, "torch_distributed")


@pytest.mark.parametrize("mode", ["torch_distributed", "none", "parameter_server"])
def test_an_mpi_job_can_only_be_started_by_mpirun(mode: str) -> None:
    with pytest.raises(
        JobRefusedError, match=f"{mode} needs a launcher on every host, and mpi_operator has one"
    ):
        planned_here(MPI_JOB, mode)


def test_hangs_are_not_looked_for_where_no_launcher_sees_the_ranks() -> None:
    node_plan = planned_here(MPI_JOB)
    assert (node_plan.limits.hang, node_plan.warnings) == (0, ())
    plan_with_hang = planned_here({**MPI_JOB, "TRAINWORKS_HANG": "fail"})
    assert (plan_with_hang.limits.hang, len(plan_with_hang.warnings)) == (0, 1)
    assert planned_here(TRAIN_JOB).limits.hang > 0


def test_a_launcher_that_is_a_worker_too_is_one_of_the_hosts() -> None:
    """RunLauncherAsWorker of MPIJob, and TrainJob's usual runtime."""
    both = "pi-launcher.pi.default.svc slots=4\n" + HOSTFILE
    description = described(MPI_JOB, hostname="pi-launcher", hostfile=both)
    assert description.resource_config["current_host"] == "pi-launcher.pi.default.svc"
    assert len(description.served) == len(texts(description.resource_config["hosts"])) == 3


@pytest.mark.parametrize("platform", [TRAIN_JOB, BATCH, DSTACK, SKYPILOT, MPI_JOB, INDEXED])
def test_what_is_missing_is_named_and_all_at_once(platform: dict[str, str]) -> None:
    """Each variable that matters is needed: without it the job is refused, and
    never started as another one.
    """
    variables = of_host(platform, 1)
    description = described(platform)
    assert description.problems == ()
    ignored = (
        "GPUS",
        "_NPROC_",
        "JOB_ID",
        "ATTEMPT",
        "RUN_NAME",
        "TASK_ID",
        "plm_rsh",
        "keep_fqdn",
        "slots",
        "NVIDIA",
    )
    optional = ("K_MPI_JOB_ROLE", *(("JOB_COMPLETION_INDEX",) if "PET_NNODES" in platform else ()))
    needed = [
        name
        for name in variables
        if name not in optional and not any(word in name for word in ignored)
    ]
    for left_out in needed:
        rest = {name: value for name, value in variables.items() if name != left_out}
        text = "".join(
            str(problem)
            for problem in platforms.describe(Sources(rest, read=lambda _: HOSTFILE)).problems
        )
        expected_name = (
            "TRAINWORKS_HOST is not set" if left_out == "JOB_COMPLETION_INDEX" else left_out
        )
        assert expected_name in text, f"{left_out}: {text}"
    first = needed[0]
    several = (
        platforms.describe(Sources({first: variables[first]})).problems if len(needed) > 2 else ()
    )
    assert [name for name in needed[1:] if several and name not in str(several[0])] == []


@pytest.mark.parametrize(
    ("platform", "changes", "words"),
    [
        (TRAIN_JOB, {"PET_NODE_RANK": "2"}, "'2' is not a whole number from 0 to 1"),
        (TRAIN_JOB, {"PET_NPROC_PER_NODE": "cpu"}, "'cpu' is not a whole number of at least 1"),
        (PYTORCH_JOB, {"PET_NNODES": "1:4"}, "let minReplicas and maxReplicas be the same"),
        (
            ELASTIC,
            {"PET_MAX_RESTARTS": "3"},
            "leave maxRestarts out, and set TRAINWORKS_MAX_RESTARTS=3",
        ),
        (DSTACK, {"DSTACK_NODES_NUM": "3"}, "2 address(es) for 3 node(s)"),
        (
            MPI_JOB,
            {"K_MPI_JOB_ROLE": "worker"},
            "a worker serves ssh, and the launcher pod starts the job",
        ),
        (INDEXED, {"JOB_COMPLETION_INDEX": "2"}, "'2' is not a whole number from 0 to 1"),
        (INDEXED, {"TRAINWORKS_HOSTS": "pi-[0-].pi"}, "is not a list of nodes"),
        ({"JOB_COMPLETION_INDEX": "0"}, {}, "set TRAINWORKS_HOSTS in the manifest"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    platform: dict[str, str], changes: dict[str, str], words: str
) -> None:
    description = described({**platform, **changes}, hostname="pi-worker-1")
    assert words in "\n".join(map(str, description.problems))


def test_a_pod_of_an_indexed_job_may_be_a_job_of_its_own() -> None:
    """The hint of a refusal, followed: its index says nothing about the job."""
    indexed = {"JOB_COMPLETION_INDEX": "1"}
    refused = "\n".join(map(str, described(indexed, hostname="sweep-1").problems))
    assert "set TRAINWORKS_HOSTS and TRAINWORKS_HOST to the pod's own name" in refused
    own_name = {"TRAINWORKS_HOSTS": "sweep-1", "TRAINWORKS_HOST": "sweep-1"}
    description = described({**indexed, **own_name}, hostname="sweep-1")
    assert not description.problems
    assert description.resource_config["hosts"] == ["sweep-1"]


@pytest.mark.parametrize("digits", [20, 5000])
@pytest.mark.parametrize(
    "platform",
    [
        {"MASTER_ADDR": "m0", "WORLD_SIZE": "", "RANK": "1"},
        {"MASTER_ADDR": "m0", "NNODES": "", "NODE_RANK": "0"},
        {"LWS_LEADER_ADDRESS": "a-0.a", "LWS_GROUP_SIZE": "", "LWS_WORKER_INDEX": "1"},
        {**SKYPILOT, "SKYPILOT_NUM_NODES": ""},
        {**TRAIN_JOB, "PET_NNODES": ""},
        {**BATCH, "AWS_BATCH_JOB_NUM_NODES": ""},
    ],
)
def test_no_job_has_so_many_hosts(platform: dict[str, str], digits: int) -> None:
    """Refuse the number alone: no list of hosts is made, and no consequence is told beside it."""
    count = next(name for name, value in platform.items() if not value)
    problems = list(map(str, described({**platform, count: "9" * digits}).problems))
    assert [
        problem for problem in problems if "that a job can have" in problem and count in problem
    ]
    assert not [problem for problem in problems if " from 0 to 0" in problem]
    assert max(map(len, problems)) < 1000


@pytest.mark.parametrize(
    "address", ["tcp://10.0.0.1:29500", "10.0.0.1:29500", "m0:23456", "http://m0", "10.0.0.300"]
)
def test_the_leaders_address_is_a_host_alone(address: str) -> None:
    variables = {"MASTER_ADDR": address, "WORLD_SIZE": "2", "RANK": "1"}
    assert f"{address!r} is not the name or address of a host alone" in str(
        described(variables).problems[0]
    )
    assert described({**variables, "MASTER_ADDR": "fd00::1"}).problems == ()


@pytest.mark.parametrize(
    "variables",
    [
        {"MASTER_ADDR": "[fd00::1]", "WORLD_SIZE": "2", "RANK": "1"},
        {"TRAINWORKS_HOSTS": "[fd00::1],[fd00::2]", "TRAINWORKS_HOST": "[fd00::2]"},
        {"TRAINWORKS_HOSTS": "[fd00::1]:1 fd00::2", "TRAINWORKS_HOST": "[fd00::2]:1"},
        {
            "PET_NNODES": "2",
            "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "[fd00::1]",
            "PET_MASTER_PORT": "29400",
        },
        {"PET_NNODES": "2:2", "PET_RDZV_ENDPOINT": "[fd00::1]:29400", "HOSTNAME": "x-worker-1"},
        {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": "1",
            "SKYPILOT_NODE_IPS": "[fd00::1]\n[fd00::2]",
        },
        {
            "CLUSTER_SPEC": (
                '{{"cluster": {{"workerpool0": ["[fd00::1]:2222"], "workerpool1": ["fd00::2"]}},'
                ' "task": {{"type": "workerpool1", "index": 0}}}}'
            )
        },
    ],
)
def test_an_ipv6_address_may_stand_in_brackets(variables: dict[str, str]) -> None:
    description = described(variables, hostname="x-worker-1")
    assert description.problems == ()
    hosts = description.resource_config["hosts"]
    assert isinstance(hosts, list)
    assert (description.leader_address or hosts[0]) == "fd00::1"
    assert (
        description.leader_address
        or hosts[1] == description.resource_config["current_host"] == "fd00::2"
    )


@pytest.mark.parametrize(
    ("hostfile", "words"),
    [
        ("", "has no host, or cannot be read"),
        ("# nothing\n", "has no host"),
        (
            "a slots=4\nb slots=2\n",
            "each host needs the same number of slots: a slots=4, b slots=2",
        ),
    ],
)
def test_a_hostfile_that_cannot_be_used(hostfile: str, words: str) -> None:
    assert words in str(described(MPI_JOB, hostfile=hostfile).problems[0])


def test_hosts_without_slots_get_the_operators_number() -> None:
    assert described(MPI_JOB, hostfile="a\nb\n").processes_per_host == 4


def planned_here(
    platform: Mapping[str, str], mode: str = "", *, index: int = 1, devices: Devices = NO_GPU
) -> NodePlan:
    """The plan of ``train [--mode MODE] -- train.py`` on a host."""
    description = described(platform, index)
    assert description.problems == ()
    invocation = Invocation(("train.py",), mode)
    job_environment = environment(
        dict(invocation.hyperparameters),
        variables={"PATH": "/usr/bin:/bin", **of_host(platform, index)},
        resource_config=description.resource_config,
        platform=description,
        invocation=invocation,
        hostname="box",
        devices=devices,
    )
    return plan(job_environment)
