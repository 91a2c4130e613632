"""What a container engine must be able to do, and the values that go in and come out.

One engine is one file beside this one plus one line in ``trainworks.engine.ENGINES``; one conformance suite
(``tests/engine``) runs over all of them.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol


@dataclass(frozen=True, kw_only=True)
class EngineInformation:
    """What a probe found.

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
    """Bytes that a build step may read at ``/run/secrets/IDENTIFIER`` and that reach no layer, no history, no key."""

    identifier: str
    content: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """One build, complete: nothing else decides what is built.

    Attributes:
        name: The target's name, for messages.
        context: A folder with the ``Dockerfile`` and every file that it copies or mounts.
        tags: References that the image gets, first the one to print.
        secrets: Host settings for the steps that ask for them.
        arguments: Build arguments; only the proxy variables, which the engines keep out of history and cache keys.
        labels: Labels of the image besides those of its Dockerfile.
        stage_components: Stage name (``FROM ... AS name``) to component, so that a failing step names its component.
        no_cache: Build every step again.
    """

    name: str
    context: Path
    tags: tuple[str, ...]
    secrets: tuple[Secret, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    stage_components: Mapping[str, str] = field(default_factory=dict)
    no_cache: bool = False


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image in the engine's store.

    Attributes:
        reference: A name or id that the engine accepts.
        identifier: ``sha256:...`` of the image's configuration.
        size: Uncompressed size of all layers, in bytes.
        labels: The image's labels.
        environment: The image's environment.
        digests: ``NAME@sha256:...`` by which registries know it, where the engine says; none of an image made here.
        entry_point: What a container runs.
        command: The default arguments of that.
        created: When it was made, as its configuration says (ISO 8601).
    """

    reference: str
    identifier: str
    size: int
    labels: Mapping[str, str]
    environment: Mapping[str, str]
    digests: tuple[str, ...] = ()
    entry_point: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    created: str = ""


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """One step of an image's history: the instruction's text, and its layer's size in bytes."""

    created_by: str
    size: int


class LayerArchive(Protocol):
    """What is in a layer: a ``tarfile.TarFile``, or what an engine has instead."""

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """Yield the members, each once."""
        ...

    def extractfile(self, member: tarfile.TarInfo, /) -> IO[bytes] | None:
        """Open a member before the next one is asked for; nothing where it is no plain file."""
        ...


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, as a stream: ``archive`` is open, uncompressed, read once and in order."""

    name: str
    archive: LayerArchive


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of this machine seen in a container."""

    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A command's end: its exit status and everything it printed (stdout and stderr, in order of arrival)."""

    status: int
    output: str


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """Something happened to a build step.

    Attributes:
        component: Whose step it is; ``""`` for the engine's own work (context, export).
        step: The instruction's text, or the engine's own words.
        state: ``started``, ``output`` (``text`` is one line), ``cached``, ``done`` or ``failed``.
        text: A line of output, or the engine's words on why a step failed; empty otherwise.
        seconds: How long a done step took, where the engine says.
    """

    component: str
    step: str
    state: str
    text: str = ""
    seconds: float | None = None


class Progress(Protocol):
    """Receives the events of a build as they happen."""

    def __call__(self, event: StepEvent, /) -> None:
        """Take one event; must not block for long and must not raise."""


class Container(Protocol):
    """A started (or mounted) container of an image, for asking it questions."""

    @property
    def identifier(self) -> str:
        """The engine's name for it."""

    def run(self, command: tuple[str, ...], *, timeout: float = 120.0) -> Completed:
        """Run a command inside with the image's environment; 124 is the status of one that did not end in time."""

    def testinfra_backend(self) -> object:
        """Return the testinfra backend (``testinfra.backend.base.BaseBackend``) that reaches this container."""


class Engine(Protocol):
    """A program that builds and runs images.

    Every method raises ``EngineUnavailableError`` when the engine does not answer, and otherwise what its docstring
    says. Ctrl-C ends the work in progress and leaves no process, container or mount behind.
    """

    name: str

    def probe(self) -> EngineInformation:
        """Ask the engine for its version; cheap, changes nothing."""

    def inspect(self, reference: str) -> BuiltImage | None:
        """Return the image, or ``None`` where the store has none of that name."""

    def load(self, archive: Path) -> None:
        """Take images from a ``docker save`` archive into the store, under the names inside."""

    def pull(self, reference: str, *, timeout: float) -> bool:
        """Fetch an image from its registry; ``False`` where that is not possible within ``timeout`` seconds."""

    def tag(self, reference: str, name: str) -> None:
        """Give an image one more name."""

    def build(self, request: BuildRequest, progress: Progress) -> BuiltImage:
        """Build and tag; raises ``BuildError`` that names component, command and last lines of the failing step."""

    def history(self, reference: str) -> tuple[HistoryEntry, ...]:
        """Return the steps of an image, first step first."""

    def layers(self, reference: str) -> AbstractContextManager[Iterator[Layer]]:
        """Stream every layer of an image once, in the order of the engine's archive, with no copy on our side."""

    def archive(self, reference: str) -> AbstractContextManager[IO[bytes]]:
        """Stream an image in ``docker save`` form, with no copy on our side; ``engine.archive`` reads it."""

    def container(self, reference: str) -> AbstractContextManager[Container]:
        """Start a container that idles (or mount the image) for the time of the ``with`` block."""

    def run(
        self,
        reference: str,
        command: tuple[str, ...],
        *,
        mounts: tuple[Mount, ...] = (),
        environment: Mapping[str, str] | None = None,
        timeout: float = 600.0,
    ) -> Completed:
        """Run the image as a job would be run: its entry point, then ``command`` as arguments.

        A job that does not end in time is killed; its status is 124, and the last line of its output says so.
        """

    def remove(self, reference: str) -> None:
        """Remove one name (and the image, when it was its last)."""
