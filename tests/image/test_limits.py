"""Containers whose engine or limits refuse threads: a line says which, and the
status is the launcher's own.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from image.support import BuiltByCommand

pytestmark = pytest.mark.engine

PROFILE = {
    "defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [{"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}],
}
"""Profile of engines of 2020, which answer an unknown system call with EPERM."""


@pytest.mark.parametrize(
    ("option", "status", "reason"),
    [
        (
            "--security-opt=seccomp={}",
            70,
            "may not start threads: its seccomp profile refuses clone3",
        ),
        ("--pids-limit=1", 70, "may not start threads: the pids limit of this container is 1"),
        (
            "--pids-limit=3",
            65,
            "Resource temporarily unavailable: the pids limit of this container is 3",
        ),
    ],
)
def test_a_container_that_may_not_start_threads_or_processes_says_why(
    docker_image: BuiltByCommand, option: str, status: int, reason: str, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(PROFILE), encoding="ascii")
    argv = (
        "docker",
        "run",
        "--rm",
        option.format(profile),
        docker_image.reference,
        "train",
        "--",
        "python",
        "-V",
    )
    result = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == status, result.stderr
    assert reason in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
