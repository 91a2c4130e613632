"""Data parallelism: average gradients over replicas, in buckets, while the backward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from smdistributed.modelparallel.torch.job.collective_calls import calls
from smdistributed.modelparallel.torch.job.config import SMPConfigError
from smdistributed.modelparallel.torch.job.state import state
from smdistributed.modelparallel.torch.job.topology import CommGroup
from smdistributed.modelparallel.torch.transport import pytrees

MIB = 2**20
"""Bytes of a mebibyte."""

_BROADCAST_BYTES = 32 * MIB
"""Largest size of a message with parameters and buffers."""

CommHook = Callable[[Any, "Bucket"], "torch.futures.Future[torch.Tensor]"]


def replica_group(tensor: torch.Tensor) -> CommGroup:
    """Return the group with equal copies of a tensor.

    Tensor ranks have different slices of a split tensor, and so are no replicas of it.
    """
    if getattr(tensor, "_smp_distributed", False):
        return CommGroup.RDP_GROUP
    return CommGroup.DP_GROUP


def broadcast(tensors: Iterable[torch.Tensor], source: int = 0) -> None:
    """Copy the values of one replica to all others. Collective, with the same list on every rank.

    The tensors of the other replicas are written in place.

    Args:
        tensors: Parameters and buffers of this rank.
        source: The replica with the values, as a rank of each tensor's group.

    Raises:
        RuntimeError: The collective broke, because a rank is gone.
    """
    batches: dict[tuple[CommGroup, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        group = replica_group(tensor)
        if len(state.topo.members(group)) > 1 and tensor.numel():
            batches.setdefault((group, tensor.device), []).append(tensor.detach())
    for (group, _), members in batches.items():
        for chunk in _chunks(members, _BROADCAST_BYTES):
            flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in chunk])
            source_rank = state.topo.members(group)[source]
            with calls.inside("the broadcast of parameters and buffers", group):
                dist.broadcast(flat, source_rank, group=state.groups[group])
            start = 0
            for tensor in chunk:
                length = tensor.numel() * tensor.element_size()
                # A clone is aligned for the type; a slice of the bytes may not be.
                values = flat[start : start + length].clone().view(tensor.dtype)
                tensor.copy_(values.view(tensor.shape))
                start += length


class Bucket:
    """Gradients that are reduced in one message.

    A communication hook gets a bucket as a hook of torch gets a ``GradBucket``.

    Args:
        index: Its place in the order of the messages.
        parameters: The parameters with gradients in the bucket.
        group: The group over which the gradients are reduced.

    Attributes:
        last: Whether it is the last bucket of a pass.
        work: The running reduction, or None.
    """

    def __init__(self, index: int, parameters: list[torch.Tensor], group: CommGroup) -> None:
        self._index, self._parameters, self.group = index, parameters, group
        self._buffer = torch.empty(0)
        self.last = False
        self.work: Any = None

    def index(self) -> int:
        """Return the bucket's place in the order of the messages."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return the bucket's gradients as one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer."""
        self._buffer = buffer

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters with gradients in the bucket."""
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        """Return the parts of the buffer, in the shapes of the parameters.

        They are views: a write to the buffer changes them.
        """
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = torch.split(self._buffer, sizes)
        gradients = []
        for part, parameter in zip(parts, self._parameters, strict=True):
            gradients.append(part.view(parameter.shape))
        return gradients

    def is_last(self) -> bool:
        """Return whether it is the last bucket of a pass."""
        return self.last

    def fill(self, *, zeros: bool) -> None:
        """Copy the gradients into the buffer. A missing gradient counts as zeros.

        The former buffer is replaced. The gradients of the parameters are not changed.

        Args:
            zeros: Fill the buffer with zeros only.

        Raises:
            SMPConfigError: A gradient is sparse.
        """
        parts = []
        for parameter in self._parameters:
            grad = None if zeros else parameter.grad
            if grad is None:
                parts.append(parameter.new_zeros(parameter.numel()))
                continue
            if grad.layout != torch.strided:
                raise SMPConfigError(
                    "a sparse gradient cannot be averaged over replicas."
                    " Make the embedding with sparse=False"
                )
            parts.append(grad.detach().reshape(-1))
        self._buffer = torch.cat(parts)


