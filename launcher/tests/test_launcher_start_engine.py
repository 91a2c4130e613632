"""Faults before the first step, on two hosts that are network namespaces: the job starts, or its
log names the fault.

Marked ``engine``; see test_launcher_engine for its needs. Packets are dropped by iptables in the
namespaces.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from launcher_network import Host, Network, as_host, call, engine_manifest, need, network_of
from launcher_support import LAUNCHER, TRAIN, Launcher

from trainworks_launcher.supervise.control.messages import PROTOCOL

pytestmark = pytest.mark.engine

CONTROL_PORT, STORE_PORT = 7780, 7777

SCRIPT = """
import os
print(os.environ["SM_CURRENT_HOST"], "has started", flush=True)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    need("iptables")
    with network_of(2) as new_network:
        yield new_network


def drop(
    network: Network, host: str, *rule: str, target: str = "DROP", chain: str = "INPUT"
) -> None:
    call(*network.inside(host, "iptables", "-A", chain, *rule, "-j", target))


def train(
    network: Network,
    folder: Path,
    host: str,
    *,
    program: Sequence[str] = TRAIN,
    words: Sequence[str] = (),
    user: Sequence[str] = (),
    **variables: str,
) -> Host:
    """``train -- train.py`` on one of two hosts.

    words: options of ``train``. user: words that make it another user's. told: further variables.
    """
    base = folder / host
    base.mkdir()
    variables = {"TRAINWORKS_HOSTS": ",".join(network.hosts), "TRAINWORKS_HOST": host, **variables}
    prefix = network.inside(host, *as_host(host, folder), "env", f"--chdir={folder}", *user)
    return Host(base, *words, "--", "train.py", variables=variables, prefix=prefix, program=program)


@contextlib.contextmanager
def job(
    network: Network,
    folder: Path,
    variables: Mapping[str, Mapping[str, str]] | None = None,
    hosts: Sequence[str] = (),
    script: str = SCRIPT,
) -> Iterator[list[Host]]:
    (folder / "train.py").write_text(script, encoding="ascii")
    own = variables or {}
    with contextlib.ExitStack() as stack:
        started = [
            train(network, folder, host, **own.get(host, {})) for host in hosts or network.hosts
        ]
        for host in started:
            stack.enter_context(host)
        yield started


def texts(hosts: Sequence[Host]) -> str:
    return "\n".join(f"== {host.base.name}\n{host.text}" for host in hosts)


def test_a_healthy_job_says_nothing_of_its_data_path(network: Network, tmp_path: Path) -> None:
    with job(network, tmp_path) as hosts:
        assert [host.wait() for host in hosts] == [0, 0], texts(hosts)
    for name, host in zip(network.hosts, hosts, strict=True):
        assert f"{name} has started" in host.text
        expected = ("each of the 2 hosts runs the whole program", "this image has no manifest")
        text_left = host.text
        for words in expected:
            text_left = text_left.replace(f"warning: {words}", "")
        for word in ("data path", "warning", "store", "waiting for algo", "not joined"):
            assert word not in text_left, host.text


@pytest.mark.parametrize("deaf", ["algo-1", "algo-2"])
def test_a_firewall_with_two_open_ports_is_named(
    network: Network, tmp_path: Path, deaf: str
) -> None:
    """The commonest security group of a first cluster; in one direction only, too."""
    for port in (CONTROL_PORT, STORE_PORT):
        drop(network, deaf, "-p", "tcp", "--dport", str(port), target="ACCEPT")
    drop(network, deaf, "-p", "tcp", "--syn")
    other = next(host for host in network.hosts if host != deaf)
    with job(network, tmp_path) as hosts:
        assert [host.wait() for host in hosts] == [0, 0], texts(hosts)
    message = f"the data path to {deaf} does not work: {other} tried {network.address(deaf)} port "
    for host in hosts if other == "algo-2" else hosts[:1]:
        assert message in host.text, texts(hosts)
        assert "no answer within 5 s" in host.text
        assert "open all TCP ports between the hosts" in host.text


