"""The image of SageMaker's page about smp, each part compiled by its recipe, in one build.

By hand: `make proof`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from image.jobs import assert_trained, prepare, train_on_two_hosts
from image.source_page import (
    FROM_DEBIAN,
    HEADERS,
    TARGET,
    make_base_images,
    make_checkout,
    make_mirror,
    plain_registry,
)
from image.support import ROOT, BuiltByCommand, engine_that_answers
from trainworks.build.base import ensure_base
from trainworks.engine.protocol import Job, Mount
from trainworks.facts.load import load
from trainworks.host.settings import read_host_settings
from trainworks.plan.own_base import OwnBase
from trainworks.plan.resolve import base_reference
from trainworks.terminal.build_progress import BuildProgress

pytestmark = pytest.mark.engine

COMPILED = {
    "nccl": "2.10.3",
    "aws-ofi-nccl": "1.2.0",
    "gdrcopy": "2.5.1",
    "rmm": "0.15.0",
    **{source.name: source.version for source in FROM_DEBIAN},
}

METIS_PROGRAM = """
#include <metis.h>
#include <stdio.h>
int main(void) {
    /* Two triangles with one edge between them. */
    idx_t nodes = 6, weights = 1, parts = 2, cut, part[6];
    idx_t starts[] = {0, 2, 4, 7, 10, 12, 14}, edges[] = {1, 2, 0, 2, 0, 1, 3, 2, 4, 5, 3, 5, 3, 4};
    int status = METIS_PartGraphKway(&nodes, &weights, starts, edges, NULL, NULL, NULL, &parts,
                                     NULL, NULL, NULL, &cut, part);
    int apart = part[0] == part[2] && part[0] != part[3];
    printf("%d cut %d, %d\\n", status == METIS_OK, (int)cut, apart);
    return 0;
}
"""
RMM_PROGRAM = """
#include <rmm/mr/host/new_delete_resource.hpp>
#include <rmm/mr/device/per_device_resource.hpp>
#include <cstdio>
#include <cstring>
int main() {
    rmm::mr::new_delete_resource memory;
    void* bytes = memory.allocate(1 << 20);
    std::memset(bytes, 7, 1 << 20);
    std::printf("%d\\n", static_cast<char*>(bytes)[(1 << 20) - 1]);
    memory.deallocate(bytes, 1 << 20);
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for builds and downloads."""
    return tmp_path_factory.mktemp("source-page")


@pytest.fixture(scope="module")
def removed_at_the_end() -> Iterator[list[str]]:
    """Give a list for names of images; they are removed at the end, also where a build fails."""
    names: list[str] = []
    yield names
    engine = engine_that_answers("docker")
    for name in names:
        engine.remove(name)


@pytest.fixture(scope="module")
def image(folder: Path, removed_at_the_end: list[str]) -> Iterator[BuiltByCommand]:
    """Give the image, as one `build.py` run built and tested it."""
    mirror = folder / "mirror"
    mirror.mkdir()
    hashes = make_mirror(mirror)
    engine = engine_that_answers("docker")
    facts = load(ROOT)
    row = facts.base_by_name["debian12"]
    base = OwnBase(row=row, name=base_reference(row, facts), origin="bootstrapped")
    ensure_base(base, engine, read_host_settings(os.environ), BuildProgress())
    with plain_registry(folder) as registry:
        removed_at_the_end.extend(f"{registry}/cuda:{tag}" for tag in ("devel", "runtime"))
        digests = make_base_images(folder / "bases", base.name, registry)
        root = make_checkout(folder / "checkout", registry, digests, hashes)
        command = (
            *(
                sys.executable,
                str(ROOT / "build.py"),
                "--root",
                str(root),
                "--framework",
                "pytorch",
                "--cuda",
                "cu118",
            ),
            *("--framework-version", "2.13.0", "--sources", "vendor", "--engine", "docker"),
            *("--mirror", str(mirror), "--format", "json"),
        )
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5400)
        (folder / "log").write_text(done.stderr)
        assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-6000:]
        report = json.loads(done.stdout)
        yield BuiltByCommand(
            engine=engine,
            root=root,
            reference=report["tags"][0],
            report=report,
            progress=done.stderr,
        )


def output_of(image: BuiltByCommand, *words: str) -> str:
    done = image.engine.run(image.reference, Job(command=words, timeout=300))
    assert done.status == 0, done.output
    return str(done.output)


def test_every_component_is_compiled_and_every_promise_kept(image: BuiltByCommand) -> None:
    checks = image.report["checks"]
    assert [check["title"] for check in checks if not check["passed"]] == []
    assert {*COMPILED, "libfabric", "open-mpi", "smp", "smddp", "torch"} <= {
        check["component"] for check in checks
    }
    manifest = json.loads(output_of(image, "cat", "/opt/trainworks/image.json"))
    assert manifest["target"]["name"].startswith(TARGET)
    assert {
        name: row["version"] for name, row in manifest["components"].items()
    }.items() >= COMPILED.items()


def test_programs_of_open_mpi_and_libfabric_run(image: BuiltByCommand) -> None:
    assert f"Open MPI v{COMPILED['open-mpi']}" in output_of(image, "ompi_info", "--version")
    # The CUDA of the stand-in was found.
    assert "mpi_built_with_cuda_support:value:true" in output_of(
        image, "ompi_info", "--parsable", "--all"
    )
    assert "provider: tcp" in output_of(image, "fi_info")


def test_programs_compiled_against_metis_and_rmm_run(image: BuiltByCommand, folder: Path) -> None:
    """RMM's memory on the host: its memory on a GPU needs one."""
    work = folder / "programs"
    work.mkdir()
    (work / "metis.c").write_text(METIS_PROGRAM)
    (work / "rmm.cpp").write_text(RMM_PROGRAM)
    (work / "run").write_text(
        "set -e; cd /programs\n"
        "gcc -I/opt/metis/include metis.c -L/opt/metis/lib"
        " -lmetis -lm -o /tmp/metis && /tmp/metis\n"
        "g++ -std=c++14 -I/opt/rmm/include -I/cuda rmm.cpp -Wl,--no-as-needed -L/opt/rmm/lib"
        " -lrmm -Wl,--allow-shlib-undefined -L/usr/local/cuda/lib64 -lcudart -o /tmp/rmm\n"
        "ldd /tmp/rmm | grep -c librmm && /tmp/rmm\n"
    )
    tag = f"{image.reference}-with-compiler"
    command = (
        sys.executable,
        str(ROOT / "build.py"),
        "extend",
        "--base",
        image.reference,
        "--tag",
        tag,
        "--apt",
        "g++",
    )
    done = subprocess.run(
        (*command, "--engine", "docker", "--root", str(image.root)),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    mounts = (
        Mount(source=work, target="/programs", read_only=True),
        Mount(source=folder / HEADERS, target="/cuda", read_only=True),
    )
    try:
        ran = image.engine.run(
            tag, Job(command=("sh", "/programs/run"), mounts=mounts, timeout=300)
        )
    finally:
        image.engine.remove(tag)
    assert (ran.status, ran.output.split("\n")[:3]) == (0, ["1 cut 1, 1", "1", "7"]), ran.output


NCCL = """
import ctypes
nccl = ctypes.CDLL("libnccl.so.2")
number = ctypes.c_int()
nccl.ncclGetVersion(ctypes.byref(number))
with open("/opt/nccl/lib/libnccl.so.2", "rb") as file:
    asks = b"ncclNetPlugin_v4" in file.read()
with open("/opt/aws-ofi-nccl/lib/libnccl-net.so", "rb") as file:
    has = b"ncclNetPlugin_v4" in file.read()
print(number.value, asks, has)
"""


def test_nccl_asks_for_what_its_plugin_has(image: BuiltByCommand) -> None:
    """The plugin itself is not loaded: it wants the driver's library."""
    assert output_of(image, "/usr/bin/python3", "-I", "-c", NCCL).split() == [
        "21003",
        "True",
        "True",
    ]


def test_a_job_speaks_open_mpi_4(image: BuiltByCommand, tmp_path: Path) -> None:
    mounts = (Mount(source=prepare(tmp_path / "ml", "mpi"), target="/opt/ml"),)
    done = image.engine.run(
        image.reference, Job(command=("train", "--plan"), mounts=mounts, timeout=300)
    )
    assert done.status == 0, done.output
    argv = json.loads(done.output)["argv"]
    assert argv[0] == "/opt/amazon/openmpi/bin/mpirun"
    assert any(word.startswith(("orte_", "plm_rsh")) for word in argv), argv
    assert not any("prte" in word for word in argv), argv


def test_two_ranks_on_one_host_train(image: BuiltByCommand, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "ml", "mpi")
    mounts = (Mount(source=folder, target="/opt/ml"),)
    done = image.engine.run(image.reference, Job(command=("train",), mounts=mounts, timeout=300))
    assert done.status == 0, done.output[-4000:]
    assert_trained(done.output, 2, folder)


def test_two_hosts_train_by_mpirun(image: BuiltByCommand, network: Any, tmp_path: Path) -> None:
    train_on_two_hosts(image.reference, network, "mpi", tmp_path)
