"""What all parts of a rank's pipeline have in hand: who the rank is, which step
runs, and how messages leave.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence

import torch

from smdistributed.modelparallel.torch.exceptions import PeerError, StepError
from smdistributed.modelparallel.torch.transport.transport import Transport

from .microbatch_threads import Context
from .modules import Modules
from .scheduler import Scheduler

__all__ = ["GONE", "TWICE", "PipelineRank"]

GONE = "it ended, was killed, or its connection was lost"
TWICE = (
    "Add the losses up, and call model.backward once. Detach what a module keeps of an earlier"
    " pass, or place that module with smp.set_partition."
)


class PipelineRank:
    """A rank's place in its pipeline. Calls, served requests and the model's outputs go through it.

    Attributes:
        me: Rank in the pipeline.
        n: Number of ranks of the pipeline.
        root_rank: The rank that owns the root module.
        modules: The placed modules, once they are installed.
        scheduler: What decides which context runs next.
        number: Number of the present step, or of the last one.
        function: Name of its step function.
        order: What ran in it, for tests of schedules: ("F" or "B", microbatch).
    """

    modules: Modules

    def __init__(self, transport: Transport, scheduler: Scheduler) -> None:
        self.scheduler, self.me, self.n = scheduler, transport.me, transport.n
        self.root_rank = 0
        self.number, self.function = 0, ""
        self.order: list[tuple[str, int]] = []
        self._transport = transport

    @property
    def in_step(self) -> bool:
        """Whether this thread runs a context."""
        context = self.scheduler.current
        return (
            context is not None
            and context.runner is not None
            and context.runner.ident == threading.get_ident()
        )

    def context(self) -> Context:
        """Return the context that this thread runs.

        Raises:
            StepError: It runs none.
        """
        if not self.in_step or self.scheduler.current is None:
            raise StepError(
                "a pipeline-parallel smp.DistributedModel can only be called in the thread of a"
                " function decorated with smp.step"
            )
        return self.scheduler.current

    def arrived(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Make the tensors of a message ready for this thread, which uses them."""
        self._transport.arrived(tensors)

    def post(
        self, peer: int, message: object, tensors: Sequence[torch.Tensor | None], what: str
    ) -> None:
        """Send a message to a rank of the pipeline, which may be this one.

        Args:
            peer: Rank in the pipeline.
            message: One of messages.py.
            tensors: What it describes.
            what: Words for it.

        Raises:
            PeerError: The rank is gone.
            StepError: The message cannot be pickled.
        """
        link = self._transport
        try:
            if peer != self.me:
                link.send(peer, message, tensors)
                return
            pickle.dumps(message, 5)
            link.inbox.put((link, peer, message, [t if t is None else t.detach() for t in tensors]))
        except OSError as error:
            raise PeerError(link.members[peer], link.name(peer), f"{GONE} ({error})") from error
        except Exception as error:  # whatever pickle says of an object
            raise StepError(
                f"cannot send the {what} to {link.name(peer)}: {type(error).__name__}: {error}\n"
                "Place the module and its caller on one partition with smp.set_partition,"
                " or pass tensors and what pickle knows."
            ) from error
