"""``push`` and ``promote``: copy an image to registries under dated and moving tags."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

from trainworks.engine import image_in
from trainworks.engine.archive import files_of
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.errors import RegistryError
from trainworks.host import aws
from trainworks.host.cache import cache_folder, write_cached
from trainworks.registry import ecr
from trainworks.registry.client import (
    IMAGE_CONFIGURATION,
    IMAGE_LAYER,
    IMAGE_MANIFEST,
    Descriptor,
    Manifest,
    Opener,
    Registries,
    Repository,
    canonical,
    digest_of,
)
from trainworks.registry.compression import compress
from trainworks.terminal.output import say
from trainworks.terminal.progress import BYTES, DISPLAY, Task, counted
from trainworks.terminal.words import megabytes

LONGEST_TAG = 128
SMALL = 16 << 20
"""Larger files of an archive are not its configuration."""


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The tags of a push.

    Attributes:
        fixed: Tags that never move. Another image under one of them is an error.
        dated: A tag that gets today's date, and part of the image's hash if another image has that date; or ``""``.
        moving: Tags that move to this image.
    """

    fixed: tuple[str, ...] = ()
    dated: str = ""
    moving: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Pushed:
    """The result of a push to one repository; ``image_uri`` has the digest, ``tags`` has the fixed ones first.

    ``there_bytes`` is the size of what the registry had already.
    """

    repository: str
    image_uri: str = ""
    digest: str = ""
    tags: list[str] = field(default_factory=list)
    sent_bytes: int = 0
    there_bytes: int = 0
    layers: dict[str, int] = field(default_factory=lambda: {"sent": 0, "mounted": 0, "there": 0})

    @property
    def names(self) -> list[str]:
        """Every name of the image in this repository, the digest first."""
        return [self.image_uri, *(f"{self.repository}:{tag}" for tag in self.tags)]


def tags_for(reference: str, fixed: Sequence[str] = (), moving: Sequence[str] = ()) -> Tags:
    """Return the tags of a push: those asked for, or those derived from the image's own tag.

    ``VERSION-cu121-py311-debian12`` gets that with a date, and the moving tag ``VERSION-cu121-debian12``.

    Raises:
        RegistryError: A tag is malformed, would not move, or there is none to derive the tags from.
    """
    asked = check_tags(fixed, moving)
    name = reference.rpartition("/")[2]
    own = name.partition("@")[0].partition(":")[2]
    if not own and not fixed:
        raise RegistryError(f"{reference} has no tag to derive the pushed tags from", hint="give one with --tag")
    dated = "" if fixed else own
    # A date and part of a hash are added.
    if len(dated) > LONGEST_TAG - 18:
        raise RegistryError(f"the tag {dated} is too long to add a date", hint="give a shorter tag with --tag")
    default = () if fixed or asked.moving else (re.sub(r"-py\d+(?=-|$)", "", own),)
    return Tags(fixed=asked.fixed, dated=dated, moving=asked.moving or check_tags((), default).moving)


def check_tags(fixed: Sequence[str], moving: Sequence[str]) -> Tags:
    """Return the tags that were asked for; raises ``RegistryError`` for a malformed one, or one that could not move.

    Tags with ``-20`` never move in repositories that ``ecr.ensure_repository`` creates: their second push would fail,
    after all layers are sent. Such moving tags are rejected for every registry.
    """
    for tag in (*fixed, *moving):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", tag) or len(tag) > LONGEST_TAG:
            raise RegistryError(
                f"{tag!r} is not a valid tag",
                hint=f"use letters, digits, `_`, `.` and `-`, at most {LONGEST_TAG} characters",
            )
    for tag in moving:
        if ecr.never_moves(tag):
            raise RegistryError(
                f"{tag} cannot be a moving tag: it contains `-20`, as dated tags do, and Amazon ECR never moves those",
                hint="give it with --tag, or give another --moving-tag",
            )
    return Tags(fixed=tuple(fixed), moving=tuple(moving))


