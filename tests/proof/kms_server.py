"""moto's server, run by moto's own Python, with what its KMS lacks: to sign a hash (``MessageType`` DIGEST)."""

from __future__ import annotations

import sys

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils
from moto.kms.responses import KmsResponse
from moto.kms.utils import ECDSAPrivateKey
from moto.server import main


def sign_hash(key: ECDSAPrivateKey, message: bytes, signing_algorithm: str) -> bytes:
    """Sign a SHA-256 hash as it is; moto takes every message for the content, and hashes it once more."""
    if signing_algorithm != "ECDSA_SHA_256":
        raise ValueError(signing_algorithm)
    signature: bytes = key.private_key.sign(message, ec.ECDSA(utils.Prehashed(hashes.SHA256())))
    return signature


def sign(response: KmsResponse) -> str:
    """Take hashes only."""
    if response._get_param("MessageType") != "DIGEST":
        raise ValueError("a message that is no hash")
    answer: str = moto_sign(response)
    return answer


moto_sign = KmsResponse.sign
KmsResponse.sign = sign
ECDSAPrivateKey.sign = sign_hash

sys.exit(main())
