"""Docker: builds and containers run the command line, the Docker SDK answers what is one call.

The SDK has no BuildKit (docker/docker-py#2230), which has the cache mounts, secrets and parallel
stages. It is imported on first use: it costs 0.14 s, and planning needs no engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import socket
import tarfile
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

from trainworks.engine import isolation, progress, subprocesses
from trainworks.engine.archive import ImageConfiguration, layers_of, write_archive
from trainworks.engine.backend import MAKERS, IdleContainer, image_of
from trainworks.engine.common import PROXIES, BuildCommand, build_arguments, run_build
from trainworks.engine.exec_status import MarkedCommand
from trainworks.engine.failures import DISK_FULL, Failure, explain, free_space
from trainworks.engine.orphans import OWNER, PREFIX, container_name, owner, remove_left_containers
from trainworks.engine.overlay_layers import LayerFolder, readable
from trainworks.engine.protocol import (
    BuildRequest,
    BuiltImage,
    Completed,
    EngineInformation,
    HistoryEntry,
    Isolation,
    Job,
    Layer,
    Progress,
    Report,
    ignore,
)
from trainworks.engine.retry import retry
from trainworks.engine.subprocesses import SEPARATE, Capture
from trainworks.engine.temporary_folders import large_folder, private_folder
from trainworks.errors import BuildError, EngineError, EngineUnavailableError, OutputError
from trainworks.plan.model import IMAGE_TIME

if TYPE_CHECKING:
    import docker
    from docker.models.images import Image as SdkImage

_NATIVE_BUILDKIT_ENDS: Final = 23
"""From this version on, BuildKit needs the buildx plugin.

Before, ``DOCKER_BUILDKIT=1`` is enough.
"""

_DATED_BUILDKIT: Final = 26
"""From this version on, Docker's BuildKit is 0.13 or newer."""

_ARCHIVE: Final = "image.tar"

_HINT: Final = (
    "start the docker daemon, or install and start an engine with `make engine`,"
    " or use `--engine buildah`"
)
_AGAIN: Final = (
    "this is not a fault of the image: run the command again; if it fails again, read the daemon's"
    " log (`journalctl -u docker`)"
)
_SHORT_CALL: Final = 60.0
"""Seconds that a short command of docker may take."""

_LONG_CALL: Final = 1800.0
"""Seconds that a command may take that reads or writes a whole image."""

_FIRST_ANSWER: Final = 10.0
"""Seconds that a daemon on this machine has to answer the first request.

After a fifth of them a line reports it.
"""

_DENIED: Final = (
    "your user may not use this daemon: join its group (`sudo usermod --append --groups docker"
    " $USER`) and log in again"
)

_SHOWN_BYTES: Final = 2000
"""How much is kept of an output that was too long."""

_EMPTY_IMAGE: Final = "trainworks.invalid/empty"
"""The name of an image without a file, which says whether skopeo reads from the daemon."""


