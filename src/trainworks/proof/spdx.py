"""Writes a bill of materials as SPDX 2.3 JSON."""

from __future__ import annotations

import hashlib
import re

from trainworks.proof.components import DISTRIBUTION, BillOfMaterials, ListedComponent
from trainworks.proof.cyclonedx import content_uuid, references_of, utc
from trainworks.proof.licenses import joined, spdx_expression

PURPOSES = {
    "base": "CONTAINER",
    DISTRIBUTION: "OPERATING-SYSTEM",
    "file": "FILE",
    "image": "CONTAINER",
    "launcher": "APPLICATION",
}
"""The format's purposes of packages that are not libraries."""

OPERATING_SYSTEM = "OperatingSystem"
"""How the identifier of the distribution begins: trivy knows it by that (``pkg/sbom/spdx`` of aquasecurity/trivy)."""

BUILT_FROM = "built package from"
"""How trivy and syft begin the text that names the source package (the same file)."""

OWN_LICENSE = re.compile(r"LicenseRef-[A-Za-z0-9.-]+")

NONE = "NOASSERTION"
IMAGE = "SPDXRef-image"


def spdx(bill: BillOfMaterials, *, builder_version: str, time: int) -> dict[str, object]:
    """Return the document: the same bill of materials gives the same bytes.

    Args:
        time: The time of the document, in seconds since 1970; the format requires one.
    """
    references = references_of(bill.components)
    identifiers = {
        reference: _identifier(each, reference) for each, reference in zip(bill.components, references, strict=True)
    }
    names: dict[str, str] = {}
    packages = [_image(bill)]
    relationships = [_relation("SPDXRef-DOCUMENT", "DESCRIBES", IMAGE)]
    for each, reference in zip(bill.components, references, strict=True):
        packages.append(_package(each, identifiers[reference], names))
        if each is bill.extended:
            relationships.append(_relation(IMAGE, "DESCENDANT_OF", identifiers[reference]))
        else:
            holder = identifiers[references[0]] if each.inherited else IMAGE
            relationships.append(_relation(holder, "CONTAINS", identifiers[reference]))
        relationships += [_relation(identifiers[reference], "DEPENDS_ON", identifiers[purl]) for purl in each.requires]
    document: dict[str, object] = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": bill.reference,
        "creationInfo": {"created": utc(time), "creators": [f"Tool: trainworks-{builder_version}"]},
        "packages": packages,
        "relationships": relationships,
    }
    if names:
        document["hasExtractedLicensingInfos"] = [
            {
                "licenseId": identifier,
                "name": name,
                "extractedText": f"Named {name!r} by the packages that have it; its text comes with them.",
            }
            for identifier, name in sorted(names.items())
        ]
    return {**document, "documentNamespace": f"urn:uuid:{content_uuid(document)}"}


def _relation(one: str, kind: str, other: str) -> dict[str, str]:
    return {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}


def _identifier(each: ListedComponent, reference: str) -> str:
    """Return a name within the document: letters, digits, dots and hyphens only, with a hash that makes it unique."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", each.name)
    kind = OPERATING_SYSTEM if each.kind == DISTRIBUTION else each.kind
    return f"SPDXRef-{kind}-{readable}-{hashlib.sha256(reference.encode()).hexdigest()[:8]}"


def _image(bill: BillOfMaterials) -> dict[str, object]:
    name, _, tag = bill.reference.rpartition(":")
    return {
        "SPDXID": IMAGE,
        "name": name,
        "versionInfo": tag,
        "downloadLocation": NONE,
        "filesAnalyzed": False,
        "primaryPackagePurpose": "CONTAINER",
        "checksums": [{"algorithm": "SHA256", "checksumValue": bill.sha256}],
        "externalRefs": [_purl(bill.purl)],
        "licenseConcluded": NONE,
        "licenseDeclared": NONE,
        "copyrightText": NONE,
    }


def _package(each: ListedComponent, identifier: str, names: dict[str, str]) -> dict[str, object]:
    content: dict[str, object] = {
        "SPDXID": identifier,
        "name": each.name,
        **({"versionInfo": each.version} if each.version else {}),
        "downloadLocation": each.origin or NONE,
        "filesAnalyzed": False,
        "primaryPackagePurpose": PURPOSES.get(each.kind, "LIBRARY"),
        "externalRefs": [_purl(each.purl)],
        "licenseConcluded": NONE,
        "licenseDeclared": _declared(each, names),
        "copyrightText": NONE,
    }
    if each.sha256:
        content["checksums"] = [{"algorithm": "SHA256", "checksumValue": each.sha256}]
    facts = dict(each.properties)
    if "source" in facts:
        content["sourceInfo"] = f"{BUILT_FROM}: {facts['source']} {facts['source-version']}"
    elif each.properties:
        content["sourceInfo"] = "; ".join(f"{name}: {value}" for name, value in each.properties)
    return content


def _purl(purl: str) -> dict[str, str]:
    return {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}


def _declared(each: ListedComponent, names: dict[str, str]) -> str:
    """Return what a package declares; ``names`` gets each name that is not an SPDX expression, for the document."""
    found: dict[str, None] = {}
    for name in each.licenses:
        expression = spdx_expression(name)
        if not expression:
            slug = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
            expression = f"LicenseRef-{slug}"
            if names.setdefault(expression, name) != name:
                expression += f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
                names[expression] = name
        else:
            # An expression of a package may contain names that only the package knows.
            names.update((word, word) for word in OWN_LICENSE.findall(expression))
        found[expression] = None
    return joined(list(found)) if found else NONE
