"""The wrapper before version 1.4."""

from .distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
