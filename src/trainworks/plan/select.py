"""Select the row of the matrix that a request means. A combination without a row is an error, never a guess."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import get_args

from trainworks.errors import UnknownNameError
from trainworks.facts.ranges import PRESENT
from trainworks.facts.rows import Component, Facts, Source, TargetRow
from trainworks.plan.model import Request
from trainworks.plan.names import unknown
from trainworks.plan.target import TargetContext, context_of


def request_for(row: TargetRow, facts: Facts, like: Request | None = None) -> Request:
    """Return the request that means this row and no other, with the optional components of another request."""
    return Request(
        framework=row.framework,
        cuda=row.cuda,
        version=row.version,
        python=facts.python_of(row),
        sources=facts.sources_of(row),
        architecture=facts.architecture_of(row),
        with_components=like.with_components if like else (),
        without_components=like.without_components if like else (),
    )


def version_key(version: str) -> tuple[int, ...]:
    """Return a sort key of a version's numbers: ``2.10.0`` is newer than ``2.9.1``."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def select_row(request: Request, facts: Facts) -> TargetRow:
    """Return the row that a request means.

    The newest framework version that has all the other values wins; among Pythons the oldest one wins, because that is
    the one with the most wheels for a user to add.

    Raises:
        UnknownNameError: When a value is unknown, or known but not together with the others; the hint has the nearest
            value and everything that exists.
    """
    try:
        return _select_row(request, facts)
    except UnknownNameError as error:
        for sources in get_args(Source):
            if sources != request.sources and _exists(replace(request, sources=sources), facts):
                raise UnknownNameError(error.message, hint=f"--sources {sources} has it; {error.hint}") from None
        raise


def _exists(request: Request, facts: Facts) -> bool:
    with suppress(UnknownNameError):
        _select_row(request, facts)
        return True
    return False


def _select_row(request: Request, facts: Facts) -> TargetRow:
    rows = list(facts.targets)
    rows = _narrow(rows, "framework", request.framework, lambda row: row.framework, "")
    rows = _narrow(rows, "--sources", request.sources, facts.sources_of, "")
    described = request.framework
    rows = _narrow(rows, "--architecture", request.architecture, facts.architecture_of, described)
    if request.architecture != "amd64":
        described += f" on {request.architecture}"
    rows = _narrow(rows, "--cuda", request.cuda, lambda row: row.cuda, described)
    described += f" with {request.cuda}"
    if request.version is not None:
        rows = _narrow(rows, "--framework-version", request.version, lambda row: row.version, described)
        described += f" {request.version}"
    if request.python is not None:
        rows = _narrow(rows, "--python", request.python, facts.python_of, described)
    newest = max(version_key(row.version) for row in rows)
    rows = [row for row in rows if version_key(row.version) == newest]
    return min(rows, key=lambda row: version_key(facts.python_of(row)))


def _narrow(
    rows: Sequence[TargetRow], kind: str, wanted: str, value_of: Callable[[TargetRow], str], described: str
) -> list[TargetRow]:
    found = [row for row in rows if value_of(row) == wanted]
    if not found:
        known = sorted({value_of(row) for row in rows}, key=lambda name: (version_key(name), name))
        label = f"{kind} for {described}:" if described else kind
        raise unknown(label, wanted, known, more="`python build.py --list` shows every target")
    return found


def sorted_rows(facts: Facts) -> list[TargetRow]:
    """Return all targets, by framework, version, cell and base."""
    return sorted(facts.targets, key=lambda row: (row.framework, version_key(row.version), row.cuda, row.base))


def rows_like(patterns: Sequence[str], facts: Facts) -> list[TargetRow]:
    """Return the targets whose names fit any of these patterns (``*`` and ``?``); without a pattern, all of them.

    Raises:
        UnknownNameError: A pattern fits no target.
    """
    rows = {facts.name_of(row): row for row in sorted_rows(facts)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in rows):
            raise unknown("target for --only", pattern, rows, more="`*` stands for anything in a name")
    return [row for name, row in rows.items() if not patterns or any(fnmatchcase(name, each) for each in patterns)]


def row_named(name: str, facts: Facts) -> TargetRow:
    """Return the target of this name; raises ``UnknownNameError``."""
    rows = {facts.name_of(row): row for row in facts.targets}
    if name not in rows:
        raise unknown("target", name, rows)
    return rows[name]


