"""What a step raises when another rank failed."""

from __future__ import annotations

from smdistributed.modelparallel.torch.exceptions import StepError

__all__ = ["PeerError", "StepError"]


class PeerError(StepError):
    """A step cannot go on because another rank failed or is gone.

    Attributes:
        rank: Global rank that failed.
        name: Words for it.
        reason: What happened, in one line.
        trace: Its traceback; empty if it left none.
    """

    def __init__(self, rank: int, name: str, reason: str, trace: str = "") -> None:
        """Make the error of a rank's failure."""
        super().__init__(f"{name} failed: {reason}")
        self.rank, self.name, self.reason, self.trace = rank, name, reason, trace
