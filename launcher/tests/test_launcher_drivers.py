"""Test ModelTrainer's files: they become the same job as the older lines' hyperparameters."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher_support import REPOSITORY, TIME_OUT, Launcher, write_manifest

from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.environment import read_environment
from trainworks_launcher.environment.sdk_drivers import TrainerFiles, read_drivers
from trainworks_launcher.job.job import Job, make_job
from trainworks_launcher.plan.script_environment import exported_variables

PEER = REPOSITORY / ".cache" / "peers" / "sdk-v3" / "bin" / "python"
TORCHRUN: dict[str, Json] = {"process_count_per_node": None, "smp": None}
MPI: dict[str, Json] = {"process_count_per_node": 2, "mpi_additional_options": None}
SHOW = (
    "import os, sys; print(sys.argv[1:], os.environ.get('SM_DISTRIBUTED_CONFIG'),"
    " os.environ['SM_HOST_COUNT'])"
)


def write(
    base: Path,
    source: Json,
    distributed: Json = None,
    hyperparameters: Mapping[str, Json] | None = None,
    files: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Write the files that ModelTrainer's channels mount; return the variables of the job."""
    (base / "input/config").mkdir(parents=True)
    (base / "input/data/sm_drivers").mkdir(parents=True)
    (base / "input/data/code").mkdir(parents=True)
    for name, text in (files or {"train.py": SHOW}).items():
        (base / "input/data/code" / name).write_text(text, encoding="utf-8")
    (base / "input/config/hyperparameters.json").write_text(
        json.dumps(hyperparameters or {}), encoding="utf-8"
    )
    (base / "input/data/sm_drivers/sourcecode.json").write_text(
        json.dumps(source), encoding="utf-8"
    )
    if distributed is not None:
        (base / "input/data/sm_drivers/distributed.json").write_text(
            json.dumps(distributed), encoding="utf-8"
        )
    programs = {
        "python": sys.executable,
        "bash": "/bin/bash",
        "mpirun": "/bin/true",
        "torchrun": "/bin/true",
    }
    manifest = write_manifest(base / "image.json", programs)
    return {
        "SAGEMAKER_BASE_DIR": str(base),
        "PATH": "/usr/bin:/bin",
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
    }


def job(
    base: Path,
    source: Json,
    distributed: Json = None,
    hyperparameters: Mapping[str, Json] | None = None,
) -> Job:
    return make_job(read_environment(write(base, source, distributed, hyperparameters)))


SOURCE: dict[str, Json] = {
    "source_dir": "mine",
    "entry_script": "./train.py",
    "command": None,
    "requirements": None,
}


@pytest.mark.parametrize(
    ("distributed", "mode", "processes", "options"),
    [
        (None, "none", 1, ()),
        ({}, "none", 1, ()),
        (TORCHRUN, "torch_distributed", 1, ()),
        ({**TORCHRUN, "process_count_per_node": 4}, "torch_distributed", 4, ()),
        (MPI, "mpi", 2, ()),
        ({**MPI, "mpi_additional_options": ["-x", "A=two words"]}, "mpi", 2, ("-x", "A=two words")),
    ],
)
def test_the_files_are_the_job(
    tmp_path: Path, distributed: Json, mode: str, processes: int, options: tuple[str, ...]
) -> None:
    trainer_job = job(tmp_path, SOURCE, distributed, {"epochs": "3", "amp": "true", "n": "1"})
    assert (
        trainer_job.placement.mode,
        trainer_job.placement.processes_per_host,
        trainer_job.placement.mpi_options,
    ) == (
        mode,
        processes,
        options,
    )
    assert (trainer_job.program.entry.name, trainer_job.program.code.directory) == (
        "train.py",
        str(tmp_path / "input/data/code"),
    )
    assert trainer_job.program.arguments == (
        "--amp",
        "true",
        "--epochs",
        "3",
        "--n",
        "1",
    ), "in ModelTrainer's own style"
    expected = (
        json.dumps(distributed, sort_keys=True, separators=(",", ":")) if distributed else None
    )
    assert exported_variables(trainer_job).get("SM_DISTRIBUTED_CONFIG") == expected
    assert any("as ModelTrainer wrote it" in line for line in trainer_job.warnings)


def test_smp_comes_with_torchrun(tmp_path: Path) -> None:
    trainer_job = job(
        tmp_path,
        SOURCE,
        {**TORCHRUN, "smp": {"x": 1}},
        {"mp_parameters": '{"hybrid_shard_degree": 8}'},
    )
    assert trainer_job.placement.mode == "torch_distributed"
    assert trainer_job.program.arguments == ("--mp_parameters", '{"hybrid_shard_degree": 8}')


