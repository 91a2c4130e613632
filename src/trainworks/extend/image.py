"""``build.py extend``: base, requirements and code become a plan, its rendering and an image (``build.image``).

Problems are looked for in two rounds, and each round reports all of them at once: first what this machine's files say,
without an engine; then what the base image says, before anything is built.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from trainworks.build.context import replace_output, write_context
from trainworks.build.image import ImageSpec, build_image
from trainworks.engine import choose
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.errors import ExtendError, ImageTestError, OutputError, UnknownNameError
from trainworks.extend.lock import (
    Resolvable,
    Wanted,
    lock_path_of,
    lock_requirements,
    locked_commits,
    locks_of,
    read_wanted,
)
from trainworks.extend.plan import (
    CODE_FOLDER,
    PROJECT_FILES,
    EntryPoint,
    ExtensionPlan,
    check_distribution,
    check_foreign,
    check_names,
    check_packages,
    find_entry_point,
    make_extension,
)
from trainworks.extend.render import RECIPES, render_extension, render_wheels
from trainworks.extend.request import ExtendRequest
from trainworks.extend.requirements import (
    BaseImage,
    Distribution,
    Wheel,
    conflicts,
    locked_versions,
    read_requirements,
    wrong_builds,
)
from trainworks.extend.source import SourceTree, read_source, some
from trainworks.extend.wheels import build_wheels, find_sources, project_source
from trainworks.facts.data import data_folder
from trainworks.facts.load import load
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings, read_host_settings
from trainworks.imagetest import interpreter
from trainworks.render.dockerfile import Rendering
from trainworks.terminal.output import say
from trainworks.terminal.progress import DISPLAY

REQUIREMENTS = "requirements.txt"
"""At the root of the code, the file that the launcher installs."""

PULL_SECONDS = 3600.0
"""How long the pull of a base image may take: those of AWS have many gigabytes."""

INTERPRETER_SECONDS = 300.0

PIP_SECRETS = ("pip.conf", "ca.pem", "netrc")
APT_SECRETS = ("apt.conf", "sources.list")
"""What of this machine's settings the installation reads."""

TITLE_LABEL = "org.opencontainers.image.title"
"""Has the name of the target that an image of ours was built from; an extension inherits it."""


@dataclass(frozen=True, kw_only=True)
class Extended:
    """What an extension came to: the report for programs, and the error where the image breaks a promise."""

    report: Mapping[str, object]
    broken: ImageTestError | None = None


@dataclass(frozen=True, kw_only=True)
class Extension:
    """An extension before it is built.

    Attributes:
        engine: Which has the base image.
        image: The base image.
        plan: What is made of it.
        lock: The file with the hash-locked requirements, where it is ours and not the user's own.
        spec: The image that is built.
    """

    engine: Engine
    image: BuiltImage
    plan: ExtensionPlan
    lock: Path | None
    spec: ImageSpec

    @property
    def rendering(self) -> Rendering:
        """The build context."""
        return self.spec.rendering


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """What this machine's files say, found to be without problems.

    Attributes:
        wanted: What is to be installed, but for the project.
        file: Where the lock lies beside: the requirements file, or else the project's.
        source: The code.
        project: The project file that makes the code something to install, or ``""``.
        installed: Which of the code's files say what is installed.
        entry_point: ``None`` where the job names it.
        apt: Debian packages.
    """

    wanted: Wanted
    file: Path | None
    source: SourceTree
    project: str
    installed: tuple[str, ...]
    entry_point: EntryPoint | None
    apt: tuple[str, ...]


def extend(request: ExtendRequest, root: Path, environment: Mapping[str, str]) -> Extended:
    """Run ``build.py extend``.

    Args:
        request: What is asked for.
        root: The checkout: recipes and facts.
        environment: The process's environment.

    Raises:
        ExtendError: Base, requirements, code and entry point do not fit, or one of them cannot be used; all problems.
        UnknownNameError: There is no such base image.
        LockError: The requirements cannot be resolved with what the base has.
        BuildError, EngineUnavailableError, HostError, OutputError: See ``trainworks.errors``.
    """
    settings = read_host_settings(environment)
    inputs = _read_inputs(request, settings)
    for text in _notes(request, inputs):
        say(text)
    extension = _plan(inputs, choose(request.engine, report=say), root, settings, environment, request)
    plan, base = extension.plan, extension.plan.base
    report: dict[str, object] = {
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
        "lock": str(extension.lock) if extension.lock else "",
        "commits": plan.commits,
        "apt": list(plan.apt),
        "code": {"files": len(plan.files), "size": inputs.source.size, "left_out": inputs.source.left_out},
        "entry_point": asdict(plan.entry_point) if plan.entry_point else None,
    }
    if request.until == "render":
        rendering = extension.rendering
        if request.output is not None:
            replace_output(rendering, request.output)
            write_context(rendering, request.output)
        files = [file.path for file in rendering.files]
        return Extended(report={**report, "dockerfile": rendering.dockerfile, "files": files})
    result = build_image(extension.spec, extension.engine, request)
    return Extended(report={**report, **result.as_values()}, broken=result.broken)


