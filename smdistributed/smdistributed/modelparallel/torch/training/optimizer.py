"""`smp.DistributedOptimizer`: a torch optimizer with parameters, state and master weights on
several ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from smdistributed.modelparallel.torch.exceptions import SMPConfigError, SMPRuntimeError
from smdistributed.modelparallel.torch.job.apex import refuse_amp_of_apex
from smdistributed.modelparallel.torch.job.collective_calls import calls
from smdistributed.modelparallel.torch.job.communication import allgather
from smdistributed.modelparallel.torch.job.meeting_points import meet
from smdistributed.modelparallel.torch.job.ranks import (
    mp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    tp_rank,
    tp_size,
)
from smdistributed.modelparallel.torch.job.state import state
from smdistributed.modelparallel.torch.job.topology import CommGroup
from smdistributed.modelparallel.torch.job.wrapped import wrapped
from smdistributed.modelparallel.torch.pipeline import own_passes
from smdistributed.modelparallel.torch.pipeline.runtime import present
from smdistributed.modelparallel.torch.sharding import mesh, wrap

from .gradient_norm import total_norm
from .precision import LossScaler, MasterWeights, any_overflow
from .state_dicts import PARTIAL

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
StateDict = dict[str, Any]

if TYPE_CHECKING:
    _Optimizer = torch.optim.Optimizer
else:  # the class comes in front of the one of the script's optimizer, which has it as its base
    _Optimizer = object

_NORM_OFFSET = 1e-6
"""Is added to a norm that divides, as torch does it: a norm may be 0."""

_NOT_SHARDABLE = ("Adafactor", "Rprop", "SparseAdam")
"""Optimizers of torch with operations that have no rule for sharded parameters."""

OWNED = "_smp_owned"
"""Key of a state: the indices of the parameters that the state is complete for."""
PRECISION = "_smp_precision"
"""Key of a state: master weights and loss scale."""


class DistributedOptimizer(_Optimizer):
    """Make an optimizer work on a model whose parts are on several ranks.

    The result is the same optimizer: its class is extended in place, so that learning-rate
    schedulers, hooks and ``param_groups`` stay valid. On each rank the optimizer updates the
    parameters that the rank owns. With ``fp16`` or ``bf16`` it keeps float32 copies of these
    parameters. With ``shard_optimizer_state`` each replica keeps a part of the state.

    Args:
        optimizer: A ``torch.optim.Optimizer``, or an object that has one as ``.optimizer``: a
            script's own optimizer for fp16. Such an object keeps its methods, and only the inner
            optimizer becomes a distributed one.
        static_loss_scale: Factor of the loss under ``fp16``.
        dynamic_loss_scale: Choose the factor by whether gradients overflow; then
            ``static_loss_scale`` is not used.
        dynamic_loss_args: Arguments of ``precision.LossScaler``.
        _: Accepted and ignored, for scripts of other versions.

    Raises:
        SMPConfigError: ``smp.init`` was not called, an argument is wrong, or the optimizer needs
            all parameters at once and cannot be split (``LBFGS``).
    """

    param_groups: list[dict[str, Any]]
    # Keeps Accelerate, and so Hugging Face's Trainer, from wrapping the optimizer: the wrapper
    # would hide `local_state_dict`.
    _is_accelerate_prepared = True

    def __new__(
        cls,
        optimizer: Any = None,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> DistributedOptimizer:
        """Extend the class of ``optimizer``, and return ``optimizer``.

        An optimizer that is extended already is returned unchanged.

        The optimizer is added to the wrapped ones, and ``smp_setup`` is called for it.

        Raises:
            SMPConfigError: See the class; or apex.amp has changed the optimizer.
        """
        if optimizer is None:  # copy makes an empty object first
            return super().__new__(cls)
        if not state.initialized:
            raise SMPConfigError("call smp.init() before smp.DistributedOptimizer")
        refuse_amp_of_apex("smp.DistributedOptimizer")
        if any(wrapped_optimizer is optimizer for wrapped_optimizer in wrapped.optimizers):
            return cast("DistributedOptimizer", optimizer)
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.__class__ = _extended(DistributedOptimizer, cast("Any", type(optimizer)))
        elif isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            if mesh.degree() > 1:
                raise SMPConfigError(
                    f"smp.DistributedOptimizer: {type(optimizer).__name__} keeps copies of whole"
                    " parameters. With sharded_data_parallel_degree give a torch.optim.Optimizer,"
                    " and fp16 or bf16 in the configuration"
                )
            optimizer.__class__ = _extended(_WithInnerOptimizer, cast("Any", type(optimizer)))
        else:
            raise SMPConfigError(
                f"smp.DistributedOptimizer: not a torch.optim.Optimizer: {type(optimizer).__name__}"
            )
        optimizer.smp_setup(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        wrapped.optimizers.append(optimizer)
        return cast("DistributedOptimizer", optimizer)

    def __init__(
        self,
        optimizer: Any,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Do nothing: ``__new__`` sets the optimizer up. The class documents the arguments."""

    def smp_setup(
        self,
        static_loss_scale: float | None,
        dynamic_loss_scale: bool,
        dynamic_loss_args: Mapping[str, Any] | None,
    ) -> None:
        """Set up an optimizer after its class was extended: its loss scale and its parameters.

        The wrapped model gets the loss scaler, too. The parameters of the groups are replaced by
        their shards. A ``step`` that a scheduler has put into the instance is removed.

        Args:
            static_loss_scale: See the class.
            dynamic_loss_scale: See the class.
            dynamic_loss_args: See the class.

        Raises:
            SMPConfigError: An argument is wrong, or the optimizer cannot be split.
        """
        cfg = state.cfg
        self.smp_half = bool(cfg.fp16 or cfg.bf16)
        # bfloat16 has the range of float32: its gradients need no scaling.
        self.loss_scaler = LossScaler(1.0, dynamic=False)
        if cfg.fp16:
            self.loss_scaler = LossScaler.of(
                static_loss_scale, dynamic_loss_scale, dynamic_loss_args
            )
        if wrapped.model is not None:
            wrapped.model.loss_scaler = self.loss_scaler
        self._smp_check_kind()
        self.overflow = False  # whether the last gradients were infinite or not numbers
        self._global_grad_norm = 0.0
        self._smp_masters: MasterWeights | None = None
        # Number of the backward pass that the masters have the gradients of.
        self._smp_copied_pass: int | None = None
        self._smp_owners: dict[int, int] | None = None
        # A learning-rate scheduler that was created before has replaced `step` in the instance.
        # The extended class counts the calls itself.
        vars(self).pop("step", None)
        self.smp_take_shards()

    def _smp_check_kind(self) -> None:
        """Refuse optimizers of torch that cannot update the parameters of one rank alone.

        Raises:
            SMPConfigError: It is such an optimizer.
        """
        cfg = state.cfg
        is_sharded = self._smp_sharded or mesh.degree() > 1
        is_split = cfg.pipeline_parallel_degree > 1 or cfg.tensor_parallel_degree > 1 or is_sharded
        if isinstance(self, torch.optim.LBFGS) and (is_split or self.smp_half):
            raise SMPConfigError(
                "torch.optim.LBFGS works on all parameters at once: it needs pipeline and tensor"
                " parallel degree 1, no shard_optimizer_state or sharded_data_parallel_degree, and"
                " float32. Use another optimizer, for example AdamW."
            )
        if mesh.degree() == 1:
            return
        for name in _NOT_SHARDABLE:
            if isinstance(self, getattr(torch.optim, name, ())):
                raise SMPConfigError(
                    "fully_shard, which sharded_data_parallel_degree uses, does not work with"
                    f" torch.optim.{name}. Use another optimizer, for example AdamW."
                )

    def smp_take_shards(self) -> None:
        """Replace the script's parameters in the groups by their shards, where the model has
        shards. State that the optimizer has already is cut in the same way.

        Raises:
            SMPRuntimeError: A value of the state has another shape than its parameter.
        """
        for group in self.param_groups:
            for place, old in enumerate(group["params"]):
                new = wrap.sharded_parameter(old)
                group["params"][place] = new
                if new is not old and old in self.state:
                    # Some optimizers create their state at once.
                    full_state = self.state.pop(old)
                    self.state[new] = {
                        key: mesh.shard_like(new, value, key) for key, value in full_state.items()
                    }
        self._smp_originals: list[Parameter] = list(self._smp_parameters())

    @property
    def _smp_sharded(self) -> bool:
        """Whether each replica updates a part of the parameters (``shard_optimizer_state``)."""
        return bool(state.cfg.shard_optimizer_state) and rdp_size() > 1

    @property
    def _smp_everywhere(self) -> bool:
        """Whether the ranks of all replicas together have the gradients."""
        return self._smp_sharded or mesh.degree() > 1

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        """The parameters of each group. Public scripts for sharded data parallelism read this.

        A list for each group, made at each call.
        """
        groups = []
        start = 0
        for group in self.param_groups:
            end = start + len(group["params"])
            groups.append(self._smp_originals[start:end])
            start = end
        return groups

    @property
    def fp32_partitioned_groups_flat(self) -> list[_FlatTensors]:
        """For each group this rank's shards as one flat tensor. Such scripts read this, too.

        A write to it changes the parameters.
        """
        flat_groups = []
        for group in self.fp16_groups:
            shards = [mesh.local(parameter.detach()) for parameter in group]
            flat_groups.append(_FlatTensors(shards))
        return flat_groups

    @property
    def ds_param_shard_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that share parameters. Such scripts read this, too."""
        return mesh.group()

    def _smp_parameters(self) -> Iterator[Parameter]:
        """Yield the present tensors of the groups: parameters, or their master weights."""
        for group in self.param_groups:
            yield from group["params"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does. They get master weights, too.

        With sharded parameters the group gets the shards.

        Raises:
            ValueError: A parameter is in a group already, or no parameter is given (torch's own
                error).
            TypeError: torch refuses the group.
        """
        super().add_param_group(param_group)
        first = len(self._smp_originals)
        added = self.param_groups[-1]["params"]
        added[:] = [wrap.sharded_parameter(parameter) for parameter in added]
        self._smp_originals += list(self.param_groups[-1]["params"])
        self._smp_owners = None
        if self._smp_masters is not None:
            self._smp_masters.add(self, self._smp_owned().__contains__, first)

    # --- Which parameters are this rank's ---------------------------------------------------------

    def _smp_local(self) -> set[int]:
        """Return the indices, over all groups, of the parameters on this rank's partition.

        Before the partition, and with sharded parameters, all are.
        """
        indices = range(len(self._smp_originals))
        if wrapped.model is None or not wrapped.model.partitioned or mesh.degree() > 1:
            return set(indices)
        local_ids = set(map(id, wrapped.model.local_parameters()))
        return {index for index in indices if id(self._smp_originals[index]) in local_ids}

    def _smp_shards(self) -> dict[int, int]:
        """Return the replica (RDP rank) that updates each local parameter.

        The parameters are given out by size, the largest first, to the replica with the fewest
        elements. All replicas compute the same.

        The answer is kept, once the model is partitioned, until a group is added.

        Returns:
            Index of a parameter -> the replica.
        """
        if self._smp_owners is not None:
            return self._smp_owners
        sizes = {index: self._smp_originals[index].numel() for index in self._smp_local()}
        loads = [0] * rdp_size()
        owners = {}
        for index in sorted(sizes, key=lambda index: (-sizes[index], index)):
            owner = loads.index(min(loads))
            owners[index] = owner
            loads[owner] += sizes[index]
        # Before the partition this rank does not know yet which parameters are local.
        if wrapped.model is not None and wrapped.model.partitioned:
            self._smp_owners = owners
        return owners

    def _smp_owned(self) -> set[int]:
        """Return the indices of the parameters that this rank itself updates."""
        if not self._smp_sharded:
            return self._smp_local()
        own_rank = rdp_rank()
        return {index for index, owner in self._smp_shards().items() if owner == own_rank}

    # --- Precision --------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer: this object."""
        return self

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, after an overflow. Accelerate's schedulers read
        this.
        """
        return self.overflow

    @property
    def loss_scale(self) -> float:
        """The factor that the loss is multiplied by."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.loss_scale = float(value)

    def init_master_params(self) -> None:
        """Create the master weights, after the partition. The first step calls this itself.

        In float32, and before the partition, nothing is done.
        """
        if self.smp_half and self._smp_masters is None:
            if wrapped.model is not None and not wrapped.model.partitioned:
                return
            self._smp_masters = MasterWeights(self, self._smp_owned().__contains__)

    def reload_model_params(self, *_: Any) -> None:
        """Set the master weights from the model's parameters.

        Any arguments of a hook are ignored.

        The masters are created before, if they are missing. In float32 nothing is done.
        """
        self.init_master_params()
        if self._smp_masters is not None:
            self._smp_masters.refresh(everything=True)

    def backward(self, loss: Tensor, update_master_grads: bool = True) -> None:
        """Run ``model.backward`` on the scaled loss.

        Gradients are added to. The masters' gradients and ``overflow`` are set with
        ``update_master_grads``.

        Args:
            loss: The loss; in a step function the loss of one microbatch.
            update_master_grads: Outside a step function, also call ``update_master_grads``. In a
                step function, ``clip_master_grads`` and ``step`` do that.

        Raises:
            SMPRuntimeError: No model is wrapped.
            StepError: As ``model.backward``.
            RuntimeError: torch refused the pass.
        """
        if wrapped.model is None:
            raise SMPRuntimeError("optimizer.backward: call smp.DistributedModel first")
        wrapped.model.backward(loss)
        runtime = present()
        if update_master_grads and (runtime is None or not runtime.in_step):
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Copy the gradients to the master weights, unscaled, and set ``overflow``.

        Collective over the ranks of the model under dynamic loss scaling.

        After an overflow the masters keep their former gradients. Masters of parameters that were
        changed elsewhere are updated first. Without fp16 or bf16 nothing is done.
        """
        self.init_master_params()
        if self._smp_masters is None:
            return
        self._smp_masters.refresh()
        self._smp_copied_pass = None
        if wrapped.model is not None:
            self._smp_copied_pass = wrapped.model.pass_no
        self.overflow = False
        if self.loss_scaler.dynamic:
            gradients = [self._smp_originals[index].grad for index in self._smp_local()]
            present_gradients = [gradient for gradient in gradients if gradient is not None]
            self.overflow = any_overflow(present_gradients, all_replicas=self._smp_everywhere)
        if not self.overflow:
            self._smp_masters.take_gradients(self.loss_scale)

    def _smp_take_gradients(self) -> None:
        """Call ``update_master_grads`` unless that was done since the last backward pass.

        In float32 nothing is done.
        """
        if not self.smp_half:
            return
        last_pass = wrapped.model.pass_no if wrapped.model is not None else None
        copied_pass = self._smp_copied_pass
        if self._smp_masters is None or copied_pass is None or copied_pass != last_pass:
            self.update_master_grads()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients of all partitions down to a norm of at most ``max_norm``.

        Collective over the ranks of the model. In float32, without master weights, the gradients of
        the parameters are scaled.

        Under fp16 or bf16 the masters' gradients are set first, if need be. The norm is kept as the
        global norm of the gradients.

        Args:
            max_norm: Largest norm.
            norm_type: 2.0, another power, or ``inf``.

        Returns:
            The norm before the scaling, or -1.0 after an overflow.

        Raises:
            RuntimeError: The collective broke, because a rank is gone.
        """
        self._smp_take_gradients()
        if self.overflow:
            return -1.0
        with torch.no_grad():
            parameters = list(self._smp_parameters())
            owned = [parameters[index] for index in sorted(self._smp_owned())]
            # With a sharded optimizer state each replica counts its own shard.
            group = CommGroup.WORLD if self._smp_sharded else CommGroup.MP_GROUP
            norm = float(total_norm(owned, float(norm_type), group=group))
            factor = max_norm / (norm + _NORM_OFFSET)
            if factor < 1.0:
                for index in self._smp_local():
                    gradient = parameters[index].grad
                    # None: a parameter of another replica, which has no master here.
                    if gradient is not None:
                        mesh.local(gradient).mul_(factor)
        self._global_grad_norm = norm
        return norm

    # --- Step -------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True, set_grads_to_None: bool | None = None) -> None:  # noqa: N803
        """Clear the gradients of parameters and master weights.

        The gradients of the masters are cleared by the optimizer itself, those of the parameters
        besides.

        Args:
            set_to_none: Set the gradients to None; else fill them with zeros.
            set_grads_to_None: The same, under the name that scripts for Apex use.
        """
        drops = set_to_none if set_grads_to_None is None else set_grads_to_None
        super().zero_grad(drops)
        self._smp_copied_pass = None
        for parameter in self._smp_originals:
            if parameter.grad is None:
                continue
            if drops:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that this rank owns. Nothing changes after an overflow.

        Parameters, state and masters are written, and the loss scale is updated. Parameters are
        sent to the other replicas with ``shard_optimizer_state``: then the call is collective over
        these. Under dynamic loss scaling and ``sdp_gradient_clipping`` it is collective over the
        ranks of the model.

        Args:
            closure: Computes the loss and the gradients, as in torch.

        Returns:
            The closure's result, or None.

        Raises:
            StepError: A step function runs, on the model of these parameters.
            RuntimeError: The collective broke, because a rank is gone.
            Exception: An error of the closure or of the optimizer itself.
        """
        own_passes.check_optimizer(self)
        self._opt_called = True  # a learning-rate scheduler reads this
        if isinstance(self, torch.optim.LBFGS):
            return super().step(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._smp_take_gradients()
        if self.smp_half:
            self._smp_copied_pass = None
            self.loss_scaler.update_scale(self.overflow)
            if self.overflow:
                return result
        if mesh.degree() > 1 and state.cfg.sdp_gradient_clipping:
            self.clip_master_grads(state.cfg.sdp_gradient_clipping)
        with self._smp_only_owned():
            super().step()
        if self._smp_masters is not None:
            self._smp_masters.write_back()
        if self._smp_sharded:
            self._smp_exchange()
        return result

    # Keeps LRScheduler from replacing `step` by a function that records the call: `step` records
    # the call itself.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001
    # Keeps torch from wrapping this `step` to run the hooks: the `step` of the script's optimizer
    # runs them.
    step.hooked = True  # type: ignore[attr-defined]

    @contextmanager
    def _smp_only_owned(self) -> Iterator[None]:
        """Hide the gradients of parameters that other replicas update, so that this rank keeps no
        state for these parameters.

        The gradients are set to None within the block, and are back after it. Without
        ``shard_optimizer_state`` nothing is done.
        """
        hidden: list[tuple[Parameter, Tensor]] = []
        if self._smp_sharded:
            owned = self._smp_owned()
            for index, parameter in enumerate(self._smp_parameters()):
                if index not in owned and parameter.grad is not None:
                    hidden.append((parameter, parameter.grad))
                    parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    def _smp_exchange(self) -> None:
        """Send each updated parameter from the replica that owns it to the others. Collective.

        Over the replicas. The parameters of this rank that others update are written in place.

        Raises:
            RuntimeError: The collective broke, because a rank is gone.
        """
        group = state.groups[CommGroup.RDP_GROUP]
        members = state.topo.members(CommGroup.RDP_GROUP)
        with calls.inside("optimizer.step()", CommGroup.RDP_GROUP):
            broadcasts = []
            for index, owner in sorted(self._smp_shards().items()):
                data = self._smp_originals[index].data
                broadcast = dist.broadcast(data, src=members[owner], group=group, async_op=True)
                broadcasts.append(broadcast)
            for broadcast in broadcasts:
                broadcast.wait()

    # --- State ------------------------------------------------------------------------------------

    def local_state_dict(self, gather_if_shard: bool = True) -> StateDict:
        """Return the state of the parameters that this rank owns, with ``_smp_is_partial`` set.

        Master weights are created before, if they are missing. Tensors share the memory of the
        optimizer's.

        Args:
            gather_if_shard: With ``shard_optimizer_state``, also collect the parts of the other
                replicas. Then the call is collective over the replicas. With False each replica
                must save its own dictionary.

        Returns:
            The state as torch's, with the keys of a partial state; under fp16 or bf16 also master
            weights and loss scale.

        Raises:
            RuntimeError: The collective broke, because a rank is gone.
        """
        self.init_master_params()
        owned = self._smp_owned()
        part: StateDict = dict(super().state_dict())
        part["state"] = _select(part["state"], owned)
        part[PARTIAL], part[OWNED] = True, sorted(owned)
        if self.smp_half:
            masters = {}
            if self._smp_masters is not None:
                for index, (parameter, master) in self._smp_masters.pairs.items():
                    # A sharded parameter is its own master: the model's state has it.
                    if not mesh.is_sharded(parameter):
                        masters[index] = master.detach()
            loss_scaler = self.loss_scaler.state_dict()
            part[PRECISION] = {"masters": masters, "loss_scaler": loss_scaler}
        if mesh.degree() > 1:
            part = _map_values([part], lambda _, pieces: mesh.local(pieces[0]))
            part.update(mesh.mark())
        if self._smp_sharded and gather_if_shard:
            part = merge_parts(allgather(part, CommGroup.RDP_GROUP))
        return part

    def state_dict(self, gather_to_rank0: bool = False) -> StateDict:
        """Return the state of all parameters, merged over the ranks of the model.

        Collective over the ranks of the model; with ``shard_optimizer_state`` and with sharded data
        parallelism over the job.

        Args:
            gather_to_rank0: Return an empty dictionary on all ranks of the model but the first;
                with sharded data parallelism on all ranks of the job but the first.

        Returns:
            The state as torch's; under fp16 or bf16 also master weights and loss scale.

        Raises:
            StepError: Ranks are missing. The error names these ranks.
            SMPRuntimeError: A value of a split parameter has another shape than the parameter, and
                cannot be joined.
            RuntimeError: The collective broke, because a rank is gone.
        """
        is_divided = wrapped.model is not None and wrapped.model.partitioned
        if is_divided or self._smp_everywhere:
            group = CommGroup.WORLD if self._smp_everywhere else CommGroup.MP_GROUP
            meet("optimizer.state_dict()", group)
        part = self.local_state_dict()
        if mesh.degree() > 1:
            part = _map_values([part], self._smp_gather)
            del part[mesh.PART]
            if self._smp_masters is not None:
                masters = {
                    index: mesh.gather(master.detach())
                    for index, (_, master) in self._smp_masters.pairs.items()
                }
                part[PRECISION]["masters"] = masters
        elif is_divided:
            if tp_size() > 1:
                part = self._smp_joined(allgather(part, CommGroup.TP_GROUP))
            if pp_size() > 1:
                part = merge_parts(allgather(part, CommGroup.PP_GROUP))
        del part[PARTIAL], part[OWNED]
        is_first = mp_rank() == 0
        if mesh.degree() > 1:
            is_first = is_first and rank() == 0
        if gather_to_rank0 and not is_first:
            return {}
        return part

    def _smp_gather(self, index: int, pieces: list[Any]) -> Any:
        """Return the full value of a parameter's state. Collective over the shard group.

        Args:
            index: Index of the parameter.
            pieces: This rank's shard, as the only item.

        Raises:
            SMPRuntimeError: The value has another shape.
        """
        parameter = self._smp_originals[index]
        return mesh.gather(mesh.shard_like(parameter, pieces[0], f"the state of parameter {index}"))

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a result of ``state_dict`` or ``local_state_dict``. All ranks call this method.

        Before the partition only the options of the groups are loaded now. The state is loaded
        right after the partition.

        Raises:
            ValueError: The groups differ from the saved ones.
            SMPRuntimeError: As ``load_state``, if the model is partitioned.
        """
        self.load_options(state_dict)
        after_partition(functools.partial(self.load_state, dict(state_dict)))

    def load_options(self, saved: StateDict) -> None:
        """Load the options of the groups only, such as the learning rate."""
        super().load_state_dict({"state": {}, "param_groups": saved["param_groups"]})

    def load_state(self, saved: StateDict) -> None:
        """Load the state of the parameters that this rank updates, after the partition.

        Collective over all ranks. A partial state of other parameters is merged with those of the
        other ranks first.

        State, master weights and loss scale are replaced; without saved masters these are set from
        the parameters. Parameters are written with their masters.

        Args:
            saved: From ``state_dict`` or ``local_state_dict``.

        Raises:
            SMPRuntimeError: The partial state is another rank's part, or a value has another shape.
            RuntimeError: The collective broke, because a rank is gone.
        """
        self.init_master_params()
        owned = self._smp_owned()
        if saved.get(PARTIAL) or mesh.PART in saved:
            mesh.check_part(saved)
        if saved.get(PARTIAL):
            is_complete = owned <= set(saved.get(OWNED, owned))
            # Every rank must take part in the exchange, or none.
            if not all(allgather(is_complete, CommGroup.WORLD)):
                saved = merge_parts(allgather(saved, CommGroup.PP_GROUP))
                is_complete = owned <= set(saved[OWNED])
                if not all(allgather(is_complete, CommGroup.WORLD)):
                    saved = merge_parts(allgather(saved, CommGroup.RDP_GROUP))
        elif tp_size() > 1:
            saved = self._smp_cut(saved)
        own_state = _select(saved["state"], owned)
        if mesh.degree() > 1:
            for index, parameter_state in own_state.items():
                parameter = self._smp_originals[index]
                own_state[index] = {
                    key: mesh.shard_like(parameter, value, f"{key} of parameter {index}")
                    for key, value in parameter_state.items()
                }
        param_groups = super().state_dict()["param_groups"]
        super().load_state_dict({"state": own_state, "param_groups": param_groups})
        if self._smp_masters is not None:
            self._smp_load_precision(saved.get(PRECISION))

    def _smp_load_precision(self, saved: Mapping[str, Any] | None) -> None:
        """Load master weights and loss scale; without them set the masters from the parameters.

        The parameters are written from the masters, too.

        Raises:
            SMPRuntimeError: A master has another shape.
        """
        assert self._smp_masters is not None
        if saved is None:
            # Saved in float32, or without the optimizer.
            self._smp_masters.refresh(everything=True)
            return
        with torch.no_grad():
            for index, (_, master) in self._smp_masters.pairs.items():
                if index in saved["masters"]:
                    title = f"the master of parameter {index}"
                    value = mesh.shard_like(master, saved["masters"][index], title)
                    master.copy_(value)
        self._smp_masters.write_back()
        self.loss_scaler.load_state_dict(saved["loss_scaler"])

    def save_optimizer_backcompat(self, gather_if_shard: bool = True) -> StateDict:
        """Return ``local_state_dict``, under the name that AWS's GPT scripts call."""
        return self.local_state_dict(bool(gather_if_shard))

    def load_optimizer_backcompat(
        self,
        state_dict: StateDict,
        gather_if_shard: bool = True,  # noqa: ARG002
    ) -> None:
        """Load a result of ``save_optimizer_backcompat``."""
        self.load_state_dict(state_dict)

    def _param_id_to_index(self) -> dict[int, int]:
        """Return ``id`` of a parameter -> its index in the groups. Scripts for Apex call this."""
        return {id(parameter): index for index, parameter in enumerate(self._smp_parameters())}

    # --- Tensor parallelism: the state of a split parameter is split along the same axis ----------

    def _smp_joined(self, parts: list[StateDict]) -> StateDict:
        """Return the full state from the parts of the tensor ranks.

        The parts are not changed.

        Args:
            parts: The parts, in the order of the tensor ranks.

        Raises:
            SMPRuntimeError: A value cannot be joined.
        """

        def join(index: int, pieces: list[Any]) -> Any:
            """Return the pieces of one value, joined if the parameter is split."""
            axis = _axis(self._smp_originals[index])
            if axis is None or not _is_split(pieces[0], self._smp_originals[index]):
                return pieces[0]
            return torch.cat(pieces, axis)

        return _map_values(parts, join)

    def _smp_cut(self, saved: StateDict) -> StateDict:
        """Return this tensor rank's part of a full state.

        The saved state is not changed: cut values are copies.
        """
        count, part = tp_size(), tp_rank()

        def cut(index: int, pieces: list[Any]) -> Any:
            """Return this rank's part of one value, if the parameter is split."""
            axis = _axis(self._smp_originals[index])
            if axis is None or not isinstance(pieces[0], Tensor) or pieces[0].dim() <= axis:
                return pieces[0]
            return pieces[0].chunk(count, axis)[part].clone()

        return _map_values([saved], cut)


