"""Plan mode torch_distributed: each host runs torchrun, which starts the ranks of that host.

A job without restarts uses static rendezvous (``--master-addr``, ``--node-rank``), so that rank 0
is on the leader, the host of the model that the platform keeps. c10d rendezvous would order the
hosts by name, and takes minutes to end a job after the loss of a host; the launchers' control
channel takes seconds.

A job of several hosts that may restart, or continue with fewer hosts, uses c10d rendezvous, because
only c10d forms a new group of hosts. A job of one host uses static rendezvous at 127.0.0.1, also
with restarts.
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
"""Variable with value ``1``: compile the graphs of a Neuron job before the job runs (as
sagemaker-training).
"""

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Variable with value ``1``: ranks make a new store after a restart.

Source: torch/distributed/elastic/rendezvous/dynamic_rendezvous.py.
"""

_FIRST_WITH_NUMA_BINDING = (2, 9)
"""First release of torch with torchrun's ``--numa-binding``.

Source: PyTorch 2.9 documentation, elastic/numa.
"""

_FIRST_WITH_DASHES = (2, 1)
"""First release of torch that reads ``--nproc-per-node``; older ones read ``--nproc_per_node``.

Source: pytorch/pytorch pull request 94505, merged when 2.0 had a branch of its own.
"""

_IGNORES_LOCAL_ADDR = (2, 4)
"""The release of torch with a c10d rendezvous that ignores ``--local-addr``.

Source: pytorch/pytorch pull request 135262.
"""

_KEEP_ALIVES = 5
"""Keep-alives of c10d rendezvous that a host may miss.

The time between two keep-alives is so long that the control channel finds a lost host first.
"""


def plan(job: Job) -> NodePlan:
    """Plan the job's host.

    Raises RefusalError for an option that the image's torch does not have, and for a missing
    Neuron compiler.
    """
    torchrun = common.programs_of_mode(job)["torchrun"]
    needs = [torchrun]
    compiler = ""
    if job.inherited.get(_COMPILE, "").strip() == "1":
        compiler = common.program(job, "neuron_parallel_compile", f"{_COMPILE} asks for it")
        needs.append(compiler)
    network, network_why = network_variables(job)
    line = _command_line(job, torchrun, compiler)
    variables = {**exported_variables(job), **network}
    why = [*line, *network_why]
    if _is_dynamic(job):
        variables[_OWN_STORE] = "1"
        store_why = (
            "the ranks' store is a new one after each restart:"
            " torch keeps the old one, with addresses of ranks that ended"
        )
        why.append(Reason(_OWN_STORE, store_why))
    return NodePlan(
        mode=job.placement.mode,
        host=job.placement.host,
        role=role_of(job),
        needs=tuple(needs),
        argv=words_of(line),
        env=MappingProxyType(variables),
        cwd=job.program.code.directory,
        code=job.program.code,
        requirements=job.program.requirements,
        processes=job.placement.processes_per_host,
        ranks_by="torchrun",
        control=control_of(job),
        limits=job.network.limits,
        why=tuple(why),
        warnings=(*job.warnings, *_warnings(job)),
    )


def _command_line(job: Job, torchrun: str, compiler: str) -> list[Reason]:
    """Return the command line: torchrun, its options, rank.py and the user's program.

    Args:
        job: The job.
        torchrun: Path of torchrun.
        compiler: Path of neuron_parallel_compile, which runs torchrun; ``""`` for none.
    """
    line: list[Reason] = []
    if compiler:
        why = f"{_COMPILE}=1: compiles the graphs of the job beforehand"
        line.append(Reason("neuron_parallel_compile", why, Origin.USER, (compiler,)))
    line += [
        Reason("torchrun", "starts the processes of this host", Origin.IMAGE, (torchrun,)),
        _nnodes(job),
        _nproc_per_node(job),
    ]
    if _is_dynamic(job):
        line += _dynamic_rendezvous(job)
    else:
        line += _static_rendezvous(job)
    restarts = job.placement.elastic.restarts
    if restarts:
        why = "failed ranks are started again so often"
        line.append(Reason("--max-restarts", why, Origin.USER, (f"--max-restarts={restarts}",)))
    line += _numa_binding(job)
    # Without --no-python torchrun would run rank.py and the user's program with its own Python.
    why = "the command line says which Python runs what"
    line.append(Reason("--no-python", why, words=("--no-python",)))
    return [
        *_for_release(line, job.environment.manifest.components.get("torch", "")),
        common.rank_wrapper(job, "gives the output of each rank to the launcher of its host"),
        *common.command(job),
    ]


