"""The real `cpu` image, as each engine builds it, and a folder for made libraries."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from image.libraries import Tree
from image.support import ROOT, BuiltByCommand, build_once, given_image
from trainworks.engine import ENGINES

MIRROR = "TRAINWORKS_TEST_MIRROR"
"""Variable: a folder with the sources that only GitHub has (`build.py mirror` fills one)."""


@pytest.fixture(scope="session", params=list(ENGINES))
def image(request: pytest.FixtureRequest, shared: Path) -> BuiltByCommand:
    """Give the image as each engine built it."""
    return build_once(shared, request.param)


@pytest.fixture(scope="session")
def docker_image(shared: Path) -> BuiltByCommand:
    """Give the image as Docker built it, for jobs of several containers on a private network."""
    return given_image() or build_once(shared, "docker")


@pytest.fixture(scope="session")
def mirror() -> Path:
    """Give a mirror folder that has the plugin's source."""
    folder = Path(os.environ.get(MIRROR) or ROOT.parent / "shared" / "sources")
    if not list(folder.glob("aws-ofi-nccl-*.bundle")):
        pytest.skip(f"NOT TESTED: {folder} has no aws-ofi-nccl; {MIRROR} names a folder of `build.py mirror`")
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Give a folder that gets real shared libraries."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("NOT TESTED: no C compiler here (apt install gcc), so no ELF files can be made for the probe")
    return Tree(root=tmp_path, compiler=compiler)


@pytest.fixture
def network() -> Iterator[Any]:
    """Give a private Docker network with a name of its own."""
    import docker

    client = docker.from_env()
    made = client.networks.create(f"trainworks-test-{uuid.uuid4().hex[:10]}", driver="bridge", internal=True)
    try:
        yield made
    finally:
        made.remove()
        client.close()
