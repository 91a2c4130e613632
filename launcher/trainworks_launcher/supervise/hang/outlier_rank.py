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
    r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$"
    r"|/horovod/\w+/mpi_ops\.py$|/mpi4py/util/\w+\.py$"
)
"""Files whose public functions are those in which a rank waits for others."""

_TO_ONE = re.compile(r"send|recv|probe", re.IGNORECASE)
"""Of those, and of MPI's and NCCL's: the ones that wait for one other rank, and
are no collectives.
"""

_STOPPED = {
    "T": "stopped (state T, by a signal such as SIGSTOP)",
    "t": "stopped by a debugger (state t)",
}
"""State of proc(5) -> what it means."""

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
        place = "" if self.kind == "stopped" else self.place
        return (self.kind, self.what, place)

    def words(self, many: bool = False) -> str:
        """Return where it is, as the end of a sentence about one or many."""
        be, wait = "is", "waits"
        if many:
            be, wait = "are", "wait"
        place = f" ({self.place})" if self.place else ""
        if self.kind == "stopped":
            return f"{be} {self.what}"
        if self.kind in ("collective", "opens"):
            return f"{wait} in {self.what}{place}"
        if self.kind == "kernel":
            why = f": {self.what}" if self.what else ""
            return f"{be} without a Python stack{why}"
        why = f", {self.why}" if self.why else ""
        return f"{be} in {self.what}{place}{why}"


def documents(rows: Sequence[Row]) -> list[Json]:
    """Return the rows of a host as a part of a message: of bounded size, and
    ranks of one place together.
    """
    first_rows: dict[tuple[str, ...], Row] = {}
    ranks: dict[tuple[str, ...], list[Json]] = {}
    for row in rows:
        place = (*row.key, row.why)
        first_rows.setdefault(place, row)
        ranks.setdefault(place, []).append(row.rank)

    messages: list[Json] = []
    for group, row in list(first_rows.items())[:_PLACES]:
        frames: list[Json] = [frame[:_LONGEST] for frame in row.frames]
        messages.append(
            {
                "host": row.host[:_LONGEST],
                "ranks": ranks[group],
                "kind": row.kind,
                "what": row.what[:_LONGEST],
                "place": row.place[:_LONGEST],
                "why": row.why[:_LONGEST],
                "frames": frames,
            }
        )
    return messages


def read_documents(host: str, message: Json) -> list[Row]:
    """Return the rows in a host's message; parts without the right form are left out."""
    rows: list[Row] = []
    if not isinstance(message, list):
        return rows
    for document in map(mapping, message):
        ranks = document.get("ranks")
        if not isinstance(ranks, list):
            continue
        row = Row(
            rank=-1,
            host=one_line(document.get("host"), _LONGEST) or host,
            kind=one_line(document.get("kind"), _LONGEST),
            what=one_line(document.get("what"), _LONGEST),
            place=one_line(document.get("place"), _LONGEST),
            why=one_line(document.get("why"), _LONGEST),
            frames=tuple(
                one_line(line, _LONGEST) for line in texts(document.get("frames"))[:_FRAMES]
            ),
        )
        rows += [row._replace(rank=rank) for rank in ranks if isinstance(rank, int)]
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
    frames = [frame for frame in _main_frames(threads) if not frame.native]
    own = _innermost_of_user(frames)
    row = Row(
        rank=rank,
        host=host,
        kind="kernel",
        what=waits,
        place=own.place if own is not None else "",
        frames=tuple(f"{frame.name} ({frame.place})" for frame in frames[:_FRAMES]),
    )
    if state in _STOPPED:
        return row._replace(kind="stopped", what=_STOPPED[state])
    if path:
        return row._replace(kind="opens", what=path)

    row = row._replace(why=waits)
    collective = _collective(frames) or _native_collective(_main_frames(natives))
    if collective:
        return row._replace(kind="collective", what=collective)
    if any(_DATA in frame.file for frame in frames):
        return row._replace(kind="data", what="DataLoader")
    if own is not None:
        return row._replace(kind="code", what=own.name)
    return row._replace(why="")


def _main_frames(threads: Sequence[Thread]) -> Sequence[Frame]:
    """Return the frames of the main thread, innermost first; none if it is not among them."""
    main = main_thread(threads)
    return main.frames if main is not None else ()


