"""Query nvidia-smi for the GPUs of a container, and find problems in the answers.

Loaded where there are GPUs.

A broken driver may never answer: each query is a process that is left behind at a deadline. A query
that a driver does not know ends with status 2, and is skipped. Statuses are those of nvidia-smi(1).
"""

from __future__ import annotations

import subprocess
import sys
import time
from types import MappingProxyType
from typing import Iterator, Mapping, NamedTuple, Sequence

from trainworks_launcher.checks import FAILED, REPLACE, WARNING, Checks, Finding, count_of

PROGRAM = "nvidia-smi"
_PIPE = subprocess.PIPE

_UUID, _DRIVER, _ECC = "uuid", "driver_version", "ecc.errors.uncorrected.volatile.total"
_RETIRED, _FABRIC = "retired_pages.pending", "fabric.state"
_REMAPPED, _UNREPAIRED = "remapped_rows.pending", "remapped_rows.failure"
# Since driver 535, and before.
_SLOWDOWN_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_USE, _MEMORY = "utilization.gpu", "memory.used"


class _Query(NamedTuple):
    """One call of nvidia-smi: ``--query-KIND=FIELDS``."""

    kind: str
    fields: tuple[str, ...]


_DEVICES = _Query("gpu", ("index", _UUID, _DRIVER, _ECC, _RETIRED))
_QUERIES = (
    _DEVICES,
    *(_Query("gpu", (_UUID, name)) for name in (*_SLOWDOWN_FIELDS, _FABRIC)),
    _Query("remapped-rows", (_UUID, _REMAPPED, _UNREPAIRED)),
)
"""Run side by side, so that the driver starts its GPUs only once. A field that not every driver
knows has a query of its own.
"""

_NO_DRIVER, _LOST, _MISMATCH = 9, 15, 18
"""Exit statuses of nvidia-smi: the driver is not loaded; a GPU has fallen off the bus; library and
kernel module differ.
"""

_LOST_VALUES = {
    "[GPU is lost]": "is lost: it has fallen off the bus",
    "[GPU requires reset]": "has to be reset before it can be used",
}
"""Values that replace every other one (nvmlErrorString)."""

_SLOWDOWN_REASONS: Mapping[int, str] = {
    0x08: "hardware slowdown",
    0x20: "too hot (software limit)",
    0x40: "too hot (hardware limit)",
    0x80: "power brake from outside",
}
"""Reasons for low clocks that are not normal; an idle GPU has others (nvml.h)."""

_CUDA_NOT_READY = 802
"""CUDA_ERROR_SYSTEM_NOT_READY (cuda.h): the fabric manager of an NVSwitch board is not up."""

_WAITING_STATES, _YES_VALUES = ("Not Started", "In Progress"), ("Yes", "1")

_START_CUDA = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"

Gpu = Mapping[str, str]
"""The values of one GPU, by the names of nvidia-smi's fields."""


class Gpus(NamedTuple):
    """All GPUs of a container.

    Attributes:
        problem: Why nvidia-smi gave no answer; ``""`` if it did.
        status: Exit status of nvidia-smi.
        devices: By index.
        cuda: Result of CUDA's own start (cuda.h); None if CUDA was not started, or is not there.
    """

    problem: str = ""
    status: int = 0
    devices: Mapping[int, Gpu] = MappingProxyType({})
    cuda: int | None = None

    @property
    def driver(self) -> str:
        """Version of the driver; ``""`` if no GPU has one."""
        for gpu in self.devices.values():
            version = gpu.get(_DRIVER, "")
            if version[:1].isdigit():
                return version
        return ""


def query_gpus(limit: float) -> Gpus:
    """Query nvidia-smi for all GPUs of the container.

    Args:
        limit: Seconds; a process that has not answered by then is killed and left behind.

    Returns:
        The GPUs, or the problem because of which nvidia-smi gave no answer.
    """
    deadline = time.monotonic() + limit
    try:
        started = [_start(query) for query in _QUERIES]
    except OSError:
        return Gpus(problem=f"{PROGRAM} is not in this container")
    answers = [_output_of(process, deadline) for process in started]
    status = started[0].poll()
    if answers[0] is None or status is None:
        return Gpus(problem=f"the NVIDIA driver does not answer within {limit:g} s")
    if status < 0:
        return Gpus(problem=f"{PROGRAM} was ended by signal {-status}")
    by_uuid: dict[str, dict[str, str]] = {}
    for query, answer, process in zip(_QUERIES, answers, started):
        # A lost GPU gives every query the same status, and the lines of the others.
        if process.poll() not in (0, status):
            # The driver does not know a field of this query.
            continue
        for row in _rows(answer, query.fields):
            by_uuid.setdefault(row[_UUID], {}).update(row)
    devices = {}
    for row in _rows(answers[0], _DEVICES.fields):
        devices[int(row["index"])] = {**by_uuid[row[_UUID]], **row}
    cuda = _start_cuda(deadline) if _may_wait_for_fabric(devices) else None
    return Gpus(status=status, devices=devices, cuda=cuda)


