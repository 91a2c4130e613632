"""NCCL through an image's own aws-ofi-nccl and libfabric, with libfabric's tcp provider."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from together import NotTestedError, main, nvidia_libraries, ranks

NEEDS = ("torch", "cuda", "nccl", "archive")
BOUND = 90

MIB = 64

ASK = """
import ctypes, sys

library, first = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p()
library.fi_getinfo(
    library.fi_version(), None, None, ctypes.c_uint64(1 << 54), None, ctypes.byref(first)
)
"""
"""Lets libfabric load its providers: with CUDA it first looks for GPUs, and
says how many there are.
"""

DETECTED = re.compile(r"Number of CUDA devices detected: (\d+)")


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Unpack the archive, which has the libraries in lib/, and move data through them."""
    if options["device"] == "cpu":
        raise NotTestedError("the plugin is NCCL's, which needs a GPU")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(options["archive"]) as archive:
            archive.extractall(folder, filter="data")
        plugins = sorted(Path(folder, "lib").glob("libnccl-net*.so"))
        if not plugins:
            raise NotTestedError("the archive has no lib/libnccl-net*.so")
        # The plugin asks the loader for CUDA's runtime by a name that no wheel has.
        for runtime in (
            file for place in nvidia_libraries() for file in Path(place).glob("libcudart.so.*")
        ):
            (plugins[0].parent / "libcudart.so").symlink_to(runtime)
        path = os.pathsep.join(
            filter(None, (str(plugins[0].parent), os.environ.get("LD_LIBRARY_PATH")))
        )
        variables = {
            "LD_LIBRARY_PATH": path,
            "NCCL_NET_PLUGIN": str(plugins[0]),
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_FILE": f"{folder}/nccl-%p.log",
            "FI_PROVIDER": "tcp",
            "OFI_NCCL_PROTOCOL": "SENDRECV",
        }
        libfabric = plugins[0].parent / "libfabric.so.1"
        has_cuda = libfabric.is_file() and b"\0libcudart.so\0" in libfabric.read_bytes()
        result = subprocess.run(
            (sys.executable, "-c", ASK, str(libfabric)),
            env={
                **os.environ,
                "LD_LIBRARY_PATH": path,
                "FI_LOG_LEVEL": "info",
                "FI_LOG_SUBSYS": "core",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        ranks(__file__, 2, "move", variables)
        logs = "\n".join(
            file.read_text(errors="replace") for file in Path(folder).glob("nccl-*.log")
        )
    used = [line.strip() for line in logs.splitlines() if "NET/" in line and "sing" in line]
    assert any("OFI" in line for line in used), f"NCCL did not take the plugin: {used[:5]}"
    detected = DETECTED.search(result.stderr)
    gpus = int(detected[1]) if detected else 0
    assert not has_cuda or gpus, (
        f"the archive's libfabric has CUDA, and finds no GPU: {result.stderr[-1000:]}"
    )
    return {"plugin": plugins[0].name, "NCCL": used[0][-200:], "GPUs that libfabric finds": gpus}


def move() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    data = torch.arange(MIB << 18, device="cuda", dtype=torch.int32) * (rank + 1)
    dist.all_reduce(data)
    assert torch.equal(data, torch.arange(MIB << 18, device="cuda", dtype=torch.int32) * 3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(globals())
