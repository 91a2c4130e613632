"""docs/smdistributed.md, "From torch.sagemaker to FSDP2": every line of the
table is run, on two ranks with gloo.

A line without a program is a failure, and so is a program without a line. A program has every name
that the code of its line has: so a line cannot promise code that was not run.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks

# A module of this name: its own list of names lacks some that it documents.
checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")

PAGE = Path(__file__).parents[2] / "docs" / "smdistributed.md"
HEADING = "## From torch.sagemaker to FSDP2"
RANKS = 2
WIDTH = 8

# A CPU has no `torch.cuda`. The two other words are the subject of the line, not a call that it
# recommends.
NOT_RUN = {"cuda", "LOCAL_RANK", "set_device", "world", "N", "nccl"}
NOTHING_TO_RUN = {
    "`expert_parallel_degree`, `MoEConfig`": "PyTorch itself has nothing",
    "`activation_loading_horizon`, `fsdp_cache_flush_warnings`, `allow_empty_shards`": (
        "PyTorch needs nothing"
    ),
}
PROGRAMS: dict[str, Callable[[], None]] = {}


def line(first_cell: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Name the line of the table that a program runs."""

    def note(program: Callable[[], None]) -> Callable[[], None]:
        PROGRAMS[first_cell] = program
        return program

    return note


def table() -> dict[str, str]:
    """Return the lines of the page's table: the feature of smp's second version, and PyTorch's."""
    section = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("|")]
    return {row[0]: row[1] for row in rows[2:]}


def names(cell: str) -> set[str]:
    """Return the names in the code of a cell."""
    names_found: set[str] = set()
    for code in re.findall(r"`([^`]+)`", cell):
        names_found |= set(re.findall(r"[A-Za-z_]\w*", code))
    return names_found - NOT_RUN


class Layers(nn.Module):
    """A model with repeated layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch() -> torch.Tensor:
    """Return the same batch on every rank."""
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def sharded(**options: Any) -> Layers:
    """Return a model that FSDP2 has sharded."""
    from torch.distributed.fsdp import fully_shard

    model = Layers()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def same_as_one_process(model: nn.Module, tolerance: float = 1e-6) -> None:
    """Compare a model's output and gradients with those of one process."""
    from torch.distributed.tensor import DTensor

    plain = Layers()
    expected, output = plain(batch()), model(batch())
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=0)
    expected.sum().backward()
    output.float().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        assert theirs.grad is not None
        torch.testing.assert_close(
            mine.grad.full_tensor().float(), theirs.grad, atol=10 * tolerance, rtol=0
        )


# --- The lines ------------------------------------------------------------------------------------


@line("`tsm.init()`")
def start() -> None:
    """Do the steps of every program before its own."""
    assert torch.distributed.init_process_group is dist.init_process_group
    assert dist.is_initialized()


@line("`tsm.state.rank`, `.world_size`, `.local_rank`")
def ranks() -> None:
    assert dist.get_world_size() == RANKS
    assert dist.get_rank() in range(RANKS)


@line("`hybrid_shard_degree` N")
def hybrid() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS // 1, 1), mesh_dim_names=("replicate", "shard"))
    same_as_one_process(sharded(mesh=mesh))


@line("`tsm.transform(model)` and `FSDP(model, ...)`")
def shard() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (RANKS,))
    model = Layers()
    layers = model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    same_as_one_process(model)
    mine = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    assert mine == sum(p.numel() for p in Layers().parameters()) // RANKS


@line("`tensor_parallel_degree`")
def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    layer = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    plain = copy.deepcopy(layer)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(layer, mesh["tp"], plan)
    fully_shard(layer, mesh=mesh["dp"])
    torch.testing.assert_close(layer(batch()), plain(batch()))


