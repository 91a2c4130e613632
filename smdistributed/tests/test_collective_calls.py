"""A call that only some ranks make ends the job, and its text names the ranks and the calls."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jobs import BY_HAND, error_of
from ranks import _FORKS, free_port, run_ranks
from smdistributed.modelparallel.torch.job.collective_calls import Call, Report, first_difference
from smdistributed.modelparallel.torch.transport import failure_watch
from test_faults import as_process
from trainworks_testing.clock import PATIENCE

MODEL = "MP_GROUP/0"
WORLD = "WORLD/0"


def report(waits_in: Call | None = None, **names: list[str]) -> Report:
    """Return the report of a rank that has made the given calls of both groups."""
    calls_of_group = {MODEL: names.get("model", []), WORLD: names.get("world", [])}
    return Report(
        waits_in, {group: len(calls) for group, calls in calls_of_group.items()}, calls_of_group
    )


def in_model(number: int, name: str) -> Call:
    return Call(MODEL, number, name)


EQUAL = {
    "the same calls": [report(model=["step", "step"]), report(model=["step", "step"])],
    "one rank is a call further": [report(model=["step", "state_dict"]), report(model=["step"])],
    "one is in a call and the other is not yet": [
        report(in_model(1, "step"), model=["step"]),
        report(),
    ],
    "ranks of two models": [
        Report(Call("MP_GROUP/0", 1, "step"), {"MP_GROUP/0": 1}, {"MP_GROUP/0": ["step"]}),
        Report(Call("MP_GROUP/2", 1, "barrier"), {"MP_GROUP/2": 1}, {"MP_GROUP/2": ["barrier"]}),
    ],
    "what is forgotten on one side": [
        Report(None, {MODEL: 3}, {MODEL: ["b", "c"]}),
        Report(None, {MODEL: 3}, {MODEL: ["a", "b", "c"]}),
    ],
    "two groups, and one has come to the other's call": [
        report(Call(WORLD, 1, "barrier"), model=["step"], world=["barrier"]),
        report(in_model(1, "step"), model=["step"]),
    ],
}

DIFFERENT = {
    "another name now": (
        [report(model=["step", "step"]), report(model=["step", "state_dict"])],
        "it called state_dict, where rank 0 called step",
    ),
    "another name before": (
        [report(model=["step", "step", "step"]), report(model=["step", "state_dict", "step"])],
        "it called state_dict, where rank 0 called step",
    ),
    "each waits for the other": (
        [
            report(in_model(1, "step"), model=["step"]),
            report(Call(WORLD, 1, "barrier"), world=["barrier"]),
        ],
        "it is in barrier, where rank 0 is in step",
    ),
}


@pytest.mark.parametrize("case", EQUAL)
def test_ranks_that_can_go_on(case: str) -> None:
    assert first_difference(dict(enumerate(EQUAL[case]))) is None


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_cannot(case: str) -> None:
    reports, words = DIFFERENT[case]
    difference = first_difference(dict(enumerate(reports)))
    assert difference is not None
    assert difference.rank == 1
    assert difference.words.startswith(words)
    assert Report.from_json(reports[1].as_json()) == reports[1]


def test_one_of_two_models_is_stuck_among_many_ranks() -> None:
    """Ranks 0 and 1 have a model, 2 and 3 another one.

    Rank 3 is in a barrier of all, and the others train.
    """
    first, second = "MP_GROUP/0", "MP_GROUP/2"
    reports = {
        rank: Report(Call(group, 1, "step"), {group: 1, WORLD: 0}, {group: ["step"]})
        for rank, group in enumerate((first, first, second))
    }
    reports[3] = Report(Call(WORLD, 1, "barrier"), {second: 0, WORLD: 1}, {WORLD: ["barrier"]})
    difference = first_difference(reports)
    assert difference is not None
    assert difference.rank == 3
    assert difference.words.startswith("it is in barrier, where rank 2 is in step")


class Net(nn.Module):
    def __init__(self) -> None:
        import smdistributed.modelparallel.torch as smp

        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        smp.set_partition(self.second, smp.pp_size() - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def train(folder: str, mistake: str) -> None:
    """Train; in the third round rank 1 makes a call that rank 0 does not, or leaves one out."""
    import smdistributed.modelparallel.torch as smp

    failure_watch.LOOK_SECONDS = 0.5  # seconds; a real job looks each five
    config: dict[str, Any] = BY_HAND
    if mistake.startswith("replica"):
        config = {"ddp": True, "microbatches": 1}
    smp.init(config)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).sum())

    @smp.step
    def look(model: Any, x: torch.Tensor) -> Any:
        return model(x)

    for number in range(4):
        if number == 2 and smp.rank() == 1:
            if mistake == "state_dict":
                model.state_dict()
            if mistake == "barrier":
                smp.barrier()
            if mistake == "checkpoint":
                smp.save_checkpoint(folder, "t", model=model, optimizer=optimizer)
            if mistake == "optimizer":
                optimizer.state_dict()
            if mistake in ("skip", "replica skips"):
                smp.barrier()
                continue
            if mistake == "other function":
                look(model, torch.ones(2, 4))
                continue
            if mistake == "slow":
                time.sleep(2)
        step(model, torch.ones(2, 4))
        optimizer.step()
    smp.barrier()
    print("the end was reached")


def run(folder: Path, mistake: str) -> tuple[list[int | None], str]:
    """Run a job of two ranks; return the statuses and the output of both."""
    port = free_port()
    processes = [
        _FORKS.Process(
            target=as_process, args=(r, port, str(folder), train, (str(folder), mistake), 2)
        )
        for r in range(2)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(end - time.monotonic(), 0.1))
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    outputs = [
        (folder / f"{name}{rank}").read_text() for rank in range(2) for name in ("stdout", "stderr")
    ]
    return statuses, "\n".join(outputs)


MISTAKES = {
    "state_dict": ("model.state_dict", "step function train.<locals>.step (call 3)"),
    "barrier": ("smp.barrier", "step function train.<locals>.step (call 3)"),
    "checkpoint": ("smp.save_checkpoint()", "step function train.<locals>.step (call 3)"),
    "optimizer": ("optimizer.state_dict()", "step function train.<locals>.step (call 3)"),
    "skip": ("smp.barrier", "step function train.<locals>.step (call 3)"),
    "replica skips": ("smp.barrier", "the sum of the gradients over replicas"),
}


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, marks=[pytest.mark.core] if mistake == "state_dict" else [])
        for mistake in MISTAKES
    ],
)
def test_a_call_on_one_rank_only_ends_the_job(mistake: str, tmp_path: Path) -> None:
    statuses, output = run(tmp_path, mistake)
    here, there = MISTAKES[mistake]
    assert statuses == [1, 1], output
    assert "the end was reached" not in output
    (line,) = {
        line.partition(" ends: ")[2] for line in output.splitlines() if line.startswith("smp: ")
    }
    assert line.startswith("rank 1"), output
    assert here in line, output
    assert f"where rank 0 called {there}" in line or f"where rank 0 is in {there}" in line, output


def test_a_rank_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    statuses, output = run(tmp_path, "slow")
    assert statuses == [0, 0], output
    assert output.count("the end was reached") == 2


def configurations(other: dict[str, Any]) -> str:
    import smdistributed.modelparallel.torch as smp

    mine = {
        "microbatches": 2,
        "pipeline_parallel_degree": 2,
        **(other if os.environ["OMPI_COMM_WORLD_RANK"] == "1" else {}),
    }
    return error_of(lambda: smp.init(mine))


@pytest.mark.core
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"microbatches": 4}, "microbatches = 2 and 4"),
        ({"pipeline_parallel_degree": 1, "ddp": True}, "pipeline_parallel_degree = 2 and 1"),
        (
            {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2, "ddp": True},
            "tensor_parallel_degree = 1 and 2",
        ),
        ({"pipeline": "simple"}, "pipeline = 'interleaved' and 'simple'"),
    ],
)
def test_ranks_with_different_configurations_are_told(other: dict[str, Any], words: str) -> None:
    for text in run_ranks(2, configurations, other):
        assert text.startswith(
            "SMPConfigError: rank 0 and rank 1 have different configurations: "
        ), text
        assert words in text


def batches(config: dict[str, Any], number: int) -> list[str]:
    """Return the message of each call when rank 1 is given half of the samples in one of them."""
    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        model = smp.DistributedModel(Net())

    @smp.step
    def step(model: Any, x: dict[str, torch.Tensor]) -> None:
        model.backward(model(x["rows"]).sum())

    texts = []
    for call in range(1, number + 1):
        rows = 4 if call == number and smp.rank() == 1 else 8
        batch = {"rows": torch.ones(rows, 4)}
        texts.append(error_of(functools.partial(step, model, batch)))
    return texts


@pytest.mark.parametrize(
    ("config", "number", "variables"),
    [
        (BY_HAND, 1, {}),
        (BY_HAND, 2, {}),
        (BY_HAND, 4, {"SMP_DEBUG": "1"}),
        ({"tensor_parallel_degree": 2, "ddp": True, "microbatches": 2}, 2, {}),
    ],
)
def test_batches_of_two_sizes_are_told(
    config: dict[str, Any], number: int, variables: dict[str, str]
) -> None:
    results = run_ranks(2, batches, config, number, variables=variables)
    assert results[1][-1].startswith(
        "StepError: smp.step: function batches.<locals>.step, argument x['rows']: rank 0 was given"
        " a tensor of shape (8, 4), and rank 1 one of shape (4, 4)"
    )
