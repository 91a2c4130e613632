"""What runs code of others: builds of wheels, and imports, in the base image
without secrets and without a network.
"""

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
from dataclasses import replace
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
    Question,
    Recipes,
    packages_image,
    render_packages,
    render_question,
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
"""Of a project that does not say what builds it (PEP 517)."""

PINS = "install.txt"
"""Among the wheels: each with its version and hash."""

_SETUP_NAME = re.compile(r"(?m)(?:^|[\s(,])name\s*=\s*[\"']?([A-Za-z0-9][\w.-]*)(?=[\"']|\s*$)")
"""How ``setup(name="...")`` and ``setup.cfg`` write a project's name."""

_ROUNDS = 4
_LARGEST_ANSWER = 4_000_000_000

Supply = Callable[[Sequence[str], Sequence[str]], list[Path]]
"""Returns the wheels of requirements, in an environment of their own.

The second are options of uv.
"""


class Workshop:
    """The base image as a place where code of others runs."""

    def __init__(
        self,
        plan: ExtensionPlan,
        recipes: Recipes,
        bench: Workbench,
        engine: Engine,
        settings: HostSettings,
        options: BuildOptions,
        folder: Path,
        *,
        packages: AddFiles,
        network: bool,
    ) -> None:
        """Remember what a build is made of.

        Args:
            plan: The extension: its base and Debian packages.
            recipes: What contexts are rendered from.
            bench: What wheels are built with.
            engine: What builds.
            settings: This machine's: steps get its proxies where they have a network.
            options: How to build.
            folder: A private one.
            packages: Puts the files of the Debian packages into a context.
            network: Whether builds of wheels have a network.
        """
        self._plan, self._recipes, self._bench, self._engine = plan, recipes, bench, engine
        self._settings, self._options, self._folder = (
            settings,
            replace(options, output=None),
            folder,
        )
        self._packages, self._network = packages, network
        self._progress = BuildProgress(verbose=options.verbose)
        self._started = False
        self._built: dict[str, Path] = {}
        self._building: list[str] = []
        self.supply: Supply = lambda _requires, _options: []

    @property
    def start(self) -> str:
        """The image that steps begin with, which is made where Debian packages are asked for."""
        plan, name = self._plan, packages_image(self._plan, self._recipes)
        if plan.apt and not self._started:
            rendering = render_packages(plan, self._recipes)
            spec = ImageSpec(
                name=plan.tag,
                tags=(name,),
                rendering=rendering,
                settings=replace(self._settings, proxies={}),
                secrets={},
                add_files=self._packages,
                architecture=plan.base.architecture,
                network="none",
            )
            build_context(spec, {}, self._engine, self._options, self._progress)
        self._started = True
        return name

    def close(self) -> None:
        """Take away the name of what was made on the way; its layers are the image's."""
        name = packages_image(self._plan, self._recipes)
        if self._plan.apt and self._started:
            self._engine.remove(name)
        self._started = False

    def metadata_of(self, folder: Path) -> Message:
        """Return what a project in a folder requires, by a build of it."""
        return metadata_of(self.wheel_of(source_of_folder(folder)))

    def wheel_of(self, source: WheelSource) -> Path:
        """Return the wheel of a source: built now, or before for the same base
        with the same compiler.

        Raises:
            BuildError: It cannot be built.
        """
        base = self._plan.base
        is_whole = self._is_whole(source)
        parts = (
            source.digest,
            base.identifier,
            self._bench.lines,
            self._plan.apt,
            self._network,
            is_whole,
        )
        key = hashlib.sha256(repr(parts).encode()).hexdigest()
        if key in self._built:
            return self._built[key]
        place = (
            self._folder / "built" if self._options.no_cache else cache_folder(os.environ, "built")
        )
        found = [*(place / key).glob("*.whl")]
        if not found:
            if key in self._building:
                raise BuildError(f"{source.origin} needs itself to be built")
            self._building.append(key)
            try:
                found = [self._build(source, place / key)]
            finally:
                self._building.remove(key)
        self._built[key] = found[0]
        return found[0]

    def _is_whole(self, source: WheelSource) -> bool:
        """Whether a source is built with the base's packages in sight."""
        return not set(_names_of(source)).isdisjoint(self._bench.whole)

    def error_of(self, modules: Sequence[str], wheels: Sequence[Path]) -> str:
        """Return why an import fails, with these wheels on the base; ``""`` where it does not."""
        local: dict[str, str] = {parse_wheel_filename(each.name)[0]: "" for each in wheels}
        lock = ExtensionLock(local=local).text.encode()
        files = [SourceFile(path=f"inputs/{LOCK}", content=lock)]
        question = Question(origin="", files=files, bench=BARE, modules=tuple(modules))

        def add(context: Path) -> tuple[str, ...]:
            put_wheels(wheels, context / "wheels")
            return ()

        return self._ask(question, add).get("error", b"").decode("utf-8", "replace").strip()

    def _build(self, source: WheelSource, target: Path) -> Path:
        say(f"  building {source.origin}")
        project = _project_of(source)
        whole = self._is_whole(source)
        requires = list(project["requires"])
        if whole:
            there = {canonicalize_name(row.name) for row in self._plan.base.distributions}
            requires = [each for each in requires if not _is_there(each, there)]
        order = {
            **project,
            "requires": requires,
            "subdirectory": source.subdirectory,
            "whole": whole,
            "environment": dict(self._bench.variables),
        }
        locked = self._bench.requirements.splitlines()
        tools = self.supply(locked, ("--no-deps",)) if locked else []
        more: list[str] = []
        for _ in range(_ROUNDS):
            links = self.supply([*requires, *more], ()) if requires or more else []
            files = [
                SourceFile(path="source/source.tar", content=source.archive),
                SourceFile(path="source/order.json", content=json.dumps(order).encode()),
            ]
            question = Question(
                origin=source.origin,
                files=files,
                bench=self._bench,
                tools=bool(tools),
                isolated="" if whole else next(iter(_names_of(source)), ""),
            )
            answer = self._ask(question, _adding(links, tools))
            wheels = sorted(name for name in answer if name.endswith(".whl"))
            if wheels:
                return _kept(wheels[0], answer[wheels[0]], target, source)
            asked = _asked(answer.get("asked.json", b"[]"))
            if set(asked) <= set(more):
                break
            more = [*more, *(each for each in asked if each not in more)]
        raise BuildError(
            f"{source.origin}: its build gives no wheel, and asks for"
            f" {', '.join(more) or 'nothing'}"
        )

    def _ask(self, question: Question, add: Callable[[Path], tuple[str, ...]]) -> dict[str, bytes]:
        """Return the files of an answer, by their names."""
        _ = self.start
        tag = f"trainworks/question:{uuid4().hex[:12]}"
        settings = replace(self._settings, proxies=_without_logins(self._settings.proxies))
        spec = ImageSpec(
            name=self._plan.tag,
            tags=(tag,),
            rendering=render_question(self._plan, self._recipes, question),
            settings=settings,
            secrets={},
            add_files=add,
            architecture=self._plan.base.architecture,
            # Never the host's own: what listens on its loopback trusts who is on this machine.
            network="default" if self._network and not question.modules else "none",
        )
        try:
            build_context(spec, {}, self._engine, self._options, self._progress)
            return self._answer(tag)
        except BuildError as error:
            raise BuildError(error.message, hint=self._advice(question.isolated)) from error
        finally:
            self._engine.remove(tag)

    def _answer(self, tag: str) -> dict[str, bytes]:
        found = {}
        with self._engine.layers(tag) as layers:
            for layer in layers:
                for member in layer.archive:
                    file = layer.archive.extractfile(member) if member.isfile() else None
                    if file is not None:
                        with file:
                            found[member.name.rsplit("/", 1)[-1]] = file.read(_LARGEST_ANSWER)
        return found

    def _advice(self, isolated: str) -> str:
        """Return what may help a build that failed.

        Args:
            isolated: Name of what was built without the base's packages; ``""`` for another step.
        """
        base = self._plan.base
        words = []
        if isolated:
            words.append(
                "If the build imports torch or another package of the base:"
                f" --no-build-isolation {isolated}."
            )
        if not base.compiler:
            how = "add --apt g++ --apt python3-dev" if base.apt else "use a base that has one"
            words.append(f"{base.reference} has no C compiler. If a build needs one: {how}.")
        if not self._network:
            words.append("Builds have no network. If a build downloads something: --build-network")
        return " ".join(words) or "the lines above are the build's own"


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
    def add(context: Path) -> tuple[str, ...]:
        for files, name in ((links, "links"), (tools, "compiler")):
            for file in files:
                link_or_copy(file, context / name / file.name)
        return ()

    return add


