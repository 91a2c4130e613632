"""The page of all targets, as one HTML file that works without a network, with
what a release says of each.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from trainworks.errors import CompatibilityError, LockError, OutputError, UnknownNameError
from trainworks.facts.rows import Built, Component, Cuda, EndOfPatch, Facts, TargetRow
from trainworks.inspect.targets import build_command
from trainworks.plan.model import ImagePlan, Step
from trainworks.plan.resolve import plan_row
from trainworks.plan.select import request_for, sorted_rows, version_key
from trainworks.plan.target import context_of
from trainworks.render.build_records import current_builds
from trainworks.terminal.formatting import amount

FILE = "released.json"


@dataclass(frozen=True, kw_only=True)
class Released:
    """What `tools/release` writes down of a target: where its image is, and
    what changed since the one before.

    Attributes:
        date: When it was pushed, ISO 8601.
        addresses: Of the image by its digest, one for each registry.
        updates: Number of security updates that it lacked then.
        sizes: Component and bytes in the image, largest first.
        packages: Version of each package, by its kind and name.
        changed: What is in it and was not in the release before, a line each;
            empty if there was none.
    """

    date: str
    addresses: Sequence[str]
    updates: int
    sizes: Sequence[Sequence[Any]]
    packages: Mapping[str, str]
    changed: Sequence[str]


def read_released(folder: Path) -> dict[str, Released]:
    """Return what was released, by the target's name.

    Args:
        folder: The results of `tools/release`, a folder for each target (docs/ship.md).

    Raises:
        OutputError: It is no folder, or a file in it is not one of these.
    """
    if not folder.is_dir():
        raise OutputError(
            f"{folder} is not a folder", hint="give the folder of results of `tools/release`"
        )
    return {path.parent.name: _read(path) for path in sorted(folder.glob(f"*/{FILE}"))}


def write_released(folder: Path, date: str) -> None:
    """Write down that a target was released, from what the commands of its
    release printed into its folder.

    It is written once the image is pushed: a release that fails before leaves the file that was.

    Args:
        folder: With ``push.json``, ``outdated.json``, ``report.json`` and ``sbom.cdx.json``.
        date: As ``Released.date``.

    Raises:
        OutputError: One of them is missing, or is not what the commands write.
    """
    path = folder / FILE
    before = _read(path) if path.exists() else None
    try:
        pushed, outdated, report, bill = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in ("push.json", "outdated.json", "report.json", "sbom.cdx.json")
        )
        named = (each for each in bill["components"] if each.get("purl"))
        now = Released(
            date=date,
            addresses=[each["image_uri"] for each in pushed["pushed"]],
            updates=len(outdated["updates"]),
            sizes=[[part["component"], part["size"]] for part in report["parts"]],
            packages={
                row["purl"].partition("@")[0].removeprefix("pkg:"): row.get("version", "")
                for row in named
            },
            changed=[],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"{folder}: not the results of a release: {type(error).__name__}: {error}"
        ) from error
    if before is not None:
        # The same image may be pushed again, or to another repository.
        digests = [
            {address.rpartition("@")[2] for address in each.addresses} for each in (before, now)
        ]
        same = digests[0] == digests[1]
        now = replace(
            now, changed=before.changed if same else changes(before.packages, now.packages)
        )
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(now), indent=1), encoding="utf-8")
    part.replace(path)


def _read(path: Path) -> Released:
    try:
        return Released(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        what = f"{path}: not what a release writes down: {type(error).__name__}: {error}"
        raise OutputError(what, hint="remove it, and run `tools/release` again") from error


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return what is different between packages and their versions, a line each, by name."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old != new:
            lines.append(
                f"{name} {new}, new"
                if old is None
                else f"{name} {old}, gone"
                if new is None
                else f"{name} {old} -> {new}"
            )
    return lines


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One target on the page.

    Attributes:
        name: The target's name, and its address in the page.
        row: Its row.
        cell: Its CUDA row.
        facets: What the page filters by, by the keys of ``FACETS``.
        plan: Its plan; ``None`` if there is none.
        problem: Why there is none.
        parts: Its components, in the order of their layers.
        optional: What can be added to it.
        proved: Components whose vendor recipe was run, if the image was not built.
        built: The recorded build of the present recipe, if there is one.
        older: Date of the recorded build of an older recipe; ``""`` if there is
            none, or ``built`` is set.
        released: Where its image is, if a release was given.
        end: Since when its framework's version is patched no more, if it is not.
        command: The command that builds it.
    """

    name: str
    row: TargetRow
    cell: Cuda
    facets: Mapping[str, str]
    plan: ImagePlan | None
    problem: str
    parts: tuple[Step, ...]
    optional: tuple[Component, ...]
    proved: tuple[str, ...]
    built: Built | None
    older: str
    released: Released | None
    end: EndOfPatch | None
    command: str

    @property
    def wheels(self) -> list[tuple[str, int]]:
        """Bytes of the Python packages that a build downloads, by component."""
        return largest(
            (step.component, sum(file.size for file in step.python)) for step in self.parts
        )

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Bytes in the released image, by component."""
        return largest(self.released.sizes if self.released else ())

    @property
    def checks(self) -> Mapping[str, int]:
        """Number of checks after a build, by kind."""
        return (
            dict(Counter(check.kind for check in self.plan.checks).most_common())
            if self.plan
            else {}
        )

    @property
    def words(self) -> str:
        """The text that a search looks through."""
        parts = [f"{step.component} {step.version}" for step in self.parts]
        what = (self.name, *self.facets.values(), self.row.version, f"cuda {self.cell.version}")
        return " ".join((*what, f"python {self.facets['python']}", *parts)).lower()


def catalogue_of(facts: Facts, released: Mapping[str, Released] | None = None) -> tuple[Entry, ...]:
    """Return every target: built ones first, then those of an older recipe.

    By framework, the newest version first.

    Args:
        facts: All facts.
        released: What was released, by the target's name.

    Raises:
        FactsError: A check in a recipe's front matter is malformed.
    """
    rows = [
        row
        for _, group in groupby(sorted_rows(facts), key=lambda row: row.framework)
        for row in reversed(list(group))
    ]
    current = current_builds(facts)
    rows.sort(
        key=lambda row: (
            facts.name_of(row) not in current,
            facts.name_of(row) not in facts.built_by_target,
        )
    )
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
    name = facts.name_of(row)
    parts = tuple(step for step in plan.steps if step.in_image) if plan else ()
    inside = {step.component for step in parts}
    possible = context_of(row, facts).components.values()
    older = facts.built_by_target.get(name)
    return Entry(
        name=name,
        row=row,
        cell=facts.cuda_by_name[row.cuda],
        facets={
            "framework": row.framework,
            "cuda": row.cuda,
            "python": facts.python_of(row),
            "base": row.base,
            "sources": facts.sources_of(row),
        },
        plan=plan,
        problem=problem,
        parts=parts,
        optional=tuple(
            each
            for each in possible
            if each.name not in inside and not (each.required or each.default or each.build_only)
        ),
        proved=tuple(each.name for each in possible if each.proved) if built is None else (),
        built=built,
        older=older.date if older and built is None else "",
        released=released,
        end=facts.end_of_patch(row),
        command=build_command(request_for(row, facts)),
    )


def features_of(entries: tuple[Entry, ...]) -> tuple[str, ...]:
    """Return the components to filter by: those that some images have and others do not."""
    counts = Counter(step.component for entry in entries for step in entry.parts)
    return tuple(sorted(name for name, count in counts.items() if count < len(entries)))


FACETS: Mapping[str, str] = {
    "framework": "Framework",
    "cuda": "CUDA",
    "python": "Python",
    "base": "Operating system",
    "sources": "Sources",
}
"""What a page filters by, with the headings."""


def render_catalogue(entries: tuple[Entry, ...], template: str) -> str:
    """Return the page. The same entries and template give the same bytes."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["code"] = lambda text: Markup(
        re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    )
    facets = {
        name: {
            "title": title,
            "values": sorted({entry.facets[name] for entry in entries}, key=_order),
        }
        for name, title in FACETS.items()
    }
    data = [
        {**entry.facets, "name": entry.name, "built": entry.built is not None}
        | {"parts": [step.component for step in entry.parts], "words": entry.words}
        for entry in entries
    ]
    return environment.from_string(template).render(
        entries=entries,
        amount=amount,
        facets=facets,
        features=features_of(entries),
        summaries={step.component: step.summary for entry in entries for step in entry.parts},
        data=data,
        built=sum(entry.built is not None for entry in entries),
        older=sum(bool(entry.older) for entry in entries),
    )


def largest(parts: Iterable[Sequence[Any]]) -> list[tuple[str, int]]:
    """Return the largest components with their bytes, largest first, and what
    the others have together.
    """
    sizes = sorted(((size, name) for name, size in parts if size), reverse=True)
    rest = sum(size for size, _ in sizes[SHOWN:])
    return [*((name, size) for size, name in sizes[:SHOWN]), *((("others", rest),) if rest else ())]


SHOWN = 5
"""How many components the page's bar of sizes shows by name."""


def _order(value: str) -> tuple[object, ...]:
    """Return a sort key: versions as numbers, newest last; names by letters."""
    return re.sub(r"[\d.]+", "", value), version_key(value), value
