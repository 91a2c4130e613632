"""Plan mode smdistributed.modelparallel: mpirun starts the ranks of smp's first version.

smp's second version is a library of the ranks of torchrun, and no mode. Source: the variables and
the command line of sagemaker-training, for which smp was tuned. This project's own smp
(trainworks-smdistributed) reads the same variables.
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

_SMDDPMPRUN = "smddpmprun"


def plan(job: Job) -> NodePlan:
    """Plan the job's host. Raises RefusalError for contradictory options."""
    environment = job.environment
    rows: list[Variable] = []
    torch = version_of(environment, "torch")
    if torch:
        why = "smp's messages want NCCL's plain protocol"
        rows.append(Variable("NCCL_PROTO", "simple", why, Origin.IMAGE))
    if torch >= (2,):
        why = "smp can hang with other algorithms on this PyTorch"
        rows.append(Variable("NCCL_ALGO", "ring", why, Origin.IMAGE))
    before: list[Reason] = []
    parameters, _ = model_parallel.parameters(environment.hyperparameters, environment.variables)
    backend = mapping(parameters).get("ddp_dist_backend", "auto")
    smddpmprun = environment.programs.get(_SMDDPMPRUN)
    # Another back end is the user's choice: smddp then takes no part.
    if backend == "auto" and smddpmprun is not None:
        words = (smddpmprun, "-i", job.placement.instance_type, "--allow-bypass")
        before.append(
            Reason(_SMDDPMPRUN, "smddp's own start of a rank under smp", Origin.IMAGE, words)
        )
    warnings = (*common.warn_of_library(job), *common.warn_without_gpu(job))
    return plan_ranks(job, rows, before, warnings)