@line("`context_parallel_degree`")
def context_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    full_tensors = [tensor.clone() for tensor in (q, k, v)]
    with (
        pytest.raises(ValueError, match="seq_dims"),
        context_parallel(mesh["cp"], buffers=[q, k, v]),
    ):
        pass
    with context_parallel(mesh["cp"], buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        assert [tensor.shape[2] for tensor in (q, k, v)] == [4, 4, 4]
    for tensor, before in zip((q, k, v), full_tensors, strict=True):
        torch.testing.assert_close(tensor, before)


@line("`FSDP(..., mixed_precision=MixedPrecision(...))`")
def mixed_precision() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Layers()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert model(batch()).dtype == torch.bfloat16
    same_as_one_process(model, tolerance=0.02)


@line("`sharding_strategy=FULL_SHARD`, `HYBRID_SHARD`")
def full_shard() -> None:
    same_as_one_process(sharded(reshard_after_forward=True))


@line("`sharding_strategy=SHARD_GRAD_OP`")
def shard_gradients() -> None:
    model = sharded(reshard_after_forward=False)
    same_as_one_process(model)


@line("`DelayedParamIniter` of `torch.sagemaker.delayed_param`")
def delayed() -> None:
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = Layers()
    fully_shard(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)  # values that may be in memory
    for module in model.modules():
        if isinstance(module, nn.Linear):  # of this model no other class has it
            module.reset_parameters()
    assert all(parameter.full_tensor().isfinite().all() for parameter in model.parameters())  # type: ignore[attr-defined]
    model(batch()).sum().backward()


@line("`clip_grad_norm_(model, norm)` of `torch.sagemaker.grad_norm`")
def clip() -> None:
    model, plain = sharded(), Layers()
    norm = 0.01
    for model_or_plain in (model, plain):
        model_or_plain(batch()).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), norm)
    norm_found = torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    torch.testing.assert_close(norm_found.full_tensor(), expected)  # type: ignore[attr-defined]


@line("`sm_activation_offloading`")
def offload() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

    model = Layers()
    model.layers = nn.ModuleList(offload_wrapper(layer) for layer in model.layers)
    plain = Layers()
    for model_or_plain in (model, plain):
        model_or_plain(batch()).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@line("`async_save`, `save` of `torch.sagemaker.distributed.checkpoint.state_dict_saver`")
def save() -> None:
    _save_and_load(checkpoint.save)
    _save_and_load(checkpoint.async_save)  # `torch.distributed.checkpoint`


@line("`maybe_finalize_async_calls`")
def finish() -> None:
    _save_and_load(lambda *values, **options: checkpoint.async_save(*values, **options).result())


@line("`load` of `...checkpoint.state_dict_loader`")
def load() -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    _save_and_load(checkpoint.save)  # it reads with `load` of `torch.distributed.checkpoint`
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters())
    model(batch()).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    other = sharded()
    set_state_dict(
        other,
        torch.optim.Adam(other.parameters()),
        model_state_dict=weights,
        optim_state_dict=moments,
    )
    torch.testing.assert_close(other(batch()), model(batch()))


@line("a full checkpoint for Hugging Face")
def full_checkpoint() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = sharded()
    full = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    expected = Layers().state_dict() if dist.get_rank() == 0 else {}
    assert full.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(full[name], value)


@line("`FlashSelfAttention`, `LlamaFlashAttention`")
def attention() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    options |= {"vocab_size": 16, "intermediate_size": 16, "attn_implementation": "sdpa"}
    config = LlamaConfig(**options)
    assert LlamaForCausalLM(config).config._attn_implementation == "sdpa"
    q = torch.randn(1, 2, 8, 4)
    assert torch.nn.functional.scaled_dot_product_attention(q, q, q).shape == q.shape


@line("the backend `smddp`")
def backend() -> None:
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    group = dist.new_group(backend="smddp")
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    assert value.item() == RANKS


def _save_and_load(write: Callable[..., Any]) -> None:
    """Write a checkpoint into a folder that all ranks share, and read it into another model."""
    names_of_folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names_of_folders)
    (folder,) = names_of_folders
    model = sharded()
    future = write(model.state_dict(), checkpoint_id=folder)
    if isinstance(future, Future):
        future.result()
    other = sharded()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    torch.testing.assert_close(other(batch()), model(batch()))


# --- The tests ------------------------------------------------------------------------------------


def _run(first_cells: list[str]) -> list[str]:
    """Run programs on a rank, and return those that ended."""
    os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]  # torchrun's name for it
    dist.init_process_group("gloo")
    cells = []
    for cell in first_cells:
        try:
            PROGRAMS[cell]()
        except Exception as error:
            raise AssertionError(f"the line of {cell}") from error
        cells.append(cell)
    dist.destroy_process_group()
    return cells


def test_every_line_is_run_and_every_program_has_a_line() -> None:
    assert set(table()) == set(PROGRAMS) | set(NOTHING_TO_RUN)


@pytest.mark.parametrize("cell", PROGRAMS)
def test_a_program_has_the_names_of_its_line(cell: str) -> None:
    assert (
        names(table()[cell]) - set(re.findall(r"\w+", inspect.getsource(PROGRAMS[cell]))) == set()
    )


def test_the_lines_run_on_two_ranks() -> None:
    cells = list(PROGRAMS)
    assert run_ranks(RANKS, _run, cells, variables={"WORLD_SIZE": str(RANKS)}) == [cells] * RANKS
