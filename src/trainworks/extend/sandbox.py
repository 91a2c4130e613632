"""Runs third-party code in the base image, without secrets: builds of wheels, and imports."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from uuid import uuid4

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from trainworks.build.context import link_or_copy
from trainworks.build.image import ImageSpec, build_context
from trainworks.build.options import BuildOptions
from trainworks.engine.protocol import Engine
from trainworks.errors import BuildError
from trainworks.extend.apt import AddFiles
from trainworks.extend.cuda_compiler import BARE, Workbench
from trainworks.extend.plan import ExtensionPlan, WheelSource
from trainworks.extend.render import (
    LOCK,
    Recipes,
    SandboxStep,
    packages_image,
    render_packages,
    render_sandbox_step,
)
from trainworks.extend.requirements import ExtensionLock
from trainworks.facts.rows import SourceFile
from trainworks.host.bootstrap import EPOCH
from trainworks.host.cache import cache_folder
from trainworks.host.settings import HostSettings
from trainworks.terminal.build_progress import BuildProgress
from trainworks.terminal.output import say

DEFAULT_BACKEND = "setuptools.build_meta:__legacy__"
DEFAULT_REQUIRES = ("setuptools",)
"""The build backend of a project that does not name one (PEP 517)."""

PINS = "install.txt"
"""A file among the wheels: the version and hash of each."""

_SETUP_NAME = re.compile(r"(?m)(?:^|[\s(,])name\s*=\s*[\"']?([A-Za-z0-9][\w.-]*)(?=[\"']|\s*$)")
"""A project's name in ``setup(name="...")`` or in ``setup.cfg``."""

_ROUNDS = 4
_LARGEST_ANSWER = 4_000_000_000

Supply = Callable[[Sequence[str], Sequence[str]], list[Path]]
"""Returns the wheels of requirements, resolved in an environment of their own.

The arguments are the requirements, and options of uv.
"""


@dataclass(frozen=True, kw_only=True)
class _Project:
    """The build of a project, as its ``pyproject.toml`` says (PEP 517).

    Attributes:
        name: The project's name; ``""`` if only a build can say.
        requires: Requirements of the build.
        backend: The build backend, such as ``hatchling.build``.
        backend_path: Folders of the project with the backend itself.
    """

    name: str
    requires: list[str]
    backend: str
    backend_path: list[str]


