"""An independent implementation of smdistributed.modelparallel, version 1.

Scripts import ``.torch``.
"""

__version__ = "1.15.0+trainworks"
"""The version of the interface, with the name of this implementation. Transformers needs 1.10."""
