"""Resolves the requirements of an extension on this machine, once, and has the
files of what was resolved.

What decides is the launcher's own installer (``install.py``), as in a job. It is given a base that
is only described (``extend.described``), uv with this machine's settings (``extend.resolver``), and
the base without either for what runs code of others (``extend.sandbox``).
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
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.utils import canonicalize_name, parse_wheel_filename

from trainworks.errors import BuildError, ExtendError, LockError
from trainworks.extend.constraints import targets_for
from trainworks.extend.cuda_compiler import Workbench, lacking
from trainworks.extend.described import Environment
from trainworks.extend.plan import PROJECT_SOURCE, WheelSource
from trainworks.extend.requirement_inputs import INPUTS, Wanted, is_lock
from trainworks.extend.requirements import NO_LOCK, PIN, ExtendedBase, ExtensionLock
from trainworks.extend.resolver import NONE, Fetched, Resolver, indexes_in, name_in
from trainworks.extend.sandbox import Supply, Workshop, metadata_of, source_of_archive
from trainworks.extend.vcs_sources import repository_source, source_at
from trainworks.facts.rows import Facts, TargetRow
from trainworks.host.downloads import without_credentials
from trainworks.host.uv import uv_program
from trainworks.plan.package_ownership import library_names

OLD = timedelta(days=730)
"""What was replaced by a newer release so long ago is named."""

OPTIONS = re.compile(
    r"--(?:index-url|extra-index-url|find-links|no-index|pre|no-binary|only-binary)\b.*|-[if]\s.*"
)
"""Lines that say where packages come from: the lock has them too."""


def manifest_of(
    base: ExtendedBase, bench: Workbench, row: TargetRow | None, facts: Facts
) -> dict[str, object]:
    """Return what the installer reads of the base: what is kept, and what goes with that."""
    there = {canonicalize_name(row.name) for row in base.distributions}
    frameworks = [each for each in facts.components if {*each.python, *each.python_cpu} & there]
    return {
        "protected": dict(base.kept),
        "companions": {
            name: component.python[0]
            for component in frameworks
            for name in component.companions
            if component.python[0] in there and name not in there
        },
        "libraries": library_names(frameworks, there, facts),
        "wheel_index": row.wheel_index if row else "",
        **lacking(bench, base, facts),
    }


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is asked for.

    Attributes:
        wanted: The requirements.
        sources: What wheels are built from, beside them.
        commits: Git requirement to commit.
        manifest: What the installer reads of the base.
        beside: Where the lock lies: what it names is seen from there.
        links: Folders of this machine with files: those of pip's settings.
        only_binary: Names of which no source archive is built.
        strict: Whether other builds of the framework are refused.
    """

    wanted: Wanted
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
        links = [str(path.absolute()) for path in self.wanted.links if path.is_dir()]
        found = [word for link in links for word in ("--find-links", link)]
        return [*found, *(f"--only-binary={name}" for name in self.only_binary)]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What is installed.

    Attributes:
        lock: Its lock.
        wheels: The wheels, those of source archives built.
        own: Names of files that lay on this machine.
        moved: A line for each that the lock before had in another version.
    """

    lock: ExtensionLock
    wheels: Sequence[Path]
    own: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()


@dataclass
class Session:
    """One resolution: the installer, the base as it would be, and what was fetched for it."""

    base: ExtendedBase
    resolver: Resolver
    workshop: Workshop
    installer: Any
    environment: Environment
    forbidden: tuple[str, ...] = ()
    said: list[str] = field(default_factory=list)
    fetched: dict[str, Fetched] = field(default_factory=dict)
    folders: dict[Path, WheelSource] = field(default_factory=dict)
    before: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> tuple[str, ...]:
        """What names the base's Python for uv."""
        return self.resolver.words

    def say(self, text: str) -> None:
        """Keep a line for the log."""
        self.said.append(text)

    def uv(self) -> str:
        """Return the path of uv."""
        return uv_program()

    def distributions(self) -> Iterable[metadata.Distribution]:
        """Return what the base would have now."""
        return self.environment

    def markers(self) -> dict[str, str]:
        """Return what environment markers are compared with."""
        return self.base.markers

    def tags(self) -> Sequence[str]:
        """Return the tags of wheels that fit."""
        return self.resolver.tags

    def install(self, installation: Any, words: Sequence[str], *, quiet: bool) -> int:  # noqa: ARG002 (nothing is shown)
        """Find out what an installation would change, fetch it, and change the description.

        Return a status.
        """
        words = [word for word in words if not word.startswith(("--target=", "--prefix="))]
        before = NONE if self.fetched else self.before
        lock = self.resolver.lock(self.environment, words, installation.environment, before)
        if lock is None:
            return 1
        for each in self.resolver.fetch(lock):
            self.fetched[each.name] = each
            self.environment.add(self.wheel_of(each))
        return 0

    def import_error(self, modules: Sequence[str]) -> str:
        """Import modules in the base with what would be installed.

        Return the last words of an error.
        """
        return self.workshop.error_of(modules, self.wheels())

    def wheel_of(self, each: Fetched) -> Path:
        """Return the wheel of a file: it, or the one that is built of it."""
        if (source := self.source_of(each)) is not None:
            return self.workshop.wheel_of(source)
        if each.file.name.endswith(".whl"):
            return each.file
        return self.workshop.wheel_of(replace(source_of_archive(each.file), name=each.name))

    def source_of(self, each: Fetched) -> WheelSource | None:
        """Return what the wheel of a folder or a repository is built from; ``None`` for a file."""
        if each.repository:
            return repository_source(each.repository, each.name, os.environ)
        return self.folder_at(each.file) if each.file.is_dir() else None

    def folder_at(self, path: Path) -> WheelSource:
        """Return a project's folder on this machine, which a requirement or
        another project names.
        """
        path = path.resolve()
        if path not in self.folders:
            self.folders[path] = source_at(path, self.forbidden)
        return self.folders[path]

    def learn(self, folder: Path) -> Message:
        """Return what a project requires that says so only when it is built."""
        if folder.resolve().is_relative_to(self.resolver.cache.resolve()):
            return self.workshop.metadata_of(folder)
        return metadata_of(self.workshop.wheel_of(self.folder_at(folder)))

    def selected(self, installation: Any, words: Sequence[str]) -> dict[str, str]:
        """Return what uv takes of a lock."""
        nothing = Path(self.resolver.file("nothing/none", ())).parent
        found = self.resolver.selected(nothing, words, installation.environment)
        if found is None:
            raise self.installer.RefusedError(
                f"uv cannot use {words[1]}: {_last(self.resolver.log)}"
            )
        return found

    def lacks_wheel(self, installation: Any, words: Sequence[str]) -> bool:
        """Whether no wheel fits what words ask for; False where an index does not answer."""
        log = self.resolver.log
        done = self.resolver.ask(
            "pip", "install", *self.words, *words, environment=installation.environment
        )
        self.resolver.log = log
        return done.returncode == 1

    def wheels(self) -> list[Path]:
        """Return all wheels."""
        return [self.wheel_of(each) for each in self.fetched.values()]


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
    """A base of which the installer asks no more than its Python."""

    base: ExtendedBase

    def markers(self) -> dict[str, str]:
        """Return what environment markers are compared with."""
        return self.base.markers


