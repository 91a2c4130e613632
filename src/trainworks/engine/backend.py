"""A testinfra backend for the containers of every engine, instead of one backend for each engine's command line.

testinfra's own ``DockerBackend`` calls whichever ``docker`` comes first on PATH, and its ``ChrootBackend`` runs with
this machine's environment instead of the image's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testinfra.backend.base import BaseBackend, CommandResult  # type: ignore[import-untyped]

from trainworks.engine.again import again
from trainworks.errors import EngineError

_END = b"\4"
_LINE = r'/bin/sh -c "$1"; status=$?; printf "\\004"; exit $status'
"""Runs a command line, and says that its output is whole: on a busy machine docker now and then loses all of it
(moby/moby, issue 27289), and whoever asks would take silence for an answer."""

_NOT_RUN = frozenset({124, 126, 127})
"""Statuses of a time-out, and of a program that is not there or cannot be executed: the shell itself, perhaps."""

Execute = Callable[[tuple[str, ...]], tuple[int, bytes, bytes]]
"""Runs a command in a container: exit status, stdout, stderr."""


class ContainerBackend(BaseBackend):  # type: ignore[misc]
    """Runs testinfra's commands through a container of ours."""

    NAME = "trainworks"

    def __init__(self, identifier: str, execute: Execute) -> None:
        """Store the container's name, and the function that runs a command in it."""
        super().__init__(identifier)
        self._execute = execute

    def run(self, command: str, *args: str, **_options: Any) -> CommandResult:
        """Run a command line in the container's shell; again if its output was lost, for these only ask."""
        line = self.get_command(command, *args)
        status, output, errors = again(lambda: self._attempt(line))
        return self.result(status, line.encode(), output, errors)

    def _attempt(self, line: str) -> tuple[int, bytes, bytes]:
        status, output, errors = self._execute(("/bin/sh", "-c", _LINE, "sh", line))
        if not output.endswith(_END) and status not in _NOT_RUN:
            raise EngineError(f"the engine lost the output of `{line}` in a container", hint="try again")
        return status, output.removesuffix(_END), errors
