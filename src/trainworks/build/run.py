"""One target, as far as ``--until`` says: its plan, its rendering, or its image."""

from __future__ import annotations

import json
import os
from pathlib import Path

from trainworks.build.options import BuildOrder
from trainworks.build.session import BuildReport, BuildSession
from trainworks.inputs.source_code import name_images_without
from trainworks.inputs.sources import Places, find_missing_sources, sources_folder
from trainworks.inspect.listing import describe_support
from trainworks.inspect.plan import describe_plan, describe_sources
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.select import row_named
from trainworks.render.dockerfile import render


def run_target(
    request: Request, plan: ImagePlan, session: BuildSession, order: BuildOrder
) -> BuildReport:
    """Do with a target what the order says.

    Args:
        request: The user's choice.
        plan: Its plan.
        session: The run of the target.
        order: The stage to reach, and options.

    Raises:
        RecipeError: A recipe and its values do not fit.
        OutputError: The folder of ``--output`` has files that are not ours, or cannot be written.
        TrainworksError: See ``build.target.build_target``.
    """
    if order.until == "plan":
        return _show_plan(request, plan, session, order)
    if order.until == "render":
        return _write_rendering(plan, session, order.output)
    # Only here: a plan needs no engine's libraries.
    from trainworks.build.target import build_target

    return build_target(request, plan, session, order)


def _show_plan(
    request: Request, plan: ImagePlan, session: BuildSession, order: BuildOrder
) -> BuildReport:
    """Return a plan for people and for programs; nothing is built."""
    facts = session.facts
    places = Places(folders=session.mirror.folders(sources_folder(os.environ)))
    missing = find_missing_sources(plan, places)
    support = describe_support(row_named(plan.target.name, facts), facts)
    recorded = facts.built_by_target.get(plan.target.name)
    if request.with_components or request.without_components or request.artifacts:
        # The record is of the target's own image.
        recorded = None
    names: dict[str, str] = {}
    # A strict build fails where a source cannot be downloaded: it has no other name.
    if not order.strict and not order.record:
        names = name_images_without(request, missing, facts)
    text = describe_plan(plan, recorded, facts.components, names, support)
    text += describe_sources(missing)
    return BuildReport(report={**json.loads(plan.as_json()), "name_without": names}, text=text)


def _write_rendering(plan: ImagePlan, session: BuildSession, output: Path | None) -> BuildReport:
    """Write the build context of a plan to ``--output``, if there is one, and report it."""
    from trainworks.build.context import write_output

    text, values = write_output(render(plan, session.facts), output)
    return BuildReport(report={"name": plan.target.name, "tags": plan.tags, **values}, text=text)
