"""The order of a step as data: which rank runs what when, where each pass of a
microbatch takes one unit of time.
"""

from __future__ import annotations

import heapq
import itertools

from smdistributed.modelparallel.torch.exceptions import SMPConfigError

from .scheduler import BACKWARD, FORWARD, INTERLEAVED, SIMPLE, START

__all__ = ["actions", "print_schedule"]


def print_schedule(
    partitions: int,
    microbatches: int,
    pipeline: str = "interleaved",
    active_microbatches: int | None = None,
) -> None:
    """Print which passes each rank of a pipeline runs, and when: ``1F0`` is
    partition 1, forward, microbatch 0.

    It is the order of a model whose partitions follow each other, with passes of equal length. In a
    job passes take what they take, and the same rules choose among what has arrived. It needs no
    ``smp.init``.

    Args:
        partitions: The pipeline parallel degree.
        microbatches: Microbatches of a step.
        pipeline: ``interleaved`` or ``simple``.
        active_microbatches: The most in flight under ``interleaved``; None: 2 more than partitions.

    Raises:
        SMPConfigError: A number is below 1, or there is no such schedule.
    """
    columns = actions(partitions, microbatches, pipeline, active_microbatches)
    width = max(len(each) for column in columns for each in (*column, f"rank {partitions - 1}"))
    rows = [[f"rank {rank}" for rank in range(partitions)], *zip(*columns, strict=True)]
    for step, row in enumerate(rows, -1):
        print(
            "  ".join(
                [f"{step:3}:" if step >= 0 else "    ", *(each.ljust(width) for each in row)]
            ).rstrip()
        )


def actions(
    partitions: int,
    microbatches: int,
    pipeline: str = "interleaved",
    active_microbatches: int | None = None,
) -> list[list[str]]:
    """Return what ``print_schedule`` prints: for each rank its passes, one for
    each unit of time, or ``""``.
    """
    least = min(partitions, microbatches, 1 if active_microbatches is None else active_microbatches)
    if least < 1 or pipeline not in ("interleaved", "simple"):
        raise SMPConfigError(
            "a schedule needs 1 or more partitions, microbatches and active_microbatches, and"
            f" 'interleaved' or 'simple', got {partitions}, {microbatches}, {active_microbatches}"
            f" and {pipeline!r}"
        )
    simple, last = pipeline == "simple", partitions - 1
    priorities = SIMPLE if simple else INTERLEAVED
    limit = microbatches if simple else active_microbatches or partitions + 2
    ready: list[list[tuple[int, int, int, str]]] = [[] for _ in range(partitions)]
    arrivals = itertools.count()
    columns: list[list[str]] = [[] for _ in range(partitions)]
    started = finished = 0
    held: list[int] = []  # under 'simple' no backward starts before all forwards are made

    def arrive(rank: int, kind: str, microbatch: int) -> None:
        heapq.heappush(ready[rank], (priorities[kind], microbatch, next(arrivals), kind))

    while finished < microbatches:
        ran = []
        for rank, waiting in enumerate(ready):
            startable = rank == 0 and started < min(microbatches, finished + limit)
            if startable and (not waiting or (priorities[START], started) < waiting[0][:2]):
                kind, microbatch, started = FORWARD, started, started + 1
            elif waiting:
                _, microbatch, _, kind = heapq.heappop(waiting)
            else:
                columns[rank].append("")
                continue
            columns[rank].append(f"{rank}{kind}{microbatch}")
            ran.append((rank, kind, microbatch))
        for rank, kind, microbatch in ran:
            if kind == FORWARD and rank < last:
                arrive(rank + 1, FORWARD, microbatch)
            elif kind == FORWARD:
                held.append(microbatch)
                if not simple or len(held) == microbatches:
                    for each in held:
                        arrive(rank, BACKWARD, each)
                    held.clear()
            elif rank:
                arrive(rank - 1, BACKWARD, microbatch)
            else:
                finished += 1
    return columns
