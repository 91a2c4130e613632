"""Find the oldest Python that the launcher and the probe of an image promise to run on."""

from __future__ import annotations

import os
from pathlib import Path

OLDEST = "3.8"
"""As in ``requires-python`` of launcher/pyproject.toml."""

VARIABLE = "TRAINWORKS_OLDEST_PYTHON"
"""Path of a Python OLDEST; without the variable the newest of pyenv is looked for."""

NOT_TESTED = f"no Python {OLDEST} is installed; set {VARIABLE} to its path"
"""The reason to skip a test without one."""


def find_oldest_python() -> str:
    """Return the path of a Python OLDEST; ``""`` for none."""
    path = os.environ.get(VARIABLE, "")
    if path:
        return path
    pythons = sorted(Path.home().glob(f".pyenv/versions/{OLDEST}.*/bin/python"))
    if not pythons:
        return ""
    return str(pythons[-1])