@pytest.mark.parametrize("command", ["train", "/opt/trainworks/bin/train", "exec train"])
def test_a_command_that_is_ourselves_hands_over_the_rest_of_the_file(
    tmp_path: Path, command: str
) -> None:
    trainer_job = job(tmp_path, {**SOURCE, "command": command}, MPI, {"epochs": "3"})
    assert (
        trainer_job.placement.mode,
        trainer_job.program.entry.name,
        trainer_job.program.arguments,
    ) == (
        "mpi",
        "train.py",
        ("--epochs", "3"),
    )


def test_a_command_is_a_line_of_shell_and_its_arguments_are_words(tmp_path: Path) -> None:
    source: dict[str, Json] = {
        **SOURCE,
        "command": "echo $SM_HOST_COUNT; python3 train.py --first",
        "args": [],
    }
    source["args"] = ["two words", "$HOME", 3]
    variables = write(tmp_path, source, TORCHRUN, {"epochs": "3"})
    with Launcher(tmp_path, variables=variables) as launcher:
        assert launcher.wait() == 0, launcher.text
    lines = launcher.text.splitlines()
    assert lines[lines.index("1") + 1] == "['--first', 'two words', '$HOME', '3'] None 1"
    assert "distributed.json is not used: the command starts its processes itself" in launcher.text
    assert "entry_script is not used: the job has a command" in launcher.text


def test_a_command_ends_with_its_first_failure(tmp_path: Path) -> None:
    with Launcher(
        tmp_path, variables=write(tmp_path, {"command": "(exit 7); echo never"})
    ) as launcher:
        assert launcher.wait() == 7
    assert "never" not in launcher.text.replace("echo never", "")


def test_a_command_that_starts_this_launcher_again_is_refused(tmp_path: Path) -> None:
    again = f"A=1 {sys.executable} -I {REPOSITORY}/launcher/trainworks_launcher/__main__.py train"
    with Launcher(tmp_path, variables=write(tmp_path, {"command": again})) as launcher:
        assert launcher.wait() == 64
    assert "the command starts this launcher again" in launcher.text


def test_a_script_runs_from_the_code_channel(tmp_path: Path) -> None:
    with Launcher(tmp_path, variables=write(tmp_path, SOURCE, {}, {"flag": "true"})) as launcher:
        assert launcher.wait() == 0, launcher.text
    assert "['--flag', 'true'] None 1" in launcher.text


def test_an_archive_of_the_code_is_in_its_channel(tmp_path: Path) -> None:
    packed = {**SOURCE, "source_dir": "s3://bucket/some/code.tar.gz"}
    variables = write(tmp_path, packed)
    folder = tmp_path / "input/data/code"
    subprocess.run(
        ("tar", "-czf", "code.tar.gz", "train.py"), cwd=folder, check=True, timeout=TIME_OUT
    )
    trainer_job = make_job(read_environment(variables))
    assert (trainer_job.program.code.archive, trainer_job.program.code.directory) == (
        str(folder / "code.tar.gz"),
        str(tmp_path / "code"),
    )


@pytest.mark.parametrize("message", ["needs.txt", "./needs.txt"])
def test_the_requirements_that_it_names_are_installed(tmp_path: Path, message: str) -> None:
    files = {"train.py": SHOW, "needs.txt": ""}
    variables = write(tmp_path, {**SOURCE, "requirements": message}, files=files)
    trainer_job = make_job(read_environment(variables))
    assert trainer_job.program.requirements[-2:] == ("-r", "needs.txt")


def test_requirements_that_are_not_there_are_a_problem(tmp_path: Path) -> None:
    with pytest.raises(RefusalError, match=r"file not found: 'needs\.txt' in"):
        job(tmp_path, {**SOURCE, "requirements": "needs.txt"})


def test_automatic_requirements_are_installed_if_there_are_any(tmp_path: Path) -> None:
    assert job(tmp_path, {**SOURCE, "requirements": "auto"}).program.requirements == ()


def test_a_job_that_names_its_entry_point_otherwise_is_that_job_and_it_is_said(
    tmp_path: Path,
) -> None:
    variables = write(tmp_path, SOURCE, MPI, {"sagemaker_program": "other.py"})
    (tmp_path / "code").mkdir()
    (tmp_path / "code/other.py").touch()
    trainer_job = make_job(read_environment(variables))
    assert (trainer_job.placement.mode, trainer_job.program.entry.name) == ("none", "other.py")
    assert any("sourcecode.json is not used" in line for line in trainer_job.warnings)


def test_the_users_argument_style_wins(tmp_path: Path) -> None:
    trainer_job = job(
        tmp_path, SOURCE, {}, {"sagemaker_argument_style": "key=value", "epochs": "3"}
    )
    assert trainer_job.program.arguments == ("epochs=3",)


