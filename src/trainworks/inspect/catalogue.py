"""``build.py catalogue``: the matrix as one HTML file that works without a network."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby

from jinja2 import Environment, StrictUndefined

from trainworks.errors import CompatibilityError, LockError, UnknownNameError
from trainworks.facts.rows import Built, EndOfPatch, Facts, TargetRow
from trainworks.inspect.released import Released
from trainworks.inspect.targets import build_command
from trainworks.plan.model import ImagePlan, Missing
from trainworks.plan.resolve import plan_row
from trainworks.plan.select import request_for, sorted_rows, version_key
from trainworks.plan.target import context_of
from trainworks.render.builds import current_builds
from trainworks.terminal.words import amount


@dataclass(frozen=True, kw_only=True)
class Part:
    """A component of an image.

    Attributes:
        name: Its name.
        version: ``""`` if it has none of its own.
        summary: What it is.
        wheels: Bytes of the Python packages that it brings, as they are downloaded.
    """

    name: str
    version: str
    summary: str
    wheels: int = 0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One target in the catalogue.

    Attributes:
        name: The target's name, and its address in the page.
        framework: For example ``pytorch``.
        version: The framework's.
        cuda: Name of the CUDA cell.
        cuda_version: The CUDA version of the cell; ``""`` if it has none.
        driver: The oldest driver that runs it.
        python: ``MAJOR.MINOR``.
        base: The operating system.
        sources: ``packages`` or ``vendor``.
        tag: The image's first tag.
        parts: Its components, in the order of their layers.
        optional: What can be added to it: the option's argument, and what it is.
        budget: The limit of its size, in megabytes.
        built: The recorded build of the present recipe, if there is one.
        older: Date of the recorded build of an older recipe; ``""`` if there is none, or ``built`` is set.
        released: Where its image is, if a release was given.
        end: Since when its framework's version is patched no more, if it is not.
        unbuilt: What the project's own machine lacks to build it; ``""`` where it can be built there.
        proved: Components whose vendor recipe was run, if the image was not built.
        checks: Number of checks after a build, by kind.
        missing: Components that it lacks, and what then does not work.
        advice: Warnings of the compatibility rules.
        unlocked: Number of inputs without a recorded hash.
        problem: Why it cannot be planned; ``""`` if it can.
        command: The command that builds it.
    """

    name: str
    framework: str
    version: str
    cuda: str
    cuda_version: str
    driver: str
    python: str
    base: str
    sources: str
    tag: str
    parts: tuple[Part, ...]
    optional: tuple[Part, ...]
    budget: int
    built: Built | None
    older: str
    released: Released | None
    end: EndOfPatch | None
    unbuilt: str
    proved: tuple[str, ...]
    checks: Mapping[str, int]
    missing: tuple[Missing, ...]
    advice: tuple[str, ...]
    unlocked: int
    problem: str
    command: str


def catalogue_of(facts: Facts, released: Mapping[str, Released] | None = None) -> tuple[Entry, ...]:
    """Return every target: built ones first, then those of an older recipe; by framework, the newest version first.

    Args:
        facts: All facts.
        released: What was released, by the target's name.

    Raises:
        FactsError: A check in a recipe's front matter is malformed.
    """
    rows = [
        row for _, group in groupby(sorted_rows(facts), key=lambda row: row.framework) for row in reversed(list(group))
    ]
    current = current_builds(facts)
    rows.sort(key=lambda row: (facts.name_of(row) not in current, facts.name_of(row) not in facts.built_by_target))
    return tuple(
        _entry(row, facts, current.get(name), (released or {}).get(name))
        for row in rows
        for name in (facts.name_of(row),)
    )


