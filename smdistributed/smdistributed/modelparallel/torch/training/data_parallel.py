"""Data parallelism: gradients are averaged over replicas, in buckets, while the
backward pass still runs.
"""

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
CommHook = Callable[[Any, "Bucket"], "torch.futures.Future[torch.Tensor]"]


def replica_group(tensor: torch.Tensor) -> CommGroup:
    """Return over which group a tensor is replicated: tensor ranks have
    different slices of a split one.
    """
    return CommGroup.RDP_GROUP if getattr(tensor, "_smp_distributed", False) else CommGroup.DP_GROUP


def broadcast(tensors: Iterable[torch.Tensor], source: int = 0) -> None:
    """Give all replicas the values of one of them. Every rank calls it with the same list.

    Args:
        tensors: Parameters and buffers of this rank.
        source: The replica whose values count, as a rank of each tensor's group.
    """
    batches: dict[tuple[CommGroup, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        group = replica_group(tensor)
        if len(state.topo.members(group)) > 1 and tensor.numel():
            batches.setdefault((group, tensor.device), []).append(tensor.detach())
    for (group, _), members in batches.items():
        for chunk in _chunks(members, 32 * MIB):
            flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in chunk])
            with calls.inside("the broadcast of parameters and buffers", group):
                dist.broadcast(flat, state.topo.members(group)[source], group=state.groups[group])
            start = 0
            for tensor in chunk:
                length = tensor.numel() * tensor.element_size()
                tensor.copy_(
                    flat[start : start + length].clone().view(tensor.dtype).view(tensor.shape)
                )
                start += length


