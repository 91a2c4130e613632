"""Kubeflow: TrainJob with a torch runtime, and PyTorchJob. Both describe the job to torchrun. Pure.

torchrun reads each of its options from a variable too: ``--nnodes`` from ``PET_NNODES``. The
launcher starts torchrun with options, so these variables are hidden from torchrun.

Sources: kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go;
kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go, master.go, elastic.go. A
PyTorchJob of an operator before 1.7 has only MASTER_ADDR, WORLD_SIZE and RANK, which a person may
have set, too: ``environment.py`` in this folder reads these variables.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Mapping

from trainworks_launcher.contract.json_values import without_brackets
from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import Reader, make_config, make_labels

HIDDEN: Mapping[str, tuple[str, ...]] = MappingProxyType({"torchrun": ("PET_",)})

_ADVICE = "leave the variables PET_* to the operator; without it, set TRAINWORKS_HOSTS"
_ELASTIC = "let minReplicas and maxReplicas be the same, or leave elasticPolicy out"


def describe(sources: Sources) -> Description:
    """Return the pods by the operator's names. Only the leader's name has to resolve.

    Nothing is raised: ``problems`` has the variables that are missing or wrong.
    """
    reader = Reader(sources.variables, "Kubeflow", _ADVICE)
    nodes = reader.text("PET_NNODES")  # 4, or 2:4 with elasticPolicy
    fewest, _, most = nodes.partition(":")
    if most and fewest != most:
        reader.refuse(
            f"the job may have from {fewest} to {most} hosts", "PET_NNODES", advice=_ELASTIC
        )
    count = reader.number(most or fewest, "PET_NNODES", least=1)

    rank = 0
    if most and not reader.optional("PET_MASTER_ADDR"):
        # elasticPolicy: torchrun's rendezvous would give out the ranks. The pods are
        # JOB-worker-0, JOB-worker-1: the number in the pod's name is its rank.
        address, _, port_text = reader.text("PET_RDZV_ENDPOINT").rpartition(":")
        port = reader.number(port_text, "PET_RDZV_ENDPOINT", least=1, most=65535)
        worker = re.search(r"-worker-(\d+)$", sources.hostname)
        index = worker.group(1) if worker else sources.hostname
        if count > 1:
            rank = reader.number(index, "HOSTNAME", most=count - 1)
    else:
        address = reader.text("PET_MASTER_ADDR", "MASTER_ADDR")
        port = reader.integer("PET_MASTER_PORT", "MASTER_PORT", least=1, most=65535)
        rank = reader.index("PET_NODE_RANK", count=count)
    address = without_brackets(address)

    restarts = reader.optional("PET_MAX_RESTARTS")
    if restarts not in ("", "0"):
        advice = f"leave maxRestarts out, and set TRAINWORKS_MAX_RESTARTS={restarts}"
        reader.refuse("the launcher starts ranks again itself", "PET_MAX_RESTARTS", advice=advice)
    processes = 0
    per_node = reader.optional("PET_NPROC_PER_NODE")
    # torchrun's words for one process per GPU, which is the launcher's default, too.
    if per_node not in ("", "auto", "gpu"):
        processes = reader.number(per_node, "PET_NPROC_PER_NODE", least=1)
    if reader.problems:
        return Description(problems=reader.problems)
    hosts = _names(address, count)
    return Description(
        resource_config=make_config(hosts, hosts[rank]),
        where="PET_NNODES",
        leader_address=address,
        names_resolve=hosts[0] == address,
        processes_per_host=processes,
        processes_why="PET_NPROC_PER_NODE",
        mode="torch_distributed",
        master_port=port,
        hidden=HIDDEN,
    )


def _names(address: str, count: int) -> tuple[str, ...]:
    """Return the names of all pods, from the name of the first pod.

    PyTorchJob: ``JOB-master-0``, ``JOB-worker-0``. TrainJob: ``JOB-node-0-0.JOB``,
    ``JOB-node-0-1.JOB``. Labels (``node-0``) if the first name has another form.
    """
    master = re.fullmatch(r"(.+)-master-0", address)
    if master:
        job = master.group(1)
        workers = [f"{job}-worker-{index}" for index in range(count - 1)]
        return (address, *workers)
    first = re.fullmatch(r"([^.]+)-0(\..+)?", address)
    if first:
        name, domain = first.group(1), first.group(2) or ""
        return tuple(f"{name}-{index}{domain}" for index in range(count))
    return make_labels(count)
