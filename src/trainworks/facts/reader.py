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
        problems: Everything that is wrong so far.
        unreadable: Files whose content is not known: what other files say about
            it can neither be right nor wrong.
        malformed: Kind and name of rows that are there and malformed: a row
            that names one is not wrong for that.
    """

    def __init__(self, *folders: Path) -> None:
        """Start without problems."""
        self.folders = folders
        self.problems: list[str] = []
        self.unreadable: set[str] = set()
        self.malformed: set[tuple[str, str]] = set()

    def text(self, path: Path) -> str:
        """Return the text of a file, ``""`` where it cannot be read."""
        try:
            return read_text(path)
        except UnreadableError as error:
            self.problems.append(f"{self.name(path)}: {error}")
            self.unreadable.add(self.name(path))
            return ""

    def name(self, path: Path) -> str:
        """Return a file's path for people: below its folder, with that folder's name."""
        folder = next(each for each in self.folders if path.is_relative_to(each))
        return path.relative_to(folder.parent).as_posix()

    def toml(self, path: Path) -> dict[str, Any]:
        """Return the content of a TOML file, nothing where it cannot be read."""
        return self.parse(self.text(path), self.name(path))

    def parse(self, text: str, where: str) -> dict[str, Any]:
        """Return the content of a TOML text; ``where`` is its place, for people."""
        try:
            table = parse_toml(text)
        except UnreadableError as error:
            self.problems.append(f"{where}: {error}")
            self.unreadable.add(where)
            return {}
        if MAY_HOLD_CONTROL.search(text):
            # A check of a front matter goes into no Dockerfile, and a program
            # in it may have several lines.
            texts = control_characters(
                {key: value for key, value in table.items() if key != "check"}
            )
            self.problems.extend(
                f"{where}: key '{place}': {value!r} has a control"
                " character (a line break, a tab, an escape)"
                for place, value in texts
            )
        return table

    def rows(
        self, row_type: type[Row], key: str, table: dict[str, Any], where: str, **more: object
    ) -> list[Row]:
        """Return the rows of the array ``key`` of a file.

        The file's own ``source`` holds for rows that have none.

        Args:
            row_type: Their type.
            key: The array.
            table: The content of the file; it is used up.
            where: The file, for people.
            more: What the file says of all its rows; no row may say it.
        """
        shape = shape_of(row_type)
        found: list[Row] = []
        raw_rows = table.pop(key, [])
        inherited = {"source": table.pop("source")} if "source" in table else {}
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
            given = more.keys() & raw.keys()
            problems = [f"unknown key '{name}'; the file says it" for name in sorted(given)]
            row, wrong = shape.read({**inherited, **raw, **more} if inherited or more else raw)
            problems += wrong
            if problems:
                label = f"{where}: {key} {number}{_identity(raw)}"
                self.problems += [f"{label}: {problem}" for problem in problems]
            if row is None:
                # A component's recipe has a name of its own.
                self.malformed |= {(key, str(raw.get(each, ""))) for each in ("name", "recipe")}
            else:
                found.append(row)
        return found


def _identity(raw: object) -> str:
    if not isinstance(raw, dict):
        return ""
    parts = [
        f"{key} = {short(raw[key])}" for key in ("name", "version", "cuda", "base") if key in raw
    ]
    return f" ({', '.join(parts)})" if parts else ""
