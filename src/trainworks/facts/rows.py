"""The shapes of the rows in ``images/``: frozen values, read by ``facts.load`` and used by
everything after it.

Every row carries the ``source`` of its fact. Names of fields are the keys of the TOML files.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal
from urllib.parse import unquote

from trainworks.facts import field_types

Source = Literal["packages", "vendor"]
"""The origin of a target's parts: Debian and Python packages only, or the
vendors' own installers.
"""


Architecture = Literal["amd64", "arm64"]
"""A processor's instruction set, by its name in images."""

MACHINES: Mapping[Architecture, str] = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architectures to their names in the kernel and in wheels."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """An operating system that images stand on.

    Attributes:
        name: Its name in targets, for example ``debian12``.
        suite: The distribution's code name: for bootstrapping, and in the names of package caches.
        version: The distribution's version.
        glibc: The newest C library level for the choice of wheels; at most the base's own.
        python: Its ``/usr/bin/python3``, ``MAJOR.MINOR``; the launcher runs on it.
        image: The reference to pull where a registry answers.
        digest: ``sha256:...`` of that image.
        alternatives: References of the same image in other registries, if the first one does not
            answer.
        bootstrap: Whether the base can be made from its package archive if no registry answers.
        archive: Address of that archive; source packages below this address may come from the
            build host's own mirror.
        archives: The suites of its packages, each with the name of its archive.
        snapshot: Address of an archive on an earlier day, with ``{archive}`` and ``{date}``
            (``YYYYMMDDThhmmssZ``).
        pythons: Further Pythons in its packages: ``MAJOR.MINOR`` to the interpreter's path.
        architecture: The processor of its programs and of all images on the base.
        environment: Variables of every image on the base, against errors of its programs.
    """

    name: field_types.Name
    suite: field_types.Name
    version: field_types.Digits
    glibc: field_types.Digits
    python: field_types.Python
    image: field_types.Image
    source: str
    digest: field_types.Digest = ""
    alternatives: tuple[field_types.Image, ...] = ()
    bootstrap: bool = False
    archive: field_types.Url = ""
    archives: Mapping[str, field_types.Name] = field(default_factory=dict)
    snapshot: field_types.Snapshot = ""
    pythons: Mapping[str, field_types.AbsolutePath] = field(default_factory=dict)
    architecture: Architecture = "amd64"
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BaseImage:
    """An image that a vendor builds on an operating system, such as NVIDIA's with CUDA.

    Attributes:
        name: The reference to pull, with its tag.
        base: Name of the base row with its operating system.
        provides: Versions of its parts, by component or ``cuda`` and ``cudnn``.
        digest: ``sha256:...``, if it is known without a lock.
        alternatives: References of images: ``build.py lock`` takes the first that exists, if this
            image is gone.
    """

    name: field_types.Image
    base: str
    source: str
    provides: Mapping[str, str] = field(default_factory=dict)
    digest: field_types.Digest = ""
    alternatives: tuple[field_types.Image, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """One input that is downloaded: a file by its hash, or a git repository by its commit.

    Attributes:
        name: The component, or a name in the key ``together`` of another artifact.
        version: Exact version. Rows of one name and version differ in ``requires``.
        url: Address of the file.
        sha256: The file's hash, published by its vendor or by a package collection that checks it.
        size: The file's published size in bytes; 0 if none is published.
        git: The repository, instead of a file.
        tag: The tag that points at the commit: git servers hand out tags sooner than commits.
        commit: 40 hexadecimal digits. Git names contents by hashes, so this verifies every byte.
        signature: Address of the file's detached OpenPGP signature, for ``build.py lock``.
        key: Address of the signing key.
        fingerprint: That key's fingerprint, 40 hexadecimal digits.
        provides: Versions of other components that the artifact installs, by component.
        requires: Conditions for a target: property to range (``plan.compatibility``).
        flags: Options for its installer, for example ``--disable-ngc``.
        together: Further artifacts that its recipe needs: name to exact version.
        requires_dist: Requirements of a wheel (``Requires-Dist`` of its metadata), if the package
            index has another build of that version with other requirements.
    """

    name: field_types.Name
    version: field_types.Release
    source: str
    url: field_types.Url = ""
    sha256: field_types.Sha256 = ""
    size: int = 0
    git: field_types.Url = ""
    tag: field_types.Tag = ""
    commit: field_types.Commit = ""
    signature: field_types.Url = ""
    key: field_types.Url = ""
    fingerprint: field_types.Fingerprint = ""
    provides: Mapping[str, field_types.Release] = field(default_factory=dict)
    requires: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[field_types.Flag, ...] = ()
    together: Mapping[str, field_types.Release] = field(default_factory=dict)
    requires_dist: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The name of its file: in a mirror, in a build context, in a build stage.

        For example ``NAME-COMMIT.bundle`` for a repository, else the last part of the URL.
        """
        if self.git:
            return f"{self.name}-{self.commit}.bundle"
        name = unquote(self.url.rsplit("/", 1)[-1])
        # Git servers name their archives by the tag alone: two repositories may have the same.
        if re.match(r"v?\d", name):
            return f"{self.name}-{name}"
        return name


