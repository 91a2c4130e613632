"""`smp.DistributedModel`: a module with parts on several ranks."""

from __future__ import annotations

import abc
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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


class _SingleInstance(abc.ABCMeta):
    """Return the existing wrapper when its module is wrapped again.

    transformers wraps the module a second time to evaluate.
    """

    def __call__(cls, module: tnn.Module, *args: Any, **kwargs: Any) -> DistributedModel:
        """Return the wrapper of this module: the existing one, or a new one."""
        model = cast("DistributedModel | None", wrapped.model)
        if model is not None and (
            module is model or module is model.module or module is model.wrapped
        ):
            return model
        return cast("DistributedModel", super().__call__(module, *args, **kwargs))


class DistributedModel(tnn.Module, Joinable, metaclass=_SingleInstance):
    """Wrap the model of a script. A process has one wrapped model.

    With a pipeline degree above 1 the model is divided when the first step function runs. Until
    then ``to()`` and ``cuda()`` do nothing, and ``smp.set_partition`` counts. Then each rank keeps
    only the parameters of its own partition. Hooks of a module fire on the rank that owns it.

    Args:
        module: The full model, with equal values on all ranks of a pipeline.
        trace_device: ``gpu`` or ``cpu``: where the traced forward pass runs, on hosts with GPUs.
        trace_execution_times: Divide by measured seconds instead of counted
            floating-point operations.
        overlapping_allreduce: Average gradients over replicas while the backward pass runs.
        backward_passes_per_step: Number of passes (calls of the step function) that add to the
            gradients before these are averaged.
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
        _add_module_attribute(module)
        object.__setattr__(self, "wrapped", module)  # not a submodule
        self.module = module
        self.partitioned = False
        self.owner: dict[str, int] = {}
        self._trace_device = trace_device
        self._measures_seconds = trace_execution_times
        self._averages_microbatches = average_grads_across_microbatches
        self._broadcast_buffers = broadcast_buffers
        self._reducer_options = {
            "passes": backward_passes_per_step,
            "bucket_bytes": int(bucket_cap_mb * MIB),
            "overlap": overlapping_allreduce,
        }
        self._reducer: Reducer | None = None
        # With sharded data parallelism: the sums of the sharded parameters' gradients.
        self._sharded_reduction: GradientReduction | None = None
        self._finds_unused = find_unused_parameters
        self._comm_hook: tuple[Any, CommHook] | None = None
        self._preset_owner: dict[str, int] | None = None  # the partition of a checkpoint
        self._deferred_loads: list[Callable[[], Any]] = []  # run right after the partition
        self._post_partition: OrderedDict[int, Hook] = OrderedDict()
        self._post_step: OrderedDict[int, Hook] = OrderedDict()
        self._is_announced = self._did_backward = False
        self._parameter_owner: dict[int, int] = {}  # by id()
        self._module_owner: dict[int, int] = {}  # by id()
        self._trace: Trace = {}
        self._half: torch.dtype | None = None
        if state.cfg.fp16:
            self._half = torch.float16
        elif state.cfg.bf16:
            self._half = torch.bfloat16
        # The scaler of the last optimizer. An optimizer that is wrapped later sets its own.
        self.loss_scaler = LossScaler(1.0, dynamic=False)
        if wrapped.optimizers:
            self.loss_scaler = wrapped.optimizers[-1].optimizer.loss_scaler
        wrapped.model = self
        if tp_size() > 1:
            self.module = nn.distribute(module, tp_size())
        nn.huggingface.answer(self.module)
        if state.cfg.pipeline_parallel_degree == 1:
            self._place(dict.fromkeys(dict(self.module.named_modules()), 0))

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Refuse torch's DistributedDataParallel, which reads this name when it wraps a model.

        It would average over all ranks, also over those with other parts of the model.

        Raises:
            SMPConfigError: Always.
        """
        raise SMPConfigError(
            "torch's DistributedDataParallel cannot wrap smp.DistributedModel. Leave it out: set"
            " ddp in the configuration, and smp.DistributedModel averages gradients over replicas"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling, for example by ``torch.save(model)``, where parts of the model are on
        other ranks.

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
        """Call the model.

        While the model is traced it is measured, and `TraceDone` leaves the step function.

        Raises:
            StepError: The pipeline degree is above 1, and no step function runs; or the step
                failed.
            Exception: An error of the model.
        """
        if is_tracing():
            self._trace = self._run_traced(args, kwargs)
            raise TraceDone
        with own_passes.inside():
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model on the pipeline, or on this rank alone, and return its outputs in float32.

        Under ``fp16`` or ``bf16`` inputs are converted to half precision first.

        Outside of a step function a pass begins with that, see `_before_pass`.

        Raises:
            StepError: The pipeline degree is above 1, and no step function runs; or the step
                failed.
            Exception: An error of the model.
        """
        runtime = present()
        args, kwargs = self._cast(args, self._half), self._cast(kwargs, self._half)
        if runtime is None:
            return self._forward_without_pipeline(args, kwargs)
        if not runtime.in_step:
            raise StepError(
                "the model was called outside a step function. With pipeline_parallel_degree above"
                " 1 call it inside a function that is decorated with smp.step"
            )
        return self._cast(runtime.model_call(args, kwargs), torch.float32)

    def _forward_without_pipeline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module of this rank, and return its outputs in float32.

        The sums of gradients over replicas are prepared: their backward begins at the outputs.

        Outside of a step function a pass begins first: hooks of the partition are called, and
        replicas get equal buffers.

        Raises:
            StepError: With sharded data parallelism, a block is used wrongly or differently on two
                ranks.
            Exception: An error of the model.
        """
        # Outside a step function a forward pass begins and ends a pass by itself.
        reducer = None
        if self._reducer is not None and not self._reducer.in_step:
            reducer = self._reducer
            self._before_pass()
        if self._sharded_reduction is None:
            outputs = self._cast(self.module(*args, **kwargs), torch.float32)
        else:
            with self._sharded_reduction.guard():
                outputs = self._cast(self.module(*args, **kwargs), torch.float32)
            outputs = self._sharded_reduction.watch(outputs)
            if reducer is not None and not torch.is_grad_enabled():
                self._sharded_reduction.end(summed=False)
        if reducer is None:
            return outputs
        return reducer.watch(outputs)

    def _cast(self, values: Any, dtype: torch.dtype | None) -> Any:
        """Return values with floating-point tensors converted, under ``fp16`` or ``bf16``.

        In full precision the values themselves are returned.

        Args:
            values: Nested values.
            dtype: The type that tensors get; None: each keeps its own.

        Returns:
            A copy, if a tensor is converted. Objects without tensors are the same.
        """
        if self._half is None:
            return values

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return pytrees.map_tensors(convert, values)

    def backward(
        self,
        tensors: torch.Tensor | Iterable[torch.Tensor],
        grad_tensors: torch.Tensor | Iterable[torch.Tensor | None] | None = None,
    ) -> None:
        """Run the backward pass of one microbatch. In a step function call this method, and not
        ``loss.backward()``.

        Each gradient is divided by the number of microbatches, and multiplied by the loss scale,
        before the pass. Gradients of the parameters are added to; those of other partitions by
        their ranks. The graph is freed.

        Args:
            tensors: The loss, or several tensors.
            grad_tensors: The gradients of ``tensors``; None: ones.

        Raises:
            ValueError: The numbers of tensors and gradients differ.
            StepError: With a pipeline, no step runs in this thread, or the step failed; or a loss
                is computed from sharded parameters.
            RuntimeError: torch refused the pass.
        """
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        root_grads: list[torch.Tensor | None]
        if grad_tensors is None or isinstance(grad_tensors, torch.Tensor):
            root_grads = [grad_tensors]
        else:
            root_grads = list(grad_tensors)
        if len(root_grads) == 1 and root_grads[0] is None:
            root_grads *= len(roots)
        if len(root_grads) != len(roots):
            raise ValueError(
                f"backward: got {len(roots)} tensors and {len(root_grads)} grad_tensors"
            )

        scale = self.loss_scaler.loss_scale
        grads = []
        for root, root_grad in zip(roots, root_grads, strict=True):
            grad = torch.ones_like(root) if root_grad is None else root_grad
            if self._averages_microbatches:
                grad = grad / state.cfg.microbatches
            if scale != 1:
                grad = grad * scale
            grads.append(grad)

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
        if self._averages_microbatches and state.cfg.microbatches > 1:
            return True
        return self.loss_scaler.loss_scale != 1

    @property
    def is_spread(self) -> bool:
        """Whether gradients are complete only after the step, because several microbatches or
        ranks add to them.
        """
        return state.cfg.microbatches > 1 or dist.get_world_size() > 1

    def begin_step(self, first: Callable[[], Any]) -> None:
        """Prepare a step; divide the model before the first one.

        Hooks of the partition are called, and replicas get equal buffers. The reducer waits for the
        end of the step.

        Args:
            first: The call of the step function for the first microbatch.

        Raises:
            SMPConfigError: The model cannot be divided.
            PeerError: The traced forward pass failed on rank 0.
            Exception: An error of the traced forward pass on this rank, or of a hook.
        """
        if not self.partitioned:
            self._partition(first)
        self._did_backward = False
        self._before_pass()
        if self._reducer is not None:
            self._reducer.begin_step()

    def begin_microbatch(self, *, last: bool) -> None:
        """Tell the sharded reduction that a microbatch begins. Without a pipeline only.

        The model's blocks learn whether the next backward pass sums gradients: of the last
        microbatch in the last pass of ``backward_passes_per_step``.

        Args:
            last: Whether it is the last microbatch of the step.
        """
        if self._sharded_reduction is not None and self._reducer is not None:
            self._sharded_reduction.begin(sums=last and self._reducer.last_pass)

    def _before_pass(self) -> None:
        """Prepare a pass: call hooks that wait for the partition, and give replicas equal buffers.

        Collective over the replicas in training.

        Raises:
            Exception: An error of a hook.
        """
        self._announce()
        self.begin_microbatch(last=True)
        if dp_size() > 1 and self.training and torch.is_grad_enabled():
            Join.notify_join_context(self)
            if self._broadcast_buffers:
                data_parallel.broadcast(self.local_buffers())

    def end_step(self) -> None:
        """Finish the data-parallel sums, and call the hooks that wait for a step.

        Gradients are averaged after the last of ``backward_passes_per_step`` passes: then the call
        is collective over the replicas. Hooks that wait for a step are called once, and forgotten.

        Raises:
            StepError: With sharded data parallelism, the last microbatch had no backward pass.
            SMPConfigError: A gradient is sparse.
            Exception: An error of a hook.
        """
        if self._reducer is not None:
            had_backward = self._did_backward or self._reducer.has_gradients
            if self._sharded_reduction is not None:
                had_backward |= self._sharded_reduction.had_backward
                self._sharded_reduction.end(summed=had_backward and self._reducer.last_pass)
            if had_backward:
                self._reducer.end_pass()
            else:
                self._reducer.abandon_step()
        hooks = list(self._post_step.values())
        self._post_step.clear()
        for hook in hooks:
            hook(self, _optimizer())

    @property
    def pass_no(self) -> int:
        """Number of backward passes so far, of step functions and of ``loss.backward()`` outside
        step functions.
        """
        if self._reducer is None:
            return 0
        return self._reducer.done_passes

    # -- partition
    def preset_partition(self, owner: Mapping[str, int]) -> None:
        """Divide the model as in another run. Call this method before the first step.

        The partition is only stored: the first step divides the model.

        Args:
            owner: Name of a module -> its partition, for example ``{"": 0, "head": 1}``.

        Raises:
            SMPConfigError: ``owner`` is of another model or of a higher pipeline degree, or the
                model is divided already in another way.
        """
        owner = dict(owner)
        highest = max(owner.values(), default=0)
        if highest >= pp_size():
            raise SMPConfigError(
                f"the saved partition has {highest + 1} partitions, this job has"
                f" pipeline_parallel_degree {pp_size()}"
            )
        names = {name for name, _ in self.module.named_modules()}
        differing = sorted(names ^ owner.keys())
        if differing:
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
        self._preset_owner = owner

    def partition_of(self, parameter: torch.Tensor) -> int | None:
        """Return the partition of a parameter; None for a tensor of another model."""
        return self._parameter_owner.get(id(parameter))

    def partition_of_module(self, module: tnn.Module) -> int | None:
        """Return the partition of a module.

        None before the model is divided, and for a module of another model.
        """
        return self._module_owner.get(id(module))

    def _partition(self, run: Callable[[], Any]) -> None:
        """Divide the model, and print the partition of each module on rank 0. Collective.

        Args:
            run: Calls the step function on its first microbatch, to trace the model.

        Raises:
            SMPConfigError: The model cannot be divided.
            PeerError: The traced forward pass failed on rank 0.
            Exception: The error of the traced forward pass on this rank.
        """
        cfg = state.cfg
        if self._preset_owner is not None:
            owner = self._preset_owner
        elif cfg.auto_partition:
            owner = self._partition_by_trace(run)
        else:
            owner = placement.by_hand(
                self.module, cfg.pipeline_parallel_degree, cfg.default_partition
            )
        if rank() == 0:
            lines = ["Partition assignments:"]
            lines += [f"  {name or '(root)'}: {index}" for name, index in owner.items()]
            print("\n".join(lines), flush=True)
        placement.compare(self.module, owner)
        self._place(owner)

    def _partition_by_trace(self, run: Callable[[], Any]) -> dict[str, int]:
        """Let rank 0 divide the model by a traced forward pass, and return its decision.

        The tensor-parallel peers of rank 0 trace, too, because their modules communicate.

        The measurements are kept in the model. Its state and all generators of random numbers are
        restored after the trace.

        Args:
            run: Calls the step function on its first microbatch.

        Returns:
            Name of a module -> its partition.

        Raises:
            PeerError: The traced forward pass failed on rank 0.
            Exception: The error of the traced forward pass on this rank.
        """
        self._trace = {}
        answer: list[Any] = [None]  # of rank 0: the owners, or its error as text
        failure: BaseException | None = None
        if not state.cfg.skip_tracing and pp_rank() == 0 and rdp_rank() == 0:
            try:
                with tracing(), unchanged(self.module):
                    run()
            except TraceDone:  # the model was called: the rest of the step function does not run
                pass
            except Exception as error:  # noqa: BLE001  the other ranks wait for the answer
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
            # A PeerError: rank 0's error must stay the cause, also if this rank ends first.
            raise PeerError(0, "rank 0 (pp_rank 0)", f"in the traced forward pass: {answer[0]}")
        return cast("dict[str, int]", answer[0])

    def _run_traced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
        """Trace a forward pass of the undivided model, and return its measurements.

        On a host with GPUs the model is moved to the device of the trace, and stays there.

        Raises:
            Exception: An error of the model.
        """
        dtype = None
        for parameter in self.module.parameters():
            if parameter.is_floating_point():
                dtype = parameter.dtype
                break
        args, kwargs = self._cast(args, dtype), self._cast(kwargs, dtype)
        gpu = placement.device()
        if gpu is not None:
            target = gpu if self._trace_device == "gpu" else torch.device("cpu")
            self.module.to(target)
            args, kwargs = pytrees.map_tensors(lambda t: t.to(target), (args, dict(kwargs)))
        return trace_forward(self.module, args, kwargs, seconds=self._measures_seconds)

    def _place(self, owner: dict[str, int]) -> None:
        """Keep this rank's tensors, free the others, give all replicas equal values, and install
        the runtime.

        The model counts as partitioned after this. States that were loaded before are put into it.
        Modules move to this rank's GPU and to half precision. Parameters get hooks that average
        their gradients. Collective over the replicas.

        Args:
            owner: Name of a module -> its partition.

        Raises:
            SMPConfigError: A checkpointed module was placed by hand on several partitions, or
                parameters cannot be sharded.
            RuntimeError: A delayed parameter was written to too late, or a deferred state does not
                fit.
            Exception: An error of a post-partition hook.
        """
        own_partition, self.owner = pp_rank(), owner
        tensors: dict[int, _PlacedTensor] = {}  # by id(): modules may share a tensor
        for name, module in self.module.named_modules():
            self._module_owner[id(module)] = owner[name]
            for key, tensor in itertools.chain(
                module.named_parameters(recurse=False), module.named_buffers(recurse=False)
            ):
                full_name = f"{name}.{key}" if name else key
                placed = _PlacedTensor(full_name, owner[name], tensor)
                placed = tensors.setdefault(id(tensor), placed)
                placed.is_local |= owner[name] == own_partition
        for key, placed in tensors.items():
            self._parameter_owner[key] = placed.partition
            if not placed.is_local:
                remote.empty(placed.tensor, placed.name, placed.partition, own_partition)
        if mesh.degree() > 1:
            self._shard(owner)
        delayed.materialize(
            (placed.name, placed.tensor) for placed in tensors.values() if placed.is_local
        )
        self.partitioned = True

        if self._sharded_reduction is None:
            self._convert_local_modules()
        deferred, self._deferred_loads = self._deferred_loads, []
        for load in deferred:
            load()
        if self._sharded_reduction is None:
            data_parallel.broadcast(itertools.chain(self.local_parameters(), self.local_buffers()))

        # Gradients of sharded parameters are summed by the sharded reduction.
        trainable = [
            p for p in self.local_parameters() if p.requires_grad and not mesh.is_sharded(p)
        ]
        self._reducer = Reducer(trainable, **self._reducer_options)  # type: ignore[arg-type]
        self._reducer.hook = self._comm_hook
        if self._sharded_reduction is not None:
            self._reducer.after_plain_pass = self._sharded_reduction.compare
        activation_checkpointing.check_partition(self.module)
        if present() is not None:
            self._install_runtime(owner)
            self._announce()

    def _convert_local_modules(self) -> None:
        """Move this rank's modules to its GPU, and to half precision, where there are such.

        Parameters keep their identity; buffers may be new objects.
        """
        gpu = placement.device()
        if gpu is None and self._half is None:
            return

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(gpu, self._half if tensor.is_floating_point() else None)

        for module in self.local_modules():
            module._apply(convert, recurse=False)  # type: ignore[no-untyped-call]  # noqa: SLF001  as Module.to does, for one module

    def _install_runtime(self, owner: dict[str, int]) -> None:
        """Let the runtime of the pipeline run the divided model.

        Modules of other partitions only forward calls after this.

        The forward of modules at which work leaves this rank is replaced.

        Args:
            owner: Name of a module -> its partition.
        """
        runtime = present()
        assert runtime is not None
        root, names = self.module, owner
        if owner[""] != 0:
            # The root of the runtime is on partition 0, because that rank has the real inputs.
            root = _Root(self.module)
            names = {"": 0}
            for name, partition in owner.items():
                names[f"module.{name}" if name else "module"] = partition
        runtime.install(root, names)
        for name, module in self.module.named_modules():
            if owner[name] != pp_rank():
                remote.detach_module(module, name, lambda: runtime.in_step)

    def _shard(self, owner: dict[str, int]) -> None:
        """Share the parameters out over the ranks, and put the shards into the wrapped
        optimizers. Collective.

        Args:
            owner: Name of a module -> its partition.

        Raises:
            SMPConfigError: The models of the ranks differ, or parameters cannot be sharded.
        """
        gpu = placement.device()

        def prepare(named: list[tuple[str, torch.Tensor]]) -> None:
            """Give tensors values, their device and type, and equal values on all ranks."""
            delayed.materialize(named, forget=False)
            for _, tensor in named:
                dtype = None
                if self._half is not None and tensor.is_floating_point():
                    # Parameters stay float32: blocks convert them while they run.
                    dtype = torch.float32 if isinstance(tensor, tnn.Parameter) else self._half
                tensor.data = tensor.data.to(gpu, dtype).contiguous()
            data_parallel.broadcast(tensor for _, tensor in named)

        placement.compare(self.module, owner)
        order = wrap.shard(self.module, prepare, half=self._half, unused=self._finds_unused)
        self._sharded_reduction = GradientReduction(self.module, order)
        self._parameter_owner = dict.fromkeys(map(id, self.module.parameters()), 0)
        for optimizer in wrapped.optimizers:
            optimizer.smp_take_shards()

    def _announce(self) -> None:
        """Call the post-partition hooks, once.

        Without a pipeline this is done when the first step or forward pass begins.

        Raises:
            Exception: An error of a hook. Hooks that come after it are not called any more.
        """
        if self._is_announced:
            return
        self._is_announced = True
        for hook in list(self._post_partition.values()):
            hook(self, _optimizer())

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` after the partition, before the first forward pass.

        The hook is called at once if the model is divided already.

        Args:
            hook: Gets this model, and the first wrapped optimizer or None.

        Returns:
            A handle: its ``remove()`` takes the hook off.

        Raises:
            Exception: An error of the hook, if it is called at once.
        """
        if self._is_announced:
            hook(self, _optimizer())
        handle = RemovableHandle(self._post_partition)
        self._post_partition[handle.id] = hook
        return handle

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` once, at the end of the next step function.

        Args:
            hook: Gets this model, and the first wrapped optimizer or None.

        Returns:
            A handle: its ``remove()`` takes the hook off.
        """
        handle = RemovableHandle(self._post_step)
        self._post_step[handle.id] = hook
        return handle

    # -- modules and tensors of this rank
    def local_named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, tnn.Module]]:
        """Yield the modules of this rank's partition, with names; before the partition all modules.

        The names are those of the full model.

        Args:
            args: Arguments of ``torch.nn.Module.named_modules``.
            kwargs: More of these arguments, by name.
        """
        own_partition = pp_rank()
        for name, module in self.module.named_modules(*args, **kwargs):
            if not self.partitioned or self.partition_of_module(module) == own_partition:
                yield name, module

    def local_modules(self) -> Iterator[tnn.Module]:
        """Yield the modules of this rank's partition."""
        return (module for _, module in self.local_named_modules())

    def local_named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, tnn.Parameter]]:
        """Yield the parameters that are on this rank, with the names that ``state_dict`` has."""
        for name, parameter in self.module.named_parameters(*args, **kwargs):
            if self._is_local(parameter):
                yield name, parameter

    def local_parameters(self, recurse: bool = True) -> Iterator[tnn.Parameter]:
        """Yield the parameters that are on this rank."""
        return filter(self._is_local, self.module.parameters(recurse))

    def local_named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that are on this rank, with the names that ``state_dict`` has."""
        for name, buffer in self.module.named_buffers(*args, **kwargs):
            if self._is_local(buffer):
                yield name, buffer

    def local_buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Yield the buffers that are on this rank."""
        return filter(self._is_local, self.module.buffers(recurse))

    @staticmethod
    def _is_local(tensor: torch.Tensor) -> bool:
        """Return whether a parameter or buffer is on this rank."""
        return not isinstance(tensor, remote.RemoteParameter | remote.RemoteBuffer)

    def get_module(self) -> tnn.Module:
        """Return the script's module."""
        return self.module

    # -- state
    def local_state_dict(self, *args: Any, **kwargs: Any) -> StateDict:  # noqa: ARG002
        """Return the state of this rank's partition, with the mark ``_smp_is_partial``.

        Returns:
            Name -> tensor, outside of the graph and in the model's memory; with sharded data
            parallelism this rank's rows. Arguments have no effect.

        Raises:
            StepError: The model is not divided yet.
        """
        if not self.partitioned:
            raise StepError(
                "local_state_dict: the model is not partitioned yet. Call it after the first step"
            )
        local_state = state_dicts.state_of_partition(self.module, self.owner, pp_rank())
        local_state = {name: mesh.local(value) for name, value in local_state.items()}
        return {**local_state, **mesh.mark(), PARTIAL: True}

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> Any:
        """Return the full state of the model, with the names of the plain module. Collective over
        the model-parallel group; with sharded data parallelism over the job.

        Args:
            args: Arguments of ``torch.nn.Module.state_dict``, where the model is not divided.
            gather_to_rank0: All ranks but the first of the group return an empty dictionary.
            kwargs: More of these arguments, by name.

        Returns:
            Name -> value. Where the model is on several ranks, new tensors in host memory; else
            those of ``torch.nn.Module.state_dict``.

        Raises:
            StepError: Ranks are missing. The error names these ranks.
            RuntimeError: The collective broke, because a rank is gone.
        """
        if mesh.degree() > 1:
            return state_dicts.gather_shared_state(
                self.module, to_first_only=gather_to_rank0, call="model.state_dict()"
            )
        divided = self.partitioned and pp_size() > 1
        if not divided and tp_size() == 1:
            return self.module.state_dict(*args, **kwargs)
        owner = self.owner
        if not self.partitioned:
            owner = dict.fromkeys(dict(self.module.named_modules()), pp_rank())
        return state_dicts.gather_state(
            self.module, owner, pp_rank(), to_first_only=gather_to_rank0, call="model.state_dict()"
        )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> _IncompatibleKeys | None:
        """Load a full state, or the partial states that the ranks of a model-parallel group saved.

        Partial states are merged first. Then the call is collective over the group.

        The parameters and buffers of this rank are written. With delayed parameters, or a partial
        state of the same partition, the load waits until the partition.

        Args:
            state_dict: From ``state_dict()`` of this model or of the plain module, or from
                ``local_state_dict()``.
            strict: Refuse missing and unexpected names.
            same_partition_load: The partial state is of the same partition: this rank loads it
                without a merge, after the partition.

        Returns:
            The result of ``torch.nn.Module.load_state_dict``; None if the state is loaded later,
            after the partition.

        Raises:
            SMPRuntimeError: The partial state is another rank's part, or a value has another shape
                than a sharded parameter.
            RuntimeError: Names or shapes differ (torch's own error), or the collective broke.
            StepError: Ranks of the group have not called it in time.
        """
        partial = bool(state_dict.get(PARTIAL))
        same_partition = partial and same_partition_load
        if partial or mesh.PART in state_dict:
            mesh.check_part(state_dict)
        if mesh.degree() > 1:
            sharded = state_dicts.shard_state(self.module, state_dict)
            result = self.module.load_state_dict(sharded, strict=strict)
            return cast("_IncompatibleKeys", result)
        if same_partition:
            entries = dict(state_dict)
        elif partial:
            merged = state_dicts.merge_partial(
                self.module, state_dict, call="model.load_state_dict() of a part"
            )
            entries = state_dicts.slice_state(self.module, merged)
        else:
            entries = state_dicts.slice_state(self.module, state_dict)

        def load() -> _IncompatibleKeys:
            full_state = entries
            if same_partition:
                full_state = state_dicts.complete_state(self.module, self.owner, pp_rank(), entries)
            return cast("_IncompatibleKeys", self.module.load_state_dict(full_state, strict=strict))

        has_delayed = any(delayed.is_delayed(p) for p in self.module.parameters())
        if not self.partitioned and (has_delayed or same_partition):
            self._deferred_loads.append(load)
            return None
        return load()

    # -- gradients
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of the full model down to a norm of at most ``max_norm``.

        Collective over the model-parallel group. Returns the norm before the scaling.
        ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`` does the same.

        The gradients of this rank are scaled in place.

        Raises:
            RuntimeError: The collective broke, because a rank is gone.
        """
        return gradient_norm.clip(self.local_parameters(), max_norm, norm_type)

    def register_comm_hook(self, hook_state: Any, hook: CommHook) -> None:
        """Let ``hook(hook_state, bucket)`` average gradients over replicas, as torch's
        DistributedDataParallel does.

        The hook must reduce over ``smp.get_dp_process_group()``. Parameters that are split over
        tensor ranks do not use it.

        The hook is used from the next bucket on, and stays for the life of the model.

        Raises:
            SMPConfigError: A hook is registered already, or sharded data parallelism is on,
                which sums gradients in its own way.
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
        """Return a context in which replicas may have different numbers of batches, like the one
        of DistributedDataParallel.

        Args:
            divide_by_initial_world_size: Whether gradients are divided by the number of all
                replicas. Only True works.
            enable: Whether the context has an effect; without replicas it has none.
            throw_on_early_termination: As for torch's.

        Raises:
            SMPConfigError: ``divide_by_initial_world_size`` is false, but gradients are always
                divided by the number of replicas. Or ranks share parameters, and so need each
                other for every batch.
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
        """Return the hook of a replica that has no more batches."""
        return _ShadowPasses(self)

    def shadow_pass(self) -> None:
        """Take part in the collectives of a pass of the other replicas, without a batch.

        Buffers of this rank are overwritten by those of the first replica. With averaged gradients,
        this rank counts as zeros.
        """
        if self._broadcast_buffers:
            data_parallel.broadcast(self.local_buffers())
        if self._reducer is not None:
            self._reducer.shadow()

    @property
    def join_device(self) -> torch.device:
        """The device on which ``join`` makes its tensors."""
        return placement.device() or torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The group over which ``join`` counts the replicas with batches."""
        return state.groups[CommGroup.DP_GROUP]

    # -- tensor parallelism
    def distributed_modules(self) -> Iterator[tnn.Module]:
        """Yield the modules that are split over tensor ranks."""
        for module in self.module.modules():
            if isinstance(module, nn.DistributedModule):
                yield module

    def is_distributed_parameter(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is split over tensor ranks."""
        return bool(getattr(parameter, "_smp_distributed", False))

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Return whether a buffer is split over tensor ranks."""
        return bool(getattr(buffer, "_smp_distributed", False))

    def is_scaled_batch_parameter(self, parameter: torch.Tensor) -> bool:
        """Return whether the gradient of a parameter includes the samples of all tensor ranks."""
        return self.is_distributed_parameter(parameter)

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Return whether a buffer includes the samples of all tensor ranks."""
        return self.is_distributed_buffer(buffer)

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, tnn.Parameter]]:
        """Yield the parameters with gradients that are averaged over the data-parallel group."""
        for name, parameter in self.local_named_parameters():
            if not self.is_scaled_batch_parameter(parameter):
                yield name, parameter

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, tnn.Parameter]]:
        """Yield the parameters with gradients that are averaged over the reduced-data-parallel
        group.
        """
        for name, parameter in self.local_named_parameters():
            if self.is_scaled_batch_parameter(parameter):
                yield name, parameter

    # -- devices
    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:
        """Move this rank's part. Before the partition this does nothing: the partition moves the
        modules.
        """
        if not self.partitioned:
            return self
        return super().to(*args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> DistributedModel:
        """Move this rank's part to a GPU. Before the partition this does nothing."""
        if not self.partitioned:
            return self
        return super().cuda(device)


@dataclass
class _PlacedTensor:
    """A parameter or buffer of the model.

    Attributes:
        name: Its name in ``state_dict``, the first one where modules share the tensor.
        partition: The partition of the module with this name.
        tensor: The tensor.
        is_local: Whether a module of this rank has the tensor.
    """

    name: str
    partition: int
    tensor: torch.Tensor
    is_local: bool = False


class _Root(tnn.Module):
    """The root of the runtime where the model itself is not on partition 0."""

    def __init__(self, module: tnn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _ShadowPasses(JoinHook):
    """Let a replica without batches take part in the collectives of the others, and copy the
    values of the last one at the end.
    """

    def __init__(self, model: DistributedModel) -> None:
        self.model = model

    def main_hook(self) -> None:
        """Take part in one pass of the other replicas. torch calls this for each pass."""
        self.model.shadow_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the parameters and buffers of a replica that had the most batches. Collective.

        The tensors of this rank are written in place.

        Args:
            is_last_joiner: Whether this replica is one of these.

        Raises:
            RuntimeError: The collective broke, because a rank is gone.
        """
        number = dp_rank() if is_last_joiner else -1
        last = torch.tensor([number], device=self.model.join_device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=self.model.join_process_group)
        tensors = itertools.chain(self.model.local_parameters(), self.model.local_buffers())
        data_parallel.broadcast(tensors, int(last))


def _optimizer() -> Any:
    """Return the first wrapped optimizer, or None."""
    if not wrapped.optimizers:
        return None
    return wrapped.optimizers[0]


def _add_module_attribute(module: tnn.Module) -> None:
    """Let the innermost module have itself as ``.module``.

    Old scripts write ``model.module.module.module``, because smp had more wrappers, and some
    scripts have a wrapper of their own.

    The attribute is set on the script's module. One that exists is kept.
    """
    innermost = module
    seen = set()
    # A wrapper may be known to the module that it wraps, as that one's `.module`.
    while innermost not in seen:
        seen.add(innermost)
        inner = getattr(innermost, "module", None)
        if not isinstance(inner, tnn.Module):
            break
        innermost = inner
    if not hasattr(innermost, "module"):
        object.__setattr__(innermost, "module", innermost)


def _check(module: Any, trace_device: str, passes: int) -> None:
    """Refuse a model that cannot be divided, and wrong arguments.

    Nothing is changed.

    Args:
        module: The script's model.
        trace_device: The argument of that name of `DistributedModel`.
        passes: Its argument ``backward_passes_per_step``.

    Raises:
        SMPConfigError: With what is wrong, and what to do.
    """
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
        where = f"module {name!r}" if name else "the model"
        where = f"{where} ({type(part).__name__})"
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
