"""Test that programs of other authors train as in one process, or end with a sentence that gives
advice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import strangers
from jobs import BY_HAND, forget
from ranks import run_ranks
from strangers import MICROBATCHES, PROGRAMS, Job

REFUSED = {
    "teacher of two partitions in a list": "is on another partition, and was written in place",
    "result that is written late": "keeps what it returned, and its caller wrote to that",
}
"""Programs that are refused, and the words of the error."""


class PlainModel(nn.Module):
    """A model in one process."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / MICROBATCHES).backward()  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


class Plain(Job):
    """A job of one process, which takes one microbatch after another."""

    def wrap(self, model: nn.Module, remote: tuple[str, ...]) -> Any:  # noqa: ARG002
        return PlainModel(model)

    def optimizer(self, optimizer: Any) -> Any:
        return optimizer

    def step(self, function: Callable[..., Any]) -> Callable[..., list[float]]:
        def run(model: Any, *arguments: Any) -> list[float]:
            chunks = [
                argument.chunk(MICROBATCHES) if isinstance(argument, torch.Tensor) else None
                for argument in arguments
            ]
            losses = []
            for number in range(MICROBATCHES):
                parts = [
                    g if c is None else c[number] for g, c in zip(arguments, chunks, strict=True)
                ]
                losses.append(float(function(model, *parts)))
            return losses

        return run


class Partitioned(Job):
    """A rank of smp."""

    def wrap(self, model: nn.Module, remote: tuple[str, ...]) -> Any:
        import smdistributed.modelparallel.torch as smp

        for name in remote:
            smp.set_partition(model.get_submodule(name), 1)
        return smp.DistributedModel(model)

    def optimizer(self, optimizer: Any) -> Any:
        import smdistributed.modelparallel.torch as smp

        return smp.DistributedOptimizer(optimizer)

    def step(self, function: Callable[..., Any]) -> Callable[..., list[float]]:
        import smdistributed.modelparallel.torch as smp

        decorated: Any = smp.step(function)

        def run(model: Any, *arguments: Any) -> list[float]:
            return [float(output) for output in decorated(model, *arguments).outputs]

        return run


def restart() -> None:
    """Put back the state that programs keep outside of their models."""
    strangers.CountsInClass.calls = 0
    strangers.Hub.get("train").scalars["scale"] = 1.0
    strangers.LOSSES.clear()
    strangers.table.cache_clear()


def play(job: Job, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run a program; return the numbers of its loop, and the model after it."""
    restart()
    torch.manual_seed(0)
    program = PROGRAMS[name]
    model = job.wrap(program.make().double(), program.remote)
    numbers = program.loop(job, model)
    return numbers, model.state_dict()


def differences(names: list[str]) -> dict[str, tuple[float, str]]:
    """Return for each program how far it is from one process, and the error if there was one."""
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.exceptions import StepError

    smp.init({**BY_HAND, "microbatches": MICROBATCHES})
    deviations = {}
    for name in names:
        numbers, state = play(Plain(), name)
        try:
            mine, states = play(Partitioned(), name)
        except StepError as error:
            deviations[name] = (0.0, str(error))
        else:
            assert len(mine) == len(numbers)
            assert states.keys() == state.keys()
            off = [abs(one - other) for one, other in zip(mine, numbers, strict=True)]
            off += [
                float((states[key].double() - state[key].double()).abs().max()) for key in state
            ]
            deviations[name] = (max(off), "")
        forget()
        smp.barrier()
    return deviations


def test_programs_of_others_equal_one_process_or_are_refused() -> None:
    for rank, results in enumerate(run_ranks(2, differences, list(PROGRAMS))):
        for name, (off, error) in results.items():
            assert off <= 1e-9, f"{name} on rank {rank}: {off}"
            assert bool(error) == (name in REFUSED), f"{name} on rank {rank}: {error}"
            assert REFUSED.get(name, "") in error, f"{name} on rank {rank}: {error}"
