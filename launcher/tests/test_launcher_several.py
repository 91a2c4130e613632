"""Variable sets of public schedulers that the launcher knows by their kind alone.

None is silently one host.

Each set says where it is documented. A set of pairs and lists that is not of a distributed job
stays one host, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from trainworks_launcher.contract.json_values import texts
from trainworks_launcher.environment import platforms
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.environment.environment import read_environment
from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.job.job import make_job

FILE = "vm-0.c.project.internal\nvm-1.c.project.internal\n"

TAKEN: dict[str, tuple[dict[str, str], str, int]] = {
    # kubeflow/training-operator, pkg/controller.v1/jax/envvar.go
    "JAXJob": (
        {
            "NUM_PROCESSES": "2",
            "PROCESS_ID": "1",
            "COORDINATOR_ADDRESS": "j-worker-0",
            "COORDINATOR_PORT": "6666",
        },
        "j-worker-0",
        1,
    ),
    # kubeflow/trainer, pkg/runtime/framework/plugins/jax
    "TrainJob for JAX": (
        {
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": "0",
            "JAX_COORDINATOR_ADDRESS": "j-node-0-0.j:6666",
        },
        "j-node-0-0.j",
        0,
    ),
    # docs.baseten.co, training, multinode
    "Baseten": (
        {"BT_GROUP_SIZE": "2", "BT_NODE_RANK": "1", "BT_LEADER_ADDR": "10.0.0.2"},
        "10.0.0.2",
        1,
    ),
    # beaker-docs.apps.allenai.org, distributed training
    "Beaker": (
        {
            "BEAKER_REPLICA_COUNT": "2",
            "BEAKER_REPLICA_RANK": "1",
            "BEAKER_LEADER_REPLICA_HOSTNAME": "l1",
        },
        "l1",
        1,
    ),
    # cloud.google.com/tpu, TPU environment variables
    "Cloud TPU": ({"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}, "", 1),
    # volcengine.com, machine learning platform, environment variables of a custom task
    "Volcengine": (
        {"MLP_WORKER_NUM": "2", "MLP_ROLE_INDEX": "1", "MLP_WORKER_ALL_HOSTS": "10.0.0.2,10.0.0.3"},
        "",
        1,
    ),
    "an unknown maker": (
        {"ACME_NNODES": "3", "ACME_NODEID": "2", "ACME_MASTER_IP": "10.0.0.2"},
        "10.0.0.2",
        2,
    ),
    "an unknown list": ({"ACME_NODE_IPS": "10.0.0.2 10.0.0.3", "ACME_NODE_INDEX": "0"}, "", 0),
}

REFUSED: dict[str, tuple[dict[str, str], str]] = {
    # docs.snowflake.com, Snowpark Container Services, run multiple replicas of a job service
    "Snowflake": (
        {"SNOWFLAKE_JOBS_COUNT": "2", "SNOWFLAKE_JOB_INDEX": "0", "SNOWFLAKE_SERVICE_NAME": "J"},
        "NNODES=2 and NODE_RANK=$SNOWFLAKE_JOB_INDEX",
    ),
    # learn.microsoft.com, Batch compute node environment variables
    "Azure Batch": (
        {
            "AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5",
            "AZ_BATCH_NODE_LIST": "10.0.0.4;10.0.0.5",
            "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
            "AZ_BATCH_IS_CURRENT_NODE_MASTER": "true",
        },
        "TRAINWORKS_HOSTS=10.0.0.4,10.0.0.5",
    ),
    # cloud.google.com/batch, TaskGroup, without requireHostsFile
    "Google Batch": (
        {"BATCH_TASK_COUNT": "2", "BATCH_TASK_INDEX": "0", "BATCH_JOB_UID": "j"},
        "BATCH_TASK_INDEX",
    ),
    # Tencent Cloud, Batch compute, environment variables
    "Tencent Batch": (
        {"BATCH_TASK_INSTANCE_NUM": "2", "BATCH_TASK_INSTANCE_INDEX": "0", "BATCH_TASK_NAME": "t"},
        "NNODES=2",
    ),
    # htcondor.readthedocs.io, parallel applications
    "HTCondor": ({"_CONDOR_NPROCS": "2", "_CONDOR_PROCNO": "1"}, "TRAINWORKS_HOSTS"),
    # IBM Job Step Manager, jsrun
    "jsrun": ({"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1"}, "NODE_RANK"),
    # intelligent-machine-learning/dlrover, elasticjob
    "DLRover": (
        {"NODE_NUM": "2", "NODE_ID": "0", "NODE_RANK": "0", "WORKER_NUM": "2", "WORKER_RANK": "0"},
        "TRAINWORKS_HOSTS",
    ),
    # flux-environment(7)
    "Flux on two nodes": (
        {
            "FLUX_JOB_NNODES": "2",
            "FLUX_JOB_SIZE": "2",
            "FLUX_TASK_RANK": "1",
            "FLUX_TASK_LOCAL_ID": "0",
        },
        "the job has 2 nodes",
    ),
    # docs.lepton.ai, batch jobs
    "Lepton": (
        {"LEPTON_JOB_TOTAL_WORKERS": "2", "LEPTON_JOB_WORKER_INDEX": "0"},
        "TRAINWORKS_HOSTS",
    ),
    # docs.metaflow.org, distributed training on Kubernetes, a worker
    "Metaflow": ({"MF_WORLD_SIZE": "2", "MF_WORKER_REPLICA_INDEX": "0"}, "TRAINWORKS_HOSTS"),
    # openpai.readthedocs.io, environment variables of a task role
    "OpenPAI": (
        {"PAI_CURRENT_TASK_ROLE_TASK_COUNT": "2", "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX": "0"},
        "NNODES=2",
    ),
    # polyaxon.com, distributed jobs
    "Polyaxon": ({"POLYAXON_REPLICA_COUNT": "2", "POLYAXON_REPLICA_INDEX": "0"}, "NNODES=2"),
    "a file of two hosts": ({"ACME_HOSTFILE": "/etc/acme/hosts"}, "TRAINWORKS_HOSTS=vm-0"),
    "a manifest's typing error": (
        {"MASTER_ADDR": "$(MASTER_ADDR)", "WORLD_SIZE": "2", "RANK": "0"},
        "'$(MASTER_ADDR)' is not the name or address of a host",
    ),
    "braces": (
        {"MASTER_ADDR": "${MASTER}", "NNODES": "2", "NODE_RANK": "0"},
        "is not the name or address",
    ),
    "white space": (
        {"MASTER_ADDR": "a b", "NNODES": "2", "NODE_RANK": "0"},
        "is not the name or address",
    ),
    "processes or hosts": (
        {"MASTER_ADDR": "10.0.0.2", "WORLD_SIZE": "16", "NPROC_PER_NODE": "8", "RANK": "0"},
        "set NNODES to the number of hosts (2, or 16)",
    ),
}

ONE = {
    # Each is documented by its maker: arrays, shards, devices, services, a person's own settings.
    "Slurm array": {
        "SLURM_JOB_ID": "4713",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_ARRAY_TASK_COUNT": "10",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURMD_NODENAME": "q-1",
    },
    "AWS Batch array": {"AWS_BATCH_JOB_ARRAY_SIZE": "10", "AWS_BATCH_JOB_ARRAY_INDEX": "3"},
    "PBS array": {"PBS_JOBID": "5[3].srv", "PBS_ARRAY_INDEX": "3", "PBS_NUM_NODES": "1"},
    "LSF array": {
        "LSB_JOBID": "5",
        "LSB_JOBINDEX": "3",
        "LSB_JOBINDEX_END": "9",
        "LSB_MCPU_HOSTS": "n01 8",
    },
    "Grid Engine array": {
        "SGE_TASK_ID": "3",
        "SGE_TASK_LAST": "9",
        "SGE_TASK_STEPSIZE": "1",
        "NHOSTS": "1",
    },
    "Cloud Run": {"CLOUD_RUN_TASK_COUNT": "3", "CLOUD_RUN_TASK_INDEX": "1", "CLOUD_RUN_JOB": "j"},
    "GitLab": {"CI_NODE_TOTAL": "4", "CI_NODE_INDEX": "2", "CI_JOB_ID": "7"},
    "CircleCI": {"CIRCLE_NODE_TOTAL": "4", "CIRCLE_NODE_INDEX": "2"},
    "Buildkite": {"BUILDKITE_PARALLEL_JOB_COUNT": "4", "BUILDKITE_PARALLEL_JOB": "2"},
    "pytest-xdist": {"PYTEST_XDIST_WORKER_COUNT": "4", "PYTEST_XDIST_WORKER": "gw1"},
    "Bazel": {"TEST_TOTAL_SHARDS": "4", "TEST_SHARD_INDEX": "1"},
    "devices": {
        "GPU_COUNT": "8",
        "GPU_INDEX": "1",
        "NVIDIA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "8",
    },
    "groups": {"VLLM_DP_SIZE": "2", "VLLM_DP_RANK": "0", "TP_SIZE": "8", "TP_RANK": "1"},
    "a loader": {"NUM_WORKERS": "8", "DATALOADER_NUM_WORKERS": "8"},
    "a sweep": {
        "NUM_TRIALS": "8",
        "TRIAL_ID": "2",
        "BATCH_SIZE": "32",
        "BATCH_INDEX": "1",
        "N_FOLDS": "5",
    },
    "services": {
        "KAFKA_HOSTS": "a,b",
        "ETCD_ENDPOINTS": "a:2379,b:2379",
        "NO_PROXY": "localhost,10.0.0.0/8,a",
        "ALLOWED_HOSTS": "a,b",
        "REDIS_NODES": "a b",
        "KNOWN_HOSTS_FILE": "/root/.ssh/known_hosts",
        "HOSTS_FILE": "/etc/hosts",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_PORT_443_TCP_ADDR": "10.96.0.1",
        "REDIS_PORT": "tcp://10.0.0.1:6379",
    },
    "JAXJob of one": {"NUM_PROCESSES": "1", "PROCESS_ID": "0", "COORDINATOR_ADDRESS": "j-worker-0"},
    "Azure Batch of one": {"AZ_BATCH_HOST_LIST": "10.0.0.4", "AZ_BATCH_NODE_LIST": "10.0.0.4"},
    "Google Batch of one": {"BATCH_TASK_COUNT": "1", "BATCH_TASK_INDEX": "0", "BATCH_JOB_UID": "j"},
    "Flux of one": {
        "FLUX_JOB_NNODES": "1",
        "FLUX_JOB_SIZE": "1",
        "FLUX_TASK_RANK": "0",
        "FLUX_TASK_LOCAL_ID": "0",
    },
    "mpirun of one": {
        "OMPI_COMM_WORLD_SIZE": "1",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    },
    "Semaphore": {"SEMAPHORE_JOB_COUNT": "4", "SEMAPHORE_JOB_INDEX": "1"},
    "Travis": {"TRAVIS_NUM_JOBS": "2", "TRAVIS_JOB_ID": "1"},
    "GitHub": {"GITHUB_RUN_NUMBER": "12", "GITHUB_RUN_ATTEMPT": "1", "GITHUB_JOB": "test"},
    "PyTorchJob's only pod with eight processes": {
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "p-master-0",
        "PET_MASTER_PORT": "23456",
        "MASTER_ADDR": "p-master-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": "8",
        "RANK": "0",
    },
    "a step of one node in a job of two": {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "q-1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    },
}

CONTRADICTS = {
    # kubeflow/training-operator, elastic.go beside envvar.go: an elasticPolicy
    # without counts, and a Master
    "kubeflow and environment": {
        "PET_NNODES": "1:1",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "pj-worker-0:23456",
        "PET_NPROC_PER_NODE": "1",
        "MASTER_ADDR": "pj-master-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": "2",
        "RANK": "1",
    },
    "slurm and counted": {
        "SLURM_JOB_ID": "9",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURMD_NODENAME": "n",
        "NUM_NODES": "2",
    },
    "slurm and environment": {
        "SLURM_JOB_ID": "9",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURMD_NODENAME": "n",
        "MASTER_ADDR": "m",
        "NNODES": "2",
        "NODE_RANK": "0",
    },
    "environment and lsf": {"NNODES": "1", "LSB_JOBID": "5", "LSB_MCPU_HOSTS": "h1 8 h2 8"},
    "counted and several": {"NUM_NODES": "1", "ACME_TASK_COUNT": "2", "ACME_TASK_INDEX": "0"},
    "leader_worker_set and several": {
        "LWS_GROUP_SIZE": "1",
        "LWS_WORKER_INDEX": "0",
        "ACME_HOST_LIST": "a,b",
    },
}


def described(variables: Mapping[str, str], hostname: str = "box", file: str = FILE) -> Description:
    return platforms.describe(
        Sources(variables, hostname=hostname, read=lambda path: file if path else "")
    )


@pytest.mark.parametrize("name", TAKEN)
def test_hosts_are_taken_where_the_addresses_are_there(name: str) -> None:
    variables, leader, index = TAKEN[name]
    description = described(variables)
    assert description.problems == ()
    hosts = texts(description.resource_config["hosts"])
    assert len(hosts) > 1
    assert description.resource_config["current_host"] == hosts[index]
    assert description.leader_address == leader


@pytest.mark.parametrize("name", REFUSED)
def test_a_scheduler_without_addresses_is_refused_with_one_way_out(name: str) -> None:
    variables, words = REFUSED[name]
    problems = described(variables).problems
    assert words in "\n".join(map(str, problems))
    assert len(problems) == 1
    for index in ("0", "1"):  # on each of the hosts
        moved = dict(variables)
        for key in variables:
            if key.endswith(("INDEX", "PROCNO")):
                moved[key] = index
        assert described(moved).problems


@pytest.mark.parametrize("name", ONE)
def test_what_only_looks_like_several_hosts_stays_one_without_a_word(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    read = read_environment(
        {"PATH": "/usr/bin:/bin", **ONE[name]}, Invocation(("train.py",), "none")
    )
    assert read.problems == ()
    assert len(make_job(read).placement.hosts) == 1
    lines = [line for line in read.warnings if "this host is planned" in line]
    assert len(lines) == (name == "a step of one node in a job of two"), (
        "the other node may be meant"
    )


@pytest.mark.parametrize("name", CONTRADICTS)
def test_one_host_here_and_more_there_is_refused_with_both_names(name: str) -> None:
    for hostname in ("pj-worker-0", "pj-master-0"):
        (problem,) = described(CONTRADICTS[name], hostname).problems
        for platform in name.split(" and "):
            assert f"{platform} says " in problem.what
    description = described(
        {**CONTRADICTS[name], "TRAINWORKS_HOSTS": "box", "TRAINWORKS_HOST": "box"}
    )
    assert description.problems == (), "a person's word counts"


def test_the_hint_of_an_elastic_job_with_a_master_is_the_one_that_applies() -> None:
    (problem,) = described(CONTRADICTS["kubeflow and environment"], "pj-worker-0").problems
    assert problem.advice.startswith("leave elasticPolicy out")
    assert "TRAINWORKS_HOSTS" not in problem.advice


GOOGLE = {
    "BATCH_TASK_COUNT": "2",
    "BATCH_TASK_INDEX": "0",
    "BATCH_HOSTS_FILE": "/etc/hosts.batch",
    "BATCH_JOB_UID": "j",
}
"""cloud.google.com/batch, TaskGroup with requireHostsFile."""


@pytest.mark.parametrize("index", ["0", "1"])
def test_google_batchs_file_of_hosts_is_read_and_a_host_finds_itself_in_it(index: str) -> None:
    variables = {**GOOGLE, "BATCH_TASK_INDEX": index}
    description = described(variables, "vm-1")
    assert description.problems == ()
    assert description.resource_config == {"hosts": FILE.split(), "current_host": FILE.split()[1]}
    assert described(variables, "stranger").problems
    assert described({**variables, "BATCH_TASK_COUNT": "4"}, "vm-1").problems, (
        "two tasks on each host"
    )
    by_address = Sources(
        variables, hostname="box", read=lambda _: "10.0.0.1\n10.0.0.2\n", address=lambda: "10.0.0.2"
    )
    assert platforms.describe(by_address).resource_config["current_host"] == "10.0.0.2"


def test_tasks_of_flux_on_one_node_are_ranks() -> None:
    variables = {"FLUX_JOB_ID": "f1", "FLUX_JOB_NNODES": "1", "FLUX_JOB_SIZE": "8"}
    description = described({**variables, "FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "3"})
    assert description.problems == ()
    assert description.tasks is not None
    assert (description.tasks.rank, description.tasks.local_rank, description.tasks.counts) == (
        3,
        3,
        (8,),
    )
    for left_out in ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES"):
        rest = {**variables, "FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "3"}
        rest.pop(left_out)
        assert described(rest).problems


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "localhost"},
            "leads every host",
        ),
        (
            {
                "LWS_GROUP_SIZE": "2",
                "LWS_WORKER_INDEX": "1",
                "LWS_LEADER_ADDRESS": "g-0.g",
                "MASTER_ADDR": "127.0.0.1",
            },
            "leads every host",
        ),
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "1",
                "PET_MASTER_ADDR": "$(A)",
                "PET_MASTER_PORT": "1",
            },
            "'$(A)'",
        ),
        ({"AZUREML_NODE_COUNT": "2", "NODE_RANK": "1", "MASTER_ADDR": "{{ip}}"}, "'{{ip}}'"),
    ],
)
def test_a_leader_that_no_other_host_reaches_is_refused_where_there_are_several(
    variables: dict[str, str], words: str
) -> None:
    assert words in "\n".join(map(str, described(variables).problems))


def test_a_bare_world_of_two_on_loopback_is_a_warning() -> None:
    description = described({"MASTER_ADDR": "localhost", "WORLD_SIZE": "2", "RANK": "0"})
    assert description.problems == ()
    assert "waits for the other processes on this host" in description.warnings[0]
    assert not described({"MASTER_ADDR": "localhost", "WORLD_SIZE": "1", "RANK": "0"}).warnings


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"NOMAD_ALLOC_INDEX": "0"}, "NOMAD_ALLOC_INDEX=0"),
        ({"ACME_NODE_RANK": "0"}, "ACME_NODE_RANK=0"),
        ({"PALS_RANKID": "0", "PALS_NODEID": "0"}, "PALS_RANKID=0"),
        ({"MODAL_TASK_ID": "ta-1"}, "MODAL_TASK_ID is set"),
        ({"DET_TASK_TYPE": "TRIAL", "DET_MASTER": "http://m"}, "DET_TASK_TYPE is set"),
    ],
)
def test_the_first_hosts_log_warns_whatever_its_index(
    variables: dict[str, str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    read = read_environment({"PATH": "/usr/bin:/bin", **variables}, Invocation(("train.py",)))
    assert [line for line in read.warnings if line.startswith(named)]
