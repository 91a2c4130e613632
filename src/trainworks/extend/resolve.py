"""Resolves the requirements of an extension on this machine, and fetches the files.

The launcher's own installer (``install.py``) decides, as in a job. It works on a description of the
base (``extend.described``), with uv and this machine's settings (``extend.resolver``). Third-party
code runs in the base image itself, without either (``extend.sandbox``).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.message import Message
from functools import cache
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.utils import canonicalize_name, parse_wheel_filename

from trainworks.errors import BuildError, ExtendError, LockError
from trainworks.extend.constraints import targets_for
from trainworks.extend.cuda_compiler import Workbench, missing_compilers
from trainworks.extend.described import Environment
from trainworks.extend.plan import PROJECT_SOURCE, WheelSource
from trainworks.extend.requirement_inputs import INPUTS, RequestedRequirements, is_lock
from trainworks.extend.requirements import NO_LOCK, PIN, ExtendedBase, ExtensionLock
from trainworks.extend.resolver import NONE, FetchedFile, Resolver, indexes_in, name_in
from trainworks.extend.sandbox import Sandbox, Supply, metadata_of, source_of_archive
from trainworks.extend.vcs_sources import repository_source, source_at
from trainworks.facts.rows import Facts, TargetRow
from trainworks.host.downloads import remove_credentials
from trainworks.host.uv import find_uv
from trainworks.plan.package_ownership import find_library_names

OLD = timedelta(days=730)
"""A release that was replaced by a newer one so long ago is named."""

OPTIONS = re.compile(
    r"--(?:index-url|extra-index-url|find-links|no-index|pre|no-binary|only-binary)\b.*|-[if]\s.*"
)
"""Option lines that say where packages come from: the lock has them too."""


def manifest_of(
    base: ExtendedBase, bench: Workbench, row: TargetRow | None, facts: Facts
) -> dict[str, object]:
    """Return the manifest that the installer reads: what the base keeps, and its companions."""
    installed = {canonicalize_name(row.name) for row in base.distributions}
    frameworks = [
        component
        for component in facts.components
        if not installed.isdisjoint((*component.python, *component.python_cpu))
    ]

    companions = {}
    for component in frameworks:
        framework = component.python[0]
        for name in component.companions:
            if framework in installed and name not in installed:
                companions[name] = framework

    return {
        "protected": dict(base.kept),
        "companions": companions,
        "libraries": find_library_names(frameworks, installed, facts),
        "wheel_index": row.wheel_index if row else "",
        **missing_compilers(bench, base, facts),
    }


@dataclass(frozen=True, kw_only=True)
class ResolutionRequest:
    """The requirements of an extension, and how they are resolved.

    Attributes:
        requested: The requirements.
        sources: Sources of more wheels.
        commits: Git requirement to commit.
        manifest: The base's manifest, for the installer.
        beside: The folder of the lock: paths in the lock are relative to it.
        links: Folders with files on this machine, from pip's settings.
        only_binary: Names of packages for which no source archive is built.
        strict: Whether other builds of the framework are refused.
    """

    requested: RequestedRequirements
    sources: Sequence[WheelSource]
    commits: Mapping[str, str]
    manifest: Mapping[str, object]
    beside: Path = Path()
    links: Sequence[Path] = ()
    only_binary: Sequence[str] = ()
    strict: bool = False

    @property
    def words(self) -> list[str]:
        """Words of every installation."""
        words: list[str] = []
        for folder in self.requested.links:
            if folder.is_dir():
                words += ["--find-links", str(folder.absolute())]
        words += [f"--only-binary={name}" for name in self.only_binary]
        return words


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The packages that an extension installs.

    Attributes:
        lock: Their lock.
        wheels: Their wheels, downloaded or built.
        own: Names of files that lay on this machine.
        moved: A line for each package that the lock before had in another version.
    """

    lock: ExtensionLock
    wheels: Sequence[Path]
    own: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()


