"""Downloads the sources of a build, or leaves out components without reachable sources."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from trainworks.errors import HostError, UnknownNameError
from trainworks.facts.rows import Artifact, Facts
from trainworks.host.settings import HostSettings
from trainworks.inputs.sources import (
    Places,
    Unreachable,
    download_sources,
    find_missing_sources,
    remove_spoiled_sources,
)
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import find_dependents, leave_out, select_components, select_row
from trainworks.plan.target import TargetContext, context_of
from trainworks.terminal.output import say

TO_GET_IT = (
    "run `python build.py mirror DIR` on a connected machine, then build with `--mirror DIR`"
)


@dataclass(frozen=True, kw_only=True)
class SourceSupply:
    """The supply of source code: the places to look for it, and the way to get it.

    Attributes:
        places: The places to look for sources.
        settings: This machine's settings, with which servers are asked.
        mirror: The value of ``--mirror``, for an error; ``None`` without the option.
    """

    places: Places
    settings: HostSettings
    mirror: str | None = None


def make_reachable_plan(
    request: Request, plan: ImagePlan, facts: Facts, supply: SourceSupply, *, strict: bool
) -> tuple[ImagePlan, tuple[Unreachable, ...]]:
    """Download the sources of a plan.

    Return a plan of the components that can be built with them, and the sources that are missing.

    Args:
        request: The request for the image.
        plan: The plan of that request.
        facts: All facts.
        supply: The supply of sources.
        strict: Whether a source that cannot be downloaded is an error.

    Raises:
        HostError: A source cannot be downloaded, and the image cannot or must
            not be built without it.
        LockError: A source does not have the hash of its row.
    """
    row = select_row(request, facts)
    target = context_of(row, facts)
    needed = set(target.fitting)
    if not strict:
        needed = _list_needed_components(request, target)
    left_out = download_missing(plan, facts, supply, needed=needed)
    if not left_out:
        return plan, ()
    names = dict.fromkeys(source.component for source in left_out)
    smaller_plan = make_plan(leave_out(request, names, row, facts), facts)
    # A component that needs another missing one would be left out anyway.
    components = select_components(request, target, facts)
    implied = set()
    for name in names:
        other_names = [other for other in names if other != name]
        if name in find_dependents(other_names, components):
            implied.add(name)
    marked = [replace(source, implied=source.component in implied) for source in left_out]
    marked.sort(key=lambda source: source.implied)
    return smaller_plan, tuple(marked)


def name_images_without(
    request: Request, missing: Iterable[tuple[str, Artifact]], facts: Facts
) -> dict[str, str]:
    """Return the name that an image gets if a host cannot be reached, by the host.

    For example ``{"HOST": "trainworks/pytorch-training:...-tcp"}``.

    Args:
        request: The request for the image.
        missing: The sources that this machine lacks, each with its component.
        facts: All facts.

    Returns:
        The names; a host that the image cannot be built without is left out.
    """
    row = select_row(request, facts)
    needed = _list_needed_components(request, context_of(row, facts))
    components_by_host: dict[str, list[str]] = {}
    for component, artifact in missing:
        host = urlsplit(artifact.git or artifact.url).hostname or ""
        components_by_host.setdefault(host, []).append(component)
    name_by_host = {}
    for host, components in components_by_host.items():
        if needed.isdisjoint(components):
            # A component of the request may need one that is left out.
            with suppress(UnknownNameError):
                smaller_plan = make_plan(leave_out(request, components, row, facts), facts)
                name_by_host[host] = smaller_plan.tags[0]
    return name_by_host


def _list_needed_components(request: Request, target: TargetContext) -> set[str]:
    """Return the components that an image needs: required ones, and those of the request."""
    required = [component.name for component in target.fitting.values() if component.required]
    return {*request.with_components, *required}


def download_missing(
    plan: ImagePlan,
    facts: Facts,
    supply: SourceSupply,
    *,
    needed: Container[str] | None = None,
) -> tuple[Unreachable, ...]:
    """Download the sources of a plan that are not on this machine.

    Return those that cannot be downloaded.

    Args:
        plan: The plan of the image.
        facts: All facts; they say which components can be left out.
        supply: The supply of sources.
        needed: Components that the image cannot be built without; default: all.

    Raises:
        HostError: Lists every source of a needed component that cannot be downloaded.
        LockError: A source does not have the hash of its row, or a tag points at another commit.
            Ends the downloads at once.
        OutputError: The cache cannot be written.
    """
    places, mirror = supply.places, supply.mirror
    remove_spoiled_sources(plan, places)  # downloads of the past that were cut off or changed
    missing = find_missing_sources(plan, places)
    if not missing:
        return ()
    from trainworks.host.downloads import Client, Limits

    with Client(supply.settings, limits=Limits(attempts=2)) as client:
        unreachable = download_sources(missing, places, client, say)
    problems = list(unreachable)
    if needed is not None:
        problems = [source for source in unreachable if source.component in needed]
    if problems:
        lines = [f"\n  {source.component}: {source.file}: {source.reason}" for source in problems]
        where = ""
        if mirror:
            where = f"are not in {mirror} and "
        raise HostError(
            f"{plan.target.name} needs sources that {where}cannot be downloaded:{''.join(lines)}",
            hint=TO_GET_IT + _advise_without(problems, facts),
        )
    return unreachable


def _advise_without(unreachable: Sequence[Unreachable], facts: Facts) -> str:
    """Return the options that build without unreachable components: ``--without gdrcopy``.

    ``""`` if an image requires one of them.
    """
    names = dict.fromkeys(source.component for source in unreachable)
    for component in facts.components:
        if component.required and component.name in names:
            return ""
    options = " ".join(f"--without {name}" for name in names)
    return f", or build without: {options}"


def describe_left_out(plan: ImagePlan, left_out: Sequence[Unreachable]) -> str:
    """Return the warning about components that are left out of an image.

    The warning has the reasons, and the features that do not work.
    """
    names = ", ".join(dict.fromkeys(source.component for source in left_out))
    cost_by_component = {missing.component: missing.cost for missing in plan.missing}
    costs = []
    for source in left_out:
        # An implied component is the cost of another one.
        cost = cost_by_component.get(source.component)
        if cost and not source.implied:
            costs.append(cost)
    reasons = [source.reason for source in left_out]
    reason = "; ".join(dict.fromkeys(reasons))
    all_costs = "; ".join(dict.fromkeys(costs))
    return (
        f"warning: {plan.tags[0]} is built without {names} ({reason}):"
        f" {all_costs}. To get it: {TO_GET_IT}"
    )
