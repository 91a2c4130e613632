"""Modules that run again in the backward pass: the same gradients, fewer kept
activations, on any partition.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from jobs import BY_HAND, forget, train_step
from ranks import RankError, run_ranks

WIDTH, SAMPLES, MICROBATCHES = 8, 8, 4


class Layer(nn.Module):
    """A layer with a random mask, which takes a tuple and counts its runs."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.runs = 0

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        self.runs += 1
        x, mask = pair
        return x + self.dropout(torch.tanh(self.linear(x))) * mask, mask


class Model(nn.Module):
    """Layers in a Sequential, and layers in a ModuleList."""

    def __init__(self, dropout: float, by_call: str | None = None) -> None:
        super().__init__()
        self.chain = nn.Sequential(*(Layer(dropout) for _ in range(5)))
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.by_call = by_call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from smdistributed.modelparallel.torch.patches.checkpoint import (
            checkpoint,
            checkpoint_sequential,
        )

        pair = (x, torch.full_like(x, 0.5))
        if self.by_call:
            pair = checkpoint_sequential(
                self.chain, pair, strategy=self.by_call, pack_args_as_tuple=True
            )
        else:
            pair = self.chain(pair)
        for layer in self.layers:
            pair = checkpoint(layer, pair) if self.by_call else layer(pair)
        loss: torch.Tensor = pair[0].pow(2).mean()
        return loss


def _cases(config: dict[str, Any], cuts: list[int]) -> dict[str, Any]:
    """Return gradients and runs of each way to checkpoint, in one process after
    another model was wrapped.
    """
    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    results = {}
    for case in ("none", "each", "contiguous", "group_2", "late", "call each", "call contiguous"):
        forget()  # the next case wraps its own
        torch.manual_seed(1)
        # The order in which microbatches arrive at a partition, and so their random numbers,
        # differs from step to step.
        call_name = case.removeprefix("call ") if case.startswith("call ") else None
        rate = 0.5 if smp.pp_size() == 1 else 0.0
        module = Model(
            rate,
            call_name,
        )
        for layer, part in zip([*module.chain, *module.layers], cuts, strict=True):
            smp.set_partition(layer, part)
        model = smp.DistributedModel(module)

        def check(module: Model = module, case: str = case) -> None:
            smp.set_activation_checkpointing(module.chain, strategy=case, pack_args_as_tuple=True)
            smp.set_activation_checkpointing(module.layers)

        if case in ("each", "contiguous", "group_2"):
            check()

        step = train_step(lambda model, x: model(x))
        x = torch.linspace(-1, 1, SAMPLES * WIDTH).view(SAMPLES, WIDTH)
        if case == "late":
            with torch.no_grad():
                torch.manual_seed(9)
                smp.step(lambda model, x: model(x))(model, x)
            check(case="group_2")
        for layer in module.modules():
            if isinstance(layer, Layer):
                layer.runs = 0
        torch.manual_seed(2)
        step(model, x)
        results[case] = {
            "gradients": {
                n: p.grad.numpy() for n, p in model.local_named_parameters() if p.grad is not None
            },
            "runs": {
                n: m.runs // MICROBATCHES
                for n, m in model.local_named_modules()
                if isinstance(m, Layer)
            },
        }
    return results


@pytest.mark.parametrize(
    ("ranks", "config", "cuts"),
    [
        (1, {"microbatches": MICROBATCHES}, [0] * 7),
        (2, {**BY_HAND, "microbatches": MICROBATCHES}, [0, 0, 0, 1, 1, 0, 1]),
    ],
    ids=["one", "two"],
)
def test_gradients_are_bitwise_those_without(
    ranks: int, config: dict[str, Any], cuts: list[int]
) -> None:
    for rank, result in enumerate(run_ranks(ranks, _cases, config, cuts)):
        plain = result.pop("none")
        mine = [index for index, part in enumerate(cuts) if part == rank]
        names = [f"chain.{index}" if index < 5 else f"layers.{index - 5}" for index in mine]
        assert plain["runs"] == dict.fromkeys(names, 1)
        for case, case_result in result.items():
            assert case_result["runs"] == dict.fromkeys(names, 2), (
                case
            )  # each runs again, exactly once
            assert case_result["gradients"].keys() == plain["gradients"].keys()
            for name, value in plain["gradients"].items():
                assert (case_result["gradients"][name] == value).all(), (case, name)


def _kept_bytes() -> dict[str, int]:
    """Return the bytes that a forward pass keeps for the backward pass, for each strategy."""
    import smdistributed.modelparallel.torch as smp

    smp.init({"offload_activations": True})
    bytes_kept = {}
    for strategy in ("none", "each", "contiguous"):
        module = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4))
        )
        if strategy != "none":
            smp.set_activation_checkpointing(module, strategy=strategy)
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            if not isinstance(tensor, nn.Parameter):
                sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module(torch.randn(32, 64, requires_grad=True)).sum()
        bytes_kept[strategy] = sum(sizes.values())
    return bytes_kept


def test_fewer_activations_are_kept() -> None:
    kept_bytes = run_ranks(1, _kept_bytes)[0]
    activation_bytes = 32 * 64 * 4
    assert kept_bytes["none"] > 8 * activation_bytes
    assert kept_bytes["each"] < 6 * activation_bytes
    assert kept_bytes["contiguous"] < 2.5 * activation_bytes


