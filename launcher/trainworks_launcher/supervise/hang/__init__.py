"""Detect a job that hangs, name the rank that differs, and write the stacks of all ranks to files.

``stacks``, ``progress``, ``outlier_rank`` and ``missing_collectives`` are pure. They parse the
output of py-spy or faulthandler, compare two samples of a host, describe the places of ranks, and
find missing calls in records of torch's flight recorder. ``rank_grid`` draws the places as text and
as SVG. ``sampling`` reads /proc and the stacks of this host's processes, ``flight_recorder`` and
``nccl`` the records of torch and NCCL. ``detector`` takes samples at intervals, agrees with the
other hosts that no rank makes progress, and reports. ``rendezvous_monitor`` does the same for ranks
that do not find each other at the start.
"""
