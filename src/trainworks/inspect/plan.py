"""``build.py --until plan`` for people: the parts of an image, and the downloads of a build."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainworks.facts.rows import Artifact, Built, Component
from trainworks.plan.model import ImagePlan


def describe_plan(
    plan: ImagePlan,
    recorded: Built | None,
    components: Iterable[Component],
    name_without: Mapping[str, str],
    support: str,
) -> str:
    """Return a plan for people: target, components with versions, and missing components.

    Args:
        plan: The plan.
        recorded: The target's last recorded build.
        components: All rows.
        name_without: The image's name if a host cannot be reached, by the host.
        support: Whether the framework's version gets patches (``describe_support``).
    """
    target = plan.target
    lines = [target.name, f"  image  {plan.tags[0]}"]
    for host, name in name_without.items():
        lines.append(f"  or     {name}, if {host} cannot be reached")
    lines.append(f"  base   {plan.image}, Python {target.python}")
    lines.append(f"  {target.framework} {target.version} {support}")
    width = max(len(step.component) for step in plan.steps)
    for step in plan.steps:
        version = step.version or "-"
        lines.append(f"  {step.component:<{width}}  {version:<10}  {step.summary}")
    lines += [f"  without {missing.component}: {missing.cost}" for missing in plan.missing]
    if recorded is None:
        unproved = find_unproved_components(plan, components)
        if unproved:
            lines.append(f"  recipes that were rendered and never run: {', '.join(unproved)}")
    lines += [f"  not locked: {source}" for source in plan.unlocked]
    lines += [f"  trusted on first use: {source}" for source in plan.first_use]
    lines += [f"  advice: {advice}" for advice in plan.advice]
    lines.append(f"  {len(plan.checks)} checks after the build; at most {plan.budget_megabytes} MB")
    sizes = []
    for step in plan.steps:
        sizes += [package.size for package in step.python]
        sizes += [artifact.size for artifact in step.artifacts]
    unknown = ""
    if 0 in sizes:
        unknown = f" and {sizes.count(0)} files of unknown size"
    lines.append(f"  downloads about {sum(sizes) / 1e6:,.0f} MB{unknown}, less what caches have")
    if recorded is not None:
        lines.append(f"  image: {recorded.megabytes:,} MB when a build was last recorded")
    return "\n".join(lines) + "\n"


def find_unproved_components(plan: ImagePlan, components: Iterable[Component]) -> tuple[str, ...]:
    """Return the components of a vendor's image with a recipe that was never run: ``("smddp",)``.

    ``()`` for an image of packages, which has other recipes.
    """
    if plan.target.sources != "vendor":
        return ()
    proved = set()
    for row in components:
        is_proved = row.proved or "packages" in row.sources
        if "vendor" in row.sources and is_proved:
            proved.add(row.name)
    return tuple(step.component for step in plan.steps if step.component not in proved)


def describe_sources(missing: Iterable[tuple[str, Artifact]]) -> str:
    """Return a line about the sources that a build would have to download; ``""`` for none."""
    files = list(dict.fromkeys(artifact.file for _, artifact in missing))
    if not files:
        return ""
    return f"  not on this machine yet, downloaded when the image is built: {', '.join(files)}\n"
