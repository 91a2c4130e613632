"""``push`` and ``promote``: an image goes to registries under dated, fixed and moving tags.

The engine sends an image under a name of its own, oras copies by digest; the tags are set by us,
last (``tags``). Every tag that never moves is looked at before anything is sent, too.
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
from trainworks.registry.tags import add_to_list, images_of, list_of, look_at, set_tags, taken
from trainworks.registry.tools import Manifest, Registries, oras
from trainworks.terminal.output import say
from trainworks.terminal.progress import DISPLAY

COSIGN_TAGS = (".att", ".sig", ".sbom")
"""How the tags end under which cosign keeps attestations, signatures and bills of materials:
``sha256-DIGEST.att``.
"""


SENT = "trainworks-sent-"
"""How the tag begins under which an engine sends an image.

It is removed where the registry allows that.
"""


@dataclass(kw_only=True)
class Pushed:
    """The result of a push to one repository.

    ``image_uri`` has the digest, ``tags`` has the fixed ones first.

    ``how`` is ``sent``, ``copied`` (from another repository of a registry) or
    ``there`` (it had the image already).
    """

    repository: str
    image_uri: str = ""
    digest: str = ""
    tags: list[str] = field(default_factory=list)
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The tags that never move, and the manifest of this image that one of them has."""

    fixed: tuple[str, ...]
    existing: Manifest | None


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
    """Push an image to each repository; layers that a repository has are not sent.

    Args:
        today: The date of the dated tag; default: now, UTC.

    Raises:
        HostError: oras is not installed.
        UnknownNameError: The engine has no such image.
        RegistryError: A registry refuses, or another image has a tag that never moves. The failing
            repository and those after it got no tag; the command can be repeated.
    """
    oras()
    image = image_in(engine, reference, hint="build it first, or choose another --engine")
    day = f"{today or datetime.now(UTC):%Y%m%d}"
    for place in map(check_repository, repositories):
        prepare(place)
    chosen = [
        _chosen_tags(registries, place, tags, image.identifier, day) for place in repositories
    ]
    for place in repositories:
        for tag in tags.shared:
            images_of(registries, place, tag)
    record = cache_folder(
        environment, "pushes", f"{hashlib.sha256(image.identifier.encode()).hexdigest()[:32]}.json"
    )
    known = _recorded(record)
    results = []
    for place, choice in zip(repositories, chosen, strict=True):
        found, how = choice.existing, "there"
        if found is None:
            found, how = _found_elsewhere(registries, place, known, image), "copied"
        with contextlib.ExitStack() as stack:
            if found is None:
                name = (
                    f"{SENT}{image.identifier.removeprefix('sha256:')[:12]}-{secrets.token_hex(4)}"
                )
                _send(registries, engine, image, f"{place}:{name}")
                found, how = registries.existing(place, name), "sent"
                stack.callback(_remove, registries, place, found, name)
            # What came by a name is believed once it comes by its digest.
            found = registries.existing(place, found.digest)
            if not found.is_of(image.identifier):
                raise RegistryError(
                    f"{place}@{found.digest} is not the image {reference} that was sent"
                )
            known[place] = found.digest
            with contextlib.suppress(OSError):
                write_cached(record, json.dumps(known).encode())
            names = set_tags(registries, place, found, choice.fixed, tags.moving)
            names += [tag for tag in tags.shared if add_to_list(registries, place, found, tag)]
        registries.existing(place, found.digest)
        results.append(_pushed(place, found.digest, names, how))
    return results


def _send(registries: Registries, engine: Engine, image: BuiltImage, name: str) -> None:
    """Have an engine push an image under ``HOST/NAME:TAG``."""
    place = name.rpartition(":")[0]
    plain = registries.plain(_host(place))
    with (
        engine.push_command(image, name, plain=plain) as argv,
        DISPLAY.task("pushing", log=False),
    ):
        registries.push(
            place, argv, show=_say_layer, check_image=lambda: _hold_to_digests(engine, image)
        )


def _hold_to_digests(engine: Engine, image: BuiltImage) -> None:
    """Read an image as a push does.

    Raises ``EngineError`` where a layer is not there with the bytes of its digest.
    """
    try:
        with engine.archive(image.identifier) as stream:
            found = {layer.digest for layer in stored_layers(stream)}
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise _unreadable(engine, image, str(error)) from error
    except EngineError as error:
        raise _unreadable(engine, image, error.message) from error
    if damaged := [name for name in image.layers if name not in found]:
        raise _unreadable(engine, image, f"other bytes than the digest says: {', '.join(damaged)}")


def _unreadable(engine: Engine, image: BuiltImage, said: str) -> EngineError:
    return EngineError(
        f"{engine.name} cannot read the image {image.reference} on this machine: {said}",
        hint=(
            "`build.py check --image` says which bytes are damaged; remove the image, and pull or"
            " build it again"
        ),
    )


def _remove(registries: Registries, place: str, image: Manifest, name: str) -> None:
    """Remove the tag under which an image was sent.

    Registries remove manifests, and many do not remove a tag alone: the tag gets a manifest of its
    own first, so that the image stays.
    """
    removed = False
    with contextlib.suppress(RegistryError):
        value = list_of([image.descriptor], {"trainworks.sent": name})
        removed = registries.remove(place, registries.put_manifest(place, value, tag=name))
    if not removed:
        say(
            f"  {place} keeps the tag {name}, under which the image was sent:"
            " the registry removes nothing"
        )


def _say_layer(line: str) -> None:
    if not line.endswith((": Preparing", ": Waiting")):
        say(f"  {line}")


def _host(place: str) -> str:
    return place.partition("/")[0]


