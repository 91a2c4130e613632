"""Makes the list of everything in an image: its packages, with facts of the plan and the lock.

Besides a package URL, scanners read facts of their own from a bill of materials:

- grype and syft: the qualifiers ``distro`` and ``upstream`` of package URLs
  (github.com/anchore/grype, ``grype/pkg/purl_provider.go`` and ``package.go``), and the component
  of the type ``operating-system`` with the properties ``syft:distro:*`` (github.com/anchore/syft,
  ``syft/format/internal/cyclonedxutil/helpers/decoder.go``).
- trivy: that component's name and version, and the properties ``aquasecurity:trivy:*`` of each
  package (github.com/aquasecurity/trivy, ``pkg/sbom/io/decode.go`` and ``pkg/sbom/core/bom.go``).
- osv-scanner: type, namespace and ``distro`` of package URLs (github.com/google/osv-scalibr,
  ``purl/ecosystem/ecosystem.go``).

All of these were read in August 2026.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from packageurl import PackageURL
from packaging.utils import canonicalize_name

from trainworks.attestation.licenses import python_licenses
from trainworks.engine.protocol import BuiltImage
from trainworks.errors import ProofError
from trainworks.extend.plan import CODE_FOLDER, ExtensionPlan
from trainworks.extend.requirements import ExtendedBase
from trainworks.facts.rows import Artifact, LockedPackage, SourceFile
from trainworks.imagetest.probe.packages import PackagesAnswer, PythonDistribution, SystemPackage
from trainworks.plan.model import ImagePlan, Request
from trainworks.render.dockerfile import Rendering

LAUNCHER = "launcher/"
"""The launcher's folder in a build context."""

DISTRIBUTION = "distribution"
"""The kind of the component that names the image's operating system."""

FAMILIES = {"amzn": "amazon"}
"""trivy's name of a distribution, if that is not its ``ID`` in ``os-release``."""

TRIVY = "aquasecurity:trivy:"
SYFT = "syft:"
"""Beginnings of the names of the scanners' own properties."""


@dataclass(frozen=True, kw_only=True)
class ListedComponent:
    """One thing in an image.

    Attributes:
        kind: ``deb``, ``rpm``, ``python``, ``artifact``, ``base``, ``distribution`` (the operating
            system), ``launcher``; in an extended image also ``image``, the one that was extended,
            and ``file``, a file of the code.
        name: The component's name.
        version: The component's version, or ``""``.
        purl: The package URL, by which both formats and every scanner know the component.
        sha256: The hash of the file that was installed, if a file was pinned.
        licenses: Names of the licences, as the package itself gives them.
        supplier: The maker, as the package itself names one, or ``""``.
        origin: The source of the download: a URL, or ``git+URL@COMMIT``; ``""`` if this machine's
            index decides.
        requires: Package URLs of the dependencies, as the lock gives them.
        properties: Further facts, by name.
        scanner_properties: Facts by the names that scanners read.
        inherited: Whether the component came with the image that was extended.
    """

    kind: str
    name: str
    version: str
    purl: str
    sha256: str = ""
    licenses: tuple[str, ...] = ()
    supplier: str = ""
    origin: str = ""
    requires: tuple[str, ...] = ()
    properties: tuple[tuple[str, str], ...] = ()
    scanner_properties: tuple[tuple[str, str], ...] = ()
    inherited: bool = False


