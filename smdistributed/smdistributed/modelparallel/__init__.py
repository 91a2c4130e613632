"""An independent implementation of smdistributed.modelparallel, version 1.

What scripts import is ``.torch``.
"""

__version__ = "1.15.0+trainworks"
"""The version of the interface, then whose it is. Transformers asks whether it is at least 1.10."""