@dataclass(frozen=True, kw_only=True)
class LockedArtifact:
    """The hash and the size in bytes of a file, recorded by ``build.py lock``."""

    url: str
    sha256: field_types.Sha256
    size: int


@dataclass(frozen=True, kw_only=True)
class ToolImage:
    """An image with a program for CI; see ``images/tool-images.toml``."""

    name: field_types.Name
    image: field_types.Image
    source: str


@dataclass(frozen=True, kw_only=True)
class LockedBaseImage:
    """The digest of a base image, recorded by ``build.py lock``.

    ``reference`` is the alternative that was taken, if any.
    """

    name: field_types.Image
    digest: field_types.Digest
    reference: str = ""


@dataclass(frozen=True, kw_only=True)
class LockedArchive:
    """The state of a package archive's suite, recorded by ``build.py lock`` from ``InRelease``.

    Attributes:
        suite: Its code name, such as ``bookworm-security``.
        date: The time of the signature, ISO 8601 in UTC.
        sha256: The hash of ``InRelease``.
        contents: The hash of its list of files: an archive signs the same packages again and again.
    """

    suite: field_types.Name
    date: field_types.Second
    sha256: field_types.Sha256
    contents: field_types.Sha256


Severity = Literal["refuse", "advise"]
"""The effect of a rule that does not hold: the plan is refused, or shows the rule as advice."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A fact about which versions work together; see the head of ``images/compatibility.toml``.

    Attributes:
        name: Its name in errors.
        when: Property to range: the rule is about plans for which all of these hold.
        require: Property to range: all of these must hold then; none: such a plan itself breaks
            the rule.
        reason: The reason of the rule.
        instead: Advice for a plan that breaks the rule.
        severity: Whether a plan that breaks the rule is refused.
    """

    name: field_types.Name
    when: Mapping[str, str]
    reason: str
    instead: str
    source: str
    require: Mapping[str, str] = field(default_factory=dict)
    severity: Severity = "refuse"


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """One value of ``--cuda``; ``cpu`` and ``neuron`` have neither version nor wheels nor driver.

    Code is compiled for ``architectures``, in nvcc's form without the dot: ``80`` is 8.0.
    """

    name: field_types.Cell
    source: str
    version: field_types.Digits = ""
    wheel_suffix: field_types.WheelSuffix = ""
    minimum_driver: field_types.Digits = ""
    architectures: tuple[field_types.Compute, ...] = ()

    @property
    def neuron(self) -> bool:
        """Whether this cell is for AWS Trainium."""
        return self.name == "neuron"


