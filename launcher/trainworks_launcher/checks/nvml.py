"""What NVIDIA's management library says about the GPUs, by ctypes: driver, ECC errors, throttling, XID errors.

``ask`` runs it in a process of its own: with a broken driver its first call may never return. Numbers of constants
and layouts are those of nvml.h (NVML API reference).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import time
from typing import Callable, Iterator, Sequence

from trainworks_launcher.checks.gpus import (
    CUDA_LIBRARY,
    FABRIC_IN_PROGRESS,
    FABRIC_NOT_STARTED,
    LIBRARY,
    LOST,
    NOT_SUPPORTED,
    OK,
    RESET_REQUIRED,
    Gpu,
    Gpus,
    is_visible,
)

_UNCORRECTED, _SINCE_LOAD = 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t
_XID_EVENT = 8  # nvmlEventTypeXidCriticalError
_VERSION_BYTES = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
_ANSWER_BYTES = 1 << 20

_Call = Callable[..., int]


class _EventData(ctypes.Structure):
    """nvmlEventData_t."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def ask(limit: float, listen: float = 0.0) -> Gpus:
    """Ask the library, in a process that is killed and left behind if it has not answered within ``limit`` seconds.

    Args:
        limit: Seconds in all.
        listen: Seconds in which XID errors are listened for, after all else was read.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.write(writer, json.dumps(read(listen)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    answer, deadline = b"", time.monotonic() + limit
    with contextlib.suppress(OSError):
        while select.select((reader,), (), (), max(0.0, deadline - time.monotonic()))[0]:
            chunk = os.read(reader, 65536)
            answer += chunk
            if not chunk or len(answer) > _ANSWER_BYTES:
                break
        else:
            answer = b"late"
    os.close(reader)
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGKILL)
    return _answer_of(answer, limit)


def _answer_of(answer: bytes, limit: float) -> Gpus:
    if answer == b"late":
        return Gpus(problem=f"the NVIDIA driver does not answer within {limit:g} s")
    try:
        found = json.loads(answer)
    except ValueError:
        return Gpus(problem=f"{LIBRARY} crashed when it was asked")
    problem, error, driver, devices, xids, cuda = found
    told = tuple((index, number) for index, number in xids)
    return Gpus(problem, error, driver, tuple(Gpu(*row) for row in devices), told, cuda)


def read(listen: float = 0.0) -> Gpus:
    """Ask the library in this process, which may never come back."""
    call = _load()
    if call is None:
        return Gpus(problem=f"{LIBRARY} is not in this container")
    started = call("nvmlInit_v2")
    if started != OK:
        return Gpus(error=started)
    version = ctypes.create_string_buffer(_VERSION_BYTES)
    call("nvmlSystemGetDriverVersion", version, _VERSION_BYTES)
    count = ctypes.c_uint()
    call("nvmlDeviceGetCount_v2", ctypes.byref(count))
    events = ctypes.c_void_p()
    listening = listen > 0 and call("nvmlEventSetCreate", ctypes.byref(events)) == OK
    devices, handles = [], {}
    for index in range(count.value):
        handle = ctypes.c_void_p()
        error = call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        if error != OK:
            devices.append(Gpu(error=error))
            continue
        handles[handle.value] = index
        if listening:
            call("nvmlDeviceRegisterEvents", handle, ctypes.c_ulonglong(_XID_EVENT), events)
        devices.append(_device(call, handle))
    xids = _listen(call, events, handles, listen) if listening else ()
    # Boards of NVSwitches before Hopper do not say in NVML whether their fabric is up; one GPU alone has none.
    waiting = any(gpu.fabric in (FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS) for gpu in devices)
    asked = waiting or (len(devices) > 1 and all(gpu.fabric is None for gpu in devices))
    cuda = _start_of_cuda() if asked else None
    return Gpus(driver=version.value.decode("ascii", "replace"), devices=tuple(devices), xids=xids, cuda=cuda)


def _start_of_cuda() -> int | None:
    """Return what CUDA's start returns; None where its library is not there."""
    try:
        return int(ctypes.CDLL(CUDA_LIBRARY).cuInit(0))
    except (OSError, AttributeError):
        return None


def _load() -> _Call | None:
    """Return what calls a function of the library by its name; None where there is no library."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None

    def call(name: str, *arguments: object) -> int:
        """Return a call's code; NOT_SUPPORTED for a function that this version of the library does not have."""
        function: _Call | None = getattr(library, name, None)
        return NOT_SUPPORTED if function is None else function(*arguments)

    return call


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: percent of the last sample's time in which a kernel ran, and memory was read or written."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def uses(visible: Sequence[str] | None = None) -> Iterator[list[tuple[int, int, int]]]:
    """Yield (index, percent of the time, bytes of memory in use) of each GPU, whenever asked, while any answers.

    Runs in this process, which may never come back.

    Args:
        visible: The GPUs that the job may use, by number or UUID; None: all.
    """
    call = _load()
    count = ctypes.c_uint()
    if call is None or call("nvmlInit_v2") != OK or call("nvmlDeviceGetCount_v2", ctypes.byref(count)) != OK:
        return
    handles: dict[int, ctypes.c_void_p] = {}
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
        if call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)) == OK:
            call("nvmlDeviceGetUUID", handle, uuid, _UUID_BYTES)
            if is_visible(visible, index, uuid.value.decode("ascii", "replace")):
                handles[index] = handle
    while True:
        rows = []
        for index, handle in handles.items():
            use, memory = _Utilization(), _Memory()
            if (
                call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(use)) == OK
                and call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)) == OK
            ):
                rows.append((index, use.gpu, memory.used))
        if not rows:
            return
        yield rows


def _device(call: _Call, handle: ctypes.c_void_p) -> Gpu:
    ecc, throttle = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    retired = ctypes.c_uint()
    rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
    counted = call("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_LOAD, ctypes.byref(ecc))
    remapped = call("nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, rows))
    waiting = call("nvmlDeviceGetRetiredPagesPendingStatus", handle, ctypes.byref(retired))
    clocks = call("nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(throttle))
    pending = [bool(rows[2].value)] if remapped == OK else []
    pending += [bool(retired.value)] if waiting == OK else []
    uuid = ctypes.create_string_buffer(_UUID_BYTES)
    call("nvmlDeviceGetUUID", handle, uuid, _UUID_BYTES)
    fabric = _FabricInfo()
    joined = call("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(fabric))
    gone = next((code for code in (counted, remapped, waiting, clocks) if code in (LOST, RESET_REQUIRED)), OK)
    return Gpu(
        error=gone,
        ecc=ecc.value if counted == OK else None,
        remap_failed=bool(rows[3].value) if remapped == OK else None,
        pending=any(pending) if pending else None,
        throttle=throttle.value if clocks == OK else None,
        uuid=uuid.value.decode("ascii", "replace"),
        fabric=fabric.state if joined == OK else None,
    )


def _listen(
    call: _Call, events: ctypes.c_void_p, handles: dict[int | None, int], seconds: float
) -> tuple[tuple[int, int], ...]:
    """Return the XID errors that come within some seconds."""
    found: list[tuple[int, int]] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        data = _EventData()
        rest = max(1, int((deadline - time.monotonic()) * 1000))
        if call("nvmlEventSetWait_v2", events, ctypes.byref(data), rest) != OK:
            break
        if data.type == _XID_EVENT:
            found.append((handles.get(data.device, -1), data.data))
    return tuple(found)
