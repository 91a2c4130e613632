"""Files of other tools: which are read as what, and what converts the others. Pure.

The launcher's install.py has the same sentences for jobs.
"""

from __future__ import annotations

import re

UV_LOCK = "uv.lock"
PROJECT = "pyproject.toml"
PYLOCK = "pylock.toml"
OF_OTHER_TOOLS = (
    "environment.yml",
    "environment.yaml",
    "conda.yml",
    "Pipfile.lock",
    "poetry.lock",
    "pdm.lock",
    "pixi.lock",
)
"""Files of a project that say what it needs, and that are not read."""

_PYLOCK = re.compile(r"pylock(\.[^.]+)?\.toml")

_SENTENCES = (
    (
        r".*\.ya?ml",
        "is conda's: `conda run -n NAME python -m pip list --format=freeze > requirements.txt` writes what pip reads",
    ),
    (r"Pipfile(\.lock)?", "is pipenv's: `pipenv requirements > requirements.txt` writes what pip reads"),
    (
        r"poetry\.lock",
        "is Poetry's: `poetry export -o requirements.txt` (plug-in poetry-plugin-export) writes what pip reads",
    ),
    (r"pdm\.lock", "is PDM's: `pdm export -o requirements.txt` writes what pip reads"),
    (
        r"pixi\.(lock|toml)",
        "is Pixi's: `pixi run python -m pip list --format=freeze > requirements.txt` writes what pip reads",
    ),
    (r"setup\.(py|cfg)", "belongs to a project: name the project's folder in a requirements file, such as ./ or -e ."),
    (r".*\.whl", "is a wheel: name it in a requirements file"),
)


def kind_of(name: str) -> str:
    """Return what a file is by its name: ``uv``, ``pylock``, ``project``, or ``""`` for a requirements file."""
    if name == UV_LOCK:
        return "uv"
    if _PYLOCK.fullmatch(name):
        return "pylock"
    return "project" if name == PROJECT else ""


def sentence_of(name: str) -> str:
    """Return why a file of this name is not a requirements file, and what converts it; ``""`` for any other."""
    return next((sentence for pattern, sentence in _SENTENCES if re.fullmatch(pattern, name)), "")
