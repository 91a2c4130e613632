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
        layers: Instructions with layers of different sizes, or that only one image has; in their
            order.
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
            counter = counts.setdefault(find_counted_folder(file.path), Counter())
            counter[_classify_change(file)] += 1
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


def find_counted_folder(path: str) -> str:
    """Return the folder that a file is counted under.

    That is the folder of its Python package, or a folder of the third level: ``/usr/lib/ssl``.
    """
    package = re.match(r"(.*/(?:site|dist)-packages/[^/]+)/", path)
    if package:
        return package[1]
    parents = path.split("/")[:-1]
    return "/".join(parents[:4]) or "/"


def compare_images(before: InspectedImage, after: InspectedImage) -> ImageDifference:
    """Compare two images: their packages, files, layers and configurations."""
    return ImageDifference(
        before=_describe_image(before),
        after=_describe_image(after),
        components=compare_tables(before.components, after.components),
        python=compare_tables(before.python, after.python),
        packages=compare_tables(before.packages, after.packages),
        settings=compare_tables(_read_start_settings(before), _read_start_settings(after)),
        environment=compare_tables(before.image.environment, after.image.environment),
        labels=compare_tables(before.image.labels, after.image.labels),
        files=_compare_files(before.files, after.files),
        layers=_compare_layers(before, after),
    )


