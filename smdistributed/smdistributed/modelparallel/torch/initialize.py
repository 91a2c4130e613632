"""`smp.init`: process groups, connections, the runtime; and the end of a process."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import multiprocessing.util
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from trainworks_smdistributed import emulation
from trainworks_smdistributed.environment import ranks_of, set_rendezvous

from .exceptions import PeerError, summary
from .job.agreement import agree_on_configuration
from .job.collective_calls import calls
from .job.config import Config, SMPConfigError
from .job.groups import make_groups
from .job.state import state
from .job.topology import CommGroup, Topology
from .partitioning import placement
from .pipeline.runtime import Runtime, present, use
from .sharding import mesh
from .transport.connect import START_SECONDS, Rendezvous, connect
from .transport.failure_watch import Failure, Watch
from .transport.payload import GroupPayload
from .transport.transport import LinkGroup, Transport

GROUP_MINUTES = 10
"""Minutes that a collective of the process groups may take."""

_GROUP_OF_LINK = {"pp": CommGroup.PP_GROUP, "tp": CommGroup.TP_GROUP, "dp": CommGroup.DP_GROUP}

_watch: Watch | None = None
"""The watch of this process, from `init` to its end."""

_process_id = 0
"""The process that has called `init`: a forked child must not end its parent's connections."""

_CAUSE_SECONDS = 2.0
"""Seconds that a rank with a lost connection waits for the message of the rank that failed."""

_COLLECTIVE_ERRORS = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
)
"""Parts of the texts of errors that a lost peer causes in a collective."""


def init(config: Mapping[str, Any] | None = None) -> None:
    """Start smp on this rank. Collective; a second call does nothing.

    Sets `state`, creates process groups, connections and the runtime, and changes environment
    variables of torch and CUDA. What was started is ended at the end of the process.

    ``sys.excepthook`` is replaced, and threads are started. A process group of torch that exists is
    used.

    Args:
        config: Keys of the configuration. The JSON in `SM_HP_MP_PARAMETERS` overrides it.

    Raises:
        SMPConfigError: A key has a wrong value, ranks have different configurations, this PyTorch
            is too old for a key, or `SMP_PAYLOAD` names an unknown backend.
        StartError: Ranks of the job are missing, or hosts do not reach each other.
        RuntimeError: torch.distributed cannot start, or a rank did not come in time.
        ValueError: A variable of the rank is not an integer.
    """
    if state.initialized:
        return
    ranks = ranks_of(os.environ)
    rank, size = ranks.rank, ranks.size
    cfg = Config.resolve(config, os.environ, size)
    set_rendezvous(os.environ, cfg.ddp_port)
    # CUDA reads this when it starts. With fewer queues than streams a receive may block the queue
    # of the send that it waits for.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    topology = Topology(
        size, cfg.pipeline_parallel_degree, cfg.tensor_parallel_degree, cfg.placement, rank
    )
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if emulation.cuda_is_available() else "gloo"
        timeout = datetime.timedelta(minutes=GROUP_MINUTES)
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
    if size > 1:
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  there is no public name
        agree_on_configuration(store, rank, size, cfg, START_SECONDS)
    state.cfg, state.topo = cfg, topology
    state.groups = make_groups(topology)
    if mesh.degree() > 1:
        mesh.check_torch()
    _register_shutdown()
    if size > 1:
        _start_connections(cfg, topology)


def _start_connections(cfg: Config, topology: Topology) -> None:
    """Create the connections of this rank, the watch and the runtime.

    ``sys.excepthook`` is replaced. The runtime is set for the process (`use`), with a pipeline.

    Args:
        cfg: The configuration.
        topology: Which rank is where.

    Raises:
        StartError: Ranks of the job are missing.
        SMPConfigError: `SMP_PAYLOAD` names an unknown backend.
        RuntimeError: The job's store or a backend cannot be used.
    """
    global _watch
    rank, size = topology.rank, topology.world
    links = {"watch": [0]}
    if rank == 0:
        links["watch"] = list(range(1, size))
    # Ranks of one stage that meet in collectives must run the requests of microbatches in the same
    # order, so they tell it each other: those of a tensor-parallel group always, all replicas if
    # deterministic_server asks for that.
    ordered = None
    if cfg.pipeline_parallel_degree > 1:
        if cfg.deterministic_server and len(topology.members(CommGroup.DP_GROUP)) > 1:
            ordered = "dp"
        elif cfg.tensor_parallel_degree > 1:
            ordered = "tp"
        for name in ("pp", ordered):
            if name is not None:
                links[name] = [
                    peer for peer in topology.members(_GROUP_OF_LINK[name]) if peer != rank
                ]
    master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    connections = connect(Rendezvous(store, size, master), rank, links)
    _watch = Watch(
        rank, connections["watch"], lambda peer: _rank_title(topology, peer), calls=calls
    )
    _install_hook(_watch)
    if cfg.pipeline_parallel_degree > 1:
        pipeline = topology.members(CommGroup.PP_GROUP)
        transport = Transport(
            LinkGroup(rank, pipeline),
            connections["pp"],
            payload=_make_payload(topology),
            device=placement.device(),
        )
        peers = None
        if ordered is not None:
            members = topology.members(_GROUP_OF_LINK[ordered])
            group = LinkGroup(rank, members, f"{ordered}_rank")
            peers = Transport(group, connections[ordered], inbox=transport.inbox)
        use(Runtime(cfg, transport, peers))


