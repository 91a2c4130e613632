"""Trains a small network whose layers are on two ranks, with smdistributed.modelparallel (smp);
resumes from its last checkpoint.

The library cuts the model into partitions, and `@smp.step` runs a step as a pipeline of
microbatches. How many of both there are is in the job's hyperparameter `mp_parameters`. `train`
starts the ranks under mpirun, on one host or several. Rank 0 prints the loss. A checkpoint has a
file for each rank, so the job goes on with as many ranks as it had.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

WIDTH = 64


def make_model(layers):
    """Return a network that predicts one number from WIDTH numbers."""
    blocks = []
    for _ in range(layers):
        blocks += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def batch_of(step, size, device):
    """Return inputs and targets of a step: the same ones whenever the job begins again."""
    generator = torch.Generator().manual_seed(step * smp.dp_size() + smp.dp_rank())
    inputs = torch.randn(size, WIDTH, generator=generator)
    targets = torch.sin(inputs[:, :1]) + inputs[:, 1:2]
    return inputs.to(device), targets.to(device)


@smp.step
def train_step(model, inputs, targets):
    """Run one microbatch: `model.backward` in the place of `loss.backward`."""
    loss = nn.functional.mse_loss(model(inputs), targets)
    model.backward(loss)
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=40, help="steps")
    parser.add_argument("--batch", type=int, default=256, help="rows for each copy of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument(
        "--mp_parameters", help="comes with the job; the library reads SM_HP_MP_PARAMETERS"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    smp.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", smp.local_rank())
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = smp.DistributedModel(make_model(options.layers).to(device))
    adam = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    optimizer = smp.DistributedOptimizer(adam)

    first = 1
    folder = Path(os.environ.get("TRAINWORKS_CHECKPOINT_DIRECTORY", "checkpoints"))
    if (folder / "newest").exists():
        first = smp.resume_from_checkpoint(folder)["step"] + 1
        if smp.rank() == 0:
            print(f"continues with step {first}, from {folder}", flush=True)

    for step in range(first, options.steps + 1):
        inputs, targets = batch_of(step, options.batch, device)
        optimizer.zero_grad()
        loss = train_step(model, inputs, targets).reduce_mean()
        optimizer.step()
        if smp.rank() == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % options.save_every == 0:
            content = {"step": step}
            smp.save_checkpoint(
                folder,
                f"step-{step}",
                model=model,
                optimizer=optimizer,
                user_content=content,
                num_kept_partial_checkpoints=2,
            )
    smp.barrier()


if __name__ == "__main__":
    main()
