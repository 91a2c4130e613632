"""Plan modes smdistributed.dataparallel and pytorchddp: mpirun starts the ranks of both.

They differ from mode mpi by the variables of smddp, and by ``smddprun`` before each rank if the
image has smddprun. Three differences from sagemaker-training: EFA is used only on hosts with EFA
devices (libfabric finds no provider on another host), the NCCL plugin of the fabric chooses
NCCL_PROTO, and mpirun gets the exact slots instead of oversubscription.
"""

from __future__ import annotations

from trainworks_launcher.contract import names
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.job.job import Job
from trainworks_launcher.plan.modes import common
from trainworks_launcher.plan.modes.common import Variable
from trainworks_launcher.plan.modes.mpi import plan_ranks
from trainworks_launcher.plan.plan import NodePlan, Reason

_SMDDPRUN = "smddprun"


def plan(job: Job) -> NodePlan:
    """Plan the job's host. Raises RefusalError for contradictory options."""
    before: list[Reason] = []
    smddprun = job.environment.programs.get(_SMDDPRUN)
    if smddprun is not None:
        why = "smddp's own start of a rank, with its variables"
        before.append(Reason(_SMDDPRUN, why, Origin.IMAGE, (smddprun,)))
    warnings = (*common.warn_of_library(job), *common.warn_without_gpu(job))
    return plan_ranks(job, _variables(job), before, warnings)


def _variables(job: Job) -> list[Variable]:
    """Return the variables that smddp reads; one for a single host, four for several hosts.

    ``ours`` marks a variable that replaces the container's value. The port yields to it: the user
    may choose another one.
    """
    if len(job.placement.distribution_hosts) == 1:
        return [Variable("SMDATAPARALLEL_USE_SINGLENODE", "1", "smddp on one host", ours=True)]
    placement = job.placement
    # The SDK's hyperparameter comes before the platform's file.
    instance_type = job.environment.reserved.text(names.INSTANCE_TYPE) or placement.instance_type
    address, port = placement.leader_address, str(names.DATA_PARALLEL_PORT)
    hosts_why = "smddp over several hosts of one kind"
    address_why = "smddp's own rendezvous is on the leader"
    type_why = "smddp chooses its algorithms by it"
    return [
        Variable("SMDATAPARALLEL_USE_HOMOGENEOUS", "1", hosts_why, ours=True),
        Variable("SMDATAPARALLEL_SERVER_ADDR", address, address_why, ours=True),
        Variable("SMDATAPARALLEL_SERVER_PORT", port, "smddp's own rendezvous"),
        Variable("SAGEMAKER_INSTANCE_TYPE", instance_type, type_why, ours=True),
    ]
