"""A job that hangs: it is seen, the rank that differs is named, and the stacks
of all ranks are written down.

``stacks``, ``progress``, ``outlier_rank`` and ``missing_collectives`` are pure: texts of py-spy or
faulthandler become stacks, two looks at a host a sign of life or none, rows of ranks words, and
records of torch's flight recorder the ranks that lack a call. ``rank_grid`` draws the rows as text
and as SVG. ``sampling`` reads /proc and the stacks of this host's processes, ``flight_recorder``
and ``nccl`` what torch and NCCL have recorded. ``detector`` looks now and then, agrees with the
other hosts that no rank makes progress, and reports.
"""
