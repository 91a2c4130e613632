"""A job that hangs: it is seen, the rank that differs is named, and the stacks
of all ranks are written down.

``stacks``, ``progress``, ``naming`` and ``lacking`` are pure: texts of py-spy or faulthandler
become stacks, two looks at a host a sign of life or none, rows of ranks words, and records of
torch's flight recorder the ranks that lack a call. ``grid`` draws the rows as text and as SVG.
``looking`` reads /proc and the stacks of this host's processes, ``recorder`` and ``nccl`` what
torch and NCCL have recorded. ``watch`` looks now and then, agrees with the other hosts that no rank
makes progress, and reports.
"""
