"""Warn of idle GPUs, of hosts that train alone, and of CUDA without a GPU. Pure.

The warnings follow from the mode, the hosts and the devices. They do not refuse the job, because
the script may use the GPUs and the hosts by itself.
"""

from __future__ import annotations

from trainworks_launcher.contract import names
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.environment.manifest import Instance
from trainworks_launcher.job.placement import Placement, is_type_of_this_host
from trainworks_launcher.job.program import Program
from trainworks_launcher.job.starters import (
    Starter,
    command_line_of,
    knows_other_hosts,
    mode_of,
    script_line_of,
    starter_of,
    words_of,
)

CUDA = frozenset(("cuda", "cudnn", "nccl"))
"""Components of an image for GPUs, which lists at least one of these in its manifest."""


def warnings(environment: Environment, program: Program, placement: Placement) -> tuple[str, ...]:
    """Return one line per warning; ``()`` for none. Nothing is logged.

    The warnings: idle GPUs, hosts that train alone, CUDA without a GPU. What concerns all hosts is
    among those of the leader only.
    """
    lines = []
    starter = None
    if placement.mode == "none":
        starter = starter_of(words_of(program))
    # A program that is not Python's, and a starter such as torchrun, may start more processes.
    is_single_process = placement.mode == "none" and program.entry.in_python and starter is None
    gpus, hosts = environment.devices.gpus, len(placement.distribution_hosts)
    if is_single_process and gpus > 1 and not environment.platform.ranks_elsewhere:
        lines.append(
            f"this host has {gpus} GPUs, and one process is started: the others stay idle unless"
            " the program uses them by itself; one process for each GPU is train --mode"
            " torch_distributed"
        )
    # With MASTER_ADDR of the platform the script may connect to the other hosts.
    has_master_address = "MASTER_ADDR" in environment.platform.kept
    is_leader = placement.host == placement.leader
    if is_single_process and hosts > 1 and is_leader and not has_master_address:
        lines.append(
            f"each of the {hosts} hosts runs the whole program: unless it shares the work itself,"
            " each trains alone, and where they write to one place the last one replaces the"
            " others; one job of all hosts is train --mode torch_distributed"
        )
    if starter is not None and hosts > 1 and is_leader:
        lines += _warn_of_lone_starters(environment, starter, hosts)
    no_gpu = warn_without_gpu(environment, placement)
    if no_gpu:
        lines.append(no_gpu)
    return tuple(lines)


def _warn_of_lone_starters(environment: Environment, starter: Starter, hosts: int) -> list[str]:
    """Return a warning if the starter on each host, such as torchrun, has no other host; else [].

    Args:
        environment: The environment of the host.
        starter: The program of the job.
        hosts: Number of hosts that run it.
    """
    if knows_other_hosts(starter, environment.variables):
        return []
    mode = mode_of(starter)
    instead = command_line_of(starter, mode)
    if not environment.invocation.program:
        # A platform's file or the SDK names the program, and the mode, too.
        script = script_line_of(starter)
        instead = f"mode {mode} with the script itself as the entry point ({script})"
    warning = (
        f"each of the {hosts} hosts runs {starter.name}, and no option says where the other hosts"
        " are: unless its settings do, each trains alone, or waits for the others until a time"
        f" limit; one job of all hosts is {instead}"
    )
    return [warning]


def warn_without_gpu(environment: Environment, placement: Placement) -> str:
    """Return a warning if the image is for CUDA and the container sees no GPU; else ``""``."""
    devices, instance_type = environment.devices, placement.instance_type
    if CUDA.isdisjoint(environment.manifest.components):
        return ""
    # The EFA devices are None where the devices of the host cannot be seen.
    is_known = devices.efa is not None and is_type_of_this_host(environment, instance_type)
    if not is_known or devices.gpus or devices.neuron_devices or placement.has_ssh_workers:
        return ""
    # CUDA_VISIBLE_DEVICES is set: the user hides the GPUs.
    is_hidden = devices.visible_gpus is not None
    is_emulated = environment.variables.get(names.EMULATION_VARIABLE) == "1"
    if is_hidden or is_emulated:
        return ""
    row = environment.manifest.instances.get(instance_type, Instance())
    if row.gpus:
        # placement.py has warned of the difference from the instance table.
        return ""
    advice = (
        "start the container with its GPUs (docker run --gpus all), or ask the scheduler for some"
    )
    if instance_type.startswith(names.PLATFORM_TYPES):
        advice = f"{instance_type} has none: take an instance type with GPUs, or an image for CPUs"
    return f"this image is for CUDA and sees no GPU: {advice}"
