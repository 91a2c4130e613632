"""Plain hosts, with real processes on two hosts that are network namespaces: no /opt/ml, no
scheduler, late names.

Marked ``engine``; see test_launcher_engine for its needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_network import Host, Network, as_host, call, engine_manifest, two_namespaces
from launcher_support import LAUNCHER, TIME_OUT

from trainworks_launcher.contract import names
from trainworks_testing.ports import free_port

pytestmark = pytest.mark.engine

SCRIPT = """
import os, sys
host, hosts, master = (os.environ[name] for name in ("SM_CURRENT_HOST", "SM_HOSTS", "MASTER_ADDR"))
print("hello from", host, "of", hosts, "to", master, sys.argv[1:])
sys.exit(int(sys.argv[-1]) if host == "algo-2" else 0)
"""


@contextlib.contextmanager
def job(network: Network, folder: Path, *words: str) -> Iterator[tuple[Host, Host]]:
    """``train -- train.py WORDS`` on both hosts, from a folder that both have."""
    (folder / "train.py").write_text(SCRIPT, encoding="ascii")
    with contextlib.ExitStack() as stack:
        processes = []
        for host in network.hosts:
            own = (
                "unshare",
                "--uts",
                "--pid",
                "--fork",
                "--mount-proc",
                "--kill-child",
                "env",
                f"--chdir={folder}",
            )
            base = folder / host
            base.mkdir()
            variables = {"TRAINWORKS_HOSTS": ",".join(network.hosts), "TRAINWORKS_HOST": host}
            started = Host(
                base,
                "--",
                "train.py",
                *words,
                variables=variables,
                prefix=network.inside(host, *own),
            )
            stack.enter_context(started)
            processes.append(started)
        yield processes[0], processes[1]


@pytest.fixture
def network() -> Iterator[Network]:
    with two_namespaces() as new_network:
        yield new_network


@pytest.mark.parametrize("status", [0, 42])
def test_both_hosts_end_with_one_status(network: Network, tmp_path: Path, status: int) -> None:
    with job(network, tmp_path, "--status", str(status)) as hosts:
        assert [host.wait() for host in hosts] == [status] * 2, "".join(host.text for host in hosts)
    for host, name in zip(hosts, network.hosts, strict=True):
        if status:  # the first host may be told before its script has said a word
            assert host.failure.startswith("train.py on host algo-2 (mode none): exit status 42")
        else:
            assert (
                f"hello from {name} of [\"algo-1\",\"algo-2\"] to algo-1 ['--status', '0']\n"
                in host.text
            )
            assert host.succeeded


def test_a_user_without_root_and_without_opt_ml(tmp_path: Path) -> None:
    """Results go to the working directory.

    Two hosts that are one machine: each by a name of its own.
    """
    if os.geteuid() != 0 or os.access(names.BASE_DIRECTORY, os.F_OK):
        pytest.skip("needs root, to become another user, and a machine without /opt/ml")
    (tmp_path / "train.py").write_text(
        'import os\nprint(os.getuid(), os.environ["SM_MODEL_DIR"])\n', encoding="ascii"
    )
    shutil.copytree(LAUNCHER / "trainworks_launcher", tmp_path / "trainworks_launcher")
    for path in (
        tmp_path,
        *tmp_path.parents,
    ):
        # Pytest's folders are root's own, one for each of its processes.
        if path.name.startswith(("pytest-", "popen-", "test_")):
            path.chmod(0o755)
    tmp_path.chmod(0o777)
    hosts, port = ("localhost", "127.0.0.1"), str(free_port())
    shared = {
        "PATH": "/usr/bin:/bin",
        "TRAINWORKS_HOSTS": ",".join(hosts),
        "TRAINWORKS_CONTROL_PORT": port,
    }
    user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    words = (
        *user,
        "/usr/bin/python3",
        "-IS",
        str(tmp_path / "trainworks_launcher/__main__.py"),
        "--",
        "train.py",
    )
    with contextlib.ExitStack() as stack:
        started = []
        for host in hosts:
            env = {**shared, "TRAINWORKS_HOST": host}
            process = subprocess.Popen(
                words, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        outputs = [process.communicate(timeout=TIME_OUT)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert outputs == [f"65534 {tmp_path}/model\n"] * 2
    assert (tmp_path / "output" / names.SUCCESS_FILE).exists()


def test_the_name_of_the_leader_resolves_late(network: Network, tmp_path: Path) -> None:
    """Resolve the name late, as on Kubernetes, where a pod's name appears after the pod."""
    names = Path("/etc/netns", network.space("algo-2"), "hosts")
    text = names.read_text(encoding="ascii")
    names.write_text("127.0.0.1 localhost\n", encoding="ascii")
    with job(network, tmp_path, "0") as hosts:
        hosts[1].read_until("cannot resolve the name algo-1")
        names.write_text(text, encoding="ascii")  # the same file, which the host sees
        assert [host.wait() for host in hosts] == [0, 0], "".join(host.text for host in hosts)


