"""Trains a small network with Lightning and DDP; resumes from its last checkpoint.

`train` starts one process for each rank under torchrun. Lightning finds torchrun's variables by
itself; it has to be told the number of hosts and of processes for each host.
"""

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    """Learns the sum of the squares of eight numbers."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, _):
        numbers, wanted = batch
        loss = nn.functional.mse_loss(self.network(numbers), wanted)
        if self.global_step % 10 == 0 and self.global_rank == 0:
            print(f"step {self.global_step} loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def make_data():
    """Return numbers and what is to be learnt, the same on every rank.

    Lightning gives each rank its own share.
    """
    numbers = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(numbers, numbers.square().sum(dim=1, keepdim=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--batch", type=int, default=32, help="rows for each rank")
    options = parser.parse_args()

    lightning.seed_everything(0)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    folder = os.environ.get("TRAINWORKS_CHECKPOINT_DIRECTORY", "checkpoints")
    saving = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=options.save_every, save_top_k=-1
    )
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=local,
        num_nodes=world // local,
        strategy="ddp",
        max_steps=options.steps,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    newest = os.environ.get("TRAINWORKS_RESUME_FROM")
    if newest and trainer.is_global_zero:
        print(f"continues from {newest}", flush=True)
    batches = DataLoader(make_data(), batch_size=options.batch, shuffle=True)
    trainer.fit(Regression(), batches, ckpt_path=newest)


if __name__ == "__main__":
    main()
