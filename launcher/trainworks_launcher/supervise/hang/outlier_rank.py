"""Name the rank that differs: make a sentence about it from the places of all ranks. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple, Sequence

from trainworks_launcher.contract.json_values import Json, mapping, texts
from trainworks_launcher.supervise.control.messages import one_line
from trainworks_launcher.supervise.hang.missing_collectives import MissingCalls
from trainworks_launcher.supervise.hang.stacks import Frame, Thread, main_thread

_COLLECTIVE_FILES = re.compile(
    r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$"
    r"|/horovod/\w+/mpi_ops\.py$|/mpi4py/util/\w+\.py$"
)
"""Files with public functions in which a rank waits for others."""

_CALL_TO_ONE_RANK = re.compile(r"send|recv|probe", re.IGNORECASE)
"""Of those functions, and of MPI's and NCCL's: those that wait for one other rank, and are no
collectives.
"""

_STOPPED_STATES = {
    "T": "stopped (state T, by a signal such as SIGSTOP)",
    "t": "stopped by a debugger (state t)",
}
"""State of proc(5) -> its meaning."""

_COLLECTIVE_LIBRARIES = ("/torch/distributed/", "/horovod/", "/mpi4py/")
_DATA_LOADER_FILES = "/torch/utils/data/"
_MAX_SHOWN = 3
"""Limit of outliers, and of groups of other ranks, in the cause."""

_MAX_CHARACTERS = 160
"""Limit of each text in a host's message."""

_MAX_FRAMES = 8
"""Limit of the frames of a rank, innermost first."""

_MAX_PLACES = 24
"""Limit of different places in a host's message."""


class Row(NamedTuple):
    """The place of one rank.

    Attributes:
        rank: Its number; -1 for the only program of a host.
        host: Its host.
        kind: "stopped", "opens", "collective", "data", "code" or "kernel".
        detail: By the kind: the path, the collective, the function, or the kernel's reason.
        place: In the user's code, for example ``train.py:12``; ``""`` if not known.
        why: The kernel's reason for its wait; ``""`` if that adds nothing.
        frames: Its innermost frames, for the failure text.
    """

    rank: int
    host: str
    kind: str
    detail: str = ""
    place: str = ""
    why: str = ""
    frames: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """A key that all ranks in the same place share."""
        place = "" if self.kind == "stopped" else self.place
        return (self.kind, self.detail, place)

    def words(self, many: bool = False) -> str:
        """Describe the place, as the end of a sentence about one rank or many."""
        be, wait = "is", "waits"
        if many:
            be, wait = "are", "wait"
        place = f" ({self.place})" if self.place else ""
        if self.kind == "stopped":
            return f"{be} {self.detail}"
        if self.kind in ("collective", "opens"):
            return f"{wait} in {self.detail}{place}"
        if self.kind == "kernel":
            why = f": {self.detail}" if self.detail else ""
            return f"{be} without a Python stack{why}"
        why = f", {self.why}" if self.why else ""
        return f"{be} in {self.detail}{place}{why}"


def documents(rows: Sequence[Row]) -> list[Json]:
    """Write the rows of a host as a part of a message of bounded size, one for each place."""
    first_rows: dict[tuple[str, ...], Row] = {}
    ranks: dict[tuple[str, ...], list[Json]] = {}
    for row in rows:
        place = (*row.key, row.why)
        first_rows.setdefault(place, row)
        ranks.setdefault(place, []).append(row.rank)

    messages: list[Json] = []
    for group, row in list(first_rows.items())[:_MAX_PLACES]:
        frames: list[Json] = [frame[:_MAX_CHARACTERS] for frame in row.frames]
        messages.append(
            {
                "host": row.host[:_MAX_CHARACTERS],
                "ranks": ranks[group],
                "kind": row.kind,
                "what": row.detail[:_MAX_CHARACTERS],
                "place": row.place[:_MAX_CHARACTERS],
                "why": row.why[:_MAX_CHARACTERS],
                "frames": frames,
            }
        )
    return messages


def read_documents(host: str, message: Json) -> list[Row]:
    """Read the rows in a host's message; parts of another form are left out."""
    rows: list[Row] = []
    if not isinstance(message, list):
        return rows
    for document in map(mapping, message):
        ranks = document.get("ranks")
        if not isinstance(ranks, list):
            continue
        frames = texts(document.get("frames"))[:_MAX_FRAMES]
        row = Row(
            rank=-1,
            host=one_line(document.get("host"), _MAX_CHARACTERS) or host,
            kind=one_line(document.get("kind"), _MAX_CHARACTERS),
            detail=one_line(document.get("what"), _MAX_CHARACTERS),
            place=one_line(document.get("place"), _MAX_CHARACTERS),
            why=one_line(document.get("why"), _MAX_CHARACTERS),
            frames=tuple(one_line(line, _MAX_CHARACTERS) for line in frames),
        )
        rows += [row._replace(rank=rank) for rank in ranks if isinstance(rank, int)]
    return rows


