"""``push`` and ``promote``: an image goes to registries under dated, fixed and moving tags.

The engine sends an image under a temporary tag, oras copies by digest; this program sets the tags
at the end (``tags``). Every tag that never moves is also read before anything is sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainworks.engine import image_in
from trainworks.engine.archive import stored_layers
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.errors import EngineError, RegistryError
from trainworks.host import aws
from trainworks.host.cache import cache_folder, write_cached
from trainworks.registry import ecr
from trainworks.registry.names import Tags, check_repository, split_image
from trainworks.registry.tags import (
    add_to_list,
    check_fixed_tags,
    make_image_index,
    make_taken_error,
    read_images_of_tag,
    set_tags,
)
from trainworks.registry.tools import Manifest, Registries, find_oras
from trainworks.terminal.output import say
from trainworks.terminal.progress import DISPLAY

COSIGN_TAGS = (".att", ".sig", ".sbom")
"""Endings of cosign's tags for attestations, signatures and bills of materials:
``sha256-DIGEST.att``.
"""

SHORT_DIGEST = 12
"""Characters of an image's digest in the temporary tag under which it is sent."""

DIGEST_IN_TAG = 8
"""Characters of an image's digest behind a date that another image's tag has, too."""


SENT = "trainworks-sent-"
"""Beginning of the temporary tag under which an engine sends an image.

The tag is removed where the registry allows that.
"""


@dataclass(kw_only=True)
class Pushed:
    """The result of a push to one repository.

    Attributes:
        repository: ``HOST/NAME``.
        image_uri: ``HOST/NAME@sha256:...``.
        digest: The digest of the manifest, ``sha256:...``.
        tags: The tags that the image has got, the fixed ones first.
        how: ``sent``, ``copied`` (from another repository of a registry) or ``there`` (the
            repository had the image already).
    """

    repository: str
    image_uri: str = ""
    digest: str = ""
    tags: list[str] = field(default_factory=list)
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class _FixedTags:
    """The tags that never move, and the image's manifest if one of them exists already.

    Attributes:
        names: The tags; for a dated tag with its date.
        existing: The manifest of this image, read under one of the tags; ``None`` without one.
    """

    names: tuple[str, ...]
    existing: Manifest | None


@dataclass(frozen=True, kw_only=True)
class PushRequest:
    """An image to push, and the names that it gets.

    Attributes:
        reference: The image in the engine.
        repositories: The repositories: ``HOST/NAME`` each.
        tags: The tags in each repository.
        today: The date of the dated tag; ``None``: now, UTC.
    """

    reference: str
    repositories: Sequence[str]
    tags: Tags
    today: datetime | None = None


