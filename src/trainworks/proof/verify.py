"""Holds signed statements against an image and against the documents beside them; every problem at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainworks.errors import ProofError
from trainworks.proof.envelope import EnvelopeError, PublicKey, key_identifier, opened
from trainworks.proof.provenance import CHECKOUT, CYCLONEDX, PROVENANCE, SPDX, STATEMENT

CYCLONEDX_FILE = "sbom.cdx.json"
SPDX_FILE = "sbom.spdx.json"
PROVENANCE_FILE = "provenance.json"
ATTESTATIONS_FILE = "attestations.intoto.jsonl"

DOCUMENTS = {PROVENANCE: PROVENANCE_FILE, CYCLONEDX: CYCLONEDX_FILE, SPDX: SPDX_FILE}
"""What is signed: type of the statement to the file that has the same for people and tools."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What a good proof says.

    Attributes:
        sha256: The image's configuration.
        builder: Who vouches for the provenance.
        commit: The checkout that it was built from; ``""`` outside of git.
        changed: Whether that checkout had changes.
        components: How many things the bill of materials lists.
        key: The hash of the key that signed.
    """

    sha256: str
    builder: str
    commit: str
    changed: bool
    components: int
    key: str


def verify(lines: Sequence[str], key: PublicKey, sha256: str, documents: Mapping[str, object]) -> Verified:
    """Check that a key has signed provenance and both bills of materials of an image, and that the files are those.

    Args:
        lines: The signed envelopes, one of each statement.
        key: Whose signature counts.
        sha256: The image's configuration.
        documents: File name to content, of those that are there: each must be what was signed.

    Raises:
        ProofError: Anything does not hold; with everything that does not.
    """
    problems: list[str] = []
    # What is not for us is passed over, as in-toto wants it: others may add lines, with keys and types of their own.
    passed_over: list[str] = []
    statements: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{ATTESTATIONS_FILE}, line {number}"
        try:
            statement = opened(line, key)
        except EnvelopeError as error:
            passed_over.append(f"{where}: {error}")
            continue
        kind = str(statement.get("predicateType", ""))
        subjects = _subjects(statement)
        if statement.get("_type") != STATEMENT or kind not in DOCUMENTS:
            passed_over.append(f"{where}: it is no statement that is known here ({kind or 'it has no type'})")
        elif sha256 not in subjects:
            said = ", ".join(f"sha256:{digest}" for digest in subjects) or "none"
            passed_over.append(f"{where}: it is about another image: {said}, not sha256:{sha256}")
        elif statements.setdefault(kind, statement) != statement:
            # The same one may be signed twice: a key in a KMS never gives the same signature again.
            problems.append(f"{where}: a second statement of the type {kind}, with another content")
    missing = [kind for kind in DOCUMENTS if kind not in statements]
    if missing:
        problems += passed_over
        problems += [
            f"{ATTESTATIONS_FILE}: no such statement of the type {kind} ({DOCUMENTS[kind]})" for kind in missing
        ]
    problems += [
        f"{name}: it is not what was signed"
        for kind, name in DOCUMENTS.items()
        if kind in statements and name in documents and documents[name] != _document(statements[kind])
    ]
    if problems:
        raise ProofError(problems, hint="trust neither these files nor what they say of the image")
    return _summary(sha256, key, statements)


def _subjects(statement: Mapping[str, Any]) -> list[str]:
    try:
        return [str(each["digest"]["sha256"]) for each in statement["subject"]]
    except (KeyError, TypeError):
        return []


def _document(statement: Mapping[str, Any]) -> object:
    """Return what the file beside an envelope has: the bill of materials itself, the whole statement of provenance."""
    return statement if statement["predicateType"] == PROVENANCE else statement["predicate"]


def _summary(sha256: str, key: PublicKey, statements: Mapping[str, Mapping[str, Any]]) -> Verified:
    try:
        predicate = statements[PROVENANCE]["predicate"]
        inputs = predicate["buildDefinition"]["resolvedDependencies"]
        checkout = next(each for each in inputs if each["name"] == CHECKOUT)
        return Verified(
            sha256=sha256,
            builder=str(predicate["runDetails"]["builder"]["id"]),
            commit=str(checkout.get("digest", {}).get("gitCommit", "")),
            changed=bool(checkout["annotations"]["changed"]),
            components=len(statements[CYCLONEDX]["predicate"]["components"]),
            key=key_identifier(key),
        )
    except (KeyError, StopIteration, TypeError, AttributeError):
        raise ProofError(["the signed statements are not as trainworks writes them"]) from None
