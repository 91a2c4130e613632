"""Trains a small transformer with DeepSpeed's ZeRO; resumes from its last checkpoint.

The data are sequences in which each number follows from the one before, so that there is something
to learn. `train` starts one process for each rank under torchrun: the script calls
`deepspeed.initialize`, and needs no `deepspeed` command. Rank 0 prints the loss. Each rank writes
its own part of a checkpoint, so a job resumes with as many ranks as it was saved with.
"""

import argparse
import os
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.distributed import destroy_process_group

VOCABULARY = 64
LENGTH = 32
WIDTH = 64


class Transformer(nn.Module):
    """Predicts the next number of each place of a sequence."""

    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, numbers):
        mask = nn.Transformer.generate_square_subsequent_mask(
            numbers.shape[1], device=numbers.device
        )
        hidden = self.layers(self.embedding(numbers), mask=mask, is_causal=True)
        return self.head(hidden.flatten(0, 1))


def make_batch(seed, size, device):
    """Return sequences and the number that follows each place: the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(VOCABULARY, (size, 1), generator=generator)
    columns = [numbers]
    for _ in range(LENGTH):
        columns.append((3 * columns[-1] + 1) % VOCABULARY)
    sequences = torch.cat(columns, dim=1).to(device)
    return sequences[:, :-1], sequences[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--batch", type=int, default=16, help="sequences for each rank")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO: 1, 2 or 3")
    options = parser.parse_args()

    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])

    torch.manual_seed(0)
    model = Transformer(options.layers)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=options.learning_rate),
        config={
            "train_micro_batch_size_per_gpu": options.batch,
            "zero_optimization": {"stage": options.stage},
            "zero_allow_untested_optimizer": True,
        },
    )

    first = 1
    newest = os.environ.get("TRAINWORKS_RESUME_FROM")
    if newest:
        checkpoint = Path(newest)
        _, state = engine.load_checkpoint(checkpoint.parent, tag=checkpoint.name)
        first = state["step"] + 1
        if rank == 0:
            print(f"continues with step {first}, from {newest}", flush=True)

    folder = os.environ.get("TRAINWORKS_CHECKPOINT_DIRECTORY", "checkpoints")
    for step in range(first, options.steps + 1):
        numbers, following = make_batch(step * ranks + rank, options.batch, engine.device)
        loss = nn.functional.cross_entropy(engine(numbers), following.flatten())
        engine.backward(loss)
        engine.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % options.save_every == 0:
            # The file `latest` names a checkpoint when all ranks have written their parts.
            engine.save_checkpoint(folder, tag=f"step-{step}", client_state={"step": step})
    destroy_process_group()


if __name__ == "__main__":
    main()
