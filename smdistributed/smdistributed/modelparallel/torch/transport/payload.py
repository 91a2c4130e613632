"""Tensors between the ranks of a pipeline, by a backend of torch.distributed:
NCCL for those on GPUs.

**Never run on a GPU.** Tests run it with a backend that has NCCL's rules, on CPUs.

NCCL matches sends and receives of two ranks by nothing but their order, and
neither ends without the other. So:
- Each directed pair of ranks has a communicator, so that the two directions never wait for each
  other.
- Communicators are made and used once in `smp.init`: the first use of one waits for both ranks.
- A send is launched before its header goes by TCP. The reader thread of the receiver posts the
  receives in the order of the headers, which is the order of the sends. No receive is posted whose
  send waits for something else.
- Everything travels as bytes: NCCL knows neither all integers nor complex numbers.
- No thread waits for a GPU: the stream that uses a tensor waits for its receive (`arrived`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist

from smdistributed.modelparallel.torch.job.topology import CommGroup, Topology

_WORK = "_smp_work"
"""The attribute of a received tensor that holds its receive until `arrived`."""


class GroupPayload:
    """The communicators of one rank's pipeline.

    Args:
        rank: Global rank of this process.
        device: Its device. Scripts choose their GPU after `smp.init`, so it is not the current one.
        topology: Which rank is where. Every rank makes the communicators of all
            pipelines, in the same order.
        backend: Of torch.distributed.
    """

    def __init__(self, rank: int, device: torch.device, topology: Topology, backend: str) -> None:
        """Create the communicators of all pipelines, and use those of this rank once. Collective
        over the job.

        Raises:
            RuntimeError: The backend cannot connect the ranks.
        """
        self.rank, self.device = rank, device
        self.members = topology.members(CommGroup.PP_GROUP)
        self._groups: dict[tuple[int, int], Any] = {}
        for pipeline in topology.all_groups(CommGroup.PP_GROUP):
            for pair in permutations(pipeline, 2):
                group = dist.new_group(list(pair), backend=backend)
                if rank in pair:
                    self._groups[pair] = group
        # Receives wait for nothing that this rank computes: they are posted
        # beside a stream that stays empty.
        self._aside: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._begin()

    def _begin(self) -> None:
        """Use each communicator once, in the same order on both its ranks, and wait for the end.

        The first use makes the connections, and would otherwise wait in the middle of a step.

        Raises:
            RuntimeError: The backend cannot connect the ranks.
        """
        with self._on_device():
            token = torch.zeros(1, dtype=torch.uint8, device=self.device)
            for (source, target), group in self._groups.items():
                if source == self.rank:
                    dist.send(token, target, group=group)
                else:
                    dist.recv(token, source, group=group)
            if self._aside is not None:
                torch.cuda.synchronize(self.device)

    def carries(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor goes this way: it is on the device of this rank."""
        return tensor.device == self.device

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Launch the sends of tensors, after the work of the current stream. Nothing is waited for.

        Args:
            peer: Rank of the receiver in the pipeline.
            tensors: Tensors that fill their memory, on this rank's device. Their memory is kept
                until the sends are completed.

        Raises:
            RuntimeError: The backend refused a send.
        """
        target = self.members[peer]
        # The memory of a send must live until the send is completed.
        self._sent = [(work, data) for work, data in self._sent if not work.is_completed()]
        group = self._groups[self.rank, target]
        with self._on_device():
            for tensor in tensors:
                if tensor.numel():
                    data = _bytes(tensor)
                    self._sent.append((dist.isend(data, target, group=group), data))

    def receive(
        self,
        peer: int,
        descriptions: Sequence[tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None]],
    ) -> list[torch.Tensor]:
        """Post the receives of a header, and return the tensors, which are not here yet.

        The reader thread of that peer calls this, in the order of the headers. `arrived` waits for
        a tensor.

        Each receive is kept as an attribute of its tensor until `arrived`.

        Args:
            peer: Rank of the sender in the pipeline.
            descriptions: (type, shape, strides) of each tensor; the strides are None for a
                contiguous one.

        Returns:
            New tensors on this rank's device. Their values are undefined before `arrived`.

        Raises:
            RuntimeError: The backend refused a receive, or there is no memory.
        """
        source = self.members[peer]
        received = []
        with (
            self._on_device(),
            torch.cuda.stream(self._aside) if self._aside is not None else contextlib.nullcontext(),
        ):
            for dtype, shape, strides in descriptions:
                if strides is None:
                    tensor = torch.empty(shape, dtype=dtype, device=self.device)
                else:
                    tensor = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
                if tensor.numel():
                    setattr(
                        tensor,
                        _WORK,
                        dist.irecv(_bytes(tensor), source, group=self._groups[source, self.rank]),
                    )
                received.append(tensor)
        return received

    def arrived(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Make the current stream wait for received tensors.

        Called by the thread that uses them.

        With a GPU the CPU does not wait. Other backends are waited for. A tensor that did not come
        by this payload is passed over.

        Raises:
            RuntimeError: A receive failed.
        """
        for tensor in tensors:
            work = None if tensor is None else vars(tensor).pop(_WORK, None)
            if tensor is not None and work is not None:
                with self._on_device():
                    work.wait()
                    if self._aside is not None:
                        tensor.record_stream(torch.cuda.current_stream())

    def close(self) -> None:
        """Free the communicators, and the memory of sends that are not completed."""
        self._sent.clear()
        self._groups.clear()

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make this rank's GPU the current one within a block; on a CPU change nothing."""
        with (
            torch.cuda.device(self.device) if self._aside is not None else contextlib.nullcontext()
        ):
            yield


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as bytes. Its elements fill the memory, in any order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
