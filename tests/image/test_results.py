"""Test containers that are removed when they end, as most are started: the files that the script
saved are on the host, or a line of the log has said that they will not be.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from image.support import BuiltByCommand

pytestmark = pytest.mark.engine

SCRIPT = """
import os, sys
for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR"):
    with open(os.path.join(os.environ[name], name), "w") as opened:
        opened.write("of the script")
if "--fail" in sys.argv:
    raise ValueError("after the model was saved")
"""
WORK = ("-v", "{}:/w", "-w", "/w")
STRANGER = ("--user", "12345:12345")
SLURM = ("-e", "SLURM_JOB_ID=77", "-e", "SLURM_JOB_NUM_NODES=1", "-e", "SLURMD_NODENAME=n1")
KUBERNETES = (
    "-e",
    "KUBERNETES_SERVICE_HOST=10.0.0.1",
    "-e",
    "JOB_COMPLETION_INDEX=0",
    "-e",
    "TRAINWORKS_HOSTS=x",
)
LOST = "results end with this container: no mount keeps "


def train(
    image: BuiltByCommand, folder: Path, options: tuple[str, ...], *words: str
) -> tuple[str, list[str]]:
    """Run a job whose script is in a folder of the host.

    Return its log, and the files that it left there.
    """
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    folder.chmod(0o777)
    docker_options = [option.format(folder) for option in options]
    argv = [
        "docker",
        "run",
        "--rm",
        *docker_options,
        image.reference,
        "train",
        "--",
        "/w/train.py",
        *words,
    ]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == (1 if "--fail" in words else 0), result.stderr
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {
        "train.py"
    }
    return result.stderr, sorted(left)


@pytest.mark.parametrize(
    ("options", "root"),
    [
        pytest.param(WORK, "", marks=pytest.mark.core, id="root"),
        pytest.param((*WORK, *STRANGER), "", marks=pytest.mark.core, id="another user"),
        pytest.param((*WORK, *STRANGER, *SLURM), "output/77/", id="Slurm"),
        pytest.param(
            (*WORK, *STRANGER, *KUBERNETES, "-e", "TRAINWORKS_HOST=x"), "", id="Kubernetes"
        ),
        pytest.param((*WORK, *STRANGER, "--read-only", "--tmpfs", "/tmp"), "", id="read-only root"),
        pytest.param((*WORK, "-v", "/opt/ml"), "", id="volume without a name"),
        pytest.param((*WORK, "--tmpfs", "/opt/ml"), "", id="memory"),
        pytest.param(("-v", "{}:/w", "-v", "{}:/opt/ml"), "", id="all of /opt/ml"),
        pytest.param(
            (*WORK, "-e", "SAGEMAKER_BASE_DIR=/w/named"),
            "named/",
            id="a directory that a person names",
        ),
        pytest.param(
            (*WORK, "-e", "SM_MODEL_DIR=/w/model"), "", id="a model's directory that a person names"
        ),
    ],
)
def test_what_a_job_saves_is_on_the_host_when_the_container_is_gone(
    docker_image: BuiltByCommand, options: tuple[str, ...], root: str, tmp_path: Path
) -> None:
    output, left = train(docker_image, tmp_path, options, "--fail")
    assert LOST not in output
    files = ("model/SM_MODEL_DIR", "output/data/SM_OUTPUT_DATA_DIR")
    assert left == sorted(
        f"{root}{name}" for name in (*files, "output/failure", "output/failure.json")
    )


@pytest.mark.parametrize(
    ("options", "lost", "left"),
    [
        (("-v", "{}:/w"), "/opt/ml/model and /opt/ml/output; ", 0),
        (("-v", "{}:/w", *STRANGER), "/opt/ml/model and /opt/ml/output; ", 0),
        (("-v", "{}:/w:ro", "-w", "/w"), "/opt/ml/model and /opt/ml/output; ", 0),
        (("-v", "{}:/w", "-v", "{}:/opt/ml/model"), "/opt/ml/output; ", 1),
        (
            (*WORK, "-e", "SAGEMAKER_BASE_DIR=/elsewhere"),
            "/elsewhere/model and /elsewhere/output; ",
            0,
        ),
        ((*WORK, "-e", "SM_MODEL_DIR=/tmp/model"), "/tmp/model; ", 2),
    ],
)
def test_the_start_says_what_will_be_lost(
    docker_image: BuiltByCommand, options: tuple[str, ...], lost: str, left: int, tmp_path: Path
) -> None:
    output, files = train(docker_image, tmp_path, options)
    (line,) = [line for line in output.splitlines() if LOST in line]
    assert (
        f"warning: {LOST}{lost}mount a directory of the host or a volume there: docker run -v "
        in line
    )
    assert len(files) == left


def test_explain_says_where_results_go_and_why(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    shown = []
    for words in (("-v", f"{tmp_path}:/w", "-w", "/w"), ("-v", f"{tmp_path}:/w:ro", "-w", "/w")):
        argv = (
            "docker",
            "run",
            "--rm",
            *words,
            docker_image.reference,
            "train",
            "explain",
            "--format",
            "json",
        )
        shown.append(
            subprocess.run(
                (*argv, "--", "train.py"), capture_output=True, text=True, timeout=300
            ).stdout
        )
    assert "in the working directory, because no mount keeps /opt/ml/model" in shown[0]
    assert "it ends with this container: no mount keeps it" in shown[1]


def test_kubernetes_is_told_why_a_container_ended(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    """Write the reason into the file that Kubernetes mounts and shows."""
    termination_file = tmp_path / "told"
    termination_file.touch()
    termination_file.chmod(0o666)
    train(
        docker_image,
        tmp_path,
        (*WORK, *STRANGER, "-v", f"{termination_file}:/dev/termination-log"),
        "--fail",
    )
    assert termination_file.read_text(encoding="utf-8").startswith(
        "ValueError: after the model was saved\n"
    )
