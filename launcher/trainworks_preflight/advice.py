"""Advice on a job before it costs anything, with reasons and figures. Pure.

Sources: the SageMaker developer guide's tips for the data parallel library, and the instance table. Advice never
refuses: what cannot work is a problem that ``job`` reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

from trainworks_launcher.contract.registry import MODES
from trainworks_preflight.facts import Facts, InstanceFacts

SMDDP_MODES = ("smdistributed.dataparallel", "pytorchddp")
SMP_MODE = "smdistributed.modelparallel"

CUDA_COMPONENTS = frozenset(("cuda", "cudnn", "nccl"))
"""Components of the image manifest of which an image for GPUs has at least one."""


@dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Attributes:
        subject: What it is about, a few words.
        text: What to do.
        why: The reason, with figures.
    """

    subject: str
    text: str
    why: str


@dataclass(frozen=True)
class Situation:
    """A job as planned.

    Attributes:
        mode: A name of ``registry.MODES``.
        hosts: Number of hosts of the distribution.
        per_host: Processes of one host.
        instance_type: Instance type of the hosts that take part.
        row: What is known about that type.
        cuda: Whether the image has CUDA; True where that is not known.
        open_library: Whether smddp and smp in the image are those of this project.
    """

    mode: str
    hosts: int
    per_host: int
    instance_type: str
    row: InstanceFacts
    cuda: bool = True
    open_library: bool = False


def advise(situation: Situation, facts: Facts) -> tuple[Advice, ...]:
    """Return all advice for a job: on its distribution and its devices."""
    return (*_distribution(situation, facts), *_devices(situation, facts))


def _distribution(job: Situation, facts: Facts) -> Iterator[Advice]:
    gpus = job.row.instance.gpus
    if job.mode == "none" and job.hosts > 1:
        why = f"no distribution is on, so each of the {job.hosts} hosts trains a whole model of its own"
        yield Advice("no distribution", "switch one on, or use one host", why)
    if job.mode in SMDDP_MODES and job.open_library:
        why = "smddp of this image is NCCL on GPUs and gloo on CPUs, on every instance type, on one host or more"
        yield Advice("smddp", "expect the speed of torch_distributed", why)
    elif job.mode in SMDDP_MODES:
        if job.hosts == 1:
            why = (
                f"AWS's library makes the exchange between hosts faster; with one, {gpus} GPU(s) are connected by"
                " NVLink or PCIe, which NCCL uses by itself"
            )
            yield Advice("smddp on one host", "use torch_distributed, or two hosts or more", why)
        if not job.row.smddp:
            named = ", ".join(name for name, row in facts.instances.items() if row.smddp and not row.torchrun_only)
            why = f"the SDK lists it for {named}, not for {job.instance_type}; AWS's library refuses other types"
            advice = "use torch_distributed there, or an image with this project's smddp"
            yield Advice("smddp on this instance type", advice, why)
    if job.mode == SMP_MODE and not job.row.smp_loader_workers and not job.open_library:
        why = f"on {job.instance_type} worker processes of data loaders do not go with AWS's smp"
        yield Advice("data loaders", "num_workers=0", why)


def _devices(job: Situation, facts: Facts) -> Iterator[Advice]:
    instance = job.row.instance
    if job.mode == "parameter_server" and instance.gpus > 1:
        why = f"a worker is one process per host, and {job.instance_type} has {instance.gpus} GPUs"
        yield Advice("idle GPUs", "take more hosts with one GPU each, or another distribution", why)
    one_per_host = MODES[job.mode].one_per_host  # a mirrored strategy uses all GPUs with its one process
    for count, noun in ((instance.gpus, "GPUs"), (instance.neuron_cores, "Neuron cores")):
        if not one_per_host and count > job.per_host:
            why = f"{job.per_host} process(es) per host, and each uses one of {count}"
            text = f"{count - job.per_host} of {count} {noun} on each host are idle: give {count} processes per host"
            yield Advice(f"idle {noun}", text, why)
    if job.mode == "none" and instance.gpus > 1:
        why = f"one process per host, and {instance.gpus} GPUs"
        yield Advice("idle GPUs", "switch torch_distributed on, unless the script uses them all by itself", why)
    if instance.gpus and not job.cuda:
        why = f"the image was built without CUDA: the {instance.gpus} GPU(s) of {job.instance_type} would be idle"
        yield Advice("image without CUDA", "take an image for CUDA, or an instance type without GPUs", why)
    gpu_modes = (*SMDDP_MODES, SMP_MODE, "torch_distributed", "pytorchxla")
    known = facts.find(job.instance_type) is not None
    if known and job.mode in gpu_modes and not instance.gpus and not instance.neuron_cores:
        why = f"{job.instance_type} has no GPU: {job.mode} would compute on CPUs, over gloo, or not at all"
        yield Advice("no accelerator", "take an instance type with GPUs", why)
    if job.mode != "none" and job.hosts > 1 and not instance.efa and (instance.gpus or instance.neuron_cores):
        better = [
            name
            for name, row in facts.instances.items()
            if row.instance.efa
            and row.instance.gpus >= instance.gpus
            and bool(row.instance.gpus) == bool(instance.gpus)
        ]
        better.sort(key=lambda name: (-_alike(name, job.instance_type), facts.instances[name].instance.gpus))
        why = f"{job.instance_type} has no EFA, so gradients between {job.hosts} hosts go over TCP"
        yield Advice("no EFA", f"with it: {', '.join(better[:3])}", why)


def _alike(one: str, other: str) -> int:
    """Return how many first letters two instance types share: those of one family come first."""
    return next((index for index, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))
