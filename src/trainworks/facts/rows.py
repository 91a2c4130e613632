"""The shapes of the rows in ``images/``: frozen values, read by ``facts.load`` and used by
everything after it.

Every row carries its ``source``: where the fact comes from. Names of fields are
the keys of the TOML files.
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
"""A processor's instruction set, by the name that images give it."""

MACHINES: Mapping[Architecture, str] = {"amd64": "x86_64", "arm64": "aarch64"}
"""The same, as the kernel and wheels call it."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """An operating system that images stand on.

    Attributes:
        name: What a target calls it, for example ``debian12``.
        suite: The distribution's code name: for bootstrapping, and in the names of package caches.
        version: The distribution's version.
        glibc: The newest C library level that wheels are chosen for; at most its own.
        python: Its ``/usr/bin/python3``, ``MAJOR.MINOR``; the launcher runs on it.
        image: The reference to pull where a registry answers.
        digest: ``sha256:...`` of that image.
        alternatives: References of the same image in other registries, for
            where the first one does not answer.
        bootstrap: Whether it can be made from its package archive where nothing can be pulled.
        archive: Address of that archive; source packages below it may come from
            the build host's own mirror of it.
        archives: The suites that its packages come from, each with the name of its archive.
        snapshot: Address of an archive on an earlier day, with ``{archive}`` and ``{date}``
            (``YYYYMMDDThhmmssZ``).
        pythons: Further Pythons that its packages bring: ``MAJOR.MINOR`` to the interpreter's path.
        architecture: What its programs, and the images that stand on it, run on.
        environment: Variables that every image on it sets, for what its programs do wrong.
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
        base: Name of the base row whose operating system it has.
        provides: Versions of what it brings, by component or ``cuda`` and ``cudnn``.
        digest: ``sha256:...``, where it is known without a lock.
        alternatives: References of images that ``build.py lock`` takes, the first that exists,
            where this one is gone.
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
        name: The component that it is, or what another artifact brings ``together`` with itself.
        version: Exact version. Rows of one name and version differ in what they require.
        url: Where the file is.
        sha256: The file's hash as its vendor (or a package collection that checks it) publishes it.
        size: The file's size in bytes, where it is published; 0 where not.
        git: The repository, instead of a file.
        tag: The tag that points at the commit: git servers hand out tags sooner than commits.
        commit: 40 hexadecimal digits. Git names contents by hashes, so this verifies every byte.
        signature: Where the file's detached OpenPGP signature is; ``build.py lock`` checks it.
        key: Where the key that signs is.
        fingerprint: That key's fingerprint, 40 hexadecimal digits.
        provides: Versions of what it installs besides itself, by component.
        requires: What must hold for it: property to range (``plan.compatibility``).
        flags: What its recipe has to pass on, for example ``--disable-ngc``.
        together: Further artifacts that its recipe needs: name to exact version.
        requires_dist: Of a wheel, what it requires (``Requires-Dist`` of its metadata), where the
            package index has another build of that version, which requires something else.
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
        """The name of its file: in a mirror, in a build context, in a build stage."""
        if self.git:
            return f"{self.name}-{self.commit}.bundle"
        name = unquote(self.url.rsplit("/", 1)[-1])
        # Git servers name their archives by the tag alone: two repositories may have the same.
        return f"{self.name}-{name}" if re.match(r"v?\d", name) else name


@dataclass(frozen=True, kw_only=True)
class LockedArtifact:
    """A file as ``build.py lock`` recorded it: its hash and its size in bytes."""

    url: str
    sha256: field_types.Sha256
    size: int


@dataclass(frozen=True, kw_only=True)
class ToolImage:
    """An image of which CI takes a program; see ``images/tool-images.toml``."""

    name: field_types.Name
    image: field_types.Image
    source: str


@dataclass(frozen=True, kw_only=True)
class LockedBaseImage:
    """A base image as ``build.py lock`` recorded it.

    ``reference`` is the alternative that it had to take.
    """

    name: field_types.Image
    digest: field_types.Digest
    reference: str = ""


@dataclass(frozen=True, kw_only=True)
class LockedArchive:
    """A suite of a package archive as it was when ``build.py lock`` read its ``InRelease``.

    Attributes:
        suite: Its code name, such as ``bookworm-security``.
        date: When the archive signed it, ISO 8601 in UTC.
        sha256: The hash of the file.
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
        name: What an error calls it.
        when: Property to range: the rule speaks about plans for which all of these hold.
        require: Property to range: all of these must hold then; with none the
            combination itself is meant.
        reason: Why.
        instead: What to do.
        severity: Whether a plan that breaks it is refused.
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

    ``architectures`` are those that code is compiled for, as nvcc names them
    without the dot: ``80`` is 8.0.
    """

    name: field_types.Cell
    source: str
    version: field_types.Digits = ""
    wheel_suffix: field_types.WheelSuffix = ""
    minimum_driver: field_types.Digits = ""
    architectures: tuple[field_types.Compute, ...] = ()

    @property
    def neuron(self) -> bool:
        """Whether this cell is AWS Trainium's."""
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
        """Whether a target of this framework, of these sources, this cell and
        this base can have it.
        """
        return (
            sources in self.sources
            and (not self.frameworks or framework in self.frameworks)
            and (not self.bases or base in self.bases)
            and (not self.needs_cuda or bool(cuda.version))
            and (not self.needs_neuron or cuda.neuron)
        )


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

    ``efa_rdma``: its EFA devices can read remote memory.

    ``architecture`` is that of its processors. The fields with a default are for
    ``trainworks-preflight``; see the head of ``images/instances.toml``.
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
    """A family of instance types (``ml.m5``) of which no size has an accelerator."""

    name: str
    source: str


