"""buildah: builds, runs and inspects images with one program and its own store, without a daemon.

Steps of builds run by an OCI runtime where one works here, else with ``chroot``, which works in
unprivileged CI containers too, and lets steps see the processes of this machine. A build without a
network runs code of others: it needs an OCI runtime. Containers that are not isolated always have
``chroot``.

This module removes two kinds of leftovers: processes that left the build's process group, found by
their root folder, and working containers, found by a marker that only this build's containers have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import resource
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from trainworks.engine import isolation, progress, subprocesses
from trainworks.engine.archive import images_in, layers_of
from trainworks.engine.backend import MAKERS, IdleContainer, image_of
from trainworks.engine.common import PROXIES, BuildCommand, build_arguments, run_build
from trainworks.engine.exec_status import MarkedCommand
from trainworks.engine.failures import DISK_FULL, Failure, explain, free_space
from trainworks.engine.mount_cache_keys import with_content_keys
from trainworks.engine.orphans import OWNER, container_name, owner, remove_left_containers
from trainworks.engine.protocol import (
    BuildRequest,
    BuiltImage,
    Completed,
    EngineInformation,
    HistoryEntry,
    Isolation,
    Job,
    Layer,
    Network,
    Progress,
    Report,
    ignore,
)
from trainworks.engine.retry import retry
from trainworks.engine.subprocesses import Capture
from trainworks.engine.temporary_folders import large_folder, private_folder
from trainworks.errors import BuildError, EngineError, EngineUnavailableError, OutputError
from trainworks.plan.model import IMAGE_TIME

_OLDEST: Final = (1, 24)
"""``RUN --mount=type=cache`` came with this version."""

_HINT: Final = (
    "install it with `make engine` (or `apt-get install buildah`), or use `--engine docker`"
)
_AGAIN: Final = (
    "this is not a fault of the image: run the command again; if it fails again, try `buildah run`"
    " with another image"
)
_SHORT_CALL: Final = 120.0
"""Seconds that a short command of buildah may take."""

_LONG_CALL: Final = 1800.0
"""Seconds that a command may take that reads or writes a whole image."""

_MARKER: Final = "trainworks-build"
"""The name of an empty secret, by whose path the working containers of a build are known."""

_LIMITS: Final = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
_RAISED: Final = 1_048_576
"""buildah raises these limits to this from 1.35 on (containers/buildah pull request 5275)."""

_MOST_PROCESSES: Final = Path("/proc/sys/kernel/pid_max")

# The OCI format drops these instructions without an error. An image that has them is built in
# docker's own format; that configuration holds the name of the working container, so it differs
# from build to build.
_DOCKER_ONLY: Final = re.compile(
    r"^\s*(?:SHELL|HEALTHCHECK|ONBUILD)\s", re.IGNORECASE | re.MULTILINE
)

_RUNTIMES: Final = ("crun", "runc")

_SHOWN_BYTES: Final = 2000
"""How much is kept of an output that was too long."""

_EXITS: Final = re.compile(rb"subprocess exited (?:with status \d+|on [a-z ]+)\n")
"""Lines of buildah's own processes, which may come before the last ones of the command."""


@dataclass(frozen=True, kw_only=True)
class _Store:
    """buildah's storage of images and working containers."""

    root: Path
    driver: str

    def container_file(self, identifier: str) -> Path:
        """Return the file in which buildah describes a working container."""
        return self.root / f"{self.driver}-containers" / identifier / "userdata" / "buildah.json"


@dataclass(frozen=True, kw_only=True)
class _Execution:
    """A command in a working container.

    Attributes:
        command: The program and its arguments.
        timeout: Seconds after which the command is stopped.
        split: Whether stdout and stderr are separate; else both are in stdout.
        isolated: The isolation of the command (``Engine.container``).
        options: Options of ``buildah run``: mounts and variables.
        once: Whether a command that has started is never run again, as a job; if buildah loses the
            end of its output, a line reports that.
    """

    command: tuple[str, ...]
    timeout: float
    split: bool = False
    isolated: Isolation = ""
    options: tuple[str, ...] = ()
    once: bool = False


