"""Stands in for nvidia-smi: two healthy GPUs, or with the fault that NVML_FAULT names.

No machine of the tests has one.

Statuses are those of nvidia-smi(1). A driver before 535 does not know
`clocks_event_reasons`, and ends with 2.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

FAULT = os.environ.get("NVML_FAULT", "")
STATUS = {"mismatch": 18, "no driver": 9, "fallen": 15}
FABRIC = {"fabric": ("Not Started", "Not Started"), "fabric late": ("Completed", "In Progress")}


def value(name: str, second: bool) -> str:
    if second and FAULT in ("lost", "reset") and name not in ("index", "uuid", "gpu_uuid"):
        return {"lost": "[GPU is lost]", "reset": "[GPU requires reset]"}[FAULT]
    if name == "utilization.gpu":
        return "50" if second else busy()
    values = {
        "index": str(int(second)),
        "uuid": f"GPU-{'bb' if second else 'aa'}",
        "gpu_uuid": f"GPU-{'bb' if second else 'aa'}",
        "driver_version": "450.51.06" if FAULT == "old" else "580.95.05",
        "ecc.errors.uncorrected.volatile.total": "7" if second and FAULT == "ecc" else "0",
        "retired_pages.pending": "[N/A]",
        "clocks_throttle_reasons.active": "0x0000000000000041"
        if second and FAULT == "hot"
        else "0x0000000000000001",
        "fabric.state": FABRIC.get(FAULT, ("[N/A]", "[N/A]"))[second],
        "remapped_rows.pending": "Yes" if second and FAULT == "pending" else "No",
        "remapped_rows.failure": "Yes" if second and FAULT == "remap" else "No",
        "memory.used": str((1 << 13) + second),
    }
    return (
        "[N/A]"
        if FAULT == "none of it" and "e" in name[5:] and name != "driver_version"
        else values[name]
    )


def busy() -> str:
    """Return the use of the first GPU: more the second time, when the FIFO of
    NVML_USE is opened.
    """
    fifo = os.environ["NVML_USE"]
    mark = Path(f"{fifo}-before")
    if not mark.exists():
        mark.touch()
        return "70"
    os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    return "90"


def main(words: list[str]) -> int:
    if words == ["--list-gpus"]:
        print("GPU 0: A\nGPU 1: A")
        return 0
    if FAULT == "hang":
        signal.pause()
    if FAULT == "crash":
        os.kill(os.getpid(), signal.SIGABRT)
    if FAULT == "slow":  # a driver that starts its GPUs first
        time.sleep(4)
    fields = words[0].partition("=")[2].split(",")
    if "clocks_event_reasons.active" in fields or (FAULT == "old" and "fabric.state" in fields):
        print('Field "clocks_event_reasons.active" is not a valid field to query.')
        return 2
    if FAULT in STATUS:
        print("No devices were found")
        return STATUS[FAULT]
    for second in (False,) if FAULT == "one is missing" else (False, True):
        print(", ".join(value(name, second) for name in fields))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
