"""A host's sshd, as the launcher starts it: nobody without the job's key gets in, and nobody from elsewhere with it."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher_network import Network, need, network_of
from launcher_support import LAUNCHER, TIME_OUT

pytestmark = pytest.mark.engine

SERVER = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from trainworks_launcher.supervise.ssh import ssh
directory, address, key, leader = Path(sys.argv[2]), *sys.argv[3:6]
ssh.make_key(sys.argv[6], directory / "host_key")
environment = {"PATH": "/usr/bin:/bin", "SECRET": "not for a session"}
server = ssh.Server(sys.argv[7], directory, address, key, leader, environment)
print(json.dumps({"port": server.port, "pid": server.pid}), flush=True)
sys.stdin.read()
server.close()
"""
"""A host that does nothing else than what a worker of an MPI job does: it starts its sshd, and ends it."""


@dataclass(frozen=True)
class Served:
    """An sshd on algo-2 which expects algo-1 with ``key``. other: a key that it does not know."""

    network: Network
    port: int
    key: Path
    other: Path
    known_hosts: Path

    def call(self, host: str, *options: str, command: Sequence[str] = ("echo", "inside")) -> tuple[int, str]:
        """(exit status, all output) of an ssh from a host."""
        words = [
            *self.network.inside(host, "ssh", "-F", "none", "-p", str(self.port), "-v"),
            *("-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "StrictHostKeyChecking=yes"),
            *(
                "-o",
                "BatchMode=yes",
                "-o",
                "ConnectTimeout=10",
                "-o",
                "HostKeyAlias=algo-2",
                "-o",
                "IdentityAgent=none",
            ),
            *("-o", "IdentitiesOnly=yes", *options, self.network.address("algo-2"), *command),
        ]
        done = subprocess.run(words, capture_output=True, timeout=TIME_OUT, check=False, stdin=subprocess.DEVNULL)
        return done.returncode, (done.stdout + done.stderr).decode("utf-8", "replace")


def make_key(path: Path) -> str:
    subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)), check=True)
    return " ".join(path.with_suffix(".pub").read_text(encoding="ascii").split()[:2])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    need("ssh", "sshd", "ssh-keygen")
    folder = tmp_path_factory.mktemp("ssh")
    directory = folder / "runtime"
    directory.mkdir(mode=0o700)
    key = make_key(folder / "key")
    make_key(folder / "other")
    sshd, keygen = (shutil.which(name, path="/usr/bin:/usr/sbin") or "" for name in ("sshd", "ssh-keygen"))
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(network_of(3))
        addresses = (network.address("algo-2"), key, network.address("algo-1"))
        words = (sys.executable, "-c", SERVER, str(LAUNCHER), str(directory), *addresses, keygen, sshd)
        process = subprocess.Popen(
            network.inside("algo-2", *words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        stack.callback(process.wait, TIME_OUT)
        stack.callback(process.stdout.close)
        stack.callback(process.stdin.close)
        said = json.loads(process.stdout.readline())
        known = folder / "known_hosts"
        host_key = (directory / "host_key.pub").read_text(encoding="ascii")
        known.write_text(f"algo-2 {host_key}", encoding="ascii")
        yield Served(network, said["port"], folder / "key", folder / "other", known)


def test_the_leader_with_the_jobs_key_gets_in(served: Served) -> None:
    status, text = served.call("algo-1", "-i", str(served.key))
    assert status == 0, text
    assert "inside" in text


def test_a_session_gets_no_more_than_it_needs(served: Served) -> None:
    _, text = served.call("algo-1", "-i", str(served.key), command=("env",))
    assert "TRAINWORKS_RUNTIME_DIRECTORY=" in text
    assert "not for a session" not in text


@pytest.mark.parametrize(
    ("host", "options"),
    [
        ("algo-1", ("-i", "OTHER")),
        ("algo-1", ("-o", "PubkeyAuthentication=no")),
        ("algo-1", ("-o", "PreferredAuthentications=password,keyboard-interactive", "-o", "NumberOfPasswordPrompts=1")),
        ("algo-1", ("-o", "PreferredAuthentications=none")),
        ("algo-3", ("-i", "KEY")),
        ("algo-3", ("-i", "OTHER")),
    ],
    ids=["another key", "no key", "password", "nothing", "the key from another host", "another key from another host"],
)
def test_nobody_else_gets_in(served: Served, host: str, options: tuple[str, ...]) -> None:
    named = {"KEY": str(served.key), "OTHER": str(served.other)}
    status, text = served.call(host, *(named.get(word, word) for word in options))
    assert status == 255, text
    assert "Permission denied (publickey)" in text, text
    assert "inside" not in text


def test_only_public_keys_are_offered_as_a_way_in(served: Served) -> None:
    _, text = served.call("algo-1", "-o", "PreferredAuthentications=none")
    offered = [line.split(":")[-1].strip() for line in text.splitlines() if "Authentications that can continue" in line]
    assert offered == ["publickey"]


def test_whoever_gets_in_cannot_tunnel(served: Served) -> None:
    """The key is for starting mpirun's daemon and for nothing else."""
    _, text = served.call("algo-1", "-i", str(served.key), "-W", "127.0.0.1:22", command=())
    assert "administratively prohibited" in text or "open failed" in text, text


def test_a_flood_of_half_open_logins_keeps_the_leader_out_of_nothing(served: Served) -> None:
    """600 connections that never say a word, more than sshd takes in all; the leader's own login still works."""
    words = (
        "import socket, sys\n"
        f"address = ({served.network.address('algo-2')!r}, {served.port})\n"
        "kept = [socket.create_connection(address, 10) for _ in range(600)]\n"
        "print('flooding', flush=True)\nsys.stdin.read()\n"
    )
    command = served.network.inside("algo-3", sys.executable, "-c", words)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flood:
        assert flood.stdout is not None
        assert flood.stdin is not None
        assert flood.stdout.readline() == b"flooding\n"
        for _ in range(5):
            status, text = served.call("algo-1", "-i", str(served.key))
            assert status == 0, text
        flood.stdin.close()


def test_it_listens_on_the_hosts_own_address_only(served: Served) -> None:
    words = f"import socket; socket.create_connection(('127.0.0.1', {served.port}), 5)"
    done = subprocess.run(
        served.network.inside("algo-2", sys.executable, "-c", words), capture_output=True, timeout=TIME_OUT, check=False
    )
    assert b"ConnectionRefusedError" in done.stderr
