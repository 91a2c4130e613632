#!/usr/bin/env python3
"""Measures steps of the open smp's pipeline beside torch's own schedules, and a
remote call beside torch's own RPC.

Two ranks on this host with one thread each. Every step of ours is followed by one of torch's
`Schedule1F1B` in the same processes, on the same blocks: so what else the machine does slows both.
The ratio is what to compare. Measure on a quiet machine: two ranks need two cores.

`.venv/bin/python benchmarks/pipeline.py --write` runs the ranks with the Python
that `make torch` installs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".cache" / "peers" / "smdistributed" / "bin" / "python"
LIBRARY = ROOT / "smdistributed"

MICROBATCHES = 8
ACTIVE = 4
WIDTH, ROWS, BLOCKS = 512, 512, 2
"""Blocks of a transformer's feed-forward part, half of them on each rank: about
30 ms forward for each microbatch.
"""

STEPS = 2
CALLS = 200


# --- a rank ---------------------------------------------------------------------------------------


def rank_steps(schedule: str, rounds: int, device: str = "cpu", rows: int = ROWS) -> dict[str, Any]:
    """Measure steps of one schedule of ours, and of torch's, between two ranks
    with a device of this kind.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
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

    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": MICROBATCHES,
            "pipeline": schedule,
            "active_microbatches": ACTIVE,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    torch.manual_seed(0)
    rank = smp.rank()
    blocks = [Block() for _ in range(BLOCKS)]
    for block in blocks[BLOCKS // 2 :]:
        smp.set_partition(block, 1)
    place = torch.device(device, 0) if device != "cpu" else torch.device(device)
    model = smp.DistributedModel(nn.Sequential(*blocks))
    data = torch.randn(rows * MICROBATCHES, WIDTH, device=place)
    target = torch.randn(rows * MICROBATCHES, WIDTH, device=place)

    @smp.step
    def train(model: Any, data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.mse_loss(model(data), target)
        model.backward(loss)
        return loss

    part = nn.Sequential(*[Block() for _ in range(BLOCKS // 2)]).to(place)
    stage = PipelineStage(part, rank, 2, place)
    theirs = Schedule1F1B(stage, MICROBATCHES, loss_fn=functional.mse_loss)

    def our_step() -> None:
        train(model, data, target)
        model.zero_grad()

    def their_step() -> None:
        if rank == 0:
            theirs.step(data)
        else:
            theirs.step(target=target)
        part.zero_grad()

    def seconds(step: Callable[[], None]) -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
            dist.barrier()
        if device != "cpu":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / STEPS

    for step in (our_step, their_step):
        seconds(step)
    started = time.perf_counter()
    for _ in range(5):
        part(data[:rows]).sum().item()
    alone = (time.perf_counter() - started) / 5
    ours, peer = [], []
    for _ in range(rounds):
        ours.append(seconds(our_step))
        peer.append(seconds(their_step))
    return {"ours": ours, "peer": peer, "stage": alone}


SERVED: list[Any] = []
"""The module of the peer's remote call, on each rank."""


def serve(value: Any) -> Any:
    """Run the module, for a peer's remote call."""
    import torch

    with torch.no_grad():
        return SERVED[0](value)


def rank_calls(rounds: int) -> dict[str, Any]:
    """Measure remote calls of a module with tiny tensors, without gradients and
    with a backward pass.
    """
    import torch
    from torch import nn
    from torch.distributed import rpc

    import smdistributed.modelparallel.torch as smp

    torch.set_num_threads(1)
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": 1,
            "auto_partition": False,
            "default_partition": 0,
        }
    )

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here, self.there = nn.Linear(4, 4), nn.Linear(4, 4)
            smp.set_partition(self.there, 1)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            value = self.here(value)
            for _ in range(CALLS):
                value = self.there(value)
            return value * 1

    model = smp.DistributedModel(Net())
    value = torch.randn(4, 4)

    @smp.step
    def evaluate(model: Any, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(value)

    @smp.step
    def train(model: Any, value: torch.Tensor) -> torch.Tensor:
        loss = model(value).sum()
        model.backward(loss)
        return loss

    def seconds(step: Callable[..., Any]) -> float:
        smp.barrier()
        started = time.perf_counter()
        step(model, value)
        return (time.perf_counter() - started) / CALLS

    def peer_seconds() -> float:
        smp.barrier()
        started = time.perf_counter()
        if smp.rank() == 0:
            result = value
            for _ in range(CALLS):
                result = rpc.rpc_sync("rank1", serve, args=(result,))
        smp.barrier()
        return (time.perf_counter() - started) / CALLS

    SERVED.append(nn.Linear(4, 4))
    meeting = f"file://{tempfile.gettempdir()}/trainworks-rpc-{os.environ['MASTER_PORT']}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting, num_worker_threads=1)
    rpc.init_rpc(f"rank{smp.rank()}", rank=smp.rank(), world_size=2, rpc_backend_options=options)
    for step in (evaluate, train):
        seconds(step)
    peer_seconds()
    forward, both, peer = [], [], []
    for _ in range(rounds):
        forward.append(seconds(evaluate))
        peer.append(peer_seconds())
        both.append(seconds(train) / 2)
    rpc.shutdown()
    return {"forward": forward, "both": both, "peer": peer}


# --- the run --------------------------------------------------------------------------------------


def measure(python: Path, *what: str, script: str = __file__) -> dict[str, Any]:
    """Start the two ranks, and return what rank 0 measured.

    Raises:
        SystemExit: A rank failed; says with what words.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        variables = {
            **os.environ,
            "PYTHONPATH": str(LIBRARY),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [str(python), script, "--rank", *what]
        ranks.append(
            subprocess.Popen(
                command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    ended = [process.communicate(timeout=600) for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit("\n".join(text[-3000:] for _, text in ended))
    found: dict[str, Any] = json.loads(ended[0][0].strip().splitlines()[-1])
    return found


def main() -> None:
    """Measure, print the table, and with `--write` record it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", type=Path, default=PYTHON, help="the Python with torch that the ranks run on"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each figure")
    parser.add_argument(
        "--only", choices=("simple", "interleaved", "calls"), help="measure one figure"
    )
    parser.add_argument(
        "--write", action="store_true", help="record the figures in results.json and results.md"
    )
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        what, rounds = options.rank[0], int(options.rank[1])
        print(json.dumps(rank_calls(rounds) if what == "calls" else rank_steps(what, rounds)))
        return
    from measure import Figure, Section, describe, load, machine, write

    facts = machine()
    figures = []
    for schedule, limit in (("simple", 1.05), ("interleaved", 1.10)):
        if options.only in (None, schedule):
            found = measure(options.python, schedule, str(options.rounds))
            ratios = [
                ours / theirs for ours, theirs in zip(found["ours"], found["peer"], strict=True)
            ]
            ratio = statistics.median(ratios)
            figures.append(
                Figure(
                    name=f"step, `{schedule}`",
                    unit="s",
                    ours=tuple(found["ours"]),
                    peer=tuple(found["peer"]),
                    note=(
                        f"beside `Schedule1F1B`: {ratio:.3f} times its time (median of"
                        f" {len(ratios)} rounds, each {', '.join(f'{r:.3f}' for r in ratios)}),"
                        f" promised at most {limit:g}: {'kept' if ratio <= limit else 'BROKEN'};"
                        f" {MICROBATCHES} microbatches, a stage's forward takes"
                        f" {1000 * found['stage']:.0f} ms for each"
                    ),
                )
            )
    if options.only in (None, "calls"):
        found = measure(options.python, "calls", str(options.rounds))
        figures += [
            Figure(
                name="remote call, tiny tensors",
                unit="ms",
                ours=tuple(1000 * value for value in found["forward"]),
                peer=tuple(1000 * value for value in found["peer"]),
                note=(
                    "from the call to its result, without gradients; the peer is"
                    " `torch.distributed.rpc.rpc_sync`; promised at most 0.25 ms:"
                    f" {'kept' if statistics.median(found['forward']) <= 0.00025 else 'BROKEN'}"
                ),
            ),
            Figure(
                name="the same with gradients, half of forward and backward",
                unit="ms",
                ours=tuple(1000 * value for value in found["both"]),
                note="recording the graph, and the two messages of the backward pass, are in it",
            ),
        ]
    section = Section(
        title="Steps of the open smp's pipeline",
        machine={**facts, "load at the end": load()},
        figures=tuple(figures),
        peer=(
            "`Schedule1F1B` of `torch.distributed.pipelining` in the same two processes with gloo,"
            " the same blocks, data and loss; each round has 2 steps of ours, then 2 of the peer's."
        ),
    )
    if options.write:
        write("pipeline", section)
    print(describe(section))


if __name__ == "__main__":
    sys.exit(main())
