"""What is in an image, as advisories speak of it: read from package URLs, which every bill of materials has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packageurl import PackageURL

from trainworks.facts.rows import Database
from trainworks.vulnerabilities.advisory import normal_name


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A package in an image.

    Attributes:
        reference: How the bill of materials names it.
        kind: The type of its package URL: ``deb``, ``pypi``, ``generic``...
        name, version: Its own.
        ecosystem: How OSV calls whose it is; ``""`` where no database is about it.
        known_as, compared: Name and version that advisories name: those of the source package, of a distribution.
    """

    reference: str
    kind: str
    name: str
    version: str
    ecosystem: str = ""
    known_as: str = ""
    compared: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What advisories are looked up by."""
        return self.ecosystem, self.known_as


def read_purl(purl: str, reference: str, databases: Iterable[Database]) -> Installed:
    """Return what a package URL says; raises ``ValueError`` for one that is none.

    The release of a distribution comes from the qualifier ``distro`` (``debian-12``), the source package from
    ``upstream`` (``NAME@VERSION``; without it, the package is its own source).
    """
    read = PackageURL.from_string(purl)
    qualifiers = qualifiers_of(read)
    distribution, _, release = qualifiers.get("distro", "").partition("-")
    version = read.version or ""
    for row in databases:
        if row.packages != read.type or row.distribution not in ("", distribution):
            continue
        source, _, source_version = qualifiers.get("upstream", "").partition("@")
        # Other programs write a point release (12.5); Debian's advisories are about the release.
        release = release.partition(".")[0] if distribution == "debian" else release
        ecosystem = row.ecosystem.format(version=release)
        return Installed(
            reference=reference,
            kind=read.type,
            name=read.name,
            version=version,
            ecosystem=ecosystem,
            known_as=normal_name(ecosystem, source or read.name),
            compared=source_version or version,
        )
    return Installed(reference=reference, kind=read.type, name=read.name, version=version)


def qualifiers_of(purl: PackageURL) -> Mapping[str, str]:
    """Return the qualifiers of a package URL, by name."""
    # The library's type says that they may be a text too, which they are before they are read.
    return {str(name): str(value) for name, value in dict(purl.qualifiers or {}).items()}
