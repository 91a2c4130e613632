"""``build.py diff``: what differs between two images."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainworks.inspect.inspected_image import ImageFile, InspectedImage
from trainworks.terminal.formatting import amount, megabytes, readable, signed

SHOWN = 15
"""How many folders and files the text shows."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference: ``before`` is ``None`` where it is new, ``after`` where it is gone."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """A file that was added, removed or changed.

    Sizes in bytes, ``None`` on the side that lacks the file.
    """

    path: str
    before: int | None
    after: int | None


@dataclass(frozen=True, kw_only=True)
class FolderChange:
    """How many files of a folder were added, removed and changed, and by how many bytes it grew."""

    folder: str
    added: int
    removed: int
    changed: int
    growth: int


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two images."""

    reference: str
    identifier: str
    created: str
    size: int


@dataclass(frozen=True, kw_only=True)
class ImageDifference:
    """Everything that differs between two images.

    Attributes:
        before: The first image.
        after: The second one.
        components: Of the images' own manifests.
        python: Python distributions.
        packages: Debian packages.
        settings: Entry point and default arguments.
        environment: Variables.
        labels: Labels.
        files: Every file that was added, removed or changed (in content, mode or target), by path.
        layers: Instructions whose layers differ in size, or that only one image
            has; in their order.
    """

    before: Side
    after: Side
    components: tuple[Change, ...]
    python: tuple[Change, ...]
    packages: tuple[Change, ...]
    settings: tuple[Change, ...]
    environment: tuple[Change, ...]
    labels: tuple[Change, ...]
    files: tuple[FileChange, ...]
    layers: tuple[FileChange, ...]

    @property
    def folders(self) -> tuple[FolderChange, ...]:
        """The changes of files by folder, the largest growth or loss first."""
        counts: dict[str, Counter[str]] = {}
        for file in self.files:
            counter = counts.setdefault(folder_of(file.path), Counter())
            counter[_kind(file)] += 1
            counter["growth"] += (file.after or 0) - (file.before or 0)
        keys = ("added", "removed", "changed", "growth")
        found = [
            FolderChange(folder=folder, **{key: each[key] for key in keys})
            for folder, each in counts.items()
        ]
        return tuple(sorted(found, key=lambda each: (-abs(each.growth), each.folder)))

    def as_values(self) -> dict[str, Any]:
        """Return it as values for JSON."""
        return {**asdict(self), "folders": [asdict(folder) for folder in self.folders]}


def folder_of(path: str) -> str:
    """Return the folder that a file is counted under: that of its Python
    package, or the third level.
    """
    found = re.match(r"(.*/(?:site|dist)-packages/[^/]+)/", path)
    return found[1] if found else "/".join(path.split("/")[:-1][:4]) or "/"


def difference(before: InspectedImage, after: InspectedImage) -> ImageDifference:
    """Return everything that differs between two images."""
    return ImageDifference(
        before=_side(before),
        after=_side(after),
        components=changes(before.components, after.components),
        python=changes(before.python, after.python),
        packages=changes(before.packages, after.packages),
        settings=changes(_settings(before), _settings(after)),
        environment=changes(before.image.environment, after.image.environment),
        labels=changes(before.image.labels, after.image.labels),
        files=_files(before.files, after.files),
        layers=_layers(before, after),
    )


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    """Return what differs between two tables, by name."""
    return tuple(
        Change(name=name, before=before.get(name), after=after.get(name))
        for name in sorted({**before, **after})
        if before.get(name) != after.get(name)
    )


def _side(contents: InspectedImage) -> Side:
    image = contents.image
    return Side(
        reference=image.reference,
        identifier=image.identifier,
        created=image.created,
        size=image.size,
    )


def _settings(contents: InspectedImage) -> dict[str, str]:
    return {
        "entry point": " ".join(contents.image.entry_point),
        "arguments": " ".join(contents.image.command),
    }


def _files(
    before: Mapping[str, ImageFile], after: Mapping[str, ImageFile]
) -> tuple[FileChange, ...]:
    found = []
    for path in sorted({**before, **after}):
        old, new = before.get(path), after.get(path)
        if old and new and (old.what, old.mode, old.size) == (new.what, new.mode, new.size):
            continue
        found.append(
            FileChange(path=path, before=old.size if old else None, after=new.size if new else None)
        )
    return tuple(found)


def _layers(before: InspectedImage, after: InspectedImage) -> tuple[FileChange, ...]:
    # Two layers may have the same instruction (`COPY /opt/venv /opt/venv`): number them.
    sides = []
    for contents in (before, after):
        seen: Counter[str] = Counter()
        layers: dict[str, int] = {}
        for entry in contents.history:
            if entry.size:
                instruction = readable(entry.created_by).removesuffix(" # buildkit")
                seen[instruction] += 1
                number = f" ({seen[instruction]})" if seen[instruction] > 1 else ""
                layers[instruction + number] = entry.size
        sides.append(layers)
    old, new = sides
    return tuple(
        FileChange(path=instruction, before=old.get(instruction), after=new.get(instruction))
        for instruction in {**old, **new}
        if old.get(instruction) != new.get(instruction)
    )


def as_text(found: ImageDifference) -> str:
    """Return a difference for people."""
    growth = signed(found.after.size - found.before.size)
    lines = [_head(found.before), f"  -> {_head(found.after)}: {growth}"]
    for title, rows in _groups(found):
        lines += ["", f"{title}: {_summed(rows)}", *(f"  {_words(row)}" for row in rows)]
    if found.files:
        lines += ["", f"files: {_summed(found.files)}"]
        for folder in found.folders[:SHOWN]:
            counts = f"+{folder.added} -{folder.removed} ~{folder.changed}"
            lines.append(f"  {signed(folder.growth):>9}  {folder.folder} ({counts})")
        if len(found.folders) > SHOWN:
            lines.append(f"  and {len(found.folders) - SHOWN} more folders")
        lines += ["", "largest changes"]
        largest = sorted(
            found.files, key=lambda file: (-abs((file.after or 0) - (file.before or 0)), file.path)
        )
        lines += [f"  {_sizes(file)}  {file.path}" for file in largest[:SHOWN]]
    if found.layers:
        lines += [
            "",
            "layers",
            *(f"  {_sizes(layer)}  {layer.path[:100]}" for layer in found.layers),
        ]
    if len(lines) == 2:  # only the head
        lines += ["", "no differences"]
    return "\n".join(lines) + "\n"


def _head(side: Side) -> str:
    return f"{side.reference} ({side.identifier[7:19]}, {megabytes(side.size)})"


def _groups(found: ImageDifference) -> list[tuple[str, tuple[Change, ...]]]:
    groups = [
        ("components", found.components),
        ("Python packages", found.python),
        ("Debian packages", found.packages),
        ("start", found.settings),
        ("environment", found.environment),
        ("labels", found.labels),
    ]
    return [(title, rows) for title, rows in groups if rows]


def _summed(rows: Sequence[Change] | Sequence[FileChange]) -> str:
    counts = Counter(_kind(row) for row in rows)
    return ", ".join(
        f"{counts[kind]} {kind}" for kind in ("added", "removed", "changed") if counts[kind]
    )


def _kind(row: Change | FileChange) -> str:
    return "added" if row.before is None else "removed" if row.after is None else "changed"


def _words(row: Change) -> str:
    if row.before is None:
        return f"+ {row.name} {row.after}".rstrip()
    if row.after is None:
        return f"- {row.name} {row.before}".rstrip()
    return f"~ {row.name} {row.before or '(nothing)'} -> {row.after or '(nothing)'}"


def _sizes(row: FileChange) -> str:
    left = "-" if row.before is None else amount(row.before)
    right = "-" if row.after is None else amount(row.after)
    return f"{left:>8} -> {right:>8}"
