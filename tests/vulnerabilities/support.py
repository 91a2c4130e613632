"""Advisories in the form in which OSV publishes them, and bills of materials to hold them against.

``REAL`` are published ones, as far as a match needs them, written down from memory: no database could be reached where
these tests were made. Every other one is the tests' own.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CVSS3_MEDIUM = "CVSS:3.1/AV:N/AC:H/PR:N/UI:R/S:C/C:H/I:N/A:N"
CVSS4_CRITICAL = "CVSS:4.0/AV:N/AC:L/AT:N/PR:N/UI:N/VC:H/VI:H/VA:H/SC:N/SI:N/SA:N"


def affected(ecosystem: str, name: str, *events: str, **more: object) -> dict[str, Any]:
    """Return a package of an advisory; an event is written ``fixed=1.0``."""
    pairs = (event.split("=", 1) for event in events)
    ranges = [{"type": "ECOSYSTEM", "events": [{kind: version} for kind, version in pairs]}] if events else []
    return {"package": {"ecosystem": ecosystem, "name": name}, "ranges": ranges, **more}


def advisory(identifier: str, *packages: Mapping[str, Any], **more: object) -> dict[str, Any]:
    """Return an advisory."""
    times = {"published": "2026-01-02T03:04:05Z", "modified": "2026-02-03T04:05:06Z"}
    return {"schema_version": "1.7.0", "id": identifier, **times, "affected": list(packages), **more}


REAL = (
    advisory(
        "GHSA-53q9-r3pm-6pq6",
        affected("PyPI", "torch", "introduced=0", "fixed=2.6.0"),
        aliases=["CVE-2025-32434"],
        summary="PyTorch: `torch.load` with `weights_only=True` leads to remote code execution",
        severity=[{"type": "CVSS_V4", "score": CVSS4_CRITICAL}],
        database_specific={"severity": "CRITICAL"},
    ),
    advisory(
        "GHSA-j8r2-6x86-q33q",
        affected("PyPI", "requests", "introduced=2.3.0", "fixed=2.31.0"),
        aliases=["CVE-2023-32681", "PYSEC-2023-74"],
        summary="Unintended leak of Proxy-Authorization header in requests",
        severity=[{"type": "CVSS_V3", "score": CVSS3_MEDIUM}],
        database_specific={"severity": "MODERATE"},
        references=[{"type": "WEB", "url": "https://github.com/psf/requests/releases/tag/v2.31.0"}],
    ),
    advisory(
        "PYSEC-2023-74",
        affected("PyPI", "requests", "introduced=2.3.0", "fixed=2.31.0", versions=["2.30.0"]),
        aliases=["CVE-2023-32681", "GHSA-j8r2-6x86-q33q"],
    ),
    advisory(
        "DSA-5532-1",
        affected("Debian:12", "openssl", "introduced=0", "fixed=3.0.11-1~deb12u2"),
        upstream=["CVE-2023-5363"],
        summary="openssl - security update",
    ),
)

PACKAGES = (
    "pkg:pypi/torch@2.5.1%2Bcpu",
    "pkg:pypi/requests@2.30.0",
    "pkg:deb/debian/libssl3@3.0.11-1~deb12u1?arch=amd64&distro=debian-12&upstream=openssl%403.0.11-1~deb12u1",
    "pkg:deb/debian/openssl@3.0.11-1~deb12u1?arch=amd64&distro=debian-12",
    "pkg:generic/open-mpi@4.1.7",
)
"""An image that all of ``REAL`` are about."""


def bill(purls: Iterable[str], **more: object) -> dict[str, Any]:
    """Return a bill of materials in CycloneDX's form."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "serialNumber": "urn:uuid:3e671687-395b-41f5-a30f-a58921a69b79",
        "metadata": {"component": {"type": "container", "bom-ref": "image", "name": "an/image", "version": "1"}},
        "components": [{"type": "library", "bom-ref": purl, "purl": purl} for purl in purls],
        **more,
    }


def zipped(advisories: Iterable[Mapping[str, Any]]) -> bytes:
    """Return a zip with a file for each advisory, as OSV publishes them."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for each in advisories:
            archive.writestr(f"{each['id']}.json", json.dumps(each))
    return content.getvalue()


def written(path: Path, value: object) -> Path:
    """Write a value as JSON; return the file."""
    path.write_text(json.dumps(value), encoding="utf-8")
    return path
