"""``build.py extend``: base, requirements and code become a plan, its rendering and an image (``build.image``).

Problems are looked for in two rounds, and each round reports all of them at once: first what this machine's files say
(``extend.inputs``), without an engine; then what the base image says (``extend.base``), before anything is built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from trainworks.build.context import write_output
from trainworks.build.image import ImageSpec, build_image
from trainworks.build.order import BuildOptions
from trainworks.build.session import BuildReport
from trainworks.engine import choose
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.errors import ExtendError, OutputError
from trainworks.extend.base import check_fit, find_base
from trainworks.extend.inputs import ExtensionInputs, notes, read_inputs
from trainworks.extend.kept import checks_again, left_behind, line_of, same_version
from trainworks.extend.lock import (
    lock_path_of,
    lock_requirements,
    locked_archives,
    locked_commits,
    locked_notes,
    locked_removals,
    release_dates,
    with_pins,
)
from trainworks.extend.plan import ExtensionPlan, WheelSource, make_extension
from trainworks.extend.reading.lines import locked_versions, read_requirements
from trainworks.extend.reading.options import choice_of, settings_with, without_vendor
from trainworks.extend.reading.selection import Kept
from trainworks.extend.reading.wanted import with_locks
from trainworks.extend.render import RECIPES, render_extension, render_wheels
from trainworks.extend.request import ExtendRequest
from trainworks.extend.requirements import ExtendedBase, Wheel, wrong_builds
from trainworks.extend.resolution import Archive, Resolvable
from trainworks.extend.source import SourceTree
from trainworks.extend.toolkit import Workbench, compiler_warnings, workbench_of
from trainworks.extend.wheel_cache import cache_key, cached_wheel, keep_wheel
from trainworks.extend.wheel_files import download_wheels
from trainworks.extend.wheels import archive_source, build_wheels, find_sources, project_source
from trainworks.facts.data import data_folder
from trainworks.facts.load import load
from trainworks.facts.rows import Facts
from trainworks.host.cache import cache_folder
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings, read_host_settings
from trainworks.inspect.targets import find_image
from trainworks.plan.model import ImagePlan
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.plan.variants import TITLE_LABEL, ImageName, image_named, request_of
from trainworks.render.dockerfile import Rendering
from trainworks.terminal.output import say

PIP_SECRETS = ("pip.conf", "ca.pem", "netrc")
APT_SECRETS = ("apt.conf", "sources.list")
"""What of this machine's settings the installation reads."""

"""Has the name of the target that an image of ours was built from; an extension inherits it."""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """An extension before it is built.

    Attributes:
        engine: Which has the base image.
        image: The base image.
        source: The code.
        plan: What is made of it.
        lock: The file with the hash-locked requirements, where it is ours and not the user's own.
        spec: The image that is built.
    """

    engine: Engine
    image: BuiltImage
    source: SourceTree
    plan: ExtensionPlan
    lock: Path | None
    spec: ImageSpec

    @property
    def rendering(self) -> Rendering:
        """The build context."""
        return self.spec.rendering


def extend(request: ExtendRequest, root: Path, environment: Mapping[str, str]) -> BuildReport:
    """Make an image of a base image, as far as the request says.

    Args:
        request: What is asked for.
        root: The checkout: recipes and facts.
        environment: The process's environment.

    Raises:
        ExtendError: Base, requirements, code and entry point do not fit, or one of them cannot be used; all problems.
        UnknownNameError: The base image does not exist.
        LockError: The requirements cannot be resolved with what the base has.
        BuildError, EngineUnavailableError, HostError, OutputError: See ``trainworks.errors``.
    """
    extension = plan_extension(request, root, environment, resolving=True)
    report = _report(extension)
    if request.until == "render":
        text, values = write_output(extension.rendering, request.output)
        return BuildReport(report={**report, **values}, text=text)
    result = build_image(extension.spec, extension.engine, request)
    return BuildReport(report={**report, **result.as_values()}, text=f"{request.tag}\n", image=result)


