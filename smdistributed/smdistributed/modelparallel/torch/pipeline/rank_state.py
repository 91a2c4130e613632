"""The state that all parts of a rank's pipeline share: the rank, the present step, and the link for
messages.
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
"""Advice for a second backward pass through the same call."""


class PipelineRank:
    """A rank of a pipeline, as the calling side, the serving side and the model calls use it.

    Attributes:
        rank: Rank in the pipeline, from 0.
        size: Number of ranks of the pipeline.
        root_rank: The rank that owns the root module.
        modules: The placed modules, once they are installed.
        scheduler: Chooses the context that runs next.
        step_number: Number of the present step, or of the last one.
        function: Name of the step function of this step.
        order: Passes that ran in this step, for tests of schedules: ("F" or "B", microbatch).
    """

    modules: Modules

    def __init__(self, transport: Transport, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.rank, self.size = transport.rank, transport.size
        self.root_rank = 0
        self.step_number, self.function = 0, ""
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

        Other threads of the script, such as those of a data loader, run none.

        Raises:
            StepError: The thread runs no context.
        """
        if not self.in_step or self.scheduler.current is None:
            raise StepError(
                "a pipeline-parallel smp.DistributedModel can only be called in the thread of a"
                " function decorated with smp.step"
            )
        return self.scheduler.current

    def arrived(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Make received tensors ready for use in this thread. Their receives may still run."""
        self._transport.arrived(tensors)

    def post(
        self, peer: int, message: object, tensors: Sequence[torch.Tensor | None], title: str
    ) -> None:
        """Send a message to a rank of the pipeline, which may be this rank.

        A message to this rank goes into the own inbox, with detached tensors.

        The call returns when the operating system has taken the message.

        Args:
            peer: Rank in the pipeline.
            message: A message of messages.py.
            tensors: The tensors of the message, in the order that the message describes.
            title: Words for the message in errors, such as "gradients".

        Raises:
            PeerError: The connection with the rank is lost.
            StepError: The message cannot be pickled, or a tensor is nested, sparse or on the device
                meta.
        """
        link = self._transport
        try:
            if peer != self.rank:
                link.send(peer, message, tensors)
                return
            pickle.dumps(message, 5)  # refuses the same objects as a message to another rank
            detached = [tensor if tensor is None else tensor.detach() for tensor in tensors]
            link.inbox.put((link, peer, message, detached))
        except OSError as error:
            raise PeerError(link.members[peer], link.name(peer), f"{GONE} ({error})") from error
        except Exception as error:  # pickling an object may raise any error
            raise StepError(
                f"cannot send the {title} to {link.name(peer)}: {type(error).__name__}: {error}\n"
                "Place the module and its caller on one partition with smp.set_partition,"
                " or pass tensors and what pickle knows."
            ) from error
