"""trainworks_launcher: runs a distributed training job inside a container and
reports its first failure.

As the data flows: ``given`` reads the world once -> ``job`` validates it -> ``plan`` plans one
host, word for word -> ``supervise`` runs that, with a control channel between the hosts.
docs/architecture.md has the rooms and their arrows.

Values are named tuples: a dataclass takes five times as long to make, and each
start of a job makes all of them.
"""

__version__ = "0.1.0"
"""The launcher's version; ``pyproject.toml`` holds the same (a test compares them)."""
