"""Test `smp.DistributedModel`: the calls that scripts may make, and those that it refuses."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jobs import BY_HAND, train_step
from ranks import RankError, run_ranks
from trainworks_testing.clock import assert_within, start_clock

TWO = {"pipeline_parallel_degree": 2, "microbatches": 2}
REPLICAS = {"pipeline_parallel_degree": 1, "microbatches": 1, "ddp": True}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.second = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x))
        return y


def start(config: dict[str, Any]) -> Any:
    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    torch.manual_seed(0)
    return smp


def steps(smp: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    train = train_step(lambda model, x: (model(x) ** 2).mean())
    forward = smp.step(lambda model, x: model(x))
    return train, forward


def raised(kind: type[BaseException], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


OWNER = {"": 0, "first": 0, "first.0": 0, "first.1": 0, "second": 1}
X = torch.linspace(-1, 1, 16).view(4, 4)


# -- wrapping, partition, hooks


def _life(config: dict[str, Any]) -> dict[str, Any]:
    smp = start(config)
    plain = Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = smp.DistributedModel(
        plain, backward_passes_per_step=1, trace_device="cpu", gradient_as_bucket_view=True
    )
    model.preset_partition(OWNER)
    wrapped = smp.DistributedOptimizer(optimizer)
    calls: list[str] = []

    def note(text: str) -> Callable[..., None]:
        return lambda m, o: calls.append(
            text if (m, o) == (model, wrapped) else f"wrong arguments of {text}"
        )

    model.register_post_partition_hook(note("partition"))
    model.register_post_partition_hook(note("removed")).remove()
    model.register_post_step_hook(note("step"))
    model.register_post_step_hook(note("removed")).remove()
    assert smp.DistributedModel(plain) is smp.DistributedModel(model) is model
    assert isinstance(model, smp.model.DistributedModel)
    assert (
        model.get_module()
        is model.module
        is model.module.module
        is model.module.module.module
        is plain
    )
    other = raised(smp.SMPConfigError, lambda: smp.DistributedModel(Net()))
    assert model.to(torch.float64) is model.cuda() is model
    assert plain.second.weight.dtype == torch.float32
    assert not model.partitioned
    assert len(list(model.local_parameters())) == len(list(model.parameters())) == 6
    outside = raised(smp.StepError, lambda: model(X))
    train, forward = steps(smp)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(model, X)
    train(model, X)
    assert model.partitioned
    model.register_post_partition_hook(note("late"))
    changed = raised(smp.SMPConfigError, lambda: smp.set_partition(plain.first, 0))
    assert raised(smp.StepError, lambda: model(X)) == outside
    model.eval()
    out = forward(model, X).concat()
    model.half()
    dtypes = {p.dtype for p in model.local_parameters()}
    model.cpu().float()
    smp.barrier()
    return {
        "calls": calls,
        "other": other,
        "outside": outside,
        "changed": changed,
        "printed": printed.getvalue(),
        "dtypes": dtypes,
        "out": out,
        "local": [n for n, _ in model.local_named_parameters()],
        "buffers": [n for n, _ in model.local_named_buffers()],
        "modules": [n for n, _ in model.local_named_modules()],
    }


def test_life_of_a_model() -> None:
    first, second = run_ranks(2, _life, TWO)
    for result in (first, second):
        assert result["calls"] == ["partition", "step", "late"]
        assert "one is wrapped already" in result["other"]
        assert "inside a function that is decorated with smp.step" in result["outside"]
        assert "already partitioned" in result["changed"]
        assert result["dtypes"] == {torch.float16}
        assert torch.equal(result["out"], first["out"])
    assert (
        first["printed"]
        == "Partition assignments:\n  (root): 0\n  first: 0\n  first.0: 0\n  first.1: 0\n "
        " second: 1\n"
    )
    assert second["printed"] == ""
    assert first["local"] == ["first.0.weight", "first.0.bias", "first.1.weight", "first.1.bias"]
    assert second["local"] == ["second.weight", "second.bias"]
    assert first["buffers"] == [
        "first.1.running_mean",
        "first.1.running_var",
        "first.1.num_batches_tracked",
    ]
    assert first["modules"] == ["", "first", "first.0", "first.1"]
    assert second["modules"] == ["second"]


def _refusals() -> dict[str, str]:
    import smdistributed.modelparallel.torch as smp

    refused = {"before init": raised(smp.SMPConfigError, lambda: smp.DistributedModel(Net()))}
    smp.init({})
    compiled = Net()
    compiled.compile()
    inner = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    models: dict[str, Any] = {
        "ddp": inner[0],
        "ddp inside": inner,
        "script": nn.Sequential(torch.jit.script(nn.Linear(2, 2))),
        "compiled": torch.compile(Net()),
        "compiled in place": compiled,
        "lazy": nn.Sequential(nn.LazyLinear(2)),
        "no module": torch.nn.functional.relu,
    }
    for name, model in models.items():
        refused[name] = raised(smp.SMPConfigError, functools.partial(smp.DistributedModel, model))
    options: dict[str, Any] = {"trace_device": "tpu", "backward_passes_per_step": 0}
    for name, option in options.items():
        refused[name] = raised(
            smp.SMPConfigError, functools.partial(smp.DistributedModel, Net(), **{name: option})
        )
    return refused


def known_to_the_inner_module() -> None:
    import smdistributed.modelparallel.torch as smp

    smp.init({})
    wrapper, inner = nn.Module(), nn.Linear(2, 2)
    wrapper.module = inner
    object.__setattr__(inner, "module", wrapper)  # no child: a plain reference back
    assert smp.DistributedModel(wrapper).module is wrapper


def test_a_wrapper_that_its_module_knows_is_no_endless_chain() -> None:
    run_ranks(1, known_to_the_inner_module)


def _ddp_around_the_model(partitions: int) -> str:
    smp = start({"pipeline_parallel_degree": partitions, "ddp": True})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    return raised(smp.SMPConfigError, lambda: nn.parallel.DistributedDataParallel(model))


@pytest.mark.parametrize("partitions", [1, 2])
def test_ddp_around_the_model_is_refused(partitions: int) -> None:
    for text in run_ranks(2, _ddp_around_the_model, partitions):
        assert "torch's DistributedDataParallel cannot wrap smp.DistributedModel" in text
        assert "set ddp in the configuration" in text


def test_what_cannot_be_divided_is_refused() -> None:
    (refused,) = run_ranks(1, _refusals)
    expected = {
        "before init": "call smp.init()",
        "ddp": (
            "the model (DistributedDataParallel) is torch's DistributedDataParallel."
            " Wrap the plain module"
        ),
        "ddp inside": "module '0' (DistributedDataParallel)",
        "script": "module '0' (RecursiveScriptModule) is a ScriptModule",
        "compiled": "cannot divide the result of torch.compile",
        "compiled in place": "cannot divide the result of torch.compile",
        "lazy": "parameter 'weight' has no shape yet",
        "no module": "needs a torch.nn.Module, got function",
        "trace_device": "must be 'gpu' or 'cpu', got 'tpu'",
        "backward_passes_per_step": "must be an integer of 1 or more, got 0",
    }
    assert set(refused) == set(expected)
    for name, text in expected.items():
        assert text in refused[name], name


def _placement() -> list[str]:
    import smdistributed.modelparallel.torch as smp

    texts = [raised(smp.SMPConfigError, lambda: smp.set_partition(nn.Linear(1, 1), 0))]
    smp = start(BY_HAND)
    wrong: Any
    for wrong in (2, -1, True, "1"):
        texts.append(
            raised(smp.SMPConfigError, functools.partial(smp.set_partition, nn.Linear(1, 1), wrong))
        )
        with pytest.raises(smp.SMPConfigError), smp.partition(wrong):
            raise AssertionError
    with smp.partition(1):
        outer = nn.Sequential(nn.Linear(4, 4))
        with smp.partition(0):
            inner = nn.Linear(4, 4)
        last = nn.Linear(4, 4)
    free = nn.Linear(4, 4)
    free.weight = last.weight  # goes where the first module with it is
    model = smp.DistributedModel(
        nn.ModuleDict({"outer": outer, "inner": inner, "last": last, "free": free})
    )
    model.module.forward = lambda x: free(last(inner(outer(x))))
    with pytest.warns(UserWarning, match="module 'free' goes to partition 1, not 0"):
        steps(smp)[0](model, X)
    assert model.owner == {"": 0, "outer": 1, "outer.0": 1, "inner": 0, "last": 1, "free": 1}
    smp.barrier()
    return texts


def test_placement_by_hand() -> None:
    for before, *wrong in run_ranks(2, _placement):
        assert "call smp.init()" in before
        for text, value in zip(wrong, ("2", "-1", "True", "'1'"), strict=True):
            assert (
                f"must be an integer from 0 to 1 (pipeline_parallel_degree is 2), got {value}"
                in text
            )


def _root_elsewhere(config: dict[str, Any]) -> torch.Tensor:
    smp = start(config)
    model = smp.DistributedModel(Net())
    train, forward = steps(smp)
    # Only the first partition's rank has the data.
    x = X if smp.pp_rank() == 0 else torch.empty(4, 0)
    train(model, x)
    model.eval()
    out: torch.Tensor = forward(model, x).concat()
    assert set(model.owner.values()) == {1}
    assert list(model.state_dict()) == list(Net().state_dict())
    return out


def test_a_root_on_another_partition_gets_the_first_ones_inputs() -> None:
    first, second = run_ranks(2, _root_elsewhere, {**BY_HAND, "default_partition": 1})
    assert torch.equal(first, second)


def _preset(config: dict[str, Any]) -> dict[str, str]:
    smp = start(config)
    model = smp.DistributedModel(Net())
    owner = {"": 0, "first": 1, "first.0": 1, "first.1": 0, "second": 0}
    errors = {
        "degree": raised(
            smp.SMPConfigError, lambda: model.preset_partition({**owner, "second": 2})
        ),
        "model": raised(smp.SMPConfigError, lambda: model.preset_partition({"": 0, "third": 0})),
    }
    model.preset_partition(owner)
    train, _ = steps(smp)
    train(model, X)
    assert model.owner == owner
    model.preset_partition(owner)
    errors["other"] = raised(
        smp.SMPConfigError, lambda: model.preset_partition({**owner, "second": 1})
    )
    smp.barrier()
    return errors


def test_a_saved_partition_is_used() -> None:
    for errors in run_ranks(2, _preset, TWO):
        assert "has 3 partitions, this job has pipeline_parallel_degree 2" in errors["degree"]
        assert "5 modules differ, such as 'first'" in errors["model"]
        assert "'second' is on partition 0, and was on 1" in errors["other"]


# -- modules of other partitions


class Peeks(nn.Module):
    """Reads its child's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.child(x), self.child.weight)


