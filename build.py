#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""The front door of a checkout: finds the builder and its dependencies, then hands over to ``trainworks.cli``."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENVIRONMENT_PYTHON = ROOT / ".venv" / "bin" / "python"
DEPENDENCIES = ("argcomplete", "docker", "jinja2", "packaging", "pydantic", "pytest", "testinfra", "tomli")


def missing_dependencies() -> list[str]:
    """Return the modules that the builder needs and this Python lacks, without importing any."""
    from importlib.util import find_spec

    return [name for name in DEPENDENCIES if find_spec(name) is None]


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 - said before a newer syntax fails in the imports below
        sys.exit(f"error: Python 3.11 or later is needed, this is {sys.version.split()[0]}")
    if missing := missing_dependencies():
        # `exists` would end with a traceback where a folder on the way may not be read (another user's checkout).
        if os.access(ENVIRONMENT_PYTHON, os.X_OK) and Path(sys.prefix) != ROOT / ".venv":
            # `make setup` was run: its environment has what this Python lacks.
            os.execv(ENVIRONMENT_PYTHON, [str(ENVIRONMENT_PYTHON), *sys.argv])
        sys.exit(f"error: this Python lacks {', '.join(missing)}\n\nhint: type `make setup`, then this again")
    sys.path.insert(0, str(ROOT / "src"))
    # uv, which `lock` runs, lies beside the Python that has it installed.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

    from trainworks.cli import main

    sys.exit(main(root=ROOT))
