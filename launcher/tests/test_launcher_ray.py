"""Test Ray's head and workers beside a program: the plan, and real processes with a stand-in for
Ray.

The stand-in is named ``ray``, on the manifest's list of programs: its head listens and counts those
who connect, its workers connect. The real Ray is in ``test_launcher_ray_engine.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_support import (
    Launcher,
    environment,
    pids_with_variable,
    plan,
    write_inputs,
    write_manifest,
)

from trainworks_launcher.command.explain import explain
from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.environment.environment import Devices
from trainworks_launcher.plan.plan import NodePlan
from trainworks_testing.ports import free_port

SECRET = "a secret of the job"
RAY: dict[str, Json] = {"sagemaker_ray_enabled": "true"}
ADDRESSES = tuple(f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.{number}" for number in (1, 2))
LIBRARY = """
import socket
class GcsClient:
    def __init__(self, address):
        self.place = address.rsplit(":", 1)
    def get_all_node_info(self):
        with socket.create_connection((self.place[0], int(self.place[1]))) as head:
            head.sendall(b"?")
            return {number: type("Row", (), {"state": 0}) for number in range(head.recv(1)[0])}
"""
STAND_IN = """
import os, select, signal, socket, sys, threading
options = dict(word.partition("=")[::2] for word in sys.argv[2:])
print("options", *sys.argv[2:], flush=True)
if "fails" in os.environ["STAND_IN"].split(",") and "--address" in options:
    sys.exit("the plasma store is on fire")
if "--address" in options:
    host, port = options["--address"].split(":")
    with socket.create_connection((host, int(port))) as kept:
        if "late" not in os.environ["STAND_IN"].split(","):
            kept.sendall(b"+")
            print("joined", flush=True)
        kept.recv(1)
    sys.exit("lost the head")
hosts = [1]
def serve(connection):
    word = connection.recv(1)
    if word == b"?":
        connection.sendall(bytes(hosts))
        connection.close()
    elif word == b"+":
        hosts[0] += 1
        kept.append(connection)
    elif word == b"x":
        os._exit(9)
    elif word == b"l":
        select.select((), (), (), 1.5)
        os._exit(9)
kept = []
with socket.create_server(("", int(options["--port"]))) as listening:
    while True:
        threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()
"""
PROGRAM = """
import os, socket, sys

print("starts with", os.environ["RAY_ADDRESS"], flush=True)
host, port = os.environ["RAY_ADDRESS"].split(":")
if "--die" in sys.argv:
    import signal

    with socket.create_connection((host, int(port))) as head:
        head.sendall(sys.argv[sys.argv.index("--die") + 1].encode())
        if "--late" not in sys.argv:
            signal.pause()
    ActorDiedError = type("ActorDiedError", (Exception,), {"__module__": "ray.exceptions"})
    raise ActorDiedError("its node has died")
