"""Select the row of the matrix that a request means.

A combination without a row is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from fnmatch import fnmatchcase

from trainworks.errors import UnknownNameError
from trainworks.facts.ranges import PRESENT
from trainworks.facts.rows import Component, Facts, TargetRow
from trainworks.plan.model import Request
from trainworks.plan.names import LIST, together, unknown
from trainworks.plan.target import TargetContext, context_of
from trainworks.suggestions import nearest

COLUMNS: Mapping[str, tuple[str, Callable[[TargetRow, Facts], str]]] = {
    "framework": ("framework", lambda row, _: row.framework),
    "sources": ("--sources", lambda row, facts: facts.sources_of(row)),
    "architecture": ("--architecture", lambda row, facts: facts.architecture_of(row)),
    "cuda": ("--cuda", lambda row, _: row.cuda),
    "version": ("--framework-version", lambda row, _: row.version),
    "python": ("--python", lambda row, facts: facts.python_of(row)),
}
"""The values by which rows are chosen, in this order: a field of ``Request``, its option, and a
function for the value of a row.
"""

GLOB = "`*` stands for anything in a name"


def request_for(row: TargetRow, facts: Facts, like: Request | None = None) -> Request:
    """Return the request that means this row and no other.

    It has the optional components of the request ``like``.
    """
    request = Request(
        framework=row.framework,
        cuda=row.cuda,
        version=row.version,
        python=facts.python_of(row),
        sources=facts.sources_of(row),
        architecture=facts.architecture_of(row),
    )
    if like is None:
        return request
    return replace(
        request,
        with_components=like.with_components,
        without_components=like.without_components,
        artifacts=like.artifacts,
    )


def version_key(version: str) -> tuple[int, ...]:
    """Return a sort key of a version's numbers: ``2.10.0`` is newer than ``2.9.1``."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def values_of(request: Request) -> dict[str, str]:
    """Return the values by which a request chooses a row: its fields of ``COLUMNS``."""
    values = {name: getattr(request, name) for name in COLUMNS}
    return {name: value for name, value in values.items() if value}


def select_row(request: Request, facts: Facts) -> TargetRow:
    """Return the row that a request means.

    The newest framework version that has all the other values wins; among Pythons the oldest one
    wins, because that is the one with the most wheels for a user to add.

    Raises:
        UnknownNameError: Values are unknown, or known but not together with the others; the hint
            has the nearest value and everything that exists.
    """
    rows, problems = matching_rows(values_of(request), facts.targets, facts)
    if problems:
        raise together(problems, LIST)
    return _best(rows, facts)


def _best(rows: Sequence[TargetRow], facts: Facts) -> TargetRow:
    newest = max(version_key(row.version) for row in rows)
    rows = [row for row in rows if version_key(row.version) == newest]
    return min(rows, key=lambda row: version_key(facts.python_of(row)))


def unknown_names(request: Request, facts: Facts) -> list[UnknownNameError]:
    """Return the unknown names of a request, all at once: values of rows and components."""
    rows, problems = matching_rows(values_of(request), facts.targets, facts)
    if problems or not (request.framework and request.cuda):
        known = [component.name for component in facts.components]
        for flag, names in _component_options(request):
            available = optional(flag, facts.components)
            problems += [
                unknown(f"component in {flag}:", name, available, hidden=known)
                for name in names
                if name not in known
            ]
        return problems
    try:
        select_components(request, context_of(_best(rows, facts), facts), facts)
    except UnknownNameError as error:
        return [error]
    return []


def _component_options(request: Request) -> tuple[tuple[str, Sequence[str]], ...]:
    """Return the two options with components, each with its names."""
    return (("--with", request.with_components), ("--without", request.without_components))


