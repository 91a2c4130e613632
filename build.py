#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""The front door of a checkout: finds the builder and its dependencies, then
hands over to ``trainworks.cli``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent
ENVIRONMENT_PYTHON = ROOT / ".venv" / "bin" / "python"


def missing_dependencies() -> list[str]:
    """Return the distributions of pyproject.toml that this Python lacks, or has
    in too old a version.
    """
    import re
    from importlib.metadata import PackageNotFoundError, version

    import tomllib

    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    missing = []
    for requirement in content["project"]["dependencies"]:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        try:
            found = version(name)
        except PackageNotFoundError:
            missing.append(name)
            continue
        try:
            from packaging.requirements import Requirement
        except ModuleNotFoundError:
            continue
        if found not in Requirement(requirement).specifier:
            missing.append(f"{requirement} (it has {found})")
    return missing


def leave(_number: int, _frame: FrameType | None) -> None:
    """End as Ctrl-C ends every command: before anything has started there is
    nothing to stop, and no traceback.
    """
    os.write(2, b"\ninterrupted: nothing had been started\n")
    os._exit(130)


def explain(error: ModuleNotFoundError) -> None:
    """Start again with the environment of the checkout, or end with a hint,
    where dependencies are missing.
    """
    if not (missing := missing_dependencies()):
        raise error
    # `exists` would end with a traceback where a folder on the way may not be
    # read (another user's checkout).
    if os.access(ENVIRONMENT_PYTHON, os.X_OK) and Path(sys.prefix) != ROOT / ".venv":
        # `make setup` was run: its environment has what this Python lacks.
        os.execv(ENVIRONMENT_PYTHON, [str(ENVIRONMENT_PYTHON), *sys.argv])
    sys.exit(
        f"error: {sys.executable} lacks {', '.join(missing)}\n"
        "\n"
        "hint: run `make setup`, then this again"
    )


if __name__ == "__main__":
    if sys.version_info < (3, 11):
        sys.exit(f"error: Python 3.11 or later is needed, this is {sys.version.split()[0]}")
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    sys.path.insert(0, str(ROOT / "src"))
    # uv, which `lock` runs, lies beside the Python that has it installed.
    os.environ["PATH"] = (
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    )
    try:
        from trainworks.cli import main

        signal.signal(signal.SIGINT, handler)
        sys.exit(main(root=ROOT))
    except ModuleNotFoundError as error:
        # Asked only now: to look at every distribution takes as long as to start Python.
        explain(error)
