"""The shapes of the rows in ``images/``: frozen values, read by ``facts.load`` and used by everything after it.

Every row carries its ``source``: where the fact comes from. Names of fields are the keys of the TOML files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Source = Literal["packages", "vendor"]
"""Where a target's parts come from: Debian and Python packages only, or the vendors' own installers."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """A base image.

    Attributes:
        name: What a target calls it, for example ``debian12``.
        suite: The distribution's code name, for bootstrapping.
        version: The distribution's version.
        glibc: The newest C library level that wheels are chosen for; at most its own.
        python: Its Python, ``MAJOR.MINOR``.
        image: The reference to pull where a registry answers.
        digest: ``sha256:...`` of that image; without one it is not pulled but bootstrapped.
    """

    name: str
    suite: str
    version: str
    glibc: str
    python: str
    image: str
    source: str
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """One value of ``--cuda``; ``cpu`` has neither version nor wheels nor driver."""

    name: str
    source: str
    version: str = ""
    wheel_suffix: str = ""
    minimum_driver: str = ""


@dataclass(frozen=True, kw_only=True)
class Component:
    """A part of an image; see the head of ``images/components.toml`` for the meaning of each key."""

    name: str
    summary: str
    source: str
    debian: tuple[str, ...] = ()
    python: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    needs_cuda: bool = False
    required: bool = False
    default: bool = False
    vendor: bool = False
    without: str = ""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A named, tested set of component versions."""

    name: str
    sources: Source
    source: str
    components: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Instance:
    """What one host of an instance type has; ``efa_rdma``: its EFA devices can write to remote memory.

    What has a default is for the launcher's preflight; see the head of ``images/instances.toml``.
    """

    name: str
    gpus: int
    neuron_cores: int
    efa: bool
    efa_rdma: bool
    source: str
    memory_gib: int = 0
    smp_loader_workers: bool = True
    smddp: bool = False
    smdistributed_by_torchrun_only: bool = False


@dataclass(frozen=True, kw_only=True)
class FabricVariable:
    """A variable that hosts with EFA need; see the head of ``images/fabric.toml``."""

    name: str
    value: str
    why: str
    source: str
    rdma: bool = False
    component: str = ""
    since: str = ""
    below: str = ""
    unknown: bool = False

    def holds(self, versions: Mapping[str, str]) -> bool:
        """Whether an image with these component versions needs it."""
        if not self.component:
            return True
        if self.component not in versions:
            return self.unknown
        version = _numbers(versions[self.component])
        return (not self.since or version >= _numbers(self.since)) and (
            not self.below or version < _numbers(self.below)
        )


def _numbers(version: str) -> tuple[int, ...]:
    """``1.22.0amzn4.0`` is (1, 22, 0): what a vendor adds behind a version does not make it another one."""
    numbers = []
    for part in version.split("."):
        digits = re.match(r"\d+", part)
        if not digits:
            break
        numbers.append(int(digits.group()))
        if digits.group() != part:
            break
    return tuple(numbers)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of instance types (``ml.m5``) of which no size has an accelerator."""

    name: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A file system whose throughput grows with its size.

    Attributes:
        name: What a person calls it.
        step_gib: Capacity of one step.
        step_megabytes_per_second: What each step adds to the throughput, 10**6 bytes per second.
        increment_gib: Above one step, capacities are multiples of this.
    """

    name: str
    step_gib: int
    step_megabytes_per_second: int
    increment_gib: int
    source: str


@dataclass(frozen=True, kw_only=True)
class GeneratedFiles:
    """Files that are in no package's list and are known all the same; see ``images/generated-files.toml``.

    Attributes:
        name: Who makes them.
        paths: Absolute patterns; ``*`` stays within a folder, ``**`` goes through all below.
    """

    name: str
    paths: tuple[str, ...]
    source: str


@dataclass(frozen=True, kw_only=True)
class PrivilegedFiles:
    """Files of one system package that run with other rights, and why; see ``images/privileged-files.toml``."""

    package: str
    paths: tuple[str, ...]
    source: str