def matching_rows(
    wanted: Mapping[str, str], rows: Iterable[TargetRow], facts: Facts
) -> tuple[list[TargetRow], list[UnknownNameError]]:
    """Return the rows that have these values, and the problems of the values, all at once.

    Args:
        wanted: Fields of a ``Request`` with their values; the others may be anything.
        rows: The rows to choose from.
        facts: All facts.
    """
    all_rows = list(rows)
    remaining = all_rows
    described, problems = "", []
    for field, (label, value_of) in COLUMNS.items():
        value = wanted.get(field)
        if value is None:
            continue
        fitting = [row for row in remaining if value_of(row, facts) == value]
        if not fitting:
            kind = f"{label} for {described}:" if described else label
            values = {value_of(row, facts) for row in remaining}
            known = sorted(values, key=lambda name: (version_key(name), name))
            problem = unknown(kind, value, known)
            elsewhere = _with_other_sources(field, wanted, all_rows, facts)
            hints = [hint for hint in (elsewhere, problem.hint) if hint]
            problems.append(UnknownNameError(problem.message, hint="; ".join(hints)))
            # The other values are compared with rows of the nearest value.
            value = nearest(value, known)
            fitting = [row for row in remaining if value_of(row, facts) == value]
        if fitting:
            remaining = fitting
        if field == "framework":
            described = value
        elif described and value and field == "cuda":
            described += f" with {value}"
        elif described and value and field == "version":
            described += f" {value}"
        elif described and field == "architecture" and value != "amd64":
            described += f" on {value}"
    return remaining, problems


def _with_other_sources(
    field: str, wanted: Mapping[str, str], rows: Iterable[TargetRow], facts: Facts
) -> str:
    """Return a hint with the other ``--sources`` for which the framework has a value.

    ``""`` if there are none, or if the request has no ``--sources``.
    """
    label, value_of = COLUMNS[field]
    sources, framework, value = wanted.get("sources"), wanted.get("framework"), wanted[field]
    if sources is None or field in ("framework", "sources"):
        return ""
    options = set()
    for row in rows:
        row_sources = facts.sources_of(row)
        is_other = row.framework == framework and row_sources != sources
        if is_other and value_of(row, facts) == value:
            options.add(f"--sources {row_sources}")
    if not options:
        return ""
    return f"{label} {value} is there with {' and '.join(sorted(options))}"


def sorted_rows(facts: Facts) -> list[TargetRow]:
    """Return all targets, by framework, version, cell and base."""
    return in_order(facts.targets)


def in_order(rows: Iterable[TargetRow]) -> list[TargetRow]:
    """Return targets by framework, version, cell and base."""
    return sorted(
        rows, key=lambda row: (row.framework, version_key(row.version), row.cuda, row.base)
    )


def rows_like(patterns: Sequence[str], facts: Facts) -> list[TargetRow]:
    """Return the targets with names that fit any of these patterns (``*`` and ``?``).

    Without a pattern, all of them.

    Raises:
        UnknownNameError: A pattern fits no target.
    """
    rows = {facts.name_of(row): row for row in sorted_rows(facts)}
    if not patterns:
        return list(rows.values())
    matched: set[str] = set()
    problems = []
    for pattern in patterns:
        names = [name for name in rows if fnmatchcase(name, pattern)]
        matched.update(names)
        if not names:
            problems.append(_unknown_pattern(pattern, rows))
    if problems:
        raise together(problems, GLOB)
    return [row for name, row in rows.items() if name in matched]


def _unknown_pattern(pattern: str, rows: Mapping[str, TargetRow]) -> UnknownNameError:
    """Return the error for a pattern that fits no target, with the nearest target or pattern."""
    part = pattern.strip("*-")
    words: list[str] = []
    for row in rows.values():
        words += (row.framework, row.cuda, row.version)
    candidates = [f"{part}-*", f"*-{part}-*", f"{part}*"]
    word = nearest(part, dict.fromkeys(words))
    if word:
        candidates += [f"{word}-*", f"*-{word}-*"]
    near = ""
    for candidate in candidates:
        names = [name for name in rows if fnmatchcase(name, candidate)]
        if names:
            near = names[0] if len(names) == 1 else f"'{candidate}'"
            break
    return unknown("target for --only", pattern, rows, near=near)


