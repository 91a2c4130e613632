"""Trains a small network on scikit-learn's handwritten digits with smdistributed.dataparallel.

A script for smddp as its guide wants it: the backend is imported, the rest is PyTorch's. Started by
`train` under mpirun or under torchrun, on one host or several. Prints the mean loss of each epoch,
and rank 0 writes `model.pt` to SM_MODEL_DIR.
"""

import argparse
import gc
import os
from pathlib import Path

import torch
from read_digits import read_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  (registers the backend, and sets the rank's variables)


def train(options, rank, world):
    """Train, say how it goes, and on rank 0 save the model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    images, labels = (
        part[rank::world].to(device) for part in read_digits(os.environ["SM_CHANNEL_TRAINING"])
    )
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)
    steps = len(images) // options.batch
    for epoch in range(options.epochs):
        total = torch.zeros(1, device=device)
        for step in range(steps):
            batch = slice(step * options.batch, (step + 1) * options.batch)
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        distributed.all_reduce(total)
        if rank == 0:
            print(
                f"epoch {epoch} world {world} loss {total.item() / steps / world:.4f}", flush=True
            )
    if rank == 0:
        torch.save(model.module.state_dict(), Path(os.environ["SM_MODEL_DIR"]) / "model.pt")


def main():
    """Read the arguments, train, and leave together."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group(backend="smddp")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(options, distributed.get_rank(), distributed.get_world_size())
    # The model holds the process group, in a cycle that only the collector ends; see train.py.
    gc.collect()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
