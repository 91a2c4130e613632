"""The three projects of this repository as wheels: each has every file of its tree, and does its
work where nothing else of ours is installed. The builder's: test_installed_package.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from trainworks_testing.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")
TORCH = ROOT / ".cache" / "peers" / "smdistributed" / "bin" / "python"
DIGITS = ROOT / "smdistributed" / "tests" / "scripts" / "digits.py"

PROJECTS = {
    ".": ["src/trainworks"],
    "launcher": ["launcher/trainworks_launcher", "launcher/trainworks_preflight"],
    "smdistributed": ["smdistributed/smdistributed", "smdistributed/trainworks_smdistributed"],
}
"""Projects, and the folders that their wheels have."""


@pytest.fixture(scope="module")
def wheel_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Build a project's wheel from the files that git knows, once."""
    built: dict[str, Path] = {}

    def build(project: str) -> Path:
        if project not in built:
            folder = tmp_path_factory.mktemp("wheel")
            listed = subprocess.run(
                ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", project),
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
            )
            for name in filter(None, listed.stdout.split("\0")):
                if (ROOT / name).is_file():
                    target = folder / "tree" / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes((ROOT / name).read_bytes())
            command = (
                str(UV),
                "build",
                "--quiet",
                "--wheel",
                "--offline",
                # With setuptools and hatchling of the environment of these tests.
                "--no-build-isolation",
                "--python",
                sys.executable,
                "--out-dir",
                str(folder),
                str(folder / "tree" / project),
            )
            subprocess.run(command, check=True)
            (built[project],) = folder.glob("*.whl")
        return built[project]

    return build


@pytest.mark.parametrize("project", PROJECTS)
def test_a_wheel_has_every_file_of_its_tree(project: str, wheel_of: Callable[[str], Path]) -> None:
    with zipfile.ZipFile(wheel_of(project)) as archive:
        packed = {
            name
            for name in archive.namelist()
            if ".dist-info/" not in name and ".data/" not in name
        }
    project_files = {
        path.relative_to((ROOT / folder).parent).as_posix()
        for folder in PROJECTS[project]
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert project_files
    assert project_files - packed == set()


@pytest.fixture
def installed(wheel_of: Callable[[str], Path], tmp_path: Path) -> Callable[[str, Path], Path]:
    """Install a project's wheel, and nothing else, into an empty environment of a Python."""

    def install(project: str, python: Path) -> Path:
        environment = tmp_path / "environment"
        make = (str(UV), "venv", "--quiet", "--offline", "--python", str(python), str(environment))
        subprocess.run(make, check=True)
        into = ("--python", str(environment / "bin" / "python"))
        add = (str(UV), "pip", "install", "--quiet", "--offline", "--no-deps", *into)
        subprocess.run((*add, str(wheel_of(project))), check=True)
        return environment

    return install


HOSTS = ("127.0.0.1", "127.0.0.2")
"""The leader, and another host: two addresses of this machine."""

HALF_FAILS = f"""
import os, signal
print("the script ran", flush=True)
if os.environ["SM_CURRENT_HOST"] == "{HOSTS[1]}":
    raise SystemExit("and failed")
signal.pause()
"""


def test_the_launcher_that_was_installed_runs_a_job_on_two_hosts(
    installed: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    """The script of the leader waits for ever: the other host's failure ends it."""
    environment = installed("launcher", Path(sys.executable))
    variables = {"PATH": os.environ["PATH"], "TRAINWORKS_CONTROL_PORT": str(free_port())}
    jobs = [tmp_path / host for host in HOSTS]
    started = []
    for job, host in zip(jobs, HOSTS, strict=True):
        write_job(job, host)
        command = (str(environment / "bin" / "train"), "train")
        started.append(start(command, variables | {"SAGEMAKER_BASE_DIR": str(job)}))
    outputs = [process.communicate()[0] for process in started]
    for job, process, text in zip(jobs, started, outputs, strict=True):
        assert "the script ran" in text
        assert process.returncode == 1, text
        failure = json.loads((job / "output" / "failure.json").read_text(encoding="utf-8"))
        assert (failure["host"], failure["cause"]) == (HOSTS[1], "and failed")


def write_job(job: Path, host: str) -> None:
    """Write the files that the platform mounts on one of the two hosts."""
    (job / "code").mkdir(parents=True)
    (job / "code" / "train.py").write_text(HALF_FAILS, encoding="utf-8")
    config = {"hosts": HOSTS, "current_host": host, "network_interface_name": "lo"}
    (job / "input" / "config").mkdir(parents=True)
    for name, content in {
        "hyperparameters.json": {"sagemaker_program": "train.py"},
        "resourceconfig.json": config,
    }.items():
        (job / "input" / "config" / name).write_text(json.dumps(content), encoding="utf-8")


def start(
    command: tuple[str, ...], variables: dict[str, str], folder: Path | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=variables,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_the_smdistributed_that_was_installed_trains_digits(
    installed: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    """Train on two ranks, of which each has half of the model."""
    if not TORCH.exists():
        pytest.skip("NOT TESTED: no PyTorch here (make torch)")
    environment = installed("smdistributed", TORCH)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (dependencies,) = TORCH.parents[1].glob("lib/python*/site-packages")
    # A path in a .pth file brings modules, but not the .pth files there: the editable install of
    # smdistributed stays out.
    (site_packages / "dependencies.pth").write_text(f"{dependencies}\n", encoding="utf-8")
    python = str(environment / "bin" / "python")
    command = (python, str(DIGITS), "--folder", str(tmp_path), "--epochs", "1")
    port = str(free_port())
    started = [
        start(command, {"PATH": os.environ["PATH"], **rank_variables(rank, port)}, tmp_path)
        for rank in range(2)
    ]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    losses = [float(loss) for loss in re.findall(r"\bLoss: ([0-9.]+)", outputs[0])]
    assert losses[-1] < 0.5 * losses[0]


def rank_variables(rank: int, port: str) -> dict[str, str]:
    """Return the variables that mpirun and the launcher set for one of two ranks of smp."""
    parameters = {"partitions": 2, "pipeline_parallel_degree": 2, "microbatches": 4}
    framework = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SMP_CPU_EMULATION": "1",
        "SM_HP_MP_PARAMETERS": json.dumps(parameters),
        "SM_FRAMEWORK_PARAMS": json.dumps(framework),
    }