def _may_wait_for_fabric(devices: Mapping[int, Gpu]) -> bool:
    """Return whether CUDA may have to wait for the fabric manager.

    Boards of NVSwitches before Hopper do not report the state of their fabric. A single GPU has no
    fabric.
    """
    states = {gpu.get(_FABRIC, "") for gpu in devices.values()}
    if states & set(_WAITING_STATES):
        return True
    return len(devices) > 1 and "Completed" not in states


def _start_cuda(deadline: float) -> int | None:
    """Start CUDA in a process of its own, which may hang.

    Args:
        deadline: End of the wait (monotonic clock).

    Returns:
        The result of cuInit, 0 for success; None if CUDA is not there, or does not answer.
    """
    process = subprocess.Popen(
        (sys.executable, "-IS", "-c", _START_CUDA), stdout=_PIPE, stderr=subprocess.DEVNULL
    )
    try:
        return int(_output_of(process, deadline) or "")
    except ValueError:
        return None


def read_use(visible: Sequence[str] | None, limit: float) -> list[tuple[int, int, int]]:
    """Return (index, percent of the time, bytes of memory in use) of the GPUs.

    GPUs without these figures are left out. Runs nvidia-smi; ``[]`` if it is not there, or has not
    answered in time.

    Args:
        visible: The GPUs that the job may use, by number or UUID; None for all.
        limit: Limit of the wait, in seconds.
    """
    query = _Query("gpu", ("index", _UUID, _USE, _MEMORY))
    try:
        answer = _output_of(_start(query), time.monotonic() + limit)
    except OSError:
        return []
    rows: list[tuple[int, int, int]] = []
    for row in _rows(answer, query.fields):
        index, use, memory = int(row["index"]), row[_USE], row[_MEMORY]
        if not use.isdigit() or not memory.isdigit():
            continue
        if is_visible(visible, index, row[_UUID]):
            # nvidia-smi prints MiB.
            rows.append((index, int(use), int(memory) << 20))
    return rows


def is_visible(visible: Sequence[str] | None, index: int, uuid: str) -> bool:
    """Return whether the job may use a GPU; others may belong to another job.

    Args:
        visible: The GPUs that the job may use, by number or UUID, which may be cut short (CUDA);
            None for all.
        index: Number of the GPU.
        uuid: Its UUID; ``""`` if not known.
    """
    if visible is None or str(index) in visible:
        return True
    return bool(uuid) and any(uuid.startswith(name) for name in visible if name.startswith("GPU-"))


def _start(query: _Query) -> subprocess.Popen[bytes]:
    """Start nvidia-smi with a query. Raises OSError if it is not there."""
    names = query.fields
    if query.kind != "gpu":
        # The field of the UUID has another name in these queries.
        names = tuple(f"gpu_{_UUID}" if name == _UUID else name for name in names)
    words = (PROGRAM, f"--query-{query.kind}={','.join(names)}", "--format=csv,noheader,nounits")
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=_PIPE, stderr=subprocess.DEVNULL
    )


def _output_of(process: subprocess.Popen[bytes], deadline: float) -> str | None:
    """Return the output of a process, whatever its status.

    Args:
        process: The process.
        deadline: End of the wait (monotonic clock).

    Returns:
        The output; None for a process that has not ended by then, which is killed and left behind.
    """
    try:
        output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return None
    return output.decode("utf-8", "replace")


