"""Errors of the library, for every framework. sagemaker-training searches a log for the names of
these classes.
"""

__all__ = ["SMPRuntimeError"]


class SMPRuntimeError(RuntimeError):
    """The library was used in an order or a place that cannot work, or a rank failed."""
