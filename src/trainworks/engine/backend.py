"""Common parts of both engines: an image by its configuration, an idle container, and its testinfra
backend.

testinfra's own ``DockerBackend`` calls the first ``docker`` on PATH, and its
``ChrootBackend`` runs with this machine's environment instead of the image's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainworks.engine.protocol import BuiltImage, Completed

_TESTINFRA_SECONDS: Final = 300.0
"""Seconds that a command of testinfra may take."""

Execute = Callable[..., tuple[int, bytes, bytes]]
"""Runs a command, with ``timeout`` and ``split``: exit status, stdout and
stderr, both in stdout unless split.
"""


MAKERS: Final = {"Author": "author", "OsVersion": "os.version", "Variant": "variant"}
"""Keys beside an image's ``config`` that no recipe renders: Docker's name to OCI's."""


def image_of(configuration: Mapping[str, Any], **more: Any) -> BuiltImage:
    """Return an image by its configuration, which has the same keys for Docker and OCI.

    Args:
        configuration: The image's ``config``.
        more: Further fields of the image, which the engine knows.
    """
    environment = {}
    for entry in configuration.get("Env") or ():
        name, _, value = entry.partition("=")
        environment[name] = value
    return BuiltImage(
        labels=dict(configuration.get("Labels") or {}),
        environment=environment,
        entry_point=tuple(configuration.get("Entrypoint") or ()),
        command=tuple(configuration.get("Cmd") or ()),
        working_folder=str(configuration.get("WorkingDir") or ""),
        user=str(configuration.get("User") or ""),
        stop_signal=str(configuration.get("StopSignal") or ""),
        volumes=tuple(sorted(configuration.get("Volumes") or ())),
        configuration={key: value for key, value in configuration.items() if value},
        **more,
    )


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
        """Return the testinfra backend that reaches this container.

        Testinfra takes a while to import.
        """
        from testinfra.backend.base import BaseBackend, CommandResult  # type: ignore[import-untyped]

        execute = self.execute

        class Backend(BaseBackend):  # type: ignore[misc]
            NAME = "trainworks"

            def run(self, command: str, *args: str, **_options: Any) -> CommandResult:
                line = self.get_command(command, *args)
                status, output, errors = execute(
                    ("/bin/sh", "-c", line), timeout=_TESTINFRA_SECONDS, split=True
                )
                return self.result(status, line.encode(), output, errors)

        return Backend(self.identifier)