def _entry(row: TargetRow, facts: Facts, built: Built | None, released: Released | None) -> Entry:
    plan: ImagePlan | None = None
    problem = ""
    try:
        plan = plan_row(row, facts)
    except (CompatibilityError, LockError, UnknownNameError) as error:
        problem = str(error)
    cuda, sources, python = facts.cuda_by_name[row.cuda], facts.sources_of(row), facts.python_of(row)
    steps = [step for step in plan.steps if step.in_image] if plan else []
    inside = {step.component for step in steps}
    possible = context_of(row, facts).components.values()
    return Entry(
        name=facts.name_of(row),
        framework=row.framework,
        version=row.version,
        cuda=row.cuda,
        cuda_version=cuda.version,
        driver=cuda.minimum_driver,
        python=python,
        base=row.base,
        sources=sources,
        tag=plan.tags[0] if plan else "",
        parts=tuple(
            Part(
                name=step.component,
                version=step.version,
                summary=step.summary,
                wheels=sum(file.size for file in step.python),
            )
            for step in steps
        ),
        optional=tuple(
            Part(name=each.name, version="", summary=each.summary)
            for each in possible
            if each.name not in inside and not (each.required or each.default or each.build_only)
        ),
        budget=row.size_budget_megabytes,
        built=built,
        older=older.date if (older := facts.built_by_target.get(facts.name_of(row))) and built is None else "",
        released=released,
        end=facts.end_of_patch(row),
        unbuilt=row.unbuilt,
        proved=tuple(each.name for each in possible if each.proved) if built is None else (),
        checks=dict(Counter(check.kind for check in plan.checks).most_common()) if plan else {},
        missing=plan.missing if plan else (),
        advice=plan.advice if plan else (),
        unlocked=len(plan.unlocked) if plan else 0,
        problem=problem,
        command=build_command(request_for(row, facts)),
    )


def features_of(entries: tuple[Entry, ...]) -> tuple[str, ...]:
    """Return the components to filter by: those that some images have and others do not."""
    counts = Counter(part.name for entry in entries for part in entry.parts)
    return tuple(sorted(name for name, count in counts.items() if count < len(entries)))


def as_json(entries: tuple[Entry, ...]) -> str:
    """Return the entries for programs."""
    return json.dumps([asdict(entry) for entry in entries], indent=2) + "\n"


FACETS: Mapping[str, str] = {
    "framework": "Framework",
    "cuda": "CUDA",
    "python": "Python",
    "base": "Operating system",
    "sources": "Sources",
}
"""Attributes of an entry that a page filters by, with their headings."""


def render_catalogue(entries: tuple[Entry, ...], template: str) -> str:
    """Return the page. The same entries and template give the same bytes."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    facets = {
        name: {"title": title, "values": sorted({str(getattr(entry, name)) for entry in entries}, key=_order)}
        for name, title in FACETS.items()
    }
    data = [
        {**{name: getattr(entry, name) for name in FACETS}, "name": entry.name, "built": entry.built is not None}
        | {"parts": [part.name for part in entry.parts], "words": _words(entry)}
        for entry in entries
    ]
    return environment.from_string(template).render(
        entries=[
            asdict(entry)
            | {
                "wheels": largest((part.name, part.wheels) for part in entry.parts),
                "sizes": largest(entry.released.sizes if entry.released else ()),
            }
            for entry in entries
        ],
        amount=amount,
        facets=facets,
        features=features_of(entries),
        summaries={part.name: part.summary for entry in entries for part in entry.parts},
        data=data,
        built=sum(entry.built is not None for entry in entries),
        older=sum(bool(entry.older) for entry in entries),
    )


def largest(parts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the largest components with their bytes, largest first, and what the others have together."""
    sizes = sorted(((size, name) for name, size in parts if size), reverse=True)
    rest = sum(size for size, _ in sizes[SHOWN:])
    return [*((name, size) for size, name in sizes[:SHOWN]), *((("others", rest),) if rest else ())]


SHOWN = 5
"""How many components the page's bar of sizes shows by name."""


def _order(value: str) -> tuple[object, ...]:
    """Return a sort key: versions as numbers, newest last; names by letters."""
    return re.sub(r"[\d.]+", "", value), version_key(value), value


def _words(entry: Entry) -> str:
    """Return the text that a search looks through."""
    parts = [f"{part.name} {part.version}" for part in entry.parts]
    what = (entry.name, entry.framework, entry.version, entry.cuda, f"cuda {entry.cuda_version}")
    return " ".join((*what, f"python {entry.python}", entry.base, entry.sources, *parts)).lower()