class RankSample(NamedTuple):
    """One sample of a rank's process.

    Attributes:
        threads: Its Python stacks; () if they cannot be read.
        state: The letter of proc(5): "T" is stopped.
        waits: The kernel's reason for the main thread's wait, as ``KernelWait.reason``.
        path: The open or read that the main thread waits for, as ``KernelWait.path``.
        native_threads: Its stacks with frames of compiled code; () if they cannot be read.
    """

    threads: Sequence[Thread]
    state: str
    waits: str = ""
    path: str = ""
    native_threads: Sequence[Thread] = ()


def row_of(rank: int, host: str, sample: RankSample) -> Row:
    """Find the place of a rank.

    The first of these that fits: stopped, waits for a file, in a collective, in a data loader, in
    the user's code; else ``kernel``, which has no Python stack.
    """
    frames = [frame for frame in _main_frames(sample.threads) if not frame.native]
    own = _innermost_of_user(frames)
    row = Row(
        rank=rank,
        host=host,
        kind="kernel",
        detail=sample.waits,
        place=own.place if own is not None else "",
        frames=tuple(f"{frame.name} ({frame.place})" for frame in frames[:_MAX_FRAMES]),
    )
    if sample.state in _STOPPED_STATES:
        return row._replace(kind="stopped", detail=_STOPPED_STATES[sample.state])
    if sample.path:
        return row._replace(kind="opens", detail=sample.path)

    row = row._replace(why=sample.waits)
    native_frames = _main_frames(sample.native_threads)
    collective = _collective(frames) or _native_collective(native_frames)
    if collective:
        return row._replace(kind="collective", detail=collective)
    if any(_DATA_LOADER_FILES in frame.file for frame in frames):
        return row._replace(kind="data", detail="DataLoader")
    if own is not None:
        return row._replace(kind="code", detail=own.name)
    return row._replace(why="")


def _main_frames(threads: Sequence[Thread]) -> Sequence[Frame]:
    """Return the frames of the main thread, innermost first; () without that thread."""
    main = main_thread(threads)
    if main is None:
        return ()
    return main.frames


