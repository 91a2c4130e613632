"""Tips for a job, each with the section of docs/tips.md that explains it. Pure.

A tip is general, because only the imports of the script are read. Advice by a job's own figures is
in ``advice``.
"""

from __future__ import annotations

from typing import Iterator, NamedTuple

from trainworks_launcher.job.job import Job
from trainworks_preflight.advice import SMDDP_MODES, SMP_MODE

PAGE = "docs/tips.md"


class Tip(NamedTuple):
    """One tip.

    Attributes:
        text: The tip, in a line.
        section: Section of the page, as in a link.
    """

    text: str
    section: str

    @property
    def link(self) -> str:
        """The link to the explanation."""
        return f"{PAGE}#{self.section}"


def tips_for(job: Job) -> Iterator[Tip]:
    """Yield the tips for a job of smddp or smp."""
    placement = job.placement
    if placement.mode not in (*SMDDP_MODES, SMP_MODE):
        return
    if len(placement.distribution_hosts) > 1:
        yield Tip(
            "all hosts in one region and availability zone, with subnets of that zone", "hosts"
        )
    elif placement.mode in SMDDP_MODES:
        yield Tip("smddp is made for two hosts or more", "hosts")
    yield Tip(
        "FSx for Lustre: the job's subnets and security group; throughput grows with its size",
        "data",
    )
    if placement.mode in SMDDP_MODES:
        yield Tip("preprocessing on CPUs competes with the exchange of gradients", "data")
        yield Tip(
            "the batch grows with the hosts; learning rate by linear scaling, with warm-up", "batch"
        )
    if placement.mode == SMP_MODE:
        yield Tip("torch.cuda.set_device(smp.local_rank()) first", "script-for-smp")
        yield Tip(
            "in the step: forward and model.backward; outside: batches, optimizer.step()",
            "script-for-smp",
        )
        yield Tip("layers that follow each other belong into a Sequential", "script-for-smp")
    yield Tip("the same number of batches on all replicas: drop_last=True", "batch")
