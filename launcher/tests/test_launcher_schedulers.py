"""Test sixty variable sets of public schedulers, by their results.

None of several hosts is silently one host.

The sets are those that a process sees, as far as their makers document them;
``test_launcher_several`` and ``test_launcher_clusters`` have more, with the sources.
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

TAKEN: dict[str, dict[str, str]] = {
    "RunPod": {
        "NUM_NODES": "2",
        "NODE_RANK": "1",
        "NODE_ADDR": "10.65.0.3",
        "MASTER_ADDR": "10.65.0.2",
        "MASTER_PORT": "29400",
        "PRIMARY_ADDR": "10.65.0.2",
        "PRIMARY_PORT": "29400",
        "NUM_TRAINERS": "8",
        "WORLD_SIZE": "16",
        "HOST_NODE_ADDR": "10.65.0.2:29400",
    },
    "Lightning": {
        "NUM_NODES": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "10.0.0.2",
        "MASTER_PORT": "1234",
        "WORLD_SIZE": "2",
    },
    "ModelArts": {
        "MA_NUM_HOSTS": "2",
        "MA_NUM_GPUS": "8",
        "VC_WORKER_NUM": "2",
        "VC_TASK_INDEX": "1",
        "VC_WORKER_HOSTS": "w-0.j,w-1.j",
        "MA_VJ_NAME": "j",
        "MA_TASK_NAME": "worker",
    },
    "Paddle": {
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ID": "0",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.2:6170",
        "PADDLE_CURRENT_ENDPOINT": "10.0.0.1:6170",
    },
    "Run:ai with two hosts": {
        "MASTER_ADDR": "j-master-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": "2",
        "RANK": "1",
        "RUNAI_JOB_NAME": "j",
    },
    "Alibaba PAI-DLC": {
        "AIMASTER_ADDR": "x",
        "WORLD_SIZE": "2",
        "RANK": "0",
        "MASTER_ADDR": "dlc-master-0",
        "MASTER_PORT": "23456",
    },
    "XGBoostJob": {
        "MASTER_PORT": "9991",
        "MASTER_ADDR": "x-master-0",
        "WORLD_SIZE": "2",
        "RANK": "0",
        "WORKER_PORT": "9991",
        "WORKER_ADDRS": "x-worker-0",
    },
}
"""Two hosts: the list or the leader is there."""

REFUSED: dict[str, dict[str, str]] = {
    "NGC": {
        "NGC_ARRAY_SIZE": "2",
        "NGC_ARRAY_INDEX": "0",
        "NGC_MASTER_ADDR": "launcher-svc-1",
        "NGC_REPLICA_ID": "0",
        "NGC_ARRAY_TYPE": "PYTORCH",
        "NGC_JOB_ID": "12",
    },
    "SGE": {
        "JOB_ID": "5",
        "NHOSTS": "2",
        "NSLOTS": "16",
        "PE_HOSTFILE": "/var/spool/sge/pe",
        "NQUEUES": "2",
        "SGE_TASK_ID": "undefined",
    },
    "Cobalt": {
        "COBALT_JOBID": "5",
        "COBALT_PARTNAME": "n1,n2",
        "COBALT_NODEFILE": "/var/tmp/cobalt.5",
        "COBALT_JOBSIZE": "2",
    },
    "PBS": {"PBS_JOBID": "5.srv", "PBS_NODEFILE": "/var/spool/nodes", "PBS_NUM_NODES": "2"},
    "PBS Pro": {
        "PBS_JOBID": "5.srv",
        "PBS_NODEFILE": "/var/spool/nodes",
        "PBS_NODENUM": "0",
        "PBS_TASKNUM": "1",
    },
    "LSF": {
        "LSB_JOBID": "5",
        "LSB_HOSTS": "h1 h2",
        "LSB_DJOB_HOSTFILE": "/x",
        "LSB_DJOB_NUMPROC": "2",
    },
    "Fujitsu": {
        "PJM_JOBID": "5",
        "PJM_NODE": "2",
        "PJM_MPI_PROC": "8",
        "PJM_NODE_X": "2",
        "PJM_O_NODEINF": "/var/opt/FJSVtcs/ple/x",
    },
    "Tencent Taiji": {
        "HOST_NUM": "2",
        "HOST_GPU_NUM": "8",
        "INDEX": "0",
        "CHIEF_IP": "10.0.0.1",
        "LOCAL_IP": "10.0.0.1",
        "NODE_IP_LIST": "10.0.0.1:8,10.0.0.2:8",
        "NODE_NUM": "2",
    },
    "LoadLeveler": {
        "LOADL_PROCESSOR_LIST": "h1 h2",
        "LOADL_TOTAL_TASKS": "2",
        "LOADL_STEP_ID": "x.1.0",
    },
    "TonY": {
        "JOB_NAME": "worker",
        "TASK_INDEX": "0",
        "TASK_NUM": "2",
        "CLUSTER_SPEC": '{"worker":["a:1","b:2"]}',
    },
    "MXNet": {
        "DMLC_ROLE": "worker",
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "2",
        "DMLC_WORKER_ID": "0",
        "DMLC_PS_ROOT_URI": "10.0.0.1",
    },
    "XGBoost": {
        "DMLC_TASK_ID": "1",
        "DMLC_NUM_WORKER": "2",
        "DMLC_TRACKER_URI": "10.0.0.1",
        "DMLC_TRACKER_PORT": "9091",
    },
    "Megascale": {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "0",
        "MEGASCALE_COORDINATOR_ADDRESS": "j-0.j",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
    },
    "Neuron": {
        "NEURON_PJRT_PROCESSES_NUM_DEVICES": "32,32",
        "NEURON_PJRT_PROCESS_INDEX": "0",
        "NEURON_RT_ROOT_COMM_ID": "10.0.0.1:46820",
    },
    "OCI": {"NODE_COUNT": "2", "NODE_RANK": "1"},
    "Lepton": {
        "LEPTON_JOB_TOTAL_WORKERS": "2",
        "LEPTON_JOB_WORKER_INDEX": "0",
        "LEPTON_JOB_WORKER_PREFIX": "j-worker",
        "LEPTON_SUBDOMAIN": "s",
    },
    "Slurm without a step": {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n-[1-2]",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
    },
    "ClearML": {
        "CLEARML_TASK_ID": "x",
        "NODE_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    },
    "Google Batch without a file": {
        "BATCH_TASK_COUNT": "2",
        "BATCH_TASK_INDEX": "1",
        "BATCH_NODE_INDEX": "1",
        "BATCH_JOB_ID": "j",
    },
    "Alibaba Batch": {
        "BATCH_COMPUTE_DAG_INSTANCE_COUNT": "2",
        "BATCH_COMPUTE_DAG_INSTANCE_ID": "0",
        "BATCH_COMPUTE_OSS_HOST": "x",
    },
    "Ray Train": {"RAY_TRAIN_WORLD_SIZE": "2", "RAY_TRAIN_WORLD_RANK": "0"},
    "Azure Batch AI": {
        "AZ_BATCHAI_WORKER_HOSTS": "10.0.0.4:2222,10.0.0.5:2222",
        "AZ_BATCHAI_TASK_INDEX": "0",
    },
    "JAX on TPUs": {
        "CLOUD_TPU_TASK_ID": "1",
        "TPU_PROCESS_ADDRESSES": "10.0.0.1:8476,10.0.0.2:8476",
        "TPU_PROCESS_BOUNDS": "1,2,1",
    },
}
"""Several hosts, and not which ones: the refusal names the variables to set."""

RANKS: dict[str, dict[str, str]] = {
    "a rank of mpirun on Fugaku": {
        "PJM_JOBID": "5",
        "PJM_NODE": "2",
        "PMIX_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "PLE_RANK_ON_NODE": "0",
    },
    "Horovod": {
        "HOROVOD_SIZE": "2",
        "HOROVOD_RANK": "0",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
    },
    "ALPS": {"ALPS_APP_PE": "1", "ALPS_APP_ID": "5", "ALPS_APP_DEPTH": "8"},
    "MVAPICH": {
        "MV2_COMM_WORLD_SIZE": "2",
        "MV2_COMM_WORLD_RANK": "1",
        "MV2_COMM_WORLD_LOCAL_RANK": "0",
    },
    "PMI": {"PMI_SIZE": "2", "PMI_RANK": "1"},
    "hydra": {
        "PMI_SIZE": "2",
        "PMI_RANK": "1",
        "MPI_LOCALNRANKS": "1",
        "MPI_LOCALRANKID": "0",
        "PMI_FD": "9",
    },
    "PMIx": {"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"},
    "Azure ML by mpirun": {
        "AZUREML_NODE_COUNT": "2",
        "AZ_BATCHAI_NUM_GPUS": "8",
        "AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
    },
}
"""One of several ranks that another program has started."""

ONE: dict[str, dict[str, str]] = {
    "Databricks": {
        "DB_IS_DRIVER": "TRUE",
        "DB_CLUSTER_ID": "x",
        "DB_DRIVER_IP": "10.0.0.1",
        "SPARK_LOCAL_IP": "10.0.0.1",
    },
    "Spark": {
        "SPARK_EXECUTOR_ID": "1",
        "SPARK_DRIVER_URL": "spark://x",
        "SPARK_APPLICATION_ID": "a",
        "SPARK_EXECUTOR_CORES": "4",
    },
    "Anyscale": {
        "ANYSCALE_CLUSTER_ID": "x",
        "RAY_ADDRESS": "auto",
        "ANYSCALE_NODE_IDENTIFIER": "k",
    },
    "Argo": {
        "ARGO_NODE_ID": "wf-1",
        "ARGO_CONTAINER_NAME": "main",
        "ARGO_TEMPLATE": "{}",
        "ARGO_POD_UID": "u",
        "ARGO_INCLUDE_SCRIPT_OUTPUT": "false",
    },
    "HF Jobs": {
        "JOB_ID": "x",
        "ACCELERATOR": "a10g",
        "CPU_CORES": "8",
        "MEMORY": "16Gi",
        "SPACE_ID": "",
    },
    "Run:ai": {
        "RUNAI_NUM_OF_GPUS": "1",
        "RUNAI_JOB_NAME": "j",
        "reporterGatewayURL": "x",
        "podUUID": "u",
    },
    "Bacalhau": {
        "BACALHAU_JOB_ID": "x",
        "BACALHAU_PARTITION_COUNT": "2",
        "BACALHAU_PARTITION_INDEX": "0",
    },
    "LSF one": {
        "LSB_JOBID": "5",
        "LSB_HOSTS": "h1 h1 h1",
        "LSB_MCPU_HOSTS": "h1 3",
        "LSB_DJOB_NUMPROC": "3",
    },
    "Lepton one": {"LEPTON_JOB_TOTAL_WORKERS": "1", "LEPTON_JOB_WORKER_INDEX": "0"},
    "RunPod one": {
        "RUNPOD_POD_ID": "x",
        "RUNPOD_GPU_COUNT": "8",
        "RUNPOD_CPU_COUNT": "64",
        "RUNPOD_DC_ID": "EU",
    },
    "Vast": {"VAST_CONTAINERLABEL": "C.1", "GPU_COUNT": "4", "VAST_TCP_PORT_22": "1"},
    "NGC one": {
        "NGC_JOB_ID": "12",
        "NGC_ARRAY_SIZE": "1",
        "NGC_ARRAY_INDEX": "0",
        "NGC_GPUS_PER_NODE": "8",
        "NGC_TOTAL_NUM_GPUS": "8",
    },
    "Paddle one": {
        "PADDLE_TRAINERS_NUM": "1",
        "PADDLE_TRAINER_ID": "0",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170",
    },
    "a Kubeflow notebook": {"NB_PREFIX": "/notebook/x", "JUPYTER_SERVER_ROOT": "/"},
    "HTCondor vanilla": {
        "_CONDOR_SLOT": "slot1_2",
        "_CONDOR_JOB_IWD": "/x",
        "_CONDOR_NPROCS": "1",
        "_CONDOR_PROCNO": "0",
        "OMP_NUM_THREADS": "4",
    },
    "SageMaker notebook": {"NUM_GPUS": "4", "REGION_NAME": "x"},
    "GitHub matrix": {"MATRIX_INDEX": "2", "MATRIX_TOTAL": "4", "GITHUB_RUN_ID": "1"},
    "Optuna": {"WORKER_ID": "3", "TRIAL_NUMBER": "2"},
    "gunicorn": {
        "WEB_CONCURRENCY": "4",
        "WORKERS": "4",
        "WORKERS_PER_CORE": "1",
        "MAX_WORKERS": "8",
    },
    "nextflow": {"NXF_TASK_WORKDIR": "/x", "TASK_ATTEMPT": "2", "TASK_INDEX": "4"},
    "LoadLeveler one": {"LOADL_PROCESSOR_LIST": "h1 h1 h1"},
    "TPU of one host": {
        "TPU_PROCESS_ADDRESSES": "localhost:8476,localhost:8477",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    },
    "Multislice of one": {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"},
    "Neuron one": {"NEURON_PJRT_PROCESSES_NUM_DEVICES": "32", "NEURON_PJRT_PROCESS_INDEX": "0"},
}
"""One host, without a word."""


def described(variables: Mapping[str, str]) -> Description:
    return platforms.describe(
        Sources(variables, hostname="box", read=lambda path: "vm-0\nvm-1\n" if path else "")
    )


def test_there_are_as_many_as_promised() -> None:
    assert len({**TAKEN, **REFUSED, **RANKS, **ONE}) >= 60


@pytest.mark.parametrize("name", TAKEN)
def test_two_hosts_are_planned(name: str) -> None:
    description = described(TAKEN[name])
    assert description.problems == ()
    assert len(texts(description.resource_config["hosts"])) == 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_missing_is_said(name: str) -> None:
    problems = described(REFUSED[name]).problems
    assert problems
    text = "\n".join(map(str, problems))
    assert any(word in text for word in ("TRAINWORKS_HOST", "NNODES", "srun ")), text


@pytest.mark.parametrize("name", RANKS)
def test_a_rank_starts_no_ranks(name: str) -> None:
    assert described(RANKS[name]).ranks_elsewhere


@pytest.mark.parametrize("name", ONE)
def test_one_host_stays_one_without_a_word(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    read = read_environment(
        {"PATH": "/usr/bin:/bin", **ONE[name]}, Invocation(("train.py",), "none")
    )
    assert read.problems == ()
    assert len(make_job(read).placement.hosts) == 1
    assert not [line for line in read.warnings if "this host is planned" in line]
