"""What the launcher and the world agree on: names, statuses, types of values,
how a refusal is said.

It knows nothing of a host or a job.
"""
