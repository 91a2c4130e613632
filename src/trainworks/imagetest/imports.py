"""Imports the modules of Python distributions; the image's Python runs this file.

The source of this file is sent into a container (``imagetest.probe_request``). It has only the
standard library of a Python that may be as old as 3.8: import nothing else, and use no newer
syntax.
"""

# ruff: noqa: PTH109
# The oldest interpreter decides, and this file does not need pathlib.

from __future__ import annotations

import importlib
import json
import os
import re
import select
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import PurePosixPath
from typing import TypedDict

SECONDS = 120.0
"""Seconds for the import of one distribution."""

NO_CODE = {
    "test",
    "tests",
    "testing",
    "doc",
    "docs",
    "example",
    "examples",
    "benchmarks",
    "scripts",
}
"""Top-level folders that a distribution installs by mistake."""

DRIVER = ("libcuda.so", "libnvidia-ml.so", "libneuron")
"""Libraries that come with the driver of the machine that has the device, not with an image."""


class ImportFailure(TypedDict):
    """A distribution that cannot be imported.

    ``module`` is one that nothing installed has, ``library`` a file of the
    system; ``""`` for other reasons.
    """

    name: str
    version: str
    reason: str
    module: str
    library: str


def modules_of(files: Iterable[PurePosixPath]) -> list[str]:
    """Return the modules to import: the highest packages with ``__init__``, else single modules."""
    packages = set()
    single = set()
    for path in files:
        stem, _, ending = path.name.partition(".")
        is_module = ending == "py" or ending.endswith(("so", "abi3.so"))
        if not is_module or ".." in path.parts or path.parts[0] in NO_CODE:
            continue
        if not all(part.isidentifier() for part in (*path.parts[:-1], stem)):
            continue
        if stem == "__init__":
            packages.add(path.parts[:-1])
        elif len(path.parts) == 1:
            single.add((stem,))
    highest = set()
    for package in packages:
        parents = [package[:length] for length in range(1, len(package))]
        if packages.isdisjoint(parents):
            highest.add(package)
    modules = highest or single
    public = {module for module in modules if not module[0].startswith("_")}
    return sorted(".".join(module) for module in public or modules)


def modules_to_import(distribution: metadata.Distribution) -> list[str]:
    """Return the modules of a distribution; of those in its ``top_level.txt``, if it has one.

    A wheel may have files that an earlier build left in its folder, and
    ``top_level.txt`` does not have those.
    """
    modules = modules_of(distribution.files or ())
    top_level = (distribution.read_text("top_level.txt") or "").split()
    return [module for module in modules if module.partition(".")[0] in top_level] or modules


def is_plugin_without_host(distribution: metadata.Distribution, missing: str) -> bool:
    """Whether a missing module is the program for which a distribution is a plugin.

    The user has left out that program.
    """
    groups = {entry.group for entry in distribution.entry_points}
    return bool(missing) and any(group.startswith(missing) for group in groups)


def failure(name: str, reason: str, *, module: str = "", library: str = "") -> ImportFailure:
    """Return a failure of a distribution, with its version where it has one."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = ""
    return {
        "name": name,
        "version": version,
        "reason": reason,
        "module": module,
        "library": library,
    }


def import_as_scripts_do(module: str) -> None:
    """Import a module.

    After torch, if the module is linked with torch's libraries, which only torch can find.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        if not re.match(r"lib(c10|torch)\w*\.so", str(error)):
            raise
        importlib.import_module("torch")
        importlib.import_module(module)


def failure_of(name: str) -> ImportFailure | None:
    """Import the modules of a distribution, and return the first failure, or ``None``."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return failure(name, "is not installed")
    modules = modules_to_import(distribution)
    for module in modules:
        try:
            import_as_scripts_do(module)
        except BaseException as error:  # noqa: BLE001, PERF203  (any error is the answer)
            missing = _missing_module(error)
            needs_driver = any(library in str(error) for library in DRIVER)
            if needs_driver or is_plugin_without_host(distribution, missing):
                continue
            lines = str(error).strip().splitlines()
            last_line = lines[-1] if lines else ""
            # A missing module of its own is a fault of the distribution: nothing else has it.
            own_modules = {own.partition(".")[0] for own in modules}
            library = re.match(r"(\S+\.so\S*): cannot open shared object file", str(error))
            return failure(
                name,
                f"import {module}: {type(error).__name__}: {last_line}"[:1500],
                module="" if missing in own_modules else missing,
                library=library.group(1) if library else "",
            )
    return None


def _missing_module(error: BaseException) -> str:
    """Return the top of the module that an import lacks, or ``""``."""
    is_about_metadata = type(error).__name__ == "PackageNotFoundError"
    if not isinstance(error, ModuleNotFoundError) or is_about_metadata:
        return ""
    return (error.name or "").partition(".")[0]


def in_child(*names: str) -> ImportFailure | None:
    """Import in a separate process, and return the first failure.

    An import may end the process, hang, or change the next import.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        first_failure = next(filter(None, map(failure_of, names)), None)
        os.write(theirs, json.dumps(first_failure).encode("ascii"))
        os._exit(0)
    os.close(theirs)
    # One write, one read; a program that the import has started may hold the pipe's other end open.
    ready, _, _ = select.select([ours], [], [], SECONDS * len(names))
    answer = os.read(ours, 65536) if ready else b""
    if not answer and not ready:
        os.kill(child, signal.SIGKILL)
    os.close(ours)
    status = os.waitpid(child, 0)[1]
    if answer:
        result: ImportFailure | None = json.loads(answer)
        return result
    name = names[-1]
    if not ready:
        return failure(name, f"its import did not end within {SECONDS:.0f} s")
    if os.WIFSIGNALED(status):
        return failure(name, f"its import was killed by signal {os.WTERMSIG(status)}")
    return failure(name, f"its import ended the process with status {os.WEXITSTATUS(status)}")


def failures(names: Sequence[str]) -> Iterator[ImportFailure]:
    """Yield the failures: all are imported in one process, and where that fails each in its own."""
    if names and in_child(*names) is not None:
        yield from filter(None, map(in_child, names))


class ImportFailures(TypedDict):
    """Every distribution that cannot be imported, and the number of all."""

    asked: int
    failed: list[ImportFailure]


def answer(names: Sequence[str]) -> ImportFailures:
    """Import all of these distributions."""
    # Only installed modules count, not the user's files of the same names.
    sys.path[:] = [folder for folder in sys.path if folder not in ("", os.getcwd())]
    return {"asked": len(names), "failed": list(failures(names))}