class _FlatTensors:
    """Tensors that look like one flat tensor, while each is in its own memory."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._by_start: dict[int, Tensor] = {}
        start = 0
        for tensor in tensors:
            if tensor.numel():
                self._by_start[start] = tensor.reshape(-1)
            start += tensor.numel()

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return the flat tensor that begins at element ``start``.

        Raises:
            KeyError: No tensor begins there.
        """
        if not length:
            return torch.empty(0)
        return self._by_start[start].narrow(dim, 0, length)


@functools.cache
def _extended(extension: Hashable, base: Hashable) -> Any:
    """Return the class of an optimizer, with our class in front of its own."""
    return type("DistributedOptimizer", cast("tuple[type, ...]", (extension, base)), {})


def _of_inner(name: str) -> Callable[..., Any]:
    """Return a method that calls the method of the inner optimizer."""
    return lambda self, *args, **kwargs: getattr(self.optimizer, name)(*args, **kwargs)


class _WithInnerOptimizer:
    """The extension of a script's own optimizer class, which has a torch optimizer inside.

    Such a class (the fp16 optimizers of AWS's older GPT scripts) has its own master weights and
    loss scale. They stay as they are; the inner optimizer becomes a distributed one in float32.
    """

    optimizer: torch.optim.Optimizer
    # Such scripts read this. It would be True in a library that renames parameters.
    redefined_params = False

    def smp_setup(self, *_: Any) -> None:
        """Extend the inner optimizer.

        Raises:
            SMPConfigError: The inner optimizer cannot be split.
        """
        # With a loss scale of 1: the script multiplies by its own.
        DistributedOptimizer(self.optimizer)
        wrapped.optimizers.pop()  # hooks get the outer optimizer
        inner: Any = self.optimizer
        inner.smp_half = False

    local_state_dict = _of_inner("local_state_dict")
    load_options = _of_inner("load_options")
    load_state = _of_inner("load_state")
    _param_id_to_index = _of_inner("_param_id_to_index")


