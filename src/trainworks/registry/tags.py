"""Sets the tags of an image in a registry; only one of several racing pushes gets a fixed tag.

In a registry the last writer of a tag wins; the protocol has no "only if it is absent". So each
push first writes a *claim*, a manifest beside the tag, and reads the claim again after it has set
the tag. Of two pushes, the push that still has its claim has the tag, and the other one puts the
tag back. docs/adr/0073 has the argument, step by step.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainworks.errors import RegistryError
from trainworks.registry.protocol import RegistryUnreachableError
from trainworks.registry.tools import Manifest, Registries
from trainworks.terminal.output import say

DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
"""The media types of a multi-architecture tag, which is a list of images.

A list in Docker's form has images in Docker's form only.
"""

MERGES = 5
"""Attempts to add an image to a multi-architecture tag that other pushes change, too."""

CLAIM = "trainworks-claim-"
"""Beginning of the tag with the claim of another tag.

Without a dot, so that ECR lets the tag move.
"""

WON = "trainworks.won"
"""Annotation of a claim: its push has the tag for good, although the tag still is another image."""

_PAUSE = 0.05
"""Seconds between two requests about the work of another push."""

_PATIENCE = 5
"""How long a push waits for another push that may have won, as a multiple of the first pause.

The push that may have won waits twice as long.
"""


def claim_tag(tag: str) -> str:
    """Return the tag that has the claim of another tag: ``trainworks-claim-`` and 16 digits."""
    return f"{CLAIM}{hashlib.sha256(tag.encode()).hexdigest()[:16]}"


def make_taken_error(repository: str, tag: str, digest: str) -> RegistryError:
    """Return the error for a tag that never moves and is another image."""
    return RegistryError(
        f"{repository}:{tag} is another image ({digest}), and this tag never moves",
        hint="use another --tag, or give a tag that may move with --moving-tag",
    )


def check_fixed_tags(
    registries: Registries, repository: str, digest: str, fixed: Sequence[str]
) -> None:
    """Check that no other image has one of the tags that never move.

    Args:
        registries: The connections to registries.
        repository: ``HOST/NAME``.
        digest: The digest of the image that will get the tags, ``sha256:...``.
        fixed: The tags that never move.

    Raises:
        RegistryError: Another image has a tag.
    """
    for tag in fixed:
        manifest = registries.find_manifest(repository, tag)
        if manifest is not None and manifest.digest != digest:
            raise make_taken_error(repository, tag, manifest.digest)


def set_tags(
    registries: Registries,
    repository: str,
    image: Manifest,
    fixed: Sequence[str],
    moving: Sequence[str],
) -> list[str]:
    """Set tags on an image of a repository, those that never move first.

    It waits for other pushes that set the same tags (``_Race``), and prints a line for each moving
    tag that another push has moved meanwhile.

    Args:
        registries: The connections to registries.
        repository: The repository, ``HOST/NAME``.
        image: The image, which the repository has.
        fixed: Tags that never move.
        moving: Tags that move to this image.

    Returns:
        The tags of the image at the end. A moving tag that another push has moved meanwhile is
        missing.

    Raises:
        RegistryError: Another image has a tag that never moves; or the registry
            does not have the image's digest.
    """
    check_fixed_tags(registries, repository, image.digest, fixed)
    # All pushes race for their tags in one order. Otherwise, of two pushes with the same two tags,
    # each could win one.
    races = [_Race(registries, repository, image, tag) for tag in sorted(set(fixed))]
    for race in races:
        race.run()
    for tag in moving:
        registries.put_tag(repository, tag, image)
    # The image may have been removed while it had no tag.
    registries.read_manifest(repository, image.digest)
    # Another push that lost a race may have overwritten a tag, and puts it back.
    for race in races:
        race.wait_until_set()
    names = list(fixed)
    for tag in moving:
        digest = registries.read_manifest(repository, tag).digest
        if digest == image.digest:
            names.append(tag)
        else:
            say(f"  {repository}:{tag} was moved by another push meanwhile: it is {digest}")
    return names


def read_images_of_tag(
    registries: Registries, repository: str, tag: str
) -> tuple[Mapping[str, Any], ...]:
    """Read the descriptors of the images of a multi-architecture tag.

    Returns:
        The descriptors; none if the tag does not exist yet.

    Raises:
        RegistryError: The tag is an image of one architecture.
    """
    manifest = registries.find_manifest(repository, tag)
    if manifest is None:
        return ()
    if "manifests" not in manifest.value:
        raise RegistryError(
            f"{repository}:{tag} is an image of one architecture",
            hint="give another --multi-arch-tag, or remove that tag",
        )
    return manifest.read_descriptors("manifests")


def add_to_list(registries: Registries, repository: str, image: Manifest, tag: str) -> bool:
    """Add an image to a multi-architecture tag; an earlier image for its processors is replaced.

    The tag is written again until it has this image and those of pushes at the same time. A line
    is printed if another push has replaced this image.

    Args:
        registries: The connections to registries.
        repository: The repository, ``HOST/NAME``.
        image: The image, which the repository has.
        tag: The multi-architecture tag.

    Returns:
        Whether the tag has the image at the end; another push for these processors may have
        replaced the image.

    Raises:
        RegistryError: The tag is an image, this image is a list itself, or
            other pushes change the tag all the time.
    """
    if not image.configuration:
        raise RegistryError(
            f"{repository}@{image.digest} is a list of images,"
            f" which cannot stand in the list of {tag}",
            hint="push it without --multi-arch-tag",
        )
    configuration = json.loads(registries.read_blob(repository, image.configuration))
    platform = {key: configuration[key] for key in ("architecture", "os")}
    own_row = {**image.descriptor, "platform": platform}
    # Another push may have read the tag before this push changes the tag. That push reads this
    # claim after its own change, and adds this image.
    claim_value = make_image_index([own_row], {"trainworks.claim": tag})
    claimed = _put_claim(registries, repository, tag, claim_value)
    added_rows: list[Mapping[str, Any]] = [own_row]
    for _ in range(MERGES):
        started = time.monotonic()
        # Of two rows for one platform the later one stays.
        row_by_platform: dict[str, Mapping[str, Any]] = {}
        for row in (*read_images_of_tag(registries, repository, tag), *added_rows):
            row_by_platform[str(row.get("platform"))] = row
        rows = [row_by_platform[key] for key in sorted(row_by_platform)]
        value = {"schemaVersion": 2, "mediaType": _list_type(rows), "manifests": rows}
        registries.put_manifest(repository, value, tag=tag)
        # A program that writes no claims may have read the tag before this push changed it. It
        # needs about as long as this push to write its change, which is then seen below.
        time.sleep(time.monotonic() - started)
        claim = _read_claim(registries, repository, tag) if claimed else None
        claimed_row = own_row if claim is None else claim.image
        digests = {row["digest"] for row in read_images_of_tag(registries, repository, tag)}
        is_same_platform = claimed_row.get("platform") == platform
        is_replaced = is_same_platform and claimed_row["digest"] != image.digest
        # Of two images for the same processors the one that was claimed last stays.
        added_rows = [claimed_row] if is_replaced else [claimed_row, own_row]
        if all(row["digest"] in digests for row in added_rows):
            if is_replaced:
                say(
                    f"  {repository}:{tag} was given another image"
                    f" for {platform['architecture']} meanwhile"
                )
            return not is_replaced
    raise RegistryError(
        f"{repository}:{tag} was changed by another push at the same time",
        hint="repeat the command",
    )


def _list_type(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the media type for a list of images: Docker's if all of them are in Docker's form."""
    for row in rows:
        if "vnd.docker." not in str(row.get("mediaType")):
            return OCI_INDEX
    return DOCKER_LIST


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """The claim of a tag by a push.

    Attributes:
        image: The descriptor of the image for which the push claims the tag.
        won: Whether the push has the tag for good.
        manifest: The claim in the registry.
    """

    image: Mapping[str, Any]
    won: bool
    manifest: Manifest

    @property
    def digest(self) -> str:
        """The digest of the image."""
        return str(self.image["digest"])


