"""A backend of torch.distributed with NCCL's rules for sends and receives, on CPUs: `strict`.

Each communicator has a thread of its own for a stream: calls return at once, and run in their
order. A send ends when its receive has been posted. There is no receive from any source. Types that
NCCL lacks are refused. A call without its counterpart never ends, or is an error. A call waits at
random before it runs, as the work of a GPU does.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

NCCL_TYPES = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16),
}
"""Types that torch gives to NCCL: ncclDataTypeMap in its ProcessGroupNCCL.cpp, without the 8-bit
floats.
"""


class Launched(Work):
    """A call that runs, or waits for those before it."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.call, self.error = call, ""
        self.ended = threading.Event()

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        self.ended.wait()
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class Strict(dist.ProcessGroup):
    """The process group of one communicator."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # as torch's own in Python
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._calls: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        threading.Thread(target=_stream, args=(self._calls,), daemon=True).start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def getBackendName(self) -> str:  # noqa: N802
        return "strict"

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int = 0) -> Work:  # noqa: ARG002, N803
        (tensor,) = tensors
        gloo, signal = self._gloo, torch.tensor([0])

        def call() -> None:
            gloo.send([torch.tensor([tensor.numel() * tensor.element_size()])], dstRank, 0).wait()
            gloo.recv([signal], dstRank, 0).wait()  # the receive has been posted
            gloo.send([tensor], dstRank, 0).wait()

        return self._launch(tensor, call)

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int = 0) -> Work:  # noqa: ARG002, N803
        (tensor,) = tensors
        gloo, size, size_expected = (
            self._gloo,
            torch.tensor([0]),
            tensor.numel() * tensor.element_size(),
        )

        def call() -> None:
            gloo.recv([size], srcRank, 0).wait()
            if int(size) != size_expected:
                raise RuntimeError(
                    f"a send of {int(size)} bytes meets a receive of {size_expected}"
                )
            gloo.send([size], srcRank, 0).wait()
            gloo.recv([tensor], srcRank, 0).wait()

        return self._launch(tensor, call)

    def recv_anysource(self, *_: Any) -> Work:
        raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")

    def abort(self) -> None:
        pass

    def _launch(self, tensor: torch.Tensor, call: Callable[[], None]) -> Work:
        if tensor.dtype not in NCCL_TYPES:
            raise TypeError(
                f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}"
            )
        work = Launched(call)
        self._calls.put(work)
        return work


def _stream(calls: queue.SimpleQueue[Launched | None]) -> None:
    chance = random.Random(0)
    while (work := calls.get()) is not None:
        time.sleep(chance.random() * 0.001)
        try:
            work.call()
        except Exception as error:  # noqa: BLE001  `wait` raises it
            work.error = str(error)
        work.ended.set()
        del work


def register() -> None:
    """Let torch.distributed know the backend."""
    if "strict" not in dist.Backend.backend_list:
        dist.Backend.register_backend("strict", Strict, devices=["cpu"])
