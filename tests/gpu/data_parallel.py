"""DDP, FSDP2 and smddp on 2 and 4 ranks equal one process."""

from __future__ import annotations

from typing import Any

from together import main, near, ranks

NEEDS = ("torch", "cuda", "nccl")
BOUND = 150

STEPS, BATCH = 3, 8


def run(options: dict[str, Any]) -> dict[str, float]:
    device = options["device"]
    figures = {}
    for count in (2, 4):
        for kind, backend in (("ddp", ""), ("ddp", "smddp"), ("fsdp2", "")):
            differences = ranks(__file__, count, "train", device=device, kind=kind, backend=backend)
            title = f"{kind} {backend or 'of torch'}, {count} ranks"
            figures[title] = near(title, max(differences), 1e-10)
    return figures


def train(device: str, kind: str, backend: str) -> float:
    """Return the largest difference of a parameter from one process that trains
    on the samples of all ranks.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    if backend == "smddp":
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  registers it
    dist.init_process_group(backend or ("nccl" if device == "cuda" else "gloo"))
    rank, size = dist.get_rank(), dist.get_world_size()
    place = torch.device(device, 0)
    if device == "cuda":
        torch.cuda.set_device(place)

    def network() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)
        ).double()

    plain, model = network().to(place), network().to(place)
    if kind == "ddp":
        device_ids = [0] if device == "cuda" else None
        trained: Any = nn.parallel.DistributedDataParallel(model, device_ids=device_ids)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device, (size,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        trained = fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (plain, trained)]
    samples = (
        torch.randn(STEPS, size, BATCH, 16, generator=torch.Generator().manual_seed(1))
        .double()
        .to(place)
    )
    for step in range(STEPS):
        plain(samples[step].flatten(0, 1)).pow(2).mean().backward()
        trained(samples[step, rank]).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    worst = 0.0
    for plain_parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
        full_tensor: Any = other.full_tensor() if hasattr(other, "full_tensor") else other
        worst = max(worst, (plain_parameter - full_tensor).abs().max().item())
    dist.barrier()
    dist.destroy_process_group()
    return worst


if __name__ == "__main__":
    main(globals())