def _peeks(config: dict[str, Any]) -> None:
    smp = start(config)
    plain = Peeks()
    smp.set_partition(plain.child, 1)
    steps(smp)[0](smp.DistributedModel(plain), X)


def test_reading_a_remote_parameter_is_an_error_that_names_it() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, _peeks, BY_HAND)
    text = str(caught.value)
    assert (
        "linear: 'weight' of module 'child' is on partition 1, and was read on partition 0" in text
    )
    assert "smp.set_partition" in text


def _hooks(config: dict[str, Any]) -> dict[str, int]:
    smp = start(config)
    plain = Net()
    smp.set_partition(plain.first, 1)
    count = {"before": 0, "after": 0, "backward": 0}

    def hook(name: str) -> Callable[..., None]:
        def run(*_args: Any) -> None:
            count[name] += 1

        return run

    plain.first.register_forward_pre_hook(hook("before"))
    plain.first.register_forward_hook(lambda _m, _a, out: out * 2)
    model = smp.DistributedModel(plain)
    train, forward = steps(smp)
    train(model, X)
    plain.first.register_forward_hook(hook("after"))
    plain.first.register_full_backward_hook(hook("backward"))
    train(model, X)
    model.eval()
    reference = Net()
    out = forward(model, X).concat()
    reference.load_state_dict(model.state_dict())
    reference.eval()
    assert torch.allclose(out, reference.second(2 * reference.first(X)))
    return count


