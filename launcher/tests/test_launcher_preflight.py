"""Test the preflight: a person's command on a laptop, and its answer."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher_support import LAUNCHER, TIME_OUT

from trainworks_launcher.command.options import parse
from trainworks_launcher.contract.json_values import Json
from trainworks_preflight.check import Result, check
from trainworks_preflight.cli import COMMAND
from trainworks_preflight.facts import FILE, parse_facts
from trainworks_preflight.report import preflight

FACTS = parse_facts((LAUNCHER / "trainworks_preflight" / FILE).read_text(encoding="utf-8"))
SCRIPT = (
    "import torch.distributed as dist\ndist.init_process_group()\ndist.destroy_process_group()\n"
)
SMDDP: Json = {"smdistributed": {"dataparallel": {"enabled": True}}}
SMP: Json = {
    "smdistributed": {
        "modelparallel": {
            "enabled": True,
            "parameters": {"pipeline_parallel_degree": 2, "ddp": True},
        }
    },
    "mpi": {"enabled": True, "processes_per_host": 8},
}
MPI: Json = {"enabled": True, "processes_per_host": 8}
TORCH: Json = {"torch_distributed": {"enabled": True}}


def words(
    folder: Path,
    distribution: Json = TORCH,
    *more: str,
    kind: str = "ml.p4d.24xlarge",
    count: int = 2,
    script: str = SCRIPT,
    hyperparameters: Mapping[str, Json] | None = None,
) -> list[str]:
    """A command line, with its files written."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    (folder / "d.json").write_text(json.dumps(distribution), encoding="utf-8")
    (folder / "h.json").write_text(json.dumps(hyperparameters or {}), encoding="utf-8")
    cluster = ["--instance-type", kind, "--instance-count", str(count)] if kind else []
    inputs = ["--distribution", f"{folder}/d.json", "--hyperparameters", f"{folder}/h.json"]
    return [*inputs, "--entry-point", f"{folder}/train.py", *cluster, *more]


def run(line: list[str]) -> Result:
    return check(parse(COMMAND, line))


def report(line: list[str], width: int = 100) -> tuple[int, str]:
    return preflight(parse(COMMAND, line), width)


def advice_of(result: Result) -> dict[str, str]:
    assert result.problems == ()
    return {piece.subject: f"{piece.text} | {piece.why}" for piece in result.advice}


def test_a_good_job_is_ready_and_shows_what_each_host_would_run(tmp_path: Path) -> None:
    status, text = report(words(tmp_path, hyperparameters={"epochs": 3}))
    assert status == 0
    assert (
        "mode torch_distributed, host algo-1 (1 of 2),"
        " 8 processes on this host, 16 in all, train.py;" in text
    )
    assert "hosts are ml.p4d.24xlarge" in " ".join(text.split())
    assert "  algo-2     8  9 10 11 12 13 14 15\n" in text
    assert "--node-rank=0" in text
    assert "train.py --epochs 3" in " ".join(text.replace("\\\n", " ").split())
    assert "algo-2 (worker) runs the same, but for --node-rank=1" in text
    assert "    FI_PROVIDER=efa" in text
    assert text.endswith("ready: the job would start\n")


def test_a_host_without_a_command_may_have_a_process_of_its_own(tmp_path: Path) -> None:
    status, text = report(words(tmp_path, {}, hyperparameters={"sagemaker_ray_enabled": True}))
    assert status == 0
    assert "  beside it: Ray head\n\nalgo-2 (worker) runs no command: " in text
    assert text.count("  beside it: Ray worker\n") == 1


