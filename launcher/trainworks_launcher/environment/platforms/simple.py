"""Platforms that take a few words each: what they set goes through what they
share, or is not enough. Pure.

SageMaker's file is the job's hosts. HyperPod's agent is the program, one in each pod, and gets its
ranks from the operator. A rank of mpirun is one process, whatever scheduler gave mpirun the hosts.
dstack and SkyPilot give every node the addresses of all. With LSF, PBS and OAR a job's script runs
on its first host, and who starts what on the others is not known. Pods of KubeRay, of an Indexed
Job and of a JobSet know nothing of each other: a person tells them. Of other schedulers no more is
read than how many hosts, or processes, a job has; a job of one is started.

Sources: dstackai/dstack, runner/internal/executor/executor.go, execJob; docs.skypilot.co,
running-jobs/environment-variables; IBM Spectrum LSF, Environment variables set for job execution;
OpenPBS, qsub(1B), PBS_NODEFILE; Torque, qsub, PBS_NUM_NODES; OAR, user documentation;
ray-project/kuberay, ray-operator/controllers/ray/common/pod.go, setContainerEnvVars; Kubernetes,
Jobs, completion mode.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Callable, Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.environment import cluster_hosts
from trainworks_launcher.environment.platforms import HYPERPOD_AGENT, Description, Sources, ranks
from trainworks_launcher.environment.platforms.common import (
    AddressVariables,
    Reader,
    config_of,
    described_by_addresses,
    numbered,
    on_one_host,
)

_ON_EACH_HOST = "start train once on each host, for example with"


def _dstack(sources: Sources) -> Description:
    return described_by_addresses(
        sources,
        "dstack",
        "dstack sets them for every node of a task: do not set or unset them",
        AddressVariables(
            nodes="DSTACK_NODES_NUM",
            rank="DSTACK_NODE_RANK",
            addresses="DSTACK_NODES_IPS",
            gpus="DSTACK_GPUS_PER_NODE",
            leader="DSTACK_MASTER_NODE_IP",
        ),
    )


def _skypilot(sources: Sources) -> Description:
    return described_by_addresses(
        sources,
        "SkyPilot",
        "SkyPilot sets them in a task's run section:"
        " hand them on if it starts a container of its own",
        AddressVariables(
            nodes="SKYPILOT_NUM_NODES",
            rank="SKYPILOT_NODE_RANK",
            addresses="SKYPILOT_NODE_IPS",
            gpus="SKYPILOT_NUM_GPUS_PER_NODE",
        ),
    )


def _lsf(sources: Sources) -> Description:
    variables = sources.variables
    words = (
        variables.get("LSB_MCPU_HOSTS", "").split()[::2] or variables.get("LSB_HOSTS", "").split()
    )
    words = words or sources.read(variables.get("LSB_DJOB_HOSTFILE", "")).split()
    parts = (variables.get(name, "").strip() for name in ("LSB_JOBID", "LSB_JOBINDEX"))
    job = "_".join(word for word in parts if word not in ("", "0"))
    return on_one_host("LSF", "LSB_MCPU_HOSTS", words, f"{_ON_EACH_HOST} blaunch")._replace(
        job_id=job
    )


def _pbs(sources: Sources) -> Description:
    variables = sources.variables
    words = sources.read(variables.get("PBS_NODEFILE", "")).split()
    if not words and variables.get("PBS_NUM_NODES", "").strip() == "1":
        words = [sources.hostname]
    made = on_one_host("PBS", "PBS_NODEFILE", words, f"{_ON_EACH_HOST} pbsdsh")
    return made._replace(job_id=variables.get("PBS_JOBID", "").strip())


def _oar(sources: Sources) -> Description:
    variables = sources.variables  # the file has a line for each core
    words = sources.read(
        variables.get("OAR_NODEFILE", "") or variables.get("OAR_NODE_FILE", "")
    ).split()
    made = on_one_host("OAR", "OAR_NODEFILE", words, f"{_ON_EACH_HOST} oarsh")
    return made._replace(job_id=variables.get("OAR_JOB_ID", "").strip())


def _told_by_a_person(title: str, advice: str) -> Callable[[Sources], Description]:
    def describe(sources: Sources) -> Description:
        reader = Reader(sources.variables, title, advice)
        reader.text(names.HOSTS_VARIABLE)
        return Description(problems=reader.problems)

    return describe


_OF_EACH_PROCESS = "NEURON_PJRT_PROCESSES_NUM_DEVICES"
"""The variable that has a number for each process, not the number of them."""

_COUNTS: Mapping[str, str] = MappingProxyType(
    {
        "NHOSTS": "Grid Engine (qsub(1), ENVIRONMENTAL VARIABLES)",
        "COBALT_JOBSIZE": "Cobalt (qsub(1))",
        "_CONDOR_NPROCS": "HTCondor's parallel universe (manual, Parallel Applications)",
        "BEAKER_REPLICA_COUNT": "Beaker (documentation, Distributed training)",
        "LEPTON_JOB_TOTAL_WORKERS": "DGX Cloud Lepton (documentation, Batch jobs)",
        "TPU_WORKER_HOSTNAMES": "Cloud TPU (documentation, Multislice and GKE)",
        "DMLC_NUM_WORKER": "MXJob, or another starter of MXNet (MXNet, Distributed training)",
        "MLP_WORKER_NUM": (
            "Volcengine's machine learning platform (documentation, environment variables)"
        ),
        "BT_GROUP_SIZE": "Baseten (documentation, Training, multinode)",
        "NGC_ARRAY_SIZE": "NGC Base Command (user guide, Multi-node jobs)",
        "HOST_NUM": "Tencent's TI platform (documentation, environment variables)",
        "PJM_NODE": "Fujitsu's job operation software (pjsub(1), PJM_NODE)",
        "PADDLE_TRAINERS_NUM": "PaddleJob (kubeflow/training-operator, paddlepaddle/envvar.go)",
        "MEGASCALE_NUM_SLICES": "Cloud TPU (documentation, Multislice)",
        "TPU_PROCESS_ADDRESSES": "Cloud TPU (jax, cloud_tpu_init.py)",
        _OF_EACH_PROCESS: "a starter of Neuron processes (AWS Neuron documentation, PJRT)",
        "LOADL_PROCESSOR_LIST": "LoadLeveler (Using and Administering, LOADL_PROCESSOR_LIST)",
        "JAX_NUM_PROCESSES": "a starter of JAX (jax, jax.distributed.initialize)",
        "NUM_NODES": "a manifest",
        "NODE_COUNT": "a manifest",
    }
)
"""Variable with the number, or with the names -> the scheduler that sets it, with its source."""


def _counted(sources: Sources) -> Description:
    found = [name for name in _COUNTS if name in sources.variables]
    more = [name for name in found if _number(name, sources.variables[name]) != 1]
    if not more:
        return Description(where=found[0])
    if sources.pairs or sources.lists:
        made = _several(sources)
        if made.resource_config:
            return made
    name = more[0]
    problem = (
        f"{name}={sources.variables[name]} says that the job has several hosts, and not which ones"
    )
    advice = (
        f"set {names.HOSTS_VARIABLE}=a,b to the same list on every host and {names.HOST_VARIABLE}"
        " to its own name; for a job of this one host set both to its name"
    )
    return Description(
        problems=(Problem(problem, f"a variable of {_COUNTS[name].partition(' (')[0]}", advice),)
    )


def _several(sources: Sources) -> Description:
    """Return the hosts of a scheduler that is recognised by the kind of its variables.

    Else what to set.

    A list with this host's index in it says all, and so does a number of hosts with the leader's
    address. In a file of hosts a host looks for itself: the order is not that of the indices
    (Google Batch, BATCH_HOSTS_FILE).
    """
    pair = next(iter(sources.pairs), None)
    for listed in sources.lists:
        made = _of_list(sources, listed, pair)
        if made is not None:
            return made
    address = (
        cluster_hosts.leader(sources.variables, pair.vendor)
        if pair is not None and pair.of_hosts
        else ("", "")
    )
    if pair is not None and address[1] and pair.place < pair.size:
        hosts = numbered(pair.size)
        return Description(
            why=f"{pair} count hosts, and {address[0]} leads to the first",
            resource_config=config_of(hosts, hosts[pair.place]),
            where=pair.names[0],
            leader_address=address[1],
            names_resolve=False,
        )
    if pair is not None:
        problem = (
            f"{pair} say that this is one of several processes, and not where the first one is"
        )
        advice = (
            "if each runs on a host of its own, set MASTER_ADDR to the first host's address,"
            f" NNODES={pair.size} and NODE_RANK=${pair.names[1]};"
            f" if it is a job of its own, set {_TO_ITSELF}"
        )
        return Description(
            where=pair.names[0], problems=(Problem(problem, f"variable {pair.names[0]}", advice),)
        )
    listed = sources.lists[0]
    shown = ",".join(listed.hosts[:_SHOWN])
    problem = f"{listed.name} names {len(listed.hosts)} hosts, and not how train is started on them"
    advice = (
        f"start train once on each of them with {names.HOSTS_VARIABLE}={shown} and"
        f" {names.HOST_VARIABLE} set to its own name; if it is a job of its own, set {_TO_ITSELF}"
    )
    return Description(
        where=listed.name, problems=(Problem(problem, f"variable {listed.name}", advice),)
    )


_SHOWN = 16
"""Hosts of a list in a message."""

_TO_ITSELF = f"{names.HOSTS_VARIABLE} and {names.HOST_VARIABLE} to its name"


def _of_list(
    sources: Sources, listed: cluster_hosts.Listed, pair: cluster_hosts.Pair | None
) -> Description | None:
    """Return the hosts of a list in which this one knows its place, None if it does not."""
    hosts = listed.hosts
    own = sources.hostname.partition(".")[0]
    here = next(
        (host for host in hosts if host.partition(".")[0] == own or host == sources.address()), ""
    )
    index_name = cluster_hosts.index_of(sources.variables, listed)
    fits = pair is not None and pair.size == len(hosts) and pair.place < pair.size
    if not listed.in_file and (index_name or fits):
        index = (
            int(sources.variables[index_name])
            if index_name
            else pair.place
            if pair is not None
            else 0
        )
        here = hosts[index]
    elif not fits or pair is None:
        return None  # nothing says that train was started on each of them
    if not here:
        return None
    why = f"{listed.name} has the hosts"
    return Description(why=why, resource_config=config_of(hosts, here), where=listed.name)


def _number(name: str, value: str) -> int:
    """Return the number that a variable says, or how many hosts or processes it lists.

    0 for nothing.
    """
    words = re.split(r"[,\s]+", value.strip()) if value.strip() else []
    if name == _OF_EACH_PROCESS:
        return len(words)
    if len(words) == 1 and words[0].isdecimal():
        return int(words[0])
    # A host may be named once for each of its processes, with another port.
    return len({word.rpartition(":")[0] or word for word in words})


ROWS: Mapping[str, Callable[[Sources], Description]] = MappingProxyType(
    {
        "sagemaker": lambda sources: Description(resource_config=sources.resource_config),
        "hyperpod": lambda _: Description(where=HYPERPOD_AGENT),
        "mpirun": ranks.describe,
        "dstack": _dstack,
        "skypilot": _skypilot,
        "lsf": _lsf,
        "pbs": _pbs,
        "oar": _oar,
        "counted": _counted,
        "several": _several,
        "kuberay": _told_by_a_person(
            "KubeRay",
            f"let Ray start the script itself, or set {names.HOSTS_VARIABLE} and"
            f" {names.HOST_VARIABLE} on every host that runs train; if each is a job of its own,"
            " set both to its own name",
        ),
        "indexed_job": _told_by_a_person(
            "a Kubernetes Indexed Job",
            f"set {names.HOSTS_VARIABLE} in the manifest,"
            " for example JOB-[0-3].SERVICE (docs/platforms/jobset.md);"
            " if each pod is a job of its own, set it to the pod's own name",
        ),
    }
)
"""Name of the platform -> what it says."""
