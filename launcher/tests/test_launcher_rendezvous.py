"""Test that no platform is not one host: variables of others that say that a job has several hosts,
or several ranks.

Each set is either taken as a job of several hosts, or refused with the variables to set. No set
starts as one job for each host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from launcher_support import environment, plan
from test_launcher_clusters import (
    BATCH,
    DSTACK,
    ELASTIC,
    HOSTFILE,
    MPI_JOB,
    PYTORCH_JOB,
    SKYPILOT,
    TRAIN_JOB,
    of_host,
)
from test_launcher_platforms import HOSTS, SLURM_NODE, SLURM_TASK

from trainworks_launcher.command.stand_ins import without_slurm
from trainworks_launcher.contract.json_values import texts
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.environment import platforms
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.environment.environment import read_environment
from trainworks_launcher.environment.platforms import PLATFORMS, Description, Sources
from trainworks_launcher.job.job import JobRefusedError
from trainworks_launcher.plan.plan import NodePlan
from trainworks_launcher.supervise.attribution import outcome_files
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome
from trainworks_launcher.supervise.processes.job_directory import JobDirectory

BY_RANK = {"MASTER_ADDR": "m0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1"}
BY_NODE = {"MASTER_ADDR": "m0", "MASTER_PORT": "23456", "NNODES": "2", "NODE_RANK": "1"}
BOTH = {**BY_RANK, **BY_NODE}
RUN_AI = {**BY_RANK, "NODE_RANK": "1"}
VOLCANO = {
    "VC_WORKER_HOSTS": "j-worker-0.j,j-worker-1.j",
    "VC_WORKER_NUM": "2",
    "VC_TASK_INDEX": "1",
}
VOLCANO_TORCH = {
    "VC_MASTER_HOSTS": "j-master-0.j",
    "VC_MASTER_NUM": "1",
    "VC_WORKER_HOSTS": "j-worker-0.j",
    "VC_WORKER_NUM": "1",
    "VC_TASK_INDEX": "0",
    "VK_TASK_INDEX": "0",
    "MASTER_ADDR": "j-master-0.j",
    "WORLD_SIZE": "2",
    "RANK": "1",
}
LWS = {"LWS_LEADER_ADDRESS": "g-0.g.ns", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
AZURE = {"AZUREML_NODE_COUNT": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.4"}
VERTEX = {
    "CLUSTER_SPEC": json.dumps(
        {
            "cluster": {"workerpool0": ["cmle-0:2222"], "workerpool1": ["cmle-1:2222"]},
            "task": {"type": "workerpool1", "index": 0},
        }
    )
}
LSF = {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "h1 8 h2 8", "LSB_DJOB_NUMPROC": "16"}
PBS = {"PBS_JOBID": "5.srv", "PBS_NODEFILE": "/var/spool/nodes", "PBS_NUM_NODES": "2"}
OAR = {"OAR_JOB_ID": "5", "OAR_NODEFILE": "/var/lib/oar/5"}
KUBERAY = {
    "RAY_CLUSTER_NAME": "c",
    "FQ_RAY_IP": "c-head.ns.svc",
    "KUBERAY_GEN_RAY_START_CMD": "ray start",
}
HETEROGENEOUS = {**SLURM_NODE, "SLURM_HET_SIZE": "2"}
TENSORFLOW = {
    "TF_CONFIG": (
        '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
    )
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
TORCHRUN = {**BY_RANK, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}

TAKEN = {
    "hosts": HOSTS,
    "slurm": SLURM_NODE,
    "slurm tasks": SLURM_TASK,
    "mpi_operator": MPI_JOB,
    "kubeflow": of_host(TRAIN_JOB, 1),
    "kubeflow PyTorchJob": of_host(PYTORCH_JOB, 1),
    "kubeflow elastic": of_host(ELASTIC, 1),
    "batch": of_host(BATCH, 1),
    "dstack": of_host(DSTACK, 1),
    "skypilot": of_host(SKYPILOT, 1),
    "environment by rank": BY_RANK,
    "environment by node": BY_NODE,
    "environment by both": BOTH,
    "environment of Run:ai": RUN_AI,
    "environment of a JobSet": {**BY_NODE, "JOB_COMPLETION_INDEX": "1"},
    "volcano": VOLCANO,
    "volcano with a master": VOLCANO_TORCH,
    "leader_worker_set": LWS,
    "azureml": AZURE,
    "vertex": VERTEX,
}
REFUSED = {
    "lsf": LSF,
    "pbs": PBS,
    "oar": OAR,
    "kuberay": KUBERAY,
    "slurm heterogeneous": HETEROGENEOUS,
}
ELSEWHERE = {
    "mpirun": OPEN_MPI,
    "mpirun in a Slurm job": {**SLURM_NODE, **OPEN_MPI},
    "mpirun in an MPIJob's launcher": {**MPI_JOB, **OPEN_MPI},
    "PMI": {"PMI_SIZE": "2", "PMI_RANK": "1"},
    "Horovod": {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "2"},
    "torchrun": TORCHRUN,
    "TensorFlow": TENSORFLOW,
    "ranks of one host": {**BY_RANK, "MASTER_ADDR": "127.0.0.1"},
    "ranks of two hosts": {**BY_NODE, "WORLD_SIZE": "16", "RANK": "9"},
    "Azure's own ranks": {**AZURE, "WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1"},
}


def described(variables: Mapping[str, str]) -> Description:
    hostname = ""
    if "PET_RDZV_ENDPOINT" in variables:
        hostname = "pi-worker-1"
    elif "VC_MASTER_HOSTS" in variables:
        hostname = "j-worker-0"
    read = HOSTFILE if "OMPI_MCA_orte_default_hostfile" in variables else ""
    sources = Sources(
        variables,
        hostname=hostname or "box",
        read=lambda path: read if path else "",
        address=lambda: "",
    )
    return platforms.describe(sources)


def planned(variables: Mapping[str, str], mode: str) -> NodePlan:
    description = described(variables)
    assert description.problems == ()
    invocation = Invocation(("train.py",), mode)
    return plan(
        environment(
            dict(invocation.hyperparameters),
            variables={"PATH": "/usr/bin:/bin", **variables},
            resource_config=description.resource_config,
            platform=description,
            invocation=invocation,
            hostname="box",
        )
    )


@pytest.mark.parametrize("name", [*TAKEN, *REFUSED, *ELSEWHERE])
def test_one_variable_left_out_or_empty_never_makes_a_job_of_one_host(name: str) -> None:
    """Refuse the rest, or read the same hosts and the same place among them."""
    variables = {**TAKEN, **REFUSED, **ELSEWHERE}[name]
    description = described(variables)
    if name in TAKEN:
        assert description.problems == (), name
        assert len(texts(description.resource_config["hosts"])) > 1
    for left_out in variables:
        rest = {key: value for key, value in variables.items() if key != left_out}
        for changed in (rest, {**rest, left_out: ""}):
            if not rest and changed == rest:
                continue  # nothing at all is one host
            changed_description = described(changed)
            one_of_several = changed_description.ranks_elsewhere != ""
            same = (
                bool(description.resource_config)
                and changed_description.resource_config == description.resource_config
            )
            others = (
                name not in TAKEN
                and len(texts(changed_description.resource_config.get("hosts"))) > 1
            )
            assert changed_description.problems or one_of_several or same or others, (
                f"{name} without {left_out}: {changed_description}"
            )


@pytest.mark.parametrize("variables", [BY_RANK, BY_NODE, BOTH, RUN_AI])
def test_the_environments_own_rendezvous_is_taken_or_kept(variables: dict[str, str]) -> None:
    alone = planned(variables, "none")
    seen = {**variables, **alone.env}
    assert {name: seen[name] for name in variables} == variables, "mode none keeps them all"
    assert alone.control is not None
    assert (alone.role, alone.control.address) == ("worker", "m0")
    node_plan = planned(variables, "torch_distributed")
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=m0", "--master-port=23456"} <= set(
        node_plan.argv
    )
    hidden = planned(variables, "mpi")
    assert set(hidden.hidden_from_ranks) == {"WORLD_SIZE", "RANK"}, "they count hosts"


@pytest.mark.parametrize("name", REFUSED)
def test_a_scheduler_that_does_not_say_enough_is_refused_with_what_to_set(name: str) -> None:
    description = described(REFUSED[name])
    assert description.platform == name.split()[0]
    (problem,) = description.problems
    assert "TRAINWORKS_HOST" in str(problem)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (LSF, "set TRAINWORKS_HOSTS=h1,h2"),
        ({"TRAINWORKS_HOSTS": ""}, "TRAINWORKS_HOSTS is set, but empty"),
        ({"WORLD_SIZE": "", "RANK": "0", "MASTER_ADDR": "m0"}, "WORLD_SIZE is set, but empty"),
        ({"MASTER_ADDR": "m0"}, "WORLD_SIZE, RANK are not set"),
        ({"NNODES": "2"}, "NODE_RANK, MASTER_ADDR are not set"),
        (
            {"WORLD_SIZE": "16", "RANK": "3", "NODE_RANK": "1", "MASTER_ADDR": "m0"},
            "RANK is 3, NODE_RANK is 1",
        ),
        ({**BY_NODE, "WORLD_SIZE": "3"}, "WORLD_SIZE=3 is not a multiple of NNODES=2"),
        ({**BY_RANK, "RANK": "2"}, "'2' is not a whole number from 0 to 1"),
        ({"WORLD_SIZE": "1", "RANK": "1"}, "'1' is not a whole number from 0 to 0"),
        ({**BY_NODE, "MASTER_ADDR": "localhost"}, "leads every host to itself"),
        ({**of_host(TRAIN_JOB, 1), "PET_MASTER_ADDR": "localhost"}, "leads every host to itself"),
        ({"PET_NPROC_PER_NODE": "4"}, "PET_NNODES"),
        ({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.1"}, "AWS_BATCH_JOB_NUM_NODES"),
        ({**VOLCANO, "VC_WORKER_NUM": "3"}, "2 host(s), and the task has 3"),
        ({**VOLCANO, "VC_PS_HOSTS": "j-ps-0.j"}, "may run different programs"),
        ({"CLUSTER_SPEC": "{"}, "is not JSON"),
        (
            {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"], "workerpool3": ["b:1"]}}'},
            "different programs",
        ),
        (HETEROGENEOUS, "a heterogeneous job has 2 components"),
    ],
)
def test_what_contradicts_itself_is_refused(variables: dict[str, str], words: str) -> None:
    assert words in "\n".join(map(str, described(variables).problems))


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        {"MASTER_ADDR": "localhost"},
        {"NNODES": "1"},
        {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "g-0.g.ns"},
        {"AZUREML_NODE_COUNT": "1"},
        {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "h1 8"},
        {"PBS_JOBID": "5.srv", "PBS_NUM_NODES": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'},
    ],
)
def test_one_host_is_one_host(variables: dict[str, str]) -> None:
    node_plan = planned(variables, "torch_distributed")
    assert (node_plan.control, "--master-addr=127.0.0.1" in node_plan.argv) == (None, True)


@pytest.mark.parametrize(("cores", "problems"), [("a\na\n", 0), ("a\na\nb\nb\n", 1), ("", 1)])
def test_a_file_with_a_line_for_each_core_says_the_hosts(cores: str, problems: int) -> None:
    description = platforms.describe(Sources(OAR, hostname="a", read=lambda _: cores))
    assert (description.platform, description.job_id, len(description.problems)) == (
        "oar",
        "5",
        problems,
    )


@pytest.mark.parametrize("name", PLATFORMS["counted"].marks)
def test_a_number_of_several_hosts_is_enough_to_refuse(name: str) -> None:
    # A number for each process.
    number = "32,32" if name == "NEURON_PJRT_PROCESSES_NUM_DEVICES" else "2"
    for value in (number, "", "a,b", "a b"):
        (problem,) = described({name: value}).problems
        assert "set TRAINWORKS_HOSTS=a,b" in problem.advice
    for value in ("1", "localhost"):
        assert planned({name: value}, "torch_distributed").control is None
    assert described({name: number, **BY_NODE}).problems == (), "who says the hosts is heard"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_ranks_that_another_program_started_are_not_started_again(name: str) -> None:
    variables = ELSEWHERE[name]
    node_plan = planned(variables, "none")
    assert node_plan.control is None
    seen = {**variables, **node_plan.env}
    assert seen.get("MASTER_ADDR") == variables.get("MASTER_ADDR"), (
        "never an address of one host beside a world of two"
    )
    for mode in ("torch_distributed", "mpi"):
        with pytest.raises(
            JobRefusedError, match="another program has started this process as one of several"
        ):
            planned(variables, mode)


def test_a_host_that_is_twice_in_a_hostfile_has_all_its_slots() -> None:
    twice = Sources(MPI_JOB, hostname="box", read=lambda _: "a slots=2\na slots=2\nb slots=4\n")
    assert platforms.describe(twice).processes_per_host == 4


# --- Slurm's MPI server ---------------------------------------------------------------------------
PMIX = {
    "PMIX_NAMESPACE": "slurm.pmix.77.0",
    "PMIX_RANK": "0",
    "PMIX_MCA_psec": "munge,native",
    "PMIX_MCA_gds": "ds21,hash",
}
"""Variables that enroot's hook sets where MpiDefault is pmix (conf/hooks/extra/50-slurm-pmi.sh)."""