@pytest.mark.parametrize(
    ("own", "chosen"),
    [("127.0.1.1", True), ("203.0.113.7", True), ("", True), ("10.77.0.1", False)],
)
def test_the_interface_is_chosen_where_the_hosts_own_name_leads_elsewhere(
    network: Network, tmp_path: Path, own: str, chosen: bool
) -> None:
    """Give the own name the address of Debian's installer (127.0.1.1): gloo would listen there, and
    no other host would reach it.
    """
    (tmp_path / "train.py").touch()
    host_lines = [f"{network.address(name)} {name}" for name in network.hosts]
    host_lines += [f"{own} {os.uname().nodename}"] if own else []
    Path("/etc/netns", network.space("algo-1"), "hosts").write_text(
        "\n".join(host_lines) + "\n", encoding="ascii"
    )
    words = (
        sys.executable,
        "-IS",
        str(LAUNCHER / "trainworks_launcher/__main__.py"),
        "--plan",
        "--",
        "train.py",
    )
    variables = {
        "PATH": "/usr/bin:/bin",
        "TRAINWORKS_HOSTS": ",".join(network.hosts),
        "TRAINWORKS_HOST": "algo-1",
    }
    shown = subprocess.run(
        network.inside("algo-1", *words),
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=TIME_OUT,
    )
    planned = json.loads(shown.stdout)
    interfaces = {name: planned["env"].get(f"{name}_SOCKET_IFNAME") for name in ("GLOO", "NCCL")}
    interface = "eth0" if chosen else None
    assert interfaces == {"GLOO": interface, "NCCL": interface}
    why = [reason["why"] for reason in planned["why"] if reason["subject"] == "GLOO_SOCKET_IFNAME"]
    assert [f"own name leads to {own or 'no address'}" in line for line in why] == (
        [True] if chosen else []
    )


MEET = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
met = torch.ones(1)
dist.all_reduce(met)
size, leader = dist.get_world_size(), os.environ["MASTER_ADDR"]
os.write(1, f"met {met.item():g} of {size} at {leader}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_hosts_meet_that_have_ipv6_addresses_and_no_names(
    network: Network, tmp_path: Path, restarts: int
) -> None:
    """With restarts torchrun's rendezvous is another one."""
    addresses = ["fd77::1", "fd77::2"]
    (tmp_path / "train.py").write_text(MEET, encoding="ascii")
    manifest = engine_manifest(tmp_path)
    with contextlib.ExitStack() as stack:
        hosts_started = []
        for name, address in zip(network.hosts, addresses, strict=True):
            network.resolves(name)
            space = ("ip", "-n", network.space(name))
            call(*space, "-6", "address", "add", f"{address}/64", "dev", "eth0", "nodad")
            call(*space, "-4", "address", "flush", "dev", "eth0")
            words = ("--mode", "torch_distributed", "--processes-per-host", "1", "--", "train.py")
            variables = {"TRAINWORKS_HOSTS": "[fd77::1],fd77::2", "TRAINWORKS_HOST": f"[{address}]"}
            variables["TRAINWORKS_IMAGE_MANIFEST"], variables["TRAINWORKS_MAX_RESTARTS"] = (
                str(manifest),
                str(restarts),
            )
            begin = ("env", f"--chdir={tmp_path}")
            prefix = network.inside(name, *as_host("plain", tmp_path), *begin)
            hosts_started.append(
                stack.enter_context(
                    Host(tmp_path / name, *words, variables=variables, prefix=prefix)
                )
            )
        statuses = [host.wait() for host in hosts_started]
    assert statuses == [0, 0], "".join(host.text for host in hosts_started)
    assert all("met 2 of 2 at fd77::1" in host.text for host in hosts_started)
