"""Finds the recorded builds of today's recipes: those with the digest of the target's rendering.

A change of any byte that goes into an image (a recipe, a lock, a fact, code of the launcher) makes
its record one of an older recipe. A change of its list of missing components does not. Pure: the
records are rows of ``images/built.toml``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from trainworks.errors import TrainworksError
from trainworks.facts.rows import Built, Facts, TargetRow
from trainworks.plan.model import ImagePlan
from trainworks.plan.resolve import plan_row
from trainworks.render.dockerfile import render


def inputs_of(plan: ImagePlan, facts: Facts) -> str:
    """Return the digest of everything that decides the image of a plan: ``sha256:`` and the hash.

    ``Rendering.digest`` is that of one machine's build. This one is for records: the origin of the
    base and the list of missing components do not count.

    Raises:
        RecipeError: See ``render``.
    """
    image = plan.image
    # One machine pulls the base, another one bootstraps it: the recipe is the same.
    if plan.origin:
        image = plan.base.name
    comparable_plan = replace(plan, missing=(), image=image)
    return render(comparable_plan, facts, check=False).digest


def inputs_of_target(row: TargetRow, facts: Facts) -> str:
    """Return ``inputs_of`` for a target's own image, without ``--with`` and ``--without``.

    Raises:
        CompatibilityError, LockError, RecipeError, UnknownNameError: The target
            cannot be planned or rendered.
    """
    return inputs_of(plan_row(row, facts), facts)


def find_current_builds(
    facts: Facts, rows: Iterable[TargetRow] | None = None
) -> Mapping[str, Built]:
    """Return the recorded builds with today's inputs, by the target's name.

    Only targets with a record are rendered. A target that cannot be planned has no recipe today,
    and so no such build.

    Args:
        facts: The rows and the records.
        rows: The targets; default: all.
    """
    if rows is None:
        rows = facts.targets
    builds: dict[str, Built] = {}
    for row in rows:
        record = facts.built_by_target.get(facts.name_of(row))
        if record is None:
            continue
        with suppress(TrainworksError):
            if inputs_of_target(row, facts) == record.inputs:
                builds[record.target] = record
    return builds
