"""Programs that keep state anywhere equal one process, or end with an error:
none is silently wrong.

State that changes first in a later step may be refused. State that changes in
the first step is followed.

More by hand: SMP_STATE_PROGRAMS=2000.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from jobs import BY_HAND, forget
from ranks import RankError, run_ranks
from state_places import PLACES, Program, drawn

PROGRAMS = int(os.environ.get("SMP_STATE_PROGRAMS", "200"))
SEED = int(os.environ.get("SMP_STATE_SEED", "1"))
MICROBATCHES = 4
REMEDIES = ("smp.set_partition", "Keep it smaller")
"""Words that the text of a refusal has, among others: the advice."""


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
    both = torch.randn(
        2, 2 * MICROBATCHES, 4, generator=torch.Generator().manual_seed(step)
    ).double()
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
    """Return the largest difference between the losses and gradients of this
    job and of one process.
    """
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
        losses += [output.item() for output in train(model, *batch(step), step).outputs]
    differences = [abs(loss - other) for loss, other in zip(losses, expected, strict=True)]
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.local_named_parameters():
        mine, theirs = parameter.grad, gradients[name]
        assert mine is not None
        assert theirs is not None
        differences.append((mine - theirs).abs().max().item())
    forget()
    return max(differences)


TOGETHER = datetime.timedelta(seconds=5)
"""How long a rank whose step failed waits for the other one to fail, too.

If the other one does not, the job ends.
"""


def train_all(folder: str, programs: list[Program]) -> None:
    """Write for each program how far it is from one process, and the text of
    the error if it was refused.
    """
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.exceptions import StepError

    smp.init({**BY_HAND, "microbatches": MICROBATCHES})
    store: Any = distributed_c10d._get_default_store()
    for number, program in enumerate(programs):
        error = None
        difference_found = 0.0
        try:
            difference_found = difference(folder, number, program)
        except StepError as raised:  # a failed step leaves the pipeline as it was
            error = raised
            forget()
        text = "" if error is None else str(error)
        Path(folder, f"{number} of rank {smp.rank()}").write_text(
            json.dumps([difference_found, text])
        )
        store.set(f"{number} {smp.rank()}", "")
        if error is not None:
            try:
                store.wait([f"{number} {1 - smp.rank()}"], TOGETHER)
            except RuntimeError:
                raise error from None
        smp.barrier()


@dataclass
class Results:
    """The results of programs: those that differ from one process, and those that were refused,
    with the texts.
    """

    silent: list[tuple[Program, float]] = field(default_factory=list)
    refused: list[tuple[Program, str]] = field(default_factory=list)


def run_all(folder: Path, programs: list[Program]) -> Results:
    """Run programs in few jobs of two ranks.

    One ends early where a step fails on one of the ranks only.
    """
    results = Results()
    left = list(programs)
    while left:
        job = folder / f"job{len(left)}"
        job.mkdir()
        error_text = ""
        try:
            run_ranks(2, train_all, str(job), left, limit=600 + 10 * len(left))
        except RankError as error:
            error_text = str(error)
        done = 0
        for number, program in enumerate(left):
            files = [job / f"{number} of rank {rank}" for rank in range(2)]
            both = [json.loads(file.read_text()) for file in files if file.exists()]
            if not both:
                break
            done += 1
            text = "\n".join(text for _, text in both if text)
            if text or len(both) < 2:
                results.refused.append((program, text or error_text))
            elif max(largest for largest, _ in both) > 1e-9:
                results.silent.append((program, max(largest for largest, _ in both)))
            if len(both) < 2:
                break
        assert done, error_text
        left = left[done:]
    return results


@pytest.mark.parametrize("count", [pytest.param(16, marks=pytest.mark.core), PROGRAMS])
def test_drawn_programs_equal_one_process_or_are_refused(count: int, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    chance = random.Random(f"{SEED} {count}")
    programs = [drawn(chance) for _ in range(count)]
    results = run_all(tmp_path, programs)
    assert not results.silent, "\n".join(f"{program}: {worst}" for program, worst in results.silent)
    unclear = []
    for program, text in results.refused:
        if not any(remedy in text for remedy in REMEDIES):
            unclear.append((program, text))
    assert not unclear, "\n".join(f"{program}: {text}" for program, text in unclear)
    followed = [
        program
        for program, _ in results.refused
        if program.first == 1 and not PLACES[program.place].stays
    ]
    assert not followed, f"state of the first step is followed: {followed}"
    assert len(results.refused) < len(programs)
