"""What a proof is in these tests, and the standards' own readers, which accept or refuse our documents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cyclonedx.model.bom import Bom
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey  # type: ignore[attr-defined]
from spdx_tools.spdx.parser.jsonlikedict.json_like_dict_parser import JsonLikeDictParser
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from trainworks.cli.prove import text_of
from trainworks.proof.components import Contents
from trainworks.proof.envelope import PrivateKey, PublicKey, sign
from trainworks.proof.verify import ATTESTATIONS_FILE, PROVENANCE_FILE


@dataclass(frozen=True, kw_only=True)
class Proven:
    """A tiny image's contents and its three statements, by the name of the file that each is written to."""

    contents: Contents
    statements: Mapping[str, Mapping[str, Any]]

    def documents(self) -> dict[str, dict[str, Any]]:
        """Return what the files have: bare bills of materials, the whole statement of provenance."""
        return {
            name: json.loads(json.dumps(each if name == PROVENANCE_FILE else each["predicate"]))
            for name, each in self.statements.items()
        }

    def write(self, folder: Path, key: PrivateKey) -> None:
        """Write a signed proof, as ``build.py prove`` does."""
        for name, document in self.documents().items():
            (folder / name).write_text(text_of(document), encoding="utf-8")
        lines = "".join(f"{sign(each, key)}\n" for each in self.statements.values())
        (folder / ATTESTATIONS_FILE).write_text(lines, encoding="utf-8")


def cyclonedx_problems(text: str) -> object:
    """Return what the standard's JSON schema, in its strict form, says against a document: nothing, or an error."""
    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)


def cyclonedx_packages(text: str) -> set[str]:
    """Return the package URLs that CycloneDX's own library reads."""
    # The library builds this method with a class decorator.
    bom = Bom.from_json(json.loads(text))  # type: ignore[attr-defined]
    return {str(component.purl) for component in bom.components}


def spdx_problems(text: str) -> list[str]:
    """Return what SPDX's own library says against a document."""
    document = JsonLikeDictParser().parse(json.loads(text))  # type: ignore[no-untyped-call]
    return [message.validation_message for message in validate_full_spdx_document(document)]


def read_provenance(statement: Mapping[str, Any]) -> provenance_pb2.Provenance:
    """Read a statement with in-toto's own types, which refuse every field that they do not know."""
    Statement.copy_from_pb(json_format.ParseDict(dict(statement), statement_pb2.Statement())).validate()
    return json_format.ParseDict(statement["predicate"], provenance_pb2.Provenance())


def read_envelope(line: str, key: PublicKey) -> dict[str, Any]:
    """Return what another implementation of DSSE finds in an envelope; it raises where the signature is not good."""
    content = json.loads(line)
    reader = SSlibKey.from_crypto(key)
    # Libraries number keys each in their own way; the standard leaves that open, and takes it for a hint only.
    content["signatures"][0]["keyid"] = reader.keyid
    envelope = Envelope.from_dict(content)
    envelope.verify([reader], 1)
    statement: dict[str, Any] = json.loads(envelope.payload)
    return statement


def public_text(key: PrivateKey) -> bytes:
    """Return the public half of a key, as PEM."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


def private_text(key: PrivateKey, password: bytes | None = None) -> bytes:
    """Return a key as PEM."""
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)