@dataclass(frozen=True, kw_only=True)
class Component:
    """A part of an image.

    See the head of ``images/components.toml`` for the meaning of each key.
    """

    name: field_types.Name
    summary: str
    source: str
    sources: tuple[Source, ...] = ("packages", "vendor")
    frameworks: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    by_row: str = ""
    recipe: field_types.Name = ""
    artifact: bool = False
    debian: tuple[field_types.Package, ...] = ()
    build_debian: tuple[field_types.Package, ...] = ()
    python: tuple[field_types.Requirement, ...] = ()
    python_cpu: tuple[field_types.Requirement, ...] = ()
    replaces: tuple[field_types.Distributions, ...] = ()
    replaces_debian: tuple[field_types.Package, ...] = ()
    protected: tuple[field_types.Distributions, ...] = ()
    companions: tuple[field_types.Distributions, ...] = ()
    compiles: tuple[field_types.Distributions, ...] = ()
    compiles_later: tuple[field_types.Distributions, ...] = ()
    needs: tuple[str, ...] = ()
    builds_with: tuple[str, ...] = ()
    build_only: bool = False
    needs_cuda: bool = False
    needs_neuron: bool = False
    required: bool = False
    default: bool = False
    without: str = ""
    variant: field_types.Name = ""
    proved: str = ""
    proved_by: tuple[str, ...] = ()

    @property
    def recipe_name(self) -> str:
        """The recipe, ``templates/components/NAME.j2``; two rows of one name have two."""
        return self.recipe or self.name

    def fits(self, framework: str, sources: Source, cuda: Cuda, base: str) -> bool:
        """Return whether a target with these values can have the component.

        An empty ``frameworks`` or ``bases`` of the component is for all of them.
        """
        if sources not in self.sources:
            return False
        if self.frameworks and framework not in self.frameworks:
            return False
        if self.bases and base not in self.bases:
            return False
        if self.needs_cuda and not cuda.version:
            return False
        return cuda.neuron or not self.needs_neuron


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A named, tested set of component versions."""

    name: str
    sources: Source
    source: str
    components: Mapping[str, field_types.Release]


@dataclass(frozen=True, kw_only=True)
class Instance:
    """The devices of one host of an instance type.

    ``efa_rdma``: its EFA devices can read remote memory. ``architecture``: that of its processors.
    The fields with a default are for ``trainworks-preflight``; see the head of
    ``images/instances.toml``.
    """

    name: str
    gpus: field_types.Gpus
    neuron_cores: field_types.NeuronCores
    efa: bool
    efa_rdma: bool
    source: str
    efa_devices: field_types.Gpus = 0
    network_gigabits: int = 0
    memory_gib: field_types.Gibibytes = 0
    architecture: Architecture = "amd64"
    smp_loader_workers: bool = True
    smddp: bool = False
    smdistributed_by_torchrun_only: bool = False


@dataclass(frozen=True, kw_only=True)
class FabricVariable:
    """A variable that hosts with EFA need; see the head of ``images/fabric.toml``."""

    name: field_types.FabricName
    value: field_types.FabricValue
    why: str
    source: str
    rdma: bool = False
    when: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of instance types without accelerators, such as ``ml.m5``."""

    name: str
    source: str


@dataclass(frozen=True, kw_only=True)
class EndOfPatch:
    """A minor version of a framework for which its project makes no more patch releases.

    Attributes:
        framework: Name of its file.
        version: ``MAJOR.MINOR``.
        date: The first day without patches.
        successor: The version that replaces it; none: the project has ended.
    """

    framework: str
    version: field_types.Minor
    date: field_types.Day
    source: str
    successor: field_types.Minor = ""


@dataclass(frozen=True, kw_only=True)
class AdvisoryService:
    """A service with published advisories about Python distributions.

    See ``images/advisories.toml``.
    """

    name: field_types.Name
    url: field_types.Url
    source: str


@dataclass(frozen=True, kw_only=True)
class GeneratedFiles:
    """Files that are in no package's list, and have a known maker.

    See ``images/generated-files.toml``.

    Attributes:
        name: The program that makes them.
        paths: Absolute patterns; ``*`` stays within a folder, ``**`` goes through all below.
        sha256: The digest of the contents, if they are the same in every
            image; then ``paths`` are plain.
        copy_of: The path of a package's file with the same content; then ``paths`` are plain.
        leads_to: The target of links; then ``paths`` are plain.
    """

    name: str
    paths: tuple[field_types.PathPattern, ...]
    sha256: field_types.Sha256 = ""
    copy_of: field_types.AbsolutePath = ""
    leads_to: str = ""
    source: str


@dataclass(frozen=True, kw_only=True)
class PrivilegedFiles:
    """Files of one system package that run with other rights.

    See ``images/privileged-files.toml``.
    """

    package: field_types.Package
    paths: tuple[field_types.AbsolutePath, ...]
    source: str


@dataclass(frozen=True, kw_only=True)
class Right:
    """Paths that some users may not read, or that a group may change; see ``images/rights.toml``.

    Attributes:
        name: A name for these paths.
        paths: Patterns of paths.
        mode: The most rights that their mode may give.
        group: The group that they may belong to, besides root's.
        attributes: Names of extended attributes that they may have, such as lists of access.
        source: The source of the fact.
    """

    name: field_types.Name
    paths: tuple[field_types.PathPattern, ...]
    mode: field_types.Mode
    source: str
    group: field_types.Group = "root"
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Built:
    """One row of ``images/built.toml``: a build that really happened, with every image test green.

    Attributes:
        target: The target's name.
        inputs: ``render.builds.inputs_of`` the plan: a digest of the Dockerfile and of every file
            of its context, independent of the machine.
        engine: Name of the engine.
        date: The day, ISO 8601, UTC.
        megabytes: Size of the image, uncompressed (1 MB = 1,000,000 bytes).
        seconds: Duration of the build, also of one with cached steps; 0 if the engine had the
            image already.
        commit: The git commit that the image was built from; empty where files that decide images
            differed from it, outside of git, and in older rows.
        image: The image's id in the engine, the digest of its configuration; empty in older
            rows.
        digest: The digest of the image in a registry, once a release has pushed it.
    """

    target: str
    inputs: field_types.Inputs
    engine: str
    date: field_types.Day
    megabytes: int
    seconds: int = 0
    commit: field_types.Commit = ""
    image: field_types.Digest = ""
    digest: field_types.Digest = ""


