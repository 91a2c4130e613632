"""Plans of command lines that stand on pages: the launcher makes each, and starts nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from documentation.blocks import ROOT

PROGRAMS = ("torchrun", "mpirun", "ray")
"""Programs of an image that a plan looks for; the plan does not start them."""


def plan(words: Sequence[str], variables: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Return the plan of a line that starts with `train`, made in a folder with a `train.py` and a
    `script.sh`.

    Args:
        words: The line. A `--plan` in it may stand or be absent.
        variables: Environment variables of the platform.
        folder: An empty folder; the files and the programs of an image are written to it.
    """
    (folder / "train.py").touch()
    _write_program(folder / "script.sh")
    programs = folder / "bin"
    programs.mkdir()
    for name in PROGRAMS:
        _write_program(programs / name)
    options = [word for word in words[1:] if word != "--plan"]
    done = subprocess.run(
        (sys.executable, "-m", "trainworks_launcher", "--plan", *options),
        cwd=folder,
        env={
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "launcher"),
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    planned: dict[str, Any] = json.loads(done.stdout)
    return planned


def _write_program(path: Path) -> None:
    """Write a program that does nothing."""
    path.write_text("#!/bin/sh\n", encoding="utf-8")
    path.chmod(0o755)
