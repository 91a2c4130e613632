"""``build.py schema``: the shapes of the files in ``images``, for editors that check TOML while it is typed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainworks.errors import OutputError
from trainworks.facts.lockfile import ARTIFACTS, BASE_IMAGES, KEYS
from trainworks.facts.patterns import PATTERNS
from trainworks.facts.rows import TABLES, LockedArtifact, LockedBaseImage, LockedPackage, TargetRow
from trainworks.facts.shapes import shape_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""The language of the schemas; editors look at it to know the keywords."""


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


def schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each kind of file in ``images``, by name, for editors: ``images/schema/NAME.json``."""
    files: Mapping[str, tuple[str, type[Any]]] = {
        **{table.name: (table.key, table.row_type) for table in TABLES.values()},
        "framework": ("target", TargetRow),
        "lock": (KEYS[LockedPackage], LockedPackage),
        f"lock-{Path(ARTIFACTS).stem}": (KEYS[LockedArtifact], LockedArtifact),
        f"lock-{Path(BASE_IMAGES).stem}": (KEYS[LockedBaseImage], LockedBaseImage),
    }
    return {name: _schema(name, key, row_type) for name, (key, row_type) in files.items()}


def _schema(name: str, key: str, row_type: type[Any]) -> dict[str, Any]:
    row = shape_of(row_type).schema()
    # A file may say once, at its head, where all its rows come from; and what framework its rows are of.
    head = {"source"} if "source" in row["properties"] else set()
    if name == "framework":
        del row["properties"]["framework"]
        row["required"].remove("framework")
        head |= {"framework", "summary"}
    row["required"] = [required for required in row["required"] if required != "source"]
    for column, (pattern, form) in PATTERNS.get(row_type, {}).items():
        text = row["properties"][column]
        while text["type"] != "string":
            text = text["items" if text["type"] == "array" else "additionalProperties"]
        text |= {"pattern": f"^{pattern.pattern.replace(chr(92) + 'Z', '$')}", "description": form}
    return {
        "$schema": DIALECT,
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{column: {"type": "string"} for column in sorted(head)},
            key: {"type": "array", "items": row},
        },
    }