def _for_release(options: Sequence[Reason], torch: str) -> list[Reason]:
    """Return torchrun's options for a release of torch: with dashes, or with underscores.

    torch: the version, such as ``2.0.1``; ``""`` if unknown.
    """
    if not torch or release(torch) >= _FIRST_WITH_DASHES:
        return [*options]
    spelled: list[Reason] = []
    for option in options:
        words = tuple(map(_with_underscores, option.words))
        subject = _with_underscores(option.subject)
        spelled.append(option._replace(subject=subject, words=words))
    return spelled


def _with_underscores(word: str) -> str:
    """Return ``--node_rank=0`` for ``--node-rank=0``; a word that is no option stays as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _is_dynamic(job: Job) -> bool:
    """Return whether the hosts may form a new group: several hosts, and restarts or a minimum."""
    return job.placement.elastic.is_requested and len(job.placement.distribution_hosts) > 1


def _numa_binding(job: Job) -> list[Reason]:
    """Return torchrun's option ``--numa-binding``, which binds each rank to CPUs near its GPU.

    The user's choice, else ``node`` if each rank of the host has a GPU of its own.

    Raises RefusalError if the image's torch does not have the option that the user asks for.
    """
    binding = Reader({}, job.inherited).word(names.NUMA_VARIABLE, names.NUMA_BINDINGS)
    if binding == "off":
        return []
    version = job.environment.manifest.components.get("torch", "")
    has_option = release(version) >= _FIRST_WITH_NUMA_BINDING
    if binding != "auto":
        # An unknown version may have the option.
        if version and not has_option:
            problem = Problem(
                f"torch {version} has no --numa-binding",
                f"variable {names.NUMA_VARIABLE}",
                "leave it out, or use a newer image",
            )
            raise RefusalError([problem])
        why = f"{names.NUMA_VARIABLE} asks for it"
        return [Reason("--numa-binding", why, Origin.USER, (f"--numa-binding={binding}",))]
    numa_nodes = job.environment.devices.gpu_nodes  # the node of each GPU; () if not known
    has_gpu_per_rank = len(numa_nodes) == job.placement.processes_per_host
    if not numa_nodes or not has_gpu_per_rank or not has_option:
        return []
    listed = ", ".join(map(str, numa_nodes))
    why = (
        f"ranks use the CPUs of their GPU's NUMA node ({listed});"
        f" {names.NUMA_VARIABLE}=off leaves them all CPUs"
    )
    return [Reason("--numa-binding", why, words=("--numa-binding=node",))]


def _nnodes(job: Job) -> Reason:
    """Return torchrun's number of hosts: ``--nnodes=4``, or ``--nnodes=3:4`` with a minimum."""
    count = len(job.placement.distribution_hosts)
    minimum = job.placement.elastic.minimum_hosts or count
    if minimum == count:
        return Reason("--nnodes", "the hosts of the job", Origin.PLATFORM, (f"--nnodes={count}",))
    why = f"all {count} hosts of the job, and at least {minimum} when others are lost"
    return Reason("--nnodes", why, Origin.USER, (f"--nnodes={minimum}:{count}",))


def _nproc_per_node(job: Job) -> Reason:
    """Return torchrun's number of ranks on this host, ``--nproc-per-node=8``."""
    why = common.counts_and_why(job)
    option = f"--nproc-per-node={job.placement.processes_per_host}"
    return Reason("--nproc-per-node", why, job.placement.processes_origin, (option,))


