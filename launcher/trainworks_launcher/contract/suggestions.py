"""Find the known name that is nearest to an unknown one."""

from __future__ import annotations

from typing import Iterable

WORDS = {
    **dict.fromkeys(
        ("n", "np", "ppn", "procs", "nproc", "nprocs", "num-processes"), "processes-per-host"
    ),
    **dict.fromkeys(("nproc-per-node", "ntasks-per-node"), "processes-per-host"),
    **dict.fromkeys(("torchrun", "ddp"), "torch-distributed"),
    "mpirun": "mpi",
    "dry-run": "plan",
}
"""Words that people use -> the name instead; both in the form of ``_plain``."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name nearest to a word; ``""`` if none is near enough."""
    import difflib  # takes time, and only an error needs it

    names = {_plain(name): name for name in known}
    plain = WORDS.get(_plain(word), _plain(word))
    if plain in names:
        return names[plain]
    near = difflib.get_close_matches(plain, names, 1, 0.65)
    if len(plain) > 3:
        near += [name for name in names if plain in name]
    if not near:
        return ""
    return names[near[0]]


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").lstrip("-")
