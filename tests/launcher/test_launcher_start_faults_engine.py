"""Faults of names, interfaces and addresses on two hosts, in each mode: the job starts all the same, or they are named.

Marked ``engine``; see test_launcher_engine for what is needed. Each fault stands beside the same job without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from launcher_network import Host, Network, call, engine_manifest, need, network_of
from test_launcher_start_engine import texts, train

pytestmark = pytest.mark.engine

MEET = {
    "none": """
import os
print("met 2", os.environ["SM_CURRENT_HOST"], flush=True)
""",
    "mpi": """
import os
from mpi4py import MPI
print("met", MPI.COMM_WORLD.allreduce(1), os.environ["SM_CURRENT_HOST"], flush=True)
""",
    "torch_distributed": """
import os, torch, torch.distributed as group
group.init_process_group("gloo")
one = torch.ones(1)
group.all_reduce(one)
print("met", int(one), os.environ["SM_CURRENT_HOST"], flush=True)
group.destroy_process_group()
""",
}
"""A program for each mode whose ranks add up what each has."""

DEAD = "10.77.9.9"
"""An address of nobody on the hosts' network."""

Fault = Callable[[Network], None]


@pytest.fixture
def network() -> Iterator[Network]:
    need("torchrun", "mpirun")
    with network_of(2) as made:
        yield made


def names_on(network: Network, host: str, **addresses: str) -> None:
    """Let a host know these names, with these addresses; ``own`` is its own name, ``peer`` the other one's."""
    other = next(name for name in network.hosts if name != host)
    lines = ["127.0.0.1 localhost"]
    lines += [f"{addresses['own']} {host}"] if "own" in addresses else []
    lines += [f"{addresses['peer']} {other}"] if "peer" in addresses else []
    Path("/etc/netns", network.space(host), "hosts").write_text("\n".join(lines) + "\n", encoding="ascii")


def own_names(network: Network, address: str = "") -> None:
    """Let each host's own name lead elsewhere; ``""``: nowhere."""
    for host in network.hosts:
        other = next(name for name in network.hosts if name != host)
        own = {"own": address} if address else {}
        names_on(network, host, peer=network.address(other), **own)


def second_interface(network: Network, subnet: str = "10.99.1", *, plugged: bool = True) -> None:
    """Give each host an eth1 that reaches nobody, with an address of one subnet, as two bridges for containers are."""
    for number, host in enumerate(network.hosts, 1):
        call(*network.inside(host, "ip", "link", "add", "eth1", "type", "veth", "peer", "name", "far1"))
        call(*network.inside(host, "ip", "address", "add", f"{subnet}.{number}/24", "dev", "eth1"))
        call(*network.inside(host, "ip", "link", "set", "eth1", "up"))
        if plugged:
            call(*network.inside(host, "ip", "link", "set", "far1", "up"))


def own_names_on_eth1(network: Network) -> None:
    second_interface(network)
    for number, host in enumerate(network.hosts, 1):
        other = next(name for name in network.hosts if name != host)
        names_on(network, host, own=f"10.99.1.{number}", peer=network.address(other))


def only_ipv6(network: Network) -> None:
    for number, host in enumerate(network.hosts, 1):
        call(*network.inside(host, "ip", "address", "flush", "dev", "eth0"))
        call(*network.inside(host, "ip", "address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad"))
    for number, host in enumerate(network.hosts, 1):
        names_on(network, host, own=f"fd77::{number}", peer=f"fd77::{3 - number}")


STARTS: Mapping[str, Fault] = {
    "nothing": lambda _: None,
    "own name to 127.0.1.1": lambda network: own_names(network, "127.0.1.1"),
    "own name to a dead address": lambda network: own_names(network, DEAD),
    "own name unknown": own_names,
    "a second interface that reaches nobody": second_interface,
    "a second interface without a carrier": lambda network: second_interface(network, plugged=False),
    "own name on an interface that reaches nobody": own_names_on_eth1,
    "IPv6 only": only_ipv6,
}


@contextlib.contextmanager
def job(
    network: Network, folder: Path, mode: str, told: Mapping[str, Mapping[str, str]], hosts: Sequence[str] = ()
) -> Iterator[list[Host]]:
    """A job of one process on each host. told: further variables, by host."""
    (folder / "train.py").write_text(MEET[mode], encoding="ascii")
    manifest = str(engine_manifest(folder))
    words = ("--mode", mode, "--processes-per-host", "1") if mode != "none" else ()
    with contextlib.ExitStack() as stack:
        made = []
        for host in hosts or network.hosts:
            variables = {"TRAINWORKS_IMAGE_MANIFEST": manifest, **told.get(host, {})}
            made.append(stack.enter_context(train(network, folder, host, words=words, **variables)))
        yield made


@pytest.mark.parametrize("mode", list(MEET))
@pytest.mark.parametrize("fault", list(STARTS))
def test_a_job_starts_all_the_same(network: Network, tmp_path: Path, fault: str, mode: str) -> None:
    STARTS[fault](network)
    with job(network, tmp_path, mode, {}) as hosts:
        assert [host.wait() for host in hosts] == [0, 0], texts(hosts)
    for name, host in zip(network.hosts, hosts, strict=True):
        assert f"met 2 {name}" in host.text, texts(hosts)
        for word in ("data path", "still waiting", "not joined"):
            assert word not in host.text, texts(hosts)


def test_the_address_that_open_mpi_could_not_reach_is_the_cause(network: Network, tmp_path: Path) -> None:
    """The user names an interface that reaches nobody: the rank itself ends with 14, and says nothing."""
    second_interface(network)
    wrong = {"OMPI_MCA_btl_tcp_if_include": "eth1"}
    with job(network, tmp_path, "mpi", dict.fromkeys(network.hosts, wrong)) as hosts:
        assert [host.wait() for host in hosts] == [14, 14], texts(hosts)
    for host in hosts:
        assert host.failure.startswith("Open MPI could not connect to 10.99.1."), host.failure
        assert "No route to host" in host.failure.partition("\n")[0]
