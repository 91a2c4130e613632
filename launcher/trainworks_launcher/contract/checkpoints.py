"""Checkpoints in a directory: which one is the newest complete one, and whether
any is younger than the job.

A checkpoint can be found half written: the job was killed while it wrote, or SageMaker uploaded the
directory at that moment and brought it back at the next start. So a directory counts only if it has
the file that its writer writes last (LAST_FILES), or if the file beside it that names the latest
one names it (TRACKERS), and no file that can be checked cheaply is cut off. The directory is only
read. It imports nothing of ours: rank.py loads it, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Iterator, NamedTuple

LAST_FILES = (
    # torch.distributed.checkpoint: its coordinator writes it after every rank has written its part.
    ".metadata",
    "trainer_state.json",  # Trainer of transformers: after model, optimizer and random state
    "random_states_0.pkl",  # save_state of accelerate
    "_SUCCESS",  # a script's own mark, as Hadoop and Spark write it
)
"""Files of a checkpoint that is a directory; the one that is there was written last."""

TRACKERS = (
    ("latest", "{}"),  # DeepSpeed: the name of the directory
    ("latest_checkpointed_iteration.txt", "iter_{:0>7}"),  # Megatron-LM: the number
)
"""File beside checkpoints, written last -> the name of the directory that its text stands for."""

# SageMaker puts them beside what it uploads.
_SYNC_MARKS = (".sagemaker-uploading", ".sagemaker-uploaded")
_TEMPORARY = re.compile(r"\.(tmp|part|partial|incomplete)$|^tmp")
_NAMED = re.compile(r"(checkpoint|ckpt|epoch|step|iter)\w*?[-_=]?\d", re.IGNORECASE)
_LIKELY = re.compile(r"checkpoint|ckpt|epoch|step|iter|snapshot|last", re.IGNORECASE)
_WEIGHTS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
_SHARD = re.compile(rb"__\d+_\d+\.distcp")
_STEP = re.compile(r"(?:step|iter)\w*?[-_=]?(\d{1,15})|^checkpoint-(\d{1,15})$", re.IGNORECASE)
_DEPTH = 4
_ENTRIES = 5000
"""Entries that are looked at: a large directory on a network file system must
not hold the job up.
"""

_HEADER_BYTES = 1 << 24
_ZIP_END_BYTES = 66_000  # the record at the end, with the longest comment


class Checkpoint(NamedTuple):
    """A complete checkpoint: a file or directory, the last number in its name
    (-1: none), when it was written.
    """

    path: Path
    step: int
    written: float


def newest_complete(directory: str) -> str:
    """Return the path of the newest complete checkpoint.

    ``""`` if there is none, or no such directory.

    The highest number in the names decides, for a copy from S3 has the times of the copying. A
    checkpoint without a number (``last.ckpt``) is the newest if it was written after that one.
    """
    found = list(_checkpoints(Path(directory)))
    numbered = max(
        (row for row in found if row.step >= 0),
        key=lambda row: (row.step, row.written),
        default=None,
    )
    others = max((row for row in found if row.step < 0), key=lambda row: row.written, default=None)
    if numbered is not None and (others is None or others.written <= numbered.written):
        return str(numbered.path)
    return str(others.path) if others is not None else ""


def step_in(name: str) -> int:
    """Return the step that the name of a checkpoint says, -1 for none:
    ``epoch=3-step=400.ckpt`` is 400.

    ``checkpoint-400`` is the Trainer's of transformers; another number may be that of an epoch.
    """
    found = _STEP.findall(Path(name).name)
    return int(next(filter(None, found[-1]))) if found else -1


def has_younger(directory: str, since: float) -> bool:
    """Return whether a file in the directory was written after ``since``
    (seconds since 1970), checkpoint or not.

    True for a directory with too many files to tell.
    """
    count = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            count += 1
            if count > _ENTRIES or (
                not name.endswith(_SYNC_MARKS) and _written(Path(folder, name)) >= since
            ):
                return True
    return False


def state_of(directory: str) -> int | None:
    """Return a number that changes when a file in the directory is written, comes or goes.

    None for too many files.

    Not by the time of writing and this host's clock: a file server's may be another.
    """
    found: set[tuple[str, int, int]] = set()
    for folder, _, names in os.walk(directory):
        for name in names:
            if len(found) >= _ENTRIES:
                return None
            if not name.endswith(_SYNC_MARKS):
                path = os.path.join(folder, name)  # noqa: PTH118
                with contextlib.suppress(OSError):
                    status = os.stat(path)  # noqa: PTH116
                    found.add((path, status.st_size, status.st_mtime_ns))
    return hash(frozenset(found))


def _checkpoints(directory: Path) -> Iterator[Checkpoint]:
    """Yield the complete checkpoints below a directory."""
    waiting, count = [(directory, 0)], 0
    while waiting:
        folder, depth = waiting.pop()
        entries = _entries(folder)
        tracked = _tracked(entries)
        for path in entries:
            count += 1
            if count > _ENTRIES:
                return
            if path.name.endswith(_SYNC_MARKS) or _TEMPORARY.search(path.name):
                continue
            if not path.is_dir():
                of_torch = path.suffix in (".pt", ".pth") and _LIKELY.search(path.name)
                if (path.suffix == ".ckpt" or of_torch) and _is_whole(path):
                    yield Checkpoint(path, _step(path.name), _written(path))
                continue
            last = next(
                (mark for mark in (path / name for name in LAST_FILES) if mark.exists()), None
            )
            if last is None and path.name in tracked:
                last = path
            if last is not None and _is_whole_directory(path):
                yield Checkpoint(path, _step(path.name), _written(last))
            elif last is None and not _NAMED.match(path.name) and depth < _DEPTH:
                waiting.append((path, depth + 1))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _step(name: str) -> int:
    """Return the last number in a name: ``epoch=3-step=400.ckpt`` is 400; -1 for none."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else -1


