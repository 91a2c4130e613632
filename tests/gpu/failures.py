"""Test smp: a rank that fails or dies ends the whole pipeline, also ranks that wait in NCCL."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from together import RanksError, main, ranks

NEEDS = ("torch", "cuda", "nccl")
BOUND = 120

KILLED = -signal.SIGKILL


def run(options: dict[str, Any]) -> dict[str, str]:
    figures = {}
    for how, own in (("raise", 1), ("kill", KILLED)):
        result = failure(options["device"], how)
        # A rank that had not ended by itself would have been killed.
        assert result.statuses == [1, own], f"{how}: {result}"
        (failure_line,) = [
            line for line in result.output[0].splitlines() if line.startswith("smp: ")
        ]
        assert "rank 1 (pp_rank 1) failed: " in failure_line, failure_line
        figures[how] = failure_line
    return figures


def failure(device: str, how: str) -> RanksError:
    """Return how the ranks ended."""
    try:
        ranks(__file__, 2, "fail", device=device, how=how)
    except RanksError as error:
        return error
    raise AssertionError(f"{how}: every rank ended with status 0")


def fail(device: str, how: str) -> None:
    """Train; then rank 1 fails, while rank 0 has begun the next step and sends to it."""
    from pipelines import SPLIT, trainer

    import smdistributed.modelparallel.torch as smp

    train = trainer(device, SPLIT)[2]
    train(range(2))
    smp.barrier()
    if smp.rank() == 1:
        time.sleep(1)  # for a send of rank 0 to wait in NCCL
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the cause")
    train(range(2, 4))


if __name__ == "__main__":
    main(globals())
