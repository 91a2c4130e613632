"""Errors of the library. sagemaker-training looks for the names of these classes in a log."""

__all__ = ["SMDDPError"]


class SMDDPError(RuntimeError):
    """The library cannot do what it was asked for in this place."""