def check_python(files: Iterable[Path], base: ExtendedBase, program: Path, facts: Facts) -> None:
    """Refuse projects, locks and scripts that are for another Python than the base's, before
    anything is resolved.

    Args:
        files: They may say nothing.
        base: What is extended.
        program: The launcher's installer, whose rule it is.
        facts: All facts: they say which targets have that Python.

    Raises:
        ExtendError: With all that are for another one.
    """
    installer = load_installer(program)
    problems: list[str] = []
    wanted: dict[str, str] = {}
    for file in files:
        try:
            installer.refuse_python(_Described(base), file, is_asked_for=False)
        except installer.RefusedError as error:
            problems += error.problems
            wanted |= error.newer
    if problems:
        ways = targets_for(list(wanted.items()), base, facts) if wanted else []
        raise ExtendError(problems, hint=_way_out(ways))


def _way_out(targets: Sequence[str]) -> str:
    """Return what to do instead of an extension that was refused."""
    return f"extend {' or '.join(targets)}; nothing was built" if targets else "nothing was built"


def supply_of(resolver: Resolver, workshop: Workshop, installer: Any) -> Supply:
    """Return what gets the wheels of build requirements: an environment of
    their own, and nothing that is kept.
    """
    counted = iter(range(10_000))
    settings = cache(installer.settings_of_pip)

    def supply(requires: Sequence[str], options: Sequence[str]) -> list[Path]:
        folder = resolver.folder / f"supply-{next(counted)}"
        folder.mkdir(mode=0o700)
        variables, _ = installer.for_uv(settings(), folder)
        own = {**os.environ, **variables}
        words = (*options, "-r", resolver.file("requires.txt", list(requires)))
        lock = resolver.lock(Environment(folder / "environment"), words, own)
        if lock is None:
            raise LockError(f"what a build requires cannot be resolved:\n{_last(resolver.log)}")
        found = resolver.fetch(lock)
        return [
            (
                each.file
                if each.file.name.endswith(".whl")
                else workshop.wheel_of(source_of_archive(each.file))
            )
            for each in found
        ]

    return supply


