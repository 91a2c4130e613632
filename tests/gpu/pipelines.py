"""smp: pipelines, data and tensor parallelism, half precision and checkpoints equal one process."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

from together import main, near, ranks

NEEDS = ("torch", "cuda", "nccl")
BOUND = 420

MATRIX = ("convolutions", "listed-blocks", "revisit", "chain-0-1-0", "arguments", "loop")
"""Models of smdistributed's own tests; the last four visit a partition twice."""

SPLIT = {"pipeline_parallel_degree": 2, "microbatches": 4}
EQUALITY = {
    "2 partitions": (2, SPLIT, "float64", {}),
    "2 partitions, simple": (2, {**SPLIT, "pipeline": "simple"}, "float64", {}),
    "4 partitions": (4, {"pipeline_parallel_degree": 4, "microbatches": 8}, "float64", {}),
    "2 partitions, 2 replicas": (4, {**SPLIT, "ddp": True}, "float64", {}),
    "2 partitions, float32": (2, SPLIT, "float32", {}),
    "2 partitions, one launch at a time": (2, SPLIT, "float64", {"CUDA_LAUNCH_BLOCKING": "1"}),
    "2 partitions, through the host": (2, SPLIT, "float64", {"SMP_PAYLOAD": "host"}),
}
"""Ranks, configuration, type and variables."""

LIMITS = {"float64": 1e-10, "float32": 5e-4}

TENSOR = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}
HALVES = {"fp16": 2e-2, "bf16": 1e-1}
"""Largest difference of half precision's losses from those of one process that trains so, too."""


def run(options: dict[str, Any]) -> dict[str, Any]:
    device, figures = options["device"], {}
    job = functools.partial(ranks, __file__, device=device)
    # On a CPU these are smdistributed's own tests: two of each are enough to try this file.
    for title, (count, config, dtype, variables) in list(EQUALITY.items())[
        : None if device == "cuda" else 1
    ]:
        rank_results = job(count, "equality_of", variables, config=config, dtype=dtype)
        figures[title] = near(title, max(rank_results), LIMITS[dtype])
    alone = job(1, "losses", config={})[0]
    for title, count, config in (
        ("2 partitions, activation checkpointing", 2, {**SPLIT, "recompute": True}),
        (
            "2 partitions, offloaded activations",
            2,
            {**SPLIT, "recompute": True, "offload_activations": True},
        ),
        ("2 tensor ranks", 2, TENSOR),
        ("2 tensor ranks, 2 partitions", 4, {**TENSOR, **SPLIT}),
        ("a module on a stream of its own", 2, {**SPLIT, "side_stream": True}),
    )[: None if device == "cuda" else 1]:
        figures[title] = near(title, worst(job(count, "losses", config=config), alone), 1e-10)
    for kind, limit in list(HALVES.items())[: None if device == "cuda" else 1]:
        alone_losses = job(1, "losses", config={kind: True})[0]
        title = f"2 partitions, {kind}"
        figures[title] = near(
            title, worst(job(2, "losses", config={**SPLIT, kind: True}), alone_losses), limit
        )
    with tempfile.TemporaryDirectory() as folder:
        for partial in (True, False):
            title = f"{'partial' if partial else 'full'} checkpoint"
            rank_results = job(2, "resumed", folder=f"{folder}/{partial}", partial=partial)
            # A full checkpoint has no optimizer: the fourth loss is the model's.
            count = 6 if partial else 4
            figures[title] = near(
                title,
                worst([rank_losses[:count] for rank_losses in rank_results], alone[:count]),
                1e-10,
            )
    for schedule in ("simple", "interleaved"):
        figures[f"step, {schedule}"] = job(2, "step_times", schedule=schedule)[0]
    return figures


def step_times(device: str, schedule: str) -> str:
    """Return the times of a step and of one of torch's Schedule1F1B in the same run, and the
    transports of both.

    Ranks that share a GPU take turns on it: this says nothing of two GPUs.
    """
    import statistics

    import pipeline

    rows = 512 if device == "cuda" else 16
    seconds_of = pipeline.rank_steps(schedule, rounds=3, device=device, rows=rows)
    carrier = "NCCL" if device == "cuda" else "gloo, on CPUs"
    ours, peer = (statistics.median(seconds_of[name]) for name in ("ours", "peer"))
    return f"step, {schedule}: {ours:.3f} s, Schedule1F1B {peer:.3f} s ({carrier})"