def _read_claim(registries: Registries, repository: str, tag: str) -> _Claim | None:
    """Read the claim of a tag in a registry; ``None`` without one, or if it is malformed."""
    manifest = registries.find_manifest(repository, claim_tag(tag))
    if manifest is None:
        return None
    rows = manifest.read_descriptors("manifests")
    if len(rows) != 1:
        return None
    annotations = manifest.value.get("annotations")
    won = isinstance(annotations, Mapping) and WON in annotations
    return _Claim(image=rows[0], won=won, manifest=manifest)


def _put_claim(registries: Registries, repository: str, tag: str, value: Mapping[str, Any]) -> bool:
    """Write the claim of a tag into a registry, in place of an earlier one.

    Args:
        registries: The connections to registries.
        repository: ``HOST/NAME``.
        tag: The tag that is claimed.
        value: The claim, a manifest.

    Returns:
        Whether it was written. ``False``, and a printed line, if the registry refuses the claim's
        tag, for example because all its tags are immutable.

    Raises:
        RegistryUnreachableError: The registry does not answer.
    """
    name = claim_tag(tag)
    try:
        registries.put_manifest(repository, value, tag=name)
    except RegistryUnreachableError:
        raise
    except RegistryError as error:
        say(
            f"  {repository}:{name} cannot be written, so only the registry keeps {tag}"
            f" ({error.message})"
        )
        return False
    return True


