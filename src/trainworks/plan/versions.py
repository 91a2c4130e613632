"""Which version of what a target has: said by its row, its stack or its base image, or brought by another part."""

from __future__ import annotations

from collections.abc import Mapping

from trainworks.facts.rows import Artifact, Component, Facts, Source, TargetRow


def declared_versions(row: TargetRow, facts: Facts) -> dict[str, str]:
    """Return what is said of a target, by component: by its stack, by its base image, and by its own row before all."""
    image = facts.base_image_by_name.get(row.image)
    brought = image.provides if image else {}
    return {**facts.stack_by_name[row.stack].components, **brought, **row.versions}


def versions_of(row: TargetRow, facts: Facts) -> dict[str, str]:
    """Return the declared versions, and those of what their artifacts bring besides (``Artifact.provides``)."""
    declared = declared_versions(row, facts)
    brought: dict[str, str] = {}
    for name, version in declared.items():
        for artifact in facts.artifacts_by_name.get(name, ()):
            if artifact.version == version:
                brought |= artifact.provides
    return {**brought, **declared}


def components_of(row: TargetRow, facts: Facts) -> Mapping[str, Component]:
    """Return the components that a target can have, by name, in the order of their layers.

    With vendor sources, and for a component that says so (``by_row``), one without a version is not the target's: its
    row or stack would name one.
    """
    versions = versions_of(row, facts)
    return {
        name: component
        for name, component in facts.fitting_components(row).items()
        if component.required or not (component.by_row or component.sources == ("vendor",)) or name in versions
    }


def artifact_rows(component: Component, version: str, sources: Source, facts: Facts) -> tuple[Artifact, ...]:
    """Return the rows of what a component of this version downloads by itself.

    With packages only a component that says so does: others of the same name are the distribution's or the index's.
    """
    if sources == "packages" and not component.artifact:
        return ()
    return tuple(row for row in facts.artifacts_by_name.get(component.name, ()) if row.version == version)
