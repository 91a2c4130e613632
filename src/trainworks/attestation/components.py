"""Makes the list of everything in an image: what is found inside, with what the
plan and the lock know of it.

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
from trainworks.plan.model import ImagePlan
from trainworks.render.dockerfile import Rendering

LAUNCHER = "launcher/"
"""The launcher's folder in a build context."""

DISTRIBUTION = "distribution"
"""The kind of the component that names the image's operating system."""

FAMILIES = {"amzn": "amazon"}
"""What trivy calls a distribution, where that is not its ``ID`` in ``os-release``."""

TRIVY = "aquasecurity:trivy:"
SYFT = "syft:"
"""How the names of the scanners' own properties begin."""


@dataclass(frozen=True, kw_only=True)
class ListedComponent:
    """One thing in an image.

    Attributes:
        kind: ``deb``, ``rpm``, ``python``, ``artifact``, ``base``, ``distribution`` (the operating
            system), ``launcher``; in an extended image also ``image``, the one that was extended,
            and ``file``, a file of the code.
        name: Its name.
        version: Its version; ``""`` where it has none.
        purl: Its package URL, by which both formats and every scanner know it.
        sha256: Hash of the file that it was installed from, where one was pinned.
        licenses: Names of the licences, as the package itself gives them.
        supplier: Who made it, as the package itself says; ``""`` where it does not.
        origin: Where it was downloaded from: a URL, or ``git+URL@COMMIT``; ``""`` where this
            machine's index decides.
        requires: Package URLs of its dependencies, as the lock gives them.
        properties: Further facts, by name.
        scanner_properties: Facts by the names that scanners read them under.
        inherited: Whether it came with the image that was extended.
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
        reference: Its name, with its tag.
        sha256: The hash of its configuration, which contains those of all layers (``Id`` of
            ``docker inspect``).
        components: The base image, or the image that was extended, first; then
            by kind, name and version.
        address: Where a registry has it: ``HOST/NAME@sha256:...``, the hash of
            its manifest; ``""`` for nowhere.
    """

    reference: str
    sha256: str
    components: tuple[ListedComponent, ...]
    address: str = ""

    @property
    def extended(self) -> ListedComponent | None:
        """The image that ``extend`` made this one from."""
        return self.components[0] if self.components[0].kind == "image" else None

    @property
    def purl(self) -> str:
        """The package URL of the image.

        Its version is the hash of the manifest, which only a registry knows.
        """
        name, tag = self.reference.rpartition("/")[2].rsplit(":", 1)
        if not self.address:
            return str(PackageURL("oci", None, name, None, {"tag": tag}))
        repository, _, digest = self.address.partition("@")
        return str(
            PackageURL(
                "oci", None, repository.rpartition("/")[2], digest, {"repository_url": repository}
            )
        )


def target_bill(
    plan: ImagePlan,
    rendering: Rendering,
    image: BuiltImage,
    found: PackagesAnswer,
    *,
    base_identifier: str,
    launcher_version: str,
    launcher_license: str,
) -> BillOfMaterials:
    """Return the bill of materials of a target's image.

    Args:
        plan: The plan that it was built from.
        rendering: The context that it was built from.
        base_identifier: ``sha256:...`` of the base image's configuration;
            ``""`` if the engine does not have it.
        launcher_version: The version of the launcher in that context.

    Raises:
        ProofError: The image cannot list its packages.
    """
    locked = {
        (str(canonicalize_name(file.name)), file.version): file
        for step in plan.steps
        if step.in_image
        for file in step.python
    }
    components = (
        *package_components(image.reference, found, locked),
        *(artifact_component(each) for each in artifacts_of(plan, installed=True)),
        _launcher(rendering, launcher_version, launcher_license),
    )
    return BillOfMaterials(
        reference=plan.tags[0],
        sha256=image.identifier.removeprefix("sha256:"),
        components=(base_component(plan, base_identifier), *in_order(components)),
    )


def package_components(
    reference: str, found: PackagesAnswer, locked: Mapping[tuple[str, str], LockedPackage]
) -> tuple[ListedComponent, ...]:
    """Return the operating system of an image, its system packages and its Python distributions.

    Args:
        reference: The image, for a message.
        locked: Files of the lock, by normalised name and version.

    Raises:
        ProofError: The image cannot list its packages.
    """
    if found["error"] or not found["system"]:
        raise ProofError(
            [f"{reference}: cannot list its packages: {found['error'] or 'the list is empty'}"]
        )
    versions = {
        str(canonicalize_name(row["name"])): row["version"]
        for row in found["python"]
        if not row["inside"]
    }
    return (
        _distribution(found),
        *(_system(row, found) for row in found["system"]),
        *(
            # The lock pinned the file of a distribution, and nothing of a copy inside another one.
            _python(
                row,
                None
                if row["inside"]
                else locked.get((str(canonicalize_name(row["name"])), row["version"])),
                versions,
            )
            for row in found["python"]
        ),
    )


