"""Reads the keys of ``--key``: a PEM file, or a key in AWS KMS, whose private half never leaves it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainworks.errors import ProofError
from trainworks.host import kms
from trainworks.proof.envelope import PublicKey, SigningKey, private_key, public_key

PASSWORD = "TRAINWORKS_KEY_PASSWORD"
"""The variable with the password of an encrypted private key."""


@dataclass(frozen=True)
class RemoteKey:
    """A key in AWS KMS, which signs there."""

    place: kms.KmsKey
    public: PublicKey

    def public_key(self) -> PublicKey:
        """Return its public half."""
        return self.public

    def sign(self, content: bytes) -> bytes:
        """Return the signature of content; raises ``ProofError`` where AWS refuses."""
        return self.place.sign(hashlib.sha256(content).digest())


def signing_key(name: str, environment: Mapping[str, str]) -> SigningKey:
    """Return the private key in a file, or one that signs in AWS KMS.

    Raises:
        ProofError: The key does not exist, is of an unsupported kind, has another password, or AWS refuses.
    """
    if name.startswith(kms.SCHEME):
        return _remote(name, environment)
    password = environment.get(PASSWORD)
    return private_key(_read(name), name, password.encode() if password else None)


def verifying_key(name: str, environment: Mapping[str, str]) -> PublicKey:
    """Return the public key of a file, or of a key in AWS KMS; raises as ``signing_key`` does."""
    if name.startswith(kms.SCHEME):
        return _remote(name, environment).public
    return public_key(_read(name), name)


def _remote(name: str, environment: Mapping[str, str]) -> RemoteKey:
    place = kms.find_key(name, environment)
    return RemoteKey(place, public_key(place.public, f"--key {name}"))


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        hint = f"a key in AWS KMS is named {kms.SCHEME}/{name}" if name.startswith("arn:") else ""
        raise ProofError([f"{name}: {error.strerror}"], hint=hint) from error
