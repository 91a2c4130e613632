"""Builds, tests and proves the container images in which people train deep-learning models.

Data flows one way: ``facts`` (rows read from ``images/``) -> ``plan`` (what an image is made of) -> ``render`` (the
text of its Dockerfile) -> ``engine`` (the program that builds it) -> ``imagetest`` (the promises, checked) -> ``cli``.
"""
