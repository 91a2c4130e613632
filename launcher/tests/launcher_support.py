"""Share made-up environments for pure tests, and real launcher processes for the others, among the
launcher's tests.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO

from trainworks_launcher.contract.hyperparameters import decode_values
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment import platforms
from trainworks_launcher.environment.entry_point import Code
from trainworks_launcher.environment.environment import Devices, Environment
from trainworks_launcher.environment.manifest import Manifest, parse_manifest
from trainworks_launcher.environment.resource_config import read_hosts
from trainworks_launcher.job.job import make_job
from trainworks_launcher.plan.modes import plan_host
from trainworks_launcher.plan.plan import NodePlan
from trainworks_testing.clock import PATIENCE, assert_within, start_clock

WAIT_FOR_SIGNALS = """
import os, signal

def wait_for_signals():
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    while True:
        os.read(waking, 1)
"""
"""The end of a script that has handlers.

A signal that comes right before the system call of ``signal.pause`` is only noted: its handler runs
after the call, which never ends. The pipe has a byte for it.
"""

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHER = REPOSITORY / "launcher"
TIME_OUT = PATIENCE

PROGRAMS = {
    name: f"/usr/bin/{name}"
    for name in ("python", "bash", "sh", "mpirun", "torchrun", "ray", "ssh", "sshd", "ssh-keygen")
}
GLOO_ENDS = """
import atexit, time
atexit.register(time.sleep, 0.3)
"""
"""How a script of a test begins that uses gloo: its end waits for gloo's threads.