@dataclass
class Session:
    """One resolution: the installer, the base as it would be, and the files that were fetched."""

    base: ExtendedBase
    resolver: Resolver
    sandbox: Sandbox
    installer: Any
    environment: Environment
    forbidden: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    fetched: dict[str, FetchedFile] = field(default_factory=dict)
    folders: dict[Path, WheelSource] = field(default_factory=dict)
    before: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> tuple[str, ...]:
        """Options that name the base's Python to uv."""
        return self.resolver.words

    def say(self, text: str) -> None:
        """Keep a line for the log."""
        self.notes.append(text)

    def uv(self) -> str:
        """Return the path of uv."""
        return find_uv()

    def distributions(self) -> Iterable[metadata.Distribution]:
        """Return the distributions that the base would have now."""
        return self.environment

    def markers(self) -> dict[str, str]:
        """Return the values of environment markers."""
        return self.base.markers

    def tags(self) -> Sequence[str]:
        """Return the tags of wheels that fit."""
        return self.resolver.tags

    def install(self, installation: Any, words: Sequence[str], *, quiet: bool) -> int:  # noqa: ARG002 (nothing is shown)
        """Resolve an installation, fetch its files, and change the description of the base.

        Return a status.
        """
        words = [word for word in words if not word.startswith(("--target=", "--prefix="))]
        before = NONE if self.fetched else self.before
        lock = self.resolver.lock(self.environment, words, installation.environment, before)
        if lock is None:
            return 1
        for file in self.resolver.fetch(lock):
            self.fetched[file.name] = file
            self.environment.add(self.wheel_of(file))
        return 0

    def import_error(self, modules: Sequence[str]) -> str:
        """Import modules in the base with the wheels that would be installed.

        Return the last words of an error.
        """
        return self.sandbox.error_of(modules, self.wheels())

    def wheel_of(self, file: FetchedFile) -> Path:
        """Return the wheel of a file: the file, or the wheel that is built from it."""
        source = self.source_of(file)
        if source is not None:
            return self.sandbox.wheel_of(source)
        if file.file.name.endswith(".whl"):
            return file.file
        archive = source_of_archive(file.file)
        return self.sandbox.wheel_of(replace(archive, name=file.name))

    def source_of(self, file: FetchedFile) -> WheelSource | None:
        """Return the source of a folder's or a repository's wheel; ``None`` for a file."""
        if file.repository:
            return repository_source(file.repository, file.name, os.environ)
        if file.file.is_dir():
            return self.folder_at(file.file)
        return None

    def folder_at(self, path: Path) -> WheelSource:
        """Return the source of a project's folder on this machine."""
        path = path.resolve()
        if path not in self.folders:
            self.folders[path] = source_at(path, self.forbidden)
        return self.folders[path]

    def learn(self, folder: Path) -> Message:
        """Build a project, and return its metadata."""
        if folder.resolve().is_relative_to(self.resolver.cache.resolve()):
            return self.sandbox.metadata_of(folder)
        return metadata_of(self.sandbox.wheel_of(self.folder_at(folder)))

    def selected(self, installation: Any, words: Sequence[str]) -> dict[str, str]:
        """Return the versions that uv selects from a lock."""
        empty_folder = Path(self.resolver.file("nothing/none", ())).parent
        versions = self.resolver.selected(empty_folder, words, installation.environment)
        if versions is None:
            raise self.installer.RefusedError(
                f"uv cannot use {words[1]}: {_last_error(self.resolver.log)}"
            )
        return versions

    def lacks_wheel(self, installation: Any, words: Sequence[str]) -> bool:
        """Whether no wheel fits a requirement; False where an index does not answer."""
        log = self.resolver.log
        command = ("pip", "install", *self.resolver.words, *words)
        result = self.resolver.ask(*command, environment=installation.environment)
        self.resolver.log = log
        return result.returncode == 1

    def wheels(self) -> list[Path]:
        """Return all wheels."""
        return [self.wheel_of(file) for file in self.fetched.values()]


def load_installer(program: Path) -> Any:
    """Return the launcher's installer as a module of its own."""
    specification = importlib.util.spec_from_file_location("trainworks_installer", program)
    if specification is None or specification.loader is None:
        raise LockError(f"{program} cannot be loaded")
    module: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class _Described:
    """A base of which the installer reads only the Python."""

    base: ExtendedBase

    def markers(self) -> dict[str, str]:
        """Return the values of environment markers."""
        return self.base.markers


def check_python(files: Iterable[Path], base: ExtendedBase, program: Path, facts: Facts) -> None:
    """Refuse projects, locks and scripts for another Python, before anything is resolved.

    Args:
        files: Files that may name a Python.
        base: The base that is extended.
        program: The launcher's installer, which has the rule.
        facts: All facts: they say which targets have that Python.

    Raises:
        ExtendError: With all files for another Python.
    """
    installer = load_installer(program)
    problems: list[str] = []
    newer: dict[str, str] = {}
    for file in files:
        try:
            installer.refuse_python(_Described(base), file, is_asked_for=False)
        except installer.RefusedError as error:
            problems += error.problems
            newer |= error.newer
    if problems:
        raise ExtendError(problems, hint=_way_out(newer, base, facts))