@dataclass(frozen=True, kw_only=True)
class TargetRow:
    """One cell of the matrix: an image that can be built.

    Attributes:
        framework: Name of its file.
        version: The framework's version.
        cuda: Name of a CUDA row.
        base: Name of a base row.
        stack: Name of a stack row.
        versions: Versions of this cell's own (framework, CUDA, cuDNN, NCCL), by component.
        size_budget_megabytes: The largest size of the image, uncompressed (1 MB = 1,000,000 bytes).
        python: ``MAJOR.MINOR``; default: the base's own.
        image: Name of a base image row; default: the base's own image.
        builder_image: Name of a base image row for its build stages, if that image has more
            (compilers, headers).
        wheel_index: The vendor's package index, used if the host names none.
        limits: Ranges for the lock (``numpy<1.24``), if a wheel's own metadata allow versions that
            break the wheel.
        unbuilt: The reason why the project's own machine cannot build the image; ``""`` if it can.
    """

    framework: str
    version: field_types.Version
    cuda: str
    base: str
    stack: str
    versions: Mapping[str, field_types.Release]
    size_budget_megabytes: field_types.Budget
    source: str
    python: field_types.Python = ""
    image: field_types.Image = ""
    builder_image: field_types.Image = ""
    wheel_index: field_types.Url = ""
    limits: tuple[field_types.Requirement, ...] = ()
    unbuilt: str = ""


@dataclass(frozen=True, kw_only=True)
class LockedPackage:
    """One file of the package index, pinned.

    Attributes:
        name: Normalised distribution name.
        version: Exact version.
        file: File name (a wheel, or a source distribution that its stage compiles).
        sha256: The file's hash in the index.
        size: The file's size in bytes; 0 if the index does not have it.
        requires: Names of its dependencies in the lock.
        build: Whether it is needed only while building: uv itself, and build tools for the
            source distributions of this lock.
    """

    name: field_types.Distribution
    version: field_types.Version
    file: field_types.File
    sha256: field_types.Sha256
    size: int = 0
    requires: tuple[field_types.Distribution, ...] = ()
    build: bool = False


@dataclass(frozen=True, kw_only=True)
class Lock:
    """Every Python file of one target: nothing else is installed."""

    target: str
    packages: tuple[LockedPackage, ...]


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """A check in the front matter of a recipe: ``kind`` and that kind's own keys.

    Versions are not filled in yet. With ``beside``, the check is only for images that have that
    component too.
    """

    kind: str
    values: Mapping[str, object]
    beside: str = ""