def resolve(
    order: Order,
    base: ExtendedBase,
    resolver: Resolver,
    workshop: Workshop,
    program: Path,
    facts: Facts,
    *,
    forbidden: tuple[str, ...] = (),
    before: ExtensionLock = NO_LOCK,
) -> Resolved:
    """Resolve requirements that have no lock, and fetch and build what is installed.

    Args:
        order: What is asked for.
        base: What it is installed on.
        resolver: uv on this machine.
        workshop: The base, for what runs code of others.
        program: The launcher's installer.
        facts: All facts.
        forbidden: Texts of this machine that must not be in an image.
        before: The lock of other requirements: what it has stays, where it can.

    Raises:
        ExtendError: The base cannot give what a line asks for, or a folder that
            a project names cannot be taken.
        LockError: No set of releases fits, or an index cannot be reached.
        BuildError: The wheel of a source cannot be built.
    """
    said: list[str] = []
    session = _session(base, resolver, workshop, program, said, forbidden)
    installer = session.installer
    folder = resolver.folder / "inputs"
    session.before = (
        {}
        if order.wanted.hashed
        else {name: version for name, version, _ in PIN.findall(before.pins)}
    )
    session.folders |= {Path(source.folder): source for source in order.sources if source.folder}
    hashed = order.wanted.hashed
    folders = {} if hashed else {_address_at(each): each for each in order.sources if each.folder}
    words = [*order.words, *_files_of(order.wanted, folder), *order.wanted.words, *folders]
    given = argparse.Namespace(manifest=folder / "manifest.json", strict=order.strict)
    given.manifest.write_text(json.dumps(order.manifest), encoding="utf-8")
    built: list[Path] = []
    try:
        task = installer.Task(session, given, words, folder)
        built += [workshop.wheel_of(source) for source in order.sources]
        # uv has to be told the name of a project that says it only when it is built.
        names = {
            word: parse_wheel_filename(workshop.wheel_of(each).name)[0]
            for word, each in folders.items()
        }
        task.reading.words = [_named(word, names.get(word, "")) for word in task.reading.words]
        repositories = [
            f"{wheel}{source.extras}"
            for wheel, source in zip(built, order.sources, strict=True)
            if not source.folder
        ]
        status = task.run(*(() if hashed else repositories))
        if status == 0 and hashed and built:
            status = task.installation.install("--no-deps", *map(str, built))
    except installer.RefusedError as error:
        ways = targets_for(list(error.newer.items()), base, facts) if error.newer else []
        raise ExtendError(list(error.problems), hint=_way_out(ways)) from None
    if status:
        raise LockError(
            f"the requirements cannot be installed in {base.reference}:\n{_last(resolver.log)}"
        )
    for source, wheel in zip(order.sources, built, strict=True):
        name = parse_wheel_filename(wheel.name)[0]
        if source.name and canonicalize_name(source.name) != name:
            raise BuildError(f"{source.origin} is not {source.name}, which the requirement names")
    said += _old(session, task.installation, [wheel.name for wheel in built])
    projects = [
        parse_wheel_filename(wheel.name)[0]
        for source, wheel in zip(order.sources, built, strict=True)
        if source.origin == PROJECT_SOURCE
    ]
    lock = _lock_of(session, order, built, task.answer.left)
    indexes = "".join(f"{line}\n" for line in task.reading.indexes)
    lock = replace(
        lock, notes=tuple(said), project=next(iter(projects), ""), pins=indexes + lock.pins
    )
    now = dict(lock.locked)
    moved = [
        f"{name}: the lock moves from {old} to {now[name]}"
        for name, old in before.locked
        if now.get(name, old) != old and name not in projects
    ]
    return replace(
        _resolved(lock, order, session.fetched.values(), session, built), moved=tuple(moved)
    )


def _address_at(source: WheelSource) -> str:
    """Return the word that names a folder, and its extras."""
    return f"{Path(source.folder).as_uri()}{source.extras}"


