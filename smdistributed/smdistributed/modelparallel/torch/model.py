"""`smp.DistributedModel`: a module whose parts are on several ranks."""

from __future__ import annotations

import abc
import contextlib
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn as tnn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils.hooks import RemovableHandle

from . import nn
from .exceptions import PeerError, SMPRuntimeError, StepError, summary
from .job.apex import refuse_amp_of_apex
from .job.collective_calls import calls
from .job.config import SMPConfigError
from .job.ranks import dp_rank, dp_size, pp_rank, pp_size, rank, rdp_rank, tp_size
from .job.state import state
from .job.topology import CommGroup
from .job.wrapped import wrapped
from .nn import delayed
from .partitioning import partitioner, placement, remote
from .partitioning.tracing import (
    Trace,
    TraceDone,
    describe,
    is_tracing,
    trace_forward,
    tracing,
    unchanged,
)
from .pipeline import own_passes
from .pipeline.runtime import present
from .sharding import mesh, wrap
from .sharding.gradient_reduction import GradientReduction
from .sharding.misuse import check_unsharded
from .training import activation_checkpointing, data_parallel, gradient_norm, state_dicts
from .training.data_parallel import MIB, CommHook, Reducer
from .training.precision import LossScaler
from .training.state_dicts import PARTIAL, StateDict
from .transport import pytrees

Hook = Callable[["DistributedModel", Any], Any]


class _Once(abc.ABCMeta):
    """Makes the class return the wrapper again for the module that is wrapped:
    transformers does that to evaluate.
    """

    def __call__(cls, module: tnn.Module, *args: Any, **kwargs: Any) -> DistributedModel:
        model = cast("DistributedModel | None", wrapped.model)
        if model is not None and any(
            module is known for known in (model, model.module, model.wrapped)
        ):
            return model
        return cast("DistributedModel", super().__call__(module, *args, **kwargs))


