"""Test the launcher in an image without a manifest: `pip install`, and its findings about the
image's own Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from launcher_support import LAUNCHER, write_manifest

from trainworks_launcher.environment.environment import Devices, read_environment
from trainworks_launcher.environment.observed import has_nccl_plugin, observe
from trainworks_launcher.job.fabric import choose_fabric
from trainworks_testing.clock import PATIENCE

PYTHONS = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13")

TORCH_VERSION = """
from typing import Optional
__all__ = ['__version__', 'cuda']
__version__ = '2.9.1+cu128'
cuda: Optional[str] = '12.8'
"""

TORCH_METADATA = """\
Metadata-Version: 2.1
Name: torch
Version: 2.9.1+cu128
Requires-Dist: filelock
Requires-Dist: numpy>=1.20
Requires-Dist: nvidia-nccl-cu12==2.27.5; platform_system == "Linux"
Requires-Dist: nvidia-cufft-cu12 (==11.3.3.83)
Requires-Dist: triton==3.5.1; platform_machine == "x86_64"
Requires-Dist: opt-einsum==3.3; extra == "opt-einsum"
"""

SCRIPT = """
import os, sys
print("python", sys.executable, sys.prefix)
print("torch", os.environ["SM_CURRENT_HOST"])
"""


def write_distribution(site_packages: Path, name: str, version: str, metadata: str = "") -> None:
    folder = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    text = metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")


def write_torch(site_packages: Path) -> None:
    """Write the files of torch that the launcher may read. An import of this torch ends the
    process. To import it ends the process.
    """
    (site_packages / "torch").mkdir(parents=True)
    (site_packages / "torch" / "__init__.py").write_text(
        "import os; os._exit(99)\n", encoding="utf-8"
    )
    (site_packages / "torch" / "version.py").write_text(TORCH_VERSION, encoding="utf-8")
    write_distribution(site_packages, "torch", "2.9.1+cu128", TORCH_METADATA)
    write_distribution(site_packages, "nvidia-nccl-cu12", "2.27.5")
    write_distribution(site_packages, "nvidia-cufft-cu12", "11.3.3.83")
    write_distribution(site_packages, "triton", "3.5.1")
    write_distribution(site_packages, "opt-einsum", "3.4")
    write_distribution(site_packages, "numpy", "2.1.0")


def python_of(version: str) -> str:
    """Return a Python of this version on this machine; skip if there is none."""
    pythons = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if pythons:
        return str(pythons[-1])
    path = shutil.which(f"python{version}")
    if path is None:
        pytest.skip(f"NOT TESTED: this machine has no Python {version}")
    return path


def make_environment(folder: Path, python: str) -> Path:
    """Make a virtual environment, with the launcher as pip installs it.

    Return its site-packages.
    """
    command = (python, "-m", "venv", "--without-pip", str(folder))
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    shutil.copytree(
        LAUNCHER / "trainworks_launcher",
        site_packages / "trainworks_launcher",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    train = folder / "bin" / "train"
    lines = (
        f"#!{folder}/bin/python",
        "import sys",
        "from trainworks_launcher.command.cli import main",
        'sys.argv[0] = "train"',
        "sys.exit(main())",
    )
    train.write_text("\n".join(lines) + "\n", encoding="utf-8")
    train.chmod(0o755)
    return site_packages


def run_job(
    base: Path,
    train: Path,
    variables: Mapping[str, str],
    *words: str,
    reserved: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """Run one host's job below ``base``, in an environment with these variables and no others."""
    (base / "code").mkdir(parents=True, exist_ok=True)
    (base / "code" / "train.py").write_text(SCRIPT, encoding="utf-8")
    (base / "input" / "config").mkdir(parents=True, exist_ok=True)
    hyperparameters = json.dumps({"sagemaker_program": "train.py", **reserved})
    file = base / "input" / "config" / "hyperparameters.json"
    file.write_text(hyperparameters, encoding="utf-8")
    host_variables = {"SAGEMAKER_BASE_DIR": str(base), "HOME": str(base), **variables}
    return subprocess.run(
        (str(train), *words),
        env=host_variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def test_what_torch_pins_is_protected_and_nothing_is_imported(tmp_path: Path) -> None:
    site_packages = make_environment(tmp_path / "env", sys.executable)
    write_torch(site_packages)
    write_distribution(site_packages, "mpi4py", "4.1.2")
    observed = observe(str(tmp_path / "env" / "bin" / "python"), ("ray",))
    assert dict(observed.components) == {"torch": "2.9.1+cu128", "cuda": "12.8", "nccl": "2.27.5"}
    assert dict(observed.protected) == {
        "torch": "2.9.1+cu128",
        "nvidia-nccl-cu12": "2.27.5",
        "nvidia-cufft-cu12": "11.3.3.83",
        "triton": "3.5.1",
        "mpi4py": "4.1.2",
    }


@pytest.mark.parametrize(
    "answer",
    ["exit 3", "echo no JSON", "echo '[]'", "printf '\\377'"],
    ids=["fails", "text", "list", "bytes"],
)
def test_a_python_that_does_not_answer_is_unknown(tmp_path: Path, answer: str) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
    python.chmod(0o755)
    assert observe(str(python)) == observe(str(tmp_path / "none"))
    assert not observe(str(python)).has_framework


@pytest.mark.parametrize("version", PYTHONS)
def test_every_python_runs_a_job_and_says_what_it_has(tmp_path: Path, version: str) -> None:
    folder = tmp_path / "opt" / "venv"
    write_torch(make_environment(folder, python_of(version)))
    path = f"{folder}/bin:/usr/bin:/bin"
    done = run_job(tmp_path / "ml", folder / "bin" / "train", {"PATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    output = done.stdout + done.stderr
    assert f"this image has no manifest; it has Python {version}." in output
    assert f"({folder}/bin/python3), torch 2.9.1+cu128, cuda 12.8" in output


def test_the_python_that_has_the_launcher_runs_jobs_without_being_on_the_path(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "opt" / "venv"
    write_torch(make_environment(folder, sys.executable))
    done = run_job(tmp_path / "ml", folder / "bin" / "train", {"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"python {folder}/bin/python" in done.stdout


def test_torchrun_is_the_one_of_the_python_with_torch(tmp_path: Path) -> None:
    folder = tmp_path / "opt" / "conda"
    write_torch(make_environment(folder, sys.executable))
    other = tmp_path / "usr" / "bin"
    other.mkdir(parents=True)
    for torchrun in (folder / "bin" / "torchrun", other / "torchrun"):
        torchrun.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
        torchrun.chmod(0o755)
    switched_on = {"sagemaker_torch_distributed_enabled": "true"}
    variables = {"PATH": f"{other}:/usr/bin:/bin"}
    train = folder / "bin" / "train"
    planned = run_job(tmp_path / "ml", train, variables, "--plan", reserved=switched_on)
    assert f'"{folder}/bin/torchrun"' in planned.stdout, planned.stdout + planned.stderr
    assert str(other) not in json.dumps(json.loads(planned.stdout)["argv"])


@pytest.mark.parametrize(
    ("mode", "has_manifest", "has_mpi4py"),
    [
        ("mpi", False, False),
        ("mpi", False, True),
        ("mpi", True, False),
        ("mpi", True, True),
        ("distributed_dataparallel", False, True),
        ("pytorch_ddp", False, True),
    ],
)
def test_a_program_under_mpirun_runs_under_the_mpi4py_that_its_python_has(
    tmp_path: Path, mode: str, *, has_manifest: bool, has_mpi4py: bool
) -> None:
    """Without the runner of mpi4py a rank that raises an error waits for the others for ever."""
    folder = tmp_path / "opt" / "venv"
    site_packages = make_environment(folder, sys.executable)
    write_torch(site_packages)
    if has_mpi4py:
        (site_packages / "mpi4py").mkdir()
        (site_packages / "mpi4py" / "__init__.py").write_text("raise SystemExit(99)\n", "utf-8")
    mpirun = folder / "bin" / "mpirun"
    mpirun.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    mpirun.chmod(0o755)
    python = f"{folder}/bin/python3"
    variables = {"PATH": f"{folder}/bin:/usr/bin:/bin"}
    if has_manifest:
        programs = {"python": python, "mpirun": str(mpirun)}
        manifest = write_manifest(tmp_path / "image.json", programs, components={})
        variables["TRAINWORKS_IMAGE_MANIFEST"] = str(manifest)
    switched_on = {
        f"sagemaker_{mode}_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": "2",
        "sagemaker_instance_type": "ml.p4d.24xlarge",
    }
    train = folder / "bin" / "train"
    planned = run_job(tmp_path / "ml", train, variables, "--plan", reserved=switched_on)
    program = ["--", python, "train.py"]
    if has_mpi4py:
        program = ["--", python, "-m", "mpi4py", "train.py"]
    assert planned.returncode == 0, planned.stderr
    argv = json.loads(planned.stdout)["argv"]
    assert argv[-len(program) :] == program


def test_a_launcher_in_an_environment_of_its_own_takes_the_python_with_torch(
    tmp_path: Path,
) -> None:
    """Install the launcher as `pipx install` and `uv tool install` do."""
    tool = tmp_path / "tool"
    make_environment(tool, sys.executable)
    conda = tmp_path / "opt" / "conda"
    write_torch(make_environment(conda, sys.executable))
    done = run_job(tmp_path / "ml", tool / "bin" / "train", {"PATH": f"{conda}/bin:/usr/bin:/bin"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"python {conda}/bin/python3 {conda}" in done.stdout


def test_without_any_framework_python_is_the_one_on_the_path(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    make_environment(tool, sys.executable)
    plain = tmp_path / "plain"
    make_environment(plain, sys.executable)
    done = run_job(tmp_path / "ml", tool / "bin" / "train", {"PATH": f"{plain}/bin:/usr/bin:/bin"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"python {plain}/bin/python3 {plain}" in done.stdout


UV = Path(sys.executable).with_name("uv")


def run_with_requirements(
    tmp_path: Path, requirements: str, *, packaging: bool
) -> subprocess.CompletedProcess[str]:
    """Run a job with requirements, in an environment that uv made: it has no pip."""
    folder = tmp_path / "opt" / "venv"
    site_packages = make_environment(folder, sys.executable)
    write_torch(site_packages)
    if packaging:
        (installed,) = Path(sysconfig.get_path("purelib")).glob("packaging")
        shutil.copytree(installed, site_packages / "packaging")
    base = tmp_path / "ml"
    (base / "code").mkdir(parents=True)
    (base / "code" / "requirements.txt").write_text(requirements, encoding="utf-8")
    path = os.pathsep.join((f"{folder}/bin", str(UV.parent), "/usr/bin", "/bin"))
    return run_job(base, folder / "bin" / "train", {"PATH": path, "UV_OFFLINE": "1"})


def test_requirements_keep_what_the_image_is_built_around(tmp_path: Path) -> None:
    done = run_with_requirements(tmp_path, "torch>=99\n", packaging=True)
    output = done.stdout + done.stderr
    assert done.returncode == 65, output
    assert "torch>=99, and this image has torch 2.9.1+cu128" in output


def test_requirements_for_another_torch_are_answered_with_the_images(tmp_path: Path) -> None:
    done = run_with_requirements(tmp_path, "torch==2.1\ntriton==3.0\n", packaging=True)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "torch" in done.stdout
    assert "2.9.1+cu128" in output
    assert "triton==3.0" in output


def test_a_python_that_can_install_nothing_says_so(tmp_path: Path) -> None:
    done = run_with_requirements(tmp_path, "six\n", packaging=False)
    output = done.stdout + done.stderr
    assert done.returncode == 65, output
    assert "has neither pip nor packaging" in output
    assert "Traceback" not in output


def test_a_plugin_for_nccl_is_looked_for_where_the_loader_looks(tmp_path: Path) -> None:
    none, cache = tmp_path / "none", tmp_path / "ld.so.cache"
    assert not has_nccl_plugin({}, str(none))
    cache.write_bytes(b"\0libnccl.so.2\0")
    assert not has_nccl_plugin({"LD_LIBRARY_PATH": f":{tmp_path}:{none}"}, str(cache))
    cache.write_bytes(b"\0libnccl.so.2\0libnccl-net-ofi.so\0/opt/amazon/ofi-nccl/lib")
    assert has_nccl_plugin({}, str(cache))
    (tmp_path / "libnccl-net.so").touch()
    assert has_nccl_plugin({"LD_LIBRARY_PATH": f"{none}:{tmp_path}"}, str(none))


def test_efa_without_a_plugin_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "opt" / "venv"
    write_torch(make_environment(folder, sys.executable))
    variables = {"PATH": f"{folder}/bin:/usr/bin:/bin"}
    warning_lines = []
    for path in ("", str(tmp_path / "plugin")):
        environment = read_environment(
            {**variables, "LD_LIBRARY_PATH": path, "SAGEMAKER_BASE_DIR": str(tmp_path)}
        )
        fabric = choose_fabric(
            environment.manifest, Devices(efa=("rdmap0s6",)), "", hosts=2, inherited={}
        )
        warning_lines.append([line for line in fabric.warnings if "aws-ofi-nccl" in line])
        (tmp_path / "plugin").mkdir(exist_ok=True)
        (tmp_path / "plugin" / "libnccl-net.so").touch()
    line = (
        "this host has EFA, but the image has no aws-ofi-nccl:"
        " NCCL talks TCP between hosts, even where EFA"
    )
    assert warning_lines[0][0].startswith(line)
    assert warning_lines[1] == []
