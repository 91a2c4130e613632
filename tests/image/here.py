"""Stand in for a container: the questions to an image run in a process of this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainworks.engine.protocol import Completed


@dataclass(frozen=True)
class Here:
    """Runs commands as a container would."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    identifier: str = "here"

    def run(self, command: tuple[str, ...], *, timeout: float = 120.0) -> Completed:
        """Run a command, with stdout and stderr merged."""
        done = subprocess.run(
            command,
            env=dict(self.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
        return Completed(status=done.returncode, output=done.stdout.decode(errors="replace"))

    def testinfra_backend(self) -> object:
        """Refuse: no test needs a backend."""
        raise NotImplementedError
