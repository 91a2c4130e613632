"""The names in ``images/``, read for shell completion: in a fraction of ``load``'s time, and without a judgement."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainworks.facts.rows import Base, Component, Cuda, Facts, Stack, TargetRow
from trainworks.facts.text import UnreadableError, parse_toml, read_text

Row = TypeVar("Row")

FRAMEWORK = re.compile(r"^framework\s*=", re.MULTILINE)
"""At the head of each file of targets, and of no other."""


def skim(root: Path) -> Facts:
    """Return targets, bases, CUDA cells, components and stacks of a checkout, and nothing else.

    What ``load`` would refuse is left out: who presses a key wants no error. Only what names things may be read from
    the rows: their other values are as they stand in the file.
    """
    images = root / "images"
    known: dict[str, tuple[Any, ...]] = {
        "bases": tuple(_rows(images / "bases.toml", "base", Base)),
        "cudas": tuple(_rows(images / "cuda.toml", "cuda", Cuda)),
        "components": tuple(_rows(images / "components.toml", "component", Component)),
        "stacks": tuple(_rows(images / "stacks.toml", "stack", Stack)),
    }
    names = {field: {row.name for row in rows} for field, rows in known.items()}
    targets = (
        row
        for path in sorted(images.glob("*.toml"))
        if FRAMEWORK.search(_text(path))
        for row in _rows(path, "target", TargetRow, framework=path.stem)
        if row.base in names["bases"] and row.cuda in names["cudas"] and row.stack in names["stacks"]
    )
    nothing: dict[str, Any] = {field.name: () for field in dataclasses.fields(Facts)}
    return Facts(**{**nothing, **known, "targets": tuple(targets)})


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except UnreadableError:
        return ""


def _rows(path: Path, key: str, row_type: type[Row], **more: str) -> Iterator[Row]:
    try:
        values = parse_toml(_text(path)).get(key)
    except UnreadableError:
        return
    for value in values if isinstance(values, list) else ():
        try:
            yield row_type(**more, **value) if isinstance(value, Mapping) else row_type(**more)
        except TypeError:
            continue
