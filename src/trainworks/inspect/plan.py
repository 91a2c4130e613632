"""``build.py --until plan`` for people: what an image is made of, and what a build downloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainworks.facts.rows import Artifact, Built, Component
from trainworks.plan.model import ImagePlan


def describe_plan(
    plan: ImagePlan,
    recorded: Built | None,
    components: Iterable[Component],
    name_without: Mapping[str, str],
    patches_until: str,
) -> str:
    """Return a plan for people: target, components with their versions, what is
    missing and what that costs.

    Args:
        plan: The plan.
        recorded: The target's last recorded build.
        components: All rows.
        name_without: The image's name if a host cannot be reached, by the host.
        patches_until: The day from which the framework's version gets no more
            patches, or what that day will be.
    """
    lines = [plan.target.name, f"  image  {plan.tags[0]}"]
    lines += [
        f"  or     {name}, if {host} cannot be reached" for host, name in name_without.items()
    ]
    lines.append(f"  base   {plan.image}, Python {plan.target.python}")
    lines.append(
        f"  {plan.target.framework} {plan.target.version} gets patches until {patches_until}"
    )
    width = max(len(step.component) for step in plan.steps)
    lines += [
        f"  {step.component:<{width}}  {step.version or '-':<10}  {step.summary}"
        for step in plan.steps
    ]
    lines += [f"  without {missing.component}: {missing.cost}" for missing in plan.missing]
    if recorded is None and (never := never_run(plan, components)):
        lines.append(f"  recipes that were rendered and never run: {', '.join(never)}")
    lines += [f"  not locked: {what}" for what in plan.unlocked]
    lines += [f"  trusted on first use: {what}" for what in plan.first_use]
    lines += [f"  advice: {advice}" for advice in plan.advice]
    lines.append(f"  {len(plan.checks)} checks after the build; at most {plan.budget_megabytes} MB")
    sizes = [
        size
        for step in plan.steps
        for size in (*(each.size for each in step.python), *(each.size for each in step.artifacts))
    ]
    unknown = f" and {sizes.count(0)} files of unknown size" if 0 in sizes else ""
    lines.append(f"  downloads about {sum(sizes) / 1e6:,.0f} MB{unknown}, less what caches have")
    if recorded is not None:
        lines.append(f"  image: {recorded.megabytes:,} MB when a build was last recorded")
    return "\n".join(lines) + "\n"


def never_run(plan: ImagePlan, components: Iterable[Component]) -> tuple[str, ...]:
    """Return the components of a vendor's image whose recipe was never run.

    Images of packages have others.
    """
    if plan.target.sources != "vendor":
        return ()
    run = {
        row.name
        for row in components
        if "vendor" in row.sources and (row.proved or "packages" in row.sources)
    }
    return tuple(step.component for step in plan.steps if step.component not in run)


def describe_sources(missing: Iterable[tuple[str, Artifact]]) -> str:
    """Return for people which sources a build would have to download; ``""`` for none."""
    files = list(dict.fromkeys(artifact.file for _, artifact in missing))
    return (
        f"  not on this machine yet, downloaded when the image is built: {', '.join(files)}\n"
        if files
        else ""
    )
