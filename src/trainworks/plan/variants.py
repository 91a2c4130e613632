"""The names of images: a target's usual image, and its variants with other components.

The name of a variant is that of the usual image and what differs: ``-tcp`` is
without NCCL's plugin for EFA.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from trainworks.errors import UnknownNameError
from trainworks.facts.rows import Component, Facts, TargetRow
from trainworks.plan.model import Request
from trainworks.plan.select import dependents_of, leave_out, request_for, select_components
from trainworks.plan.target import TargetContext, context_of

LONGEST = 80
"""Longer than this a variant is named by a hash: registries take tags of at most 128 characters."""

HASHED = "-variant-"

TITLE_LABEL = "org.opencontainers.image.title"
"""Label of every image of this project: its target's name, with the variant.

Images that extend it inherit it.
"""

BASE_NAME_LABEL = "org.opencontainers.image.base.name"
"""Label of every image: the reference of the image that it stands on."""


@dataclass(frozen=True)
class ImageName:
    """The name of an image of this project: its target, and what sets it apart
    from the target's usual image.
    """

    row: TargetRow
    variant: str
    reference: str


def usual_components(target: TargetContext, facts: Facts) -> tuple[Component, ...]:
    """Return the components of a target's own image, the one without ``--with``
    and ``--without``.
    """
    return select_components(
        Request(framework=target.row.framework, cuda=target.row.cuda), target, facts
    )


def reference_of(row: TargetRow, facts: Facts, variant: str = "") -> str:
    """Return the name that an engine has an image of a target under."""
    tag = facts.name_of(row).removeprefix(f"{row.framework}-")
    return f"trainworks/{row.framework}-training:{tag}{variant}"


def variant_of(components: Sequence[Component], target: TargetContext, facts: Facts) -> str:
    """Return what sets an image apart from its target's usual one, for its tag:
    two contents never share a name.
    """
    by_default = usual_components(target, facts)
    # Of what only builds nothing is in the image: what it built says it.
    usual = {component.name: component for component in by_default if not component.build_only}
    chosen = {component.name for component in components if not component.build_only}
    missing = usual.keys() - chosen
    named = {usual[name].variant: name for name in sorted(missing) if usual[name].variant}
    # Parts that need a missing part are missing too; the name leaves them out.
    unsaid = {*named.values(), *dependents_of(named.values(), usual.values())}
    words = "".join(
        [f"-{word}" for word in named]
        + [f"-with-{name}" for name in sorted(chosen - usual.keys())]
        + [f"-without-{name}" for name in sorted(missing - unsaid)]
    )
    return (
        words
        if len(words) <= LONGEST
        else f"{HASHED}{hashlib.sha256(words.encode()).hexdigest()[:12]}"
    )


def request_of(row: TargetRow, variant: str, facts: Facts) -> Request | None:
    """Return the request whose image has this variant in its name.

    ``None`` if there is none, or it is a hash.
    """
    target = context_of(row, facts)
    usual = {component.name: component for component in usual_components(target, facts)}
    words = {f"-{each.variant}": (each.name, False) for each in usual.values() if each.variant}
    words |= {f"-with-{name}": (name, True) for name in target.components if name not in usual}
    words |= {f"-without-{name}": (name, False) for name in usual}
    parts: list[tuple[str, bool]] = []
    rest = variant
    while rest:
        word = max(
            (each for each in words if f"{rest}-".startswith(f"{each}-")), key=len, default=""
        )
        if not word:
            return None
        parts.append(words[word])
        rest = rest.removeprefix(word)
    request = replace(
        request_for(row, facts), with_components=tuple(name for name, added in parts if added)
    )
    with suppress(UnknownNameError):
        request = leave_out(request, [name for name, added in parts if not added], row, facts)
        if variant_of(select_components(request, target, facts), target, facts) == variant:
            return request
    return None


def image_named(name: str, facts: Facts) -> ImageName | None:
    """Return what a name of this project means: a target, its image, or one of both with a variant.

    Else ``None``.
    """
    for row in facts.targets:
        for usual in (facts.name_of(row), reference_of(row, facts)):
            variant = name.removeprefix(usual)
            if name.startswith(usual) and (
                not variant or variant.startswith(HASHED) or request_of(row, variant, facts)
            ):
                return ImageName(row, variant, reference_of(row, facts, variant))
    return None
