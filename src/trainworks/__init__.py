"""Builds, tests and proves the container images in which people train deep-learning models.

Data flows one way: ``facts`` (rows read from ``images/``) -> ``plan`` (what an image is made of) ->
``render`` (the text of its Dockerfile) -> ``engine`` (the program that builds it) -> ``imagetest``
(the promises, checked) -> ``cli``.
"""

__version__ = "0.1.0"
"""The builder's version; ``pyproject.toml`` holds the same (a test compares them)."""
