"""``build.py --list``: targets with their last builds, from the facts alone.

The table leaves out the targets that the project's own machine cannot build. ``--all`` shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from trainworks.facts.rows import Built, Facts, TargetRow
from trainworks.plan.select import sort_rows, sorted_rows, version_key
from trainworks.plan.target import context_of

COLUMNS = ("target", "patched to", "built")

WIDTH = 80
"""Columns of a terminal, in which each target has one line."""


def state_of(row: TargetRow, facts: Facts, current: Mapping[str, Built]) -> str:
    """Return the state of a target's last recorded build.

    ``current`` for a build of today's recipe, ``older`` for one of another recipe, ``never``.
    """
    name = facts.name_of(row)
    if name in current:
        return "current"
    if name in facts.built_by_target:
        return "older"
    return "never"


def patches_until(row: TargetRow, facts: Facts) -> str:
    """Return the day from which the framework's version gets no more patches.

    ``supported`` if it gets them: it is the framework's latest release.
    """
    end = facts.end_of_patch(row)
    if end is None:
        return "supported"
    return end.date


def describe_support(row: TargetRow, facts: Facts) -> str:
    """Return whether the framework's version gets patches, as the rest of a sentence.

    That is ``gets patches``, or for example ``has had no patches since 2024-10-17``.
    """
    end = facts.end_of_patch(row)
    if end is None:
        return "gets patches"
    return f"has had no patches since {end.date}"


def _describe_last_build(row: TargetRow, facts: Facts, current: Mapping[str, Built]) -> str:
    """Return the last build of a target in words: ``DAY, SIZE``, ``older, DAY``, or ``no``.

    ``no; 3 parts`` says that three of its components were built. Reasons, and the names of the
    components, are in `--format json` and docs/targets.md.
    """
    name = facts.name_of(row)
    if name in current:
        build = current[name]
        return f"{build.date}, {build.megabytes} MB"
    if name in facts.built_by_target:
        return f"older, {facts.built_by_target[name].date}"
    components = context_of(row, facts).components.values()
    proved = [component for component in components if component.proved]
    if proved:
        return f"no; {len(proved)} parts"
    return "no"


def format_list(
    rows: Sequence[TargetRow], facts: Facts, current: Mapping[str, Built], *, whole: bool = True
) -> str:
    """Return the table for people.

    Args:
        rows: The targets to show.
        facts: All facts.
        current: The recorded builds of today's recipes, by the target's name.
        whole: Whether to show targets that the project's own machine cannot build. Else a last
            line has their number, unless all of ``rows`` are such.
    """
    listed = rows
    if not whole:
        buildable = [row for row in rows if not row.unbuilt]
        listed = buildable or rows
    table = [COLUMNS]
    for row in sort_rows(listed):
        built = _describe_last_build(row, facts, current)
        table.append((facts.name_of(row), patches_until(row, facts), built))
    columns = zip(*table, strict=True)
    widths = [max(map(len, column)) for column in columns]
    text = ""
    for cells in table:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        text += "  ".join(padded).rstrip() + "\n"
    hidden = len(rows) - len(listed)
    if hidden:
        text += f"{hidden} more cannot be built on the project's own machine: add --all\n"
    return text


def render_summary(facts: Facts) -> str:
    """Return a short table: for each framework and kind of sources its versions and its cells.

    The table is in committed pages, so it has no builds: those depend on more than the rows.
    """
    groups: dict[tuple[str, str], list[TargetRow]] = {}
    for row in sorted_rows(facts):
        groups.setdefault((facts.sources_of(row), row.framework), []).append(row)
    lines = ["| sources | framework | versions | CUDA | targets |", "|---|---|---|---|---|"]
    for (sources, framework), rows in sorted(groups.items()):
        versions = list(dict.fromkeys(row.version for row in rows))
        cells = sorted({row.cuda for row in rows}, key=lambda name: (version_key(name), name))
        span = versions[0]
        if len(versions) > 1:
            span += f" to {versions[-1]}"
        lines.append(f"| {sources} | {framework} | {span} | {', '.join(cells)} | {len(rows)} |")
    return "\n".join(lines) + "\n"


def format_json_list(rows: Iterable[TargetRow], facts: Facts, current: Mapping[str, Built]) -> str:
    """Return the table for programs: an object for each target, with versions and last build.

    ``built`` is the recorded build, and whether it is ``current``: of today's
    recipe. Arguments as for ``format_list``.
    """
    values = [_collect_values(row, facts, current) for row in sort_rows(rows)]
    return json.dumps(values, indent=2) + "\n"


def _collect_values(
    row: TargetRow, facts: Facts, current: Mapping[str, Built]
) -> dict[str, object]:
    """Return a target as values for JSON."""
    name = facts.name_of(row)
    end = facts.end_of_patch(row)
    last_day = ""
    if end is not None:
        last_day = end.date
    record = facts.built_by_target.get(name)
    # A target without a recorded build has ``"built": null``.
    built = None
    if record is not None:
        built = asdict(record) | {"current": record.target in current}
    return {
        "name": name,
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
        "end_of_patch": last_day,
        "state": state_of(row, facts, current),
        "built": built,
    }