def _rows(text: str | None, fields: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the lines of an answer as field -> value.

    Lines in another form, such as those about an unreachable GPU, are skipped.

    Args:
        text: The answer, for example ``0, GPU-5f3a, 535.183.01, 0, No``; None for none.
        fields: The fields of the query.
    """
    for line in (text or "").splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(fields) and (fields[0] != "index" or values[0].isdigit()):
            yield dict(zip(fields, values))


def find_gpu_problems(checks: Checks, gpus: Gpus) -> Iterator[Finding]:
    """Yield the problems of the driver and the GPUs of a host. Nothing is queried.

    Of GPUs that the job may not use, only a loss is a problem.

    Args:
        checks: The expected values.
        gpus: The answers of nvidia-smi.
    """
    look = f"run {PROGRAM} on the host"
    if gpus.problem:
        advice = f"{look}; start the container with NVIDIA's container runtime and its utilities"
        yield Finding(WARNING, gpus.problem, advice)
    elif gpus.status == _MISMATCH:
        problem = (
            "the NVIDIA driver was changed while the host was running:"
            " library and kernel module differ"
        )
        yield Finding(FAILED, problem, "reboot or replace the host")
    elif gpus.status == _NO_DRIVER:
        yield Finding(
            FAILED,
            "the NVIDIA driver is not loaded on the host",
            "install or load it, or replace the host",
        )
    elif gpus.status == _LOST and len(gpus.devices) >= checks.gpus:
        yield Finding(FAILED, "a GPU is lost: it has fallen off the bus", REPLACE)
    elif gpus.status not in (0, _LOST):
        yield Finding(WARNING, f"{PROGRAM} ends with status {gpus.status}", look)
    yield from _find_fabric_problems(gpus)
    # Without any device the status says more, unless all GPUs are lost.
    has_answer = bool(gpus.devices) or gpus.status == _LOST
    if has_answer and len(gpus.devices) < checks.gpus:
        problem = (
            f"the NVIDIA driver knows {len(gpus.devices)} of the {count_of(checks.gpus, 'GPU')} in"
            " this container"
        )
        yield Finding(FAILED, problem, REPLACE)
    for index, gpu in gpus.devices.items():
        if is_visible(checks.visible_gpus, index, gpu.get(_UUID, "")):
            yield from _find_problems_of_gpu(f"GPU {index}", gpu)


def _find_fabric_problems(gpus: Gpus) -> Iterator[Finding]:
    """Yield a finding if the GPUs of a board with NVSwitches wait for its fabric manager."""
    advice = f"start nvidia-fabricmanager on the host, in the driver's own version, or {REPLACE}"
    if gpus.cuda == _CUDA_NOT_READY:
        yield Finding(
            FAILED,
            f"NVIDIA's fabric manager is not up: CUDA cannot start (error {_CUDA_NOT_READY})",
            advice,
        )
        return
    waiting = 0
    for gpu in gpus.devices.values():
        if gpu.get(_FABRIC) in _WAITING_STATES:
            waiting += 1
    # If CUDA could start, or failed otherwise, its own result counts.
    if waiting and gpus.cuda is None:
        total = count_of(len(gpus.devices), "GPU")
        problem = f"{waiting} of {total} wait for NVIDIA's fabric manager"
        yield Finding(WARNING, problem, advice)


def _find_problems_of_gpu(name: str, gpu: Gpu) -> Iterator[Finding]:
    """Yield the problems of one GPU; of a lost GPU only that.

    Args:
        name: For example ``GPU 3``.
        gpu: Its values; a field that the driver does not know is absent.
    """
    for value in gpu.values():
        if value in _LOST_VALUES:
            yield Finding(FAILED, f"{name} {_LOST_VALUES[value]}", REPLACE)
            return
    if gpu.get(_UNREPAIRED) in _YES_VALUES:
        yield Finding(FAILED, f"{name} has broken memory that could not be replaced", REPLACE)
    errors = gpu.get(_ECC, "")
    if errors.isdigit() and int(errors):
        problem = f"{name} has {count_of(int(errors), 'memory error')} that could not be corrected"
        yield Finding(FAILED, problem, f"reset the GPU, or {REPLACE}")
    if gpu.get(_RETIRED) in _YES_VALUES or gpu.get(_REMAPPED) in _YES_VALUES:
        problem = f"{name} has broken memory that the next reset replaces"
        yield Finding(WARNING, problem, "reset the GPU or reboot the host when no job runs on it")
    slow: list[str] = []
    # The driver knows one of the two fields.
    for field in _SLOWDOWN_FIELDS:
        if gpu.get(field, "").startswith("0x"):
            bits = int(gpu[field], 16)
            slow = [reason for bit, reason in _SLOWDOWN_REASONS.items() if bits & bit]
            break
    if slow:
        yield Finding(
            WARNING,
            f"{name} is slowed down: {', '.join(slow)}",
            "check cooling and power of the host",
        )