@pytest.mark.parametrize(
    ("source", "distributed", "hyperparameters", "refused"),
    [
        ({"source_dir": "mine"}, {}, {}, "neither 'entry_script' nor 'command' is given"),
        (
            {**SOURCE, "command": "train", "entry_script": None},
            {},
            {},
            "command='train' needs 'entry_script'",
        ),
        ({**SOURCE, "entry_script": 3}, {}, {}, "'entry_script' is a number"),
        ({**SOURCE, "command": "x", "args": "y"}, {}, {}, "'args' is a text"),
        ({**SOURCE, "entry_script": "../train.py"}, {}, {}, "'..' segment"),
        ({**SOURCE, "entry_script": "tran.py"}, {}, {}, "did you mean 'train.py'?"),
        (SOURCE, {"process_count_per_node": 2}, {}, "is neither Torchrun's nor MPI's"),
        (SOURCE, {**MPI, "process_count_per_node": 0}, {}, "0 is not a count"),
        (
            SOURCE,
            {**MPI, "mpi_additional_options": "-x A"},
            {},
            "'mpi_additional_options' is a text",
        ),
        (
            SOURCE,
            TORCHRUN,
            {"sagemaker_mpi_enabled": "true"},
            "mpi and torch_distributed are both switched on",
        ),
        (
            SOURCE,
            MPI,
            {"sagemaker_mpi_num_of_processes_per_host": "4"},
            "4, and ModelTrainer's files say 2",
        ),
        ([], {}, {}, "is a list, not an object"),
    ],
)
def test_what_is_wrong_in_the_files_is_refused(
    tmp_path: Path,
    source: Json,
    distributed: Json,
    hyperparameters: Mapping[str, Json],
    refused: str,
) -> None:
    with pytest.raises(RefusalError) as caught:
        job(tmp_path, source, distributed, hyperparameters)
    assert refused in str(caught.value)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.text("./ -$x", max_size=4)
    | st.just("train.py"),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(
    source=st.fixed_dictionaries(
        {}, optional=dict.fromkeys((*SOURCE, "args", "later"), JSON_VALUES)
    ),
    distributed=st.fixed_dictionaries({}, optional=dict.fromkeys((*TORCHRUN, *MPI), JSON_VALUES)),
)
def test_whatever_the_files_hold_is_read_or_refused(
    source: dict[str, Json], distributed: dict[str, Json]
) -> None:
    drivers = read_drivers(TrainerFiles(source, distributed), {}, "", "/opt/ml", False)
    assert (
        drivers.problems
        or not source
        or drivers.command
        or "sagemaker_program" in drivers.hyperparameters
    )
    assert all(isinstance(word, str) for word in drivers.arguments)
    assert all(
        problem.where.startswith(("input/data/sm_drivers/", "hyperparameter "))
        for problem in drivers.problems
    )


@pytest.mark.engine
def test_the_real_sdks_files_are_understood() -> None:
    if not PEER.is_file():
        pytest.skip(
            "the SageMaker Python SDK's third line is not there; run: tools/set-up-peers sdk-v3"
        )
    peer = (str(PEER), str(Path(__file__).with_name("peer_sdk_model_trainer.py")))
    done = subprocess.run(peer, capture_output=True, timeout=300, check=True)
    files = json.loads(done.stdout)
    read = {
        name: read_drivers(
            TrainerFiles(file["source"], file["distributed"]), {}, "", "/opt/ml", False
        )
        for name, file in files.items()
    }
    assert [drivers.problems for drivers in read.values() if drivers.problems] == []
    code = {"sagemaker_submit_directory": "/opt/ml/input/data/code"}
    script = {**code, "sagemaker_program": "train.py", "sagemaker_argument_style": "json"}
    assert {name: dict(drivers.hyperparameters) for name, drivers in read.items()} == {
        "plain": script,
        "command": {**code, "sagemaker_argument_style": "none"},
        "torchrun": {
            **script,
            "sagemaker_submit_directory": "/opt/ml/input/data/code/code.tar.gz",
            "sagemaker_torch_distributed_enabled": True,
            "sagemaker_mpi_num_of_processes_per_host": 2,
        },
        "smp": {**script, "sagemaker_torch_distributed_enabled": True},
        "mpi": {
            **script,
            "sagemaker_mpi_enabled": True,
            "sagemaker_mpi_custom_mpi_options": "-x 'A=two words'",
        },
    }
    assert (read["command"].command, read["command"].arguments) == (
        'python train.py "$@"',
        ("--epochs", "3"),
    )
    assert read["mpi"].requirements == "needs.txt"
