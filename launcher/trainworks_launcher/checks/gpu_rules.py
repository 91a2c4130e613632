"""What NVIDIA's library says of the GPUs, and what it means. Pure. A part of ``rules``, loaded where there are GPUs."""

from __future__ import annotations

from typing import Iterator, Mapping

from trainworks_launcher.checks import FAILED, WARNING, Checks, Finding
from trainworks_launcher.checks.gpus import (
    CUDA_NOT_READY,
    FABRIC_IN_PROGRESS,
    FABRIC_NOT_STARTED,
    LOST,
    MISMATCH,
    NO_DRIVER,
    OK,
    RESET_REQUIRED,
    Gpu,
    Gpus,
    is_visible,
)
from trainworks_launcher.checks.look import Seen
from trainworks_launcher.checks.words import REPLACE, count_of

_THROTTLE: Mapping[int, str] = {
    0x08: "hardware slowdown",
    0x20: "too hot (software limit)",
    0x40: "too hot (hardware limit)",
    0x80: "power brake from outside",
}
"""nvmlClocksThrottleReasons that are not normal; an idle GPU has others (nvml.h)."""

APPLICATION_XIDS = frozenset((13, 31, 43, 45, 68, 69))
"""XID errors that a program causes, not the GPU. Source: NVIDIA, XID errors, table of common causes."""

_GONE = {
    LOST: "is lost: it has fallen off the bus",
    RESET_REQUIRED: "has to be reset before it can be used",
}


def judge_gpus(asked: Checks, seen: Seen) -> Iterator[Finding]:
    """Yield what is wrong with the driver and the GPUs of a host."""
    gpus = seen.gpus
    if gpus is None:
        return
    yield from _library(gpus)
    yield from _fabric(gpus)
    if gpus.devices and len(gpus.devices) < asked.gpus:
        what = f"the NVIDIA driver knows {len(gpus.devices)} of the {count_of(asked.gpus, 'GPU')} in this container"
        yield Finding(FAILED, what, REPLACE)
    used = [index for index, gpu in enumerate(gpus.devices) if is_visible(asked.visible_gpus, index, gpu.uuid)]
    for index in used:
        yield from _gpu(f"GPU {index}", gpus.devices[index])
    for index, number in sorted(set(gpus.xids)):
        if index in used and number not in APPLICATION_XIDS:
            yield Finding(FAILED, f"GPU {index} reported XID error {number} during the check", REPLACE)
    for place, number in sorted(set(seen.xids)) if asked.visible_gpus is None else ():
        if number not in APPLICATION_XIDS:
            advice = "read the kernel's log; if it comes again, replace the host"
            yield Finding(WARNING, f"the kernel's log has XID error {number} of GPU {place}", advice)


def _library(gpus: Gpus) -> Iterator[Finding]:
    if gpus.problem:
        advice = "run nvidia-smi on the host; start the container with NVIDIA's container runtime and its utilities"
        yield Finding(WARNING, gpus.problem, advice)
    if gpus.error == MISMATCH:
        what = "the NVIDIA driver was changed while the host was running: library and kernel module differ"
        yield Finding(FAILED, what, "reboot or replace the host")
    elif gpus.error == NO_DRIVER:
        yield Finding(FAILED, "the NVIDIA driver is not loaded on the host", "install or load it, or replace the host")
    elif gpus.error != OK:
        yield Finding(WARNING, f"the NVIDIA driver answers with error {gpus.error}", "run nvidia-smi on the host")


def _fabric(gpus: Gpus) -> Iterator[Finding]:
    """Yield whether the GPUs of a board with NVSwitches wait for its fabric manager."""
    advice = f"start nvidia-fabricmanager on the host, in the driver's own version, or {REPLACE}"
    if gpus.cuda == CUDA_NOT_READY:
        yield Finding(FAILED, f"NVIDIA's fabric manager is not up: CUDA cannot start (error {CUDA_NOT_READY})", advice)
        return
    late = [index for index, gpu in enumerate(gpus.devices) if gpu.fabric in (FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS)]
    if late and gpus.cuda is None:
        what = f"{len(late)} of {count_of(len(gpus.devices), 'GPU')} wait for NVIDIA's fabric manager"
        yield Finding(WARNING, what, advice)


def _gpu(name: str, gpu: Gpu) -> Iterator[Finding]:
    if gpu.error in _GONE:
        yield Finding(FAILED, f"{name} {_GONE[gpu.error]}", REPLACE)
        return
    if gpu.error != OK:
        yield Finding(WARNING, f"{name} answers with error {gpu.error}", "run nvidia-smi on the host")
    if gpu.remap_failed:
        yield Finding(FAILED, f"{name} has broken memory that could not be replaced", REPLACE)
    if gpu.ecc:
        what = f"{name} has {count_of(gpu.ecc, 'memory error')} that could not be corrected"
        yield Finding(FAILED, what, f"reset the GPU, or {REPLACE}")
    if gpu.pending:
        what = f"{name} has broken memory that the next reset replaces"
        yield Finding(WARNING, what, "reset the GPU or reboot the host when no job runs on it")
    slow = [text for bit, text in _THROTTLE.items() if (gpu.throttle or 0) & bit]
    if slow:
        yield Finding(WARNING, f"{name} is slowed down: {', '.join(slow)}", "check cooling and power of the host")
