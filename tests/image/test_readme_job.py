"""The failed job that the README shows, run as its example says: each command prints what stands below it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from image.support import ROOT, BuiltByCommand

pytestmark = pytest.mark.engine


def run(command: tuple[str, ...], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=600)
    return done.stdout


def test_the_failed_job_of_the_readme(docker_image: BuiltByCommand, tmp_path: Path) -> None:
    folder = tmp_path / "failing"
    shutil.copytree(ROOT / "examples" / "failing", folder)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```console\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    try:
        run(("sh", "two-hosts.sh", docker_image.reference), folder)
        seen = ""
        for command in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
            seen += f"$ {command}\n{run(('bash', '-c', command), folder)}"
    finally:
        subprocess.run(("docker", "rm", "--force", "node-1", "node-2"), check=False, capture_output=True)
        subprocess.run(("docker", "network", "rm", "failing"), check=False, capture_output=True)
    assert seen == block
