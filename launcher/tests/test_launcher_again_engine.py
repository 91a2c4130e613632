"""Starting again on two hosts with their own processes, in each mode: a rank, a
launcher, a whole host is killed.

``TRAINWORKS_AGAIN=20 pytest -s -m engine`` does each death so often.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from launcher_network import (
    PREFIX,
    Host,
    Network,
    as_host,
    engine_manifest,
    job_on,
    need,
    network_of,
)
from launcher_support import Launcher, write_inputs, write_manifest
from test_launcher_again import OWN_MEMORY
from test_launcher_mpirun_engine import DIALECTS, mpirun

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.mpirun.dialects import Dialect

pytestmark = pytest.mark.engine

RUNS = int(os.environ.get("TRAINWORKS_AGAIN", "1"))
SCRIPT = """
import fcntl, os, pathlib, re, signal, sys, time

shared, again = pathlib.Path(os.environ["SHARED"]), os.environ["TRAINWORKS_RESTART_COUNT"]
rank = (
    os.environ.get("RANK")
    or os.environ.get("OMPI_COMM_WORLD_RANK")
    or os.environ["SM_CURRENT_HOST"]
)
# Locks end with their process, and are seen in every namespace.
mine = open(shared / f"try-{again}-{rank}", "w")
fcntl.flock(mine, fcntl.LOCK_EX)
for other in shared.glob("try-*"):
    if not other.name.startswith(f"try-{again}-"):
        try:
            fcntl.flock(open(other), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            print("two tries at once", flush=True)
begun = step = int(re.findall("[0-9]+", os.environ.get("TRAINWORKS_RESUME_FROM", "0"))[-1])
print(f"try {again} begins with step {step} on {os.environ['SM_CURRENT_HOST']}", flush=True)
while again == "0" or step < begun + 3:
    step += 1
    if rank in ("0", "algo-1"):
        made = shared / "checkpoints" / f"tmp-{step}"
        made.write_text("weights")
        made.rename(shared / "checkpoints" / f"step-{step}.ckpt")
    print(f"step {step} of try {again}, process", os.getpid(), flush=True)
    time.sleep(0.1)
"""


def variables(shared: Path) -> dict[str, str]:
    (shared / "checkpoints").mkdir(parents=True)
    places = {"SHARED": str(shared), "TRAINWORKS_CHECKPOINT_DIRECTORY": str(shared / "checkpoints")}
    return {**places, "TRAINWORKS_MAX_RESTARTS": "2"}


def die(
    network: Network, folder: Path, manifest: Path, mode: dict[str, Json], dies: str, victim: str
) -> None:
    """One job of which something dies on a host, once."""
    host_variables = variables(folder / "shared")
    with contextlib.ExitStack() as stack:
        hosts = dict(
            zip(
                network.hosts,
                stack.enter_context(
                    job_on(
                        network, folder, SCRIPT, mode, manifest=manifest, variables=host_variables
                    )
                ),
                strict=True,
            )
        )
        for host in hosts.values():
            host.read_until("step 3 of try 0, process")
        if victim == "rank":
            scripts = [
                pid
                for pid in hosts[dies].processes()
                if b"train.py" in command_of(pid).split(b"\0")[-1:][0]
            ]
            ranks = [pid for pid in scripts if b"python" in command_of(pid).split(b"\0")[0]]
            os.kill(max(ranks), signal.SIGKILL)
        else:
            hosts[dies].kill()
            hosts[dies].wait()
            other = next(host for name, host in hosts.items() if name != dies)
            other.read_until("starting again on every host")
            started = job_on(
                network,
                folder,
                SCRIPT,
                mode,
                manifest=manifest,
                variables=host_variables,
                started=[dies],
            )
            (hosts[dies],) = stack.enter_context(started)
        statuses = [host.wait() for host in hosts.values()]
        text = "".join(host.text for host in hosts.values())
        assert statuses == [0, 0], text
    assert "two tries at once" not in text
    for name, host in hosts.items():
        (begun,) = [
            line
            for line in text.splitlines()
            if line.endswith(f" on {name}") and "try 1 begins" in line
        ]
        assert int(begun.split()[-3]) >= 3, begun
        assert host.succeeded


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
    except OSError:
        return b""


@pytest.mark.parametrize("dies", ["algo-1", "algo-2"])
@pytest.mark.parametrize("victim", ["rank", "host"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"open-mpi-{dialect.major}")
def test_mpi(tmp_path: Path, dialect: Dialect, victim: str, dies: str) -> None:
    path, version = mpirun(dialect)
    programs = {"mpirun": path, "python": sys.executable}
    manifest = write_manifest(
        tmp_path / "image.json", programs, components={"open-mpi": {"version": version}}
    )
    with network_of(2) as network:
        for run in range(RUNS):
            die(
                network,
                tmp_path / str(run),
                manifest,
                {"sagemaker_mpi_enabled": "true"},
                dies,
                victim,
            )


@pytest.mark.parametrize("dies", ["algo-1", "algo-2"])
@pytest.mark.parametrize("victim", ["rank", "host"])
@pytest.mark.parametrize("mode", ["none", "torch_distributed"])
def test_without_mpirun(tmp_path: Path, mode: str, victim: str, dies: str) -> None:
    if mode == "torch_distributed" and not (PREFIX / "bin/torchrun").exists():
        pytest.skip(f"not here: torchrun (TRAINWORKS_TEST_PREFIX={PREFIX})")
    hyperparameters: dict[str, Json] = (
        {"sagemaker_torch_distributed_enabled": "true"} if mode != "none" else {}
    )
    with network_of(2) as network:
        for run in range(RUNS):
            die(
                network,
                tmp_path / str(run),
                engine_manifest(tmp_path),
                hyperparameters,
                dies,
                victim,
            )


@pytest.mark.parametrize("dies", ["algo-1", "algo-2"])
def test_a_pod_whose_container_is_started_again_in_its_place(tmp_path: Path, dies: str) -> None:
    """docs/platforms/jobset.md: each pod has its index and the hosts by their names."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="ascii")
    host_variables = {**variables(tmp_path / "shared"), "TRAINWORKS_HOSTS": "algo-[1-2]"}
    host_variables["TRAINWORKS_IMAGE_MANIFEST"] = str(engine_manifest(tmp_path))
    with network_of(2) as network, contextlib.ExitStack() as stack:

        def start(name: str) -> Host:
            prefix = network.inside(name, *as_host("pod", tmp_path), "env", f"--chdir={tmp_path}")
            pod_variables = {
                **host_variables,
                "JOB_COMPLETION_INDEX": str(network.hosts.index(name)),
            }
            pod = Host(tmp_path / name, "--", "train.py", variables=pod_variables, prefix=prefix)
            stack.enter_context(pod)
            return pod

        pods = {name: start(name) for name in network.hosts}
        for pod in pods.values():
            pod.read_until("step 3 of try 0, process")
        pods[dies].kill()
        pods[dies].wait()
        (other,) = (pod for name, pod in pods.items() if name != dies)
        other.read_until("starting again on every host")
        pods[dies] = start(dies)
        statuses = [pod.wait() for pod in pods.values()]
        text = "".join(pod.text for pod in pods.values())
    assert statuses == [0, 0], text
    assert "two tries at once" not in text
    for name in network.hosts:
        (begun,) = [
            line
            for line in text.splitlines()
            if line.endswith(f" on {name}") and "try 1 begins" in line
        ]
        assert int(begun.split()[-3]) >= 3, begun


LEAVES = """
import mmap, os, signal, time
again = os.environ.get("TRAINWORKS_RESTART_COUNT", "0")
if again == "0":
    with open("/dev/shm/left", "w+b") as opened:  # as NCCL does
        opened.write(bytes(1 << 20))
        opened.flush()
        mapped = mmap.mmap(opened.fileno(), 0)
    os.kill(os.getpid(), signal.SIGKILL)
deadline = time.monotonic() + 60
while os.path.exists("/dev/shm/left") and time.monotonic() < deadline:
    time.sleep(0.05)
print("try", again, "finds", os.listdir("/dev/shm"), flush=True)
"""


def test_shared_memory_is_cleaned_up_after_a_restart_of_torchruns_own() -> None:
    need("torchrun")
    base = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        hyperparameters: dict[str, Json] = {
            "sagemaker_torch_distributed_enabled": "true",
            "sagemaker_torch_distributed_max_restarts": "1",
        }
        write_inputs(base, LEAVES, hyperparameters, {})
        manifest = engine_manifest(base)
        variables = {"TRAINWORKS_IMAGE_MANIFEST": str(manifest), "TMPDIR": "/var/tmp"}
        with Launcher(base, variables=variables, prefix=(*OWN_MEMORY, "shm")) as launcher:
            assert launcher.wait() == 0, launcher.text
    finally:
        shutil.rmtree(base)
    assert "removed what dead ranks left: 1 file(s), 1 MiB, in /dev/shm" in launcher.text
    assert "try 1 finds ['before']" in launcher.text
