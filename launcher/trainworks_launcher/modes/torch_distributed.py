"""torch_distributed: every host runs its own torchrun, which starts the processes of that host.

Rendezvous is static (``--master-addr``, ``--node-rank``): rank 0 is then on the leader for certain, which is the host
whose model the platform keeps; c10d rendezvous orders hosts by address. What c10d would add, ending everybody when one
host fails, is done by the control channel, in seconds and not in the agents' minutes.
"""

from __future__ import annotations

from types import MappingProxyType

from trainworks_launcher.job import Job
from trainworks_launcher.modes import common
from trainworks_launcher.plan import NodePlan, Reason, control_of, network_variables, role_of

NAME = "torch_distributed"
"""As Job.mode has it."""


def plan(job: Job) -> NodePlan:
    """Plan the job's host. Raises RefusalError if the image has no torchrun."""
    (torchrun,) = common.programs(job, ("torchrun",), "the job asks for torch_distributed")
    network, network_why = network_variables(job)
    why: list[Reason] = [
        Reason("--nproc-per-node", f"{job.processes_per_host} process(es) on each of {len(job.hosts)} host(s)")
    ]
    words: list[str] = [
        torchrun,
        f"--nnodes={len(job.hosts)}",
        f"--nproc-per-node={job.processes_per_host}",
    ]
    if len(job.hosts) > 1:
        words += [
            f"--master-addr={job.leader}",
            f"--master-port={job.master_port}",
            f"--node-rank={job.host_rank}",
        ]
        why.append(Reason("--node-rank", "static rendezvous puts rank 0 on the leader, whose model is kept"))
    else:
        words += ["--standalone", "--local-addr=127.0.0.1"]
        why.append(Reason("--standalone", "one host needs no fixed port for its rendezvous"))
        why.append(Reason("--local-addr", "one host talks to itself: its own name need not resolve"))
    return NodePlan(
        mode=NAME,
        host=job.host,
        role=role_of(job),
        needs=(torchrun,),
        argv=(*words, *_program(job)),
        env=MappingProxyType({**job.variables, **network}),
        cwd=job.code.directory,
        code=job.code,
        requirements=common.requirements(job),
        processes=job.processes_per_host,
        signals="children",
        status_from="torchrun",
        control=control_of(job),
        limits=job.limits,
        why=(*why, *network_why),
        warnings=job.warnings,
    )


def _program(job: Job) -> tuple[str, ...]:
    """The program as torchrun takes it: it adds Python itself, unless told not to."""
    if job.entry.kind == "script":
        return (job.entry.name, *job.arguments)
    if job.entry.kind == "module":
        return ("-m", job.entry.name, *job.arguments)
    return ("--no-python", *common.command(job))
