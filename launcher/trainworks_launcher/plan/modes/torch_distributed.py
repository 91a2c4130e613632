"""torch_distributed: every host runs its own torchrun, which starts the processes of that host.

Rendezvous is static (``--master-addr``, ``--node-rank``): rank 0 is then on the leader for certain,
which is the host whose model the platform keeps; c10d rendezvous orders hosts by name. What c10d
would add, ending everybody when one host fails, is done by the control channel, in seconds and not
in the agents' minutes. A job of several hosts that asks
for restarts, or that may go on with fewer hosts, needs c10d: only it makes a
new group. One host is the static
rendezvous of one: it talks to itself at 127.0.0.1, and its agent starts the ranks again.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.contract.settings import Reader
from trainworks_launcher.job.job import Job
from trainworks_launcher.job.placement import DATA_PARALLEL
from trainworks_launcher.plan.flight_recorder import release
from trainworks_launcher.plan.modes import common
from trainworks_launcher.plan.plan import (
    NodePlan,
    Reason,
    control_of,
    network_variables,
    role_of,
    words_of,
)
from trainworks_launcher.plan.script_environment import exported_variables

_COMPILE = "RUN_NEURON_PARALLEL_COMPILE"
"""``1``: compile a Neuron job's graphs before it runs, as sagemaker-training."""

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Source: torch/distributed/elastic/rendezvous/dynamic_rendezvous.py."""

_BINDS_FROM = (2, 9)
"""From this release of torch on, torchrun has ``--numa-binding``.

Source: PyTorch 2.9 documentation, elastic/numa.
"""

_DASHES_FROM = (2, 1)
"""From this release of torch on, its options may have dashes; each has underscores, too.

Source: pytorch/pytorch pull request 94505, merged when 2.0 had a branch of its own.
"""

_NAMES_ITSELF = (2, 4)
"""The release of torch whose c10d rendezvous ignores ``--local-addr``.

Source: pytorch/pytorch pull request 135262.
"""

_KEEP_ALIVES = 5
"""Keep-alives that a host may miss.

They are so far apart that the control channel finds a lost host first.
"""


def plan(job: Job) -> NodePlan:
    """Plan the job's host.

    Raises RefusalError for what is asked for and the image does not have.
    """
    compiling = job.inherited.get(_COMPILE, "").strip() == "1"
    torchrun = common.programs_of_mode(job)["torchrun"]
    compiler = (
        common.program(job, "neuron_parallel_compile", f"{_COMPILE} asks for it")
        if compiling
        else ""
    )
    network, network_why = network_variables(job)
    line = _line(job, torchrun, compiler)
    own = {_OWN_STORE: "1"} if _is_dynamic(job) else {}
    why = (
        "the ranks' store is a new one after each restart: torch keeps the old one, with addresses"
        " of ranks that ended"
    )
    own_why = [Reason(name, why) for name in own]
    return NodePlan(
        mode=job.placement.mode,
        host=job.placement.host,
        role=role_of(job),
        needs=(torchrun, compiler) if compiling else (torchrun,),
        argv=words_of(line),
        env=MappingProxyType({**exported_variables(job), **network, **own}),
        cwd=job.program.code.directory,
        code=job.program.code,
        requirements=job.program.requirements,
        processes=job.placement.processes_per_host,
        ranks_by="torchrun",
        control=control_of(job),
        limits=job.network.limits,
        why=(*line, *network_why, *own_why),
        warnings=(*job.warnings, *_warnings(job)),
    )


def _line(job: Job, torchrun: str, compiler: str) -> list[Reason]:
    """Return the words of the command line. compiler: compiles the job's graphs beforehand.

    "" for none.
    """
    restarts, per_host = job.placement.elastic.restarts, job.placement.processes_per_host
    line: list[Reason] = []
    if compiler:
        why = f"{_COMPILE}=1: compiles the graphs of the job beforehand"
        line.append(Reason("neuron_parallel_compile", why, Origin.USER, (compiler,)))
    line += [
        Reason("torchrun", "starts the processes of this host", Origin.IMAGE, (torchrun,)),
        _hosts(job),
        Reason(
            "--nproc-per-node",
            common.counts_and_why(job),
            job.placement.processes_origin,
            (f"--nproc-per-node={per_host}",),
        ),
    ]
    line += _dynamic_rendezvous(job) if _is_dynamic(job) else _static_rendezvous(job)
    if restarts:
        why = "failed ranks are started again so often"
        line.append(Reason("--max-restarts", why, Origin.USER, (f"--max-restarts={restarts}",)))
    line += _numa_binding(job)
    # Without --no-python it would add a Python of its own.
    line.append(
        Reason(
            "--no-python", "the command line says which Python runs what", words=("--no-python",)
        )
    )
    return [
        *_spelled(line, job.environment.manifest.components.get("torch", "")),
        common.rank_wrapper(job, "gives the output of each rank to the launcher of its host"),
        *common.command(job),
    ]


def _spelled(line: Sequence[Reason], torch: str) -> list[Reason]:
    """Return torchrun's options as this version of torch reads them."""
    if not torch or release(torch) >= _DASHES_FROM:
        return [*line]
    old: list[Reason] = []
    for reason in line:
        words = tuple(_with_underscores(word) for word in reason.words)
        subject = _with_underscores(reason.subject)
        old.append(reason._replace(subject=subject, words=words))
    return old


