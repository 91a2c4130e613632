"""Run launchers on hosts that are network namespaces, for the launcher's engine tests.

The hosts themselves are in ``trainworks_testing.network_hosts``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from launcher_support import LAUNCHER, TIME_OUT, Launcher, write_inputs, write_manifest

from trainworks_launcher.contract.json_values import Json
from trainworks_testing.network_hosts import (
    BECOME_HOST,
    OWN,
    PREFIX,
    Network,
    as_host,
    call,
    network_of,
)

__all__ = ["BECOME_HOST", "OWN", "PREFIX", "Network", "as_host", "call", "network_of"]

NAMES = ("algo-1", "algo-2")


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
