"""Find the known name that is nearest to an unknown one."""

from __future__ import annotations

from typing import Iterable

WORDS = {
    "n": "processes-per-host",
    "np": "processes-per-host",
    "ppn": "processes-per-host",
    "procs": "processes-per-host",
    "nproc": "processes-per-host",
    "nprocs": "processes-per-host",
    "num-processes": "processes-per-host",
    "nproc-per-node": "processes-per-host",
    "ntasks-per-node": "processes-per-host",
    "torchrun": "torch-distributed",
    "torch": "torch-distributed",
    "pytorch": "torch-distributed",
    "ddp": "torch-distributed",
    "fsdp": "torch-distributed",
    "accelerate": "torch-distributed",
    "deepspeed": "torch-distributed",
    "mpirun": "mpi",
    "mpiexec": "mpi",
    "horovod": "mpi",
    "smddp": "smdistributed.dataparallel",
    "smp": "smdistributed.modelparallel",
    "dry-run": "plan",
}
"""Word of another tool -> the launcher's name for it; both in the form of ``_plain``."""


_LEAST_LIKENESS = 0.65
"""Likeness from which a name is near enough, from 0 to 1 (difflib)."""

_SHORT_WORD = 3
"""Letters up to which a word is a part of too many names."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name nearest to a word; ``""`` if none is near enough.

    Case, hyphens and underscores do not count. A word of another tool stands for the launcher's.
    """
    import difflib  # takes time, and only a refusal suggests names

    name_of = {_plain(name): name for name in known}
    plain = _plain(word)
    for name in (plain, WORDS.get(plain, "")):
        if name in name_of:
            return name_of[name]
    near = difflib.get_close_matches(plain, name_of, 1, _LEAST_LIKENESS)
    # A longer word may also be a part of a name.
    if len(plain) > _SHORT_WORD:
        near += [name for name in name_of if plain in name]
    if not near:
        return ""
    return name_of[near[0]]


def _plain(name: str) -> str:
    """Return a name in one spelling: ``--nproc_per_node`` is ``nproc-per-node``."""
    return name.lower().replace("_", "-").lstrip("-")
