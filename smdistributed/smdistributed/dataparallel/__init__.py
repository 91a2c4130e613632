"""An independent implementation of smdistributed.dataparallel: the backend ``smddp`` and the
interface before 1.4.

Nothing is imported here: ``import torch`` comes by when it looks for backends.
"""

__version__ = "2.8.0+trainworks"
"""The version of the interface, then whose it is."""
