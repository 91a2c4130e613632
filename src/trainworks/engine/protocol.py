"""The interface of a container engine, with the values that it takes and returns.

An engine is one file in this folder and one line in ``trainworks.engine.ENGINES``. One conformance
suite (``tests/engine/conformance``) runs for all of them.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, Protocol

from trainworks.facts.rows import Architecture

Network = Literal["none", "default", "host"]
"""What the steps of a build reach: nothing; what the engine's containers reach.

All that this machine does.
"""

Report = Callable[[str], None]
"""Receives a line of text for the user."""


Isolation = Literal["", "asked", "job"]
"""How a container is closed against this machine and the network, because
another maker's programs run in it.

``""`` is not closed. ``asked`` is closed and read-only. A ``job`` may change its own files and
users: it is an image that says it is one of ours, whose tests do that.
"""


def ignore(_line: str) -> None:
    """Discard a line."""


@dataclass(frozen=True, kw_only=True)
class EngineInformation:
    """The result of a probe.

    Attributes:
        name: ``docker`` or ``buildah``.
        version: The engine's own version text.
        program: The command-line program that builds, as an absolute path.
    """

    name: str
    version: str
    program: str


@dataclass(frozen=True, kw_only=True)
class Secret:
    """Bytes that a build step can read at ``/run/secrets/IDENTIFIER``.

    Not in any layer, history or cache key.
    """

    identifier: str
    content: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """Everything that decides what is built.

    Attributes:
        name: The target's name, for messages.
        context: A folder with the ``Dockerfile`` and every file that it copies or mounts.
        tags: References that the image gets; the first one is printed.
        secrets: Host settings for the steps that mount them.
        arguments: Build arguments: the proxy variables, which engines keep out
            of history and cache keys.
        labels: Labels of the image, in addition to those of its Dockerfile.
        stage_components: Stage name (``FROM ... AS name``) to component, so that a failing step
            names its component.
        no_cache: Build every step again.
        same_layers: Whether the Dockerfile is a ``FROM`` alone: only labels are
            set, and no layer is made.
        architecture: ``amd64`` or ``arm64``: what the image's programs run on;
            its base image has the same.
        network: What all steps reach. With ``none`` they do not see this
            machine's processes either.
    """

    name: str
    context: Path
    tags: tuple[str, ...]
    secrets: tuple[Secret, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    stage_components: Mapping[str, str] = field(default_factory=dict)
    no_cache: bool = False
    same_layers: bool = False
    architecture: Architecture = "amd64"
    network: Network = "default"


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image in the engine's store.

    Attributes:
        reference: A name or id that the engine accepts.
        identifier: ``sha256:...`` of the image's configuration.
        size: Uncompressed size of all layers, in bytes.
        labels: The image's labels.
        environment: The image's environment.
        digests: ``NAME@sha256:...`` of the registries that it was pulled from or pushed to, if the
            engine records them.
        entry_point: The program that a container runs.
        command: Default arguments of the entry point.
        working_folder: The folder that a container starts in.
        user: The user that a container runs as; ``""`` is root.
        stop_signal: The signal that ends a container; ``""`` is SIGTERM.
        volumes: Folders that get a volume of their own in each container, sorted.
        created: Creation time in its configuration (ISO 8601).
        layers: The digests of its layers, uncompressed, lowest first.
        configuration: What it says of a container, by the keys of an image's
            configuration; without empty ones.
        architecture: What its programs run on, as its configuration has it: ``amd64``.
        system: Its operating system, as its configuration has it: ``linux``.
    """

    reference: str
    identifier: str
    size: int
    labels: Mapping[str, str]
    environment: Mapping[str, str]
    digests: tuple[str, ...] = ()
    entry_point: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    working_folder: str = ""
    user: str = ""
    stop_signal: str = ""
    volumes: tuple[str, ...] = ()
    created: str = ""
    layers: tuple[str, ...] = ()
    configuration: Mapping[str, object] = field(default_factory=dict)
    architecture: str = ""
    system: str = ""


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """One step of an image's history: the instruction's text, and its layer's size in bytes."""

    created_by: str
    size: int


