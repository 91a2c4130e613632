#!/usr/bin/env python3
"""Measures a training step of the open smp's sharded data parallelism beside
torch's `fully_shard`, used directly.

Two ranks on this host with one thread each. Every step of ours is followed by one of the peer's in
the same processes, on the same blocks, microbatches, data and optimizer: so what else the machine
does slows both. The ratio is what to compare. Measure on a quiet machine: two ranks need two cores.

`.venv/bin/python benchmarks/sharding.py --write` runs the ranks with the Python
that `make torch` installs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import Figure, Section, describe, load, machine, write
from pipeline import PYTHON, measure

MICROBATCHES, LIMIT = 4, 1.05
WIDTH, ROWS, BLOCKS = 256, 256, 4
STEPS = 2


def rank_steps(rounds: int) -> dict[str, list[float]]:
    """Measure steps of ours and of torch's, in turns."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional

    import smdistributed.modelparallel.torch as smp

    torch.set_num_threads(1)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.Linear(4 * WIDTH, WIDTH),
            )

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value + self.down(functional.gelu(self.up(self.norm(value))))

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Block() for _ in range(BLOCKS)])

    settings = {"sharded_data_parallel_degree": 2, "ddp": True, "microbatches": MICROBATCHES}
    smp.init({**settings, "sdp_gradient_clipping": 0})  # the peer does not clip
    model = smp.DistributedModel(network())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    direct: Any = network()
    for block in direct:
        fully_shard(block)
    fully_shard(direct)
    adam = torch.optim.AdamW(direct.parameters(), lr=1e-3)
    data, target = torch.randn(ROWS * MICROBATCHES, WIDTH), torch.randn(ROWS * MICROBATCHES, WIDTH)

    @smp.step
    def train(model: Any, data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.mse_loss(model(data), target)
        model.backward(loss)
        return loss

    def our_step() -> None:
        train(model, data, target)
        optimizer.step()
        optimizer.zero_grad()

    def their_step() -> None:
        parts = zip(data.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
        for number, (inputs, labels) in enumerate(parts, 1):
            direct.set_requires_gradient_sync(number == MICROBATCHES)
            direct.set_is_last_backward(number == MICROBATCHES)
            (functional.mse_loss(direct(inputs), labels) / MICROBATCHES).backward()
        adam.step()
        adam.zero_grad()

    def seconds(step: Callable[[], None]) -> tuple[float, float]:
        """Return how long a step takes, and how long it has a processor."""
        dist.barrier()
        started, worked = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            step()
        dist.barrier()
        return (time.perf_counter() - started) / STEPS, (time.process_time() - worked) / STEPS

    for step in (our_step, their_step):
        seconds(step)
    pairs = [(seconds(our_step), seconds(their_step)) for _ in range(rounds)]
    return {
        "ours": [ours for (ours, _), _ in pairs],
        "peer": [peer for _, (peer, _) in pairs],
        "ours, processor": [ours for (_, ours), _ in pairs],
        "peer, processor": [peer for _, (_, peer) in pairs],
    }


def main() -> None:
    """Measure, print the table, and with `--write` record it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", type=Path, default=PYTHON, help="the Python with torch that the ranks run on"
    )
    parser.add_argument("--rounds", type=int, default=9, help="measurements of the figure")
    parser.add_argument(
        "--write", action="store_true", help="record the figure in results.json and results.md"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(rank_steps(options.rank)))
        return
    facts = machine()
    found = measure(options.python, str(options.rounds), script=__file__)
    ratios = [ours / theirs for ours, theirs in zip(found["ours"], found["peer"], strict=True)]
    ratio = statistics.median(ratios)
    section = Section(
        title="A step of the open smp's sharded data parallelism",
        machine={**facts, "load at the end": load()},
        figures=(
            Figure(
                name="step, degree 2",
                unit="s",
                ours=tuple(found["ours"]),
                peer=tuple(found["peer"]),
                note=(
                    f"{ratio:.3f} times the peer's time (median of {len(ratios)} rounds, each "
                    f"{', '.join(f'{r:.3f}' for r in ratios)}), promised at most {LIMIT:g}: "
                    f"{'kept' if ratio <= LIMIT else 'BROKEN'}; {MICROBATCHES} microbatches, AdamW"
                ),
            ),
            Figure(
                name="the same, time of a processor",
                unit="s",
                ours=tuple(found["ours, processor"]),
                peer=tuple(found["peer, processor"]),
                note="of rank 0, all its threads: what else the machine does counts less",
            ),
        ),
        peer=(
            "`torch.distributed.fsdp.fully_shard` in the same two processes with gloo, on the same"
            " blocks, data and optimizer, with gradients summed once in a step; each round has"
            f" {STEPS} steps of ours, then {STEPS} of the peer's."
        ),
    )
    if options.write:
        write("sharding", section)
    print(describe(section))


if __name__ == "__main__":
    sys.exit(main())