@dataclass(frozen=True, kw_only=True)
class Built:
    """A build that really happened, all image tests green: when, with what, how long, how big."""

    date: str
    engine: str
    seconds: int
    megabytes: int


@dataclass(frozen=True, kw_only=True)
class TargetRow:
    """One cell of the matrix: an image that can be asked for.

    Attributes:
        framework: Name of the file it stands in.
        version: The framework's version.
        cuda: Name of a CUDA row.
        base: Name of a base row.
        stack: Name of a stack row.
        versions: Versions of this cell's own (framework, CUDA, cuDNN, NCCL), by component.
        size_budget_megabytes: The most the image may weigh, uncompressed (1 MB = 1,000,000 bytes).
        wheel_index: A vendor's own index, used when the host names none of its own.
        built: The last real build, absent where there was none.
    """

    framework: str
    version: str
    cuda: str
    base: str
    stack: str
    versions: Mapping[str, str]
    size_budget_megabytes: int
    source: str
    wheel_index: str = ""
    built: Built | None = None


@dataclass(frozen=True, kw_only=True)
class LockedPackage:
    """One file of the package index, pinned.

    Attributes:
        name: Normalised distribution name.
        version: Exact version.
        file: File name (a wheel, or a source distribution that its stage compiles).
        sha256: The file's hash, as the index publishes it.
        requires: Names of the locked packages that it depends on.
        build: Needed only while building: uv itself, and what compiles the source distributions of this lock.
    """

    name: str
    version: str
    file: str
    sha256: str
    requires: tuple[str, ...] = ()
    build: bool = False


@dataclass(frozen=True, kw_only=True)
class Lock:
    """Every Python file of one target: nothing else is installed."""

    target: str
    packages: tuple[LockedPackage, ...]


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """A promise in the front matter of a recipe, before versions are filled in: ``kind`` and that kind's own keys.

    It holds only where the component ``beside`` is in the image too; without one, always.
    """

    kind: str
    values: Mapping[str, object]
    beside: str = ""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """``templates/components/NAME.j2``: front matter and the text of two Jinja blocks.

    Attributes:
        name: The component.
        text: The whole template.
        environment: Variables of the image that this component sets.
        programs: Programs that the launcher starts, name to absolute path; they go into the manifest.
        checks: Promises that hold where the component is installed.
        owns: Patterns of the files that it adds and no package lists; ``*`` stays within a folder, ``**`` does not.
    """

    name: str
    text: str
    environment: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[CheckRow, ...] = ()
    owns: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file that goes into build contexts as it is: its path there, its bytes, its permission bits."""

    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that was read: rows, recipes, and the files that recipes copy."""

    bases: tuple[Base, ...]
    cudas: tuple[Cuda, ...]
    components: tuple[Component, ...]
    stacks: tuple[Stack, ...]
    instances: tuple[Instance, ...]
    families: tuple[Family, ...]
    storages: tuple[Storage, ...]
    fabric: tuple[FabricVariable, ...]
    generated_files: tuple[GeneratedFiles, ...]
    privileged_files: tuple[PrivilegedFiles, ...]
    targets: tuple[TargetRow, ...]
    recipes: Mapping[str, Recipe]
    templates: Mapping[str, str]
    files: tuple[SourceFile, ...]
    locks: Mapping[str, Lock]

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
    def component_by_name(self) -> Mapping[str, Component]:
        """Components by name, in the order of their layers."""
        return {row.name: row for row in self.components}

    def sources_of(self, row: TargetRow) -> Source:
        """Return the sources of a target: those of its stack."""
        return self.stack_by_name[row.stack].sources

    def name_of(self, row: TargetRow) -> str:
        """Return a target's name, ``FRAMEWORK-VERSION-CUDA-pyXY-BASE``: unique, and the name of its lock."""
        python = self.base_by_name[row.base].python.replace(".", "")
        return f"{row.framework}-{row.version}-{row.cuda}-py{python}-{row.base}"
