"""Validate a job: its program, placement and network. job.py combines the three. Pure."""
