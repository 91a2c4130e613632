"""Which rank differs: rows of ranks, where each is, become a sentence that names the odd one.

Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Sequence

from trainworks_launcher.contract.json_values import Json, mapping, texts
from trainworks_launcher.supervise.control.messages import one_line
from trainworks_launcher.supervise.hang.missing_collectives import Lacking
from trainworks_launcher.supervise.hang.stacks import Frame, Thread, main_thread

_COLLECTIVES = re.compile(
    r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$|/horovod/\w+/mpi_ops\.py$|/mpi4py/util/\w+\.py$"
)
"""Files whose public functions are those in which a rank waits for others."""

_TO_ONE = re.compile(r"send|recv|probe", re.IGNORECASE)
"""Of those, and of MPI's and NCCL's: the ones that wait for one other rank, and
are no collectives.
"""

_LIBRARIES = ("/torch/distributed/", "/horovod/", "/mpi4py/")
_DATA = "/torch/utils/data/"
_SHOWN = 3
_LONGEST = 160
_FRAMES = 8
_PLACES = 24
"""Different places of one host that a message has room for."""


class Row(NamedTuple):
    """Where one rank is.

    Attributes:
        rank: Its number; -1 for the only program of a host.
        host: Its host.
        kind: "stopped", "opens", "collective", "data", "code" or "kernel".
        what: Of the kind: the path, the collective, the function, the kernel's words.
        place: Of the user's code: ``train.py:12``; ``""`` if it is not known.
        why: What the kernel says it waits for; ``""`` if that says no more.
        frames: Its innermost frames, for the failure text.
    """

    rank: int
    host: str
    kind: str
    what: str = ""
    place: str = ""
    why: str = ""
    frames: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """Ranks with one key wait in the same place."""
        return (self.kind, self.what, self.place if self.kind != "stopped" else "")

    def words(self, many: bool = False) -> str:
        """Return where it is, as the end of a sentence about one or many."""
        place = f" ({self.place})" if self.place else ""
        why = f", {self.why}" if self.why else ""
        be, wait = ("are", "wait") if many else ("is", "waits")
        if self.kind == "stopped":
            return f"{be} {self.what}"
        if self.kind in ("collective", "opens"):
            return f"{wait} in {self.what}{place}"
        if self.kind == "kernel":
            return f"{be} without a Python stack{f': {self.what}' if self.what else ''}"
        return f"{be} in {self.what}{place}{why}"


def documents(rows: Sequence[Row]) -> list[Json]:
    """Return the rows of a host as a part of a message: of bounded size, and
    ranks of one place together.
    """
    groups: dict[Row, list[Json]] = {}
    for row in rows:
        alike = next(
            (first for first in groups if (first.key, first.why) == (row.key, row.why)), row
        )
        groups.setdefault(alike, []).append(row.rank)
    return [
        {
            "host": row.host[:_LONGEST],
            "ranks": ranks,
            "kind": row.kind,
            "what": row.what[:_LONGEST],
            "place": row.place[:_LONGEST],
            "why": row.why[:_LONGEST],
            "frames": [frame[:_LONGEST] for frame in row.frames],
        }
        for row, ranks in list(groups.items())[:_PLACES]
    ]


def read_documents(host: str, found: Json) -> list[Row]:
    """Return the rows in a host's message."""
    rows: list[Row] = []
    for document in map(mapping, found if isinstance(found, list) else ()):
        kind, what, place, why = (
            one_line(document.get(name), _LONGEST) for name in ("kind", "what", "place", "why")
        )
        frames = tuple(one_line(line, _LONGEST) for line in texts(document.get("frames"))[:_FRAMES])
        ranks = document.get("ranks")
        numbers = (
            [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []
        )
        where = one_line(document.get("host"), _LONGEST) or host
        rows += [Row(rank, where, kind, what, place, why, frames) for rank in numbers]
    return rows


def row_of(
    rank: int,
    host: str,
    threads: Sequence[Thread],
    state: str,
    waits: str,
    path: str,
    natives: Sequence[Thread] = (),
) -> Row:
    """Return where a rank is.

    Args:
        rank: Its number.
        host: Its host.
        threads: Its Python stacks; () if they cannot be read.
        state: The letter of proc(5): "T" is stopped.
        waits: The kernel's words of what its main thread waits for.
        path: The file that the main thread is in the middle of opening, or the FIFO that it reads.
        natives: Its stacks with the frames of compiled code; () if they cannot be read.
    """
    main = main_thread(threads)
    frames = [frame for frame in main.frames if not frame.native] if main is not None else []
    shown = tuple(f"{frame.name} ({frame.place})" for frame in frames[:_FRAMES])
    own = next((frame for frame in frames if frame.is_own), frames[0] if frames else None)
    place = own.place if own is not None else ""
    if state in ("T", "t"):
        what = (
            "stopped (state T, by a signal such as SIGSTOP)"
            if state == "T"
            else "stopped by a debugger (state t)"
        )
        return Row(rank, host, "stopped", what, place, frames=shown)
    if path:
        return Row(rank, host, "opens", path, place, frames=shown)
    native = main_thread(natives)
    collective = _collective(frames) or _native_collective(
        native.frames if native is not None else ()
    )
    if collective:
        return Row(rank, host, "collective", collective, place, waits, shown)
    data = next((frame for frame in frames if _DATA in frame.file), None)
    if data is not None:
        return Row(rank, host, "data", "DataLoader", place, waits, shown)
    if own is not None:
        return Row(rank, host, "code", own.name, place, waits, shown)
    return Row(rank, host, "kernel", waits, frames=shown)


def waits_in_a_package(threads: Sequence[Thread]) -> bool:
    """Return whether the main thread is inside an installed package other than
    torch and those of collectives.

    Such as the driver of a cluster framework, whose main thread waits for the work of other
    processes or hosts while a thread beside it prints what they say.
    """
    main = main_thread(threads)
    for frame in main.frames if main is not None else ():
        if not frame.native and not frame.is_standard:
            return not frame.is_own and not any(
                library in frame.file for library in ("/torch/", *_LIBRARIES)
            )
    return False


def _collective(frames: Sequence[Frame]) -> str:
    """Return the collective that a stack waits in, ``""`` for none."""
    for frame in frames:
        if frame.is_own:
            return ""
        if _COLLECTIVES.search(frame.file) and not frame.name.startswith("_"):
            return frame.name
    return ""


_NATIVE = re.compile(
    r"^P?(MPI_[A-Z][a-z]+(?:_[a-z]+)*)$|^(nccl[A-Z]\w+)|^(?:cuda|cu)(StreamSynchronize|EventSynchronize|DeviceSynchronize)"
)
"""Functions of compiled libraries in which a rank waits for others, or for its
GPU, which waits for others in NCCL.
"""


def _native_collective(frames: Sequence[Frame]) -> str:
    """Return the outermost call of compiled code in which a thread waits for
    others, ``""`` for none.
    """
    for frame in reversed(frames):
        found = _NATIVE.match(frame.name) if frame.native else None
        if found:
            return next(name for name in found.groups() if name)
    return ""


_NO_RECORDS = Lacking()


class Verdict(NamedTuple):
    """What is said of a job that hangs. cause: one line. odd: ranks that differ.

    () if none does. text: for a person, the cause first.
    """

    cause: str
    odd: tuple[Row, ...]
    text: str


def name_the_odd(
    rows: Sequence[Row], silent: Sequence[str], limit: float, records: Lacking = _NO_RECORDS
) -> Verdict:
    """Return the verdict on a job none of whose ranks makes progress.

    Args:
        rows: Of all ranks of all hosts.
        silent: Hosts whose rows did not come.
        limit: Seconds without progress.
        records: What torch's flight recorder says. It names the rank where the stacks show all
            ranks in collectives.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.rank, row.host)):
        groups.setdefault(row.key, []).append(row)
    odd = _odd(list(groups.values()))
    if all(kind == "collective" for kind, _, _ in groups):
        odd = [
            row for row in sorted(rows, key=lambda row: row.rank) if row.rank in records.ranks
        ] or odd
    rest = [group for group in groups.values() if group[0] not in odd]
    said = [_one(row) for row in odd[:_SHOWN]]
    if len(odd) > _SHOWN:
        said.append(f"{len(odd) - _SHOWN} more differ")
    said += [
        _several(group, bool(odd), len(groups) == 1)
        for group in sorted(rest, key=len, reverse=True)[:_SHOWN]
    ]
    said += [f"{', '.join(silent)} did not answer"] if silent else []
    cause = f"no rank has made progress for {limit:g} s" + (f": {'; '.join(said)}" if said else "")
    advice = _advice(odd, list(groups.values()))
    lacks = [f"torch's flight recorder: {line}" for line in records.lines]
    frames = [
        f"{_label(row)}:\n" + "\n".join(f"  {frame}" for frame in row.frames)
        for row in [*odd, *rows][:1]
        if row.frames
    ]
    return Verdict(cause, tuple(odd), "\n".join(filter(None, (cause, *lacks, advice, *frames))))


def _odd(groups: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the ranks that keep the others waiting, as far as that can be told."""
    stopped = [row for group in groups for row in group if group[0].kind in ("stopped", "opens")]
    waiting = [group for group in groups if group[0].kind == "collective"]
    if len(groups) < 2:
        return stopped
    to_one = [group for group in waiting if _TO_ONE.search(group[0].what)]
    if to_one and len(to_one) < len(waiting) == len(groups):
        # They wait for one rank, and the others for all of them.
        return [row for group in to_one for row in group]
    if waiting:
        apart = [row for group in groups for row in group if group[0].kind != "collective"]
        if apart:
            return sorted(apart, key=lambda row: (row not in stopped, row.rank))
    if stopped:
        return stopped
    largest = max(len(group) for group in groups)
    if sum(len(group) == largest for group in groups) > 1:
        return []
    return [row for group in groups if len(group) < largest for row in group]


def _label(row: Row) -> str:
    return f"rank {row.rank} on {row.host}" if row.rank >= 0 else f"the program on {row.host}"


def _one(row: Row) -> str:
    return f"{_label(row)} {row.words()}"


def _several(group: Sequence[Row], others: bool, all_: bool) -> str:
    if len(group) == 1:
        return _one(group[0])
    who = f"all {len(group)} ranks" if all_ else f"{len(group)} {'others' if others else 'ranks'}"
    return f"{who} {group[0].words(many=True)}"


def _advice(odd: Sequence[Row], groups: Sequence[Sequence[Row]]) -> str:
    """Return what the picture says beyond the places."""
    if odd and all(group[0].kind in ("code", "data", "kernel") for group in groups):
        return "nothing shows who waits for whom: a rank that differs may be waiting for the others"
    kinds = {group[0].key for group in groups} if not odd else set()
    to_one = [what for kind, what, _ in kinds if kind == "collective" and _TO_ONE.search(what)]
    if to_one:
        every = (
            f"every rank waits in {to_one[0]}"
            if len(kinds) == 1
            else f"{' and '.join(sorted(to_one))} wait for one rank"
        )
        return f"{every}: look at what the other side has called"
    if len(kinds) > 1 and all(kind == "collective" for kind, _, _ in kinds):
        return (
            "the ranks wait in different collectives: one of them left out a call, or made one more"
        )
    if len(kinds) == 1 and next(iter(kinds))[0] == "collective":
        return "every rank waits in the same collective: look at the network between the hosts"
    return ""
