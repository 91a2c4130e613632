"""Write results to stdout, and lines for people to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TextIO

from trainworks.errors import OutputError
from trainworks.terminal.progress import DISPLAY, LABEL
from trainworks.terminal.visible import visible


def silence(stream: TextIO) -> None:
    """Send everything that is still to be written to a stream to ``/dev/null``.

    Without that, Python would fail on a closed stream once more when the process ends.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def put(text: str) -> None:
    """Write a result to stdout at once, so that a full disk changes the exit status.

    Hidden characters are written as ``visible`` shows them. A closed stdout is no error.

    Raises:
        OutputError: stdout cannot be written.
    """
    text = visible(text)
    # Bars on the same terminal would be in the middle of the result.
    pause = DISPLAY.paused() if sys.stdout.isatty() else nullcontext()
    try:
        with pause:
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (`| head`), which is not an error.
        silence(sys.stdout)
    except OSError as error:
        silence(sys.stdout)
        raise OutputError(f"cannot write to stdout: {error.strerror}") from error


def put_json(content: object) -> None:
    """Write a value to stdout as one indented JSON document; raises as ``put``."""
    put(json.dumps(content, indent=2) + "\n")


def put_result(form: str, content: object, text: str) -> None:
    """Write a result to stdout for programs or for people; raises as ``put``.

    Args:
        form: The value of ``--format``: ``json`` or ``text``.
        content: The result for programs, a value for JSON.
        text: The result for people.
    """
    if form == "json":
        put_json(content)
    else:
        put(text)


def say(text: str) -> None:
    """Write a line for people to stderr, after the label of this thread."""
    DISPLAY.say(text)


@contextmanager
def labelled(name: str) -> Iterator[None]:
    """Put a name before each line and each task of this thread while the ``with`` block runs."""
    token = LABEL.set(name)
    try:
        yield
    finally:
        LABEL.reset(token)
