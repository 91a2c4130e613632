"""``build.py extend``: base, requirements and code become a plan, its rendering and an image (``assemble.image``).

Problems are looked for in two rounds, and each round reports all of them at once: first what this machine's files say
(``extend.inputs``), without an engine; then what the base image says (``extend.base``), before anything is built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from trainworks.assemble.context import write_output
from trainworks.assemble.image import ImageSpec, build_image
from trainworks.assemble.session import BuildReport
from trainworks.engine import choose
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.errors import ExtendError, OutputError
from trainworks.extend.base import check_fit, find_base
from trainworks.extend.inputs import ExtensionInputs, notes, read_inputs
from trainworks.extend.kept import checks_again, left_behind, line_of, same_version
from trainworks.extend.plan import ExtensionPlan, WheelSource, make_extension
from trainworks.extend.reading.lines import locked_versions, read_requirements
from trainworks.extend.reading.options import choice_of, settings_with, without_vendor
from trainworks.extend.reading.selection import Kept
from trainworks.extend.reading.wanted import with_locks
from trainworks.extend.render import RECIPES, render_extension
from trainworks.extend.request import ExtendRequest
from trainworks.extend.requirements import ExtendedBase, Wheel, wrong_builds
from trainworks.extend.resolving.lock import (
    lock_path_of,
    lock_requirements,
    locked_archives,
    locked_commits,
    locked_notes,
    locked_removals,
    release_dates,
    with_pins,
)
from trainworks.extend.resolving.releases import Resolvable
from trainworks.extend.source import SourceTree
from trainworks.extend.toolkit import compiler_warnings, workbench_of
from trainworks.extend.wheels.files import download_wheels
from trainworks.extend.wheels.sources import find_sources, project_source
from trainworks.extend.wheels.workshop import Workshop, secrets_for
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
    given = _read(request, root, environment, resolving=resolving)
    base, inputs, facts, settings = given.base, given.inputs, given.facts, given.settings
    known = locked_commits(given.lock) if given.lock else {}
    sources, commits = _sources_of(request, inputs, base, known, environment, resolving=resolving)
    workshop = _workshop_of(request, given, environment)
    bench = workshop.bench
    built = workshop.build(sources)
    _check_built(sources, built, base)
    local, resolvable = _resolvable(inputs, base, built, commits, request.only_binary)
    resolvable = replace(resolvable, options=(*resolvable.options, *bench.lines))
    companions = frozenset(name for component in facts.components for name in component.companions)
    found, lock = "".join(f"{line}\n" for line in resolvable.lines), None
    if inputs.wanted.hashed:
        found += "".join(f"{wheel.pin}\n" for wheel in local)
    elif given.lock is not None and (resolvable.lines or resolvable.wheels):
        found, lock = lock_requirements(
            resolvable,
            given.lock,
            base,
            settings,
            environment,
            build=workshop.build_archives,
            with_index=given.with_index,
            companions=companions,
            output=request.output,
            resolving=resolving,
        )
    archives = locked_archives(found)
    of_archives = workshop.build_archives(archives)
    requirements = with_pins(found, {str(each): wheel for each, wheel in zip(archives, of_archives, strict=True)})
    requirements += "".join(f"{wheel.pin}\n" for wheel in built)
    locked = locked_versions(read_requirements(requirements, "").requirements, base)
    if wrong := wrong_builds(locked, base, companions):
        raise ExtendError(wrong, hint="nothing was built")
    if any(name in companions for name, _ in locked):
        settings = given.with_index
    plan = make_extension(
        tag=request.tag,
        base=base,
        requirements=requirements,
        locked=locked,
        resolved=lock is not None,
        removed=locked_removals(found),
        files=inputs.source.files,
        entry_point=inputs.entry_point,
        wheels=(*resolvable.wheels, *of_archives),
        commits=commits,
        apt=inputs.apt,
        project=built[-1].name if inputs.project else "",
        installed=inputs.installed,
        released=release_dates(found),
    )
    if resolving:
        _say_what_is_installed(plan, inputs, built, None if lock is None else locked_notes(found))
        for warning in [] if bench.component else compiler_warnings([name for name, _ in locked], base, facts):
            say(f"  warning: {warning}")
    spec = _spec_of(plan, given, settings)
    return Extension(engine=given.engine, image=given.image, source=inputs.source, plan=plan, lock=lock, spec=spec)


def _workshop_of(request: ExtendRequest, given: _Given, environment: Mapping[str, str]) -> Workshop:
    ours = _name_of_base(given.base, given.facts)
    return Workshop(
        base=given.base,
        apt=given.inputs.apt,
        bench=workbench_of(
            request.with_components,
            request.build_environment,
            given.base,
            ours.row if ours else None,
            given.facts,
        ),
        recipes=given.recipes,
        engine=given.engine,
        settings=given.settings,
        options=request,
        cache=cache_folder(environment, "wheels"),
    )


def _spec_of(plan: ExtensionPlan, given: _Given, settings: HostSettings) -> ImageSpec:
    """Return the image that a plan means. settings: of this machine, for the installation."""
    base = given.base
    locked = {name for name, _ in plan.locked}
    again = checks_again(_plan_of_base(base, given.facts), base, plan.moves, removed=plan.removed, locked=locked)
    return ImageSpec(
        name=plan.tag,
        tags=(plan.tag,),
        rendering=render_extension(plan, given.recipes),
        settings=settings,
        secrets=secrets_for(settings, base, plan.apt),
        add_files=lambda folder: _add_local_wheels(plan, settings.pip, folder),
        checks=(*plan.checks, *again),
        forbidden=given.forbidden,
        extends=given.image,
        architecture=base.architecture,
    )


class _Given(NamedTuple):
    """What an extension is made from.

    Attributes:
        engine: Which has the base image.
        image: The base image.
        base: What is in it.
        facts: Of the checkout.
        recipes: Templates, by name.
        inputs: What this machine's files say, with what this base gets of locks, and the wheels of the network.
        settings: Of this machine, with the options of the requirements.
        with_index: The same with the index that the base was built from.
        forbidden: Texts of this machine that must not be in the image.
        lock: Where a lock of the requirements lies, or will; ``None`` without a file of requirements.
    """

    engine: Engine
    image: BuiltImage
    base: ExtendedBase
    facts: Facts
    recipes: Mapping[str, str]
    inputs: ExtensionInputs
    settings: HostSettings
    with_index: HostSettings
    forbidden: tuple[str, ...]
    lock: Path | None


def _read(request: ExtendRequest, root: Path, environment: Mapping[str, str], *, resolving: bool) -> _Given:
    """Read what an extension is made from, and check that it fits."""
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
    lock = lock_path_of(inputs.file, base.reference) if inputs.file is not None else None
    return _Given(engine, image, base, facts, recipes, inputs, settings, with_index, forbidden, lock)


def _sources_of(
    request: ExtendRequest,
    inputs: ExtensionInputs,
    base: ExtendedBase,
    known: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    resolving: bool,
) -> tuple[list[WheelSource], Mapping[str, str]]:
    """Return what wheels are built of: repositories, folders and the code itself, which comes last; and the commits.

    known: Commits that a lock has.
    """
    sources, commits = find_sources(
        [source for source in inputs.wanted.sources if source.applies(base)],
        known,
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
    return sources, commits


def _check_built(sources: Sequence[WheelSource], built: Sequence[Wheel], base: ExtendedBase) -> None:
    """Raise ExtendError if a wheel would replace what the base keeps."""
    if refused := [
        f"{source.origin} is {wheel.name} {wheel.version}, and {base.reference} keeps {base.kept[wheel.name]}"
        for source, wheel in zip(sources, built, strict=True)
        if not same_version(base.kept.get(wheel.name, wheel.version), wheel.version)
    ]:
        raise ExtendError(refused)


def _say_what_is_installed(
    plan: ExtensionPlan, inputs: ExtensionInputs, built: Sequence[Wheel], notes_of_lock: Sequence[str] | None
) -> None:
    """Say what is installed that nobody named, and what moves. notes_of_lock: of a lock of ours; None without one."""
    wanted = inputs.wanted
    if wanted.locks:
        there = {each.name for each in (*wanted.requirements, *wanted.constraints)} | {wheel.name for wheel in built}
        for name, version in plan.locked:
            if name not in there:
                say(f"  {wanted.locks[0].lock.where} does not have {name} {version}, which is needed in this base")
    moved = (f"{move.name} {move.old} -> {move.new}, asked for by the requirements" for move in plan.moves)
    for note in moved if notes_of_lock is None else notes_of_lock:
        say(f"  {note}")
    if warning := left_behind(plan.moves):
        say(warning)


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