def push_image(
    engine: Engine, request: PushRequest, registries: Registries, environment: Mapping[str, str]
) -> list[Pushed]:
    """Push an image to each repository; layers that a repository has are not sent.

    A repository of ECR is created if it does not exist. A file in the user's cache folder gets the
    repositories that have the image, so that a later push to the same registry copies it there.

    Args:
        engine: The engine that has the image.
        request: The image, its repositories and tags.
        registries: The connections to registries.
        environment: The process's environment: it names the user's cache folder.

    Returns:
        One result for each repository, in their order.

    Raises:
        HostError: oras is not installed.
        UnknownNameError: The engine has no such image.
        RegistryError: A registry refuses, or another image has a tag that never moves. The failing
            repository and those after it got no tag; the command can be repeated.
    """
    reference, repositories, tags = request.reference, request.repositories, request.tags
    # A missing oras is an error before anything is sent.
    find_oras()
    image = image_in(engine, reference, hint="build it first, or choose another --engine")
    day = f"{request.today or datetime.now(UTC):%Y%m%d}"
    for repository in map(check_repository, repositories):
        create_repository_in_ecr(repository)
    # Every tag is read before anything is sent: a tag that cannot be set is an error at once.
    fixed_tags = []
    for repository in repositories:
        fixed_tags.append(_read_fixed_tags(registries, repository, tags, image.identifier, day))
    for repository in repositories:
        for tag in tags.shared:
            # Raises an error if the tag is an image of one architecture.
            read_images_of_tag(registries, repository, tag)
    image_hash = hashlib.sha256(image.identifier.encode()).hexdigest()
    record = cache_folder(environment, "pushes", f"{image_hash[:32]}.json")
    earlier_pushes = _read_pushes(record)
    results = []
    for repository, fixed in zip(repositories, fixed_tags, strict=True):
        manifest, how = fixed.existing, "there"
        if manifest is None:
            manifest = _copy_from_registry(registries, repository, earlier_pushes, image)
            how = "copied"
        with contextlib.ExitStack() as stack:
            if manifest is None:
                short_digest = image.identifier.removeprefix("sha256:")[:SHORT_DIGEST]
                # The random end keeps pushes of one image at the same time apart.
                name = f"{SENT}{short_digest}-{secrets.token_hex(4)}"
                _send(registries, engine, image, f"{repository}:{name}")
                manifest, how = registries.read_manifest(repository, name), "sent"
                stack.callback(_remove_temporary_tag, registries, repository, manifest, name)
            # A manifest that was read by a name must also exist by its digest.
            manifest = registries.read_manifest(repository, manifest.digest)
            if not manifest.is_of(image.identifier):
                raise RegistryError(
                    f"{repository}@{manifest.digest} is not the image {reference} that was sent"
                )
            earlier_pushes[repository] = manifest.digest
            # Without the record only time is lost: the next push sends the image again.
            with contextlib.suppress(OSError):
                write_cached(record, json.dumps(earlier_pushes).encode())
            names = set_tags(registries, repository, manifest, fixed.names, tags.moving)
            for tag in tags.shared:
                if add_to_list(registries, repository, manifest, tag):
                    names.append(tag)
        # The removal of the temporary tag must not have removed the image.
        registries.read_manifest(repository, manifest.digest)
        results.append(_make_pushed(repository, manifest.digest, names, how))
    return results


def _send(registries: Registries, engine: Engine, image: BuiltImage, name: str) -> None:
    """Have an engine push an image under ``HOST/NAME:TAG``, and show its progress.

    Raises:
        EngineError: The image on this machine is damaged.
        RegistryError: The registry refuses, or the engine failed in each attempt.
    """
    repository = name.rpartition(":")[0]
    plain = registries.is_plain_http(_host_of(repository))
    with (
        engine.push_command(image, name, plain=plain) as argv,
        DISPLAY.task("pushing", log=False),
    ):
        registries.run_push(
            repository, argv, show=_say_layer, check_image=lambda: _check_digests(engine, image)
        )


def _check_digests(engine: Engine, image: BuiltImage) -> None:
    """Read an image as a push does, and compare its layers with their digests.

    Raises:
        EngineError: The engine cannot read a layer, or the bytes have another digest.
    """
    try:
        with engine.archive(image.identifier) as stream:
            digests = {layer.digest for layer in stored_layers(stream)}
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise _make_unreadable_error(engine, image, str(error)) from error
    except EngineError as error:
        raise _make_unreadable_error(engine, image, error.message) from error
    damaged = [name for name in image.layers if name not in digests]
    if damaged:
        raise _make_unreadable_error(
            engine, image, f"other bytes than the digest says: {', '.join(damaged)}"
        )


def _make_unreadable_error(engine: Engine, image: BuiltImage, reason: str) -> EngineError:
    """Return the error for an image whose layers this machine cannot read."""
    return EngineError(
        f"{engine.name} cannot read the image {image.reference} on this machine: {reason}",
        hint=(
            "`build.py check --image` says which bytes are damaged; remove the image, and pull or"
            " build it again"
        ),
    )


def _remove_temporary_tag(
    registries: Registries, repository: str, image: Manifest, name: str
) -> None:
    """Remove the tag under which an image was sent, or print that the registry keeps it.

    Registries remove manifests, and many do not remove a tag alone: the tag gets a manifest of its
    own first, so that the image stays.

    Args:
        registries: The connections to registries.
        repository: ``HOST/NAME``.
        image: The image that was sent.
        name: The tag.
    """
    is_removed = False
    with contextlib.suppress(RegistryError):
        value = make_image_index([image.descriptor], {"trainworks.sent": name})
        digest = registries.put_manifest(repository, value, tag=name)
        is_removed = registries.delete_manifest(repository, digest)
    if not is_removed:
        say(
            f"  {repository} keeps the tag {name}, under which the image was sent:"
            " the registry removes nothing"
        )


