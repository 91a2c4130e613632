"""Plan the all-reduce of ``train check bandwidth``: a job of mode mpi with nccl-tests. Pure."""

from __future__ import annotations

import json

from trainworks_launcher.checks import FAILED, Finding
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.job.job import Job
from trainworks_launcher.plan.plan import NodePlan

PROGRAM = "all_reduce_perf"
"""The program of nccl-tests."""

INVOCATION = Invocation((PROGRAM, "--minbytes", "1G", "--maxbytes", "1G", "--check", "1"), "mpi")
"""The command line of the job. 1 GiB keeps every network of GPUs busy; each sum is checked."""

MISSING = Finding(
    FAILED,
    f"no bandwidth was measured: {PROGRAM} is not in this image",
    "build it with `--with nccl-tests` for CUDA 13, or put one that was compiled with MPI on PATH;"
    " TCP alone is measured by iperf3",
)
"""The problem of an image without that program."""

LIMIT_SECONDS = 900.0
"""Time limit of mpirun. A new host first loads CUDA and connects all GPUs, which takes minutes."""


def measured(plan: NodePlan, job: Job) -> NodePlan:
    """Return the plan with programs/measure.py before mpirun, which explains the measured figure.

    measure.py runs mpirun, ends it after ``LIMIT_SECONDS``, and compares the figure with the
    network of the instance type. The plan of a host without mpirun stays as it is.
    """
    if not plan.argv:
        return plan
    placement, environment = job.placement, job.environment
    hosts = len(placement.distribution_hosts)
    gigabits = 0  # of the network between hosts per second; 0: nothing to compare with
    row = environment.manifest.instances.get(placement.instance_type)
    if row is not None and hosts > 1:
        gigabits = row.network_gigabits
    measurement = {
        "limit": LIMIT_SECONDS,
        "ranks": placement.processes,
        "hosts": hosts,
        "type": placement.instance_type,
        "gigabits": gigabits,
    }
    program = f"{environment.launcher_directory}/programs/measure.py"
    measure = (environment.launcher_python, "-I", program, json.dumps(measurement))
    return plan._replace(argv=(*measure, *plan.argv))
