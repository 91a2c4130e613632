"""CUDA tensors between the ranks of a pipeline, by NCCL.

**Never run.** It was written and reviewed against torch's documentation on a machine without GPUs.

The header of a message goes by TCP and describes the tensors. The reader thread of the receiver then posts their
receives in the order of the headers, which is the order of the sends. Each directed pair of ranks has a communicator of
its own, so what goes one way never waits for what goes the other way. Sends and receives run on streams of their own:
events order them with the computation, and no thread waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from smdistributed.modelparallel.torch.job.topology import CommGroup, Topology


class NcclPayload:
    """The communicators of one rank's pipeline.

    Args:
        rank: Global rank of this process.
        device: Its GPU. Scripts choose theirs after `smp.init`, so it is not the current one.
        topology: Which rank is where. Every rank makes the communicators of all pipelines, in the same order.
    """

    def __init__(self, rank: int, device: int, topology: Topology) -> None:
        """Make the communicators. Collective over the job."""
        self.members = topology.members(CommGroup.PP_GROUP)
        self.device = device
        self._groups: dict[tuple[int, int], Any] = {}
        for pipeline in topology.all_groups(CommGroup.PP_GROUP):
            for source in pipeline:
                for target in pipeline:
                    if source == target:
                        continue
                    group = dist.new_group([source, target], backend="nccl")
                    if rank in (source, target):
                        self._groups[source, target] = group
        self.rank = rank
        self._streams = {
            pair: torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            for pair in self._groups
        }
        self._events: dict[int, torch.cuda.Event] = {}

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors after what the current stream has to do for them. Does not wait."""
        pair = self.rank, self.members[peer]
        stream = self._streams[pair]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for tensor in tensors:
                if tensor.numel():
                    dist.send(tensor, pair[1], group=self._groups[pair])
                    tensor.record_stream(stream)

    def receive(self, peer: int, descriptions: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[torch.Tensor]:
        """Post the receives of a header; called by the reader thread of that peer. Does not wait."""
        pair = self.members[peer], self.rank
        torch.cuda.set_device(self.device)
        received = []
        with torch.cuda.stream(self._streams[pair]):
            for dtype, shape in descriptions:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
                if tensor.numel():
                    dist.recv(tensor, pair[0], group=self._groups[pair])
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record()
                    self._events[id(tensor)] = event
                received.append(tensor)
        return received

    def arrived(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Let the current stream wait for received tensors."""
        current = torch.cuda.current_stream()
        for tensor in tensors:
            event = self._events.pop(id(tensor), None) if tensor is not None else None
            if tensor is not None and event is not None:
                current.wait_event(event)
                tensor.record_stream(current)
