"""``build.py diff``: the differences between two images."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainworks.inspect.inspected_image import ImageFile, InspectedImage
from trainworks.terminal.formatting import amount, megabytes, readable, signed

SHOWN = 15
"""The number of folders and of files in the text."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference: ``before`` is ``None`` for an added row, ``after`` for a removed one."""

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
    """The numbers of a folder's added, removed and changed files, and its growth in bytes."""

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
        components: The components in the images' own manifests.
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
        folders = []
        for name, count in counts.items():
            folder = FolderChange(
                folder=name,
                added=count["added"],
                removed=count["removed"],
                changed=count["changed"],
                growth=count["growth"],
            )
            folders.append(folder)
        return tuple(sorted(folders, key=lambda folder: (-abs(folder.growth), folder.folder)))

    def as_values(self) -> dict[str, Any]:
        """Return the difference as values for JSON."""
        return {**asdict(self), "folders": [asdict(folder) for folder in self.folders]}


def folder_of(path: str) -> str:
    """Return the folder that a file is counted under.

    That is the folder of its Python package, or a folder of the third level: ``/usr/lib/ssl``.
    """
    package = re.match(r"(.*/(?:site|dist)-packages/[^/]+)/", path)
    if package:
        return package[1]
    parents = path.split("/")[:-1]
    return "/".join(parents[:4]) or "/"


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
    """Return the differences between two tables, sorted by name."""
    differences = []
    for name in sorted({**before, **after}):
        old, new = before.get(name), after.get(name)
        if old != new:
            differences.append(Change(name=name, before=old, after=new))
    return tuple(differences)


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
    changed_files = []
    for path in sorted({**before, **after}):
        old, new = before.get(path), after.get(path)
        if old and new and _is_same(old, new):
            continue
        old_size = old.size if old else None
        new_size = new.size if new else None
        changed_files.append(FileChange(path=path, before=old_size, after=new_size))
    return tuple(changed_files)


def _is_same(old: ImageFile, new: ImageFile) -> bool:
    return (old.what, old.mode, old.size) == (new.what, new.mode, new.size)


def _layers(before: InspectedImage, after: InspectedImage) -> tuple[FileChange, ...]:
    old, new = _layer_sizes(before), _layer_sizes(after)
    layers = []
    for instruction in {**old, **new}:
        old_size, new_size = old.get(instruction), new.get(instruction)
        if old_size != new_size:
            layers.append(FileChange(path=instruction, before=old_size, after=new_size))
    return tuple(layers)


def _layer_sizes(contents: InspectedImage) -> dict[str, int]:
    """Return the size of each layer by its instruction.

    Two layers may have the same instruction (``COPY /opt/venv /opt/venv``): later ones get a
    number.
    """
    counts: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for entry in contents.history:
        if not entry.size:
            continue
        instruction = readable(entry.created_by).removesuffix(" # buildkit")
        counts[instruction] += 1
        number = counts[instruction]
        key = instruction if number == 1 else f"{instruction} ({number})"
        sizes[key] = entry.size
    return sizes


def as_text(difference: ImageDifference) -> str:
    """Return a difference for people."""
    growth = signed(difference.after.size - difference.before.size)
    lines = [_head(difference.before), f"  -> {_head(difference.after)}: {growth}"]
    for title, rows in _groups(difference):
        lines += ["", f"{title}: {_summed(rows)}"]
        lines += [f"  {_words(row)}" for row in rows]
    if difference.files:
        lines += ["", f"files: {_summed(difference.files)}"]
        folders = difference.folders
        for folder in folders[:SHOWN]:
            counts = f"+{folder.added} -{folder.removed} ~{folder.changed}"
            lines.append(f"  {signed(folder.growth):>9}  {folder.folder} ({counts})")
        if len(folders) > SHOWN:
            lines.append(f"  and {len(folders) - SHOWN} more folders")
        lines += ["", "largest changes"]
        largest = sorted(difference.files, key=_by_growth)
        lines += [f"  {_sizes(file)}  {file.path}" for file in largest[:SHOWN]]
    if difference.layers:
        lines += ["", "layers"]
        lines += [f"  {_sizes(layer)}  {layer.path[:100]}" for layer in difference.layers]
    if len(lines) == 2:  # only the head
        lines += ["", "no differences"]
    return "\n".join(lines) + "\n"


def _by_growth(file: FileChange) -> tuple[int, str]:
    growth = (file.after or 0) - (file.before or 0)
    return -abs(growth), file.path


def _head(side: Side) -> str:
    return f"{side.reference} ({side.identifier[7:19]}, {megabytes(side.size)})"


def _groups(difference: ImageDifference) -> list[tuple[str, tuple[Change, ...]]]:
    groups = [
        ("components", difference.components),
        ("Python packages", difference.python),
        ("Debian packages", difference.packages),
        ("start", difference.settings),
        ("environment", difference.environment),
        ("labels", difference.labels),
    ]
    return [(title, rows) for title, rows in groups if rows]


def _summed(rows: Sequence[Change] | Sequence[FileChange]) -> str:
    counts = Counter(_kind(row) for row in rows)
    kinds = [kind for kind in ("added", "removed", "changed") if counts[kind]]
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds)


def _kind(row: Change | FileChange) -> str:
    if row.before is None:
        return "added"
    if row.after is None:
        return "removed"
    return "changed"


def _words(row: Change) -> str:
    if row.before is None:
        return f"+ {row.name} {row.after}".rstrip()
    if row.after is None:
        return f"- {row.name} {row.before}".rstrip()
    return f"~ {row.name} {row.before or '(nothing)'} -> {row.after or '(nothing)'}"


def _sizes(row: FileChange) -> str:
    before = "-" if row.before is None else amount(row.before)
    after = "-" if row.after is None else amount(row.after)
    return f"{before:>8} -> {after:>8}"
