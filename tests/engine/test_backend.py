"""What testinfra asks of a container: the answer is whole, or it is asked again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from trainworks.engine.backend import ContainerBackend
from trainworks.errors import EngineError


def engine_that_loses(times: int) -> tuple[Callable[[tuple[str, ...]], tuple[int, bytes, bytes]], list[str]]:
    """Return an engine whose containers are this machine, which loses the first outputs, and the lines it was given."""
    lines: list[str] = []

    def execute(command: tuple[str, ...]) -> tuple[int, bytes, bytes]:
        lines.append(command[-1])
        done = subprocess.run(command, capture_output=True, check=False)
        return done.returncode, b"" if len(lines) <= times else done.stdout, done.stderr

    return execute, lines


LINES = {"echo a; echo b >&2; exit 3": 3, "exit 0": 3, "printf 'no end'": 3, "no-such-program": 1}
"""A command line, and how often it is given where two outputs are lost: a program that is not there has none."""


@pytest.mark.parametrize(("line", "times"), LINES.items())
def test_a_lost_output_is_asked_for_again(line: str, times: int) -> None:
    plain = subprocess.run(("/bin/sh", "-c", line), capture_output=True, check=False)
    execute, lines = engine_that_loses(2)
    told = ContainerBackend("here", execute).run(line)
    assert lines == [line] * times
    assert (told.rc, told.stdout_bytes, told.stderr_bytes) == (plain.returncode, plain.stdout, plain.stderr)


def test_arguments_are_words() -> None:
    execute, _ = engine_that_loses(0)
    assert ContainerBackend("here", execute).run("printf '%%s|' %s %s", "a b", "'c'").stdout == "a b|'c'|"


def test_an_output_that_is_always_lost_is_the_engines_failure() -> None:
    execute, lines = engine_that_loses(9)
    with pytest.raises(EngineError, match="lost the output of `echo a`"):
        ContainerBackend("here", execute).run("echo a")
    assert len(lines) == 3