def after_partition(action: Callable[[], None]) -> None:
    """Run an action now, or right after the partition if the model is not partitioned yet.

    The action runs once.

    Raises:
        Exception: An error of the action, if it runs now.
    """
    if wrapped.model is None or wrapped.model.partitioned:
        action()
        return

    def once(*_: Any) -> None:
        handle.remove()  # frees the objects of the action, such as a checkpoint
        action()

    handle = wrapped.model.register_post_partition_hook(once)


def merge_parts(parts: list[StateDict]) -> StateDict:
    """Return one partial state from several partial states of different parameters.

    Args:
        parts: The states. The groups and the loss scale are those of the first one.

    Returns:
        A new state. The parts are not changed; inner values are theirs.
    """
    merged = dict(parts[0])
    merged_state: dict[int, Any] = {}
    owned: set[int] = set()
    masters: dict[int, Any] = {}
    for part in parts:
        merged_state.update(sorted(part["state"].items()))
        owned.update(part[OWNED] if OWNED in part else part["state"])
        if PRECISION in merged:
            masters.update(part[PRECISION]["masters"])
    merged["state"], merged[OWNED] = merged_state, sorted(owned)
    if PRECISION in merged:
        merged[PRECISION] = {**merged[PRECISION], "masters": masters}
    return merged