def in_order(components: Iterable[ListedComponent]) -> tuple[ListedComponent, ...]:
    """Return components in the order of documents: each once, by kind, name and version."""
    unique = {(row.kind, row.purl, row.properties): row for row in components}
    return tuple(sorted(unique.values(), key=_document_order))


def _document_order(component: ListedComponent) -> tuple[object, ...]:
    # Copies inside other packages last: dependencies are those of the distribution itself.
    return (
        component.kind,
        component.name.lower(),
        component.version,
        _is_copy(component),
        component.properties,
    )


def extension_bill(
    plan: ExtensionPlan,
    image: BuiltImage,
    found: PackagesAnswer,
    inherited: Sequence[ListedComponent],
) -> BillOfMaterials:
    """Return the bill of materials of an extended image.

    Components of its base are marked as inherited.

    Args:
        plan: The plan that it was built from.
        image: The image.
        found: The packages in the image.
        inherited: The components of the image that was extended.

    Raises:
        ProofError: The image cannot list its packages.
    """
    base_by_place = {_place(component): component for component in inherited}
    packages = package_components(plan.tag, found, {})
    of_base = [component for component in inherited if component.kind not in _PACKAGES]
    own = []
    for package in packages:
        if _place(package) in base_by_place:
            of_base.append(base_by_place[_place(package)])
        else:
            own.append(_required(package, plan.lock.hashes))
    own += [_file(file) for file in plan.files]

    # A package of the base may require one that the extension has replaced.
    known_purls = {package.purl for package in packages}
    kept = []
    for component in of_base:
        requires = tuple(purl for purl in component.requires if purl in known_purls)
        kept.append(replace(component, inherited=True, requires=requires))
    return BillOfMaterials(
        reference=plan.tag,
        sha256=image.identifier.removeprefix("sha256:"),
        components=(_extended(plan.base), *in_order([*kept, *own])),
    )


_PACKAGES = ("deb", "rpm", "python", DISTRIBUTION)
"""The kinds of components that are found inside an image."""


def _is_copy(each: ListedComponent) -> bool:
    """Say whether a Python distribution is a copy inside another package."""
    return "inside" in dict(each.properties)


def _place(each: ListedComponent) -> tuple[str, str]:
    """Return what makes a package the same one in two images: its package URL,
    and for Python its path.
    """
    return each.purl, dict(each.properties).get("path", "")


def _extended(base: ExtendedBase) -> ListedComponent:
    path, _, tag = base.reference.partition("@")[0].rpartition(":")
    if not path or "/" in tag:
        path, tag = base.reference.partition("@")[0], ""
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


