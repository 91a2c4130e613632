"""The all-reduce of ``train check bandwidth``: nccl-tests' program, started
over the hosts as a job is. Pure.
"""

from __future__ import annotations

import json

from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.job.job import Job
from trainworks_launcher.plan.plan import NodePlan

PROGRAM = "all_reduce_perf"
"""Of nccl-tests. One size, which every network of GPUs is busy with; each sum is checked."""

ASKED = Invocation((PROGRAM, "--minbytes", "1G", "--maxbytes", "1G", "--check", "1"), "mpi")
"""What the command line of a job with that program would ask for."""

MISSING = (
    f"{PROGRAM} is not in this image: build it with `--with nccl-tests` for CUDA 13, or put one"
    " that was compiled with MPI on PATH; TCP alone is measured by iperf3"
)

LIMIT_SECONDS = 900.0
"""From the start of mpirun.

Hosts that are new load CUDA and connect every pair of GPUs first, which takes minutes.
"""


def measured(plan: NodePlan, job: Job) -> NodePlan:
    """Return the plan of a job with PROGRAM whose host that starts mpirun also
    says what its figure means.
    """
    if not plan.argv:
        return plan
    placement, environment = job.placement, job.environment
    row = environment.manifest.instances.get(placement.instance_type)
    several = len(placement.distribution_hosts) > 1
    asked = {
        "limit": LIMIT_SECONDS,
        "ranks": placement.processes,
        "hosts": len(placement.distribution_hosts),
        "type": placement.instance_type,
        "gigabits": row.network_gigabits if row and several else 0,
    }
    program = f"{environment.launcher_directory}/programs/measure.py"
    return plan._replace(
        argv=(environment.launcher_python, "-I", program, json.dumps(asked), *plan.argv)
    )
