"""Which recorded builds are of today's recipes: a record counts while its digest is that of the target's rendering.

A change of anything that goes into an image (a recipe, a lock, a fact, code of the launcher) makes its record one of
an older recipe. A change of words does not: a comment, a docstring, the account of what the image lacks. Pure: the
records are rows of ``images/built.toml``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from trainworks.errors import TrainworksError
from trainworks.facts.rows import Built, Facts, TargetRow
from trainworks.plan.model import ImagePlan
from trainworks.plan.resolve import plan_row
from trainworks.render.comments import without_comments
from trainworks.render.dockerfile import render


def inputs_of(plan: ImagePlan, facts: Facts) -> str:
    """Return the digest of everything that is in the image of a plan, or decides it: ``sha256:`` and the hash.

    ``Rendering.digest`` is that of the bytes, by which an engine's image is known. This one is for records, and leaves
    out what the image is without: comments, docstrings, and the components that it lacks.

    Raises:
        RecipeError: See ``render``.
    """
    # A base that is pulled here is bootstrapped there: the recipe is the same.
    image = plan.base.name if plan.origin else plan.image
    rendering = render(replace(plan, missing=(), image=image), facts, check=False)
    digest = hashlib.sha256(without_comments("Dockerfile", rendering.dockerfile.encode()))
    for file in rendering.files:
        content = without_comments(file.path, file.content)
        digest.update(f"\0{file.path}\0{file.mode:o}\0{len(content)}\0".encode() + content)
    return f"sha256:{digest.hexdigest()}"


def inputs_of_target(row: TargetRow, facts: Facts) -> str:
    """Return ``inputs_of`` a target's own image, the one without ``--with`` and ``--without``.

    Raises:
        CompatibilityError, LockError, RecipeError, UnknownNameError: The target cannot be planned or rendered.
    """
    return inputs_of(plan_row(row, facts), facts)


def current_builds(facts: Facts, rows: Iterable[TargetRow] | None = None) -> Mapping[str, Built]:
    """Return the recorded builds whose inputs are today's, by the target's name.

    Only targets with a record are rendered. A target that cannot be planned has no recipe today, and so no such build.

    Args:
        facts: The rows and the records.
        rows: The targets to look at; default: all.
    """
    found: dict[str, Built] = {}
    for row in facts.targets if rows is None else rows:
        record = facts.built_by_target.get(facts.name_of(row))
        if record is not None:
            with suppress(TrainworksError):
                if inputs_of_target(row, facts) == record.inputs:
                    found[record.target] = record
    return found
