"""Reads TOML files into rows and collects every problem instead of stopping at the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from trainworks.facts.schema import shape_of, short
from trainworks.facts.text import (
    MAY_HOLD_CONTROL,
    UnreadableError,
    control_characters,
    parse_toml,
    read_text,
)

Row = TypeVar("Row")


class Reader:
    """Reads files below some folders.

    Attributes:
        folders: The folders.
        problems: All problems so far.
        unreadable: Files that could not be read: a name in another file that
            would point to their rows is no problem.
        malformed: Kind and name of rows that are malformed: a row that names
            one is no problem.
    """

    def __init__(self, *folders: Path) -> None:
        """Start without problems."""
        self.folders = folders
        self.problems: list[str] = []
        self.unreadable: set[str] = set()
        self.malformed: set[tuple[str, str]] = set()

    def text(self, path: Path) -> str:
        """Return the text of a file; ``""`` and a problem if it cannot be read."""
        try:
            return read_text(path)
        except UnreadableError as error:
            self.problems.append(f"{self.name(path)}: {error}")
            self.unreadable.add(self.name(path))
            return ""

    def name(self, path: Path) -> str:
        """Return a file's path for people, which begins with one of ``folders``' own names.

        For example ``images/cuda.toml``.
        """
        folder = next(folder for folder in self.folders if path.is_relative_to(folder))
        return path.relative_to(folder.parent).as_posix()

    def toml(self, path: Path) -> dict[str, Any]:
        """Return the content of a TOML file; ``{}`` and a problem if it cannot be read."""
        return self.parse(self.text(path), self.name(path))

    def parse(self, text: str, where: str) -> dict[str, Any]:
        """Return the content of a TOML text; ``{}`` and a problem if it is not TOML.

        Control characters in its texts are problems, too.

        Args:
            text: The text.
            where: Its place, for people: ``images/cuda.toml``.
        """
        try:
            table = parse_toml(text)
        except UnreadableError as error:
            self.problems.append(f"{where}: {error}")
            self.unreadable.add(where)
            return {}
        if MAY_HOLD_CONTROL.search(text):
            # A check of a front matter goes into no Dockerfile, and a program
            # in it may have several lines.
            strict = {key: value for key, value in table.items() if key != "check"}
            for place, value in control_characters(strict):
                self.problems.append(
                    f"{where}: key '{place}': {value!r} has a control"
                    " character (a line break, a tab, an escape)"
                )
        return table

    def rows(
        self, row_type: type[Row], key: str, table: dict[str, Any], where: str, **more: object
    ) -> list[Row]:
        """Return the well-formed rows of the array ``key`` of a file.

        The file's own ``source`` is the source of rows without one. Everything else in the file,
        and every malformed row, is a problem; malformed rows are noted in ``malformed``.

        Args:
            row_type: The type of the rows.
            key: The array.
            table: The content of the file; its keys are removed.
            where: The file, for people.
            more: Values of keys for all rows of the file; no row may have these keys.
        """
        shape = shape_of(row_type)
        rows: list[Row] = []
        raw_rows = table.pop(key, [])
        inherited = {}
        if "source" in table:
            inherited["source"] = table.pop("source")
        if not isinstance(raw_rows, list):
            self.problems.append(f"{where}: `{key}` must be written as [[{key}]] rows")
            raw_rows = []
        for extra in table:
            self.problems.append(f"{where}: unknown key '{extra}'; this file has [[{key}]] rows")
        for number, raw in enumerate(raw_rows, start=1):
            if not isinstance(raw, dict):
                self.problems.append(
                    f"{where}: {key} {number}: must be a table of keys, got {short(raw)}"
                )
                continue
            repeated_keys = sorted(more.keys() & raw.keys())
            problems = [f"unknown key '{name}'; the file says it" for name in repeated_keys]
            row, problems_of_keys = shape.read({**inherited, **raw, **more})
            problems += problems_of_keys
            if problems:
                label = f"{where}: {key} {number}{_identity(raw)}"
                self.problems += [f"{label}: {problem}" for problem in problems]
            if row is not None:
                rows.append(row)
                continue
            # A component's recipe has a name of its own.
            for name_key in ("name", "recipe"):
                self.malformed.add((key, str(raw.get(name_key, ""))))
        return rows


def _identity(raw: dict[str, Any]) -> str:
    """Return the keys that identify a row: `` (name = 'nccl', version = '2.18')``, or ``""``."""
    keys = ("name", "version", "cuda", "base")
    parts = [f"{key} = {short(raw[key])}" for key in keys if key in raw]
    if not parts:
        return ""
    return f" ({', '.join(parts)})"
