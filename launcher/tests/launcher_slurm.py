"""A Slurm cluster for engine tests: Debian's slurmctld, munged, and one slurmd in each host of
``launcher_network``.

Nothing is installed or changed on the machine: configuration, state, key and
sockets are in a folder of the test.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher_network import Network, need, network_of
from launcher_support import TIME_OUT

from trainworks_testing.clock import start_clock

PROGRAMS = ("slurmctld", "slurmd", "srun", "sinfo", "munged")
START_SECONDS = 60.0

# proctrack/pgid: signals go to a task's own process group, not to the ranks below it, as with
# proctrack/cgroup, which clusters have and which needs a cgroup hierarchy to itself.

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={leader}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster that answers. folder: configuration, logs and sockets."""

    network: Network
    folder: Path

    def run(
        self, *words: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm on the first host; its output and errors together."""
        env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **(variables or {})}
        return subprocess.run(
            self.network.inside(self.network.hosts[0], *words),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_OUT * 2,
            check=False,
            cwd=self.folder,
        )

    def batch(self, script: Path, *words: str, variables: Mapping[str, str]) -> tuple[int, str]:
        """Run a batch script; its exit status and its output."""
        out = script.with_suffix(".out")
        result = self.run(
            "sbatch", "--parsable", f"--output={out}", *words, str(script), variables=variables
        )
        assert result.returncode == 0, result.stdout
        deadline = time.monotonic() + TIME_OUT * 2
        while time.monotonic() < deadline:
            shown = self.run("scontrol", "show", "job", result.stdout.strip()).stdout
            state, status = (
                re.search(r"JobState=(\w+)", shown),
                re.search(r"ExitCode=(\d+):", shown),
            )
            if (
                state
                and status
                and state.group(1) not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")
            ):
                return int(status.group(1)), out.read_text(encoding="utf-8")
            time.sleep(0.3)
        raise AssertionError(f"the batch job does not end:\n{shown}")

    def logs(self) -> str:
        """The last lines of every log."""
        shown = [
            f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}"
            for path in self.folder.glob("*.log")
        ]
        return "\n".join(shown)


@contextlib.contextmanager
def slurm_of(count: int, folder: Path, cpus: int = 2) -> Iterator[Slurm]:
    """A cluster of so many nodes, each with so many CPUs."""
    need(*PROGRAMS)
    start_clock()
    with network_of(count) as network, contextlib.ExitStack() as stack:
        slurm = Slurm(network, folder)
        _configure(slurm, cpus)
        socket = folder / "munge.socket"
        _start(
            stack,
            (
                "munged",
                "--foreground",
                "--force",
                f"--socket={socket}",
                f"--key-file={folder}/munge.key",
                f"--pid-file={folder}/munge.pid",
                f"--seed-file={folder}/munge.seed",
                f"--log-file={folder}/munge.log",
            ),
        )
        _until(socket.exists, slurm)
        conf = str(folder / "slurm.conf")
        leader = network.hosts[0]
        _start(stack, _on(network, leader, f"slurmctld -D -f {conf}"))
        for host in network.hosts:
            _start(stack, _on(network, host, f"slurmd -D -N {host} -f {conf}"))
        _until(
            lambda: (
                slurm.run("sinfo", "--noheader", "--format=%D %t").stdout.strip() == f"{count} idle"
            ),
            slurm,
        )
        yield slurm


def _configure(slurm: Slurm, cpus: int) -> None:
    network, folder = slurm.network, slurm.folder
    nodes = [
        f"NodeName={host} NodeHostname={host}"
        f" NodeAddr={network.address(host)} CPUs={cpus} State=UNKNOWN"
        for host in network.hosts
    ]
    text = _CONFIGURATION.format(
        leader=network.hosts[0],
        address=network.address(network.hosts[0]),
        folder=folder,
        nodes="\n".join(nodes),
    )
    (folder / "slurm.conf").write_text(text, encoding="ascii")
    (folder / "cgroup.conf").write_text(
        f"CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint={folder}/cgroup\n",
        encoding="ascii",
    )
    (folder / "cgroup").mkdir()
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o600)


def _on(network: Network, host: str, command: str) -> tuple[str, ...]:
    """A daemon in a host's network, with the host's name, whose processes all end with it."""
    space = ("unshare", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c")
    # The shell stays process 1 and reaps orphans. slurmd does not: the group of a job with one
    # would never be empty.
    return network.inside(host, *space, f"hostname {host} && {command}; exit $?")


def _start(stack: contextlib.ExitStack, words: Sequence[str]) -> None:
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    process = subprocess.Popen(
        words,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    stack.callback(process.wait, TIME_OUT)
    stack.callback(process.kill)


def _until(done: object, slurm: Slurm) -> None:
    """Wait for a cluster that answers.

    Skip, with the logs' text, where this machine cannot run one.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if done():  # type: ignore[operator]
            return
        time.sleep(0.2)
    pytest.skip(f"NOT TESTED: Slurm does not start on this machine:\n{slurm.logs()}")
