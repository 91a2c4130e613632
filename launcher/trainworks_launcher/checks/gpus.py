"""What nvidia-smi says of the GPUs of a container, and what that means.

Loaded where there are GPUs.

A broken driver may never answer: each question is a process that is left behind at a deadline. A
question that a driver does not know ends with status 2, and is left open. Statuses are those of
nvidia-smi(1).
"""

from __future__ import annotations

import contextlib
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
# From driver 535 on, and before.
_SLOW = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_USE, _MEMORY = "utilization.gpu", "memory.used"

_QUESTIONS = (
    ("gpu", ("index", _UUID, _DRIVER, _ECC, _RETIRED)),
    *(("gpu", (_UUID, name)) for name in (*_SLOW, _FABRIC)),
    ("remapped-rows", (_UUID, _REMAPPED, _UNREPAIRED)),
)
"""Asked side by side: where the driver has to start its GPUs first, it does so once."""

_NO_DRIVER, _LOST, _MISMATCH = 9, 15, 18
_GONE = {
    "[GPU is lost]": "is lost: it has fallen off the bus",
    "[GPU requires reset]": "has to be reset before it can be used",
}
"""Values in the place of every other one (nvmlErrorString)."""

_REASONS: Mapping[int, str] = {
    0x08: "hardware slowdown",
    0x20: "too hot (software limit)",
    0x40: "too hot (hardware limit)",
    0x80: "power brake from outside",
}
"""Reasons for low clocks that are not normal; an idle GPU has others (nvml.h)."""

_CUDA_NOT_READY = 802
"""CUDA_ERROR_SYSTEM_NOT_READY (cuda.h): the fabric manager of an NVSwitch board is not up."""

_WAITING, _YES = ("Not Started", "In Progress"), ("Yes", "1")

_START_CUDA = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"

Gpu = Mapping[str, str]
"""What one GPU says, by the names of nvidia-smi's fields."""


class Gpus(NamedTuple):
    """All GPUs of a container.

    Attributes:
        problem: Why nothing is known, in words; ``""`` if all is well.
        status: How nvidia-smi ended.
        devices: By index.
        cuda: What CUDA's own start returned (cuda.h); None where it was not asked, or is not there.
    """

    problem: str = ""
    status: int = 0
    devices: Mapping[int, Gpu] = MappingProxyType({})
    cuda: int | None = None

    @property
    def driver(self) -> str:
        """Version of the driver; ``""`` if no GPU says it."""
        return next(
            (gpu[_DRIVER] for gpu in self.devices.values() if gpu.get(_DRIVER, "")[:1].isdigit()),
            "",
        )


def ask(limit: float) -> Gpus:
    """Ask nvidia-smi; what has not answered within ``limit`` seconds is left behind."""
    deadline = time.monotonic() + limit
    try:
        started = [_start(what, fields) for what, fields in _QUESTIONS]
    except OSError:
        return Gpus(problem=f"{PROGRAM} is not in this container")
    answers = [_text_of(process, deadline) for process in started]
    status = started[0].poll()
    if answers[0] is None or status is None:
        return Gpus(problem=f"the NVIDIA driver does not answer within {limit:g} s")
    if status < 0:
        return Gpus(problem=f"{PROGRAM} was ended by signal {-status}")
    more: dict[str, dict[str, str]] = {}
    for (_, fields), text, process in zip(_QUESTIONS, answers, started):
        for row in _rows(text, fields) if process.poll() in (0, status) else ():
            more.setdefault(row[_UUID], {}).update(row)
    devices = {
        int(row["index"]): {**more[row[_UUID]], **row}
        for row in _rows(answers[0], _QUESTIONS[0][1])
    }
    # Boards of NVSwitches before Hopper do not say whether their fabric is up;
    # one GPU alone has none.
    cuda = None
    states = {gpu.get(_FABRIC, "") for gpu in devices.values()}
    if states & set(_WAITING) or (len(devices) > 1 and not states & {*_WAITING, "Completed"}):
        process = subprocess.Popen(
            (sys.executable, "-IS", "-c", _START_CUDA), stdout=_PIPE, stderr=subprocess.DEVNULL
        )
        with contextlib.suppress(ValueError):
            cuda = int(_text_of(process, deadline) or "")
    return Gpus(status=status, devices=devices, cuda=cuda)


def uses(visible: Sequence[str] | None, limit: float) -> list[tuple[int, int, int]]:
    """Return (index, percent of the time, bytes of memory in use) of the GPUs.

    Nothing where they do not say.

    Args:
        visible: The GPUs that the job may use, by number or UUID; None: all.
        limit: Seconds after which it is given up.
    """
    fields = ("index", _UUID, _USE, _MEMORY)
    try:
        text = _text_of(_start("gpu", fields), time.monotonic() + limit)
    except OSError:
        return []
    return [
        (int(row["index"]), int(row[_USE]), int(row[_MEMORY]) << 20)
        for row in _rows(text, fields)
        if row[_USE].isdigit()
        and row[_MEMORY].isdigit()
        and is_visible(visible, int(row["index"]), row[_UUID])
    ]


