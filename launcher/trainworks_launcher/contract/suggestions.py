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
    "ddp": "torch-distributed",
    "mpirun": "mpi",
    "dry-run": "plan",
}
"""Word of another tool -> the launcher's name for it; both in the form of ``_plain``."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name nearest to a word; ``""`` if none is near enough."""
    import difflib  # takes time, and only a refusal suggests names

    name_of = {_plain(name): name for name in known}
    plain = WORDS.get(_plain(word), _plain(word))
    if plain in name_of:
        return name_of[plain]
    near = difflib.get_close_matches(plain, name_of, 1, 0.65)
    if len(plain) > 3:
        near += [name for name in name_of if plain in name]
    if not near:
        return ""
    return name_of[near[0]]


def _plain(name: str) -> str:
    """Return a name in one spelling: ``--nproc_per_node`` is ``nproc-per-node``."""
    return name.lower().replace("_", "-").lstrip("-")
