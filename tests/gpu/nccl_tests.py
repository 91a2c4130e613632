"""nccl-tests' all_reduce_perf of an image checks its own sums."""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from together import NotTestedError, main, nvidia_libraries

NEEDS = ("torch", "cuda", "archive")
BOUND = 60


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Run the program in one process: it ends with a status other than 0 if a sum is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(options["archive"]) as archive:
            archive.extractall(folder, filter="data")
        program = Path(folder, "bin", "all_reduce_perf")
        if not program.is_file():
            raise NotTestedError("the archive has no bin/all_reduce_perf")
        path = os.pathsep.join(
            filter(None, (f"{folder}/lib", *nvidia_libraries(), os.environ.get("LD_LIBRARY_PATH")))
        )
        result = subprocess.run(
            [
                str(program),
                "--minbytes",
                "8",
                "--maxbytes",
                "64M",
                "--stepfactor",
                "8",
                "--ngpus",
                "1",
                "--check",
                "1",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": path},
        )
    print(result.stdout)
    assert result.returncode == 0, f"all_reduce_perf ended with status {result.returncode}"
    return {"last lines": result.stdout.splitlines()[-6:]}


if __name__ == "__main__":
    main(globals())
