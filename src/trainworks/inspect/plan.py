"""``build.py --until plan`` for people: what an image is made of, and what a build would do."""

from __future__ import annotations

from collections.abc import Iterable

from trainworks.facts.rows import Artifact
from trainworks.plan.model import ImagePlan
from trainworks.render.forecast import Forecast


def describe_plan(plan: ImagePlan) -> str:
    """Return a plan for people: target, components with their versions, what is missing and what that costs."""
    lines = [plan.target.name, f"  image  {plan.tags[0]}", f"  base   {plan.image}, Python {plan.target.python}"]
    width = max(len(step.component) for step in plan.steps)
    lines += [f"  {step.component:<{width}}  {step.version or '-':<10}  {step.summary}" for step in plan.steps]
    lines += [f"  without {missing.component}: {missing.cost}" for missing in plan.missing]
    lines += [f"  not locked: {what}" for what in plan.unlocked]
    lines += [f"  advice: {advice}" for advice in plan.advice]
    lines.append(f"  {len(plan.checks)} checks after the build; at most {plan.budget_megabytes} MB")
    return "\n".join(lines) + "\n"


def describe_forecast(expected: Forecast) -> str:
    """Return for people what a build would do: what is built again and why, and how much is downloaded."""
    if not expected.since:
        lines = ["  not built on this machine yet: everything is built"]
    elif not expected.rebuilds:
        lines = [f"  nothing changed since the build of {expected.since}"]
    else:
        lines = [f"  since the build of {expected.since}:"]
        width = max(len(rebuild.component) for rebuild in expected.rebuilds)
        lines += [f"    {each.component:<{width}}  {'; '.join(each.reasons)}" for each in expected.rebuilds]
        lines.append(f"    layers of the image are written again from {expected.layers_from} on")
        if expected.kept:
            lines.append(f"    from the engine's cache: {', '.join(expected.kept)}")
    unknown = f" and {expected.unknown_sizes} files of unknown size" if expected.unknown_sizes else ""
    lines.append(f"  downloads about {expected.download_bytes / 1e6:,.0f} MB{unknown}, less what caches have")
    if expected.recorded_megabytes:
        lines.append(f"  image: {expected.recorded_megabytes:,} MB when a build was last recorded")
    return "\n".join(lines) + "\n"


def describe_sources(missing: Iterable[tuple[str, Artifact]]) -> str:
    """Return for people which sources a build would have to download; ``""`` for none."""
    files = list(dict.fromkeys(artifact.file for _, artifact in missing))
    return f"  not on this machine yet, downloaded when the image is built: {', '.join(files)}\n" if files else ""
