"""An independent implementation of smdistributed.dataparallel: the backend ``smddp`` and the
interface before 1.4.

This file imports nothing, because ``import torch`` loads it when it searches for backends.
"""

__version__ = "2.8.0+trainworks"
"""The version of the interface, with the name of this implementation."""
