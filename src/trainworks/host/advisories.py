"""Published advisories about Python distributions, from a service that speaks OSV's interface.

Format and requests: the OSV schema, and "POST /v1/querybatch" and "GET
/v1/vulns/{id}" of OSV's documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainworks.host.downloads import Client, UnreachableError

ECOSYSTEM = "PyPI"
"""OSV's name of the index of Python packages."""

AT_ONCE = 500
"""Distributions in one request; the service takes a thousand."""


@dataclass(frozen=True, kw_only=True)
class Advisory:
    """A published advisory about a distribution in the version that is installed.

    Attributes:
        name: The distribution.
        installed: The distribution's version.
        identifier: The number of the CVE, else the advisory's own.
        fixed: The next version without the fault, or ``""``.
        summary: The fault in the publisher's words, or ``""``.
    """

    name: str
    installed: str
    identifier: str
    fixed: str = ""
    summary: str = ""


def find_advisories(
    installed: Mapping[str, str], address: str, client: Client
) -> tuple[Advisory, ...]:
    """Ask a service for the advisories about distributions; sorted by name and identifier.

    Withdrawn advisories are left out.

    Args:
        installed: Normalised name to version.
        address: The service.
        client: The client for the service.

    Raises:
        UnreachableError: The service does not answer, or not as OSV does.
    """
    advisories: dict[tuple[str, str], Advisory] = {}
    details: dict[str, Any] = {}
    try:
        for name, number in _find_published(installed, address, client):
            if number not in details:
                details[number] = _parse_response(
                    client.get(f"{address}/v1/vulns/{number}"), address
                )
            if not details[number].get("withdrawn"):
                advisory = _make_advisory(name, installed[name], details[number])
                advisories[advisory.name, advisory.identifier] = advisory
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreachableError(f"{address} does not answer as OSV does: {error!r}") from error
    return tuple(advisory for _, advisory in sorted(advisories.items()))


def _find_published(
    installed: Mapping[str, str], address: str, client: Client
) -> Iterator[tuple[str, str]]:
    """Yield the name of a distribution and the number of an advisory about its version.

    A distribution with several advisories comes several times.

    Args:
        installed: Normalised name to version.
        address: The service.
        client: The client for the service.
    """
    # The local part of a version, as in 2.4.1+cu121, is the builder's and is in no advisory.
    # Name, version, and the page of the answer that is asked for; ``""``: the first one.
    pending = [(name, version.partition("+")[0], "") for name, version in sorted(installed.items())]
    while pending:
        batch, pending = pending[:AT_ONCE], pending[AT_ONCE:]
        queries = []
        for name, version, page in batch:
            query: dict[str, object] = {
                "package": {"name": name, "ecosystem": ECOSYSTEM},
                "version": version,
            }
            if page:
                query["page_token"] = page
            queries.append(query)
        response = client.post(f"{address}/v1/querybatch", {"queries": queries})
        results = _parse_response(response, address)["results"]
        for (name, version, _), result in zip(batch, results, strict=True):
            for vulnerability in result.get("vulns") or ():
                yield name, str(vulnerability["id"])
            next_page = result.get("next_page_token")
            if next_page:
                pending.append((name, version, next_page))


def _parse_response(response: Any, address: str) -> Any:
    """Return the JSON of a response; raises ``UnreachableError`` for another status than 200."""
    if response.status_code != 200:
        raise UnreachableError(f"{address} answers HTTP {response.status_code}")
    return response.json()


def _make_advisory(name: str, version: str, detail: Mapping[str, Any]) -> Advisory:
    """Return the advisory about a distribution in a version, from OSV's own object."""
    number = str(detail["id"])
    aliases = [str(alias) for alias in detail.get("aliases") or ()]
    cves = sorted(name for name in (number, *aliases) if name.startswith("CVE-"))
    return Advisory(
        name=name,
        installed=version,
        identifier=cves[0] if cves else number,
        fixed=_find_next_version(version, list(_find_fixes(name, detail))),
        summary=" ".join(str(detail.get("summary") or "").split()),
    )


def _find_fixes(name: str, detail: Mapping[str, Any]) -> Iterator[str]:
    """Yield the versions of a distribution that have the fix of an advisory."""
    for affected in detail.get("affected") or ():
        package = affected.get("package") or {}
        if canonicalize_name(str(package.get("name", ""))) != name:
            continue
        for ranges in affected.get("ranges") or ():
            if ranges.get("type") != "ECOSYSTEM":
                continue
            for event in ranges.get("events") or ():
                if "fixed" in event:
                    yield event["fixed"]


def _find_next_version(version: str, fixes: list[str]) -> str:
    """Return the smallest of several versions that is newer than one; ``""`` without any.

    Malformed versions are left out.
    """
    newer = []
    for fix in fixes:
        try:
            if Version(fix) > Version(version):
                newer.append(Version(fix))
        except InvalidVersion:
            continue
    return str(min(newer)) if newer else ""
