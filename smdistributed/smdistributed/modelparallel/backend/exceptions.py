"""Errors of the library, whatever the framework. sagemaker-training looks for
the names of these classes in a log.
"""

__all__ = ["SMPRuntimeError"]


class SMPRuntimeError(RuntimeError):
    """The library was used in an order or a place that cannot work, or a rank failed."""
