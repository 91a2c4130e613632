"""An independent implementation of smdistributed.modelparallel.torch, version
1: what scripts import as ``smp``.
"""

from trainworks_smdistributed import emulation, legacy

from . import amp, initialize, model, nn, optimizers
from .exceptions import SMPConfigError, SMPRuntimeError, SMPUnsupportedError, StepError
from .initialize import init
from .job import communication, ranks
from .job.communication import *  # noqa: F403  each module lists its names
from .job.ranks import *  # noqa: F403
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
    "DistributedModel",
    "DistributedOptimizer",
    "SMPConfigError",
    "SMPRuntimeError",
    "SMPUnsupportedError",
    "StepError",
    "StepOutput",
    "amp",
    "delay_param_initialization",
    "init",
    "initialize",
    "is_tracing",
    "load",
    "model",
    "model_creation",
    "nn",
    "num_microbatches",
    "optimizers",
    "partition",
    "print_schedule",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "state",
    "step",
    "tensor_parallelism",
    "tp_register",
    "tp_register_with_module",
]
__all__ += communication.__all__
__all__ += ranks.__all__
