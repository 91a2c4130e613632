"""Writes a bill of materials as CycloneDX 1.6 JSON."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from trainworks.attestation.components import DISTRIBUTION, TRIVY, BillOfMaterials, ListedComponent
from trainworks.attestation.licenses import join_expressions, spdx_expression
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


def make_cyclonedx(bill: BillOfMaterials, *, builder: Builder, time: int) -> dict[str, object]:
    """Return a bill of materials as a CycloneDX document: the same bill gives the same bytes.

    Args:
        bill: The bill of materials.
        builder: The author of the document.
        time: The time of the document, in seconds since 1970.
    """
    references = make_references(bill.components)
    components = []
    # Of the components that the image does not have from the image that it extends.
    own_references = []
    reference_by_purl: dict[str, str] = {}
    for component, reference in zip(bill.components, references, strict=True):
        components.append(_describe_component(component, reference))
        reference_by_purl.setdefault(component.purl, reference)
        if not component.inherited:
            own_references.append(reference)

    name, version = bill.reference.rsplit(":", 1)
    image: dict[str, object] = {
        "type": "container",
        "bom-ref": bill.purl,
        "name": name,
        "version": version,
        "purl": bill.purl,
        "hashes": [{"alg": "SHA-256", "content": bill.sha256}],
        "properties": [
            {"name": f"{TRIVY}ImageID", "value": f"sha256:{bill.sha256}"},
            {"name": f"{TRIVY}RepoTag", "value": bill.reference},
        ],
    }
    dependencies: list[object] = [{"ref": bill.purl, "dependsOn": sorted(own_references)}]
    if bill.extended:
        of_base = sorted(set(references) - set(own_references))
        dependencies.append({"ref": references[0], "dependsOn": of_base})
        ancestor = _describe_component(bill.extended, references[0])
        # A reference must be unique in the document, and the list of components has this one.
        del ancestor["bom-ref"]
        image["pedigree"] = {"ancestors": [ancestor]}
    for component, reference in zip(bill.components, references, strict=True):
        if component.requires:
            required = {reference_by_purl[purl] for purl in component.requires}
            dependencies.append({"ref": reference, "dependsOn": sorted(required)})
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
    """Return the serial number of a document: it follows from the content, in any order of keys."""
    content = {key: value for key, value in document.items() if key != "serialNumber"}
    return f"urn:uuid:{content_uuid(content)}"


def utc(time: int) -> str:
    """Return a time in the format's form: ``2026-01-31T12:00:00Z``."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def content_uuid(document: Mapping[str, object]) -> uuid.UUID:
    """Return an identifier of a document that depends on its content alone."""
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    return uuid.uuid5(uuid.NAMESPACE_OID, digest)


def make_references(components: Sequence[ListedComponent]) -> list[str]:
    """Return a unique name within the document for each component: its package URL.

    The second component with a package URL gets ``#2`` at the end, for example
    ``pkg:pypi/NAME@VERSION#2``.
    """
    counts: dict[str, int] = {}
    references = []
    for component in components:
        number = counts.get(component.purl, 0) + 1
        counts[component.purl] = number
        references.append(component.purl if number == 1 else f"{component.purl}#{number}")
    return references


def _describe_component(component: ListedComponent, reference: str) -> dict[str, object]:
    """Return a component as an object of the format; empty facts are left out."""
    content: dict[str, object] = {
        "type": TYPES.get(component.kind, "library"),
        "bom-ref": reference,
        "name": component.name,
    }
    if component.version:
        content["version"] = component.version
    content["purl"] = component.purl
    if component.supplier:
        content["supplier"] = {"name": component.supplier}
    if component.sha256:
        content["hashes"] = [{"alg": "SHA-256", "content": component.sha256}]
    if component.licenses:
        content["licenses"] = _describe_licenses(component.licenses)
    if component.origin:
        kind = "vcs" if component.origin.startswith("git+") else "distribution"
        content["externalReferences"] = [{"type": kind, "url": component.origin}]
    properties = [(f"trainworks:{name}", value) for name, value in component.properties]
    properties += component.scanner_properties
    if properties:
        content["properties"] = [{"name": name, "value": value} for name, value in properties]
    return content


def _describe_licenses(names: Sequence[str]) -> list[object]:
    """Return names of licences as a list of the format: one expression if every name has one.

    The format does not allow a mix of expressions and names, so otherwise all are names.
    """
    expressions = [spdx_expression(name) for name in names]
    if all(expressions):
        return [{"expression": join_expressions(list(dict.fromkeys(expressions)))}]
    return [{"license": {"name": name}} for name in names]
