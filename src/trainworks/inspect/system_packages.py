"""Reads the Debian packages of an image, or of a bill of materials, and where the image gets newer ones from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packageurl import PackageURL
from packaging.utils import canonicalize_name

from trainworks.engine import choose, image_in
from trainworks.errors import ImageTestError, OutputError, UnknownNameError
from trainworks.facts.rows import Facts
from trainworks.host.apt import AptSource, parse_deb822, parse_one_line
from trainworks.imagetest.questions import list_packages
from trainworks.inspect.targets import find_image
from trainworks.terminal.output import say
from trainworks.terminal.progress import DISPLAY

SOURCES_OF_IMAGE = (
    "cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null; echo; echo '#:'; "
    'for file in /etc/apt/sources.list.d/*.sources; do cat "$file" 2>/dev/null; echo; done'
)
"""Prints an image's archives: those of one line each, a mark, those of the newer form."""

ALL = "all"
"""The architecture of packages that fit every machine."""


@dataclass(frozen=True, kw_only=True)
class DebianPackage:
    """An installed Debian package.

    Attributes:
        name: Its name.
        version: Its version, with the epoch.
        source_version: The version of the source package that it was built from.
        architecture: As dpkg names it; ``""`` where a bill of materials does not say.
    """

    name: str
    version: str
    source_version: str
    architecture: str