def _way_out(newer: Mapping[str, str], base: ExtendedBase, facts: Facts) -> str:
    """Return the hint for a refused extension.

    Args:
        newer: The versions that a target must have, by name; may be empty.
        base: The base that was refused.
        facts: All facts.
    """
    if newer:
        targets = targets_for(list(newer.items()), base, facts)
        if targets:
            return f"extend {' or '.join(targets)}; nothing was built"
    return "nothing was built"


def supply_of(resolver: Resolver, sandbox: Sandbox, installer: Any) -> Supply:
    """Return the function that gets the wheels of build requirements.

    They are resolved for an environment of their own, in which nothing is kept.
    """
    numbers = count()
    settings = cache(installer.settings_of_pip)

    def supply(requires: Sequence[str], options: Sequence[str]) -> list[Path]:
        """Resolve and download what a build requires, and return the wheels.

        Args:
            requires: Lines of requirements.
            options: Options of uv.

        Raises:
            LockError: They cannot be resolved.
        """
        folder = resolver.folder / f"supply-{next(numbers)}"
        folder.mkdir(mode=0o700)
        variables, _ = installer.for_uv(settings(), folder)
        variables = {**os.environ, **variables}
        words = (*options, "-r", resolver.file("requires.txt", list(requires)))
        lock = resolver.lock(Environment(folder / "environment"), words, variables)
        if lock is None:
            raise LockError(
                f"what a build requires cannot be resolved:\n{_last_error(resolver.log)}"
            )
        wheels = []
        for fetched in resolver.fetch(lock):
            if fetched.file.name.endswith(".whl"):
                wheels.append(fetched.file)
            else:
                wheels.append(sandbox.wheel_of(source_of_archive(fetched.file)))
        return wheels

    return supply


@dataclass(frozen=True, kw_only=True)
class ResolutionTools:
    """The programs that resolve and build for one base.

    Attributes:
        base: The image that is extended.
        resolver: uv on this machine.
        sandbox: The base image, in which third-party code runs.
        program: The launcher's installer.
    """

    base: ExtendedBase
    resolver: Resolver
    sandbox: Sandbox
    program: Path


def resolve(
    resolution: ResolutionRequest,
    tools: ResolutionTools,
    facts: Facts,
    *,
    forbidden: tuple[str, ...] = (),
    before: ExtensionLock = NO_LOCK,
) -> Resolved:
    """Resolve requirements that have no lock, and fetch and build what is installed.

    Args:
        resolution: The requirements and sources.
        tools: The base and its tools.
        facts: All facts.
        forbidden: Texts of this machine that must not be in an image.
        before: The lock of other requirements: its versions stay where they can.

    Raises:
        ExtendError: The base cannot fulfil a requirement, or a project names a folder that
            cannot be taken.
        LockError: No set of releases fits, or an index cannot be reached.
        BuildError: The wheel of a source cannot be built.
    """
    session = _session(tools, forbidden)
    if not resolution.requested.hashed:
        session.before = {name: version for name, version, _ in PIN.findall(before.pins)}
    for source in resolution.sources:
        if source.folder:
            session.folders[Path(source.folder)] = source
    try:
        task, built = _install(session, resolution)
    except session.installer.RefusedError as error:
        hint = _way_out(error.newer, tools.base, facts)
        raise ExtendError(list(error.problems), hint=hint) from None

    projects = []
    for source, wheel in zip(resolution.sources, built, strict=True):
        name = _name_of(wheel)
        if source.name and canonicalize_name(source.name) != name:
            raise BuildError(f"{source.origin} is not {source.name}, which the requirement names")
        if source.origin == PROJECT_SOURCE:
            projects.append(name)
    session.notes += _old_releases(session, task.installation, built)

    lock = _make_lock(session, resolution, built, task.answer.left)
    indexes = "".join(f"{line}\n" for line in task.reading.indexes)
    lock = replace(
        lock,
        notes=tuple(session.notes),
        project=projects[0] if projects else "",
        pins=indexes + lock.pins,
    )
    resolved = _make_resolved(lock, resolution, session.fetched.values(), session, built)
    return replace(resolved, moved=_moves(before, lock, projects))