class BuildahEngine:
    """The ``buildah`` on PATH with the user's own store."""

    name = "buildah"

    def __init__(self, *, options: tuple[str, ...] = ()) -> None:
        """Store the options; nothing is run before the first call.

        Args:
            options: Global options, such as ``("--root", FOLDER, "--runroot",
                FOLDER)`` for a store elsewhere.
        """
        self._options = options
        self._information: EngineInformation | None = None
        self._store: _Store | None = None
        self._has_removed_leftovers = False
        self._runtime = ""
        self._isolation: str | None = None

    def probe(self, report: Report = ignore) -> EngineInformation:  # noqa: ARG002 (there is no daemon to wait for)
        """Find a buildah whose store can be opened; the result is cached."""
        if self._information is None:
            programs = subprocesses.programs("buildah", os.environ.get("PATH"))
            if not programs:
                raise EngineUnavailableError("there is no `buildah` program on PATH", hint=_HINT)
            self._information, self._store = self._examine(programs[0])
        return self._information

    def inspect(self, reference: str) -> BuiltImage | None:
        """Return the image, or ``None`` if the store has none of that name."""
        description = self._describe(reference)
        return None if description is None else self._built(reference, description)

    def names(self) -> tuple[str, ...]:
        """Return the names of all images in the store."""
        # buildah prints null for an empty store, and for an image without a name.
        images = json.loads(retry(self._list_images)) or ()
        names: list[str] = []
        for image in images:
            names += image["names"] or ()
        return tuple(name.removeprefix("localhost/") for name in names)

    def _list_images(self) -> str:
        """Return the list of images, as JSON.

        Raises:
            EngineError: buildah failed, mostly because another program removed an image meanwhile.
        """
        listing = subprocesses.run(self._argv("images", "--json"), timeout=_SHORT_CALL)
        if listing.status != 0:
            raise self._fault("listing images", listing.words)
        return listing.output.decode(errors="replace")

    def load(self, archive: Path) -> None:
        """Load images from a ``docker save`` archive."""
        for number, names in enumerate(images_in(archive)):
            # By position: an archive of several images is refused otherwise.
            # buildah then leaves the names out.
            loaded = self._run_command(
                f"loading {archive.name}",
                "pull",
                "--quiet",
                f"docker-archive:{archive.resolve()}:@{number}",
            )
            if names:
                self._run_command(f"tagging {names[0]}", "tag", loaded.split()[-1], *names)

    def pull(self, reference: str, *, timeout: float) -> bool:
        """Pull an image from its registry.

        ``False`` if that fails or takes longer than ``timeout`` seconds.
        """
        with self._temporary_files() as (_, environment):
            argv = self._argv("pull", "--quiet", "--policy", "always", "--retry", "0", reference)
            return subprocesses.run(argv, timeout=timeout, environment=environment).status == 0

    def tag(self, reference: str, name: str) -> None:
        """Add a name to an image; raises ``BuildError`` if there is no such image."""
        self._run_command(f"tagging {name}", "tag", reference, name)

    def build(self, request: BuildRequest, progress: Progress) -> BuiltImage:
        """Build, and tag."""
        self.probe()
        with self._temporary_files() as (folder, environment):
            marker = folder / _MARKER
            marker.write_bytes(b"")
            identifier_file = folder / "image-id"
            dockerfile = folder / "Dockerfile"
            dockerfile.write_text(self._dockerfile(request.context))
            argv = ["build", *self._steps_isolation(request.network)]
            argv += ["--layers", "--force-rm", "--pull=false", "--file", str(dockerfile)]
            argv += ["--format", _format(request.context), "--timestamp", str(IMAGE_TIME)]
            argv += ["--iidfile", str(identifier_file)]
            argv += _own_limits()
            # buildah writes the secret into the description of every working container: the
            # marker distinguishes the containers of this build from others.
            argv += ["--secret", f"id={_MARKER},src={marker}"]
            argv += build_arguments(request, folder)
            # Proxies go in by the environment, not as build arguments: buildah hands them to the
            # steps and, unlike arguments, keeps them out of the cache's keys. Proxies of the host
            # that the request does not name must not go in.
            for name in PROXIES:
                environment.pop(name, None)
            environment.update(request.arguments)
            for name in request.arguments:
                if name not in PROXIES:
                    argv += ["--build-arg", name]
            argv.append(str(request.context))
            try:
                retry(lambda: self._run_build(self._argv(*argv), environment, request, progress))
                image = identifier_file.read_text().strip()
            finally:
                self._sweep(marker)
        built = self.inspect(image)
        if built is None:
            raise BuildError(f"buildah built {image}, and does not have it")
        return dataclasses.replace(built, reference=request.tags[0] if request.tags else image)

    def history(self, reference: str) -> tuple[HistoryEntry, ...]:
        """Return the steps of an image, first step first.

        Raises ``BuildError`` if there is no such image.
        """
        description = self._find_image(reference)
        sizes = iter(_layer_sizes(description))
        steps = []
        for entry in description["OCIv1"].get("history") or ():
            # Only a step that made a layer has a size among those of the layers.
            size = 0
            if not entry.get("empty_layer"):
                size = next(sizes, 0)
            steps.append(HistoryEntry(created_by=str(entry.get("created_by", "")), size=size))
        return tuple(steps)

    @contextlib.contextmanager
    def layers(self, reference: str) -> Iterator[Iterator[Layer]]:
        """Stream every layer of an image, lowest first, without a copy on disk."""
        with self.archive(reference) as stream:
            yield layers_of(stream)

    @contextlib.contextmanager
    def archive(self, reference: str) -> Iterator[IO[bytes]]:
        """Stream an image in ``docker save`` form.

        Raises ``BuildError`` if there is no such image.
        """
        identifier = self._find_image(reference)["FromImageID"]
        with self._temporary_files() as (_, environment):
            argv = self._argv(
                "push", "--quiet", "--disable-compression", identifier, "docker-archive:/dev/stdout"
            )
            with subprocesses.piped(argv, environment, _SHORT_CALL) as (stream, failed):
                yield stream
                if words := failed():
                    raise self._fault("reading an image's layers", words)

    @contextlib.contextmanager
    def push_command(
        self, image: BuiltImage, name: str, *, plain: bool
    ) -> Iterator[tuple[str, ...]]:
        """Give the command that pushes an image under a name in a registry."""
        tls = ("--tls-verify=false",) if plain else ()
        yield self._argv("push", *tls, image.identifier.removeprefix("sha256:"), f"docker://{name}")

    @contextlib.contextmanager
    def contents(self, reference: str) -> Iterator[Iterator[Layer]]:
        """Stream every layer, lowest first, as ``layers`` does."""
        with self.layers(reference) as layers:
            yield layers

    def isolates(self) -> str:
        """Return why no OCI runtime can make an isolated container, or ``""``.

        Each runtime on PATH is tried once; the result is cached.
        """
        if self._isolation is None:
            failures = []
            for name in _RUNTIMES:
                for runtime in subprocesses.programs(name, os.environ.get("PATH")):
                    failure = self._try_runtime(runtime)
                    if not failure:
                        self._runtime, self._isolation = runtime, ""
                        return ""
                    failures.append(f"{runtime}: {failure}")
            self._isolation = "; ".join(failures)
            if not failures:
                self._isolation = f"there is no {' or '.join(_RUNTIMES)} on PATH"
        return self._isolation

    def _try_runtime(self, runtime: str) -> str:
        """Run a program of this machine in an empty isolated container.

        Return why that failed, or ``""``.
        """
        name = container_name()
        argv = ["run"]
        # The container is empty: the shell and its libraries come from this machine.
        for program_folder in map(Path, ("/usr", "/bin", "/lib", "/lib64")):
            if program_folder.exists():
                source = program_folder.resolve()
                argv.append(f"--volume={source}:{program_folder}:ro")
        try:
            with self._temporary_files() as (folder, environment):
                with subprocesses.uninterrupted():
                    creation = subprocesses.run(
                        self._argv("from", "--quiet", *_own_limits(), "--name", name, "scratch"),
                        timeout=_SHORT_CALL,
                        environment=environment,
                    )
                if creation.status != 0:
                    return creation.words
                argv += _isolation_options(runtime, folder, "asked")
                argv += [name, "--", "/bin/sh", "-c", ":"]
                result = subprocesses.run(
                    self._argv(*argv),
                    timeout=_SHORT_CALL,
                    environment=environment,
                    capture=Capture(merge=True),
                )
            if result.status == 0:
                return ""
            reason = result.words or f"exit status {result.status}"
            return reason.splitlines()[0]
        finally:
            with subprocesses.uninterrupted():
                subprocesses.run(self._argv("rm", name), timeout=_SHORT_CALL)

    def _steps_isolation(self, network: Network) -> tuple[str, ...]:
        """Return the options that isolate a build's steps from this machine.

        Without a runtime that isolates, steps see the processes and the network of this machine.
        buildah has no network of its own without further programs: steps that may have a network
        have this machine's.

        Raises:
            EngineUnavailableError: The build is without a network, and no runtime isolates.
        """
        obstacle = self.isolates()
        if obstacle and network == "none":
            raise EngineUnavailableError(
                f"buildah needs {' or '.join(_RUNTIMES)} for steps that run code of others without"
                f" a network: {obstacle}",
                hint="`apt-get install crun`, or use `--engine docker`",
            )
        step_network = "none" if network == "none" else "host"
        if obstacle:
            return ("--isolation=chroot", "--network", step_network)
        return ("--isolation=oci", f"--runtime={self._runtime}", "--network", step_network)

    def _check_isolation(self) -> None:
        """Raise ``BuildError`` if no runtime can isolate a container."""
        obstacle = self.isolates()
        if obstacle:
            raise BuildError(
                f"buildah cannot isolate programs of another maker here: {obstacle}",
                hint="install crun or runc (`make engines` does), or use `--engine docker`",
            )

    @contextlib.contextmanager
    def container(self, reference: str, *, isolated: Isolation = "") -> Iterator[IdleContainer]:
        """Make a working container for the time of the ``with`` block.

        Each command runs separately in it.
        """
        if isolated:
            self._check_isolation()
        with self._working_container(reference) as (identifier, _):
            yield IdleContainer(
                identifier, functools.partial(self.execute, identifier, isolated=isolated)
            )

    def run(self, reference: str, job: Job) -> Completed:
        """Run a job of an image.

        ``buildah run`` ignores the entry point, so it is added to the command.
        """
        if job.isolated:
            self._check_isolation()
        options: list[str] = []
        for mount in job.mounts:
            mode = ":ro" if mount.read_only else ""
            options += ["--volume", f"{mount.source.resolve()}:{mount.target}{mode}"]
        for name, value in job.environment.items():
            options += ["--env", f"{name}={value}"]
        with self._working_container(reference) as (identifier, description):
            configuration = description["OCIv1"].get("config") or {}
            entry_point = configuration.get("Entrypoint") or ()
            arguments = job.command or configuration.get("Cmd") or ()
            full_command = (*entry_point, *arguments)
            if not full_command:
                raise BuildError(
                    f"{reference} has neither an entry point nor a command, and none was given"
                )
            execution = _Execution(
                command=full_command,
                timeout=job.timeout,
                isolated=job.isolated,
                options=tuple(options),
                once=True,
            )
            status, output, _ = self._execute(identifier, execution)
        return Completed(status=status, output=output.decode(errors="replace"))

    def remove(self, reference: str) -> None:
        """Remove a name, and the image with its last name; an unknown name is not an error."""
        if self._describe(reference) is None:
            return
        self._run_command(f"removing {reference}", "rmi", reference)

    def execute(
        self,
        container: str,
        command: tuple[str, ...],
        *,
        timeout: float,
        split: bool = False,
        isolated: Isolation = "",
    ) -> tuple[int, bytes, bytes]:
        """Run a command in a working container and return status, stdout and stderr.

        Args:
            container: The name of the container.
            command: The program and its arguments.
            timeout: Seconds.
            split: Whether stdout and stderr are separate; else both are in stdout.
            isolated: The isolation of the command (``Engine.container``).

        Raises:
            EngineError: buildah could not start the command, or lost its output, three times.
        """
        execution = _Execution(command=command, timeout=timeout, split=split, isolated=isolated)
        return self._execute(container, execution)

    def _execute(self, container: str, execution: _Execution) -> tuple[int, bytes, bytes]:
        """Run a command in a container, again if buildah fails; return status, stdout, stderr."""
        return retry(lambda: self._execute_once(container, execution))

    def _execute_once(self, container: str, execution: _Execution) -> tuple[int, bytes, bytes]:
        """Run a command in a container once, and return status, stdout and stderr.

        Raises:
            EngineError: buildah could not start the command; or it lost the end of the output, and
                the command may run again.
        """
        marked = MarkedCommand(command=execution.command, job=execution.once)
        limit = isolation.OUTPUT_BYTES if execution.isolated else 0
        with self._temporary_files() as (folder, environment):
            for name in PROXIES:
                environment.pop(name, None)
            options = ["--isolation=chroot"]
            if execution.isolated:
                options = _isolation_options(self._runtime, folder, execution.isolated)
            for name, value in subprocesses.emulation().items():
                options.append(f"--env={name}={value}")
            options += execution.options
            finished = subprocesses.run(
                self._argv("run", *options, container, "--", *marked.argv),
                timeout=execution.timeout,
                environment=environment,
                capture=Capture(merge=not execution.split, limit=limit),
                strays=_with_mounts_of,
            )
        if finished.over(limit):
            output = finished.output[-_SHOWN_BYTES:] + subprocesses.stopped_after_bytes(limit)
            return subprocesses.TOO_MUCH, output, b""

        result = marked.read(finished, split=execution.split)
        note = b""
        if finished.timed_out:
            note = f"\n(stopped after {execution.timeout:g} seconds)\n".encode()
        elif not result.is_complete:
            has_printed = bool(finished.words)
            has_failed_to_start = result.status is None and finished.status != 0 and has_printed
            if not execution.once or has_failed_to_start:
                reason = ""
                if result.status is None:
                    reason = _first_line(finished)
                reason = reason or "the end of what it printed was lost"
                raise self._fault(f"running {execution.command[0]} in a container", reason)
            note = b"\n(buildah lost the end of this output)\n"
        output = _EXITS.sub(b"", result.output)
        errors = _EXITS.sub(b"", result.errors)
        if execution.split:
            errors += note
        else:
            output += note
        status = result.status
        if status is None:
            status = finished.status
        return status, output, errors

    def _run_build(
        self,
        argv: tuple[str, ...],
        environment: Mapping[str, str],
        request: BuildRequest,
        receive: Progress,
    ) -> None:
        """Run a build once, and hand its events on; raises the error of a failure (``explain``)."""
        command = BuildCommand(
            argv=argv, environment=environment, hint=_HINT, strays=_with_mounts_of
        )
        built = run_build(command, progress.BuildahParser(request.stage_components), receive)
        if built.status == 0:
            return
        last_line = built.lines[-1] if built.lines else ""
        failure = Failure(
            target=request.name,
            engine=self.name,
            status=built.status,
            step=built.log.broken_off(last_line),
            lines=built.lines,
        )
        raise explain(failure, alive=str, space=self._space)

    def _examine(self, program: str) -> tuple[EngineInformation, _Store]:
        """Ask a program for its version and its store.

        Raises:
            EngineUnavailableError: It does not run, is too old, or cannot open its store.
        """
        try:
            version_call = subprocesses.run((program, "--version"), timeout=_SHORT_CALL)
            info_call = subprocesses.run((program, *self._options, "info"), timeout=_SHORT_CALL)
        except OSError as error:
            raise EngineUnavailableError(
                f"cannot run {program}: {error.strerror}", hint=_HINT
            ) from error
        text = version_call.output.decode(errors="replace")
        version = re.search(r"version (?P<text>(?P<major>\d+)\.(?P<minor>\d+)\S*)", text)
        if version is None:
            raise EngineUnavailableError(
                f"{program} prints no version: {version_call.words}", hint=_HINT
            )
        if (int(version["major"]), int(version["minor"])) < _OLDEST:
            oldest = ".".join(map(str, _OLDEST))
            raise EngineUnavailableError(
                f"{program} is version {version['text']}, and cache mounts need {oldest}",
                hint=_HINT,
            )
        if info_call.status != 0:
            raise EngineUnavailableError(
                f"{program} cannot open its store: {info_call.words}", hint=_HINT
            )
        store = json.loads(info_call.output)["store"]
        return (
            EngineInformation(name=self.name, version=version["text"], program=program),
            _Store(root=Path(store["GraphRoot"]), driver=store["GraphDriverName"]),
        )

    def _dockerfile(self, context: Path) -> str:
        """Return the Dockerfile with the mounted files' hashes, which buildah's cache keys lack."""

        def identify(reference: str) -> str:
            description = self._describe(reference)
            if description is None:
                return ""
            return str(description["FromImageID"])

        try:
            return with_content_keys(
                (context / "Dockerfile").read_text(), context, identify=identify
            )
        except OSError as error:
            raise OutputError(
                f"cannot read {error.filename or context}: {error.strerror or error}"
            ) from error

    def _argv(self, *arguments: str) -> tuple[str, ...]:
        """Return the words of a call of buildah, with its global options."""
        return (self.probe().program, *self._options, *arguments)

    def _run_command(self, doing: str, *arguments: str) -> str:
        """Run a command of buildah, and return its output.

        Args:
            doing: The work, for a message: ``tagging NAME``.
            arguments: The arguments of buildah.

        Raises:
            OutputError: The disk is full.
            BuildError: buildah failed, in its own words.
        """
        with self._temporary_files() as (_, environment):
            result = subprocesses.run(
                self._argv(*arguments), timeout=_LONG_CALL, environment=environment
            )
        if result.status != 0:
            fault = self._fault(doing, result.words)
            if isinstance(fault, OutputError):
                raise fault
            raise BuildError(fault.message)
        return result.output.decode(errors="replace")

    def _fault(self, doing: str, words: str) -> EngineError | OutputError:
        """Return the error for a failure of buildah itself, not of the command that it ran."""
        last = words.strip().rpartition("\n")[2].removeprefix("Error: ")
        if DISK_FULL.search(words):
            return OutputError(
                f"the disk is full: buildah failed {doing} ({last}). {self._space()}"
            )
        return EngineError(f"buildah failed {doing}: {last}", hint=_AGAIN)

    def _describe(self, reference: str) -> dict[str, Any] | None:
        """Return buildah's description of an image; ``None`` if the store has none of that name.

        Raises:
            BuildError: buildah cannot open its store.
        """
        result = subprocesses.run(
            self._argv("inspect", "--type", "image", reference), timeout=_SHORT_CALL
        )
        if result.status == 0:
            description: dict[str, Any] = json.loads(result.output)
            return description
        # If buildah opens its store, the store works and lacks this image. `buildah images` would
        # fail where another build removes an image meanwhile.
        self._run_command(f"looking up {reference}", "info")
        return None

    def _find_image(self, reference: str) -> dict[str, Any]:
        """Return buildah's description of an image; raises ``BuildError`` without such an image."""
        description = self._describe(reference)
        if description is None:
            raise BuildError(
                f"buildah has no image {reference}", hint="`buildah images` lists them"
            )
        return description

    def _built(self, reference: str, description: dict[str, Any]) -> BuiltImage:
        """Return an image from buildah's description of it."""
        image = description["OCIv1"]
        # HEALTHCHECK, ONBUILD and SHELL are in Docker's form alone.
        dockers = (description.get("Docker") or {}).get("config") or {}
        more = {key: image.get(name) for key, name in MAKERS.items()}
        return image_of(
            {**dockers, **(image.get("config") or {}), **more},
            reference=reference,
            identifier=f"sha256:{description['FromImageID'].removeprefix('sha256:')}",
            size=sum(_layer_sizes(description)),
            created=str(image.get("created") or ""),
            architecture=str(image.get("architecture") or ""),
            system=str(image.get("os") or ""),
            layers=tuple((image.get("rootfs") or {}).get("diff_ids") or ()),
        )

    def _space(self) -> str:
        """Return sentences about the free space of the image store and of the temporary folder."""
        self.probe()
        assert self._store is not None
        sentences = []
        for folder in dict.fromkeys((str(self._store.root), large_folder())):
            with contextlib.suppress(OSError):
                usage = shutil.disk_usage(folder)
                sentences.append(free_space(folder, free=usage.free, total=usage.total))
        return " ".join(dict.fromkeys(sentences))

    @contextlib.contextmanager
    def _temporary_files(self) -> Iterator[tuple[Path, dict[str, str]]]:
        """Give buildah a private folder for temporary files, which is removed if buildah is killed.

        Cache mounts are below the temporary folder too, in ``buildah-cache``. All builds share
        them by a link.
        """
        parent = large_folder()
        with private_folder(parent) as folder:
            for name in ("buildah-cache", f"buildah-cache-{os.getuid()}"):
                shared = Path(parent) / name
                shared.mkdir(mode=0o700, exist_ok=True)
                (folder / name).symlink_to(shared)
            yield folder, {**subprocesses.own_environment(), OWNER: owner(), "TMPDIR": str(folder)}

    @contextlib.contextmanager
    def _working_container(self, reference: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Make a working container with a random name, and remove the container at the end.

        A container that was made during an interruption is removed too.
        """
        description = self._find_image(reference)
        self._remove_leftovers()
        name = container_name()
        try:
            with subprocesses.uninterrupted():
                retry(lambda: self._make_container(reference, name, description["FromImageID"]))
            yield name, description
        finally:
            with subprocesses.uninterrupted():
                subprocesses.run(self._argv("rm", name), timeout=_SHORT_CALL)

    def _remove_leftovers(self) -> None:
        """Remove the working containers of builders that were killed; once.

        Containers that cannot be listed stay.
        """
        if self._has_removed_leftovers:
            return
        self._has_removed_leftovers = True
        listed = subprocesses.run(self._argv("containers", "--json"), timeout=_SHORT_CALL)
        names = []
        if listed.status == 0:
            # buildah prints null, or nothing, if there is no container.
            containers = json.loads(listed.output or b"null") or ()
            names = [container["containername"] for container in containers]
        remove_left_containers(
            names, lambda name: subprocesses.run(self._argv("rm", name), timeout=_SHORT_CALL)
        )

    def _make_container(self, reference: str, name: str, image: str) -> None:
        """Make a working container of an image; raises ``EngineError`` if that fails."""
        argv = self._argv("from", "--pull=false", "--quiet", *_own_limits(), "--name", name, image)
        with self._temporary_files() as (_, environment):
            result = subprocesses.run(argv, timeout=_LONG_CALL, environment=environment)
        if result.status != 0:
            raise self._fault(f"making a container of {reference}", result.words)

    def _sweep(self, marker: Path) -> None:
        """Remove the working containers that this build left, and no others."""
        with subprocesses.uninterrupted():
            assert self._store is not None
            listed = subprocesses.run(
                self._argv("containers", "--quiet", "--notruncate"), timeout=_SHORT_CALL
            )
            for identifier in listed.output.decode().split():
                try:
                    description = self._store.container_file(identifier).read_text()
                except OSError:
                    # Another build has removed its container.
                    continue
                if str(marker) in description:
                    subprocesses.run(self._argv("rm", identifier), timeout=_SHORT_CALL)


def _first_line(execution: subprocesses.Finished) -> str:
    """Return the first line that buildah printed, without its note about an exit status."""
    text = _EXITS.sub(b"", execution.errors or execution.output)
    for line in text.decode(errors="replace").splitlines():
        if line:
            return line
    return ""


def _isolation_options(runtime: str, folder: Path, isolated: Isolation) -> list[str]:
    """Return the options that run a command isolated (``engine.isolation``).

    They name a script in a private folder as the runtime.
    """
    wrapper = folder / "runtime"
    words = (sys.executable, "-I", isolation.__file__, isolated, runtime)
    # A container that is made by another command than "create" would not be isolated, so other
    # commands are refused.
    wrapper.write_text(
        "#!/bin/sh\n"
        'case " $* " in\n'
        f'*" create "*) exec {shlex.join(words)} "$@" ;;\n'
        '*" start "* | *" state "* | *" kill "* | *" delete "*)'
        f' exec {shlex.quote(runtime)} "$@" ;;\n'
        '*) echo "not known: $*" >&2; exit 125 ;;\n'
        "esac\n"
    )
    wrapper.chmod(0o700)
    options = ["--isolation=oci", f"--runtime={wrapper}", "--network=none"]
    return [*options, *isolation.environment_options(isolated)]


def _own_limits() -> list[str]:
    """Return options that keep this process's limits, for example ``--ulimit=nofile=1024:1024``.

    Root in a container may not raise them (CAP_SYS_RESOURCE).
    """
    hard_limits = {}
    for name, number in _LIMITS.items():
        _, limit = resource.getrlimit(number)
        hard_limits[name] = _RAISED if limit == resource.RLIM_INFINITY else limit
    with contextlib.suppress(OSError):
        # buildah itself lowers its limit of processes to this.
        hard_limits["nproc"] = min(hard_limits["nproc"], int(_MOST_PROCESSES.read_text()))
    options = []
    for name, limit in hard_limits.items():
        if limit < _RAISED:
            options.append(f"--ulimit={name}={limit}:{limit}")
    return options


def _format(context: Path) -> str:
    """Return the image format: OCI, which is reproducible, or docker's if an instruction needs it.

    The result is ``oci`` or ``docker``.
    """
    try:
        text = (context / "Dockerfile").read_text()
    except OSError as error:
        raise OutputError(f"cannot read {context / 'Dockerfile'}: {error.strerror}") from error
    return "docker" if _DOCKER_ONLY.search(text) else "oci"


def _layer_sizes(description: dict[str, Any]) -> list[int]:
    """Return the size of each layer, lowest first. buildah stores layers uncompressed."""
    manifest = json.loads(description["Manifest"] or "{}")
    return [int(layer["size"]) for layer in manifest.get("layers") or ()]


def _with_mounts_of(child: int) -> Iterator[int]:
    """Yield the processes of a build's steps: they share a namespace of mounts with buildah's.

    Their session does not matter. Call this while buildah still runs: later a process that a step
    left behind has another parent, and nothing leads to the process.
    """
    parents: dict[int, int] = {}
    namespaces: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            process = int(folder.name)
            # The name of the program, in brackets, may have spaces and brackets itself.
            _, _, after_name = (folder / "stat").read_text().rpartition(")")
            parents[process] = int(after_name.split()[1])
            namespaces[process] = str((folder / "ns" / "mnt").readlink())

    family = {child}
    children = family
    while children:
        children = {process for process, parent in parents.items() if parent in family} - family
        family |= children

    step_namespaces = {namespaces[process] for process in family if process in namespaces}
    step_namespaces.discard(str(Path("/proc/self/ns/mnt").readlink()))
    for process, namespace in namespaces.items():
        if namespace in step_namespaces:
            yield process
