"""TensorFlow, MXNet and torch_xla jobs as real processes, with stand-ins for the frameworks.

The frameworks are not installed. Each stand-in is a package of a few lines that acts on its
arguments as the real one does: TensorFlow's server listens on its address of TF_CONFIG, ``import
mxnet`` serves where DMLC_ROLE says so. The tests show that the processes are started with the right
words and ended with the job, and no more.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from launcher_support import Launcher, pids_with_variable, write_inputs, write_manifest

from trainworks_launcher.contract.json_values import Json
from trainworks_testing.ports import free_port

# Addresses of this test run alone: the ports of these clusters are fixed.
ADDRESSES = tuple(
    f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.{number}" for number in (1, 2, 3)
)
HOSTS = ADDRESSES[:2]
TENSORFLOW = """
import os, socket

class train:
    ClusterSpec = dict

class distribute:
    class Server:
        def __init__(self, cluster, job_name, task_index):
            host, port = cluster[job_name][task_index].rsplit(":", 1)
            self.listening = socket.create_server((host, int(port)))
            devices = os.environ["CUDA_VISIBLE_DEVICES"]
            print(job_name, task_index, "serves, GPUs:", repr(devices), flush=True)

        def join(self):
            while True:
                with self.listening.accept()[0] as connection:
                    word = connection.recv(16)
                    connection.sendall(word)
                    if word == b"die":
                        raise SystemExit(3)
"""
MXNET = """
import os, signal

role, root = os.environ["DMLC_ROLE"], os.environ["DMLC_PS_ROOT_URI"]
servers, port = os.environ["DMLC_NUM_SERVER"], os.environ["DMLC_PS_ROOT_PORT"]
print(role, "of", servers, "at", root, port, flush=True)
if role != "worker":
    print(role, "serves", flush=True)
    signal.pause()
"""
XLA_SPAWN = """
import os, sys

own = {name: os.environ[name] for name in os.environ if name.startswith(("XRT_", "GPU_NUM"))}
print("spawn", *sys.argv[1:], own)
"""
CLUSTER = """
import json, os, signal, socket, sys
config = json.loads(os.environ["TF_CONFIG"])
cluster, task = config["cluster"], config["task"]
print("task", task["type"], task["index"], "of", json.dumps(cluster, sort_keys=True), flush=True)
def place(kind, index):
    host, port = cluster[kind][index].rsplit(":", 1)
    return host, int(port)
def connect(kind, index):
    while True:
        try:
            return socket.create_connection(place(kind, index))
        except ConnectionRefusedError:
            signal.sigtimedwait([signal.SIGUSR1], 0.02)
def ask(index, word):
    with connect("ps", index) as connection:
        connection.sendall(word)
        return connection.recv(16)
assert ask(0, b"one") == ask(1, b"one") == b"one"
"""
SAVE = f"""
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
{CLUSTER}
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
assert ask(0, b"save") == ask(1, b"save") == b"save"
print("saved", flush=True)
"""
PARAMETERS = f"""{CLUSTER}
if task["type"] == "worker":
    kept = connect("master", 0)
    sys.exit(0)
with socket.create_server(place("master", 0)) as listening, listening.accept()[0] as worker:
    assert worker.recv(16) == b"", "closed by the end of the worker's process, and not before"
if "--die" in sys.argv:
    ask(1, b"die")
    signal.pause()