def push_image(
    engine: Engine,
    reference: str,
    repositories: Sequence[str],
    tags: Tags,
    registries: Registries,
    environment: Mapping[str, str],
    *,
    today: datetime | None = None,
) -> list[Pushed]:
    """Push an image to each repository, layer by layer; what a repository has is neither compressed nor sent.

    Args:
        today: The date of the dated tag; default: now, UTC.

    Raises:
        UnknownNameError: The engine has no such image.
        RegistryError: A registry refuses, or another image has a tag that never moves. The failing repository and
            those after it got no tag; the command can be repeated.
    """
    image = image_in(engine, reference, hint="build it first, or choose another --engine")
    day = f"{today or datetime.now(UTC):%Y%m%d}"
    places = [registries.repository(address) for address in repositories]
    results = [Pushed(repository=str(place)) for place in places]
    for place in places:
        prepare(place)
    known = _recorded(engine, image, environment)
    configuration = image.identifier if engine.identifier_is_configuration else ""
    if known:
        configuration = known.value()["config"]["digest"]
    if configuration:
        for place in places:
            _chosen_tags(place, tags, str(configuration), day)
    if known is None or not _already_there(known, places, results):
        known = _send(engine, image, reference, places, results)
        _record(engine, image, known, environment)
    for place, result in zip(places, results, strict=True):
        chosen = _chosen_tags(place, tags, known.value()["config"]["digest"], day)
        _tag(place, chosen.existing or known, chosen.fixed, tags.moving, result)
    return results


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The tags to set, and the manifest of the same image that one of them has already."""

    fixed: tuple[str, ...]
    existing: Manifest | None


def _chosen_tags(place: Repository, tags: Tags, configuration: str, day: str) -> _Chosen:
    """Return the fixed and dated tags; raises ``RegistryError`` if another image has one of them."""
    fixed: list[str] = []
    existing = None
    for tag in tags.fixed:
        found = place.get_manifest(tag)
        if found is not None and not _is(found, configuration):
            raise _taken(place, tag, found)
        existing, fixed = found or existing, [*fixed, tag]
    if tags.dated:
        tag = f"{tags.dated}-{day}"
        found = place.get_manifest(tag)
        if found is not None and not _is(found, configuration):
            tag = f"{tag}-{configuration.removeprefix('sha256:')[:8]}"
            found = place.get_manifest(tag)
            if found is not None and not _is(found, configuration):
                raise _taken(place, tag, found)
        existing, fixed = found or existing, [*fixed, tag]
    return _Chosen(fixed=tuple(fixed), existing=existing)


def _taken(place: Repository, tag: str, found: Manifest) -> RegistryError:
    return RegistryError(
        f"{place}:{tag} is another image ({found.digest}), and this tag never moves; nothing was changed",
        hint="push with another --tag, or give a tag that may move with --moving-tag",
    )


def _is(manifest: Manifest, configuration: str) -> bool:
    """Whether a manifest is of this image. Its digest differs if another program compressed the layers."""
    config = manifest.value().get("config")
    return isinstance(config, dict) and config.get("digest") == configuration


def prepare(place: Repository) -> None:
    """Create a repository of ECR if it does not exist."""
    registry = ecr.parse_host(place.registry.host)
    if registry is None:
        return
    if not ecr.available():
        say(f"  {place}: no AWS credentials for boto3, so the repository must exist ({aws.INSTALL})")
    elif ecr.ensure_repository(registry, place.name):
        say(f"  {place}: created, with scan on push, dated tags that never move, and a lifecycle policy")


def _already_there(manifest: Manifest, places: Sequence[Repository], results: Sequence[Pushed]) -> bool:
    """Whether every repository has every blob, so that nothing has to be read from the engine."""
    value = manifest.value()
    layers = {each["digest"] for each in value["layers"]}
    needed = [value["config"]["digest"], *sorted(layers)]
    if not all(place.has_blob(digest) for place in places for digest in needed):
        return False
    for result in results:
        result.layers["there"] += len(layers)
        result.there_bytes += sum(int(each["size"]) for each in value["layers"])
    return True


def _send(
    engine: Engine, image: BuiltImage, reference: str, places: Sequence[Repository], results: Sequence[Pushed]
) -> Manifest:
    """Send the configuration and every layer that a repository lacks; return the manifest, which is not sent yet."""
    small: dict[str, bytes] = {}
    packed: dict[str, Descriptor] = {}
    read = compressed = 0
    with (
        DISPLAY.task("pushing", unit=BYTES) as task,
        DISPLAY.task("packing", image.size, BYTES) as packing,
        tempfile.TemporaryDirectory(prefix="trainworks-push-") as folder,
        engine.archive(reference) as stream,
    ):

        def told(amount: int) -> None:
            # Archives are a little larger than their content.
            packing.reach(min(image.size, read + amount))

        path = Path(folder) / "layer"
        for name, content, is_layer in files_of(stream):
            if not is_layer:
                small[name] = content.read(SMALL)
                continue
            started = time.monotonic()
            with path.open("wb") as file, _unpacked(content) as plain:
                layer = compress(counted(plain, told), file)
            read += layer.original_size
            if layer.difference not in packed:
                compressed += layer.size
                packed[layer.difference] = {"mediaType": IMAGE_LAYER, "digest": layer.digest, "size": layer.size}
                # The compressed size of the remaining layers is estimated from those so far.
                rest = max(0, image.size - read)
                task.total, task.about = (compressed + compressed * rest // max(read, 1)) * len(places), bool(rest)
                blob = _Blob(f"layer {len(packed)}", layer.digest, layer.size, lambda: path.open("rb"), started)
                for place, result in zip(places, results, strict=True):
                    sources = [each.name for each in places if each.registry is place.registry and each is not place]
                    _deliver(blob, place, sources, result, task)
    described = json.loads(small["manifest.json"])[0]
    configuration = small[described["Config"]]
    differences = json.loads(configuration)["rootfs"]["diff_ids"]
    missing = [each for each in differences if each not in packed]
    if missing:
        raise RegistryError(f"{engine.name} exported {reference} without its layers {', '.join(missing)}")
    digest = digest_of(configuration)
    for place in places:
        place.put_bytes(configuration)
    value = {
        "schemaVersion": 2,
        "mediaType": IMAGE_MANIFEST,
        "config": {"mediaType": IMAGE_CONFIGURATION, "digest": digest, "size": len(configuration)},
        "layers": [packed[each] for each in differences],
    }
    return Manifest(content=canonical(value), media_type=IMAGE_MANIFEST)


@contextlib.contextmanager
def _unpacked(content: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield a layer uncompressed, also if the engine stores it compressed."""
    assert isinstance(content, io.BufferedReader)
    if content.peek(2)[:2] == b"\x1f\x8b":
        with gzip.open(content) as plain:
            yield plain  # type: ignore[misc]
    else:
        yield content