def test_hooks_of_a_module_fire_once_and_every_rank_has_what_they_count() -> None:
    for count in run_ranks(2, _hooks, BY_HAND):
        assert count == {"before": 6, "after": 4, "backward": 2}


# -- state


def _states(config: dict[str, Any]) -> dict[str, Any]:
    smp = start(config)
    model = smp.DistributedModel(Net())
    model.preset_partition(OWNER)
    early = raised(smp.StepError, model.local_state_dict)
    assert list(model.state_dict()) == list(Net().state_dict())  # nothing is divided
    marked = {name: torch.full_like(v, 7) for name, v in Net().state_dict().items()}
    model.load_state_dict(marked)
    train, _ = steps(smp)
    train(model, X)
    full_state = model.state_dict()
    assert list(full_state) == list(marked)
    assert all(
        torch.equal(full_state[n], marked[n])
        for n in full_state
        if "running" not in n and "tracked" not in n
    )
    only = model.state_dict(gather_to_rank0=True)
    part = model.local_state_dict()
    part = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in part.items()}
    model.load_state_dict({name: torch.zeros_like(v) for name, v in marked.items()})
    assert not any(p.any() for p in model.local_parameters())
    model.load_state_dict(part)
    again = model.state_dict()
    assert all(torch.equal(full_state[name], again[name]) for name in full_state)
    model.get_module().load_state_dict(marked)  # each rank takes its own
    assert all(bool((p == 7).all()) for p in model.local_parameters())
    lacking = {name: v for name, v in full_state.items() if name != "second.bias"}
    keys = model.load_state_dict(lacking, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["second.bias"], [])
    shorter = dict(list(part.items())[1:])
    # Without a message: this rank's part alone.
    model.load_state_dict(part, same_partition_load=True)
    result = {
        "early": early,
        "only": list(only),
        "part": list(part),
        "missing": raised(RuntimeError, lambda: model.load_state_dict(lacking)),
        "unexpected": raised(
            RuntimeError, lambda: model.load_state_dict({**full_state, "third": X})
        ),
        "shape": raised(
            RuntimeError, lambda: model.load_state_dict({**full_state, "second.bias": X})
        ),
        "local": raised(
            RuntimeError, lambda: model.load_state_dict(shorter, same_partition_load=True)
        ),
    }
    smp.barrier()
    return result