@dataclass(kw_only=True)
class Sandbox:
    """The base image as a sandbox for third-party code.

    Attributes:
        plan: The extension: its base and Debian packages.
        recipes: Templates and programs of contexts.
        bench: The compiler, and the environment of builds.
        engine: The engine that builds.
        settings: This machine's settings: steps with a network get the proxies.
        options: Options of builds; the sandbox writes no context for the user.
        folder: A private folder.
        packages: Puts the files of the Debian packages into a context.
        network: Whether builds of wheels have a network.
        supply: Gives the wheels that a build requires; default: none.
    """

    plan: ExtensionPlan
    recipes: Recipes
    bench: Workbench
    engine: Engine
    settings: HostSettings
    options: BuildOptions
    folder: Path
    packages: AddFiles
    network: bool
    supply: Supply = lambda _requires, _options: []
    _started: bool = field(default=False, init=False)
    _built: dict[str, Path] = field(default_factory=dict, init=False)
    _building: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Prepare the display of builds."""
        self.options = replace(self.options, output=None)
        self._progress = BuildProgress(verbose=self.options.verbose)

    @property
    def start(self) -> str:
        """The image that steps begin with; with Debian packages, it is built on first use."""
        plan = self.plan
        name = packages_image(plan, self.recipes)
        if plan.apt and not self._started:
            spec = ImageSpec(
                name=plan.tag,
                tags=(name,),
                rendering=render_packages(plan, self.recipes),
                settings=replace(self.settings, proxies={}),
                secrets={},
                add_files=self.packages,
                architecture=plan.base.architecture,
                network="none",
            )
            build_context(spec, {}, self.engine, self.options, self._progress)
        self._started = True
        return name

    def close(self) -> None:
        """Remove the name of the image with Debian packages; the extension has its layers."""
        name = packages_image(self.plan, self.recipes)
        if self.plan.apt and self._started:
            self.engine.remove(name)
        self._started = False

    def metadata_of(self, folder: Path) -> Message:
        """Build a project in a folder, and return the metadata of its wheel."""
        return metadata_of(self.wheel_of(source_of_folder(folder)))

    def wheel_of(self, source: WheelSource) -> Path:
        """Build the wheel of a source, or return an earlier one of the same base and compiler.

        Raises:
            BuildError: The source cannot be built.
        """
        key = self._key_of(source)
        if key in self._built:
            return self._built[key]
        if self.options.no_cache:
            folder = self.folder / "built" / key
        else:
            folder = cache_folder(os.environ, "built") / key
        wheels = list(folder.glob("*.whl"))
        if not wheels:
            if key in self._building:
                raise BuildError(f"{source.origin} needs itself to be built")
            self._building.append(key)
            try:
                wheels = [self._build(source, folder)]
            finally:
                self._building.remove(key)
        self._built[key] = wheels[0]
        return wheels[0]

    def _key_of(self, source: WheelSource) -> str:
        """Return a digest of everything that a wheel depends on."""
        parts = (
            source.digest,
            self.plan.base.identifier,
            self.bench.lines,
            self.plan.apt,
            self.network,
            self._is_whole(source),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _is_whole(self, source: WheelSource) -> bool:
        """Whether a build of a source sees the base's packages."""
        return not set(_names_of(source)).isdisjoint(self.bench.whole)

    def error_of(self, modules: Sequence[str], wheels: Sequence[Path]) -> str:
        """Import modules with these wheels on the base; return the error, or ``""``."""
        local: dict[str, str] = {parse_wheel_filename(wheel.name)[0]: "" for wheel in wheels}
        lock = ExtensionLock(local=local).text.encode()
        files = [SourceFile(path=f"inputs/{LOCK}", content=lock)]
        step = SandboxStep(origin="", files=files, bench=BARE, modules=tuple(modules))

        def add(context: Path) -> tuple[str, ...]:
            put_wheels(wheels, context / "wheels")
            return ()

        error = self._run(step, add).get("error", b"")
        return error.decode("utf-8", "replace").strip()

    def _build(self, source: WheelSource, target: Path) -> Path:
        """Build a wheel of a source in the base, again with further requirements of its backend.

        Args:
            source: The source.
            target: The folder that gets the wheel.

        Raises:
            BuildError: The build gives no wheel.
        """
        say(f"  building {source.origin}")
        project = _project_of(source)
        is_whole = self._is_whole(source)
        requires = project.requires
        if is_whole:
            installed = {canonicalize_name(row.name) for row in self.plan.base.distributions}
            requires = [line for line in requires if not _is_installed(line, installed)]
        order = {
            "name": project.name,
            "requires": requires,
            "backend": project.backend,
            "backend_path": project.backend_path,
            "subdirectory": source.subdirectory,
            "whole": is_whole,
            "environment": dict(self.bench.variables),
        }
        locked_tools = self.bench.requirements.splitlines()
        tools: list[Path] = []
        if locked_tools:
            tools = self.supply(locked_tools, ("--no-deps",))
        isolated = ""
        if not is_whole:
            isolated = next(iter(_names_of(source)), "")
        step = SandboxStep(
            origin=source.origin,
            files=[
                SourceFile(path="source/source.tar", content=source.archive),
                SourceFile(path="source/order.json", content=json.dumps(order).encode()),
            ],
            bench=self.bench,
            tools=bool(tools),
            isolated=isolated,
        )
        # A backend may ask for more requirements, which its next build gets.
        more: list[str] = []
        for _ in range(_ROUNDS):
            all_requires = [*requires, *more]
            links: list[Path] = []
            if all_requires:
                links = self.supply(all_requires, ())
            answer = self._run(step, _adding(links, tools))
            wheels = sorted(name for name in answer if name.endswith(".whl"))
            if wheels:
                return _store_wheel(wheels[0], answer[wheels[0]], target, source)
            requested = _more_requirements(answer.get("asked.json", b"[]"))
            new = [line for line in requested if line not in more]
            if not new:
                break
            more += new
        raise BuildError(
            f"{source.origin}: its build gives no wheel, and asks for"
            f" {', '.join(more) or 'nothing'}"
        )

    def _run(self, step: SandboxStep, add: Callable[[Path], tuple[str, ...]]) -> dict[str, bytes]:
        """Run a step in the base image, and return the files that it wrote, by their names."""
        _ = self.start
        tag = f"trainworks/question:{uuid4().hex[:12]}"
        settings = replace(self.settings, proxies=_without_logins(self.settings.proxies))
        # Never the host's own network: programs that listen on its loopback trust every local
        # process.
        has_network = self.network and not step.modules
        spec = ImageSpec(
            name=self.plan.tag,
            tags=(tag,),
            rendering=render_sandbox_step(self.plan, self.recipes, step),
            settings=settings,
            secrets={},
            add_files=add,
            architecture=self.plan.base.architecture,
            network="default" if has_network else "none",
        )
        try:
            build_context(spec, {}, self.engine, self.options, self._progress)
            return self._read_output(tag)
        except BuildError as error:
            raise BuildError(error.message, hint=self._advice(step.isolated)) from error
        finally:
            self.engine.remove(tag)

    def _read_output(self, tag: str) -> dict[str, bytes]:
        """Return the files of an image's layers by their names."""
        contents = {}
        with self.engine.layers(tag) as layers:
            for layer in layers:
                for member in layer.archive:
                    if not member.isfile():
                        continue
                    file = layer.archive.extractfile(member)
                    if file is None:
                        continue
                    name = member.name.rsplit("/", 1)[-1]
                    with file:
                        contents[name] = file.read(_LARGEST_ANSWER)
        return contents

    def _advice(self, isolated: str) -> str:
        """Return a hint for a build that failed.

        Args:
            isolated: The name of a project that was built without the base's packages; ``""`` for
                another step.
        """
        base = self.plan.base
        sentences = []
        if isolated:
            sentences.append(
                "If the build imports torch or another package of the base:"
                f" --no-build-isolation {isolated}."
            )
        if not base.compiler:
            advice = "add --apt g++ --apt python3-dev" if base.apt else "use a base that has one"
            sentences.append(f"{base.reference} has no C compiler. If a build needs one: {advice}.")
        if not self.network:
            sentences.append(
                "Builds have no network. If a build downloads something: --build-network"
            )
        return " ".join(sentences) or "the lines above are the build's own"


