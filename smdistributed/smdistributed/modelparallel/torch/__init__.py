"""An independent implementation of smdistributed.modelparallel.torch, version 1: what scripts import as ``smp``."""

from trainworks_smdistributed import emulation, legacy

from . import amp, initialize, model, nn, optimizers
from .exceptions import SMPConfigError, SMPRuntimeError, SMPUnsupportedError, StepError
from .initialize import init
from .job.communication import (
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    pp_barrier,
    rdp_barrier,
    recv_from,
    send,
    tp_barrier,
)
from .job.ranks import (
    DP_GROUP,
    MP_GROUP,
    PP_GROUP,
    RDP_GROUP,
    TP_GROUP,
    WORLD,
    CommGroup,
    RankType,
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    is_initialized,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from .job.state import state
from .model import DistributedModel
from .nn import set_tensor_parallelism, tensor_parallelism, tp_register, tp_register_with_module
from .partitioning.creation import delay_param_initialization, model_creation
from .partitioning.placement import partition, set_partition
from .partitioning.tracing import is_tracing
from .pipeline.schedule import print_schedule
from .step_function import StepOutput, num_microbatches, step
from .training.activation_checkpointing import set_activation_checkpointing
from .training.checkpoint import load, resume_from_checkpoint, save, save_checkpoint
from .training.optimizer import DistributedOptimizer

# What a script, or transformers, imports after this looks for CUDA, and for modules that are gone.
emulation.install_if_asked()
legacy.install()

__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "RankType",
    "SMPConfigError",
    "SMPRuntimeError",
    "SMPUnsupportedError",
    "StepError",
    "StepOutput",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "delay_param_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "init",
    "initialize",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "model",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "nn",
    "num_microbatches",
    "optimizers",
    "partition",
    "pp_barrier",
    "pp_rank",
    "pp_size",
    "print_schedule",
    "rank",
    "rdp_barrier",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "size",
    "state",
    "step",
    "tensor_parallelism",
    "tp_barrier",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
]
