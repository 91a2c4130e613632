"""Records of torch's flight recorder of this host's ranks: each rank keeps its last collectives.

A rank that uses NCCL makes a FIFO, and writes its record to a file for each byte in the FIFO.

Sources: torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp (DumpPipe), FlightRecorderDetail.hpp (the
record's fields).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import select
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn, Sequence

from trainworks_launcher.contract.files import written_at
from trainworks_launcher.contract.json_values import Json, mapping, printable
from trainworks_launcher.supervise.hang.missing_collectives import format_ranks

_LOOK_SECONDS = 0.1
"""Seconds between two looks for the records of the ranks."""

_RECORD_BYTES = 64 << 20
"""Size of a record that is read."""

_MESSAGE_BYTES = 60000
"""Size of all records of a host as JSON: they are one message."""

_CALLS = 3
"""Open collectives of one group that are kept."""

_NAME_CHARACTERS = 60
_PEER = re.compile(r"(?:send|recv) \d+(?:->|<-)(\d+)$")
_ALIKE = ("all_reduce", "allreduce", "broadcast", "reduce")
"""Collectives whose tensors have one size on all ranks."""


class Recorder:
    """The flight recorders of this host's ranks."""

    def __init__(self, pipe: str, file: str) -> None:
        """Ask no rank yet.

        Args:
            pipe: Path of the FIFO, without the rank; ``""`` for none.
            file: Path of the record, without the rank; ``""`` for none.
        """
        self._pipe = pipe
        self._file = file

    def request_records(self, ranks: Sequence[int], seconds: float) -> list[Json]:
        """Request the records of ranks, and wait for them, bounded. Blocks the thread.

        Args:
            ranks: The ranks of this host.
            seconds: Bound of the wait.

        Returns:
            The records that came in time (``record_of``), within the size of a message. ``[]`` if
            torch's flight recorder is off.
        """
        deadline = time.monotonic() + seconds
        waiting = {}  # rank -> time at which its earlier record was written
        if self._pipe and self._file:
            for rank in ranks:
                before = self._ask(rank)
                if before is not None:
                    waiting[rank] = before
        records: list[Json] = []
        size = 0
        while waiting:
            for rank, before in list(waiting.items()):
                if written_at(f"{self._file}{rank}") == before:
                    continue
                document = record_of(rank, self._read(rank))
                if not document:
                    # The rank is still writing.
                    continue
                size += len(json.dumps(document))
                if size < _MESSAGE_BYTES:
                    records.append(document)
                del waiting[rank]
            if not waiting or time.monotonic() >= deadline:
                break
            select.select((), (), (), _LOOK_SECONDS)
        return records

    def _ask(self, rank: int) -> int | None:
        """Request the record of a rank.

        Returns:
            The time at which its earlier record was written, in nanoseconds since 1970; 0 for none.
            The time changes when the rank writes the new one. None if the rank has no FIFO.
        """
        try:
            # Without O_NONBLOCK the open would wait until the rank reads.
            pipe = os.open(f"{self._pipe}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return None
        before = written_at(f"{self._file}{rank}")
        with contextlib.suppress(OSError):
            os.write(pipe, b"1\n")
        os.close(pipe)
        return before

    def _read(self, rank: int) -> bytes:
        """Return the record file of a rank; empty if it cannot be read."""
        with contextlib.suppress(OSError), Path(f"{self._file}{rank}").open("rb") as opened:
            return opened.read(_RECORD_BYTES)
        return b""


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries only; refuses classes, which may run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse every class."""
        raise pickle.UnpicklingError(f"{module}.{name} is not plain")


def record_of(rank: int, data: bytes) -> dict[str, Json]:
    """Extract the calls from a rank's record.

    Args:
        rank: The rank.
        data: Content of the file.

    Returns:
        ``{}`` if the file is not a complete record. Else ``rank``; ``groups``: name ->
        [description, ranks, number of the last call]; ``open``: the first few calls of each group
        that have not ended, in order: [group, number, call, place in the group of the rank that it
        goes to or comes from, else -1]. For example ``["0", 17, "all_reduce of sizes [[8]]", -1]``.
    """
    try:
        return _extract_calls(rank, _PlainUnpickler(io.BytesIO(data)).load())
    except Exception:  # noqa: BLE001  (a file that is being written may hold anything)
        return {}


def _extract_calls(rank: int, dump: Any) -> dict[str, Json]:
    """Return the document of ``record_of``.

    Args:
        rank: The rank.
        dump: torch's record: ``entries``, the calls in order, and ``pg_config``, the groups.

    Raises:
        Exception: The record has another form.
    """
    config = mapping(dump.get("pg_config"))
    groups: dict[str, Json] = {}
    last_numbers: dict[str, int] = {}
    open_calls: list[Json] = []
    count: Counter[str] = Counter()  # open calls so far: of a group, or of one kind of call to one
    for entry in dump["entries"]:
        name, description = (
            printable(str(word))[:_NAME_CHARACTERS] for word in entry["process_group"]
        )
        # For example "nccl:all_reduce", or "nccl:send 0->1".
        call = printable(entry["profiling_name"].rpartition(":")[2])[:_NAME_CHARACTERS]
        is_to_one = entry.get("is_p2p")
        # Calls to one rank are not numbered in the same way on both ranks.
        number = -1 if is_to_one else entry["collective_seq_id"]
        last_numbers[name] = max(last_numbers.get(name, -1), number)
        ranks_text = str(mapping(config.get(name)).get("ranks") or "")
        ranks = map(int, re.findall(r"\d+", ranks_text))
        groups[name] = [description, format_ranks(ranks), last_numbers[name]]
        peer = _PEER.search(call)
        has_ended = entry["state"] == "completed" or entry.get("retired")
        if has_ended or (is_to_one and not peer):
            continue

        # Of calls to one rank the first of each kind is kept, of collectives the first few.
        kind, limit, place = name, _CALLS, -1
        if is_to_one and peer:
            kind, limit, place = f"{name} {call}", 1, int(peer[1])
        count[kind] += 1
        if count[kind] > limit:
            continue
        if call in _ALIKE:
            # Ranks with other sizes have called something else.
            call += f" of sizes {entry.get('input_sizes')}"[:_NAME_CHARACTERS]
        open_calls.append([name, number, call, place])
    return {"rank": rank, "groups": groups, "open": open_calls}