def put_wheels(wheels: Iterable[Path], folder: Path) -> None:
    """Put wheels into a folder, with a file of their versions and hashes."""
    lines = []
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        name, version, _, _ = parse_wheel_filename(wheel.name)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name}=={version} --hash=sha256:{digest}\n")
        link_or_copy(wheel, folder / wheel.name)
    (folder / PINS).write_text("".join(sorted(lines)), encoding="utf-8")


def _adding(links: Sequence[Path], tools: Sequence[Path]) -> Callable[[Path], tuple[str, ...]]:
    """Return a function that puts wheels and the compiler into a context."""

    def add(context: Path) -> tuple[str, ...]:
        for file in links:
            link_or_copy(file, context / "links" / file.name)
        for file in tools:
            link_or_copy(file, context / "compiler" / file.name)
        return ()

    return add


def _store_wheel(name: str, content: bytes, target: Path, source: WheelSource) -> Path:
    """Write a built wheel to a folder of its own, complete or not at all.

    The wheel is checked: third-party code has made it.
    """
    try:
        built_name, _, _, _ = parse_wheel_filename(name)
    except InvalidWheelFilename as error:
        raise BuildError(
            f"{source.origin}: its build gives {name!r}, which is not a wheel's name"
        ) from error
    if source.name and built_name != canonicalize_name(source.name):
        raise BuildError(f"{source.origin} is not {source.name}, which the requirement names")

    draft = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True, mode=0o700)
    (draft / name).write_bytes(content)
    metadata_name = canonicalize_name(str(metadata_of(draft / name)["Name"]))
    if metadata_name != built_name:
        raise BuildError(
            f"{source.origin}: its build gives {name}, whose metadata are those of {metadata_name}"
        )
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    return target / name


