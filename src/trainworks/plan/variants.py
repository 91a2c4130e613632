"""The names of images: a target's usual image, and its variants with other components.

The name of a variant is that of the usual image and its differences: ``-tcp`` is
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
from trainworks.plan.select import find_dependents, leave_out, request_for, select_components
from trainworks.plan.target import TargetContext, context_of

LONGEST = 80
"""Characters of a variant; a longer one is named by a hash.

Registries take tags of at most 128 characters.
"""

HASHED = "-variant-"
"""The beginning of a variant that is named by a hash: ``-variant-0123456789ab``."""

TITLE_LABEL = "org.opencontainers.image.title"
"""Label of every image of this project: its target's name, with the variant.

Images that extend it inherit it.
"""

BASE_NAME_LABEL = "org.opencontainers.image.base.name"
"""Label of every image: the reference of the image that it stands on."""


@dataclass(frozen=True)
class ImageName:
    """The name of an image of this project.

    Attributes:
        row: Its target.
        variant: Its differences to the target's usual image, such as ``-tcp``.
        reference: The whole name.
    """

    row: TargetRow
    variant: str
    reference: str


@dataclass(frozen=True)
class _Part:
    """A word of a variant: a component that is added or left out."""

    component: str
    is_added: bool


def choose_usual_components(target: TargetContext, facts: Facts) -> tuple[Component, ...]:
    """Return the components of a target's own image, without ``--with`` and ``--without``."""
    request = Request(framework=target.row.framework, cuda=target.row.cuda)
    return select_components(request, target, facts)


def make_reference(row: TargetRow, facts: Facts, variant: str = "") -> str:
    """Return the name of a target's image in an engine."""
    tag = facts.name_of(row).removeprefix(f"{row.framework}-")
    return f"trainworks/{row.framework}-training:{tag}{variant}"


def make_variant(components: Sequence[Component], target: TargetContext, facts: Facts) -> str:
    """Return the part of an image's tag for its differences to the target's usual image.

    Two contents never share a name. Example: ``-tcp-with-flash-attention``.
    """
    # Components that only build are not in the image: the built ones name them.
    usual = {}
    for component in choose_usual_components(target, facts):
        if not component.build_only:
            usual[component.name] = component
    chosen = {component.name for component in components if not component.build_only}
    missing = usual.keys() - chosen
    name_by_word = {}
    for name in sorted(missing):
        if usual[name].variant:
            name_by_word[usual[name].variant] = name
    # Components that need a missing component are missing too; the name leaves them out.
    named = name_by_word.values()
    implied = {*named, *find_dependents(named, usual.values())}
    words = [f"-{word}" for word in name_by_word]
    words += [f"-with-{name}" for name in sorted(chosen - usual.keys())]
    words += [f"-without-{name}" for name in sorted(missing - implied)]
    variant = "".join(words)
    if len(variant) <= LONGEST:
        return variant
    return f"{HASHED}{hashlib.sha256(variant.encode()).hexdigest()[:12]}"


def request_of(row: TargetRow, variant: str, facts: Facts) -> Request | None:
    """Return the request for the image with this variant in its name.

    ``None`` if there is none, or if the variant is a hash.
    """
    target = context_of(row, facts)
    usual = {component.name: component for component in choose_usual_components(target, facts)}
    words: dict[str, _Part] = {}
    for component in usual.values():
        if component.variant:
            words[f"-{component.variant}"] = _Part(component.name, is_added=False)
    for name in target.components:
        if name not in usual:
            words[f"-with-{name}"] = _Part(name, is_added=True)
    for name in usual:
        words[f"-without-{name}"] = _Part(name, is_added=False)

    added: list[str] = []
    left_out: list[str] = []
    # Read one word after another: ``-tcp``, then ``-with-flash-attention``.
    rest = variant
    while rest:
        beginnings = [word for word in words if f"{rest}-".startswith(f"{word}-")]
        if not beginnings:
            return None
        # A word may begin another one: the longest is meant.
        word = max(beginnings, key=len)
        part = words[word]
        if part.is_added:
            added.append(part.component)
        else:
            left_out.append(part.component)
        rest = rest.removeprefix(word)

    # Words in another order, or of a component that others imply, name no image: the name of the
    # request's own image must be this one.
    request = replace(request_for(row, facts), with_components=tuple(added))
    with suppress(UnknownNameError):
        request = leave_out(request, left_out, row, facts)
        if make_variant(select_components(request, target, facts), target, facts) == variant:
            return request
    return None


def image_named(name: str, facts: Facts) -> ImageName | None:
    """Return the target and variant in a name of this project, or ``None``.

    The name is a target's, or its image's; both may have a variant.
    """
    for row in facts.targets:
        for usual_name in (facts.name_of(row), make_reference(row, facts)):
            if not name.startswith(usual_name):
                continue
            variant = name.removeprefix(usual_name)
            is_known = not variant or variant.startswith(HASHED)
            if is_known or request_of(row, variant, facts):
                return ImageName(row, variant, make_reference(row, facts, variant))
    return None
