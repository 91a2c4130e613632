"""The three projects of this repository as wheels: each has every file of its tree, and does its
work where nothing else of ours is installed, with what it requires from a package index. More of
the builder's: test_installed_package.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import wheels
from image.support import build_once
from trainworks.cli import main
from trainworks_testing.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")
EARLIEST = "315532800"
"""The earliest time of a file in a zip: 1980, in seconds since 1970."""
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
                    # With its mode: some files of recipes are programs.
                    shutil.copy(ROOT / name, target)
            wheels.build_wheel(folder / "tree" / project, folder, EARLIEST)
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
    """Install the wheel of a project that requires nothing into an empty environment of a Python.

    A requirement would have to be downloaded, and nothing can be.
    """

    def install(project: str, python: Path) -> Path:
        environment = tmp_path / "environment"
        make = (str(UV), "venv", "--quiet", "--offline", "--python", str(python), str(environment))
        subprocess.run(make, check=True)
        into = ("--python", str(environment / "bin" / "python"))
        add = (str(UV), "pip", "install", "--quiet", "--offline", "--no-cache", *into)
        subprocess.run((*add, str(wheel_of(project))), check=True)
        return environment

    return install


Install = Callable[..., Path]


@pytest.fixture
def from_index(wheel_of: Callable[[str], Path], tmp_path: Path) -> Install:
    """Install a project's wheel with all that it requires into an empty environment.

    Packages come from where this machine's pip gets them; skips where that does not answer.
    """

    def install(project: str, *more: str) -> Path:
        environment = tmp_path / "environment"
        subprocess.run((sys.executable, "-m", "venv", str(environment)), check=True)
        program = (str(ROOT / "tools" / "install-packages"), str(environment))
        reached = ("--dry-run", *(more or ("packaging",)))
        if subprocess.run((*program, *reached), capture_output=True, check=False).returncode:
            pytest.skip(f"NOT TESTED: no package index here that has {' '.join(reached[1:])}")
        subprocess.run((*program, str(wheel_of(project)), *more), check=True)
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
    run_job_on_two_hosts(installed("launcher", Path(sys.executable)), tmp_path)


@pytest.mark.engine
def test_the_launcher_of_a_package_index_runs_a_job_on_two_hosts(
    from_index: Install, tmp_path: Path
) -> None:
    run_job_on_two_hosts(from_index("launcher"), tmp_path)


def run_job_on_two_hosts(environment: Path, tmp_path: Path) -> None:
    """Run a job that fails on one host, and check that both hosts say so."""
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
    if not TORCH.exists():
        pytest.skip("NOT TESTED: no PyTorch here (make torch)")
    environment = installed("smdistributed", TORCH)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (dependencies,) = TORCH.parents[1].glob("lib/python*/site-packages")
    # A path in a .pth file brings modules, but not the .pth files there: the editable install of
    # smdistributed stays out.
    (site_packages / "dependencies.pth").write_text(f"{dependencies}\n", encoding="utf-8")
    train_digits(environment, tmp_path)


@pytest.mark.engine
def test_the_smdistributed_of_a_package_index_trains_digits_with_torch_and_numpy(
    from_index: Install, tmp_path: Path
) -> None:
    """Nothing else is there. torch.distributed sends objects by numpy; torch does not require it.

    Torch is too large to be downloaded for one test: the wheel is the one of `make torch`.
    """
    pins = (ROOT / "tests" / "peers" / "smdistributed.txt").read_text(encoding="utf-8")
    (torch,) = [line for line in pins.splitlines() if line.startswith("torch==")]
    train_digits(from_index("smdistributed", torch, "numpy", "--offline"), tmp_path)


def train_digits(environment: Path, tmp_path: Path) -> None:
    """Train on two ranks, of which each has half of the model, and check that the loss falls."""
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


PLAN = ("--framework", "pytorch", "--cuda", "cpu")


def run_trainworks(environment: Path, folder: Path, *words: str) -> str:
    """Run the installed builder outside of a checkout, and return what it printed."""
    command = (str(environment / "bin" / "trainworks"), *words)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.engine
def test_the_builder_of_a_package_index_lists_plans_and_renders(
    from_index: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what its wheel requires, and nothing of these tests, it does what the checkout does."""
    environment = from_index(".")
    for words in (("--list",), (*PLAN, "--until", "plan", "--format", "json")):
        assert main(words, ROOT) == 0
        assert run_trainworks(environment, tmp_path, *words) == capsys.readouterr().out
    render = (*PLAN, "--until", "render", "--output")
    run_trainworks(environment, tmp_path, *render, str(tmp_path / "installed"))
    assert main([*render, str(tmp_path / "checkout")], ROOT) == 0
    files = sorted(path for path in (tmp_path / "checkout").rglob("*") if path.is_file())
    assert files
    for path in files:
        name = path.relative_to(tmp_path / "checkout")
        assert (tmp_path / "installed" / name).read_bytes() == path.read_bytes(), name


@pytest.mark.engine
def test_the_builder_of_a_package_index_builds_and_tests_the_image(
    from_index: Install, shared: Path, tmp_path: Path
) -> None:
    """It is the image of the checkout, layer by layer."""
    of_checkout = build_once(shared, "docker")
    words = (*PLAN, "--engine", "docker", "--format", "json")
    built = json.loads(run_trainworks(from_index("."), tmp_path, *words))
    assert built["identifier"] == of_checkout.report["identifier"]
    checks = built["checks"]
    assert checks
    assert [check["title"] for check in checks if not check["passed"]] == []
