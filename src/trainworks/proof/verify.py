"""Compares signed statements with an image and with the documents beside them; reports every problem at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainworks.errors import ProofError
from trainworks.proof.envelope import EnvelopeError, PublicKey, key_identifier, opened
from trainworks.proof.provenance import CHECKOUT, CYCLONEDX, PROVENANCE, SPDX, STATEMENT
from trainworks.proof.strict_json import canonical

CYCLONEDX_FILE = "sbom.cdx.json"
SPDX_FILE = "sbom.spdx.json"
PROVENANCE_FILE = "provenance.json"
ATTESTATIONS_FILE = "attestations.intoto.jsonl"

DOCUMENTS = {PROVENANCE: PROVENANCE_FILE, CYCLONEDX: CYCLONEDX_FILE, SPDX: SPDX_FILE}
"""The type of each signed statement, and the file with the same content."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What a good proof says.

    Attributes:
        sha256: The hash of the image's configuration.
        builder: The URI of the builder.
        commit: The git commit that it was built from; ``""`` outside of git.
        changed: Whether the checkout had changes that are in no commit.
        components: How many components the bill of materials lists.
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
        sha256: The hash of the image's configuration.
        documents: File name to content; each must equal what was signed. Files may be missing.

    Raises:
        ProofError: Something does not hold; the error lists every problem.
    """
    problems: list[str] = []
    # Lines with other keys, types or images are skipped, as in-toto wants it: others may add theirs.
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
            passed_over.append(f"{where}: not a type of statement that is known ({kind or 'it has no type'})")
        elif sha256 not in subjects:
            said = ", ".join(f"sha256:{digest}" for digest in subjects) or "none"
            passed_over.append(f"{where}: it is about another image: {said}, not sha256:{sha256}")
        elif canonical(statements.setdefault(kind, statement)) != canonical(statement):
            # The same one may be signed twice: a key in a KMS never gives the same signature again.
            problems.append(f"{where}: a second statement of the type {kind}, with different content")
    missing = [kind for kind in DOCUMENTS if kind not in statements]
    if missing:
        problems += passed_over
        problems += [
            f"{ATTESTATIONS_FILE}: no such statement of the type {kind} ({DOCUMENTS[kind]})" for kind in missing
        ]
    problems += [
        f"{name}: differs from what was signed"
        for kind, name in DOCUMENTS.items()
        if kind in statements
        and name in documents
        and canonical(documents[name]) != canonical(_document(statements[kind]))
    ]
    if problems:
        raise ProofError(problems, hint="do not trust these files or what they say of the image")
    return _summary(sha256, key, statements)


def _subjects(statement: Mapping[str, Any]) -> list[str]:
    try:
        return [str(each["digest"]["sha256"]) for each in statement["subject"]]
    except (KeyError, TypeError):
        return []


def _document(statement: Mapping[str, Any]) -> object:
    """Return the content of the file beside an envelope: a bill of materials, or the whole statement of provenance."""
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