def row_named(name: str, facts: Facts) -> TargetRow:
    """Return the target of this name; raises ``UnknownNameError``."""
    rows = {facts.name_of(row): row for row in facts.targets}
    if name not in rows:
        raise unknown("target", name, rows)
    return rows[name]


def optional(flag: str, components: Iterable[Component]) -> list[str]:
    """Return the components that ``--with`` can add to packages, or ``--without`` leave out."""
    is_default = flag == "--without"
    return [
        row.name
        for row in components
        if "packages" in row.sources and not row.required and row.default == is_default
    ]


def select_components(
    request: Request, target: TargetContext, facts: Facts
) -> tuple[Component, ...]:
    """Return the components that a request has of a target, in the order of their layers.

    Raises:
        UnknownNameError: For names that do not exist, do not fit the target, are required, or are
            needed by others; all such problems at once.
    """
    available = target.components
    problems = _option_problems(request, target, facts)
    chosen = {
        name for name, component in available.items() if component.required or component.default
    }
    chosen |= set(request.with_components)
    chosen -= set(request.without_components)
    problems += _need_problems(chosen, target, facts)
    if problems:
        raise together(problems)

    built_with: set[str] = set()
    for name in chosen:
        built_with.update(available[name].builds_with)
    components = []
    for name, component in available.items():
        if name in chosen:
            # A component that only builds is of no use without one that is built with it.
            if not component.build_only or name in built_with:
                components.append(component)
        elif name in built_with and not component.default:
            summary = f"{component.summary}; here it only builds others"
            components.append(replace(component, build_only=True, summary=summary))
    return tuple(components)


def _option_problems(
    request: Request, target: TargetContext, facts: Facts
) -> list[UnknownNameError]:
    """Return the problems of the names in ``--with`` and ``--without``."""
    available = target.components
    component_by_name = {component.name: component for component in facts.components}
    problems: list[UnknownNameError] = []
    for flag, names in _component_options(request):
        for name in names:
            if name not in component_by_name:
                known = optional(flag, available.values())
                problems.append(
                    unknown(f"component in {flag}:", name, known, hidden=component_by_name)
                )
            elif name not in available:
                problems.append(_unavailable(flag, component_by_name[name], target, facts))
            elif flag == "--without" and available[name].required:
                hint = f"it is {available[name].summary}"
                message = f"--without {name}: every image needs it"
                problems.append(UnknownNameError(message, hint=hint))
    both = set(request.with_components) & set(request.without_components)
    for name in sorted(both):
        message = f"{name}: both --with and --without"
        problems.append(UnknownNameError(message, hint="use one of them"))
    return problems


def _need_problems(chosen: Set[str], target: TargetContext, facts: Facts) -> list[UnknownNameError]:
    """Return a problem for each chosen component that needs one that is not chosen."""
    available = target.components
    problems = []
    for name in sorted(chosen & available.keys()):
        for need in available[name].needs:
            if need in chosen:
                continue
            components = [row for row in available.values() if row.name in chosen]
            dependents = dependents_of([name], components)
            options = [f"--without {other}" for other in (name, *dependents)]
            reason = _why(name, need, target, facts)
            problems.append(
                UnknownNameError(
                    f"{name} needs {need}, which is not in the image{reason}",
                    hint=f"add --with {need}, or {' '.join(options)}",
                )
            )
    return problems


def dependents_of(names: Iterable[str], components: Iterable[Component]) -> tuple[str, ...]:
    """Return the components that need one of ``names``, directly or through others.

    Args:
        names: Components that are left out.
        components: All components that may need them, in any order.
    """
    needs = {component.name: component.needs for component in components}
    gone = set(names)
    dependents: list[str] = []
    while True:
        more = [
            name
            for name, needed in needs.items()
            if name not in gone and not gone.isdisjoint(needed)
        ]
        if not more:
            return tuple(dependents)
        gone.update(more)
        dependents += more


