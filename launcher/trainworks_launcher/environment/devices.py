"""What a container may use of its host's devices: EFA devices, memory, GPUs, CPUs.

Reads the kernel's own files.

The kernel lists RDMA devices and GPUs of the whole host in every container.
What counts is what this one can open.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Callable, Collection, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract.files import text_of

_PROBE_SECONDS = 20.0
_IPC_LOCK = 14
"""Bit of CAP_IPC_LOCK, with which no limit of locked memory holds (linux/capability.h)."""


def names_in(
    directory: str | Path, wanted: Callable[[str], object] = lambda _: True
) -> tuple[str, ...]:
    """Return the sorted names in a directory that may not exist."""
    try:
        return tuple(
            sorted(entry.name for entry in Path(directory).iterdir() if wanted(entry.name))
        )
    except OSError:
        return ()


# --- EFA ------------------------------------------------------------------------------------------
def efa_devices(
    classes: str = "/sys/class", nodes: str = "/dev/infiniband"
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the EFA devices that can be opened here, and of those
    of the host that cannot.

    A program opens a device by its node ``uverbsN``; the kernel says which node is whose (kernel
    documentation, sysfs-class-infiniband). Where it does not, each node that can be opened counts
    for one device.

    Args:
        classes: Where the kernel lists devices by class.
        nodes: Where the device nodes are.
    """
    listed = tuple(
        name
        for name in names_in(f"{classes}/infiniband")
        if _is_efa(f"{classes}/infiniband/{name}")
    )
    if not listed:
        return (), ()
    verbs = f"{classes}/infiniband_verbs"
    node_of = {_line(f"{verbs}/{node}/ibdev"): node for node in names_in(verbs)}
    for name in listed:
        for node in names_in(f"{classes}/infiniband/{name}/device/infiniband_verbs"):
            node_of[name] = node
    found = [
        node
        for node in names_in(nodes, re.compile(r"uverbs\d+").fullmatch)
        if _opens(f"{nodes}/{node}")
    ]
    if not any(name in node_of for name in listed):
        return listed[: len(found)], listed[len(found) :]
    usable = tuple(name for name in listed if node_of.get(name) in found)
    return usable, tuple(name for name in listed if name not in usable)


def _is_efa(device: str) -> bool:
    """Return whether an InfiniBand-class device is EFA: by its driver, or by
    the name the driver gives it.
    """
    try:
        driver = os.readlink(f"{device}/device/driver")
    except OSError:
        driver = ""
    return driver.endswith("/efa") or Path(device).name.startswith(("efa", "rdmap"))


def _opens(node: str) -> bool:
    """Return whether a device node can be opened: its rights are not all, the
    container's list of devices counts.
    """
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def locked_memory(status: str = "/proc/self/status") -> int | None:
    """Return the bytes of memory that this process may lock; None if there is no limit for it.

    Args:
        status: The kernel's file with the capabilities of this process.
    """
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = re.search(r"CapEff:\s*([0-9a-f]+)", text_of(status))
    free = capabilities is not None and int(capabilities.group(1), 16) >> _IPC_LOCK & 1
    return None if free or limit == resource.RLIM_INFINITY else limit


def _line(path: str) -> str:
    return text_of(path).strip()


# --- GPUs -----------------------------------------------------------------------------------------
def count_gpus(variables: Mapping[str, str]) -> int:
    """NVIDIA GPUs of this container: its device nodes, else the driver's list,
    else nvidia-smi, asked once.

    Device nodes first: a container that was given two of eight GPUs has two
    nodes, while the driver may list eight.
    """
    nodes = names_in("/dev", re.compile(r"nvidia\d+").fullmatch)
    if nodes:
        return sum(os.access(f"/dev/{node}", os.R_OK | os.W_OK) for node in nodes)
    listed = len(names_in("/proc/driver/nvidia/gpus"))
    if listed:
        return listed
    program = shutil.which("nvidia-smi", path=variables.get("PATH", os.defpath))
    if not program:
        return 0
    import subprocess

    try:
        answer = subprocess.run(
            [program, "--list-gpus"], capture_output=True, timeout=_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    if answer.returncode != 0:
        return 0
    return sum(line.startswith(b"GPU ") for line in answer.stdout.splitlines())


# --- NUMA -----------------------------------------------------------------------------------------
class KernelFolders(NamedTuple):
    """Folders in which the kernel lists devices.

    Attributes:
        system: Nodes, and devices with their node.
        driver: This container's GPUs by their PCI addresses, from NVIDIA's driver.
    """

    system: str = "/sys"
    driver: str = "/proc/driver/nvidia/gpus"


def nodes_of_gpus(
    gpus: int,
    visible: Sequence[str] | None,
    variables: Mapping[str, str],
    folders: KernelFolders = KernelFolders(),  # noqa: B008  (a constant)
    cpus: Collection[int] | None = None,
) -> tuple[int, ...]:
    """Return the NUMA node of each GPU that the job may use.

    () where ranks cannot be bound to the CPUs of their GPU.

    That needs GPUs on two nodes or more, CPUs of each of these nodes, and a ``numactl`` that may
    bind. Where the kernel does not know a GPU's node (-1, as in many virtual machines), torch would
    bind its rank to node 0. Where a file is missing, or a node has no CPU that this process may
    use, torch would end the job. Sources: torch/numa/binding.py; kernel documentation,
    sysfs-bus-pci (numa_node) and sysfs-devices-node (cpulist).

    Args:
        gpus: Number of GPUs that the job may use.
        visible: Which of the container's they are, as CUDA_VISIBLE_DEVICES calls them; None: all.
        variables: The process's environment.
        folders: Where the kernel lists nodes and GPUs.
        cpus: CPUs that this process may use; None: what the kernel says.
    """
    if gpus < 2:
        return ()
    node_folder = f"{folders.system}/devices/system/node"
    if len(names_in(node_folder, re.compile(r"node\d+").fullmatch)) < 2:
        return ()
    addresses = names_in(folders.driver)
    devices = [f"{folders.system}/bus/pci/devices/{name.lower()}" for name in addresses]
    of_gpus = [_line(f"{device}/numa_node") for device in devices]
    if visible is not None:
        chosen = [int(entry) for entry in visible if entry.isdecimal()]
        of_gpus = [of_gpus[number] for number in chosen if number < len(of_gpus)]
    nodes = tuple(int(node) for node in of_gpus if node.isdecimal())
    if not len(nodes) == len(of_gpus) == gpus or len(set(nodes)) < 2:
        return ()

    allowed = set(os.sched_getaffinity(0) if cpus is None else cpus)
    lists = [f"{node_folder}/node{node}/cpulist" for node in set(nodes)]
    usable = [allowed & _numbers(_line(path)) for path in lists]
    if not all(usable) or not _binds(min(usable[0]), variables):
        return ()
    return nodes


def _numbers(ranges: str) -> set[int]:
    """Return the numbers of a list of the kernel: ``0-3,8``."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges):
        found.update(range(int(first), int(last or first) + 1))
    return found


def _binds(cpu: int, variables: Mapping[str, str]) -> bool:
    """Return whether numactl can bind here, tried with one CPU: a container's filter of system
    calls may forbid it.
    """
    program = shutil.which("numactl", path=variables.get("PATH", os.defpath))
    if not program:
        return False
    import subprocess

    line = (program, f"--physcpubind={cpu}", sys.executable, "-I", "-S", "-c", "")
    try:
        return (
            subprocess.run(
                line, capture_output=True, timeout=_PROBE_SECONDS, check=False
            ).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
