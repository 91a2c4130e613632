"""The contract between the launcher and its users: names, statuses, types of values, refusals.

This room knows no host and no job.
"""
