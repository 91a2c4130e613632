"""Simulate hosts as network namespaces on a bridge, for the engine tests of the launcher and for
benchmarks.

A host is a network namespace with a PID, a UTS and a mount namespace of its own in it: as in a
container, the launcher is process 1, with it everything on that host is gone, the host's own name
is not the one that the platform gave it, and /tmp and /dev/shm are its own. Open MPI names its
files there by host name and process id, which are those of others.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainworks_testing.clock import PATIENCE

REPOSITORY = Path(__file__).resolve().parents[2]
PREFIX = Path(os.environ.get("TRAINWORKS_TEST_PREFIX") or REPOSITORY / ".cache/peers/programs")
"""A virtual environment with Open MPI, mpi4py and torch; ``tools/set-up-peers`` makes it."""

OWN = ("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Starts a process in namespaces of its own."""

BECOME_HOST = f"""
set -e
hostname "$1"
kept=$2
shift 2
mount -t tmpfs kept /mnt
each_kept() {{ for each in "$kept" {shlex.quote(str(REPOSITORY))} {shlex.quote(str(PREFIX))}; do
    case $each in /tmp/*|/dev/shm/*) "$1" "$each" "/mnt/$(echo "$each" | tr / _)" ;; esac
done; }}
take() {{ ! [ -e "$1" ] || {{ mkdir "$2"; mount --rbind "$1" "$2"; }}; }}
give() {{ ! [ -e "$2" ] || {{ mkdir -p "$1"; mount --move "$2" "$1"; }}; }}
each_kept take
for own in /tmp /dev/shm; do mount -t tmpfs "$own" "$own"; done
each_kept give
umount /mnt
exec "$@"
"""
"""Makes the namespaces a host and runs a command in it. $1: the host's name for itself.

$2: a directory that all hosts have, the tests' own files. The checkout and the peers' programs stay
where they are if they are below /tmp.
"""

_NUMBER = itertools.count()


def call(*words: str) -> None:
    """Run a command. Raises ``subprocess.CalledProcessError`` if it fails."""
    subprocess.run(words, check=True, capture_output=True, timeout=PATIENCE)


@dataclass(frozen=True)
class Network:
    """Namespaces on one bridge.

    Attributes:
        hosts: The platform's names of the hosts; each resolves in every namespace.
        prefix: The name of the bridge's namespace; those of the hosts begin with it.
    """

    hosts: tuple[str, ...]
    prefix: str

    def space(self, host: str) -> str:
        """Return the name of a host's namespace."""
        return f"{self.prefix}-{self.hosts.index(host) + 1}"

    def address(self, host: str) -> str:
        """Return the address of a host on the bridge."""
        number = self.hosts.index(host) + 1
        return f"10.77.{number // 250}.{number % 250}"

    def resolves(self, host: str, *known_hosts: str) -> None:
        """Let a host know these names only, from now on."""
        lines = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in known_hosts)]
        # The same file, as it is mounted already where a process of the host runs.
        Path("/etc/netns", self.space(host), "hosts").write_text(
            "\n".join(lines) + "\n", encoding="ascii"
        )

    def cut(self, host: str) -> None:
        """Take the cable of a host out at the switch: the host itself sees its link go down."""
        call("ip", "-n", self.prefix, "link", "set", f"port{self.hosts.index(host) + 1}", "down")

    def inside(self, host: str, *words: str) -> tuple[str, ...]:
        """Return the words that run a command in a host's network."""
        return ("ip", "netns", "exec", self.space(host), *words)


@contextlib.contextmanager
def network_of(count: int, names: Sequence[str] = ()) -> Iterator[Network]:
    """Make namespaces on a bridge, and remove them after the ``with`` block.

    The test is skipped for a user other than root, and without ``ip`` or ``unshare``.

    Args:
        count: The number of hosts without ``names``: algo-1, algo-2...
        names: Names of the hosts. Each host resolves all of them.
    """
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    missing = [name for name in ("ip", "unshare") if not shutil.which(name)]
    if missing:
        pytest.skip(f"not here: {', '.join(missing)}")
    hosts = tuple(names) or tuple(f"algo-{number}" for number in range(1, count + 1))
    network = Network(hosts, f"tw{os.getpid()}{next(_NUMBER)}")
    with contextlib.ExitStack() as stack:
        call("ip", "netns", "add", network.prefix)
        stack.callback(call, "ip", "netns", "delete", network.prefix)
        call("ip", "-n", network.prefix, "link", "add", "switch", "type", "bridge")
        call("ip", "-n", network.prefix, "link", "set", "switch", "up")
        for number, host in enumerate(network.hosts, 1):
            space, port = network.space(host), f"port{number}"
            call("ip", "netns", "add", space)
            stack.callback(call, "ip", "netns", "delete", space)
            directory = Path("/etc/netns", space)
            directory.mkdir(parents=True)
            stack.callback(shutil.rmtree, directory)
            network.resolves(network.hosts[number - 1], *network.hosts)
            # Nothing answers there, and that is known at once: other names do not exist.
            (directory / "resolv.conf").write_text("nameserver 127.0.0.1\n", encoding="ascii")
            peer = ("type", "veth", "peer", "name", port, "netns", network.prefix)
            call("ip", "link", "add", "eth0", "netns", space, *peer)
            call("ip", "-n", network.prefix, "link", "set", port, "master", "switch", "up")
            call("ip", "-n", space, "address", "add", f"{network.address(host)}/16", "dev", "eth0")
            call("ip", "-n", space, "link", "set", "eth0", "up")
            call("ip", "-n", space, "link", "set", "lo", "up")
            call("ip", "-n", space, "route", "add", "default", "dev", "eth0")
        yield network


def as_host(hostname: str, folder: Path) -> tuple[str, ...]:
    """Return the words that run a command as process 1 of a host.

    Args:
        hostname: The host's name for itself.
        folder: A folder of the run of tests, whose other files the host sees, too. They are below
            /tmp or /dev/shm, and tests share images and scripts among them.
    """
    roots = [root for root in (Path("/dev/shm"), Path("/tmp")) if root in folder.parents]
    shared_folder = roots[0] / folder.relative_to(roots[0]).parts[0] if roots else folder
    return (*OWN, "sh", "-c", BECOME_HOST, "sh", hostname, str(shared_folder))
