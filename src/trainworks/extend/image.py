"""``build.py extend``: base, requirements and code become a plan, its rendering and an image
(``assemble.image``).

Problems are looked for in two rounds, and each round reports all of them at once: first what this
machine's files say (``extend.inputs``), without an engine; then what the base image says
(``extend.base``). Then the requirements are resolved and downloaded once, which gives their lock
(``extend.resolve``), and the image is built from that.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from trainworks.extend.plan import ExtensionPlan, WheelSource, make_extension
from trainworks.extend.render import INSTALLER, RECIPES, Recipes, render_extension
from trainworks.extend.request import ExtendRequest
from trainworks.extend.requirements import NO_LOCK, ExtendedBase, holds
from trainworks.extend.resolve import Order, check_python, gather, manifest_of, resolve
from trainworks.extend.resolver import Resolver
from trainworks.extend.sandbox import Workshop, put_wheels
from trainworks.extend.user_code import SourceTree
from trainworks.extend.vcs_sources import folder_source, git_sources, named_sources
from trainworks.facts.data import data_folder
from trainworks.facts.load import load
from trainworks.facts.rows import Facts
from trainworks.host.downloads import Client
from trainworks.host.settings import HostSettings, read_host_settings
from trainworks.host.uv import uv_program
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
        engine: Which has the base image.
        image: The base image.
        source: The code.
        plan: What is made of it.
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


def extend(request: ExtendRequest, root: Path, environment: Mapping[str, str]) -> BuildReport:
    """Make an image of a base image, as far as the request says.

    Args:
        request: What is asked for.
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
        request: What is asked for.
        root: The checkout: recipes and facts.
        environment: The process's environment.
        stack: What was made on the way is taken away with it.
        resolving: Whether requirements without a lock get one, and lines report it. Without it this
            is what an extension was made from: what would be resolved today is not what was
            installed.
    """
    settings = read_host_settings(environment)
    forbidden = settings.forbidden_texts("")
    inputs = read_inputs(request, forbidden, environment)
    for text in notes(request, inputs) if resolving else ():
        say(text)
    engine, facts, texts = choose(request.engine, report=say), load(root), _recipes(root)
    if request.build_network and engine.name == "buildah":
        raise ExtendError(
            [
                (
                    "--build-network: buildah has only this machine's own network,"
                    " which shows builds what listens on it"
                )
            ],
            hint=(
                "use `--engine docker`, or put what the build"
                " downloads into the folder of the project"
            ),
        )
    image, base = find_base(find_image(request.base, engine, facts, elsewhere=True), engine, facts)
    check_fit(base, inputs)
    program = data_folder(root, "launcher") / INSTALLER
    check_python(inputs.for_python, base, program, facts)
    named = image_named(base.labels.get(TITLE_LABEL, ""), facts) if base.launcher else None
    bench = workbench_of(
        request.with_components,
        request.build_environment,
        base,
        named.row if named else None,
        facts,
    )
    whole = {canonicalize_name(name) for name in (*request.built_whole, *inputs.wanted.built_whole)}
    bench = replace(bench, whole=(*bench.whole, *sorted(whole)))
    path = lock_path_of(inputs.file, base.reference) if inputs.file is not None else None
    sources, commits = _sources_of(
        request, inputs, base, locked_commits(path), environment, resolving=resolving
    )
    ours = _plan_of_base(named, facts)
    if resolving and inputs.apt and ours is not None:
        settings = locate_archive(ours.base, ours.archives, settings).settings
    programs = {
        "inside.py": resources.files("trainworks.extend").joinpath("inside.py").read_bytes(),
        "imports.py": resources.files("trainworks.imagetest").joinpath("imports.py").read_bytes(),
    }
    uv = b"" if base.uv else Path(uv_program()).read_bytes()
    recipes = Recipes(texts=texts, programs=programs, uv=uv)
    plan = make_extension(
        tag=request.tag,
        base=base,
        files=inputs.source.files,
        entry_point=inputs.entry_point,
        sources=sources,
        inputs=inputs.wanted.files.values(),
        apt=inputs.apt,
        installed=inputs.installed,
    )
    packages = packages_for(inputs.apt, image, settings, facts, engine)
    workshop = Workshop(
        plan,
        recipes,
        bench,
        engine,
        settings,
        request,
        stack.enter_context(private_folder()),
        packages=packages,
        network=request.build_network,
    )
    stack.callback(workshop.close)
    order = Order(
        wanted=inputs.wanted,
        sources=sources,
        commits=commits,
        manifest=manifest_of(base, bench, named.row if named else None, facts),
        beside=path.parent.resolve() if path is not None else Path(),
        links=settings.pip.local_folders,
        only_binary=request.only_binary,
        strict=request.strict,
    )
    lock, resolved = NO_LOCK, None
    if path is not None and (inputs.wanted or sources):
        chosen = {
            "only_binary": request.only_binary,
            "strict": request.strict,
            "apt": plan.apt,
            "bench": bench.lines,
        }
        chosen["whole"] = sorted(whole)
        digest = inputs_digest(inputs.wanted, sources, chosen, base)
        known = read_lock(path, digest)
        others, same = named_sources(known or NO_LOCK, order.beside, forbidden)
        known = known if same else None
        if known is not None and resolving:
            say(f"  locked already: {path}")
        elif known is None and not resolving:
            raise LockError(
                f"no lock for these requirements and this base: {path}",
                hint="`build.py extend` with the same choice writes it",
            )
        lock = known or NO_LOCK
        if known is None:
            say(f"  resolving the requirements for {base.reference}")
            resolver = _resolver(base, settings, request, stack)
            before = lock_before(path)
            resolved = resolve(
                order, base, resolver, workshop, program, facts, forbidden=forbidden, before=before
            )
            lock = resolved.lock
            for line in resolved.moved:
                say(f"  {line}")
            others, _ = named_sources(lock, order.beside, forbidden)
            if request.output is None:
                write_lock(path, lock, digest, base)
                say(f"  resolved and hashed: {path}")
        sources = [*sources, *others]
        order = replace(order, sources=sources)
    plan = replace(plan, lock=lock, sources=tuple(sources))

    def add_wheels(context: Path) -> tuple[str, ...]:
        """Put what is installed into a context, where it is built at all."""
        _ = workshop.start
        if not lock.locked:
            return ()
        found = resolved or gather(
            lock, order, base, _resolver(base, settings, request, stack), workshop, program
        )
        put_wheels(found.wheels, context / "wheels")
        return found.own

    for note in (*lock.notes, hidden_by(plan.files, base)) if resolving else ():
        say(f"  {note}") if note else None
    spec = ImageSpec(
        name=plan.tag,
        tags=(plan.tag,),
        rendering=render_extension(plan, recipes),
        settings=replace(settings, proxies={}),
        secrets={},
        add_files=add_wheels,
        checks=(*plan.checks, *checks_again(ours, base, plan.moves, locked=dict(lock.locked))),
        # What a variable has is not in the file, and must not be in the image either.
        forbidden=(
            *settings.forbidden_texts(""),
            *(environment[name] for name in inputs.wanted.variables),
        ),
        extends=image,
        # It runs programs of its base, which may be another maker's.
        isolated="" if engine.isolates() else "job",
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


def _resolver(
    base: ExtendedBase, settings: HostSettings, request: ExtendRequest, stack: ExitStack
) -> Resolver:
    client = stack.enter_context(Client(settings))
    return Resolver(
        base, stack.enter_context(private_folder(large_folder())), client, fresh=request.no_cache
    )


def _sources_of(
    request: ExtendRequest,
    inputs: ExtensionInputs,
    base: ExtendedBase,
    known: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    resolving: bool,
) -> tuple[list[WheelSource], Mapping[str, str]]:
    """Return what wheels are built of: repositories, folders and the code itself, which comes last.

    And the commits.
    """
    wanted, own = (
        inputs.wanted,
        request.source.resolve() if inputs.project and request.source is not None else None,
    )
    repositories = [each for each in wanted.repositories if holds(each.marker, base)]
    sources, commits = git_sources(repositories, known, environment, resolving=resolving)
    extras = set(inputs.extras)
    for each in [each for each in wanted.folders if holds(each.marker, base)]:
        if each.folder.resolve() == own:
            extras |= {
                extra.strip() for extra in each.extras.strip("[]").split(",") if extra.strip()
            }
        else:
            sources.append(
                folder_source(each.tree.files, each.folder, origin=each.origin, extras=each.extras)
            )
    if own is not None:
        chosen = f"[{','.join(sorted(extras))}]" if extras else ""
        sources.append(folder_source(inputs.source.files, own, extras=chosen))
    return sources, commits


def _plan_of_base(named: ImageName | None, facts: Facts) -> ImagePlan | None:
    """Return what this checkout makes of the target that a base's label names.

    ``None`` for another maker's image.
    """
    if named is None:
        return None
    return make_plan(
        request_of(named.row, named.variant, facts) or request_for(named.row, facts), facts
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
        "requirements": [f"{name}=={version}" for name, version in plan.lock.locked],
        "moved": [asdict(move) for move in plan.moves],
        "lock": str(extension.lock) if extension.lock else "",
        "commits": plan.lock.all_commits,
        "apt": list(plan.apt),
        "code": {"files": len(plan.files), "size": source.size, "left_out": source.left_out},
        "entry_point": asdict(plan.entry_point) if plan.entry_point else None,
    }


def _recipes(root: Path) -> dict[str, str]:
    try:
        return {
            name: (data_folder(root, "templates") / name).read_text(encoding="utf-8")
            for name in RECIPES
        }
    except OSError as error:
        raise OutputError(
            f"{error.filename or root}: {error.strerror}",
            hint="run from a checkout of trainworks, or name one with --root",
        ) from error
