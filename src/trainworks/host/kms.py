"""Keys in AWS KMS: the private half never leaves it; named as cosign names them, ``awskms:///...``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from trainworks.errors import ProofError
from trainworks.host import aws

SCHEME = "awskms://"

_IDENTIFIER = re.compile(
    r"alias/[\w/-]+"
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|mrk-[0-9a-f]{32}"
    r"|arn:aws[a-z-]*:kms:(?P<region>[a-z0-9-]+):\d{12}:(?:alias|key)/[\w/-]+"
)
"""An alias, a key's number, or the ARN of either, which has the region."""

_FORMS = f"{SCHEME}/alias/NAME, {SCHEME}/KEY-ID, or {SCHEME}/ARN of either"

_ALGORITHM = "ECDSA_SHA_256"

_KIND = "`aws kms create-key --key-usage SIGN_VERIFY --key-spec ECC_NIST_P256` makes one that fits"

_STATE = "`aws kms describe-key` says in which state it is"


@dataclass(frozen=True, kw_only=True)
class KmsKey:
    """A key in AWS KMS, which exists and is for signatures.

    Attributes:
        identifier: Its ARN.
        region: Where it is; ``None``: the region of AWS's own configuration.
        public: Its public half, DER.
    """

    identifier: str
    region: str | None
    public: bytes

    def sign(self, digest: bytes) -> bytes:
        """Return the ECDSA signature (DER) of a SHA-256 hash; raises ``ProofError``. Each time it is another one."""
        # The hash alone: KMS takes messages up to 4,096 bytes, and a bill of materials is larger.
        arguments = {"Message": digest, "MessageType": "DIGEST", "SigningAlgorithm": _ALGORITHM}
        answer = _call("sign", self.identifier, self.region, **arguments)
        signature: bytes = answer["Signature"]
        return signature


def find_key(name: str, environment: Mapping[str, str]) -> KmsKey:
    """Ask AWS KMS for the key of a name that begins with ``awskms://``.

    Args:
        name: ``awskms:///alias/NAME``, or a key's number or ARN instead of the alias.
        environment: Its ``AWS_REGION`` is the region of a key that is not named by its ARN, as in other AWS programs;
            boto3 looks for the rest.

    Raises:
        ProofError: It is no such name, there is no such key, it is of another kind, or AWS refuses.
    """
    host, _, identifier = name.removeprefix(SCHEME).partition("/")
    found = _IDENTIFIER.fullmatch(identifier)
    if host or found is None:
        hint = "another endpoint is named by AWS_ENDPOINT_URL_KMS" if host and found else f"it is written {_FORMS}"
        raise ProofError([f"--key {name} is not the name of a key in AWS KMS"], hint=hint)
    if find_spec("boto3") is None:
        raise ProofError([f"--key {name}: boto3, which asks AWS, is not installed"], hint=aws.INSTALL)
    region = found["region"] or environment.get("AWS_REGION") or None
    answer = _call("get_public_key", identifier, region)
    usage, algorithms = answer["KeyUsage"], answer.get("SigningAlgorithms") or ()
    if usage != "SIGN_VERIFY" or _ALGORITHM not in algorithms:
        kind = answer.get("KeySpec") or answer.get("CustomerMasterKeySpec")
        raise ProofError([f"--key {name} is a key of another kind: {kind} for {usage}"], hint=_KIND)
    return KmsKey(identifier=answer["KeyId"], region=region, public=answer["PublicKey"])


def _call(operation: str, identifier: str, region: str | None, **arguments: Any) -> Any:
    place = f"AWS KMS{f' in {region}' if region else ''}"
    answer = aws.call(
        "kms",
        operation,
        region=region,
        place=f"{place}, key {identifier},",
        refuse=lambda message, hint: ProofError([message], hint=hint),
        missing="NotFoundException",
        hints={
            "UnsupportedOperationException": _KIND,
            "InvalidKeyUsageException": _KIND,
            "DisabledException": _STATE,
            "KMSInvalidStateException": _STATE,
        },
        KeyId=identifier,
        **arguments,
    )
    if answer is None:
        hint = "`aws kms list-aliases` names those of an account and region; the ARN of a key says which these are"
        raise ProofError([f"{place} has no key {identifier}"], hint=hint)
    return answer
