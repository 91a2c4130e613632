"""Download the sources of a build, or leave out the components whose sources
cannot be downloaded.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit

from trainworks.errors import HostError, UnknownNameError
from trainworks.facts.rows import Artifact, Facts
from trainworks.host.settings import HostSettings
from trainworks.inputs.sources import (
    Places,
    Unreachable,
    download_sources,
    drop_spoiled,
    missing_sources,
)
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import dependents_of, leave_out, select_components, select_row
from trainworks.plan.target import TargetContext, context_of
from trainworks.terminal.output import say

TO_GET_IT = (
    "run `python build.py mirror DIR` on a connected machine, then build with `--mirror DIR`"
)


def reachable_plan(
    request: Request,
    plan: ImagePlan,
    facts: Facts,
    places: Places,
    settings: HostSettings,
    *,
    strict: bool,
    mirror: str | None = None,
) -> tuple[ImagePlan, tuple[Unreachable, ...]]:
    """Download the sources of a plan.

    Return the plan of what can be built with them, and what was left out.

    Args:
        places: Where to look for sources.
        strict: Whether a source that cannot be downloaded is an error.
        mirror: The value of ``--mirror``, for the error.

    Raises:
        HostError: A source cannot be downloaded, and the image cannot or must
            not be built without it.
        LockError: A source does not have the hash of its row.
    """
    row = select_row(request, facts)
    target = context_of(row, facts)
    needed = _needed(request, target) if not strict else set(target.fitting)
    left_out = download_missing(plan, places, settings, facts, needed=needed, mirror=mirror)
    if not left_out:
        return plan, ()
    names = dict.fromkeys(each.component for each in left_out)
    less = make_plan(leave_out(request, names, row, facts), facts)
    chosen = select_components(request, target, facts)
    implied = {
        name
        for name in names
        if name in dependents_of([each for each in names if each != name], chosen)
    }
    marked = (replace(each, implied=each.component in implied) for each in left_out)
    return less, tuple(sorted(marked, key=lambda each: each.implied))


def names_without(
    request: Request, missing: Iterable[tuple[str, Artifact]], facts: Facts
) -> dict[str, str]:
    """Return the name that an image gets if a host cannot be reached, by the host.

    Args:
        request: What is asked for.
        missing: The sources that this machine lacks, each with its component.
        facts: All facts.

    Returns:
        Nothing of a host that the image cannot be built without.
    """
    row = select_row(request, facts)
    needed = _needed(request, context_of(row, facts))
    hosts: dict[str, list[str]] = {}
    for component, artifact in missing:
        hosts.setdefault(urlsplit(artifact.git or artifact.url).hostname or "", []).append(
            component
        )
    found = {}
    for host, names in hosts.items():
        if needed.isdisjoint(names):
            # What was asked for by name may need what is left out.
            with suppress(UnknownNameError):
                found[host] = make_plan(leave_out(request, names, row, facts), facts).tags[0]
    return found


def _needed(request: Request, target: TargetContext) -> set[str]:
    """Return the components that an image cannot be built without: required
    ones, and those asked for by name.
    """
    return {
        *request.with_components,
        *(each.name for each in target.fitting.values() if each.required),
    }


def download_missing(
    plan: ImagePlan,
    places: Places,
    settings: HostSettings,
    facts: Facts,
    *,
    needed: Container[str] | None = None,
    mirror: str | None = None,
) -> tuple[Unreachable, ...]:
    """Download the sources of a plan that are not on this machine.

    Return those that cannot be downloaded.

    Args:
        places: Where to look for its sources.
        facts: What of the plan can be left out.
        needed: Components that the image cannot be built without; default: all.
        mirror: The value of ``--mirror``, for the error.

    Raises:
        HostError: Lists every source of a needed component that cannot be downloaded.
        LockError: A source does not have the hash of its row.
    """
    drop_spoiled(plan, places)
    missing = missing_sources(plan, places)
    if not missing:
        return ()
    from trainworks.host.downloads import Client, Limits

    with Client(settings, limits=Limits(attempts=2)) as client:
        unreachable = download_sources(missing, places, client, say)
    if problems := [each for each in unreachable if needed is None or each.component in needed]:
        lines = "".join(f"\n  {each.component}: {each.file}: {each.reason}" for each in problems)
        where = f"are not in {mirror} and " if mirror else ""
        raise HostError(
            f"{plan.target.name} needs sources that {where}cannot be downloaded:{lines}",
            hint=TO_GET_IT + _leave_out(problems, facts),
        )
    return unreachable


def _leave_out(unreachable: Sequence[Unreachable], facts: Facts) -> str:
    """Return the options that build without what cannot be downloaded.

    ``""`` where an image needs some of it.
    """
    names = dict.fromkeys(each.component for each in unreachable)
    if any(each.required for each in facts.components if each.name in names):
        return ""
    return f", or build without: {' '.join(f'--without {name}' for name in names)}"


def describe_left_out(plan: ImagePlan, left_out: Sequence[Unreachable]) -> str:
    """Return the warning about components that are left out of an image, with
    the reasons and what does not work.
    """
    names = ", ".join(dict.fromkeys(each.component for each in left_out))
    costs = {missing.component: missing.cost for missing in plan.missing}
    telling = [
        each.component for each in left_out if not each.implied and costs.get(each.component)
    ]
    cost = "; ".join(dict.fromkeys(costs[name] for name in telling))
    reasons = "; ".join(dict.fromkeys(each.reason for each in left_out))
    return (
        f"warning: {plan.tags[0]} is built without {names} ({reasons}):"
        f" {cost}. To get it: {TO_GET_IT}"
    )