@dataclass(frozen=True, kw_only=True)
class FrontMatter:
    """The keys of a recipe's front matter.

    Attributes:
        environment: Variables that the component adds to the image; ``{version}`` as in checks.
        path: Folders for the front of the image's PATH.
        libraries: Folders for the image's LD_LIBRARY_PATH.
        programs: Programs that the launcher starts, name to absolute path; they
            go into the manifest.
        owns: Patterns of files that the recipe adds and no package lists; ``*``
            stays within a folder, ``**`` does not.
        removes: Patterns of packages' files that the recipe removes or replaces; as ``owns``.
        brings: Names of Debian packages that an installer of the recipe brings with it, beside
            those that they depend on; ``*`` is any text.
        trims: Patterns of files below site-packages that the recipe removes from wheels with
            ``trim-python-packages``; a folder with all its files.
        strips: Patterns of libraries of wheels without their symbols, likewise.
        links: Links among its files, path to target; ``""`` is any target.
        imports: Modules that every job with this component imports: ``python-bytecode`` compiles
            the modules that they load.
        answers: Rules of ``images/compatibility.toml`` with advice that this recipe follows; such
            advice is not shown.
        check: Checks of an image with the component; ``plan`` reads their keys.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    path: tuple[field_types.AbsolutePath, ...] = ()
    libraries: tuple[field_types.AbsolutePath, ...] = ()
    programs: Mapping[str, field_types.AbsolutePath] = field(default_factory=dict)
    owns: tuple[field_types.PathPattern, ...] = ()
    removes: tuple[field_types.PathPattern, ...] = ()
    brings: tuple[str, ...] = ()
    trims: tuple[str, ...] = ()
    strips: tuple[str, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[field_types.Module, ...] = ()
    answers: tuple[str, ...] = ()
    check: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe(FrontMatter):
    """``templates/components/NAME.j2``: front matter and the text of two Jinja blocks.

    Attributes:
        name: The component.
        text: The complete template.
        checks: The rows of ``check``.
    """

    name: str
    text: str
    checks: tuple[CheckRow, ...] = ()


def checks_of(front: FrontMatter) -> tuple[CheckRow, ...]:
    """Return the checks of a front matter; their values are not looked at yet."""
    rows = []
    for raw in front.check:
        kind, beside = str(raw.get("kind", "")), str(raw.get("beside", ""))
        values = {key: value for key, value in raw.items() if key not in ("kind", "beside")}
        rows.append(CheckRow(kind=kind, values=values, beside=beside))
    return tuple(rows)


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of build contexts: its path in a context, its bytes, its permission bits."""

    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644


@dataclass(frozen=True, kw_only=True)
class Table:
    """One kind of rows in ``images/``.

    Attributes:
        name: Its file, ``images/NAME.toml``.
        key: The head of each row: ``[[KEY]]``.
        row_type: The type of its rows.
        names: Takes a row, returns the names that no other row of the table may have.
        optional: Whether the file may be missing.
    """

    name: str
    key: str
    row_type: type[Any]
    names: Callable[[Any], Iterable[str]]
    optional: bool = False


def _table(
    name: str,
    key: str,
    row_type: type[Any],
    *,
    names: Callable[[Any], Iterable[str]] = lambda row: (row.name,),
    optional: bool = False,
) -> Any:
    """Return a field of ``Facts`` that has the rows of a table."""
    table = Table(name=name, key=key, row_type=row_type, names=names, optional=optional)
    return field(metadata={"table": table})