@dataclass(frozen=True, kw_only=True)
class BillOfMaterials:
    """An image and everything in it.

    Attributes:
        reference: The image's name, with its tag.
        sha256: The hash of the image's configuration, which contains those of all layers (``Id`` of
            ``docker inspect``).
        components: The base image, or the image that was extended, first; then
            by kind, name and version.
        address: The image in a registry, by the hash of its manifest: ``HOST/NAME@sha256:...``;
            ``""`` if it is in none.
    """

    reference: str
    sha256: str
    components: tuple[ListedComponent, ...]
    address: str = ""

    @property
    def extended(self) -> ListedComponent | None:
        """The image that ``extend`` made this one from; ``None`` for a target's image."""
        base = self.components[0]
        if base.kind != "image":
            return None
        return base

    @property
    def purl(self) -> str:
        """The package URL of the image: ``pkg:oci/NAME@sha256:...?repository_url=HOST/NAME``.

        The version is the hash of the manifest, which only a registry knows; an image that is in
        none has its tag instead: ``pkg:oci/NAME?tag=TAG``.
        """
        name, tag = self.reference.rpartition("/")[2].rsplit(":", 1)
        if not self.address:
            return str(PackageURL("oci", None, name, None, {"tag": tag}))
        repository, _, digest = self.address.partition("@")
        last_part = repository.rpartition("/")[2]
        return str(PackageURL("oci", None, last_part, digest, {"repository_url": repository}))


@dataclass(frozen=True, kw_only=True)
class TargetBuild:
    """The build of a target's image.

    Attributes:
        request: The target and the choices that the plan was made for.
        plan: The plan that the image was built from.
        rendering: The context that the image was built from.
    """

    request: Request
    plan: ImagePlan
    rendering: Rendering


@dataclass(frozen=True, kw_only=True)
class LauncherRelease:
    """The version of the launcher in a build context, and the name of its licence."""

    version: str
    license: str


def make_target_bill(
    build: TargetBuild,
    image: BuiltImage,
    packages: PackagesAnswer,
    *,
    base_identifier: str,
    launcher: LauncherRelease,
) -> BillOfMaterials:
    """Return the bill of materials of a target's image.

    Args:
        build: The build of the image.
        image: The image.
        packages: The packages in the image.
        base_identifier: ``sha256:...`` of the base image's configuration;
            ``""`` if the engine does not have the base image.
        launcher: The launcher in the build's context.

    Raises:
        ProofError: The image cannot list its packages.
    """
    plan = build.plan
    locked = {}
    for step in plan.steps:
        # Files of the other steps are needed for the build alone.
        if step.in_image:
            for file in step.python:
                locked[str(canonicalize_name(file.name)), file.version] = file
    components = list(list_package_components(image.reference, packages, locked))
    components += map(make_artifact_component, list_artifacts(plan, installed=True))
    components.append(_make_launcher_component(build.rendering, launcher))
    return BillOfMaterials(
        reference=plan.tags[0],
        sha256=image.identifier.removeprefix("sha256:"),
        components=(make_base_component(plan, base_identifier), *sort_components(components)),
    )


def list_package_components(
    reference: str, packages: PackagesAnswer, locked: Mapping[tuple[str, str], LockedPackage]
) -> tuple[ListedComponent, ...]:
    """Return the operating system of an image, its system packages and its Python distributions.

    Args:
        reference: The image, for a message.
        packages: The packages in the image.
        locked: Files of the lock, by normalised name and version.

    Raises:
        ProofError: The image cannot list its packages.
    """
    if packages["error"] or not packages["system"]:
        reason = packages["error"] or "the list is empty"
        raise ProofError([f"{reference}: cannot list its packages: {reason}"])
    # The versions that requirements mean: not those of copies inside other distributions.
    versions = {}
    for row in packages["python"]:
        if not row["inside"]:
            versions[str(canonicalize_name(row["name"]))] = row["version"]
    components = [_make_distribution_component(packages)]
    components += [_make_system_component(row, packages) for row in packages["system"]]
    for row in packages["python"]:
        # The lock pinned the file of a distribution, and no copy inside another distribution.
        file = None
        if not row["inside"]:
            file = locked.get((str(canonicalize_name(row["name"])), row["version"]))
        components.append(_make_python_component(row, file, versions))
    return tuple(components)


def sort_components(components: Iterable[ListedComponent]) -> tuple[ListedComponent, ...]:
    """Return components in the order of documents: each once, by kind, name and version."""
    unique = {(row.kind, row.purl, row.properties): row for row in components}
    return tuple(sorted(unique.values(), key=_document_order))


