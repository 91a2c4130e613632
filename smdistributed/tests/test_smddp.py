"""smddp on CPUs: the backend, the interface before 1.4, the programs, Hugging Face.

Under mpirun and torchrun.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranks import free_port, run_program, run_ranks
from smdistributed.dataparallel.torch import backend

BIN = Path(sys.executable).parent

EMULATED = {"SMP_CPU_EMULATION": "1"}

SMDDP_JOB = {
    "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_distributed_dataparallel_enabled": True})
}

QUIET = """
import os, sys

before = dict(os.environ)
import torch
import torch.distributed as dist

packages = ("smdistributed", "trainworks_smdistributed")
ours = sorted(name for name in sys.modules if name.startswith(packages))
registered = dist.is_available() and "smddp" in dist.Backend.backend_list
print(json.dumps([registered, ours, dict(os.environ) == before]))
"""


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    argv = [sys.executable, "-c", "import json\n" + script]
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=300, env=environment
    )


def test_a_bare_import_of_torch_knows_the_backend_and_changes_nothing_else() -> None:
    done = run(QUIET, OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_LOCAL_RANK="1")
    assert (done.returncode, done.stderr) == (0, "")
    is_known, modules, unchanged = json.loads(done.stdout)
    assert is_known
    assert unchanged
    assert modules == [
        "smdistributed",
        "smdistributed.dataparallel",
        "smdistributed.dataparallel.torch",
        "smdistributed.dataparallel.torch.backend",
        "trainworks_smdistributed",
        "trainworks_smdistributed.environment",
    ]


def test_a_bare_import_of_torch_sets_the_ranks_in_a_job_of_smddp() -> None:
    script = (
        "import os, torch\nprint(os.environ['LOCAL_RANK'], os.environ['SMDATAPARALLEL_LOCAL_RANK'])"
    )
    done = run(script, OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_LOCAL_RANK="1", **SMDDP_JOB)
    assert (done.returncode, done.stdout) == (0, "1 1\n"), done.stderr


def test_which_parameters_are_those_of_a_job() -> None:
    assert backend._is_job(SMDDP_JOB["SM_FRAMEWORK_PARAMS"])
    for text in ("", "{", "[]", "null", "1", "{}", '{"sagemaker_mpi_enabled": true}'):
        assert not backend._is_job(text), text


def test_an_error_does_not_break_import_torch() -> None:
    done = run(
        "import torch.distributed as dist\n"
        "dist.Backend.backend_list = None\n"
        "from smdistributed.dataparallel.torch.backend import autoload\n"
        "autoload()",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("smdistributed: torch.distributed has no backend smddp: ")


def test_the_import_registers_once_however_often_it_happens() -> None:
    script = """
import importlib, os, sys
import torch.distributed as dist
assert "smddp" not in dist.Backend.backend_list
import smdistributed.dataparallel.torch.torch_smddp as first
importlib.reload(first)
for name in [name for name in sys.modules if name.startswith("smdistributed")]:
    del sys.modules[name]