class DockerEngine:
    """A Docker daemon, at the address of ``DOCKER_HOST`` or of the current docker context."""

    name = "docker"

    def __init__(self, *, host: str | None = None, first_answer: float = _FIRST_ANSWER) -> None:
        """Store the daemon's address; nothing is sent before the first call.

        Args:
            host: An address such as ``unix:///run/docker.sock``; default: that
                of the user's docker.
            first_answer: Seconds that a daemon on this machine has to answer the first request.
        """
        self._requested_host = host
        self._first_answer = first_answer
        self._information: EngineInformation | None = None
        self._containerd: bool | None = None
        self._connection: docker.DockerClient | None = None
        self._has_removed_leftovers = False

    def probe(self, report: Report = ignore) -> EngineInformation:
        """Find a daemon that answers and a client whose BuildKit works; the result is cached."""
        if self._information is None:
            with self._translated_errors("answering"), self._report_waiting(report):
                version = self._client().version()
            components = version.get("Components") or [{}]
            if "podman" in str(components[0].get("Name", "")).lower():
                raise EngineUnavailableError(
                    f"{self._host()} is podman, which has docker's interface without BuildKit",
                    hint="use `--engine buildah`",
                )
            self._information = EngineInformation(
                name=self.name, version=str(version["Version"]), program=self._program()
            )
        return self._information

    def inspect(self, reference: str) -> BuiltImage | None:
        """Return the image, or ``None`` if the store has none of that name."""
        image = self._image(reference)
        if image is None:
            return None
        built = _built(reference, image)
        # Asking the daemon for its store takes as long as a whole plan. Docker's older store
        # shows itself by its driver.
        driver = (image.attrs.get("GraphDriver") or {}).get("Name")
        if driver == "overlay2" or not self._in_containerd():
            return built
        # containerd's store gives the size of the compressed layers, so the sizes of the steps
        # are added up.
        with self._translated_errors("reading an image's history"):
            steps = cast("list[dict[str, Any]]", image.history())
        size = sum(int(step["Size"]) for step in steps)
        # containerd's store has a digest for every name, also of an image that no registry has:
        # no build could start from that.
        return dataclasses.replace(built, size=size, digests=())

    def names(self) -> tuple[str, ...]:
        """Return the names of all images in the store."""
        with self._translated_errors("listing images"):
            # Not the SDK's objects: it asks the daemon about each image again.
            images = cast("list[dict[str, Any]]", self._client().api.images())
        names: list[str] = []
        for image in images:
            # An image without a name has the tag "<none>:<none>".
            names += [name for name in image["RepoTags"] or () if "<none>" not in name]
        return tuple(names)

    def load(self, archive: Path) -> None:
        """Load images from a ``docker save`` archive."""
        try:
            archive.open("rb").close()
        except OSError as error:
            raise OutputError(f"cannot read {archive}: {error.strerror}") from error
        result = self._call("load", "--quiet", "--input", str(archive), timeout=_LONG_CALL)
        if result.status:
            fault = self._fault(f"loading {archive.name}", result.words)
            if isinstance(fault, EngineError):
                raise BuildError(fault.message)
            raise fault

    def pull(self, reference: str, *, timeout: float) -> bool:
        """Pull an image from its registry.

        ``False`` if that fails or takes longer than ``timeout`` seconds.

        The command line pulls, because only that knows the user's credential helpers, and because
        killing the command ends the transfer.
        """
        return self._call("pull", "--quiet", reference, timeout=timeout).status == 0

    def tag(self, reference: str, name: str) -> None:
        """Add a name to an image; raises ``BuildError`` if there is no such image."""
        image = self._find_image(reference)
        with self._translated_errors(f"tagging {name}"):
            # The daemon splits the tag from the name itself.
            image.tag(name)

    def build(self, request: BuildRequest, progress: Progress) -> BuiltImage:
        """Build with BuildKit, and tag."""
        # An archive without a name could not be found again in the store.
        constant = bool(request.tags) and self.sets_times()
        former = self.inspect(request.tags[0]) if request.same_layers else None
        dated = constant and not request.same_layers
        with private_folder(large_folder() if dated else None) as folder:
            identifier_file = folder / "image-id"
            argv = [
                self.probe().program,
                "build",
                "--progress=plain",
                "--network",
                request.network,
                "--iidfile",
                str(identifier_file),
            ]
            argv += build_arguments(request, folder)
            argv += _argument_options(request)
            if constant:
                argv += ["--build-arg", f"SOURCE_DATE_EPOCH={IMAGE_TIME}"]
            if dated:
                # On its way into the daemon's own store BuildKit refuses to set the times of files.
                argv += ["--output", f"type=docker,dest={folder / _ARCHIVE},rewrite-timestamp=true"]
            argv.append(str(request.context))
            retry(lambda: self._run_build(tuple(argv), request, progress))
            # In the store of containerd an image is not known by the digest of its configuration.
            image = request.tags[0] if constant else identifier_file.read_text().strip()
            if dated:
                self.load(folder / _ARCHIVE)
        built = self.inspect(image)
        if built is None:
            raise BuildError(f"docker built {image}, and does not have it")
        if former is not None:
            self._remove_nameless(former.identifier)
        return dataclasses.replace(built, reference=request.tags[0] if request.tags else image)

    def _remove_nameless(self, identifier: str) -> None:
        """Remove an image that has lost its last name and that no container uses.

        The store lists such an image all the same.
        """
        from docker.errors import APIError

        with self._translated_errors(f"removing {identifier}"), contextlib.suppress(APIError):
            if not self._client().images.get(identifier).tags:
                self._client().images.remove(identifier)

    def sets_times(self) -> bool:
        """Return whether builds are reproducible: times of files and of the image are a constant.

        That needs BuildKit 0.13 or newer, which is in Docker 26, and the image store of
        containerd. Docker's own store cannot do it.
        """
        major, _, _ = self.probe().version.partition(".")
        return int(major) >= _DATED_BUILDKIT and self._in_containerd()

    def _in_containerd(self) -> bool:
        """Return whether containerd's store has the images; the result is cached."""
        if self._containerd is None:
            with self._translated_errors("answering"):
                store = dict(self._client().info().get("DriverStatus") or ())
            self._containerd = store.get("driver-type") == "io.containerd.snapshotter.v1"
        return self._containerd

    def history(self, reference: str) -> tuple[HistoryEntry, ...]:
        """Return the steps of an image, first step first.

        Raises ``BuildError`` if there is no such image.
        """
        image = self._find_image(reference)
        with self._translated_errors("reading an image's history"):
            entries = cast("list[dict[str, Any]]", image.history())
        # Docker gives the newest step first.
        steps = []
        for entry in reversed(entries):
            step = HistoryEntry(created_by=str(entry["CreatedBy"]), size=int(entry["Size"]))
            steps.append(step)
        return tuple(steps)

    @contextlib.contextmanager
    def layers(self, reference: str) -> Iterator[Iterator[Layer]]:
        """Read every layer of an image from the daemon's storage, or else from ``docker save``.

        ``docker save`` copies every byte, about 100 MB per second, in the order of its archive.
        """
        folders = layer_folders(self._find_image(reference).attrs)
        if readable(list(folders.values())):
            yield _layers_in(folders)
            return
        with self.archive(reference) as stream:
            yield layers_of(stream)

    @contextlib.contextmanager
    def archive(self, reference: str) -> Iterator[IO[bytes]]:
        """Stream an image in ``docker save`` form; raises ``BuildError`` if there is no such image.

        The command line is used because the daemon writes the whole image to its disk before the
        first byte comes, and the SDK does not wait that long.
        """
        argv = (self.probe().program, "save", str(self._find_image(reference).id))
        with subprocesses.piped(argv, self._environment({}), _SHORT_CALL) as (stream, failed):
            yield stream
            if words := failed():
                raise EngineError(f"docker cannot save {reference}: {words}", hint=_AGAIN)

    @contextlib.contextmanager
    def push_command(
        self, image: BuiltImage, name: str, *, plain: bool
    ) -> Iterator[tuple[str, ...]]:
        """Give the command that pushes an image: skopeo's where it is better, or else docker's own.

        skopeo compresses on all processors; docker takes twice as long for an image that no
        registry has. docker pushes by a tag of its own store, which the image has for the time of
        the block.
        """
        docker = self.probe().program
        host = self._host()
        skopeo = self._skopeo()
        if skopeo:
            words = [skopeo, "--insecure-policy", "copy"]
            if host:
                words += ["--src-daemon-host", host]
            if plain:
                words.append("--dest-tls-verify=false")
            yield (*words, f"docker-daemon:{image.identifier}", f"docker://{name}")
            return
        before = self.inspect(name)
        try:
            self.tag(image.identifier, name)
            words = [docker]
            if host:
                words += ["--host", host]
            yield (*words, "push", name)
        finally:
            with subprocesses.uninterrupted():
                if before is None:
                    self.remove(name)
                else:
                    self.tag(before.identifier, name)

    def _skopeo(self) -> str:
        """Return the ``skopeo`` that pushes faster than docker; ``""`` if there is none.

        containerd's store has compressed layers, and skopeo would compress them anew. Docker 25 and
        later refuse the skopeo of Debian 12 and of Ubuntu 22.04 and 24.04 (containers/skopeo issue
        2202): it is asked for an image without a file, which is there for that moment.
        """
        programs = subprocesses.programs("skopeo", os.environ.get("PATH"))
        if not programs or self._in_containerd():
            return ""
        skopeo = programs[0]
        words = [skopeo, "--insecure-policy", "inspect"]
        if self._host():
            words += ["--daemon-host", self._host()]
        name = f"{_EMPTY_IMAGE}:{uuid.uuid4().hex[:12]}"
        words.append(f"docker-daemon:{name}")
        with private_folder() as folder:
            root, archive = folder / "root", folder / "image.tar"
            root.mkdir()
            write_archive(root, archive, name=name, configuration=ImageConfiguration(created=0))
            self.load(archive)
        try:
            result = subprocesses.run(
                tuple(words), timeout=_SHORT_CALL, environment=self._environment({})
            )
        finally:
            with subprocesses.uninterrupted():
                self.remove(name)
        return skopeo if result.status == 0 else ""

    @contextlib.contextmanager
    def contents(self, reference: str) -> Iterator[Iterator[Layer]]:
        """Read the layers from the daemon's storage, or else export a container never started."""
        folders = layer_folders(self._find_image(reference).attrs)
        if readable(list(folders.values())):
            yield _layers_in(folders)
            return
        with self._temporary(reference) as name:
            # An image without a command needs one for ``create``; the program need not exist.
            creation = self._call(
                "create", "--network=none", "--name", name, reference, "/never-started"
            )
            if creation.status:
                raise self._fault(f"making a container of {reference}", creation.words)
            argv = (self.probe().program, "export", name)
            with subprocesses.piped(argv, self._environment({}), _SHORT_CALL) as (stream, failed):
                with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 16) as archive:
                    yield iter((Layer(name="all", archive=archive),))
                while stream.read(1 << 16):
                    pass
                if words := failed():
                    raise EngineError(f"docker cannot export {reference}: {words}", hint=_AGAIN)

    def isolates(self) -> str:
        """Every daemon can isolate."""
        return ""

    @contextlib.contextmanager
    def container(self, reference: str, *, isolated: Isolation = "") -> Iterator[IdleContainer]:
        """Start an idle container for the time of the ``with`` block; its entry point is not run.

        The container runs a shell that waits for input: testinfra needs a shell anyway, and not
        every ``sleep`` knows ``infinity``.
        """
        words = ("--entrypoint", "/bin/sh", "--interactive", "--tty", "--workdir", "/", reference)
        isolation_options = isolation.docker_options(isolated)
        with self._temporary(reference) as name:
            error = self._start(name, *isolation_options, *words)
            if error:
                raise BuildError(f"docker failed starting a container of {reference}: {error}")
            limit = isolation.OUTPUT_BYTES if isolated else 0
            yield IdleContainer(name, functools.partial(self.execute, name, limit=limit))

    def execute(
        self,
        container: str,
        command: tuple[str, ...],
        *,
        timeout: float,
        split: bool,
        limit: int = 0,
    ) -> tuple[int, bytes, bytes]:
        """Run a command in a container and return status, stdout and stderr.

        Args:
            split: Whether stdout and stderr are separate; else both are in stdout.
            limit: Bytes that the command may print before it is stopped; 0: any number.

        Raises:
            EngineError: The daemon could not start the command, or its output was lost, three
                times.
            EngineUnavailableError: The daemon does not answer.
        """
        return retry(
            lambda: self._execute(container, command, timeout=timeout, split=split, limit=limit)
        )

    def _execute(
        self, container: str, command: tuple[str, ...], *, timeout: float, split: bool, limit: int
    ) -> tuple[int, bytes, bytes]:
        """Run a command in a container once; arguments, result and errors as of ``execute``."""
        marked = MarkedCommand(command=command)
        capture = Capture(merge=not split, limit=limit)
        execution = self._call("exec", container, *marked.argv, timeout=timeout, capture=capture)
        if execution.over(limit):
            self._call("restart", "--time", "0", container)
            output = execution.output[-_SHOWN_BYTES:] + subprocesses.stopped_after_bytes(limit)
            return subprocesses.TOO_MUCH, output, b""
        result = marked.read(execution, split=split)
        if result.status is not None and result.is_complete:
            return result.status, result.output, result.errors
        if execution.timed_out:
            # A restart ends every process and keeps the files.
            self._call("restart", "--time", "0", container)
            note = f"\n(stopped after {timeout:g} seconds)\n".encode()
            if split:
                return execution.status, result.output, result.errors + note
            return execution.status, result.output + note, result.errors
        reason = execution.words
        if result.status is not None or not execution.status:
            reason = "the end of what it printed was lost"
        raise self._fault(f"running {command[0]} in a container", reason)

    def run(self, reference: str, job: Job) -> Completed:
        """Run a job of an image: the image's entry point, with the command as arguments."""
        # The daemon's default log driver may not be readable.
        options = ["--log-driver", "json-file"]
        if job.isolated:
            # The log of an endless output would fill the disk.
            options += ["--log-opt", f"max-size={isolation.OUTPUT_BYTES}"]
            options += isolation.docker_options(job.isolated)
        for mount in job.mounts:
            mode = ",readonly" if mount.read_only else ""
            source = mount.source.resolve()
            options += ["--mount", f"type=bind,source={source},target={mount.target}{mode}"]
        for variable, value in job.environment.items():
            options += ["--env", f"{variable}={value}"]
        with self._temporary(reference) as name:
            error = self._start(name, *options, reference, *job.command)
            if error:
                return Completed(status=127, output=f"{error}\n")
            waited = self._call("wait", name, timeout=job.timeout)
            if waited.timed_out:
                self._call("kill", name)
            elif waited.status:
                raise self._fault(f"running {reference}", waited.words)
            logs = self._call("logs", name, capture=Capture(merge=True))
        output = logs.output.decode(errors="replace")
        if waited.timed_out:
            note = f"\n(stopped after {job.timeout:g} seconds)\n"
            return Completed(status=waited.status, output=output + note)
        return Completed(status=int(waited.output), output=output)

    def remove(self, reference: str) -> None:
        """Remove a name, and the image with its last name; an unknown name is not an error."""
        from docker.errors import ImageNotFound

        with self._translated_errors(f"removing {reference}"), contextlib.suppress(ImageNotFound):
            self._client().images.remove(reference)

    def _run_build(self, argv: tuple[str, ...], request: BuildRequest, receive: Progress) -> None:
        """Run a build once, and hand its events on; raises the error of a failure (``explain``)."""
        environment = self._environment(request.arguments)
        command = BuildCommand(argv=argv, environment=environment, hint=_HINT)
        built = run_build(command, progress.BuildKitParser(request.stage_components), receive)
        if built.status == 0:
            return
        step = built.log.failed
        # Without a failed step, the daemon may have ended during the step that was running.
        if step is None and self._silence():
            step = built.log.broken_off("the build ended here")
        failure = Failure(
            target=request.name,
            engine=self.name,
            daemon=True,
            status=built.status,
            step=step,
            lines=built.lines,
        )
        raise explain(failure, alive=self._silence, space=self._space)

    def _silence(self) -> str:
        """Return why the daemon does not answer; ``""`` if it does."""
        # The old connection may belong to a daemon that has ended.
        self._connection = None
        try:
            with self._translated_errors("answering"):
                self._client().ping()
        except EngineUnavailableError as error:
            return error.message
        return ""

    def _space(self) -> str:
        """Return a sentence about the free space of the daemon's storage."""
        try:
            with self._translated_errors("answering"):
                root = str(self._client().info()["DockerRootDir"])
            free = shutil.disk_usage(root)
        except (EngineError, EngineUnavailableError, BuildError, OSError):
            return "The free space of the docker daemon's storage is unknown."
        return free_space(root, free=free.free, total=free.total)

    def _host(self) -> str:
        """Return the daemon's address, the same for the SDK and the command line.

        The command line follows docker contexts (rootless, Docker Desktop), and the SDK does not.
        """
        if self._requested_host is not None:
            return self._requested_host
        from docker.context import ContextAPI

        return os.environ.get("DOCKER_HOST") or str(ContextAPI.get_current_context().Host or "")

    @contextlib.contextmanager
    def _report_waiting(self, report: Report) -> Iterator[None]:
        """Report after a fifth of the time that the daemon is waited for, and how long."""
        line = (
            f"waiting for the docker daemon at {self._host()} to answer, at most"
            f" {self._first_answer:g} s"
        )
        timer = threading.Timer(self._first_answer / 5, report, (line,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _client(self) -> docker.DockerClient:
        """Return the SDK's client, which the first call connects. Later calls return the same one.

        Raises:
            EngineUnavailableError: No daemon listens on the local socket, or a library for ssh is
                missing. For a daemon of another host the SDK's own error is raised; the callers
                translate it (``_translated_errors``).
        """
        if self._connection is None:
            import docker

            host = self._host()
            if host.startswith("ssh://") and importlib.util.find_spec("paramiko") is None:
                raise EngineUnavailableError(
                    f"docker at {host}: the Python library `paramiko`, which reaches a daemon over"
                    " ssh, is missing",
                    hint=(
                        "`.venv/bin/python -m pip install paramiko` adds it; or forward the socket"
                        " with `ssh -NL /tmp/docker.sock:/run/docker.sock HOST` and set"
                        " DOCKER_HOST=unix:///tmp/docker.sock"
                    ),
                )
            self._check_socket(host)
            is_local = not host or host.startswith("unix://")
            # The client asks for the daemon's version at once.
            timeout = int(self._first_answer if is_local else _SHORT_CALL)
            if self._requested_host is None and os.environ.get("DOCKER_HOST"):
                # from_env() reads DOCKER_TLS_VERIFY and DOCKER_CERT_PATH beside DOCKER_HOST.
                self._connection = docker.DockerClient.from_env(
                    timeout=timeout, use_ssh_client=host.startswith("ssh://")
                )
            else:
                self._connection = docker.DockerClient(
                    base_url=host or None, timeout=timeout, use_ssh_client=host.startswith("ssh://")
                )
            self._connection.api.timeout = int(_SHORT_CALL)
            if is_local:
                # No proxy, login or CA of the environment is for a socket. Each call would read all
                # variables, which another thread may change meanwhile: os.environ.items() ends with
                # KeyError then.
                self._connection.api.trust_env = False
            # Connections stay open between calls, and belong to this engine for as long as it
            # lives.
            weakref.finalize(self, self._connection.close)
        return self._connection

    def _check_socket(self, host: str) -> None:
        """Try to connect to a local daemon's socket; do nothing for a host without one.

        The SDK's own error says less, and leaves its socket open.

        Raises:
            EngineUnavailableError: Nothing listens there, or this user may not connect.
        """
        if not host.startswith("unix://"):
            return
        path = re.sub("^/*", "/", host.removeprefix("unix://"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(self._first_answer)
            try:
                listener.connect(path)
            except OSError as error:
                reason = str(error.strerror or error)
                if isinstance(error, TimeoutError):
                    reason = "no answer"
                denied = isinstance(error, PermissionError)
                raise _silent(host, f"{path}: {reason}", denied=denied) from error

    def _environment(self, arguments: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of docker's command line.

        It is this process's environment with the daemon's address, a build's arguments and
        BuildKit.
        """
        environment = {**subprocesses.own_environment(), OWNER: owner()}
        host = self._host()
        if host:
            environment["DOCKER_HOST"] = host
        environment.update(arguments)
        environment["DOCKER_BUILDKIT"] = "1"
        # Attestations change what the image's identifier means, and depend on the time of day.
        environment["BUILDX_NO_DEFAULT_ATTESTATIONS"] = "1"
        environment["DOCKER_CLI_HINTS"] = "false"
        return environment

    def _program(self) -> str:
        """Return the first ``docker`` on PATH whose BuildKit works; others are skipped."""
        tried = []
        for program in subprocesses.programs("docker", os.environ.get("PATH")):
            words = self._unfit(program)
            if not words:
                return program
            tried.append(f"{program}: {words}")
        if not tried:
            raise EngineUnavailableError(
                "the docker daemon answers, but there is no `docker` program on PATH", hint=_HINT
            )
        raise EngineUnavailableError(
            "no `docker` on PATH can use BuildKit: " + "; ".join(tried), hint=_HINT
        )

    def _unfit(self, program: str) -> str:
        """Return why a client cannot build with BuildKit; ``""`` if it can."""
        try:
            client = subprocesses.run(
                (program, "--version"), timeout=_SHORT_CALL, environment=self._environment({})
            )
            version = re.search(r"version (?P<major>\d+)\.", client.output.decode(errors="replace"))
            if version is None:
                return client.words or "prints no version"
            if int(version["major"]) < _NATIVE_BUILDKIT_ENDS:
                return ""
            buildx = subprocesses.run(
                (program, "buildx", "version"),
                timeout=_SHORT_CALL,
                environment=self._environment({}),
            )
            if buildx.status == 0:
                return ""
        except OSError as error:
            return str(error.strerror)
        return f"version {version['major']} without the buildx plugin"

    def _image(self, reference: str) -> SdkImage | None:
        """Return the SDK's object of an image; ``None`` if the store has none of that name."""
        from docker.errors import ImageNotFound

        with self._translated_errors(f"looking up {reference}"):
            try:
                return self._client().images.get(reference)
            except ImageNotFound:
                return None

    def _find_image(self, reference: str) -> SdkImage:
        """Return the SDK's object of an image; raises ``BuildError`` if there is no such image."""
        image = self._image(reference)
        if image is None:
            raise BuildError(f"docker has no image {reference}", hint="`docker images` lists them")
        return image

    def _call(
        self, *words: str, timeout: float = _SHORT_CALL, capture: Capture = SEPARATE
    ) -> subprocesses.Finished:
        """Run docker's command line, and return its end; a failure is not raised.

        Args:
            words: The arguments: ``rm``, ``--force``, a name.
            timeout: Seconds.
            capture: The streams that are read.
        """
        argv = (self.probe().program, *words)
        return subprocesses.run(
            argv, timeout=timeout, environment=self._environment({}), capture=capture
        )

    def _fault(self, doing: str, words: str) -> EngineError | EngineUnavailableError | OutputError:
        """Return the error for a command that docker failed at."""
        if silence := self._silence():
            return EngineUnavailableError(silence, hint=_HINT)
        if DISK_FULL.search(words):
            return OutputError(
                f"the disk is full: docker failed {doing} ({words}). {self._space()}"
            )
        return EngineError(f"docker failed {doing}: {words}", hint=_AGAIN)

    @contextlib.contextmanager
    def _temporary(self, reference: str) -> Iterator[str]:
        """Give a random name for a container, and remove it at the end."""
        self._find_image(reference)
        if not self._has_removed_leftovers:
            self._has_removed_leftovers = True
            listed = self._call(
                "ps", "--all", "--filter", f"name={PREFIX}", "--format", "{{.Names}}"
            )
            remove_left_containers(listed.output.decode().split(), self._remove)
        name = container_name()
        try:
            yield name
        finally:
            # An error of the removal is not raised: the container or the daemon may be gone, and
            # the first error matters.
            with subprocesses.uninterrupted():
                self._remove(name)

    def _remove(self, name: str) -> None:
        """Remove a container and its volumes; a failure is not raised."""
        self._call("rm", "--force", "--volumes", name)

    def _start(self, name: str, *words: str) -> str:
        """Start a container.

        Return the daemon's error if the program does not exist or cannot be run, else ``""``.
        """
        emulation = []
        for variable, value in subprocesses.emulation().items():
            emulation.append(f"--env={variable}={value}")

        def attempt() -> str:
            # An interrupted client would let the daemon finish the container after it was removed.
            with subprocesses.uninterrupted():
                start = self._call("run", "--detach", "--name", name, *emulation, *words)
            if start.status in (126, 127):
                return start.words
            if start.status:
                self._remove(name)
                raise self._fault("starting a container", start.words)
            return ""

        return retry(attempt)

    @contextlib.contextmanager
    def _translated_errors(self, doing: str) -> Iterator[None]:
        """Translate the SDK's errors: server errors to ``EngineError``, refusals to ``BuildError``.

        Args:
            doing: The work, for a message: ``reading an image's history``.
        """
        from docker.errors import APIError, DockerException
        from requests.exceptions import RequestException

        try:
            yield
        except APIError as error:
            words = str(error.explanation or error).strip()
            if DISK_FULL.search(words):
                raise OutputError(
                    f"the disk is full: docker failed {doing} ({words}). {self._space()}"
                ) from error
            if error.is_server_error():
                raise EngineError(f"docker failed {doing}: {words}", hint=_AGAIN) from error
            raise BuildError(f"docker failed {doing}: {words}") from error
        except (DockerException, RequestException) as error:
            self._connection = None
            raise _silent(self._host(), _innermost(error)) from error


def _argument_options(request: BuildRequest) -> list[str]:
    """Return the options for a build's arguments.

    Docker takes their values from the environment: a proxy's address may have a password, and a
    command line is public.
    """
    options = []
    for name in request.arguments:
        options += ["--build-arg", name]
    if request.secrets:
        return options
    # The client adds the proxies of its own configuration, which may have a password.
    requested = {name.lower() for name in request.arguments}
    for name in PROXIES:
        if name.lower() not in requested:
            options += ["--build-arg", f"{name}="]
    return options


def _silent(host: str, words: str, *, denied: bool = False) -> EngineUnavailableError:
    """Return the error for a daemon that does not answer.

    Args:
        host: Its address; ``""`` for the default one.
        words: The reason.
        denied: Whether the user may not use it.
    """
    where = host or "its default address"
    return EngineUnavailableError(
        f"the docker daemon at {where} does not answer: {words}",
        hint=_DENIED if denied else _HINT,
        denied=denied,
    )


def _built(reference: str, image: SdkImage) -> BuiltImage:
    """Return an image from the SDK's object of it."""
    more = {key: image.attrs.get(key) for key in MAKERS}
    return image_of(
        {**(image.attrs.get("Config") or {}), **more},
        reference=reference,
        identifier=str(image.id),
        size=int(image.attrs["Size"]),
        digests=tuple(image.attrs.get("RepoDigests") or ()),
        created=str(image.attrs.get("Created") or ""),
        architecture=str(image.attrs.get("Architecture") or ""),
        system=str(image.attrs.get("Os") or ""),
        layers=tuple((image.attrs.get("RootFS") or {}).get("Layers") or ()),
    )


def _innermost(error: BaseException) -> str:
    """Return the text of the innermost cause; requests and urllib3 wrap it three times."""
    # They raise some of these errors without `from`: then the cause is the context.
    while error.__cause__ is not None or error.__context__ is not None:
        inner = error.__cause__ or error.__context__
        # A KeyboardInterrupt that was pending is not why the daemon failed.
        if not isinstance(inner, Exception):
            break
        error = inner
    return str(error) or type(error).__name__


def _layers_in(folders: Mapping[str, Path]) -> Iterator[Layer]:
    """Yield the layers in the daemon's own folders; the keys are the layers' digests."""
    for name, folder in folders.items():
        yield Layer(name=name, archive=LayerFolder(folder))


def layer_folders(image: Mapping[str, Any]) -> dict[str, Path]:
    """Return the folder of each layer of an image; empty if the daemon does not name them.

    The folders have random names, so those of a daemon on another machine do not exist on this one.
    """
    driver = image.get("GraphDriver") or {}
    if driver.get("Name") != "overlay2":
        return {}
    data = driver.get("Data") or {}
    top = data.get("UpperDir")
    if not top:
        return {}
    # Docker lists the highest layer first, an image's configuration the lowest.
    lower = (data.get("LowerDir") or "").split(":")
    folders = [top, *filter(None, lower)]
    folders.reverse()
    names = (image.get("RootFS") or {}).get("Layers") or []
    if len(names) != len(folders):
        return {}
    return dict(zip(names, map(Path, folders), strict=True))
