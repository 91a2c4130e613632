"""Writes what was found as CycloneDX 1.6: vulnerabilities, and what is known of each (VEX)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from trainworks.proof.cyclonedx import SCHEMA, content_uuid, utc
from trainworks.vulnerabilities.ignore import Row, Sorted
from trainworks.vulnerabilities.installed import Installed
from trainworks.vulnerabilities.match import Finding
from trainworks.vulnerabilities.severity import Rating

SEVERITIES: Mapping[str, str] = {"negligible": "info"}
"""The format's words where they are others than ours."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What was looked at.

    Attributes:
        name, version: Of the image.
        reference: How a bill of materials names the image itself; ``""`` where it does not.
        bill: Serial number and version of the bill of materials that was read; without one the document lists the
            packages that it speaks of, under the names that ``build.py prove`` gives them.
        purls: Package URLs by their names in the bill of materials.
    """

    name: str
    version: str
    reference: str
    bill: tuple[str, int] | None
    purls: Mapping[str, str]


def vex(
    subject: Subject, found: Sorted, pages: Mapping[str, str], *, builder_version: str, time: int
) -> dict[str, object]:
    """Return the document.

    Args:
        subject: What was looked at.
        found: Open and ignored findings.
        pages: Address about a vulnerability, ``{id}`` standing for it, by ecosystem.
        builder_version: Of this program.
        time: Of the report, in seconds since 1970.
    """
    rows: list[tuple[Finding, Row | None]] = [*((each, None) for each in found.open), *found.ignored]
    component = {"type": "container", "name": subject.name}
    component |= {key: value for key, value in (("version", subject.version), ("bom-ref", subject.reference)) if value}
    document: dict[str, object] = {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": utc(time),
            "tools": {"components": [{"type": "application", "name": "trainworks", "version": builder_version}]},
            "component": component,
        },
    }
    if subject.bill is None:
        document["components"] = _components([finding for finding, _ in rows], subject.purls)
    document["vulnerabilities"] = [
        _vulnerability(finding, row, subject, pages.get(finding.ecosystem, "")) for finding, row in rows
    ]
    return {**document, "serialNumber": f"urn:uuid:{content_uuid(document)}"}


def _components(findings: Iterable[Finding], purls: Mapping[str, str]) -> list[object]:
    packages = {each.reference: each for finding in findings for each in finding.packages}
    return [
        {
            "type": "library",
            "bom-ref": each.reference,
            "name": each.name,
            "version": each.version,
            "purl": purls[each.reference],
        }
        for each in sorted(packages.values(), key=lambda each: each.reference)
    ]


def _vulnerability(finding: Finding, row: Row | None, subject: Subject, page: str) -> dict[str, object]:
    name = ", ".join(finding.databases)
    source = {"name": name, **({"url": page.format(id=finding.identifier)} if page else {})}
    content: dict[str, object] = {
        "bom-ref": f"{finding.identifier}/{finding.ecosystem}/{finding.name}/{finding.version}",
        "id": finding.identifier,
        "source": source,
        "references": [{"id": each, "source": {"name": name}} for each in finding.aliases],
        "ratings": [_rating(finding.rating, name)],
    }
    if finding.summary:
        content["description"] = finding.summary
    content["recommendation"] = recommendation(finding)
    content["advisories"] = [{"url": link} for link in finding.links]
    content |= {key: value for key, value in (("published", finding.published), ("updated", finding.modified)) if value}
    content["analysis"] = _analysis(row)
    content["affects"] = [
        {"ref": _reference(each, subject), "versions": [{"version": each.version, "status": "affected"}]}
        for each in finding.packages
    ]
    return content


def recommendation(finding: Finding) -> str:
    """Return what to do about a finding, in a word."""
    if finding.fixed:
        return f"{finding.name} {finding.fixed} or newer"
    return f"no version of {finding.name} without it is known"


def _rating(rating: Rating, name: str) -> dict[str, object]:
    content: dict[str, object] = {"source": {"name": name}}
    if rating.score is not None:
        content["score"] = rating.score
    content["severity"] = SEVERITIES.get(rating.level, rating.level)
    if rating.vector:
        content |= {"method": rating.method, "vector": rating.vector}
    return content


def _analysis(row: Row | None) -> dict[str, object]:
    """Return what is known of a finding: that a version matches says nothing of whether the code is ever reached."""
    if row is None:
        return {"state": "in_triage"}
    justification = {"justification": row.justification} if row.justification else {}
    return {"state": row.state, **justification, "detail": f"{row.reason} (until {row.until.isoformat()})"}


def _reference(package: Installed, subject: Subject) -> str:
    """Return the package's name in this document, or its BOM-Link into the bill of materials that was read."""
    if subject.bill is None:
        return package.reference
    serial, version = subject.bill
    return f"urn:cdx:{serial.removeprefix('urn:uuid:')}/{version}#{quote(package.reference, safe='')}"
