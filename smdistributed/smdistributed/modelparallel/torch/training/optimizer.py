"""`smp.DistributedOptimizer`: a torch optimizer whose parameters, state and
master weights are on several ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
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

# What they compute has no rule for a parameter in parts.
_UNSHARED = (
    "Adafactor",
    "Rprop",
    "SparseAdam",
)
OWNED = "_smp_owned"  # indices of the parameters that the part is complete for
PRECISION = "_smp_precision"  # master weights and loss scale


class DistributedOptimizer(_Optimizer):
    """Make an optimizer work on a model whose parts are on several ranks.

    The result is the optimizer that was passed: its class is extended in place, so that
    learning-rate schedulers, hooks and ``param_groups`` stay valid. On each rank it updates the
    parameters that the rank owns. With ``fp16`` or ``bf16`` it keeps float32 copies of them. With
    ``shard_optimizer_state`` each replica keeps the state of a part.

    Args:
        optimizer: A ``torch.optim.Optimizer``, or an object that has one as ``.optimizer``: a
            script's own optimizer for fp16. Such an object keeps its methods, and only what is
            inside becomes a distributed optimizer.
        static_loss_scale: Factor of the loss under ``fp16``.
        dynamic_loss_scale: Choose the factor by whether gradients overflow; then
            ``static_loss_scale`` is not used.
        dynamic_loss_args: Arguments of ``precision.LossScaler``.
        _: Accepted and ignored, for scripts of other versions.

    Raises:
        SMPConfigError: ``smp.init`` was not called, an argument is wrong, or the optimizer looks at
            all parameters at once and cannot be split (``LBFGS``).
    """

    param_groups: list[dict[str, Any]]
    # Accelerate, and so Hugging Face's Trainer, leaves it as it is: its wrapper
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
        """Extend the class of ``optimizer`` and return it.

        What was returned before is returned again.
        """
        if optimizer is None:  # copy makes an empty object first
            return super().__new__(cls)
        if not state.initialized:
            raise SMPConfigError("call smp.init() before smp.DistributedOptimizer")
        refuse_amp_of_apex("smp.DistributedOptimizer")
        if any(known is optimizer for known in wrapped.optimizers):
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
            optimizer.__class__ = _extended(_Around, cast("Any", type(optimizer)))
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
        """See the class. Everything is done when the class is extended."""

    def smp_setup(
        self,
        static_loss_scale: float | None,
        dynamic_loss_scale: bool,
        dynamic_loss_args: Mapping[str, Any] | None,
    ) -> None:
        """Add what this class needs to an optimizer whose class was extended."""
        cfg = state.cfg
        self.smp_half = bool(cfg.fp16 or cfg.bf16)
        # bfloat16 has the range of float32: its gradients need no scaling.
        self.loss_scaler = (
            LossScaler.of(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
            if cfg.fp16
            else LossScaler(1.0, dynamic=False)
        )
        if wrapped.model is not None:
            wrapped.model.loss_scaler = self.loss_scaler
        split = (
            cfg.pipeline_parallel_degree > 1 or cfg.tensor_parallel_degree > 1 or self._smp_sharded
        )
        split = split or mesh.degree() > 1
        if isinstance(self, torch.optim.LBFGS) and (split or self.smp_half):
            raise SMPConfigError(
                "torch.optim.LBFGS works on all parameters at once: it needs pipeline and tensor"
                " parallel degree 1, no shard_optimizer_state or sharded_data_parallel_degree, and"
                " float32. Use another optimizer, for example AdamW."
            )
        if mesh.degree() > 1 and (
            refused := [k for k in _UNSHARED if isinstance(self, getattr(torch.optim, k, ()))]
        ):
            raise SMPConfigError(
                "fully_shard, which sharded_data_parallel_degree uses, does not work with"
                f" torch.optim.{refused[0]}. Use another optimizer, for example AdamW."
            )
        self.overflow = False  # whether the last gradients were infinite or not numbers
        self._global_grad_norm = 0.0
        self._smp_masters: MasterWeights | None = None
        self._smp_taken: int | None = None  # the backward pass whose gradients the masters have
        self._smp_owners: dict[int, int] | None = None
        # A scheduler that was made before replaced `step` in the instance. The
        # extended class keeps its promises.
        vars(self).pop("step", None)
        self.smp_take_shards()

    def smp_take_shards(self) -> None:
        """Put the shared parameters, where the model has them, in the place of
        those that the script made.
        """
        for group in self.param_groups:
            for place, old in enumerate(group["params"]):
                group["params"][place] = new = wrap.sharded_parameter(old)
                if new is not old and old in self.state:
                    made = self.state.pop(old)  # some optimizers make their state at once
                    self.state[new] = {
                        key: mesh.shard_like(new, value, key) for key, value in made.items()
                    }
        self._smp_originals: list[Parameter] = list(self._smp_parameters())

    @property
    def _smp_sharded(self) -> bool:
        return bool(state.cfg.shard_optimizer_state) and rdp_size() > 1

    @property
    def _smp_everywhere(self) -> bool:
        """Whether the ranks of all replicas together have the gradients."""
        return self._smp_sharded or mesh.degree() > 1

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        """The parameters of each group: public scripts for sharded data parallelism ask."""
        originals = iter(self._smp_originals)
        return [[next(originals) for _ in group["params"]] for group in self.param_groups]

    @property
    def fp32_partitioned_groups_flat(self) -> list[_Flat]:
        """This rank's parts of the parameters of each group, in one row: such
        scripts ask for that, too.
        """
        return [
            _Flat([mesh.local(parameter.detach()) for parameter in group])
            for group in self.fp16_groups
        ]

    @property
    def ds_param_shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that share parameters, likewise."""
        return mesh.group()

    def _smp_parameters(self) -> Iterator[Parameter]:
        """Yield what is in the groups now: parameters, or their masters."""
        return (parameter for group in self.param_groups for parameter in group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does; they get masters too."""
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
        """Return the indices (over all groups) of the parameters that this rank
        owns, with those of its replicas.
        """
        everything = range(len(self._smp_originals))
        if wrapped.model is None or not wrapped.model.partitioned or mesh.degree() > 1:
            return set(everything)
        local = {id(parameter) for parameter in wrapped.model.local_parameters()}
        return {index for index in everything if id(self._smp_originals[index]) in local}

    def _smp_shards(self) -> dict[int, int]:
        """Return the replica (RDP rank) that updates each local parameter: the
        largest go first, to the emptiest.
        """
        if self._smp_owners is None:
            local = sorted(
                self._smp_local(), key=lambda index: (-self._smp_originals[index].numel(), index)
            )
            load = [0] * rdp_size()
            owners = {}
            for index in local:
                owners[index] = load.index(min(load))
                load[owners[index]] += self._smp_originals[index].numel()
            if wrapped.model is None or not wrapped.model.partitioned:
                return owners
            self._smp_owners = owners
        return self._smp_owners

    def _smp_owned(self) -> set[int]:
        """Return the indices of the parameters that this rank itself updates."""
        if not self._smp_sharded:
            return self._smp_local()
        me = rdp_rank()
        return {index for index, owner in self._smp_shards().items() if owner == me}

    # --- Precision --------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer: this object."""
        return self

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, after an overflow: Accelerate's schedulers ask."""
        return self.overflow

    @property
    def loss_scale(self) -> float:
        """The factor that the loss is multiplied by."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.loss_scale = float(value)

    def init_master_params(self) -> None:
        """Make the master weights, after the partition. The first step calls it; you need not."""
        if self.smp_half and self._smp_masters is None:
            if wrapped.model is not None and not wrapped.model.partitioned:
                return
            self._smp_masters = MasterWeights(self, self._smp_owned().__contains__)

    def reload_model_params(self, *_: Any) -> None:
        """Set the master weights from the model's parameters.

        Any arguments of a hook are ignored.
        """
        self.init_master_params()
        if self._smp_masters is not None:
            self._smp_masters.refresh(everything=True)

    def backward(self, loss: Tensor, update_master_grads: bool = True) -> None:
        """Run ``model.backward`` on the scaled loss.

        Args:
            loss: The loss. Inside ``smp.step`` that of one microbatch.
            update_master_grads: Outside a step, also call ``update_master_grads``. Inside one,
                ``clip_master_grads`` and ``step`` do that.
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
        """
        self.init_master_params()
        if self._smp_masters is None:
            return
        self._smp_masters.refresh()
        self._smp_taken = wrapped.model.pass_no if wrapped.model is not None else None
        self.overflow = False
        if self.loss_scaler.dynamic:
            local = self._smp_local()
            gradients = [self._smp_originals[index].grad for index in local]
            self.overflow = any_overflow(
                (g for g in gradients if g is not None), all_replicas=self._smp_everywhere
            )
        if not self.overflow:
            self._smp_masters.take_gradients(self.loss_scale)

    def _smp_take_gradients(self) -> None:
        """Call ``update_master_grads`` unless that was done since the last backward pass."""
        if not self.smp_half:
            return
        passed = wrapped.model.pass_no if wrapped.model is not None else None
        if self._smp_masters is None or self._smp_taken is None or self._smp_taken != passed:
            self.update_master_grads()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients down so that the norm of all of them, over all
        partitions, is at most ``max_norm``.

        Collective over the ranks of the model. Works in float32 too, where
        there are no master weights.

        Args:
            max_norm: Largest norm.
            norm_type: 2.0, another power, or ``inf``.

        Returns:
            The norm before, or -1.0 after an overflow.
        """
        self._smp_take_gradients()
        if self.overflow:
            return -1.0
        with torch.no_grad():
            parameters = list(self._smp_parameters())
            owned = [parameters[index] for index in sorted(self._smp_owned())]
            # Sharded, each replica counts its own shard.
            group = CommGroup.WORLD if self._smp_sharded else CommGroup.MP_GROUP
            norm = float(total_norm(owned, float(norm_type), group=group))
            factor = max_norm / (norm + 1e-6)
            if factor < 1.0:
                for index in self._smp_local():
                    gradient = parameters[index].grad
                    # Without a master the gradient of another replica's parameter is not used.
                    if gradient is not None:
                        mesh.local(gradient).mul_(factor)
        self._global_grad_norm = norm
        return norm

    # --- Step -------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True, set_grads_to_None: bool | None = None) -> None:  # noqa: N803
        """Clear the gradients of parameters and master weights.

        Args:
            set_to_none: Drop them instead of filling them with zeros.
            set_grads_to_None: The same, under the name that scripts for Apex use.
        """
        super().zero_grad(set_to_none if set_grads_to_None is None else set_grads_to_None)
        self._smp_taken = None
        for parameter in self._smp_originals:
            if parameter.grad is None:
                continue
            if set_to_none if set_grads_to_None is None else set_grads_to_None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that this rank owns. Nothing changes after an overflow.

        Args:
            closure: Computes the loss and the gradients, as in torch.

        Returns:
            What torch returns: the closure's result, or None.
        """
        own_passes.check_optimizer(self)
        self._opt_called = True  # what a learning-rate scheduler looks for
        if isinstance(self, torch.optim.LBFGS):
            return super().step(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._smp_take_gradients()
        if self.smp_half:
            self._smp_taken = None
            overflow = self.overflow
            self.loss_scaler.update_scale(overflow)
            if overflow:
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

    # LRScheduler replaces `step` by a function that notes the call, unless it
    # has this mark; `step` notes it itself.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001
    # torch wraps `step` of a class to run the hooks, unless it has this mark;
    # the wrapped `step` runs them.
    step.hooked = True  # type: ignore[attr-defined]

    @contextmanager
    def _smp_only_owned(self) -> Iterator[None]:
        """Hide the gradients of parameters that other replicas update, so that
        no state is made for them.
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
        """Send each updated parameter from the replica that owns it to the others."""
        group, members = state.groups[CommGroup.RDP_GROUP], state.topo.members(CommGroup.RDP_GROUP)
        with calls.inside("optimizer.step()", CommGroup.RDP_GROUP):
            sends = [
                dist.broadcast(
                    self._smp_originals[index].data, src=members[owner], group=group, async_op=True
                )
                for index, owner in sorted(self._smp_shards().items())
            ]
            for send in sends:
                send.wait()

    # --- State ------------------------------------------------------------------------------------

    def local_state_dict(self, gather_if_shard: bool = True) -> StateDict:
        """Return the state of the parameters that this rank owns, with ``_smp_is_partial`` set.

        Args:
            gather_if_shard: With ``shard_optimizer_state``, also collect the parts of the other
                replicas (collective over the replicas). Without it each replica must save its own
                dict.
        """
        self.init_master_params()
        owned = self._smp_owned()
        full: StateDict = super().state_dict()
        part = {
            **full,
            "state": {index: one for index, one in full["state"].items() if index in owned},
        }
        part[PARTIAL], part[OWNED] = True, sorted(owned)
        if self.smp_half:
            masters = self._smp_masters.pairs if self._smp_masters is not None else {}
            part[PRECISION] = {
                # A shared parameter is its own master: the model's state has it.
                "masters": {
                    i: master.detach()
                    for i, (p, master) in masters.items()
                    if not mesh.is_sharded(p)
                },
                "loss_scaler": self.loss_scaler.state_dict(),
            }
        if mesh.degree() > 1:
            part = {**_mapped([part], lambda _, pieces: mesh.local(pieces[0])), **mesh.mark()}
        if self._smp_sharded and gather_if_shard:
            part = merge_parts(allgather(part, CommGroup.RDP_GROUP))
        return part

    def state_dict(self, gather_to_rank0: bool = False) -> StateDict:
        """Return the state of all parameters, merged over the ranks of the model.

        Collective over them.

        With ``shard_optimizer_state`` and with sharded data parallelism every
        rank of the job must call it.

        Args:
            gather_to_rank0: Return an empty dict on all ranks of the model but the first; with
                sharded data parallelism on all ranks of the job but the first.

        Raises:
            StepError: Ranks are missing. The error names them.
        """
        divided = wrapped.model is not None and wrapped.model.partitioned
        if divided or self._smp_everywhere:
            meet(
                "optimizer.state_dict()",
                CommGroup.WORLD if self._smp_everywhere else CommGroup.MP_GROUP,
            )
        part = self.local_state_dict()
        if mesh.degree() > 1:
            part = _mapped([part], self._smp_whole)
            del part[mesh.PART]
            if self._smp_masters is not None:
                masters = {
                    index: mesh.gather(master.detach())
                    for index, (_, master) in self._smp_masters.pairs.items()
                }
                part[PRECISION]["masters"] = masters
        elif divided:
            if tp_size() > 1:
                part = self._smp_joined(allgather(part, CommGroup.TP_GROUP))
            if pp_size() > 1:
                part = merge_parts(allgather(part, CommGroup.PP_GROUP))
        del part[PARTIAL], part[OWNED]
        if gather_to_rank0 and (mp_rank() != 0 or (mesh.degree() > 1 and rank() != 0)):
            return {}
        return part

    def _smp_whole(self, index: int, pieces: list[Any]) -> Any:
        """Return the whole of which the first piece is this rank's part.

        Collective over those who share it.
        """
        parameter = self._smp_originals[index]
        return mesh.gather(mesh.shard_like(parameter, pieces[0], f"the state of parameter {index}"))

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what ``state_dict`` or ``local_state_dict`` returned. Call it on all ranks.

        Before the partition only the groups' options are loaded now; the state
        follows right after the partition.

        Raises:
            ValueError: The groups differ from those that were saved.
        """
        self.load_options(state_dict)
        after_partition(functools.partial(self.load_state, dict(state_dict)))

    def load_options(self, saved: StateDict) -> None:
        """Load the options of the groups only, such as the learning rate."""
        super().load_state_dict({"state": {}, "param_groups": saved["param_groups"]})

    def load_state(self, saved: StateDict) -> None:
        """Load the state of the parameters that this rank updates, after the partition.

        Collective over all ranks.
        """
        self.init_master_params()
        owned = self._smp_owned()
        if saved.get(PARTIAL) or mesh.PART in saved:
            mesh.check_part(saved)
        if saved.get(PARTIAL):
            complete = owned <= set(saved.get(OWNED, owned))
            # Every rank must take part in the exchange, or none.
            if not all(allgather(complete, CommGroup.WORLD)):
                saved = merge_parts(allgather(saved, CommGroup.PP_GROUP))
                if not all(allgather(owned <= set(saved[OWNED]), CommGroup.WORLD)):
                    saved = merge_parts(allgather(saved, CommGroup.RDP_GROUP))
        elif tp_size() > 1:
            saved = self._smp_cut(saved)
        mine = {index: one for index, one in saved["state"].items() if index in owned}
        if mesh.degree() > 1:
            mine = {
                index: {
                    key: mesh.shard_like(
                        self._smp_originals[index], value, f"{key} of parameter {index}"
                    )
                    for key, value in one.items()
                }
                for index, one in mine.items()
            }
        super().load_state_dict(
            {"state": mine, "param_groups": super().state_dict()["param_groups"]}
        )
        if self._smp_masters is not None:
            self._smp_load_precision(saved.get(PRECISION))

    def _smp_load_precision(self, saved: Mapping[str, Any] | None) -> None:
        assert self._smp_masters is not None
        if saved is None:
            # Saved in float32, or the model only: the model's parameters are all there is.
            self._smp_masters.refresh(everything=True)
            return
        with torch.no_grad():
            for index, (_, master) in self._smp_masters.pairs.items():
                if index in saved["masters"]:
                    master.copy_(
                        mesh.shard_like(
                            master, saved["masters"][index], f"the master of parameter {index}"
                        )
                    )
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
        """Load what ``save_optimizer_backcompat`` returned."""
        self.load_state_dict(state_dict)

    def _param_id_to_index(self) -> dict[int, int]:
        """Return the index of each parameter in the groups by its ``id``.

        Scripts for Apex call it.
        """
        return {id(parameter): index for index, parameter in enumerate(self._smp_parameters())}

    # --- Tensor parallelism: the state of a split parameter is split along the same axis ----------

    def _smp_joined(self, parts: list[StateDict]) -> StateDict:
        """Join the parts of the tensor ranks."""

        def join(index: int, pieces: list[Any]) -> Any:
            axis = _axis(self._smp_originals[index])
            if axis is None or not _is_split(pieces[0], self._smp_originals[index]):
                return pieces[0]
            return torch.cat(pieces, axis)

        return _mapped(parts, join)

    def _smp_cut(self, saved: StateDict) -> StateDict:
        """Cut this tensor rank's part out of a full dict."""
        count, me = tp_size(), tp_rank()

        def cut(index: int, pieces: list[Any]) -> Any:
            axis = _axis(self._smp_originals[index])
            if axis is None or not isinstance(pieces[0], Tensor) or pieces[0].dim() <= axis:
                return pieces[0]
            return pieces[0].chunk(count, axis)[me].clone()

        return _mapped([saved], cut)


class _Flat:
    """Tensors in one row, each in its own memory."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._at: dict[int, Tensor] = {}
        start = 0
        for tensor in tensors:
            if tensor.numel():
                self._at[start] = tensor.reshape(-1)
            start += tensor.numel()

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return one of the tensors, as a row: ``start`` is where it begins."""
        return self._at[start].narrow(dim, 0, length) if length else torch.empty(0)


@functools.cache
def _extended(extension: Hashable, base: Hashable) -> Any:
    """Make the class of an optimizer: ours in front of its own."""
    return type("DistributedOptimizer", cast("tuple[type, ...]", (extension, base)), {})


def _of_inner(name: str) -> Callable[..., Any]:
    """Return a method that is the one of the optimizer inside."""
    return lambda self, *args, **kwargs: getattr(self.optimizer, name)(*args, **kwargs)


class _Around:
    """What is added in front of the class of a script's own optimizer, which
    has a torch optimizer inside.

    Such a class (the fp16 optimizers of AWS's older GPT scripts) has its own master weights and
    loss scale. They stay; the optimizer inside becomes a distributed one in float32.
    """

    optimizer: torch.optim.Optimizer
    redefined_params = False  # those scripts ask; it is True in a library that renames parameters

    def smp_setup(self, *_: Any) -> None:
        """Make a distributed optimizer of the one inside."""
        DistributedOptimizer(self.optimizer)  # with a scale of 1: the script multiplies by its own
        wrapped.optimizers.pop()  # hooks get the outer one
        inner: Any = self.optimizer
        inner.smp_half = False

    local_state_dict = _of_inner("local_state_dict")
    load_options = _of_inner("load_options")
    load_state = _of_inner("load_state")
    _param_id_to_index = _of_inner("_param_id_to_index")


def after_partition(action: Callable[[], None]) -> None:
    """Do something now, or right after the partition if that is still to come."""
    if wrapped.model is None or wrapped.model.partitioned:
        action()
        return

    def once(*_: Any) -> None:
        handle.remove()  # what it holds (a checkpoint) is freed
        action()

    handle = wrapped.model.register_post_partition_hook(once)


def merge_parts(parts: list[StateDict]) -> StateDict:
    """Merge partial dicts of different parameters into one."""
    merged = dict(parts[0])
    merged["state"] = {index: one for part in parts for index, one in sorted(part["state"].items())}
    merged[OWNED] = sorted(
        {index for part in parts for index in (part[OWNED] if OWNED in part else part["state"])}
    )
    if PRECISION in merged:
        masters = {
            index: one for part in parts for index, one in part[PRECISION]["masters"].items()
        }
        merged[PRECISION] = {**merged[PRECISION], "masters": masters}
    return merged


def _mapped(parts: list[StateDict], change: Callable[[int, list[Any]], Any]) -> StateDict:
    """Apply ``change`` to each value of the state and to each master, given the
    values of all parts.
    """
    out = dict(parts[0])
    out["state"] = {
        index: {key: change(index, [part["state"][index][key] for part in parts]) for key in one}
        for index, one in parts[0]["state"].items()
    }
    if PRECISION in out:
        masters = {
            index: change(index, [part[PRECISION]["masters"][index] for part in parts])
            for index in out[PRECISION]["masters"]
        }
        out[PRECISION] = {**out[PRECISION], "masters": masters}
    return out


def _axis(parameter: Parameter) -> int | None:
    """Return the axis along which a parameter is split over the tensor ranks."""
    if not getattr(parameter, "_smp_distributed", False):
        return None
    return int(getattr(parameter, "_smp_axis", 1))


def _is_split(value: Any, parameter: Parameter) -> bool:
    """Return whether a value of the state has one number for each element of its parameter.

    Raises:
        SMPRuntimeError: It has neither that nor one number (a factored moment):
            it cannot be joined.
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
