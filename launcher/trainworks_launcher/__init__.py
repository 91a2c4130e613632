"""trainworks_launcher: runs a distributed training job inside a container and reports its first failure.

From top to bottom, as the data flows: ``environment`` reads the world once -> ``job`` validates it -> ``modes`` plan
one host -> ``plan`` is what is shown and what is run -> ``supervise`` runs it, with ``control`` between the hosts.

Values are named tuples: a dataclass takes five times as long to make, and each start of a job makes all of them.
"""

__version__ = "0.1.0"
"""The launcher's version; ``pyproject.toml`` holds the same (a test compares them)."""
