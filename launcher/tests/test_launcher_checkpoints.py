"""Test the checkpoint that a job goes on from when it starts again: layouts of the common writers,
whole and cut off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from launcher_network import engine_manifest, need
from launcher_support import LAUNCHER, TIME_OUT, Launcher, environment, plan, write_inputs

from trainworks_launcher.contract.checkpoints import newest_complete, step_in
from trainworks_launcher.contract.json_values import Json


def zipped() -> bytes:
    """Return a zip file, as torch.save writes one."""
    import io

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    return buffer.getvalue()


def safetensors(size: int = 100) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + b"x" * size


def with_header(header: bytes) -> bytes:
    """A safetensors file with this header, and no tensor."""
    return len(header).to_bytes(8, "little") + header


ZIP, TENSORS = zipped(), safetensors()
INDEX = json.dumps(
    {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
).encode()
METADATA = b"\x80\x04 a pickle that names __0_0.distcp and __1_0.distcp"

Files = Mapping[str, bytes]


@pytest.mark.parametrize(
    ("files", "newest"),
    [
        pytest.param({}, "", id="nothing"),
        pytest.param({"notes.txt": b"x", "model.pt": ZIP}, "", id="no checkpoint"),
        # transformers
        pytest.param(
            {
                "checkpoint-500/trainer_state.json": b"{}",
                "checkpoint-1000/trainer_state.json": b"{}",
            },
            "checkpoint-1000",
            id="by number, not by name",
        ),
        pytest.param(
            {
                "checkpoint-500/trainer_state.json": b"{}",
                "checkpoint-500/model.safetensors": TENSORS,
                "checkpoint-1000/model.safetensors": TENSORS,
            },
            "checkpoint-500",
            id="the state is written last",
        ),
        pytest.param(
            {
                "checkpoint-5/trainer_state.json": b"{}",
                "checkpoint-9/trainer_state.json": b"{}",
                "checkpoint-9/model.safetensors": TENSORS[:-1],
            },
            "checkpoint-5",
            id="safetensors cut off",
        ),
        pytest.param(
            {
                "checkpoint-9/trainer_state.json": b"{}",
                "checkpoint-9/model.safetensors": with_header(b'{"w": {"data_offsets": []}}'),
            },
            "",
            id="safetensors with a strange header, no offsets",
        ),
        pytest.param(
            {
                "checkpoint-9/trainer_state.json": b"{}",
                "checkpoint-9/model.safetensors": with_header(b"[" * 100000),
            },
            "",
            id="safetensors with a strange header, nested too deep",
        ),
        pytest.param(
            {
                "checkpoint-9/trainer_state.json": b"{}",
                "checkpoint-9/model.safetensors": with_header(b"[1]"),
            },
            "",
            id="safetensors with a strange header, a list",
        ),
        pytest.param(
            {
                "checkpoint-9/trainer_state.json": b"{}",
                "checkpoint-9/model.safetensors.index.json": b"[" * 100000,
            },
            "",
            id="an index nested too deep",
        ),
        pytest.param(
            {"checkpoint-9/trainer_state.json": b"{}", "checkpoint-9/optimizer.pt": ZIP[:-30]},
            "",
            id="zip cut off",
        ),
        pytest.param(
            {
                "checkpoint-9/trainer_state.json": b"{}",
                "checkpoint-9/model.safetensors.index.json": INDEX,
                "checkpoint-9/model-1.safetensors": TENSORS,
            },
            "",
            id="a shard of the index is missing",
        ),
        pytest.param(
            {"run/checkpoint-9/trainer_state.json": b"{}", "checkpoint-9.sagemaker-uploaded": b""},
            "run/checkpoint-9",
            id="deeper, with SageMaker's marks",
        ),
        # torch.distributed.checkpoint
        pytest.param(
            {
                "step-8/.metadata": METADATA,
                "step-8/__0_0.distcp": b"x",
                "step-8/__1_0.distcp": b"x",
            },
            "step-8",
            id="dcp",
        ),
        pytest.param(
            {"step-8/.metadata": METADATA, "step-8/__0_0.distcp": b"x"},
            "",
            id="dcp, a part is missing",
        ),
        pytest.param(
            {"step-8/__0_0.distcp": b"x", "step-8/__1_0.distcp": b"x"}, "", id="dcp, no metadata"
        ),
        pytest.param(
            {
                "checkpoint-9/trainer_state.json": b"{}",
                "checkpoint-9/optimizer_0/__0_0.distcp": b"x",
            },
            "",
            id="dcp in a checkpoint of transformers",
        ),
        # Lightning
        pytest.param(
            {
                "lightning_logs/version_0/checkpoints/epoch=9-step=90.ckpt": ZIP,
                "lightning_logs/version_0/checkpoints/epoch=1-step=100.ckpt": ZIP,
                "lightning_logs/version_0/checkpoints/epoch=2-step=200.ckpt": ZIP[:-30],
            },
            "lightning_logs/version_0/checkpoints/epoch=1-step=100.ckpt",
            id="lightning",
        ),
        pytest.param(
            {"epoch=1-val_loss=0.45.ckpt": ZIP, "epoch=2-val_loss=0.31.ckpt": ZIP},
            "epoch=2-val_loss=0.31.ckpt",
            id="a number with a decimal point is not a step",
        ),
        pytest.param(
            {"epoch-0.100.ckpt": ZIP, "epoch-0.200.ckpt": ZIP},
            "epoch-0.200.ckpt",
            id="the only number has a point",
        ),
        pytest.param(
            {"epoch=1-step=100.ckpt": ZIP, "last.ckpt": ZIP},
            "last.ckpt",
            id="the later one without number",
        ),
        # DeepSpeed, Megatron-LM, smp
        pytest.param(
            {"latest": b"global_step7\n", "global_step7/a.pt": ZIP, "global_step8/a.pt": ZIP},
            "global_step7",
            id="deepspeed",
        ),
        pytest.param(
            {
                "latest_checkpointed_iteration.txt": b"70",
                "iter_0000070/a.pt": ZIP,
                "iter_0000080/a.pt": ZIP,
            },
            "iter_0000070",
            id="megatron",
        ),
        pytest.param(
            {
                "newest": b"step-40",
                "step-40_partial/model_0_0_0.pt": ZIP,
                "step-60_partial/model_0_0_0.pt": ZIP,
            },
            "step-40_partial",
            id="smp",
        ),
        # a script's own
        pytest.param({"checkpoint.pt": ZIP}, "checkpoint.pt", id="one file"),
        pytest.param({"checkpoint.pt": b""}, "", id="an empty file"),
        pytest.param(
            {"epoch_4/_SUCCESS": b"", "epoch_5/w.pt": ZIP, "epoch_6.tmp/_SUCCESS": b""},
            "epoch_4",
            id="mark",
        ),
    ],
)
def test_the_newest_complete_checkpoint(tmp_path: Path, files: Files, newest: str) -> None:
    for number, (name, content) in enumerate(files.items()):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (1000 + number, 1000 + number))
    assert newest_complete(str(tmp_path)) == (str(tmp_path / newest) if newest else "")


def test_a_script_is_told_what_to_go_on_from(tmp_path: Path) -> None:
    """The directory as the platform names it, and the variable that wins over it."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for place in (mine, theirs):
        (place / "checkpoint-3").mkdir(parents=True)
        (place / "checkpoint-3/trainer_state.json").write_text("{}", encoding="utf-8")
    script = (
        "import os; print(sorted(v for n, v in os.environ.items() if n in"
        " ('TRAINWORKS_RESUME_FROM',)))"
    )
    write_inputs(tmp_path, script, {}, {})
    config = tmp_path / "input/config/checkpointconfig.json"
    config.write_text(json.dumps({"LocalPath": str(theirs), "S3Uri": "s3://b/p"}), encoding="utf-8")
    for variables, expected_place in (
        ({}, theirs),
        ({"TRAINWORKS_CHECKPOINT_DIRECTORY": str(mine)}, mine),
    ):
        with Launcher(tmp_path, variables=variables) as launcher:
            assert launcher.wait() == 0
        assert f"['{expected_place}/checkpoint-3']" in launcher.text


