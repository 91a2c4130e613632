"""Checks rows against each other: unique names, names that point somewhere, recipes with a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from datetime import date
from graphlib import CycleError, TopologicalSorter

from packaging.version import Version

from trainworks.facts.field_types import FILE
from trainworks.facts.ranges import PROPERTIES, problem_of, references
from trainworks.facts.rows import TABLES, Component, Facts, TargetRow
from trainworks.facts.schema import short
from trainworks.suggestions import nearest

Malformed = Set[tuple[str, str]]
"""Kind and name of malformed rows (``Reader.malformed``)."""


def relate(facts: Facts, malformed: Malformed) -> Iterator[str]:
    """Yield problems between rows: names in two rows, names that point nowhere, recipes without a
    row.

    A problem is a sentence with its file, row and key. Names of malformed rows count as known,
    because those rows are problems already.

    Args:
        facts: All rows that are well-formed.
        malformed: The others.
    """
    known = _add_malformed(
        "component", (component.name for component in facts.components), malformed
    )
    for field, table in TABLES.items():
        names: list[str] = []
        for row in getattr(facts, field):
            names += table.names(row)
        for name in _find_repeated(names):
            yield f"images: {table.key} {name!r} is in two rows"
    yield from _check_components(facts, known, malformed)
    yield from _check_artifacts(facts)
    artifacts = _add_malformed("artifact", (row.name for row in facts.artifacts), malformed)
    yield from _check_ranges(facts, known | artifacts)
    for stack in facts.stacks:
        for name in stack.components:
            if name not in known:
                yield f"images/stacks.toml: stack {stack.name!r}: unknown component {name!r}"
    yield from _check_targets(facts, known, malformed)
    for generated in facts.generated_files:
        if generated.copy_of in generated.paths:
            yield (
                f"images/generated-files.toml: generated {generated.name!r}: "
                f"key 'copy_of': {generated.copy_of} would be compared with itself"
            )
    for end in facts.ends:
        if end.successor and Version(end.successor) <= Version(end.version):
            yield (
                f"images/end-of-patch.toml: ended {end.framework} {end.version}: "
                f"key 'successor': {end.successor} does not come after {end.version}"
            )
    suites = _find_repeated([archive.suite for archive in facts.locked_archives])
    for suite in suites:
        yield f"images/lock/archives.toml: archive {suite!r} is in two rows"
    yield from _check_dates(facts)


def _check_dates(facts: Facts) -> Iterator[str]:
    """Yield a problem for each row with a date that no calendar has."""
    for where, day in _find_dates(facts):
        if not _is_day(day):
            yield f"{where}: key 'date': {day} is not a day of the calendar"


def _find_dates(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield the place and the day of each row with a date: ``("images/...", "2026-11-21")``."""
    for built in facts.built:
        yield f"images/built.toml: built {built.target!r}", built.date
    for end in facts.ends:
        yield f"images/end-of-patch.toml: ended {end.framework} {end.version}", end.date
    for archive in facts.locked_archives:
        # Without the time of the day.
        yield f"images/lock/archives.toml: archive {archive.suite!r}", archive.date[:10]


def _add_malformed(kind: str, names: Iterable[str], malformed: Malformed) -> Set[str]:
    """Return names of rows of a kind, with those of the malformed rows of this kind."""
    malformed_names = {name for malformed_kind, name in malformed if malformed_kind == kind}
    return {*names, *malformed_names}


