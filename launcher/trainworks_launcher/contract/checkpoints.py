"""Find the newest complete checkpoint in a directory, and whether any file is younger than the job.

A checkpoint may be half written, if the job was killed during the writing, or if SageMaker uploaded
the directory at that moment. A directory is complete if it has the file that its framework writes
last (LAST_FILES), or if a file beside the directory names the directory as the latest (TRACKERS).
No file with a cheap check may be cut off. The directory is only read. This module imports no other
module of the launcher, because programs/rank.py loads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Iterator, NamedTuple

LAST_FILES = (
    # torch.distributed.checkpoint: written by the coordinator after the parts of all ranks
    ".metadata",
    "trainer_state.json",  # Trainer of transformers: after model, optimizer and random state
    "random_states_0.pkl",  # save_state of accelerate
    "_SUCCESS",  # a script's own mark, as Hadoop and Spark write it
)
"""Files of a checkpoint that is a directory, written last."""

TRACKERS = (
    ("latest", "{}"),  # DeepSpeed: the name of the directory
    ("latest_checkpointed_iteration.txt", "iter_{:0>7}"),  # Megatron-LM: the number
    ("newest", "{}_partial"),  # smp.save_checkpoint: the tag
)
"""File beside checkpoints, written last -> form of the directory's name, filled with its text."""

# SageMaker writes these files beside the uploaded files.
_SYNC_MARKS = (".sagemaker-uploading", ".sagemaker-uploaded")
_TEMPORARY_NAME = re.compile(r"\.(tmp|part|partial|incomplete)$|^tmp")
"""Name of a file or directory that is still being written."""

_CHECKPOINT_NAME = re.compile(r"(checkpoint|ckpt|epoch|step|iter)\w*?[-_=]?\d", re.IGNORECASE)
"""Name of a directory that is a checkpoint itself, for example ``checkpoint-400``."""

_LIKELY_NAME = re.compile(r"checkpoint|ckpt|epoch|step|iter|snapshot|last", re.IGNORECASE)
"""Words in the name of a file of torch that is a checkpoint; other files may be any tensors."""

_CHECKED_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
"""Suffixes of files that can be checked for a missing end."""

_SHARD_NAME = re.compile(rb"__\d+_\d+\.distcp")
"""Name of a part of torch.distributed.checkpoint, as ``.metadata`` has it."""

_STEP_IN_NAME = re.compile(
    r"(?:step|iter)\w*?[-_=]?(\d{1,15})|^checkpoint-(\d{1,15})$", re.IGNORECASE
)
_MAX_DEPTH = 4
"""Levels of directories below the directory of checkpoints that are searched."""

_MAX_ENTRIES = 5000
"""Limit of entries: a large directory on a network file system must not delay the job."""

_TRACKER_BYTES = 256
"""Bytes of a tracker that are read: it has one name or number."""

_HEADER_BYTES = 1 << 24
"""Bytes of a header, or of a file that lists others, that are read."""

_LENGTH_BYTES = 8
"""Bytes at the start of a file of safetensors: the length of its header."""

_ZIP_START, _ZIP_END = b"PK", b"PK\x05\x06"
"""Beginnings of a zip, and of the record at its end."""

_ZIP_END_BYTES = 66_000  # the record at the end, with the longest comment


class Checkpoint(NamedTuple):
    """A complete checkpoint.

    Attributes:
        path: A file or directory.
        step: The last whole number in its name (``_step``); -1 for none.
        written: Time of writing, in seconds since 1970.
    """

    path: Path
    step: int
    written: float


def newest_complete(directory: str) -> str:
    """Return the path of the newest complete checkpoint; ``""`` for none.

    The highest number in the names decides, because a copy from S3 has the times of the copying. A
    checkpoint without a number (``last.ckpt``) is the newest if no numbered checkpoint is younger.
    """
    numbered: Checkpoint | None = None
    unnumbered: Checkpoint | None = None
    for checkpoint in _checkpoints(Path(directory)):
        if checkpoint.step < 0:
            if unnumbered is None or checkpoint.written > unnumbered.written:
                unnumbered = checkpoint
            continue
        key = (checkpoint.step, checkpoint.written)
        if numbered is None or key > (numbered.step, numbered.written):
            numbered = checkpoint
    newest = numbered
    if newest is None or (unnumbered is not None and unnumbered.written > newest.written):
        newest = unnumbered
    if newest is None:
        return ""
    return str(newest.path)


def step_in(name: str) -> int:
    """Return the step in the name of a checkpoint: 400 for ``epoch=3-step=400.ckpt``; -1 for none.

    ``checkpoint-400`` is a step of transformers' Trainer. Other numbers may be epochs.
    """
    matches = _STEP_IN_NAME.findall(Path(name).name)
    if not matches:
        return -1
    digits, trainer_digits = matches[-1]
    return int(digits or trainer_digits)


def has_younger(directory: str, since: float) -> bool:
    """Return whether any file in the directory was written after ``since`` (seconds since 1970).

    True for a directory with too many files; False for one that cannot be read.
    """
    count = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            count += 1
            if count > _MAX_ENTRIES:
                return True
            if not name.endswith(_SYNC_MARKS) and _written(Path(folder, name)) >= since:
                return True
    return False


def state_of(directory: str) -> int | None:
    """Return a number that changes when a file in the directory is written, added or removed.

    None for too many files. The times are only compared with each other, because the clock of a
    file server may differ from this host's. The number has no meaning in another process.
    """
    files: set[tuple[str, int, int]] = set()
    for folder, _, names in os.walk(directory):
        for name in names:
            if len(files) >= _MAX_ENTRIES:
                return None
            if not name.endswith(_SYNC_MARKS):
                path = os.path.join(folder, name)  # noqa: PTH118
                with contextlib.suppress(OSError):
                    status = os.stat(path)  # noqa: PTH116
                    files.add((path, status.st_size, status.st_mtime_ns))
    return hash(frozenset(files))