def test_state_dicts() -> None:
    first, second = run_ranks(2, _states, TWO)
    names = list(Net().state_dict())
    assert first["only"] == names
    assert second["only"] == []
    assert first["part"] == [*names[:-2], "_smp_is_partial"]
    assert second["part"] == [*names[-2:], "_smp_is_partial"]
    assert "first.0.weight" in first["local"]
    assert "second.weight" in second["local"]
    for result in (first, second):
        assert "not partitioned yet" in result["early"]
        assert 'Missing key(s) in state_dict: "second.bias"' in result["missing"]
        assert 'Unexpected key(s) in state_dict: "third"' in result["unexpected"]
        assert "size mismatch for second.bias" in result["shape"]


def _deferred(config: dict[str, Any]) -> bool:
    smp = start(config)
    model = smp.DistributedModel(Net())
    model.preset_partition(OWNER)
    own = "first." if smp.pp_rank() == 0 else "second."
    part = {n: torch.full_like(v, 3) for n, v in Net().state_dict().items() if n.startswith(own)}
    model.load_state_dict({**part, "_smp_is_partial": True}, same_partition_load=True)
    assert not any(bool((p == 3).all()) for p in model.local_parameters())
    seen = []
    model.register_post_partition_hook(
        lambda m, _: seen.append(all(bool((p == 3).all()) for p in m.local_parameters()))
    )
    steps(smp)[1](model, X)
    smp.barrier()
    return seen == [True]


