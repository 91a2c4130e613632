"""``build.py report``: the size of an image by component, against its budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainworks.facts.rows import Facts
from trainworks.imagetest.probe.files import pattern_of
from trainworks.inspect.inspected_image import ImageFile, InspectedImage
from trainworks.plan.model import ImagePlan, Step
from trainworks.terminal.formatting import amount, megabytes, stacked

SHOWN = 10
"""The number of largest packages and files in the text."""

OVERWRITTEN = "replaced or removed by a later layer"
"""The name for bytes that a later layer hides."""

BAR = 40
"""Characters of the bar of all components together."""


@dataclass(frozen=True, kw_only=True)
class ComponentSize:
    """The size of a component in bytes, the number of its files, and its packages.

    Attributes:
        component: The component's name.
        size: The size of all its files.
        files: The number of its files.
        packages: Version and size of each package, the largest first:
            ``{"python torch": ("2.6", 900_000_000), "package libc6": ("2.36-9", 13_000_000)}``.
    """

    component: str
    size: int
    files: int
    packages: Mapping[str, tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class SizeReport:
    """The size of an image by component; sizes are uncompressed, in bytes.

    Attributes:
        reference: The image's name.
        identifier: ``sha256:...`` of the image's configuration.
        created: The time of creation.
        size: The size of all layers.
        budget: The limit of the size; 0 if the image is not a target's.
        parts: The components, largest first.
        overwritten: Bytes of lower layers that a later layer replaced or removed.
        largest_files: Path and size of the largest files: ``("/opt/venv/.../libtorch.so", 500)``.
    """

    reference: str
    identifier: str
    created: str
    size: int
    budget: int
    parts: tuple[ComponentSize, ...]
    overwritten: int
    largest_files: tuple[tuple[str, int], ...]


def make_size_report(contents: InspectedImage, plan: ImagePlan | None, facts: Facts) -> SizeReport:
    """Return the size of an image by component.

    A file of a package belongs to the component that the plan installs the package for, else, as a
    package that others need, to ``system``. Any other file belongs to the component whose recipe
    owns its path. Without a plan, only the packages are known.
    """
    component_of = _make_component_lookup(plan, facts)
    sizes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    packages: dict[str, Counter[str]] = {}
    for file in contents.files.values():
        component = component_of(file)
        sizes[component] += file.size
        files[component] += 1
        if file.owner:
            packages.setdefault(component, Counter())[file.owner] += file.size
    versions = {f"package {name}": version for name, version in contents.packages.items()}
    for name, version in contents.python.items():
        versions[f"python {name}"] = version
    parts = []
    for component, size in sizes.most_common():
        package_sizes = packages.get(component, Counter())
        rows = {}
        for owner, weight in package_sizes.most_common():
            rows[owner] = (versions.get(owner, ""), weight)
        part = ComponentSize(component=component, size=size, files=files[component], packages=rows)
        parts.append(part)
    budget = 0
    if plan is not None:
        budget = plan.budget_megabytes * 1_000_000
    by_size = sorted(contents.files.values(), key=lambda file: (-file.size, file.path))
    largest_files = [(file.path, file.size) for file in by_size[:SHOWN]]
    return SizeReport(
        reference=contents.image.reference,
        identifier=contents.image.identifier,
        created=contents.image.created,
        size=contents.image.size,
        budget=budget,
        parts=tuple(parts),
        overwritten=max(0, contents.image.size - sizes.total()),
        largest_files=tuple(largest_files),
    )


def _make_component_lookup(plan: ImagePlan | None, facts: Facts) -> Callable[[ImageFile], str]:
    """Return a function that finds the component of a file: ``torch``, or ``other files``."""
    steps: tuple[Step, ...] = ()
    if plan is not None:
        steps = plan.steps
    # A package that two components name belongs to the first one. Packages that
    # only other packages need belong to no component.
    by_package: dict[str, str] = {}
    by_distribution: dict[str, str] = {}
    patterns = []
    for step in steps:
        patterns.append((step.component, pattern_of(facts.recipes[step.recipe].owns)))
        if not step.in_image:
            continue
        for package in step.python:
            by_distribution[package.name] = step.component
        if step.component != "system":
            for name in step.debian:
                by_package.setdefault(name, step.component)
    generated_paths: list[str] = []
    for row in facts.generated_files:
        generated_paths += row.paths
    generated = pattern_of(generated_paths)

    def component_of(file: ImageFile) -> str:
        kind, _, name = file.owner.partition(" ")
        if kind == "python":
            return by_distribution.get(name, "other Python distributions")
        if kind == "package":
            if plan is None:
                return "Debian packages"
            return by_package.get(name, "system")
        for component, pattern in patterns:
            if pattern.fullmatch(file.path):
                return component
        if generated.fullmatch(file.path):
            return "generated files"
        return "other files"

    return component_of


def as_text(report: SizeReport) -> str:
    """Write a report for people: a bar for each component, then the largest packages and files."""
    head = f"{report.reference}: {megabytes(report.size)}"
    if report.budget:
        head += f", {report.size / report.budget:.0%} of its {megabytes(report.budget)}"
    lines = [head, ""]
    labels = [OVERWRITTEN]
    labels += [part.component for part in report.parts]
    width = max(map(len, labels))
    sizes = [part.size for part in report.parts]
    *bars, overwritten_bar = stacked([*sizes, report.overwritten], BAR)
    for part, bar in zip(report.parts, bars, strict=True):
        share = 0.0
        if report.size:
            share = part.size / report.size
        figures = f"{amount(part.size):>8}  {share:>6.1%}  {part.files:>6} files"
        lines.append(f"  {part.component:<{width}}  {figures}  {bar}")
    hidden_size = amount(report.overwritten)
    lines.append(f"  {OVERWRITTEN:<{width}}  {hidden_size:>8}{'':24}{overwritten_bar}")
    lines += ["", "largest packages"]
    weights = []
    for part in report.parts:
        for owner, (version, weight) in part.packages.items():
            weights.append((weight, owner, version, part.component))
    weights.sort(reverse=True)
    for weight, owner, version, component in weights[:SHOWN]:
        lines.append(f"  {amount(weight):>8}  {owner} {version} ({component})")
    lines += ["", "largest files"]
    lines += [f"  {amount(size):>8}  {path}" for path, size in report.largest_files]
    return "\n".join(lines) + "\n"
