"""Checks what no single row can say: unique names, names that point somewhere,
rows and recipes in step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from datetime import date
from graphlib import CycleError, TopologicalSorter

from packaging.version import Version

from trainworks.facts.field_types import FILE
from trainworks.facts.ranges import PROPERTIES, problem_of, references
from trainworks.facts.rows import TABLES, Component, Facts
from trainworks.facts.schema import short
from trainworks.suggestions import nearest

Malformed = Set[tuple[str, str]]
"""Kind and name of rows that are there and malformed (``Reader.malformed``)."""


def relate(facts: Facts, malformed: Malformed) -> Iterator[str]:
    """Yield what no single row can say: unique names, names that point
    somewhere, rows and recipes in step.
    """
    known = _names("component", (component.name for component in facts.components), malformed)
    for field, table in TABLES.items():
        names = [name for row in getattr(facts, field) for name in table.names(row)]
        yield from (f"images: {table.key} {name!r} is in two rows" for name in _repeated(names))
    yield from _of_components(facts, known, malformed)
    yield from _of_artifacts(facts)
    yield from _of_ranges(
        facts, known | _names("artifact", (row.name for row in facts.artifacts), malformed)
    )
    yield from (
        f"images/stacks.toml: stack {stack.name!r}: unknown component {name!r}"
        for stack in facts.stacks
        for name in stack.components
        if name not in known
    )
    yield from _of_targets(facts, known, malformed)
    yield from (
        f"images/generated-files.toml: generated {row.name!r}: "
        f"key 'copy_of': {row.copy_of} would be compared with itself"
        for row in facts.generated_files
        if row.copy_of in row.paths
    )
    dated = [(f"images/built.toml: built {row.target!r}", row.date) for row in facts.built]
    dated += [
        (f"images/end-of-patch.toml: ended {row.framework} {row.version}", row.date)
        for row in facts.ends
    ]
    dated += [
        (f"images/lock/archives.toml: archive {row.suite!r}", row.date[:10])
        for row in facts.locked_archives
    ]
    yield from (
        f"images/end-of-patch.toml: ended {row.framework} {row.version}: "
        f"key 'successor': {row.successor} does not come after {row.version}"
        for row in facts.ends
        if row.successor and Version(row.successor) <= Version(row.version)
    )
    suites = _repeated([row.suite for row in facts.locked_archives])
    yield from (f"images/lock/archives.toml: archive {suite!r} is in two rows" for suite in suites)
    yield from (
        f"{where}: key 'date': {day} is not a day of the calendar"
        for where, day in dated
        if not _is_day(day)
    )


def _names(kind: str, names: Iterable[str], malformed: Malformed) -> Set[str]:
    """Return names of rows, with those of the malformed ones."""
    return {*names, *(name for malformed_kind, name in malformed if malformed_kind == kind)}


def _of_components(facts: Facts, known: Set[str], malformed: Malformed) -> Iterator[str]:
    """Yield what is wrong between the components and their recipes. known:
    names of all components.
    """
    yield from (
        f"templates/components/{recipe.name}.j2: check {number}: beside unknown component"
        f" {check.beside!r}"
        for recipe in facts.recipes.values()
        for number, check in enumerate(recipe.checks, start=1)
        if check.beside and check.beside not in known
    )
    advising = _names(
        "rule", (rule.name for rule in facts.rules if rule.severity == "advise"), malformed
    )
    yield from (
        f"templates/components/{recipe.name}.j2: answers unknown advice {name!r}"
        for recipe in facts.recipes.values()
        for name in recipe.answers
        if name not in advising
    )
    if circle := _circle(facts.components):
        way = " -> ".join(circle)
        yield f"images/components.toml: component {circle[0]!r}: builds_with in a circle: {way}"
    bases = _names("base", facts.base_by_name, malformed)
    frameworks = {target.framework for target in facts.targets}
    yield from (
        f"images/base-images.toml: base_image {row.name!r}: key 'base': unknown {row.base!r}"
        for row in facts.base_images
        if row.base not in bases
    )
    for component in facts.components:
        yield from (
            f"images/components.toml: component {component.name!r}: {key} unknown {need!r}"
            for key, needs in (("needs", component.needs), ("builds_with", component.builds_with))
            for need in needs
            if need not in known
        )
        yield from (
            f"images/components.toml: component {component.name!r}: key {key!r}: unknown {name!r}"
            for key, names, there in (
                ("bases", component.bases, bases),
                ("frameworks", component.frameworks, frameworks),
            )
            for name in names
            if name not in there
        )
        if component.recipe_name not in facts.recipes:
            recipe = f"templates/components/{component.recipe_name}.j2"
            yield f"{recipe} is missing: the component {component.name} has a row"
    recipes = {component.recipe_name for component in facts.components}
    for name in sorted(set(facts.recipes) - recipes - known):
        yield f"templates/components/{name}.j2: no row of this name in images/components.toml"


def _of_targets(facts: Facts, known: Set[str], malformed: Malformed) -> Iterator[str]:
    """Yield what is wrong with targets and their locks. known: names of all components."""
    target_names: list[str] = []
    for target in facts.targets:
        where = (
            f"images/{target.framework}.toml: target {target.version} {target.cuda} {target.base}"
        )
        broken = [
            f"{where}: key '{key}': no row {value!r} in {file}"
            for key, value, rows, file in (
                ("cuda", target.cuda, facts.cuda_by_name, "images/cuda.toml"),
                ("base", target.base, facts.base_by_name, "images/bases.toml"),
                ("stack", target.stack, facts.stack_by_name, "images/stacks.toml"),
                ("image", target.image, facts.base_image_by_name, "images/base-images.toml"),
                (
                    "builder_image",
                    target.builder_image,
                    facts.base_image_by_name,
                    "images/base-images.toml",
                ),
            )
            if value
            and value not in _names("base_image" if key.endswith("image") else key, rows, malformed)
        ]
        broken += [
            f"{where}: key 'versions': unknown component {name!r}"
            for name in target.versions
            if name not in known
        ]
        yield from broken
        # A malformed base is in its file, and has no Python to name the target
        # by; nor has a stack its sources.
        if not broken and target.base in facts.base_by_name and target.stack in facts.stack_by_name:
            target_names.append(facts.name_of(target))
    yield from (f"images: target {name} is in two rows" for name in _repeated(target_names))
    if len(target_names) == len(facts.targets) and not _names("target", (), malformed):
        # A lock without a target is a leftover. A target without a lock is
        # reported when it is planned.
        for name in sorted(set(facts.locks) - set(target_names)):
            yield f"images/lock/{name}.toml: no target of this name"


def _is_day(text: str) -> bool:
    """Return whether a text that looks like a day, ISO 8601, is one."""
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


def _circle(components: Iterable[Component]) -> list[str]:
    """Return the way from a component back to itself by ``builds_with``, from
    the first one by name; else nothing.
    """
    graph: dict[str, set[str]] = {}
    for component in components:
        graph.setdefault(component.name, set()).update(component.builds_with)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        way: list[str] = error.args[1][:0:-1]
        first = way.index(min(way))
        return [*way[first:], *way[: first + 1]]
    return []


def _of_artifacts(facts: Facts) -> Iterator[str]:
    """Yield where an artifact is not one file or one commit, or brings along what has no row."""
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
        yield from (
            f"{where}: key 'together': no artifact {name} {version}"
            for name, version in row.together.items()
            if (name, version) not in versions
        )


def _of_ranges(facts: Facts, parts: Set[str]) -> Iterator[str]:
    """Yield rules, artifacts and variables that name an unknown property, or a
    range that cannot be read.
    """
    provided = [row.provides for row in facts.artifacts] + [
        row.provides for row in facts.base_images
    ]
    versions = {*parts, *(name for each in provided for name in each)}
    known = {*PROPERTIES, *versions, *(row.framework for row in facts.targets)}
    known |= {f"{name}.{kind}" for name in versions for kind in ("build", "flags")}
    ranges = [
        (f"images/compatibility.toml: rule {row.name!r}: key '{key}'", written)
        for row in facts.rules
        for key, written in (("when", row.when), ("require", row.require))
    ]
    ranges += [
        (f"images/artifacts.toml: artifact {row.name} {row.version}: key 'requires'", row.requires)
        for row in facts.artifacts
    ]
    ranges += [
        (f"images/fabric.toml: variable {row.name!r}: key 'when'", row.when) for row in facts.fabric
    ]
    for where, written in ranges:
        for name, allowed in written.items():
            for asked in (name, *references(allowed)):
                if asked not in known:
                    near = nearest(asked, sorted(known))
                    advice = f"; did you mean {near}?" if near else ""
                    yield f"{where}: unknown property {asked!r}{advice}"
            if problem := problem_of(allowed):
                yield f"{where}: {name}: {problem}"
    yield from (
        f"images/compatibility.toml: rule {row.name!r}: key 'when' is empty: it must say which"
        " plans it speaks about"
        for row in facts.rules
        if not row.when
    )


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
