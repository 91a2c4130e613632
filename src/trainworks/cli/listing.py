"""``build.py --list``: every target, from the facts alone."""

from __future__ import annotations

import json
from dataclasses import asdict

from trainworks.facts.rows import Facts, TargetRow
from trainworks.plan.select import version_key
from trainworks.plan.versions import components_of, versions_of

COLUMNS = ("framework", "version", "cuda", "python", "base", "sources", "built for real")


def sorted_rows(facts: Facts) -> list[TargetRow]:
    """Return all targets, by framework, version and Python."""
    return sorted(facts.targets, key=lambda row: (row.framework, version_key(row.version), row.cuda, row.base))


def _cells(row: TargetRow, facts: Facts) -> tuple[str, ...]:
    return (
        row.framework,
        row.version,
        row.cuda,
        facts.python_of(row),
        row.base,
        facts.sources_of(row),
        _proof(row, facts),
    )


def _proof(row: TargetRow, facts: Facts) -> str:
    """Return what of a target was really built: the image, parts of it by their recipes, or nothing."""
    if built := row.built:
        return f"{built.date}, {built.engine}, {built.seconds} s, {built.megabytes} MB"
    parts = [component.name for component in components_of(row, facts).values() if component.proved]
    return f"parts: {', '.join(parts)}" if parts else "no: rendered only"


def list_text(facts: Facts) -> str:
    """Return the table for people."""
    table = [COLUMNS, *(_cells(row, facts) for row in sorted_rows(facts))]
    widths = [max(len(line[number]) for line in table) for number in range(len(COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table)
    return "\n".join(lines) + "\n"


def list_markdown(facts: Facts) -> str:
    """Return the table for the documentation."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *(_cells(row, facts) for row in sorted_rows(facts))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def summary_markdown(facts: Facts) -> str:
    """Return a short table: for each framework and kind of sources its versions, its cells, and what was built."""
    groups: dict[tuple[str, str], list[TargetRow]] = {}
    for row in sorted_rows(facts):
        groups.setdefault((facts.sources_of(row), row.framework), []).append(row)
    lines = ["| sources | framework | versions | CUDA | targets | images built for real |", "|---|---|---|---|---|---|"]
    for (sources, framework), rows in sorted(groups.items()):
        versions = list(dict.fromkeys(row.version for row in rows))
        cells = sorted({row.cuda for row in rows}, key=lambda name: (version_key(name), name))
        shown = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        built = sum(row.built is not None for row in rows)
        lines.append(f"| {sources} | {framework} | {shown} | {', '.join(cells)} | {len(rows)} | {built or 'none'} |")
    return "\n".join(lines) + "\n"


def list_json(facts: Facts) -> str:
    """Return the table for programs: one object for each target, with its name and its versions."""
    rows = [
        {
            "name": facts.name_of(row),
            "framework": row.framework,
            "version": row.version,
            "cuda": row.cuda,
            "python": facts.python_of(row),
            "base": row.base,
            "sources": facts.sources_of(row),
            "stack": row.stack,
            "versions": versions_of(row, facts),
            "built": asdict(row.built) if row.built else None,
        }
        for row in sorted_rows(facts)
    ]
    return json.dumps(rows, indent=2) + "\n"
