"""One target: plan, sources, rendering, image (``build.image``), record, push."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainworks.build.base import pull_base
from trainworks.build.context import add_local_artifacts, add_local_wheels, one_at_a_time
from trainworks.build.image import ImageResult, ImageSpec, build_image, unchanged_image
from trainworks.build.options import BuildOrder, PushOrder
from trainworks.build.session import BuildReport, BuildSession
from trainworks.engine import choose
from trainworks.engine.protocol import Engine
from trainworks.errors import EngineUnavailableError, UnknownNameError
from trainworks.host.settings import HostSettings
from trainworks.inputs.makers import MakersLists
from trainworks.inputs.mirror import check_mirror
from trainworks.inputs.source_code import SourceSupply, describe_left_out, make_reachable_plan
from trainworks.inputs.sources import Unreachable
from trainworks.plan.checks import Check, ConfigurationCheck, DeliveredFilesCheck
from trainworks.plan.locks import refuse_unlocked
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.own_base import own_base
from trainworks.plan.resolve import make_plan, remove_pulled_bases
from trainworks.render.dockerfile import Rendering, render
from trainworks.terminal.build_progress import BuildProgress
from trainworks.terminal.output import say

if TYPE_CHECKING:
    from trainworks.build.record import RecordedRecipe


def build_target(
    request: Request, plan: ImagePlan, session: BuildSession, order: BuildOrder
) -> BuildReport:
    """Build a target's image and test it, as far as the order says.

    Args:
        request: The user's choice.
        plan: Its plan.
        session: The run of the target.
        order: Options of the build.

    Raises:
        LockError: An input is not locked, or a file has another hash than in the lock.
        HostError: A source that the image needs cannot be downloaded.
        RegistryError: A registry refuses the push. BuildError, EngineError, EngineUnavailableError,
        OutputError, RecipeError: See ``trainworks.errors``.
    """
    left_out: tuple[Unreachable, ...] = ()
    refuse_unlocked(plan)
    if order.push is not None:
        from trainworks.registry.tools import find_oras

        # Before hours of building.
        find_oras()
    if session.mirror.folder:
        check_mirror(plan, session.mirror.folder, complete=order.offline)
    engine = _engine_that_answers(order)
    base = own_base(plan)
    if engine is not None and base is not None and base.origin == "pulled":
        progress = BuildProgress(verbose=order.verbose)
        if order.offline or not pull_base(base, engine, progress, again=order.pull):
            progress.line("  no registry gives the base image: it is bootstrapped instead")
            session = replace(session, facts=remove_pulled_bases(session.facts))
            plan = make_plan(request, session.facts)
    facts = session.facts
    spec = image_spec(plan, render(plan, facts), session)
    recipe: RecordedRecipe | None = None
    if order.record:
        from trainworks.build.record import prepare_record

        recipe = prepare_record(plan, facts, session.root)
    if engine is None or unchanged_image(spec, engine, order) is None:
        plan, left_out = _with_sources(request, plan, session, order)
        if left_out:
            spec = image_spec(plan, render(plan, facts), session)
    result = build_image(spec, engine or choose(order.engine), order)
    if left_out:
        say(describe_left_out(plan, left_out))
    report: dict[str, object] = {
        "name": plan.target.name,
        "tags": plan.tags,
        "left_out": [asdict(unreachable) for unreachable in left_out],
        **result.as_values(),
    }
    text = f"{plan.tags[0]}\n"
    if recipe is not None and result.broken is None:
        from trainworks.build.record import record_result

        say(f"recorded in {record_result(recipe, result, facts, session.root, os.environ)}")
    if order.push is not None and result.broken is None:
        report["pushed"], pushed = _push(plan.tags[0], order.push, result, session.settings)
        text += pushed
    return BuildReport(report=report, text=text, image=result)


def _engine_that_answers(order: BuildOrder) -> Engine | None:
    """Return the engine, or ``None``: problems of sources are reported before a missing engine."""
    with suppress(EngineUnavailableError, UnknownNameError):
        return choose(order.engine, report=say)
    return None


def _with_sources(
    request: Request, plan: ImagePlan, session: BuildSession, order: BuildOrder
) -> tuple[ImagePlan, tuple[Unreachable, ...]]:
    """Download the sources of a plan.

    Return the plan of the possible image, and the sources that were left out.
    """
    supply = SourceSupply(places=session.places, settings=session.settings, mirror=order.mirror)
    strict = order.strict or order.record or order.push is not None
    # Two targets often need the same files: the second one finds what the first one downloaded.
    with one_at_a_time("sources", os.environ):
        plan, left_out = make_reachable_plan(request, plan, session.facts, supply, strict=strict)
    if left_out:
        say(describe_left_out(plan, left_out))
    return plan, left_out


def image_spec(plan: ImagePlan, rendering: Rendering, session: BuildSession) -> ImageSpec:
    """Return the image of a target, ready to be built."""
    settings = session.settings
    suite = plan.base.suite if plan.base.bootstrap else ""
    addresses: list[str] = []
    for step in plan.steps:
        for artifact in step.artifacts:
            addresses += (artifact.url, artifact.git)

    def add_files(folder: Path) -> tuple[str, ...]:
        wheels = add_local_wheels(plan, settings.pip, folder)
        artifacts = add_local_artifacts(plan, session.places.folders, folder)
        return (*wheels, *artifacts)

    return ImageSpec(
        name=plan.target.name,
        tags=plan.tags,
        rendering=rendering,
        settings=settings,
        secrets=settings.secrets(suite, plan.wheel_index, addresses),
        add_files=add_files,
        checks=tuple(_rendered(check, rendering) for check in plan.checks),
        forbidden=settings.forbidden_texts(plan.wheel_index),
        base=own_base(plan),
        architecture=plan.base.architecture,
        makers=MakersLists(plan=plan, settings=settings, environment=os.environ, report=say),
    )


def _rendered(check: Check, rendering: Rendering) -> Check:
    """Return a check of the plan with values of the rendering."""
    if isinstance(check, DeliveredFilesCheck):
        return replace(check, digests=(*check.digests, *rendering.copied))
    if isinstance(check, ConfigurationCheck):
        return replace(check, steps=rendering.history)
    return check


def _push(
    reference: str, order: PushOrder, result: ImageResult, settings: HostSettings
) -> tuple[list[dict[str, object]], str]:
    """Push a built image, and print its tags.

    Args:
        reference: The name of the image.
        order: The repositories and tags.
        result: The image, and the engine that has it.
        settings: This machine's proxies and CAs.

    Returns:
        The results for programs, and for people.
    """
    from trainworks.registry.names import derive_tags
    from trainworks.registry.push import PushRequest, push_image, report_of, say_tags, text_of
    from trainworks.registry.tools import Registries

    tags = derive_tags(reference, order.fixed_tags, order.moving_tags)
    request = PushRequest(reference=reference, repositories=order.repositories, tags=tags)
    with Registries(settings, report=say) as registries:
        pushed = push_image(result.engine, request, registries, os.environ)
    say_tags(pushed)
    return report_of(pushed), text_of(pushed)
