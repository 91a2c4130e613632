"""A row of the matrix with everything that its names stand for: resolved once,
where planning begins.
"""

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
    """What planning asks of a target.

    Attributes:
        row: Its row.
        name: Its name, also that of its lock.
        base: Its operating system.
        cell: Its CUDA cell.
        python: Its Python, ``MAJOR.MINOR``.
        sources: Where its parts come from: those of its stack.
        image: The base image that its row names, None for the operating system's own.
        builder_image: The image of its build stages, None where that is the base image.
        declared: Versions by component: of its stack, of its base image, and of
            its row, which wins.
        versions: The declared versions, and those that their artifacts bring besides
            (``Artifact.provides``).
        fitting: The components for its framework, sources, cell and base, by
            name, in the order of their layers.
        components: Those of them that it can have: of some only with a version
            (``_needs_version``).
        lock: The files of its lock, None where it has none.
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
    """Return what the names in a row stand for."""
    base, cell, stack = (
        facts.base_by_name[row.base],
        facts.cuda_by_name[row.cuda],
        facts.stack_by_name[row.stack],
    )
    image = facts.base_image_by_name.get(row.image)
    declared = {**stack.components, **(image.provides if image else {}), **row.versions}
    versions = {LAUNCHER: facts.launcher_version, **_brought(declared, facts), **declared}
    fitting = {
        each.name: each
        for each in facts.components
        if each.fits(row.framework, stack.sources, cell, row.base)
    }
    name = facts.name_of(row)
    lock = facts.locks.get(name)
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
        components={
            name: component
            for name, component in fitting.items()
            if component.required or not _needs_version(component) or name in versions
        },
        lock=lock.packages if lock else None,
    )


def _brought(declared: Mapping[str, str], facts: Facts) -> dict[str, str]:
    """Return the versions of what the artifacts of declared components bring besides themselves."""
    brought: dict[str, str] = {}
    for name, version in declared.items():
        for artifact in facts.artifacts_by_name.get(name, ()):
            if artifact.version == version:
                brought |= artifact.provides
    return brought


def _needs_version(component: Component) -> bool:
    """Return whether a target has a component only where its row or stack names a version.

    That is so for a component of vendor sources alone, and for one with ``by_row``.
    """
    return bool(component.by_row) or component.sources == ("vendor",)


def artifact_rows(
    component: Component, target: TargetContext, facts: Facts
) -> tuple[Artifact, ...]:
    """Return the rows of what a component downloads by itself, in the version that the target has.

    With packages only a component with ``artifact`` does: others come from the
    distribution or the package index.
    """
    if target.sources == "packages" and not component.artifact:
        return ()
    version = target.versions.get(component.name, "")
    return tuple(
        row for row in facts.artifacts_by_name.get(component.name, ()) if row.version == version
    )
