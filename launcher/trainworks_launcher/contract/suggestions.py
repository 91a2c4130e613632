"""Find the known name that a person meant by an unknown one."""

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
"""Words that people use for a name that is written otherwise, both as ``_plain`` returns them."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name that is meant by a word; ``""`` if none is near enough."""
    import difflib  # takes time, and only an error needs it

    names = {_plain(name): name for name in known}
    asked = WORDS.get(_plain(word), _plain(word))
    near = [asked] if asked in names else difflib.get_close_matches(asked, names, 1, 0.65)
    near += [name for name in names if len(asked) > 3 and asked in name]
    return names[near[0]] if near else ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").lstrip("-")
