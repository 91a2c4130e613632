"""Test that the output of a command in a container tells how the command ended.

A text that an engine lost or added is seen.
"""

from __future__ import annotations

import subprocess

import pytest

from trainworks.engine.exec_status import MarkedCommand
from trainworks.engine.subprocesses import Finished


def run(marked: MarkedCommand, *, split: bool) -> Finished:
    """Run a command as in a container that is this machine."""
    errors = subprocess.PIPE if split else subprocess.STDOUT
    done = subprocess.run(marked.argv, stdout=subprocess.PIPE, stderr=errors, check=False)
    return Finished(status=done.returncode, output=done.stdout, errors=done.stderr or b"")


@pytest.mark.parametrize(
    ("command", "status", "output"),
    [
        (("sh", "-c", "echo a; exit 3"), 3, b"a\n"),
        (("printf", "no end"), 0, b"no end"),
        (("sh", "-c", "kill -9 $$"), 137, b""),
        (("printf", "%s|%s", "a b", "'c'"), 0, b"a b|'c'"),
    ],
)
@pytest.mark.parametrize("job", [False, True])
def test_status_and_output_are_the_commands(
    command: tuple[str, ...], status: int, output: bytes, job: bool
) -> None:
    marked = MarkedCommand(command=command, job=job)
    result = marked.read(run(marked, split=True), split=True)
    assert (result.status, result.is_complete, result.output) == (status, True, output)


def test_streams_may_be_merged() -> None:
    marked = MarkedCommand(command=("sh", "-c", "echo a; echo b >&2"))
    result = marked.read(run(marked, split=False), split=False)
    assert (result.status, result.is_complete, result.output, result.errors) == (
        0,
        True,
        b"a\nb\n",
        b"",
    )


def test_what_an_engine_loses_or_adds_is_seen() -> None:
    marked = MarkedCommand(command=("sh", "-c", "echo a; exit 3"))
    done = run(marked, split=True)
    result = marked.read(
        Finished(status=1, output=b"", errors=done.errors + b"Error: exit status 3\n"), split=True
    )
    assert (result.status, result.is_complete, result.errors) == (3, False, b"")
    nothing = marked.read(
        Finished(status=125, output=b"", errors=b"no such container\n"), split=True
    )
    assert (nothing.status, nothing.is_complete, nothing.errors) == (
        None,
        False,
        b"no such container\n",
    )
