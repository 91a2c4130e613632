"""Trains a small transformer, sharded over all ranks with FSDP2; resumes from its last checkpoint.

The data are sequences in which each number follows from the one before, so that there is something
to learn. `train` starts one process for each rank under torchrun. Rank 0 prints the loss; a
checkpoint holds the shards of all ranks (torch.distributed.checkpoint), and any number of ranks can
read it.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

VOCABULARY = 64
LENGTH = 32
WIDTH = 64


class Block(nn.Module):
    """Attention to earlier numbers, then two linear layers."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=4, batch_first=True)
        self.linear = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.first_norm = nn.LayerNorm(WIDTH)
        self.second_norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden, mask):
        normed = self.first_norm(hidden)
        attended, _ = self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)
        hidden = hidden + attended
        return hidden + self.linear(self.second_norm(hidden))


class Transformer(nn.Module):
    """Predicts the next number of each place of a sequence."""

    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, numbers):
        mask = nn.Transformer.generate_square_subsequent_mask(
            numbers.shape[1], device=numbers.device
        )
        hidden = self.embedding(numbers)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(hidden.flatten(0, 1))


def batch_of(step, rank, size, device):
    """Return sequences for this step and rank: the same ones whenever the job begins again."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
    numbers = torch.randint(VOCABULARY, (size, 1), generator=generator)
    sequence = [numbers]
    for _ in range(LENGTH):
        sequence.append((3 * sequence[-1] + 1) % VOCABULARY)
    whole = torch.cat(sequence, dim=1).to(device)
    return whole[:, :-1], whole[:, 1:]


def save(folder, step, model, optimizer):
    """Write the checkpoint of a step.

    It has its final name only when all ranks have written their shards.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    unfinished = folder / f"unfinished-step-{step}"
    checkpoint.save(state, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(folder / f"step-{step}")
    dist.barrier()


def load(path, model, optimizer):
    """Read a checkpoint; return the step after it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    checkpoint.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state["step"] + 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--batch", type=int, default=16, help="sequences for each rank")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = Transformer(options.layers).to(device)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    first = 1
    newest = os.environ.get("TRAINWORKS_RESUME_FROM")
    if newest:
        first = load(newest, model, optimizer)
        if rank == 0:
            print(f"continues with step {first}, from {newest}", flush=True)

    folder = Path(os.environ.get("TRAINWORKS_CHECKPOINT_DIRECTORY", "checkpoints"))
    folder.mkdir(parents=True, exist_ok=True)
    for step in range(first, options.steps + 1):
        numbers, following = batch_of(step, rank, options.batch, device)
        logits = model(numbers)
        loss = nn.functional.cross_entropy(logits, following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % options.save_every == 0:
            save(folder, step, model, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
