"""The first block of docs/ship.md, as it stands there: from a build to a promoted image."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from documentation.blocks import Block
from image.support import ROOT, engine_that_answers
from push.support import RegistryServer
from trainworks.cli.grammar import CPU_TARGET
from trainworks.registry.tools import Registries

pytestmark = pytest.mark.engine


@pytest.mark.usefixtures("logged_in")
def test_the_block_of_the_page_ends_with_a_promoted_image(
    page_blocks: list[Block],
    server: RegistryServer,
    other: RegistryServer,
    registries: Registries,
    tmp_path: Path,
) -> None:
    """Run in a clone without changes; the smallest image, and two registries on this machine."""
    engine_that_answers("docker")
    if shutil.which("cosign") is None:
        pytest.skip("NOT TESTED: no cosign (tools/set-up-engine all)")
    clone = tmp_path / "clone"
    subprocess.run(("git", "clone", "--quiet", str(ROOT), str(clone)), check=True)
    (block,) = page_blocks
    hosts = {"host": server.host, "other": other.host}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ("bash", "-euc", block.adapted(target=CPU_TARGET, **hosts)),
        cwd=clone,
        env={**os.environ, "PATH": path, "COSIGN_PASSWORD": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    place = f"{other.host}/pytorch-training"
    digest = registries.read_manifest(place, "2026.11").digest
    assert f"{place}@{digest}" in done.stdout
    assert registries.read_manifest(f"{server.host}/pytorch-training", digest).digest == digest