def _split(automatic: bool) -> list[str]:
    import smdistributed.modelparallel.torch as smp

    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "auto_partition": automatic,
            "default_partition": 0,
            "microbatches": 2,
        }
    )
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    module = nn.Sequential(nn.Identity(), nn.Sequential(*layers))
    smp.set_partition(layers[2], 1)
    smp.set_activation_checkpointing(module)
    model = smp.DistributedModel(module)

    step = train_step(lambda model, x: model(x).sum())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, torch.ones(4, WIDTH))
        step(model, torch.ones(4, WIDTH))
    assert all(p.grad is not None for p in model.local_parameters())
    return [str(w.message) for w in caught if "checkpointing" in str(w.message)]


def test_a_module_on_two_partitions() -> None:
    first, second = run_ranks(2, _split, True)
    assert len(first) + len(second) == 1
    assert "on partitions [0, 1], so its activations are kept" in (first + second)[0]
    with pytest.raises(
        RankError, match=r"checkpointing of 1: it is on partitions \[0, 1\]. Put it on one with"
    ):
        run_ranks(2, _split, False)


def _mistakes() -> list[str]:
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.patches.checkpoint import (
        checkpoint,
        checkpoint_sequential,
    )

    smp.init({})
    errors = []
    for call in (
        lambda: smp.set_activation_checkpointing(nn.Linear(2, 2), strategy="group_0"),
        lambda: smp.set_activation_checkpointing([nn.Linear(2, 2)]),  # type: ignore[arg-type]
        lambda: checkpoint(torch.tanh, torch.ones(2)),  # type: ignore[arg-type]
        lambda: checkpoint_sequential(nn.Linear(2, 2), torch.ones(2)),  # type: ignore[arg-type]
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        errors.append(str(caught.value))
    return errors


def test_mistakes() -> None:
    assert run_ranks(1, _mistakes)[0] == [
        "strategy must be 'each', 'contiguous' or 'group_N' with N of 1 or more, got 'group_0'",
        "set_activation_checkpointing needs a torch.nn.Module, got list",
        "checkpoint needs a torch.nn.Module, got builtin_function_or_method",
        "checkpoint_sequential needs a torch.nn.Sequential, got Linear",
    ]


# --- Why torch's checkpoint_wrapper is not used ---------------------------------------------------


def _wrapped_by_the_script(cuts: list[int]) -> dict[bool, dict[str, Any]]:
    """Return gradients of a pipeline whose script wraps layers with torch's own
    function, and without it.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    import smdistributed.modelparallel.torch as smp

    smp.init({**BY_HAND, "microbatches": MICROBATCHES})
    gradients = {}
    for wraps in (False, True):
        forget()
        torch.manual_seed(1)
        module = Model(0.0)
        for layer, part in zip([*module.chain, *module.layers], cuts, strict=True):
            smp.set_partition(layer, part)
        if wraps:
            module.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in module.layers)
        model = smp.DistributedModel(module)
        step = train_step(lambda model, x: model(x))
        step(model, torch.linspace(-1, 1, SAMPLES * WIDTH).view(SAMPLES, WIDTH))
        gradients[wraps] = {
            n: p.grad.numpy() for n, p in model.local_named_parameters() if p.grad is not None
        }
    return gradients


def test_a_script_may_wrap_with_torch() -> None:
    for with_and_without in run_ranks(2, _wrapped_by_the_script, [0, 0, 0, 1, 1, 0, 1]):
        plain, wrapped = with_and_without[False], with_and_without[True]
        unwrapped = {
            name.replace("_checkpoint_wrapped_module.", ""): value
            for name, value in wrapped.items()
        }
        assert unwrapped.keys() == plain.keys()
        assert all((unwrapped[name] == value).all() for name, value in plain.items())


def _seen_by_hooks(call: Callable[[], Any]) -> set[int]:
    """Return the addresses of the tensors that hooks of saved tensors see while
    something is called.
    """
    addresses: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        addresses.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        call()
    return addresses


def test_what_the_wrapper_of_torch_does_otherwise() -> None:
    """Each of these would show in a script: so `set_activation_checkpointing` is not made of it."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from smdistributed.modelparallel.torch.pipeline import recompute

    layer = Layer(0.0)
    wrapper = checkpoint_wrapper(layer)
    # smp takes a module, before or after the model was made: it stays where it
    # is, with its class and its names.
    assert not isinstance(wrapper, Layer)
    assert "_checkpoint_wrapped_module.linear" in dict(wrapper.named_modules())
    # `offload_activations`: the hooks that move kept tensors to the host see those in a tuple only
    # with ours.
    pair = (torch.randn(4, WIDTH, requires_grad=True), torch.ones(4, WIDTH))
    again = recompute.Recomputation(preserve_rng_state=True, offload=False)
    ours = _seen_by_hooks(lambda: again.call(layer, (pair,), {}))
    of_torch = _seen_by_hooks(lambda: wrapper(pair))
    inputs = {tensor.data_ptr() for tensor in pair}
    assert inputs <= ours
    assert not inputs & of_torch
    # A layer of Hugging Face gets its cache once: torch's second run writes into it again.
    cache_with_ours: list[bool] = []
    cache_with_torch: list[bool] = []

    class WithCache(nn.Module):
        def forward(
            self, x: torch.Tensor, past_key_values: list[bool] | None = None
        ) -> torch.Tensor:
            if past_key_values is not None:
                past_key_values.append(True)
            return torch.tanh(x)

    x = torch.ones(2, requires_grad=True)
    again.call(WithCache(), (x,), {"past_key_values": cache_with_ours}).sum().backward()
    checkpoint_wrapper(WithCache())(x, past_key_values=cache_with_torch).sum().backward()
    assert len(cache_with_ours) <= 1 < len(cache_with_torch)