def plan_extension(
    request: ExtendRequest, root: Path, environment: Mapping[str, str], *, resolving: bool = False
) -> Extension:
    """Plan and render an extension; raises as ``extend`` does.

    Args:
        request: What is asked for.
        root: The checkout: recipes and facts.
        environment: The process's environment.
        resolving: Whether requirements without a lock get one, and a line reports the code. Without it this is
            what an extension was made from: what would be resolved today is not what was installed.
    """
    settings = read_host_settings(environment)
    forbidden = settings.forbidden_texts("")
    inputs = read_inputs(request, forbidden, environment)
    for text in notes(request, inputs) if resolving else ():
        say(text)
    engine, facts, recipes = choose(request.engine, report=say), load(root), _recipes(root)
    image, base = find_base(find_image(request.base, engine, facts, elsewhere=True), engine, facts)
    wanted, wrong = with_locks(inputs.wanted, base, kept_of(base, facts), forbidden=forbidden)
    options, said = without_vendor(wanted.options, base, vendor_hosts(facts))
    for text in (*wanted.notes[len(inputs.wanted.notes) :], *said) if resolving else ():
        say(f"  {text}")
    inputs = replace(inputs, wanted=wanted)
    check_fit(base, inputs, facts, wrong)
    with_index = with_index_of(image, facts, settings)
    settings = replace(settings, pip=settings_with(settings.pip, options))
    with_index = replace(with_index, pip=settings_with(with_index.pip, options))
    # An address that has its password from a variable is not in the file, and must not be in the image either.
    forbidden = (*forbidden, *(option.value for option in options if "@" in option.value))
    named = [each for each in inputs.wanted.requirements if each.applies(base)]
    downloaded = download_wheels(named, settings, environment)
    inputs = replace(inputs, wanted=replace(inputs.wanted, wheels={**inputs.wanted.wheels, **downloaded}))
    path = lock_path_of(inputs.file, base.reference) if inputs.file is not None else None
    sources, commits = find_sources(
        [source for source in inputs.wanted.sources if source.applies(base)],
        locked_commits(path) if path else {},
        environment,
        resolving=resolving,
    )
    folders = [each for each in inputs.wanted.folders if each.requirement.applies(base)]
    own = [each for each in folders if inputs.project and _is_same(each.folder, request.source)]
    sources += [
        project_source(
            each.tree.files,
            origin=each.requirement.path,
            name=each.requirement.name,
            extras=each.requirement.extras,
        )
        for each in folders
        if each not in own
    ]
    if inputs.project:
        extras = {extra for each in own for extra in each.requirement.extras.strip("[]").split(",") if extra}
        extras |= set(inputs.extras)
        sources.append(project_source(inputs.source.files, extras=f"[{','.join(sorted(extras))}]" if extras else ""))
    ours = _name_of_base(base, facts)
    bench = workbench_of(request.with_components, request.build_environment, base, ours.row if ours else None, facts)
    workshop = _Workshop(
        base=base,
        apt=inputs.apt,
        bench=bench,
        recipes=recipes,
        engine=engine,
        settings=settings,
        options=request,
        cache=cache_folder(environment, "wheels"),
    )
    built = workshop.build(sources)
    if refused := [
        f"{source.origin} is {wheel.name} {wheel.version}, and {base.reference} keeps {base.kept[wheel.name]}"
        for source, wheel in zip(sources, built, strict=True)
        if not same_version(base.kept.get(wheel.name, wheel.version), wheel.version)
    ]:
        raise ExtendError(refused)
    local, resolvable = _resolvable(inputs, base, built, commits, request.only_binary)
    resolvable = replace(resolvable, options=(*resolvable.options, *bench.lines))
    companions = frozenset(name for component in facts.components for name in component.companions)
    requirements, lock = "".join(f"{line}\n" for line in resolvable.lines), None
    if inputs.wanted.hashed:
        requirements += "".join(f"{wheel.pin}\n" for wheel in local)
    elif path is not None and (resolvable.lines or resolvable.wheels):
        requirements, lock = lock_requirements(
            resolvable,
            path,
            base,
            settings,
            environment,
            build=workshop.build_archives,
            with_index=with_index,
            companions=companions,
            output=request.output,
            resolving=resolving,
        )
    archives, notes_of_lock = locked_archives(requirements), locked_notes(requirements)
    of_archives = workshop.build_archives(archives)
    removed, released = locked_removals(requirements), release_dates(requirements)
    requirements = with_pins(
        requirements, {str(each): wheel for each, wheel in zip(archives, of_archives, strict=True)}
    )
    requirements += "".join(f"{wheel.pin}\n" for wheel in built)
    locked = locked_versions(read_requirements(requirements, "").requirements, base)
    if wrong := wrong_builds(locked, base, companions):
        raise ExtendError(wrong, hint="nothing was built")
    if resolving and wanted.locks:
        there = {each.name for each in (*wanted.requirements, *wanted.constraints)} | {wheel.name for wheel in built}
        for name, version in locked:
            if name not in there:
                say(f"  {wanted.locks[0].lock.where} does not have {name} {version}, which is needed in this base")
    if any(name in companions for name, _ in locked):
        settings = with_index
    plan = make_extension(
        tag=request.tag,
        base=base,
        requirements=requirements,
        locked=locked,
        resolved=lock is not None,
        removed=removed,
        files=inputs.source.files,
        entry_point=inputs.entry_point,
        wheels=(*resolvable.wheels, *of_archives),
        commits=commits,
        apt=inputs.apt,
        project=built[-1].name if inputs.project else "",
        installed=inputs.installed,
        released=released,
    )
    if resolving:
        moved = (f"{move.name} {move.old} -> {move.new}, asked for by the requirements" for move in plan.moves)
        for note in notes_of_lock if lock is not None else moved:
            say(f"  {note}")
        if warning := left_behind(plan.moves):
            say(warning)
        for warning in [] if bench.component else compiler_warnings([name for name, _ in locked], base, facts):
            say(f"  warning: {warning}")
    again = checks_again(
        _plan_of_base(base, facts), base, plan.moves, removed=removed, locked={name for name, _ in locked}
    )
    spec = ImageSpec(
        name=request.tag,
        tags=(request.tag,),
        rendering=render_extension(plan, recipes),
        settings=settings,
        secrets=_secrets(settings, base, inputs.apt),
        add_files=lambda folder: _add_local_wheels(plan, settings.pip, folder),
        checks=(*plan.checks, *again),
        forbidden=forbidden,
        extends=image,
        architecture=base.architecture,
    )
    return Extension(engine=engine, image=image, source=inputs.source, plan=plan, lock=lock, spec=spec)


