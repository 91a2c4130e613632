"""Known vulnerabilities of what is in an image: advisories held against packages. Pure: effects are the command line's.

Advisories are read in the OSV format, which is what the databases of distributions, PyPI and GitHub are published in
(docs/adr/0023).
"""

LEVELS = ("critical", "high", "medium", "low", "unknown", "negligible")
"""Worst first. ``unknown``: nobody rated it; ``negligible``: its distribution says that it is no danger there."""
