"""Select the row of the matrix that a request means.

A combination without a row is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from trainworks.errors import UnknownNameError
from trainworks.facts.ranges import PRESENT
from trainworks.facts.rows import Component, Facts, TargetRow
from trainworks.plan.model import Request
from trainworks.plan.names import LIST, join_problems, make_unknown_name_error
from trainworks.plan.target import TargetContext, context_of
from trainworks.suggestions import nearest


@dataclass(frozen=True)
class _Column:
    """A value by which rows are chosen.

    Attributes:
        option: The option of the command line, for messages.
        read: Returns the value of a row.
    """

    option: str
    read: Callable[[TargetRow, Facts], str]


COLUMNS: Mapping[str, _Column] = {
    "framework": _Column("framework", lambda row, _: row.framework),
    "sources": _Column("--sources", lambda row, facts: facts.sources_of(row)),
    "architecture": _Column("--architecture", lambda row, facts: facts.architecture_of(row)),
    "cuda": _Column("--cuda", lambda row, _: row.cuda),
    "version": _Column("--framework-version", lambda row, _: row.version),
    "python": _Column("--python", lambda row, facts: facts.python_of(row)),
}
"""The values by which rows are chosen, in this order, by the field of ``Request``."""

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


def collect_values(request: Request) -> dict[str, str]:
    """Return the values by which a request chooses a row: its fields of ``COLUMNS``."""
    values = {name: getattr(request, name) for name in COLUMNS}
    return {name: value for name, value in values.items() if value}


def select_row(request: Request, facts: Facts) -> TargetRow:
    """Return the row that a request means.

    The newest framework version that has all the other values wins, and among Pythons the oldest
    one.

    Raises:
        UnknownNameError: Values are unknown, or known but not together with the others; the hint
            has the nearest value and everything that exists.
    """
    rows, problems = matching_rows(collect_values(request), facts.targets, facts)
    if problems:
        raise join_problems(problems, LIST)
    return _choose_newest_row(rows, facts)


def _choose_newest_row(rows: Sequence[TargetRow], facts: Facts) -> TargetRow:
    """Return the row with the newest framework version, and of these the one with the oldest
    Python: most wheels exist for that Python.
    """
    newest = max(version_key(row.version) for row in rows)
    rows = [row for row in rows if version_key(row.version) == newest]
    return min(rows, key=lambda row: version_key(facts.python_of(row)))


def unknown_names(request: Request, facts: Facts) -> list[UnknownNameError]:
    """Return the unknown names of a request, all at once: values of rows and components."""
    rows, problems = matching_rows(collect_values(request), facts.targets, facts)
    if problems or not (request.framework and request.cuda):
        known = [component.name for component in facts.components]
        for flag, names in _list_component_options(request):
            available = find_optional_components(flag, facts.components)
            kind = f"component in {flag}:"
            for name in names:
                if name not in known:
                    problems.append(make_unknown_name_error(kind, name, available, hidden=known))
        return problems
    # The row is known: names of components are compared with those that its target can have.
    try:
        select_components(request, context_of(_choose_newest_row(rows, facts), facts), facts)
    except UnknownNameError as error:
        return [error]
    return []


def _list_component_options(request: Request) -> tuple[tuple[str, Sequence[str]], ...]:
    """Return the two options with components: ``("--with", ("flash-attention",))``."""
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
    for field, column in COLUMNS.items():
        value = wanted.get(field)
        if value is None:
            continue
        fitting = [row for row in remaining if column.read(row, facts) == value]
        if not fitting:
            kind = column.option
            if described:
                kind += f" for {described}:"
            values = {column.read(row, facts) for row in remaining}
            known = sorted(values, key=lambda name: (version_key(name), name))
            shown = known
            if field == "framework":
                shown = _find_buildable_frameworks(remaining) or known
            problem = make_unknown_name_error(kind, value, shown, hidden=known)
            elsewhere = _find_other_sources(field, wanted, all_rows, facts)
            hints = [hint for hint in (elsewhere, problem.hint) if hint]
            problems.append(UnknownNameError(problem.message, hint="; ".join(hints)))
            # The other values are compared with rows of the nearest value.
            value = nearest(value, known)
            fitting = [row for row in remaining if column.read(row, facts) == value]
        if fitting:
            remaining = fitting
        # The next problem names the values before it: "pytorch with cu121 on arm64".
        if field == "framework":
            described = value
        elif described and value and field == "cuda":
            described += f" with {value}"
        elif described and value and field == "version":
            described += f" {value}"
        elif described and field == "architecture" and value != "amd64":
            described += f" on {value}"
    return remaining, problems


def _find_buildable_frameworks(rows: Iterable[TargetRow]) -> list[str]:
    """Return the frameworks that have a target which the project's own machine can build."""
    return sorted({row.framework for row in rows if not row.unbuilt})


