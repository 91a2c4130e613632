"""How far one run of the launcher is on its host: one value, which only grows. Pure."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """What a run does. A stop signal may come in any phase; ``shutdown`` has it."""

    JOINING = 0
    """The control channel does not stand yet. A refusal is this host's own."""
    PREPARING = 1
    """Steps before the start, and then the wait for the other hosts."""
    RUNNING = 2
    """All hosts were told to start. Directories that were made for the job stay."""
    ENDING = 3
    """The outcome is known: nothing is started any more, and what runs is ended."""
    LEAVING = 4
    """Nothing runs here; the files are written, and the other hosts are told."""