def _found_elsewhere(
    registries: Registries, place: str, known: Mapping[str, str], image: BuiltImage
) -> Manifest | None:
    """Copy an image that another repository of this registry has; ``None`` without one."""
    for other in sorted(
        (each for each in known if _host(each) == _host(place)), key=lambda each: each != place
    ):
        with contextlib.suppress(RegistryError):
            found = registries.manifest(other, known[other])
            if found is not None and found.is_of(image.identifier):
                registries.copy(other, place, found.digest, attached=False)
                say(f"  {place}: copied from {other}")
                return found
    return None


def _chosen_tags(
    registries: Registries, place: str, tags: Tags, identifier: str, day: str
) -> _Chosen:
    """Return the fixed and dated tags.

    Raises ``RegistryError`` if another image has one of them.
    """
    fixed: list[str] = []
    existing = None
    dated = f"{tags.dated}-{day}"
    wanted: list[tuple[str, ...]] = [(tag,) for tag in tags.fixed]
    wanted += [(dated, f"{dated}-{identifier.removeprefix('sha256:')[:8]}")] if tags.dated else []
    for names in wanted:
        for name in names:
            found = registries.manifest(place, name)
            if found is None or found.is_of(identifier):
                break
        else:
            raise taken(place, name, found.digest if found else "")
        fixed.append(name)
        existing = found or existing
    return _Chosen(fixed=tuple(fixed), existing=existing)


def prepare(place: str) -> None:
    """Create a repository of ECR if it does not exist."""
    host, _, name = place.partition("/")
    registry = ecr.parse_host(host)
    if registry is None:
        return
    if not ecr.available():
        say(
            f"  {place}: no AWS credentials for boto3, so the repository must exist ({aws.INSTALL})"
        )
    elif ecr.ensure_repository(registry, name):
        say(f"  {place}: created, with scan on push and dated tags that never move")


def _pushed(place: str, digest: str, tags: Sequence[str], how: str) -> Pushed:
    return Pushed(
        repository=place, image_uri=f"{place}@{digest}", digest=digest, tags=list(tags), how=how
    )


def promote_image(
    source: str, targets: Sequence[str], tags: Tags, registries: Registries
) -> list[Pushed]:
    """Copy an image between repositories by its digest, with everything that is
    attached to it, and to that.

    Args:
        source: ``HOST/NAME@sha256:...`` or ``HOST/NAME:TAG``.
        tags: ``fixed`` and ``moving`` ones; default: the source's tag, if it
            was named by one. It does not move.

    Raises:
        HostError: oras is not installed.
        RegistryError: A registry refuses, or another image has a tag that never moves.
    """
    origin, reference = split_image(source)
    places = [check_repository(target) for target in targets]
    oras()
    manifest = registries.existing(origin, reference)
    digest = manifest.digest
    if not (tags.fixed or tags.moving) and ":" not in reference:
        tags = Tags(fixed=(reference,))
    for place in places:
        prepare(place)
    for place in places:
        look_at(registries, place, digest, tags.fixed)
    with DISPLAY.task("copying", log=False):
        attachments = set(_attachments(registries, origin, manifest))
        results = []
        for place in places:
            registries.copy(origin, place, digest, attached=True)
            for name in _cosign_tags(registries, origin, manifest):
                registries.copy(
                    origin, place, registries.existing(origin, name).digest, tag=name, attached=True
                )
            lost = attachments - set(_attachments(registries, place, manifest))
            if lost:
                raise RegistryError(
                    f"{place}@{digest} lacks {', '.join(sorted(lost))},"
                    f" attached to it in {origin}; it got no tag",
                    hint="repeat the command",
                )
            if attachments:
                say(f"  {place}: copied with {len(attachments)} attachments")
            how = "copied" if _host(origin) == _host(place) else "sent"
            copied = registries.existing(place, digest)
            names = set_tags(registries, place, copied, tags.fixed, tags.moving)
            results.append(_pushed(place, digest, names, how))
    return results


def _attachments(registries: Registries, place: str, manifest: Manifest) -> Iterator[str]:
    """Yield the digests of everything that is attached to an image or its
    platforms' images, and to that, each once.
    """
    waiting = [manifest.digest, *(str(each["digest"]) for each in manifest.listed("manifests"))]
    seen = set(waiting)
    while waiting:
        for each in registries.referrers(place, waiting.pop()):
            found = str(each["digest"])
            if found not in seen:
                seen.add(found)
                waiting.append(found)
                yield found


def _cosign_tags(registries: Registries, place: str, manifest: Manifest) -> Iterator[str]:
    """Yield the tags under which cosign keeps what it attached to an image or
    its platforms' images.
    """
    for digest in (
        manifest.digest,
        *(str(each["digest"]) for each in manifest.listed("manifests")),
    ):
        for end in COSIGN_TAGS:
            tag = f"{digest.replace(':', '-')}{end}"
            if registries.manifest(place, tag) is not None:
                yield tag


def report_of(results: Sequence[Pushed]) -> list[dict[str, Any]]:
    """Return the results for ``--format json``."""
    return [asdict(result) for result in results]


def text_of(results: Sequence[Pushed]) -> str:
    """Return the results for stdout: a line for each repository, the
    ``image_uri`` with its digest.
    """
    return "".join(f"{result.image_uri}\n" for result in results)


def say_tags(results: Sequence[Pushed]) -> None:
    """Print the tags of each repository for people."""
    for result in results:
        for tag in result.tags:
            say(f"  {result.repository}:{tag}")


def _recorded(path: Path) -> dict[str, str]:
    """Return where this machine pushed an image before: repository to digest."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return (
        found
        if isinstance(found, dict) and all(isinstance(each, str) for each in found.values())
        else {}
    )
