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
from trainworks.engine.common import PROXIES, build_arguments, run_build
from trainworks.engine.exec_status import Marked
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
    Layer,
    Mount,
    Network,
    Progress,
    Report,
    ignore,
)
from trainworks.engine.retry import again
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
_LONG_CALL: Final = 1800.0
_MARKER: Final = "trainworks-build"

_LIMITS: Final = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
_RAISED: Final = 1_048_576
"""What buildah raises these limits to from 1.35 on (containers/buildah pull request 5275)."""

_MOST_PROCESSES: Final = Path("/proc/sys/kernel/pid_max")

# These are what the OCI format drops without an error; an image that has them is built in docker's
# own format, whose configuration holds the name of the working container and hence differs from
# build to build.
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
    """Where buildah keeps things."""

    root: Path
    driver: str

    def container_file(self, identifier: str) -> Path:
        """Return the file in which buildah describes a working container."""
        return self.root / f"{self.driver}-containers" / identifier / "userdata" / "buildah.json"


@dataclass(frozen=True, kw_only=True)
class _Running:
    """How a command runs in a working container; fields as the arguments of ``execute``."""

    options: tuple[str, ...]
    timeout: float
    split: bool
    job: bool
    isolated: Isolation


class BuildahEngine:
    """The ``buildah`` on PATH with the user's own store."""

    name = "buildah"

    def __init__(self, *, options: tuple[str, ...] = ()) -> None:
        """Remember how to call it; nothing is run before the first call.

        Args:
            options: Global options, such as ``("--root", FOLDER, "--runroot",
                FOLDER)`` for a store elsewhere.
        """
        self._options = options
        self._information: EngineInformation | None = None
        self._store: _Store | None = None
        self._swept = False
        self._runtime = ""
        self._isolation: str | None = None

    def probe(self, report: Report = ignore) -> EngineInformation:  # noqa: ARG002 (there is no daemon to wait for)
        """Find a buildah whose store can be opened; the result is cached."""
        if self._information is None:
            found = subprocesses.programs("buildah", os.environ.get("PATH"))
            if not found:
                raise EngineUnavailableError("there is no `buildah` program on PATH", hint=_HINT)
            self._information, self._store = self._examine(found[0])
        return self._information

    def inspect(self, reference: str) -> BuiltImage | None:
        """Return the image, or ``None`` if the store has none of that name."""
        description = self._describe(reference)
        return None if description is None else self._built(reference, description)

    def names(self) -> tuple[str, ...]:
        """Return the names of all images in the store."""
        found = json.loads(self._do("listing images", "images", "--json"))
        return tuple(
            name.removeprefix("localhost/")
            for image in found or ()
            for name in image["names"] or ()
        )

    def load(self, archive: Path) -> None:
        """Load images from a ``docker save`` archive."""
        for number, names in enumerate(images_in(archive)):
            # By position: an archive of several images is refused otherwise.
            # buildah then leaves the names out.
            loaded = self._do(
                f"loading {archive.name}",
                "pull",
                "--quiet",
                f"docker-archive:{archive.resolve()}:@{number}",
            )
            if names:
                self._do(f"tagging {names[0]}", "tag", loaded.split()[-1], *names)

    def pull(self, reference: str, *, timeout: float) -> bool:
        """Pull an image from its registry.

        ``False`` if that fails or takes longer than ``timeout`` seconds.
        """
        with self._temporary_files() as (_, environment):
            argv = self._argv("pull", "--quiet", "--policy", "always", "--retry", "0", reference)
            return subprocesses.run(argv, timeout=timeout, environment=environment).status == 0

    def tag(self, reference: str, name: str) -> None:
        """Add a name to an image; raises ``BuildError`` if there is no such image."""
        self._do(f"tagging {name}", "tag", reference, name)

    def build(self, request: BuildRequest, progress: Progress) -> BuiltImage:
        """Build, and tag."""
        self.probe()
        with self._temporary_files() as (folder, environment):
            marker = folder / _MARKER
            marker.write_bytes(b"")
            identifier_file = folder / "image-id"
            dockerfile = folder / "Dockerfile"
            dockerfile.write_text(self._keyed(request.context))
            argv = [
                *(
                    "build",
                    *self._steps_isolation(request.network),
                    "--layers",
                    "--force-rm",
                    "--pull=false",
                ),
                *(
                    "--file",
                    str(dockerfile),
                    "--format",
                    _format(request.context),
                    "--timestamp",
                    str(IMAGE_TIME),
                ),
                *("--iidfile", str(identifier_file)),
                *_own_limits(),
                # Written by buildah into every working container's description:
                # it distinguishes ours from others'.
                *("--secret", f"id={_MARKER},src={marker}"),
            ]
            argv += build_arguments(request, folder)
            # Proxies go in by the environment, not as build arguments: buildah hands them to the
            # steps and, unlike arguments, keeps them out of the cache's keys. The host's own must
            # not go in unasked.
            for name in PROXIES:
                environment.pop(name, None)
            environment.update(request.arguments)
            for name in request.arguments:
                if name not in PROXIES:
                    argv += ["--build-arg", name]
            argv.append(str(request.context))
            try:
                again(lambda: self._run_build(self._argv(*argv), environment, request, progress))
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
        description = self._existing(reference)
        sizes = iter(_layer_sizes(description))
        return tuple(
            HistoryEntry(
                created_by=str(entry.get("created_by", "")),
                size=0 if entry.get("empty_layer") else next(sizes, 0),
            )
            for entry in description["OCIv1"].get("history") or ()
        )

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
        identifier = self._existing(reference)["FromImageID"]
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
        """Say why no OCI runtime can make an isolated container here.

        The answer of a try is cached.
        """
        if self._isolation is None:
            tried = []
            for name in _RUNTIMES:
                for runtime in subprocesses.programs(name, os.environ.get("PATH")):
                    words = self._try_runtime(runtime)
                    if not words:
                        self._runtime, self._isolation = runtime, ""
                        return ""
                    tried.append(f"{runtime}: {words}")
            self._isolation = "; ".join(tried) or f"there is no {' or '.join(_RUNTIMES)} on PATH"
        return self._isolation

    def _try_runtime(self, runtime: str) -> str:
        """Run a program of this machine in an empty isolated container.

        Return why that failed, or ``""``.
        """
        folders = [
            folder for folder in map(Path, ("/usr", "/bin", "/lib", "/lib64")) if folder.exists()
        ]
        name = container_name()
        argv = ["run", *(f"--volume={folder.resolve()}:{folder}:ro" for folder in folders)]
        try:
            with self._temporary_files() as (folder, environment):
                with subprocesses.uninterrupted():
                    made = subprocesses.run(
                        self._argv("from", "--quiet", *_own_limits(), "--name", name, "scratch"),
                        timeout=_SHORT_CALL,
                        environment=environment,
                    )
                if made.status != 0:
                    return made.words
                argv += [*_isolating(runtime, folder, "asked"), name, "--", "/bin/sh", "-c", ":"]
                done = subprocesses.run(
                    self._argv(*argv), timeout=_SHORT_CALL, environment=environment, merge=True
                )
            return (
                ""
                if done.status == 0
                else (done.words or f"exit status {done.status}").splitlines()[0]
            )
        finally:
            with subprocesses.uninterrupted():
                subprocesses.run(self._argv("rm", name), timeout=_SHORT_CALL)

    def _steps_isolation(self, network: Network) -> tuple[str, ...]:
        """Return the options that decide what a build's steps see of this machine.

        Without a runtime that isolates, steps see the processes and the network of this machine.
        buildah has no network of its own without further programs: steps that may have one have
        this machine's.

        Raises:
            EngineUnavailableError: A build without a network is asked for, and
                there is no such runtime.
        """
        words = self.isolates()
        if words and network == "none":
            raise EngineUnavailableError(
                f"buildah needs {' or '.join(_RUNTIMES)} for steps that run code of others without"
                f" a network: {words}",
                hint="`apt-get install crun`, or use `--engine docker`",
            )
        isolation_ = (
            ("--isolation=chroot",) if words else ("--isolation=oci", f"--runtime={self._runtime}")
        )
        return (*isolation_, "--network", "none" if network == "none" else "host")

    def _must_isolate(self) -> None:
        if words := self.isolates():
            raise BuildError(
                f"buildah cannot isolate programs of another maker here: {words}",
                hint="install crun or runc (`make engine` does), or use `--engine docker`",
            )

    @contextlib.contextmanager
    def container(self, reference: str, *, isolated: Isolation = "") -> Iterator[IdleContainer]:
        """Make a working container for the time of the ``with`` block.

        Each command runs separately in it.
        """
        if isolated:
            self._must_isolate()
        with self._working_container(reference) as (identifier, _):
            yield IdleContainer(
                identifier, functools.partial(self.execute, identifier, isolated=isolated)
            )

    def run(
        self,
        reference: str,
        command: tuple[str, ...],
        *,
        mounts: tuple[Mount, ...] = (),
        environment: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        isolated: Isolation = "",
    ) -> Completed:
        """Run the image like a job.

        ``buildah run`` ignores the entry point, so it is added to the command.
        """
        if isolated:
            self._must_isolate()
        options: list[str] = []
        for mount in mounts:
            options += [
                "--volume",
                f"{mount.source.resolve()}:{mount.target}" + (":ro" if mount.read_only else ""),
            ]
        for name, value in (environment or {}).items():
            options += ["--env", f"{name}={value}"]
        with self._working_container(reference) as (identifier, description):
            configuration = description["OCIv1"].get("config") or {}
            whole = (
                *(configuration.get("Entrypoint") or ()),
                *(command or configuration.get("Cmd") or ()),
            )
            if not whole:
                raise BuildError(
                    f"{reference} has neither an entry point nor a command, and none was given"
                )
            status, output, _ = self.execute(
                identifier,
                whole,
                options=tuple(options),
                timeout=timeout,
                job=True,
                isolated=isolated,
            )
        return Completed(status=status, output=output.decode(errors="replace"))

    def remove(self, reference: str) -> None:
        """Remove a name, and the image with its last name; an unknown name is not an error."""
        if self._describe(reference) is None:
            return
        self._do(f"removing {reference}", "rmi", reference)

    def execute(
        self,
        container: str,
        command: tuple[str, ...],
        *,
        options: tuple[str, ...] = (),
        timeout: float,
        split: bool = False,
        job: bool = False,
        isolated: Isolation = "",
    ) -> tuple[int, bytes, bytes]:
        """Run a command in a working container and return status, stdout and
        stderr (merged into one unless split).

        A ``job`` is never run twice; if buildah loses the end of its output, a line reports that.

        Raises:
            EngineError: buildah could not start the command, or lost its output, three times.
        """
        how = _Running(options=options, timeout=timeout, split=split, job=job, isolated=isolated)
        return again(lambda: self._execute(container, command, how))

    def _execute(
        self, container: str, command: tuple[str, ...], how: _Running
    ) -> tuple[int, bytes, bytes]:
        marked = Marked(command=command, job=how.job)
        limit = isolation.OUTPUT_BYTES if how.isolated else 0
        with self._temporary_files() as (folder, environment):
            for name in PROXIES:
                environment.pop(name, None)
            emulation = [
                f"--env={name}={value}" for name, value in subprocesses.emulation().items()
            ]
            closed = ["--isolation=chroot"]
            if how.isolated:
                closed = _isolating(self._runtime, folder, how.isolated)
            options = (*closed, *emulation, *how.options)
            done = subprocesses.run(
                self._argv("run", *options, container, "--", *marked.argv),
                timeout=how.timeout,
                environment=environment,
                merge=not how.split,
                strays=_with_mounts_of,
                limit=limit,
            )
        if done.over(limit):
            output = done.output[-_SHOWN_BYTES:] + subprocesses.stopped_after_bytes(limit)
            return subprocesses.TOO_MUCH, output, b""

        told = marked.read(done, split=how.split)
        note = b""
        if done.timed_out:
            note = f"\n(stopped after {how.timeout:g} seconds)\n".encode()
        elif not told.whole:
            has_failed_to_start = told.status is None and done.status != 0 and bool(done.words)
            if not how.job or has_failed_to_start:
                reason = "" if told.status is not None else _first_line(done)
                reason = reason or "the end of what it printed was lost"
                raise self._fault(f"running {command[0]} in a container", reason)
            note = b"\n(buildah lost the end of this output)\n"
        output = _EXITS.sub(b"", told.output)
        errors = _EXITS.sub(b"", told.errors)
        if how.split:
            errors += note
        else:
            output += note
        return done.status if told.status is None else told.status, output, errors

    def _run_build(
        self,
        argv: tuple[str, ...],
        environment: Mapping[str, str],
        request: BuildRequest,
        receive: Progress,
    ) -> None:
        built = run_build(
            argv,
            progress.BuildahParser(request.stage_components),
            receive,
            environment=environment,
            hint=_HINT,
            strays=_with_mounts_of,
        )
        if built.status != 0:
            failure = Failure(
                target=request.name,
                engine=self.name,
                status=built.status,
                step=built.log.broken_off(built.lines[-1] if built.lines else ""),
                lines=built.lines,
            )
            raise explain(failure, alive=str, space=self._space)

    def _examine(self, program: str) -> tuple[EngineInformation, _Store]:
        try:
            said = subprocesses.run((program, "--version"), timeout=_SHORT_CALL)
            opened = subprocesses.run((program, *self._options, "info"), timeout=_SHORT_CALL)
        except OSError as error:
            raise EngineUnavailableError(
                f"cannot run {program}: {error.strerror}", hint=_HINT
            ) from error
        text = said.output.decode(errors="replace")
        found = re.search(r"version (?P<version>(?P<major>\d+)\.(?P<minor>\d+)\S*)", text)
        if found is None:
            raise EngineUnavailableError(f"{program} prints no version: {said.words}", hint=_HINT)
        if (int(found["major"]), int(found["minor"])) < _OLDEST:
            oldest = ".".join(map(str, _OLDEST))
            raise EngineUnavailableError(
                f"{program} is version {found['version']}, and cache mounts need {oldest}",
                hint=_HINT,
            )
        if opened.status != 0:
            raise EngineUnavailableError(
                f"{program} cannot open its store: {opened.words}", hint=_HINT
            )
        store = json.loads(opened.output)["store"]
        return (
            EngineInformation(name=self.name, version=found["version"], program=program),
            _Store(root=Path(store["GraphRoot"]), driver=store["GraphDriverName"]),
        )

    def _keyed(self, context: Path) -> str:
        """Return the Dockerfile with the mounted files' hashes, which buildah's cache keys lack."""

        def identify(reference: str) -> str:
            description = self._describe(reference)
            return "" if description is None else str(description["FromImageID"])

        try:
            return with_content_keys(
                (context / "Dockerfile").read_text(), context, identify=identify
            )
        except OSError as error:
            raise OutputError(
                f"cannot read {error.filename or context}: {error.strerror or error}"
            ) from error

    def _argv(self, *arguments: str) -> tuple[str, ...]:
        return (self.probe().program, *self._options, *arguments)

    def _do(self, doing: str, *arguments: str) -> str:
        """Run a short command and return its output; raises its text as an error if it fails."""
        with self._temporary_files() as (_, environment):
            done = subprocesses.run(
                self._argv(*arguments), timeout=_LONG_CALL, environment=environment
            )
        if done.status != 0:
            fault = self._fault(doing, done.words)
            raise fault if isinstance(fault, OutputError) else BuildError(fault.message)
        return done.output.decode(errors="replace")

    def _fault(self, doing: str, words: str) -> EngineError | OutputError:
        """Return the error for a failure of buildah itself, not of the command that it ran."""
        last = words.strip().rpartition("\n")[2].removeprefix("Error: ")
        if DISK_FULL.search(words):
            return OutputError(
                f"the disk is full: buildah failed {doing} ({last}). {self._space()}"
            )
        return EngineError(f"buildah failed {doing}: {last}", hint=_AGAIN)

    def _describe(self, reference: str) -> dict[str, Any] | None:
        done = subprocesses.run(
            self._argv("inspect", "--type", "image", reference), timeout=_SHORT_CALL
        )
        if done.status == 0:
            description: dict[str, Any] = json.loads(done.output)
            return description
        # A store whose images can be listed has no such one.
        self._do(f"looking up {reference}", "images", "--quiet")
        return None

    def _existing(self, reference: str) -> dict[str, Any]:
        description = self._describe(reference)
        if description is None:
            raise BuildError(
                f"buildah has no image {reference}", hint="`buildah images` lists them"
            )
        return description

    def _built(self, reference: str, description: dict[str, Any]) -> BuiltImage:
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
        """Give buildah a private folder for temporary files, so that none is
        left when it is killed.

        Cache mounts are below the temporary folder too, in ``buildah-cache``.
        All builds share them by a link.
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
        """Make a working container with a random name and remove it at the end,
        even if making it was interrupted.
        """
        description = self._existing(reference)
        self._remove_left()
        name = container_name()
        try:
            with subprocesses.uninterrupted():
                again(lambda: self._make_container(reference, name, description["FromImageID"]))
            yield name, description
        finally:
            with subprocesses.uninterrupted():
                subprocesses.run(self._argv("rm", name), timeout=_SHORT_CALL)

    def _remove_left(self) -> None:
        """Remove the working containers of builders that were killed; once.

        What cannot be listed is left.
        """
        if self._swept:
            return
        self._swept = True
        listed = subprocesses.run(self._argv("containers", "--json"), timeout=_SHORT_CALL)
        remove_left_containers(
            (
                [each["containername"] for each in json.loads(listed.output or b"null") or ()]
                if listed.status == 0
                else ()
            ),
            lambda name: subprocesses.run(self._argv("rm", name), timeout=_SHORT_CALL),
        )

    def _make_container(self, reference: str, name: str, image: str) -> None:
        argv = self._argv("from", "--pull=false", "--quiet", *_own_limits(), "--name", name, image)
        with self._temporary_files() as (_, environment):
            done = subprocesses.run(argv, timeout=_LONG_CALL, environment=environment)
        if done.status != 0:
            raise self._fault(f"making a container of {reference}", done.words)

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


def _first_line(done: subprocesses.Finished) -> str:
    """Return the first line that buildah printed, without its note about an exit status."""
    text = _EXITS.sub(b"", done.errors or done.output)
    for line in text.decode(errors="replace").splitlines():
        if line:
            return line
    return ""


def _isolating(runtime: str, folder: Path, isolated: Isolation) -> list[str]:
    """Return the options that run a command isolated (``engine.isolation``), by
    way of a file in a private folder.
    """
    wrapper = folder / "runtime"
    words = (sys.executable, "-I", isolation.__file__, isolated, runtime)
    # What makes a container in another way than buildah does would not be closed: it is refused.
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
    """Return options that keep this process's limits: root in a container may
    not raise them (CAP_SYS_RESOURCE).
    """
    found = {name: resource.getrlimit(limit)[1] for name, limit in _LIMITS.items()}
    hard = {
        name: _RAISED if each == resource.RLIM_INFINITY else each for name, each in found.items()
    }
    with contextlib.suppress(OSError):
        # buildah itself lowers its limit of processes to this.
        hard["nproc"] = min(hard["nproc"], int(_MOST_PROCESSES.read_text()))
    return [f"--ulimit={name}={each}:{each}" for name, each in hard.items() if each < _RAISED]


def _format(context: Path) -> str:
    """Return the image format: OCI, which is reproducible, unless an
    instruction needs docker's format.
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
    """Yield the processes that share a namespace of mounts with what buildah started: a step's,
    whatever their session.

    To be asked while buildah still runs: what a step left behind has another parent then, and
    nothing leads to it.
    """
    parents: dict[int, int] = {}
    namespaces: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name of the program, in brackets, may have spaces and brackets itself.
            parents[int(process.name)] = int(
                (process / "stat").read_text().rpartition(")")[2].split()[1]
            )
            namespaces[int(process.name)] = str((process / "ns" / "mnt").readlink())
    family = {child}
    while more := {each for each, parent in parents.items() if parent in family} - family:
        family |= more
    own = str(Path("/proc/self/ns/mnt").readlink())
    theirs = {namespaces[each] for each in family if each in namespaces} - {own}
    yield from (each for each, namespace in namespaces.items() if namespace in theirs)