def compare_tables(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    """Compare two tables of names and values; return the different rows, sorted by name.

    For example ``Change(name="torch", before="2.5", after="2.6")``.
    """
    differences = []
    for name in sorted({**before, **after}):
        old, new = before.get(name), after.get(name)
        if old != new:
            differences.append(Change(name=name, before=old, after=new))
    return tuple(differences)


def _describe_image(contents: InspectedImage) -> Side:
    """Return the name, creation time and size of an inspected image."""
    image = contents.image
    return Side(
        reference=image.reference,
        identifier=image.identifier,
        created=image.created,
        size=image.size,
    )


def _read_start_settings(contents: InspectedImage) -> dict[str, str]:
    """Return the words that start a container, such as ``{"arguments": "train"}``."""
    return {
        "entry point": " ".join(contents.image.entry_point),
        "arguments": " ".join(contents.image.command),
    }


def _compare_files(
    before: Mapping[str, ImageFile], after: Mapping[str, ImageFile]
) -> tuple[FileChange, ...]:
    """Return the files that were added, removed or changed, sorted by path."""
    changed_files = []
    for path in sorted({**before, **after}):
        old, new = before.get(path), after.get(path)
        if old and new and _is_same_file(old, new):
            continue
        old_size = new_size = None
        if old is not None:
            old_size = old.size
        if new is not None:
            new_size = new.size
        changed_files.append(FileChange(path=path, before=old_size, after=new_size))
    return tuple(changed_files)


def _is_same_file(old: ImageFile, new: ImageFile) -> bool:
    """Return whether two files have the same content or link target, mode and size."""
    return (old.content, old.mode, old.size) == (new.content, new.mode, new.size)


def _compare_layers(before: InspectedImage, after: InspectedImage) -> tuple[FileChange, ...]:
    """Return the layers that differ in size, or that only one image has.

    ``FileChange.path`` holds the layer's instruction: ``COPY /opt/venv /opt/venv``.
    """
    old, new = _collect_layer_sizes(before), _collect_layer_sizes(after)
    layers = []
    for instruction in {**old, **new}:
        old_size, new_size = old.get(instruction), new.get(instruction)
        if old_size != new_size:
            layers.append(FileChange(path=instruction, before=old_size, after=new_size))
    return tuple(layers)


def _collect_layer_sizes(contents: InspectedImage) -> dict[str, int]:
    """Return the size of each layer by its instruction.

    Two layers may have the same instruction (``COPY /opt/venv /opt/venv``): later ones get a
    number.
    """
    counts: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for entry in contents.history:
        # ENV, LABEL and the like make entries of the history without a layer.
        if not entry.size:
            continue
        instruction = readable(entry.created_by).removesuffix(" # buildkit")
        counts[instruction] += 1
        number = counts[instruction]
        if number > 1:
            instruction += f" ({number})"
        sizes[instruction] = entry.size
    return sizes


def as_text(difference: ImageDifference) -> str:
    """Write a difference for people: the sizes, then a paragraph for each table with changes."""
    growth = signed(difference.after.size - difference.before.size)
    lines = [_format_image(difference.before), f"  -> {_format_image(difference.after)}: {growth}"]
    for title, rows in _list_tables_with_changes(difference):
        lines += ["", f"{title}: {_count_changes(rows)}"]
        lines += [f"  {_format_change(row)}" for row in rows]
    if difference.files:
        lines += ["", f"files: {_count_changes(difference.files)}"]
        folders = difference.folders
        for folder in folders[:SHOWN]:
            counts = f"+{folder.added} -{folder.removed} ~{folder.changed}"
            lines.append(f"  {signed(folder.growth):>9}  {folder.folder} ({counts})")
        if len(folders) > SHOWN:
            lines.append(f"  and {len(folders) - SHOWN} more folders")
        lines += ["", "largest changes"]
        largest = sorted(difference.files, key=_get_growth_order)
        lines += [f"  {_format_sizes(file)}  {file.path}" for file in largest[:SHOWN]]
    if difference.layers:
        lines += ["", "layers"]
        lines += [f"  {_format_sizes(layer)}  {layer.path[:100]}" for layer in difference.layers]
    if len(lines) == 2:  # only the head
        lines += ["", "no differences"]
    return "\n".join(lines) + "\n"


def _get_growth_order(file: FileChange) -> tuple[int, str]:
    """Return the sort key that puts the largest growth or loss first, then the path."""
    growth = (file.after or 0) - (file.before or 0)
    return -abs(growth), file.path


def _format_image(side: Side) -> str:
    """Return the reference, the short identifier and the size of an image on one line."""
    return f"{side.reference} ({side.identifier[7:19]}, {megabytes(side.size)})"


def _list_tables_with_changes(difference: ImageDifference) -> list[tuple[str, tuple[Change, ...]]]:
    """Return the title and the changes of each table that has any: ``("labels", changes)``."""
    tables = [
        ("components", difference.components),
        ("Python packages", difference.python),
        ("Debian packages", difference.packages),
        ("start", difference.settings),
        ("environment", difference.environment),
        ("labels", difference.labels),
    ]
    return [(title, rows) for title, rows in tables if rows]


def _count_changes(rows: Sequence[Change] | Sequence[FileChange]) -> str:
    """Return the numbers of changes as words: ``3 added, 1 changed``."""
    counts = Counter(map(_classify_change, rows))
    kinds = [kind for kind in ("added", "removed", "changed") if counts[kind]]
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds)


def _classify_change(row: Change | FileChange) -> str:
    """Return ``added``, ``removed`` or ``changed``."""
    if row.before is None:
        return "added"
    if row.after is None:
        return "removed"
    return "changed"


def _format_change(row: Change) -> str:
    """Return a change as a line: ``+ NAME NEW``, ``- NAME OLD`` or ``~ NAME OLD -> NEW``."""
    if row.before is None:
        return f"+ {row.name} {row.after}".rstrip()
    if row.after is None:
        return f"- {row.name} {row.before}".rstrip()
    return f"~ {row.name} {row.before or '(nothing)'} -> {row.after or '(nothing)'}"


def _format_sizes(row: FileChange) -> str:
    """Return both sizes of a file or layer; ``-`` on the side that lacks it."""
    before = after = "-"
    if row.before is not None:
        before = amount(row.before)
    if row.after is not None:
        after = amount(row.after)
    return f"{before:>8} -> {after:>8}"
