"""Trains a small network with Ray Train: Ray starts a worker for each GPU, or on each host;
resumes from its last checkpoint.

`train` starts Ray's head and workers, and this program on the leader once all hosts have joined.
The run has a name and a folder that all hosts share: a program that is started again goes on with
the run of that name. Ray's workers are processes of torch.distributed.
"""

import argparse
import os
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

WIDTH = 64


def batch_of(step, size, device):
    """Return inputs and targets of a step: the same ones whenever the job begins again."""
    context = ray.train.get_context()
    seed = step * context.get_world_size() + context.get_world_rank()
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, WIDTH, generator=generator)
    targets = torch.sin(inputs[:, :1]) + inputs[:, 1:2]
    return inputs.to(device), targets.to(device)


def without_wrapper(model):
    """Return the model itself: with several workers DistributedDataParallel is around it."""
    return getattr(model, "module", model)


def load(model, optimizer):
    """Read the last checkpoint of the run; return the step to begin with."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 1
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / "state.pt", map_location="cpu")
    without_wrapper(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"] + 1
    if ray.train.get_context().get_world_rank() == 0:
        print(f"continues with step {first}", flush=True)
    return first


def report(step, loss, model, optimizer):
    """Hand the loss to Ray, and on rank 0 a checkpoint, too. All workers call it."""
    metrics = {"step": step, "loss": loss}
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        weights = without_wrapper(model).state_dict()
        state = {"model": weights, "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, Path(folder) / "state.pt")
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def train_loop(options):
    """Run on each worker."""
    torch.manual_seed(0)
    blocks = []
    for _ in range(options["layers"]):
        blocks += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model = prepare_model(nn.Sequential(*blocks, nn.Linear(WIDTH, 1)))
    device = ray.train.torch.get_device()
    optimizer = torch.optim.Adam(model.parameters(), lr=options["learning_rate"])
    first = load(model, optimizer)
    for step in range(first, options["steps"] + 1):
        inputs, targets = batch_of(step, options["batch"], device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and ray.train.get_context().get_world_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % options["save_every"] == 0:
            report(step, loss.item(), model, optimizer)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=40, help="steps")
    parser.add_argument("--batch", type=int, default=256, help="rows for each worker")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()

    ray.init()
    gpus = int(ray.cluster_resources().get("GPU", 0))
    workers = gpus or len(ray.nodes())
    folder = os.environ.get("TRAINWORKS_CHECKPOINT_DIRECTORY", "checkpoints")
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=vars(options),
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=gpus > 0),
        run_config=ray.train.RunConfig(name="example", storage_path=str(Path(folder).absolute())),
    )
    result = trainer.fit()
    print(f"the last checkpoint: {result.checkpoint.path}", flush=True)


if __name__ == "__main__":
    main()