def _warnings(job: Job) -> tuple[str, ...]:
    """Return warnings of a missing smddp, and of c10d rendezvous in a job that may restart."""
    warnings: list[str] = []
    if job.environment.reserved.is_on(names.DATA_PARALLEL_ENABLED):
        warnings += common.warn_of_library(job, DATA_PARALLEL)
    if not _is_dynamic(job):
        return tuple(warnings)
    # c10d rendezvous sorts the hosts by name.
    first, leader = min(job.placement.distribution_hosts), job.placement.leader
    if leader != first:
        warnings.append(
            "c10d rendezvous numbers ranks by host name:"
            f" rank 0 is on {first}, not on the leader {leader}"
        )
    version = job.environment.manifest.components.get("torch", "")
    if release(version) == _IGNORES_LOCAL_ADDR:
        warnings.append(
            f"torch {version} tells the ranks the name that {first} gives itself, not --local-addr:"
            " every host must be able to resolve that name; torch 2.5 reads --local-addr"
        )
    return tuple(warnings)


def _static_rendezvous(job: Job) -> list[Reason]:
    """Return torchrun's options for one host, and for hosts that are all needed to the end.

    torchrun's ``--standalone`` is not used: torch 2.4 then gives the ranks the host's own name, in
    spite of ``--local-addr``, and that name may not resolve.
    """
    address, rank = job.placement.leader_address, job.placement.host_rank
    address_why = "rank 0's store is on the leader"
    port_why = "rank 0's store"
    rank_why = "static rendezvous puts rank 0 on the leader, whose model is kept"
    if len(job.placement.distribution_hosts) == 1:
        address, rank = names.LOOPBACK, 0
        address_why = "one host talks to itself: its own name need not resolve"
        port_why = "a port that is free on this host"
        rank_why = "the only host"
    port = job.network.master_port
    return [
        Reason("--master-addr", address_why, Origin.PLATFORM, (f"--master-addr={address}",)),
        Reason("--master-port", port_why, words=(f"--master-port={port}",)),
        Reason("--node-rank", rank_why, Origin.PLATFORM, (f"--node-rank={rank}",)),
    ]


def _dynamic_rendezvous(job: Job) -> list[Reason]:
    """Return torchrun's options for c10d rendezvous, which can form a new group of fewer hosts.

    Source of the settings:
    torch/distributed/elastic/rendezvous/{dynamic_rendezvous,c10d_rendezvous_backend}.py.
    """
    is_leader = job.placement.host == job.placement.leader
    local_address = job.placement.host
    if is_leader and job.environment.devices.own_route:
        # Ranks of the leader connect to rank 0 by this name, which may resolve to another host on
        # the leader itself.
        local_address = job.environment.devices.own_route
    leader_address = job.placement.leader_address
    if ":" in leader_address:
        leader_address = f"[{leader_address}]"
    endpoint = f"{leader_address}:{job.network.master_port}"

    # Seconds between two keep-alives. A host has missed _KEEP_ALIVES of them only after the
    # heartbeat limit: the control channel finds a lost host first.
    interval = max(1, math.ceil(job.network.limits.heartbeat / (_KEEP_ALIVES - 1)))
    settings = {
        "is_host": int(is_leader),
        "keep_alive_interval": interval,
        "keep_alive_max_attempt": _KEEP_ALIVES,
        # Seconds that a new group waits for more hosts after the minimum. No host waits at the
        # start, because all hosts join.
        "last_call_timeout": interval * _KEEP_ALIVES,
    }
    configuration = ",".join(f"{name}={value}" for name, value in settings.items())
    backend_why = "c10d can make a new group of the hosts that are left"
    endpoint_why = "the leader holds the rendezvous: without it the job ends"
    configuration_why = (
        f"a lost host leaves the rendezvous after {interval * _KEEP_ALIVES} s, and the others wait"
        " as long for one another; torch would guess who is the host by its name"
    )
    address_why = (
        "the platform's name of this host, whatever it calls itself;"
        " ranks are in the order of these names"
    )
    return [
        Reason("--rdzv-backend", backend_why, Origin.USER, ("--rdzv-backend=c10d",)),
        Reason("--rdzv-endpoint", endpoint_why, Origin.PLATFORM, (f"--rdzv-endpoint={endpoint}",)),
        Reason("--rdzv-conf", configuration_why, words=(f"--rdzv-conf={configuration}",)),
        Reason("--local-addr", address_why, Origin.PLATFORM, (f"--local-addr={local_address}",)),
    ]
