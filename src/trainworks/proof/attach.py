"""Attaches a proof to an image in a registry, in the forms that cosign and others look for, and reads it back.

Each signed statement is attached twice: as a bundle of sigstore, an OCI referrer (cosign 3, ``--new-bundle-format``
before), and in the image of attestations under cosign's tag ``sha256-DIGEST.att`` (cosign 1 and 2, policy controllers).
The forms are those of github.com/sigstore/cosign ``specs/BUNDLE_SPEC.md`` and ``ATTESTATION_SPEC.md``, and of
github.com/sigstore/protobuf-specs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trainworks.engine.protocol import BuiltImage
from trainworks.errors import ProofError
from trainworks.proof.envelope import PAYLOAD_TYPE
from trainworks.proof.strict_json import read_json
from trainworks.proof.verify import ATTESTATIONS_FILE, CYCLONEDX_FILE, PROVENANCE_FILE
from trainworks.registry.names import split_image
from trainworks.registry.tools import Manifest, Registries

TYPES = {CYCLONEDX_FILE: "application/vnd.cyclonedx+json", PROVENANCE_FILE: PAYLOAD_TYPE}
"""The media type of each document, as its format names it."""

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
ENVELOPE = "application/vnd.dsse.envelope.v1+json"
OLD_BUNDLE = "application/vnd.in-toto.bundle"
"""Signed statements: a bundle of sigstore; one envelope; lines of envelopes, as trainworks attached them before 0.2."""

IMAGE_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"
TITLE = "org.opencontainers.image.title"
IMAGE_CONFIGURATION = "application/vnd.oci.image.config.v1+json"


@dataclass(frozen=True, kw_only=True)
class PushedImage:
    """An image in a registry: ``HOST/NAME``, and its manifest."""

    registries: Registries
    repository: str
    manifest: Manifest

    @property
    def address(self) -> str:
        """Its name with its digest."""
        return f"{self.repository}@{self.manifest.digest}"

    @property
    def sha256(self) -> str:
        """The hash of its manifest."""
        return self.manifest.digest.removeprefix("sha256:")

    @property
    def cosign_tag(self) -> str:
        """The tag under which cosign keeps its attestations."""
        return f"sha256-{self.sha256}.att"


def find_pushed(address: str, registries: Registries) -> PushedImage:
    """Return the image that ``HOST/NAME@sha256:...`` or ``HOST/NAME:TAG`` is in its registry.

    Raises:
        RegistryError: The image does not exist, or the registry refuses to show it.
    """
    repository, reference = split_image(address, "latest")
    return PushedImage(
        registries=registries, repository=repository, manifest=registries.existing(repository, reference)
    )


def check_same(pushed: PushedImage, image: BuiltImage) -> None:
    """Check that the registry has this image under the address; raises ``ProofError`` where it has another one."""
    if not pushed.manifest.is_of(image.identifier):
        found = pushed.manifest.configuration or "no configuration"
        raise ProofError(
            [f"{pushed.address} is another image ({found}), not {image.identifier}"],
            hint="push this image first: `build.py push`",
        )


def attach(pushed: PushedImage, texts: Mapping[str, str], *, key: str = "", time: int = 0) -> dict[str, str]:
    """Attach the files of a proof to an image; return the digest of each attachment by its name.

    What is attached already stays as it is, and the same files are attached once.

    Args:
        texts: File name to text; the envelopes of the signed statements are lines of one file.
        key: The hash of the public key, hexadecimal: a hint for who verifies.
        time: The time of the attachments, in seconds since 1970.
    """
    created = {"org.opencontainers.image.created": f"{datetime.fromtimestamp(time, UTC):%Y-%m-%dT%H:%M:%SZ}"}
    done = {name: _refer(pushed, name, text, TYPES[name], created) for name, text in texts.items() if name in TYPES}
    envelopes = texts.get(ATTESTATIONS_FILE, "").splitlines()
    for envelope in envelopes:
        kind = predicate_type(envelope)
        name = f"{kind.rpartition('//')[2].replace('/', '-')}.sigstore.json"
        notes = {**created, "dev.sigstore.bundle.content": "dsse-envelope", "dev.sigstore.bundle.predicateType": kind}
        done[name] = _refer(pushed, name, bundle(envelope, key), BUNDLE, notes)
    if envelopes:
        done[ATTESTATIONS_FILE] = _attach_for_cosign(pushed, envelopes)
    return done


def _refer(pushed: PushedImage, name: str, text: str, media_type: str, notes: Mapping[str, str]) -> str:
    """Attach a file to an image as a referrer of OCI; return the digest of its manifest."""
    registries, place = pushed.registries, pushed.repository
    layer = {**registries.put_blob(place, text.encode()), "mediaType": media_type, "annotations": {TITLE: name}}
    value = {
        "schemaVersion": 2,
        "mediaType": IMAGE_MANIFEST,
        "artifactType": media_type,
        "config": {**registries.put_blob(place, b"{}"), "mediaType": EMPTY},
        "layers": [layer],
        "subject": pushed.manifest.descriptor,
        "annotations": dict(notes),
    }
    return registries.put_manifest(place, value)


def predicate_type(envelope: str) -> str:
    """Return the type of the statement in an envelope of ours."""
    return str(json.loads(base64.b64decode(json.loads(envelope)["payload"]))["predicateType"])


def bundle(envelope: str, key: str) -> str:
    """Return sigstore's bundle of an envelope; ``key`` is the hash of the public key, hexadecimal."""
    content = json.loads(envelope)
    # cosign passes over signatures with another name of the key than its own.
    content["signatures"] = [{"sig": each["sig"]} for each in content["signatures"]]
    hint = base64.b64encode(bytes.fromhex(key)).decode()
    material = {"publicKey": {"hint": hint}}
    value = {"mediaType": BUNDLE, "verificationMaterial": material, "dsseEnvelope": content}
    return json.dumps(value, separators=(",", ":"))