@dataclass(frozen=True)
class _Blob:
    """A blob to send: name for the user, digest, size in bytes, content, and when work on it began."""

    name: str
    digest: str
    size: int
    content: Opener
    began: float


def _deliver(blob: _Blob, place: Repository, sources: Sequence[str], result: Pushed, task: Task) -> None:
    """Put a blob into a repository, show the progress, and report the time."""
    before = task.done
    with DISPLAY.task(blob.name, blob.size, BYTES, log=False) as mine:

        def sent(amount: int) -> None:
            mine.reach(amount)
            task.reach(before + amount)

        @contextlib.contextmanager
        def opened() -> Iterator[IO[bytes]]:
            if result.layers["there"] and not (result.sent_bytes or mine.done):
                say(f"  resumed at {megabytes(result.there_bytes)}, which {place} has already")
            # Each attempt sends the blob from its beginning.
            sent(0)
            with blob.content() as stream:
                yield counted(stream, sent)

        how = place.put_blob(blob.digest, blob.size, opened, sources=sources)
    result.layers[how] += 1
    if how == "sent":
        result.sent_bytes += blob.size
        task.reach(before + blob.size)
    else:
        result.there_bytes += blob.size
        task.skip(blob.size)
    words = {"there": "is there already", "mounted": "mounted from a sister repository", "sent": "sent"}[how]
    say(f"  {blob.name:<10} {megabytes(blob.size):>8}  {time.monotonic() - blob.began:6.1f} s  {words}: {place}")


def _tag(place: Repository, manifest: Manifest, fixed: Sequence[str], moving: Sequence[str], result: Pushed) -> None:
    """Set the tags, fixed ones first, so that a moving tag never points at an incomplete push."""
    if not fixed and not moving:
        place.put_manifest(manifest)
    for tag in (*fixed, *moving):
        found = place.get_manifest(tag)
        if found is None or found.digest != manifest.digest:
            place.put_manifest(manifest, tag=tag)
    result.digest = manifest.digest
    result.image_uri = f"{place}@{manifest.digest}"
    result.tags = [*fixed, *moving]


def promote_image(source: str, targets: Sequence[str], tags: Tags, registries: Registries) -> list[Pushed]:
    """Copy an image between repositories by its digest, with what is attached to it.

    Args:
        source: ``HOST/NAME@sha256:...`` or ``HOST/NAME:TAG``.
        tags: ``fixed`` and ``moving`` ones; default: the source's tag, if it was named by one.

    Raises:
        RegistryError: A registry refuses, or another image has a tag that never moves.
    """
    address, reference = split_source(source)
    origin = registries.repository(address)
    manifest = origin.get_manifest(reference)
    if manifest is None:
        raise RegistryError(f"{origin} has no {reference}", hint="check the tag or digest")
    if not (tags.fixed or tags.moving) and ":" not in reference:
        tags = Tags(fixed=(reference,)) if ecr.never_moves(reference) else Tags(moving=(reference,))
    places = [registries.repository(target) for target in targets]
    results = [Pushed(repository=str(place)) for place in places]
    for place in places:
        prepare(place)
        for tag in tags.fixed:
            found = place.get_manifest(tag)
            if found is not None and found.digest != manifest.digest:
                raise _taken(place, tag, found)
        if not (tags.fixed or tags.moving) and ecr.parse_host(place.registry.host):
            say(f"  {place}: the copy has no tag; a lifecycle policy may remove it after {ecr.UNTAGGED_DAYS} days")
    with DISPLAY.task("copying", unit=BYTES) as task:
        task.total = len(places) * _weight(origin, manifest)
        for place, result in zip(places, results, strict=True):
            _copy(origin, place, manifest, result, task)
            _tag(place, manifest, tags.fixed, tags.moving, result)
            for attached in origin.referrers(manifest.digest):
                proof = origin.get_manifest(str(attached["digest"]))
                if proof is not None and place.get_manifest(proof.digest) is None:
                    task.total += _weight(origin, proof)
                    _copy(origin, place, proof, result, task)
                    place.put_manifest(proof)
                    say(f"  {attached.get('artifactType', 'attached')}: copied too")
    return results