def _check_components(facts: Facts, known: Set[str], malformed: Malformed) -> Iterator[str]:
    """Yield problems of components and their recipes.

    Args:
        facts: All rows that are well-formed.
        known: The names of all components.
        malformed: The malformed rows.
    """
    for recipe in facts.recipes.values():
        for number, check in enumerate(recipe.checks, start=1):
            if check.beside and check.beside not in known:
                yield (
                    f"templates/components/{recipe.name}.j2: check {number}: beside unknown"
                    f" component {check.beside!r}"
                )
    advice = (rule.name for rule in facts.rules if rule.severity == "advise")
    advising = _add_malformed("rule", advice, malformed)
    for recipe in facts.recipes.values():
        for name in recipe.answers:
            if name not in advising:
                yield f"templates/components/{recipe.name}.j2: answers unknown advice {name!r}"
    circle = _circle(facts.components)
    if circle:
        path = " -> ".join(circle)
        yield f"images/components.toml: component {circle[0]!r}: builds_with in a circle: {path}"
    bases = _add_malformed("base", facts.base_by_name, malformed)
    frameworks = {target.framework for target in facts.targets}
    for row in facts.base_images:
        if row.base not in bases:
            yield (
                f"images/base-images.toml: base_image {row.name!r}:"
                f" key 'base': unknown {row.base!r}"
            )
    for component in facts.components:
        where = f"images/components.toml: component {component.name!r}"
        for need in component.needs:
            if need not in known:
                yield f"{where}: needs unknown {need!r}"
        for need in component.builds_with:
            if need not in known:
                yield f"{where}: builds_with unknown {need!r}"
        for name in component.bases:
            if name not in bases:
                yield f"{where}: key 'bases': unknown {name!r}"
        for name in component.frameworks:
            if name not in frameworks:
                yield f"{where}: key 'frameworks': unknown {name!r}"
        if _must_have_cost(component) and not component.without:
            yield (
                f"{where}: key 'without' is missing: an image can lack this component, so say"
                " what that costs"
            )
        if component.recipe_name not in facts.recipes:
            file = f"templates/components/{component.recipe_name}.j2"
            yield f"{file} is missing: the component {component.name} has a row"
    recipes = {component.recipe_name for component in facts.components}
    for name in sorted(set(facts.recipes) - recipes - known):
        yield f"templates/components/{name}.j2: no row of this name in images/components.toml"


def _must_have_cost(component: Component) -> bool:
    """Return whether a component's row has to say what an image without it costs.

    Vendors' other parts are made of some of their components, and of those that only build: these
    rows may say nothing, because the row of the part says it.
    """
    is_of_packages = "packages" in component.sources
    return is_of_packages and not component.required and not component.build_only


@dataclass(frozen=True)
class _Reference:
    """A key of a target that names a row.

    Attributes:
        key: The key.
        name: The name in it; ``""`` for none.
        kind: The kind of the row.
        rows: The names of such rows.
        file: The file of such rows.
    """

    key: str
    name: str
    kind: str
    rows: Iterable[str]
    file: str


def _references_of(target: TargetRow, facts: Facts) -> tuple[_Reference, ...]:
    """Return the keys of a target that name rows, with the names of the rows that exist."""
    images = facts.base_image_by_name
    images_file = "images/base-images.toml"
    return (
        _Reference("cuda", target.cuda, "cuda", facts.cuda_by_name, "images/cuda.toml"),
        _Reference("base", target.base, "base", facts.base_by_name, "images/bases.toml"),
        _Reference("stack", target.stack, "stack", facts.stack_by_name, "images/stacks.toml"),
        _Reference("image", target.image, "base_image", images, images_file),
        _Reference("builder_image", target.builder_image, "base_image", images, images_file),
    )


def _check_targets(facts: Facts, known: Set[str], malformed: Malformed) -> Iterator[str]:
    """Yield problems of targets and their locks.

    Args:
        facts: All rows that are well-formed.
        known: The names of all components.
        malformed: The malformed rows.
    """
    target_names: list[str] = []
    for target in facts.targets:
        where = (
            f"images/{target.framework}.toml: target {target.version} {target.cuda} {target.base}"
        )
        problems = []
        for reference in _references_of(target, facts):
            row_names = _add_malformed(reference.kind, reference.rows, malformed)
            if reference.name and reference.name not in row_names:
                problems.append(
                    f"{where}: key '{reference.key}': no row {reference.name!r} in {reference.file}"
                )
        for name in target.versions:
            if name not in known:
                problems.append(f"{where}: key 'versions': unknown component {name!r}")
        yield from problems
        # A malformed base has no Python to name the target by; nor has a malformed stack its
        # sources.
        has_name = target.base in facts.base_by_name and target.stack in facts.stack_by_name
        if not problems and has_name:
            target_names.append(facts.name_of(target))
    for name in _find_repeated(target_names):
        yield f"images: target {name} is in two rows"
    if len(target_names) == len(facts.targets) and not _add_malformed("target", (), malformed):
        # A lock without a target is a leftover. A target without a lock is
        # reported when it is planned.
        for name in sorted(set(facts.locks) - set(target_names)):
            yield f"images/lock/{name}.toml: no target of this name"