Without that one of a few good ranks is aborted after its last line ("terminate called without an
active exception"): a thread of gloo still frees a tensor when Python ends (pytorch issue 190489).
The fault is torch's, not the launcher's.
"""

TRAIN = (sys.executable, "-IS", str(LAUNCHER / "trainworks_launcher" / "__main__.py"))
"""The words that start the launcher."""

INSTANCES: dict[str, Json] = {
    "ml.fast.xlarge": {"gpus": 8, "neuron_cores": 0, "efa": True, "efa_rdma": True},
    "ml.fabric.xlarge": {"gpus": 4, "neuron_cores": 0, "efa": True, "efa_rdma": False},
    "ml.plain.xlarge": {"gpus": 0, "neuron_cores": 0, "efa": False, "efa_rdma": False},
    "ml.neuron.xlarge": {"gpus": 0, "neuron_cores": 32, "efa": True, "efa_rdma": True},
}

NO_GPU = Devices(gpus=0, cpus=4, interfaces=("eth0", "lo"))


def manifest_document(open_mpi: str = "5.0.11", **changes: Json) -> dict[str, Json]:
    """An image manifest as the builder writes it."""
    return {
        "schema": 1,
        "name": "made-up",
        "components": {
            "open-mpi": {"version": open_mpi, "prefix": "/opt/venv"},
            "mpi4py": {"version": "4.1.2"},
        },
        "missing": [
            {"component": "aws-ofi-nccl", "cost": "NCCL talks TCP between hosts instead of EFA"}
        ],
        "instances": INSTANCES,
        "programs": dict(PROGRAMS),
        "hostname_shim": "/opt/trainworks/lib/libhostname.so",
        **changes,
    }


def manifest(open_mpi: str = "5.0.11") -> Manifest:
    return parse_manifest(json.dumps(manifest_document(open_mpi)), "made-up")


def environment(
    hyperparameters: Mapping[str, Json] | None = None,
    *,
    hosts: Sequence[str] = (),
    host: str = "algo-1",
    instance_type: str = "ml.plain.xlarge",
    interface: str = "eth0",
    variables: Mapping[str, str] | None = None,
    devices: Devices = NO_GPU,
    open_mpi: str = "5.0.11",
    resource_config: Mapping[str, Json] | None = None,
    **changes: object,
) -> Environment:
    """A whole environment with nothing of this machine in it."""
    config: dict[str, Json] = {}
    if hosts:
        config = {
            "current_host": host,
            "hosts": list(hosts),
            "current_instance_type": instance_type,
            "network_interface_name": interface,
        }
    hosts_config = config if resource_config is None else resource_config
    value = Environment(
        base_directory="/opt/ml",
        variables=MappingProxyType(dict(variables or {"PATH": "/usr/bin:/bin"})),
        hyperparameters=decode_values({"sagemaker_program": "train.py", **(hyperparameters or {})}),
        hosts=read_hosts(hosts_config),
        input_data_config=MappingProxyType({}),
        manifest=_for_its_devices(manifest(open_mpi), instance_type),
        devices=devices,
        code=Code("/opt/ml/code", entries=("run.sh", "tool", "train.py"), executable=("tool",)),
        hostname=host,
        programs=MappingProxyType(dict(PROGRAMS)),
        hostname_shim="/opt/trainworks/lib/libhostname.so",
        launcher_python="/usr/bin/python3",
        launcher_directory="/opt/trainworks/lib/trainworks_launcher",
        platform=platforms.describe(platforms.Sources(variables or {}, config, host)),
    )
    return value._replace(**changes)  # type: ignore[arg-type]


def _for_its_devices(given_manifest: Manifest, instance_type: str) -> Manifest:
    """An image with Neuron for hosts that have its cores."""
    if "neuron" not in instance_type:
        return given_manifest
    return given_manifest._replace(
        components=MappingProxyType({**given_manifest.components, "neuron-runtime": "2.32"})
    )


def plan(job_environment: Environment, host: str = "") -> NodePlan:
    return plan_host(make_job(job_environment, host))


def write_inputs(
    base: Path, script: str, hyperparameters: Mapping[str, Json], config: Mapping[str, Json]
) -> None:
    """The files that a platform mounts."""
    (base / "code").mkdir(parents=True, exist_ok=True)
    (base / "input/config").mkdir(parents=True, exist_ok=True)
    (base / "code/train.py").write_text(script, encoding="utf-8")
    document = {"sagemaker_program": "train.py", **hyperparameters}
    (base / "input/config/hyperparameters.json").write_text(json.dumps(document), encoding="utf-8")
    if config:
        (base / "input/config/resourceconfig.json").write_text(json.dumps(config), encoding="utf-8")


def stand_in(folder: Path) -> None:
    """Write the stand-in for nvidia-smi into a folder for PATH."""
    program = folder / "nvidia-smi"
    target = Path(__file__).with_name("stand_in_nvidia_smi.py")
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -IS "{target}" "$@"\n', encoding="utf-8"
    )
    program.chmod(0o755)


def write_manifest(
    path: Path, programs: Mapping[str, str], hostname_shim: str = "", **changes: Json
) -> Path:
    """A manifest file whose programs are ``programs``."""
    path.write_text(
        json.dumps(
            manifest_document()
            | {"programs": dict(programs), "hostname_shim": hostname_shim}
            | changes
        ),
        encoding="utf-8",
    )
    return path


def pids_with_variable(name: str, value: str) -> list[int]:
    """Processes started with this environment variable."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{name}={value}".encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


class Launcher:
    """A real launcher process on a base directory, with everything it prints."""

    def __init__(
        self,
        base: Path,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        stderr: int = subprocess.STDOUT,
        program: Sequence[str] = TRAIN,
    ) -> None:
        self.base = base
        self.output = b""
        self.status = -1
        self.end_time = 0.0
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SM_", "SAGEMAKER_"))
        }
        env.update({"SAGEMAKER_BASE_DIR": str(base), "TRAINWORKS_IMAGE_MANIFEST": ""})
        if not prefix:
            # A launcher that a test kills leaves its directory behind: let it
            # be one of the test's, with a short name.
            scratch = base / "tmp"
            if not scratch.exists():
                real_folder = tempfile.mkdtemp(prefix="tw-")
                atexit.register(shutil.rmtree, real_folder, ignore_errors=True)
                base.mkdir(parents=True, exist_ok=True)
                scratch.symlink_to(real_folder)
            env["TMPDIR"] = str(scratch.resolve())
        env.update(variables or {})
        command = [*prefix, *program, *arguments]
        start_clock()
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(TIME_OUT)
        # A launcher that a test killed could not end its script.
        for pid in pids_with_variable("SAGEMAKER_BASE_DIR", str(self.base)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def read_until(self, words: str, count: int = 1) -> None:
        """Read until ``words`` were printed ``count`` times.

        Fails with all output if the process ends before.
        """
        while self.output.count(words.encode()) < count:
            assert self._read(), f"{words!r} was never printed:\n{self.text}"

    def wait(self) -> int:
        """The exit status, with all output read."""
        while self._read():
            pass
        status = self.process.wait(TIME_OUT)
        self.end_time = time.monotonic()
        return status

    @property
    def seconds(self) -> float:
        """Return how long the launcher ran."""
        return self.end_time - self.started

    def assert_ended_within(self, seconds: float) -> None:
        """Fail if the launcher ran longer, on a machine without other work."""
        assert_within(seconds, self.started, self.end_time, self.text)

    def signal_process_one(self, number: int) -> None:
        """Signal the launcher itself where it is process 1 of a PID namespace,
        below ``unshare``.
        """
        os.kill(self.process_one(), number)

    def process_one(self) -> int:
        """Process id, as seen from here, of the launcher that is process 1 of a PID namespace."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(
            encoding="ascii"
        )
        return int(children.split()[0])

    @property
    def text(self) -> str:
        return self.output.decode("utf-8", "replace")

    @property
    def failure(self) -> str:
        """The text of output/failure without its last newline, "" if there is none."""
        path = self.base / "output/failure"
        return path.read_text(encoding="utf-8").removesuffix("\n") if path.exists() else ""

    @property
    def succeeded(self) -> bool:
        return (self.base / "output/success").exists()

    def _read(self) -> bool:
        stream: IO[bytes] | None = self.process.stdout
        assert stream is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            assert selector.select(TIME_OUT), f"nothing was printed for {TIME_OUT} s:\n{self.text}"
        chunk = os.read(stream.fileno(), 65536)
        self.output += chunk
        return bool(chunk)