def _kept(name: str, content: bytes, target: Path, source: WheelSource) -> Path:
    """Write a built wheel to a folder of its own, complete or not at all.

    It is what code of others has made.
    """
    try:
        built, _, _, _ = parse_wheel_filename(name)
    except InvalidWheelFilename as error:
        raise BuildError(
            f"{source.origin}: its build gives {name!r}, which is not a wheel's name"
        ) from error
    if source.name and built != canonicalize_name(source.name):
        raise BuildError(f"{source.origin} is not {source.name}, which the requirement names")
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True, mode=0o700)
    (draft / name).write_bytes(content)
    said = canonicalize_name(str(metadata_of(draft / name)["Name"]))
    if said != built:
        raise BuildError(
            f"{source.origin}: its build gives {name}, whose metadata are those of {said}"
        )
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    return target / name


def _asked(content: bytes) -> list[str]:
    """Return the requirements that a build backend asks for: text of others."""
    try:
        found = json.loads(content)
    except ValueError:
        return []
    plain = [each for each in _texts(found) if re.match(r"[A-Za-z0-9]", each)]
    return [each for each in plain if each.isprintable()]


def _is_there(requirement: str, names: Container[str]) -> bool:
    found = re.match(r"[A-Za-z0-9][\w.-]*", requirement)
    return found is not None and canonicalize_name(found.group()) in names


