"""Faults of names, interfaces and addresses on two hosts, in each mode: the job starts all the
same, or they are named.

Marked ``engine``; see test_launcher_engine for its needs. Each fault stands beside the same job
without it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from launcher_network import Host, Network, call, engine_manifest, need, network_of
from test_launcher_start_engine import program, texts, train

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
"""A program for each mode whose ranks add up a number of each."""

DEAD = "10.77.9.9"
"""An address without a host on the hosts' network."""

Fault = Callable[[Network], None]


@pytest.fixture
def network() -> Iterator[Network]:
    need("torchrun", "mpirun")
    with network_of(2) as new_network:
        yield new_network


def names_on(network: Network, host: str, **addresses: str) -> None:
    """Let a host know these names, with these addresses.

    ``own`` is its own name, ``peer`` the other one's.
    """
    other = next(name for name in network.hosts if name != host)
    lines = ["127.0.0.1 localhost"]
    lines += [f"{addresses['own']} {host}"] if "own" in addresses else []
    lines += [f"{addresses['peer']} {other}"] if "peer" in addresses else []
    Path("/etc/netns", network.space(host), "hosts").write_text(
        "\n".join(lines) + "\n", encoding="ascii"
    )


def own_names(network: Network, address: str = "") -> None:
    """Let each host's own name lead elsewhere; ``""``: nowhere."""
    for host in network.hosts:
        other = next(name for name in network.hosts if name != host)
        own = {"own": address} if address else {}
        names_on(network, host, peer=network.address(other), **own)


def second_interface(network: Network, subnet: str = "10.99.1", *, plugged: bool = True) -> None:
    """Give each host an eth1 that reaches no other host, with an address of one subnet, as two
    bridges for containers are.
    """
    for number, host in enumerate(network.hosts, 1):
        call(
            *network.inside(
                host, "ip", "link", "add", "eth1", "type", "veth", "peer", "name", "far1"
            )
        )
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
        call(
            *network.inside(
                host, "ip", "address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad"
            )
        )
    for number, host in enumerate(network.hosts, 1):
        names_on(network, host, own=f"fd77::{number}", peer=f"fd77::{3 - number}")


STARTS: Mapping[str, Fault] = {
    "nothing": lambda _: None,
    "own name to 127.0.1.1": lambda network: own_names(network, "127.0.1.1"),
    "own name to a dead address": lambda network: own_names(network, DEAD),
    "own name unknown": own_names,
    "a second interface that reaches nobody": second_interface,
    "a second interface without a carrier": lambda network: second_interface(
        network, plugged=False
    ),
    "own name on an interface that reaches nobody": own_names_on_eth1,
    "IPv6 only": only_ipv6,
}


@contextlib.contextmanager
def job(
    network: Network,
    folder: Path,
    mode: str,
    variables_of_host: Mapping[str, Mapping[str, str]],
    hosts: Sequence[str] = (),
) -> Iterator[list[Host]]:
    """A job of one process on each host. told: further variables, by host."""
    (folder / "train.py").write_text(MEET[mode], encoding="ascii")
    manifest = str(engine_manifest(folder))
    words = ("--mode", mode, "--processes-per-host", "1") if mode != "none" else ()
    with contextlib.ExitStack() as stack:
        hosts_started = []
        for host in hosts or network.hosts:
            variables = {"TRAINWORKS_IMAGE_MANIFEST": manifest, **variables_of_host.get(host, {})}
            hosts_started.append(train(network, folder, host, words=words, **variables))
            stack.enter_context(hosts_started[-1])
        yield hosts_started


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


@pytest.mark.parametrize("fault", ["nothing", "own name to a dead address", "own name unknown"])
def test_a_job_that_may_restart_starts_all_the_same(
    network: Network, tmp_path: Path, fault: str
) -> None:
    """Let the hosts meet by c10d, which tells the ranks where rank 0 is."""
    STARTS[fault](network)
    variables_of_host = {host: {"TRAINWORKS_MAX_RESTARTS": "1"} for host in network.hosts}
    with job(network, tmp_path, "torch_distributed", variables_of_host) as hosts:
        assert [host.wait() for host in hosts] == [0, 0], texts(hosts)


