"""The real `cpu` image, as each engine builds it, and a folder for made libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from image.libraries import Tree
from image.support import ROOT, BuiltByCommand, build_once, given_image
from trainworks.engine import ENGINES
from trainworks.engine.protocol import Job, Mount

CELL = "cu121"
"""The CUDA cell of the image with NCCL's plugin."""

CUDA_IMAGE = "TRAINWORKS_TEST_CUDA_IMAGE"
"""Variable: another image of this cell, of Docker, that takes its place: one
built ``--without libfabric-cuda``.
"""

MIRROR = "TRAINWORKS_TEST_MIRROR"
"""Variable: a folder with the sources that only GitHub has (`build.py mirror` fills one)."""


@pytest.fixture(scope="session", params=list(ENGINES))
def image(request: pytest.FixtureRequest, shared: Path) -> BuiltByCommand:
    """Give the image as each engine built it."""
    return (given_image() if request.param == "docker" else None) or build_once(
        shared, request.param
    )


@pytest.fixture(scope="session")
def docker_image(shared: Path) -> BuiltByCommand:
    """Give the image as Docker built it, for jobs of several containers on a private network."""
    return given_image() or build_once(shared, "docker")


@pytest.fixture(scope="session")
def mirror() -> Path:
    """Give a mirror folder that has the plugin's source."""
    folder = Path(os.environ.get(MIRROR) or ROOT.parent / "shared" / "sources")
    if not list(folder.glob("aws-ofi-nccl-*.bundle")):
        pytest.skip(
            f"NOT TESTED: {folder} has no aws-ofi-nccl;"
            f" {MIRROR} names a folder of `build.py mirror`"
        )
    return folder


@pytest.fixture(scope="session")
def cuda_image(shared: Path, mirror: Path) -> BuiltByCommand:
    """Give the CUDA image with all its parts; its own promises were tested when it was built.

    A mirror may lack libfabric's source: then it is the image that a user gets there, and tests of
    GPUs' memory are skipped.
    """
    more: tuple[str, ...] = ("--mirror", str(mirror), "--strict")
    if not list(mirror.glob("libfabric-cuda-*.bundle")):
        more += ("--without", "libfabric-cuda")
    return given_image(CUDA_IMAGE) or build_once(shared, "docker", cuda=CELL, more=more)


@pytest.fixture(scope="session")
def programs(cuda_image: BuiltByCommand, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the program that is NCCL here, and with the stand-in for CUDA."""
    folder = tmp_path_factory.mktemp("fabric")
    shutil.copytree(Path(__file__).parent / "fabric", folder, dirs_exist_ok=True)
    version = int(CELL.removeprefix("cu")) * 100
    strict = "gcc -O2 -Wall -Wextra -Werror"
    script = (
        f"cd /fabric && {strict} -o transfer transfer.c -ldl && {strict} -Wno-cast-function-type"
        f" -shared -fPIC -DSTAND_IN_VERSION={version} -Wl,-soname,libcudart.so -o libcudart.so"
        " stand_in_cudart.c && ln -s libcudart.so libcuda.so.1"
    )
    mounts = (Mount(source=folder, target="/fabric"),)
    has_compiler = (
        cuda_image.engine.run(
            cuda_image.reference, Job(command=("sh", "-c", "command -v gcc"), timeout=300)
        ).status
        == 0
    )
    if has_compiler:
        done = cuda_image.engine.run(
            cuda_image.reference, Job(command=("sh", "-c", script), mounts=mounts, timeout=300)
        )
        assert done.status == 0, done.output
    elif shutil.which("gcc"):
        subprocess.run(
            ("sh", "-c", script.replace("/fabric", str(folder))), check=True, timeout=300
        )
    else:
        pytest.skip(
            "NOT TESTED: no C compiler in the image and none on this machine (apt install gcc)"
        )
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Give a folder that gets real shared libraries."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        pytest.skip(
            "NOT TESTED: no C compiler here (apt install gcc),"
            " so no ELF files can be made for the probe"
        )
    return Tree(root=tmp_path, compiler=compiler)


@pytest.fixture
def network() -> Iterator[Any]:
    """Give a private Docker network with a name of its own."""
    import docker

    client = docker.from_env()
    docker_network = client.networks.create(
        f"trainworks-test-{uuid.uuid4().hex[:10]}", driver="bridge", internal=True
    )
    try:
        yield docker_network
    finally:
        docker_network.remove()
        client.close()
