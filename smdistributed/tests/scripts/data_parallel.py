"""Train with the backend smddp, which this script uses and does not import.

A second run loads the checkpoint of the first one.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(backend="smddp")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise RuntimeError("this script needs CUDA")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(rank)  # the wrapper sends rank 0's values
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).to(
        device
    )
    model = DistributedDataParallel(net, device_ids=[local_rank], output_device=local_rank)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    if os.path.exists(args.model):
        model.load_state_dict(torch.load(args.model, map_location={"cuda:0": f"cuda:{local_rank}"}))
    dist.barrier()
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x[:, :1] - x[:, 1:2])
    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=dist.get_world_size(), rank=rank
    )
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler, pin_memory=True)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=device)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"Epoch {epoch} Loss: {(total / len(loader) / dist.get_world_size()).item():.6f}")
    if rank == 0:
        torch.save(model.state_dict(), args.model)
        print("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
