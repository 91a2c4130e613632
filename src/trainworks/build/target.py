"""One target: plan, sources, rendering, image (``build.image``), record, push."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trainworks.build.context import add_local_artifacts, add_local_wheels, one_at_a_time
from trainworks.build.image import ImageResult, ImageSpec, build_image
from trainworks.build.order import BuildOrder, PushOrder
from trainworks.build.session import BuildReport, BuildSession
from trainworks.engine import choose
from trainworks.host.settings import HostSettings
from trainworks.inputs.mirror import check_mirror
from trainworks.inputs.source_code import describe_left_out, reachable_plan
from trainworks.inputs.sources import Unreachable
from trainworks.plan.locks import refuse_unlocked
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.resolve import base_reference
from trainworks.render.dockerfile import Rendering, render
from trainworks.render.forecast import inputs_of
from trainworks.terminal.output import say


def build_target(request: Request, plan: ImagePlan, session: BuildSession, order: BuildOrder) -> BuildReport:
    """Build a target's image and test it, as far as the order says.

    Args:
        request: What was asked for.
        plan: Its plan.
        session: The run that it is part of.
        order: How to build.

    Raises:
        LockError: An input is not locked, or a file is not what was locked.
        HostError: A source that the image needs cannot be downloaded.
        RegistryError: A registry refuses the push.
        BuildError, EngineError, EngineUnavailableError, OutputError, RecipeError: See ``trainworks.errors``.
    """
    facts = session.facts
    plan, left_out = _with_sources(request, plan, session, order)
    rendering = render(plan, facts)
    if order.record:
        from trainworks.build.record import refuse_record

        refuse_record(plan, rendering, facts, session.root)
    spec = image_spec(plan, rendering, session.settings, session.places.folders)
    result = build_image(spec, choose(order.engine, report=say), order)
    if left_out:
        say(describe_left_out(plan, left_out))
    report: dict[str, object] = {
        "name": plan.target.name,
        "tags": plan.tags,
        "left_out": [asdict(unreachable) for unreachable in left_out],
        **result.as_values(),
    }
    text = f"{plan.tags[0]}\n"
    if order.record and result.broken is None:
        from trainworks.build.record import record_result

        say(f"recorded in {record_result(plan, rendering, facts, result, session.root, os.environ)}")
    if order.push is not None and result.broken is None:
        report["pushed"], pushed = _push(plan.tags[0], order.push, result, session.settings)
        text += pushed
    return BuildReport(report=report, text=text, image=result)


def _with_sources(
    request: Request, plan: ImagePlan, session: BuildSession, order: BuildOrder
) -> tuple[ImagePlan, tuple[Unreachable, ...]]:
    """Download the sources of a plan; return the plan of what can be built of them, and what was left out."""
    refuse_unlocked(plan)
    if session.mirror.folder:
        check_mirror(plan, session.mirror.folder, complete=order.offline)
    # Two targets often need the same files: the second one finds what the first one downloaded.
    with one_at_a_time("sources", os.environ):
        plan, left_out = reachable_plan(
            request,
            plan,
            session.facts,
            session.places,
            session.settings,
            strict=order.strict or order.record or order.push is not None,
            mirror=order.mirror,
        )
    if left_out:
        say(describe_left_out(plan, left_out))
    return plan, left_out


def image_spec(
    plan: ImagePlan, rendering: Rendering, settings: HostSettings, sources: Sequence[Path] = ()
) -> ImageSpec:
    """Return the image of a target, ready to be built.

    Args:
        plan: The target's plan.
        rendering: Its build context.
        settings: This machine's settings.
        sources: Folders that may have files which components download; the first one that has a file wins.
    """

    def add_files(folder: Path) -> tuple[str, ...]:
        return (*add_local_wheels(plan, settings.pip, folder), *add_local_artifacts(plan, sources, folder))

    return ImageSpec(
        name=plan.target.name,
        tags=plan.tags,
        rendering=rendering,
        settings=settings,
        secrets=settings.secrets(plan.base.suite if plan.base.bootstrap else "", plan.wheel_index),
        add_files=add_files,
        checks=plan.checks,
        forbidden=settings.forbidden_texts(plan.wheel_index),
        # A base that cannot be made here is pulled by the engine itself, by the digest in its FROM.
        base=plan.base if plan.image == base_reference(plan.base) else None,
        inputs=inputs_of(plan, rendering),
    )


def _push(
    reference: str, order: PushOrder, result: ImageResult, settings: HostSettings
) -> tuple[list[dict[str, object]], str]:
    from trainworks.registry.client import Registries
    from trainworks.registry.push import push_image, report_of, tags_for, text_of

    tags = tags_for(reference, order.fixed_tags, order.moving_tags)
    with Registries(settings, report=say) as registries:
        pushed = push_image(result.engine, reference, order.repositories, tags, registries, os.environ)
    return report_of(pushed), text_of(pushed)