def worst(rank_losses: list[list[float]], expected: list[float]) -> float:
    """Return the largest difference of any rank's losses."""
    return max(
        abs(a - b) for one_rank in rank_losses for a, b in zip(one_rank, expected, strict=True)
    )


def equality_of(device: str, config: dict[str, Any], dtype: str) -> float:
    """Train each model on these ranks and a copy of it in this process.

    Return the largest difference of anything.
    """
    import equality
    import networks
    import torch

    import smdistributed.modelparallel.torch as smp

    place, kind = torch.device(device, 0), getattr(torch, dtype)
    smp.init(config)

    def data(name: str, seed: int, count: int) -> Any:
        x, y = networks.data(name, seed, count, kind)
        return x.to(place), y.to(place)

    largest = 0.0
    for name in MATRIX:
        plain = networks.build(name, kind).to(place)
        difference = equality.compare(
            plain,
            functools.partial(networks.loss_of, name),
            functools.partial(data, name),
            owner=networks.places(plain, smp.pp_size()),
        )
        print(name, difference, flush=True)
        largest = max(largest, difference.largest)
    smp.barrier()
    return largest


def trainer(device: str, config: dict[str, Any]) -> Any:
    """Start smp.

    Return its model, its optimizer, and a function that trains some steps and returns their losses.
    """
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    config = dict(config)
    recompute, side = config.pop("recompute", False), config.pop("side_stream", False)
    half = next((kind for kind in HALVES if config.get(kind)), None)
    smp.init({"microbatches": 4, **config})
    place = torch.device(device, 0)

    class Aside(nn.Linear):
        """Computes on a stream of its own, as some attention code does."""

        def forward(self, value: Any) -> Any:
            if not (side and device == "cuda"):
                return super().forward(value)
            before, own = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            own.wait_stream(before)
            with torch.cuda.stream(own):
                result = super().forward(value)
            before.wait_stream(own)
            result.record_stream(before)
            return result

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            layers = [
                nn.Sequential(nn.Linear(16, 32), nn.Tanh(), Aside(32, 16), nn.LayerNorm(16))
                for _ in range(4)
            ]
            self.body, self.head = nn.Sequential(*layers), nn.Linear(16, 4)

        def forward(self, value: Any) -> Any:
            return self.head(self.body(value))

    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        dtype = torch.float32 if half else torch.float64
        network = Network().to(dtype)
    model: Any = smp.DistributedModel(network)
    if recompute:
        smp.set_activation_checkpointing(model.module.body)
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    scale = {"init_scale": 2.0**8}
    optimizer: Any = smp.DistributedOptimizer(
        plain, dynamic_loss_scale=True, dynamic_loss_args=scale
    )

    @smp.step
    def step(model: Any, data: Any) -> Any:
        output = model(data).float() if half else model(data)
        loss = output.sub(1).pow(2).mean()
        model.backward(loss)
        return loss

    def train(steps: range) -> list[float]:
        losses = []
        for number in steps:
            data = torch.randn(16, 16, generator=torch.Generator().manual_seed(number)).double()
            dtype = torch.float32 if half else torch.float64
            data = data.to(place, dtype)
            optimizer.zero_grad()
            loss = step(model, data).reduce_mean()
            optimizer.step()
            losses.append(float(loss))
        return losses

    return model, optimizer, train


def losses(device: str, config: dict[str, Any]) -> list[float]:
    """Train six steps."""
    import smdistributed.modelparallel.torch as smp

    loss_values: list[float] = trainer(device, config)[2](range(6))
    smp.barrier()
    return loss_values


def resumed(device: str, folder: str, partial: bool) -> list[float]:
    """Train three steps, save, go astray, load, and train three more."""
    import smdistributed.modelparallel.torch as smp

    model, optimizer, train = trainer(device, SPLIT)
    first = train(range(3))
    smp.save_checkpoint(folder, tag="third", partial=partial, model=model, optimizer=optimizer)
    train(range(3))
    smp.resume_from_checkpoint(folder, tag="third", partial=partial)
    loss_values: list[float] = first + train(range(3, 6))
    smp.barrier()
    return loss_values


if __name__ == "__main__":
    main(globals())