def _say_layer(line: str) -> None:
    """Print a line of the engine about a layer, unless the layer only waits for its turn."""
    if not line.endswith((": Preparing", ": Waiting")):
        say(f"  {line}")


def _host_of(repository: str) -> str:
    """Return the host of a repository ``HOST/NAME``."""
    return repository.partition("/")[0]


def _copy_from_registry(
    registries: Registries, repository: str, earlier_pushes: Mapping[str, str], image: BuiltImage
) -> Manifest | None:
    """Copy an image from another repository of the same registry, and print a line about it.

    Args:
        registries: The connections to registries.
        repository: The repository that gets the image, ``HOST/NAME``.
        earlier_pushes: The repositories that this machine pushed the image to, with its digests.
        image: The image in the engine.

    Returns:
        The manifest of the image; ``None`` if no repository of the registry has the image, or no
        copy succeeded.
    """
    sources = [name for name in earlier_pushes if _host_of(name) == _host_of(repository)]
    # The repository itself first (False comes before True): then nothing is copied.
    sources.sort(key=lambda name: name != repository)
    for source in sources:
        # After a failure the next repository is tried; at last the engine sends the image.
        with contextlib.suppress(RegistryError):
            manifest = registries.find_manifest(source, earlier_pushes[source])
            if manifest is not None and manifest.is_of(image.identifier):
                registries.copy_image(source, repository, manifest.digest, attached=False)
                say(f"  {repository}: copied from {source}")
                return manifest
    return None


def _read_fixed_tags(
    registries: Registries, repository: str, tags: Tags, identifier: str, day: str
) -> _FixedTags:
    """Choose the tags that never move, and read what they are in a repository.

    A dated tag that another image has gets the beginning of the image's digest.

    Args:
        registries: The connections to registries.
        repository: ``HOST/NAME``.
        tags: The tags of the push.
        identifier: The image in the engine, ``sha256:...``.
        day: The date of the dated tag: ``20261121``.

    Raises:
        RegistryError: Another image has one of the tags.
    """
    # Names for each tag: the first one that no other image has is taken.
    alternatives: list[tuple[str, ...]] = [(tag,) for tag in tags.fixed]
    if tags.dated:
        dated = f"{tags.dated}-{day}"
        short_digest = identifier.removeprefix("sha256:")[:DIGEST_IN_TAG]
        alternatives.append((dated, f"{dated}-{short_digest}"))
    fixed: list[str] = []
    existing = None
    for names in alternatives:
        for name in names:
            manifest = registries.find_manifest(repository, name)
            if manifest is None or manifest.is_of(identifier):
                break
        else:
            raise make_taken_error(repository, name, manifest.digest if manifest else "")
        fixed.append(name)
        if manifest is not None:
            existing = manifest
    return _FixedTags(names=tuple(fixed), existing=existing)


def create_repository_in_ecr(repository: str) -> None:
    """Create a repository if it is of ECR and does not exist; do nothing for other registries.

    Prints a line when it has created the repository, or cannot because of missing credentials.

    Raises:
        RegistryError: AWS refuses.
    """
    host, _, name = repository.partition("/")
    registry = ecr.parse_host(host)
    if registry is None:
        return
    if not ecr.has_credentials():
        say(
            f"  {repository}: no AWS credentials for boto3,"
            f" so the repository must exist (boto3, in the checkout: {aws.INSTALL})"
        )
    elif ecr.ensure_repository(registry, name):
        say(f"  {repository}: created, with scan on push and dated tags that never move")


def _make_pushed(repository: str, digest: str, tags: Sequence[str], how: str) -> Pushed:
    return Pushed(
        repository=repository,
        image_uri=f"{repository}@{digest}",
        digest=digest,
        tags=list(tags),
        how=how,
    )


