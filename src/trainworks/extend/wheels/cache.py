"""The user's cache of wheels that were built for an extension: what takes minutes to compile is compiled once.

A wheel is found by its source, and by what it is built for and with: Python, the C library, torch and CUDA, Debian
packages, the compiler and its variables, which name the architectures. A folder of the user's project has no entry: its
files change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from trainworks.extend.plan import WheelSource
from trainworks.extend.reading.wheel import read_wheel
from trainworks.extend.requirements import ExtendedBase, Wheel
from trainworks.extend.toolkit import Workbench
from trainworks.host.cache import write_cached
from trainworks.terminal.output import say


def cache_key(source: WheelSource, base: ExtendedBase, apt: tuple[str, ...], bench: Workbench) -> str:
    """Return the name of a wheel's folder in the cache."""
    built_for = (base.full_version or base.version, base.machine, base.glibc, base.suite, sorted(base.kept.items()))
    built_with = (sorted(apt), base.compiler, bench.lines)
    content = json.dumps((source.file, source.name in bench.whole, built_for, built_with))
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def cached_wheel(folder: Path, source: WheelSource) -> Wheel | None:
    """Return the wheel of a folder of the cache, ``None`` where it has none that can be read."""
    if not _stays(source):
        return None
    with contextlib.suppress(OSError, ValueError):
        for path in sorted(folder.glob("*.whl")):
            wheel = read_wheel(path.name, path.read_bytes(), extras=source.extras, built=True)
            say(f"  built before: {path}")
            return wheel
    return None


def keep_wheel(folder: Path, source: WheelSource, wheel: Wheel) -> Wheel:
    """Write a built wheel into its folder of the cache, and return it. If the cache cannot be written, go on."""
    if _stays(source):
        with contextlib.suppress(OSError):
            write_cached(folder / wheel.file, wheel.content)
            if not wheel.file.endswith("-none-any.whl"):
                say(f"  compiled and kept: {folder / wheel.file}")
    return wheel


def _stays(source: WheelSource) -> bool:
    """Return whether a source is always the same: an archive by its hash, a commit."""
    return bool(source.pin) or source.origin.startswith("git+")