def _no_names(_row: Artifact) -> tuple[str, ...]:
    """Return no names: several artifacts of one name and version may differ in ``requires``."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that was read: rows, recipes, and the files that recipes copy.

    A table of ``images/`` is named in one place, its field below; ``TABLES`` and the reader follow
    from the field.
    """

    bases: tuple[Base, ...] = _table("bases", "base", Base)
    base_images: tuple[BaseImage, ...] = _table("base-images", "base_image", BaseImage)
    tool_images: tuple[ToolImage, ...] = _table("tool-images", "tool", ToolImage, optional=True)
    cudas: tuple[Cuda, ...] = _table("cuda", "cuda", Cuda)
    artifacts: tuple[Artifact, ...] = _table("artifacts", "artifact", Artifact, names=_no_names)
    rules: tuple[Rule, ...] = _table("compatibility", "rule", Rule)
    components: tuple[Component, ...] = _table(
        "components",
        "component",
        Component,
        names=lambda row: [f"{row.name} ({source})" for source in row.sources],
    )
    stacks: tuple[Stack, ...] = _table("stacks", "stack", Stack)
    instances: tuple[Instance, ...] = _table("instances", "instance", Instance)
    families: tuple[Family, ...] = _table("families", "family", Family)
    ends: tuple[EndOfPatch, ...] = _table(
        "end-of-patch", "ended", EndOfPatch, names=lambda row: (f"{row.framework} {row.version}",)
    )
    advisories: tuple[AdvisoryService, ...] = _table(
        "advisories", "service", AdvisoryService, optional=True
    )
    fabric: tuple[FabricVariable, ...] = _table("fabric", "variable", FabricVariable)
    generated_files: tuple[GeneratedFiles, ...] = _table(
        "generated-files", "generated", GeneratedFiles
    )
    privileged_files: tuple[PrivilegedFiles, ...] = _table(
        "privileged-files", "privileged", PrivilegedFiles, names=lambda row: (row.package,)
    )
    rights: tuple[Right, ...] = _table("rights", "right", Right)
    built: tuple[Built, ...] = _table(
        "built", "built", Built, names=lambda row: (row.target,), optional=True
    )
    targets: tuple[TargetRow, ...]
    recipes: Mapping[str, Recipe]
    templates: Mapping[str, str]
    files: tuple[SourceFile, ...]
    locks: Mapping[str, Lock]
    locked_artifacts: tuple[LockedArtifact, ...]
    locked_base_images: tuple[LockedBaseImage, ...]
    locked_archives: tuple[LockedArchive, ...] = ()

    @cached_property
    def base_by_name(self) -> Mapping[str, Base]:
        """Bases by name."""
        return {row.name: row for row in self.bases}

    @cached_property
    def cuda_by_name(self) -> Mapping[str, Cuda]:
        """CUDA cells by name."""
        return {row.name: row for row in self.cudas}

    @cached_property
    def stack_by_name(self) -> Mapping[str, Stack]:
        """Stacks by name."""
        return {row.name: row for row in self.stacks}

    @cached_property
    def base_image_by_name(self) -> Mapping[str, BaseImage]:
        """Base images by name."""
        return {row.name: row for row in self.base_images}

    @cached_property
    def built_by_target(self) -> Mapping[str, Built]:
        """The last recorded build of each target, by the target's name.

        It may be of an older recipe.
        """
        return {row.target: row for row in self.built}

    def end_of_patch(self, row: TargetRow) -> EndOfPatch | None:
        """Return the end of patches for a target's framework; ``None`` if patches still come."""
        minor = ".".join(row.version.split(".")[:2])
        for end in self.ends:
            if (end.framework, end.version) == (row.framework, minor):
                return end
        return None

    @cached_property
    def artifacts_by_name(self) -> Mapping[str, tuple[Artifact, ...]]:
        """Artifacts by name, in the order of their file."""
        rows_by_name: dict[str, tuple[Artifact, ...]] = {}
        for row in self.artifacts:
            rows_by_name[row.name] = (*rows_by_name.get(row.name, ()), row)
        return rows_by_name

    @cached_property
    def locked_artifact_by_url(self) -> Mapping[str, LockedArtifact]:
        """Locked files by their URL."""
        return {row.url: row for row in self.locked_artifacts}

    @cached_property
    def digest_by_image(self) -> Mapping[str, str]:
        """Digests of base images by name: from their rows, and from the lock.

        The lock has an image with a digest in its row only if an alternative was taken.
        """
        digests = {row.name: row.digest for row in self.base_images if row.digest}
        for locked in self.locked_base_images:
            digests[locked.name] = locked.digest
        return digests

    def archives_of(self, base: Base) -> tuple[LockedArchive, ...]:
        """Return the locked states of a base's suites; suites without a lock are left out."""
        locked = {row.suite: row for row in self.locked_archives}
        return tuple(locked[suite] for suite in base.archives if suite in locked)

    def digest_of(self, base: Base) -> str:
        """Return the digest of a base's own image, ``sha256:...``; ``""`` if it is not known."""
        return self.digest_by_image.get(base.image, base.digest)

    @cached_property
    def alternative_by_image(self) -> Mapping[str, str]:
        """Locked replacements of base images that are gone, by name."""
        return {row.name: row.reference for row in self.locked_base_images if row.reference}

    @cached_property
    def launcher_version(self) -> str:
        """The launcher's version in its own pyproject.toml."""
        (text,) = (file.content for file in self.files if file.path == "launcher/pyproject.toml")
        version: str = tomllib.loads(text.decode())["project"]["version"]
        return version

    def sources_of(self, row: TargetRow) -> Source:
        """Return the sources of a target: those of its stack."""
        return self.stack_by_name[row.stack].sources

    def python_of(self, row: TargetRow) -> str:
        """Return a target's Python, ``MAJOR.MINOR``."""
        return row.python or self.base_by_name[row.base].python

    def architecture_of(self, row: TargetRow) -> Architecture:
        """Return a target's architecture: that of its base."""
        return self.base_by_name[row.base].architecture

    def name_of(self, row: TargetRow) -> str:
        """Return a target's name: unique, and the name of its lock.

        ``FRAMEWORK-VERSION-CUDA-pyXY-BASE``, and ``-vendor`` for a target from vendors' sources.
        """
        python = self.python_of(row).replace(".", "")
        name = f"{row.framework}-{row.version}-{row.cuda}-py{python}-{row.base}"
        if self.sources_of(row) == "vendor":
            name += "-vendor"
        return name


TABLES: Mapping[str, Table] = {
    row.name: row.metadata["table"] for row in fields(Facts) if "table" in row.metadata
}
"""The tables of ``images/``, by field of ``Facts``; every other file there is a framework's."""