def _innermost_of_user(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code; without one the innermost frame."""
    for frame in frames:
        if frame.is_own:
            return frame
    if not frames:
        return None
    return frames[0]


def waits_in_a_package(threads: Sequence[Thread]) -> bool:
    """Return whether the main thread is inside an installed package, except torch and packages
    of collectives.

    For example in the driver of a cluster framework: the main thread waits for other processes or
    hosts, while a thread beside it prints their output.
    """
    for frame in _main_frames(threads):
        if frame.native or frame.is_standard:
            continue
        of_torch = any(library in frame.file for library in ("/torch/", *_COLLECTIVE_LIBRARIES))
        return not frame.is_own and not of_torch
    return False


def _collective(frames: Sequence[Frame]) -> str:
    """Return the collective in which a stack waits, ``""`` for none.

    frames: innermost first. The search ends at the user's code.
    """
    for frame in frames:
        if frame.is_own:
            return ""
        if _COLLECTIVE_FILES.search(frame.file) and not frame.name.startswith("_"):
            return frame.name
    return ""


_NATIVE_CALL = re.compile(
    r"^P?(MPI_[A-Z][a-z]+(?:_[a-z]+)*)$|^(nccl[A-Z]\w+)|^(?:cuda|cu)(StreamSynchronize|EventSynchronize|DeviceSynchronize)"
)
"""Functions of compiled libraries in which a rank waits for others, or for its GPU, which may wait
for others in NCCL.
"""


def _native_collective(frames: Sequence[Frame]) -> str:
    """Return the outermost call of compiled code in which a thread waits, ``""`` for none."""
    for frame in reversed(frames):
        call = _NATIVE_CALL.match(frame.name)
        if frame.native and call is not None:
            return next(name for name in call.groups() if name)
    return ""


_NO_RECORDS = MissingCalls()


class Diagnosis(NamedTuple):
    """The diagnosis of a job that hangs.

    Attributes:
        cause: One line.
        outliers: Ranks that differ; () for none.
        text: For people, the cause first.
    """

    cause: str
    outliers: tuple[Row, ...]
    text: str


def name_outliers(
    rows: Sequence[Row], silent: Sequence[str], limit: float, records: MissingCalls = _NO_RECORDS
) -> Diagnosis:
    """Diagnose a job without progress on any rank.

    Args:
        rows: Of all ranks of all hosts.
        silent: Hosts that sent no rows.
        limit: Seconds without progress.
        records: Calls that torch's flight recorder shows as missing. They decide if the stacks
            show all ranks in collectives.
    """
    groups = _groups_of(rows)
    outliers = _find_outliers(groups)
    # Rows come in the order in which hosts have answered.
    in_order = sorted(rows, key=lambda row: (row.rank, row.host))
    if all(group[0].kind == "collective" for group in groups):
        by_records = [row for row in in_order if row.rank in records.ranks]
        outliers = by_records or outliers

    parts = _parts_of_cause(groups, outliers)
    if silent:
        parts.append(f"{', '.join(silent)} did not answer")
    cause = f"no rank has made progress for {limit:g} s"
    if parts:
        cause += f": {'; '.join(parts)}"

    lines = [cause]
    lines += [f"torch's flight recorder: {line}" for line in records.lines]
    advice = _advice(outliers, groups)
    if advice:
        lines.append(advice)
    example = next(iter([*outliers, *in_order]), None)
    if example is not None and example.frames:
        lines.append(f"{_name_of(example)}:")
        lines += [f"  {frame}" for frame in example.frames]
    return Diagnosis(cause, tuple(outliers), "\n".join(lines))


def _groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Group the ranks by their place, in the order of their numbers."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.rank, row.host)):
        groups.setdefault(row.key, []).append(row)
    return list(groups.values())


def _parts_of_cause(groups: Sequence[Sequence[Row]], outliers: Sequence[Row]) -> list[str]:
    """Return the parts of the cause: the outliers, then the largest groups of the others."""
    parts = [_describe(row) for row in outliers[:_MAX_SHOWN]]
    if len(outliers) > _MAX_SHOWN:
        parts.append(f"{len(outliers) - _MAX_SHOWN} more differ")
    others = [group for group in groups if group[0] not in outliers]
    for group in sorted(others, key=len, reverse=True)[:_MAX_SHOWN]:
        if len(groups) == 1:
            subject = f"all {len(group)} ranks"
        elif outliers:
            subject = f"{len(group)} others"
        else:
            subject = f"{len(group)} ranks"
        if len(group) == 1:
            parts.append(_describe(group[0]))
        else:
            parts.append(f"{subject} {group[0].words(many=True)}")
    return parts


def _find_outliers(groups: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the ranks for which the others wait, if the rows show that; ``[]`` if not.

    In this order: ranks in a call to one rank, where others are in calls to all; ranks outside of
    collectives, where others are in one; stopped ranks, and ranks that wait for a file; the ranks
    that are not in the largest group.
    """
    waiting = [group for group in groups if group[0].kind == "collective"]
    stopped: list[Row] = []
    apart: list[Row] = []
    for group in groups:
        if group[0].kind in ("stopped", "opens"):
            stopped += group
        if group[0].kind != "collective":
            apart += group
    if len(groups) < 2:
        return stopped

    if len(waiting) == len(groups):
        to_one = [group for group in waiting if _CALL_TO_ONE_RANK.search(group[0].detail)]
        if to_one and len(to_one) < len(waiting):
            # These wait for one rank, and the others for all ranks.
            return _flat(to_one)
    if waiting and apart:
        return sorted(apart, key=lambda row: (row not in stopped, row.rank))
    if stopped:
        return stopped

    # Nothing shows which rank waits for which: the minority differs from the largest group.
    sizes = [len(group) for group in groups]
    if sizes.count(max(sizes)) > 1:
        return []
    return _flat([group for group in groups if len(group) < max(sizes)])


def _flat(groups: Sequence[Sequence[Row]]) -> list[Row]:
    rows: list[Row] = []
    for group in groups:
        rows += group
    return rows


def _name_of(row: Row) -> str:
    if row.rank < 0:
        return f"the program on {row.host}"
    return f"rank {row.rank} on {row.host}"


def _describe(row: Row) -> str:
    return f"{_name_of(row)} {row.words()}"


def _advice(outliers: Sequence[Row], groups: Sequence[Sequence[Row]]) -> str:
    """Return advice for the groups, ``""`` for none."""
    if outliers:
        if all(group[0].kind in ("code", "data", "kernel") for group in groups):
            return (
                "nothing shows who waits for whom:"
                " a rank that differs may be waiting for the others"
            )
        return ""

    collectives = [group[0].detail for group in groups if group[0].kind == "collective"]
    to_one = sorted(name for name in collectives if _CALL_TO_ONE_RANK.search(name))
    if to_one and len(groups) == 1:
        return f"every rank waits in {to_one[0]}: look at what the other side has called"
    if to_one:
        names = " and ".join(to_one)
        return f"{names} wait for one rank: look at what the other side has called"
    if not collectives or len(collectives) < len(groups):
        return ""
    if len(groups) == 1:
        return "every rank waits in the same collective: look at the network between the hosts"
    return "the ranks wait in different collectives: one of them left out a call, or made one more"