def test_a_firewall_that_answers_no_is_named(network: Network, tmp_path: Path) -> None:
    drop(network, "algo-1", "-p", "tcp", "--dport", str(CONTROL_PORT), target="ACCEPT")
    call(*network.inside("algo-1", "iptables", "-A", "INPUT", "-p", "tcp", "--syn", "-j", "REJECT"))
    with job(network, tmp_path) as hosts:
        assert [host.wait() for host in hosts] == [0, 0], texts(hosts)
    assert "the data path to algo-1 does not work" in hosts[1].text
    assert (
        "rank 0's store on algo-1 does not work:"
        f" algo-2 tried {network.address('algo-1')} port 7777" in hosts[1].text
    )


def test_large_packets_that_are_lost_are_named(network: Network, tmp_path: Path) -> None:
    drop(network, "algo-2", "-p", "tcp", "-m", "length", "--length", "1000:65535")
    with job(network, tmp_path) as hosts:
        assert [host.wait() for host in hosts] == [0, 0], texts(hosts)
    assert "the connection opens, and 9,000 bytes do not arrive" in hosts[0].text, texts(hosts)
    assert "lower the MTU of eth0" in hosts[0].text


def test_a_port_of_the_store_that_is_taken_is_named(network: Network, tmp_path: Path) -> None:
    taken = (
        "import"
        " socket,sys;s=socket.create_server(('',7777));print('up',flush=True);sys.stdin.read()"
    )
    words = network.inside("algo-1", sys.executable, "-c", taken)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        with job(network, tmp_path) as hosts:
            assert [host.wait() for host in hosts] == [0, 0], texts(hosts)
        other.kill()
    assert (
        "port 7777 of rank 0's store cannot be opened on algo-1: Address already in use"
        in hosts[0].text
    )
    assert "set MASTER_PORT to another port" in hosts[0].text


def test_a_host_that_never_comes_is_named_long_before_the_limit(
    network: Network, tmp_path: Path
) -> None:
    with job(network, tmp_path, hosts=["algo-1"]) as (leader,):
        leader.read_until(
            "still waiting for algo-2 after 20 s: nothing has come to port 7780 of algo-1"
        )


def test_who_has_not_come_is_named_again_where_the_job_is_stopped(
    network: Network, tmp_path: Path
) -> None:
    for host, words in (
        ("algo-1", "still waiting for algo-2 after "),
        ("algo-2", "not joined after "),
    ):
        with job(network, tmp_path, hosts=[host]) as (alone,):
            awaited_line = "waiting for 1 other host" if host == "algo-1" else "joining algo-1"
            alone.read_until(awaited_line)
            alone.signal_process_one(signal.SIGTERM)
            assert alone.wait() == 143, alone.text
        assert words in alone.text


def test_a_leader_that_never_comes_is_named_long_before_the_limit(
    network: Network, tmp_path: Path
) -> None:
    with job(network, tmp_path, hosts=["algo-2"]) as (worker,):
        worker.read_until("not joined after 20 s: algo-1 (10.77.0.1) port 7780: ")
        worker.read_until("check that the leader algo-1 is started")


def test_two_leaders_end_with_the_names_of_both(network: Network, tmp_path: Path) -> None:
    both = {host: {"TRAINWORKS_HOST": "algo-1"} for host in network.hosts}
    with job(network, tmp_path, both) as hosts:
        assert [host.wait() for host in hosts] == [66, 66], texts(hosts)
    for host in hosts:
        assert host.failure.startswith(
            "two hosts lead this job: algo-1, which is this host, and algo-1 (10.77.0."
        ), host.failure