def _select(parameter_states: Mapping[int, Any], indices: Set[int]) -> dict[int, Any]:
    """Return the states of some parameters."""
    return {index: value for index, value in parameter_states.items() if index in indices}


def _map_values(parts: list[StateDict], change: Callable[[int, list[Any]], Any]) -> StateDict:
    """Apply a function to each value of the state and to each master weight.

    Args:
        parts: States of the same parameters, for example of the tensor ranks.
        change: Takes the index of a parameter and the values of all parts, and returns the new
            value.

    Returns:
        The first state, with the new values.

    Raises:
        Exception: An error of the function.
    """
    mapped = dict(parts[0])
    mapped["state"] = {}
    for index, parameter_state in parts[0]["state"].items():
        new_state = {}
        for key in parameter_state:
            new_state[key] = change(index, [part["state"][index][key] for part in parts])
        mapped["state"][index] = new_state
    if PRECISION in mapped:
        masters = {}
        for index in mapped[PRECISION]["masters"]:
            pieces = [part[PRECISION]["masters"][index] for part in parts]
            masters[index] = change(index, pieces)
        mapped[PRECISION] = {**mapped[PRECISION], "masters": masters}
    return mapped


def _axis(parameter: Parameter) -> int | None:
    """Return the axis along which a parameter is split over the tensor ranks; None: it is whole."""
    if not getattr(parameter, "_smp_distributed", False):
        return None
    return int(getattr(parameter, "_smp_axis", 1))


def _is_split(value: Any, parameter: Parameter) -> bool:
    """Return whether a value of the state has one number for each element of its parameter.

    Raises:
        SMPRuntimeError: The value has another shape, such as a factored moment, and cannot be
            joined.
    """
    if not isinstance(value, Tensor) or value.dim() == 0:
        return False
    if value.shape == parameter.shape:
        return True
    raise SMPRuntimeError(
        f"the full optimizer state cannot be saved: state of shape {tuple(value.shape)} of a"
        f" parameter of shape {tuple(parameter.shape)} that is split by tensor parallelism. Save a"
        " partial checkpoint."
    )
