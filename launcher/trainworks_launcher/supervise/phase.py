"""The phase of one run of the launcher on its host: one value, which only grows. Pure."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """The phase of a run. A stop signal may come in any phase; ``shutdown`` handles it."""

    JOINING = 0
    """The control channel is not open yet. A refusal is this host's own."""
    PREPARING = 1
    """This host runs the steps before the start, then waits for the other hosts."""
    RUNNING = 2
    """All hosts were told to start. Directories that were made for the job stay."""
    ENDING = 3
    """The outcome is known: nothing is started any more, and running processes are ended."""
    LEAVING = 4
    """No process runs on this host; the files are written, and the other hosts are told."""
