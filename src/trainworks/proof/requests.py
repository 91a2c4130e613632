"""What ``prove`` and ``verify`` are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainworks.extend.request import ExtendRequest
from trainworks.proof.verify import Policy


@dataclass(frozen=True, kw_only=True)
class ProveRequest:
    """An image to give proof of, and where to write it.

    Attributes:
        output: The folder to write to.
        target: The target whose image it is; ``""`` with ``extension``.
        key: A private key, a PEM file; ``""``: nothing is signed.
        attach: The image's address in a registry; ``""``: nothing is attached.
        builder: The URI of the builder; ``""``: this machine.
        engine: Which engine has the image; ``None``: the first that answers.
        with_components, without_components: The choice of components that the target was built with.
        extension: The request that the image was extended by; ``None``: the image is a target's.
    """

    output: Path
    target: str = ""
    key: str = ""
    attach: str = ""
    builder: str = ""
    engine: str | None = None
    with_components: tuple[str, ...] = ()
    without_components: tuple[str, ...] = ()
    extension: ExtendRequest | None = None


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """An image whose proof is to be checked.

    Attributes:
        image: A name that the engine has, ``sha256:...``, or an address in a registry.
        key: The public key: a PEM or DER file.
        proof: The folder with the proof; ``None``: it is attached to the image in the registry.
        engine: Which engine has the image; ``None``: the first that answers.
        policy: What the provenance has to say; ``None``: anything.
    """

    image: str
    key: str
    proof: Path | None = None
    engine: str | None = None
    policy: Policy | None = None
