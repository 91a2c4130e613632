"""Compares statements that cosign has verified with a policy.

cosign judges signatures. Its output, one DSSE envelope in a line, is trusted here.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packageurl import PackageURL

from trainworks.attestation.cyclonedx import serial_number
from trainworks.attestation.evidence import EVIDENCE, GPU_PARTS, Evidence, read_evidence
from trainworks.attestation.provenance import CHECKOUT, CYCLONEDX, PROVENANCE
from trainworks.errors import OutputError, ProofError

TYPES = {"slsaprovenance1": PROVENANCE, "cyclonedx": CYCLONEDX}
"""The types of statements that an image must have, by their names in ``cosign --type``."""

_CUDA = re.compile(r"nvidia-cuda-runtime(-cu\d+)?$|cuda-cudart-[\d-]+$|(.*/)?nvidia/cuda(:|$)")
"""The names of CUDA's runtime: as a wheel, as a Debian package, and of NVIDIA's image."""

_NOT_OURS = "the statements are not as trainworks writes them"

LARGEST = 256_000_000
"""The most characters of cosign's output that are read.

The bill of materials of a large image has a hundredth.
"""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The facts of a good proof.

    Attributes:
        sha256: The hash of the image's manifest.
        builder: The URI of the builder.
        commit: The git commit that the image was built from; ``""`` outside of git.
        changed: Whether the checkout had changes that are in no commit.
        components: The number of components in the bill of materials.
        cuda: Whether a component is CUDA's runtime, or NVIDIA's image with the runtime.
        evidence: The recorded runs of the image that fit the policy.
    """

    sha256: str
    builder: str
    commit: str
    changed: bool
    components: int
    cuda: bool = False
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The user's demands on the statements, besides their signatures.

    Attributes:
        builder: The URI of the builder; ``""``: any.
        commit: The git commit, or its first digits (at least seven); ``""``: any.
        unchanged: Whether the checkout must have been that of the commit, without changes.
        gpu: A GPU on which the image passed ``parts``, or a part of its name; ``""``: none is
            needed. The image must have CUDA, and the run must have been of a checkout without
            changes.
        parts: The parts of `make gpu` that must have passed there.
    """

    builder: str = ""
    commit: str = ""
    unchanged: bool = False
    gpu: str = ""
    parts: tuple[str, ...] = GPU_PARTS

    def problems(self, proof: Verified) -> list[str]:
        """Return a sentence for each demand that a proof does not meet; empty if it meets all."""
        problems = []
        if self.builder and proof.builder != self.builder:
            problems.append(f"the builder is {proof.builder}, not {self.builder}")
        if self.commit and not proof.commit.startswith(self.commit.lower()):
            problems.append(f"built from the commit {proof.commit or '(none)'}, not {self.commit}")
        if self.unchanged and proof.changed:
            problems.append("built from a checkout with changes that are in no commit")
        if self.gpu and not proof.cuda:
            problems.append(f"the image has no CUDA: nothing of it runs on {self.gpu}")
        return problems


def read_output(files: Sequence[Path]) -> str:
    """Return cosign's output, from files or, if there are none, from stdin.

    Raises:
        OutputError: A file or stdin cannot be read.
        ProofError: The output is not text, or longer than ``LARGEST``.
    """
    texts = []
    try:
        for path in files:
            with path.open(encoding="utf-8") as file:
                # One character more than allowed shows that there are too many.
                texts.append(file.read(LARGEST + 1))
        if not files:
            texts.append(sys.stdin.read(LARGEST + 1))
    except OSError as error:
        # Nothing was proved, and nothing was refuted: the status is that of every unreadable file.
        where = f"{error.filename}: " if error.filename else ""
        raise OutputError(f"cannot read cosign's output: {where}{error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProofError([f"cannot read cosign's output: {error}"]) from error
    if sum(map(len, texts)) > LARGEST:
        raise ProofError(
            [f"cosign's output has more than {LARGEST // 1_000_000} MB; no proof of an image has"]
        )
    return "\n".join(texts)


def verify(output: str, sha256: str, policy: Policy) -> Verified:
    """Check provenance and bill of materials of an image, and return the facts in them.

    There may be several of each: one provenance that fits the policy and has its bill of materials
    is enough.

    Args:
        output: The output of ``cosign verify-attestation`` for each type.
        sha256: The hash of the image's manifest.
        policy: The user's demands on the provenance.

    Raises:
        ProofError: Something does not hold; the error lists every problem.
    """
    statements, skipped = _group_by_type(output, sha256)
    missing = [name for name, kind in TYPES.items() if not statements[kind]]
    if missing:
        lines = [
            f"no statement of the type {TYPES[name]} (cosign verify-attestation --type {name})"
            for name in missing
        ]
        raise ProofError([*skipped, *lines], hint="do not trust what is said of the image")
    evidence, untrue = _check_evidence(statements[EVIDENCE], sha256, policy)
    if policy.gpu and not evidence:
        if not untrue:
            untrue = [
                f"no statement of the type {EVIDENCE} (cosign verify-attestation --type {EVIDENCE})"
            ]
        raise ProofError([*skipped, *untrue], hint=f"nothing shows that it works on {policy.gpu}")

    bill_by_serial: dict[str, Mapping[str, Any]] = {}
    problems: list[str] = []
    for statement in statements[CYCLONEDX]:
        bill = statement.get("predicate")
        problem = _check_bill(bill, sha256)
        if problem:
            problems.append(problem)
        elif bill is not None:
            bill_by_serial[bill["serialNumber"]] = bill
    if bill_by_serial:
        # The last one first: it is most likely the newest.
        for provenance in reversed(statements[PROVENANCE]):
            summary = _summarise(sha256, provenance, bill_by_serial)
            if summary is None:
                problems.append("the provenance is of another bill of materials than is there")
                continue
            differences = policy.problems(summary)
            if not differences:
                return replace(summary, evidence=evidence)
            problems += differences
    raise ProofError(
        list(dict.fromkeys(problems)),
        hint="the signature is good; what it says is not what you demand of an image",
    )


def _group_by_type(
    output: str, sha256: str
) -> tuple[dict[str, list[Mapping[str, Any]]], list[str]]:
    """Return the statements about an image by their types, and a sentence for each other one.

    Args:
        output: cosign's output.
        sha256: The hash of the image's manifest.

    Raises:
        ProofError: A line is not an envelope as cosign prints it.
    """
    statements: dict[str, list[Mapping[str, Any]]] = {
        kind: [] for kind in (*TYPES.values(), EVIDENCE)
    }
    skipped: list[str] = []
    for number, statement in _read_statements(output):
        kind, subjects = str(statement.get("predicateType", "")), _read_subjects(statement)
        if kind not in statements:
            skipped.append(
                f"line {number}: not a type of statement that is known ({kind or 'it has no type'})"
            )
        elif sha256 not in subjects:
            names = ", ".join(f"sha256:{digest}" for digest in subjects) or "none"
            skipped.append(
                f"line {number}: it is about another image: {names}, not sha256:{sha256}"
            )
        else:
            statements[kind].append(statement)
    return statements, skipped


def _check_evidence(
    statements: Sequence[Mapping[str, Any]], sha256: str, policy: Policy
) -> tuple[tuple[Evidence, ...], list[str]]:
    """Return the evidence that holds and fits the policy, and the problems of the rest.

    Args:
        statements: The statements of the type ``EVIDENCE``.
        sha256: The hash of the image's manifest.
        policy: The user's demands.
    """
    fitting: list[Evidence] = []
    problems: list[str] = []
    for statement in statements:
        try:
            evidence = read_evidence(statement.get("predicate"), sha256)
        except ProofError as error:
            problems += error.problems
            continue
        differences = []
        if policy.gpu:
            differences = evidence.problems(policy.gpu, policy.parts)
        # With a GPU, its own demands include this one.
        if policy.unchanged and not policy.gpu and evidence.changed:
            differences.append(
                f"{evidence.suite} ran on a checkout with changes that are in no commit"
            )
        problems += differences
        if not differences:
            fitting.append(evidence)
    return tuple(fitting), problems


def _read_statements(output: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the number of its line, and the statement, for each statement in cosign's output.

    Lines of words for people, and statements that are not objects, are skipped.

    Raises:
        ProofError: A line with an object is not an envelope as cosign prints it.
    """
    for number, line in enumerate(output.splitlines(), start=1):
        if not line.startswith("{"):
            continue
        try:
            payload = json.loads(line)["payload"]
            statement = json.loads(base64.b64decode(payload, validate=True))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ProofError([f"line {number}: not an envelope as cosign prints it"]) from None
        if isinstance(statement, dict):
            yield number, statement


