"""Types of a plan, and of the request that it is made for.

All values are frozen and ordered, and a plan prints itself as JSON: the shown plan is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from trainworks.facts.rows import Architecture, Artifact, Base, LockedArchive, LockedPackage, Source
from trainworks.plan.checks import Check
from trainworks.plan.own_artifacts import OwnArtifact

IMAGE_TIME = 1_577_836_800
"""Time of images and their files, in seconds since 1970, where an engine can set it: two cold
builds give one digest.

2020 and not 1970: a wheel or any other ZIP file cannot hold a time before 1980,
and image steps make such files.
"""

Origin = Literal["", "pulled", "bootstrapped"]
"""The origin of a base image: its registry, a pull by digest, or a bootstrap from packages."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a user on the command line.

    ``None`` means the default, see ``plan.select``.

    Attributes:
        framework: For example ``pytorch``.
        cuda: ``cpu`` or for example ``cu121``.
        version: The framework's version; default: the newest that has the other values.
        python: ``MAJOR.MINOR``; default: the oldest, because most wheels are made for that one.
        sources: ``packages`` (default) or ``vendor``.
        architecture: ``amd64`` (default) or ``arm64``.
        with_components: Optional components to add.
        without_components: Default components to leave out.
        artifacts: Wheels of this build, in the place of those of the row.
    """

    framework: str
    cuda: str
    version: str | None = None
    python: str | None = None
    sources: Source = "packages"
    architecture: Architecture = "amd64"
    with_components: tuple[str, ...] = ()
    without_components: tuple[str, ...] = ()
    artifacts: tuple[OwnArtifact, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Target:
    """The cell of the matrix that a request means."""

    name: str
    framework: str
    version: str
    cuda: str
    python: str
    base: str
    sources: Source
    architecture: Architecture


@dataclass(frozen=True, kw_only=True)
class Step:
    """One component of an image.

    Attributes:
        component: Its name, also the name of its recipe and of its build stage.
        version: The promised version; ``""`` if the component has no version.
        summary: A description for people.
        debian: Packages of the distribution (the step ``system`` has those of all steps).
        python: Files of the package index, in the lock's order (those of
            ``builder`` serve all build stages).
        recipe: Its recipe.
        artifacts: The component's own downloads, its main artifact first; hashes are those of the
            row or of the lock.
        build_packages: Packages of the distribution that only building needs
            (``builder`` has those of all steps).
        builds_with: Steps from which the stage of this one copies.
        in_image: Whether any of its files is in the image; else it only serves other stages.
    """

    component: str
    version: str
    summary: str
    debian: tuple[str, ...] = ()
    python: tuple[LockedPackage, ...] = ()
    recipe: str = ""
    artifacts: tuple[Artifact, ...] = ()
    build_packages: tuple[str, ...] = ()
    builds_with: tuple[str, ...] = ()
    in_image: bool = True


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A component that this image lacks, and the cost for its user: ``copies are slower``."""

    component: str
    cost: str


@dataclass(frozen=True, kw_only=True)
class InstanceShape:
    """The hardware of one host of an instance type, for a launcher that cannot read it.

    Attributes:
        gpus: The number of GPUs.
        neuron_cores: The number of Neuron cores.
        efa: Whether the host has EFA.
        efa_rdma: Whether its EFA devices read remote memory.
        efa_devices: The number of EFA devices; 0 if not known.
        network_gigabits: Gigabits per second in each direction; 0 if not known.
    """

    gpus: int
    neuron_cores: int
    efa: bool
    efa_rdma: bool
    efa_devices: int = 0
    network_gigabits: int = 0


@dataclass(frozen=True, kw_only=True)
class FabricVariable:
    """A variable that the launcher sets on hosts with EFA.

    ``rdma``: only on hosts with devices that read remote memory.
    """

    name: str
    value: str
    rdma: bool
    why: str


ENTRY_POINT = ("/opt/trainworks/bin/train",)
"""The program that every image starts."""

COMMAND = ("train",)
"""Arguments of the entry point where a platform gives none."""

WORKING_FOLDER = "/opt/ml/code"
"""Where containers start: the folder of the user's code."""


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """An image, complete: the same plan always renders to the same bytes.

    Attributes:
        target: The cell of the matrix.
        base: The operating system's row.
        image: Reference of the base image, with its digest where that is known.
        origin: ``pulled`` or ``bootstrapped`` for a base image that is named by this project;
            ``""`` for one that is named by its registry.
        archives: The states of the package archive that its system packages are
            to come from, as they are locked.
        builder_image: Reference of the image that build stages stand on; ``""``
            where that is the base image.
        interpreter: Path of the target's Python, which ``/opt/venv`` is made from.
        cuda_home: Folder of the CUDA toolkit; ``""`` where the image has none.
        cuda_architectures: The GPUs that code is compiled for, as nvcc names them: ``80`` is 8.0.
        steps: Components, in the order of their layers.
        environment: Variables of the image.
        labels: Labels of the image.
        tags: References it gets, the one to print first.
        programs: Name -> path: the programs that the launcher starts, and the
            library ``hostname-shim``.
        checks: Every promise, tested after each build.
        missing: Components that an image of this kind could have, and this one lacks.
        instances: Instance types with accelerators that the launcher knows.
        families: Families of instance types without any.
        fabric: Variables for hosts with EFA, for this image's versions.
        minimum_driver: Oldest driver of a host that runs the image's CUDA;
            ``""`` for an image without.
        budget_megabytes: The most the image may weigh, uncompressed (1 MB = 1,000,000 bytes).
        wheel_index: A vendor's own package index, for hosts that name none; ``""`` where the
            default one serves all.
        unlocked: Inputs without a recorded hash or digest: such a plan is shown, and not built.
        first_use: Inputs without a published hash: the recorded one is that of the first download.
        advice: Rules that do not hold and yet refuse nothing, each with reason and advice.
        imports: Modules that every job of this framework imports: their bytecode is in the image.
        protected: Python distributions that a job's requirements must not replace, name to version.
        companions: Distributions that are compiled against a component, and that the image does not
            have: name to component.
        compiled_by: Distributions that compile with a component that the image
            does not have: name to component.
        needs: Distributions that are installed only with a component that the image does not have,
            unless they have a wheel: name to component.
        built_whole: Distributions that are built with the image's torch in
            sight, by a component that it has.
        libraries: Distributions that only other builds of the framework need,
            and that the image does not have.
    """

    target: Target
    base: Base
    image: str
    origin: Origin
    archives: tuple[LockedArchive, ...]
    builder_image: str
    interpreter: str
    cuda_home: str
    cuda_architectures: tuple[str, ...]
    steps: tuple[Step, ...]
    environment: Mapping[str, str]
    labels: Mapping[str, str]
    tags: tuple[str, ...]
    programs: Mapping[str, str]
    checks: tuple[Check, ...]
    missing: tuple[Missing, ...]
    instances: Mapping[str, InstanceShape] = field(repr=False)
    families: tuple[str, ...]
    fabric: tuple[FabricVariable, ...]
    minimum_driver: str
    budget_megabytes: int
    wheel_index: str
    unlocked: tuple[str, ...]
    first_use: tuple[str, ...]
    advice: tuple[str, ...]
    imports: tuple[str, ...]
    protected: Mapping[str, str]
    companions: Mapping[str, str]
    compiled_by: Mapping[str, str]
    needs: Mapping[str, str]
    built_whole: tuple[str, ...]
    libraries: tuple[str, ...]

    def as_json(self) -> str:
        """Return the whole plan as JSON in its own order, indented, with a newline at the end."""
        return json.dumps(asdict(self), indent=2) + "\n"
