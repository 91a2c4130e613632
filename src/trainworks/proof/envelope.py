"""Signs statements and checks signatures: DSSE envelopes, as in-toto and cosign use them; Ed25519 or ECDSA P-256."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import load_der_public_key, load_pem_public_key

from trainworks.errors import ProofError
from trainworks.proof.strict_json import read_json

PAYLOAD_TYPE = "application/vnd.in-toto+json"

PrivateKey = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
PublicKey = ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey


KINDS = "keys are Ed25519 or ECDSA P-256, as `openssl genpkey -algorithm ed25519` makes them"


class EnvelopeError(Exception):
    """An envelope is malformed, or its signature is not good."""


def private_key(content: bytes, name: str, password: bytes | None) -> PrivateKey:
    """Return the key in a PEM file.

    Args:
        name: The file's name, for messages.
        password: What it is encrypted with, if it is.

    Raises:
        ProofError: The file is not such a key, or the password is wrong or missing.
    """
    try:
        key = serialization.load_pem_private_key(content, password)
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        # The library's words, never the file's: an unreadable file may still contain a key.
        raise ProofError([f"cannot read a private key: {name} ({error})"], hint=KINDS) from None
    if not isinstance(key, PrivateKey) or not _fits(key):
        raise ProofError([f"unsupported private key: {name}"], hint=KINDS)
    return key


def public_key(content: bytes, name: str) -> PublicKey:
    """Return the public key in a PEM file, or in DER; raises as ``private_key`` does."""
    load = load_pem_public_key if b"-----BEGIN" in content else load_der_public_key
    try:
        key = load(content)
    except (ValueError, UnsupportedAlgorithm):
        raise ProofError(
            [f"not a public key: {name}"], hint="`openssl pkey -in KEY -pubout` writes the public half of a private key"
        ) from None
    if not isinstance(key, PublicKey) or not _fits(key):
        raise ProofError([f"unsupported public key: {name}"], hint=KINDS)
    return key


def _fits(key: PrivateKey | PublicKey) -> bool:
    return not isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) or isinstance(
        key.curve, ec.SECP256R1
    )


def key_identifier(key: PublicKey) -> str:
    """Return the hash of a public key's DER form, which identifies it."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def sign(statement: Mapping[str, object], key: PrivateKey) -> str:
    """Return a statement in a signed envelope, one line of JSON."""
    payload = json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()
    content = signed_bytes(PAYLOAD_TYPE, payload)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        # The nonce follows from key and content (RFC 6979): the same proof has the same bytes.
        signature = key.sign(content, ec.ECDSA(hashes.SHA256(), deterministic_signing=True))
    else:
        signature = key.sign(content)
    envelope = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [
            {"keyid": key_identifier(key.public_key()), "sig": base64.b64encode(signature).decode()},
        ],
    }
    return json.dumps(envelope, separators=(",", ":"))


def signed_bytes(payload_type: str, payload: bytes) -> bytes:
    """Return what is signed: DSSE's pre-authentication encoding of type and payload."""
    return b"DSSEv1 %d %s %d %s" % (len(payload_type), payload_type.encode(), len(payload), payload)


def opened(envelope: str, key: PublicKey) -> dict[str, object]:
    """Return the statement in an envelope that a key has signed.

    Raises:
        EnvelopeError: The text is not an envelope, or the key has not signed it.
    """
    try:
        content: Any = read_json(envelope)
        payload_type = str(content["payloadType"])
        payload = base64.b64decode(content["payload"], validate=True)
        signatures = [base64.b64decode(each["sig"], validate=True) for each in content["signatures"]]
    except (ValueError, KeyError, TypeError, binascii.Error):
        raise EnvelopeError("not a DSSE envelope") from None
    if payload_type != PAYLOAD_TYPE:
        raise EnvelopeError(f"its payload is {payload_type}, not {PAYLOAD_TYPE}")
    if not any(_good(signature, signed_bytes(payload_type, payload), key) for signature in signatures):
        raise EnvelopeError(f"not signed by the key {key_identifier(key)[:12]}, or changed afterwards")
    try:
        statement = read_json(payload)
    except ValueError as error:
        raise EnvelopeError(f"its payload is not valid JSON: {error}") from None
    if not isinstance(statement, dict):
        raise EnvelopeError("its payload is not a statement")
    return statement


def _good(signature: bytes, content: bytes, key: PublicKey) -> bool:
    try:
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, content)
        else:
            key.verify(signature, content, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True