class _Race:
    """The race of this push for a tag that never moves, with a push of another image.

    docs/adr/0073 has the argument, step by step.
    """

    def __init__(self, registries: Registries, repository: str, image: Manifest, tag: str) -> None:
        """Store the image and the tag that it should get; nothing is sent yet."""
        self._registries = registries
        self._repository = repository
        self._image = image
        self._tag = tag
        # Whether the registry has taken this push's claim.
        self._claimed = False
        self._wait_seconds = _PATIENCE * registries.patience.pause

    def run(self) -> None:
        """Set the tag, and wait until it stays this push's.

        Raises:
            RegistryError: Another image has the tag.
        """
        has_tag = False
        while not has_tag:
            # ``False``: the other push has lost, and has put this image under the tag.
            has_tag = self._attempt()

    def _attempt(self) -> bool:
        """Claim the tag, set it, and wait for the decision between this push and another one.

        Returns:
            Whether this push has the tag. ``False`` if the other push has given way, so that
            another attempt may succeed.

        Raises:
            RegistryError: Another image has the tag.
        """
        former = _read_claim(self._registries, self._repository, self._tag)
        # An earlier push of this image has the tag already.
        if former is not None and former.digest == self._image.digest and self._has_tag():
            return True
        # First the claim, then the look at the tag: so two pushes that both see no tag have both
        # claimed before either of them reads the claims.
        self._claimed = self._write_claim(_make_claim(self._image, self._tag, won=False))
        started = time.monotonic()
        tagged = self._registries.find_manifest(self._repository, self._tag)
        if tagged is not None and tagged.digest != self._image.digest:
            if self._claimed:
                self._withdraw(former, tagged)
            return self._check_given_way()
        if tagged is None:
            self._put_tag(self._image)
        seconds = time.monotonic() - started
        if self._claimed:
            self._wait_for_decision()
        # A program that writes no claims, such as `docker push`, may have read the tag before
        # this push set it.
        time.sleep(seconds)
        self.wait_until_set()
        return True

    def _has_tag(self) -> bool:
        """Return whether the tag is this push's image in the registry."""
        manifest = self._registries.find_manifest(self._repository, self._tag)
        return manifest is not None and manifest.digest == self._image.digest

    def _withdraw(self, former: _Claim | None, tagged: Manifest) -> None:
        """Give the claim back to the push that has the tag: that push reads the claim again.

        Args:
            former: The claim before this push's own; ``None``: there was none.
            tagged: The image that has the tag.
        """
        if former is not None and former.digest != self._image.digest:
            self._write_claim(former.manifest.value)
        else:
            self._write_claim(_make_claim(tagged, self._tag, won=False))

    def _check_given_way(self) -> bool:
        """Check that the other push has put this push's image under the tag; return ``False``.

        Raises:
            RegistryError: Another image has the tag.
        """
        current = self._registries.read_manifest(self._repository, self._tag)
        if current.digest != self._image.digest:
            raise make_taken_error(self._repository, self._tag, current.digest)
        return False

    def _write_claim(self, value: Mapping[str, Any]) -> bool:
        """Write a claim of the tag, and return whether the registry has taken the claim."""
        return _put_claim(self._registries, self._repository, self._tag, value)

    def _put_tag(self, image: Manifest) -> None:
        """Put an image under the tag.

        Raises:
            RegistryError: The registry refuses. One with immutable tags does so if another push
                was faster; it is no error if that push has set this image.
        """
        try:
            self._registries.put_tag(self._repository, self._tag, image)
        except RegistryError:
            current = self._registries.find_manifest(self._repository, self._tag)
            if current is None:
                raise
            if current.digest != image.digest:
                raise make_taken_error(self._repository, self._tag, current.digest) from None

    def _wait_for_decision(self) -> None:
        """Wait until this push has won the tag.

        Another claim is of a push that began after this one. That push either sees this push's tag
        and withdraws its claim, or it saw no tag, and has won.

        Raises:
            RegistryError: The other push has won.
        """
        deadline = time.monotonic() + self._wait_seconds
        while True:
            claim = _read_claim(self._registries, self._repository, self._tag)
            if claim is None or claim.digest == self._image.digest:
                return
            current = self._registries.read_manifest(self._repository, self._tag)
            if current.digest == claim.digest:
                raise make_taken_error(self._repository, self._tag, claim.digest)
            if claim.won or time.monotonic() > deadline:
                # This push has overwritten the tag of the push that won, or of a push that was
                # ended in the middle.
                self._put_tag(self._registries.read_manifest(self._repository, claim.digest))
                raise make_taken_error(self._repository, self._tag, claim.digest)
            time.sleep(_PAUSE)

    def wait_until_set(self) -> None:
        """Wait until this push's image has the tag: a push that lost puts the tag back.

        Raises:
            RegistryError: Another image keeps the tag.
        """
        # Twice as long as a push waits in ``_wait_for_decision`` before it puts the tag back.
        deadline = time.monotonic() + 2 * self._wait_seconds
        current = self._registries.read_manifest(self._repository, self._tag)
        if current.digest != self._image.digest and self._claimed:
            # The other push need not wait to know that it has lost.
            self._write_claim(_make_claim(self._image, self._tag, won=True))
        while current.digest != self._image.digest:
            if time.monotonic() > deadline:
                raise make_taken_error(self._repository, self._tag, current.digest)
            time.sleep(_PAUSE)
            current = self._registries.read_manifest(self._repository, self._tag)


def make_image_index(
    images: Sequence[Mapping[str, Any]], annotations: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return a manifest that lists images; a registry's garbage collection leaves them alone.

    Args:
        images: The descriptors of the images.
        annotations: The annotations of the manifest.
    """
    return {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": list(images),
        "annotations": dict(annotations),
    }


def _make_claim(image: Manifest, tag: str, *, won: bool) -> Mapping[str, Any]:
    """Return the manifest that claims a tag for an image; ``won``: has the tag for good."""
    annotations = {"trainworks.claim": tag}
    if won:
        annotations[WON] = "yes"
    return make_image_index([image.descriptor], annotations)
