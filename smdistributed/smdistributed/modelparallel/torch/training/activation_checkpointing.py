"""Compute activations again in the backward pass: ``smp.set_activation_checkpointing``.

torch's ``checkpoint_wrapper`` is not used. The wrapper is another module with other names, does not
offload inputs in tuples, and gives Hugging Face's layers their cache twice. A script may use the
wrapper itself, with equal results.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from smdistributed.modelparallel.torch.job.config import SMPConfigError
from smdistributed.modelparallel.torch.job.ranks import pp_rank
from smdistributed.modelparallel.torch.job.state import state
from smdistributed.modelparallel.torch.job.wrapped import wrapped
from smdistributed.modelparallel.torch.partitioning.tracing import is_tracing
from smdistributed.modelparallel.torch.pipeline import recompute

__all__ = ["check_partition", "checkpoint", "checkpoint_sequential", "set_activation_checkpointing"]

_logger = logging.getLogger("smdistributed.modelparallel")
_warnings: set[str] = set()


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,  # noqa: ARG001
    strategy: str = "each",
) -> None:
    """Keep only the inputs of a module, and run the module again in the backward pass.

    Call this function before or after the model is wrapped. A module on several partitions is an
    error if it was placed by hand. Otherwise it causes a warning, and its activations are kept.

    The module's ``forward`` is replaced on ranks that run it. Warnings go to the log of rank 0,
    once for each text.

    Args:
        module: The module. For a Sequential or a ModuleList its children run again.
        preserve_rng_state: Whether the second run draws the random numbers of the first one.
        pack_args_as_tuple: Accepted, without effect.
        strategy: The groups of a Sequential: ``each`` child alone, ``contiguous`` (all consecutive
            children of a partition together), or ``group_N`` (at most N of these).

    Raises:
        TypeError: The value is not a module.
        ValueError: The strategy is unknown.
        SMPConfigError: A module was placed by hand on several partitions.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"set_activation_checkpointing needs a torch.nn.Module, got {type(module).__name__}"
        )
    size = _group_size(strategy)
    if state.initialized and state.cfg.offload_activations:
        _warn_once(
            "offload_activations: checkpointed inputs that are on a GPU wait in host memory; on"
            " CPUs nothing changes"
        )
    if isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and size == 1):
        if size != 1:
            _warn_once(
                "set_activation_checkpointing:"
                f" a ModuleList is checkpointed child by child, not as {strategy!r}"
            )
        for child in module:
            _make_run_again(child, preserve_rng_state)
    elif isinstance(module, nn.Sequential):
        groups = _Groups(module, preserve_rng_state, size)
        # For the runtime, which calls the children of one partition.
        module.__dict__["_smp_run_children"] = groups.run
        placement = _placement_of(module)
        if placement.is_on_this_rank and len(placement.partitions) < 2:
            module.forward = groups  # type: ignore[method-assign]
    else:
        _make_run_again(module, preserve_rng_state)


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True) -> Any:
    """Call a module, keep only its inputs, and run it again in the backward pass.

    The result of the module is returned. A module on several partitions runs as it is, with a
    warning, if it was placed automatically.

    Args:
        module: The module. Unlike torch's function this takes no other callable.
        args: Its arguments.
        preserve_rng_state: See ``set_activation_checkpointing``.

    Raises:
        TypeError: It is not a module.
        SMPConfigError: It was placed by hand on several partitions.
        Exception: An error of the module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"checkpoint needs a torch.nn.Module, got {type(module).__name__}")
    if not _can_run_again(module):
        return module(*args)
    if not _placement_of(module).is_on_this_rank:
        # The runtime sends this to the module's rank.
        module.__dict__["_smp_checkpoint"] = _recomputation(preserve_rng_state)
        try:
            return module(*args)
        finally:
            module.__dict__.pop("_smp_checkpoint", None)
    return _recomputation(preserve_rng_state).call(module, args, {})


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,  # noqa: A002  the documented name
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,  # noqa: ARG001
) -> Any:
    """Call a Sequential, keep only the inputs of its groups, and run the groups again in the
    backward pass.

    The result of the last child is returned. Children on several partitions keep their activations.
    After the call of a Sequential with children of other ranks its marks stay on it: a later plain
    call recomputes, too.

    Args:
        sequential_module: The module.
        input: Its argument: a tensor, or a tuple of tensors that the first child takes as one.
        strategy: The groups, see ``set_activation_checkpointing``.
        preserve_rng_state: See ``set_activation_checkpointing``.
        pack_args_as_tuple: See ``set_activation_checkpointing``.

    Raises:
        TypeError: The module is not a Sequential.
        ValueError: The strategy is unknown.
        SMPConfigError: A child was placed by hand on several partitions.
        Exception: An error of a child.
    """
    if not isinstance(sequential_module, nn.Sequential):
        raise TypeError(
            "checkpoint_sequential needs a torch.nn.Sequential, got"
            f" {type(sequential_module).__name__}"
        )
    groups = _Groups(sequential_module, preserve_rng_state, _group_size(strategy))
    placement = _placement_of(sequential_module)
    if placement.is_on_this_rank and len(placement.partitions) < 2:
        return groups(input)
    # The runtime runs the children of this rank, and sends the options to the ranks of the others.
    own = vars(sequential_module)
    own.update(_smp_run_children=groups.run, _smp_checkpoint=groups.recomputation)
    return sequential_module(input)


def check_partition(model: nn.Module) -> None:
    """Check that each checkpointed module is on one partition. Called once the model is divided.

    A module is checkpointed if `set_activation_checkpointing` has marked it: it has the attribute
    ``_smp_runs_again``, with any value. A module on several partitions cannot run again. If it was
    placed by hand, that is an error. Under automatic partitioning it is none: the module keeps its
    activations, and rank 0 warns (``warnings.warn``), once for each module.

    Each checked module gets its place in the divided model as the attribute ``_smp_where``, and one
    that was warned of ``_smp_warned``. While the model is traced nothing is checked.

    Args:
        model: The model, with all its submodules.

    Raises:
        SMPConfigError: Such a module was placed by hand on several partitions. The text names it
            and the partitions.
    """
    for module in model.modules():
        if "_smp_runs_again" in vars(module):
            _can_run_again(module)


class _Checkpointed:
    """The forward of a module that runs again in the backward pass."""

    def __init__(self, module: nn.Module, preserve_rng_state: bool) -> None:
        self.module, self.forward = module, module.forward
        self.preserve_rng_state = preserve_rng_state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _can_run_again(self.module):
            return self.forward(*args, **kwargs)
        return recompute.run(_recomputation(self.preserve_rng_state), self.forward, args, kwargs)


class _Groups:
    """The forward of a Sequential with children that run again in groups."""

    def __init__(self, module: nn.Sequential, preserve_rng_state: bool, size: int | None) -> None:
        self.module, self.preserve_rng_state, self.size = module, preserve_rng_state, size

    @property
    def recomputation(self) -> recompute.Recomputation:
        """The options with which the children run again."""
        return _recomputation(self.preserve_rng_state, self.size)

    def __call__(self, input: Any) -> Any:  # noqa: A002
        return self.run(list(self.module), input)

    def run(self, children: Sequence[nn.Module], x: Any) -> Any:
        """Run neighbours that are on this rank, and return the last result.

        They run again in the backward pass, unless one of them is on several partitions.

        Args:
            children: The modules.
            x: The argument of the first one.

        Raises:
            SMPConfigError: A child was placed by hand on several partitions.
            Exception: An error of a child.
        """
        if _all_can_run_again(children):
            return self.recomputation.chain(children, x)
        return recompute.in_turn(children, x)


def _make_run_again(module: nn.Module, preserve_rng_state: bool) -> None:
    """Replace the forward of a module by one that runs again in the backward pass.

    On a rank without the module it is only marked.

    The mark is the attribute ``_smp_runs_again``. A second call for the same module only sets
    ``preserve_rng_state``.

    Args:
        module: The module.
        preserve_rng_state: Whether the second run draws the random numbers of the first one.

    Raises:
        SMPConfigError: The module was placed by hand on several partitions.
    """
    module.__dict__["_smp_runs_again"] = True
    if not _placement_of(module).is_on_this_rank:
        return
    _can_run_again(module)
    forward = module.forward
    if isinstance(forward, _Checkpointed):  # set before: the last call counts
        forward.preserve_rng_state = preserve_rng_state
    else:
        module.forward = _Checkpointed(module, preserve_rng_state)


def _recomputation(preserve_rng_state: bool, group: int | None = 1) -> recompute.Recomputation:
    """Return the options with which modules of this job run again."""
    offload = state.initialized and state.cfg.offload_activations
    return recompute.Recomputation(preserve_rng_state, offload, group)


def _group_size(strategy: str) -> int | None:
    """Return the number of children of a group; None: all of the Sequential.

    Args:
        strategy: "each", "contiguous", or for example "group_3".

    Raises:
        ValueError: The strategy is unknown.
    """
    if strategy == "each":
        return 1
    if strategy == "contiguous":
        return None
    if re.fullmatch(r"group_[1-9]\d*", strategy):
        return int(strategy.removeprefix("group_"))
    raise ValueError(
        f"strategy must be 'each', 'contiguous' or 'group_N' with N of 1 or more, got {strategy!r}"
    )


class _Placement(NamedTuple):
    """The place of a module in the divided model.

    Attributes:
        is_on_this_rank: Whether the module's own forward runs on this rank.
        partitions: The partitions of the module and its submodules.
    """

    is_on_this_rank: bool
    partitions: frozenset[int]


def _placement_of(module: nn.Module) -> _Placement:
    """Return the place of a module.

    A module of another model, and of a model that is not divided yet, is on this rank.

    The place is kept on the module as ``_smp_where``, once the model is divided.
    """
    model = wrapped.model
    if model is None or not model.partitioned:
        return _Placement(True, frozenset())
    placement: _Placement | None = module.__dict__.get("_smp_where")
    if placement is None:
        partitions = {model.partition_of_module(part) for part in module.modules()}
        here = model.partition_of_module(module) in (None, pp_rank())
        placement = _Placement(here, frozenset(partitions - {None}))
        module.__dict__["_smp_where"] = placement
    return placement


def _can_run_again(module: nn.Module) -> bool:
    """Return whether a module is on one partition, and so can run again; refuse or warn of one that
    is not.

    False also while the model is traced. Rank 0 warns once of a module on several partitions.

    The module gets the attributes ``_smp_where``, and after the warning ``_smp_warned``.

    Raises:
        SMPConfigError: It was placed by hand on several partitions.
    """
    if is_tracing():
        return False
    partitions = _placement_of(module).partitions
    if len(partitions) < 2:
        return True
    model = wrapped.model
    assert model is not None
    title = "the model"
    for name, part in model.module.named_modules():
        if part is module and name:
            title = name
    text = f"activation checkpointing of {title}: it is on partitions {sorted(partitions)}"
    if not state.cfg.auto_partition:
        raise SMPConfigError(
            f"{text}. Put it on one with smp.partition, or checkpoint the modules in it"
        )
    if "_smp_warned" not in vars(module) and state.topo.rank == 0:
        warnings.warn(f"{text}, so its activations are kept", stacklevel=2)
    vars(module)["_smp_warned"] = True
    return False


def _all_can_run_again(modules: Sequence[nn.Module]) -> bool:
    """Return whether each module is on one partition; effects and errors as `_can_run_again`."""
    # A list, because each module is checked, also after one that cannot.
    results = [_can_run_again(module) for module in modules]
    return all(results)


def _warn_once(text: str) -> None:
    """Log a warning on rank 0, the first time."""
    if text not in _warnings and state.initialized and state.topo.rank == 0:
        _logger.warning("%s", text)
    _warnings.add(text)