def _find_other_sources(
    field: str, wanted: Mapping[str, str], rows: Iterable[TargetRow], facts: Facts
) -> str:
    """Return a hint with the other ``--sources`` for which the framework has a value.

    For example ``--cuda cu118 is there with --sources vendor``.
    ``""`` if there are none, or if the request has no ``--sources``.
    """
    column = COLUMNS[field]
    sources, framework, value = wanted.get("sources"), wanted.get("framework"), wanted[field]
    if sources is None or field in ("framework", "sources"):
        return ""
    options = set()
    for row in rows:
        row_sources = facts.sources_of(row)
        is_other = row.framework == framework and row_sources != sources
        if is_other and column.read(row, facts) == value:
            options.add(f"--sources {row_sources}")
    if not options:
        return ""
    return f"{column.option} {value} is there with {' and '.join(sorted(options))}"


def sorted_rows(facts: Facts) -> list[TargetRow]:
    """Return all targets, by framework, version, cell and base."""
    return sort_rows(facts.targets)


def sort_rows(rows: Iterable[TargetRow]) -> list[TargetRow]:
    """Return targets by framework, version, cell and base."""

    def get_sort_key(row: TargetRow) -> tuple[str, tuple[int, ...], str, str]:
        return row.framework, version_key(row.version), row.cuda, row.base

    return sorted(rows, key=get_sort_key)


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
            problems.append(_make_unknown_pattern_error(pattern, rows))
    if problems:
        raise join_problems(problems, GLOB)
    return [row for name, row in rows.items() if name in matched]


def _make_unknown_pattern_error(pattern: str, rows: Mapping[str, TargetRow]) -> UnknownNameError:
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
            near = f"'{candidate}'"
            if len(names) == 1:
                near = names[0]
            break
    return make_unknown_name_error("target for --only", pattern, rows, near=near)


def row_named(name: str, facts: Facts) -> TargetRow:
    """Return the target of this name; raises ``UnknownNameError``."""
    rows = {facts.name_of(row): row for row in facts.targets}
    if name not in rows:
        raise make_unknown_name_error("target", name, rows)
    return rows[name]


def find_optional_components(flag: str, components: Iterable[Component]) -> list[str]:
    """Return the components that ``--with`` can add to packages, or ``--without`` leave out."""
    is_default = flag == "--without"
    names = []
    for component in components:
        if "packages" not in component.sources or component.required:
            continue
        if component.default == is_default:
            names.append(component.name)
    return names


def select_components(
    request: Request, target: TargetContext, facts: Facts
) -> tuple[Component, ...]:
    """Return the components that a request has of a target, in the order of their layers.

    Raises:
        UnknownNameError: For names that do not exist, do not fit the target, are required, or are
            needed by others; all such problems at once.
    """
    available = target.components
    problems = _check_options(request, target, facts)
    chosen = set(request.with_components)
    for name, component in available.items():
        if component.required or component.default:
            chosen.add(name)
    chosen -= set(request.without_components)
    problems += _check_needs(chosen, target, facts)
    if problems:
        raise join_problems(problems)

    built_with: set[str] = set()
    for name in chosen:
        built_with.update(available[name].builds_with)
    components = []
    for name, component in available.items():
        if name in chosen:
            # A component that only builds, such as a compiler, serves those built with it.
            if not component.build_only or name in built_with:
                components.append(component)
        elif name in built_with and not component.default:
            summary = f"{component.summary}; here it only builds others"
            components.append(replace(component, build_only=True, summary=summary))
    return tuple(components)


