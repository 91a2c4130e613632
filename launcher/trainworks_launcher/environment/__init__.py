"""Reads a host and its job once: platform, variables, files, image manifest, code, devices.

``environment.py`` puts them into one frozen value, ``Environment``. The package ``job`` decides
from that value how the job runs.
"""