def promote_image(
    source: str, targets: Sequence[str], tags: Tags, registries: Registries
) -> list[Pushed]:
    """Copy an image between repositories by its digest, with attachments and theirs.

    A target of ECR is created if it does not exist. A target gets its tags after it has the image
    and all attachments.

    Args:
        source: ``HOST/NAME@sha256:...`` or ``HOST/NAME:TAG``.
        targets: The repositories that get the image, ``HOST/NAME`` each.
        tags: ``fixed`` and ``moving`` ones; default: the source's tag, if the
            source has one; that tag does not move then.
        registries: The connections to registries.

    Returns:
        One result for each target, in their order.

    Raises:
        HostError: oras is not installed.
        RegistryError: A registry refuses, or another image has a tag that never moves. The failing
            target and those after it got no tag.
    """
    origin, reference = split_image(source)
    repositories = [check_repository(target) for target in targets]
    find_oras()
    manifest = registries.read_manifest(origin, reference)
    digest = manifest.digest
    is_digest = ":" in reference
    if not tags.fixed and not tags.moving and not is_digest:
        tags = Tags(fixed=(reference,))
    for repository in repositories:
        create_repository_in_ecr(repository)
    for repository in repositories:
        check_fixed_tags(registries, repository, digest, tags.fixed)
    with DISPLAY.task("copying", log=False):
        attachments = set(_find_attachments(registries, origin, manifest))
        results = []
        for repository in repositories:
            registries.copy_image(origin, repository, digest, attached=True)
            # Older versions of cosign attach by a tag, which no list of attachments has.
            for name in _find_cosign_tags(registries, origin, manifest):
                cosign_digest = registries.read_manifest(origin, name).digest
                registries.copy_image(origin, repository, cosign_digest, tag=name, attached=True)
            lost = attachments - set(_find_attachments(registries, repository, manifest))
            if lost:
                raise RegistryError(
                    f"{repository}@{digest} lacks {', '.join(sorted(lost))},"
                    f" attached to it in {origin}; it got no tag",
                    hint="repeat the command",
                )
            if attachments:
                say(f"  {repository}: copied with {len(attachments)} attachments")
            how = "copied" if _host_of(origin) == _host_of(repository) else "sent"
            copy = registries.read_manifest(repository, digest)
            names = set_tags(registries, repository, copy, tags.fixed, tags.moving)
            results.append(_make_pushed(repository, digest, names, how))
    return results


def _image_digests(manifest: Manifest) -> list[str]:
    """Return the digests of an image and of the images that it lists, one for each platform."""
    platform_images = [str(row["digest"]) for row in manifest.read_descriptors("manifests")]
    return [manifest.digest, *platform_images]


def _find_attachments(registries: Registries, repository: str, manifest: Manifest) -> Iterator[str]:
    """Yield the digest of each attachment, once.

    Attachments are those of the image, of its platforms' images, and of attachments themselves,
    such as the signature of a proof.
    """
    pending = _image_digests(manifest)
    digests = set(pending)
    while pending:
        for referrer in registries.read_referrers(repository, pending.pop()):
            digest = str(referrer["digest"])
            if digest not in digests:
                digests.add(digest)
                pending.append(digest)
                yield digest


def _find_cosign_tags(registries: Registries, repository: str, manifest: Manifest) -> Iterator[str]:
    """Yield the tags of cosign that the repository has for an image and its platforms' images."""
    for digest in _image_digests(manifest):
        for end in COSIGN_TAGS:
            tag = f"{digest.replace(':', '-')}{end}"
            if registries.find_manifest(repository, tag) is not None:
                yield tag


def report_of(results: Sequence[Pushed]) -> list[dict[str, Any]]:
    """Return the results as objects for ``--format json``, with the keys of ``Pushed``."""
    return [asdict(result) for result in results]


def text_of(results: Sequence[Pushed]) -> str:
    """Return the results for stdout: one line ``HOST/NAME@sha256:...`` for each repository."""
    return "".join(f"{result.image_uri}\n" for result in results)


def say_tags(results: Sequence[Pushed]) -> None:
    """Print the tags of each repository for people."""
    for result in results:
        for tag in result.tags:
            say(f"  {result.repository}:{tag}")


def _read_pushes(path: Path) -> dict[str, str]:
    """Read the record of an image's pushes: the repositories that have it, with its digests.

    ``{}`` if there is no record, or if it cannot be read.
    """
    try:
        pushes = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(pushes, dict):
        return {}
    has_only_texts = all(isinstance(digest, str) for digest in pushes.values())
    return pushes if has_only_texts else {}