class Reducer:
    """Averages the gradients of this rank's parameters over the replicas.

    A bucket is sent as soon as all its gradients of the last microbatch are there. The reducer
    learns from earlier passes how many gradients a parameter gets in a pass. All ranks send the
    buckets in the same order. ``grad`` stays None for a parameter that no replica used.

    Args:
        parameters: This rank's trainable parameters, in the order of their definition.
        passes: Backward passes between two reductions. Gradients add up until then.
        bucket_bytes: Largest size of a bucket in bytes. A larger parameter has its own bucket.
        overlap: Send buckets while the backward pass runs.

    Attributes:
        done_passes: Number of backward passes so far.
        hook: A communication hook of the script, with its state; or None.
        early: Number of buckets that were sent before the end of their pass.
        after_plain_pass: Called at the end of a backward pass outside a step function.
        buckets: The buckets, in the order of the messages.
        seen: ``id()`` of a parameter -> number of its gradients in the present pass.
        expected: The same for a full pass, learned from earlier ones; None before the first one.
        at_send: The same at the time when the bucket was sent.
        sent: Number of buckets that were sent in the present pass.
        in_step: Whether a step function runs.
        queued: Whether the end of the present ``loss.backward()`` will call the reducer.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], *, passes: int, bucket_bytes: int, overlap: bool
    ) -> None:
        self.passes, self.overlap, self.done_passes = passes, overlap, 0
        self.hook: tuple[Any, CommHook] | None = None
        self.early = 0
        self.after_plain_pass: Callable[[], None] = lambda: None
        kinds: dict[tuple[CommGroup, torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in reversed(list(parameters)):  # the last layer's gradients are there first
            group = replica_group(parameter)
            if _divisor(group) > 1:
                # Also a split parameter with one replica: its gradient has the samples of all its
                # tensor ranks.
                kinds.setdefault((group, parameter.dtype, parameter.device), []).append(parameter)
        self.buckets: list[Bucket] = []
        for (group, _, _), members in kinds.items():
            for chunk in _chunks(members, bucket_bytes):
                self.buckets.append(Bucket(len(self.buckets), chunk, group))
        if self.buckets:
            self.buckets[-1].last = True
        # With one partition a plain loss.backward() is a pass, also without replicas. So all
        # parameters are watched.
        watched: list[torch.Tensor] = []
        if state.cfg.pipeline_parallel_degree == 1:
            watched += parameters
        else:
            for bucket in self.buckets:
                watched += bucket.parameters()
        self.seen: dict[int, int] = dict.fromkeys(map(id, watched), 0)
        self.expected: dict[int, int] | None = None
        self.at_send: dict[int, int] = {}
        self.sent = 0
        self.in_step = self.queued = False
        for parameter in watched:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    # -- called by the model
    def begin_step(self) -> None:
        """Begin a step function. `end_pass` or `abandon_step` follows."""
        self.in_step = True

    def end_pass(self) -> None:
        """End one backward pass, and reduce the gradients after the last of ``passes``.

        The gradients of the parameters become their averages over the replicas. The counts of
        gradients are learned for later passes, and the pass counts as done.

        Raises:
            SMPConfigError: A gradient is sparse.
            RuntimeError: The collective broke, because a rank is gone.
        """
        self.in_step = False
        if self.last_pass:
            self._reduce(zeros=False)
        self.done_passes += 1
        highest = self.expected or {}
        self.expected = {key: max(count, highest.get(key, 0)) for key, count in self.seen.items()}
        self._reset()

    def watch(self, outputs: Any) -> Any:
        """Register hooks on the outputs of a call outside a step function, and return the outputs.

        The hooks notice a backward pass when it begins. The first gradient of a parameter would be
        too late: it can belong to a pass inside the pass (torch's checkpointing).

        Args:
            outputs: The outputs of the call. They are returned themselves.
        """
        self.queued = False
        for output in pytrees.tensors_in(outputs):
            if output.requires_grad:
                output.register_hook(self._queue)  # type: ignore[no-untyped-call]
        return outputs

    def abandon_step(self) -> None:
        """End a step that had no backward pass."""
        self.in_step = False
        self._reset()

    def shadow(self) -> None:
        """Take part in a reduction of the other replicas, with zeros."""
        self._reduce(zeros=True)
        self._reset()

    @property
    def has_gradients(self) -> bool:
        """Whether a parameter got a gradient since the last pass ended."""
        return any(self.seen.values())

    # -- while a backward pass runs
    @torch.no_grad()
    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Count a gradient, and send the buckets that are complete, in their order.

        torch calls this when it has added to a parameter's gradient.

        The buckets that are sent early are counted in `early`.

        Raises:
            SMPConfigError: A gradient is sparse.
        """
        # Hot: called for each gradient of the pass.
        self.seen[id(parameter)] += 1
        self._queue()
        if self.overlap and self.expected is not None and self.last_pass:
            for bucket in self.buckets[self.sent :]:
                if any(self.seen[id(p)] < self.expected[id(p)] for p in bucket.parameters()):
                    break
                self._send(bucket, zeros=False)
                self.early += 1

    def _queue(self, _: object = None) -> None:
        """Reduce when torch's engine has finished this ``loss.backward()``.

        torch's autograd engine gets a callback for that. Within a step function nothing is done.
        """
        if not self.in_step and not self.queued:
            self.queued = True
            Variable._execution_engine.queue_callback(self._engine_done)  # noqa: SLF001  as FSDP does

    def _engine_done(self) -> None:
        """End the pass of a ``loss.backward()`` outside a step function. torch's engine calls."""
        self.queued = False
        self.after_plain_pass()
        self.end_pass()

    @property
    def last_pass(self) -> bool:
        """Whether the gradients are reduced at the end of the present pass."""
        return (self.done_passes + 1) % self.passes == 0

    # -- messages
    def _send(self, bucket: Bucket, *, zeros: bool) -> None:
        """Start the reduction of a bucket, and do not wait for its end.

        Args:
            bucket: The bucket. It is filled first.
            zeros: Send zeros in the place of gradients.

        Raises:
            SMPConfigError: A gradient is sparse.
            Exception: An error of the script's communication hook.
        """
        bucket.fill(zeros=zeros)
        for parameter in bucket.parameters():
            self.at_send[id(parameter)] = self.seen[id(parameter)]
        self.sent += 1
        if self.hook is not None and bucket.group is CommGroup.DP_GROUP:
            hook_state, hook = self.hook
            bucket.work = hook(hook_state, bucket)
        else:
            bucket.buffer().div_(_divisor(bucket.group))
            bucket.work = dist.all_reduce(
                bucket.buffer(), group=state.groups[bucket.group], async_op=True
            )

    @torch.no_grad()
    def _reduce(self, *, zeros: bool) -> None:
        """Reduce all gradients, and write the averages back. Collective over the replicas.

        If a rank has got a gradient after it had sent a bucket, all buckets of the group are sent a
        second time. The buffers are freed at the end.

        Args:
            zeros: Take part with zeros, without gradients of this rank.

        Raises:
            SMPConfigError: A gradient is sparse.
            RuntimeError: The collective broke, because a rank is gone.
        """
        for bucket in self.buckets[self.sent :]:
            self._send(bucket, zeros=zeros)
        for group in dict.fromkeys(bucket.group for bucket in self.buckets):
            buckets = [bucket for bucket in self.buckets if bucket.group is group]
            parameters: list[torch.Tensor] = []
            for bucket in buckets:
                parameters += bucket.parameters()
            # One more message: whether a rank sent a bucket too early, and which parameters have a
            # gradient on any rank.
            sent_too_early = False
            has_gradient = [0] * len(parameters)
            if not zeros:
                for number, parameter in enumerate(parameters):
                    key = id(parameter)
                    sent_too_early |= self.seen[key] != self.at_send[key]
                    has_gradient[number] = int(parameter.grad is not None)
            flags = torch.tensor([int(sent_too_early), *has_gradient], dtype=torch.int32)
            flags = flags.to(parameters[0].device)
            with calls.inside("the sum of the gradients over replicas", group):
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=state.groups[group])
                for bucket in buckets:
                    bucket.work.wait()
            must_resend, *used = flags.tolist()
            if must_resend:
                for bucket in buckets:
                    self._send(bucket, zeros=zeros)
                    bucket.work.wait()
            if not zeros:
                _write(buckets, dict(zip(map(id, parameters), used, strict=True)))
            for bucket in buckets:
                bucket.set_buffer(torch.empty(0))
                bucket.work = None

    def _reset(self) -> None:
        """Forget the gradients and messages of the present pass."""
        self.sent = 0
        self.at_send.clear()
        self.seen = dict.fromkeys(self.seen, 0)


