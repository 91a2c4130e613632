"""Advisories in the OSV format, as far as a match needs them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from packaging.utils import canonicalize_name

from trainworks.vulnerabilities.versions import EVENTS, Event

COMPARABLE = ("ECOSYSTEM", "SEMVER")
"""Types of ranges whose events are versions; those of ``GIT`` are commits."""

SUMMARY = 160
"""Characters of an advisory's text that stand for its summary, where it has none."""


class MalformedAdvisoryError(ValueError):
    """What should be an advisory is none."""


@dataclass(frozen=True, kw_only=True)
class Affected:
    """A package that an advisory is about.

    Attributes:
        ecosystem: Whose, as OSV names it: ``PyPI``, ``Debian:12``.
        name: The package; of a distribution, the source package.
        ranges: Events of each range.
        versions: Versions that are affected whatever the ranges say.
        scores: Kind and score of each severity that is this package's own.
        words: Words for its severity.
        named: Which of the advisory's vulnerabilities it has, with the scores of each; none where that is not said.
    """

    ecosystem: str
    name: str
    ranges: tuple[tuple[Event, ...], ...]
    versions: frozenset[str] = frozenset()
    scores: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ()
    named: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Advisory:
    """What somebody published about vulnerabilities.

    Attributes:
        identifier: Its own: ``GHSA-...``, ``PYSEC-...``, ``DSA-...``, ``CVE-...``.
        database: Where it was read.
        affected: Packages.
        aliases: Other identifiers of the very same vulnerability.
        upstream: Identifiers of the vulnerabilities that a distribution's advisory is about, where it names them.
        summary: One line.
        scores, words: Severity, as ``Affected`` has it.
        links: Addresses of more about it.
        published, modified: Times, as they are written (RFC 3339).
    """

    identifier: str
    database: str
    affected: tuple[Affected, ...]
    aliases: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    summary: str = ""
    scores: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    published: str = ""
    modified: str = ""


def normal_name(ecosystem: str, name: str) -> str:
    """Return a package's name as all spellings of it are compared."""
    return str(canonicalize_name(name)) if ecosystem == "PyPI" else name


def read_advisory(value: object, database: str, wanted: Collection[tuple[str, str]]) -> Advisory | None:
    """Read an advisory, as far as it is about these packages.

    Args:
        value: A file of the database, as JSON reads it.
        database: What to name as its source.
        wanted: Ecosystems and names of packages.

    Returns:
        Nothing where it was withdrawn, or is about none of the packages.

    Raises:
        MalformedAdvisoryError: It is no advisory; says what is wrong.
    """
    with _well_formed():
        return _read(value, database, wanted)


def ecosystems_of(value: object) -> set[str]:
    """Return whose packages an advisory is about; raises ``MalformedAdvisoryError``."""
    with _well_formed():
        affected: Any = value
        packages = [row.get("package") or {} for row in affected.get("affected") or ()]
        return {_text(each["ecosystem"]) for each in packages if each}


@contextmanager
def _well_formed() -> Iterator[None]:
    """Say of what another form than OSV's has that it is no advisory."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise MalformedAdvisoryError(f"not in the OSV format: {missing}") from None


def _read(value: Any, database: str, wanted: Collection[tuple[str, str]]) -> Advisory | None:
    identifier = _identifier(value["id"])
    if value.get("withdrawn"):
        return None
    affected = []
    for row in value.get("affected") or ():
        # Without a package it is about commits of a repository.
        package = row.get("package") or {}
        key = (str(package.get("ecosystem")), normal_name(str(package.get("ecosystem")), str(package.get("name"))))
        if key in wanted:
            affected.append(_affected(row, key))
    if not affected:
        return None
    references = value.get("references") or ()
    return Advisory(
        identifier=identifier,
        database=database,
        affected=tuple(affected),
        aliases=tuple(_identifier(each) for each in value.get("aliases") or ()),
        upstream=tuple(_identifier(each) for each in value.get("upstream") or ()),
        summary=_summary(value),
        scores=_scores(value),
        words=_words(value.get("database_specific")),
        links=tuple(_text(each["url"]) for each in references if str(each["url"]).startswith(("https://", "http://"))),
        published=_text(value.get("published") or ""),
        modified=_text(value.get("modified") or ""),
    )


def _affected(row: Mapping[str, Any], key: tuple[str, str]) -> Affected:
    ranges = tuple(
        tuple((kind, _text(event[kind])) for event in each["events"] for kind in EVENTS if kind in event)
        for each in row.get("ranges") or ()
        if each["type"] in COMPARABLE
    )
    return Affected(
        ecosystem=key[0],
        name=key[1],
        ranges=ranges,
        versions=frozenset(_text(each) for each in row.get("versions") or ()),
        scores=_scores(row),
        words=(*_words(row.get("ecosystem_specific")), *_words(row.get("database_specific"))),
        named=_named(row.get("database_specific")),
    )


def _named(specific: Any) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """Return what Ubuntu says of a package: its notices are about several releases, and not all have everything."""
    rows = ((specific or {}).get("cves_map") or {}).get("cves") or ()
    return tuple((_identifier(each["id"]), _scores(each)) for each in rows)


def _summary(value: Mapping[str, Any]) -> str:
    """Return the summary, or the start of the text; one line without control characters: it goes to a terminal."""
    text = _text(value.get("summary") or "") or _text(value.get("details") or "")
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= SUMMARY else line[: SUMMARY - 3].rstrip() + "..."


def _scores(value: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((_text(each["type"]), _text(each["score"])) for each in value.get("severity") or ())


def _words(specific: Any) -> tuple[str, ...]:
    """Return words for a severity: GitHub's and Ubuntu's key, and Debian's."""
    found = specific or {}
    return tuple(each for key in ("severity", "urgency") if isinstance(each := found.get(key), str))


def _identifier(value: object) -> str:
    if not re.fullmatch(r"[\w.:~+-]+", _text(value)):
        message = f"{value!r:.60} is no identifier"
        raise TypeError(message)
    return str(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        message = f"{value!r:.60} is no text"
        raise TypeError(message)
    return value
