"""mpirun has started this process as one of its ranks, within whatever scheduler gave it the hosts. Pure.

The scheduler's variables then describe mpirun's daemon, or the job, and not this process. Sources: Open MPI, mpirun(1),
environment variables; MVAPICH2 user guide, MV2_COMM_WORLD_SIZE.
"""

from __future__ import annotations

from trainworks_launcher.given.platforms import Description, Given, ranks


def describe(given: Given) -> Description:
    """Return a job of this one process, as for the ranks of any other program."""
    return ranks.describe(given)