def _write(buckets: Iterable[Bucket], used: dict[int, int]) -> None:
    """Copy the averages from the buckets into the gradients.

    A parameter without a gradient gets a new one. With a communication hook the bucket's buffer
    becomes what the hook returned.

    Args:
        buckets: Buckets with a finished reduction.
        used: ``id()`` of a parameter -> 1 if the parameter has a gradient on any rank.
    """
    for bucket in buckets:
        if isinstance(bucket.work, torch.futures.Future):
            # Of a communication hook, which returns the averages.
            value = bucket.work.value()
            if isinstance(value, list | tuple):
                value = value[0]
            bucket.set_buffer(value)
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if not used[id(parameter)]:
                continue
            if parameter.grad is None:
                parameter.grad = grad.clone()
            else:
                parameter.grad.copy_(grad)


def _divisor(group: CommGroup) -> int:
    """Return the divisor of a sum of gradients over a group.

    The gradient of a split parameter includes the samples of all its tensor ranks, unless all of
    them have the same samples (``prescaled_batch``).

    Returns:
        The number of ranks with other samples.
    """
    if group is CommGroup.RDP_GROUP and not state.cfg.prescaled_batch:
        group = CommGroup.DP_GROUP
    return len(state.topo.members(group))


def _chunks(tensors: Iterable[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Divide tensors into lists of at most ``limit`` bytes, or of one tensor.

    The order of the tensors is kept.
    """
    chunks: list[list[torch.Tensor]] = []
    chunk_size = limit + 1
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        chunk_size += size
        if chunk_size > limit:
            chunks.append([])
            chunk_size = size
        chunks[-1].append(tensor)
    return chunks
