"""The JSON schemas of the files in images/, for editors that check TOML while it is typed.

Generate.py writes them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from trainworks.facts.field_types import Form
from trainworks.facts.lockfile import ARCHIVES, ARTIFACTS, BASE_IMAGES, KEYS
from trainworks.facts.rows import (
    TABLES,
    LockedArchive,
    LockedArtifact,
    LockedBaseImage,
    LockedPackage,
    TargetRow,
)
from trainworks.facts.schema import shape_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""The language of the schemas; editors look at it to know the keywords."""


def schema_files() -> dict[str, str]:
    """Return the text of each file of `images/schema`, by its name."""
    files: Mapping[str, tuple[str, type[Any]]] = {
        **{table.name: (table.key, table.row_type) for table in TABLES.values()},
        "framework": ("target", TargetRow),
        "lock": (KEYS[LockedPackage], LockedPackage),
        f"lock-{Path(ARTIFACTS).stem}": (KEYS[LockedArtifact], LockedArtifact),
        f"lock-{Path(BASE_IMAGES).stem}": (KEYS[LockedBaseImage], LockedBaseImage),
        f"lock-{Path(ARCHIVES).stem}": (KEYS[LockedArchive], LockedArchive),
    }
    texts = {}
    for name, (key, row_type) in files.items():
        schema = _schema(name, key, row_type)
        texts[f"{name}.json"] = json.dumps(schema, indent=2) + "\n"
    return texts


def _schema(name: str, key: str, row_type: type[Any]) -> dict[str, Any]:
    shape = shape_of(row_type)
    properties = {}
    for field in dataclasses.fields(row_type):
        properties[field.name] = _type(shape.types[field.name]) | _default(field)
    required = list(shape.required)
    # The head of a file may have the source and the framework of all its rows.
    head = {"source"} if "source" in properties else set()
    if name == "framework":
        del properties["framework"]
        required.remove("framework")
        head |= {"framework", "summary"}
    row = {
        "type": "object",
        "description": inspect.cleandoc(row_type.__doc__ or ""),
        "additionalProperties": False,
        "properties": properties,
        "required": [column for column in required if column != "source"],
    }
    return {
        "$schema": DIALECT,
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{column: {"type": "string"} for column in sorted(head)},
            key: {"type": "array", "items": row},
        },
    }


def _default(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return a default as a part of a schema; an empty default is left out."""
    if field.default is dataclasses.MISSING or not field.default:
        return {}
    if isinstance(field.default, tuple):
        return {"default": list(field.default)}
    return {"default": field.default}


def _type(annotation: Any) -> dict[str, Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind, rule = arguments
        if not isinstance(rule, Form):
            return _type(kind) | {"minimum": rule.start, "maximum": rule[-1]}
        pattern = rule.pattern.pattern.replace(chr(92) + "Z", "$")
        return {"type": "string", "pattern": f"^(?:{pattern})$", "description": rule.words}
    if origin is tuple:
        return {"type": "array", "items": _type(arguments[0])}
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    plain: Mapping[Any, dict[str, Any]] = {
        str: {"type": "string"},
        int: {"type": "integer", "minimum": 0},
        bool: {"type": "boolean"},
    }
    return plain.get(annotation, {})
