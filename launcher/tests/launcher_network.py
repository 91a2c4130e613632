"""Simulate hosts as network namespaces on a bridge, for the engine tests of the launcher and its
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
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher_support import LAUNCHER, REPOSITORY, TIME_OUT, Launcher, write_inputs, write_manifest

from trainworks_launcher.contract.json_values import Json

NAMES = ("algo-1", "algo-2")
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
    subprocess.run(words, check=True, capture_output=True, timeout=TIME_OUT)


def need(*programs: str) -> None:
    """Skip, and name the missing programs."""
    missing = [
        name
        for name in programs
        if not shutil.which(name, path=f"{PREFIX}/bin:{os.environ['PATH']}:/usr/sbin")
    ]
    if missing:
        pytest.skip(f"not here: {', '.join(missing)} (TRAINWORKS_TEST_PREFIX={PREFIX})")


def engine_manifest(folder: Path, **more: str) -> Path:
    """The manifest of a made-up image whose programs are this machine's, and
    ``more``, with the hostname shim.
    """
    programs = {name: str(PREFIX / "bin" / name) for name in ("python", "mpirun", "torchrun")}
    for name in ("ssh", "sshd", "ssh-keygen"):
        programs[name] = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") or ""
    shim = folder / "libhostname.so"
    source = LAUNCHER / "hostname_shim" / "hostname.c"
    subprocess.run(
        ("cc", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"),
        check=True,
        timeout=TIME_OUT,
    )
    return write_manifest(folder / "image.json", {**programs, **more}, hostname_shim=str(shim))


@dataclass(frozen=True)
class Network:
    """Namespaces on one bridge. hosts: the platform's names; each resolves in every namespace."""

    hosts: tuple[str, ...]
    prefix: str

    def space(self, host: str) -> str:
        return f"{self.prefix}-{self.hosts.index(host) + 1}"

    def address(self, host: str) -> str:
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
        """The words that run a command in a host's network."""
        return ("ip", "netns", "exec", self.space(host), *words)


@contextlib.contextmanager
def network_of(count: int, names: Sequence[str] = ()) -> Iterator[Network]:
    """Make ``count`` namespaces on a bridge, in which algo-1, algo-2... can be resolved, or other
    names.
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


class Host(Launcher):
    """A launcher as process 1 of a host of its own."""

    def processes(self) -> list[int]:
        """Every process of the host."""
        mine = Path(f"/proc/{self.process_one()}/ns/pid").readlink()
        pids = []
        for path in Path("/proc").glob("[0-9]*/ns/pid"):
            with contextlib.suppress(OSError):
                if path.readlink() == mine:
                    pids.append(int(path.parts[2]))
        return pids

    def pause(self) -> None:
        """Stop all its processes for the time being, as pausing a container does."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the host: with process 1 all others are gone."""
        self.process.kill()


def as_host(hostname: str, folder: Path) -> tuple[str, ...]:
    """The words that run a command as process 1 of a host, which sees all files
    of the run of tests that folder is of.

    Those files are below /tmp or /dev/shm, and tests share images and scripts among them.
    """
    roots = [root for root in (Path("/dev/shm"), Path("/tmp")) if root in folder.parents]
    shared_folder = roots[0] / folder.relative_to(roots[0]).parts[0] if roots else folder
    return (*OWN, "sh", "-c", BECOME_HOST, "sh", hostname, str(shared_folder))


@contextlib.contextmanager
def job_on(
    network: Network,
    tmp_path: Path,
    script: str,
    hyperparameters: Mapping[str, Json],
    *,
    manifest: Path | None = None,
    variables: Mapping[str, str] | None = None,
    started: Sequence[str] = (),
    arguments: Sequence[str] = (),
    before: Mapping[str, Sequence[str]] | None = None,
    config: Callable[[str], Mapping[str, Json]] = lambda _: {},
) -> Iterator[tuple[Host, ...]]:
    """A launcher on each host of the network. started: those that come, default
    all. arguments: of ``train``.

    before: words in front of a host's command, in its network.
    """
    started_hosts: list[Host] = []
    with contextlib.ExitStack() as stack:
        for host in started or network.hosts:
            base = tmp_path / host
            resources: dict[str, Json] = {
                "hosts": list(network.hosts),
                "current_host": host,
                "network_interface_name": "eth0",
                **config(host),
            }
            write_inputs(base, script, hyperparameters, resources)
            prefix = network.inside(host, *(before or {}).get(host, ()), *as_host("aws", tmp_path))
            environment = {
                **(variables or {}),
                **({"TRAINWORKS_IMAGE_MANIFEST": str(manifest)} if manifest else {}),
            }
            host_ = Host(base, *arguments, variables=environment, prefix=prefix)
            stack.enter_context(host_)
            started_hosts.append(host_)
        yield tuple(started_hosts)


@contextlib.contextmanager
def two_namespaces() -> Iterator[Network]:
    """Two hosts, algo-1 and algo-2."""
    with network_of(2) as network:
        yield network


@contextlib.contextmanager
def two_hosts(
    tmp_path: Path, network: Network, manifest: Path, script: str, hyperparameters: dict[str, Json]
) -> Iterator[tuple[Host, Host]]:
    """Two launchers, each on its host, with the same wrong hostname and an
    interface that does not exist.
    """
    wrong: dict[str, Json] = {"network_interface_name": "ethwe"}
    with job_on(
        network, tmp_path, script, hyperparameters, manifest=manifest, config=lambda _: wrong
    ) as hosts:
        yield hosts[0], hosts[1]