@pytest.mark.parametrize(("directory", "newest"), [("", ""), ("/c", ""), ("/c", "/c/checkpoint-1")])
def test_the_variables_of_a_first_start(directory: str, newest: str) -> None:
    env = plan(environment(checkpoint_directory=directory, resume_from=newest)).env
    assert env["TRAINWORKS_RESTART_COUNT"] == "0"
    assert env.get("TRAINWORKS_CHECKPOINT_DIRECTORY", "") == directory
    assert env.get("TRAINWORKS_RESUME_FROM", "") == newest


@pytest.mark.parametrize(
    ("torchrun", "before", "count", "step"),
    [("0", "2", "2", "1"), ("1", "0", "1", "2"), ("3", "2", "5", "2")],
)
def test_a_rank_that_torchrun_starts_again_looks_again(
    tmp_path: Path, torchrun: str, before: str, count: str, step: str
) -> None:
    for number in (1, 2):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}/trainer_state.json").write_text("{}", encoding="utf-8")
    variables = {
        "TORCHELASTIC_RESTART_COUNT": torchrun,
        "TRAINWORKS_RESTART_COUNT": before,
        "TRAINWORKS_RESUME_FROM": str(tmp_path / "checkpoint-1"),
        "TRAINWORKS_CHECKPOINT_DIRECTORY": str(tmp_path),
        "PATH": os.defpath,
    }
    rank = LAUNCHER / "trainworks_launcher/programs/rank.py"
    program = (
        "import os; print(os.environ['TRAINWORKS_RESTART_COUNT'],"
        " os.environ['TRAINWORKS_RESUME_FROM'])"
    )
    done = subprocess.run(
        (sys.executable, "-IS", str(rank), "--", sys.executable, "-c", program),
        env=variables,
        capture_output=True,
        timeout=TIME_OUT,
        check=True,
    )
    assert done.stdout.decode().split() == [count, str(tmp_path / f"checkpoint-{step}")]


