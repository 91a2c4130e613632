"""Compares signed statements with an image and with the documents beside them; reports every problem at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainworks.errors import ProofError
from trainworks.proof.envelope import EnvelopeError, PublicKey, key_identifier, opened
from trainworks.proof.provenance import CHECKOUT, CYCLONEDX, PROVENANCE, STATEMENT
from trainworks.proof.strict_json import canonical

CYCLONEDX_FILE = "sbom.cdx.json"
PROVENANCE_FILE = "provenance.json"
ATTESTATIONS_FILE = "attestations.intoto.jsonl"

STATEMENTS = (STATEMENT, "https://in-toto.io/Statement/v0.1")
"""Types of statements: that of today, and the one that cosign 2 writes. They have the same fields."""

DOCUMENTS = {PROVENANCE: PROVENANCE_FILE, CYCLONEDX: CYCLONEDX_FILE}
"""The type of each signed statement, and the file with the same content."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What a good proof says.

    Attributes:
        sha256: The hash of the image's configuration, or of its manifest.
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


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What provenance has to say beside its signature.

    Attributes:
        builder: The URI of the builder; ``""``: any.
        commit: The git commit, or its first digits (at least seven); ``""``: any.
        unchanged: Whether the checkout must have been that of the commit, without changes.
    """

    builder: str = ""
    commit: str = ""
    unchanged: bool = False

    def problems(self, found: Verified) -> list[str]:
        """Return what a proof says otherwise."""
        problems = []
        if self.builder and found.builder != self.builder:
            problems.append(f"the builder is {found.builder}, not {self.builder}")
        if self.commit and not found.commit.startswith(self.commit.lower()):
            problems.append(f"built from the commit {found.commit or '(none)'}, not {self.commit}")
        if self.unchanged and found.changed:
            problems.append("built from a checkout with changes that are in no commit")
        return problems


def verify(
    lines: Sequence[str],
    key: PublicKey,
    sha256: str,
    documents: Mapping[str, object],
    policy: Policy | None = None,
) -> Verified:
    """Check that a key has signed provenance and bill of materials of an image, and that the files are those.

    A signature is judged before anything that it covers is read. Several signed sets may be there: one that fits the
    files and the policy is enough.

    Args:
        lines: The signed envelopes.
        sha256: The hash of the image's configuration, or of its manifest.
        documents: File name to content; each must equal what was signed. Files may be missing.
        policy: What the provenance has to say; default: anything.

    Raises:
        ProofError: Something does not hold; the error lists every problem.
    """
    # Lines with other keys, types or images are skipped, as in-toto wants it: others may add theirs.
    passed_over: list[str] = []
    statements: dict[str, list[dict[str, Any]]] = {kind: [] for kind in DOCUMENTS}
    for number, line in enumerate(lines, start=1):
        where = f"{ATTESTATIONS_FILE}, line {number}"
        try:
            statement = opened(line, key)
        except EnvelopeError as error:
            passed_over.append(f"{where}: {error}")
            continue
        kind = str(statement.get("predicateType", ""))
        subjects = _subjects(statement)
        if statement.get("_type") not in STATEMENTS or kind not in DOCUMENTS:
            passed_over.append(f"{where}: not a type of statement that is known ({kind or 'it has no type'})")
        elif sha256 not in subjects:
            said = ", ".join(f"sha256:{digest}" for digest in subjects) or "none"
            passed_over.append(f"{where}: it is about another image: {said}, not sha256:{sha256}")
        else:
            statements[kind].append(statement)
    problems: list[str] = []
    if not all(statements.values()):
        problems += passed_over
    for kind, name in DOCUMENTS.items():
        found = statements[kind]
        if not found:
            problems.append(f"{ATTESTATIONS_FILE}: no such statement of the type {kind} ({name})")
        elif name in documents:
            same = [each for each in found if canonical(_document(each)) == canonical(documents[name])]
            if not same:
                problems.append(f"{name}: differs from what was signed")
            statements[kind] = same
    if problems:
        raise ProofError(problems, hint="do not trust these files or what they say of the image")
    return _fitting(sha256, key, statements, policy or Policy())


def _fitting(
    sha256: str, key: PublicKey, statements: Mapping[str, Sequence[Mapping[str, Any]]], policy: Policy
) -> Verified:
    """Return the last set of statements that fits the policy; raises ``ProofError`` if none does."""
    problems: list[str] = []
    for provenance in reversed(statements[PROVENANCE]):
        found = _summary(sha256, key, provenance, statements[CYCLONEDX][-1])
        wrong = policy.problems(found)
        if not wrong:
            return found
        problems += [each for each in wrong if each not in problems]
    raise ProofError(problems, hint="the signature is good; what it says is not what you demand of an image")


def _subjects(statement: Mapping[str, Any]) -> list[str]:
    try:
        return [str(each["digest"]["sha256"]) for each in statement["subject"]]
    except (KeyError, TypeError):
        return []


def _document(statement: Mapping[str, Any]) -> object:
    """Return the content of the file beside an envelope: a bill of materials, or the whole statement of provenance."""
    return statement if statement["predicateType"] == PROVENANCE else statement["predicate"]


def _summary(sha256: str, key: PublicKey, provenance: Mapping[str, Any], materials: Mapping[str, Any]) -> Verified:
    try:
        predicate = provenance["predicate"]
        inputs = predicate["buildDefinition"]["resolvedDependencies"]
        checkout = next(each for each in inputs if each["name"] == CHECKOUT)
        return Verified(
            sha256=sha256,
            builder=str(predicate["runDetails"]["builder"]["id"]),
            commit=str(checkout.get("digest", {}).get("gitCommit", "")),
            # What is not plainly "unchanged" counts as changed.
            changed=checkout["annotations"]["changed"] is not False,
            components=len(materials["predicate"]["components"]),
            key=key_identifier(key),
        )
    except (KeyError, StopIteration, TypeError, AttributeError):
        raise ProofError(["the signed statements are not as trainworks writes them"]) from None
