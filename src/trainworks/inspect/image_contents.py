"""Looks into images for the reports: every file with its owner, the packages, the manifest, and the configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainworks.engine.protocol import BuiltImage, Engine, HistoryEntry
from trainworks.errors import UnknownNameError
from trainworks.facts.rows import Facts
from trainworks.imagetest.inventory import pattern_of
from trainworks.imagetest.questions import take_contents
from trainworks.inspect.listing import sorted_rows
from trainworks.plan.model import ImagePlan
from trainworks.plan.names import unknown
from trainworks.plan.resolve import plan_row
from trainworks.terminal.progress import DISPLAY


@dataclass(frozen=True, kw_only=True)
class File:
    """A file or link of an image.

    Attributes:
        path: Absolute.
        size: Its bytes; a second hard link has none.
        mode: Permission bits.
        what: ``-> TARGET`` of a link; the SHA-256 of a file where it was asked for.
        owner: ``package NAME``, ``python NAME``, or ``""``.
    """

    path: str
    size: int
    mode: int
    what: str = ""
    owner: str = ""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """An image, as far as reports want to know it.

    Attributes:
        image: Its configuration.
        history: Its layers, lowest first.
        files: Its files, by path.
        packages: Its Debian packages, name to version.
        python: Its Python distributions, name to version (all of them, where several environments have one).
        name: The target that it was built as; ``""`` where it is none of ours.
        components: The components of its manifest, name to version.
    """

    image: BuiltImage
    history: tuple[HistoryEntry, ...]
    files: Mapping[str, File]
    packages: Mapping[str, str]
    python: Mapping[str, str]
    name: str
    components: Mapping[str, str]


ENGINE_FILES = "container-engine"
"""The row of ``images/generated-files.toml`` with what every container gets from its engine, and no image has."""


def read_contents(engine: Engine, reference: str, facts: Facts, *, digests: bool = False) -> Contents:
    """Look into an image of the engine's store.

    Args:
        engine: Which has it.
        reference: Its name.
        facts: Which files are the engine's.
        digests: Whether what is in its files is to be compared: all are read then.

    Raises:
        UnknownNameError: The engine has no such image.
        ImageTestError: There is no Python in it that could tell.
    """
    image = engine.inspect(reference)
    if image is None:
        raise UnknownNameError(
            f"{engine.name} has no image {reference}",
            hint=f"`{engine.name} images` lists what there is; one of a registry has to be pulled first",
        )
    with DISPLAY.task("reading", log=False) as task, engine.container(image.reference) as container:
        task.note = reference
        found = take_contents(container, digests=digests)
    manifest = json.loads(found["manifest"] or "{}")
    python: dict[str, str] = {}
    for name, version in found["python"]:
        python[name] = f"{python[name]}, {version}" if name in python else version
    alien = pattern_of(path for row in facts.generated_files if row.name == ENGINE_FILES for path in row.paths)
    files = [
        File(path=path, size=size, mode=mode, what=what, owner=owner)
        for path, size, mode, what, owner in found["files"]
        if not alien.fullmatch(path)
    ]
    return Contents(
        image=image,
        history=engine.history(reference),
        files={file.path: file for file in files},
        packages=dict(found["packages"]),
        python=python,
        name=str(manifest.get("name", "")),
        components={name: str(row["version"]) for name, row in manifest.get("components", {}).items()},
    )


def plan_of_target(name: str, facts: Facts) -> ImagePlan | None:
    """Return the plan of a target with its default components; ``None`` where no target has this name.

    Raises:
        LockError: The target has no lock, or the lock does not fit the row.
        CompatibilityError: Its parts do not go together.
    """
    for row in sorted_rows(facts):
        if facts.name_of(row) == name:
            return plan_row(row, facts)
    return None


def plans_of_targets(names: Sequence[str], facts: Facts) -> list[ImagePlan]:
    """Return the plans of targets.

    Raises:
        UnknownNameError: No target has one of the names.
        LockError, CompatibilityError: See ``plan_of_target``.
    """
    plans = {name: plan_of_target(name, facts) for name in names}
    for name, plan in plans.items():
        if plan is None:
            raise unknown("target", name, map(facts.name_of, sorted_rows(facts)), more="`--list` shows them all")
    return [plan for plan in (plans[name] for name in names) if plan is not None]


def reference_of(name: str, facts: Facts) -> str:
    """Return the image that a person names: a target's own tag, or else what the name says."""
    plan = plan_of_target(name, facts)
    return name if plan is None else plan.tags[0]
