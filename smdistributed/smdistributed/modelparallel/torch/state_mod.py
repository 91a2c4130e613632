"""`state`, in a module of this name because scripts import it from there: so
AWS's library calls it.
"""

from .job.state import state as state
