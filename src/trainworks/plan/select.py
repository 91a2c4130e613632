"""From a request to one row of the matrix. A cell is an explicit row: what has none is an error, never a guess."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from trainworks.errors import UnknownNameError
from trainworks.facts.rows import Component, Facts, TargetRow
from trainworks.plan.model import Request
from trainworks.plan.names import unknown


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

    def python_of(row: TargetRow) -> str:
        return facts.base_by_name[row.base].python

    rows = list(facts.targets)
    rows = _narrow(rows, "framework", request.framework, lambda row: row.framework, "")
    rows = _narrow(rows, "--sources", request.sources, facts.sources_of, "")
    described = request.framework
    rows = _narrow(rows, "--cuda", request.cuda, lambda row: row.cuda, described)
    described += f" with {request.cuda}"
    if request.version is not None:
        rows = _narrow(rows, "--framework-version", request.version, lambda row: row.version, described)
        described += f" {request.version}"
    if request.python is not None:
        rows = _narrow(rows, "--python", request.python, python_of, described)
    newest = max(version_key(row.version) for row in rows)
    rows = [row for row in rows if version_key(row.version) == newest]
    return min(rows, key=lambda row: version_key(python_of(row)))


def _narrow(
    rows: Sequence[TargetRow], kind: str, wanted: str, value_of: Callable[[TargetRow], str], described: str
) -> list[TargetRow]:
    found = [row for row in rows if value_of(row) == wanted]
    if not found:
        known = sorted({value_of(row) for row in rows}, key=lambda name: (version_key(name), name))
        label = f"{kind} for {described}:" if described else kind
        raise unknown(label, wanted, known, more="`python build.py --list` shows every target")
    return found


def select_components(request: Request, row: TargetRow, facts: Facts) -> tuple[Component, ...]:
    """Return the components of an image, in the order of their layers.

    Raises:
        UnknownNameError: For names that do not exist, do not fit the target, are required, or are needed by others;
            all such problems at once.
    """
    cuda = row.cuda != "cpu"
    available = {
        component.name: component
        for component in facts.components
        if not component.vendor and (cuda or not component.needs_cuda)
    }
    chosen = {name for name, component in available.items() if component.required or component.default}
    problems: list[UnknownNameError] = []
    for flag, names in (("--with", request.with_components), ("--without", request.without_components)):
        for name in names:
            known = facts.component_by_name.get(name)
            if known is None:
                problems.append(unknown(f"component in {flag}:", name, available, hidden=facts.component_by_name))
            elif known.vendor:
                problems.append(
                    UnknownNameError(
                        f"{flag} {name}: only its vendor serves it",
                        hint=f"it comes with vendor sources, which no target has yet; without it: {known.without}",
                    )
                )
            elif name not in available:
                problems.append(
                    UnknownNameError(f"{flag} {name}: needs CUDA, and {row.cuda} has none", hint="choose a --cuda cell")
                )
            elif flag == "--without" and known.required:
                problems.append(
                    UnknownNameError(f"--without {name}: no image works without it", hint=f"it is {known.summary}")
                )
    both = set(request.with_components) & set(request.without_components)
    problems += [UnknownNameError(f"{name}: both --with and --without", hint="say one") for name in sorted(both)]
    chosen |= set(request.with_components)
    chosen -= set(request.without_components)
    for name in sorted(chosen & set(available)):
        for need in available[name].needs:
            if need not in chosen:
                problems.append(
                    UnknownNameError(
                        f"{name} needs {need}, which is not in the image",
                        hint=f"add --with {need}, or --without {name}",
                    )
                )
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise UnknownNameError("\n".join(str(problem) for problem in problems))
    return tuple(component for name, component in available.items() if name in chosen)
