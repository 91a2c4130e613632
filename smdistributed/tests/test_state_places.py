"""Programs that keep state anywhere equal one process, or end with an error: none is silently wrong.

More by hand: SMP_STATE_PROGRAMS=2000.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from jobs import BY_HAND, forget
from ranks import run_ranks
from state_places import Program, drawn

PROGRAMS = int(os.environ.get("SMP_STATE_PROGRAMS", "200"))
SEED = int(os.environ.get("SMP_STATE_SEED", "1"))
MICROBATCHES = 4


def load(folder: str, name: str, program: Program) -> Any:
    """Write a program to a file and import it, as a user's module is."""
    file = Path(folder, f"{name}.py")
    if not file.exists():
        mine = file.with_suffix(f".{os.getpid()}")
        mine.write_text(program.text())
        mine.replace(file)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randn(2, 2 * MICROBATCHES, 4, generator=torch.Generator().manual_seed(step)).double()
    return both[0], both[1]


def one_process(root: torch.nn.Module, steps: int) -> list[float]:
    """Return the loss of each microbatch, and the sum of all gradients at the end."""
    losses = []
    for step in range(1, steps + 1):
        x, y = batch(step)
        for xs, ys in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = ((root(xs, step) - ys) ** 2).mean()
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
    return losses


def difference(folder: str, number: int, program: Program) -> float:
    """Return the largest difference between the losses and gradients of this job and of one process."""
    import smdistributed.modelparallel.torch as smp

    steps = program.first + 2
    torch.manual_seed(0)
    plain = load(folder, f"plain{number}", program).Root().double()
    expected = one_process(plain, steps)
    torch.manual_seed(0)
    root = load(folder, f"program{number}", program).Root().double()
    smp.set_partition(root.body, 1)
    model = smp.DistributedModel(root)

    @smp.step
    def train(model: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> Any:
        loss = ((model(x, step) - y) ** 2).mean()
        model.backward(loss)
        return loss

    losses: list[float] = []
    for step in range(1, steps + 1):
        losses += [each.item() for each in train(model, *batch(step), step).outputs]
    differences = [abs(one - other) for one, other in zip(losses, expected, strict=True)]
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.local_named_parameters():
        mine, theirs = parameter.grad, gradients[name]
        assert mine is not None
        assert theirs is not None
        differences.append((mine - theirs).abs().max().item())
    forget()
    return max(differences)


def train_all(folder: str, programs: list[Program]) -> list[float | str]:
    """Return how far each program is from one process, or the error that refuses it."""
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.exceptions import StepError

    smp.init({**BY_HAND, "microbatches": MICROBATCHES})
    found: list[float | str] = []
    for number, program in enumerate(programs):
        try:
            found.append(difference(folder, number, program))
        except StepError as error:
            found.append(str(error))
            forget()
        smp.barrier()
    return found


def test_drawn_programs_equal_one_process_or_are_refused(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    programs = [drawn(chance) for _ in range(PROGRAMS)]
    results = run_ranks(2, train_all, str(tmp_path), programs, limit=600 + PROGRAMS)
    silent, unclear = [], []
    for program, *found in zip(programs, *results, strict=True):
        texts = [each for each in found if isinstance(each, str)]
        if not texts and max(each for each in found if isinstance(each, float)) > 1e-9:
            silent.append((program, found))
        if texts and not any("smp.set_partition" in text or "Keep it smaller" in text for text in texts):
            unclear.append((program, found))
    assert not silent, "\n".join(f"{program}: {found}" for program, found in silent)
    assert not unclear, "\n".join(f"{program}: {found}" for program, found in unclear)
