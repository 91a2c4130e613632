"""Private folders for the time of one build: readable by us alone, gone afterwards whatever happens."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainworks.engine.processes import uninterrupted
from trainworks.engine.protocol import Secret
from trainworks.errors import OutputError


@contextlib.contextmanager
def private_folder(parent: str | None = None) -> Iterator[Path]:
    """Make a folder of mode 0700 with a name of its own, and remove it and all in it at the end.

    Raises:
        OutputError: The folder cannot be made, filled (inside the block) or removed.
    """
    folder: tempfile.TemporaryDirectory[str] | None = None
    try:
        with uninterrupted():
            folder = tempfile.TemporaryDirectory(prefix="trainworks-", dir=parent)
        yield Path(folder.name)
    except OSError as error:
        where = folder.name if folder is not None else parent or tempfile.gettempdir()
        raise OutputError(
            f"cannot write below {where}: {error.strerror or error}", hint="set TMPDIR to a folder with space"
        ) from error
    finally:
        if folder is not None:
            with uninterrupted():
                folder.cleanup()


def write_secrets(folder: Path, secrets: tuple[Secret, ...]) -> tuple[tuple[str, Path], ...]:
    """Write each secret to a file of mode 0600 and return identifier and file, in the same order."""
    files = []
    for number, secret in enumerate(secrets):
        # The identifier may hold a slash or a comma, neither of which may reach a file name or a ``src=`` option.
        path = folder / f"secret-{number}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret.content)
        files.append((secret.identifier, path))
    return tuple(files)