def _install(session: Session, resolution: ResolutionRequest) -> tuple[Any, list[Path]]:
    """Run the launcher's installer on the described base.

    Returns:
        The installer's task, and the wheels that were built from the resolution's sources.

    Raises:
        installer.RefusedError: The base cannot fulfil a requirement.
        LockError: uv refuses the requirements.
    """
    requested, sandbox, installer = resolution.requested, session.sandbox, session.installer
    projects: dict[str, WheelSource] = {}
    if not requested.hashed:
        projects = {_address_at(source): source for source in resolution.sources if source.folder}
    folder = session.resolver.folder / "inputs"
    words = [*resolution.words, *_files_of(requested, folder), *requested.words, *projects]
    options = argparse.Namespace(manifest=folder / "manifest.json", strict=resolution.strict)
    options.manifest.write_text(json.dumps(resolution.manifest), encoding="utf-8")
    task = installer.Task(session, options, words, folder)
    built = [sandbox.wheel_of(source) for source in resolution.sources]

    # uv has to be told the name of a project that only a build can say.
    requirements = {}
    for address, source in projects.items():
        requirements[address] = _as_requirement(address, _name_of(sandbox.wheel_of(source)))
    task.reading.words = [requirements.get(word, word) for word in task.reading.words]

    if requested.hashed:
        # A wheel that was built has no hash in the user's lines: it is installed on its own.
        status = task.run()
        if status == 0 and built:
            status = task.installation.install("--no-deps", *map(str, built))
    else:
        repositories = []
        for wheel, source in zip(built, resolution.sources, strict=True):
            if not source.folder:
                repositories.append(f"{wheel}{source.extras}")
        status = task.run(*repositories)
    if status:
        raise LockError(
            f"the requirements cannot be installed in {session.base.reference}:"
            f"\n{_last_error(session.resolver.log)}"
        )
    return task, built


def _moves(before: ExtensionLock, lock: ExtensionLock, projects: Sequence[str]) -> tuple[str, ...]:
    """Return a line for each package that the lock before had in another version."""
    versions = dict(lock.locked)
    lines = []
    for name, old_version in before.locked:
        new_version = versions.get(name, old_version)
        if new_version != old_version and name not in projects:
            lines.append(f"{name}: the lock moves from {old_version} to {new_version}")
    return tuple(lines)


def _name_of(wheel: Path) -> str:
    """Return the name of a wheel's distribution."""
    return parse_wheel_filename(wheel.name)[0]


def _address_at(source: WheelSource) -> str:
    """Return the word for a project's folder and its extras: ``ADDRESS[extra]``."""
    return f"{Path(source.folder).as_uri()}{source.extras}"


def _as_requirement(word: str, name: str) -> str:
    """Return the word for a project's folder as a requirement: ``pkg[extra] @ ADDRESS``."""
    address, bracket, extras = word.partition("[")
    return f"{name}{bracket}{extras} @ {address}"


def gather(lock: ExtensionLock, resolution: ResolutionRequest, tools: ResolutionTools) -> Resolved:
    """Return the files of a lock, each by its hash; without a network where all are known.

    Raises:
        LockError: An index no longer has a file, or has another one in its place.
        BuildError: The wheel of a source cannot be built.
    """
    session = _session(tools)
    resolver = tools.resolver
    built = [tools.sandbox.wheel_of(source) for source in resolution.sources]
    versions = dict(lock.locked)
    files: list[FetchedFile] = []
    missing_lines: dict[str, str] = {}
    head: list[str] = []
    for line in re.sub(r" \\\n\s+", " ", lock.pins).splitlines():
        hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", line)
        if not hashes:
            head.append(line)
            continue
        name = name_in(line)
        known_file = resolver.known_file(hashes[0])
        if known_file is None:
            missing_lines[name] = line
            continue
        is_direct = " @ " in line
        version = versions.get(name, "")
        files.append(_local_file(name, version, known_file, hashes[0], direct=is_direct))
    if missing_lines:
        files += _download_locked(resolution, session, [*head, *missing_lines.values()])

    own_files = _own_files(resolution.requested, resolver.folder / "inputs")
    local_files = [
        path for path in own_files if canonicalize_name(path.name.split("-")[0]) in lock.local
    ]
    return _make_resolved(
        lock, resolution, files, session, [*built, *_wheels(local_files, session)]
    )