def plan_extension(request: ExtendRequest, root: Path, environment: Mapping[str, str]) -> Extension:
    """Return what an extension that was made already was made from; raises as ``extend`` does.

    Its lock has to be there: what would be resolved today is not what was installed.
    """
    settings = read_host_settings(environment)
    inputs = _read_inputs(request, settings)
    return _plan(inputs, choose(request.engine, report=say), root, settings, environment, request, resolving=False)


def _plan(
    inputs: _Inputs,
    engine: Engine,
    root: Path,
    settings: HostSettings,
    environment: Mapping[str, str],
    request: ExtendRequest,
    *,
    resolving: bool = True,
) -> Extension:
    """Find the base image, and plan and render what is made of it; ``resolving``: requirements get a lock if needed."""
    recipes = _recipes(root)
    forbidden = settings.forbidden_texts("")
    companions = frozenset(name for component in load(root).components for name in component.companions)
    image, base = find_base(request.base, engine)
    problems = _unfit(base, inputs)
    if problems:
        raise ExtendError(problems, hint=f"{base.reference} has Python {base.version}; nothing was built")
    wanted = inputs.wanted
    path = lock_path_of(inputs.file, base.reference) if inputs.file is not None else None
    named = [requirement for requirement in wanted.requirements if requirement.applies(base)]
    sources, commits = find_sources(
        [source for source in wanted.sources if source.applies(base)],
        locked_commits(path) if path else {},
        environment,
        resolving=resolving,
    )
    if inputs.project:
        sources.append(project_source(inputs.source.files))
    built: tuple[Wheel, ...] = ()
    if sources:
        rendering = render_wheels(tuple(sources), base, inputs.apt, recipes)
        name = f"trainworks/wheels:{rendering.digest[-12:]}"
        secrets = _secrets(settings, base, inputs.apt)
        spec = ImageSpec(name=name, tags=(name,), rendering=rendering, settings=settings, secrets=secrets)
        built = build_wheels(tuple(sources), spec, base, engine, request)
        there = {canonicalize_name(row.name): row.version for row in base.distributions}
        problems = [
            f"{source.origin} is {wheel.name} {wheel.version}, and {base.reference} has {wheel.name} "
            f"{there[wheel.name]}, which is not replaced"
            for source, wheel in zip(sources, built, strict=True)
            if wheel.name in there
        ]
        if problems:
            raise ExtendError(problems)
    local = [wanted.wheels[requirement.wheel] for requirement in named if requirement.wheel]
    resolvable = Resolvable(
        lines=tuple(requirement.text for requirement in named if not requirement.wheel),
        constraints=tuple(str(each.specification) for each in wanted.constraints),
        wheels=(*local, *built),
        commits=commits,
    )
    requirements, lock = "".join(f"{line}\n" for line in resolvable.lines), None
    if wanted.hashed:
        requirements += "".join(f"{wheel.pin}\n" for wheel in local)
    elif path is not None and (named or resolvable.wheels):
        requirements, lock = lock_requirements(
            resolvable,
            path,
            base,
            settings,
            environment,
            with_index=with_index_of(image, root, settings),
            companions=companions,
            output=request.output,
            resolving=resolving,
        )
    requirements += "".join(f"{wheel.pin}\n" for wheel in built)
    locked = locked_versions(read_requirements(requirements, "").requirements, base)
    if wrong := wrong_builds(locked, base, companions):
        raise ExtendError(wrong, hint="nothing was built")
    if any(name in companions for name, _ in locked):
        settings = with_index_of(image, root, settings)
    plan = make_extension(
        tag=request.tag,
        base=base,
        requirements=requirements,
        locked=locked,
        resolved=lock is not None,
        files=inputs.source.files,
        entry_point=inputs.entry_point,
        wheels=resolvable.wheels,
        commits=commits,
        apt=inputs.apt,
        project=built[-1].name if inputs.project else "",
        installed=inputs.installed,
    )
    spec = ImageSpec(
        name=request.tag,
        tags=(request.tag,),
        rendering=render_extension(plan, recipes),
        settings=settings,
        secrets=_secrets(settings, base, inputs.apt),
        add_files=lambda folder: _add_local_wheels(plan, settings.pip, folder),
        checks=plan.checks,
        forbidden=forbidden,
        extends=image,
    )
    return Extension(engine=engine, image=image, plan=plan, lock=lock, spec=spec)