import smdistributed.dataparallel.torch.torch_smddp
assert dist.Backend.backend_list.count("smddp") == 1
assert os.environ["LOCAL_RANK"] == os.environ["SMDATAPARALLEL_LOCAL_RANK"] == "1"
assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "8")
assert os.environ["LOCAL_WORLD_SIZE"] == os.environ["SMDATAPARALLEL_LOCAL_SIZE"] == "4"
import smdistributed.dataparallel, smdistributed.dataparallel.exceptions as exceptions
assert smdistributed.dataparallel.__version__ >= "2"
assert [name for name in dir(exceptions) if isinstance(getattr(exceptions, name), type)]
"""
    done = run(
        script,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        RANK="3",
        OMPI_COMM_WORLD_RANK="7",
        OMPI_COMM_WORLD_SIZE="8",
        OMPI_COMM_WORLD_LOCAL_RANK="1",
        OMPI_COMM_WORLD_LOCAL_SIZE="4",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "smdistributed.dataparallel.torch.torch_smddp",
        "smdistributed.dataparallel.torch.distributed",
        "smdistributed.dataparallel.torch.backend, torch",
        "smdistributed.modelparallel.torch",
        "trainworks_smdistributed.emulation",
    ],
)
def test_each_can_be_the_first_import_of_a_process(module: str) -> None:
    """torch looks for backends while such a module is being imported."""
    done = run(
        f"import {module}\nimport torch\nassert 'smddp' in torch.distributed.Backend.backend_list",
        **EMULATED,
    )
    assert (done.returncode, done.stderr) == (0, "")


def _data() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    return (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
        torch.randn(8, 4).double(),
    )


def _trained(model: nn.Module, rows: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(rows).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _wrapped() -> dict[str, list[float]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    dist.init_process_group(backend="smddp")
    assert dist.get_backend() == "smddp"
    me = dist.get_rank()
    model, rows = _data()
    own = rows[me::2]
    losses = {"ddp": _trained(DistributedDataParallel(model), own)}

    model, _ = _data()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    losses["fsdp2"] = _trained(model, own)

    pair, single, other = (
        dist.new_group([0, 1]),
        dist.new_group([1]),
        dist.new_group(backend="gloo"),
    )
    assert (dist.get_backend(pair), dist.get_backend(other)) == ("smddp", "gloo")
    for group in (None, pair, other):
        total = torch.tensor([me + 1.0])
        dist.all_reduce(total, group=group)
        assert total.item() == 3.0
    if me == 1:
        dist.barrier(single)
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": 0}, {"rank": 1}]
    parts = [torch.zeros(2) for _ in range(2)]
    dist.all_gather(parts, torch.full((2,), float(me)))
    assert torch.stack(parts).tolist() == [[0, 0], [1, 1]]
    scattered = torch.zeros(1)
    dist.reduce_scatter(scattered, [torch.tensor([1.0]), torch.tensor([2.0])])
    assert scattered.item() == (me + 1) * 2
    dist.barrier()
    dist.destroy_process_group()
    return losses


def _second_backend() -> None:
    import torch.distributed as dist

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    dist.init_process_group("gloo")
    second = dist.new_group(backend="smddp")
    total = torch.tensor([1.0])
    dist.all_reduce(total, group=second)
    assert total.item() == 2.0
    dist.destroy_process_group()


def _before_version_1_4() -> list[float]:
    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel import DistributedDataParallel as Same
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

    assert Same is DistributedDataParallel
    assert dist.is_available()
    assert not dist.is_initialized()
    dist.init_process_group("nccl")
    dist.init_process_group(backend="nccl")  # does nothing
    assert dist.is_initialized()
    me = dist.get_rank()
    assert (me, dist.get_local_rank(), dist.get_world_size()) == (me, me, 2)
    tensor = torch.tensor([float(me)])
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    assert tensor.item() == 1
    dist.broadcast(tensor := torch.tensor([me]), 1)
    assert tensor.item() == 1
    dist.reduce(tensor := torch.tensor([1]), 0)
    assert tensor.item() == (2 if me == 0 else 1)
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(parts, torch.tensor([float(me)]))
    assert torch.cat(parts).tolist() == [0, 1]
    output = torch.zeros(2)
    dist.all_to_all_single(output, torch.tensor([10.0 * me, 10.0 * me + 1]))
    assert output.tolist() == [me, 10 + me]
    dist.barrier()
    model, rows = _data()
    wrapped = DistributedDataParallel(model, broadcast_buffers=False, bucket_cap_mb=1)
    with wrapped.no_sync():
        wrapped(rows[: me + 1]).sum().backward()
    local = [parameter.grad for parameter in model.parameters()]
    sums = [torch.stack([gradient]) for gradient in local if gradient is not None]
    before = sums[0].clone()
    dist.all_reduce(sums[0])
    assert not torch.equal(before * 2, sums[0])  # no_sync left them apart
    wrapped.zero_grad()
    return _trained(wrapped, rows[me::2])


def test_training_is_that_of_one_process() -> None:
    model, rows = _data()
    expected = _trained(model, rows)
    results = run_ranks(2, _wrapped)
    for name in ("ddp", "fsdp2"):
        both = torch.tensor([result[name] for result in results]).mean(0)
        assert torch.allclose(both, torch.tensor(expected), rtol=1e-6, atol=0), name


def test_it_is_a_second_backend_as_well() -> None:
    run_ranks(2, _second_backend)


def test_the_interface_before_1_4() -> None:
    model, rows = _data()
    both = torch.tensor(run_ranks(2, _before_version_1_4)).mean(0)
    assert torch.allclose(both, torch.tensor(_trained(model, rows)), rtol=1e-6, atol=0)


# Imports nothing of smddp, and is started by programs that set the variables.
JOB = """
import sys
import torch, torch.distributed as dist
dist.init_process_group(backend="smddp")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()} {sys.argv[1:]}")
dist.destroy_process_group()
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def test_smddprun_under_mpirun(job: Path) -> None:
    if not (BIN / "mpirun").exists():
        pytest.skip(
            "NOT TESTED: no mpirun beside this Python; tools/set-up-peers smdistributed installs it"
        )
    mpirun = [
        str(BIN / "mpirun"),
        "--allow-run-as-root",
        "--oversubscribe",
        "-np",
        "2",
        "--mca",
        "btl",
        "self,sm,tcp",
    ]
    # The rendezvous is smddprun's, but for the port, which two runs of this test must not share.
    rank = [str(BIN / "smddprun"), sys.executable, "-m", "mpi4py", str(job), "-v", "--lr"]
    argv = [*mpirun, "-x", f"MASTER_PORT={free_port()}", *rank]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "RANK")
    }
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout) == [f"rank {rank} of 2: 3.0 ['-v', '--lr']" for rank in (0, 1)]


def lines_of(text: str) -> list[str]:
    """Return the lines that the ranks printed. They write into one pipe: their lines may run into
    each other.
    """
    return sorted(re.findall(r"rank \d of 2: 3.0 \[.*?\]", text))


