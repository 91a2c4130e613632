"""Names of images in registries, and the tags of a push."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainworks.errors import RegistryError
from trainworks.registry import ecr

DEFAULT_HOST = "docker.io"
"""The registry of names without a host, as in docker and buildah.

Logins are stored under this name.
"""

LONGEST_TAG = 128
"""Characters of the longest tag that the protocol allows."""

LONGEST_SUFFIX = len("-20261121-") + 8
"""Characters that a push may add to a dated tag: the date, and the beginning of a digest."""

PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
"""A part of a repository's name, between two slashes, as the protocol defines it."""


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The tags of a push.

    Attributes:
        fixed: Tags that never move. Another image under one of them is an error.
        dated: A tag that gets today's date, and part of the image's hash if
            another image has that date; or ``""``.
        moving: Tags that move to this image.
        shared: Multi-architecture tags: this image stands there beside those of
            other architectures.
    """

    fixed: tuple[str, ...] = ()
    dated: str = ""
    moving: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()


def derive_tags(
    reference: str,
    fixed: Sequence[str] = (),
    moving: Sequence[str] = (),
    shared: Sequence[str] = (),
) -> Tags:
    """Return the tags of a push: the chosen ones, or those derived from the image's own tag.

    From ``VERSION-cu121-py311-debian12`` follow the dated tag of the same text, and the moving tag
    ``VERSION-cu121-debian12``.

    Args:
        reference: The image in the engine: ``NAME:TAG``.
        fixed: The user's ``--tag``.
        moving: The user's ``--moving-tag``.
        shared: The user's ``--multi-arch-tag``.

    Raises:
        RegistryError: A tag is malformed, would not move, or there is none to derive the tags from.
    """
    chosen = check_tags(fixed, moving)
    name = reference.rpartition("/")[2]
    own_tag = name.partition("@")[0].partition(":")[2]
    if not own_tag and not fixed:
        raise RegistryError(
            f"{reference} has no tag to derive the pushed tags from", hint="give one with --tag"
        )
    # A fixed tag of the user takes the place of the dated one.
    dated = "" if fixed else own_tag
    if len(dated) > LONGEST_TAG - LONGEST_SUFFIX:
        raise RegistryError(
            f"the tag {dated} is too long to add a date", hint="give a shorter tag with --tag"
        )
    moving_tags = chosen.moving
    if not fixed and not moving_tags:
        # One moving tag for all Pythons of a version.
        derived = re.sub(r"-py\d+(?=-|$)", "", own_tag)
        moving_tags = check_tags((), [derived]).moving
    # A multi-architecture tag moves, too.
    for tag in check_tags((), shared).moving:
        if tag in chosen.fixed or tag in moving_tags:
            raise RegistryError(
                f"{tag} is a tag of one image", hint="give another --multi-arch-tag"
            )
    return Tags(fixed=chosen.fixed, dated=dated, moving=moving_tags, shared=tuple(shared))


def check_tags(fixed: Sequence[str], moving: Sequence[str]) -> Tags:
    """Return the user's tags as ``Tags``, if each of them is well-formed and can do its part.

    Repositories that ``ecr.ensure_repository`` creates keep some tags from moving: their second
    push would fail after all layers are sent. Such moving tags are rejected for every registry.

    Args:
        fixed: Tags that never move.
        moving: Tags that move.

    Raises:
        RegistryError: A tag is malformed, or a moving tag could not move.
    """
    for tag in (*fixed, *moving):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", tag) or len(tag) > LONGEST_TAG:
            raise RegistryError(
                f"{tag!r} is not a valid tag",
                hint=f"use letters, digits, `_`, `.` and `-`, at most {LONGEST_TAG} characters",
            )
    for tag in moving:
        reason = ""
        if tag in fixed:
            reason = "--tag has it, too"
        elif ecr.is_immutable_tag(tag):
            reason = f"it fits {ecr.IMMUTABLE_TAGS}, which Amazon ECR never moves"
        if reason:
            raise RegistryError(
                f"{tag} cannot be a moving tag: {reason}",
                hint="give it with --tag, or give another --moving-tag",
            )
    return Tags(fixed=tuple(fixed), moving=tuple(moving))


def split_reference(reference: str) -> tuple[str, str, str]:
    """Return the host, the name and the tag of a reference, as docker completes it.

    ``debian`` is (``docker.io``, ``library/debian``, ``latest``).
    """
    path, tag = reference, "latest"
    # A colon before the last slash belongs to the host's port.
    if ":" in reference.rpartition("/")[2]:
        path, _, tag = reference.rpartition(":")
    host, slash, name = path.partition("/")
    if slash and is_host(host):
        return host, name, tag
    if not slash:
        # Docker Hub's own images are in the account ``library``.
        path = f"library/{path}"
    return DEFAULT_HOST, path, tag


def is_host(text: str) -> bool:
    """Return whether the first part of a reference is a host, and not a part of a name.

    As docker decides: a host has a dot or a port, or is ``localhost``.
    """
    return "." in text or ":" in text or text == "localhost"


def check_repository(address: str) -> str:
    """Return the address of a repository unchanged, if it has the form ``HOST/NAME``.

    Raises:
        RegistryError: It is malformed, or has a user or password.
    """
    scheme, has_scheme, rest = address.partition("://")
    if has_scheme and "@" not in rest.partition("/")[0]:
        raise RegistryError(
            f"{address}: a repository is HOST/NAME, without {scheme}://", hint=f"for example {rest}"
        )
    host, slash, name = address.partition("/")
    if "@" in host:
        raise _make_login_error()
    if not slash or not is_host(host):
        raise RegistryError(
            f"{address}: a repository is HOST/NAME, and {host!r} is not a host name",
            hint=(
                f"for example {DEFAULT_HOST}/{address}, or"
                f" ACCOUNT.dkr.ecr.REGION.amazonaws.com/{address}"
            ),
        )
    if not re.fullmatch(rf"{PART}(?:/{PART})*", name):
        hint = "use lowercase letters, digits, . _ - and /"
        if ":" in name:
            hint = "give the tag with --tag"
        raise RegistryError(f"{address}: {name!r} is not a valid repository name", hint=hint)
    if not re.fullmatch(r"[A-Za-z0-9.-]+(?::[0-9]+)?|\[[0-9a-fA-F:]+\](?::[0-9]+)?", host):
        raise RegistryError(f"{host!r} is not a valid host name")
    return address


def _make_login_error() -> RegistryError:
    """Return the error for a repository with a user; it does not repeat the password."""
    return RegistryError(
        "the repository must not contain a user or password", hint="`docker login` stores them"
    )


def split_image(address: str, default_tag: str = "") -> tuple[str, str]:
    """Return the repository and the tag or digest of ``HOST/NAME:TAG`` or ``HOST/NAME@sha256:...``.

    Args:
        address: The address of an image in a registry.
        default_tag: The tag of an address with neither a tag nor a digest; ``""``: it is an error.

    Raises:
        RegistryError: The address is malformed, or has neither and there is no default.
    """
    # An ``@`` before the first slash ends a user and password.
    if "@" in address.partition("/")[0]:
        raise _make_login_error()
    name, at, digest = address.partition("@")
    tag = default_tag
    if ":" in name.rpartition("/")[2]:
        name, _, tag = name.rpartition(":")
    if at and not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise RegistryError(
            f"{address}: {digest!r} is not a digest", hint="push prints it: sha256: and 64 digits"
        )
    if not at and not tag:
        raise RegistryError(f"{address} names no image", hint="add @sha256:... or :TAG")
    repository = check_repository(name)
    if digest:
        # A digest says more than the tag before it.
        return repository, digest
    return repository, check_tags([tag], ()).fixed[0]


def image_name(repository: str, reference: str) -> str:
    """Return the name of an image: ``HOST/NAME:TAG`` or ``HOST/NAME@sha256:...``.

    Args:
        repository: ``HOST/NAME``.
        reference: A tag or a digest; only a digest has a colon.
    """
    separator = "@" if ":" in reference else ":"
    return f"{repository}{separator}{reference}"