def split_source(source: str) -> tuple[str, str]:
    """Return the repository and the tag or digest of a source to promote; raises ``RegistryError``."""
    address, _, digest = source.partition("@")
    if digest:
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise RegistryError(f"{source}: {digest!r} is not a digest", hint="push prints it: sha256: and 64 digits")
        return address.rpartition(":")[0] if ":" in address.rpartition("/")[2] else address, digest
    if ":" not in source.rpartition("/")[2]:
        raise RegistryError(f"{source} names no image", hint="add @sha256:... or :TAG")
    address, _, tag = source.rpartition(":")
    return address, tag


def _children(origin: Repository, manifest: Manifest) -> Iterator[Manifest]:
    """Yield the images of an index; none of an image."""
    for child in manifest.value().get("manifests") or ():
        found = origin.get_manifest(str(child["digest"]))
        if found is None:
            raise RegistryError(f"{origin} lacks {child['digest']}, which {manifest.digest} points at")
        yield found


def _blobs(manifest: Manifest) -> dict[str, int]:
    """Return the blobs of a manifest: digest to size in bytes."""
    value = manifest.value()
    return {each["digest"]: int(each["size"]) for each in (*(value.get("layers") or ()), value.get("config")) if each}


def _weight(origin: Repository, manifest: Manifest) -> int:
    """Return the total size in bytes of a manifest's blobs, and of those of its images."""
    return sum(_blobs(manifest).values()) + sum(_weight(origin, child) for child in _children(origin, manifest))


def _copy(origin: Repository, place: Repository, manifest: Manifest, result: Pushed, task: Task) -> None:
    """Copy what a manifest points at to another repository: blobs, or the images of an index."""
    for child in _children(origin, manifest):
        _copy(origin, place, child, result, task)
        place.put_manifest(child)
    sources = [origin.name] if origin.registry is place.registry else []
    blobs = _blobs(manifest)
    for number, (digest, size) in enumerate(blobs.items(), 1):
        name = f"blob {number}/{len(blobs)}"
        _deliver(
            _Blob(name, digest, size, partial(origin.open_blob, digest), time.monotonic()), place, sources, result, task
        )


def report_of(results: Sequence[Pushed]) -> list[dict[str, Any]]:
    """Return the results for ``--format json``."""
    return [asdict(result) for result in results]


def text_of(results: Sequence[Pushed]) -> str:
    """Return the results for stdout: a line for each repository, the ``image_uri`` with its digest, then the tags."""
    return "".join(" ".join(result.names) + "\n" for result in results)


def _recorded(engine: Engine, image: BuiltImage, environment: Mapping[str, str]) -> Manifest | None:
    """Return the manifest of this image's last push from this machine; ``None`` if there was none."""
    with contextlib.suppress(OSError, RuntimeError):
        content = _record_file(engine, image, environment).read_bytes()
        manifest = Manifest(content=content, media_type=IMAGE_MANIFEST)
        with contextlib.suppress(RegistryError, LookupError, TypeError):
            value = manifest.value()
            if value["config"]["digest"] and value["layers"]:
                return manifest
    return None


def _record(engine: Engine, image: BuiltImage, manifest: Manifest, environment: Mapping[str, str]) -> None:
    """Store the manifest of a push, so that the next push does not have to compress the image again."""
    with contextlib.suppress(OSError, RuntimeError):
        write_cached(_record_file(engine, image, environment), manifest.content)


def _record_file(engine: Engine, image: BuiltImage, environment: Mapping[str, str]) -> Path:
    name = hashlib.sha256(f"{engine.name} {image.identifier}".encode()).hexdigest()[:32]
    return cache_folder(environment, "pushes", f"{name}.json")
