"""Read the command line, run the command, and return one exit status for each class of error."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from trainworks import __version__
from trainworks.cli.commands import BUILD, COMMANDS, command_named, grammar_of
from trainworks.errors import CommandLineError, InterruptionError, OutputError, TrainworksError
from trainworks.facts.data import default_root
from trainworks.suggestions import nearest
from trainworks.terminal.output import put, put_json, silence
from trainworks.terminal.progress import DISPLAY


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Run one command of ``build.py``.

    Results go to stdout, errors and progress to stderr; with ``--format json`` errors go to
    stdout, too. While it runs, SIGTERM ends the command as Ctrl-C does. A process that a shell
    started for completion answers the shell and ends.

    Args:
        arguments: The words of the command line, without the program; default: the process's own.
        root: The checkout; default: the current folder if it is one, else the
            data of the installed package.

    Returns:
        The exit status; see the end of ``--help``. No error is raised.
    """
    if "_ARGCOMPLETE" in os.environ and arguments is None:
        from trainworks.cli.complete import complete

        complete(root or default_root(Path.cwd()))
    is_own_process = arguments is None
    if arguments is None:
        arguments = sys.argv[1:]
    words = list(arguments)
    as_json = _has_json_format(words)
    previous: Any = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if words == ["--version"]:
            put(f"trainworks {__version__}\n")
            return 0
        name, words = _split_command(words)
        command = command_named(name)
        checkout = root or default_root(Path.cwd())
        options = command.parser().read(words, checkout)
        return int(command.run(options, options.root or checkout))
    except TrainworksError as error:
        _say_error(error, as_json=as_json)
        return error.exit_status
    except KeyboardInterrupt:
        if is_own_process:
            # A second Ctrl-C while Python shuts down would end the process with
            # the signal's status.
            previous = signal.SIG_IGN
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        _say_error(InterruptionError(), as_json=as_json)
        return InterruptionError.exit_status
    except BrokenPipeError:
        # The reader of stderr has gone (`2>&1 | head`). The work was stopped, as by Ctrl-C.
        silence(sys.stderr)
        _say_error(InterruptionError(), as_json=as_json)
        return InterruptionError.exit_status
    except OSError as error:
        # For example a full disk, or a folder without write permission.
        where = f"{error.filename}: " if error.filename else ""
        _say_error(OutputError(f"{where}{error.strerror or error}"), as_json=as_json)
        return OutputError.exit_status
    finally:
        signal.signal(signal.SIGTERM, previous)


def _split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the command and the words for its grammar.

    ``--root DIR`` may stand before the command: ``--root /a push x`` is ``push`` with the words
    ``x --root /a``. Words without a command are those of ``build``.

    Raises:
        CommandLineError: The first word is neither a command nor an option nor a target.
    """
    # The number of words before the command: ``--root DIR`` or ``--root=DIR``.
    count = 0
    if words and words[0] == "--root":
        count = 2
    elif words and words[0].startswith("--root="):
        count = 1
    if len(words) > count and words[count] in COMMANDS:
        words = [*words[count:], *words[:count]]
    if not words:
        return BUILD, []
    first, *arguments = words
    if first in ("-h", "--help"):
        return "help", arguments
    if first in COMMANDS:
        return first, arguments
    # An option, or the name of a target: it has dashes, and the names of commands do not.
    if not first or "-" in first:
        return BUILD, list(words)
    known_words = list(COMMANDS)
    for argument in grammar_of(BUILD).arguments():
        known_words += argument["names"]
    near = nearest(first, known_words)
    did_you_mean = f"did you mean {near}? " if near else ""
    hint = (
        f"{did_you_mean}`python build.py help` lists all commands;"
        " --framework and --cuda build an image"
    )
    raise CommandLineError([f"unknown command {first!r}"], hint=hint)


def _has_json_format(words: Sequence[str]) -> bool:
    """Return whether words ask for errors on stdout as JSON: ``--format json``.

    The words are not parsed: the error of a parser is one of those errors.
    """
    return "--format=json" in words or ("--format", "json") in pairwise(words)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Make SIGTERM end a command as Ctrl-C does."""
    raise KeyboardInterrupt


def _say_error(error: TrainworksError, *, as_json: bool) -> None:
    """Print an error: for people to stderr, and with ``as_json`` as JSON to stdout, too.

    JSON is left out for an error that the command's own JSON has reported.
    """
    from trainworks.terminal.formatting import describe

    if as_json and not error.reported:
        put_json(error.as_values())
    if isinstance(error, InterruptionError):
        text = f"\ninterrupted: {error.message}"
    else:
        text = describe(error)
    try:
        DISPLAY.write(text)
    except BrokenPipeError:
        # No program reads stderr: the exit status alone reports the error.
        silence(sys.stderr)