def _recipes(root: Path) -> dict[str, str]:
    try:
        return {name: (data_folder(root, "templates") / name).read_text(encoding="utf-8") for name in RECIPES}
    except OSError as error:
        raise OutputError(
            f"{error.filename}: {error.strerror}", hint="run from a checkout of trainworks, or name one with --root"
        ) from error


def with_index_of(image: BuiltImage, root: Path, settings: HostSettings) -> HostSettings:
    """Return the settings with the index that an image of ours was built from, where the user names none.

    Its torch may be a build that the default index does not have, and what goes with that is there too.
    """
    if TITLE_LABEL not in image.labels or settings.pip.names_a_source:
        return settings
    facts = load(root)
    rows = [row for row in facts.targets if facts.name_of(row) == image.labels[TITLE_LABEL] and row.wheel_index]
    indexes = tuple(row.wheel_index for row in rows)
    return replace(settings, pip=replace(settings.pip, extra_index_urls=indexes)) if indexes else settings


def _secrets(settings: HostSettings, base: BaseImage, apt: tuple[str, ...]) -> dict[str, bytes]:
    """Return what of this machine's settings the steps read."""
    names = (*PIP_SECRETS, *(APT_SECRETS if apt else ()))
    # Archives of this machine serve another suite of Debian, and no Ubuntu.
    content = settings.secrets(base.suite if base.distribution == "debian" else "", "")
    return {name: content[name] for name in names}


def _read_inputs(request: ExtendRequest, settings: HostSettings) -> _Inputs:
    problems = [*check_names(request.base, request.tag), *check_packages(request.apt)]
    wanted, source, entry_point = Wanted(), SourceTree(), None
    file: Path | None = request.requirements
    if file is None and request.source is not None and (request.source / REQUIREMENTS).is_file():
        file = request.source / REQUIREMENTS
    if file is None and request.source is None and not request.apt:
        problems.append("none of --requirements, --source and --apt is given: there is nothing to extend the base with")
    if file is not None:
        wanted, wrong = read_wanted(file)
        problems += wrong
    own = False
    if request.source is not None:
        own = file is not None and file.resolve() == (request.source / REQUIREMENTS).resolve()
        places = [file] if file is not None and file.parent.resolve() == request.source.resolve() else []
        # Ours, not the user's: they come and go, and must not make another image each time.
        ignored = [name for place in (*places, *_project_files(request.source)) for name in locks_of(place)]
        source = read_source(request.source, ignored=ignored, forbidden=settings.forbidden_texts(""))
        problems += source.problems
    project = _project_file(source)
    if request.entry_point is not None:
        if request.source is None:
            problems.append("--entry-point is a path below --source, which is not given")
        elif source.files:
            executable = {file.path: file.mode == 0o755 for file in source.files}
            try:
                entry_point = find_entry_point(request.entry_point, executable, project=bool(project))
            except ValueError as error:
                problems.append(f"--entry-point: {error} (--source {request.source}, {CODE_FOLDER} in the image)")
    if problems:
        secrets = any("secret" in problem or "key" in problem for problem in source.problems)
        advice = "name files that must stay outside in a .trainworksignore in the root of --source; " if secrets else ""
        raise ExtendError(problems, hint=f"{advice}nothing was started")
    if entry_point is not None and entry_point.kind not in ("module", "package"):
        # As the launcher has it: a shell script may install the project in its own way.
        project = ""
    installed = [*([REQUIREMENTS] if own else []), *([project] if project else [])]
    return _Inputs(
        wanted=wanted,
        file=file or (request.source / project if request.source is not None and project else None),
        source=source,
        project=project,
        installed=tuple(name for name in installed if name in {each.path for each in source.files}),
        entry_point=entry_point,
        apt=tuple(sorted(set(request.apt))),
    )


def _project_files(folder: Path) -> tuple[Path, ...]:
    return tuple(folder / name for name in PROJECT_FILES)


def _project_file(source: SourceTree) -> str:
    """Return what makes the code a project for the launcher: setup.py, or a pyproject.toml that says how; or ``""``."""
    contents = {file.path: file.content for file in source.files if file.path in PROJECT_FILES}
    if PROJECT_FILES[0] in contents:
        return PROJECT_FILES[0]
    sections = rb"^\s*\[\s*(project|build-system)\s*\]"
    found = re.search(sections, contents.get(PROJECT_FILES[1], b""), re.MULTILINE)
    return PROJECT_FILES[1] if found else ""


