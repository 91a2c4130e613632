"""Runs one host's plan with real processes, and ends it truthfully together with the other hosts."""