def _document_order(component: ListedComponent) -> tuple[object, ...]:
    """Return the sort key of a component in documents."""
    # Copies inside other packages come last: the first component of a package URL is the one that
    # others depend on.
    return (
        component.kind,
        component.name.lower(),
        component.version,
        _is_copy(component),
        component.properties,
    )


def make_extension_bill(
    plan: ExtensionPlan,
    image: BuiltImage,
    packages: PackagesAnswer,
    inherited: Sequence[ListedComponent],
) -> BillOfMaterials:
    """Return the bill of materials of an extended image.

    Components of its base are marked as inherited.

    Args:
        plan: The plan that the image was built from.
        image: The image.
        packages: The packages in the image.
        inherited: The components of the image that was extended.

    Raises:
        ProofError: The image cannot list its packages.
    """
    base_by_identity = {_identify_package(component): component for component in inherited}
    installed = list_package_components(plan.tag, packages, {})
    of_base = [component for component in inherited if component.kind not in _PACKAGES]
    added = []
    for package in installed:
        of_base_package = base_by_identity.get(_identify_package(package))
        if of_base_package is not None:
            # Taken from the base's list, which may have more facts, such as the file's hash.
            of_base.append(of_base_package)
        else:
            added.append(_add_locked_hashes(package, plan.lock.hashes))
    added += [_make_file_component(file) for file in plan.files]

    # A package of the base may require one that the extension has replaced.
    installed_purls = {package.purl for package in installed}
    marked = []
    for component in of_base:
        requires = tuple(purl for purl in component.requires if purl in installed_purls)
        marked.append(replace(component, inherited=True, requires=requires))
    return BillOfMaterials(
        reference=plan.tag,
        sha256=image.identifier.removeprefix("sha256:"),
        components=(_make_extended_component(plan.base), *sort_components([*marked, *added])),
    )


_PACKAGES = ("deb", "rpm", "python", DISTRIBUTION)
"""The kinds of components that are found inside an image."""


def _is_copy(component: ListedComponent) -> bool:
    """Return whether a Python distribution is a copy inside another package."""
    return "inside" in dict(component.properties)


def _identify_package(component: ListedComponent) -> tuple[str, str]:
    """Return the identity of a package in two images: its package URL, and for Python its path."""
    return component.purl, dict(component.properties).get("path", "")


def _make_extended_component(base: ExtendedBase) -> ListedComponent:
    """Return the image that was extended: by its digest, or without one by the engine's name."""
    name = base.reference.partition("@")[0]
    path, _, tag = name.rpartition(":")
    # There is no colon, or it belongs to the registry's port.
    if not path or "/" in tag:
        path, tag = name, ""
    version = base.digest.rpartition("@")[2] or base.identifier
    qualifiers = {"repository_url": path if base.digest else "", "tag": tag}
    return ListedComponent(
        kind="image",
        name=path,
        version=tag or version,
        purl=str(PackageURL("oci", None, path.rpartition("/")[2], version, qualifiers)),
        sha256=version.removeprefix("sha256:"),
        properties=(("image-id", base.identifier),),
    )


def _add_locked_hashes(
    package: ListedComponent, hashes: Mapping[tuple[str, str], tuple[str, ...]]
) -> ListedComponent:
    """Return an installed package with the hash of its file.

    If pip may have chosen one of several files of the lock, the package has all their hashes.
    """
    if package.kind != "python" or _is_copy(package):
        return package
    allowed = hashes.get((str(canonicalize_name(package.name)), package.version), ())
    if not allowed:
        return package
    if len(allowed) == 1:
        return replace(package, sha256=allowed[0])
    properties = (*package.properties, ("one-of-sha256", " ".join(allowed)))
    return replace(package, properties=properties)


def _make_file_component(file: SourceFile) -> ListedComponent:
    """Return a file of the code, by its path in the image and its hash."""
    path = f"{CODE_FOLDER}/{file.path}"
    digest = hashlib.sha256(file.content).hexdigest()
    folder, _, name = path.rpartition("/")
    qualifiers = {"checksum": f"sha256:{digest}"}
    return ListedComponent(
        kind="file",
        name=path,
        version="",
        purl=str(PackageURL("generic", folder.strip("/"), name, None, qualifiers)),
        sha256=digest,
    )