def _download_locked(
    resolution: ResolutionRequest, session: Session, lines: Sequence[str]
) -> list[FetchedFile]:
    """Download the files of a lock's lines.

    uv says where they are: nothing is left to resolve.
    """
    resolver, installer = session.resolver, session.installer
    variables, options = installer.for_uv(installer.settings_of_pip(), resolver.folder)
    variables = {**os.environ, **variables, "UV_INDEX_STRATEGY": "unsafe-best-match"}
    trusted_hosts = re.findall(
        r"(?m)^--trusted-host[ =](\S+)", "\n".join(resolution.requested.lines)
    )
    options += [f"--allow-insecure-host={host}" for host in trusted_hosts]

    index_lines: list[str] = []
    file = resolution.requested.file
    if file is not None and not is_lock(file):
        # An index of a project may be for some of its packages only, and the lock's lines do not
        # say for which.
        variables["UV_PROJECT"] = str(file.parent.absolute())
        index_lines = [f"--extra-index-url {address}" for address in indexes_in(variables)]
    lock_file = resolver.file("lock.txt", [*index_lines, *lines])
    words = [*resolution.words, *options, "--no-deps", "-r", lock_file]
    empty_folder = Path(resolver.file("nothing/none", ())).parent
    lock = resolver.lock(Environment(empty_folder / "environment"), words, variables)
    if lock is None:
        raise LockError(f"uv does not find the files of the lock:\n{_last_error(resolver.log)}")
    return resolver.fetch(lock)


def _wheels(files: Sequence[Path], session: Session) -> list[Path]:
    fetched = [_local_file("", "", file, "", direct=True) for file in files]
    return [session.wheel_of(file) for file in fetched]


def _local_file(name: str, version: str, file: Path, sha256: str, *, direct: bool) -> FetchedFile:
    name = name or canonicalize_name(file.name.split("-")[0])
    return FetchedFile(
        name=name, version=version, file=file, sha256=sha256, direct=direct, local=direct
    )


def _session(tools: ResolutionTools, forbidden: tuple[str, ...] = ()) -> Session:
    """Return a session of the resolver, in which it and the sandbox know each other."""
    resolver, sandbox = tools.resolver, tools.sandbox
    environment = Environment(resolver.folder / "base")
    environment.describe(tools.base)
    installer = load_installer(tools.program)
    session = Session(tools.base, resolver, sandbox, installer, environment, forbidden)
    resolver.learn = session.learn
    sandbox.supply = supply_of(resolver, sandbox, installer)
    return session


def _files_of(requested: RequestedRequirements, folder: Path) -> list[str]:
    """Write the files of requirements, and return the words that name them."""
    _own_files(requested, folder)
    words = _words_for("-r", folder / "requirements.txt", requested.lines)
    words += _words_for("-c", folder / "constraints.txt", requested.constraints)
    return words


def _words_for(option: str, file: Path, lines: Sequence[str]) -> list[str]:
    """Write lines to a file, and return an option that names the file; nothing for no lines."""
    if not lines:
        return []
    text = "".join(f"{line}\n" for line in lines)
    file.write_text(text.replace(f"{INPUTS}/", f"{file.parent}/"), encoding="utf-8")
    return [option, str(file)]


