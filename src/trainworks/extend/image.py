"""``build.py extend``: base, requirements and code become a plan, its rendering and an image
(``build.image``).

Problems are found in two rounds, and each round reports all of its problems at once: first those
of this machine's files (``extend.inputs``), without an engine; then those of the base image
(``extend.base_image``). Then the requirements are resolved and downloaded, which gives their lock
(``extend.resolve``), and the image is built from that lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path

from packaging.utils import canonicalize_name

from trainworks.build.context import write_output
from trainworks.build.image import ImageSpec, build_image, locate_archive
from trainworks.build.session import BuildReport
from trainworks.engine import choose
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.engine.temporary_folders import large_folder, private_folder
from trainworks.errors import ExtendError, LockError, OutputError
from trainworks.extend.apt import AddFiles, packages_for
from trainworks.extend.base_image import check_fit, find_base
from trainworks.extend.constraints import checks_again, hidden_by
from trainworks.extend.cuda_compiler import workbench_of
from trainworks.extend.inputs import ExtensionInputs, notes, read_inputs
from trainworks.extend.lock import (
    inputs_digest,
    lock_before,
    lock_path_of,
    locked_commits,
    read_lock,
    write_lock,
)
from trainworks.extend.plan import ExtensionPlan, WheelSource
from trainworks.extend.render import INSTALLER, RECIPES, Recipes, render_extension
from trainworks.extend.request import ExtendRequest
from trainworks.extend.requirements import NO_LOCK, ExtendedBase, ExtensionLock, holds
from trainworks.extend.resolve import (
    ResolutionRequest,
    ResolutionTools,
    Resolved,
    check_python,
    gather,
    manifest_of,
    resolve,
)
from trainworks.extend.resolver import Resolver
from trainworks.extend.sandbox import Sandbox, put_wheels
from trainworks.extend.user_code import SourceTree
from trainworks.extend.vcs_sources import folder_source, git_sources, named_sources
from trainworks.facts.data import data_folder
from trainworks.facts.load import load
from trainworks.facts.rows import Facts
from trainworks.host.downloads import Client
from trainworks.host.settings import HostSettings, read_host_settings
from trainworks.host.uv import find_uv
from trainworks.inspect.targets import find_image
from trainworks.plan.model import ImagePlan
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.plan.variants import TITLE_LABEL, ImageName, image_named, request_of
from trainworks.terminal.output import say


@dataclass(frozen=True, kw_only=True)
class Extension:
    """An extension before it is built.

    Attributes:
        engine: The engine that has the base image.
        image: The base image.
        source: The code.
        plan: The plan of the extension.
        lock: The file with the hash-locked requirements; ``None`` where nothing is installed.
        spec: The image that is built.
        packages: Puts the files of the Debian packages into a context.
    """

    engine: Engine
    image: BuiltImage
    source: SourceTree
    plan: ExtensionPlan
    lock: Path | None
    spec: ImageSpec
    packages: AddFiles


@dataclass(frozen=True, kw_only=True)
class _Planning:
    """One call of ``plan_extension``.

    Attributes:
        request: The user's choice.
        environment: The process's environment.
        resolving: Whether requirements without a lock are resolved, and progress is reported.
        settings: This machine's settings.
        forbidden: Texts of this machine that must not be in an image.
        facts: All facts.
        stack: Removes temporary folders at its end.
    """

    request: ExtendRequest
    environment: Mapping[str, str]
    resolving: bool
    settings: HostSettings
    forbidden: tuple[str, ...]
    facts: Facts
    stack: ExitStack


@dataclass(frozen=True, kw_only=True)
class _Locked:
    """The locked requirements of an extension.

    Attributes:
        lock: The lock.
        sources: Sources of the wheels that the lock names by a folder or a repository.
        resolved: The files, if the requirements were resolved now.
    """

    lock: ExtensionLock = NO_LOCK
    sources: Sequence[WheelSource] = ()
    resolved: Resolved | None = None


def extend(request: ExtendRequest, root: Path, environment: Mapping[str, str]) -> BuildReport:
    """Make an image of a base image, as far as the request says.

    Args:
        request: The user's choice.
        root: The checkout: recipes and facts.
        environment: The process's environment.

    Raises:
        ExtendError: Base, requirements, code and entry point do not fit, or one
            of them cannot be used; all problems.
        UnknownNameError: The base image does not exist.
        LockError: The requirements cannot be resolved with what the base has.
        BuildError, EngineUnavailableError, HostError, OutputError: See ``trainworks.errors``.
    """
    with ExitStack() as stack:
        extension = plan_extension(request, root, environment, stack, resolving=True)
        report = _report(extension)
        if request.until == "plan":
            names = "".join(f"{name}=={version}\n" for name, version in extension.plan.lock.locked)
            return BuildReport(report=report, text=names)
        if request.until == "render":
            text, values = write_output(extension.spec.rendering, request.output)
            if request.output is not None and extension.plan.apt:
                extension.packages(request.output)
            return BuildReport(report={**report, **values}, text=text)
        result = build_image(extension.spec, extension.engine, request)
        return BuildReport(
            report={**report, **result.as_values()}, text=f"{request.tag}\n", image=result
        )


def plan_extension(
    request: ExtendRequest,
    root: Path,
    environment: Mapping[str, str],
    stack: ExitStack,
    *,
    resolving: bool = False,
) -> Extension:
    """Plan and render an extension; raises as ``extend`` does.

    Args:
        request: The user's choice.
        root: The checkout: recipes and facts.
        environment: The process's environment.
        stack: Removes temporary folders at its end.
        resolving: Whether requirements without a lock get one, and lines report it. False to plan
            an extension that was built before: a resolution of today may differ from its lock.
    """
    settings = read_host_settings(environment)
    forbidden = settings.forbidden_texts("")
    inputs = read_inputs(request, forbidden, environment)
    if resolving:
        for text in notes(request, inputs):
            say(text)
    engine = choose(request.engine, report=say)
    facts = load(root)
    texts = _recipes(root)
    _refuse_network(request, engine)

    # The second round of problems: those of the base image.
    candidate = find_image(request.base, engine, facts, elsewhere=True)
    image, base = find_base(candidate, engine, facts)
    check_fit(base, inputs)
    program = data_folder(root, "launcher") / INSTALLER
    check_python(inputs.for_python, base, program, facts)

    image_name = image_named(base.labels.get(TITLE_LABEL, ""), facts) if base.launcher else None
    target = image_name.row if image_name else None
    base_plan = _plan_of_base(image_name, facts)
    if resolving and inputs.apt and base_plan is not None:
        settings = locate_archive(base_plan.base, base_plan.archives, settings).settings
    planning = _Planning(
        request=request,
        environment=environment,
        resolving=resolving,
        settings=settings,
        forbidden=forbidden,
        facts=facts,
        stack=stack,
    )

    bench = workbench_of(request.with_components, request.build_environment, base, target, facts)
    requested_whole = (*request.built_whole, *inputs.requested.built_whole)
    whole = sorted({canonicalize_name(name) for name in requested_whole})
    bench = replace(bench, whole=(*bench.whole, *whole))
    path = lock_path_of(inputs.file, base.reference) if inputs.file is not None else None
    sources, commits = _sources_of(planning, inputs, base, locked_commits(path))
    recipes = Recipes(
        texts=texts,
        programs=_programs(),
        uv=b"" if base.uv else Path(find_uv()).read_bytes(),
    )
    plan = ExtensionPlan(
        tag=request.tag,
        base=base,
        files=tuple(inputs.source.files),
        entry_point=inputs.entry_point,
        sources=tuple(sources),
        inputs=tuple(inputs.requested.files.values()),
        apt=tuple(inputs.apt),
        installed=tuple(inputs.installed),
    )
    packages = packages_for(inputs.apt, image, settings, facts, engine)
    sandbox = Sandbox(
        plan=plan,
        recipes=recipes,
        bench=bench,
        engine=engine,
        settings=settings,
        options=request,
        folder=stack.enter_context(private_folder()),
        packages=packages,
        network=request.build_network,
    )
    stack.callback(sandbox.close)

    def tools() -> ResolutionTools:
        resolver = _resolver(base, planning)
        return ResolutionTools(base=base, resolver=resolver, sandbox=sandbox, program=program)

    resolution = ResolutionRequest(
        requested=inputs.requested,
        sources=sources,
        commits=commits,
        manifest=manifest_of(base, bench, target, facts),
        beside=path.parent.resolve() if path is not None else Path(),
        links=settings.pip.local_folders,
        only_binary=request.only_binary,
        strict=request.strict,
    )
    locked = _Locked()
    if path is not None and (inputs.requested or sources):
        choice: dict[str, object] = {
            "only_binary": request.only_binary,
            "strict": request.strict,
            "apt": plan.apt,
            "bench": bench.lines,
            "whole": whole,
        }
        digest = inputs_digest(inputs.requested, sources, choice, base)
        locked = _lock_requirements(planning, resolution, path, digest, tools)
    lock = locked.lock
    resolution = replace(resolution, sources=[*sources, *locked.sources])
    plan = replace(plan, lock=lock, sources=tuple(resolution.sources))

    def add_wheels(context: Path) -> tuple[str, ...]:
        """Put the wheels into a context; called only for an image that is built."""
        _ = sandbox.start
        if not lock.locked:
            return ()
        resolved = locked.resolved or gather(lock, resolution, tools())
        put_wheels(resolved.wheels, context / "wheels")
        return resolved.own

    if resolving:
        for note in (*lock.notes, hidden_by(plan.files, base)):
            if note:
                say(f"  {note}")
    base_checks = checks_again(base_plan, base, plan.moves, locked=dict(lock.locked))
    # A requirement's file names variables: their values must not be in the image either.
    variable_values = [environment[name] for name in inputs.requested.variables]
    spec = ImageSpec(
        name=plan.tag,
        tags=(plan.tag,),
        rendering=render_extension(plan, recipes),
        settings=replace(settings, proxies={}),
        secrets={},
        add_files=add_wheels,
        checks=(*plan.checks, *base_checks),
        forbidden=(*settings.forbidden_texts(""), *variable_values),
        extends=image,
        # The tests run programs of the base, which may be another maker's: `find_base` refuses an
        # engine that cannot isolate them.
        isolated="job",
        architecture=base.architecture,
        network="none",
    )
    return Extension(
        engine=engine,
        image=image,
        source=inputs.source,
        plan=plan,
        lock=path if lock.locked else None,
        spec=spec,
        packages=packages,
    )


def _refuse_network(request: ExtendRequest, engine: Engine) -> None:
    """Refuse a network for builds where the engine has only that of this machine."""
    if not request.build_network or engine.name != "buildah":
        return
    problem = (
        "--build-network: buildah has only this machine's own network,"
        " which shows builds what listens on it"
    )
    hint = "use `--engine docker`, or put what the build downloads into the folder of the project"
    raise ExtendError([problem], hint=hint)


def _programs() -> dict[str, bytes]:
    """Return the programs that run in the base image, by file name."""
    build_stage = resources.files("trainworks.extend").joinpath("build_stage.py")
    imports = resources.files("trainworks.imagetest").joinpath("imports.py")
    return {"build_stage.py": build_stage.read_bytes(), "imports.py": imports.read_bytes()}


def _lock_requirements(
    planning: _Planning,
    resolution: ResolutionRequest,
    path: Path,
    digest: str,
    tools: Callable[[], ResolutionTools],
) -> _Locked:
    """Read the lock of the requirements, or resolve them.

    Args:
        planning: The request and its facts.
        resolution: The requirements and sources.
        path: The lock's file.
        digest: Digest of everything that the lock depends on.
        tools: Makes the tools of a resolution.

    Raises:
        LockError: There is no lock, and nothing is resolved.
    """
    known = read_lock(path, digest)
    sources, is_unchanged = named_sources(known or NO_LOCK, resolution.beside, planning.forbidden)
    if known is not None and is_unchanged:
        if planning.resolving:
            say(f"  locked already: {path}")
        return _Locked(lock=known, sources=sources)
    if not planning.resolving:
        raise LockError(
            f"no lock for these requirements and this base: {path}",
            hint="`build.py extend` with the same choice writes it",
        )

    resolution_tools = tools()
    base = resolution_tools.base
    say(f"  resolving the requirements for {base.reference}")
    resolved = resolve(
        resolution,
        resolution_tools,
        planning.facts,
        forbidden=planning.forbidden,
        before=lock_before(path),
    )
    for line in resolved.moved:
        say(f"  {line}")
    sources, _ = named_sources(resolved.lock, resolution.beside, planning.forbidden)
    if planning.request.output is None:
        write_lock(path, resolved.lock, digest, base)
        say(f"  resolved and hashed: {path}")
    return _Locked(lock=resolved.lock, sources=sources, resolved=resolved)


def _resolver(base: ExtendedBase, planning: _Planning) -> Resolver:
    client = planning.stack.enter_context(Client(planning.settings))
    folder = planning.stack.enter_context(private_folder(large_folder()))
    return Resolver(base, folder, client, fresh=planning.request.no_cache)


def _sources_of(
    planning: _Planning,
    inputs: ExtensionInputs,
    base: ExtendedBase,
    known_commits: Mapping[str, str],
) -> tuple[list[WheelSource], Mapping[str, str]]:
    """Return the sources of wheels, and the commits of repositories.

    The sources are repositories, folders, and the code itself, which comes last.
    """
    requested, code = inputs.requested, planning.request.source
    project = code.resolve() if inputs.project and code is not None else None
    repositories = [row for row in requested.repositories if holds(row.marker, base)]
    sources, commits = git_sources(
        repositories, known_commits, planning.environment, resolving=planning.resolving
    )
    extras = set(inputs.extras)
    for requirement in requested.folders:
        if not holds(requirement.marker, base):
            continue
        folder = requirement.folder
        if folder.resolve() == project:
            names = [name.strip() for name in requirement.extras.strip("[]").split(",")]
            extras.update(name for name in names if name)
        else:
            source = folder_source(
                requirement.tree.files,
                folder,
                origin=requirement.origin,
                extras=requirement.extras,
            )
            sources.append(source)
    if project is not None:
        words = f"[{','.join(sorted(extras))}]" if extras else ""
        sources.append(folder_source(inputs.source.files, project, extras=words))
    return sources, commits


def _plan_of_base(image_name: ImageName | None, facts: Facts) -> ImagePlan | None:
    """Return this checkout's plan of the target in a base's label.

    ``None`` for another maker's image.
    """
    if image_name is None:
        return None
    row = image_name.row
    request = request_of(row, image_name.variant, facts) or request_for(row, facts)
    return make_plan(request, facts)


def _report(extension: Extension) -> dict[str, object]:
    """Return the facts of an extension as an object for JSON."""
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
        "requirements": [f"{name}=={version}" for name, version in plan.lock.locked],
        "moved": [asdict(move) for move in plan.moves],
        "lock": str(extension.lock) if extension.lock else "",
        "commits": plan.lock.all_commits,
        "apt": list(plan.apt),
        "code": {"files": len(plan.files), "size": source.size, "left_out": source.left_out},
        "entry_point": asdict(plan.entry_point) if plan.entry_point else None,
    }


def _recipes(root: Path) -> dict[str, str]:
    """Read the templates of an extension, by name; raises ``OutputError`` if one is missing."""
    try:
        folder = data_folder(root, "templates")
        return {name: (folder / name).read_text(encoding="utf-8") for name in RECIPES}
    except OSError as error:
        raise OutputError(
            f"{error.filename or root}: {error.strerror}",
            hint="run from a checkout of trainworks, or name one with --root",
        ) from error
