"""The public errors. sagemaker-training searches a log for the names of these classes."""

from __future__ import annotations

from collections.abc import Sequence

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError

__all__ = ["PeerError", "SMPConfigError", "SMPRuntimeError", "SMPUnsupportedError", "StepError"]


def summary(error: BaseException) -> str:
    """Return an error in one line: its class and its first line."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[0]}"


class SMPConfigError(ValueError):
    """The configuration cannot work.

    Attributes:
        problems: One sentence for each problem, with key, value and range.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems: Sequence[str] = problems

    def __str__(self) -> str:
        """Return the only problem, or a line for each."""
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n  ".join([f"the configuration has {len(self.problems)} problems", *self.problems])


class StepError(SMPRuntimeError):
    """A function decorated with ``smp.step``, or a function that it calls, failed on a rank or
    cannot run.
    """


class PeerError(StepError):
    """A step cannot go on because another rank failed or is gone.

    Attributes:
        rank: Global rank that failed.
        name: Words for the rank.
        reason: The cause, in one line.
        trace: The traceback of the rank; empty if there is none.
    """

    def __init__(self, rank: int, name: str, reason: str, trace: str = "") -> None:
        super().__init__(f"{name} failed: {reason}")
        self.rank, self.name, self.reason, self.trace = rank, name, reason, trace


class SMPUnsupportedError(NotImplementedError):
    """A name of the public interface is used that this library can only import."""