def test_a_store_port_that_another_program_has_ends_both_hosts(
    network: Network, tmp_path: Path
) -> None:
    need("ss")
    serve = (sys.executable, "-m", "http.server", "7777", "--directory", str(tmp_path))
    with (
        program(network, "algo-1", *serve, until="7777"),
        job(network, tmp_path, "torch_distributed", {}) as hosts,
    ):
        assert [host.wait() for host in hosts] == [66, 66], texts(hosts)
    for host in hosts:
        assert (
            "port 7777 of rank 0's store cannot be opened on algo-1: Address already in use"
            in host.failure
        )
        assert "set MASTER_PORT to another port" in host.failure


PROXIES = dict.fromkeys(
    ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY"), f"http://{DEAD}:3128"
)


@pytest.mark.parametrize("mode", list(MEET))
def test_a_proxy_that_nobody_answers_at_catches_nothing(
    network: Network, tmp_path: Path, mode: str
) -> None:
    with job(network, tmp_path, mode, dict.fromkeys(network.hosts, PROXIES)) as hosts:
        assert [host.wait() for host in hosts] == [0, 0], texts(hosts)


def wrong_address(network: Network) -> None:
    names_on(network, "algo-2", own=network.address("algo-2"), peer=DEAD)


def own_address(network: Network) -> None:
    names_on(network, "algo-2", own=network.address("algo-2"), peer=network.address("algo-2"))


def unknown_peer(network: Network) -> None:
    names_on(network, "algo-2", own=network.address("algo-2"))


def closed(network: Network, host: str, *rule: str) -> None:
    call(*network.inside(host, "iptables", "-A", "INPUT", *rule, "-j", "DROP"))


def one_open_port(network: Network) -> None:
    """The commonest security group: the port that the documentation names, and no other one."""
    for host in network.hosts:
        call(
            *network.inside(
                host, "iptables", "-A", "INPUT", "-p", "tcp", "--dport", "7780", "-j", "ACCEPT"
            )
        )
        closed(network, host, "-i", "eth0", "-p", "tcp", "--syn")


NAMED: Mapping[str, tuple[Fault, str, str]] = {
    "the leader's name to an address of nobody": (
        wrong_address,
        "algo-2",
        f"not joined after 20 s: algo-1 ({DEAD}) port 7780: No route to host",
    ),
    "the leader's name to the host itself": (
        own_address,
        "algo-2",
        "not joined after 20 s: algo-1 (10.77.0.2) port 7780: Connection refused",
    ),
    "the leader's name is unknown": (unknown_peer, "algo-2", "cannot resolve the name algo-1"),
    "the other side of it": (
        unknown_peer,
        "algo-1",
        "still waiting for algo-2 after 20 s: nothing has come to port",
    ),
    "dropped SYN": (
        lambda network: closed(network, "algo-1", "-p", "tcp", "--dport", "7780", "--syn"),
        "algo-2",
        "not joined after 20 s: algo-1 (10.77.0.1) port 7780: it does not answer",
    ),
    "a cable that is out": (
        lambda network: network.cut("algo-2"),
        "algo-1",
        "still waiting for algo-2 after 20 s",
    ),
    "the host with that cable": (
        lambda network: network.cut("algo-2"),
        "algo-2",
        "eth0 has no carrier",
    ),
    "the leader's cable": (
        lambda network: network.cut("algo-1"),
        "algo-1",
        "the network interface eth0 is down",
    ),
}
"""Of the join, which is the same in each mode: the fault, the host whose log
names it, and its words.
"""

OF_PATHS: Mapping[str, tuple[Fault, str, str]] = {
    "one open port": (
        one_open_port,
        "algo-1",
        "the data path to algo-2 does not work: algo-1 tried 10.77.0.2 port",
    ),
    "one open port, the other way": (
        one_open_port,
        "algo-2",
        "the data path to algo-1 does not work: algo-2 tried 10.77.0.1 port",
    ),
    "large packets are dropped": (
        lambda network: closed(
            network, "algo-2", "-p", "tcp", "-m", "length", "--length", "1400:65535"
        ),
        "algo-1",
        "the connection opens, and 9,000 bytes do not arrive",
    ),
}
"""Of the ranks' own ways, which each mode takes in its own manner."""


@pytest.mark.parametrize(
    ("fault", "mode"),
    [*((fault, "none") for fault in NAMED), *itertools.product(OF_PATHS, MEET)],
)
def test_what_is_in_the_way_is_named(
    network: Network, tmp_path: Path, fault: str, mode: str
) -> None:
    """Within a minute; ``read_until`` fails if the job ends before it was said."""
    need("iptables")
    plant, where, words = {**NAMED, **OF_PATHS}[fault]
    plant(network)
    with job(network, tmp_path, mode, {}) as hosts:
        hosts[network.hosts.index(where)].read_until(words)