def _make_payload(topology: Topology) -> GroupPayload | None:
    """Return the payload of the pipeline's link; None: all tensors go through host memory.

    `SMP_PAYLOAD` is `host`, or a backend of torch.distributed. The default is NCCL on hosts with
    GPUs.

    Communicators are created for it: then the call is collective over the job.

    Raises:
        SMPConfigError: The backend is unknown.
        RuntimeError: The backend cannot connect the ranks.
    """
    gpu = placement.device()
    backend = os.environ.get("SMP_PAYLOAD")
    if not backend:
        backend = "nccl" if gpu is not None and dist.is_nccl_available() else "host"
    if backend == "host":
        return None
    if backend not in dist.Backend.backend_list:
        raise SMPConfigError(
            f"SMP_PAYLOAD={backend}: torch.distributed has no such backend\n"
            "Set it to host, or unset it."
        )
    return GroupPayload(topology.rank, gpu or torch.device("cpu"), topology, backend)


def _rank_title(topology: Topology, rank: int) -> str:
    """Return words for a global rank, such as "rank 3 (pp_rank 1)"."""
    if topology.degree["P"] == 1:
        return f"rank {rank}"
    return f"rank {rank} (pp_rank {topology.coords(rank)['P']})"


# --- the end of a process -------------------------------------------------------------------------


def _register_shutdown() -> None:
    """Let `_shutdown` run at the end of this process."""
    global _process_id
    _process_id = os.getpid()
    atexit.register(_shutdown)
    # Processes that multiprocessing starts do not call what atexit registered.
    multiprocessing.util.Finalize(None, _shutdown, exitpriority=100)


def _shutdown() -> None:
    """End the runtime, the process groups and the watch, in this order. In a forked child nothing.

    No thread may be left in torch when the interpreter ends, or the process would abort.

    A failure is told to the other ranks. Rank 0 waits for the end of all others. The process ends
    with status 1 if another rank has failed. A second call does nothing.
    """
    global _watch
    if os.getpid() != _process_id:
        return  # a forked child
    watch, _watch = _watch, None
    error = sys.exc_info()[1]  # set if multiprocessing calls this for a function that raised
    is_success = error is None or (isinstance(error, SystemExit) and not error.code)
    if watch is not None and error is not None and not is_success:
        _report_failure(watch, error)
    runtime = present()
    if runtime is not None:
        use(None)
        runtime.close()
    if dist.is_initialized():
        # gloo's threads end with the last reference. Threads that were left to static destruction
        # aborted 1 process in 100.
        state.groups = None  # type: ignore[assignment]
        _end_process_groups(abort=watch is not None and watch.failed)
        gc.collect()
    if watch is not None:
        watch.leave()


def _end_process_groups(*, abort: bool) -> None:
    """End all process groups.

    Errors of the abort are passed over.

    Args:
        abort: Abort them first. After a failure NCCL's groups would wait for ranks that are gone.
    """
    if abort:
        # AttributeError before torch 2.6; RuntimeError of a backend without this function.
        with contextlib.suppress(AttributeError, RuntimeError):
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001  there is no public name
    if dist.is_initialized():
        dist.destroy_process_group()


def _install_hook(watch: Watch) -> None:
    """Report errors of the script to the watch: replace ``sys.excepthook``.

    The traceback of an error is not printed if another rank is the cause: that rank is named.

    The former hook is called for errors of this rank itself.

    Args:
        watch: The watch of this rank.
    """
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        """Report an error, and print its traceback unless another rank is the cause."""
        if not _report_failure(watch, error):
            before(kind, error, trace)

    sys.excepthook = hook


def _report_failure(watch: Watch, error: BaseException) -> bool:
    """Tell the job that this rank ends with an error, and print the cause if it is another rank.

    The other ranks are told, unless they know. Then this process ends within the grace period, 3 s.
    An error that may come from a lost peer waits up to 2 s for the message of that rank.

    Args:
        watch: The watch of this rank.
        error: The error.

    Returns:
        Whether another rank is the cause, and was named.
    """
    # The error may be the consequence of another rank's failure. Then the message of that failure
    # is here, or comes soon, and names the cause better than a lost connection.
    may_be_consequence = isinstance(error, PeerError) and not error.trace
    may_be_consequence = may_be_consequence or _may_come_from_lost_peer(error)
    seconds = _CAUSE_SECONDS if may_be_consequence else 0.0
    failure: Failure | None = watch.wait_for_failure(seconds)
    if failure is not None:
        watch.say(watch.words(failure))
        return True
    if isinstance(error, PeerError):
        watch.fail(error.reason, error.rank)
        watch.say(str(error))
        return True
    if may_be_consequence and watch.over is not None:
        failure = Failure(
            watch.over, f"its script was over while {watch.name(watch.rank)} still waited for it"
        )
        watch.fail(failure.reason, failure.rank)
        watch.say(watch.words(failure))
        return True
    watch.fail(summary(error))
    return False


def _may_come_from_lost_peer(error: BaseException) -> bool:
    """Return whether an error may be the consequence of a lost peer in a collective."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(part in text for part in _COLLECTIVE_ERRORS)