def _more_requirements(content: bytes) -> list[str]:
    """Return the requirements that a build backend asks for: untrusted text."""
    try:
        requirements = _texts(json.loads(content))
    except ValueError:
        return []
    return [line for line in requirements if re.match(r"[A-Za-z0-9]", line) and line.isprintable()]


def _is_installed(requirement: str, names: Container[str]) -> bool:
    """Whether one of these names fulfils a requirement, in any version."""
    match = re.match(r"[A-Za-z0-9][\w.-]*", requirement)
    return match is not None and canonicalize_name(match.group()) in names


def _names_of(source: WheelSource) -> list[str]:
    """Return the names of a project before its build: its own, its folder's, its repository's."""
    address = source.origin.partition("@")[0].removesuffix(".git").rstrip("/")
    repository = address.rpartition("/")[2].partition(" ")[0]
    names = [source.name, _project_of(source).name, *_names_in_setup(source)]
    names += [Path(source.folder).name, repository]
    valid_names = [canonicalize_name(name) for name in names if name and name[0].isalnum()]
    return list(dict.fromkeys(valid_names))


def _names_in_setup(source: WheelSource) -> list[str]:
    """Return the names in a project's ``setup.cfg`` and ``setup.py``, which are not run."""
    paths = (_path_in(source, "setup.cfg"), _path_in(source, "setup.py"))
    names: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(source.archive)) as archive:
        for member in archive:
            if os.path.normpath(member.name) not in paths or not member.isfile():
                continue
            file = archive.extractfile(member)
            if file is not None:
                names += _SETUP_NAME.findall(file.read().decode("utf-8", "replace"))
    return names


def _path_in(source: WheelSource, name: str) -> str:
    """Return the path of a project's file in its archive: ``source/subdirectory/setup.py``."""
    subdirectory = source.subdirectory.strip("/")
    if not subdirectory:
        return f"source/{name}"
    return f"source/{subdirectory}/{name}"


def _project_of(source: WheelSource) -> _Project:
    """Read how a source is built from its ``pyproject.toml``."""
    content: dict[str, Any] = {}
    path = _path_in(source, "pyproject.toml")
    with tarfile.open(fileobj=io.BytesIO(source.archive)) as archive:
        for member in archive:
            if os.path.normpath(member.name) != path or not member.isfile():
                continue
            file = archive.extractfile(member)
            text = file.read().decode("utf-8", "replace") if file else ""
            try:
                content = tomllib.loads(text)
            except tomllib.TOMLDecodeError as error:
                raise BuildError(f"{source.origin}: pyproject.toml is not TOML: {error}") from error
    system = content.get("build-system", {})
    if not isinstance(system, dict):
        raise BuildError(f"{source.origin}: build-system in pyproject.toml is not a table")
    return _Project(
        name=str(content.get("project", {}).get("name", "")),
        requires=_texts(system.get("requires", DEFAULT_REQUIRES)),
        backend=str(system.get("build-backend", DEFAULT_BACKEND)),
        backend_path=_texts(system.get("backend-path", ())),
    )


def _texts(value: object) -> list[str]:
    """Return the texts in a list; nothing for another value."""
    if not isinstance(value, (list, tuple)):
        return []
    return [item for item in value if isinstance(item, str)]


def metadata_of(wheel: Path) -> Message:
    """Return the metadata of a wheel; raises ``BuildError`` for a file without metadata."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            pattern = re.compile(r"[^/]+\.dist-info/METADATA")
            names = [name for name in archive.namelist() if pattern.fullmatch(name)]
            text = archive.read(names[0]).decode("utf-8", "replace")
    except (OSError, zipfile.BadZipFile, IndexError) as error:
        raise BuildError(f"{wheel.name} is not a wheel with metadata: {error}") from error
    return HeaderParser().parsestr(text)


def source_of_folder(folder: Path) -> WheelSource:
    """Pack an unpacked project as the source of a wheel."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.rglob("*")):
            if not path.is_file() and not path.is_symlink():
                continue
            name = path.relative_to(folder).as_posix()
            member = archive.gettarinfo(path, f"source/{name}")
            _normalise(member)
            content = io.BytesIO(path.read_bytes()) if member.isfile() else None
            archive.addfile(member, content)
    return _with_own_name(buffer.getvalue(), folder.name)


