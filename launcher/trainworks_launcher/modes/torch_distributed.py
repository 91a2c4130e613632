"""torch_distributed: every host runs its own torchrun, which starts the processes of that host.

Rendezvous is static (``--master-addr``, ``--node-rank``): rank 0 is then on the leader for certain, which is the host
whose model the platform keeps; c10d rendezvous orders hosts by address. What c10d would add, ending everybody when one
host fails, is done by the control channel, in seconds and not in the agents' minutes.
"""

from __future__ import annotations

from types import MappingProxyType

from trainworks_launcher import names
from trainworks_launcher.job import Job
from trainworks_launcher.modes import common
from trainworks_launcher.plan import NodePlan, Reason, control_of, network_variables, role_of, words_of

_COMPILE = "RUN_NEURON_PARALLEL_COMPILE"  # "1": compile the graphs of a Neuron job before it runs (TT)


def plan(job: Job) -> NodePlan:
    """Plan the job's host. Raises RefusalError for programs that the image lacks."""
    compiling = job.inherited.get(_COMPILE, "").strip() == "1"
    needs = common.programs(job, ("torchrun",), "the job asks for torch_distributed")
    torchrun = needs[0]
    if compiling:
        needs += common.programs(job, ("neuron_parallel_compile",), f"{_COMPILE} asks for it")
    network, network_why = network_variables(job)
    count, per_host = len(job.distribution_hosts), job.processes_per_host
    line: list[Reason] = []
    if compiling:
        why = f"{_COMPILE}=1: compiles the graphs of the job beforehand"
        line.append(Reason("neuron_parallel_compile", why, "user", (needs[1],)))
    line += [
        Reason("torchrun", "starts the processes of this host", "image", (torchrun,)),
        Reason("--nnodes", "the hosts of the job", "platform", (f"--nnodes={count}",)),
        Reason(
            "--nproc-per-node",
            common.counts_and_why(job),
            job.processes_origin,
            (f"--nproc-per-node={per_host}",),
        ),
    ]
    if count > 1:
        line += [
            Reason("--master-addr", "rank 0's store is on the leader", "platform", (f"--master-addr={job.leader}",)),
            Reason("--master-port", "rank 0's store", words=(f"--master-port={job.master_port}",)),
            Reason(
                "--node-rank",
                "static rendezvous puts rank 0 on the leader, whose model is kept",
                "platform",
                (f"--node-rank={job.host_rank}",),
            ),
        ]
    else:
        line += [
            Reason("--standalone", "one host needs no fixed port for its rendezvous", words=("--standalone",)),
            Reason(
                "--local-addr",
                "one host talks to itself: its own name need not resolve",
                words=(f"--local-addr={names.LOOPBACK}",),
            ),
        ]
    line += _program(job)
    return NodePlan(
        mode=job.mode,
        host=job.host,
        role=role_of(job),
        needs=needs,
        argv=words_of(line),
        env=MappingProxyType({**job.variables, **network}),
        cwd=job.code.directory,
        code=job.code,
        requirements=common.requirements(job),
        processes=job.processes_per_host,
        ranks_by="torchrun",
        control=control_of(job),
        limits=job.limits,
        why=(*line, *network_why),
        warnings=job.warnings,
    )


def _program(job: Job) -> tuple[Reason, ...]:
    """The program as torchrun takes it: it would add Python itself, if the first word were not a program of ours."""
    return (
        Reason("--no-python", "the command line says which Python runs what", words=("--no-python",)),
        common.rank_wrapper(job, "gives the output of each rank to the launcher of its host"),
        *common.command(job),
    )
