"""What NVIDIA's management library can say about GPUs, as values. Pure. Codes are those of nvmlReturn_t (nvml.h)."""

from __future__ import annotations

from typing import NamedTuple, Sequence

LIBRARY, CUDA_LIBRARY = "libnvidia-ml.so.1", "libcuda.so.1"

OK = 0
NOT_SUPPORTED = 3
NO_DRIVER = 9
LOST = 15  # the GPU has fallen off the bus, or cannot be reached
RESET_REQUIRED = 16
MISMATCH = 18  # the library of the container and the kernel's driver have different versions


FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS = 1, 2  # nvmlGpuFabricState_t
CUDA_NOT_READY = 802  # CUDA_ERROR_SYSTEM_NOT_READY of cuda.h: the fabric manager of an NVSwitch board is not up


class Gpu(NamedTuple):
    """One GPU. None: the GPU does not have it, or does not say.

    Attributes:
        error: NVML's return code where the GPU does not answer; OK if it does.
        ecc: Uncorrected memory errors since the driver was loaded.
        remap_failed: Whether a broken row of memory could not be replaced.
        pending: Whether a broken page or row waits for a reset to be replaced.
        throttle: Reasons why its clocks are low, as bits.
        uuid: Its UUID; ``""`` if it does not say.
        fabric: How far it has joined the fabric of an NVSwitch board: nvmlGpuFabricState_t.
    """

    error: int = OK
    ecc: int | None = None
    remap_failed: bool | None = None
    pending: bool | None = None
    throttle: int | None = None
    uuid: str = ""
    fabric: int | None = None


class Gpus(NamedTuple):
    """All GPUs of a container.

    Attributes:
        problem: Why nothing is known, in words; ``""`` if all is well.
        error: NVML's return code of its start; OK if it started, or could not be asked.
        driver: Version of the driver.
        devices: In the order of their indices.
        xids: (index, number) of errors that came while it was asked.
        cuda: What CUDA's own start returned (cuda.h); None where it was not asked, or is not there.
    """

    problem: str = ""
    error: int = OK
    driver: str = ""
    devices: tuple[Gpu, ...] = ()
    xids: tuple[tuple[int, int], ...] = ()
    cuda: int | None = None


def is_visible(visible: Sequence[str] | None, index: int, uuid: str) -> bool:
    """Return whether the job may use a GPU: another job's is not this one's affair. A UUID may be cut short (CUDA).

    Args:
        visible: What the job may use, by number or UUID; None: all.
        index: Number of the GPU.
        uuid: Its UUID; ``""`` if it does not say.
    """
    if visible is None or str(index) in visible:
        return True
    return bool(uuid) and any(uuid.startswith(name) for name in visible if name.startswith("GPU-"))