def test_a_part_is_loaded_when_the_model_is_divided() -> None:
    assert run_ranks(2, _deferred, TWO) == [True, True]


def _alone(config: dict[str, Any]) -> str:
    import time

    from smdistributed.modelparallel.torch.job import meeting_points

    smp = start(config)
    model = smp.DistributedModel(Net())
    steps(smp)[0](model, X)
    meeting_points.LIMIT = 1.0
    if smp.rank() == 0:
        text = raised(smp.StepError, model.state_dict)
        smp.send(text, 1, smp.RankType.WORLD_RANK)
        return text
    begin = start_clock()
    text = smp.recv_from(0, smp.RankType.WORLD_RANK)
    assert_within(30, begin, time.monotonic(), str(text))
    return str(text)


def test_a_state_dict_of_one_rank_names_the_missing_ranks() -> None:
    for text in run_ranks(2, _alone, TWO):
        assert "model.state_dict(): waited 1 s on rank 0, but rank(s) 1 did not call it" in text
        assert "Every rank of MP_GROUP must call it: 0, 1" in text


# -- data parallelism


class Branches(nn.Module):
    """How often a layer is used depends on the data; one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        out: torch.Tensor = self.a(x)
        for _ in range(times):
            out = torch.utils.checkpoint.checkpoint(self.b, torch.tanh(out), use_reentrant=True)
        return out


def _replicas(config: dict[str, Any]) -> dict[str, Any]:
    smp = start(config)
    me = smp.rank()
    torch.manual_seed(me)  # the first replica's values count
    model = smp.DistributedModel(Branches().double(), bucket_cap_mb=0.0001)
    torch.manual_seed(0)
    reference = Branches().double()
    worst = 0.0
    # Replica 1 uses the layer more or less often than it did before, so some
    # buckets were sent too early.
    for times in ([0, 1], [1, 1], [1, 3], [2, 0], [0, 0], [3, 2]):
        xs = [
            torch.randn(4, 4, generator=torch.Generator().manual_seed(r)).double() for r in range(2)
        ]
        model.zero_grad()
        (model(xs[me], times[me]) ** 2).mean().backward()
        reference.zero_grad()
        for x, count in zip(xs, times, strict=True):
            ((reference(x, count) ** 2).mean() / 2).backward()
        for (name, p), q in zip(
            model.module.named_parameters(), reference.parameters(), strict=True
        ):
            assert (p.grad is None) == (q.grad is None), (times, name)
            if p.grad is not None and q.grad is not None:
                worst = max(worst, (p.grad - q.grad).abs().max().item())
    return {"worst": worst, "early": model._reducer.early, "passes": model.pass_no}


def test_replicas_average_gradients_after_a_plain_backward() -> None:
    for result in run_ranks(2, _replicas, REPLICAS):
        assert result["worst"] < 1e-12
        assert result["early"] > 0
        assert result["passes"] == 6


def _passes(config: dict[str, Any], overlap: bool) -> list[Any]:
    smp = start(config)
    model = smp.DistributedModel(
        nn.Linear(4, 1).double(), backward_passes_per_step=2, overlapping_allreduce=overlap
    )
    weight = model.module.weight
    train, forward = steps(smp)
    x = torch.full((2, 4), float(smp.dp_rank() + 1)).double()
    reference = copy.deepcopy(model.module)
    ((reference(x) ** 2).mean() * 2).backward()
    train(model, x)
    own = weight.grad.clone()
    forward(model, x)  # no pass
    train(model, x)
    return [own, weight.grad, reference.weight.grad, model.pass_no]


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_of_several_passes_add_up(overlap: bool) -> None:
    first, second = run_ranks(2, _passes, REPLICAS, overlap)
    mean = (first[2] + second[2]) / 2
    for own, both, alone, passes in (first, second):
        assert torch.allclose(own, alone / 2)
        assert torch.allclose(both, mean)
        assert passes == 2


def _replica_extras(config: dict[str, Any]) -> dict[str, Any]:
    smp = start(config)
    me = smp.dp_rank()
    plain: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    model = smp.DistributedModel(plain)
    train, _ = steps(smp)
    # Buffers: replicas saw other data.
    train(model, X.double() + me)
    own = plain[1].running_mean.clone()
    train(model, X.double())
    # Uneven numbers of batches: the last one is replica 1's alone.
    with model.join():
        for _ in range(1 + 2 * me):
            plain.zero_grad()
            train(model, X.double())
            with torch.no_grad():
                plain[0].weight -= 0.1 * plain[0].weight.grad
    # A communication hook in the place of the average.
    calls = []

    def twice(group: Any, bucket: Any) -> Any:
        calls.append(len(bucket.gradients()))
        work = torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda f: f.value()[0] * 2)

    model.register_comm_hook(smp.get_dp_process_group(), twice)
    again = raised(smp.SMPConfigError, lambda: model.register_comm_hook(None, twice))
    plain.zero_grad()
    (model(X.double()) ** 2).sum().backward()
    with_hook = plain[0].bias.grad.clone()
    model._reducer.hook = None
    plain.zero_grad()
    (model(X.double()) ** 2).sum().backward()
    return {
        "own": own,
        "mean": plain[1].running_mean,
        "weight": plain[0].weight.detach(),
        "calls": calls,
        "again": again,
        "hook": with_hook,
        "plain": plain[0].bias.grad,
    }


def test_buffers_join_and_communication_hooks() -> None:
    first, second = run_ranks(2, _replica_extras, REPLICAS)
    assert not torch.equal(first["own"], second["own"])
    assert torch.equal(first["weight"], second["weight"])
    for result in (first, second):
        assert result["calls"] == [4]
        assert "only once" in result["again"]
        # The hook adds two replicas and doubles: four times the average.
        assert torch.allclose(result["hook"], 4 * result["plain"], atol=1e-12)


def _sum_of_microbatches(config: dict[str, Any]) -> torch.Tensor | None:
    smp = start(config)
    model = smp.DistributedModel(Net().eval().double(), average_grads_across_microbatches=False)

    @smp.step  # type: ignore[untyped-decorator, unused-ignore]
    def train(model: Any, x: torch.Tensor) -> Any:
        out = model(x)
        model.backward([out, out.sum()], [torch.ones_like(out), None])

    assert train(model, X.double()) is None
    grad: torch.Tensor | None = (
        dict(model.local_named_parameters()).get("second.bias", torch.zeros(3)).grad
    )
    smp.barrier()
    return grad


def test_gradients_of_several_tensors_without_the_average_over_microbatches() -> None:
    _, grad = run_ranks(2, _sum_of_microbatches, TWO)
    assert torch.equal(grad, torch.full((3,), 8.0).double())


# -- norm


def _norms(config: dict[str, Any]) -> list[float]:
    smp = start(config)
    reference = Net().eval().double()
    model = smp.DistributedModel(copy.deepcopy(reference))
    train, _ = steps(smp)
    for x in X.double().chunk(2):
        ((reference(x) ** 2).mean() / 2).backward()
    out = []
    for kind in (2.0, 1.0, float("inf")):
        model.zero_grad()
        train(model, X.double())
        local = float(nn.utils.clip_grad_norm_(list(model.local_parameters()), 1e9, kind))
        for name, part in reference.named_children():
            there = list(model.module.get_submodule(name).parameters())
            full_norm = float(nn.utils.clip_grad_norm_(part.parameters(), 1e9, kind))
            assert float(nn.utils.clip_grad_norm_(there, 1e9, kind)) == pytest.approx(
                full_norm, rel=1e-12
            )
        expected = copy.deepcopy(reference)
        for p, q in zip(expected.parameters(), reference.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        norm = float(nn.utils.clip_grad_norm_(expected.parameters(), 0.01, kind))
        mine = [p.grad.detach() for p in model.parameters() if p.grad is not None]
        total = nn.utils.get_total_norm(mine, kind, error_if_nonfinite=True)
        assert float(total) == pytest.approx(norm, rel=1e-12)
        if kind == 2.0:
            norm_found = float(model.clip_grad_norm_(0.01))
        elif kind == 1.0:
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, total)
            norm_found = float(total)
        else:
            norm_found = float(
                nn.utils.clip_grad_norm_(model.parameters(), 0.01, kind, error_if_nonfinite=True)
            )
        assert norm_found == pytest.approx(norm, rel=1e-12)
        assert local < norm or kind == float("inf")
        assert nn.utils.get_total_norm([torch.full((4,), 2.0)]) == 4.0  # not the model's
        gradients: dict[str, Any] = {n: p.grad for n, p in expected.named_parameters()}
        for name, p in model.local_named_parameters():
            assert torch.allclose(p.grad, gradients[name], rtol=1e-12)
        out.append(norm_found)
    smp.barrier()
    return out


def test_clipping_by_the_norm_of_all_partitions() -> None:
    first, second = run_ranks(2, _norms, TWO)
    assert first == second


# -- half precision


def _half(config: dict[str, Any]) -> list[Any]:
    smp = start(config)
    model = smp.DistributedModel(Net())
    train, forward = steps(smp)
    loss = train(model, X).reduce_mean()
    dtypes = {p.dtype for p in model.local_parameters()} | {
        p.grad.dtype for p in model.local_parameters()
    }
    out = forward(model, X).concat()
    return [float(loss), out.dtype, dtypes]


def test_bf16_casts_the_model_its_inputs_and_its_outputs() -> None:
    first, second = run_ranks(2, _half, {**TWO, "bf16": True})
    assert first == second
    assert first[0] > 0
    assert first[1:] == [torch.float32, {torch.bfloat16}]


# -- tracing


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        x = self.drop(self.norm(self.act(x))) * (scale + random.random() + float(np.random.rand()))
        out: torch.Tensor = self.blocks[0](self.blocks[1](self.blocks[1](x)))
        return out


@pytest.mark.parametrize("seconds", [False, True])
def test_a_trace_changes_nothing(seconds: bool) -> None:
    from smdistributed.modelparallel.torch.partitioning.tracing import (
        describe,
        trace_forward,
        unchanged,
    )

    module, x = Noisy(), X.clone()
    state = copy.deepcopy(module.state_dict())
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with unchanged(module):
        trace = trace_forward(module, (x,), {"scale": 1.0}, seconds=seconds)
    assert torch.equal(x, X)
    assert all(torch.equal(v, state[n]) for n, v in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert str(np.random.get_state()) == str(generators[2])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert [n for n, _ in sorted(trace.items(), key=lambda item: item[1].order)] == [
        "", "act", "norm", "drop", "blocks.1", "blocks.0",
    ]  # fmt: skip
    assert trace["blocks.1"].activations == 2 * X.nbytes
    if not seconds:
        assert trace["blocks.1"].work == 2 * trace["blocks.0"].work == 2 * (2 * 4 * 4 * 4)
    root = describe(module, trace)
    assert {n.name for n in root.walk()} == {n for n, _ in module.named_modules()}
    assert next(n for n in root.walk() if n.name == "blocks").order is None


def _trace_fails(config: dict[str, Any]) -> None:
    smp = start(config)
    model = smp.DistributedModel(Net())
    steps(smp)[0](model, torch.ones(4, 5))


def test_an_error_in_the_trace_ends_all_ranks() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, _trace_fails, TWO)
    assert (
        "rank 0 (pp_rank 0) failed: in the traced forward pass: RuntimeError: mat1 and mat2"
        in str(caught.value)
    )
    assert "still running" not in str(caught.value)
