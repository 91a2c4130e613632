"""Plan mode multi_worker_mirrored_strategy of TensorFlow: one process per host.

The processes connect by TF_CONFIG.
"""

from __future__ import annotations

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.json_values import Json, compact
from trainworks_launcher.job.job import Job
from trainworks_launcher.plan.modes import common
from trainworks_launcher.plan.modes.common import Variable
from trainworks_launcher.plan.plan import NodePlan, Reason


def plan(job: Job) -> NodePlan:
    """Plan the job's host. Raises RefusalError if the image has no TensorFlow."""
    problems = common.missing_package(job, ("tensorflow",))
    if problems:
        raise RefusalError(problems)
    workers: list[Json] = [
        f"{host}:{names.TENSORFLOW_MIRRORED_PORT}" for host in job.placement.distribution_hosts
    ]
    task: dict[str, Json] = {"type": "worker", "index": job.placement.host_rank}
    document: dict[str, Json] = {
        "cluster": {"worker": workers},
        "environment": "cloud",
        "task": task,
    }
    why = "how the hosts' processes find each other"
    row = Variable("TF_CONFIG", compact(document), why, ours=True)
    choice = Reason(
        "mode multi_worker_mirrored_strategy",
        "every host runs the program once; the first one is the chief",
    )
    return common.own_process(job, common.command(job), [choice], [row])