class LayerArchive(Protocol):
    """The content of a layer: a ``tarfile.TarFile``, or an engine's own equivalent."""

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """Yield the members, each once."""
        ...

    def extractfile(self, member: tarfile.TarInfo, /) -> IO[bytes] | None:
        """Open a member, before the next one is read; ``None`` if it is not a plain file."""
        ...


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, as a stream: ``archive`` is open, uncompressed, read once and in order."""

    name: str
    archive: LayerArchive


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of this machine that is mounted in a container."""

    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of an image: its command, and the things that the run sees besides the image.

    Attributes:
        command: Arguments of the image's entry point; ``()``: those that the image has.
        mounts: Folders and files of this machine.
        environment: Variables, besides those of the image.
        timeout: Seconds after which the run is killed.
        isolated: Whether the programs are another maker's, as of ``Engine.container``.
    """

    command: tuple[str, ...]
    mounts: tuple[Mount, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 600.0
    isolated: Isolation = ""


@dataclass(frozen=True, kw_only=True)
class Completed:
    """The result of a command: exit status, and stdout and stderr in order of arrival."""

    status: int
    output: str


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """A change in the state of a build step.

    Attributes:
        component: The step's component; ``""`` for the engine's own work (context, export).
        stage: The step's stage; ``""`` where the engine does not name it.
        step: The instruction's text, or the engine's description.
        state: ``started``, ``output`` (``text`` is one line), ``cached``, ``done`` or ``failed``.
        text: A line of output, or the engine's reason for a failed step; else empty.
        seconds: Duration of a done step, if the engine reports it.
    """

    component: str
    step: str
    state: str
    text: str = ""
    seconds: float | None = None
    stage: str = ""


class Progress(Protocol):
    """Receives the events of a build as they happen."""

    def __call__(self, event: StepEvent, /) -> None:
        """Take one event; must not block for long and must not raise."""


class Container(Protocol):
    """A started (or mounted) container of an image, to run commands in."""

    @property
    def identifier(self) -> str:
        """The engine's name for it."""

    def run(self, command: tuple[str, ...], *, timeout: float = 120.0) -> Completed:
        """Run a command with the image's environment; its status is 124 after a time-out."""

    def testinfra_backend(self) -> object:
        """Return the testinfra backend (``testinfra.backend.base.BaseBackend``)
        that reaches this container.
        """


class Engine(Protocol):
    """A program that builds and runs images.

    A container has the image's environment, and ``QEMU_CPU`` where this machine sets it. Every
    method raises ``EngineUnavailableError`` if the engine does not answer. Ctrl-C ends the work in
    progress and leaves no process, container or mount behind.

    Attributes:
        name: Its name in ``ENGINES``.
    """

    name: str

    def probe(self, report: Report = ignore) -> EngineInformation:
        """Ask the engine for its version; ``report`` receives a line if that takes long.

        Changes nothing.
        """

    def inspect(self, reference: str) -> BuiltImage | None:
        """Return the image, or ``None`` if the store has none of that name."""

    def names(self) -> tuple[str, ...]:
        """Return the names of all images in the store, ``REPOSITORY:TAG``, in any order."""

    def load(self, archive: Path) -> None:
        """Load images from a ``docker save`` archive into the store, under the
        names in the archive.

        Raises:
            OutputError: The file cannot be read, or the store's disk is full.
            BuildError: It is not an image archive.
        """

    def pull(self, reference: str, *, timeout: float) -> bool:
        """Pull an image from its registry.

        ``False`` if that fails or takes longer than ``timeout`` seconds.
        """

    def tag(self, reference: str, name: str) -> None:
        """Add a name to an image."""

    def build(self, request: BuildRequest, progress: Progress) -> BuiltImage:
        """Build and tag.

        Raises:
            BuildError: A step failed; has component, instruction and last lines.
            OutputError: The disk is full.
            EngineError: The engine could not start a step, three times.
            EngineUnavailableError: The engine does not answer, or stopped
                answering during the build.
        """

    def history(self, reference: str) -> tuple[HistoryEntry, ...]:
        """Return the steps of an image, first step first."""

    def layers(self, reference: str) -> AbstractContextManager[Iterator[Layer]]:
        """Stream every layer of an image once, in the order of the engine's
        archive, without a copy on disk.
        """

    def archive(self, reference: str) -> AbstractContextManager[IO[bytes]]:
        """Stream an image in ``docker save`` form, without a copy on disk.

        ``engine.archive`` reads it.
        """

    def push_command(
        self, image: BuiltImage, name: str, *, plain: bool
    ) -> AbstractContextManager[tuple[str, ...]]:
        """Give the command that pushes an image as ``HOST/NAME:TAG``, with its
        configuration unchanged.

        Args:
            plain: Whether the registry speaks HTTP without TLS.
        """

    def contents(self, reference: str) -> AbstractContextManager[Iterator[Layer]]:
        """Read the files of an image without starting a program of it; ``engine.tree`` reads them.

        Yields its layers, lowest first, or one that has all that a container sees.
        """

    def isolates(self) -> str:
        """Return why ``isolated`` containers cannot be started here, in the system's words.

        ``""`` if they can.
        """

    def container(
        self, reference: str, *, isolated: Isolation = ""
    ) -> AbstractContextManager[Container]:
        """Start a container that idles (or mount the image) for the time of the ``with`` block.

        Args:
            isolated: Whether its programs are another maker's. They get no network but a loopback
                of their own and no new privileges, and see no process of this machine. Those that
                are ``asked`` have no capability, and all files are read-only but those in
                ``TMPDIR``. Memory, processes, and bytes that are printed have a limit
                (``engine.isolation``).

        Raises:
            BuildError: There is no such image; or ``isolated``, and
                ``isolates`` says why that cannot be.
        """

    def run(self, reference: str, job: Job) -> Completed:
        """Run a job of an image: the image's entry point, with the command as arguments.

        After a time-out the job is killed: its status is 124, and the last line
        of its output names the time-out.
        """

    def remove(self, reference: str) -> None:
        """Remove a name, and the image with its last name."""
