"""Resolves the names in a row of the matrix: base, CUDA cell, stack, images, components, lock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainworks.facts.rows import (
    Artifact,
    Base,
    BaseImage,
    Component,
    Cuda,
    Facts,
    LockedPackage,
    Source,
    TargetRow,
)

LAUNCHER = "launcher"
"""The component that is this repository's launcher: its version is its own."""

OWN_PYTHON = "cpython"
"""The component that compiles a Python which the base does not have."""


@dataclass(frozen=True, kw_only=True)
class TargetContext:
    """A target with everything that the names in its row stand for.

    Attributes:
        row: Its row.
        name: Its name, also that of its lock.
        base: Its operating system.
        cell: Its CUDA cell.
        python: Its Python, ``MAJOR.MINOR``.
        sources: The sources of its stack: ``packages`` or ``vendor``.
        image: The base image that its row names; ``None`` for the operating system's own.
        builder_image: The image of its build stages; ``None`` if that is the base image.
        declared: Versions by component: of its stack, of its base image, and of
            its row, which wins.
        versions: The declared versions, and those that their artifacts bring besides
            (``Artifact.provides``).
        fitting: The components for its framework, sources, cell and base, by
            name, in the order of their layers.
        components: The fitting components that the target can have; some only if its row or stack
            names a version (``_needs_version``).
        lock: The files of its lock; ``None`` for a target without a lock.
    """

    row: TargetRow
    name: str
    base: Base
    cell: Cuda
    python: str
    sources: Source
    image: BaseImage | None
    builder_image: BaseImage | None
    declared: Mapping[str, str]
    versions: Mapping[str, str]
    fitting: Mapping[str, Component]
    components: Mapping[str, Component]
    lock: tuple[LockedPackage, ...] | None


def context_of(row: TargetRow, facts: Facts) -> TargetContext:
    """Resolve the names in a row."""
    name = facts.name_of(row)
    base = facts.base_by_name[row.base]
    cell = facts.cuda_by_name[row.cuda]
    stack = facts.stack_by_name[row.stack]
    image = facts.base_image_by_name.get(row.image)

    # The row wins over the base image, and the image over the stack.
    declared = dict(stack.components)
    if image is not None:
        declared.update(image.provides)
    declared.update(row.versions)
    provided = _collect_provided_versions(declared, facts)
    versions = {LAUNCHER: facts.launcher_version, **provided, **declared}

    fitting = {}
    components = {}
    for component in facts.components:
        if not component.fits(row.framework, stack.sources, cell, row.base):
            continue
        fitting[component.name] = component
        has_version = component.name in versions or not _needs_version(component)
        if component.required or has_version:
            components[component.name] = component

    files: tuple[LockedPackage, ...] | None = None
    lock = facts.locks.get(name)
    if lock is not None:
        files = lock.packages
    return TargetContext(
        row=row,
        name=name,
        base=base,
        cell=cell,
        python=facts.python_of(row),
        sources=stack.sources,
        image=image,
        builder_image=facts.base_image_by_name.get(row.builder_image),
        declared=declared,
        versions=versions,
        fitting=fitting,
        components=components,
        lock=files,
    )


def _collect_provided_versions(declared: Mapping[str, str], facts: Facts) -> dict[str, str]:
    """Return the versions that the artifacts of declared components bring besides themselves.

    For example ``{"libfabric": "1.14"}`` for EFA's installer (``Artifact.provides``).
    """
    versions: dict[str, str] = {}
    for name, version in declared.items():
        for artifact in facts.artifacts_by_name.get(name, ()):
            if artifact.version == version:
                versions.update(artifact.provides)
    return versions


def _needs_version(component: Component) -> bool:
    """Return whether a target has a component only if its row or stack names a version.

    Components of vendor sources alone need one, and those with ``by_row``.
    """
    return bool(component.by_row) or component.sources == ("vendor",)


def find_artifact_rows(
    component: Component, target: TargetContext, facts: Facts
) -> tuple[Artifact, ...]:
    """Return the artifacts of a component in the version that the target has."""
    # The other components of packages come from the distribution or the package index.
    if target.sources == "packages" and not component.artifact:
        return ()
    version = target.versions.get(component.name, "")
    rows = facts.artifacts_by_name.get(component.name, ())
    return tuple(row for row in rows if row.version == version)
