"""Several ranks on one GPU: NCCL's all-reduce, sends that cross, every type as bytes."""

from __future__ import annotations

from typing import Any

from together import main, ranks

NEEDS = ("torch", "cuda", "nccl")
BOUND = 90

MIB = 1 << 20


def run(options: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{count} ranks": ranks(__file__, count, "exchange", device=options["device"])[0]
        for count in (2, 4)
    }


def exchange(device: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    place = torch.device(device, 0)
    total = torch.full((MIB,), float(rank + 1), device=place)
    dist.all_reduce(total)
    assert bool((total == size * (size + 1) / 2).all()), total
    left, right = (rank - 1) % size, (rank + 1) % size
    groups = {}
    for source in range(size):
        for target in {(source + 1) % size, (source - 1) % size}:
            groups[source, target] = dist.new_group([source, target])
    for number in (1, 1000, 4 * MIB):
        # Both directions at once, each on a communicator of its own.
        sent = torch.arange(number, device=place) % 251 + rank
        out = sent.view(torch.uint8)
        into = {peer: torch.empty_like(out) for peer in (left, right)}
        works: list[Any] = [
            dist.isend(out, peer, group=groups[rank, peer]) for peer in {left, right}
        ]
        works += [dist.irecv(into[peer], peer, group=groups[peer, rank]) for peer in {left, right}]
        for work in works:
            work.wait()
        for peer, data in into.items():
            assert torch.equal(data.view(torch.int64), sent - rank + peer), (rank, peer, number)
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    used = torch.cuda.mem_get_info() if device == "cuda" else (0, 0)
    dist.destroy_process_group()
    return {"MiB in use on the device": (used[1] - used[0]) // MIB}


if __name__ == "__main__":
    main(globals())