def _required(
    package: ListedComponent, hashes: Mapping[tuple[str, str], tuple[str, ...]]
) -> ListedComponent:
    """Return an installed package with the hash of its file.

    Where pip may have chosen one of several files of the lock, with all their hashes.
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


def _file(file: SourceFile) -> ListedComponent:
    path = f"{CODE_FOLDER}/{file.path}"
    digest = hashlib.sha256(file.content).hexdigest()
    folder, _, name = path.rpartition("/")
    return ListedComponent(
        kind="file",
        name=path,
        version="",
        purl=str(
            PackageURL("generic", folder.strip("/"), name, None, {"checksum": f"sha256:{digest}"})
        ),
        sha256=digest,
    )


def artifacts_of(plan: ImagePlan, *, installed: bool) -> tuple[Artifact, ...]:
    """Return the downloads of an image's components, each once: all, or those with something of
    theirs in the image.
    """
    found: dict[tuple[str, str, str], Artifact] = {}
    for step in plan.steps:
        if step.in_image or not installed:
            for artifact in step.artifacts:
                found.setdefault(
                    (artifact.name, artifact.version, artifact.url or artifact.commit), artifact
                )
    return tuple(found.values())


def base_component(plan: ImagePlan, identifier: str) -> ListedComponent:
    """Return the base image: by its digest, or by what the engine knows it by
    where it was made on this machine.
    """
    name, _, digest = plan.image.partition("@")
    path, _, tag = name.rpartition(":") if ":" in name.rpartition("/")[2] else (name, "", "")
    properties = [("base", plan.base.name)]
    if plan.base.bootstrap and not digest:
        properties.append(("made-from", f"the package archive of {plan.base.suite}"))
    if identifier:
        properties.append(("image-id", identifier))
    version = digest or identifier
    return ListedComponent(
        kind="base",
        name=path,
        version=tag or version,
        purl=str(
            PackageURL(
                "oci", None, path.rpartition("/")[2], version or None, {"tag": tag} if tag else None
            )
        ),
        sha256=version.removeprefix("sha256:"),
        properties=tuple(properties),
    )


def artifact_component(artifact: Artifact) -> ListedComponent:
    """Return a download, with its hash and where it comes from."""
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


def python_purl(name: str, version: str) -> str:
    """Return the package URL of a Python distribution."""
    return str(PackageURL("pypi", None, str(canonicalize_name(name)), version))


def _distribution(found: PackagesAnswer) -> ListedComponent:
    """Return the operating system, as ``os-release`` names it."""
    name, version = found["distribution"], found["version"]
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


def _system(row: SystemPackage, found: PackagesAnswer) -> ListedComponent:
    is_rpm = found["kind"] == "rpm"
    epoch, _, version = row["version"].rpartition(":") if is_rpm else ("", "", row["version"])
    qualifiers = {
        "arch": row["architecture"],
        "distro": f"{found['distribution']}-{found['version']}",
    }
    if epoch:
        qualifiers["epoch"] = epoch
    if is_rpm:
        # As rpm names the file of a source package.
        qualifiers["upstream"] = (
            f"{row['source']}-{row['source_version'].rpartition(':')[2]}.src.rpm"
        )
    elif (row["source"], row["source_version"]) != (row["name"], row["version"]):
        qualifiers["upstream"] = f"{row['source']}@{row['source_version']}"
    return ListedComponent(
        kind=found["kind"],
        name=row["name"],
        version=row["version"],
        purl=str(
            PackageURL(found["kind"], found["distribution"], row["name"], version, qualifiers)
        ),
        licenses=tuple(row["licenses"]),
        supplier=row["supplier"],
        properties=(
            ("architecture", row["architecture"]),
            ("source", row["source"]),
            ("source-version", row["source_version"]),
        ),
        scanner_properties=_trivy_properties(row, found, epoch),
    )


def _trivy_properties(
    row: SystemPackage, found: PackagesAnswer, epoch: str
) -> tuple[tuple[str, str], ...]:
    """Return what trivy knows a system package by: its source package, with the
    version in three parts.
    """
    source_epoch, _, version = row["source_version"].rpartition(":")
    upstream, _, revision = version.rpartition("-") if "-" in version else (version, "", "")
    values = {
        "PkgID": f"{row['name']}@{row['version']}",
        "PkgType": FAMILIES.get(found["distribution"], found["distribution"]),
        "SrcName": row["source"],
        "SrcVersion": upstream,
        "SrcRelease": revision,
        # rpm keeps no epoch of the source package: it is the package's.
        "SrcEpoch": (source_epoch or epoch).removeprefix("0"),
    }
    return tuple((f"{TRIVY}{name}", value) for name, value in values.items() if value)


def _python(
    row: PythonDistribution, locked: LockedPackage | None, versions: Mapping[str, str]
) -> ListedComponent:
    properties = [("path", row["path"])]
    if row["inside"]:
        properties.append(("inside", row["inside"]))
    properties += [("sbom", path) for path in row["sboms"]]
    requires = []
    if locked is not None:
        properties.append(("file", locked.file))
        for name in locked.requires:
            version = versions.get(str(canonicalize_name(name)))
            if version is not None:
                requires.append(python_purl(name, version))
    return ListedComponent(
        kind="python",
        name=row["name"],
        version=row["version"],
        purl=python_purl(row["name"], row["version"]),
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


def _launcher(rendering: Rendering, version: str, name: str) -> ListedComponent:
    digest = hashlib.sha256()
    for file in rendering.files:
        if file.path.startswith(LAUNCHER):
            digest.update(f"\0{file.path}\0{len(file.content)}\0".encode() + file.content)
    return ListedComponent(
        kind="launcher",
        name="trainworks-launcher",
        version=version,
        purl=str(PackageURL("generic", None, "trainworks-launcher", version)),
        licenses=(name,),
        supplier="trainworks",
        properties=(("files-sha256", digest.hexdigest()),),
    )
