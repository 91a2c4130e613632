"""``build.py schema``: the shapes of the files in ``images``, for editors that check TOML while it is typed."""

from __future__ import annotations

import json
from pathlib import Path

from trainworks.errors import OutputError
from trainworks.facts.load import schemas


def schema_files() -> dict[str, str]:
    """Return the text of each file of ``images/schema``, by its name."""
    return {f"{name}.json": json.dumps(schema, indent=2) + "\n" for name, schema in schemas().items()}


def write_schemas(folder: Path) -> list[Path]:
    """Write one JSON schema for each kind of file; returns the paths. Raises ``OutputError``."""
    written = []
    for name, text in schema_files().items():
        path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}") from error
        written.append(path)
    return written
