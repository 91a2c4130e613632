"""Advice on a job before it costs anything, with reasons and figures. Pure.

Sources: the SageMaker developer guide's tips for the data parallel library, its pages on scripts for the model parallel
library, and the instance table. Advice never refuses: what cannot work is a problem that ``job`` reports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterator, Mapping, Sequence

from trainworks_launcher.contract.registry import MODES
from trainworks_launcher.contract.values import Json, mapping
from trainworks_preflight.facts import Facts, InstanceFacts, Storage
from trainworks_preflight.script import Finding

SMDDP_MODES = ("smdistributed.dataparallel", "pytorchddp")
SMP_MODE = "smdistributed.modelparallel"

CUDA_COMPONENTS = frozenset(("cuda", "cudnn", "nccl"))
"""Components of the image manifest of which an image for GPUs has at least one."""

GIGABYTES_PER_GIB = 1.073741824
_CACHE_SHARE = 0.5  # of a host's memory; the rest is the job's own
_BATCH_NAMES = ("batch_size", "batch-size", "per_device_train_batch_size", "train_batch_size", "train-batch-size")
_RATE_NAMES = ("lr", "learning_rate", "learning-rate", "base_lr")


@dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Attributes:
        subject: What it is about, a few words.
        text: What to do.
        why: The reason, with figures.
        line: Line of the training script; 0 if it is not about one.
    """

    subject: str
    text: str
    why: str
    line: int = 0


@dataclass(frozen=True)
class Data:
    """What is known about the training data.

    Attributes:
        gigabytes: Size of one epoch, in 10**9 bytes.
        seconds: Longest time in which to read it once.
        cached: Gigabytes of it that the hosts' memory keeps; None for what fits.
        throughput: Throughput of an existing file system, in GB/s; 0 if it is still to be made.
    """

    gigabytes: float
    seconds: float
    cached: float | None = None
    throughput: float = 0.0


@dataclass(frozen=True)
class Situation:
    """A job as planned.

    Attributes:
        mode: A name of ``registry.MODES``.
        hosts: Number of hosts of the distribution.
        per_host: Processes of one host.
        processes: Processes in all.
        instance_type: Instance type of the hosts that take part.
        row: What is known about that type.
        hyperparameters: Hyperparameters of the script.
        data: None if nothing is known about it.
        cuda: Whether the image has CUDA; True where that is not known.
        open_library: Whether smddp and smp in the image are those of this project.
    """

    mode: str
    hosts: int
    per_host: int
    processes: int
    instance_type: str
    row: InstanceFacts
    hyperparameters: Mapping[str, Json]
    data: Data | None = None
    cuda: bool = True
    open_library: bool = False


def advise(situation: Situation, facts: Facts, findings: Sequence[Finding] = ()) -> tuple[Advice, ...]:
    """Return all advice for a job: its distribution, its figures, its data, and then its script by line."""
    found = [
        *_distribution(situation, facts),
        *_scaling(situation),
        *_devices(situation, facts),
    ]
    if situation.data is not None:
        found += _storage(situation.data, situation.hosts, situation.row.memory_gib, facts.storages)
    found += [Advice("script", finding.what, finding.why, finding.line) for finding in findings]
    return tuple(found)


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
        why = (
            "the AllReduce of AWS's library runs on the CPUs, and so does preprocessing: Debugger's rules"
            " CPUBottleneck, LowGPUUtilization and LoadBalancing show it"
        )
        yield Advice("CPUs", "keep preprocessing light, or do it before the job", why)
    if job.mode == SMP_MODE and not job.row.smp_loader_workers and not job.open_library:
        why = f"on {job.instance_type} worker processes of data loaders do not go with AWS's smp"
        yield Advice("data loaders", "num_workers=0", why)