def _innermost_of_user(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code; of any code where there is none."""
    for frame in frames:
        if frame.is_own:
            return frame
    return frames[0] if frames else None


def waits_in_a_package(threads: Sequence[Thread]) -> bool:
    """Return whether the main thread is inside an installed package other than
    torch and those of collectives.

    Such as the driver of a cluster framework, whose main thread waits for the work of other
    processes or hosts while a thread beside it prints what they say.
    """
    for frame in _main_frames(threads):
        if frame.native or frame.is_standard:
            continue
        of_torch = any(library in frame.file for library in ("/torch/", *_LIBRARIES))
        return not frame.is_own and not of_torch
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
        call = _NATIVE.match(frame.name)
        if frame.native and call is not None:
            return next(name for name in call.groups() if name)
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
    groups = _groups_of(rows)
    odd = _odd(groups)
    if all(group[0].kind == "collective" for group in groups):
        in_order = sorted(rows, key=lambda row: row.rank)
        odd = [row for row in in_order if row.rank in records.ranks] or odd

    parts = _parts(groups, odd)
    if silent:
        parts.append(f"{', '.join(silent)} did not answer")
    cause = f"no rank has made progress for {limit:g} s"
    if parts:
        cause += f": {'; '.join(parts)}"

    lines = [cause]
    lines += [f"torch's flight recorder: {line}" for line in records.lines]
    advice = _advice(odd, groups)
    if advice:
        lines.append(advice)
    example = next(iter([*odd, *rows]), None)
    if example is not None and example.frames:
        lines.append(f"{_label(example)}:")
        lines += [f"  {frame}" for frame in example.frames]
    return Verdict(cause, tuple(odd), "\n".join(lines))


def _groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Put the ranks that wait in one place together, in the order of their numbers."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.rank, row.host)):
        groups.setdefault(row.key, []).append(row)
    return list(groups.values())


def _parts(groups: Sequence[Sequence[Row]], odd: Sequence[Row]) -> list[str]:
    """Return the parts of the cause: the odd ranks, then the largest groups of the others."""
    parts = [_one(row) for row in odd[:_SHOWN]]
    if len(odd) > _SHOWN:
        parts.append(f"{len(odd) - _SHOWN} more differ")
    others = [group for group in groups if group[0] not in odd]
    for group in sorted(others, key=len, reverse=True)[:_SHOWN]:
        if len(groups) == 1:
            who = f"all {len(group)} ranks"
        elif odd:
            who = f"{len(group)} others"
        else:
            who = f"{len(group)} ranks"
        if len(group) == 1:
            parts.append(_one(group[0]))
        else:
            parts.append(f"{who} {group[0].words(many=True)}")
    return parts


def _odd(groups: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the ranks that keep the others waiting, as far as that can be told."""
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
        to_one = [group for group in waiting if _TO_ONE.search(group[0].what)]
        if to_one and len(to_one) < len(waiting):
            # They wait for one rank, and the others for all of them.
            return _flat(to_one)
    if waiting and apart:
        return sorted(apart, key=lambda row: (row not in stopped, row.rank))
    if stopped:
        return stopped

    # Nothing shows who waits for whom: the minority differs from the largest group.
    sizes = [len(group) for group in groups]
    if sizes.count(max(sizes)) > 1:
        return []
    return _flat([group for group in groups if len(group) < max(sizes)])


def _flat(groups: Sequence[Sequence[Row]]) -> list[Row]:
    rows: list[Row] = []
    for group in groups:
        rows += group
    return rows


def _label(row: Row) -> str:
    if row.rank < 0:
        return f"the program on {row.host}"
    return f"rank {row.rank} on {row.host}"


def _one(row: Row) -> str:
    return f"{_label(row)} {row.words()}"


def _advice(odd: Sequence[Row], groups: Sequence[Sequence[Row]]) -> str:
    """Return advice that follows from the picture, ``""`` where none does."""
    if odd:
        if all(group[0].kind in ("code", "data", "kernel") for group in groups):
            return (
                "nothing shows who waits for whom:"
                " a rank that differs may be waiting for the others"
            )
        return ""

    collectives = [group[0].what for group in groups if group[0].kind == "collective"]
    to_one = sorted(name for name in collectives if _TO_ONE.search(name))
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
