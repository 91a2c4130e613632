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
PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"


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
    """Return the tags of a push: those asked for, or those derived from the image's own tag.

    ``VERSION-cu121-py311-debian12`` gets that with a date, and the moving tag
    ``VERSION-cu121-debian12``.

    Raises:
        RegistryError: A tag is malformed, would not move, or there is none to derive the tags from.
    """
    asked = check_tags(fixed, moving)
    name = reference.rpartition("/")[2]
    own = name.partition("@")[0].partition(":")[2]
    if not own and not fixed:
        raise RegistryError(
            f"{reference} has no tag to derive the pushed tags from", hint="give one with --tag"
        )
    dated = "" if fixed else own
    # A date and part of a hash are added.
    if len(dated) > LONGEST_TAG - 18:
        raise RegistryError(
            f"the tag {dated} is too long to add a date", hint="give a shorter tag with --tag"
        )
    default = () if fixed or asked.moving else (re.sub(r"-py\d+(?=-|$)", "", own),)
    moves = asked.moving or check_tags((), default).moving
    for tag in check_tags((), shared).moving:
        if tag in (*asked.fixed, *moves):
            raise RegistryError(
                f"{tag} is a tag of one image", hint="give another --multi-arch-tag"
            )
    return Tags(fixed=asked.fixed, dated=dated, moving=moves, shared=tuple(shared))


def check_tags(fixed: Sequence[str], moving: Sequence[str]) -> Tags:
    """Return the tags that were asked for.

    Raises ``RegistryError`` for a malformed one, or one that could not move.

    Repositories that ``ecr.ensure_repository`` creates keep some tags from moving: their second
    push would fail after all layers are sent. Such moving tags are rejected for every registry.
    """
    for tag in (*fixed, *moving):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", tag) or len(tag) > LONGEST_TAG:
            raise RegistryError(
                f"{tag!r} is not a valid tag",
                hint=f"use letters, digits, `_`, `.` and `-`, at most {LONGEST_TAG} characters",
            )
    for tag in moving:
        if ecr.is_immutable_tag(tag) or tag in fixed:
            why = (
                "--tag has it, too"
                if tag in fixed
                else f"it fits {ecr.IMMUTABLE_TAGS}, which Amazon ECR never moves"
            )
            raise RegistryError(
                f"{tag} cannot be a moving tag: {why}",
                hint="give it with --tag, or give another --moving-tag",
            )
    return Tags(fixed=tuple(fixed), moving=tuple(moving))


def split_reference(reference: str) -> tuple[str, str, str]:
    """Return host, name and tag of a reference: ``debian`` is (``docker.io``,
    ``library/debian``, ``latest``).
    """
    path, _, tag = (
        reference.rpartition(":")
        if ":" in reference.rpartition("/")[2]
        else (reference, "", "latest")
    )
    host, slash, name = path.partition("/")
    if slash and is_host(host):
        return host, name, tag
    return DEFAULT_HOST, path if slash else f"library/{path}", tag


def is_host(text: str) -> bool:
    """Whether the first part of a reference is a host, and not the first part of a name."""
    return "." in text or ":" in text or text == "localhost"


def check_repository(address: str) -> str:
    """Return the address of a repository, ``HOST/NAME``.

    Raises ``RegistryError`` if it is malformed.
    """
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
        hint = (
            "give the tag with --tag"
            if ":" in name
            else "use lowercase letters, digits, . _ - and /"
        )
        raise RegistryError(f"{address}: {name!r} is not a valid repository name", hint=hint)
    if not re.fullmatch(r"[A-Za-z0-9.-]+(?::[0-9]+)?|\[[0-9a-fA-F:]+\](?::[0-9]+)?", host):
        raise RegistryError(f"{host!r} is not a valid host name")
    return address


def _make_login_error() -> RegistryError:
    return RegistryError(
        "the repository must not contain a user or password", hint="`docker login` stores them"
    )


def split_image(address: str, default_tag: str = "") -> tuple[str, str]:
    """Return the repository and the tag or digest of ``HOST/NAME:TAG`` or ``HOST/NAME@sha256:...``.

    Raises:
        RegistryError: The address is malformed, or has neither and there is no default.
    """
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
    return check_repository(name), digest or check_tags([tag], ()).fixed[0]


def image_name(repository: str, reference: str) -> str:
    """Return the name of an image in a repository, by its tag or digest."""
    return f"{repository}{'@' if ':' in reference else ':'}{reference}"