def _with_underscores(word: str) -> str:
    """Return an option with underscores in its name; another word stays as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _is_dynamic(job: Job) -> bool:
    """Return whether the hosts may form a new group: several hosts, and
    restarts or a minimum of hosts.
    """
    return job.placement.elastic.is_requested and len(job.placement.distribution_hosts) > 1


def _numa_binding(job: Job) -> list[Reason]:
    """Return the words that bind each rank to CPUs near its GPU: those asked
    for, else where rank N has GPU N.

    Raises RefusalError if they are asked for and the image's torch does not have them.
    """
    asked = Reader({}, job.inherited).word(names.NUMA_VARIABLE, names.NUMA_BINDINGS)
    version = job.environment.manifest.components.get("torch", "")
    nodes, binds = job.environment.devices.gpu_nodes, release(version) >= _BINDS_FROM
    if asked not in ("auto", "off"):
        if version and not binds:
            problem = f"torch {version} has no --numa-binding"
            raise RefusalError(
                [
                    Problem(
                        problem,
                        f"variable {names.NUMA_VARIABLE}",
                        "leave it out, or use a newer image",
                    )
                ]
            )
        why = f"{names.NUMA_VARIABLE} asks for it"
        return [Reason("--numa-binding", why, Origin.USER, (f"--numa-binding={asked}",))]
    if asked == "off" or not nodes or len(nodes) != job.placement.processes_per_host or not binds:
        return []
    listed = ", ".join(map(str, nodes))
    why = (
        f"ranks use the CPUs of their GPU's NUMA node ({listed});"
        f" {names.NUMA_VARIABLE}=off leaves them all CPUs"
    )
    return [Reason("--numa-binding", why, words=("--numa-binding=node",))]


def _hosts(job: Job) -> Reason:
    """Return how many hosts torchrun wants."""
    count = len(job.placement.distribution_hosts)
    fewest = job.placement.elastic.minimum_hosts or count
    if fewest == count:
        return Reason("--nnodes", "the hosts of the job", Origin.PLATFORM, (f"--nnodes={count}",))
    text = f"all {count} hosts of the job, and at least {fewest} when others are lost"
    return Reason("--nnodes", text, Origin.USER, (f"--nnodes={fewest}:{count}",))


def _warnings(job: Job) -> tuple[str, ...]:
    """Return what a job for smddp lacks, and what a job that may restart has to know."""
    found: list[str] = []
    if job.environment.reserved.is_on(names.DATA_PARALLEL_ENABLED):
        found += common.warn_of_library(job, DATA_PARALLEL)
    first, leader = min(job.placement.distribution_hosts), job.placement.leader
    if _is_dynamic(job) and leader != first:
        found.append(
            "c10d rendezvous numbers ranks by host name:"
            f" rank 0 is on {first}, not on the leader {leader}"
        )
    version = job.environment.manifest.components.get("torch", "")
    if _is_dynamic(job) and release(version)[:2] == _NAMES_ITSELF:
        found.append(
            f"torch {version} tells the ranks the name that {first} gives itself, not --local-addr:"
            " every host must be able to resolve that name; torch 2.5 reads --local-addr"
        )
    return tuple(found)


def _static_rendezvous(job: Job) -> list[Reason]:
    """Return the words for a job of one host, and for one whose hosts are all needed to its end.

    ``--standalone`` is not used: in torch 2.4 it tells the ranks this host's own name, whatever
    ``--local-addr`` says, and that name need not resolve.
    """
    alone = len(job.placement.distribution_hosts) == 1
    address = names.LOOPBACK if alone else job.placement.leader_address
    rank = 0 if alone else job.placement.host_rank
    if alone:
        address_why = "one host talks to itself: its own name need not resolve"
        port_why = "a port that is free on this host"
        node_why = "the only host"
    else:
        address_why = "rank 0's store is on the leader"
        port_why = "rank 0's store"
        node_why = "static rendezvous puts rank 0 on the leader, whose model is kept"
    return [
        Reason("--master-addr", address_why, Origin.PLATFORM, (f"--master-addr={address}",)),
        Reason("--master-port", port_why, words=(f"--master-port={job.network.master_port}",)),
        Reason("--node-rank", node_why, Origin.PLATFORM, (f"--node-rank={rank}",)),
    ]


def _dynamic_rendezvous(job: Job) -> list[Reason]:
    """Return the words for a job that may restart: only c10d rendezvous makes a new group, with
    hosts that are left.

    Source of the settings:
    torch/distributed/elastic/rendezvous/{dynamic_rendezvous,c10d_rendezvous_backend}.py.
    """
    beat = max(1, math.ceil(job.network.limits.heartbeat / (_KEEP_ALIVES - 1)))
    leads = job.placement.host == job.placement.leader
    # The leader's own ranks look for rank 0 by this name: it takes its address
    # where its name leads elsewhere.
    own_route = job.environment.devices.own_route if leads else ""
    endpoint = job.placement.leader_address
    if ":" in endpoint:
        endpoint = f"[{endpoint}]"
    settings = {
        "is_host": int(leads),
        "keep_alive_interval": beat,
        "keep_alive_max_attempt": _KEEP_ALIVES,
        # How long a new group waits for more hosts once it has enough. At the
        # start all come, and none waits.
        "last_call_timeout": beat * _KEEP_ALIVES,
    }
    return [
        Reason(
            "--rdzv-backend",
            "c10d can make a new group of the hosts that are left",
            Origin.USER,
            ("--rdzv-backend=c10d",),
        ),
        Reason(
            "--rdzv-endpoint",
            "the leader holds the rendezvous: without it the job ends",
            Origin.PLATFORM,
            (f"--rdzv-endpoint={endpoint}:{job.network.master_port}",),
        ),
        Reason(
            "--rdzv-conf",
            f"a lost host leaves the rendezvous after {beat * _KEEP_ALIVES} s, and the others wait"
            " as long for one another; torch would guess who is the host by its name",
            words=(
                "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in settings.items()),
            ),
        ),
        Reason(
            "--local-addr",
            "the platform's name of this host, whatever it calls itself;"
            " ranks are in the order of these names",
            Origin.PLATFORM,
            (f"--local-addr={own_route or job.placement.host}",),
        ),
    ]
