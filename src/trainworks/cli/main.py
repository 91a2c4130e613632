"""Reads the command line, runs the command, and ends with one exit status for each class of error."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from trainworks.cli.output import put, silence
from trainworks.errors import OutputError, TrainworksError

INTERRUPTED = 130

BUILD = "build"
"""The command that is meant where none is named."""

COMMANDS = (
    BUILD,
    "catalogue",
    "changelog",
    "check",
    "diff",
    "extend",
    "lint",
    "lock",
    "mirror",
    "promote",
    "prove",
    "push",
    "report",
    "schema",
    "verify",
)
"""A command is one file of ``cli.commands``."""


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Run ``build.py``.

    Args:
        arguments: Those of the command line, without the program; default: the process's own.
        root: The checkout; default: the current folder.

    Returns:
        The exit status; see the end of ``--help``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words.pop(0) if words and words[0] in COMMANDS and words[0] != BUILD else BUILD
    # One command's libraries are not loaded for another: a plan is there in half a second.
    command = importlib.import_module(f"trainworks.cli.commands.{name}")
    options = command.parser().parse_args(words)
    # For a command that hands its own words on to other processes.
    options.words = tuple(words)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(command.run(options, options.root or root or Path.cwd()))
    except TrainworksError as error:
        _say_error(error, as_json=getattr(options, "format", "text") == "json" and not error.reported)
        return error.exit_status
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted: everything that was started has been stopped\n")
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads our progress any more (`2>&1 | head`): what it was about has been stopped, as by Ctrl-C.
        silence(sys.stderr)
        return INTERRUPTED
    except OSError as error:
        # A disk that is full, or a folder that may not be written, where no layer expected it.
        where = f"{error.filename}: " if error.filename else ""
        _say_error(OutputError(f"{where}{error.strerror or error}"), as_json=False)
        return OutputError.exit_status
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Make SIGTERM end a build as Ctrl-C does."""
    raise KeyboardInterrupt


def _say_error(error: TrainworksError, *, as_json: bool) -> None:
    from trainworks.cli.report import describe

    if as_json:
        content = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        put(json.dumps({**content, "exit_status": error.exit_status}, indent=2) + "\n")
    sys.stderr.write(describe(error) + "\n")
