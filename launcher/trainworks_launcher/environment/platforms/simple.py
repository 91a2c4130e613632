"""Platforms that need a few lines each. Pure.

SageMaker: its file has the job's hosts. HyperPod: its agent runs in each pod as the program, and
gets its ranks from the operator. mpirun: each rank is one process, under any scheduler. dstack and
SkyPilot: every node gets the addresses of all nodes. LSF, PBS and OAR: the job's script runs on its
first host, and its commands on the other hosts are not known. KubeRay, Indexed Job and JobSet: the
pods get no list of pods, so a person sets TRAINWORKS_HOSTS. Other schedulers: only the number of
hosts or processes is read, and a job of one host is started.

Sources: dstackai/dstack, runner/internal/executor/executor.go, execJob; docs.skypilot.co,
running-jobs/environment-variables; IBM Spectrum LSF, Environment variables set for job execution;
OpenPBS, qsub(1B), PBS_NODEFILE; Torque, qsub, PBS_NUM_NODES; OAR, user documentation;
ray-project/kuberay, ray-operator/controllers/ray/common/pod.go, setContainerEnvVars; Kubernetes,
Jobs, completion mode.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Callable, Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.environment import cluster_hosts
from trainworks_launcher.environment.platforms import HYPERPOD_AGENT, Description, Sources, ranks
from trainworks_launcher.environment.platforms.common import (
    AddressVariables,
    Reader,
    describe_by_addresses,
    describe_one_host,
    make_config,
    make_labels,
)

_ON_EACH_HOST = "start train once on each host, for example with"
"""Beginning of an advice; the scheduler's command follows: ``blaunch``."""


