"""The three projects of this repository as wheels: each has every file of its tree, and the
launcher's runs a job.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")

PROJECTS = {
    ".": ["src/trainworks"],
    "launcher": ["launcher/trainworks_launcher", "launcher/trainworks_preflight"],
    "smdistributed": ["smdistributed/smdistributed", "smdistributed/trainworks_smdistributed"],
}
"""Projects, and the folders that their wheels have."""


@pytest.fixture(scope="module")
def wheel_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Build a project's wheel from what git knows of it, once."""
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
    there = {
        path.relative_to((ROOT / folder).parent).as_posix()
        for folder in PROJECTS[project]
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert there
    assert there - packed == set()


def test_the_launcher_that_pip_installed_runs_a_job(
    wheel_of: Callable[[str], Path], tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel_of("launcher")) as archive:
        archive.extractall(tmp_path / "packages")
    job = tmp_path / "ml"
    (job / "code").mkdir(parents=True)
    (job / "code" / "train.py").write_text(
        "print('the script ran')\nraise SystemExit('and failed')\n"
    )
    (job / "input" / "config").mkdir(parents=True)
    (job / "input" / "config" / "hyperparameters.json").write_text(
        '{"sagemaker_program": "train.py"}'
    )
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'packages')!r}); "
    program += "from trainworks_launcher.command.cli import main; sys.exit(main(['train']))"
    done = subprocess.run(
        (sys.executable, "-I", "-c", program),
        env={"PATH": os.environ["PATH"], "SAGEMAKER_BASE_DIR": str(job)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the script ran" in done.stdout, done.stderr
    assert done.returncode == 1
    assert "and failed" in (job / "output" / "failure").read_text()
