"""How a tool of this folder starts and ends: with the Python of `make setup`, and with a clear
error instead of a traceback for a bad file.

A tool calls `use_environment()` before it imports `trainworks`, and ends with
`sys.exit(exit_status_of(main))`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"

INTERRUPTED = 130


class FileError(Exception):
    """A file of the checkout that a tool cannot use: which, what is wrong, and what to do."""


def use_environment() -> None:
    """Make this checkout's `trainworks` importable.

    Starts the tool again with the Python of `make setup` where the one that runs it lacks the
    builder's dependencies. Raises SystemExit, with what to run, where `make setup` was not run.
    """
    sys.path.insert(0, str(ROOT / "src"))
    try:
        # An installed builder brings its dependencies.
        distribution("trainworks")
    except PackageNotFoundError:
        pass
    else:
        return
    if os.access(PYTHON, os.X_OK) and Path(sys.prefix) != ENVIRONMENT:
        os.execv(PYTHON, [str(PYTHON), *sys.argv])
    sys.exit(
        f"error: {sys.executable} lacks the dependencies of trainworks\n"
        "\n"
        "hint: run `make setup`, then this again"
    )


def exit_status_of(main: Callable[[], int]) -> int:
    """Return the exit status of a tool; print what it could not do, and what to run.

    Errors of the builder, of the file system, of a program, and FileError are about the tool's
    input. Other errors are defects of the tool: they pass.

    Args:
        main: The tool; it returns its exit status.
    """
    from trainworks.errors import TrainworksError
    from trainworks.terminal.formatting import describe

    try:
        return main()
    except TrainworksError as error:
        print(describe(error), file=sys.stderr)
        return error.exit_status
    except subprocess.CalledProcessError as error:
        # Its own error is on stderr already.
        command = " ".join(str(word) for word in error.cmd)
        print(f"error: `{command}` ended with status {error.returncode}", file=sys.stderr)
        return 1
    except FileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