class DistributedModel(tnn.Module, Joinable, metaclass=_Once):
    """Wrap the model of a script. There is one in a process.

    With a pipeline degree above 1 the model is divided when the first step function runs. Until
    then ``to()`` and ``cuda()`` do nothing, and ``smp.set_partition`` counts. Then each rank keeps
    only the parameters of its own partition. Hooks of a module fire on the rank that owns it.

    Args:
        module: The model, whole and equal on all ranks of a pipeline.
        trace_device: ``gpu`` or ``cpu``: where the traced forward pass runs, on machines with GPUs.
        trace_execution_times: Divide by measured seconds instead of counted
            floating-point operations.
        overlapping_allreduce: Average gradients over replicas while the backward pass runs.
        backward_passes_per_step: Passes (calls of the step function) whose
            gradients add up before they are averaged.
        average_grads_across_microbatches: ``backward`` divides by the number of microbatches.
        bucket_cap_mb: Size of a message with gradients, in MiB.
        trace_memory_usage: Accepted. Memory is always counted.
        broadcast_buffers: Replicas take the buffers of the first one before each training step.
        gradient_as_bucket_view: Accepted, without effect.
        find_unused_parameters: Parameters without a gradient are always found; with sharded data
            parallelism only if this is set, where ranks use different ones, and then all have one.

    Raises:
        SMPConfigError: ``smp.init`` was not called, another model is wrapped,
            or the model cannot be divided.
    """

    def __init__(
        self,
        module: tnn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,  # noqa: ARG002
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,  # noqa: ARG002
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        _check(module, trace_device, backward_passes_per_step)
        # Old scripts write model.module.module.module: there were more
        # wrappers, and some have one of their own.
        innermost = module
        while (
            isinstance(inner := getattr(innermost, "module", None), tnn.Module)
            and inner is not innermost
        ):
            innermost = inner
        if not hasattr(innermost, "module"):
            object.__setattr__(innermost, "module", innermost)
        object.__setattr__(self, "wrapped", module)  # not a submodule
        self.module = module
        self.partitioned = False
        self.owner: dict[str, int] = {}
        self._trace_device, self._seconds = trace_device, trace_execution_times
        self._average = average_grads_across_microbatches
        self._broadcast_buffers = broadcast_buffers
        self._reducer_options = {
            "passes": backward_passes_per_step,
            "bucket_bytes": int(bucket_cap_mb * MIB),
            "overlap": overlapping_allreduce,
        }
        self._reducer: Reducer | None = None
        self._passes: GradientReduction | None = None  # of sharded data parallelism
        self._unused = find_unused_parameters
        self._comm_hook: tuple[Any, CommHook] | None = None
        self._preset: dict[str, int] | None = None
        self._deferred: list[Callable[[], Any]] = []
        self._post_partition: OrderedDict[int, Hook] = OrderedDict()
        self._post_step: OrderedDict[int, Hook] = OrderedDict()
        self._announced = self._did_backward = False
        self._parameter_owner: dict[int, int] = {}
        self._module_owner: dict[int, int] = {}
        self._trace: Trace = {}
        self._half = torch.float16 if state.cfg.fp16 else torch.bfloat16 if state.cfg.bf16 else None
        # The last optimizer's; one that is wrapped later gives its own.
        self.loss_scaler = LossScaler(1.0, dynamic=False)
        if wrapped.optimizers:
            self.loss_scaler = wrapped.optimizers[-1].optimizer.loss_scaler
        wrapped.model = self
        if tp_size() > 1:
            self.module = nn.distribute(module, tp_size())
        nn.huggingface.answer(self.module)
        if state.cfg.pipeline_parallel_degree == 1:
            self._place(dict.fromkeys((name for name, _ in self.module.named_modules()), 0))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, as ``torch.save(model)`` does: parts of the
        model are on other ranks.

        Raises:
            SMPRuntimeError: The model is on several ranks.
        """
        if self.partitioned and present() is not None:
            raise SMPRuntimeError(
                "a smp.DistributedModel that is on several ranks cannot be pickled or copied\n"
                "Save model.state_dict(), which all its ranks must call,"
                " or call smp.save_checkpoint()."
            )
        return super().__reduce_ex__(protocol)

    # -- forward and backward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. With a pipeline degree above 1 only a step function may do it.

        Raises:
            StepError: It was called outside a step function.
        """
        if is_tracing():
            self._trace = self._traced(args, kwargs)
            raise TraceDone
        with own_passes.inside():
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime = present()
        args, kwargs = self._cast(args, self._half), self._cast(kwargs, self._half)
        if runtime is None:
            outside = (
                self._reducer if self._reducer is not None and not self._reducer.in_step else None
            )
            if outside is not None:
                self._before_pass()
            with contextlib.nullcontext() if self._passes is None else self._passes.guard():
                outputs = self._cast(self.module(*args, **kwargs), torch.float32)
            if self._passes is not None:
                outputs = self._passes.watch(outputs)
                if outside is not None and not torch.is_grad_enabled():
                    self._passes.end(summed=False)
            return outputs if outside is None else outside.watch(outputs)
        if not runtime.in_step:
            raise StepError(
                "the model was called outside a step function. With pipeline_parallel_degree above"
                " 1 call it inside a function that is decorated with smp.step"
            )
        return self._cast(runtime.model_call(args, kwargs), torch.float32)

    def _cast(self, values: Any, dtype: torch.dtype | None) -> Any:
        """Return values with floating-point tensors in another type, if the
        configuration asks for half precision.
        """
        if self._half is None:
            return values
        return pytrees.mapped(lambda t: t.to(dtype) if t.is_floating_point() else t, values)

    def backward(
        self,
        tensors: torch.Tensor | Iterable[torch.Tensor],
        grad_tensors: torch.Tensor | Iterable[torch.Tensor | None] | None = None,
    ) -> None:
        """Run the backward pass of one microbatch: call it in the step function in the place of
        ``loss.backward()``.

        Args:
            tensors: The loss, or several tensors.
            grad_tensors: Their gradients; None: ones.
        """
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = (
            [grad_tensors]
            if grad_tensors is None or isinstance(grad_tensors, torch.Tensor)
            else list(grad_tensors)
        )
        if len(given) == 1 and given[0] is None:
            given *= len(roots)
        if len(given) != len(roots):
            raise ValueError(f"backward: got {len(roots)} tensors and {len(given)} grad_tensors")
        grads = [torch.ones_like(t) if g is None else g for t, g in zip(roots, given, strict=True)]
        if self._average:
            grads = [g / state.cfg.microbatches for g in grads]
        if (scale := self.loss_scaler.loss_scale) != 1:
            grads = [g * scale for g in grads]
        self._did_backward = True
        runtime = present()
        with own_passes.inside():
            if runtime is not None:
                runtime.backward(roots, grads)
            else:
                check_unsharded(roots)
                torch.autograd.backward(roots, grads)

    @property
    def changes_gradients(self) -> bool:
        """Whether ``backward`` makes other gradients than ``loss.backward()``."""
        return (self._average and state.cfg.microbatches > 1) or self.loss_scaler.loss_scale != 1

    @property
    def is_spread(self) -> bool:
        """Whether the gradients are complete only after the step: of several
        microbatches, or of several ranks.
        """
        return state.cfg.microbatches > 1 or dist.get_world_size() > 1

    def begin_step(self, first: Callable[[], Any]) -> None:
        """Divide the model if it is not yet, and make ready for a step.

        ``first`` is the first microbatch's call.
        """
        if not self.partitioned:
            self._partition(first)
        self._did_backward = False
        self._before_pass()
        if self._reducer is not None:
            self._reducer.begin_step()

    def begin_microbatch(self, *, last: bool) -> None:
        """Say, where there is one partition, that a microbatch of the step
        begins, and whether it is the last.
        """
        if self._passes is not None and self._reducer is not None:
            self._passes.begin(sums=last and self._reducer.last_pass)

    def _before_pass(self) -> None:
        self._announce()
        self.begin_microbatch(last=True)
        if dp_size() > 1 and self.training and torch.is_grad_enabled():
            Join.notify_join_context(self)
            if self._broadcast_buffers:
                data_parallel.broadcast(self.local_buffers())

    def end_step(self) -> None:
        """Finish the data-parallel sums, and call the hooks that wait for a step."""
        if self._reducer is not None:
            backward = self._did_backward or self._reducer.has_gradients
            if self._passes is not None:
                backward |= self._passes.seen
                self._passes.end(summed=backward and self._reducer.last_pass)
            if backward:
                self._reducer.end_pass()
            else:
                self._reducer.abandon_step()
        hooks = list(self._post_step.values())
        self._post_step.clear()
        for hook in hooks:
            hook(self, _optimizer())

    @property
    def pass_no(self) -> int:
        """Number of backward passes so far: of step functions, and of
        ``loss.backward()`` outside them.
        """
        return 0 if self._reducer is None else self._reducer.done_passes

    # -- partition
    def preset_partition(self, owner: Mapping[str, int]) -> None:
        """Divide the model as ``owner`` of another run says. Call it before the first step.

        Args:
            owner: The partition of each module, by its name.

        Raises:
            SMPConfigError: It is of another model or of a higher pipeline degree, or the model is
                divided already in another way.
        """
        owner = dict(owner)
        highest = max(owner.values(), default=0)
        if highest >= pp_size():
            raise SMPConfigError(
                f"the saved partition has {highest + 1} partitions, this job has"
                f" pipeline_parallel_degree {pp_size()}"
            )
        names = {name for name, _ in self.module.named_modules()}
        if differing := sorted(names ^ owner.keys()):
            raise SMPConfigError(
                f"the saved partition is of another model: {len(differing)} modules differ, such as"
                f" {differing[0]!r}"
            )
        if self.partitioned and owner != self.owner:
            name = next(name for name in owner if owner[name] != self.owner[name])
            raise SMPConfigError(
                "the model is already partitioned, and not as it was saved:"
                f" module {name!r} is on partition {self.owner[name]}, and was on {owner[name]}."
                " Load before the first step"
            )
        self._preset = owner

    def partition_of(self, parameter: torch.Tensor) -> int | None:
        """Return on which partition a parameter is; None: it is not the model's."""
        return self._parameter_owner.get(id(parameter))

    def partition_of_module(self, module: tnn.Module) -> int | None:
        """Return on which partition a module is.

        None: it is not the model's, or the model is not divided yet.
        """
        return self._module_owner.get(id(module))

    def _partition(self, run: Callable[[], Any]) -> None:
        """Divide the model. ``run`` is the step function on its first microbatch."""
        cfg = state.cfg
        if self._preset is not None:
            owner = self._preset
        elif cfg.auto_partition:
            owner = self._automatic(run)
        else:
            owner = placement.by_hand(
                self.module, cfg.pipeline_parallel_degree, cfg.default_partition
            )
        if rank() == 0:
            lines = [f"  {name or '(root)'}: {index}" for name, index in owner.items()]
            print("\n".join(["Partition assignments:", *lines]), flush=True)
        placement.compare(self.module, owner)
        self._place(owner)

    def _automatic(self, run: Callable[[], Any]) -> dict[str, int]:
        """Let rank 0 decide.

        Its tensor-parallel peers trace with it, as their modules communicate.
        """
        self._trace = {}
        answer: list[Any] = [None]
        failure: BaseException | None = None
        if not state.cfg.skip_tracing and pp_rank() == 0 and rdp_rank() == 0:
            try:
                with tracing(), unchanged(self.module):
                    run()
            except TraceDone:
                pass
            except Exception as error:  # noqa: BLE001  the others wait for an answer
                failure = error
        if rank() == 0:
            if failure is None:
                tree = describe(self.module, self._trace)
                answer = [partitioner.partition(tree, pp_size(), state.cfg.memory_weight)]
            else:
                answer = [summary(failure)]
        with calls.inside(
            "smp.DistributedModel, which is divided in the first step", CommGroup.WORLD
        ):
            dist.broadcast_object_list(answer, src=0)
        if failure is not None:
            raise failure
        if isinstance(answer[0], str):
            # Not an error of this rank, which would be told as a cause if it ended first.
            raise PeerError(0, "rank 0 (pp_rank 0)", f"in the traced forward pass: {answer[0]}")
        return cast("dict[str, int]", answer[0])

    def _traced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
        args, kwargs = self._cast(args, self._dtype()), self._cast(kwargs, self._dtype())
        gpu = placement.device()
        if gpu is not None:
            target = gpu if self._trace_device == "gpu" else torch.device("cpu")
            self.module.to(target)
            args, kwargs = pytrees.mapped(lambda t: t.to(target), (args, dict(kwargs)))
        return trace_forward(self.module, args, kwargs, seconds=self._seconds)

    def _dtype(self) -> torch.dtype | None:
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), None)

    def _place(self, owner: dict[str, int]) -> None:
        """Keep what is this rank's, free the rest, give all replicas the same
        values, and install the runtime.
        """
        me, self.owner = pp_rank(), owner
        mine: set[int] = set()
        tensors: dict[int, tuple[str, int, torch.Tensor]] = {}
        for name, module in self.module.named_modules():
            for key, tensor in itertools.chain(
                module.named_parameters(recurse=False), module.named_buffers(recurse=False)
            ):
                tensors.setdefault(
                    id(tensor), (f"{name}.{key}" if name else key, owner[name], tensor)
                )
                if owner[name] == me:
                    mine.add(id(tensor))
        self._module_owner = {
            id(module): owner[name] for name, module in self.module.named_modules()
        }
        self._parameter_owner = {key: index for key, (_, index, _) in tensors.items()}
        for key, (name, index, tensor) in tensors.items():
            if key not in mine:
                remote.empty(tensor, name, index, me)
        if mesh.degree() > 1:
            self._shard(owner)
        delayed.materialize(
            (name, tensor) for key, (name, _, tensor) in tensors.items() if key in mine
        )
        self.partitioned = True
        gpu = placement.device()
        for module in self.local_modules() if gpu is not None or self._half is not None else ():
            if self._passes is None:
                module._apply(  # type: ignore[no-untyped-call]  # noqa: SLF001  as Module.to does, for one module
                    lambda t: t.to(gpu, self._half if t.is_floating_point() else None),
                    recurse=False,
                )
        deferred, self._deferred = self._deferred, []
        for load in deferred:
            load()
        if self._passes is None:
            data_parallel.broadcast(itertools.chain(self.local_parameters(), self.local_buffers()))
        trainable = [
            p for p in self.local_parameters() if p.requires_grad and not mesh.is_sharded(p)
        ]
        self._reducer = Reducer(trainable, **self._reducer_options)  # type: ignore[arg-type]
        self._reducer.hook = self._comm_hook
        if self._passes is not None:
            self._reducer.after_plain_pass = self._passes.compare
        activation_checkpointing.check_partition(self.module)
        runtime = present()
        if runtime is not None:
            root, names = self.module, owner
            if owner[""] != 0:
                # The root of the runtime is on partition 0, whose rank has the real inputs.
                root = _Root(self.module)
                names = {
                    "": 0,
                    **{f"module.{name}" if name else "module": i for name, i in owner.items()},
                }
            runtime.install(root, names)
            for name, module in self.module.named_modules():
                if owner[name] != me:
                    remote.detach_module(module, name, lambda: runtime.in_step)
            self._announce()

    def _shard(self, owner: dict[str, int]) -> None:
        """Share the parameters out over the ranks, and put what is shared into
        the optimizers that are wrapped.
        """
        gpu = placement.device()

        def ready(named: list[tuple[str, torch.Tensor]]) -> None:
            delayed.materialize(named, forget=False)
            for _, tensor in named:
                kind = torch.float32 if isinstance(tensor, tnn.Parameter) else self._half
                kind = kind if self._half is not None and tensor.is_floating_point() else None
                tensor.data = tensor.data.to(gpu, kind).contiguous()
            data_parallel.broadcast(tensor for _, tensor in named)

        placement.compare(self.module, owner)
        self._passes = GradientReduction(
            self.module, wrap.shard(self.module, ready, half=self._half, unused=self._unused)
        )
        self._parameter_owner = dict.fromkeys(map(id, self.module.parameters()), 0)
        for optimizer in wrapped.optimizers:
            optimizer.smp_take_shards()

    def _announce(self) -> None:
        """Call the hooks that wait for the partition.

        The degree is 1: when the first step or call begins.
        """
        if self._announced:
            return
        self._announced = True
        for hook in list(self._post_partition.values()):
            hook(self, _optimizer())

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` after the partition, before the first forward pass.

        Now, if that is over.
        """
        if self._announced:
            hook(self, _optimizer())
        handle = RemovableHandle(self._post_partition)
        self._post_partition[handle.id] = hook
        return handle

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` once, at the end of the next step function."""
        handle = RemovableHandle(self._post_step)
        self._post_step[handle.id] = hook
        return handle

    # -- what is on this rank
    def local_named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, tnn.Module]]:
        """Yield the modules of this rank's partition; all of them before the partition."""
        me = pp_rank()
        for name, module in self.module.named_modules(*args, **kwargs):
            if not self.partitioned or self.partition_of_module(module) == me:
                yield name, module

    def local_modules(self) -> Iterator[tnn.Module]:
        """Yield the modules of this rank's partition."""
        return (module for _, module in self.local_named_modules())

    def local_named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, tnn.Parameter]]:
        """Yield the parameters that are on this rank, with the names that ``state_dict`` has."""
        return (
            pair
            for pair in self.module.named_parameters(*args, **kwargs)
            if self._is_local(pair[1])
        )

    def local_parameters(self, recurse: bool = True) -> Iterator[tnn.Parameter]:
        """Yield the parameters that are on this rank."""
        return (
            parameter for parameter in self.module.parameters(recurse) if self._is_local(parameter)
        )

    def local_named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that are on this rank."""
        return (
            pair for pair in self.module.named_buffers(*args, **kwargs) if self._is_local(pair[1])
        )

    def local_buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Yield the buffers that are on this rank."""
        return (buffer for buffer in self.module.buffers(recurse) if self._is_local(buffer))

    @staticmethod
    def _is_local(tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, remote.RemoteParameter | remote.RemoteBuffer)

    def get_module(self) -> tnn.Module:
        """Return the script's module."""
        return self.module

    # -- state
    def local_state_dict(self, *args: Any, **kwargs: Any) -> StateDict:  # noqa: ARG002
        """Return the state of this rank's partition, with the mark ``_smp_is_partial``."""
        if not self.partitioned:
            raise StepError(
                "local_state_dict: the model is not partitioned yet. Call it after the first step"
            )
        mine = state_dicts.local(self.module, self.owner, pp_rank())
        return {
            **{name: mesh.local(value) for name, value in mine.items()},
            **mesh.mark(),
            PARTIAL: True,
        }

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> Any:
        """Return the state of the whole model, as the plain module would.

        Every rank of the model-parallel group must call it; with sharded data
        parallelism every rank of the job.

        Args:
            args: As of ``torch.nn.Module.state_dict``, when nothing is divided.
            gather_to_rank0: All ranks but the first of the group return an empty dictionary.
            kwargs: As args.

        Raises:
            StepError: Ranks are missing. The error names them.
        """
        if mesh.degree() > 1:
            return state_dicts.unshared(
                self.module, to_first_only=gather_to_rank0, call="model.state_dict()"
            )
        divided = self.partitioned and pp_size() > 1
        if not divided and tp_size() == 1:
            return self.module.state_dict(*args, **kwargs)
        owner = (
            self.owner
            if self.partitioned
            else {name: pp_rank() for name, _ in self.module.named_modules()}
        )
        return state_dicts.gathered(
            self.module, owner, pp_rank(), to_first_only=gather_to_rank0, call="model.state_dict()"
        )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> _IncompatibleKeys | None:
        """Load a whole state, or the partial ones that the ranks of a model-parallel group saved.

        Partial states are merged first: every rank of the group must call it then.

        Args:
            state_dict: From ``state_dict()`` of this model or of the plain module, or from
                ``local_state_dict()``.
            strict: Refuse missing and unexpected names.
            same_partition_load: The partial state is of the same partition: it is not merged, and
                is loaded after the partition.

        Returns:
            What torch returns; None if it will be loaded after the partition.
        """
        partial = bool(state_dict.get(PARTIAL))
        if partial or mesh.PART in state_dict:
            mesh.check_part(state_dict)
        if mesh.degree() > 1:
            return cast(
                "_IncompatibleKeys",
                self.module.load_state_dict(
                    state_dicts.shared(self.module, state_dict), strict=strict
                ),
            )
        if partial and not same_partition_load:
            state_dict = state_dicts.merge_partial(
                self.module, state_dict, call="model.load_state_dict() of a part"
            )
        entries = (
            dict(state_dict)
            if partial and same_partition_load
            else state_dicts.cut(self.module, state_dict)
        )

        def load() -> _IncompatibleKeys:
            whole = entries
            if partial and same_partition_load:
                whole = state_dicts.completed(self.module, self.owner, pp_rank(), entries)
            return cast("_IncompatibleKeys", self.module.load_state_dict(whole, strict=strict))

        waiting = any(delayed.is_delayed(p) for p in self.module.parameters())
        if not self.partitioned and (waiting or (partial and same_partition_load)):
            self._deferred.append(load)
            return None
        return load()

    # -- gradients
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of the whole model so that their norm is at most ``max_norm``.

        Return the norm.

        Every rank of the model-parallel group must call it.
        ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`` does the same.
        """
        return gradient_norm.clip(self.local_parameters(), max_norm, norm_type)

    def register_comm_hook(self, hook_state: Any, hook: CommHook) -> None:
        """Let ``hook(hook_state, bucket)`` average gradients over replicas, as torch's
        DistributedDataParallel does.

        The hook must reduce over ``smp.get_dp_process_group()``. Parameters that are split over
        tensor ranks do not use it.

        Raises:
            SMPConfigError: There is a hook already, or sharded data parallelism
                sums gradients in its own way.
        """
        if mesh.degree() > 1:
            raise SMPConfigError(
                "register_comm_hook: not with sharded_data_parallel_degree above 1"
            )
        if self._comm_hook is not None:
            raise SMPConfigError("register_comm_hook can be called only once")
        self._comm_hook = hook_state, hook
        if self._reducer is not None:
            self._reducer.hook = self._comm_hook

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which replicas may have different numbers of batches, as
        DistributedDataParallel's.

        Raises:
            SMPConfigError: ``divide_by_initial_world_size`` is false: gradients are divided by the
                number of replicas. Or ranks share parameters: each needs the others for every
                batch.
        """
        if enable and mesh.degree() > 1:
            raise SMPConfigError(
                "join: not with sharded_data_parallel_degree above 1,"
                " where ranks have equal batches"
            )
        if not divide_by_initial_world_size:
            raise SMPConfigError("join: divide_by_initial_world_size=False is not supported")
        return Join([self], enable and dp_size() > 1, throw_on_early_termination)

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ARG002
        """Return what a replica does that has no more batches."""
        return _Joined(self)

    def shadow_pass(self) -> None:
        """Take part in a pass of the other replicas, without a batch."""
        if self._broadcast_buffers:
            data_parallel.broadcast(self.local_buffers())
        if self._reducer is not None:
            self._reducer.shadow()

    @property
    def join_device(self) -> torch.device:
        """Return where ``join`` makes its tensors."""
        return placement.device() or torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """Return the group over which ``join`` counts."""
        return state.groups[CommGroup.DP_GROUP]

    # -- tensor parallelism
    def distributed_modules(self) -> Iterator[tnn.Module]:
        """Yield the modules that are split over tensor ranks."""
        return (m for m in self.module.modules() if isinstance(m, nn.DistributedModule))

    def is_distributed_parameter(self, parameter: torch.Tensor) -> bool:
        """Is the parameter split over tensor ranks?"""
        return bool(getattr(parameter, "_smp_distributed", False))

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Is the buffer split over tensor ranks?"""
        return bool(getattr(buffer, "_smp_distributed", False))

    def is_scaled_batch_parameter(self, parameter: torch.Tensor) -> bool:
        """Has the parameter's gradient seen the samples of all tensor ranks?"""
        return self.is_distributed_parameter(parameter)

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Has the buffer seen the samples of all tensor ranks?"""
        return self.is_distributed_buffer(buffer)

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, tnn.Parameter]]:
        """Yield the parameters whose gradients are averaged over the data-parallel group."""
        return (
            (n, p)
            for n, p in self.local_named_parameters()
            if not self.is_scaled_batch_parameter(p)
        )

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, tnn.Parameter]]:
        """Yield the parameters whose gradients are averaged over the
        reduced-data-parallel group.
        """
        return (
            (n, p) for n, p in self.local_named_parameters() if self.is_scaled_batch_parameter(p)
        )

    # -- devices
    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:
        """Move this rank's part. Before the partition it does nothing: the partition moves it."""
        return super().to(*args, **kwargs) if self.partitioned else self

    def cuda(self, device: int | torch.device | None = None) -> DistributedModel:
        """Move this rank's part to a GPU. Before the partition it does nothing."""
        return super().cuda(device) if self.partitioned else self