@dataclass(frozen=True, kw_only=True)
class EndOfPatch:
    """A minor version of a framework for which its project makes no more patch releases.

    Attributes:
        framework: Name of its file.
        version: ``MAJOR.MINOR``.
        date: The day from which on.
        successor: The version that took its place; none: the project has ended.
    """

    framework: str
    version: field_types.Minor
    date: field_types.Day
    source: str
    successor: field_types.Minor = ""


@dataclass(frozen=True, kw_only=True)
class AdvisoryService:
    """A service that knows published advisories about Python distributions.

    See ``images/advisories.toml``.
    """

    name: field_types.Name
    url: field_types.Url
    source: str


@dataclass(frozen=True, kw_only=True)
class GeneratedFiles:
    """Files that are in no package's list and are known all the same.

    See ``images/generated-files.toml``.

    Attributes:
        name: Who makes them.
        paths: Absolute patterns; ``*`` stays within a folder, ``**`` goes through all below.
        sha256: The digest of the contents, where they are the same in every
            image; then ``paths`` are plain.
        copy_of: The path of a package's file that these are copies of; likewise.
        leads_to: What these are links to; likewise.
    """

    name: str
    paths: tuple[field_types.PathPattern, ...]
    sha256: field_types.Sha256 = ""
    copy_of: field_types.AbsolutePath = ""
    leads_to: str = ""
    source: str


@dataclass(frozen=True, kw_only=True)
class PrivilegedFiles:
    """Files of one system package that run with other rights, and why.

    See ``images/privileged-files.toml``.
    """

    package: field_types.Package
    paths: tuple[field_types.AbsolutePath, ...]
    source: str


@dataclass(frozen=True, kw_only=True)
class Right:
    """Paths that some users may not read, or that a group may change; see ``images/rights.toml``.

    Attributes:
        name: What these paths are.
        paths: Patterns of paths.
        mode: The most that their mode may be.
        group: The group that they may belong to, besides root's.
        source: Who says so.
    """

    name: field_types.Name
    paths: tuple[field_types.PathPattern, ...]
    mode: field_types.Mode
    source: str
    group: field_types.Group = "root"


@dataclass(frozen=True, kw_only=True)
class Built:
    """One row of ``images/built.toml``: a build that really happened, with every image test green.

    Attributes:
        target: The target's name.
        inputs: ``render.builds.inputs_of`` what was built: the Dockerfile and every file of its
            context. It says nothing of the machine.
        engine: Name of the engine.
        date: The day, ISO 8601, UTC.
        megabytes: Size of the image, uncompressed (1 MB = 1,000,000 bytes).
        seconds: How long the build took, with whatever was cached; 0 where the
            engine had the image already.
    """

    target: str
    inputs: field_types.Inputs
    engine: str
    date: field_types.Day
    megabytes: int
    seconds: int = 0