@dataclass(frozen=True)
class _Entry:
    """A file of a source archive, or a link, which has no content."""

    member: tarfile.TarInfo
    content: bytes | None

    @property
    def path(self) -> str:
        """The path below the one folder that every source archive has."""
        return os.path.normpath(self.member.name).removeprefix("./").partition("/")[2]


def source_of_archive(file: Path) -> WheelSource:
    """Pack a source archive anew as the source of a wheel.

    The result is the same for the same content in another form, such as zip and tar.gz.

    Raises:
        BuildError: The file is not an archive.
    """
    try:
        entries = _zip_entries(file) if zipfile.is_zipfile(file) else _tar_entries(file)
    except (OSError, tarfile.TarError, zipfile.BadZipFile, KeyError) as error:
        raise BuildError(f"{file.name} is not a source archive: {error}") from error
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry in sorted(entries, key=lambda entry: entry.path):
            path, member, content = entry.path, entry.member, entry.content
            if not path:
                continue
            member.name = f"source/{path}"
            member.size = len(content or b"")
            _normalise(member)
            archive.addfile(member, None if content is None else io.BytesIO(content))
    return _with_own_name(buffer.getvalue(), file.name)


def _zip_entries(file: Path) -> list[_Entry]:
    """Return the files of a zip archive, with their modes; folders are left out."""
    entries = []
    with zipfile.ZipFile(file) as archive:
        for packed in archive.infolist():
            if packed.is_dir():
                continue
            member = tarfile.TarInfo(packed.filename)
            member.mode = packed.external_attr >> 16 or 0o644
            entries.append(_Entry(member, archive.read(packed)))
    return entries


def _tar_entries(file: Path) -> list[_Entry]:
    """Return the files and links of a tar archive; folders and devices are left out."""
    entries = []
    with tarfile.open(file) as archive:
        for member in archive:
            has_content = member.isreg() or member.islnk()
            stream = archive.extractfile(member) if has_content else None
            if stream is not None:
                # A hard link becomes a file of its own.
                member.type, member.linkname = tarfile.REGTYPE, ""
                entries.append(_Entry(member, stream.read()))
            elif member.issym():
                entries.append(_Entry(member, None))
    return entries


def _normalise(member: tarfile.TarInfo) -> None:
    """Remove owner, time and attributes from a member of a tar, which differ between machines."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = EPOCH
    member.mode = 0o755 if member.mode & 0o100 else 0o644
    member.pax_headers = {}


def _with_own_name(archive: bytes, origin: str) -> WheelSource:
    """Return a source with name and version of its ``PKG-INFO``; unchanged if it has none.

    Args:
        archive: A tar with the files below ``source/``, as ``WheelSource.archive``.
        origin: Where the files are from, for messages, if they have no name of their own.
    """
    source = WheelSource(archive=archive, origin=origin)
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        members = (member for member in packed if member.name == "source/PKG-INFO")
        member = next(members, None)
        if member is None or not member.isfile():
            return source
        file = packed.extractfile(member)
        if file is None:
            return source
        metadata = HeaderParser().parsestr(file.read().decode("utf-8", "replace"))
    name = _plain(metadata["Name"])
    if not name:
        return source
    return replace(source, name=name, origin=f"{name} {_plain(metadata['Version'])}")


def _plain(value: object) -> str:
    """Return a name or a version without characters that neither can have."""
    return re.sub(r"[^\w.+!-]", "", str(value or ""))


def _without_logins(proxies: Mapping[str, str]) -> dict[str, str]:
    """Return the proxies that need no login: third-party code sees them."""
    return {name: value for name, value in proxies.items() if "@" not in value}