def _named(word: str, name: str) -> str:
    """Return a word that names a folder as a requirement with its name; another word as it is."""
    address, bracket, extras = word.partition("[")
    return f"{name}{bracket}{extras} @ {address}" if name else word


def gather(
    lock: ExtensionLock,
    order: Order,
    base: ExtendedBase,
    resolver: Resolver,
    workshop: Workshop,
    program: Path,
) -> Resolved:
    """Return what a lock says: each file by its hash; without a network where all are known.

    Raises:
        LockError: An index does not have a file any more, or another one in its place.
        BuildError: The wheel of a source cannot be built.
    """
    session = _session(base, resolver, workshop, program, [])
    built = [workshop.wheel_of(source) for source in order.sources]
    found: list[Fetched] = []
    missing: set[str] = set()
    head: list[str] = []
    pins: dict[str, str] = {}
    for line in re.sub(r" \\\n\s+", " ", lock.pins).splitlines():
        hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", line)
        if not hashes:
            head.append(line)
            continue
        name, known = name_in(line), resolver.known_file(hashes[0])
        pins[name] = line
        if known is not None:
            version = dict(lock.locked).get(name, "")
            found.append(_as_fetched(name, version, known, hashes[0], direct=" @ " in line))
        else:
            missing.add(name)
    folder = resolver.folder / "inputs"
    local = [
        path
        for path in _own_files(order.wanted, folder)
        if canonicalize_name(path.name.split("-")[0]) in lock.local
    ]
    if missing:
        lines = [line for name, line in pins.items() if name in missing]
        found += _downloaded(order, session, [*head, *lines])
    return _resolved(lock, order, found, session, [*built, *_wheels(local, session)])


def _downloaded(order: Order, session: Session, lines: Sequence[str]) -> list[Fetched]:
    """Return the files of lines of a lock. uv is asked where they are: nothing
    is left to resolve.
    """
    resolver, installer = session.resolver, session.installer
    variables, options = installer.for_uv(installer.settings_of_pip(), resolver.folder)
    variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    trusted = re.findall(r"(?m)^--trusted-host[ =](\S+)", "\n".join(order.wanted.lines))
    options += [f"--allow-insecure-host={host}" for host in trusted]
    file = order.wanted.file
    given = {**os.environ, **variables}
    more: list[str] = []
    if file is not None and not is_lock(file):
        # An index of a project may be for some of its packages only, and the
        # lock's lines do not say for which.
        given["UV_PROJECT"] = str(file.parent.absolute())
        more = [f"--extra-index-url {address}" for address in indexes_in(given)]
    words = [*order.words, *options, "--no-deps", "-r", resolver.file("lock.txt", [*more, *lines])]
    nothing = Environment(Path(resolver.file("nothing/none", ())).parent / "environment")
    lock = resolver.lock(nothing, words, given)
    if lock is None:
        raise LockError(f"uv does not find the files of the lock:\n{_last(resolver.log)}")
    return resolver.fetch(lock)


def _wheels(files: Sequence[Path], session: Session) -> list[Path]:
    return [session.wheel_of(_as_fetched("", "", file, "", direct=True)) for file in files]


def _as_fetched(name: str, version: str, file: Path, sha256: str, *, direct: bool) -> Fetched:
    name = name or canonicalize_name(file.name.split("-")[0])
    return Fetched(
        name=name, version=version, file=file, sha256=sha256, direct=direct, local=direct
    )


def _session(
    base: ExtendedBase,
    resolver: Resolver,
    workshop: Workshop,
    program: Path,
    said: list[str],
    forbidden: tuple[str, ...] = (),
) -> Session:
    environment = Environment(resolver.folder / "base")
    environment.describe(base)
    installer = load_installer(program)
    session = Session(base, resolver, workshop, installer, environment, forbidden, said=said)
    resolver.learn = session.learn
    workshop.supply = supply_of(resolver, workshop, installer)
    return session


def _files_of(wanted: Wanted, folder: Path) -> list[str]:
    """Write the files of requirements, and return the words that name them."""
    _own_files(wanted, folder)
    words: list[str] = []
    for option, name, lines in (
        ("-r", "requirements.txt", wanted.lines),
        ("-c", "constraints.txt", wanted.constraints),
    ):
        if lines:
            text = "".join(f"{line}\n" for line in lines).replace(f"{INPUTS}/", f"{folder}/")
            (folder / name).write_text(text, encoding="utf-8")
            words += [option, str(folder / name)]
    return words


