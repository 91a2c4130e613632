"""Compress layers with gzip on all processors, with the same bytes for the same input."""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

BLOCK = 4 << 20
"""Bytes of a block, which is compressed independently. The result depends on it, so it is fixed."""

LEVEL = 6
_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """A compressed stream: hashes (``sha256:...``) and sizes in bytes of input (``difference``) and output."""

    difference: str
    digest: str
    size: int
    original_size: int


def compress(source: IO[bytes], target: IO[bytes]) -> Compressed:
    """Write a stream as one gzip member, without name and time, and hash input and output.

    Blocks are compressed in threads (zlib works without Python's lock) and written in order.
    """
    plain, packed = hashlib.sha256(), hashlib.sha256()
    check = original = size = 0
    workers = os.cpu_count() or 1
    waiting: deque[Future[bytes]] = deque()

    def write(content: bytes) -> int:
        target.write(content)
        packed.update(content)
        return len(content)

    with ThreadPoolExecutor(workers) as pool:
        size += write(_HEADER)
        while block := source.read(BLOCK):
            waiting.append(pool.submit(_deflate, block))
            plain.update(block)
            check = zlib.crc32(block, check)
            original += len(block)
            if len(waiting) > 2 * workers:
                size += write(waiting.popleft().result())
        while waiting:
            size += write(waiting.popleft().result())
    size += write(zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS).flush())
    size += write(struct.pack("<II", check, original & 0xFFFFFFFF))
    return Compressed(
        difference=f"sha256:{plain.hexdigest()}",
        digest=f"sha256:{packed.hexdigest()}",
        size=size,
        original_size=original,
    )


def _deflate(block: bytes) -> bytes:
    """Compress a block that is followed by others."""
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return deflate.compress(block) + deflate.flush(zlib.Z_SYNC_FLUSH)
