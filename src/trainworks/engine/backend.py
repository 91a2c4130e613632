"""A testinfra backend for the containers of every engine, instead of one backend for each engine's command line.

testinfra's own ``DockerBackend`` calls whichever ``docker`` comes first on PATH, and its ``ChrootBackend`` runs with
this machine's environment instead of the image's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testinfra.backend.base import BaseBackend, CommandResult  # type: ignore[import-untyped]

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
        """Run a command line in the container's shell; what it printed is whole."""
        line = self.get_command(command, *args)
        status, output, errors = self._execute(("/bin/sh", "-c", line))
        return self.result(status, line.encode(), output, errors)