def test_ranks_of_mpirun_do_not_get_the_plugins_of_slurms_server(tmp_path: Path) -> None:
    node_plan = planned({**SLURM_NODE, **PMIX}, "mpi")
    assert node_plan.hidden_from_ranks == ("PMI_", "PMIX_")
    runtime = JobDirectory({"TMPDIR": str(tmp_path), **SLURM_NODE, **PMIX}, {})
    runtime.write_rank_environment("/", node_plan.hidden_from_ranks)
    rank_environment = json.loads((runtime.path / "environment.json").read_text())["env"]
    runtime.remove()
    assert [name for name in rank_environment if name.startswith("PMI")] == []
    assert rank_environment["SLURM_JOB_ID"] == SLURM_NODE["SLURM_JOB_ID"], (
        "a script may ask for its job"
    )
    tasks = planned({**SLURM_TASK, **PMIX}, "none")
    assert (tasks.hidden, tasks.hidden_from_ranks) == ((), ()), "srun's own ranks need them"


def test_the_images_mpirun_survives_a_slurm_step(tmp_path: Path) -> None:
    step = {**SLURM_NODE, **PMIX, "HOME": "/root", "PATH": str(tmp_path)}
    assert without_slurm(step) == {"HOME": "/root", "PATH": str(tmp_path), "SLURMD_NODENAME": "fn2"}
    (tmp_path / "srun").touch(0o755)
    assert "SLURM_JOB_ID" in without_slurm(step)
    assert "PMIX_MCA_psec" not in without_slurm(step)
    assert without_slurm(PMIX) == PMIX, "a server of another scheduler is its own"


