"""Lists the devices that this container may use: EFA devices, GPUs and their NUMA nodes.

Reads the kernel's own files. The kernel lists the RDMA devices and GPUs of the host in every
container; a device counts only if this container can open its device node.
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
"""Limit for a program that this module starts: nvidia-smi or numactl."""

_IPC_LOCK = 14
"""Bit of CAP_IPC_LOCK (linux/capability.h). A process with it may lock memory without a limit."""


def list_names(
    directory: str | Path, is_wanted: Callable[[str], object] = lambda _: True
) -> tuple[str, ...]:
    """Return the sorted names in a directory; () if the directory does not exist."""
    try:
        entry_names = [entry.name for entry in Path(directory).iterdir()]
    except OSError:
        return ()
    return tuple(sorted(filter(is_wanted, entry_names)))


# --- EFA ------------------------------------------------------------------------------------------
def efa_devices(
    classes: str = "/sys/class", nodes: str = "/dev/infiniband"
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the host's EFA devices: those that can be opened here, and the others.

    A program opens a device by its device node ``uverbsN``. The kernel says which device a node
    belongs to (kernel documentation, sysfs-class-infiniband). If the kernel does not say so, each
    node that can be opened counts for one device.

    Args:
        classes: Folder in which the kernel lists devices by class.
        nodes: Folder of the device nodes.
    """
    # Opens each device node for a moment.
    infiniband = f"{classes}/infiniband"
    devices = tuple(name for name in list_names(infiniband) if _is_efa(f"{infiniband}/{name}"))
    if not devices:
        return (), ()

    node_of = _find_nodes(classes, devices)
    opened = []
    for node in list_names(nodes, re.compile(r"uverbs\d+").fullmatch):
        if _can_open(f"{nodes}/{node}"):
            opened.append(node)
    if not any(name in node_of for name in devices):
        return devices[: len(opened)], devices[len(opened) :]
    usable = tuple(name for name in devices if node_of.get(name) in opened)
    closed = tuple(name for name in devices if name not in usable)
    return usable, closed


def _find_nodes(classes: str, devices: Sequence[str]) -> dict[str, str]:
    """Return device -> device node, for example ``rdmap0s6`` -> ``uverbs0``."""
    verbs = f"{classes}/infiniband_verbs"
    node_of = {}
    for node in list_names(verbs):
        device = _read_line(f"{verbs}/{node}/ibdev")
        node_of[device] = node
    for device in devices:
        for node in list_names(f"{classes}/infiniband/{device}/device/infiniband_verbs"):
            node_of[device] = node
    return node_of


def _is_efa(device: str) -> bool:
    """Return whether an InfiniBand device is EFA, by its driver or by its name."""
    try:
        driver = os.readlink(f"{device}/device/driver")
    except OSError:
        driver = ""
    return driver.endswith("/efa") or Path(device).name.startswith(("efa", "rdmap"))


def _can_open(node: str) -> bool:
    """Return whether a device node can be opened.

    Open the node: its mode does not show the container's list of devices (cgroups).
    """
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def locked_memory(status: str = "/proc/self/status") -> int | None:
    """Return the bytes of memory that this process may lock; None if there is no limit.

    Args:
        status: The kernel's file with the capabilities of this process.
    """
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return None
    # A process with this capability has no limit: a bit for each capability, in hexadecimal digits.
    capabilities = re.search(r"CapEff:\s*([0-9a-f]+)", text_of(status))
    if capabilities is not None and int(capabilities.group(1), 16) >> _IPC_LOCK & 1:
        return None
    return limit


def _read_line(path: str) -> str:
    """Return the text of a kernel's file without its line end; "" if it cannot be read."""
    return text_of(path).strip()


# --- GPUs -----------------------------------------------------------------------------------------
def count_gpus(variables: Mapping[str, str]) -> int:
    """Return the number of NVIDIA GPUs in this container; 0 if none is found.

    Count the device nodes that can be opened, else the driver's list, else the lines of nvidia-smi,
    which runs for at most ``_PROBE_SECONDS``. Device nodes come first: a container with two of
    eight GPUs has two nodes, while the driver may list eight.

    Args:
        variables: The process's environment; its PATH is searched for nvidia-smi.
    """
    nodes = list_names("/dev", re.compile(r"nvidia\d+").fullmatch)
    if nodes:
        return sum(os.access(f"/dev/{node}", os.R_OK | os.W_OK) for node in nodes)
    listed = len(list_names("/proc/driver/nvidia/gpus"))
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
        system: Folder of NUMA nodes, and of devices with their NUMA node.
        driver: Folder of this container's GPUs, named by their PCI addresses (``0000:10:1C.0``),
            from NVIDIA's driver.
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
    """Return the NUMA node of each GPU of the job, for example ``(0, 0, 1, 1)``.

    Return () where ranks cannot be bound to the CPUs of their GPU's node. Binding needs GPUs on two
    nodes or more, a CPU of each of these nodes, and a ``numactl`` that may bind. If the kernel does
    not know a GPU's node (-1, as in many virtual machines), torch would bind the rank to node 0. If
    a file is missing, or a node has no CPU that this process may use, torch would end the job.
    Sources: torch/numa/binding.py; kernel documentation, sysfs-bus-pci (numa_node) and
    sysfs-devices-node (cpulist).

    Args:
        gpus: Number of GPUs that the job may use.
        visible: Entries of CUDA_VISIBLE_DEVICES, for example ``("0", "3")``; None: all GPUs.
        variables: The process's environment.
        folders: Folders in which the kernel lists nodes and GPUs.
        cpus: CPUs that this process may use; None: all that the kernel allows.
    """
    if gpus < 2:
        return ()
    node_folder = f"{folders.system}/devices/system/node"
    if len(list_names(node_folder, re.compile(r"node\d+").fullmatch)) < 2:
        return ()

    # The node of each GPU of the container, in the order of PCI addresses, as CUDA counts them.
    node_texts = []
    for address in list_names(folders.driver):
        device = f"{folders.system}/bus/pci/devices/{address.lower()}"
        node_texts.append(_read_line(f"{device}/numa_node"))
    if visible is not None:
        indices = [int(entry) for entry in visible if entry.isdecimal()]
        node_texts = [node_texts[index] for index in indices if index < len(node_texts)]
    nodes = tuple(int(node) for node in node_texts if node.isdecimal())
    is_known = len(nodes) == len(node_texts) == gpus
    if not is_known or len(set(nodes)) < 2:
        return ()

    allowed = set(cpus) if cpus is not None else os.sched_getaffinity(0)
    usable = []
    for node in set(nodes):
        cpus_of_node = _parse_ranges(_read_line(f"{node_folder}/node{node}/cpulist"))
        usable.append(allowed & cpus_of_node)
    if not all(usable) or not _can_bind(min(usable[0]), variables):
        return ()
    return nodes


def _parse_ranges(ranges: str) -> set[int]:
    """Return the numbers in a list of the kernel: 0, 1, 2, 3 and 8 for ``0-3,8``."""
    numbers: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges):
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _can_bind(cpu: int, variables: Mapping[str, str]) -> bool:
    """Return whether numactl can bind a process to a CPU.

    Start numactl: a container's seccomp profile may forbid the system call.
    """
    program = shutil.which("numactl", path=variables.get("PATH", os.defpath))
    if not program:
        return False
    import subprocess

    argv = (program, f"--physcpubind={cpu}", sys.executable, "-I", "-S", "-c", "")
    try:
        answer = subprocess.run(argv, capture_output=True, timeout=_PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0