def _is_day(text: str) -> bool:
    """Return whether a text in the form of ISO 8601 is a day of the calendar."""
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


def _circle(components: Iterable[Component]) -> list[str]:
    """Return a circle of components by ``builds_with``, from the first one by name.

    ``["a", "b", "a"]``: a builds with b, and b with a. Empty without a circle.
    """
    graph: dict[str, set[str]] = {}
    for component in components:
        graph.setdefault(component.name, set()).update(component.builds_with)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # The circle is from dependency to dependent, and its first name is its last one, too.
        circle: list[str] = error.args[1][:0:-1]
        # It begins at any of its names; here at the first one by name, for equal messages.
        first = circle.index(min(circle))
        return [*circle[first:], *circle[: first + 1]]
    return []


def _check_artifacts(facts: Facts) -> Iterator[str]:
    """Yield a problem for each artifact that is not one file or one commit, and for each that
    comes together with an artifact without a row.
    """
    versions = {(row.name, row.version) for row in facts.artifacts}
    for row in facts.artifacts:
        where = f"images/artifacts.toml: artifact {row.name} {row.version}"
        if not FILE.pattern.fullmatch(row.file):
            yield (
                f"{where}: the file of its `url` is {short(row.file)},"
                " which is not the name of a file"
            )
        if bool(row.url) == bool(row.git):
            yield f"{where}: must have either `url` or `git`"
        if bool(row.git) != bool(row.commit):
            yield f"{where}: `git` and `commit` belong together: a tag alone can be moved"
        if len({bool(row.signature), bool(row.key), bool(row.fingerprint)}) > 1:
            yield f"{where}: `signature`, `key` and `fingerprint` belong together"
        for name, version in row.together.items():
            if (name, version) not in versions:
                yield f"{where}: key 'together': no artifact {name} {version}"


def _check_ranges(facts: Facts, parts: Set[str]) -> Iterator[str]:
    """Yield a problem for each unknown property and invalid range of rules, artifacts, variables.

    Args:
        facts: All rows that are well-formed.
        parts: The names of components and artifacts: their versions are properties.
    """
    known = _properties(facts, parts)
    for where, ranges in _ranges_of(facts):
        for name, allowed in ranges.items():
            for property_name in (name, *references(allowed)):
                if property_name not in known:
                    near = nearest(property_name, sorted(known))
                    advice = f"; did you mean {near}?" if near else ""
                    yield f"{where}: unknown property {property_name!r}{advice}"
            problem = problem_of(allowed)
            if problem:
                yield f"{where}: {name}: {problem}"
    for row in facts.rules:
        if not row.when:
            yield (
                f"images/compatibility.toml: rule {row.name!r}: key 'when' is empty: it must say"
                " which plans it speaks about"
            )


def _properties(facts: Facts, parts: Set[str]) -> set[str]:
    """Return the names of all properties that a rule may name: ``cuda``, ``nccl.build``.

    ``parts`` are the names of components and artifacts.
    """
    versions = set(parts)
    for artifact in facts.artifacts:
        versions.update(artifact.provides)
    for image in facts.base_images:
        versions.update(image.provides)
    properties = {*PROPERTIES, *versions}
    properties.update(target.framework for target in facts.targets)
    for name in versions:
        properties.update((f"{name}.build", f"{name}.flags"))
    return properties


def _ranges_of(facts: Facts) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the place and the ranges, by property, of each key that has ranges."""
    for rule in facts.rules:
        where = f"images/compatibility.toml: rule {rule.name!r}"
        yield f"{where}: key 'when'", rule.when
        yield f"{where}: key 'require'", rule.require
    for artifact in facts.artifacts:
        where = f"images/artifacts.toml: artifact {artifact.name} {artifact.version}"
        yield f"{where}: key 'requires'", artifact.requires
    for variable in facts.fabric:
        yield f"images/fabric.toml: variable {variable.name!r}: key 'when'", variable.when


def _find_repeated(names: Iterable[str]) -> list[str]:
    """Return the names that are there more than once, sorted, each once."""
    counts = Counter(names)
    return sorted(name for name, count in counts.items() if count > 1)