def select_components(request: Request, target: TargetContext, facts: Facts) -> tuple[Component, ...]:
    """Return the components that a request has of a target, in the order of their layers.

    Raises:
        UnknownNameError: For names that do not exist, do not fit the target, are required, or are needed by others;
            all such problems at once.
    """
    available = target.components
    everywhere = {component.name: component for component in facts.components}
    chosen = {name for name, component in available.items() if component.required or component.default}
    problems: list[UnknownNameError] = []
    for flag, names in (("--with", request.with_components), ("--without", request.without_components)):
        for name in names:
            if name not in everywhere:
                problems.append(unknown(f"component in {flag}:", name, available, hidden=everywhere))
            elif name not in available:
                problems.append(_unavailable(flag, everywhere[name], target))
            elif flag == "--without" and available[name].required:
                problems.append(
                    UnknownNameError(f"--without {name}: every image needs it", hint=f"it is {available[name].summary}")
                )
    both = set(request.with_components) & set(request.without_components)
    problems += [
        UnknownNameError(f"{name}: both --with and --without", hint="use one of them") for name in sorted(both)
    ]
    chosen |= set(request.with_components)
    chosen -= set(request.without_components)
    for name in sorted(chosen & set(available)):
        for need in available[name].needs:
            if need not in chosen:
                others = (name, *dependents_of([name], [each for each in available.values() if each.name in chosen]))
                problems.append(
                    UnknownNameError(
                        f"{name} needs {need}, which is not in the image{_why(name, need, target, facts)}",
                        hint=f"add --with {need}, or {' '.join(f'--without {other}' for other in others)}",
                    )
                )
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise UnknownNameError("\n".join(str(problem) for problem in problems))
    built_with = {other for name in chosen for other in available[name].builds_with}
    return tuple(
        component
        for name, component in available.items()
        if name in chosen and (not component.build_only or name in built_with)
    )


def dependents_of(names: Iterable[str], components: Iterable[Component]) -> tuple[str, ...]:
    """Return the names of those of these components that need one of ``names``, directly or through others.

    Args:
        names: Components that are left out.
        components: All components that are looked at, in any order.
    """
    needs = {component.name: component.needs for component in components}
    gone, found = set(names), dict[str, None]()
    while more := [name for name, needed in needs.items() if name not in gone and not gone.isdisjoint(needed)]:
        gone.update(more)
        found |= dict.fromkeys(more)
    return tuple(found)


def leave_out(request: Request, names: Iterable[str], row: TargetRow, facts: Facts) -> Request:
    """Return the request without these components and without those that need them.

    Raises:
        UnknownNameError: Only when the request is planned: one of them is required, or was asked for by name.
    """
    chosen = select_components(request, context_of(row, facts), facts)
    out = dict.fromkeys((*names, *dependents_of(names, chosen)))
    more = tuple(name for name in out if name not in request.without_components)
    return replace(request, without_components=(*request.without_components, *more))


def _why(name: str, need: str, target: TargetContext, facts: Facts) -> str:
    """Return the reason and the source of the rule that says that a component needs another; ``""`` without a rule."""
    for rule in facts.rules:
        if need in rule.require and rule.when in ({name: PRESENT}, {name: PRESENT, "sources": target.sources}):
            return f": {rule.reason} (source: {rule.source})"
    return ""


def _unavailable(flag: str, component: Component, target: TargetContext) -> UnknownNameError:
    """Return why a target cannot have a component that others have."""
    name, row = component.name, target.row
    if component.needs_cuda and not target.cell.version:
        return UnknownNameError(
            f"{flag} {name}: needs CUDA, and the cell {row.cuda} has no CUDA", hint="choose a --cuda cell"
        )
    if component.needs_neuron and not target.cell.neuron:
        return UnknownNameError(f"{flag} {name}: is for AWS Trainium", hint="choose --cuda neuron")
    if component.frameworks and row.framework not in component.frameworks:
        return UnknownNameError(
            f"{flag} {name}: is for {', '.join(component.frameworks)}", hint=f"this image is for {row.framework}"
        )
    if component.bases and row.base not in component.bases:
        return UnknownNameError(
            f"{flag} {name}: is for {', '.join(component.bases)}", hint=f"this image is for {row.base}"
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


def _consequence(component: Component) -> str:
    return f"; without it: {component.without}" if component.without else ""
