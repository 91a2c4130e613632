"""smdistributed.modelparallel: smp's first version, always under mpirun (its
second is a library under torchrun).

Source: what sagemaker-training gives such a job, since smp was tuned with it. The library of this
project reads the same variables and takes the same start.
"""

from __future__ import annotations

from trainworks_launcher.contract.json_values import mapping
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.job import model_parallel
from trainworks_launcher.job.job import Job
from trainworks_launcher.job.placement import version_of
from trainworks_launcher.plan.modes import common
from trainworks_launcher.plan.modes.common import Variable
from trainworks_launcher.plan.modes.mpi import plan_ranks
from trainworks_launcher.plan.plan import NodePlan, Reason

_SET_UP = "smddpmprun"


def plan(job: Job) -> NodePlan:
    """Plan the job's host. Raises RefusalError for contradictory options."""
    environment = job.environment
    rows: list[Variable] = []
    torch = version_of(environment, "torch")
    if torch:
        rows.append(
            Variable(
                "NCCL_PROTO", "simple", "smp's messages want NCCL's plain protocol", Origin.IMAGE
            )
        )
        if torch >= (2,):
            rows.append(
                Variable(
                    "NCCL_ALGO",
                    "ring",
                    "smp can hang with other algorithms on this PyTorch",
                    Origin.IMAGE,
                )
            )
    before: list[Reason] = []
    value, _ = model_parallel.parameters(environment.hyperparameters, environment.variables)
    backend = mapping(value).get("ddp_dist_backend", "auto")
    if backend == "auto" and _SET_UP in environment.programs:
        words = (environment.programs[_SET_UP], "-i", job.placement.instance_type, "--allow-bypass")
        before.append(Reason(_SET_UP, "smddp's own start of a rank under smp", Origin.IMAGE, words))
    return plan_ranks(
        job, rows, before, (*common.warn_of_library(job), *common.warn_without_gpu(job))
    )