def command(*line: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a checkout, as docs/jobs.md says."""
    argv = (sys.executable, "-m", "trainworks_preflight", *line)
    env = {
        "PYTHONPATH": str(LAUNCHER),
        "SAGEMAKER_BASE_DIR": "/does/not/exist",
        "PATH": os.environ["PATH"],
    }
    return subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=TIME_OUT, check=False
    )


def test_it_runs_as_a_command_without_a_container_and_without_the_platforms_files(
    tmp_path: Path,
) -> None:
    line = words(tmp_path)
    result = command(*line)
    assert (result.returncode, result.stderr) == (0, "")
    assert "ready: the job would start" in result.stdout
    twice = command(*line, "--instance-type=ml.p4d.24xlarg")
    assert twice.returncode == 64
    assert "--instance-type is given twice" in twice.stderr
    empty = command()
    assert (empty.returncode, empty.stdout) == (64, "")
    assert "trainworks-preflight needs --entry-point" in empty.stderr


def test_its_help_has_every_option() -> None:
    result = command("--help")
    assert result.returncode == 0
    assert [
        option.name for option in COMMAND.options if f"  {option.name} " not in result.stdout
    ] == []
    assert max(len(line) for line in result.stdout.splitlines()) <= 120


def test_the_launcher_in_an_image_says_where_preflight_is(tmp_path: Path) -> None:
    image = tmp_path / "lib"
    shutil.copytree(LAUNCHER / "trainworks_launcher", image / "trainworks_launcher")
    for words_given in (
        ("preflight", "--entry-point", "train.py"),
        ("train", "preflight", "--help"),
    ):
        argv = (
            sys.executable,
            "-I",
            str(image / "trainworks_launcher" / "__main__.py"),
            *words_given,
        )
        result = subprocess.run(argv, capture_output=True, text=True, timeout=TIME_OUT, check=False)
        assert (result.returncode, result.stdout) == (64, "")
        assert "pip install ./launcher && trainworks-preflight" in result.stderr


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_report_fits_its_terminal_and_its_commands_can_be_copied(
    tmp_path: Path, width: int
) -> None:
    _, text = report(words(tmp_path, SMP, hyperparameters={"prompt": "it's $HOME; ls"}), width)
    prose = [line for line in text.splitlines() if "/opt/" not in line]
    assert max(map(len, prose)) <= width
    assert """'it'"'"'s $HOME; ls'""" in text


def test_the_same_job_as_json(tmp_path: Path) -> None:
    secret = "abcdefgh-secret"
    status, text = report(
        words(tmp_path, SMP, "--format", "json", hyperparameters={"api_token": secret})
    )
    document = json.loads(text)
    assert (status, document["ready"], document["problems"]) == (0, True, [])
    assert document["hyperparameters"]["mp_parameters"] == {
        "pipeline_parallel_degree": 2,
        "ddp": True,
    }
    assert document["plans"][0]["mode"] == "smdistributed.modelparallel"
    assert secret not in text
    assert (
        secret
        in report(words(tmp_path, SMP, "--show-secrets", hyperparameters={"api_token": secret}))[1]
    )


def test_the_dict_may_be_written_as_python_does(tmp_path: Path) -> None:
    line = words(tmp_path)
    (tmp_path / "d.json").write_text(
        "{'mpi': {'enabled': True, 'processes_per_host': 8},}  # as in the notebook"
    )
    assert run(line).hyperparameters["sagemaker_mpi_enabled"] is True
    (tmp_path / "d.json").write_text("{'mpi': {'enabled': on}}")
    assert "is neither JSON nor a Python literal" in str(run(line).problems[0])


def test_model_parallel_parameters_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "smp.json").write_text(
        '{"pipeline_parallel_degree": 4, "ddp": true}', encoding="utf-8"
    )
    parallel: Json = {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": "smp.json"}}
    }
    result = run(words(tmp_path, {**parallel, "mpi": {"enabled": True, "processes_per_host": 8}}))  # type: ignore[dict-item]
    assert result.problems == ()
    assert result.hyperparameters["mp_parameters"] == {"pipeline_parallel_degree": 4, "ddp": True}


@pytest.mark.parametrize(
    ("distribution", "more", "message"),
    [
        (
            {"mpi": {"enabled": True, "processes_per_host": 9}},
            (),
            "9 processes per host on 8 GPU(s)",
        ),
        (SMP | {"mpi": {"enabled": True}}, (), "needs the processes per host"),  # type: ignore[operator]
        (
            {"mpi": {"enabled": True, "custom_mpi_options": "-x A=1 -x A=2"}},
            (),
            "given as '1' and as '2'",
        ),
        (SMDDP | {"mpi": {"enabled": True}}, (), "are both switched on"),  # type: ignore[operator]
        (
            {
                "smdistributed": {
                    "modelparallel": {"enabled": True, "parameters": {"optimize": "sped"}}
                },
                "mpi": MPI,
            },
            (),
            "did you mean 'speed'",
        ),
        (TORCH, ("--framework-version", "1.12"), "torch_distributed needs torch 1.13 or later"),
        ({"mpi": {"processes_per_host": 8}}, (), "'enabled' is missing"),
        (TORCH, ("--image-manifest", "/does/not/exist.json"), "file not found"),
        (
            TORCH,
            ("--instance-group", "a=ml.p4d.24xlarge:2"),
            "cannot be combined with --instance-type and --instance-count",
        ),
    ],
)
def test_problems_are_said_before_anything_is_paid_for(
    tmp_path: Path, distribution: Json, more: tuple[str, ...], message: str
) -> None:
    status, text = report(words(tmp_path, distribution, *more), 120)
    assert status == 64
    assert message in " ".join(text.split())
    assert "not ready" in text


def test_every_problem_of_every_kind_at_once(tmp_path: Path) -> None:
    line = words(tmp_path, {"mpi": {"processes_per_host": 8}}, kind="ml.p4d.24xlarg", count=0)
    line[line.index("--entry-point") + 1] = f"{tmp_path}/trian.py"
    result = run(line)
    texts = [str(problem) for problem in result.problems]
    assert len(texts) == 3
    assert "did you mean 'ml.p4d.24xlarge'?" in result.warnings[0]
    for message in ("did you mean 'train.py'?", "'0' is not a number of hosts"):
        assert any(message in text for text in texts), texts


def test_a_wrong_dict_and_a_wrong_script_are_both_said(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    line = words(tmp_path, {"smdistributed": {"other": {}}}, "--source-dir", f"{tmp_path}/src")
    line[line.index("--entry-point") + 1] = "train.py"
    texts = [str(problem) for problem in run(line).problems]
    assert any("smdistributed has no 'other'" in text for text in texts)
    assert any("no code found" in text for text in texts)


def test_a_source_directory_goes_with_its_script_and_without_one_the_script_goes_alone(
    tmp_path: Path,
) -> None:
    source = tmp_path / "src"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "train.py").write_text(SCRIPT, encoding="utf-8")
    (source / "requirements.txt").write_text("x", encoding="utf-8")
    (source / "deep" / "requirements.txt").write_text("x", encoding="utf-8")
    for entry in ("deep/train.py", f"{source}/deep/train.py"):
        line = words(tmp_path, TORCH, "--source-dir", str(source))
        line[line.index("--entry-point") + 1] = entry
        result = run(line)
        assert result.problems == ()
        assert result.plans[0].argv[-1] == "deep/train.py"
        assert "requirements.txt" in " ".join(result.plans[0].requirements)
    alone = words(tmp_path)
    alone[alone.index("--entry-point") + 1] = f"{source}/deep/train.py"
    assert run(alone).plans[0].requirements == ()
    assert "deep" not in " ".join(run(alone).plans[0].argv)


def test_what_the_platform_does_not_take_is_a_warning(tmp_path: Path) -> None:
    many = run(words(tmp_path, hyperparameters={f"h{number}": number for number in range(100)}))
    assert "the platform takes 100" in many.warnings[0]
    long = run(words(tmp_path, hyperparameters={"prompt": "x" * 2500}))
    assert (
        "hyperparameter prompt has 2,502 characters, the platform takes 2,500" in long.warnings[0]
    )
    assert many.problems == long.problems == ()


def test_instance_groups(tmp_path: Path) -> None:
    groups = ("--instance-group", "gpu=ml.p4d.24xlarge:2", "--instance-group", "cpu=ml.c5.xlarge:3")
    mpi: Json = {"mpi": {"enabled": True, "processes_per_host": 8}, "instance_groups": ["gpu"]}
    result = run(words(tmp_path, mpi, *groups, kind=""))
    assert result.problems == ()
    assert [(plan.host, bool(plan.argv)) for plan in result.plans] == [
        ("algo-1", True),
        ("algo-2", False),
        ("algo-3", True),
    ]
    assert result.plans[2].env["SM_CURRENT_INSTANCE_TYPE"] == "ml.c5.xlarge"


@pytest.mark.parametrize(
    ("framework", "variable"),
    [("tensorflow", "TF_CONFIG"), ("mxnet", "DMLC_ROLE"), ("pytorch", "RANK")],
)
def test_parameter_servers_are_those_of_the_framework(
    tmp_path: Path, framework: str, variable: str
) -> None:
    line = words(
        tmp_path,
        {"parameter_server": {"enabled": True}},
        "--framework",
        framework,
        kind="ml.p3.2xlarge",
    )
    result = run(line)
    assert result.problems == ()
    assert variable in result.plans[0].env
    text = report(line)[1]
    assert ("beside it: TensorFlow parameter server" in text) == (framework == "tensorflow")
    assert max(map(len, text.split("(worker)")[1].splitlines())) <= 100


def test_an_image_manifest_says_what_is_not_there(tmp_path: Path) -> None:
    manifest = {
        "schema": 1,
        "name": "small",
        "components": {"torch": {"version": "2.4.1"}},
        "missing": [
            {"component": "aws-ofi-nccl", "cost": "NCCL talks TCP between hosts instead of EFA"}
        ],
        "programs": {"python": "/opt/venv/bin/python", "torchrun": "/opt/venv/bin/torchrun"},
    }
    (tmp_path / "image.json").write_text(json.dumps(manifest), encoding="utf-8")
    option = ("--image-manifest", f"{tmp_path}/image.json")
    result = run(words(tmp_path, TORCH, *option))
    assert result.problems == ()
    assert any("NCCL talks TCP between hosts" in warning for warning in result.warnings)
    assert "8 GPU(s) of ml.p4d.24xlarge would be idle" in advice_of(result)["image without CUDA"]
    assert "mpirun is not installed" in str(
        run(words(tmp_path, {"mpi": {"enabled": True}}, *option)).problems[0]
    )


# --- advice ---------------------------------------------------------------------------------------
def test_one_host_with_smddp(tmp_path: Path) -> None:
    image = image_with_smp(tmp_path, AWS)
    advice = advice_of(run(words(tmp_path, SMDDP, *image, count=1)))
    assert "use torch_distributed" in advice["smddp on one host"]
    assert "NVLink" in advice["smddp on one host"]
    assert "smddp on one host" not in advice_of(run(words(tmp_path, SMDDP, *image)))
    assert "smddp on this instance type" in advice_of(
        run(words(tmp_path, SMDDP, *image, kind="ml.g5.48xlarge"))
    )


AWS: dict[str, Json] = {"torch": "1.12.1"}
OPEN: dict[str, Json] = {"torch": "2.13.0", "trainworks-smdistributed": "0.1.0"}
"""Distributions that an image protects: with AWS's smddp and smp, and with this project's."""


def image_with_smp(folder: Path, protected: dict[str, Json]) -> tuple[str, str]:
    """The option for an image with smddp and smp."""
    programs = (
        "python",
        "mpirun",
        "torchrun",
        "ssh",
        "sshd",
        "ssh-keygen",
        "smddprun",
        "smddpmprun",
    )
    document = {
        "schema": 1,
        "components": {
            "torch": {"version": protected["torch"]},
            "cuda": {"version": "13"},
            "smddp": {},
            "smp": {},
        },
        "programs": {name: f"/opt/venv/bin/{name}" for name in programs},
        "protected": protected,
    }
    (folder / "image.json").write_text(json.dumps(document), encoding="utf-8")
    return ("--image-manifest", f"{folder}/image.json")


@pytest.mark.parametrize("has_manifest", [True, False])
def test_the_open_library_runs_anywhere(tmp_path: Path, *, has_manifest: bool) -> None:
    """Without a manifest the newest image is meant, which has the open library."""
    image = image_with_smp(tmp_path, OPEN) if has_manifest else ()
    advice = advice_of(run(words(tmp_path, SMDDP, *image, kind="ml.g5.48xlarge", count=1)))
    assert "every instance type" in advice["smddp"]
    assert not {"smddp on one host", "smddp on this instance type"} & advice.keys()
    assert "data loaders" not in advice_of(run(words(tmp_path, SMP, *image)))


def test_awss_smp_needs_data_loaders_without_processes_on_one_type(tmp_path: Path) -> None:
    image = image_with_smp(tmp_path, AWS)
    assert "num_workers=0" in advice_of(run(words(tmp_path, SMP, *image)))["data loaders"]
    other = words(tmp_path, SMP, *image, kind="ml.p4de.24xlarge")
    assert "data loaders" not in advice_of(run(other))


# --- smp ------------------------------------------------------------------------------------------
def smp_with(**parameters: Json) -> Json:
    """The distribution of a job of smp with these parameters."""
    parallel: Json = {"modelparallel": {"enabled": True, "parameters": parameters}}
    return {"smdistributed": parallel, "mpi": MPI}


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ({"load_partition": True}, "load_partition is true, and the image's smp cannot do it"),
        ({"auto_partition": False}, "auto_partition is off without a default_partition"),
        ({"ddp": False}, "8 processes train 4 copies of the model, and ddp is false"),
    ],
)
def test_parameters_that_smp_refuses_are_problems_without_a_manifest(
    tmp_path: Path, parameters: dict[str, Json], fault: str
) -> None:
    distribution = smp_with(pipeline_parallel_degree=2, **parameters)
    (problem,) = run(words(tmp_path, distribution, count=1)).problems
    assert fault in problem.what
    assert problem.advice


def test_sharding_needs_the_torch_of_the_image_that_is_meant(tmp_path: Path) -> None:
    sharding = smp_with(sharded_data_parallel_degree=2, ddp=True)
    assert run(words(tmp_path, sharding)).problems == ()
    (problem,) = run(words(tmp_path, sharding, "--framework-version", "2.4.1")).problems
    assert "needs PyTorch 2.6; the image has 2.4.1" in problem.what


@pytest.mark.parametrize(
    ("misspelt", "name"),
    [
        ("partitons", "partitions"),
        ("pipeline_paralel_degree", "pipeline_parallel_degree"),
        ("sharded_data_paralel_degree", "sharded_data_parallel_degree"),
    ],
)
def test_a_misspelt_parameter_that_is_needed_is_named(
    tmp_path: Path, misspelt: str, name: str
) -> None:
    distribution = smp_with(**{misspelt: 2, "microbatchs": 4, "ddp": True})
    result = run(words(tmp_path, distribution))
    (problem,) = result.problems
    assert problem.advice == f"write {name!r} in the place of {misspelt!r}"
    text = " ".join(report(words(tmp_path, distribution))[1].split())
    assert f"has {misspelt!r}, which smp does not know; did you mean {name!r}?" in text
    assert "has 'microbatchs', which smp does not know; did you mean 'microbatches'?" in text


def test_parameters_without_effect_are_named(tmp_path: Path) -> None:
    distribution = smp_with(
        partitions=2, ddp=True, microbatches=4, horovod=False, sdp_reduce_bucket_size=5
    )
    advice = advice_of(run(words(tmp_path, distribution)))["parameters without effect"]
    assert "leave out: horovod, sdp_reduce_bucket_size |" in advice
    image = image_with_smp(tmp_path, AWS)
    assert "parameters without effect" not in advice_of(run(words(tmp_path, distribution, *image)))
    assert "parameters without effect" not in advice_of(run(words(tmp_path, SMP)))


SECOND_VERSION = [
    "import torch\nimport torch.sagemaker as tsm\ntsm.init()\n",
    "import torch\nfrom torch import sagemaker\n",
    "import torch\nfrom torch.sagemaker.delayed_param import DelayedParamIniter\n",
    "def main():\n    import torch.sagemaker as tsm\n",
]
FIRST_OR_NEITHER = [
    SCRIPT,
    "import smdistributed.modelparallel.torch as smp\nsmp.init()\n",
    "try:\n    import torch.sagemaker as tsm\nexcept ImportError:\n    tsm = None\n",
    "import sys\nif '--smp' in sys.argv:\n    import torch.sagemaker as tsm\n",
    "# import torch.sagemaker\nimport torch.sagemakers\n",
    "import torch.sagemaker as tsm\nthis is no Python\n",
]


@pytest.mark.parametrize("script", SECOND_VERSION)
def test_a_script_for_smps_second_version_is_refused_with_the_page_that_helps(
    tmp_path: Path, script: str
) -> None:
    (problem,) = run(words(tmp_path, script=script)).problems
    assert "imports torch.sagemaker: it is smp's second version" in problem.what
    assert problem.where == "train.py, line 2"
    assert 'docs/smdistributed.md, "From torch.sagemaker to FSDP2"' in problem.advice
    # AWS's image may have it.
    image = image_with_smp(tmp_path, AWS | {"torch": "2.3.1"})
    assert run(words(tmp_path, TORCH, *image, script=script)).problems == ()


@pytest.mark.parametrize("script", FIRST_OR_NEITHER)
def test_a_script_that_runs_without_smps_second_version_is_not_refused(
    tmp_path: Path, script: str
) -> None:
    assert run(words(tmp_path, script=script)).problems == ()


def test_the_modules_of_a_script_are_read_too(tmp_path: Path) -> None:
    source = tmp_path / "src"
    (source / "lib").mkdir(parents=True)
    (source / "train.py").write_text("from lib import loop\nimport torch\n", encoding="utf-8")
    (source / "lib" / "__init__.py").write_text("", encoding="utf-8")
    (source / "lib" / "loop.py").write_text("import train\nimport lib.model\n", encoding="utf-8")
    (source / "lib" / "model.py").write_text(SECOND_VERSION[0], encoding="utf-8")
    (source / "unused.py").write_text(SECOND_VERSION[0], encoding="utf-8")
    line = words(tmp_path, TORCH, "--source-dir", str(source))
    line[line.index("--entry-point") + 1] = "train.py"
    (problem,) = run(line).problems
    assert problem.where == "lib/model.py, line 2"


def test_parameters_of_smps_second_version_are_a_warning(tmp_path: Path) -> None:
    parallel: Json = {"modelparallel": {"enabled": True, "parameters": {"hybrid_shard_degree": 8}}}
    distribution: Json = {**TORCH, "smdistributed": parallel}  # type: ignore[dict-item]
    result = run(words(tmp_path, distribution))
    assert result.problems == ()
    (warning,) = result.warnings
    assert "mp_parameters is for torch.sagemaker, which the image does not have" in warning
    assert "From torch.sagemaker to FSDP2" in warning


def test_a_problem_is_followed_by_what_to_do(tmp_path: Path) -> None:
    distribution = smp_with(partitions=2, ddp=True, auto_partition=False, optimize="sped")
    status, text = report(words(tmp_path, distribution), 120)
    assert status == 64
    assert text.partition("Problems, to correct before you start the job:\n")[2].startswith(
        "  1. optimize is 'sped' (hyperparameter mp_parameters)\n"
        "     -> did you mean 'speed'?\n"
        "  2. auto_partition is off without a default_partition (hyperparameter mp_parameters)\n"
        "     -> give default_partition\n\n"
    )
    assert text.endswith("not ready: 2 problems\n")


def test_without_a_manifest_the_newest_image_is_meant(tmp_path: Path) -> None:
    _, text = report(words(tmp_path, {"mpi": {"enabled": True, "processes_per_host": 8}}))
    assert FACTS.image.programs["mpirun"].startswith("/opt/venv/")
    assert FACTS.image.programs["mpirun"] in text
    assert f"paths and versions are those of {FACTS.image.name}" in " ".join(text.split())
    assert "btl_vader" not in text, "an option of Open MPI 4"
    assert "FI_EFA_FORK_SAFE=1" in text, "libfabric's from 1.13 on"
    assert "RDMAV_FORK_SAFE" not in text


def test_devices_that_do_nothing_and_devices_that_are_not_there(tmp_path: Path) -> None:
    four: Json = {"mpi": {"enabled": True, "processes_per_host": 4}}
    assert "4 of 8 GPUs on each host are idle" in advice_of(run(words(tmp_path, four)))["idle GPUs"]
    assert "8 GPUs" in advice_of(run(words(tmp_path, {}, count=1)))["idle GPUs"]
    servers: Json = {"parameter_server": {"enabled": True}}
    tensorflow = ("--framework", "tensorflow")
    assert "one GPU each" in advice_of(run(words(tmp_path, servers, *tensorflow)))["idle GPUs"]
    mirrored: Json = {"multi_worker_mirrored_strategy": {"enabled": True}}
    assert "idle GPUs" not in advice_of(run(words(tmp_path, mirrored, *tensorflow)))
    assert "has no GPU" in advice_of(run(words(tmp_path, kind="ml.m5.xlarge")))["no accelerator"]
    assert "ml.p3dn.24xlarge" in advice_of(run(words(tmp_path, kind="ml.p3.16xlarge")))["no EFA"]
    assert (
        "each of the 2 hosts trains a whole model"
        in advice_of(run(words(tmp_path, {})))["no distribution"]
    )


@pytest.mark.parametrize(
    "distribution", [TORCH, {"mpi": {"enabled": True, "processes_per_host": 8}}, {}]
)
def test_a_type_that_nobody_knows_yet_is_a_warning_and_no_refusal(
    tmp_path: Path, distribution: Json
) -> None:
    result = run(words(tmp_path, distribution, kind="ml.p9.48xlarge"))
    assert result.problems == ()
    assert [
        warning
        for warning in result.warnings
        if "ml.p9.48xlarge is not in the instance table" in warning
    ] == [result.warnings[0]]
    assert "no accelerator" not in advice_of(result)
    assert report(words(tmp_path, distribution, kind="ml.p9.48xlarge"))[0] == 0


def test_a_starter_for_gpus_is_not_refused_on_a_type_that_nobody_knows_yet(tmp_path: Path) -> None:
    xla: Json = {"pytorchxla": {"enabled": True}}
    assert run(words(tmp_path, xla, kind="ml.p9.48xlarge")).problems == ()
    (problem,) = run(words(tmp_path, xla, kind="ml.m5.xlarge")).problems
    assert "pytorchxla is for GPUs only" in str(problem)


def test_an_image_for_other_processors_is_a_problem(tmp_path: Path) -> None:
    kind = "ml.p6e-gb200.36xlarge"
    (problem,) = run(words(tmp_path, kind=kind)).problems
    assert "ml.p6e-gb200.36xlarge has arm64 processors, and the image is for amd64" in str(problem)
    manifest = tmp_path / "image.json"
    manifest.write_text(
        '{"schema": 1, "target": {"framework": "pytorch", "architecture": "arm64"}}',
        encoding="utf-8",
    )
    option = ("--image-manifest", str(manifest))
    texts = [str(problem) for problem in run(words(tmp_path, TORCH, *option, kind=kind)).problems]
    assert not [words for words in texts if "processors" in words]
    texts = [str(problem) for problem in run(words(tmp_path, TORCH, *option)).problems]
    assert [words for words in texts if "has amd64 processors, and the image is for arm64" in words]
    # Graviton types are none of SageMaker training's: no family of the table
    # takes one for a host like others.
    assert (
        "ml.c7g.xlarge is not in the instance table"
        in run(words(tmp_path, kind="ml.c7g.xlarge")).warnings[0]
    )


# --- any input ------------------------------------------------------------------------------------
KEYS = st.sampled_from(
    (
        *(
            "mpi",
            "smdistributed",
            "pytorchddp",
            "torch_distributed",
            "parameter_server",
            "instance_groups",
            "torchrun",
        ),
        *(
            "dataparallel",
            "modelparallel",
            "enabled",
            "parameters",
            "processes_per_host",
            "custom_mpi_options",
        ),
        *(
            "pytorchxla",
            "multi_worker_mirrored_strategy",
            "process_count_per_node",
            "partitions",
            "ddp_port",
            "x",
        ),
    )
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-1, 9),
        st.floats(allow_nan=False),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    distribution=VALUES,
    user=st.dictionaries(st.text(max_size=6), VALUES, max_size=3),
    kind=st.sampled_from(
        ["ml.p4d.24xlarge", "ml.trn1.32xlarge", "ml.c5.xlarge", "ml.p5.48xlarge", ""]
    ),
    framework=st.sampled_from(["pytorch", "tensorflow", "mxnet"]),
)
def test_any_dict_gets_an_answer_and_never_a_traceback(
    tmp_path_factory: pytest.TempPathFactory,
    distribution: Json,
    user: dict[str, Json],
    kind: str,
    framework: str,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    line = words(folder, distribution, "--framework", framework, kind=kind, hyperparameters=user)
    status, text = report(line)
    assert status == (0 if text.endswith("ready: the job would start\n") else 64)
    assert (status == 64) == bool(run(line).problems)
    shutil.rmtree(folder)


# --- tips -----------------------------------------------------------------------------------------
PAGE_OF_TIPS = (LAUNCHER.parent / "docs" / "tips.md").read_text(encoding="utf-8")


def tips_of(result: Result) -> list[str]:
    assert result.problems == ()
    return [tip.text for tip in result.tips]


def test_a_job_of_smddp_gets_the_tips_for_it(tmp_path: Path) -> None:
    two = tips_of(run(words(tmp_path, SMDDP)))
    assert "all hosts in one region and availability zone, with subnets of that zone" in two
    assert "preprocessing on CPUs competes with the exchange of gradients" in two
    assert "the batch grows with the hosts; learning rate by linear scaling, with warm-up" in two
    assert "smddp is made for two hosts or more" in tips_of(run(words(tmp_path, SMDDP, count=1)))
    assert not [tip for tip in two if "smp." in tip or "Sequential" in tip]


def test_a_job_of_smp_gets_the_tips_for_it(tmp_path: Path) -> None:
    tips = tips_of(run(words(tmp_path, SMP)))
    assert "torch.cuda.set_device(smp.local_rank()) first" in tips
    assert "in the step: forward and model.backward; outside: batches, optimizer.step()" in tips
    assert "layers that follow each other belong into a Sequential" in tips


def test_other_jobs_get_none(tmp_path: Path) -> None:
    assert tips_of(run(words(tmp_path))) == []
    assert tips_of(run(words(tmp_path, {}))) == []


@pytest.mark.parametrize("distribution", [SMDDP, SMP])
def test_each_tip_is_a_line_with_a_link_to_a_section_of_the_page(
    tmp_path: Path, distribution: Json
) -> None:
    sections = {
        title.lower().replace(" ", "-")
        for title in re.findall(r"^## (.+)$", PAGE_OF_TIPS, re.MULTILINE)
    }
    _, text = report(words(tmp_path, distribution), 120)
    tips = text.partition("\nTips for every job of this kind:\n")[2].partition("\n\n")[0]
    lines = tips.splitlines()
    assert len(lines) == len(run(words(tmp_path, distribution)).tips)
    for line in lines:
        assert line.startswith("  - ")
        assert line.rpartition("docs/tips.md#")[2] in sections


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("One region and one availability zone", id="zone"),
        pytest.param("the file system's subnets and a security group", id="fsx-vpc"),
        pytest.param("Two hosts or more", id="hosts"),
        pytest.param("Preprocessing on CPUs competes", id="preprocessing"),
        pytest.param("`CPUBottleneck`, `LowGPUUtilization` and `LoadBalancing`", id="debugger"),
        pytest.param("The batch grows with the hosts", id="batch"),
        pytest.param("linear scaling, with warm-up", id="learning-rate"),
        pytest.param("240 MB/s for each 1.2 TiB", id="fsx-throughput"),
        pytest.param("An epoch of 100 GB", id="fsx-example"),
        pytest.param("The same number of batches", id="batches"),
        pytest.param("`num_workers=0`", id="workers"),
        pytest.param("`torch.cuda.synchronize()`", id="synchronize"),
        pytest.param("A Sequential for layers", id="sequential"),
    ],
)
def test_the_page_of_tips_says(message: str) -> None:
    assert message in PAGE_OF_TIPS


def test_the_figures_of_the_page_are_right() -> None:
    steps_of_240 = 14
    assert (steps_of_240 - 1) * 0.240 < 100 / 30 <= steps_of_240 * 0.240
    assert f"{steps_of_240} steps, {steps_of_240 * 1.2:.1f} TiB" in PAGE_OF_TIPS
    assert f"({10 * 0.240:.1f} GB/s, {10 * 1.2:.0f} TiB)" in PAGE_OF_TIPS
