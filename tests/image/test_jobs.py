"""Real training jobs in the real `cpu` image, started as a platform starts
them: one container per host, /opt/ml.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from image.jobs import RESTRICTED, assert_trained, prepare, run_on_hosts, train_on_two_hosts
from image.support import BuiltByCommand
from trainworks.engine.protocol import Completed, Job, Mount

pytestmark = pytest.mark.engine

MODES = ("torch_distributed", "mpi", "smddp", "smddp-torchrun", "smp")

PLAIN_MODEL = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
print(model.load_state_dict(torch.load("/opt/ml/model/model.pt")))
"""


@pytest.mark.parametrize(
    "mode", [pytest.param("torch_distributed", marks=pytest.mark.core), *MODES[1:]]
)
def test_two_processes_on_one_host_train(
    docker_image: BuiltByCommand, mode: str, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "ml", mode)
    mounts = (Mount(source=folder, target="/opt/ml"),)
    done = docker_image.engine.run(
        docker_image.reference, Job(command=("train",), mounts=mounts, timeout=300)
    )
    assert done.status == 0, done.output[-4000:]
    assert_trained(done.output, 2, folder)


@pytest.mark.core
def test_two_processes_train_on_a_host_that_does_not_know_its_own_name(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    """Run without a network: nothing resolves the container's name.

    Torchrun and gloo would look for it.
    """
    folder = prepare(tmp_path / "ml", "torch_distributed")
    mounts = (Mount(source=folder, target="/opt/ml"),)
    done = docker_image.engine.run(
        docker_image.reference, Job(command=("train",), mounts=mounts, timeout=300, isolated="job")
    )
    assert done.status == 0, done.output[-4000:]
    assert_trained(done.output, 2, folder)


def test_a_model_that_smp_has_trained_is_a_plain_one(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "ml", "smp", processes=4)
    mounts = (Mount(source=folder, target="/opt/ml"),)
    done = docker_image.engine.run(
        docker_image.reference, Job(command=("train",), mounts=mounts, timeout=300)
    )
    assert_trained(done.output, 4, folder)
    loaded = docker_image.engine.run(
        docker_image.reference,
        Job(command=("python", "-c", PLAIN_MODEL), mounts=mounts, timeout=300),
    )
    assert "All keys matched" in loaded.output


def plain_job(folder: Path, script: str, **hyperparameters: str) -> Path:
    """Lay out /opt/ml for a script of one process."""
    for name in ("code", "input/config", "model", "output"):
        (folder / name).mkdir(parents=True)
    (folder / "code" / "script.py").write_text(script, encoding="utf-8")
    config = folder / "input" / "config"
    (config / "hyperparameters.json").write_text(
        json.dumps({"sagemaker_program": "script.py", **hyperparameters})
    )
    (config / "resourceconfig.json").write_text(
        json.dumps({"current_host": "algo-1", "hosts": ["algo-1"]})
    )
    return folder


def test_a_failing_script_ends_with_its_own_status_and_says_why(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    script = "import sys\nprint('cannot read /no/such/data', file=sys.stderr)\nsys.exit(42)\n"
    folder = plain_job(tmp_path / "ml", script)
    done = docker_image.engine.run(
        docker_image.reference,
        Job(command=("train",), mounts=(Mount(source=folder, target="/opt/ml"),), timeout=300),
    )
    assert done.status == 42, done.output
    assert "/no/such/data" in (folder / "output" / "failure").read_text(encoding="utf-8")
    assert not (folder / "output" / "success").exists()


def test_no_argument_is_train_and_another_one_is_run_as_given(
    image: BuiltByCommand, tmp_path: Path
) -> None:
    folder = plain_job(tmp_path / "ml", "import sys; print('arguments', sys.argv[1:])", rate="0.5")
    mounts = (Mount(source=folder, target="/opt/ml"),)
    assert (
        "arguments ['--rate', '0.5']"
        in image.engine.run(image.reference, Job(command=(), mounts=mounts, timeout=300)).output
    )
    done = image.engine.run(
        image.reference, Job(command=("bash", "-c", "echo $0 is bash; exit 7"), timeout=300)
    )
    assert done == Completed(status=7, output="bash is bash\n")


def test_the_plan_of_a_job_is_shown_and_nothing_is_run(
    image: BuiltByCommand, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "ml", "torch_distributed")
    mounts = (Mount(source=folder, target="/opt/ml"),)
    done = image.engine.run(
        image.reference, Job(command=("train", "--plan"), mounts=mounts, timeout=300)
    )
    plan = json.loads(done.output)
    assert done.status == 0
    assert plan["argv"][0] == "/opt/venv/bin/torchrun"
    assert not any((folder / "model").iterdir())


@pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.core) for mode in MODES[:2]), *MODES[2:]]
)
def test_two_hosts_train_together_and_end_together(
    docker_image: BuiltByCommand, network: Any, mode: str, tmp_path: Path
) -> None:
    train_on_two_hosts(docker_image.reference, network, mode, tmp_path)


@pytest.mark.parametrize(
    ("mode", "user"),
    [
        ("mpi", "65534"),
        ("mpi", "73421"),
        ("smddp", "73421"),
        ("smp", "73421"),
        ("torch_distributed", "73421"),
    ],
)
def test_two_restricted_pods_train_together(
    docker_image: BuiltByCommand, network: Any, mode: str, user: str, tmp_path: Path
) -> None:
    """Run with no root, no capability, and a read-only root.

    The user `nobody` has no shell, and the other user no password entry.
    """
    train_on_two_hosts(docker_image.reference, network, mode, tmp_path, user)