@dataclass(frozen=True, kw_only=True)
class _Workshop:
    """Where wheels are built: the base image, with an extension's Debian packages."""

    base: ExtendedBase
    apt: tuple[str, ...]
    bench: Workbench
    recipes: Mapping[str, str]
    engine: Engine
    settings: HostSettings
    options: BuildOptions
    cache: Path
    done: dict[str, Wheel] = field(default_factory=dict)

    def build_archives(self, archives: Sequence[Archive]) -> tuple[Wheel, ...]:
        """Build source archives; what was built for this extension is not built again."""
        missing = [archive for archive in archives if archive.sha256 not in self.done]
        wheels = self.build([archive_source(archive) for archive in missing])
        self.done.update({archive.sha256: wheel for archive, wheel in zip(missing, wheels, strict=True)})
        return tuple(self.done[archive.sha256] for archive in archives)

    def build(self, sources: Sequence[WheelSource]) -> tuple[Wheel, ...]:
        """Return wheels, in the same order: those of the user's cache, or else built."""
        places = [self.cache / cache_key(source, self.base, self.apt, self.bench) for source in sources]
        wheels = [
            None if self.options.no_cache else cached_wheel(place, source)
            for place, source in zip(places, sources, strict=True)
        ]
        missing = [source for source, wheel in zip(sources, wheels, strict=True) if wheel is None]
        built = iter(self._build(missing))
        found = []
        for place, source, wheel in zip(places, sources, wheels, strict=True):
            found.append(wheel or keep_wheel(place, source, next(built)))
        return tuple(found)

    def _build(self, sources: Sequence[WheelSource]) -> tuple[Wheel, ...]:
        if not sources:
            return ()
        rendering = render_wheels(tuple(sources), self.base, self.apt, self.recipes, self.bench)
        name = f"trainworks/wheels:{rendering.digest[-12:]}"
        spec = ImageSpec(
            name=name,
            tags=(name,),
            rendering=rendering,
            settings=self.settings,
            secrets=_secrets(self.settings, self.base, self.apt),
            add_files=lambda folder: _add_local_archives(sources, self.settings.pip, folder),
            architecture=self.base.architecture,
        )
        return build_wheels(tuple(sources), spec, self.base, self.engine, self.options)


def _plan_of_base(base: ExtendedBase, facts: Facts) -> ImagePlan | None:
    """Return what this checkout makes of the target that a base's label names; ``None`` for another maker's image."""
    named = _name_of_base(base, facts)
    if named is None:
        return None
    return make_plan(request_of(named.row, named.variant, facts) or request_for(named.row, facts), facts)


def _name_of_base(base: ExtendedBase, facts: Facts) -> ImageName | None:
    """Return the target and variant that a base's label names; ``None`` for another maker's image."""
    return image_named(base.labels.get(TITLE_LABEL, ""), facts) if base.launcher else None


def _is_same(folder: Path, source: Path | None) -> bool:
    return source is not None and folder.resolve() == source.resolve()


def kept_of(base: ExtendedBase, facts: Facts) -> Kept:
    """Return what of a base is never replaced, and the names of what belongs to it."""
    patterns = [
        pattern
        for component in facts.components
        for pattern in component.protected
        if "*" in pattern or any(name in base.kept for name in component.protected)
    ]
    return Kept(versions=base.kept, patterns=tuple(patterns))