class _Root(tnn.Module):
    def __init__(self, module: tnn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _Joined(JoinHook):
    """A replica without batches takes part in the messages of the others, and
    gets the last one's values in the end.
    """

    def __init__(self, model: DistributedModel) -> None:
        self.model = model

    def main_hook(self) -> None:
        self.model.shadow_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        last = torch.tensor([dp_rank() if is_last_joiner else -1], device=self.model.join_device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=self.model.join_process_group)
        tensors = itertools.chain(self.model.local_parameters(), self.model.local_buffers())
        data_parallel.broadcast(tensors, int(last))


def _optimizer() -> Any:
    return wrapped.optimizers[0] if wrapped.optimizers else None


def _check(module: Any, trace_device: str, passes: int) -> None:
    """Refuse what cannot be divided."""
    if not state.initialized:
        raise SMPConfigError("call smp.init() before smp.DistributedModel")
    if wrapped.model is not None:
        raise SMPConfigError(
            "smp.DistributedModel wraps one model in a process, and one is wrapped already"
        )
    if not isinstance(module, tnn.Module):
        raise SMPConfigError(
            f"smp.DistributedModel needs a torch.nn.Module, got {type(module).__name__}"
        )
    if trace_device not in ("gpu", "cpu"):
        raise SMPConfigError(f"trace_device must be 'gpu' or 'cpu', got {trace_device!r}")
    if type(passes) is not int or passes < 1:
        raise SMPConfigError(
            f"backward_passes_per_step must be an integer of 1 or more, got {passes!r}"
        )
    # Without the import of torch._dynamo, which takes seconds.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    compiled = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    if compiled or module._compiled_call_impl is not None:  # noqa: SLF001  set by Module.compile()
        raise SMPConfigError(
            "smp.DistributedModel cannot divide the result of torch.compile. Wrap the plain module,"
            " and compile parts of it that stay whole"
        )
    refuse_amp_of_apex("smp.DistributedModel")
    for name, part in module.named_modules():
        where = (
            f"module {name!r} ({type(part).__name__})"
            if name
            else f"the model ({type(part).__name__})"
        )
        if isinstance(part, tnn.parallel.DistributedDataParallel):
            raise SMPConfigError(
                f"{where} is torch's DistributedDataParallel. Wrap the plain module: set ddp in the"
                " configuration, and smp.DistributedModel averages gradients over replicas"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise SMPConfigError(
                f"{where} is a ScriptModule. smp.DistributedModel needs plain modules"
            )
        for key, parameter in part.named_parameters(recurse=False):
            if tnn.parameter.is_lazy(parameter):
                raise SMPConfigError(
                    f"{where}: parameter {key!r} has no shape yet. Call the model once before"
                )