def _checkpoints(directory: Path) -> Iterator[Checkpoint]:
    """Yield the complete checkpoints below a directory, in no order.

    At most _MAX_DEPTH levels and _MAX_ENTRIES entries are searched. Nothing is raised: what cannot
    be read counts as empty.
    """
    waiting, count = [(directory, 0)], 0
    while waiting:
        folder, depth = waiting.pop()
        entries = _entries(folder)
        tracked = _tracked(entries)
        for path in entries:
            count += 1
            if count > _MAX_ENTRIES:
                return
            if path.name.endswith(_SYNC_MARKS) or _TEMPORARY_NAME.search(path.name):
                continue
            if not path.is_dir():
                is_of_torch = path.suffix in (".pt", ".pth") and _LIKELY_NAME.search(path.name)
                if (path.suffix == ".ckpt" or is_of_torch) and _is_complete(path):
                    yield Checkpoint(path, _step(path.name), _written(path))
                continue
            # The last file shows that a directory is a checkpoint, and when it was written.
            last = _last_file(path)
            if last is None and path.name in tracked:
                last = path
            if last is not None and _is_complete_directory(path):
                yield Checkpoint(path, _step(path.name), _written(last))
            elif last is None and not _CHECKPOINT_NAME.match(path.name) and depth < _MAX_DEPTH:
                waiting.append((path, depth + 1))


def _last_file(folder: Path) -> Path | None:
    """Return the file that the checkpoint's framework writes last; None if it is missing."""
    for name in LAST_FILES:
        if (folder / name).exists():
            return folder / name
    return None


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
    """Return the last whole number in a name: ``epoch=3-step=400.ckpt`` is 400; -1 for none.

    A number with a decimal point is mostly a measure: ``epoch=2-val_loss=0.31.ckpt`` is 2. It
    counts if the name has no other number.
    """
    numbers = re.findall(r"\d+(?:\.\d+)*", name)
    whole_numbers = [number for number in numbers if "." not in number]
    if not whole_numbers:
        whole_numbers = re.findall(r"\d+", name)
    if not whole_numbers:
        return -1
    return int(whole_numbers[-1])


def _tracked(entries: list[Path]) -> frozenset[str]:
    """Return the names of the directories that the trackers among some files name (TRACKERS).

    entries: the files and directories of one folder.
    """
    forms = dict(TRACKERS)
    tracked: set[str] = set()
    for path in entries:
        if path.name in forms and path.is_file():
            content = _read(path, _TRACKER_BYTES).decode("utf-8", "replace").strip()
            tracked.add(forms[path.name].format(content))
    return frozenset(tracked)


def _is_complete_directory(folder: Path) -> bool:
    """Return whether no file of a checkpoint is missing or cut off.

    Some formats have a file that lists the others.
    """
    for place, _, names in os.walk(str(folder)):
        required: set[str] = set()
        if any(name.endswith(".distcp") for name in names) and ".metadata" not in names:
            return False
        for name in names:
            path = Path(place, name)
            if name.endswith(_SYNC_MARKS):
                continue
            if _TEMPORARY_NAME.search(name) or not _is_complete(path):
                return False
            if name == ".metadata":
                shards = _SHARD_NAME.findall(_read(path, _HEADER_BYTES))
                required.update(shard.decode() for shard in shards)
            elif name.endswith(".index.json"):
                required.update(_shards_of_index(path))
        if not required <= set(names):
            return False
    return True


def _read(path: Path, limit: int) -> bytes:
    """Return the beginning of a file; ``b""`` for an unreadable file."""
    try:
        with path.open("rb") as opened:
            return opened.read(limit)
    except OSError:
        return b""


_MALFORMED_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Raised for JSON of another form than expected: other types, missing or too few entries, or
lists nested too deep.
"""


def _shards_of_index(path: Path) -> set[str]:
    """Return the files that an index of transformers names.

    An unreadable index names the file ``""``, which cannot exist: the checkpoint is not complete.
    """
    try:
        index = json.loads(_read(path, _HEADER_BYTES))
        shards = index["weight_map"].values()
    except _MALFORMED_ERRORS:
        return {""}
    return set(map(str, shards))


def _is_complete(path: Path) -> bool:
    """Return whether a file of weights is not cut off. Other files count as complete.

    torch.save's zip has its directory at the end; the header of safetensors has the file's length.
    The older form of torch.save has neither: such a file is complete unless it is empty.
    """
    if path.suffix not in _CHECKED_SUFFIXES:
        return True
    try:
        size = path.stat().st_size
        with path.open("rb") as opened:
            start = opened.read(_LENGTH_BYTES)
            if path.suffix == ".safetensors":
                # The length of the header, the header as JSON, and the tensors. The header has the
                # place of each tensor behind it.
                length = int.from_bytes(start, "little")
                is_whole = len(start) == _LENGTH_BYTES
                if not is_whole or length > min(size - _LENGTH_BYTES, _HEADER_BYTES):
                    return False
                rows = json.loads(opened.read(length))
                rows.pop("__metadata__", None)
                ends = [row["data_offsets"][1] for row in rows.values()]
                return bool(size == _LENGTH_BYTES + length + max(ends, default=0))
            if start.startswith(_ZIP_START):
                opened.seek(max(0, size - _ZIP_END_BYTES))
                return _ZIP_END in opened.read()
            return size > 0
    except (OSError, *_MALFORMED_ERRORS):
        return False
