"""Which versions and downloads the parts of a target are, and whether they go
together: known before all else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainworks.facts.ranges import Properties, Value
from trainworks.facts.rows import Artifact, Component, Facts
from trainworks.plan.compatibility import Conflict, all_hold, conflicts, describe
from trainworks.plan.target import TargetContext, artifact_rows


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a target.

    Attributes:
        versions: What has which version, by component.
        properties: What rules, artifacts and fabric variables can ask about it.
        artifacts: What each component downloads: its own artifact first, then what that brings
            together with itself.
        unfit: Components for which no artifact row fits, or more than one; each
            with what its rows require.
        broken: Rules that do not hold.
        advice: The same of rules that only advise, without those that a recipe answers.
    """

    versions: Mapping[str, str]
    properties: Properties
    artifacts: Mapping[str, tuple[Artifact, ...]]
    unfit: tuple[str, ...]
    broken: tuple[Conflict, ...]
    advice: tuple[Conflict, ...]


def parts_of(target: TargetContext, components: Sequence[Component], facts: Facts) -> Parts:
    """Return the parts of a target with these components, and every way in
    which they do not go together.
    """
    properties = properties_of(target, components)
    artifacts, unfit = _choose_artifacts(target, components, properties, facts)
    properties |= properties_of_artifacts(artifacts)
    unknown = {f"{name}.flags" for name in unfit}
    unknown |= {
        other
        for name in unfit
        for each in facts.artifacts_by_name.get(name, ())
        for other in each.together
    }
    # What follows from a wrong artifact is not a second problem.
    found = conflicts(
        (rule for rule in facts.rules if unknown.isdisjoint({*rule.when, *rule.require})),
        properties,
    )
    advising = {rule.name for rule in facts.rules if rule.severity == "advise"}
    answered = {
        rule for component in components for rule in facts.recipes[component.recipe_name].answers
    }
    return Parts(
        versions=target.versions,
        properties=properties,
        artifacts=artifacts,
        unfit=tuple(problem for problems in unfit.values() for problem in problems),
        broken=tuple(conflict for conflict in found if conflict.rule not in advising),
        advice=tuple(conflict for conflict in found if conflict.rule in advising - answered),
    )


def properties_of(target: TargetContext, components: Iterable[Component]) -> dict[str, Value]:
    """Return what rules and artifacts can ask about a target with these components
    (``facts.ranges.PROPERTIES``).
    """
    row, base, cell, versions = target.row, target.base, target.cell, target.versions
    image, builder_image = target.image, target.builder_image
    properties: dict[str, Value] = {
        component.name: versions[component.name]
        for component in components
        if component.name in versions
    }
    for name, value in tuple(properties.items()):
        if isinstance(value, str) and "+" in value:
            properties[f"{name}.build"] = value.partition("+")[2]
    properties |= {
        row.framework: row.version,
        "framework": row.framework,
        "cell": cell.name,
        "python": target.python,
        "base": base.name,
        "base.python": base.python,
        "base.pythons": frozenset({base.python, *base.pythons}),
        "glibc": base.glibc,
        "sources": target.sources,
    }
    if image:
        properties["image.base"] = image.base
    if builder_image:
        properties["builder.base"] = builder_image.base
        if "cuda" in builder_image.provides:
            properties["builder.cuda"] = builder_image.provides["cuda"]
    if cell.version:
        properties |= {
            "cell.cuda": cell.version,
            "cuda": versions.get("cuda", cell.version),
            "driver": cell.minimum_driver,
        }
        if "cudnn" in versions:
            properties["cudnn"] = versions["cudnn"]
        if cell.architectures:
            properties["architectures"] = frozenset(cell.architectures)
    return properties


def properties_of_artifacts(artifacts: Mapping[str, tuple[Artifact, ...]]) -> dict[str, Value]:
    """Return what can be asked about the artifacts that components download:
    their flags, and what comes together.
    """
    return {
        **{f"{name}.flags": frozenset(own.flags) for name, (own, *_) in artifacts.items()},
        **{
            brought.name: brought.version for _, *others in artifacts.values() for brought in others
        },
    }


def _choose_artifacts(
    target: TargetContext, components: Sequence[Component], properties: Properties, facts: Facts
) -> tuple[dict[str, tuple[Artifact, ...]], dict[str, list[str]]]:
    """Return what each component downloads, and the problems of each component for which not
    exactly one row fits.

    A component whose version is not declared but brought by another part downloads nothing.
    """
    found: dict[str, tuple[Artifact, ...]] = {}
    problems: dict[str, list[str]] = {}
    for component in components:
        name = component.name
        if name in target.versions and name not in target.declared:
            continue
        version = target.versions.get(name, "")
        rows = artifact_rows(component, target, facts)
        fitting = [each for each in rows if all_hold(each.requires, properties)]
        if len(fitting) == 1:
            own = fitting[0]
            brought = [
                each
                for other, wanted in own.together.items()
                for each in facts.artifacts_by_name[other]
                if each.version == wanted
            ]
            found[name] = tuple(_with_lock(each, facts) for each in (own, *brought))
        elif fitting:
            problems[name] = [f"{name} {version}: {len(fitting)} rows of images/artifacts.toml fit"]
        elif rows:
            problems[name] = [
                f"{name} {version}: requires "
                + ", ".join(f"{other} {allowed}" for other, allowed in each.requires.items())
                + f"; this target has {describe(each.requires, properties)} (source: {each.source})"
                for each in rows
            ]
        elif component.artifact:
            known = (
                ", ".join(each.version for each in facts.artifacts_by_name.get(name, ())) or "none"
            )
            problems[name] = [
                (
                    f"{name} {version or 'without a version'}: no row in images/artifacts.toml"
                    f" (available: {known})"
                )
            ]
    return found, problems


def _with_lock(artifact: Artifact, facts: Facts) -> Artifact:
    """Return an artifact with the hash and size that the lock knows, where its own row has none."""
    locked = facts.locked_artifact_by_url.get(artifact.url)
    if locked is None:
        return artifact
    return replace(
        artifact, sha256=artifact.sha256 or locked.sha256, size=artifact.size or locked.size
    )