def list_artifacts(plan: ImagePlan, *, installed: bool) -> tuple[Artifact, ...]:
    """Return the downloads of an image's components, each once.

    Args:
        plan: The plan of the image.
        installed: Whether to return only those of components in the image.
    """
    artifacts: dict[tuple[str, str, str], Artifact] = {}
    for step in plan.steps:
        if installed and not step.in_image:
            continue
        for artifact in step.artifacts:
            key = (artifact.name, artifact.version, artifact.url or artifact.commit)
            artifacts.setdefault(key, artifact)
    return tuple(artifacts.values())


def make_base_component(plan: ImagePlan, identifier: str) -> ListedComponent:
    """Return the base image of a target, by its digest.

    A base that was made on this machine has no digest: the engine's identifier takes its place.

    Args:
        plan: The plan of the target's image.
        identifier: ``sha256:...`` of the base image in the engine; ``""``: it is not there.
    """
    name, _, digest = plan.image.partition("@")
    path, tag = name, ""
    if ":" in name.rpartition("/")[2]:
        path, _, tag = name.rpartition(":")
    properties = [("base", plan.base.name)]
    if plan.base.bootstrap and not digest:
        properties.append(("made-from", f"the package archive of {plan.base.suite}"))
    if identifier:
        properties.append(("image-id", identifier))
    version = digest or identifier
    last_part = path.rpartition("/")[2]
    qualifiers = {"tag": tag} if tag else None
    return ListedComponent(
        kind="base",
        name=path,
        version=tag or version,
        purl=str(PackageURL("oci", None, last_part, version or None, qualifiers)),
        sha256=version.removeprefix("sha256:"),
        properties=tuple(properties),
    )


def make_artifact_component(artifact: Artifact) -> ListedComponent:
    """Return a download of a component, with its hash and origin."""
    origin = artifact.url or f"git+{artifact.git}@{artifact.commit}"
    qualifiers = {"vcs_url": origin} if artifact.git else {"download_url": origin}
    if artifact.sha256:
        qualifiers["checksum"] = f"sha256:{artifact.sha256}"
    return ListedComponent(
        kind="artifact",
        name=artifact.name,
        version=artifact.version,
        purl=str(PackageURL("generic", None, artifact.name, artifact.version, qualifiers)),
        sha256=artifact.sha256,
        origin=origin,
    )


def make_python_purl(name: str, version: str) -> str:
    """Return the package URL of a Python distribution: ``pkg:pypi/NAME@VERSION``."""
    return str(PackageURL("pypi", None, str(canonicalize_name(name)), version))


def _make_distribution_component(packages: PackagesAnswer) -> ListedComponent:
    """Return the operating system, as ``os-release`` names it."""
    name, version = packages["distribution"], packages["version"]
    return ListedComponent(
        kind=DISTRIBUTION,
        name=FAMILIES.get(name, name),
        version=version,
        purl=str(PackageURL("generic", None, name, version or None)),
        scanner_properties=(
            (f"{TRIVY}Class", "os-pkgs"),
            (f"{TRIVY}Type", FAMILIES.get(name, name)),
            (f"{SYFT}distro:id", name),
            (f"{SYFT}distro:versionID", version),
        ),
    )


