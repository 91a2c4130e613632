"""Read an image for the reports: its files with their owners, packages,
manifest and configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainworks.engine import image_in
from trainworks.engine.protocol import BuiltImage, Engine, HistoryEntry
from trainworks.facts.rows import Facts
from trainworks.imagetest.probe.files import pattern_of
from trainworks.imagetest.probe_request import take_contents
from trainworks.terminal.progress import DISPLAY


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """A file or link of an image.

    Attributes:
        path: Absolute.
        size: In bytes; 0 for a second hard link.
        mode: Permission bits.
        content: ``-> TARGET`` of a link, or the SHA-256 of a file; ``""`` if files were not hashed.
        owner: ``package NAME``, ``python NAME``, or ``""``.
    """

    path: str
    size: int
    mode: int
    content: str = ""
    owner: str = ""


@dataclass(frozen=True, kw_only=True)
class InspectedImage:
    """The contents of an image, as reports read them.

    Attributes:
        image: Its configuration.
        history: Its layers, lowest first.
        files: Its files, by path.
        packages: Its Debian packages, name to version.
        python: Its Python distributions, name to version (all versions, if
            several environments have one).
        name: The name of its target; ``""`` if trainworks did not build the image.
        components: The components of its manifest, name to version.
    """

    image: BuiltImage
    history: tuple[HistoryEntry, ...]
    files: Mapping[str, ImageFile]
    packages: Mapping[str, str]
    python: Mapping[str, str]
    name: str
    components: Mapping[str, str]


ENGINE_FILES = "container-engine"
"""The row of ``images/generated-files.toml`` with the files that an engine adds
to every container.
"""


def inspect_image(
    engine: Engine, reference: str, facts: Facts, *, digests: bool = False
) -> InspectedImage:
    """Read an image of the engine's store.

    Args:
        digests: Whether to read and hash every file.

    Raises:
        UnknownNameError: The engine has no such image.
        ImageTestError: The image has no Python to run the inventory with.
    """
    image = image_in(engine, reference)
    with (
        DISPLAY.task("reading", log=False) as task,
        engine.container(image.reference, isolated="asked") as container,
    ):
        task.note = reference
        contents = take_contents(container, digests=digests)
    return make_inspected_image(image, engine.history(reference), contents, facts)


def make_inspected_image(
    image: BuiltImage,
    history: tuple[HistoryEntry, ...],
    contents: Mapping[str, Any],
    facts: Facts,
) -> InspectedImage:
    """Join the parts of an image that the engine and the inventory have read. Pure.

    Args:
        image: The image's configuration.
        history: Its layers, lowest first.
        contents: The inventory's answer: ``manifest``, ``python``, ``packages`` and ``files``.
        facts: The files that an engine adds to every container.
    """
    name, components = _parse_manifest(contents["manifest"])
    python: dict[str, str] = {}
    for distribution, version in contents["python"]:
        if distribution in python:
            python[distribution] += f", {version}"
        else:
            python[distribution] = version

    # The inventory runs in a container, so it also lists files that the image does not have.
    engine_paths: list[str] = []
    for row in facts.generated_files:
        if row.name == ENGINE_FILES:
            engine_paths += row.paths
    engine_files = pattern_of(engine_paths)
    files = {}
    for path, size, mode, content, owner in contents["files"]:
        if not engine_files.fullmatch(path):
            file = ImageFile(path=path, size=size, mode=mode, content=content, owner=owner)
            files[path] = file
    return InspectedImage(
        image=image,
        history=history,
        files=files,
        packages=dict(contents["packages"]),
        python=python,
        name=name,
        components=components,
    )


def _parse_manifest(text: str) -> tuple[str, dict[str, str]]:
    """Return the target's name and the components' versions of an image's manifest.

    For example ``("pytorch-...", {"torch": "2.6"})``; ``("", {})`` for a malformed manifest.

    Args:
        text: The manifest's JSON, see ``render.manifest``; ``""`` if the image has no manifest.
    """
    try:
        manifest = json.loads(text or "{}")
        versions = {}
        for name, row in manifest.get("components", {}).items():
            versions[str(name)] = str(row["version"])
        return str(manifest.get("name", "")), versions
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return "", {}