def _names_of(source: WheelSource) -> list[str]:
    """Return the names by which people know a project before it is built: its
    own, its folder's, its repository's.
    """
    place = source.origin.partition("@")[0].removesuffix(".git").rstrip("/").rpartition("/")[2]
    own = [source.name, str(_project_of(source)["name"]), *_names_in_setup(source)]
    found = [*own, Path(source.folder).name, place.partition(" ")[0]]
    return list(
        dict.fromkeys(canonicalize_name(name) for name in found if name and name[0].isalnum())
    )


def _names_in_setup(source: WheelSource) -> list[str]:
    """Return the names that a project's ``setup.cfg`` and ``setup.py`` have as words.

    They are not run.
    """
    folder = "/".join(filter(None, ("source", source.subdirectory.strip("/"))))
    found: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(source.archive)) as archive:
        for member in archive:
            if os.path.normpath(member.name) not in (f"{folder}/setup.cfg", f"{folder}/setup.py"):
                continue
            file = archive.extractfile(member) if member.isfile() else None
            found += _SETUP_NAME.findall(file.read().decode("utf-8", "replace")) if file else []
    return found


def _project_of(source: WheelSource) -> dict[str, Any]:
    """Return what builds a source, as its ``pyproject.toml`` says."""
    path = "/".join(filter(None, ("source", source.subdirectory.strip("/"), "pyproject.toml")))
    system: dict[str, object] = {}
    name = ""
    with tarfile.open(fileobj=io.BytesIO(source.archive)) as archive:
        for member in archive:
            if os.path.normpath(member.name) == path and member.isfile():
                file = archive.extractfile(member)
                text = file.read().decode("utf-8", "replace") if file else ""
                try:
                    content = tomllib.loads(text)
                    system = content.get("build-system", {})
                    name = str(content.get("project", {}).get("name", ""))
                except tomllib.TOMLDecodeError as error:
                    raise BuildError(
                        f"{source.origin}: pyproject.toml is not TOML: {error}"
                    ) from error
    if not isinstance(system, dict):
        raise BuildError(f"{source.origin}: build-system in pyproject.toml is not a table")
    return {
        "name": name,
        "requires": _texts(system.get("requires", DEFAULT_REQUIRES)),
        "backend": str(system.get("build-backend", DEFAULT_BACKEND)),
        "backend_path": _texts(system.get("backend-path", ())),
    }


