"""Writes a bill of materials as CycloneDX 1.6 JSON."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from trainworks.attestation.components import DISTRIBUTION, TRIVY, BillOfMaterials, ListedComponent
from trainworks.attestation.licenses import joined, spdx_expression
from trainworks.attestation.provenance import Builder

SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"

TYPES = {
    "base": "container",
    DISTRIBUTION: "operating-system",
    "file": "file",
    "image": "container",
    "launcher": "application",
}
"""The format's types of components that are not libraries.

Scanners take the one ``operating-system`` for the distribution of the packages;
a base image is a ``container``.
"""


def cyclonedx(bill: BillOfMaterials, *, builder: Builder, time: int) -> dict[str, object]:
    """Return the document: the same bill of materials gives the same bytes.

    Args:
        builder: The author of the document.
        time: The time of the document, in seconds since 1970.
    """
    references = references_of(bill.components)
    components = [
        _component(each, reference)
        for each, reference in zip(bill.components, references, strict=True)
    ]
    by_purl: dict[str, str] = {}
    for each, reference in zip(bill.components, references, strict=True):
        by_purl.setdefault(each.purl, reference)
    own = [
        name for each, name in zip(bill.components, references, strict=True) if not each.inherited
    ]
    dependencies: list[object] = [{"ref": bill.purl, "dependsOn": sorted(own)}]
    image: dict[str, object] = {
        "type": "container",
        "bom-ref": bill.purl,
        "name": bill.reference.rsplit(":", 1)[0],
        "version": bill.reference.rsplit(":", 1)[1],
        "purl": bill.purl,
        "hashes": [{"alg": "SHA-256", "content": bill.sha256}],
        "properties": [
            {"name": f"{TRIVY}ImageID", "value": f"sha256:{bill.sha256}"},
            {"name": f"{TRIVY}RepoTag", "value": bill.reference},
        ],
    }
    if bill.extended:
        dependencies.append({"ref": references[0], "dependsOn": sorted(set(references) - set(own))})
        ancestor = _component(bill.extended, references[0])
        del ancestor["bom-ref"]
        image["pedigree"] = {"ancestors": [ancestor]}
    dependencies += [
        {"ref": reference, "dependsOn": sorted({by_purl[purl] for purl in each.requires})}
        for each, reference in zip(bill.components, references, strict=True)
        if each.requires
    ]
    document: dict[str, object] = {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": utc(time),
            "lifecycles": [{"phase": "post-build"}],
            "tools": {
                "components": [
                    {"type": "application", "name": "trainworks", "version": builder.version}
                ]
            },
            "authors": [{"name": builder.identifier}],
            "component": image,
        },
        "components": components,
        "dependencies": dependencies,
    }
    return {**document, "serialNumber": serial_number(document)}


def serial_number(document: Mapping[str, object]) -> str:
    """Return what a document's serial number must be: it follows from the
    content, in whatever order its keys are.
    """
    content = {key: value for key, value in document.items() if key != "serialNumber"}
    return f"urn:uuid:{content_uuid(content)}"


def utc(time: int) -> str:
    """Return a time as the format writes it."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def content_uuid(document: Mapping[str, object]) -> uuid.UUID:
    """Return an identifier of a document that depends on its content alone."""
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    return uuid.uuid5(uuid.NAMESPACE_OID, digest)


def references_of(components: Sequence[ListedComponent]) -> list[str]:
    """Return a name for each component within the document: its package URL,
    with a number where two have the same.
    """
    seen: dict[str, int] = {}
    references = []
    for each in components:
        number = seen[each.purl] = seen.get(each.purl, 0) + 1
        references.append(each.purl if number == 1 else f"{each.purl}#{number}")
    return references


def _component(each: ListedComponent, reference: str) -> dict[str, object]:
    content: dict[str, object] = {
        "type": TYPES.get(each.kind, "library"),
        "bom-ref": reference,
        "name": each.name,
        **({"version": each.version} if each.version else {}),
        "purl": each.purl,
        **({"supplier": {"name": each.supplier}} if each.supplier else {}),
    }
    if each.sha256:
        content["hashes"] = [{"alg": "SHA-256", "content": each.sha256}]
    if each.licenses:
        content["licenses"] = _licenses(each.licenses)
    if each.origin:
        kind = "vcs" if each.origin.startswith("git+") else "distribution"
        content["externalReferences"] = [{"type": kind, "url": each.origin}]
    properties = [
        *((f"trainworks:{name}", value) for name, value in each.properties),
        *each.scanner_properties,
    ]
    if properties:
        content["properties"] = [{"name": name, "value": value} for name, value in properties]
    return content


def _licenses(names: Sequence[str]) -> list[object]:
    """Return one expression if every name has one.

    The format does not allow a mix of expressions and names.
    """
    expressions = [spdx_expression(name) for name in names]
    if all(expressions):
        return [{"expression": joined(list(dict.fromkeys(expressions)))}]
    return [{"license": {"name": name}} for name in names]
