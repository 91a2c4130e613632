"""Starts the launcher of this checkout as an image does, with torchrun as a
module of this Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from together import ONE_GPU, ROOT, free_port


def launch(
    folder: str,
    words: Sequence[str],
    ranks: int,
    variables: Mapping[str, str] | None = None,
    mode: str = "torchrun",
) -> tuple[int, str, float]:
    """Run a program under the launcher.

    Return its status, its output with the launcher's, and the seconds.

    Args:
        folder: Where files may be made.
        words: A script and its arguments.
        ranks: Processes on this host.
        variables: More environment variables.
        mode: `torchrun`, or `none`: the script alone.
    """
    place = Path(folder)
    torchrun = place / "torchrun"
    torchrun.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n', encoding="utf-8"
    )
    torchrun.chmod(0o755)
    manifest = place / "image.json"
    programs = {"python": sys.executable, "torchrun": str(torchrun)}
    manifest.write_text(
        json.dumps({"schema": 1, "name": "gpu-suite", "programs": programs}), encoding="utf-8"
    )
    options = (
        ["--mode", "torch_distributed", "--processes-per-host", str(ranks)]
        if mode == "torchrun"
        else []
    )
    begun = time.monotonic()
    result = subprocess.run(
        [
            sys.executable,
            str(ROOT / "launcher" / "trainworks_launcher" / "__main__.py"),
            *options,
            "--",
            *words,
        ],
        env={
            **os.environ,
            **ONE_GPU,
            "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
            "SAGEMAKER_BASE_DIR": str(place / "ml"),
            "MASTER_PORT": str(free_port()),
            **(variables or {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )
    return result.returncode, result.stdout, time.monotonic() - begun


def check(variables: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run `train check`; return its status and its output."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "launcher" / "trainworks_launcher" / "__main__.py"), "check"],
        env={**os.environ, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return result.returncode, result.stdout