assert ask(1, b"two") == b"two"
print("served to the end", flush=True)
"""


def frameworks(directory: Path, **packages: str) -> str:
    """A directory with packages, for PYTHONPATH."""
    for name, text in packages.items():
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text(text, encoding="utf-8")
    return str(directory)


@contextlib.contextmanager
def job(
    tmp_path: Path,
    script: str,
    hyperparameters: Mapping[str, Json],
    packages: str,
    *,
    hosts: Sequence[str] = HOSTS,
    instance_type: str = "local",
    groups: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[list[Launcher]]:
    """Start one launcher per host, with the packages where the image's Python finds them. groups:
    name -> hosts.
    """
    image = write_manifest(tmp_path / "image.json", {"python": sys.executable})
    shared = {
        "TRAINWORKS_CONTROL_PORT": str(free_port()),
        "TRAINWORKS_IMAGE_MANIFEST": str(image),
        "PYTHONPATH": packages,
    }
    with contextlib.ExitStack() as stack:
        launchers = []
        for host in hosts:
            base = tmp_path / host
            config: dict[str, Json] = {
                "hosts": list(hosts),
                "current_host": host,
                "current_instance_type": instance_type,
                "network_interface_name": "lo",
                "instance_groups": [
                    {
                        "instance_group_name": name,
                        "instance_type": instance_type,
                        "hosts": list(members),
                    }
                    for name, members in (groups or {}).items()
                ],
            }
            write_inputs(base, script, hyperparameters, config)
            launchers.append(stack.enter_context(Launcher(base, variables=shared)))
        yield launchers


def left_behind(launchers: Sequence[Launcher]) -> list[int]:
    return [
        pid
        for launcher in launchers
        for pid in pids_with_variable("SAGEMAKER_BASE_DIR", str(launcher.base))
    ]


def test_parameter_servers_outlive_their_hosts_program_and_end_with_the_job(tmp_path: Path) -> None:
    packages = frameworks(tmp_path / "packages", tensorflow=TENSORFLOW)
    with job(
        tmp_path, PARAMETERS, {"sagemaker_parameter_server_enabled": "true"}, packages
    ) as launchers:
        assert [launcher.wait() for launcher in launchers] == [0, 0], (
            launchers[0].text + launchers[1].text
        )
        assert left_behind(launchers) == []
    first, second = HOSTS
    cluster = {
        "master": [f"{first}:2222"],
        "ps": [f"{first}:2223", f"{second}:2223"],
        "worker": [f"{second}:2222"],
    }
    assert f"task master 0 of {json.dumps(cluster)}" in launchers[0].text
    assert f"task worker 0 of {json.dumps(cluster)}" in launchers[1].text
    assert "[TensorFlow parameter server] ps 0 serves, GPUs: ''" in launchers[0].text
    assert "[TensorFlow parameter server] ps 1 serves, GPUs: ''" in launchers[1].text
    assert "served to the end" in launchers[0].text
    assert all(launcher.succeeded for launcher in launchers)


def test_a_stop_signal_goes_to_the_programs_whose_servers_go_on_serving(tmp_path: Path) -> None:
    packages = frameworks(tmp_path / "packages", tensorflow=TENSORFLOW)
    with job(tmp_path, SAVE, {"sagemaker_parameter_server_enabled": "true"}, packages) as launchers:
        for launcher in launchers:
            launcher.read_until("ready")
        launchers[1].process.send_signal(signal.SIGTERM)
        assert [launcher.wait() for launcher in launchers] == [0, 0], (
            launchers[0].text + launchers[1].text
        )
        assert left_behind(launchers) == []
    assert all("saved" in launcher.text for launcher in launchers)
    assert not any(launcher.succeeded for launcher in launchers)


def test_a_parameter_server_that_fails_is_the_jobs_failure(tmp_path: Path) -> None:
    """Fail even where the program beside the server has ended well."""
    packages = frameworks(tmp_path / "packages", tensorflow=TENSORFLOW)
    hyperparameters = {"sagemaker_parameter_server_enabled": "true", "die": "1"}
    with job(tmp_path, PARAMETERS, hyperparameters, packages) as launchers:
        assert [launcher.wait() for launcher in launchers] == [3, 3], (
            launchers[0].text + launchers[1].text
        )
        assert left_behind(launchers) == []
    expected = (
        f"the TensorFlow parameter server on host {HOSTS[1]} (mode parameter_server): exit status 3"
    )
    assert all(expected in launcher.failure for launcher in launchers)


def test_a_parameter_server_that_cannot_start_is_told_with_its_traceback(tmp_path: Path) -> None:
    packages = frameworks(tmp_path / "packages", tensorflow="raise ImportError('no libcuda')")
    with job(
        tmp_path,
        "import signal; signal.pause()",
        {"sagemaker_parameter_server_enabled": True},
        packages,
    ) as launchers:
        assert [launcher.wait() for launcher in launchers] == [1, 1]
        assert left_behind(launchers) == []
    assert all(launcher.failure.startswith("ImportError: no libcuda\n") for launcher in launchers)


def test_mxnets_roles_find_the_scheduler_by_its_address(tmp_path: Path) -> None:
    packages = frameworks(tmp_path / "packages", mxnet=MXNET)
    hyperparameters = {"sagemaker_parameter_server_enabled": "true", "_ps_port": str(free_port())}
    # The scheduler's name has to be looked up: a name that every machine has, beside an address.
    with job(
        tmp_path, "import mxnet", hyperparameters, packages, hosts=("localhost", HOSTS[1])
    ) as launchers:
        assert [launcher.wait() for launcher in launchers] == [0, 0], (
            launchers[0].text + launchers[1].text
        )
        assert left_behind(launchers) == []
    at = f"of 2 at 127.0.0.1 {hyperparameters['_ps_port']}"
    assert f"worker {at}" in launchers[0].text
    assert f"worker {at}" in launchers[1].text
    assert "starting the MXNet scheduler" in launchers[0].text
    assert "starting the MXNet scheduler" not in launchers[1].text
    assert all("starting the MXNet server" in launcher.text for launcher in launchers)


def test_mirrored_workers_have_their_place_in_the_cluster(tmp_path: Path) -> None:
    packages = frameworks(tmp_path / "packages", tensorflow="")
    script = "import os; print('config', os.environ['TF_CONFIG'])"
    with job(
        tmp_path, script, {"sagemaker_multi_worker_mirrored_strategy_enabled": "true"}, packages
    ) as launchers:
        assert [launcher.wait() for launcher in launchers] == [0, 0]
    for index, launcher in enumerate(launchers):
        line = next(line for line in launcher.text.splitlines() if line.startswith("config "))
        assert json.loads(line[len("config ") :]) == {
            "cluster": {"worker": [f"{host}:8890" for host in HOSTS]},
            "environment": "cloud",
            "task": {"index": index, "type": "worker"},
        }


def test_torch_xla_starts_the_processes_of_each_host(tmp_path: Path) -> None:
    packages = frameworks(tmp_path / "packages", torch_xla="")
    distributed = tmp_path / "packages/torch_xla/distributed"
    distributed.mkdir()
    (distributed / "xla_spawn.py").write_text(XLA_SPAWN, encoding="utf-8")
    hyperparameters = {"sagemaker_pytorch_xla_multi_worker_enabled": "true", "epochs": "3"}
    with job(tmp_path, "", hyperparameters, packages, instance_type="ml.fast.xlarge") as launchers:
        assert [launcher.wait() for launcher in launchers] == [0, 0], launchers[0].text
    assert "spawn --num_gpus 8 train.py --epochs 3" in launchers[1].text
    assert "'XRT_HOST_ORDINAL': '1'" in launchers[1].text
    assert (
        f"'XRT_WORKERS': 'localservice:0;{HOSTS[0]}:43857|localservice:1;{HOSTS[1]}:43857'"
        in launchers[1].text
    )


@pytest.mark.parametrize(
    "failing", [None, ADDRESSES[0], ADDRESSES[2]], ids=["nobody", "the first host", "the last host"]
)
def test_a_host_outside_the_distribution_runs_the_program_and_ends_with_the_job(
    tmp_path: Path, failing: str | None
) -> None:
    """The first host is the one outside, so the channel's leader is the second,
    the distribution's first.
    """
    outside, first, second = ADDRESSES
    packages = frameworks(tmp_path / "packages", tensorflow="")
    script = f"""