@pytest.mark.parametrize(
    ("script", "more", "warned"),
    [
        ("from mpi4py import MPI\n", {}, True),
        ("if True:\n    import mpi4py\n", {}, True),
        ("import torch  # not mpi4py\n", {}, False),
        ("from mpi4py import MPI\n", PMIX, False),
        (
            "from mpi4py import MPI\n",
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            False,
        ),
    ],
)
def test_an_mpi_program_in_tasks_without_pmi_is_warned(
    script: str, more: dict[str, str], warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ranks.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    tasks = {**SLURM_TASK, "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    read = read_environment({"PATH": "/usr/bin:/bin", **tasks, **more}, Invocation(("ranks.py",)))
    assert any("each of them will be rank 0 of 1" in warning for warning in read.warnings) is warned


# --- variables of unknown makers ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"ACME_NUM_NODES": "2"}, "ACME_NUM_NODES=2: "),
        ({"X_NNODES": "4", "X_HOST_COUNT": "4"}, "X_HOST_COUNT=4, X_NNODES=4: "),
        ({"CLUSTER_WORKERS_TOTAL": "3"}, "CLUSTER_WORKERS_TOTAL=3: "),
        ({"OCI__WORKER_COUNT": "2"}, "OCI__WORKER_COUNT=2: "),
        ({"NUMBER_OF_REPLICAS": "2"}, "NUMBER_OF_REPLICAS=2: "),
        ({"NOMAD_ALLOC_INDEX": "1"}, "NOMAD_ALLOC_INDEX=1: "),
        ({"ACME_NODE_RANK": "3"}, "ACME_NODE_RANK=3: "),
        ({"ACME_NUM_NODES": "1", "NOMAD_ALLOC_INDEX": "0"}, ""),
        ({"ACME_NUM_NODES": "two"}, ""),
        ({"NUM_WORKERS": "8", "DATALOADER_NUM_WORKERS": "8", "OMP_NUM_THREADS": "8"}, ""),
        ({"AWS_BATCH_JOB_ARRAY_SIZE": "10", "AWS_BATCH_JOB_ARRAY_INDEX": "3"}, ""),
        ({"SM_HOST_COUNT": "2"}, ""),
        ({"ACME_NUM_NODES": "2", "TRAINWORKS_HOSTS": "a", "TRAINWORKS_HOST": "a"}, ""),
        ({"ACME_NUM_NODES": "2", "MASTER_ADDR": "m", "NNODES": "2", "NODE_RANK": "0"}, ""),
        ({"ACME_NUM_NODES": "2", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, ""),
    ],
)
def test_one_host_is_planned_where_a_variable_may_say_more_and_the_log_warns(
    variables: dict[str, str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    read = read_environment({"PATH": "/usr/bin:/bin", **variables}, Invocation(("train.py",)))
    warned_parts = [
        line.partition("this host is planned")[0]
        for line in read.warnings
        if "this host is planned" in line
    ]
    assert warned_parts == ([named] if named else [])


@pytest.mark.parametrize("more", [{}, {"MASTER_ADDR": "m", "WORLD_SIZE": "2", "RANK": "0"}])
def test_the_port_variable_of_a_service_named_master_is_no_port(
    more: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    variables = {
        "PATH": "/usr/bin:/bin",
        "MASTER_PORT": "tcp://10.96.0.7:23456",
        "MASTER_SERVICE_HOST": "10.96.0.7",
        **more,
    }
    assert plan(read_environment(variables, Invocation(("train.py",)))).env["MASTER_PORT"] == "7777"


@pytest.mark.parametrize(
    ("address", "port", "expected_port"),
    [("[fd00::1]:29500", "", "29500"), ("[fd00::1]:1", "2", "2"), ("[fd00::1]", "", "7777")],
)
def test_a_leaders_address_with_a_port_says_the_port_of_rank_0(
    address: str, port: str, expected_port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    variables = {
        "PATH": "/usr/bin:/bin",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "RANK": "1",
    }
    node_plan = plan(read_environment(variables, Invocation(("train.py",))))
    assert (node_plan.env["MASTER_ADDR"], node_plan.env["MASTER_PORT"]) == (
        "fd00::1",
        expected_port,
    )


@pytest.mark.parametrize(
    ("variable", "value", "absent"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", False),
        ("GLOO_SOCKET_IFNAME", "ens5", True),
        ("GLOO_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "eth", False),
        ("NCCL_SOCKET_IFNAME", "ib,eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth", True),
        ("NCCL_SOCKET_IFNAME", "ib", True),
        ("NCCL_SOCKET_IFNAME", "^docker", False),
        ("NCCL_SOCKET_IFNAME", "", False),
    ],
)
def test_an_interface_that_is_set_and_does_not_exist_is_said(
    variable: str, value: str, absent: bool
) -> None:
    node_plan = plan(environment(variables={"PATH": "/usr/bin:/bin", variable: value}))
    message = f"{variable}={value}: this host has no such network interface; it has eth0, lo"
    assert (message in node_plan.warnings) is absent


def test_num_nodes_is_read_beside_the_leaders_address() -> None:
    """RunPod's instant clusters, and Lightning AI's multi-machine jobs."""
    variables = {"MASTER_ADDR": "10.65.0.2", "NUM_NODES": "2", "WORLD_SIZE": "16", "NODE_RANK": "1"}
    read = described(variables)
    assert (read.platform, read.problems, read.leader_address) == ("environment", (), "10.65.0.2")
    assert read.resource_config == {"hosts": ["node-0", "node-1"], "current_host": "node-1"}


def test_a_world_that_is_taken_for_hosts_is_said() -> None:
    read = described({"MASTER_ADDR": "m", "WORLD_SIZE": "16", "RANK": "0"})
    assert "WORLD_SIZE=16 is taken for the number of hosts" in read.why
    assert (
        "is taken for" not in described({"MASTER_ADDR": "m", "NNODES": "2", "NODE_RANK": "0"}).why
    )


def test_slurms_variables_without_a_job_are_refused() -> None:
    """Refuse the variables that a batch script hands to ``docker run -e``."""
    read = described({"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "q-[1-2]"})
    assert "SLURM_JOB_ID, SLURM_STEP_ID, SLURM_STEP_NODELIST" in read.problems[0].what
    assert described({"SLURM_CONF": "/etc/slurm.conf"}).platform == "", "a login node has it, too"


def test_hyperpods_agent_brings_its_own_rendezvous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hyperpodrun").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    variables = {"PATH": "/usr/bin:/bin", "NNODES": "2", "JOB_COMPLETION_INDEX": "1"}
    node_plan = plan(
        read_environment(variables, Invocation(("hyperpodrun", "--nnodes=2:2", "train.py")))
    )
    assert (node_plan.platform, node_plan.mode, node_plan.control) == ("hyperpod", "none", None)
    assert node_plan.argv[-3:] == ("./hyperpodrun", "--nnodes=2:2", "train.py")
    refused = read_environment(variables, Invocation(("train.py",)))
    assert refused.problems, "for any other program the hosts are missing"


# --- jobs in one directory ------------------------------------------------------------------------
def test_each_job_of_a_scheduler_has_results_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "trainworks_launcher.contract.names.BASE_DIRECTORY", str(tmp_path / "absent")
    )
    for more, folder in (
        ({}, "4711"),
        ({"SLURM_STEP_ID": "3"}, "4711.3"),
        ({"SLURM_JOB_ID": "4712"}, "4712"),
    ):
        read = read_environment(
            {"PATH": "/usr/bin:/bin", **SLURM_NODE, **more}, Invocation(("train.py",))
        )
        assert read.output == f"{tmp_path}/output/{folder}/output"
        assert plan(read).env["SM_MODEL_DIR"] == f"{tmp_path}/output/{folder}/model"
        assert plan(read).env["SM_OUTPUT_FAILURE"] == f"{tmp_path}/output/{folder}/output/failure"
    named = {"PATH": "/usr/bin:/bin", **SLURM_NODE, "SAGEMAKER_BASE_DIR": str(tmp_path)}
    assert read_environment(named, Invocation(("train.py",))).output == f"{tmp_path}/output"


def test_a_failure_of_another_job_is_not_this_ones(tmp_path: Path) -> None:
    """Two jobs with one directory that a person named."""
    redactor = Redactor({})
    first = Outcome(FAILED, 1, "n-a", "ValueError: cause_of_A")
    outcome_files.write(str(tmp_path), first, redactor)
    assert outcome_files.users_own_failure(str(tmp_path), redactor) == ""
    outcome_files.write(
        str(tmp_path), Outcome(FAILED, 1, "n-b", "ValueError: cause_of_B"), redactor
    )
    assert (tmp_path / "failure").read_text() == "ValueError: cause_of_B\n"
    document = json.loads((tmp_path / "failure.json").read_text())
    assert (document["text"], document["host"]) == ("ValueError: cause_of_B", "n-b")
    (tmp_path / "failure").write_text("the script's own words")
    assert outcome_files.users_own_failure(str(tmp_path), redactor) == "the script's own words"