def _attach_for_cosign(pushed: PushedImage, envelopes: Sequence[str]) -> str:
    """Add envelopes to the image of attestations, as ``cosign attest`` does; return its digest."""
    registries, place = pushed.registries, pushed.repository
    found = registries.manifest(place, pushed.cosign_tag)
    layers: list[Mapping[str, Any]] = list(found.listed("layers")) if found else []
    for envelope in envelopes:
        notes = {"dev.cosignproject.cosign/signature": "", "predicateType": predicate_type(envelope)}
        layer = {**registries.put_blob(place, envelope.encode()), "mediaType": ENVELOPE, "annotations": notes}
        if layer["digest"] not in {each["digest"] for each in layers}:
            layers.append(layer)
    if found is None or len(layers) > len(found.listed("layers")):
        differences = [str(each["digest"]) for each in layers]
        configuration = {
            "architecture": "",
            "os": "",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": differences},
            "history": [{"created": "0001-01-01T00:00:00Z"} for _ in layers],
        }
        value = {
            "schemaVersion": 2,
            "mediaType": IMAGE_MANIFEST,
            "config": {
                **registries.put_blob(place, json.dumps(configuration).encode()),
                "mediaType": IMAGE_CONFIGURATION,
            },
            "layers": layers,
        }
        return registries.put_manifest(place, value, tag=pushed.cosign_tag)
    return found.digest


def attached(pushed: PushedImage) -> tuple[str, ...]:
    """Return all signed statements that are attached to an image, as envelopes; others' files are no part of them.

    Raises:
        RegistryError: The registry does not answer, or its answer is malformed.
    """
    registries, place = pushed.registries, pushed.repository
    manifests = [
        registries.existing(place, str(each["digest"]))
        for each in registries.referrers(place, pushed.manifest.digest)
        if each.get("artifactType") in (BUNDLE, ENVELOPE, OLD_BUNDLE)
    ]
    if found := registries.manifest(place, pushed.cosign_tag):
        manifests.append(found)
    layers = {str(layer["digest"]): layer for manifest in manifests for layer in manifest.listed("layers")}
    return tuple(
        envelope
        for digest, layer in layers.items()
        if layer.get("mediaType") in (BUNDLE, ENVELOPE, OLD_BUNDLE)
        for envelope in envelopes_of(registries.blob(place, digest), str(layer["mediaType"]))
    )


def envelopes_of(content: bytes, media_type: str) -> Iterator[str]:
    """Yield the envelopes in an attached file; what is not one is left to ``verify``, which passes it over."""
    text = content.decode(errors="replace")
    if media_type == OLD_BUNDLE:
        yield from text.splitlines()
    elif media_type == ENVELOPE:
        yield text
    else:
        try:
            found = read_json(text)
            yield json.dumps(found["dsseEnvelope"])  # type: ignore[index]
        except (ValueError, KeyError, TypeError):
            yield text
