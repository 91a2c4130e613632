"""Finds changes of an image since its build, without the build itself.

The image's label has the digests of its layers, and a digest decides the content of its layer.
Additional layers change or hide files of the built image. The bytes of layers are compared with
their digests, too.
"""

from __future__ import annotations

import posixpath
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainworks.engine.archive import stored_layers
from trainworks.engine.entries import OPAQUE, WHITEOUT, Entry
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.errors import EngineError
from trainworks.imagetest.results import CheckResult, folded
from trainworks.render.dockerfile import LAYERS_LABEL

DIGITS = 16
"""Digits of a layer's digest in the label: they tell layers apart, and are no signature."""


def layers_of(image: BuiltImage) -> str:
    """Return the text of the label: the first digits of each layer's digest, lowest layer first."""
    return " ".join(name.rpartition(":")[2][:DIGITS] for name in image.layers)


def compare_layers(image: BuiltImage, engine: Engine) -> tuple[CheckResult, ...]:
    """Compare the layers of an image with their digests and with the layers of its label.

    Returns:
        The result for the bytes, and, if the image has the label, the result for the number and
        order of the layers, with a line for each changed file.

    Raises:
        EngineError, EngineUnavailableError: The engine cannot read the image.
    """
    stored, damage = _read_layers(image, engine)
    results = [_check_bytes(image, engine, stored, damage)]
    # Without the label the image is another maker's, or is not built to its end.
    if image.labels.get(LAYERS_LABEL):
        results.append(_check_layers(image, stored))
    return tuple(results)


def _read_layers(image: BuiltImage, engine: Engine) -> tuple[dict[str, Mapping[str, Entry]], str]:
    """Read every layer of an image from the engine.

    Returns:
        The entries of each readable layer, by the digest of its bytes; and the error of a damaged
        image in a sentence, ``""`` without one.

    Raises:
        EngineError: The engine failed after it had sent all layers.
    """
    stored: dict[str, Mapping[str, Entry]] = {}
    damage = ""
    try:
        with engine.archive(image.reference) as stream:
            try:
                for layer in stored_layers(stream):
                    stored[layer.digest] = layer.entries
            except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
                # The engine's own error, which follows, has more details than a truncated archive.
                damage = f"the engine's copy of the image cannot be read: {error}"
    except EngineError as error:
        # With every layer complete, the error is not about the archive.
        if all(name in stored for name in image.layers):
            raise
        damage = error.message
    return stored, damage


def _check_bytes(
    image: BuiltImage, engine: Engine, stored: Mapping[str, Mapping[str, Entry]], damage: str
) -> CheckResult:
    """Compare each layer with its digest: a bad disk changes an image, but not its name.

    Args:
        image: The image.
        engine: The engine that has it.
        stored: The entries of the readable layers, by the digest of their bytes.
        damage: The error of reading; ``""`` without one.
    """
    lines = [damage] if damage else []
    for number, name in enumerate(image.layers, start=1):
        if name not in stored and not damage:
            lines.append(
                f"layer {number} of {len(image.layers)} has"
                f" other bytes than its digest says, {name}"
            )
    if damage:
        # A full disk and a damaged store differ only in the engine's words, in the line above.
        lines.append(
            f"the disk of {engine.name} is full, or its store is damaged: "
            "if it is not full, remove the image, and pull or build it again"
        )
    elif lines:
        lines.append(
            f"the store of {engine.name} is damaged: remove the image, and pull or build it again"
        )
    return CheckResult(
        component="content",
        title=f"the bytes of its {len(image.layers)} layers are those of their digests",
        passed=not lines,
        detail="\n".join(lines),
        seconds=0,
    )