def _tracked(entries: list[Path]) -> frozenset[str]:
    """Return the names that the files beside checkpoints say."""
    forms = dict(TRACKERS)
    files = [path for path in entries if path.name in forms and path.is_file()]
    return frozenset(
        forms[path.name].format(_read(path, 256).decode("utf-8", "replace").strip())
        for path in files
    )


def _is_whole_directory(folder: Path) -> bool:
    """Return whether no file of a checkpoint is missing or cut off, as far as
    files say what they need.
    """
    for place, _, names in os.walk(str(folder)):
        wanted: set[str] = set()
        if any(name.endswith(".distcp") for name in names) and ".metadata" not in names:
            return False
        for name in names:
            path = Path(place, name)
            if name.endswith(_SYNC_MARKS):
                continue
            if _TEMPORARY.search(name) or not _is_whole(path):
                return False
            if name == ".metadata":
                wanted.update(
                    shard.decode() for shard in _SHARD.findall(_read(path, _HEADER_BYTES))
                )
            elif name.endswith(".index.json"):
                wanted.update(_shards_of_index(path))
        if not wanted <= set(names):
            return False
    return True


def _read(path: Path, limit: int) -> bytes:
    """Return the beginning of a file; nothing if it cannot be read."""
    try:
        with path.open("rb") as opened:
            return opened.read(limit)
    except OSError:
        return b""


def _shards_of_index(path: Path) -> set[str]:
    """Return the files that an index of transformers names.

    One that does not exist where it cannot be read.
    """
    try:
        return {str(name) for name in json.loads(_read(path, _HEADER_BYTES))["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {""}


def _is_whole(path: Path) -> bool:
    """Return whether a file of weights is not cut off: torch.save's zip has its directory at the
    end, and the header of safetensors says how long the file is. Other files are believed.
    """
    if path.suffix not in _WEIGHTS:
        return True
    try:
        size = path.stat().st_size
        with path.open("rb") as opened:
            start = opened.read(8)
            if path.suffix == ".safetensors":
                length = int.from_bytes(start, "little")
                if len(start) < 8 or length > min(size - 8, _HEADER_BYTES):
                    return False
                rows = json.loads(opened.read(length))
                ends = [
                    row["data_offsets"][1] for name, row in rows.items() if name != "__metadata__"
                ]
                return bool(size == 8 + length + max(ends, default=0))
            if start.startswith(b"PK"):
                opened.seek(max(0, size - _ZIP_END_BYTES))
                return b"PK\x05\x06" in opened.read()
            return size > 0
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False