def test_a_rank_whose_own_host_did_not_fail_looks_again_too(tmp_path: Path) -> None:
    """torchrun's count stays 0 on a host whose ranks were ended because another host failed."""
    variables = {
        "TORCHELASTIC_RESTART_COUNT": "0",
        "LOCAL_RANK": "1",
        "TRAINWORKS_RESTART_COUNT": "2",
        "TRAINWORKS_CHECKPOINT_DIRECTORY": str(tmp_path),
        "TRAINWORKS_RUNTIME_DIRECTORY": str(tmp_path),
        "PATH": os.defpath,
    }
    rank = LAUNCHER / "trainworks_launcher/programs/rank.py"
    program = (
        "import os; print(os.environ['TRAINWORKS_RESTART_COUNT'],"
        " os.environ.get('TRAINWORKS_RESUME_FROM'))"
    )
    rank_lines = []
    for number in (1, 2, 3):
        done = subprocess.run(
            (sys.executable, "-IS", str(rank), "--", sys.executable, "-c", program),
            env=variables,
            capture_output=True,
            timeout=TIME_OUT,
            check=True,
        )
        rank_lines.append(done.stdout.decode().split())
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}/trainer_state.json").write_text("{}", encoding="utf-8")
    assert rank_lines == [
        ["2", "None"],
        ["3", str(tmp_path / "checkpoint-1")],
        ["4", str(tmp_path / "checkpoint-2")],
    ]


FAILS_ONCE = """
import json, os

resumed = os.environ.get("TRAINWORKS_RESUME_FROM", "-")
print("start", os.environ["TRAINWORKS_RESTART_COUNT"], resumed, flush=True)
if os.environ["TRAINWORKS_RESTART_COUNT"] == "0":
    place = os.environ["TRAINWORKS_CHECKPOINT_DIRECTORY"] + "/checkpoint-7"
    os.makedirs(place)
    json.dump({}, open(place + "/trainer_state.json", "w"))
    raise SystemExit(3)
"""


@pytest.mark.engine
def test_torchrun_starts_again_from_what_the_job_has_saved(tmp_path: Path) -> None:
    """The real torchrun, with one restart."""
    need("torchrun")
    (tmp_path / "checkpoints").mkdir()
    hyperparameters: dict[str, Json] = {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_torch_distributed_max_restarts": "1",
        "sagemaker_mpi_num_of_processes_per_host": "1",
    }
    write_inputs(tmp_path, FAILS_ONCE, hyperparameters, {})
    image = engine_manifest(tmp_path)
    with Launcher(tmp_path, variables={"TRAINWORKS_IMAGE_MANIFEST": str(image)}) as launcher:
        assert launcher.wait() == 0
    assert "start 0 -\n" in launcher.text
    assert f"start 1 {tmp_path}/checkpoints/checkpoint-7\n" in launcher.text


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=3-step=400.ckpt", 400),
        ("step-7-of-10.ckpt", 7),
        ("checkpoint-500", 500),
        ("global_step100", 100),
        ("iter_0000200", 200),
        ("checkpoint3.pt", -1),
        ("epoch-3", -1),
        ("last.ckpt", -1),
    ],
)
def test_the_step_that_a_checkpoints_name_says(name: str, step: int) -> None:
    assert step_in(f"/steps-1/{name}") == step