def vendor_hosts(facts: Facts) -> frozenset[str]:
    """Return the hosts of indexes that our images get their frameworks from."""
    hosts = (urlsplit(row.wheel_index).hostname for row in facts.targets)
    return frozenset(host for host in hosts if host)


def _resolvable(
    inputs: ExtensionInputs,
    base: ExtendedBase,
    built: tuple[Wheel, ...],
    commits: Mapping[str, str],
    only_binary: tuple[str, ...],
) -> tuple[list[Wheel], Resolvable]:
    """Return the wheels that the requirements name, and what a lock is made for."""
    wanted = inputs.wanted
    choice = choice_of(wanted.options)
    named = [requirement for requirement in wanted.requirements if requirement.applies(base)]
    local = [wanted.wheels[requirement.wheel] for requirement in named if requirement.wheel]
    return local, Resolvable(
        lines=tuple(
            requirement.text if wanted.hashed else line_of(requirement, base)
            for requirement in named
            if not requirement.wheel
        ),
        constraints=tuple(
            str(each.specification) for each in wanted.constraints if each.applies(base) and each.name not in base.kept
        ),
        wheels=(*local, *built),
        commits=commits,
        options=tuple(f"{option.name} {option.written}" for option in wanted.options),
        choice=replace(choice, only_binary=(*choice.only_binary, *only_binary)),
        hashes=wanted.hashes,
    )


def _report(extension: Extension) -> dict[str, object]:
    plan, base, source = extension.plan, extension.plan.base, extension.source
    return {
        "name": plan.tag,
        "tags": [plan.tag],
        "base": {
            "name": base.reference,
            "identifier": base.identifier,
            "digest": base.digest,
            "size": extension.image.size,
            "python": base.version,
            "launcher": base.launcher,
        },
        "requirements": [f"{name}=={version}" for name, version in plan.locked],
        "moved": [asdict(move) for move in plan.moves],
        "removed": list(plan.removed),
        "lock": str(extension.lock) if extension.lock else "",
        "commits": plan.commits,
        "apt": list(plan.apt),
        "code": {"files": len(plan.files), "size": source.size, "left_out": source.left_out},
        "entry_point": asdict(plan.entry_point) if plan.entry_point else None,
    }


def _recipes(root: Path) -> dict[str, str]:
    try:
        return {name: (data_folder(root, "templates") / name).read_text(encoding="utf-8") for name in RECIPES}
    except OSError as error:
        raise OutputError(
            f"{error.filename}: {error.strerror}", hint="run from a checkout of trainworks, or name one with --root"
        ) from error


def with_index_of(image: BuiltImage, facts: Facts, settings: HostSettings) -> HostSettings:
    """Return the settings with the index that an image of ours was built from, where the user names none.

    Its torch may be a build that the default index does not have, and what goes with that is there too.
    """
    named = image_named(image.labels.get(TITLE_LABEL, ""), facts)
    if named is None or not named.row.wheel_index or settings.pip.names_a_source:
        return settings
    return replace(settings, pip=replace(settings.pip, extra_index_urls=(named.row.wheel_index,)))


def _secrets(settings: HostSettings, base: ExtendedBase, apt: tuple[str, ...]) -> dict[str, bytes]:
    """Return what of this machine's settings the steps read."""
    names = (*PIP_SECRETS, *(APT_SECRETS if apt else ()))
    # Archives of this machine serve another suite of Debian, and no Ubuntu.
    content = settings.secrets(base.suite if base.distribution == "debian" else "", "")
    return {name: content[name] for name in names}


def _add_local_archives(sources: Sequence[WheelSource], settings: PipSettings, folder: Path) -> tuple[str, ...]:
    """Copy the source archives that this machine has in pip's folders into the context of a build of wheels."""
    pins = " ".join(source.pin for source in sources)
    found = []
    for path in sorted(path for local in settings.local_folders for path in local.glob("*.tar.gz")):
        content = path.read_bytes()
        if path.name not in found and hashlib.sha256(content).hexdigest() in pins:
            (folder / "archives" / path.name).write_bytes(content)
            found.append(path.name)
    return tuple(found)


def _add_local_wheels(plan: ExtensionPlan, settings: PipSettings, folder: Path) -> tuple[str, ...]:
    """Copy locked wheels that this machine has in pip's folders into the context, where the installation looks."""
    found: list[str] = []
    for path in sorted(path for local in settings.local_folders for path in local.glob("*.whl")):
        try:
            name, version, _, _ = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if (name, str(version)) not in plan.locked or path.name in found:
            continue
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() in plan.requirements:
            (folder / "wheels" / path.name).write_bytes(content)
            found.append(path.name)
    return tuple(found)