def _notes(request: ExtendRequest, inputs: _Inputs) -> Iterable[str]:
    """Yield what a person should know of the code that is copied."""
    if request.source is None:
        return
    source = inputs.source
    largest = max(source.files, key=lambda file: len(file.content))
    count = f"{len(source.files)} file{'s' if len(source.files) != 1 else ''}, {source.size / 1e3:,.1f} kB"
    yield f"  code: {count}; the largest is {largest.path}, {len(largest.content) / 1e3:,.1f} kB"
    if source.left_out:
        yield f"  left out: {some(source.left_out)}"
    own = request.source / REQUIREMENTS
    if own.is_file() and REQUIREMENTS not in inputs.installed:
        yield f"  {own} is installed when a job starts, on each host: --requirements names another file"
    if (project := _project_file(source)) and not inputs.project:
        yield f"  {project} is not installed: {request.entry_point} may install the project in its own way"


def find_base(reference: str, engine: Engine) -> tuple[BuiltImage, BaseImage]:
    """Return the base image, pulled where the engine does not have it, and what is known of it.

    Raises:
        UnknownNameError: It is not there and cannot be pulled.
        ExtendError: It has no Python, or one that does not answer.
    """
    image = engine.inspect(reference)
    if image is None:
        say(f"  pulling {reference}")
        with DISPLAY.task("pulling", log=False):
            image = engine.inspect(reference) if engine.pull(reference, timeout=PULL_SECONDS) else None
    if image is None:
        raise UnknownNameError(
            f"there is no image {reference}: {engine.name} has none of this name, and no registry gave one",
            hint="correct the name, build it first (`build.py --list` shows ours), or log in to its registry",
        )
    with engine.container(reference) as container:
        named = container.run(("/bin/sh", "-c", "command -v python || command -v python3"))
        python = named.output.strip()
        if named.status != 0 or not python.startswith("/"):
            raise ExtendError([f"--base {reference}: no python is on its PATH"], hint="take a training image")
        program = resources.files("trainworks.imagetest").joinpath("interpreter.py").read_text(encoding="utf-8")
        done = container.run((python, "-I", "-c", program), timeout=INTERPRETER_SECONDS)
    answer = next((text for text in done.output.splitlines() if text.startswith(interpreter.MARKER)), "")
    if not answer:
        raise ExtendError([f"--base {reference}: {python} does not say what it has: {done.output.strip()[-2000:]}"])
    found: interpreter.Interpreter = json.loads(answer.removeprefix(interpreter.MARKER))
    repository = re.sub(r"(:[^:/@]+)?(@.*)?$", "", reference)
    digests = [digest for digest in image.digests if digest.partition("@")[0] == repository]
    return image, BaseImage(
        reference=reference,
        identifier=image.identifier,
        digest=reference if "@" in reference else next(iter(digests), ""),
        python=found["python"],
        version=found["version"],
        glibc=found["glibc"],
        machine=found["machine"],
        distribution=found["distribution"],
        suite=found["suite"],
        compiler=found["compiler"],
        managed=found["managed"],
        pip=found["pip"],
        launcher=found["launcher"],
        environment=image.environment,
        labels=image.labels,
        distributions=tuple(
            Distribution(name=row["name"], version=row["version"], extras=tuple(row["extras"]))
            for row in found["distributions"]
        ),
        complaints=tuple(found["complaints"]),
    )


def _unfit(base: BaseImage, inputs: _Inputs) -> list[str]:
    """Return why this base cannot be extended like that."""
    problems = [*check_foreign(inputs.entry_point, base), *check_distribution(inputs.apt, base)]
    where = f"--base {base.reference}"
    if not (inputs.wanted.requirements or inputs.wanted.sources or inputs.project):
        return problems
    if tuple(map(int, base.version.split("."))) < interpreter.OLDEST:
        oldest = ".".join(map(str, interpreter.OLDEST))
        problems.append(f"{where} has Python {base.version}: requirements are installed from {oldest} on")
    elif not base.pip:
        problems.append(f"{where}: {base.python} has no pip to install requirements with")
    if not base.glibc:
        problems.append(f"{where} has another C library than glibc, which no training wheel is made for")
    return problems + conflicts(inputs.wanted.requirements, base)


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
        with path.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() in plan.requirements:
                (folder / "wheels" / path.name).write_bytes(path.read_bytes())
                found.append(path.name)
    return tuple(found)
