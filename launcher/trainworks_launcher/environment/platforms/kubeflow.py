"""Kubeflow: TrainJob with a torch runtime, and PyTorchJob. Both describe the job to torchrun. Pure.

torchrun reads each option of its own from a variable ``PET_OPTION``; the launcher gives it options,
so the variables are hidden from it. Sources: kubeflow/trainer,
pkg/runtime/framework/plugins/torch/torch.go; kubeflow/training-operator,
pkg/controller.v1/pytorch/envvar.go, master.go, elastic.go (before 1.7 they had no PET_NNODES, and
nothing that tells them from a person's own variables).
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Mapping

from trainworks_launcher.contract.json_values import without_brackets
from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import Reader, config_of, numbered

HIDDEN: Mapping[str, tuple[str, ...]] = MappingProxyType({"torchrun": ("PET_",)})

_ADVICE = "leave the variables PET_* to the operator; without it, set TRAINWORKS_HOSTS"
_ELASTIC = "let minReplicas and maxReplicas be the same, or leave elasticPolicy out"


def describe(sources: Sources) -> Description:
    """Return the pods.

    They are called by the operator's rule; only the leader's name has to resolve.
    """
    reader = Reader(sources.variables, "Kubeflow", _ADVICE)
    number = reader.text("PET_NNODES")
    fewest, _, most = number.partition(":")
    if most and fewest != most:
        reader.refuse(
            f"the job may have from {fewest} to {most} hosts", "PET_NNODES", advice=_ELASTIC
        )
    count = reader.number(most or fewest, "PET_NNODES", least=1)
    if most and not reader.optional("PET_MASTER_ADDR"):
        address, _, port_text = reader.text("PET_RDZV_ENDPOINT").rpartition(":")
        port = reader.number(port_text, "PET_RDZV_ENDPOINT", least=1, most=65535)
        place = re.search(r"-worker-(\d+)$", sources.hostname)
        index = place.group(1) if place else sources.hostname
        rank = reader.number(index, "HOSTNAME", most=count - 1) if count > 1 else 0
    else:
        address = reader.text("PET_MASTER_ADDR", "MASTER_ADDR")
        port = reader.integer("PET_MASTER_PORT", "MASTER_PORT", least=1, most=65535)
        rank = reader.index("PET_NODE_RANK", count=count)
    address = without_brackets(address)
    per_node = reader.optional("PET_NPROC_PER_NODE") or "auto"
    restarts = reader.optional("PET_MAX_RESTARTS")
    if restarts not in ("", "0"):
        advice = f"leave maxRestarts out, and set TRAINWORKS_MAX_RESTARTS={restarts}"
        reader.refuse("the launcher starts ranks again itself", "PET_MAX_RESTARTS", advice=advice)
    processes = (
        0 if per_node in ("auto", "gpu") else reader.number(per_node, "PET_NPROC_PER_NODE", least=1)
    )
    if reader.problems:
        return Description(problems=reader.problems)
    hosts = _names(address, count)
    return Description(
        resource_config=config_of(hosts, hosts[rank]),
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
    """Return the names of the pods by that of the first one.

    ``JOB-master-0`` and ``JOB-worker-0``, or ``JOB-node-0-0.JOB`` and ``JOB-node-0-1.JOB``.
    """
    master = re.fullmatch(r"(.+)-master-0", address)
    if master:
        return (address, *(f"{master.group(1)}-worker-{index}" for index in range(count - 1)))
    first = re.fullmatch(r"([^.]+)-0(\..+)?", address)
    if first:
        return tuple(f"{first.group(1)}-{index}{first.group(2) or ''}" for index in range(count))
    return numbered(count)