sys.exit(int(sys.argv[sys.argv.index("--status") + 1]))
"""


def planned(
    shared_memory: int | None = None,
    host: str = "",
    options: str = "",
    cpus: int = 6,
    gpus: int = 2,
) -> NodePlan:
    devices = Devices(gpus=gpus, cpus=cpus, interfaces=("eth0", "lo"), shared_memory=shared_memory)
    variables = {"PATH": "/usr/bin", **({"TRAINWORKS_RAY_OPTIONS": options} if options else {})}
    return plan(
        environment(
            RAY,
            hosts=("algo-1", "algo-2"),
            instance_type="local",
            devices=devices,
            variables=variables,
        ),
        host,
    )


def words(node_plan: NodePlan) -> tuple[str, ...]:
    """The words behind ``ray start``."""
    (daemon,) = node_plan.auxiliaries
    return daemon.argv[daemon.argv.index("start") + 1 :]


def test_every_host_has_a_daemon_with_its_own_resources_and_the_leader_the_program() -> None:
    head, worker = planned(), planned(host="algo-2")
    assert [node_plan.auxiliaries[0].name for node_plan in (head, worker)] == [
        "Ray head",
        "Ray worker",
    ]
    assert words(head)[:2] == ("--head", "--port=7777")
    assert words(worker)[0] == "--address=algo-1:7777"
    for node_plan in (head, worker):
        assert {"--block", "--num-gpus=2", "--num-cpus=6"} <= set(words(node_plan))
        assert node_plan.env["RAY_ADDRESS"] == "algo-1:7777"
        assert "OMP_NUM_THREADS" not in node_plan.env, "Ray's own, for each of its processes"
    assert "--include-dashboard=false" in words(head)
    assert not any("dashboard" in word for word in words(worker)), "Ray refuses it there"
    assert head.argv[-1] == "train.py"
    assert worker.argv == ()
    assert all(row.why for node_plan in (head, worker) for row in explain(node_plan, {}))


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (None, []),
        (10**11, []),
        (8 << 30, ["--object-store-memory=4294967296"]),
        (64 << 20, ["--object-store-memory=78643200", "--plasma-directory=/tmp"]),
    ],
)
def test_the_object_store_fits_into_shared_memory(free: int | None, expected: list[str]) -> None:
    node_plan = planned(free)
    assert [
        word for word in words(node_plan) if word.startswith(("--object-store", "--plasma"))
    ] == expected
    warned = "/dev/shm has 64 MiB free, too little for Ray's object store" in "".join(
        node_plan.warnings
    )
    assert warned == (len(expected) == 2)


def test_options_of_a_user_come_last_and_those_of_the_head_only_to_the_head() -> None:
    message = "--include-dashboard=true --num-cpus=3 --resources='{\"slots\": 8}'"
    head, worker = planned(options=message), planned(options=message, host="algo-2")
    assert words(head)[-3:] == (
        "--include-dashboard=true",
        "--num-cpus=3",
        '--resources={"slots": 8}',
    )
    assert words(worker)[-2:] == ("--num-cpus=3", '--resources={"slots": 8}')


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (
            "--port=6379 --head",
            ["'--port=6379' cannot be given to ray start", "'--head' cannot be given to ray start"],
        ),
        ("--num-cpus 3", ["'3' cannot be given to ray start", "write --NAME=VALUE"]),
        (
            "--resources='{",
            ["cannot be read: No closing quotation (variable TRAINWORKS_RAY_OPTIONS)"],
        ),
    ],
)
def test_options_that_the_launcher_gives_are_refused(options: str, messages: list[str]) -> None:
    with pytest.raises(RefusalError) as refused:
        planned(options=options)
    for text in messages:
        assert text in str(refused.value)


def test_with_a_secret_ray_wants_a_token_that_no_plan_shows() -> None:
    job_environment = environment(RAY, hosts=("algo-1", "algo-2"))
    assert "RAY_AUTH_TOKEN" not in plan(job_environment).env
    tokens = {
        plan(job_environment._replace(job_secret=SECRET), host).env["RAY_AUTH_TOKEN"]
        for host in ("algo-1", "algo-2")
    }
    assert len(tokens) == 1
    (token,) = tokens
    node_plan = plan(job_environment._replace(job_secret=SECRET))
    assert node_plan.env["RAY_AUTH_MODE"] == "token"
    shown = node_plan.to_json(
        Redactor(job_environment.variables, node_plan.env, job_environment.hyperparameters)
    )
    assert token not in shown
    assert SECRET not in token + shown


def with_ray(version: str, hosts: tuple[str, ...]) -> NodePlan:
    job_environment = environment(RAY, hosts=hosts)
    changed_manifest = job_environment.manifest._replace(
        components={**job_environment.manifest.components, "ray": version}
    )
    return plan(job_environment._replace(job_secret=SECRET, manifest=changed_manifest))


@pytest.mark.parametrize("version", ["2.51.2", "2.40.0", "2.9.3", "1.13.0"])
def test_a_ray_that_ignores_the_secret_is_refused_on_several_hosts(version: str) -> None:
    with pytest.raises(RefusalError) as refused:
        with_ray(version, ("algo-1", "algo-2"))
    assert refused.value.status == 64
    assert f"Ray {version} ignores TRAINWORKS_JOB_SECRET" in str(refused.value)
    assert "use Ray 2.52.0 or later" in str(refused.value)
    (warning,) = [line for line in with_ray(version, ("algo-1",)).warnings if "Ray" in line]
    assert "also on one host" in warning


@pytest.mark.parametrize("version", ["2.52.0", "2.52.1", "2.60.0", "3.0.0.dev0"])
def test_a_ray_that_asks_for_the_token_is_taken(version: str) -> None:
    for hosts in (("algo-1",), ("algo-1", "algo-2")):
        assert not [line for line in with_ray(version, hosts).warnings if "Ray" in line]
    (warning,) = [line for line in with_ray("", ("algo-1", "algo-2")).warnings if "Ray" in line]
    assert "is not known" in warning


def test_the_version_of_ray_is_that_of_the_python_that_runs_it(tmp_path: Path) -> None:
    library = tmp_path / "library"
    (library / "ray-2.40.0.dist-info").mkdir(parents=True)
    (library / "ray-2.40.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: ray\nVersion: 2.40.0\n"
    )
    (library / "ray").mkdir()
    (library / "ray/__init__.py").touch()
    programs = {
        "ray": "exit 9",
        "python": f'PYTHONPATH="{library}" exec {sys.executable} "$@"',
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    image = write_manifest(
        tmp_path / "image.json", {name: str(tmp_path / name) for name in programs}
    )
    variables = {"TRAINWORKS_IMAGE_MANIFEST": str(image), "TRAINWORKS_JOB_SECRET": SECRET}
    config: dict[str, Json] = {
        "hosts": list(ADDRESSES),
        "current_host": ADDRESSES[0],
        "network_interface_name": "lo",
    }
    write_inputs(tmp_path / "job", PROGRAM, RAY, config)
    with Launcher(
        tmp_path / "job", variables={**variables, "TRAINWORKS_CONTROL_PORT": str(free_port())}
    ) as launcher:
        launcher.read_until("Ray 2.40.0 ignores TRAINWORKS_JOB_SECRET")


@contextlib.contextmanager
def job(
    tmp_path: Path, hyperparameters: dict[str, Json], *, stand_in: str = "", **variables: str
) -> Iterator[list[Launcher]]:
    """Two launchers whose Ray is the stand-in.

    Its Python finds the library without a variable, as an image's does.
    """
    (tmp_path / "library/ray").mkdir(parents=True)
    (tmp_path / "library/ray/__init__.py").touch()
    (tmp_path / "library/ray/_raylet.py").write_text(LIBRARY, encoding="utf-8")
    (tmp_path / "stand_in.py").write_text(STAND_IN, encoding="utf-8")
    programs = {
        "ray": f'exec {sys.executable} {tmp_path}/stand_in.py "$@"',
        "python": (
            '[ "$1" != -I ] || shift\n'
            f'PYTHONPATH="{tmp_path}/library:$PYTHONPATH" exec {sys.executable} "$@"'
        ),
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    image = write_manifest(
        tmp_path / "image.json", {name: str(tmp_path / name) for name in programs}
    )
    shared = {
        "TRAINWORKS_CONTROL_PORT": str(free_port()),
        "MASTER_PORT": str(free_port()),
        "TRAINWORKS_IMAGE_MANIFEST": str(image),
        "STAND_IN": stand_in,
        **variables,
    }
    with contextlib.ExitStack() as stack:
        launchers = []
        for host in ADDRESSES:
            config: dict[str, Json] = {
                "hosts": list(ADDRESSES),
                "current_host": host,
                "network_interface_name": "lo",
            }
            write_inputs(tmp_path / host, PROGRAM, {**RAY, **hyperparameters}, config)
            launchers.append(stack.enter_context(Launcher(tmp_path / host, variables=shared)))
        yield launchers


def assert_ended(launchers: list[Launcher], status: int) -> None:
    """Check that both hosts ended with the status, and that no process of theirs runs."""
    text = "".join(f"{host.wait()}\n{host.text}" for host in launchers)
    assert [host.process.returncode for host in launchers] == [status, status], text
    assert not any(
        pids_with_variable("SAGEMAKER_BASE_DIR", str(host.base)) for host in launchers
    ), text


@pytest.mark.parametrize("status", [0, 7])
def test_the_program_starts_when_all_have_joined_and_its_status_is_the_jobs(
    tmp_path: Path, status: int
) -> None:
    with job(tmp_path, {"status": status}) as launchers:
        assert_ended(launchers, status)
        leader, worker = launchers
    assert "trainworks: starting the Ray head\n" in leader.text
    assert "[Ray worker] joined\n" in worker.text
    assert "starts with " in leader.text
    assert "starts with " not in worker.text
    for host in launchers:
        expected = f"train.py on host {ADDRESSES[0]} (mode ray): exit status 7\n"
        assert host.failure.startswith(expected) if status else host.succeeded


def test_a_daemon_that_fails_ends_the_job_with_its_words(tmp_path: Path) -> None:
    with job(tmp_path, {}, stand_in="fails") as launchers:
        assert_ended(launchers, 1)
    for host in launchers:
        assert host.failure.startswith(
            f"the Ray worker on host {ADDRESSES[1]} (mode ray): exit status 1"
        ), host.failure
        assert "the plasma store is on fire" in host.failure
    assert "starts with" not in launchers[0].text


@pytest.mark.parametrize("hyperparameters", [{"die": "x"}, {"die": "l", "late": 1}])
def test_a_head_that_dies_under_the_program_is_the_cause(
    tmp_path: Path, hyperparameters: dict[str, Json]
) -> None:
    """Find the head also where the program notices the death before Ray's daemon does, which looks
    once a second.
    """
    with job(tmp_path, hyperparameters) as launchers:
        assert_ended(launchers, 9)
    for host in launchers:
        assert host.failure.startswith(
            f"the Ray head on host {ADDRESSES[0]} (mode ray): exit status 9"
        ), host.failure


def test_a_host_that_does_not_join_ray_ends_the_job_within_the_limit(tmp_path: Path) -> None:
    with job(tmp_path, {}, stand_in="late", TRAINWORKS_JOIN_LIMIT_SECONDS="15") as launchers:
        assert_ended(launchers, 66)
    assert "trainworks: 1 of 2 hosts joined Ray within 15 s" in launchers[1].failure


def test_a_stop_signal_goes_to_the_program(tmp_path: Path) -> None:
    with job(tmp_path, {}, stand_in="late") as launchers:
        launchers[1].read_until("options")
        launchers[1].process.send_signal(signal.SIGTERM)
        assert [host.wait() for host in launchers] == [143, 143]