def _own_files(wanted: Wanted, folder: Path) -> list[Path]:
    """Write the wheels and archives that requirements name by a path, and return where they are."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = []
    for name, file in sorted(wanted.files.items()):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file.content)
        found.append(path)
    return found


def _lock_of(
    session: Session, order: Order, built: Sequence[Path], left: Sequence[str]
) -> ExtensionLock:
    own = {wheel.resolve() for wheel in built}
    here = session.resolver.folder.resolve()
    asked_for = {Path(source.folder) for source in order.sources if source.folder}
    local: dict[str, str] = {}
    folders: dict[str, str] = {}
    repositories: dict[str, str] = {}
    pins: list[str] = []
    for name, each in sorted(session.fetched.items()):
        version = str(metadata_of(session.wheel_of(each))["Version"])
        path = each.file.resolve()
        source = session.source_of(each)
        if source is not None:
            local[name] = version
            if each.repository:
                repositories[each.repository] = name
            elif path not in asked_for:
                folders[os.path.relpath(path, order.beside)] = source.identity
            continue
        if path in own or (each.direct and path.is_relative_to(here) and each.local):
            local[name] = version
            continue
        line = f"{name}=={version}"
        if each.direct:
            local[name] = version
            line = f"{name} @ {_with_names(each.address, order.wanted.variables)}"
        pins.append(f"{line} \\\n    --hash=sha256:{each.sha256}\n")
    options = [line.partition("  #@ ") for line in order.wanted.lines if OPTIONS.match(line)]
    head = [f"{line}\n" for line, _, place in options if place not in left]
    vendors = str(order.manifest.get("wheel_index", ""))
    companions: Any = order.manifest.get("companions", {})
    if vendors and not session.fetched.keys().isdisjoint(companions):
        # One of them may come from there, and uv's lock does not name the index of a file.
        head.append(f"--extra-index-url {vendors}\n")
    return ExtensionLock(
        commits=dict(order.commits),
        local=local,
        folders=folders,
        repositories=repositories,
        pins="".join([*head, *pins]),
    )


def _with_names(address: str, variables: Iterable[str]) -> str:
    """Return an address with the names of the user's variables in the place of
    their values, and with no login else.
    """
    for name in sorted(variables):
        value = os.environ[name]
        # uv quotes what an address may not have: with or without the slash.
        for written in {value, quote(value), quote(value, safe="")}:
            address = address.replace(written, f"${{{name}}}")
    return address if "${" in address.partition("@")[0] else without_credentials(address)


def _resolved(
    lock: ExtensionLock,
    order: Order,
    fetched: Iterable[Fetched],
    session: Session,
    built: Sequence[Path],
) -> Resolved:
    files = list(fetched)
    wheels = [session.wheel_of(each) for each in files]
    folders = {each.resolve() for each in (*order.links, *order.wanted.links)}
    own = [
        each.file.name
        for each in files
        if each.local and each.file.resolve().parent in folders and each.sha256
    ]
    unique = {wheel.name: wheel for wheel in (*wheels, *built)}
    return Resolved(
        lock=lock, wheels=tuple(unique[name] for name in sorted(unique)), own=tuple(sorted(own))
    )


def _old(session: Session, installation: Any, own: Sequence[str]) -> list[str]:
    """Return a line for each release that was replaced long ago, and that no line asks for."""
    local = {parse_wheel_filename(name)[0] for name in own}
    folder = Environment(session.resolver.folder / "new")
    moment = datetime.now(UTC) - OLD
    found = [
        name for name in session.fetched if name not in local and name not in installation.pinned
    ]
    # What was released since then cannot have been replaced before it.
    uploaded = {name: session.fetched[name].uploaded for name in found}
    names = [name for name, when in uploaded.items() if when is None or when < moment]
    for name in names:
        folder.add(session.wheel_of(session.fetched[name]))
    if not names:
        return []
    words = (
        "list",
        "--target",
        str(folder.folder),
        "--outdated",
        "--exclude-newer",
        f"{OLD.days} days",
        "--format",
        "json",
    )
    python = session.words[:2]
    done = session.resolver.ask("pip", *words, *python, environment=installation.environment)
    rows = json.loads(done.stdout) if done.returncode == 0 else ()
    return [
        f"{row['name']} {row['version']} is old:"
        f" {row['latest_version']} has been there for two years"
        for row in rows
    ]


def _last(log: str) -> str:
    """Return uv's reason, without what it said before."""
    text = log[log.rfind("\nerror: ") :] if "\nerror: " in log else log[-4000:]
    return without_credentials(text.strip())
