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
"""What OSV calls the index of Python packages."""

AT_ONCE = 500
"""Distributions in one request; the service takes a thousand."""


@dataclass(frozen=True, kw_only=True)
class Advisory:
    """A published advisory about a distribution in the version that is installed.

    Attributes:
        name: The distribution.
        installed: Its version.
        identifier: The CVE's number where there is one, else the advisory's own.
        fixed: The next version without it; ``""`` where there is none.
        summary: What it is about, in the publisher's words; ``""`` where they say nothing.
    """

    name: str
    installed: str
    identifier: str
    fixed: str = ""
    summary: str = ""


def advisories_of(
    installed: Mapping[str, str], address: str, client: Client
) -> tuple[Advisory, ...]:
    """Return the advisories about distributions, by name and identifier.

    One that was withdrawn is left out.

    Args:
        installed: Normalised name to version.
        address: The service.
        client: Asks it.

    Raises:
        UnreachableError: The service does not answer, or not as OSV does.
    """
    found: dict[tuple[str, str], Advisory] = {}
    details: dict[str, Any] = {}
    try:
        for name, number in _published(installed, address, client):
            if number not in details:
                details[number] = _answer(client.get(f"{address}/v1/vulns/{number}"), address)
            if not details[number].get("withdrawn"):
                advisory = _advisory(name, installed[name], details[number])
                found[advisory.name, advisory.identifier] = advisory
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreachableError(f"{address} does not answer as OSV does: {error!r}") from error
    return tuple(each for _, each in sorted(found.items()))


def _published(
    installed: Mapping[str, str], address: str, client: Client
) -> Iterator[tuple[str, str]]:
    """Yield each distribution with the number of each advisory about its version."""
    # The local part of a version, as in 2.4.1+cu121, is the builder's and is in no advisory.
    left = [(name, version.partition("+")[0], "") for name, version in sorted(installed.items())]
    while left:
        asked, left = left[:AT_ONCE], left[AT_ONCE:]
        queries = []
        for name, version, page in asked:
            query: dict[str, object] = {
                "package": {"name": name, "ecosystem": ECOSYSTEM},
                "version": version,
            }
            if page:
                query["page_token"] = page
            queries.append(query)
        answer = _answer(client.post(f"{address}/v1/querybatch", {"queries": queries}), address)
        for (name, version, _), result in zip(asked, answer["results"], strict=True):
            yield from ((name, str(each["id"])) for each in result.get("vulns") or ())
            if more := result.get("next_page_token"):
                left.append((name, version, more))


def _answer(response: Any, address: str) -> Any:
    if response.status_code != 200:
        raise UnreachableError(f"{address} answers HTTP {response.status_code}")
    return response.json()


def _advisory(name: str, version: str, detail: Mapping[str, Any]) -> Advisory:
    number = str(detail["id"])
    known = sorted(
        str(each)
        for each in (number, *(detail.get("aliases") or ()))
        if str(each).startswith("CVE-")
    )
    fixes = [
        event["fixed"]
        for affected in detail.get("affected") or ()
        if canonicalize_name(str((affected.get("package") or {}).get("name", ""))) == name
        for ranges in affected.get("ranges") or ()
        if ranges.get("type") == "ECOSYSTEM"
        for event in ranges.get("events") or ()
        if "fixed" in event
    ]
    return Advisory(
        name=name,
        installed=version,
        identifier=known[0] if known else number,
        fixed=_next(version, fixes),
        summary=" ".join(str(detail.get("summary") or "").split()),
    )


def _next(version: str, fixes: list[str]) -> str:
    """Return the smallest of several versions that is newer than one."""
    newer = []
    for each in fixes:
        try:
            if Version(each) > Version(version):
                newer.append(Version(each))
        except InvalidVersion:
            continue
    return str(min(newer)) if newer else ""