def _dstack(sources: Sources) -> Description:
    """Return the nodes of a task of dstack, the first one as the leader."""
    return describe_by_addresses(
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
    """Return the nodes of a task of SkyPilot, the first one as the leader."""
    return describe_by_addresses(
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
    """Return a job of LSF with one host; a problem for several hosts, or if none is named."""
    variables = sources.variables
    # Hosts and numbers of slots in turn: hostA 8 hostB 8.
    hosts = variables.get("LSB_MCPU_HOSTS", "").split()[::2]
    if not hosts:
        hosts = variables.get("LSB_HOSTS", "").split()
    if not hosts:
        hosts = sources.read(variables.get("LSB_DJOB_HOSTFILE", "")).split()
    # An index of 0 means that the job is not one of an array.
    ids = [variables.get(name, "").strip() for name in ("LSB_JOBID", "LSB_JOBINDEX")]
    job_id = "_".join(part for part in ids if part not in ("", "0"))
    description = describe_one_host("LSF", "LSB_MCPU_HOSTS", hosts, f"{_ON_EACH_HOST} blaunch")
    return description._replace(job_id=job_id)


def _pbs(sources: Sources) -> Description:
    """Return a job of PBS with one host; a problem for several hosts, or if none is named."""
    variables = sources.variables
    hosts = sources.read(variables.get("PBS_NODEFILE", "")).split()
    if not hosts and variables.get("PBS_NUM_NODES", "").strip() == "1":
        hosts = [sources.hostname]
    description = describe_one_host("PBS", "PBS_NODEFILE", hosts, f"{_ON_EACH_HOST} pbsdsh")
    return description._replace(job_id=variables.get("PBS_JOBID", "").strip())


def _oar(sources: Sources) -> Description:
    """Return a job of OAR with one host; a problem for several hosts, or if none is named."""
    variables = sources.variables
    path = variables.get("OAR_NODEFILE", "") or variables.get("OAR_NODE_FILE", "")
    hosts = sources.read(path).split()  # a line for each core
    description = describe_one_host("OAR", "OAR_NODEFILE", hosts, f"{_ON_EACH_HOST} oarsh")
    return description._replace(job_id=variables.get("OAR_JOB_ID", "").strip())


def _named_by_a_person(title: str, advice: str) -> Callable[[Sources], Description]:
    """Return a ``describe`` that asks for TRAINWORKS_HOSTS, because the platform has no list.

    Without that variable the description has a problem. With it the platform ``hosts`` counts,
    which is earlier in the order.
    """

    def describe(sources: Sources) -> Description:
        reader = Reader(sources.variables, title, advice)
        reader.text(names.HOSTS_VARIABLE)
        return Description(problems=reader.problems)

    return describe


_OF_EACH_PROCESS = "NEURON_PJRT_PROCESSES_NUM_DEVICES"
"""Variable with one number for each process: ``32,32`` for two processes."""

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
"""Variable with a number or a list of hosts or processes -> the scheduler, with its source."""


def _counted(sources: Sources) -> Description:
    """Return a job of this one host; of several hosts only if other variables name the hosts.

    Otherwise ``problems`` has the variable that says that there are several.
    """
    counts = [name for name in _COUNTS if name in sources.variables]
    above_one = [name for name in counts if _count_in(name, sources.variables[name]) != 1]
    if not above_one:
        return Description(where=counts[0])
    if sources.pairs or sources.lists:
        description = _several(sources)
        if description.resource_config:
            return description

    name = above_one[0]
    scheduler, _, _ = _COUNTS[name].partition(" (")
    problem = (
        f"{name}={sources.variables[name]} says that the job has several hosts, and not which ones"
    )
    advice = (
        f"set {names.HOSTS_VARIABLE}=a,b to the same list on every host and {names.HOST_VARIABLE}"
        " to its own name; for a job of this one host set both to its name"
    )
    return Description(problems=(Problem(problem, f"a variable of {scheduler}", advice),))


def _several(sources: Sources) -> Description:
    """Return the hosts of an unknown scheduler, recognised by the kind of its variables.

    Two kinds of variables describe the hosts: a list of addresses with this host's index, and a
    number of hosts with this host's index and the leader's address. Otherwise the job is refused
    with the variables to set.
    """
    pair = next(iter(sources.pairs), None)
    for listed in sources.lists:
        description = _of_list(sources, listed, pair)
        if description is not None:
            return description
    if pair is None:
        return _refuse_list(sources.lists[0])

    variable = address = ""
    if pair.of_hosts:
        variable, address = cluster_hosts.find_leader(sources.variables, pair.vendor)
    if not address or pair.place >= pair.size:
        return _refuse_pair(pair)
    hosts = make_labels(pair.size)
    return Description(
        why=f"{pair} count hosts, and {variable} leads to the first",
        resource_config=make_config(hosts, hosts[pair.place]),
        where=pair.names[0],
        leader_address=address,
        names_resolve=False,
    )


def _refuse_pair(pair: cluster_hosts.Pair) -> Description:
    """Return a description with the problem of a count and an index, without the leader."""
    count, index = pair.names
    problem = f"{pair} say that this is one of several processes, and not where the first one is"
    advice = (
        "if each runs on a host of its own, set MASTER_ADDR to the first host's address,"
        f" NNODES={pair.size} and NODE_RANK=${index};"
        f" if it is a job of its own, set {_TO_ITSELF}"
    )
    return Description(where=count, problems=(Problem(problem, f"variable {count}", advice),))


def _refuse_list(listed: cluster_hosts.HostList) -> Description:
    """Return a description with the problem of a list in which this host's place is not known."""
    shown = ",".join(listed.hosts[:_MAX_SHOWN_HOSTS])
    problem = f"{listed.name} names {len(listed.hosts)} hosts, and not how train is started on them"
    advice = (
        f"start train once on each of them with {names.HOSTS_VARIABLE}={shown} and"
        f" {names.HOST_VARIABLE} set to its own name; if it is a job of its own, set {_TO_ITSELF}"
    )
    return Description(
        where=listed.name, problems=(Problem(problem, f"variable {listed.name}", advice),)
    )


_MAX_SHOWN_HOSTS = 16
"""Hosts of a list in a message."""

_TO_ITSELF = f"{names.HOSTS_VARIABLE} and {names.HOST_VARIABLE} to its name"


def _of_list(
    sources: Sources, listed: cluster_hosts.HostList, pair: cluster_hosts.Pair | None
) -> Description | None:
    """Return the hosts of a list; None if this host's place in the list is not known.

    Args:
        sources: The sources of the platform.
        listed: The list.
        pair: A count with an index; None if there is none. A count as large as the list shows that
            ``train`` was started on each of the hosts.
    """
    hosts = listed.hosts
    index_name = cluster_hosts.find_index(sources.variables, listed)
    fits = pair is not None and pair.size == len(hosts) and pair.place < pair.size
    current = ""
    if not listed.in_file and index_name:
        current = hosts[int(sources.variables[index_name])]
    elif not listed.in_file and pair is not None and fits:
        current = hosts[pair.place]
    elif fits:
        # A file may have another order than the indices (Google Batch, BATCH_HOSTS_FILE).
        current = _find_own_name(sources, hosts)
    if not current:
        return None
    why = f"{listed.name} has the hosts"
    return Description(why=why, resource_config=make_config(hosts, current), where=listed.name)


def _find_own_name(sources: Sources, hosts: Sequence[str]) -> str:
    """Return the host of a list with this host's name or address; ``""`` if there is none."""
    own_name, _, _ = sources.hostname.partition(".")
    for host in hosts:
        name, _, _ = host.partition(".")
        if name == own_name or host == sources.address():
            return host
    return ""


def _count_in(name: str, value: str) -> int:
    """Return the number of hosts or processes in a variable, which may be a list; 0 if empty.

    Args:
        name: Name of the variable.
        value: Its value, for example ``2`` or ``a:8471,b:8471``.
    """
    value = value.strip()
    words = re.split(r"[,\s]+", value) if value else []
    if name == _OF_EACH_PROCESS:
        return len(words)
    if len(words) == 1 and words[0].isdecimal():
        return int(words[0])
    # A host may be listed once for each of its processes, with another port.
    hosts = {word.rpartition(":")[0] or word for word in words}
    return len(hosts)


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
        "kuberay": _named_by_a_person(
            "KubeRay",
            f"let Ray start the script itself, or set {names.HOSTS_VARIABLE} and"
            f" {names.HOST_VARIABLE} on every host that runs train; if each is a job of its own,"
            " set both to its own name",
        ),
        "indexed_job": _named_by_a_person(
            "a Kubernetes Indexed Job",
            f"set {names.HOSTS_VARIABLE} in the manifest,"
            " for example JOB-[0-3].SERVICE (docs/platforms/jobset.md);"
            f" if each pod is a job of its own, set {names.HOSTS_VARIABLE} and"
            f" {names.HOST_VARIABLE} to the pod's own name",
        ),
    }
)
"""Name of the platform -> its ``describe``."""
