"""``build.py catalogue``: the matrix as one HTML file that needs no network, made from the facts alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby

from jinja2 import Environment, StrictUndefined

from trainworks.errors import CompatibilityError, LockError, UnknownNameError
from trainworks.facts.rows import Built, Facts, TargetRow
from trainworks.inspect.listing import sorted_rows
from trainworks.plan.model import ImagePlan, Missing
from trainworks.plan.resolve import plan_row
from trainworks.plan.select import version_key
from trainworks.plan.target import context_of
from trainworks.render.builds import current_builds


@dataclass(frozen=True, kw_only=True)
class Part:
    """A component of an image; ``version`` is ``""`` where it has none of its own."""

    name: str
    version: str
    summary: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One target, as a reader of the catalogue wants to know it.

    Attributes:
        name: The target's name, and its address in the page.
        framework: For example ``pytorch``.
        version: The framework's.
        cuda: Name of the CUDA cell.
        cuda_version: What that is; ``""`` where the cell has no CUDA.
        driver: The oldest driver that runs it.
        python: ``MAJOR.MINOR``.
        base: The operating system.
        sources: ``packages`` or ``vendor``.
        tag: The image's name.
        parts: Its components, in the order of their layers.
        optional: What can be added to it: the option's argument, and what it is.
        budget: The most it may weigh, in megabytes.
        built: The recorded build of today's recipe, ``None`` where there is none.
        older: The day of a build of an older recipe; ``""`` where there was none, or where ``built`` is there.
        proved: Components whose vendor's recipe was really run, where the image was not.
        checks: How many promises of each kind are tested after a build.
        missing: What it lacks, and what that costs.
        advice: What to know before it is used.
        unlocked: How many inputs nobody has recorded a hash of yet.
        problem: Why it cannot be planned; ``""`` if nothing stands against it.
        command: What builds it.
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
    proved: tuple[str, ...]
    checks: Mapping[str, int]
    missing: tuple[Missing, ...]
    advice: tuple[str, ...]
    unlocked: int
    problem: str
    command: str


def catalogue_of(facts: Facts) -> tuple[Entry, ...]:
    """Return every target: by framework, the newest version first.

    Raises:
        FactsError: A promise in a recipe's front matter is malformed.
    """
    rows = [
        row for _, group in groupby(sorted_rows(facts), key=lambda row: row.framework) for row in reversed(list(group))
    ]
    current = current_builds(facts)
    return tuple(_entry(row, facts, current.get(facts.name_of(row))) for row in rows)


def _entry(row: TargetRow, facts: Facts, built: Built | None) -> Entry:
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
    vendor = " --sources vendor" if sources == "vendor" else ""
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
        parts=tuple(Part(name=step.component, version=step.version, summary=step.summary) for step in steps),
        optional=tuple(
            Part(name=each.name, version="", summary=each.summary)
            for each in possible
            if each.name not in inside and not (each.required or each.default or each.build_only)
        ),
        budget=row.size_budget_megabytes,
        built=built,
        older=older.date if (older := facts.built_by_target.get(facts.name_of(row))) and built is None else "",
        proved=tuple(each.name for each in possible if each.proved) if built is None else (),
        checks=dict(Counter(check.kind for check in plan.checks).most_common()) if plan else {},
        missing=plan.missing if plan else (),
        advice=plan.advice if plan else (),
        unlocked=len(plan.unlocked) if plan else 0,
        problem=problem,
        command=(
            f"python build.py --framework {row.framework} --cuda {row.cuda} --framework-version {row.version}"
            f" --python {python}{vendor}"
        ),
    )


def features_of(entries: tuple[Entry, ...]) -> tuple[str, ...]:
    """Return the components worth a filter: those that some images have and others have not."""
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
    """Return the page: the same entries and template, the same bytes."""
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
        entries=[asdict(entry) for entry in entries],
        facets=facets,
        features=features_of(entries),
        summaries={part.name: part.summary for entry in entries for part in entry.parts},
        data=data,
        built=sum(entry.built is not None for entry in entries),
    )


def _order(value: str) -> tuple[object, ...]:
    """Sort versions as numbers, newest last, and names by their letters."""
    return re.sub(r"[\d.]+", "", value), version_key(value), value


def _words(entry: Entry) -> str:
    """Return what a search looks through."""
    parts = [f"{part.name} {part.version}" for part in entry.parts]
    what = (entry.name, entry.framework, entry.version, entry.cuda, f"cuda {entry.cuda_version}")
    return " ".join((*what, f"python {entry.python}", entry.base, entry.sources, *parts)).lower()
