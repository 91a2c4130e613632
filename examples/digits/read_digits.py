"""Reads the file that prepare.py writes; the three training scripts share it."""

import csv
from pathlib import Path

import torch


def read_digits(folder):
    """Return images [N, 64] in 0..1 and labels [N] from `digits.csv`: 64 pixels
    in 0..16, then the digit.
    """
    with (Path(folder) / "digits.csv").open(newline="") as file:
        rows = torch.tensor([[float(cell) for cell in row] for row in csv.reader(file)])
    return rows[:, :64] / 16, rows[:, 64].long()