def test_torchrun(job: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(job),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout) == [f"rank {rank} of 2: 3.0 []" for rank in (0, 1)]


def test_smddpsinglenode_starts_one_rank_for_each_gpu(job: Path) -> None:
    argv = [
        sys.executable,
        "-c",
        "from smdistributed.dataparallel.programs import smddpsinglenode; smddpsinglenode()",
    ]
    done = subprocess.run(
        [*argv, "-x", "LOCAL_WORLD_SIZE=2", sys.executable, job, "-x"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **EMULATED, "LOCAL_WORLD_SIZE": "2"},
    )
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout) == [f"rank {rank} of 2: 3.0 ['-x']" for rank in (0, 1)]


PRINT = "import os, sys; print(os.environ.get('MASTER_ADDR'), os.environ.get('RANK'), sys.argv[1:])"


@pytest.mark.parametrize(
    ("program", "options", "variables", "out"),
    [
        ("smddprun", [], {}, "127.0.0.1 None ['-i', 'x']"),
        ("smddprun", [], {"MASTER_ADDR": "algo-1"}, "algo-1 None ['-i', 'x']"),
        ("smddprun", [], {"SMDATAPARALLEL_SERVER_ADDR": "algo-2"}, "algo-2 None ['-i', 'x']"),
        ("smddprun", [], {"OMPI_COMM_WORLD_RANK": "0", "RANK": "4"}, "127.0.0.1 4 ['-i', 'x']"),
        ("smddpmprun", ["-i", "ml.p4d.24xlarge", "--allow-bypass"], {}, "None None ['-i', 'x']"),
        ("smddpmprun", [], {"RANK": "1"}, "None 1 ['-i', 'x']"),
    ],
)
def test_a_program_becomes_its_command(
    program: str, options: list[str], variables: dict[str, str], out: str
) -> None:
    done = of_program(program, *options, sys.executable, "-c", PRINT, "-i", "x", **variables)
    assert (done.returncode, done.stdout.strip()) == (0, out), done.stderr


def test_what_a_program_refuses() -> None:
    ranks = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    for arguments, variables, status, text in (
        ((), {}, 2, "there is no command to run"),
        (
            ("/no/such/program",),
            {},
            127,
            "smddprun: cannot run /no/such/program: No such file or directory",
        ),
        (("true",), {"RANK": "one"}, 2, "the environment variable RANK='one' is not an integer"),
        (("true",), ranks, 2, "MASTER_ADDR is not set, and only 2 of the 4 ranks are on this host"),
    ):
        done = of_program("smddprun", *arguments, **variables)
        assert done.returncode == status, done.stderr
        assert text in done.stderr
        assert "Traceback" not in done.stderr
    assert of_program("smddprun", sys.executable, "-c", "raise SystemExit(7)").returncode == 7


def of_program(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept_variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MASTER_", "OMPI_", "RANK"))
    }
    argv = [str(BIN / program), *arguments]
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**kept_variables, **variables},
    )


# Steps that the Trainer and the Accelerator do by themselves in a job of smddp, on CPUs by
# emulation.
HUGGING_FACE = """
import os, sys
import torch, transformers
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

transformers.set_seed(1)
words = torch.arange(64).reshape(8, 8) % 16
data = [{"input_ids": row, "labels": row} for row in words]
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=16, n_positions=8))
arguments = TrainingArguments(
    sys.argv[1],
    max_steps=8,
    per_device_train_batch_size=2,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    learning_rate=0.02,
    disable_tqdm=True,
)
assert arguments.parallel_mode.value == "sagemaker_data_parallel", arguments.parallel_mode
assert arguments.world_size == 2
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
assert torch.distributed.get_backend() == "smddp"
assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
assert losses[-1] < losses[0] * 0.9, losses

accelerator = Accelerator()
assert accelerator.num_processes == 2 and accelerator.state.backend == "smddp"
model, optimizer = accelerator.prepare(
    torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1)
)
accelerator.backward(model(torch.ones(2, 2)).sum())
gathered = accelerator.gather(torch.tensor([accelerator.process_index]))
assert gathered.tolist() == [0, 1]
accelerator.end_training()
print("done")
"""


def test_the_trainer_and_the_accelerator_of_hugging_face(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(HUGGING_FACE)
    variables = {
        **EMULATED,
        **SMDDP_JOB,
        "ACCELERATE_USE_SAGEMAKER": "true",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for end in run_program(2, [str(script), str(tmp_path)], variables=variables):
        assert end.status == 0, end.err
        assert end.out.splitlines()[-1] == "done"


def train_and_destroy() -> str:
    import torch.distributed as dist

    from trainworks_smdistributed.environment import complete

    complete(os.environ)
    dist.init_process_group("smddp")
    model = torch.nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()
    return "trained"


def test_a_rank_that_destroyed_its_group_ends_though_a_wrapper_still_has_it() -> None:
    # The wrapper goes when the function returns.
    for _ in range(3):
        assert run_ranks(2, train_and_destroy) == ["trained", "trained"]
