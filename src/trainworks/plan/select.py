"""Select the row of the matrix that a request means.

A combination without a row is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""What rows are chosen by, in this order: a field of ``Request``, its option,
and the value of a row.
"""

GLOB = "`*` stands for anything in a name"


def request_for(row: TargetRow, facts: Facts, like: Request | None = None) -> Request:
    """Return the request that means this row and no other, with the optional
    components of another request.
    """
    return Request(
        framework=row.framework,
        cuda=row.cuda,
        version=row.version,
        python=facts.python_of(row),
        sources=facts.sources_of(row),
        architecture=facts.architecture_of(row),
        with_components=like.with_components if like else (),
        without_components=like.without_components if like else (),
        artifacts=like.artifacts if like else (),
    )


def version_key(version: str) -> tuple[int, ...]:
    """Return a sort key of a version's numbers: ``2.10.0`` is newer than ``2.9.1``."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def values_of(request: Request) -> dict[str, str]:
    """Return what rows are chosen by in a request: its fields of ``COLUMNS``.

    ``""`` was not given.
    """
    return {name: value for name in COLUMNS if (value := getattr(request, name))}


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
    """Return what is unknown in a request, all at once: values of rows and components."""
    rows, problems = matching_rows(values_of(request), facts.targets, facts)
    if problems or not (request.framework and request.cuda):
        known = [component.name for component in facts.components]
        names = (("--with", request.with_components), ("--without", request.without_components))
        problems += [
            unknown(f"component in {flag}:", name, optional(flag, facts.components), hidden=known)
            for flag, all_ in names
            for name in all_
            if name not in known
        ]
        return problems
    try:
        select_components(request, context_of(_best(rows, facts), facts), facts)
    except UnknownNameError as error:
        return [error]
    return []


def matching_rows(
    wanted: Mapping[str, str], rows: Iterable[TargetRow], facts: Facts
) -> tuple[list[TargetRow], list[UnknownNameError]]:
    """Return the rows that have these values, and what is wrong with the values, all at once.

    Args:
        wanted: Fields of a ``Request`` with their values; the others may be anything.
        rows: The rows to choose from.
        facts: All facts.
    """
    rows = every = list(rows)
    described, problems = "", []
    for field, (label, value_of) in COLUMNS.items():
        value = wanted.get(field)
        if value is None:
            continue
        found = [row for row in rows if value_of(row, facts) == value]
        if not found:
            kind = f"{label} for {described}:" if described else label
            known = sorted(
                {value_of(row, facts) for row in rows}, key=lambda name: (version_key(name), name)
            )
            problem = unknown(kind, value, known)
            elsewhere = _with_other_sources(field, wanted, every, facts)
            hint = "; ".join(filter(None, (elsewhere, problem.hint)))
            problems.append(UnknownNameError(problem.message, hint=hint))
            # The other values are held against the nearest.
            value = nearest(value, known)
            found = [row for row in rows if value_of(row, facts) == value] or rows
        rows = found
        if field == "framework":
            described = value
        elif described and value and field in ("cuda", "version"):
            described += f"{' with' if field == 'cuda' else ''} {value}"
        elif described and field == "architecture" and value != "amd64":
            described += f" on {value}"
    return rows, problems


def _with_other_sources(
    field: str, wanted: Mapping[str, str], rows: Iterable[TargetRow], facts: Facts
) -> str:
    """Return with which other ``--sources`` the framework has a value.

    ``""`` if with none, or none were asked for.
    """
    label, value_of = COLUMNS[field]
    asked, framework, value = wanted.get("sources"), wanted.get("framework"), wanted[field]
    if asked is None or field in ("framework", "sources"):
        return ""
    others = {
        facts.sources_of(row)
        for row in rows
        if value_of(row, facts) == value
        and row.framework == framework
        and facts.sources_of(row) != asked
    }
    if not others:
        return ""
    return (
        f"{label} {value} is there with"
        f" {' and '.join(f'--sources {name}' for name in sorted(others))}"
    )


def sorted_rows(facts: Facts) -> list[TargetRow]:
    """Return all targets, by framework, version, cell and base."""
    return in_order(facts.targets)


def in_order(rows: Iterable[TargetRow]) -> list[TargetRow]:
    """Return targets by framework, version, cell and base."""
    return sorted(
        rows, key=lambda row: (row.framework, version_key(row.version), row.cuda, row.base)
    )


def rows_like(patterns: Sequence[str], facts: Facts) -> list[TargetRow]:
    """Return the targets whose names fit any of these patterns (``*`` and ``?``).

    Without a pattern, all of them.

    Raises:
        UnknownNameError: A pattern fits no target.
    """
    rows = {facts.name_of(row): row for row in sorted_rows(facts)}
    if wrong := [each for each in patterns if not any(fnmatchcase(name, each) for name in rows)]:
        raise together([_unknown_pattern(pattern, rows) for pattern in wrong], GLOB)
    return [
        row
        for name, row in rows.items()
        if not patterns or any(fnmatchcase(name, each) for each in patterns)
    ]


def _unknown_pattern(pattern: str, rows: Mapping[str, TargetRow]) -> UnknownNameError:
    """Return the error for a pattern that fits no target: with the target or
    the pattern that was meant.
    """
    part = pattern.strip("*-")
    words = dict.fromkeys(
        word for row in rows.values() for word in (row.framework, row.cuda, row.version)
    )
    word = nearest(part, words)
    for meant in (
        f"{part}-*",
        f"*-{part}-*",
        f"{part}*",
        *((f"{word}-*", f"*-{word}-*") if word else ()),
    ):
        if fitting := [name for name in rows if fnmatchcase(name, meant)]:
            return unknown(
                "target for --only",
                pattern,
                rows,
                near=fitting[0] if len(fitting) == 1 else f"'{meant}'",
            )
    return unknown("target for --only", pattern, rows)


def row_named(name: str, facts: Facts) -> TargetRow:
    """Return the target of this name; raises ``UnknownNameError``."""
    rows = {facts.name_of(row): row for row in facts.targets}
    if name not in rows:
        raise unknown("target", name, rows)
    return rows[name]


def optional(flag: str, components: Iterable[Component]) -> list[str]:
    """Return what ``--with`` can add to packages, or what ``--without`` can leave out of them."""
    return [
        row.name
        for row in components
        if "packages" in row.sources and not row.required and row.default == (flag == "--without")
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
    everywhere = {component.name: component for component in facts.components}
    chosen = {
        name for name, component in available.items() if component.required or component.default
    }
    problems: list[UnknownNameError] = []
    for flag, names in (
        ("--with", request.with_components),
        ("--without", request.without_components),
    ):
        for name in names:
            if name not in everywhere:
                problems.append(
                    unknown(
                        f"component in {flag}:",
                        name,
                        optional(flag, available.values()),
                        hidden=everywhere,
                    )
                )
            elif name not in available:
                problems.append(_unavailable(flag, everywhere[name], target, facts))
            elif flag == "--without" and available[name].required:
                problems.append(
                    UnknownNameError(
                        f"--without {name}: every image needs it",
                        hint=f"it is {available[name].summary}",
                    )
                )
    both = set(request.with_components) & set(request.without_components)
    problems += [
        UnknownNameError(f"{name}: both --with and --without", hint="use one of them")
        for name in sorted(both)
    ]
    chosen |= set(request.with_components)
    chosen -= set(request.without_components)
    for name in sorted(chosen & set(available)):
        for need in available[name].needs:
            if need not in chosen:
                others = (
                    name,
                    *dependents_of(
                        [name], [each for each in available.values() if each.name in chosen]
                    ),
                )
                problems.append(
                    UnknownNameError(
                        f"{name} needs {need}, which is not in the"
                        f" image{_why(name, need, target, facts)}",
                        hint=(
                            f"add --with {need}, or"
                            f" {' '.join(f'--without {other}' for other in others)}"
                        ),
                    )
                )
    if problems:
        raise together(problems)
    built_with = {other for name in chosen for other in available[name].builds_with}
    lent = {
        name for name in built_with - chosen if name in available and not available[name].default
    }
    return tuple(
        (
            replace(
                component,
                build_only=True,
                summary=f"{component.summary}; here it only builds others",
            )
            if name in lent
            else component
        )
        for name, component in available.items()
        if name in lent or (name in chosen and (not component.build_only or name in built_with))
    )


def dependents_of(names: Iterable[str], components: Iterable[Component]) -> tuple[str, ...]:
    """Return the names of those of these components that need one of ``names``,
    directly or through others.

    Args:
        names: Components that are left out.
        components: All components that are looked at, in any order.
    """
    needs = {component.name: component.needs for component in components}
    gone, found = set(names), dict[str, None]()
    while more := [
        name for name, needed in needs.items() if name not in gone and not gone.isdisjoint(needed)
    ]:
        gone.update(more)
        found |= dict.fromkeys(more)
    return tuple(found)


def leave_out(request: Request, names: Iterable[str], row: TargetRow, facts: Facts) -> Request:
    """Return the request without these components and without those that need them.

    Raises:
        UnknownNameError: Only when the request is planned: one of them is
            required, or was asked for by name.
    """
    chosen = select_components(request, context_of(row, facts), facts)
    out = dict.fromkeys((*names, *dependents_of(names, chosen)))
    more = tuple(name for name in out if name not in request.without_components)
    return replace(request, without_components=(*request.without_components, *more))


def _why(name: str, need: str, target: TargetContext, facts: Facts) -> str:
    """Return the reason and the source of the rule that says that a component needs another.

    ``""`` without a rule.
    """
    for rule in facts.rules:
        if need in rule.require and rule.when in (
            {name: PRESENT},
            {name: PRESENT, "sources": target.sources},
        ):
            return f": {rule.reason} (source: {rule.source})"
    return ""


def _unavailable(
    flag: str, component: Component, target: TargetContext, facts: Facts
) -> UnknownNameError:
    """Return why a target cannot have a component that others have."""
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
    """Return what chooses the target that has a component and is most like this one."""
    contexts = [
        context_of(row, facts) for row in facts.targets if row.framework == target.row.framework
    ]
    having = [
        each for each in contexts if name in each.components and each.sources == target.sources
    ]
    if not having:
        return "no target has it"
    newer = [
        each
        for each in having
        if version_key(each.cell.version) >= version_key(target.cell.version)
    ]
    cells = {version_key(each.cell.version) for each in newer or having}
    cell = min(cells) if newer else max(cells)
    alike = [each for each in having if version_key(each.cell.version) == cell]
    near = min(
        alike,
        key=lambda each: (
            each.base.architecture != target.base.architecture,
            each.python != target.python,
        ),
    )
    return f"the nearest target that can have it is {near.name}: --cuda {near.row.cuda}"


def _consequence(component: Component) -> str:
    return f"; without it: {component.without}" if component.without else ""