def _make_system_component(row: SystemPackage, packages: PackagesAnswer) -> ListedComponent:
    """Return a package of the distribution, with the facts that scanners look for.

    Args:
        row: The package.
        packages: The packages of the image, with the kind and the name of the distribution.
    """
    kind, distribution = packages["kind"], packages["distribution"]
    is_rpm = kind == "rpm"
    epoch, version = "", row["version"]
    # A package URL of the type ``rpm`` has the epoch apart; one of ``deb`` has it in the version.
    if is_rpm:
        epoch, _, version = row["version"].rpartition(":")
    qualifiers = {
        "arch": row["architecture"],
        "distro": f"{distribution}-{packages['version']}",
    }
    if epoch:
        qualifiers["epoch"] = epoch
    if is_rpm:
        # The name of a source package's file, which has no epoch.
        _, _, source_version = row["source_version"].rpartition(":")
        qualifiers["upstream"] = f"{row['source']}-{source_version}.src.rpm"
    elif (row["source"], row["source_version"]) != (row["name"], row["version"]):
        qualifiers["upstream"] = f"{row['source']}@{row['source_version']}"
    return ListedComponent(
        kind=kind,
        name=row["name"],
        version=row["version"],
        purl=str(PackageURL(kind, distribution, row["name"], version, qualifiers)),
        licenses=tuple(row["licenses"]),
        supplier=row["supplier"],
        properties=(
            ("architecture", row["architecture"]),
            ("source", row["source"]),
            ("source-version", row["source_version"]),
        ),
        scanner_properties=_make_trivy_properties(row, distribution, epoch),
    )


def _make_trivy_properties(
    row: SystemPackage, distribution: str, epoch: str
) -> tuple[tuple[str, str], ...]:
    """Return trivy's facts of a system package: its source, with the version in three parts."""
    # ``EPOCH:UPSTREAM-REVISION``; the first and the last part may be missing.
    source_epoch, _, version = row["source_version"].rpartition(":")
    upstream, revision = version, ""
    if "-" in version:
        upstream, _, revision = version.rpartition("-")
    values = {
        "PkgID": f"{row['name']}@{row['version']}",
        "PkgType": FAMILIES.get(distribution, distribution),
        "SrcName": row["source"],
        "SrcVersion": upstream,
        "SrcRelease": revision,
        # rpm stores no epoch of the source package, which has the package's epoch.
        "SrcEpoch": (source_epoch or epoch).removeprefix("0"),
    }
    return tuple((f"{TRIVY}{name}", value) for name, value in values.items() if value)


def _make_python_component(
    row: PythonDistribution, locked: LockedPackage | None, versions: Mapping[str, str]
) -> ListedComponent:
    """Return an installed Python distribution.

    Args:
        row: The distribution.
        locked: The file of the lock that it was installed from; ``None``: it is in no lock.
        versions: The version of each installed distribution, by normalised name.
    """
    properties = [("path", row["path"])]
    if row["inside"]:
        properties.append(("inside", row["inside"]))
    properties += [("sbom", path) for path in row["sboms"]]
    requires = []
    if locked is not None:
        properties.append(("file", locked.file))
        for name in locked.requires:
            version = versions.get(str(canonicalize_name(name)))
            # A later step may have removed the dependency from the image.
            if version is not None:
                requires.append(make_python_purl(name, version))
    return ListedComponent(
        kind="python",
        name=row["name"],
        version=row["version"],
        purl=make_python_purl(row["name"], row["version"]),
        sha256=locked.sha256 if locked else "",
        licenses=python_licenses(row["expression"], row["license"], row["classifiers"]),
        supplier=row["supplier"],
        requires=tuple(requires),
        properties=tuple(properties),
        scanner_properties=(
            (f"{TRIVY}PkgType", "python-pkg"),
            (f"{TRIVY}FilePath", f"{row['path'].lstrip('/')}/METADATA"),
        ),
    )


def _make_launcher_component(rendering: Rendering, release: LauncherRelease) -> ListedComponent:
    """Return the launcher, with one hash of all its files in the build context."""
    digest = hashlib.sha256()
    for file in rendering.files:
        if file.path.startswith(LAUNCHER):
            # The length keeps a path and a content from being read as others.
            digest.update(f"\0{file.path}\0{len(file.content)}\0".encode() + file.content)
    return ListedComponent(
        kind="launcher",
        name="trainworks-launcher",
        version=release.version,
        purl=str(PackageURL("generic", None, "trainworks-launcher", release.version)),
        licenses=(release.license,),
        supplier="trainworks",
        properties=(("files-sha256", digest.hexdigest()),),
    )