@dataclass(frozen=True, kw_only=True)
class SystemPackages:
    """The Debian packages of one image.

    Attributes:
        name: The image, or the file of the bill of materials.
        identity: The image's identifier, or the serial number of the bill of materials.
        distribution: ``ID`` of the image's ``os-release``, such as ``debian``.
        release: Its ``VERSION_ID``, such as ``12``.
        packages: What is installed; never empty.
        sources: The image's own package archives; empty for a bill of materials.
        target: The target that the image was built for, as its label says; ``""`` for others and a bill of materials.
        created: When it was built (ISO 8601); ``""`` for a bill of materials.
        python: Version of each Python distribution, by its normalised name; empty for a bill of materials.
    """

    name: str
    identity: str
    distribution: str
    release: str
    packages: tuple[DebianPackage, ...]
    sources: tuple[AptSource, ...] = ()
    target: str = ""
    created: str = ""
    python: Mapping[str, str] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The architecture of most packages; ``amd64`` where none says it."""
        counts = Counter(each.architecture for each in self.packages if each.architecture not in ("", ALL))
        return next((each for each, _ in counts.most_common(1)), "amd64")


def read_system_packages(name: str, engine_name: str | None, facts: Facts) -> SystemPackages:
    """Return the Debian packages of an image or of a bill of materials.

    Args:
        name: A target, an image of the engine, or a CycloneDX file.
        engine_name: Which engine has the image; ``None``: the first that answers.

    Raises:
        UnknownNameError: The engine does not have the image, or it has no Debian packages.
        ImageTestError: The image cannot list its packages.
        OutputError: The file cannot be read, or lists no Debian packages of one release.
    """
    if Path(name).is_file():
        return read_bill_of_materials(Path(name))
    if name.endswith(".json"):
        raise OutputError(f"{name}: no such file", hint="`build.py prove TARGET --output DIR` writes sbom.cdx.json")
    engine = choose(engine_name, report=say)
    reference = find_image(name, engine, facts)
    image = image_in(engine, reference)
    say(f"reading the packages of {reference}")
    with DISPLAY.task("reading", log=False), engine.container(image.reference) as container:
        found = list_packages(container)
        archives = container.run(("/bin/sh", "-c", SOURCES_OF_IMAGE)).output
    if found["error"] or not found["system"]:
        raise ImageTestError(f"{reference}: cannot list its packages: {found['error'] or 'the list is empty'}")
    if found["kind"] != "deb":
        raise UnknownNameError(
            f"{reference} has no Debian packages but {found['kind']} packages of {found['distribution']}",
            hint="only archives of Debian and Ubuntu can be asked; scan its bill of materials instead (docs/ship.md)",
        )
    one_line, _, newer = archives.partition("#:\n")
    return SystemPackages(
        name=reference,
        identity=image.identifier,
        distribution=found["distribution"],
        release=found["version"],
        packages=tuple(
            DebianPackage(
                name=row["name"],
                version=row["version"],
                source_version=row["source_version"],
                architecture=row["architecture"],
            )
            for row in found["system"]
        ),
        sources=(*parse_one_line(one_line), *parse_deb822(newer)),
        target=image.labels.get("org.opencontainers.image.title", ""),
        created=image.created,
        python={canonicalize_name(row["name"]): row["version"] for row in found["python"] if not row["inside"]},
    )


def read_bill_of_materials(path: Path) -> SystemPackages:
    """Return the Debian packages that a CycloneDX file lists by package URL: one of ours, of syft or of trivy.

    Raises:
        OutputError: The file cannot be read, is not CycloneDX, lists no Debian packages, or lists some without their
            release (the qualifier ``distro``) or of several releases.
    """
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        if document["bomFormat"] != "CycloneDX":
            raise OutputError(f"{path}: not a CycloneDX document but {document['bomFormat']!r:.60}")
        image = (document.get("metadata") or {}).get("component") or {}
        name = ":".join(str(image[key]) for key in ("name", "version") if image.get(key)) or path.name
        identity = str(document.get("serialNumber") or path.name)
        purls = [
            PackageURL.from_string(str(each["purl"]))
            for each in _nested(document.get("components") or ())
            if str(each.get("purl") or "").startswith("pkg:deb/")
        ]
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise OutputError(
            f"{path}: not a bill of materials in CycloneDX JSON: {reason}",
            hint="`build.py prove TARGET --output DIR` writes one, sbom.cdx.json",
        ) from None
    if not purls:
        raise OutputError(f"{path}: lists no Debian packages (package URLs that begin with pkg:deb/)")
    releases = Counter(_release(each) for each in purls)
    unknown = releases.pop(("", ""), 0)
    if unknown or len(releases) != 1:
        said = ", ".join(f"{one} {two}" for one, two in sorted(releases)) or "none"
        raise OutputError(
            f"{path}: {unknown} of {len(purls)} Debian packages do not name their release; named: {said}",
            hint="each package URL needs the qualifier distro, such as distro=debian-12, and all the same one",
        )
    ((distribution, release),) = releases
    return SystemPackages(
        name=name,
        identity=identity,
        distribution=distribution,
        release=release,
        packages=tuple(_package(each) for each in purls),
    )


def _nested(components: Iterable[Any]) -> Iterator[Any]:
    """Yield components, and those that are parts of others."""
    for each in components:
        yield each
        yield from _nested(each.get("components") or ())


def _release(purl: PackageURL) -> tuple[str, str]:
    """Return distribution and release of a package URL; trivy writes a point release of Debian (``debian-12.5``)."""
    distribution, _, release = _qualifiers(purl).get("distro", "").partition("-")
    if not distribution or not release:
        return "", ""
    return distribution, release.partition(".")[0] if distribution == "debian" else release


def _package(purl: PackageURL) -> DebianPackage:
    qualifiers = _qualifiers(purl)
    version = purl.version or ""
    # trivy writes the epoch as a qualifier, syft and we as a part of the version.
    if qualifiers.get("epoch") and ":" not in version:
        version = f"{qualifiers['epoch']}:{version}"
    return DebianPackage(
        name=purl.name,
        version=version,
        source_version=qualifiers.get("upstream", "").partition("@")[2] or version,
        architecture=qualifiers.get("arch", ""),
    )


def _qualifiers(purl: PackageURL) -> Mapping[str, str]:
    # The library's type says that they may be a text too, which they are only before they are read.
    return {str(name): str(value) for name, value in dict(purl.qualifiers or {}).items()}