def _check_layers(image: BuiltImage, stored: Mapping[str, Mapping[str, Entry]]) -> CheckResult:
    """Compare the layers with those in the label.

    The check passes only for the same layers in the same number. The lines name the changed files
    of additional layers.
    """
    built = image.labels[LAYERS_LABEL].split()
    actual = layers_of(image).split()
    lines = []
    if len(actual) != len(built):
        lines.append(f"the image has {len(actual)} layers, and was built with {len(built)}")
    has_other_layers = False
    for number, name in enumerate(built, start=1):
        # A slice: the image may have fewer layers.
        if actual[number - 1 : number] != [name]:
            has_other_layers = True
            lines.append(f"layer {number} of {len(built)} is not the one that was built")
    if not has_other_layers:
        lines += _on_top(image, stored, len(built))
    return CheckResult(
        component="content",
        title=f"its {len(built)} layers are those that were built, and no others",
        passed=actual == built,
        detail="\n".join(lines),
        seconds=0,
    )


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A path that a layer changes.

    Attributes:
        path: The path.
        how: The change, such as ``is new``.
        only_time: Whether only the time of a folder changes.
    """

    path: str
    how: str
    only_time: bool = False


def _on_top(
    image: BuiltImage, stored: Mapping[str, Mapping[str, Entry]], built: int
) -> Iterator[str]:
    """Yield the changes of the layers on top of the built ones: at least a line for each layer.

    Args:
        image: The image.
        stored: The entries of the readable layers, by their digests.
        built: The number of layers of the build.
    """
    # The paths of all layers below, each as the highest of them has it.
    paths: dict[str, Entry] = {}
    # The first layer on top has the number 1, and those of the build have 0 and less.
    for number, name in enumerate(image.layers, start=1 - built):
        entries = stored.get(name)
        if number > 0:
            if entries is None:
                yield f"layer {number} on top, {name}, cannot be read"
            else:
                yield from _change_lines(list(_changes(entries, paths)), number)
        paths.update(entries or {})


def _change_lines(changes: list[_Change], number: int) -> Iterator[str]:
    """Yield the lines for the changes of a layer, equal changes together.

    A new file also sets the time of its folder: such changes are left out, unless the layer has no
    others.
    """
    lasting_changes = [change for change in changes if not change.only_time]
    if lasting_changes:
        changes = lasting_changes
    if not changes:
        yield (
            f"layer {number} on top changes no file:"
            " it has the folders of the image once more, or nothing"
        )
    paths_by_change: dict[str, list[str]] = {}
    for change in changes:
        paths_by_change.setdefault(change.how, []).append(change.path)
    for how, paths in paths_by_change.items():
        for path in folded(paths):
            yield f"{path} {how} (layer {number} on top)"


def _changes(entries: Mapping[str, Entry], below: Mapping[str, Entry]) -> Iterator[_Change]:
    """Yield a layer's changes of the paths of the layers below.

    An unchanged folder is left out.
    """
    for path, entry in sorted(entries.items()):
        folder, name = posixpath.split(path)
        before = below.get(path)
        if name == OPAQUE:
            yield _Change(path=folder, how="has nothing left of what was in it")
            continue
        if name.startswith(WHITEOUT):
            yield _Change(path=posixpath.join(folder, name[len(WHITEOUT) :]), how="is removed")
            continue
        if before is None:
            yield _Change(path=path, how="is new")
            continue
        differences = entry.differences(before)
        if differences:
            only_time = entry.type == "folder" and differences == ["time"]
            how = _describe_differences(entry, before, differences)
            yield _Change(path=path, how=how, only_time=only_time)
        elif entry.type != "folder":
            yield _Change(path=path, how="is written again")


def _describe_differences(entry: Entry, before: Entry, differences: list[str]) -> str:
    """Return the differences of a path in words: ``has mode 0755, was 0644``.

    Args:
        entry: The path in the layer.
        before: The path in the layers below.
        differences: The names of the differences, as of ``Entry.differences``; at least one.
    """
    if "type" in differences:
        # A link in place of a file: mode, size and hash cannot be compared.
        differences = [name for name in differences if name in ("type", "target")]
    elif "time" in differences and len(differences) > 1:
        # Every changed file has another time.
        differences = [name for name in differences if name != "time"]
    elif entry.type != "folder" and differences == ["time"]:
        return "is written again"
    new, old = entry.words(), before.words()
    parts = []
    for name in differences:
        if new[name] == old[name]:
            parts.append(f"other {name} {new[name]}")
        else:
            parts.append(f"{name} {new[name]}, was {old[name]}")
    return f"has {', '.join(parts)}"
