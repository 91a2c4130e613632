"""Holds advisories against packages: each vulnerability of each package once, whatever it is called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainworks.vulnerabilities.advisory import Advisory, Affected
from trainworks.vulnerabilities.installed import Installed
from trainworks.vulnerabilities.severity import Rating, rate, worst
from trainworks.vulnerabilities.versions import (
    SCHEMES,
    Compare,
    UnreadableVersionError,
    in_range,
    newest,
    next_fix,
)

CVE = "CVE-"
"""How the names begin of which each vulnerability has one."""

PREFERRED = (CVE, "GHSA-", "PYSEC-", "DSA-", "USN-")
"""Whose identifier a vulnerability is called by, where it has several: the one that most people know."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One vulnerability of one package.

    Attributes:
        identifier: What it is called.
        aliases: Its other identifiers, and those of advisories about it.
        name, version: The package as advisories name it: the source package, of a distribution.
        packages: What is installed of it.
        fixed: The version that has no more of it; ``""`` where there is none yet.
        rating: How bad it is.
        summary: One line.
        links: Addresses of more about it.
        databases: Which say so.
        published, modified: When it was first written about, and last; ``""`` where nobody says it.
    """

    identifier: str
    aliases: tuple[str, ...]
    name: str
    version: str
    packages: tuple[Installed, ...]
    fixed: str
    rating: Rating
    summary: str
    links: tuple[str, ...]
    databases: tuple[str, ...]
    published: str = ""
    modified: str = ""

    @property
    def ecosystem(self) -> str:
        """Whose package it is."""
        return self.packages[0].ecosystem

    @property
    def identifiers(self) -> frozenset[str]:
        """Everything that it is called."""
        return frozenset((self.identifier, *self.aliases))


@dataclass(frozen=True, kw_only=True)
class Matches:
    """What was found; ``unreadable`` names the advisories that a version could not be held against, and why."""

    findings: tuple[Finding, ...]
    unreadable: tuple[str, ...]


@dataclass
class _Hit:
    """An advisory that is true of a package: ``names`` of the one vulnerability that it is taken for."""

    names: set[str]
    advisory: Advisory
    fixed: str
    rating: Rating
    also: set[str] = field(default_factory=set)


def match(installed: Iterable[Installed], advisories: Iterable[Advisory]) -> Matches:
    """Return the vulnerabilities of some packages, worst first, each once for a package in one version.

    What cannot be compared is never taken for harmless in silence: it is named in ``unreadable``.
    """
    groups: dict[tuple[str, str], dict[str, list[Installed]]] = {}
    for package in installed:
        if package.ecosystem:
            groups.setdefault(package.key, {}).setdefault(package.compared, []).append(package)
    hits: dict[tuple[str, str, str], list[_Hit]] = {}
    unreadable: dict[str, None] = {}
    for advisory in advisories:
        for affected in advisory.affected:
            for version, packages in groups.get((affected.ecosystem, affected.name), {}).items():
                try:
                    fixed = _fix_of(affected, version, SCHEMES[packages[0].kind])
                except UnreadableVersionError as error:
                    unreadable[f"{advisory.identifier}: {affected.name} {version}: {error}"] = None
                    continue
                if fixed is not None:
                    key = affected.ecosystem, affected.name, version
                    hits.setdefault(key, []).extend(_hits(advisory, affected, fixed))
    found = [
        finding
        for (ecosystem, name, version), of_package in hits.items()
        for finding in _findings(of_package, groups[ecosystem, name][version])
    ]
    found.sort(key=lambda each: (each.rating.key, each.name, each.version, each.identifier))
    return Matches(findings=tuple(found), unreadable=tuple(unreadable))


def _fix_of(affected: Affected, version: str, compare: Compare) -> str | None:
    """Return the version with the fix, ``""`` where there is none; nothing where a version is not affected."""
    listed = any(_same(version, named, compare) for named in affected.versions)
    try:
        inside = [events for events in affected.ranges if in_range(version, events, compare)]
        fixes = [next_fix(version, events, compare) for events in inside or affected.ranges]
    except UnreadableVersionError:
        if not listed:
            raise
        inside, fixes = [], []
    if not inside and not listed:
        return None
    return newest([fix for fix in fixes if fix], compare)


def _same(version: str, named: str, compare: Compare) -> bool:
    """Say whether an enumerated version is this one; lists have versions of old that no scheme can read."""
    try:
        return compare(version, named) == 0
    except UnreadableVersionError:
        return version == named


def _hits(advisory: Advisory, affected: Affected, fixed: str) -> Iterator[_Hit]:
    """Yield what an advisory says: of one vulnerability under all its names, or of several that it is about.

    A distribution's advisory names what it fixes in ``upstream``, older ones among their aliases: each CVE there is a
    vulnerability. One alone is another name of the same.
    """
    also = {advisory.identifier}
    for name, scores in affected.named:
        yield _Hit({name}, advisory, fixed, rate(name, scores, ()), also)
    if affected.named:
        return
    scores = affected.scores or advisory.scores
    rating = rate(advisory.identifier, scores, (*affected.words, *advisory.words))
    names = dict.fromkeys((advisory.identifier, *advisory.upstream, *advisory.aliases))
    several = [name for name in names if name.startswith(CVE)] or list(advisory.upstream)
    if len(several) > 1 and not advisory.identifier.startswith(CVE):
        for name in several:
            yield _Hit({name}, advisory, fixed, rating, also)
    else:
        yield _Hit(set(names), advisory, fixed, rating)


def _findings(hits: Sequence[_Hit], packages: Sequence[Installed]) -> Iterator[Finding]:
    for group in _joined(hits):
        names = set().union(*(hit.names for hit in group))
        identifier = min(names, key=_preference)
        also = set().union(*(hit.also for hit in group))
        advisories = [hit.advisory for hit in group]
        compare = SCHEMES[packages[0].kind]
        yield Finding(
            identifier=identifier,
            aliases=tuple(sorted((names | also) - {identifier}, key=_preference)),
            name=packages[0].known_as,
            version=packages[0].compared,
            packages=tuple(sorted(packages, key=lambda each: (each.name, each.reference))),
            fixed=newest([hit.fixed for hit in group if hit.fixed], compare),
            rating=worst(hit.rating for hit in group),
            summary=next((each.summary for each in advisories if each.summary), ""),
            links=tuple(dict.fromkeys(link for each in advisories for link in each.links)),
            databases=tuple(sorted({each.database for each in advisories})),
            published=min((each.published for each in advisories if each.published), default=""),
            modified=max(each.modified for each in advisories),
        )


def _joined(hits: Sequence[_Hit]) -> list[list[_Hit]]:
    """Return groups of hits that share a name, also by way of others."""
    owner: dict[str, list[_Hit]] = {}
    groups: list[list[_Hit]] = []
    for hit in hits:
        group = [hit]
        for other in {id(owner[name]): owner[name] for name in hit.names if name in owner}.values():
            group += other
            groups = [each for each in groups if each is not other]
        groups.append(group)
        owner.update((name, group) for each in group for name in each.names)
    return groups


def _preference(name: str) -> tuple[int, str]:
    rank = next((number for number, start in enumerate(PREFERRED) if name.startswith(start)), len(PREFERRED))
    return rank, name


def counted(findings: Iterable[Finding], levels: Sequence[str]) -> Mapping[str, int]:
    """Return how many findings there are of each level that has any."""
    all_levels = [finding.rating.level for finding in findings]
    return {level: all_levels.count(level) for level in levels if level in all_levels}
