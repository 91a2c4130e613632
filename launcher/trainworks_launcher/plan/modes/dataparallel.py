"""smdistributed.dataparallel and pytorchddp: one file, because mpirun starts both alike.

They differ from plain mpi in what smddp reads: its variables, and ``smddprun`` in front of each
rank where the image has it. sagemaker-training also asks for EFA on every host, sets NCCL_PROTO by
instance type, and oversubscribes. This launcher decides on EFA by devices (libfabric finds no
provider on a host without it), leaves the protocol to the plugin (``fabric``), and gives the exact
slots.
"""

from __future__ import annotations

from trainworks_launcher.contract import names
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.job.job import Job
from trainworks_launcher.plan.modes import common
from trainworks_launcher.plan.modes.common import Variable
from trainworks_launcher.plan.modes.mpi import plan_ranks
from trainworks_launcher.plan.plan import NodePlan, Reason

_START = "smddprun"


def plan(job: Job) -> NodePlan:
    """Plan the job's host. Raises RefusalError for contradictory options."""
    environment = job.environment
    if len(job.placement.distribution_hosts) > 1:
        kind = environment.reserved.text(names.INSTANCE_TYPE) or job.placement.instance_type
        rows = [
            Variable(
                "SMDATAPARALLEL_USE_HOMOGENEOUS",
                "1",
                "smddp over several hosts of one kind",
                ours=True,
            ),
            Variable(
                "SMDATAPARALLEL_SERVER_ADDR",
                job.placement.leader_address,
                "smddp's own rendezvous is on the leader",
                ours=True,
            ),
            Variable(
                "SMDATAPARALLEL_SERVER_PORT",
                str(names.DATA_PARALLEL_PORT),
                "smddp's own rendezvous",
            ),
            Variable(
                "SAGEMAKER_INSTANCE_TYPE", kind, "smddp chooses its algorithms by it", ours=True
            ),
        ]
    else:
        rows = [Variable("SMDATAPARALLEL_USE_SINGLENODE", "1", "smddp on one host", ours=True)]
    before: list[Reason] = []
    if _START in environment.programs:
        words = (environment.programs[_START],)
        before.append(
            Reason(_START, "smddp's own start of a rank, with its variables", Origin.IMAGE, words)
        )
    return plan_ranks(
        job, rows, before, (*common.warn_of_library(job), *common.warn_without_gpu(job))
    )
