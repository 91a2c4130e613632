"""Whole scripts, run as users run them: our own in ``scripts/``, and public
ones where they are on this machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from ranks import HERE, Ended, run_program

SCRIPTS = HERE / "scripts"

PUBLIC = "TRAINWORKS_PUBLIC_SCRIPTS"
"""Names the folder with the public scripts; smdistributed/README.md says how to fill it."""

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 4}
SHARDED = {"sharded_data_parallel_degree": 2, "microbatches": 2, "ddp": True}
TENSOR = {"tensor_parallel_degree": 2, "ddp": True}


def run(
    script: Path,
    *arguments: str,
    ranks: int = 2,
    smp: Mapping[str, object] | None,
    folder: Path,
    torchrun: bool = False,
) -> list[float]:
    """Run a script in a job of smp or smddp, in ``folder``, and return the
    losses that rank 0 printed or logged.

    The ranks have the variables of mpirun, or torchrun starts them.
    """
    framework: dict[str, object] = {"sagemaker_distributed_dataparallel_enabled": True}
    variables = {
        "SMP_CPU_EMULATION": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(SCRIPTS / "stand_ins")]),
        "HF_HUB_OFFLINE": "1",
        "SAGEMAKER_JOB_NAME": "job",
        "SM_HPS": "{}",
        "SM_NUM_GPUS": str(ranks),
        "SM_HOSTS": '["algo-1"]',
        "SM_CURRENT_HOST": "algo-1",
        "SM_CHANNEL_TRAIN": str(folder),
        "SM_CHANNEL_TEST": str(folder),
        "SM_MODEL_DIR": str(folder),
        "SM_OUTPUT_DATA_DIR": str(folder),
    }
    if smp is not None:
        framework = {
            "sagemaker_mpi_enabled": True,
            "sagemaker_mpi_num_of_processes_per_host": ranks,
        }
        # Transformers looks for the key `partitions`.
        variables["SM_HP_MP_PARAMETERS"] = json.dumps(
            {"partitions": smp.get("pipeline_parallel_degree", 1), **smp}
        )
    variables["SM_FRAMEWORK_PARAMS"] = json.dumps(framework)
    started = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if torchrun
        else []
    )
    command = [*started, str(script), *arguments]
    count = 1 if torchrun else ranks
    ends = run_program(count, command, variables=variables, folder=folder)
    assert not any(rank.status for rank in ends), _story(ends)
    return [
        float(number)
        for number in re.findall(r"\bLoss: ([0-9.]+(?:e-?\d+)?)", ends[0].out + ends[0].err)
    ]


def _story(results: list[Ended]) -> str:
    return "\n".join(
        f"rank {rank.rank}: status {rank.status}\n{rank.out}\n{rank.err}" for rank in results
    )


# --- Our own --------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", ["partial", "full"])
def test_a_convolution_net_trains_and_goes_on_from_its_checkpoint(
    saved: str, tmp_path: Path
) -> None:
    script, folder = SCRIPTS / "digits.py", str(tmp_path)
    smp = {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "interleaved"}
    first = run(script, "--folder", folder, f"--save-{saved}-model", smp=smp, folder=tmp_path)
    assert first[-1] < 0.5 * first[0]
    name = str(tmp_path / "digits.pt")
    second = run(
        script,
        f"--{saved}-checkpoint",
        name,
        "--amp",
        str(int(saved == "full")),
        smp=smp,
        folder=tmp_path,
    )
    assert max(second) < 0.5 * first[0]


def test_a_convolution_net_placed_by_hand_trains_on_two_replicas(tmp_path: Path) -> None:
    smp = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "auto_partition": False}
    losses = run(
        SCRIPTS / "digits.py", "--manual", "1", "--epochs", "3", ranks=4, smp=smp, folder=tmp_path
    )
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(("ranks", "count"), [(2, 10), (4, 5)], ids=["one-model", "two-replicas"])
def test_the_script_of_the_page_trains(ranks: int, count: int, tmp_path: Path) -> None:
    smp = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}
    losses = run(SCRIPTS / "page.py", ranks=ranks, smp=smp, folder=tmp_path)
    assert len(losses) == count
    assert losses[-1] < losses[0]


def test_a_language_model_trains_and_resumes_in_half_precision(tmp_path: Path) -> None:
    """Train in half precision; without `fp16` the script trains over tensor ranks, below.

    The convolution net resumes from a partial model.
    """
    script = SCRIPTS / "language.py"
    options = ["--pipeline_parallel_degree", "2", "--microbatches", "4", "--fp16", "1"]
    first = run(script, *options, smp=PIPELINE, folder=tmp_path)
    assert first[-1] < 0.8 * first[0]
    second = run(
        script, *options, "--max_steps", "4", "--resume", "full", smp=PIPELINE, folder=tmp_path
    )
    assert max(second) < 0.9 * first[0]
    assert (tmp_path / "newest").read_text() == "steps-24"


@pytest.mark.core
def test_a_language_model_trains_over_tensor_ranks(tmp_path: Path) -> None:
    losses = run(
        SCRIPTS / "language.py", "--tensor_parallel_degree", "2", smp=TENSOR, folder=tmp_path
    )
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("fp16", ["0", "1"])
def test_a_language_model_trains_and_resumes_with_sharded_data_parallelism(
    fp16: str, tmp_path: Path
) -> None:
    options = ["--sharded_data_parallel_degree", "2", "--microbatches", "2", "--fp16", fp16]
    first = run(
        SCRIPTS / "language.py", *options, smp=SHARDED, folder=tmp_path, torchrun=fp16 == "0"
    )
    assert first[-1] < 0.8 * first[0]
    kind = "full" if fp16 == "1" else "partial"
    second = run(
        SCRIPTS / "language.py",
        *options,
        "--max_steps",
        "4",
        "--resume",
        kind,
        smp=SHARDED,
        folder=tmp_path,
    )
    assert max(second) < 0.9 * first[0]


@pytest.mark.core
def test_smddp_without_an_import(tmp_path: Path) -> None:
    model = str(tmp_path / "model.pt")
    first = run(SCRIPTS / "data_parallel.py", "--model", model, smp=None, folder=tmp_path)
    assert first[-1] < 0.5 * first[0]
    second = run(SCRIPTS / "data_parallel.py", "--model", model, smp=None, folder=tmp_path)
    assert second[0] < 0.5 * first[0]


@pytest.mark.parametrize("smp", [PIPELINE, None], ids=["smp", "smddp"])
def test_hugging_face_trainer(smp: Mapping[str, object] | None, tmp_path: Path) -> None:
    options = ["--output_dir", str(tmp_path / "out")]
    first = run(SCRIPTS / "trainer.py", *options, "--max_steps", "8", smp=smp, folder=tmp_path)
    assert len(first) == 8
    assert first[-1] < 0.9 * first[0]
    resumed = run(
        SCRIPTS / "trainer.py", *options, "--max_steps", "10", "--resume", smp=smp, folder=tmp_path
    )
    assert resumed[:8] == first
    assert len(resumed) == 10
    assert max(resumed[8:]) < 0.9 * first[0]


# --- Public ones ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Public:
    """A public script: its source, and its arguments for a small run.

    Attributes:
        repository: On GitHub.
        revision: Its commit.
        path: The script's path in the repository.
        ranks: How many.
        smp: The configuration; None: a job of smddp.
        arguments: Of the script.
        again: Arguments of a second run in the same folder, which goes on from the checkpoint of
            the first one.
    """

    repository: str
    revision: str
    path: str
    smp: Mapping[str, object] | None
    arguments: str
    again: str = ""
    ranks: int = 2

    @property
    def file(self) -> Path | None:
        """The script, in the folder that the variable names."""
        folder = os.environ.get(PUBLIC)
        return (
            Path(folder, f"{self.repository.partition('/')[2]}@{self.revision}", self.path)
            if folder
            else None
        )


DLC, ASE = "aws/deep-learning-containers", "aws/amazon-sagemaker-examples"
RESOURCES = "test/sagemaker_tests/pytorch/training/resources"
EXAMPLES = "training/distributed_training/pytorch/model_parallel"
MNIST = "--data-dir x --epochs 1 --log-interval 4 --lr 1.0"
SMALL = (
    "--zipped_data 0 --train_batch_size 8 --max_steps 12 --hidden_width 32 --num_layers 4"
    " --num_heads 2 --vocab_size 97 --max_context_width 32 --lr 0.01 --warmup 0 --epochs 90"
    " --checkpoint-dir checkpoints"
)
HALVES = f"{SMALL} --pipeline_parallel_degree 2 --tensor_parallel_degree 1 --microbatches 4"
WHOLE = f"{SMALL} --sharded_data_parallel_degree 2 --microbatches 2"
LAYERS = f"{HALVES} --use_distributed_transformer 0"

PUBLIC_SCRIPTS = {
    "mnist partial": Public(
        DLC, "bf6b026b993e", f"{RESOURCES}/mnist/smmodelparallel_pt_mnist.py", PIPELINE,
        f"{MNIST} --save-partial-model", f"{MNIST} --partial-checkpoint ./pt_mnist_checkpoint.pt",
    ),
    "mnist full, amp": Public(
        DLC, "bf6b026b993e", f"{RESOURCES}/mnist/smmodelparallel_pt_mnist.py", PIPELINE,
        f"{MNIST} --save-full-model", f"{MNIST} --full-checkpoint ./pt_mnist_checkpoint.pt --amp 1",
    ),
    "mnist smddp": Public(
        DLC, "bf6b026b993e", f"{RESOURCES}/mnist/smdataparallel_mnist.py", None,
        "--data-path x --epochs 3 --log-interval 1", ranks=8,
    ),
    "gpt2": Public(
        DLC, "bf6b026b993e", f"{RESOURCES}/gpt2/train_gpt_simple.py", PIPELINE,
        f"{HALVES} --checkpoint_freq 6", f"{HALVES} --max_steps 18 --load_partial 1",
    ),
    "gpt2 fp16": Public(
        DLC, "bf6b026b993e", f"{RESOURCES}/gpt2/train_gpt_simple.py", PIPELINE,
        f"{HALVES} --fp16 1 --max_steps 40 --checkpoint_freq 20 --save_final_full_model 1"
        " --validation_freq 20",
        f"{HALVES} --fp16 1 --max_steps 44 --load_partial 1",
    ),
    "gpt2 train.py": Public(
        ASE, "653a1f4da", f"{EXAMPLES}/gpt2/train.py", PIPELINE,
        f"{LAYERS} --model_type gpt2",
    ),
    "bloom": Public(
        ASE, "653a1f4da", f"{EXAMPLES}/gpt2/train.py", PIPELINE,
        f"{LAYERS} --model_type bloom",
    ),
    "flan-t5": Public(
        ASE, "653a1f4da", f"{EXAMPLES}/flan-t5/train.py", PIPELINE,
        f"{LAYERS} --model_type flan_t5 --flash_attention 0",
    ),
    "gpt-neox": Public(ASE, "653a1f4da", f"{EXAMPLES}/gpt-neox/train.py", PIPELINE, LAYERS),
    "gpt-neox tensor": Public(
        ASE, "653a1f4da", f"{EXAMPLES}/gpt-neox/train.py", TENSOR,
        f"{SMALL} --use_distributed_transformer 0 --tensor_parallel_degree 2",
    ),
    "gpt2 sharded": Public(
        ASE, "653a1f4da", f"{EXAMPLES}/gpt2/train.py", SHARDED,
        f"{WHOLE} --checkpoint_freq 6 --bf16 1",
        f"{WHOLE} --bf16 1 --max_steps 18 --load_partial 1",
    ),
    "gpt2 sharded, with its own full checkpoint": Public(
        ASE, "2cbfea648", f"{EXAMPLES}/gpt2/train_gpt_simple.py", SHARDED,
        f"{WHOLE} --checkpoint_freq 6 --save_final_full_model 1",
        f"{WHOLE} --max_steps 18 --load_partial 1",
    ),
    "gpt-neox sharded": Public(
        ASE, "653a1f4da", f"{EXAMPLES}/gpt-neox/train.py", SHARDED,
        f"{WHOLE} --use_distributed_transformer 0 --save_final_full_model 1",
    ),
    "flan-t5 sharded": Public(
        ASE, "653a1f4da", f"{EXAMPLES}/flan-t5/train.py", SHARDED,
        f"{WHOLE} --use_distributed_transformer 0 --model_type flan_t5 --flash_attention 0",
    ),
    "gpt-neo": Public(
        ASE, "8e973eccc", f"{EXAMPLES}/gpt-neo/train_gptneo_simple.py", PIPELINE, LAYERS,
    ),
    "gpt-j": Public(
        ASE, "471969099", f"{EXAMPLES}/gpt-j/train_gptj_simple.py", PIPELINE,
        f"{LAYERS} --hidden_width 128",
    ),
    "gpt2 custom": Public(
        ASE, "53dedee14", f"{EXAMPLES}/gpt2-custom/train_gpt_custom.py", PIPELINE, LAYERS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC_SCRIPTS)
def test_a_public_script_runs_unchanged(name: str, tmp_path: Path) -> None:
    script = PUBLIC_SCRIPTS[name]
    if script.file is None or not script.file.exists():
        pytest.skip(
            f"NOT TESTED: {script.file or f'{PUBLIC} is not set'};"
            " smdistributed/README.md says how to get it"
        )
    lines = [[(start * 7 + step) % 97 for step in range(33)] for start in range(64)]
    text = "".join(
        json.dumps({"input_ids": line, "attention_mask": [1] * 33}) + "\n" for line in lines
    )
    (tmp_path / "train_1.json").write_text(text)
    first = run(
        script.file, *script.arguments.split(), ranks=script.ranks, smp=script.smp, folder=tmp_path
    )
    assert first[-1] < 0.99 * first[0]
    if script.again:
        second = run(
            script.file, *script.again.split(), ranks=script.ranks, smp=script.smp, folder=tmp_path
        )
        assert second[0] < 0.95 * first[0]