def leave_out(request: Request, names: Iterable[str], row: TargetRow, facts: Facts) -> Request:
    """Return the request without these components and without those that need them.

    Raises:
        UnknownNameError: Only when the request is planned: one of them is
            required, or the request names it in ``--with``.
    """
    chosen = select_components(request, context_of(row, facts), facts)
    left_out = list(names)
    left_out += dependents_of(left_out, chosen)
    more = [name for name in dict.fromkeys(left_out) if name not in request.without_components]
    return replace(request, without_components=(*request.without_components, *more))


def _why(name: str, need: str, target: TargetContext, facts: Facts) -> str:
    """Return reason and source of the rule by which a component needs another, or ``""``."""
    conditions = ({name: PRESENT}, {name: PRESENT, "sources": target.sources})
    for rule in facts.rules:
        if need in rule.require and rule.when in conditions:
            return f": {rule.reason} (source: {rule.source})"
    return ""


def _unavailable(
    flag: str, component: Component, target: TargetContext, facts: Facts
) -> UnknownNameError:
    """Return the reason why a target cannot have a component that others have."""
    name, row = component.name, target.row
    if component.needs_cuda and not target.cell.version:
        return UnknownNameError(
            f"{flag} {name}: needs CUDA, and the cell {row.cuda} has no CUDA",
            hint="choose a --cuda cell",
        )
    if component.needs_neuron and not target.cell.neuron:
        return UnknownNameError(f"{flag} {name}: is for AWS Trainium", hint="choose --cuda neuron")
    if component.frameworks and row.framework not in component.frameworks:
        return UnknownNameError(
            f"{flag} {name}: is for {', '.join(component.frameworks)}",
            hint=f"this image is for {row.framework}",
        )
    if component.bases and row.base not in component.bases:
        return UnknownNameError(
            f"{flag} {name}: is for {', '.join(component.bases)}",
            hint=f"this image is for {row.base}",
        )
    if component.by_row and target.sources in component.sources:
        return UnknownNameError(
            f"{flag} {name}: not in this image: {component.by_row}",
            hint=_nearest_with(name, target, facts),
        )
    if target.sources in component.sources:
        return UnknownNameError(
            f"{flag} {name}: no version of it is known to fit this target",
            hint=f"its row or stack would name one{_consequence(component)}",
        )
    return UnknownNameError(
        f"{flag} {name}: not with --sources {target.sources}",
        hint=f"it comes with --sources {', '.join(component.sources)}{_consequence(component)}",
    )


def _nearest_with(name: str, target: TargetContext, facts: Facts) -> str:
    """Return a hint with the target that has a component and is most like this one."""
    candidates = []
    for row in facts.targets:
        if row.framework != target.row.framework:
            continue
        context = context_of(row, facts)
        if name in context.components and context.sources == target.sources:
            candidates.append(context)
    if not candidates:
        return "no target has it"

    # The oldest CUDA that is not older than the target's, or else the newest.
    cells = {version_key(candidate.cell.version) for candidate in candidates}
    newer_cells = [cell for cell in cells if cell >= version_key(target.cell.version)]
    cell = min(newer_cells) if newer_cells else max(cells)
    alike = [row for row in candidates if version_key(row.cell.version) == cell]

    def differences(candidate: TargetContext) -> tuple[bool, bool]:
        has_other_architecture = candidate.base.architecture != target.base.architecture
        return has_other_architecture, candidate.python != target.python

    near = min(alike, key=differences)
    return f"the nearest target that can have it is {near.name}: --cuda {near.row.cuda}"


def _consequence(component: Component) -> str:
    return f"; without it: {component.without}" if component.without else ""
