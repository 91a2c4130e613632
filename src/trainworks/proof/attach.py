"""Attaches a proof to an image in a registry (OCI referrers), and reads it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from trainworks.engine.protocol import BuiltImage
from trainworks.errors import ProofError, RegistryError
from trainworks.proof.verify import ATTESTATIONS_FILE, CYCLONEDX_FILE, PROVENANCE_FILE, SPDX_FILE
from trainworks.registry.client import Descriptor, Registries, Repository, split_repository

TYPES = {
    CYCLONEDX_FILE: "application/vnd.cyclonedx+json",
    SPDX_FILE: "application/spdx+json",
    PROVENANCE_FILE: "application/vnd.in-toto+json",
    ATTESTATIONS_FILE: "application/vnd.in-toto.bundle",
}
"""The media type of each file, as its format names it."""

TITLE = "org.opencontainers.image.title"


@dataclass(frozen=True, kw_only=True)
class PushedImage:
    """An image in a registry: where, and its manifest's descriptor."""

    repository: Repository
    descriptor: Descriptor

    @property
    def address(self) -> str:
        """Its name with its digest."""
        return f"{self.repository}@{self.descriptor['digest']}"

    @property
    def sha256(self) -> str:
        """The hash of its manifest."""
        return str(self.descriptor["digest"]).removeprefix("sha256:")


def find_pushed(address: str, registries: Registries) -> PushedImage:
    """Return the image that ``HOST/NAME@sha256:...`` or ``HOST/NAME:TAG`` is in its registry.

    Raises:
        RegistryError: The image does not exist, or the registry refuses to show it.
    """
    name, at, digest = address.partition("@")
    tag = "latest"
    if ":" in name.rpartition("/")[2]:
        name, _, tag = name.rpartition(":")
    split_repository(name)
    repository = registries.repository(name)
    return PushedImage(repository=repository, descriptor=repository.descriptor(digest if at else tag))


def check_same(pushed: PushedImage, image: BuiltImage) -> None:
    """Check that the registry has this image under the address; raises ``ProofError`` where it has another one."""
    with _well_formed(pushed):
        manifest = pushed.repository.get_manifest(str(pushed.descriptor["digest"]))
        configuration = str(manifest.value().get("config", {}).get("digest", "")) if manifest else ""
    if configuration != image.identifier:
        raise ProofError(
            [f"{pushed.address} is another image ({configuration or 'no configuration'}), not {image.identifier}"],
            hint="push this image first: `build.py push`",
        )


def attach(pushed: PushedImage, texts: Mapping[str, str]) -> dict[str, str]:
    """Attach files to an image; return the digest of each. Files that are attached already stay as they are."""
    return {
        name: pushed.repository.attach(pushed.descriptor, TYPES[name], {name: text.encode()})
        for name, text in texts.items()
    }


def attached(pushed: PushedImage) -> dict[str, bytes]:
    """Return the files of a proof that are attached to an image.

    Raises:
        ProofError: A file is attached twice, with different contents.
        RegistryError: The registry does not answer, or its answer is malformed.
    """
    found: dict[str, bytes] = {}
    problems = []
    names = {kind: name for name, kind in TYPES.items()}
    with _well_formed(pushed):
        for each in pushed.repository.referrers(str(pushed.descriptor["digest"])):
            name = names.get(str(each.get("artifactType", "")))
            manifest = pushed.repository.get_manifest(str(each["digest"])) if name else None
            if name is None or manifest is None:
                continue
            for layer in manifest.value().get("layers", ()):
                content = pushed.repository.get_bytes(str(layer["digest"]))
                if (layer.get("annotations") or {}).get(TITLE) != name:
                    continue
                if name == ATTESTATIONS_FILE:
                    # Lines of several bundles are one bundle; the last line of one may lack its end.
                    before = found.get(name, b"")
                    found[name] = (before if before.endswith(b"\n") or not before else before + b"\n") + content
                elif found.setdefault(name, content) != content:
                    problems.append(f"{pushed.address}: {name} is attached twice, with different contents")
    if problems:
        raise ProofError(problems, hint="`build.py verify --proof DIR` checks a copy of the files")
    return found


@contextmanager
def _well_formed(pushed: PushedImage) -> Iterator[None]:
    """Report an answer of the registry that is not of the standard's form as an error."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RegistryError(
            f"{pushed.address}: the registry's answer is malformed ({type(error).__name__}: {error})"
        ) from None
