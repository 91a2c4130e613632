"""The versions and downloads of a target's parts, and the rules that they break."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainworks.facts.ranges import Properties, Value
from trainworks.facts.rows import Artifact, Component, Facts
from trainworks.plan.compatibility import Conflict, all_hold, describe_properties, find_conflicts
from trainworks.plan.target import TargetContext, find_artifact_rows


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a target.

    Attributes:
        versions: The version of each component.
        properties: Properties for the conditions of rules, artifacts and fabric variables:
            ``{"nccl": "2.27", "efa-installer.flags": frozenset({"-y", "-g"})}``.
        artifacts: The downloads of each component: its own artifact first, then those that come
            with it.
        unfit: A line for each component for which no artifact row fits, or more than one.
        broken: Rules that do not hold.
        advice: Rules that only advise and do not hold, without those that a recipe answers.
    """

    versions: Mapping[str, str]
    properties: Properties
    artifacts: Mapping[str, tuple[Artifact, ...]]
    unfit: tuple[str, ...]
    broken: tuple[Conflict, ...]
    advice: tuple[Conflict, ...]


def choose_parts(target: TargetContext, components: Sequence[Component], facts: Facts) -> Parts:
    """Return the parts of a target with these components, and every broken rule."""
    properties = collect_properties(target, components)
    artifacts, unfit = _choose_artifacts(target, components, properties, facts)
    properties |= collect_artifact_properties(artifacts)

    # Without a fitting artifact its flags and companions are not known: rules about these would
    # report a consequence as a second problem.
    unknown = set()
    problems: list[str] = []
    for name, component_problems in unfit.items():
        problems += component_problems
        unknown.add(f"{name}.flags")
        for artifact in facts.artifacts_by_name.get(name, ()):
            unknown.update(artifact.together)
    rules = []
    for rule in facts.rules:
        if unknown.isdisjoint({*rule.when, *rule.require}):
            rules.append(rule)

    advising = {rule.name for rule in facts.rules if rule.severity == "advise"}
    answered: set[str] = set()
    for component in components:
        answered.update(facts.recipes[component.recipe_name].answers)
    broken = []
    advice = []
    for conflict in find_conflicts(rules, properties):
        if conflict.rule not in advising:
            broken.append(conflict)
        elif conflict.rule not in answered:
            advice.append(conflict)
    return Parts(
        versions=target.versions,
        properties=properties,
        artifacts=artifacts,
        unfit=tuple(problems),
        broken=tuple(broken),
        advice=tuple(advice),
    )


def collect_properties(target: TargetContext, components: Iterable[Component]) -> dict[str, Value]:
    """Return the properties of a target with these components, for rules and artifacts
    (``facts.ranges.PROPERTIES``).
    """
    row, base, cell, versions = target.row, target.base, target.cell, target.versions
    properties: dict[str, Value] = {}
    for component in components:
        version = versions.get(component.name)
        if version is None:
            continue
        properties[component.name] = version
        # A build of its own, such as ``cu130`` of ``2.9+cu130``.
        if "+" in version:
            properties[f"{component.name}.build"] = version.partition("+")[2]
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
    if target.image:
        properties["image.base"] = target.image.base
    builder_image = target.builder_image
    if builder_image:
        properties["builder.base"] = builder_image.base
        if "cuda" in builder_image.provides:
            properties["builder.cuda"] = builder_image.provides["cuda"]
    if cell.version:
        properties["cell.cuda"] = cell.version
        properties["cuda"] = versions.get("cuda", cell.version)
        properties["driver"] = cell.minimum_driver
        if "cudnn" in versions:
            properties["cudnn"] = versions["cudnn"]
        if cell.architectures:
            properties["architectures"] = frozenset(cell.architectures)
    return properties


def collect_artifact_properties(artifacts: Mapping[str, tuple[Artifact, ...]]) -> dict[str, Value]:
    """Return the flags of each component's own artifact, and the versions of its companions.

    For example ``{"efa-installer.flags": frozenset({"-y", "-g"}), "libfabric-headers": "2.1"}``.
    """
    flags: dict[str, Value] = {}
    versions: dict[str, Value] = {}
    for name, (own, *others) in artifacts.items():
        flags[f"{name}.flags"] = frozenset(own.flags)
        for other in others:
            versions[other.name] = other.version
    return {**flags, **versions}


def _choose_artifacts(
    target: TargetContext, components: Sequence[Component], properties: Properties, facts: Facts
) -> tuple[dict[str, tuple[Artifact, ...]], dict[str, list[str]]]:
    """Return the artifacts and the problems of components, both by the component's name.

    Exactly one row of ``images/artifacts.toml`` must fit a component; else it has problems.
    """
    artifacts: dict[str, tuple[Artifact, ...]] = {}
    problems: dict[str, list[str]] = {}
    for component in components:
        name = component.name
        # The artifact of another component brings this one: there is nothing to download.
        if name in target.versions and name not in target.declared:
            continue
        rows = find_artifact_rows(component, target, facts)
        fitting = [row for row in rows if all_hold(row.requires, properties)]
        if len(fitting) == 1:
            artifacts[name] = _add_companions(fitting[0], facts)
            continue
        version = target.versions.get(name, "")
        if fitting:
            problems[name] = [f"{name} {version}: {len(fitting)} rows of images/artifacts.toml fit"]
        elif rows:
            problems[name] = [_explain_unfit_row(row, version, properties) for row in rows]
        elif component.artifact:
            versions = [row.version for row in facts.artifacts_by_name.get(name, ())]
            available = ", ".join(versions) or "none"
            label = f"{name} {version or 'without a version'}"
            problems[name] = [f"{label}: no row in images/artifacts.toml (available: {available})"]
    return artifacts, problems


def _add_companions(own: Artifact, facts: Facts) -> tuple[Artifact, ...]:
    """Return a component's own artifact and its companions (``together``), with the lock's hashes.

    For example ``together = {"libfabric-headers": "2.1"}``.
    """
    artifacts = [own]
    for name, version in own.together.items():
        for row in facts.artifacts_by_name[name]:
            if row.version == version:
                artifacts.append(row)
    return tuple(_add_locked_hash(artifact, facts) for artifact in artifacts)


def _explain_unfit_row(row: Artifact, version: str, properties: Properties) -> str:
    """Return the reason why an artifact does not fit a target."""
    requirements = [f"{other} {allowed}" for other, allowed in row.requires.items()]
    required = ", ".join(requirements)
    present = describe_properties(row.requires, properties)
    return (
        f"{row.name} {version}: requires {required};"
        f" this target has {present} (source: {row.source})"
    )


def _add_locked_hash(artifact: Artifact, facts: Facts) -> Artifact:
    """Return an artifact with the lock's hash and size, if its row has none."""
    locked = facts.locked_artifact_by_url.get(artifact.url)
    if locked is None:
        return artifact
    # A published hash or size counts before the recorded one.
    sha256 = artifact.sha256 or locked.sha256
    size = artifact.size or locked.size
    return replace(artifact, sha256=sha256, size=size)
