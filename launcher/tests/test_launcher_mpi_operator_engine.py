"""MPIJob: a launcher pod and two worker pods that run ``/usr/sbin/sshd -De``,
with real mpirun, ssh and sshd.

The pods have the operator's own variables and files (kubeflow/mpi-operator, mpi_job_controller.go:
launcherEnvVars, workerEnvVars, ompiEnvVars, newConfigMap, setupSSHOnPod).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from launcher_network import PREFIX, Host, Network, engine_manifest, need, network_of
from launcher_pods import start_pod, write_job_keys, write_ssh_folder, write_stand_ins
from launcher_support import TRAIN

pytestmark = pytest.mark.engine

LAUNCHER_POD = "pi-launcher.pi.default.svc"
WORKERS = ("pi-worker-0.pi.default.svc", "pi-worker-1.pi.default.svc")
SUM = (
    "from mpi4py import MPI; w = MPI.COMM_WORLD; print('rank', w.rank, 'of', w.size, 'sum',"
    " w.allreduce(1), flush=True)"
)


@dataclass(frozen=True)
class Job:
    """The pods of an MPIJob."""

    folder: Path
    network: Network
    variables: Mapping[str, str]
    mounts: Mapping[str, Path]

    def worker(self, name: str) -> Host:
        variables = {**self.variables, "K_MPI_JOB_ROLE": "worker"}
        program = (str(self.folder / "sshd"), "-De")
        mounts = {**self.mounts, **write_ssh_folder(self._place(name))}
        hostname = name.partition(".")[0]
        return start_pod(
            self.network,
            name,
            self.folder / hostname,
            hostname=hostname,
            variables=variables,
            mounts=mounts,
            program=program,
        )

    def launcher(self, *words: str, hosts: Sequence[str] = WORKERS) -> Host:
        hostfile = self.folder / "hostfile"
        hostfile.write_text("".join(f"{name} slots=1\n" for name in hosts), encoding="ascii")
        variables = {
            **self.variables,
            "K_MPI_JOB_ROLE": "launcher",
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_default_hostfile": str(hostfile),
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
            "OMPI_MCA_orte_set_default_slots": "1",
            "NVIDIA_VISIBLE_DEVICES": "",
            "NVIDIA_DRIVER_CAPABILITIES": "",
        }
        return start_pod(
            self.network,
            LAUNCHER_POD,
            self._place(LAUNCHER_POD),
            hostname="pi-launcher",
            variables=variables,
            mounts=self.mounts,
            program=words,
        )

    def _place(self, name: str) -> Path:
        place = self.folder / name.partition(".")[0]
        place.mkdir(exist_ok=True)
        return place


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    need("mpirun", "python", "ssh", "sshd", "ssh-keygen")
    variables = write_stand_ins(tmp_path, engine_manifest(tmp_path))
    with network_of(3, (LAUNCHER_POD, *WORKERS)) as network:
        yield Job(tmp_path, network, variables, write_job_keys(tmp_path))


def test_mpirun_starts_ranks_on_workers_that_run_sshd(job: Job) -> None:
    """Run mpirun as the launcher's command, as in existing manifests.

    A worker comes late, and so does its name.
    """
    first, late = WORKERS
    job.network.resolves(LAUNCHER_POD, LAUNCHER_POD, first)
    with contextlib.ExitStack() as pods:
        worker = pods.enter_context(job.worker(first))
        worker.read_until("trainworks: sshd's host key is the job's own key")
        python = f"{PREFIX}/bin/python"
        launcher = pods.enter_context(
            job.launcher(str(job.folder / "mpirun"), "--allow-run-as-root", python, "-c", SUM)
        )
        launcher.read_until(f"trainworks: waiting for sshd on {late}, port 22: ")
        job.network.resolves(LAUNCHER_POD, LAUNCHER_POD, first, late)
        pods.enter_context(job.worker(late))
        assert launcher.wait() == 0, launcher.text
        assert sorted(line for line in launcher.text.splitlines() if line.startswith("rank")) == [
            "rank 0 of 2 sum 2",
            "rank 1 of 2 sum 2",
        ], launcher.text


def test_a_worker_that_has_not_the_jobs_key_is_not_believed(job: Job) -> None:
    """A pod with sshd and some key of its own: it serves, and the launcher does not talk to it."""
    stranger = replace(job, mounts={})
    with contextlib.ExitStack() as pods:
        for name in WORKERS:
            worker = pods.enter_context(stranger.worker(name))
            worker.read_until("trainworks: sshd's host key was made now")
            worker.read_until("Server listening on 0.0.0.0 port 22")
        launcher = pods.enter_context(
            job.launcher(str(job.folder / "mpirun"), "--allow-run-as-root", "hostname")
        )
        assert launcher.wait() != 0
        assert "Host key verification failed" in launcher.text


SCRIPT = """
import os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
print("rank", world.rank, "of", world.size, "sum", world.allreduce(1), os.environ["MASTER_ADDR"],
      os.environ.get("SM_CURRENT_HOST"), sys.argv[1:], flush=True)
if "--fail" in sys.argv and world.rank == 1:
    sys.exit(42)
world.Barrier()
"""


@pytest.mark.parametrize("status", [0, 42])
def test_train_on_the_launcher_pod_starts_the_ranks_of_the_workers(job: Job, status: int) -> None:
    code = job.folder / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT, encoding="utf-8")
    words = (
        "env",
        "-C",
        str(code),
        *TRAIN,
        "--",
        "train.py",
        "--lr",
        "0.1",
        *(["--fail"] if status else []),
    )
    with contextlib.ExitStack() as pods:
        for name in WORKERS:
            pods.enter_context(job.worker(name)).read_until("Server listening")
        launcher = pods.enter_context(job.launcher(*words))
        assert launcher.wait() == status, launcher.text
    for rank in range(2):
        assert f"rank {rank} of 2 sum 2 {WORKERS[0]} None ['--lr', '0.1'" in launcher.text, (
            launcher.text
        )
    assert launcher.succeeded is not bool(status)
    if status:
        first = "train.py on host pi-worker-1, rank 1 (mode mpi): exit status 42\n"
        assert launcher.failure.startswith(first), launcher.failure


@pytest.mark.parametrize("command", ["mpirun", "train"])
def test_a_launcher_that_is_a_worker_too_needs_no_ssh_to_itself(job: Job, command: str) -> None:
    """RunLauncherAsWorker; the usual MPI runtime of a TrainJob.

    No sshd runs on the launcher pod.
    """
    (job.folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    real = (str(job.folder / "mpirun"), "--allow-run-as-root", f"{PREFIX}/bin/python", "-c", SUM)
    words = (
        real if command == "mpirun" else ("env", "-C", str(job.folder), *TRAIN, "--", "train.py")
    )
    with contextlib.ExitStack() as pods:
        pods.enter_context(job.worker(WORKERS[0])).read_until("Server listening")
        launcher = pods.enter_context(job.launcher(*words, hosts=(LAUNCHER_POD, WORKERS[0])))
        assert launcher.wait() == 0, launcher.text
    for rank in range(2):
        assert f"rank {rank} of 2 sum 2" in launcher.text, launcher.text