def _scaling(job: Situation) -> Iterator[Advice]:
    """Batch and learning rate for the number of model replicas."""
    if job.mode == "none" or job.processes < 2:
        return
    parameters = mapping(job.hyperparameters.get("mp_parameters"))
    split = 1
    for names in (("pipeline_parallel_degree", "partitions"), ("tensor_parallel_degree",)):
        given = next((parameters[name] for name in names if name in parameters), 1)
        split *= given if isinstance(given, int) and given > 0 else 1
    replicas = max(job.processes // split, 1)
    if replicas < 2:
        return
    model = f"{job.processes} processes" if split == 1 else f"{job.processes} processes, {split} to a model"
    batch = _number(job.hyperparameters, _BATCH_NAMES)
    if batch:
        name, value = batch
        why = f"{model}: {replicas} replicas of the model, each with {name}={value:g} if the script means one process"
        yield Advice("batch", f"the global batch is {value * replicas:g} = {value:g} x {replicas}", why)
    else:
        yield Advice("batch", f"the global batch is {replicas} times that of one process", model)
    rate = _number(job.hyperparameters, _RATE_NAMES)
    rule = "linear scaling rule: the learning rate grows as the batch does; warm-up, because it is too high at first"
    if rate:
        name, value = rate
        text = f"if {name}={value:g} was found with one process, go to {value * replicas:g} with a gradual warm-up"
    else:
        text = f"{replicas} times the learning rate of one process, with a gradual warm-up"
    yield Advice("learning rate", text, rule)


def _number(hyperparameters: Mapping[str, Json], names: Sequence[str]) -> tuple[str, float] | None:
    """Return the first of several hyperparameters that is a number."""
    for name in names:
        value = hyperparameters.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return name, float(value)
    return None


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


def _storage(data: Data, hosts: int, memory_gib: int, storages: Sequence[Storage]) -> Iterator[Advice]:
    """Yield what a file system has to give, and what the hosts' memory changes."""
    needed = data.gigabytes / data.seconds
    each = f"each of {hosts} hosts reads its part" if hosts > 1 else "the host reads all of it"
    for storage in storages:
        yield Advice(
            "storage",
            f"{storage.name}: {describe_size(needed, storage)}",
            f"{data.gigabytes:g} GB in {data.seconds:g} s are {needed:.2f} GB/s; {each}, in the same region and zone",
        )
        memory = hosts * memory_gib * GIGABYTES_PER_GIB
        cached = data.cached if data.cached is not None else min(data.gigabytes, memory * _CACHE_SHARE)
        rest = max(data.gigabytes - cached, 0.0)
        if not cached:
            continue
        where = f"with {cached:g} GB in memory" if data.cached is not None else f"with {cached:.0f} GB in memory"
        if data.cached is None:
            where += f", half of {hosts} x {memory_gib} GiB," if cached < data.gigabytes else ", all of it,"
        if rest:
            text = f"{where} the other epochs read {rest:g} GB, {rest / data.seconds:.2f} GB/s: "
            text += describe_size(rest / data.seconds, storage)
        else:
            text = f"{where} only the first epoch reads"
        yield Advice(
            "storage cache", text, "the page cache keeps what is read, if a host reads the same files each epoch"
        )
    if data.throughput:
        cached = min(data.cached or 0.0, data.gigabytes)
        first, other = epoch_seconds(data, 0.0), epoch_seconds(data, cached)
        enough = "enough" if other <= data.seconds else f"not enough for {data.seconds:g} s"
        text = f"{data.throughput:g} GB/s is {enough}: {other:.1f} s per epoch, {first:.1f} s for the first"
        yield Advice("storage throughput", text, f"{data.gigabytes:g} GB, of which {cached:g} GB come from memory")


def epoch_seconds(data: Data, cached: float) -> float:
    """Return the seconds that reading one epoch takes at the file system's throughput, with ``cached`` GB in memory."""
    return max(data.gigabytes - cached, 0.0) / data.throughput


def describe_size(needed: float, storage: Storage) -> str:
    """Return the capacity that gives ``needed`` GB/s, by steps, as the file system is sold."""
    steps = steps_for(needed, storage)
    gib = steps * storage.step_gib
    text = f"{steps} step(s) of {storage.step_gib / 1000:g} TiB, {storage.step_megabytes_per_second} MB/s each"
    sold = gib if steps == 1 else math.ceil(gib / storage.increment_gib) * storage.increment_gib
    rounded = f" (sold as {sold:,} GiB)" if sold != gib else ""
    return f"{text}: {gib / 1000:g} TiB{rounded}"


def steps_for(needed: float, storage: Storage) -> int:
    """Steps of capacity for ``needed`` GB/s; at least one."""
    return max(math.ceil(round(needed * 1000 / storage.step_megabytes_per_second, 6)), 1)
