"""What is in an image, as both bills of materials list it: found inside, with what plan and lock know of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from packageurl import PackageURL
from packaging.utils import canonicalize_name

from trainworks.engine.protocol import BuiltImage
from trainworks.errors import ProofError
from trainworks.extend.plan import CODE_FOLDER, ExtensionPlan
from trainworks.extend.requirements import ExtendedBase, locked_hashes
from trainworks.facts.rows import Artifact, LockedPackage, SourceFile
from trainworks.imagetest.packages import Answer, PythonDistribution, SystemPackage
from trainworks.plan.model import ImagePlan
from trainworks.proof.licenses import python_licenses
from trainworks.render.dockerfile import Rendering

LAUNCHER = "launcher/"
"""Where a build context has the launcher's files."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """One thing in an image.

    Attributes:
        kind: ``deb``, ``rpm``, ``python``, ``artifact``, ``base``, ``launcher``; in an extended image also ``image``,
            the one that was extended, and ``file``, a file of the code.
        name: Its name.
        version: Its version; ``""`` where it has none.
        purl: Its package URL, which both formats and every scanner know it by.
        sha256: Hash of the file that it was installed from, where there is one that somebody pinned.
        licenses: Names of the licences, as the package itself says them.
        origin: Where it was downloaded from: a URL, or ``git+URL@COMMIT``; ``""`` where this machine's index decides.
        requires: Package URLs of what it depends on, as the lock says.
        properties: Further facts, by name.
        inherited: It came with the image that was extended.
    """

    kind: str
    name: str
    version: str
    purl: str
    sha256: str = ""
    licenses: tuple[str, ...] = ()
    origin: str = ""
    requires: tuple[str, ...] = ()
    properties: tuple[tuple[str, str], ...] = ()
    inherited: bool = False


@dataclass(frozen=True, kw_only=True)
class Contents:
    """An image and everything in it.

    Attributes:
        reference: Its name, with its tag.
        sha256: The hash of its configuration, which has those of all layers in it (``docker inspect``'s ``Id``).
        components: Base image, or the image that was extended, first; then by kind, name and version.
        pushed: ``NAME`` and hash of the manifest by which a registry knows it, where it was pushed.
    """

    reference: str
    sha256: str
    components: tuple[Component, ...]
    pushed: tuple[str, str] | None = None

    @property
    def extended(self) -> Component | None:
        """The image that this one was made from by ``extend``."""
        return self.components[0] if self.components[0].kind == "image" else None

    @property
    def purl(self) -> str:
        """The image's own package URL."""
        name, tag = self.reference.rpartition("/")[2].rsplit(":", 1)
        return str(PackageURL("oci", None, name, f"sha256:{self.sha256}", {"tag": tag}))


def contents_of(
    plan: ImagePlan,
    rendering: Rendering,
    image: BuiltImage,
    found: Answer,
    *,
    base_identifier: str,
    launcher_version: str,
    launcher_license: str,
) -> Contents:
    """Return what is in an image.

    Args:
        plan: What it was built from.
        rendering: The context that it was built from.
        image: The image.
        found: What the image says that is installed in it.
        base_identifier: ``sha256:...`` of the base image's configuration, ``""`` where the engine does not have it.
        launcher_version: Of the launcher in that context.
        launcher_license: Of the launcher too.

    Raises:
        ProofError: The image could not say what is in it.
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
    return Contents(
        reference=plan.tags[0],
        sha256=image.identifier.removeprefix("sha256:"),
        components=(base_component(plan, base_identifier), *in_order(components)),
    )


def package_components(
    reference: str, found: Answer, locked: Mapping[tuple[str, str], LockedPackage]
) -> tuple[Component, ...]:
    """Return the packages that an image says are installed, of the distribution and of Python.

    Args:
        reference: The image, for a message.
        found: What it says.
        locked: Files of the lock, by normalised name and version.

    Raises:
        ProofError: It could not say what is in it.
    """
    if found["error"] or not found["system"]:
        raise ProofError([f"{reference}: its packages cannot be listed: {found['error'] or 'it says none'}"])
    versions = {str(canonicalize_name(row["name"])): row["version"] for row in found["python"]}
    return (
        *(_system(row, found) for row in found["system"]),
        *(
            _python(row, locked.get((str(canonicalize_name(row["name"])), row["version"])), versions)
            for row in found["python"]
        ),
    )


def in_order(components: Iterable[Component]) -> tuple[Component, ...]:
    """Return components as documents list them: each once, by kind, name and version."""
    unique = {(each.kind, each.purl, each.properties): each for each in components}
    return tuple(
        sorted(unique.values(), key=lambda each: (each.kind, each.name.lower(), each.version, each.properties))
    )


def extension_contents(
    plan: ExtensionPlan, image: BuiltImage, found: Answer, inherited: Sequence[Component]
) -> Contents:
    """Return what is in an extended image, and what of it came with the image that it was made from.

    Args:
        plan: What it was built from.
        image: The image.
        found: What the image says that is installed in it.
        inherited: What is in the image that was extended.

    Raises:
        ProofError: The image could not say what is in it.
    """
    there = {_place(each): each for each in inherited}
    hashes = locked_hashes(plan.requirements)
    packages = package_components(plan.tag, found, {})
    known = {each.purl for each in packages}
    components = [
        *(each for each in inherited if each.kind not in _PACKAGES),
        *(there[_place(each)] for each in packages if _place(each) in there),
    ]
    return Contents(
        reference=plan.tag,
        sha256=image.identifier.removeprefix("sha256:"),
        components=(
            _extended(plan.base),
            *in_order(
                [
                    *(
                        replace(each, inherited=True, requires=tuple(purl for purl in each.requires if purl in known))
                        for each in components
                    ),
                    *(_required(each, hashes) for each in packages if _place(each) not in there),
                    *(_file(each) for each in plan.files),
                ]
            ),
        ),
    )


_PACKAGES = ("deb", "rpm", "python")
"""What an image says itself that it has."""


def _place(each: Component) -> tuple[str, str]:
    """Return by what a package is the same one in two images: what it is, and for Python, where it is."""
    return each.purl, dict(each.properties).get("path", "")


def _extended(base: ExtendedBase) -> Component:
    path, _, tag = base.reference.partition("@")[0].rpartition(":")
    if not path or "/" in tag:
        path, tag = base.reference.partition("@")[0], ""
    version = base.digest.rpartition("@")[2] or base.identifier
    qualifiers = {"repository_url": path if base.digest else "", "tag": tag}
    return Component(
        kind="image",
        name=path,
        version=tag or version,
        purl=str(PackageURL("oci", None, path.rpartition("/")[2], version, qualifiers)),
        sha256=version.removeprefix("sha256:"),
        properties=(("image-id", base.identifier),),
    )


def _required(each: Component, hashes: Mapping[tuple[str, str], tuple[str, ...]]) -> Component:
    """Return what was installed, with the hash of its file, or of all files that the lock allows: pip chose one."""
    allowed = hashes.get((str(canonicalize_name(each.name)), each.version), ()) if each.kind == "python" else ()
    if len(allowed) == 1:
        return replace(each, sha256=allowed[0])
    return replace(each, properties=(*each.properties, ("one-of-sha256", " ".join(allowed)))) if allowed else each


def _file(file: SourceFile) -> Component:
    path = f"{CODE_FOLDER}/{file.path}"
    digest = hashlib.sha256(file.content).hexdigest()
    folder, _, name = path.rpartition("/")
    return Component(
        kind="file",
        name=path,
        version="",
        purl=str(PackageURL("generic", folder.strip("/"), name, None, {"checksum": f"sha256:{digest}"})),
        sha256=digest,
    )


def artifacts_of(plan: ImagePlan, *, installed: bool) -> tuple[Artifact, ...]:
    """Return the downloads of an image's components, each once: all, or those with something of theirs in the image."""
    found: dict[tuple[str, str, str], Artifact] = {}
    for step in plan.steps:
        if step.in_image or not installed:
            for artifact in step.artifacts:
                found.setdefault((artifact.name, artifact.version, artifact.url or artifact.commit), artifact)
    return tuple(found.values())


def base_component(plan: ImagePlan, identifier: str) -> Component:
    """Return the base image: by its digest, or by what the engine knows it by where it was made on this machine."""
    name, _, digest = plan.image.partition("@")
    path, _, tag = name.rpartition(":") if ":" in name.rpartition("/")[2] else (name, "", "")
    properties = [("base", plan.base.name)]
    if plan.base.bootstrap and not digest:
        properties.append(("made-from", f"the package archive of {plan.base.suite}"))
    if identifier:
        properties.append(("image-id", identifier))
    version = digest or identifier
    return Component(
        kind="base",
        name=path,
        version=tag or version,
        purl=str(PackageURL("oci", None, path.rpartition("/")[2], version or None, {"tag": tag} if tag else None)),
        sha256=version.removeprefix("sha256:"),
        properties=tuple(properties),
    )


def artifact_component(artifact: Artifact) -> Component:
    """Return a download, with its hash and where it comes from."""
    origin = artifact.url or f"git+{artifact.git}@{artifact.commit}"
    qualifiers = {"vcs_url": origin} if artifact.git else {"download_url": origin}
    if artifact.sha256:
        qualifiers["checksum"] = f"sha256:{artifact.sha256}"
    return Component(
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


def _system(row: SystemPackage, found: Answer) -> Component:
    epoch, _, version = row["version"].rpartition(":") if found["kind"] == "rpm" else ("", "", row["version"])
    qualifiers = {"arch": row["architecture"], "distro": f"{found['distribution']}-{found['version']}"}
    if epoch:
        qualifiers["epoch"] = epoch
    if (row["source"], row["source_version"]) != (row["name"], row["version"]):
        qualifiers["upstream"] = f"{row['source']}@{row['source_version']}"
    return Component(
        kind=found["kind"],
        name=row["name"],
        version=row["version"],
        purl=str(PackageURL(found["kind"], found["distribution"], row["name"], version, qualifiers)),
        licenses=tuple(row["licenses"]),
        properties=(
            ("architecture", row["architecture"]),
            ("source", row["source"]),
            ("source-version", row["source_version"]),
        ),
    )


def _python(row: PythonDistribution, locked: LockedPackage | None, versions: Mapping[str, str]) -> Component:
    properties = [("path", row["path"])]
    if locked is not None:
        properties.append(("file", locked.file))
    return Component(
        kind="python",
        name=row["name"],
        version=row["version"],
        purl=python_purl(row["name"], row["version"]),
        sha256=locked.sha256 if locked else "",
        licenses=python_licenses(row["expression"], row["license"], row["classifiers"]),
        requires=tuple(
            python_purl(name, versions[str(canonicalize_name(name))])
            for name in (locked.requires if locked else ())
            if str(canonicalize_name(name)) in versions
        ),
        properties=tuple(properties),
    )


def _launcher(rendering: Rendering, version: str, name: str) -> Component:
    digest = hashlib.sha256()
    for file in rendering.files:
        if file.path.startswith(LAUNCHER):
            digest.update(f"\0{file.path}\0{len(file.content)}\0".encode() + file.content)
    return Component(
        kind="launcher",
        name="trainworks-launcher",
        version=version,
        purl=str(PackageURL("generic", None, "trainworks-launcher", version)),
        licenses=(name,),
        properties=(("files-sha256", digest.hexdigest()),),
    )
