"""Test the order of a step: passes, microbatches in flight, and the contexts that are carried to
other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from typing import Any

import pytest
from torch import nn

from jobs import BY_HAND, train_step
from ranks import HERE, run_program, run_ranks
from smdistributed.modelparallel.torch.exceptions import SMPConfigError
from smdistributed.modelparallel.torch.pipeline.schedule import actions, print_schedule
from smdistributed.modelparallel.torch.pipeline.tail_calls import returned_modules

MICROBATCHES = 6


def order_of_step(schedule: str, active: int) -> dict[str, Any]:
    """Train a model that ends with a remote module.

    Return the passes that ran on this rank, and how many microbatches were in flight.
    """
    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.pipeline.runtime import present

    smp.init(
        {
            **BY_HAND,
            "microbatches": MICROBATCHES,
            "pipeline": schedule,
            "active_microbatches": active,
        }
    )
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    smp.set_partition(second, 1)
    model = smp.DistributedModel(nn.Sequential(first, second))
    begun: list[int] = []
    live = 0
    most = 0

    @smp.step
    def train(model: Any, number: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        nonlocal live, most
        begun.append(int(number[0]))
        live += 1
        most = max(most, live)
        loss: torch.Tensor = model(value).sum()
        model.backward(loss)
        live -= 1
        return loss

    for _ in range(2):
        begun.clear()
        train(model, torch.arange(MICROBATCHES), torch.ones(MICROBATCHES, 4))
    runtime = present()
    assert runtime is not None
    return {
        "order": runtime.pipeline.order,
        "most": most,
        "begun": begun,
        "switches": runtime.scheduler.switches,
    }


def passes(actions: list[str]) -> list[tuple[str, int]]:
    return [
        (kind, int(number))
        for action in actions
        if action
        for _, kind, number in [re.split("([FB])", action)]
    ]


def test_the_last_rank_runs_what_the_printed_schedule_says() -> None:
    """Run the same action next at each order of messages: the other ranks choose among the arrived
    ones.
    """
    for schedule, active in (("interleaved", 2), ("interleaved", MICROBATCHES), ("simple", 2)):
        first, last = run_ranks(2, order_of_step, schedule, active)
        expected = actions(2, MICROBATCHES, schedule, active)
        assert last["order"] == passes(expected[1])
        assert sorted(first["order"]) == sorted(passes(expected[0]))
        assert first["begun"] == last["begun"] == list(range(MICROBATCHES))
        if schedule == "simple":
            assert first["order"] == passes(expected[0])
        else:
            assert max(first["most"], last["most"]) <= active


def test_a_printed_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    print_schedule(2, 3)
    print_schedule(2, 2, "simple")
    assert capsys.readouterr().out.splitlines() == [
        "      rank 0  rank 1",
        "  0:  0F0",
        "  1:  0F1     1F0",
        "  2:  0F2     1B0",
        "  3:  0B0     1F1",
        "  4:          1B1",
        "  5:  0B1     1F2",
        "  6:          1B2",
        "  7:  0B2",
        "      rank 0  rank 1",
        "  0:  0F0",
        "  1:  0F1     1F0",
        "  2:          1F1",
        "  3:          1B0",
        "  4:  0B0     1B1",
        "  5:  0B1",
    ]


@pytest.mark.parametrize("partitions", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("active", [1, 2, None])
@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
def test_every_schedule_is_whole(partitions: int, active: int | None, pipeline: str) -> None:
    """Each pass runs once, after those that it needs, and no more microbatches
    are in flight than may be.
    """
    columns = actions(partitions, 9, pipeline, active)
    when = {action: time for column in columns for time, action in enumerate(column) if action}
    assert len(when) == 2 * partitions * 9
    for rank, number in itertools.product(range(partitions), range(9)):
        assert when[f"{rank}F{number}"] < when[f"{rank}B{number}"]
        if rank:
            assert when[f"{rank - 1}F{number}"] < when[f"{rank}F{number}"]
            assert when[f"{rank}B{number}"] < when[f"{rank - 1}B{number}"]
    live = itertools.accumulate(1 if kind == "F" else -1 for kind, _ in passes(columns[0]))
    assert max(live) <= (9 if pipeline == "simple" else active or partitions + 2)


def test_a_schedule_that_cannot_be_is_refused() -> None:
    for arguments in ((0, 1), (1, 0), (1, 1, "1f1b"), (1, 1, "simple", 0)):
        with pytest.raises(SMPConfigError, match="a schedule needs 1 or more partitions"):
            actions(*arguments)


def test_the_last_rank_needs_no_threads() -> None:
    assert run_ranks(2, order_of_step, "interleaved", 4)[1]["switches"] == 0


def test_every_thread_of_a_step_computes_with_as_many_threads_as_the_script_says() -> None:
    """torch tells a thread's first parallel loop of set_num_threads, and a product of matrices
    before that is none.
    """
    root, _ = run_program(
        2, [str(HERE / "scripts" / "threads.py")], variables={"OMP_NUM_THREADS": "2"}
    )
    assert root.status == 0, root.err
    match = re.search(r"before 2 in steps 1 changes of threads (\d+)$", root.out, re.MULTILINE)
    assert match is not None, root.out
    assert int(match[1]) > 0


def what_contexts_carry() -> dict[str, Any]:
    """Try many kinds of calls in one job, and return the context that each saw."""
    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.exceptions import StepError
    from smdistributed.modelparallel.torch.pipeline.runtime import present

    smp.init(BY_HAND)
    seen: dict[str, Any] = {"hooks": 0}

    class Remote(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: torch.Tensor, *, plus: float = 0.0) -> tuple[torch.Tensor, float]:
            seen["grad"] = torch.is_grad_enabled()
            seen["inference"] = torch.is_inference_mode_enabled()
            seen["autocast"] = torch.is_autocast_enabled("cpu")
            return self.linear(value) + plus, plus

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.remote = nn.Linear(4, 4), Remote()
            self.chain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
            smp.set_partition(self.remote, 1)
            smp.set_partition(self.chain[1], 1)

        def forward(self, value: torch.Tensor, times: int) -> dict[str, Any]:
            value = self.start(value)
            for number in range(times):
                value, plus = self.remote(value, plus=float(number))
                assert plus == number
            return {"value": self.chain(value), "times": times, "nothing": None}

    torch.manual_seed(0)
    net = Net()
    net.remote.register_forward_hook(lambda *_: seen.__setitem__("hooks", seen["hooks"] + 1))
    model = smp.DistributedModel(net)
    value = torch.ones(4, 4)

    @smp.step
    def train(model: Any, value: torch.Tensor, times: int) -> Any:
        output = model(value, times)
        assert (output["times"], output["nothing"]) == (times, None)
        loss = output["value"].sum()
        loss /= 2
        model.backward(loss)
        return loss

    evaluate = smp.step(lambda model, value, times: model(value, times)["value"])

    @smp.step
    def twice(model: Any, value: torch.Tensor) -> Any:
        first = model(value, 1)["value"].sum()
        second = model(value, 2)["value"].sum()
        model.backward([first, second])
        return first + second

    @smp.step
    def again(model: Any, value: torch.Tensor) -> Any:
        output = model(value, 1)["value"]
        model.backward(output.sum())
        model.backward(output.mean())

    seen["losses"] = [float(train(model, value, times).reduce_mean()) for times in (1, 3, 0)]
    seen["calls"] = seen["hooks"]
    with torch.no_grad():
        seen["evaluated"] = float(evaluate(model, value, 2).concat().sum())
        seen["no_grad"] = seen.get("grad")
    with torch.inference_mode():
        evaluate(model, value, 1)
        seen["in_inference_mode"] = seen.get("inference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        evaluate(model, value, 1)
        seen["in_autocast"] = seen.get("autocast")
    evaluate(model, value, 1)
    seen["after_autocast"] = seen.get("autocast")
    twice(model, value)
    runtime = present()
    assert runtime is not None
    number = runtime.pipeline.step_number
    try:
        again(model, value)
    except (StepError, RuntimeError) as error:
        seen["again"] = str(error)
    train(model, value, 1)  # a failed step leaves the pipeline as it was
    seen["steps"] = runtime.pipeline.step_number - number
    try:
        model(value, 1)
    except StepError as error:
        seen["outside"] = str(error)
    return seen


def test_contexts_carry_modes_hooks_and_values() -> None:
    first, second = run_ranks(2, what_contexts_carry)
    assert first["losses"] == second["losses"]
    assert first["evaluated"] == second["evaluated"]
    # The remote module's hook fires where the module is, once a call: 1 + 3 + 0
    # calls for each of 2 microbatches.
    assert (first["calls"], second["calls"]) == (8, 8)
    assert second["no_grad"] is False
    assert second["in_inference_mode"] is True
    assert (second["in_autocast"], second["after_autocast"]) == (True, False)
    assert first["steps"] == 2
    assert (
        "Trying to backward through the graph a second time" in first["again"]
        or "second backward" in first["again"]
    )
    assert "decorated" in first["outside"]


def ends_before_the_others() -> float:
    """Train one step; rank 2 stands still in it until rank 1 has ended its process."""
    import os
    import signal
    from pathlib import Path

    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({**BY_HAND, "pipeline_parallel_degree": 3, "microbatches": 8})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.remote, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            smp.set_partition(self.remote, 1)
            smp.set_partition(self.unused, 2)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.start(self.remote(self.start(value)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = smp.DistributedModel(Net())
    pids = smp.allgather(os.getpid(), smp.WORLD)

    @smp.step
    def evaluate(model: Any, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if smp.rank() == 0 and value[0, 0] == 7:
                os.kill(pids[2], signal.SIGSTOP)  # it waits for the outputs
            return model(value).sum()  # type: ignore[no-any-return]

    loss = float(evaluate(model, torch.arange(8.0)[:, None].expand(8, 4)).reduce_mean())
    if smp.rank() == 0:
        pause = threading.Event()
        with contextlib.suppress(FileNotFoundError):
            while ") Z" not in Path(f"/proc/{pids[1]}/stat").read_text(encoding="ascii"):
                pause.wait(0.01)
        os.kill(pids[2], signal.SIGCONT)
    return loss


def test_a_rank_that_has_ended_its_last_step_is_not_missed_by_slower_ones() -> None:
    losses = run_ranks(3, ends_before_the_others)
    assert losses == [losses[0]] * 3


def returns_more_when(flag: bool) -> list[Any]:
    """Train a model whose last remote result is sometimes changed, and one
    rank's script skips the backward.
    """
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init(BY_HAND)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
            smp.set_partition(self.head, 1)

        def forward(self, value: torch.Tensor, change: bool) -> torch.Tensor:
            value = self.start(value)
            if change:
                return self.head(value) * 2  # type: ignore[no-any-return]
            return self.head(value)  # type: ignore[no-any-return]

    class Plain(Net):
        def forward(self, value: torch.Tensor, change: bool) -> torch.Tensor:  # noqa: ARG002
            return self.head(self.start(value))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    network = Plain() if flag else Net()
    model = smp.DistributedModel(network)

    @smp.step
    def train(model: Any, value: torch.Tensor, change: bool, everywhere: bool) -> Any:
        loss = model(value, change).sum()
        if everywhere or smp.pp_rank() == 0:
            model.backward(loss)
        return loss

    losses = []
    for change, everywhere in ((False, True), (True, True), (False, False)):
        model.zero_grad()
        loss = train(model, torch.ones(2, 4), change, everywhere)
        gradients = [float(p.grad.sum()) for p in model.local_parameters() if p.grad is not None]
        losses.append((float(loss.reduce_mean()), gradients))
    return losses


@pytest.mark.parametrize("tail", [True, False])
def test_a_changed_result_and_a_backward_on_one_rank_only_are_served(tail: bool) -> None:
    first, second = run_ranks(2, returns_more_when, tail)
    for (loss, gradients), (other, others) in zip(first, second, strict=True):
        assert loss == other
        assert len(gradients) == len(others) == 2
        assert any(gradients)
        assert any(others)
    factor = 1 if tail else 2
    assert first[1][0] == pytest.approx(factor * first[0][0])
    assert first[2] == first[0]
    assert second[2] == second[0]


def same_order_on_replicas() -> Any:
    """Return the passes that ran on this rank in a job of two replicas that share one order."""
    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.pipeline.runtime import present

    smp.init({**BY_HAND, "microbatches": 4, "ddp": True, "deterministic_server": True})
    ran: list[tuple[str, int]] = []

    class Noted(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.linear = name, nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            ran.append((self.name, int(value.detach()[0, 0].round())))
            # Replicas differ in speed, and would differ in order.
            rounds = 2000 if smp.rank() > 1 else 1
            for _ in range(rounds):
                value = value + 0
            result: torch.Tensor = value + 0 * self.linear(value)
            return result

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Noted("a"), Noted("b"), Noted("c")
            smp.set_partition(self.b, 1)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            value = self.c(self.b(self.a(value)))
            result: torch.Tensor = self.b(value) + self.a(value)
            return result

    model = smp.DistributedModel(Net())

    train = train_step(lambda model, value: model(value).sum())
    for _ in range(3):
        train(model, torch.arange(4.0)[:, None].expand(4, 4).contiguous())
    runtime = present()
    assert runtime is not None
    return ran, runtime.pipeline.order


def test_replicas_run_in_one_order() -> None:
    ranks = run_ranks(4, same_order_on_replicas)
    assert ranks[0] == ranks[2]
    assert ranks[1] == ranks[3]
    assert len(ranks[0][0]) == 3 * 4 * 3


# --- tail calls, from the source ------------------------------------------------------------------


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)


class Returned(Head):
    def forward(self, value: Any) -> Any:
        value = self.body(value)
        if value.sum() > 0:
            return self.other(value)
        return self.head(value)


class Changed(Head):
    def forward(self, value: Any) -> Any:
        return self.head(self.body(value)) + 1


class Twice(Head):
    def forward(self, value: Any) -> Any:
        return self.head(self.head(value))


class Elsewhere(Head):
    def helper(self, value: Any) -> Any:
        return self.head(value)

    def forward(self, value: Any) -> Any:
        return self.head(self.helper(value))


class Hidden(Head):
    def forward(self, value: Any) -> Any:
        for child in self.children():
            value = child(value)
        return self.head(value)


class Caught(Head):
    def forward(self, value: Any) -> Any:
        try:
            return self.head(value)
        finally:
            print("done")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Returned, ["other", "head"]),
        (Changed, []),
        (Twice, []),
        (Elsewhere, []),
        (Hidden, []),
        (Caught, []),
    ],
)
def test_only_a_result_that_is_always_returned_is_a_tail(
    kind: type[Head], names: list[str]
) -> None:
    module = kind()
    assert {id(child) for child in returned_modules(module)} == {
        id(getattr(module, name)) for name in names
    }


def test_the_last_child_of_a_sequential_is_a_tail() -> None:
    chain = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    assert returned_modules(chain) == [chain[1]]
    twice = nn.ReLU()
    assert returned_modules(nn.Sequential(twice, nn.Linear(1, 1), twice)) == []


def test_a_replaced_forward_is_no_tail() -> None:
    module = Returned()
    object.__setattr__(module, "forward", lambda value: value)
    assert returned_modules(module) == []