def _texts(value: object) -> list[str]:
    return (
        [each for each in value if isinstance(each, str)]
        if isinstance(value, (list, tuple))
        else []
    )


def metadata_of(wheel: Path) -> Message:
    """Return the metadata of a wheel; raises ``BuildError`` for what is none."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [
                each
                for each in archive.namelist()
                if re.fullmatch(r"[^/]+\.dist-info/METADATA", each)
            ]
            text = archive.read(names[0]).decode("utf-8", "replace")
    except (OSError, zipfile.BadZipFile, IndexError) as error:
        raise BuildError(f"{wheel.name} is not a wheel with metadata: {error}") from error
    return HeaderParser().parsestr(text)


def source_of_folder(folder: Path) -> WheelSource:
    """Return an unpacked project as what a wheel is built from."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() or path.is_symlink()]
    rows = [(path.relative_to(folder).as_posix(), path) for path in files]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, path in rows:
            member = archive.gettarinfo(path, f"source/{name}")
            _normalise(member)
            content = io.BytesIO(path.read_bytes()) if member.isfile() else None
            archive.addfile(member, content)
    return _named(buffer.getvalue(), folder.name)


def source_of_archive(file: Path) -> WheelSource:
    """Return a source archive as what a wheel is built from.

    The same for the same content in another form.

    Raises:
        BuildError: It is not an archive.
    """
    entries: list[tuple[tarfile.TarInfo, bytes | None]] = []
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as packed:
                for entry in packed.infolist():
                    if not entry.is_dir():
                        member = tarfile.TarInfo(entry.filename)
                        member.mode = entry.external_attr >> 16 or 0o644
                        entries.append((member, packed.read(entry)))
        else:
            with tarfile.open(file) as packed_tar:
                for member in packed_tar:
                    stream = (
                        packed_tar.extractfile(member) if member.isreg() or member.islnk() else None
                    )
                    if stream is not None:
                        member.type, member.linkname = tarfile.REGTYPE, ""
                        entries.append((member, stream.read()))
                    elif member.issym():
                        entries.append((member, None))
    except (OSError, tarfile.TarError, zipfile.BadZipFile, KeyError) as error:
        raise BuildError(f"{file.name} is not a source archive: {error}") from error
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member, content in sorted(entries, key=lambda entry: _inner(entry[0].name)):
            if inner := _inner(member.name):
                member.name = f"source/{inner}"
                member.size = len(content or b"")
                _normalise(member)
                archive.addfile(member, None if content is None else io.BytesIO(content))
    return _named(buffer.getvalue(), file.name)


def _inner(name: str) -> str:
    """Return the path of a member below the one folder that every source archive has."""
    return os.path.normpath(name).removeprefix("./").partition("/")[2]


def _normalise(member: tarfile.TarInfo) -> None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = EPOCH
    member.mode = 0o755 if member.mode & 0o100 else 0o644
    member.pax_headers = {}


def _named(archive: bytes, origin: str) -> WheelSource:
    """Return a source with the name that its own ``PKG-INFO`` says."""
    found = WheelSource(archive=archive, origin=origin)
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        member = next((each for each in opened if each.name == "source/PKG-INFO"), None)
        file = opened.extractfile(member) if member is not None and member.isfile() else None
        if file is None:
            return found
        said = HeaderParser().parsestr(file.read().decode("utf-8", "replace"))
    name, version = (
        re.sub(r"[^\w.+!-]", "", str(said[each] or "")) for each in ("Name", "Version")
    )
    return replace(found, name=name, origin=f"{name} {version}") if name else found


def _without_logins(proxies: Mapping[str, str]) -> dict[str, str]:
    """Return the proxies that need no login: code of others sees them."""
    return {name: value for name, value in proxies.items() if "@" not in value}