FAILS_ON_THE_LAST_RANK = """
from mpi4py import MPI
world = MPI.COMM_WORLD
if world.rank == world.size - 1:
    raise ValueError("no data for rank", world.rank)
world.barrier()
"""


@pytest.mark.core
def test_both_hosts_name_the_rank_that_failed_first(
    docker_image: BuiltByCommand, network: Any, tmp_path: Path
) -> None:
    hosts = ("algo-1", "algo-2")
    folders = {
        host: prepare(tmp_path / host, "mpi", processes=1, host=host, hosts=",".join(hosts))
        for host in hosts
    }
    for folder in folders.values():
        (folder / "code" / "train.py").write_text(FAILS_ON_THE_LAST_RANK, encoding="utf-8")
    run_on_hosts(docker_image.reference, network, folders, status=1)
    for folder in folders.values():
        failure = (folder / "output" / "failure").read_text(encoding="utf-8")
        assert failure.startswith("ValueError: ('no data for rank', 1)\ntrain.py on host algo-2"), (
            failure
        )
        assert (
            json.loads((folder / "output" / "failure.json").read_text(encoding="utf-8"))["rank"]
            == 1
        )


CALLS_MPIRUN = """
import json, os, subprocess, sys

RANK = '''
from mpi4py import MPI
world = MPI.COMM_WORLD
print("rank", world.rank, "of", world.size, "sum", world.allreduce(world.rank))
'''
if os.environ["SM_CURRENT_HOST"] == "algo-1":
    with open("/tmp/hostfile", "w") as hostfile:
        hostfile.writelines(f"{host} slots=2\\n" for host in json.loads(os.environ["SM_HOSTS"]))
    line = "/opt/amazon/openmpi/bin/mpirun --hostfile /tmp/hostfile -np 4 -N 2 -mca pml ob1"
    line += " -x PATH -x LD_LIBRARY_PATH -mca btl_tcp_if_exclude lo,docker0 -x NCCL_DEBUG=INFO"
    sys.exit(subprocess.run([*line.split(), "python", "-c", RANK]).returncode)
"""


@pytest.mark.parametrize("user", ["", "73421"], ids=["root", "restricted"])
def test_a_script_for_awss_images_calls_mpirun_with_a_hostfile(
    docker_image: BuiltByCommand, network: Any, user: str, tmp_path: Path
) -> None:
    """Each host runs the script, and the first calls mpirun by AWS's path for all."""
    hosts = ("algo-1", "algo-2")
    folders = {host: plain_job(tmp_path / host, CALLS_MPIRUN) for host in hosts}
    for host, folder in folders.items():
        config = {"current_host": host, "hosts": hosts}
        (folder / "input/config/resourceconfig.json").write_text(
            json.dumps(config), encoding="utf-8"
        )
    if user:
        subprocess.run(("chown", "-R", user, str(tmp_path)), check=True)
    settings = {**RESTRICTED, "user": user} if user else {}
    output = run_on_hosts(docker_image.reference, network, folders, settings=settings)
    assert all(f"rank {rank} of 4 sum 6\n" in output for rank in range(4)), output


IDENTITY = ("-c", "user.name=test", "-c", "user.email=test@example.org")

NATIVE_SETUP = """
from setuptools import Extension, setup
module = Extension({name!r}, ["{name}.cpp"], language="c++")
setup(name={name!r}, version="1.0", ext_modules=[module])
"""

NATIVE_SOURCE = """
#include <Python.h>
#include <string>
static PyObject *text(PyObject *, PyObject *) {{
    return PyUnicode_FromString(std::string("compiled {name}").c_str());
}}
static PyMethodDef methods[] = {{
    {{"text", text, METH_NOARGS, ""}},
    {{nullptr, nullptr, 0, nullptr}},
}};
static PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{name}", "", -1, methods}};
PyMODINIT_FUNC PyInit_{name}() {{ return PyModule_Create(&module); }}
"""


def native_project(folder: Path, name: str) -> Path:
    """Write a Python project with one module in C++."""
    folder.mkdir()
    (folder / "setup.py").write_text(NATIVE_SETUP.format(name=name))
    (folder / f"{name}.cpp").write_text(NATIVE_SOURCE.format(name=name))
    return folder


def test_requirements_are_compiled_and_taken_from_git(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    """A source distribution in C++ and a repository.

    Setuptools is the image's own, so no network is needed.
    """
    folder = plain_job(tmp_path / "ml", "import one, two; print(one.text(), 'and', two.text())")
    code = folder / "code"
    with tarfile.open(code / "one-1.0.tar.gz", "w:gz") as archive:
        archive.add(native_project(tmp_path / "one", "one"), "one-1.0")
    repository = native_project(code / "two", "two")
    for words in (("init", "-q"), ("add", "."), (*IDENTITY, "commit", "-q", "-m", "first")):
        subprocess.run(("git", "-C", str(repository), *words), check=True, capture_output=True)
    (code / "requirements.txt").write_text(
        "/opt/ml/code/one-1.0.tar.gz\ntwo @ git+file:///opt/ml/code/two\n"
    )
    # "false" is pip's own word for "take the setuptools that is there", in the spelling that its
    # variables have.
    job = Job(
        command=("train",),
        mounts=(Mount(source=folder, target="/opt/ml"),),
        environment={"PIP_NO_BUILD_ISOLATION": "false", "PIP_NO_INDEX": "1"},
        timeout=300,
    )
    done = docker_image.engine.run(docker_image.reference, job)
    assert done.status == 0, done.output[-4000:]
    assert "compiled one and compiled two" in done.output