def _read_subjects(statement: Mapping[str, Any]) -> list[str]:
    """Return the SHA-256 of each image that a statement is about; empty if it is malformed."""
    try:
        return [str(subject["digest"]["sha256"]) for subject in statement["subject"]]
    except (KeyError, TypeError):
        return []


def _check_bill(bill: Any, sha256: str) -> str:
    """Return the reason why a bill of materials is not this image's; ``""`` if it is.

    A signature does not prove that the right document was signed: the bill of another image, signed
    for this one, is a mistake that only the bill itself shows.
    """
    try:
        serial = str(bill["serialNumber"])
        purl = PackageURL.from_string(bill["metadata"]["component"]["purl"])
    except (KeyError, TypeError, ValueError):
        return _NOT_OURS
    if serial != serial_number(bill):
        return (
            "the bill of materials is not what was written:"
            " its serial number does not follow from its content"
        )
    if not purl.version:
        return (
            "the bill of materials does not name the image's manifest: write it with `prove"
            " --pushed ADDRESS`"
        )
    if purl.version != f"sha256:{sha256}":
        return f"the bill of materials is about another image: {purl.version}"
    return ""


def _summarise(
    sha256: str, provenance: Mapping[str, Any], bills: Mapping[str, Mapping[str, Any]]
) -> Verified | None:
    """Return the facts of a provenance and of its bill of materials.

    Args:
        sha256: The hash of the image's manifest.
        provenance: The statement.
        bills: The bills of materials of the image, by their serial numbers.

    Returns:
        The facts; ``None`` if the provenance belongs to none of these bills of materials.

    Raises:
        ProofError: The statement, or the bill of materials, is not as trainworks writes it.
    """
    try:
        predicate = provenance["predicate"]
        # The serial number in the provenance says which bill of materials was written with it.
        serials = [str(row.get("uri")) for row in predicate["runDetails"]["byproducts"]]
        bill = next((bills[serial] for serial in serials if serial in bills), None)
        if bill is None:
            return None
        inputs = predicate["buildDefinition"]["resolvedDependencies"]
        checkout = next(row for row in inputs if row["name"] == CHECKOUT)
        names = [str(component["name"]) for component in bill["components"]]
        return Verified(
            sha256=sha256,
            builder=str(predicate["runDetails"]["builder"]["id"]),
            commit=str(checkout.get("digest", {}).get("gitCommit", "")),
            # Any value but False counts as changed.
            changed=checkout["annotations"]["changed"] is not False,
            components=len(names),
            cuda=any(_CUDA.match(name) for name in names),
        )
    except (KeyError, StopIteration, TypeError, AttributeError):
        raise ProofError([_NOT_OURS]) from None


def describe(image: str, proven: Verified) -> str:
    """Return the facts of a good proof for people, as lines of a text.

    Args:
        image: The address that the user gave: ``HOST/NAME@sha256:...``.
        proven: The facts.
    """
    commit = f"commit {proven.commit}" if proven.commit else "a checkout outside of git"
    changed = ", with changes that are in no commit" if proven.changed else ""
    lines = [
        f"{image}: proof holds",
        f"  image     sha256:{proven.sha256}",
        f"  builder   {proven.builder}",
        f"  built     from {commit}{changed}",
        f"  contents  {proven.components} components",
    ]
    for evidence in proven.evidence:
        gpus = ", ".join(evidence.gpus) or "no GPU"
        lines.append(
            f"  tested    {evidence.suite}, {evidence.date}, {gpus}, driver"
            f" {evidence.driver or 'none'}: {len(evidence.passed)} passed,"
            f" {len(evidence.failed)} failed, {len(evidence.not_tested)} not tested"
        )
    return "".join(f"{line}\n" for line in lines)
