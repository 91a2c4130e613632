"""Runs one host's plan with real processes, and ends it truthfully together with the other hosts.

``supervisor`` is the one that knows all rooms; each room knows one subject. ``event_loop`` waits
for everything at once. What only some jobs need is a part (``part``, ``parts``).
"""