def _own_files(requested: RequestedRequirements, folder: Path) -> list[Path]:
    """Write the wheels and archives that requirements name by a path, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths = []
    for name, file in sorted(requested.files.items()):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file.content)
        paths.append(path)
    return paths


def _make_lock(
    session: Session, resolution: ResolutionRequest, built: Sequence[Path], left: Sequence[str]
) -> ExtensionLock:
    """Return the lock of the fetched files.

    Args:
        session: It has the files.
        resolution: The requirements and sources.
        built: Wheels of the resolution's sources.
        left: Places of option lines that the installer has left out.
    """
    built_paths = {wheel.resolve() for wheel in built}
    session_folder = session.resolver.folder.resolve()
    project_folders = {Path(source.folder) for source in resolution.sources if source.folder}
    local: dict[str, str] = {}
    folders: dict[str, str] = {}
    repositories: dict[str, str] = {}
    pins: list[str] = []
    for name, file in sorted(session.fetched.items()):
        version = str(metadata_of(session.wheel_of(file))["Version"])
        path = file.file.resolve()
        source = session.source_of(file)
        is_copied = file.direct and file.local and path.is_relative_to(session_folder)
        if source is not None:
            local[name] = version
            if file.repository:
                repositories[file.repository] = name
            elif path not in project_folders:
                folders[os.path.relpath(path, resolution.beside)] = source.identity
        elif path in built_paths or is_copied:
            local[name] = version
        elif file.direct:
            local[name] = version
            address = _with_names(file.address, resolution.requested.variables)
            pins.append(_pin(f"{name} @ {address}", file.sha256))
        else:
            pins.append(_pin(f"{name}=={version}", file.sha256))
    return ExtensionLock(
        commits=dict(resolution.commits),
        local=local,
        folders=folders,
        repositories=repositories,
        pins="".join([*_lock_head(session, resolution, left), *pins]),
    )


def _pin(requirement: str, sha256: str) -> str:
    return f"{requirement} \\\n    --hash=sha256:{sha256}\n"


def _lock_head(session: Session, resolution: ResolutionRequest, left: Sequence[str]) -> list[str]:
    """Return the option lines of a lock: the indexes of its packages.

    Args:
        session: The session, with the fetched distributions.
        resolution: The requirements. A line may end with its place: ``  #@ requirements.txt:3``.
        left: Places of option lines that the installer has left out.
    """
    head = []
    for line in resolution.requested.lines:
        option, _, place = line.partition("  #@ ")
        if OPTIONS.match(line) and place not in left:
            head.append(f"{option}\n")
    vendor_index = str(resolution.manifest.get("wheel_index", ""))
    companions: Any = resolution.manifest.get("companions", {})
    if vendor_index and not session.fetched.keys().isdisjoint(companions):
        # torchvision, a companion of torch, may come from the index of torch's wheels for CUDA, and
        # uv's lock does not name the index of a file.
        head.append(f"--extra-index-url {vendor_index}\n")
    return head


def _with_names(address: str, variables: Iterable[str]) -> str:
    """Return an address with variables instead of their values, and without any other login.

    ``SECRET@HOST/x.whl`` becomes ``${TOKEN}@HOST/x.whl``.
    """
    for name in sorted(variables):
        value = os.environ[name]
        # uv quotes characters that an address may not have: with or without the slash.
        for quoted_value in {value, quote(value), quote(value, safe="")}:
            address = address.replace(quoted_value, f"${{{name}}}")
    has_variable_login = "${" in address.partition("@")[0]
    return address if has_variable_login else remove_credentials(address)


def _make_resolved(
    lock: ExtensionLock,
    resolution: ResolutionRequest,
    fetched: Iterable[FetchedFile],
    session: Session,
    built: Sequence[Path],
) -> Resolved:
    """Return a lock with the wheels to install: downloaded ones, and those that were built.

    Args:
        lock: The lock.
        resolution: The request, with the folders of wheels that the user named.
        fetched: The downloaded files; source archives are built.
        session: The session, which builds them.
        built: Wheels of folders and repositories.
    """
    link_folders = {folder.resolve() for folder in (*resolution.links, *resolution.requested.links)}
    wheels: dict[str, Path] = {}
    own_names = []
    for file in fetched:
        wheel = session.wheel_of(file)
        wheels[wheel.name] = wheel
        if file.local and file.sha256 and file.file.resolve().parent in link_folders:
            own_names.append(file.file.name)
    for wheel in built:
        wheels[wheel.name] = wheel
    sorted_wheels = tuple(wheels[name] for name in sorted(wheels))
    return Resolved(lock=lock, wheels=sorted_wheels, own=tuple(sorted(own_names)))


def _old_releases(session: Session, installation: Any, built: Sequence[Path]) -> list[str]:
    """Return a line for each release that was replaced long ago and that no requirement pins.

    Args:
        session: It has the fetched releases.
        installation: The installer's; it has the pinned names.
        built: Wheels of the resolution's sources, which are left out.
    """
    built_names = {_name_of(wheel) for wheel in built}
    oldest = datetime.now(UTC) - OLD
    environment = Environment(session.resolver.folder / "new")
    has_candidates = False
    for name, file in session.fetched.items():
        if name in built_names or name in installation.pinned:
            continue
        # A release that is younger cannot have been replaced before.
        if file.uploaded is None or file.uploaded < oldest:
            environment.add(session.wheel_of(file))
            has_candidates = True
    if not has_candidates:
        return []

    command = ["pip", "list", "--target", str(environment.folder), "--outdated"]
    command += ["--exclude-newer", f"{OLD.days} days", "--format", "json", *session.words[:2]]
    result = session.resolver.ask(*command, environment=installation.environment)
    if result.returncode != 0:
        return []
    return [
        f"{row['name']} {row['version']} is old:"
        f" {row['latest_version']} has been there for two years"
        for row in json.loads(result.stdout)
    ]


def _last_error(log: str) -> str:
    """Return uv's reason for a failure, without its earlier output."""
    start = log.rfind("\nerror: ")
    text = log[start:] if start >= 0 else log[-4000:]
    return remove_credentials(text.strip())