@dataclass(frozen=True, kw_only=True)
class TargetRow:
    """One cell of the matrix: an image that can be asked for.

    Attributes:
        framework: Name of its file.
        version: The framework's version.
        cuda: Name of a CUDA row.
        base: Name of a base row.
        stack: Name of a stack row.
        versions: Versions of this cell's own (framework, CUDA, cuDNN, NCCL), by component.
        size_budget_megabytes: The most the image may weigh, uncompressed (1 MB = 1,000,000 bytes).
        python: ``MAJOR.MINOR``; default: the base's own.
        image: Name of a base image row; default: the base's own image.
        builder_image: The one that its build stages stand on, where that has
            more (compilers, headers).
        wheel_index: The vendor's package index, used if the host names none.
        limits: Ranges that the lock keeps to (``numpy<1.24``), where a wheel's
            own metadata allow what breaks it.
        unbuilt: What the project's own machine lacks to build the image; ``""``
            where it can be built there.
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
        sha256: The file's hash, as the index publishes it.
        size: The file's size in bytes; 0 where the index does not say it.
        requires: Names of the locked packages that it depends on.
        build: Needed only while building: uv itself, and what compiles the
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
    """A promise in the front matter of a recipe, before versions are filled in:
    ``kind`` and that kind's own keys.

    It holds only where the component ``beside`` is in the image too; without one, always.
    """

    kind: str
    values: Mapping[str, object]
    beside: str = ""


@dataclass(frozen=True, kw_only=True)
class FrontMatter:
    """The keys of a recipe's front matter.

    Attributes:
        environment: Variables of the image that this component sets; ``{version}`` as in checks.
        path: Folders for the front of the image's PATH.
        libraries: Folders for the image's LD_LIBRARY_PATH.
        programs: Programs that the launcher starts, name to absolute path; they
            go into the manifest.
        owns: Patterns of the files that it adds and no package lists; ``*``
            stays within a folder, ``**`` does not.
        removes: Patterns of files of packages that it removes, or replaces, in
            the image; as ``owns``.
        trims: Patterns of files that it removes from wheels, below site-packages: what its
            ``trim-python-packages`` is given; a folder with all that is in it.
        strips: Patterns of libraries of wheels whose symbols it removes, likewise.
        links: Links among its files, path to what each leads to; ``""`` is anything.
        imports: Modules that every job imports where this component is: ``python-bytecode``
            compiles what they load.
        answers: Rules of ``images/compatibility.toml`` that advise what this recipe does; such
            advice is not given.
        check: Promises that hold where the component is installed; ``plan`` looks at their keys.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    path: tuple[field_types.AbsolutePath, ...] = ()
    libraries: tuple[field_types.AbsolutePath, ...] = ()
    programs: Mapping[str, field_types.AbsolutePath] = field(default_factory=dict)
    owns: tuple[field_types.PathPattern, ...] = ()
    removes: tuple[field_types.PathPattern, ...] = ()
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
        text: The whole template.
        checks: The promises of ``check``.
    """

    name: str
    text: str
    checks: tuple[CheckRow, ...] = ()


def checks_of(front: FrontMatter) -> tuple[CheckRow, ...]:
    """Return the promises of a front matter."""
    return tuple(
        CheckRow(
            kind=str(raw.get("kind", "")),
            values={key: raw[key] for key in raw if key not in ("kind", "beside")},
            beside=str(raw.get("beside", "")),
        )
        for raw in front.check
    )


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file that goes into build contexts as it is: its path there, its bytes,
    its permission bits.
    """

    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644


@dataclass(frozen=True, kw_only=True)
class Table:
    """One kind of rows in ``images/``.

    Attributes:
        name: Its file, ``images/NAME.toml``.
        key: What each row begins with: ``[[KEY]]``.
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
    """Return no names: several artifacts of one name and version may differ in
    what they require.
    """
    return ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that was read: rows, recipes, and the files that recipes copy.

    A table of ``images/`` is named in one place, its field below; ``TABLES``
    and everything else follow from it.
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
        """Return since when the framework's version of a target is patched no more.

        None: it still is.
        """
        minor = ".".join(row.version.split(".")[:2])
        return next(
            (end for end in self.ends if (end.framework, end.version) == (row.framework, minor)),
            None,
        )

    @cached_property
    def artifacts_by_name(self) -> Mapping[str, tuple[Artifact, ...]]:
        """Artifacts by name, in the order of their file."""
        found: dict[str, tuple[Artifact, ...]] = {}
        for row in self.artifacts:
            found[row.name] = (*found.get(row.name, ()), row)
        return found

    @cached_property
    def locked_artifact_by_url(self) -> Mapping[str, LockedArtifact]:
        """Locked files by their URL."""
        return {row.url: row for row in self.locked_artifacts}

    @cached_property
    def digest_by_image(self) -> Mapping[str, str]:
        """Digests of base images by name: those that rows themselves say, and those of the lock.

        The lock has an image with a digest of its own only where an alternative had to be taken.
        """
        rows = {row.name: row.digest for row in self.base_images if row.digest}
        return rows | {row.name: row.digest for row in self.locked_base_images}

    def archives_of(self, base: Base) -> tuple[LockedArchive, ...]:
        """Return the states of the suites that a base's packages come from, as
        far as they are locked.
        """
        locked = {row.suite: row for row in self.locked_archives}
        return tuple(locked[suite] for suite in base.archives if suite in locked)

    def digest_of(self, base: Base) -> str:
        """Return the digest of a base's own image, ``""`` where none is known."""
        return self.digest_by_image.get(base.image, base.digest)

    @cached_property
    def alternative_by_image(self) -> Mapping[str, str]:
        """Locked replacements of base images that are gone, by name."""
        return {row.name: row.reference for row in self.locked_base_images if row.reference}

    @cached_property
    def launcher_version(self) -> str:
        """The launcher's version, as its own pyproject.toml says it."""
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
        """Return what a target's programs run on: its base's architecture."""
        return self.base_by_name[row.base].architecture

    def name_of(self, row: TargetRow) -> str:
        """Return a target's name: unique, and the name of its lock.

        ``FRAMEWORK-VERSION-CUDA-pyXY-BASE``, with ``-vendor`` behind it where
        its sources are the vendors.
        """
        vendor = "-vendor" if self.sources_of(row) == "vendor" else ""
        python = self.python_of(row).replace(".", "")
        return f"{row.framework}-{row.version}-{row.cuda}-py{python}-{row.base}{vendor}"


TABLES: Mapping[str, Table] = {
    each.name: each.metadata["table"] for each in fields(Facts) if "table" in each.metadata
}
"""The tables of ``images/``, by field of ``Facts``; every other file there is a framework's."""
