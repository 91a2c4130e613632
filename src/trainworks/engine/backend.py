"""An idle container of either engine, and the one testinfra backend that reaches it.

testinfra's own ``DockerBackend`` calls whichever ``docker`` comes first on PATH, and its ``ChrootBackend`` runs with
this machine's environment instead of the image's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from trainworks.engine.protocol import Completed

_TESTINFRA_SECONDS: Final = 300.0

Execute = Callable[..., tuple[int, bytes, bytes]]
"""Runs a command, with ``timeout`` and ``split``: exit status, stdout and stderr, both in stdout unless split."""


@dataclass(frozen=True)
class IdleContainer:
    """A container to run commands in.

    Attributes:
        identifier: Its name.
        execute: Runs a command in it.
    """

    identifier: str
    execute: Execute

    def run(self, command: tuple[str, ...], *, timeout: float = 120.0) -> Completed:
        """Run a command with the image's environment; its status is 124 after a time-out."""
        status, output, _ = self.execute(command, timeout=timeout, split=False)
        return Completed(status=status, output=output.decode(errors="replace"))

    def testinfra_backend(self) -> object:
        """Return the testinfra backend that reaches this container; testinfra takes a while to import."""
        from testinfra.backend.base import BaseBackend, CommandResult  # type: ignore[import-untyped]

        execute = self.execute

        class Backend(BaseBackend):  # type: ignore[misc]
            NAME = "trainworks"

            def run(self, command: str, *args: str, **_options: Any) -> CommandResult:
                line = self.get_command(command, *args)
                status, output, errors = execute(("/bin/sh", "-c", line), timeout=_TESTINFRA_SECONDS, split=True)
                return self.result(status, line.encode(), output, errors)

        return Backend(self.identifier)