class Bucket:
    """Gradients that are reduced in one message.

    A communication hook gets it as torch's gets a ``GradBucket``.

    Args:
        index: Its place in the order of the messages.
        parameters: Whose gradients are in it.
        group: Over which ranks they are reduced.
    """

    def __init__(self, index: int, parameters: list[torch.Tensor], group: CommGroup) -> None:
        self._index, self._parameters, self.group = index, parameters, group
        self._buffer = torch.empty(0)
        self.last = False
        self.work: Any = None

    def index(self) -> int:
        """Return its place in the order of the messages."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all its gradients in one row."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer."""
        self._buffer = buffer

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are in it."""
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        """Return the parts of the buffer, shaped as the parameters."""
        parts = torch.split(self._buffer, [p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def is_last(self) -> bool:
        """Is it the last one of a pass?"""
        return self.last

    def fill(self, *, zeros: bool) -> None:
        """Copy the gradients into the buffer. What has no gradient counts as zeros."""
        parts = []
        for parameter in self._parameters:
            grad = None if zeros else parameter.grad
            if grad is not None and grad.layout != torch.strided:
                raise SMPConfigError(
                    "a sparse gradient cannot be averaged over replicas."
                    " Make the embedding with sparse=False"
                )
            parts.append(
                parameter.new_zeros(parameter.numel())
                if grad is None
                else grad.detach().reshape(-1)
            )
        self._buffer = torch.cat(parts)


class Reducer:
    """Averages the gradients of this rank's parameters over the replicas.

    A bucket is sent as soon as all its gradients of the last microbatch are in. How many gradients
    a parameter gets in a pass was learned from the passes before. Buckets are sent in the same
    order by all ranks. Parameters that no replica used keep ``grad`` None.

    Args:
        parameters: This rank's trainable parameters, in the order of their definition.
        passes: Backward passes between two reductions. Gradients add up until then.
        bucket_bytes: Largest size of a bucket, but for a single large parameter.
        overlap: Send buckets while the backward pass runs.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], *, passes: int, bucket_bytes: int, overlap: bool
    ) -> None:
        self.passes, self.overlap, self.done_passes = passes, overlap, 0
        self.hook: tuple[Any, CommHook] | None = None
        self.early = 0  # buckets that were sent before the end of their pass
        self.after_plain_pass: Callable[[], None] = lambda: None  # a pass outside a step
        kinds: dict[tuple[CommGroup, torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in reversed(list(parameters)):  # the last layer's gradients are there first
            group = replica_group(parameter)
            if (
                _divisor(group) > 1
            ):  # with one replica, a split parameter has seen the samples of its tensor ranks
                kinds.setdefault((group, parameter.dtype, parameter.device), []).append(parameter)
        self.buckets: list[Bucket] = []
        for (group, _, _), members in kinds.items():
            for chunk in _chunks(members, bucket_bytes):
                self.buckets.append(Bucket(len(self.buckets), chunk, group))
        if self.buckets:
            self.buckets[-1].last = True
        # With one partition a plain loss.backward() is a pass, also without replicas.
        everything = state.cfg.pipeline_parallel_degree == 1
        watched = (
            parameters
            if everything
            else [p for bucket in self.buckets for p in bucket.parameters()]
        )
        self.seen: dict[int, int] = {id(p): 0 for p in watched}
        self.expected: dict[int, int] | None = None
        self.at_send: dict[int, int] = {}
        self.sent = 0
        self.in_step = self.queued = False
        for parameter in watched:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    # -- what the model calls
    def begin_step(self) -> None:
        """Say that a step function begins: ``end_pass`` follows."""
        self.in_step = True

    def end_pass(self) -> None:
        """End one backward pass; reduce when it was the last of ``passes``."""
        self.in_step = False
        if self.last_pass:
            self._reduce(zeros=False)
        self.done_passes += 1
        highest = self.expected or {}
        self.expected = {key: max(count, highest.get(key, 0)) for key, count in self.seen.items()}
        self._reset()

    def watch(self, outputs: Any) -> Any:
        """Return the outputs of a call outside a step.

        A backward pass from them is noticed when it begins.

        The first gradient of a parameter is too late: it can belong to a pass inside the pass
        (torch's checkpointing).
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
        """A gradient came in since the last pass ended."""
        return any(self.seen.values())

    # -- while a backward pass runs
    @torch.no_grad()
    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self.seen[id(parameter)] += 1
        self._queue()
        if self.overlap and self.expected is not None and self.last_pass:
            for bucket in self.buckets[self.sent :]:
                if any(self.seen[id(p)] < self.expected[id(p)] for p in bucket.parameters()):
                    break
                self._send(bucket, zeros=False)
                self.early += 1

    def _queue(self, _: object = None) -> None:
        """Reduce when torch's engine has finished this ``loss.backward()``."""
        if not self.in_step and not self.queued:
            self.queued = True
            Variable._execution_engine.queue_callback(self._engine_done)  # noqa: SLF001  as FSDP does

    def _engine_done(self) -> None:
        self.queued = False
        self.after_plain_pass()
        self.end_pass()

    @property
    def last_pass(self) -> bool:
        """The gradients are reduced at the end of this pass."""
        return (self.done_passes + 1) % self.passes == 0

    # -- messages
    def _send(self, bucket: Bucket, *, zeros: bool) -> None:
        bucket.fill(zeros=zeros)
        self.at_send.update({id(p): self.seen[id(p)] for p in bucket.parameters()})
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
        for bucket in self.buckets[self.sent :]:
            self._send(bucket, zeros=zeros)
        for group in dict.fromkeys(bucket.group for bucket in self.buckets):
            buckets = [b for b in self.buckets if b.group is group]
            parameters = [p for b in buckets for p in b.parameters()]
            # One more message: was a bucket sent too early somewhere? Which
            # parameters have a gradient anywhere?
            late = not zeros and any(self.seen[id(p)] != self.at_send[id(p)] for p in parameters)
            used = [0 if zeros or p.grad is None else 1 for p in parameters]
            flags = torch.tensor([int(late), *used], dtype=torch.int32).to(parameters[0].device)
            with calls.inside("the sum of the gradients over replicas", group):
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=state.groups[group])
                for bucket in buckets:
                    bucket.work.wait()
            again, *anywhere = flags.tolist()
            if again:
                for bucket in buckets:
                    self._send(bucket, zeros=zeros)
                    bucket.work.wait()
            if not zeros:
                _write(buckets, dict(zip(map(id, parameters), anywhere, strict=True)))
            for bucket in buckets:
                bucket.set_buffer(torch.empty(0))
                bucket.work = None

    def _reset(self) -> None:
        self.sent = 0
        self.at_send.clear()
        self.seen = dict.fromkeys(self.seen, 0)


def _write(buckets: Iterable[Bucket], used: dict[int, int]) -> None:
    for bucket in buckets:
        if isinstance(bucket.work, torch.futures.Future):
            value = bucket.work.value()
            bucket.set_buffer(value[0] if isinstance(value, list | tuple) else value)
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if not used[id(parameter)]:
                continue
            if parameter.grad is None:
                parameter.grad = grad.clone()
            else:
                parameter.grad.copy_(grad)


def _divisor(group: CommGroup) -> int:
    """Return by what a sum over a group is divided.

    A split parameter has seen the samples of all its tensor ranks, unless they have the same ones.
    """
    if group is CommGroup.RDP_GROUP and not state.cfg.prescaled_batch:
        group = CommGroup.DP_GROUP
    return len(state.topo.members(group))


def _chunks(tensors: Iterable[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Divide tensors into lists of at most ``limit`` bytes, or of one tensor."""
    out: list[list[torch.Tensor]] = []
    size = limit + 1
    for tensor in tensors:
        size += tensor.numel() * tensor.element_size()
        if size > limit:
            out.append([])
            size = tensor.numel() * tensor.element_size()
        out[-1].append(tensor)
    return out
