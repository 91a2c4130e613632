"""What goes to stdout: results, and nothing else. What people are told meanwhile goes to stderr."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

from trainworks.errors import OutputError
from trainworks.terminal.progress import DISPLAY, LABEL


def silence(stream: TextIO) -> None:
    """Let what is still to be written to a stream go nowhere; Python would fail on it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def put(text: str) -> None:
    """Write a result to stdout at once, so that a full disk is known while the exit status can still say so."""
    try:
        with DISPLAY.paused() if sys.stdout.isatty() else nullcontext():
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough (`| head`): nothing is wrong, and nothing more can be said.
        silence(sys.stdout)
    except OSError as error:
        silence(sys.stdout)
        raise OutputError(f"stdout cannot be written: {error.strerror}") from error


def put_json(content: object) -> None:
    """Write a result for programs: one JSON document."""
    put(json.dumps(content, indent=2) + "\n")


def put_result(options: Namespace, content: object, text: str) -> None:
    """Write a result as ``--format`` says: for programs or for people."""
    if options.format == "json":
        put_json(content)
    else:
        put(text)


def write_file(path: Path, text: str) -> None:
    """Write a result to a file.

    Raises:
        OutputError: The file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from error


def say(text: str) -> None:
    """Write a line for people; results for programs go to stdout instead."""
    DISPLAY.say(text)


@contextmanager
def labelled(name: str) -> Iterator[None]:
    """Put a name before each line and each task of this thread while the ``with`` block runs."""
    before = LABEL.set(name)
    try:
        yield
    finally:
        LABEL.reset(before)
