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
from typing import NoReturn, Sequence

from trainworks_launcher.contract.files import written_at
from trainworks_launcher.contract.json_values import Json, mapping, printable
from trainworks_launcher.supervise.hang.missing_collectives import format_ranks

_LOOK_SECONDS = 0.1
_BYTES = 64 << 20
_MESSAGE_BYTES = 60000
_CALLS, _NAME = 3, 60
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
        """Request the records of ranks.

        Returns:
            Those that came within so many seconds, as a part of a message.
        """
        deadline = time.monotonic() + seconds
        waiting = {}
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
            A value that changes when the rank writes its record; None if the rank has no FIFO.
        """
        try:
            pipe = os.open(f"{self._pipe}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return None
        before = written_at(f"{self._file}{rank}")
        with contextlib.suppress(OSError):
            os.write(pipe, b"1\n")
        os.close(pipe)
        return before

    def _read(self, rank: int) -> bytes:
        with contextlib.suppress(OSError), Path(f"{self._file}{rank}").open("rb") as opened:
            return opened.read(_BYTES)
        return b""


class _Plain(pickle.Unpickler):
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
        ``{}`` if the file is not a complete record. Else ``groups``: name -> [description, ranks,
        number of the last call]; ``open``: the first few calls of each group that have not ended,
        in order: [group, number, call, place in the group of the rank that it goes to or comes
        from, else -1].
    """
    try:
        dump = _Plain(io.BytesIO(data)).load()
        config = mapping(dump.get("pg_config"))
        groups: dict[str, Json] = {}
        last: dict[str, int] = {}
        open_: list[Json] = []
        count: Counter[str] = Counter()
        for row in dump["entries"]:
            name, about = (printable(str(word))[:_NAME] for word in row["process_group"])
            call = printable(row["profiling_name"].rpartition(":")[2])[:_NAME]
            to_one = row.get("is_p2p")
            seq = -1 if to_one else row["collective_seq_id"]
            last[name] = max(last.get(name, -1), seq)
            listed = mapping(config.get(name)).get("ranks")
            ranks = map(int, re.findall(r"\d+", str(listed or "")))
            groups[name] = [about, format_ranks(ranks), last[name]]
            peer = _PEER.search(call)
            if row["state"] == "completed" or row.get("retired") or (to_one and not peer):
                continue

            # Of calls to one rank the first of each kind, of collectives the first few.
            counted, most, place = name, _CALLS, -1
            if to_one and peer:
                counted, most, place = f"{name} {call}", 1, int(peer[1])
            count[counted] += 1
            if count[counted] <= most:
                if call in _ALIKE:
                    call += f" of sizes {row.get('input_sizes')}"[:_NAME]
                open_.append([name, seq, call, place])
    except Exception:  # noqa: BLE001  (a file that is being written may hold anything)
        return {}
    return {"rank": rank, "groups": groups, "open": open_}
