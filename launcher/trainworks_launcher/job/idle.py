"""What a job leaves idle, or does twice, without a word of the script: one warning each. Pure.

All of them follow from the mode, the hosts and the devices. The script may know
better, and says so by doing it.
"""

from __future__ import annotations

from trainworks_launcher.contract import names
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.environment.manifest import Instance
from trainworks_launcher.job.placement import Placement, is_type_of_this_host
from trainworks_launcher.job.program import Program
from trainworks_launcher.job.starters import starter_of, words_of

CUDA = frozenset(("cuda", "cudnn", "nccl"))
"""Components of the image manifest of which an image for GPUs has at least one."""


def warnings(environment: Environment, program: Program, placement: Placement) -> tuple[str, ...]:
    """Return a line for each: GPUs without a process, hosts that each train
    alone, an image for CUDA without a GPU.
    """
    found = []
    # A shell script and a starter may well start more.
    alone = (
        placement.mode == "none"
        and program.entry.in_python
        and starter_of(words_of(program)) is None
    )
    gpus, hosts = environment.devices.gpus, len(placement.distribution_hosts)
    if alone and gpus > 1 and not environment.platform.ranks_elsewhere:
        found.append(
            f"this host has {gpus} GPUs, and one process is started: the others stay idle unless"
            " the program uses them by itself; one process for each GPU is train --mode"
            " torch_distributed"
        )
    # The script may read where the others are.
    finds_itself = "MASTER_ADDR" in environment.platform.kept
    if alone and hosts > 1 and placement.host == placement.leader and not finds_itself:
        found.append(
            f"each of the {hosts} hosts runs the whole program: unless it shares the work itself,"
            " each trains alone, and where they write to one place the last one replaces the"
            " others; one job of all hosts is train --mode torch_distributed"
        )
    line = _no_gpu(environment, placement)
    return (*found, line) if line else tuple(found)


def _no_gpu(environment: Environment, placement: Placement) -> str:
    """Return a line if the image is for CUDA and this host shows no GPU.

    ``""`` where somebody has hidden them.
    """
    devices, kind = environment.devices, placement.instance_type
    is_known = devices.efa is not None and is_type_of_this_host(environment, kind)
    wanted = CUDA.isdisjoint(environment.manifest.components) or not is_known
    hidden = (
        devices.visible_gpus is not None
        or environment.variables.get(names.EMULATION_VARIABLE) == "1"
    )
    if wanted or hidden or devices.gpus or devices.neuron_devices or placement.served:
        return ""
    row = environment.manifest.instances.get(kind, Instance())
    if row.gpus:
        return ""  # placement has said it
    todo = (
        "start the container with its GPUs (docker run --gpus all), or ask the scheduler for some"
    )
    if kind.startswith(names.PLATFORM_TYPES):
        todo = f"{kind} has none: take an instance type with GPUs, or an image for CPUs"
    return f"this image is for CUDA and sees no GPU: {todo}"
