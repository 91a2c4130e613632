"""``build.py --list``: every target, from the facts alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from trainworks.facts.rows import Built, Facts, TargetRow
from trainworks.plan.select import in_order, sorted_rows, version_key
from trainworks.plan.target import context_of

COLUMNS = ("target", "patched to", "built")

WIDTH = 80
"""Columns of a terminal, in which each target has one line."""


def state_of(row: TargetRow, facts: Facts, current: Mapping[str, Built]) -> str:
    """Return what was built of a target: ``current`` from today's recipe,
    ``older`` from another one, ``never``.
    """
    name = facts.name_of(row)
    return "current" if name in current else "older" if name in facts.built_by_target else "never"


def patches_until(row: TargetRow, facts: Facts) -> str:
    """Return the day from which the framework's version gets no more patches,
    or what that day will be.
    """
    end = facts.end_of_patch(row)
    return end.date if end else "its successor"


def _proof(row: TargetRow, facts: Facts, current: Mapping[str, Built]) -> str:
    """Return what was built of a target: the image, an image of an older
    recipe, some components, or nothing.

    Why it was not, and which components were, is in `--format json` and docs/targets.md.
    """
    name = facts.name_of(row)
    if built := current.get(name):
        return f"{built.date}, {built.megabytes} MB"
    if older := facts.built_by_target.get(name):
        return f"older, {older.date}"
    parts = [
        component.name
        for component in context_of(row, facts).components.values()
        if component.proved
    ]
    return f"no; {len(parts)} parts" if parts else "no"


def list_text(
    rows: Sequence[TargetRow], facts: Facts, current: Mapping[str, Built], *, whole: bool = True
) -> str:
    """Return the table for people.

    Args:
        rows: The targets to show.
        facts: All facts.
        current: The recorded builds of today's recipes, by the target's name.
        whole: With those that the project's own machine cannot build. Else they are counted in a
            last line, unless all of ``rows`` are such.
    """
    shown = rows if whole else [row for row in rows if not row.unbuilt] or rows
    cells = (
        (
            facts.name_of(row),
            patches_until(row, facts).removeprefix("its "),
            _proof(row, facts, current),
        )
        for row in in_order(shown)
    )
    table = [COLUMNS, *cells]
    widths = [max(len(line[number]) for line in table) for number in range(len(COLUMNS))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )
    hidden = len(rows) - len(shown)
    more = (
        f"{hidden} more cannot be built on the project's own machine: add --all\n" if hidden else ""
    )
    return "\n".join(lines) + "\n" + more


def summary_markdown(facts: Facts) -> str:
    """Return a short table: for each framework and kind of sources its versions and its cells.

    It stands in committed pages, so it says nothing of builds: those depend on more than the rows.
    """
    groups: dict[tuple[str, str], list[TargetRow]] = {}
    for row in sorted_rows(facts):
        groups.setdefault((facts.sources_of(row), row.framework), []).append(row)
    lines = ["| sources | framework | versions | CUDA | targets |", "|---|---|---|---|---|"]
    for (sources, framework), rows in sorted(groups.items()):
        versions = list(dict.fromkeys(row.version for row in rows))
        cells = sorted({row.cuda for row in rows}, key=lambda name: (version_key(name), name))
        shown = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        lines.append(f"| {sources} | {framework} | {shown} | {', '.join(cells)} | {len(rows)} |")
    return "\n".join(lines) + "\n"


def list_json(rows: Iterable[TargetRow], facts: Facts, current: Mapping[str, Built]) -> str:
    """Return the table for programs: one object for each target, with its name,
    its versions, and its last build.

    ``built`` is the recorded build, and whether it is ``current``: of today's
    recipe. Arguments as for ``list_text``.
    """
    shown = [
        {
            "name": facts.name_of(row),
            "framework": row.framework,
            "version": row.version,
            "cuda": row.cuda,
            "python": facts.python_of(row),
            "base": row.base,
            "architecture": facts.architecture_of(row),
            "sources": facts.sources_of(row),
            "stack": row.stack,
            "versions": context_of(row, facts).versions,
            "unbuilt": row.unbuilt,
            "end_of_patch": end.date if (end := facts.end_of_patch(row)) else "",
            "state": state_of(row, facts, current),
            "built": asdict(built) | {"current": built.target in current} if built else None,
        }
        for row in in_order(rows)
        for built in (facts.built_by_target.get(facts.name_of(row)),)
    ]
    return json.dumps(shown, indent=2) + "\n"
