"""The order of a step as data: the passes of each rank, with one unit of time for each pass of a
microbatch.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from smdistributed.modelparallel.torch.exceptions import SMPConfigError

from .scheduler import BACKWARD, FORWARD, INTERLEAVED, SIMPLE, START

__all__ = ["actions", "print_schedule"]


def print_schedule(
    partitions: int,
    microbatches: int,
    pipeline: str = "interleaved",
    active_microbatches: int | None = None,
) -> None:
    """Print the passes of each rank of a pipeline, one line for each unit of time.

    ``1F0`` is partition 1, forward, microbatch 0. The model is a chain of partitions, with passes
    of equal length. In a job passes have different lengths, and the same rules choose among the
    passes that are ready. ``smp.init`` is not needed.

    The lines go to standard output. No process group and no model is needed.

    Args:
        partitions: The pipeline parallel degree.
        microbatches: Microbatches of a step.
        pipeline: ``interleaved`` or ``simple``.
        active_microbatches: Largest number of microbatches in flight under ``interleaved``; None: 2
            more than partitions.

    Raises:
        SMPConfigError: A number is below 1, or the name of the schedule is unknown.
    """
    columns = actions(partitions, microbatches, pipeline, active_microbatches)
    titles = [f"rank {rank}" for rank in range(partitions)]
    width = max(map(len, titles))
    for column in columns:
        width = max(width, *map(len, column))
    _print_row("    ", titles, width)
    for time, row in enumerate(zip(*columns, strict=True)):
        _print_row(f"{time:3}:", row, width)


def _print_row(head: str, cells: Iterable[str], width: int) -> None:
    """Print one line of the table.

    It goes to standard output.

    Args:
        head: The first column.
        cells: The other columns.
        width: Characters of each of these.
    """
    padded = [cell.ljust(width) for cell in cells]
    print("  ".join([head, *padded]).rstrip())


def actions(
    partitions: int,
    microbatches: int,
    pipeline: str = "interleaved",
    active_microbatches: int | None = None,
) -> list[list[str]]:
    """Return the passes that ``print_schedule`` prints.

    The arguments and errors are the same.

    Returns:
        For each rank a list with an item for each unit of time: a pass such as ``"1F0"``, or ``""``
        if the rank waits.

    Raises:
        SMPConfigError: A number is below 1, or the name of the schedule is unknown.
    """
    numbers = [partitions, microbatches]
    if active_microbatches is not None:
        numbers.append(active_microbatches)
    if min(numbers) < 1 or pipeline not in ("interleaved", "simple"):
        raise SMPConfigError(
            "a schedule needs 1 or more partitions, microbatches and active_microbatches, and"
            f" 'interleaved' or 'simple', got {partitions}, {microbatches}, {active_microbatches}"
            f" and {pipeline!r}"
        )
    simple, last = pipeline == "simple", partitions - 1
    if simple:
        priorities, limit = SIMPLE, microbatches
    else:
        priorities, limit = INTERLEAVED, active_microbatches or partitions + 2
    ready: list[list[tuple[int, int, int, str]]] = [[] for _ in range(partitions)]
    arrivals = itertools.count()
    columns: list[list[str]] = [[] for _ in range(partitions)]
    started = finished = 0
    waiting_backwards: list[int] = []  # 'simple': no backward starts before all forwards are made

    def arrive(rank: int, kind: str, microbatch: int) -> None:
        """Make a pass ready on a rank."""
        heapq.heappush(ready[rank], (priorities[kind], microbatch, next(arrivals), kind))

    while finished < microbatches:
        # One unit of time: each rank runs one pass at most. What the passes make ready runs from
        # the next unit on.
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
                waiting_backwards.append(microbatch)
                if not simple or len(waiting_backwards) == microbatches:
                    for waiting_microbatch in waiting_backwards:
                        arrive(rank, BACKWARD, waiting_microbatch)
                    waiting_backwards.clear()
            elif rank:
                arrive(rank - 1, BACKWARD, microbatch)
            else:
                finished += 1
    return columns