import os, signal, sys
host = os.environ["SM_CURRENT_HOST"]
print("config" if "TF_CONFIG" in os.environ else "plain", os.environ["MASTER_ADDR"], flush=True)
if host == {failing!r}:
    sys.exit(42)
if {failing!r}:
    signal.pause()
"""
    hyperparameters: dict[str, Json] = {
        "sagemaker_multi_worker_mirrored_strategy_enabled": "true",
        "sagemaker_distribution_instance_groups": '["train"]',
    }
    groups = {"data": (outside,), "train": (first, second)}
    with job(
        tmp_path, script, hyperparameters, packages, hosts=ADDRESSES, groups=groups
    ) as launchers:
        expected = 42 if failing else 0
        assert [launcher.wait() for launcher in launchers] == [expected] * 3, "".join(
            launcher.text for launcher in launchers
        )
        assert left_behind(launchers) == []
    for launcher, kind in zip(launchers, ("plain", "config", "config"), strict=True):
        assert failing or f"{kind} {first}" in launcher.text
        assert launcher.failure.startswith(f"train.py on host {failing}") == bool(failing)
    assert f"joined {first}" in launchers[0].text
    assert "takes no part in it, 2 do, 3 in the job" in launchers[0].text


@pytest.mark.parametrize(
    "switch", ["sagemaker_parameter_server_enabled", "sagemaker_pytorch_xla_multi_worker_enabled"]
)
def test_without_the_package_nothing_is_started(tmp_path: Path, switch: str) -> None:
    hyperparameters = {switch: "true"}
    with job(
        tmp_path,
        "print('started')",
        hyperparameters,
        str(tmp_path),
        hosts=HOSTS[:1],
        instance_type="ml.fast.xlarge",
    ) as launchers:
        assert launchers[0].wait() == 64
    assert "needs" in launchers[0].failure
    assert "started" not in launchers[0].text