@contextlib.contextmanager
def program(network: Network, host: str, *words: str, until: str = "") -> Iterator[None]:
    """Run another program on a host, and wait until it listens on the port ``until``."""
    with subprocess.Popen(
        network.inside(host, *words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as other:
        try:
            listens = ("sh", "-c", f"until ss -Hltn 'sport = :{until}' | grep -q .; do :; done")
            call(*network.inside(host, *listens))
            yield
        finally:
            other.kill()


def test_another_program_at_the_leaders_port_ends_both_hosts(
    network: Network, tmp_path: Path
) -> None:
    """End the leader at once, and the other host long before the join limit: the answer is not a
    launcher's.
    """
    need("ss")
    serve = (sys.executable, "-m", "http.server", str(CONTROL_PORT), "--directory", str(tmp_path))
    with (
        program(network, "algo-1", *serve, until=str(CONTROL_PORT)),
        job(network, tmp_path) as hosts,
    ):
        assert [host.wait() for host in hosts] == [66, 66], texts(hosts)
    assert "cannot listen on port 7780: Address already in use" in hosts[0].failure.replace(
        "[Errno 98] ", ""
    )
    assert hosts[1].failure.startswith(
        "the leader algo-1 did not let this host in on port 7780: another program has"
    )
    assert "set TRAINWORKS_CONTROL_PORT on every host" in hosts[1].failure


@pytest.mark.parametrize("old", ["algo-1", "algo-2"])
def test_a_launcher_of_another_version_ends_both_hosts(
    network: Network, tmp_path: Path, old: str
) -> None:
    copy = tmp_path / "old" / "trainworks_launcher"
    shutil.copytree(LAUNCHER / "trainworks_launcher", copy)
    messages = copy / "supervise/control/messages.py"
    text = messages.read_text(encoding="utf-8")
    messages.write_text(
        text.replace(f"\nPROTOCOL = {PROTOCOL}\n", f"\nPROTOCOL = {PROTOCOL + 1}\n"),
        encoding="utf-8",
    )
    (tmp_path / "train.py").write_text(SCRIPT, encoding="ascii")
    older = (sys.executable, "-IS", str(copy / "__main__.py"))
    with contextlib.ExitStack() as stack:
        hosts = [
            train(network, tmp_path, host, program=older if host == old else TRAIN)
            for host in network.hosts
        ]
        for host in hosts:
            stack.enter_context(host)
        assert [host.wait() for host in hosts] == [66, 66], texts(hosts)
    for host in hosts:
        assert "it runs another version of the launcher: use one image" in host.failure, texts(
            hosts
        )


SEARCHES = """
import os, socket, sys, time
def init_process_group():
    while True:
        with socket.socket() as opened:
            opened.settimeout(3)
            try:
                opened.connect((os.environ["MASTER_ADDR"], 7791))
            except OSError as error:
                print("warning:", error, flush=True)
if os.environ["SM_CURRENT_HOST"] == "algo-2":
    init_process_group()
time.sleep(1000)
"""


def test_ranks_that_do_not_find_each_other_are_named_after_a_minute(
    network: Network, tmp_path: Path
) -> None:
    """A port of the script's own is closed: torch would repeat its warning for half an hour."""
    drop(network, "algo-1", "-p", "tcp", "--dport", "7791")
    with job(network, tmp_path, script=SEARCHES) as hosts:
        leader = hosts[0]
        leader.read_until("60 s after the start the ranks have not found each other: ")
        line = next(
            line for line in leader.text.splitlines() if "have not found each other" in line
        )
        assert "algo-2 " in line
        assert "connects to 10.77.0.1 port 7791, which does not answer" in line
        assert "algo-1 is in" in line
        leader.signal_process_one(signal.SIGTERM)
        assert [host.wait() for host in hosts] == [143, 143], texts(hosts)
    for host in hosts:
        assert "s after the start the ranks had not found each other: " in host.failure, (
            host.failure
        )
        assert "connects to 10.77.0.1 port 7791, which does not answer" in host.failure
    assert leader.text.count("connects to 10.77.0.1 port 7791") == 2, (
        "once after a minute, and again at the end"
    )


MEETS_LATE = """
import time
from pathlib import Path
def init_process_group():
    time.sleep(70)
init_process_group()
print("they have met", flush=True)
for step in range(60):
    time.sleep(1)
    print("step", step, flush=True)
raise SystemExit(3)
"""


def test_ranks_that_find_each_other_after_a_minute_are_no_hang_and_no_cause(tmp_path: Path) -> None:
    """See ranks while they search: their later output is progress again."""
    (tmp_path / "train.py").write_text(MEETS_LATE, encoding="ascii")
    variables = {"TRAINWORKS_HANG": "fail", "TRAINWORKS_HANG_LIMIT_SECONDS": "85"}
    words = ("--mode", "mpi", "--processes-per-host", "2", "--", "train.py")
    manifest = str(engine_manifest(tmp_path))
    variables["TRAINWORKS_IMAGE_MANIFEST"] = manifest
    with Launcher(
        tmp_path, *words, variables=variables, prefix=("env", f"--chdir={tmp_path}")
    ) as job:
        assert job.wait() == 3, job.text
    assert "60 s after the start the ranks have not found each other" in job.text
    assert "had not found each other" not in job.failure