def is_visible(visible: Sequence[str] | None, index: int, uuid: str) -> bool:
    """Return whether the job may use a GPU: another job's is not this one's affair.

    A UUID may be cut short (CUDA).

    Args:
        visible: What the job may use, by number or UUID; None: all.
        index: Number of the GPU.
        uuid: Its UUID; ``""`` if it does not say.
    """
    if visible is None or str(index) in visible:
        return True
    return bool(uuid) and any(uuid.startswith(name) for name in visible if name.startswith("GPU-"))


def _start(what: str, fields: Sequence[str]) -> subprocess.Popen[bytes]:
    # The field of the UUID has another name there.
    names = ",".join(f"gpu_{_UUID}" if name == _UUID and what != "gpu" else name for name in fields)
    words = (PROGRAM, f"--query-{what}={names}", "--format=csv,noheader,nounits")
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=_PIPE, stderr=subprocess.DEVNULL
    )


def _text_of(process: subprocess.Popen[bytes], deadline: float) -> str | None:
    """Return what a process prints.

    None for one that has not ended by the deadline: it is not waited for.
    """
    try:
        return process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0].decode(
            "utf-8", "replace"
        )
    except subprocess.TimeoutExpired:
        process.kill()
        return None


def _rows(text: str | None, fields: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the lines of an answer, by field; other lines say that a GPU could not be asked."""
    for line in (text or "").splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(fields) and (fields[0] != "index" or values[0].isdigit()):
            yield dict(zip(fields, values))


def judge_gpus(asked: Checks, gpus: Gpus) -> Iterator[Finding]:
    """Yield what is wrong with the driver and the GPUs of a host."""
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
    elif gpus.status == _LOST and len(gpus.devices) >= asked.gpus:
        yield Finding(FAILED, "a GPU is lost: it has fallen off the bus", REPLACE)
    elif gpus.status not in (0, _LOST):
        yield Finding(WARNING, f"{PROGRAM} ends with status {gpus.status}", look)
    yield from _fabric(gpus)
    if (gpus.devices or gpus.status == _LOST) and len(gpus.devices) < asked.gpus:
        problem = (
            f"the NVIDIA driver knows {len(gpus.devices)} of the {count_of(asked.gpus, 'GPU')} in"
            " this container"
        )
        yield Finding(FAILED, problem, REPLACE)
    for index, gpu in gpus.devices.items():
        if is_visible(asked.visible_gpus, index, gpu.get(_UUID, "")):
            yield from _gpu(f"GPU {index}", gpu)


def _fabric(gpus: Gpus) -> Iterator[Finding]:
    """Yield whether the GPUs of a board with NVSwitches wait for its fabric manager."""
    advice = f"start nvidia-fabricmanager on the host, in the driver's own version, or {REPLACE}"
    if gpus.cuda == _CUDA_NOT_READY:
        yield Finding(
            FAILED,
            f"NVIDIA's fabric manager is not up: CUDA cannot start (error {_CUDA_NOT_READY})",
            advice,
        )
        return
    late = sum(gpu.get(_FABRIC) in _WAITING for gpu in gpus.devices.values())
    if late and gpus.cuda is None:
        problem = f"{late} of {count_of(len(gpus.devices), 'GPU')} wait for NVIDIA's fabric manager"
        yield Finding(WARNING, problem, advice)


def _gpu(name: str, gpu: Gpu) -> Iterator[Finding]:
    gone = next((_GONE[value] for value in gpu.values() if value in _GONE), "")
    if gone:
        yield Finding(FAILED, f"{name} {gone}", REPLACE)
        return
    if gpu.get(_UNREPAIRED) in _YES:
        yield Finding(FAILED, f"{name} has broken memory that could not be replaced", REPLACE)
    errors = gpu.get(_ECC, "")
    if errors.isdigit() and int(errors):
        problem = f"{name} has {count_of(int(errors), 'memory error')} that could not be corrected"
        yield Finding(FAILED, problem, f"reset the GPU, or {REPLACE}")
    if gpu.get(_RETIRED) in _YES or gpu.get(_REMAPPED) in _YES:
        problem = f"{name} has broken memory that the next reset replaces"
        yield Finding(WARNING, problem, "reset the GPU or reboot the host when no job runs on it")
    bits = next((int(gpu[name], 16) for name in _SLOW if gpu.get(name, "").startswith("0x")), 0)
    slow = [text for bit, text in _REASONS.items() if bits & bit]
    if slow:
        yield Finding(
            WARNING,
            f"{name} is slowed down: {', '.join(slow)}",
            "check cooling and power of the host",
        )