PORT_80 = "port 80 of rank 0's store cannot be opened on algo-1: Permission denied"


@pytest.mark.parametrize("port", ["80", "29500"])
def test_a_port_that_a_user_may_not_open_is_named_with_the_way_out(
    network: Network, tmp_path: Path, port: str
) -> None:
    need("setpriv")
    # As any user but root, who could not read the tests' own Python.
    user = ("setpriv", "--bounding-set", "-net_bind_service")
    (tmp_path / "train.py").write_text(MEET["torch_distributed"], encoding="ascii")
    variables = {"TRAINWORKS_IMAGE_MANIFEST": str(engine_manifest(tmp_path)), "MASTER_PORT": port}
    words = ("--mode", "torch_distributed", "--processes-per-host", "1")
    with contextlib.ExitStack() as stack:
        hosts = [
            train(network, tmp_path, host, words=words, user=user, **variables)
            for host in network.hosts
        ]
        for host in hosts:
            stack.enter_context(host)
        status = [host.wait() for host in hosts]
    if port != "80":
        assert status == [0, 0], texts(hosts)
        return
    assert status == [66, 66], texts(hosts)
    for host in hosts:
        assert PORT_80 in host.failure
        assert "set MASTER_PORT to another port, from 1024 on, on every host" in host.failure


def test_an_interface_that_the_user_names_and_that_has_no_carrier_is_named(
    network: Network, tmp_path: Path
) -> None:
    second_interface(network, plugged=False)
    variables_of_host = {host: {"GLOO_SOCKET_IFNAME": "eth1"} for host in network.hosts}
    with job(network, tmp_path, "torch_distributed", variables_of_host) as hosts:
        hosts[0].read_until("eth1")
    lines = [line for line in hosts[0].text.splitlines() if "eth1" in line]
    assert "carrier" in lines[0], texts(hosts)


def test_two_hosts_with_one_name_are_named(tmp_path: Path) -> None:
    """The third one never comes, and the second one came twice."""
    twice = {"algo-3": {"TRAINWORKS_HOST": "algo-2"}}
    with network_of(3) as network, job(network, tmp_path, "none", twice) as hosts:
        hosts[0].read_until("still waiting for algo-3 after 20 s")

        hosts[0].read_until("as algo-2, it has already joined")


def test_lists_in_another_order_are_two_leaders(network: Network, tmp_path: Path) -> None:
    other = {"algo-2": {"TRAINWORKS_HOSTS": "algo-2,algo-1"}}
    with job(network, tmp_path, "none", other) as hosts:
        assert [host.wait() for host in hosts] == [66, 66], texts(hosts)
    for host in hosts:
        assert host.failure.startswith("two hosts lead this job: "), host.failure


def test_the_address_that_open_mpi_could_not_reach_is_the_cause(
    network: Network, tmp_path: Path
) -> None:
    """Name an interface that reaches no other host: the rank ends with 14, and says nothing."""
    second_interface(network)
    wrong = {"OMPI_MCA_btl_tcp_if_include": "eth1"}
    with job(network, tmp_path, "mpi", dict.fromkeys(network.hosts, wrong)) as hosts:
        assert [host.wait() for host in hosts] == [14, 14], texts(hosts)
    for host in hosts:
        assert host.failure.startswith("Open MPI could not connect to 10.99.1."), host.failure
        assert "No route to host" in host.failure.partition("\n")[0]


@pytest.mark.parametrize("mode", list(MEET))
def test_a_clock_that_is_a_day_behind_stops_no_start(
    network: Network, tmp_path: Path, mode: str
) -> None:
    need("faketime")
    (tmp_path / "train.py").write_text(MEET[mode], encoding="ascii")
    variables = {"TRAINWORKS_IMAGE_MANIFEST": str(engine_manifest(tmp_path))}
    words = ("--mode", mode, "--processes-per-host", "1") if mode != "none" else ()
    behind = {"algo-2": ("faketime", "-f", "-1d")}
    with contextlib.ExitStack() as stack:
        hosts = []
        for host in network.hosts:
            hosts.append(
                train(network, tmp_path, host, words=words, user=behind.get(host, ()), **variables)
            )
            stack.enter_context(hosts[-1])
        assert [host.wait() for host in hosts] == [0, 0], texts(hosts)
    assert "the clock of algo-2 is 86" in texts(hosts), texts(hosts)