def _check_options(request: Request, target: TargetContext, facts: Facts) -> list[UnknownNameError]:
    """Return the problems of the names in ``--with`` and ``--without``."""
    available = target.components
    component_by_name = {component.name: component for component in facts.components}
    problems: list[UnknownNameError] = []
    for flag, names in _list_component_options(request):
        for name in names:
            if name not in component_by_name:
                known = find_optional_components(flag, available.values())
                problems.append(
                    make_unknown_name_error(
                        f"component in {flag}:", name, known, hidden=component_by_name
                    )
                )
            elif name not in available:
                problems.append(_explain_unavailable(flag, component_by_name[name], target, facts))
            elif flag == "--without" and available[name].required:
                hint = f"it is {available[name].summary}"
                message = f"--without {name}: every image needs it"
                problems.append(UnknownNameError(message, hint=hint))
    both = set(request.with_components) & set(request.without_components)
    for name in sorted(both):
        message = f"{name}: both --with and --without"
        problems.append(UnknownNameError(message, hint="use one of them"))
    return problems


def _check_needs(chosen: Set[str], target: TargetContext, facts: Facts) -> list[UnknownNameError]:
    """Return a problem for each chosen component that needs one that is not chosen."""
    available = target.components
    problems = []
    for name in sorted(chosen & available.keys()):
        for need in available[name].needs:
            if need in chosen:
                continue
            components = [row for row in available.values() if row.name in chosen]
            dependents = find_dependents([name], components)
            options = [f"--without {other}" for other in (name, *dependents)]
            reason = _find_reason_of_need(name, need, target, facts)
            problems.append(
                UnknownNameError(
                    f"{name} needs {need}, which is not in the image{reason}",
                    hint=f"add --with {need}, or {' '.join(options)}",
                )
            )
    return problems


def find_dependents(names: Iterable[str], components: Iterable[Component]) -> tuple[str, ...]:
    """Return the components that need one of ``names``, directly or through others.

    Args:
        names: Components that are left out.
        components: All components that may need them, in any order.
    """
    needs = {component.name: component.needs for component in components}
    gone = set(names)
    dependents: list[str] = []
    # A component may need one that was found in the last round: search until a round finds none.
    while True:
        more = []
        for name, needed in needs.items():
            if name not in gone and not gone.isdisjoint(needed):
                more.append(name)
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
    left_out += find_dependents(left_out, chosen)
    more = [name for name in dict.fromkeys(left_out) if name not in request.without_components]
    return replace(request, without_components=(*request.without_components, *more))


def _find_reason_of_need(name: str, need: str, target: TargetContext, facts: Facts) -> str:
    """Return reason and source of the rule by which a component needs another, or ``""``.

    For example ``: NCCL asks its plugin for EFA (source: ADDRESS)``.
    """
    # Only a rule about this component alone gives the reason, for all sources or for the target's.
    conditions = ({name: PRESENT}, {name: PRESENT, "sources": target.sources})
    for rule in facts.rules:
        if need in rule.require and rule.when in conditions:
            return f": {rule.reason} (source: {rule.source})"
    return ""


def _explain_unavailable(
    flag: str, component: Component, target: TargetContext, facts: Facts
) -> UnknownNameError:
    """Return the error that says why a target cannot have a component that others have."""
    name, row = component.name, target.row
    lack = _describe_lack(component)
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
            hint=_find_nearest_target(name, target, facts),
        )
    if target.sources in component.sources:
        return UnknownNameError(
            f"{flag} {name}: no version of it is known to fit this target",
            hint=f"its row or stack would name one{lack}",
        )
    return UnknownNameError(
        f"{flag} {name}: not with --sources {target.sources}",
        hint=f"it comes with --sources {', '.join(component.sources)}{lack}",
    )


def _find_nearest_target(name: str, target: TargetContext, facts: Facts) -> str:
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
    cell = max(cells)
    if newer_cells:
        cell = min(newer_cells)
    alike = [row for row in candidates if version_key(row.cell.version) == cell]

    def compare_with_target(candidate: TargetContext) -> tuple[bool, bool]:
        has_other_architecture = candidate.base.architecture != target.base.architecture
        return has_other_architecture, candidate.python != target.python

    near = min(alike, key=compare_with_target)
    return f"the nearest target that can have it is {near.name}: --cuda {near.row.cuda}"


def _describe_lack(component: Component) -> str:
    """Return the cost of leaving a component out, as words after a hint; ``""`` if not recorded."""
    if not component.without:
        return ""
    return f"; without it: {component.without}"
