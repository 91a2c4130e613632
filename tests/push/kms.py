"""A stand-in for AWS KMS with one key, for `cosign --key awskms:///...`.

It answers the three requests that signing takes. moto's KMS signs the digest of a digest, which no
verifier accepts.
"""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

from lock.servers import Answer, Request, Server


def serve_key(server: Server, folder: Path, name: str) -> Path:
    """Have a key of the curve P-256, known by an alias; return the file with its public part.

    Args:
        server: Gets the answers of KMS.
        folder: Where the files of the key are written.
        name: The alias, such as ``alias/images``.
    """
    private, public = folder / "kms.pem", folder / "kms.pub"
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(private))
    openssl("ec", "-in", str(private), "-pubout", "-out", str(public))
    server.serve("/", answer_for(private, name))
    return public


def answer_for(private: Path, name: str) -> Answer:
    """Return the answer to each request about the key of a file."""

    def answer(request: Request) -> None:
        asked = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        operation = request.headers["X-Amz-Target"].rpartition(".")[2]
        status, content = 400, {"__type": "NotFoundException", "message": "there is no such key"}
        if asked["KeyId"] == name:
            status, content = 200, operations(private, operation, asked)
        body = json.dumps(content).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/x-amz-json-1.1")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer


def operations(private: Path, operation: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the result of an operation of KMS."""
    algorithms = {"KeyUsage": "SIGN_VERIFY", "SigningAlgorithms": ["ECDSA_SHA_256"]}
    if operation == "DescribeKey":
        return {"KeyMetadata": {"KeyId": asked["KeyId"], "KeySpec": "ECC_NIST_P256", **algorithms}}
    if operation == "GetPublicKey":
        public = openssl("ec", "-in", str(private), "-pubout", "-outform", "DER")
        return {"KeyId": asked["KeyId"], "PublicKey": encoded(public), **algorithms}
    assert (operation, asked["MessageType"]) == ("Sign", "DIGEST")
    digest = base64.b64decode(asked["Message"])
    signature = openssl("pkeyutl", "-sign", "-inkey", str(private), content=digest)
    return {"KeyId": asked["KeyId"], "Signature": encoded(signature)}


def encoded(content: bytes) -> str:
    """Return bytes as JSON of AWS has them."""
    return base64.b64encode(content).decode()


def openssl(*words: str, content: bytes = b"") -> bytes:
    """Return the output of openssl."""
    command = ("openssl", *words)
    return subprocess.run(command, input=content, capture_output=True, check=True).stdout
