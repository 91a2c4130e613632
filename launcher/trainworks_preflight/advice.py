"""Advice on a job before it costs money, with reasons and figures. Pure.

Sources: the SageMaker developer guide's tips for the data parallel library, and the instance table.
Advice never refuses a job: a job that cannot work has a problem, which ``job`` reports.
"""

from __future__ import annotations

from typing import Iterator, NamedTuple

from trainworks_launcher.contract.modes import MODES
from trainworks_launcher.environment.manifest import Instance
from trainworks_launcher.job import idle, model_parallel
from trainworks_launcher.job.job import Job
from trainworks_launcher.job.model_parallel import OPEN_LIBRARY
from trainworks_preflight.facts import Facts, InstanceFacts

SMDDP_MODES = ("smdistributed.dataparallel", "pytorchddp")
SMP_MODE = "smdistributed.modelparallel"


class Advice(NamedTuple):
    """One piece of advice.

    Attributes:
        subject: For example ``idle GPUs``.
        text: The advice.
        why: The reason, with figures.
    """

    subject: str
    text: str
    why: str


def advise(job: Job, row: InstanceFacts, facts: Facts) -> Iterator[Advice]:
    """Yield all advice for a job, on its distribution and then on its devices.

    Args:
        job: The job.
        row: Instance type of the hosts that take part.
        facts: All instance types.
    """
    placement, gpus = job.placement, row.instance.gpus
    mode, kind, hosts = placement.mode, placement.instance_type, len(placement.distribution_hosts)
    open_library = OPEN_LIBRARY in job.environment.manifest.protected
    if mode == "none" and hosts > 1:
        why = f"no distribution is on, so each of the {hosts} hosts trains a whole model of its own"
        yield Advice("no distribution", "switch one on, or use one host", why)
    if mode in SMDDP_MODES and open_library:
        why = (
            "smddp of this image is NCCL on GPUs and gloo on CPUs,"
            " on every instance type, on one host or more"
        )
        yield Advice("smddp", "expect the speed of torch_distributed", why)
    elif mode in SMDDP_MODES:
        if hosts == 1:
            why = (
                f"AWS's library makes the exchange between hosts faster; with one, {gpus} GPU(s)"
                " are connected by NVLink or PCIe, which NCCL uses by itself"
            )
            yield Advice("smddp on one host", "use torch_distributed, or two hosts or more", why)
        if not row.smddp:
            rows = facts.instances.items()
            listed = [name for name, row_ in rows if row_.smddp and not row_.torchrun_only]
            named = ", ".join(listed)
            why = f"the SDK lists it for {named}, not for {kind}; AWS's library refuses other types"
            advice = "use torch_distributed there, or an image with this project's smddp"
            yield Advice("smddp on this instance type", advice, why)
    if mode == SMP_MODE and not row.smp_loader_workers and not open_library:
        why = f"on {kind} worker processes of data loaders do not go with AWS's smp"
        yield Advice("data loaders", "num_workers=0", why)
    if mode == SMP_MODE:
        parameters, _ = model_parallel.parameters(
            job.environment.hyperparameters, job.environment.variables
        )
        protected = job.environment.manifest.protected
        idle_names = model_parallel.without_effect(parameters, protected)
        if idle_names:
            why = "smp of this image accepts them, and does nothing with them"
            text = f"leave out: {', '.join(idle_names)}"
            yield Advice("parameters without effect", text, why)
    yield from _devices(job, row, facts)


def _devices(job: Job, row: InstanceFacts, facts: Facts) -> Iterator[Advice]:
    placement, instance = job.placement, row.instance
    components = job.environment.manifest.components
    mode, kind, hosts = placement.mode, placement.instance_type, len(placement.distribution_hosts)
    if mode == "parameter_server" and instance.gpus > 1:
        why = f"a worker is one process per host, and {kind} has {instance.gpus} GPUs"
        yield Advice("idle GPUs", "take more hosts with one GPU each, or another distribution", why)
    per_host, one_per_host = placement.processes_per_host, MODES[mode].one_per_host
    for count, noun in ((instance.gpus, "GPUs"), (instance.neuron_cores, "Neuron cores")):
        if not one_per_host and count > per_host:
            # A mirrored strategy uses all GPUs with its one process.
            why = f"{per_host} process(es) per host, and each uses one of {count}"
            text = (
                f"{count - per_host} of {count} {noun} on each host are idle: give {count}"
                " processes per host"
            )
            yield Advice(f"idle {noun}", text, why)
    if mode == "none" and instance.gpus > 1:
        why = f"one process per host, and {instance.gpus} GPUs"
        yield Advice(
            "idle GPUs",
            "switch torch_distributed on, unless the script uses them all by itself",
            why,
        )
    if instance.gpus and components and idle.CUDA.isdisjoint(components):
        why = (
            f"the image was built without CUDA: the {instance.gpus} GPU(s) of {kind} would be idle"
        )
        yield Advice(
            "image without CUDA", "take an image for CUDA, or an instance type without GPUs", why
        )
    gpu_modes = (*SMDDP_MODES, SMP_MODE, "torch_distributed", "pytorchxla")
    accelerated = instance.gpus or instance.neuron_cores
    if facts.find(kind) is not None and mode in gpu_modes and not accelerated:
        why = f"{kind} has no GPU: {mode} would compute on CPUs, over gloo, or not at all"
        yield Advice("no accelerator", "take an instance type with GPUs", why)
    if mode != "none" and hosts > 1 and not instance.efa and accelerated:
        why = f"{kind} has no EFA, so gradients between {hosts} hosts go over TCP"
        better = _types_with_efa(kind, instance, facts)
        yield Advice("no EFA", f"with it: {', '.join(better[:3])}", why)


def _types_with_efa(kind: str, instance: Instance, facts: Facts) -> list[str]:
    """Return instance types with EFA and at least as many GPUs, the most similar ones first."""
    gpus_of: dict[str, int] = {}
    for name, facts_of_type in facts.instances.items():
        other = facts_of_type.instance
        has_gpus = other.gpus >= instance.gpus and bool(other.gpus) == bool(instance.gpus)
        if other.efa and has_gpus:
            gpus_of[name] = other.gpus
    return sorted(gpus_of, key=lambda name: (-_common_prefix(name, kind), gpus_of[name]))


def _common_prefix(one: str, other: str) -> int:
    """Return the length of the common prefix of two types, which is long within a family."""
    for length, (letter, other_letter) in enumerate(zip(one, other)):
        if letter != other_letter:
            return length
    return min(len(one), len(other))
