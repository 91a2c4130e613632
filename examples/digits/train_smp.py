"""Trains a small network on scikit-learn's handwritten digits, split over processes by
smdistributed.modelparallel.

A script for smp's first version: the library cuts the model into partitions, and `@smp.step` runs a
step as a pipeline of microbatches. How many of both is in the job's hyperparameter `mp_parameters`.
Started by `train` under mpirun, on one host or several. Prints the mean loss of each epoch, and
rank 0 writes the whole model to SM_MODEL_DIR/model.pt.
"""

import argparse
import os
from pathlib import Path

import torch
from read_digits import read_digits
from torch import nn

import smdistributed.modelparallel.torch as smp


@smp.step
def train_step(model, images, labels):
    """Run one microbatch: `model.backward` in the place of `loss.backward`."""
    loss = nn.functional.cross_entropy(model(images), labels)
    model.backward(loss)
    return loss


def train(options, device):
    """Train, say how it goes, and on rank 0 save the model."""
    torch.manual_seed(0)
    # Processes that hold parts of one model get the same images; each copy of
    # the model gets its own share.
    images, labels = (
        part[smp.dp_rank() :: smp.dp_size()].to(device)
        for part in read_digits(os.environ["SM_CHANNEL_TRAINING"])
    )
    layers = (nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = smp.DistributedModel(nn.Sequential(*layers).to(device))
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)
    )
    steps = len(images) // options.batch
    for epoch in range(options.epochs):
        total = 0.0
        for step in range(steps):
            batch = slice(step * options.batch, (step + 1) * options.batch)
            optimizer.zero_grad()
            total += train_step(model, images[batch], labels[batch]).reduce_mean().item()
            optimizer.step()
        losses = smp.allgather(total / steps, smp.DP_GROUP)
        if smp.rank() == 0:
            print(
                f"epoch {epoch} world {smp.size()} loss {sum(losses) / len(losses):.4f}", flush=True
            )
    if smp.dp_rank() == 0:
        # Of all partitions, which every process of this copy helps to collect.
        state = model.state_dict()
        if smp.rank() == 0:
            torch.save(state, Path(os.environ["SM_MODEL_DIR"]) / "model.pt")
    smp.barrier()


def main():
    """Read the arguments and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--mp_parameters", help="comes with the job; the library reads SM_HP_MP_PARAMETERS"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    smp.init()
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{smp.local_rank()}"
        torch.cuda.set_device(device)
    train(options, device)


if __name__ == "__main__":
    main()
