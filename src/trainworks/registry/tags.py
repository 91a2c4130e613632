"""Sets the tags of an image that a registry has: one that never moves is given
to one of the pushes that race for it.

A registry sets a tag for whoever asks last; the protocol has no "only if it is absent". So each
push first writes a *claim*, a manifest of its own beside the tag, and reads it again after it has
set the tag: of two pushes the one whose claim is still there has the tag, and the other one puts
the tag back. docs/adr/0073 has the argument, step by step.
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
"""What a multi-architecture tag is: a list of images.

Docker's form has images of Docker's form only.
"""

MERGES = 5
"""How often an image is added to a multi-architecture tag that other pushes
change at the same time.
"""

CLAIM = "trainworks-claim-"
"""How the tag begins that has the claim of another tag.

Without a dot, so that ECR does not keep it from moving.
"""

WON = "trainworks.won"
"""The annotation of a claim whose push has the tag for good, while the tag
still is another image.
"""

_PAUSE = 0.05
"""Seconds between two looks at what another push does."""

_PATIENCE = 5
"""How often the registries' first pause a push waits for one that may have won.

That one waits twice as long.
"""


def claim_tag(tag: str) -> str:
    """Return the tag that has the claim of a tag."""
    return f"{CLAIM}{hashlib.sha256(tag.encode()).hexdigest()[:16]}"


def taken(place: str, tag: str, digest: str) -> RegistryError:
    """Return the error for a tag that never moves and is another image."""
    return RegistryError(
        f"{place}:{tag} is another image ({digest}), and this tag never moves",
        hint="use another --tag, or give a tag that may move with --moving-tag",
    )


def look_at(registries: Registries, place: str, digest: str, fixed: Sequence[str]) -> None:
    """Raise ``RegistryError`` if another image has a tag that never moves."""
    for tag in fixed:
        found = registries.manifest(place, tag)
        if found is not None and found.digest != digest:
            raise taken(place, tag, found.digest)


def set_tags(
    registries: Registries, place: str, image: Manifest, fixed: Sequence[str], moving: Sequence[str]
) -> list[str]:
    """Set tags on an image that the repository has, those that never move first.

    Returns:
        The tags that the image has at the last look; a moving tag that another push has moved
        meanwhile is not there.

    Raises:
        RegistryError: Another image has a tag that never moves; or the registry
            does not answer for the digest.
    """
    look_at(registries, place, image.digest, fixed)
    # Sorted: of two pushes with the same two tags one gets both.
    races = [_Race(registries, place, image, tag) for tag in sorted(set(fixed))]
    for race in races:
        race.run()
    for tag in moving:
        registries.put(place, tag, image)
    registries.existing(place, image.digest)
    for race in races:
        race.see_that_it_stays()
    mine = list(fixed)
    for tag in moving:
        found = registries.existing(place, tag).digest
        if found == image.digest:
            mine.append(tag)
        else:
            say(f"  {place}:{tag} was moved by another push meanwhile: it is {found}")
    return mine


def images_of(registries: Registries, place: str, tag: str) -> tuple[Mapping[str, Any], ...]:
    """Return the images of a multi-architecture tag; none if it does not exist yet."""
    found = registries.manifest(place, tag)
    if found is not None and "manifests" not in found.value:
        raise RegistryError(
            f"{place}:{tag} is an image of one architecture",
            hint="give another --multi-arch-tag, or remove that tag",
        )
    return found.listed("manifests") if found else ()


def add_to_list(registries: Registries, place: str, image: Manifest, tag: str) -> bool:
    """Put an image under a multi-architecture tag, in the place of an earlier
    one for the same processors.

    Returns:
        Whether it is there at the last look; another push for these processors
        may have replaced it.

    Raises:
        RegistryError: The tag is an image, this image is a list itself, or
            other pushes change the tag all the time.
    """
    if not image.configuration:
        raise RegistryError(
            f"{place}@{image.digest} is a list of images, which cannot stand in the list of {tag}",
            hint="push it without --multi-arch-tag",
        )
    configuration = json.loads(registries.blob(place, image.configuration))
    platform = {key: configuration[key] for key in ("architecture", "os")}
    mine = {**image.descriptor, "platform": platform}
    # A push that reads this after it has changed the tag adds our image, if it
    # looked before we changed the tag.
    claimed = _put_claim(registries, place, tag, list_of([mine], {"trainworks.claim": tag}))
    added: list[Mapping[str, Any]] = [mine]
    for _ in range(MERGES):
        begun = time.monotonic()
        listed = {
            str(each.get("platform")): each for each in (*images_of(registries, place, tag), *added)
        }
        rows = [listed[key] for key in sorted(listed)]
        dockers = all("vnd.docker." in str(each.get("mediaType")) for each in rows)
        kind = DOCKER_LIST if dockers else OCI_INDEX
        registries.put_manifest(
            place, {"schemaVersion": 2, "mediaType": kind, "manifests": rows}, tag=tag
        )
        time.sleep(time.monotonic() - begun)
        claim = _claim(registries, place, tag) if claimed else None
        last = mine if claim is None else claim.image
        there = {each["digest"] for each in images_of(registries, place, tag)}
        replaced = last.get("platform") == platform and last["digest"] != image.digest
        # Of two images for the same processors the one that was claimed last stays.
        added = [last] if replaced else [last, mine]
        if all(each["digest"] in there for each in added):
            if replaced:
                say(
                    f"  {place}:{tag} was given another image"
                    f" for {platform['architecture']} meanwhile"
                )
            return not replaced
    raise RegistryError(
        f"{place}:{tag} was changed by another push at the same time", hint="repeat the command"
    )


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """Which image a push wants a tag for, or has it.

    ``manifest`` is the claim as the registry has it.
    """

    image: Mapping[str, Any]
    won: bool
    manifest: Manifest

    @property
    def digest(self) -> str:
        """The digest of the image."""
        return str(self.image["digest"])


def _claim(registries: Registries, place: str, tag: str) -> _Claim | None:
    """Return the claim that a registry has for a tag; ``None`` without one."""
    found = registries.manifest(place, claim_tag(tag))
    rows = found.listed("manifests") if found is not None else ()
    if found is None or len(rows) != 1:
        return None
    annotations = found.value.get("annotations")
    won = isinstance(annotations, Mapping) and WON in annotations
    return _Claim(image=rows[0], won=won, manifest=found)


def _put_claim(registries: Registries, place: str, tag: str, value: Mapping[str, Any]) -> bool:
    """Write a claim.

    ``False`` if the registry refuses such a tag, as one does whose tags are all immutable.
    """
    name = claim_tag(tag)
    try:
        registries.put_manifest(place, value, tag=name)
    except RegistryUnreachableError:
        raise
    except RegistryError as error:
        say(
            f"  {place}:{name} cannot be written, so only the registry keeps {tag}"
            f" ({error.message})"
        )
        return False
    return True


class _Race:
    """One image, one tag that never moves, and perhaps another push that wants
    the tag for another image.
    """

    def __init__(self, registries: Registries, place: str, image: Manifest, tag: str) -> None:
        """Store what is asked for."""
        self._registries = registries
        self._place = place
        self._image = image
        self._tag = tag
        self._claimed = False
        self._wait = _PATIENCE * registries.patience.pause

    def run(self) -> None:
        """Set the tag, and see that it stays.

        Raises:
            RegistryError: Another image has the tag.
        """
        while not self._attempt():
            # The other push has put our image under the tag: it has lost.
            pass

    def _attempt(self) -> bool:
        """Try to get the tag.

        ``False`` if the other push has given way, so that it is worth another try.
        """
        former = _claim(self._registries, self._place, self._tag)
        if former is not None and former.digest == self._image.digest and self._is_there():
            return True
        self._claimed = self._write_claim(_claim_of(self._image, self._tag, won=False))
        begun = time.monotonic()
        there = self._registries.manifest(self._place, self._tag)
        if there is not None and there.digest != self._image.digest:
            if self._claimed:
                self._withdraw(former, there)
            return self._look_again()
        if there is None:
            self._set(self._image)
        took = time.monotonic() - begun
        if self._claimed:
            self._decide()
        # A program that writes no claims, such as `docker push`, may have
        # looked before we set the tag.
        time.sleep(took)
        self.see_that_it_stays()
        return True

    def _is_there(self) -> bool:
        found = self._registries.manifest(self._place, self._tag)
        return found is not None and found.digest == self._image.digest

    def _withdraw(self, former: _Claim | None, there: Manifest) -> None:
        """Give the claim back to the push that has the tag, which reads it
        again before it believes so.
        """
        if former is not None and former.digest != self._image.digest:
            self._write_claim(former.manifest.value)
        else:
            self._write_claim(_claim_of(there, self._tag, won=False))

    def _look_again(self) -> bool:
        """Return ``False`` if our image has the tag now.

        Raises ``RegistryError`` with the digest that has it.
        """
        now = self._registries.existing(self._place, self._tag)
        if now.digest != self._image.digest:
            raise taken(self._place, self._tag, now.digest)
        return False

    def _write_claim(self, value: Mapping[str, Any]) -> bool:
        return _put_claim(self._registries, self._place, self._tag, value)

    def _set(self, image: Manifest) -> None:
        """Put an image under the tag.

        A registry with immutable tags refuses if another push was faster.
        """
        try:
            self._registries.put(self._place, self._tag, image)
        except RegistryError:
            now = self._registries.manifest(self._place, self._tag)
            if now is None:
                raise
            if now.digest != image.digest:
                raise taken(self._place, self._tag, now.digest) from None

    def _decide(self) -> None:
        """Wait until it is known whose the tag is.

        Raises ``RegistryError`` if it is another image's.

        Another claim is of a push that began after ours. It either sees our tag and withdraws its
        claim, or it saw no tag, and has won.
        """
        until = time.monotonic() + self._wait
        while True:
            claim = _claim(self._registries, self._place, self._tag)
            if claim is None or claim.digest == self._image.digest:
                return
            now = self._registries.existing(self._place, self._tag)
            if now.digest == claim.digest:
                raise taken(self._place, self._tag, claim.digest)
            if claim.won or time.monotonic() > until:
                # We have overwritten the tag of the push that won, or of one
                # that was ended in the middle.
                self._set(self._registries.existing(self._place, claim.digest))
                raise taken(self._place, self._tag, claim.digest)
            time.sleep(_PAUSE)

    def see_that_it_stays(self) -> None:
        """Wait until our image has the tag: a push that lost puts it back.

        Raises ``RegistryError`` if it does not.
        """
        until = time.monotonic() + 2 * self._wait
        now = self._registries.existing(self._place, self._tag)
        if now.digest != self._image.digest and self._claimed:
            # The other push need not wait to know that it has lost.
            self._write_claim(_claim_of(self._image, self._tag, won=True))
        while now.digest != self._image.digest:
            if time.monotonic() > until:
                raise taken(self._place, self._tag, now.digest)
            time.sleep(_PAUSE)
            now = self._registries.existing(self._place, self._tag)


def list_of(
    images: Sequence[Mapping[str, Any]], annotations: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return a manifest that lists images, which keeps them from a registry's
    garbage collection.
    """
    return {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": list(images),
        "annotations": dict(annotations),
    }


def _claim_of(image: Manifest, tag: str, *, won: bool) -> Mapping[str, Any]:
    annotations = {"trainworks.claim": tag, **({WON: "yes"} if won else {})}
    return list_of([image.descriptor], annotations)
