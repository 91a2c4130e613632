"""Reads the key files of ``--key``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainworks.errors import ProofError
from trainworks.proof.envelope import PrivateKey, PublicKey, private_key, public_key

PASSWORD = "TRAINWORKS_KEY_PASSWORD"
"""The variable with the password of an encrypted private key."""


def signing_key(name: str, environment: Mapping[str, str]) -> PrivateKey:
    """Return the private key in a file.

    Raises:
        ProofError: The file does not exist, its key is of an unsupported kind or has another password.
    """
    password = environment.get(PASSWORD)
    return private_key(_read(name), name, password.encode() if password else None)


def verifying_key(name: str) -> PublicKey:
    """Return the public key in a file; raises as ``signing_key`` does."""
    return public_key(_read(name), name)


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ProofError([f"{name}: {error.strerror}"]) from error
