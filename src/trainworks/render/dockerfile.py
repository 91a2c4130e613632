"""Joins the recipes of a plan's components to one Dockerfile, and collects the copied files.

A recipe has two Jinja blocks: ``stage`` builds its component in a separate stage, ``image`` takes
the result over into the final stage. The values that a recipe reads are its signature: a value
that is missing, or that the recipe ignores, is an error before any engine starts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import cast

from jinja2 import (
    Environment,
    FunctionLoader,
    StrictUndefined,
    TemplateError,
    TemplateSyntaxError,
    meta,
    nodes,
)
from jinja2.exceptions import SecurityError, TemplateNotFound
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainworks.errors import RecipeError
from trainworks.facts.rows import Artifact, Facts, Recipe, SourceFile
from trainworks.facts.text import CONTROL
from trainworks.plan.model import COMMAND, ENTRY_POINT, IMAGE_TIME, WORKING_FOLDER, ImagePlan, Step
from trainworks.plan.package_ownership import BUILDER
from trainworks.plan.target import OWN_PYTHON
from trainworks.render.layers import WheelLayer, divide_wheels, keep_one_layer
from trainworks.render.manifest import (
    CONSTRAINTS,
    UV_SETTINGS,
    render_constraints,
    render_manifest,
    render_uv_settings,
)
from trainworks.render.shells import render_profile, render_sshd
from trainworks.render.steps import image_steps
from trainworks.suggestions import nearest

INPUTS_LABEL = "trainworks.inputs"
"""Label of every image: the digest of the rendering that it was built from.

Equal digests need no build.
"""

BASE_LABEL = "trainworks.base"
"""Label of every image on a base of this project: whether that was ``pulled`` or
``bootstrapped``.
"""

ARCHIVES_LABEL = "trainworks.archives"
"""Label of every image on a base of this project: the states of its packages' archive."""

LAYERS_LABEL = "trainworks.layers"
"""Label of every image: a digest of its layers at the build.

An image with more layers was changed since.
"""

FRAME = "Dockerfile.j2"
"""The template of the whole Dockerfile, which joins the blocks of recipes."""

MACROS = "macros.j2"
"""Its macros can be called in every recipe."""

BLOCKS = frozenset({"stage", "image"})
"""The blocks that a recipe may have; a recipe with another one is refused."""

MUST_BE_READ = frozenset({"requirements", "packages", "artifacts"})
"""Values that a recipe must not ignore: they stand for packages that the plan promises."""

ARCHIVES = "source_archives"
"""The macro for the stage that builds a component's source archives, before its own stage."""

DIVIDED = "wheel_layers"
"""Value that a recipe reads instead of ``requirements``, to divide its wheels among layers."""

ROOT = "/opt/root/"
"""A build stage's folder that is copied over the image's root."""

BUILDER_FOLDER = "/opt/builder/"
"""The folder of the tools of build stages."""

CONTEXT_COPY = re.compile(r"^COPY (?!--from=)(?:--\S+ )*(.+) (\S+)$", re.MULTILINE)
CONTEXT_MOUNT = re.compile(r"--mount=(?=\S*type=bind)(?!\S*from=)\S*source=([^\s,]+)")
"""Sources of a ``COPY`` or a mount: the files that a Dockerfile takes from its build context."""

STAGE_SOURCE = re.compile(r"(?:--from=|--mount=(?=\S*type=bind)\S*\bfrom=)([^\s,]+)")
"""Finds the stages and images that a Dockerfile copies or mounts files of."""

INSTRUCTIONS = frozenset({"FROM", "RUN", "COPY", "ENV", "ARG", "LABEL", "WORKDIR", "SHELL", "USER"})
"""The instructions that a recipe may use."""

STAGE_NAME = re.compile(r"^FROM \S+ AS (\S+)$", re.MULTILINE)
"""Finds the names of a block's stages: a component may need more than one."""


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """A build context as values.

    Attributes:
        dockerfile: Its text.
        files: Every other file of the context, sorted by path.
        stage_components: Stage name to component.
        texts: Component to the text of its recipe, for its stage and for the image together.
    """

    dockerfile: str
    files: tuple[SourceFile, ...]
    stage_components: Mapping[str, str]
    texts: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def history(self) -> tuple[str, ...]:
        """The steps in the image's history: ``ConfigurationCheck.steps``."""
        return image_steps(self.dockerfile)

    @cached_property
    def copied(self) -> tuple[tuple[str, str, str], ...]:
        """The files that recipes copy into the image: component, path in the image, SHA-256.

        For example ``("nccl", "/etc/nccl.conf", "0123...")``: see ``DeliveredFilesCheck.digests``.
        """
        rows = []
        for component, text in self.texts.items():
            for sources, target in CONTEXT_COPY.findall(text):
                path = target
                if target.startswith(ROOT):
                    path = f"/{target.removeprefix(ROOT)}"
                # Files for a build stage are in no image.
                if path.startswith(BUILDER_FOLDER):
                    continue
                for file in self.files:
                    for source in sources.split():
                        copy = _find_copied_path(file.path, source, path)
                        if copy:
                            digest = hashlib.sha256(file.content).hexdigest()
                            rows.append((component, copy, digest))
        return tuple(rows)

    @cached_property
    def digest(self) -> str:
        """``sha256:`` and the hash of the text and of all files, with paths and permissions."""
        digest = hashlib.sha256(self.dockerfile.encode())
        for file in self.files:
            head = f"\0{file.path}\0{file.mode:o}\0{len(file.content)}\0"
            digest.update(head.encode() + file.content)
        return f"sha256:{digest.hexdigest()}"


def _find_copied_path(file: str, source: str, target: str) -> str:
    """Return the path that ``COPY source target`` gives to a file of the context.

    For example ``/etc/nccl.conf`` for ``files/nccl.conf`` and ``COPY files/nccl.conf /etc/``;
    ``""`` for a file that the instruction does not copy.
    """
    if file == source and target.endswith("/"):
        return f"{target}{source.rpartition('/')[2]}"
    if file == source:
        return target
    if file.startswith(f"{source}/"):
        return f"{target}{file.removeprefix(source)}"
    return ""


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """The build stages of a component: the text of its block, and words for a comment."""

    component: str
    version: str
    summary: str
    text: str


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The parts of a Dockerfile, from the recipes of a plan.

    Attributes:
        stages: The build stages.
        layers: The blocks of the image's own stage.
        texts: Component to the text of its recipe.
        wheels: Component to its layers of wheels.
    """

    stages: list[_Stage] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    wheels: dict[str, tuple[WheelLayer, ...]] = field(default_factory=dict)

    def add(self, step: Step, blocks: dict[str, str]) -> None:
        """Add the blocks of a component's recipe."""
        if not step.in_image:
            blocks.pop("image", None)
        if "image" in blocks:
            self.layers.append(blocks["image"])
        if "stage" in blocks:
            stage = _Stage(
                component=step.component,
                version=step.version,
                summary=step.summary,
                text=blocks["stage"],
            )
            self.stages.append(stage)
        self.texts[step.component] = "\n".join(blocks.values())


def render(plan: ImagePlan, facts: Facts, *, check: bool = True) -> Rendering:
    """Return the build context of a plan: same plan and facts, same bytes.

    Args:
        plan: The plan.
        facts: The facts that the plan was made of.
        check: Whether to check for values that a recipe ignores, or would lack
            in another image; that takes a third of the time.

    Raises:
        RecipeError: A recipe and the values of its component do not fit, or a
            template is malformed.
    """
    recipes = [(f"components/{name}", recipe.text) for name, recipe in facts.recipes.items()]
    environment = _compile_templates((*facts.templates.items(), *recipes))
    parts = _Parts()
    for step in plan.steps:
        recipe = facts.recipes[step.recipe]
        wheels = _divide_into_layers(step, recipe, environment)
        values = _collect_values(step, plan, wheels)
        if check:
            _check_signature(environment, recipe, values)
        blocks = _render_blocks(environment, step.recipe, values)
        if "stage" in blocks:
            # A source archive is built in a stage of its own, before the component's stage.
            archive_stages = _render_archive_stages(step, wheels, environment)
            blocks["stage"] = "\n\n".join((*archive_stages, blocks["stage"]))
        parts.wheels[step.component] = wheels
        parts.add(step, blocks)
    with name_template_in_errors(FRAME):
        dockerfile = environment.get_template(FRAME).render(
            target=plan.target,
            stages=parts.stages,
            layers=parts.layers,
            environment=plan.environment.items(),
            labels=plan.labels.items(),
            working_folder=WORKING_FOLDER,
            entry_point=ENTRY_POINT,
            command=COMMAND,
        )
    files = _collect_context_files(plan, facts, dockerfile, parts.wheels)
    if check:
        _check_instructions(parts.texts)
        _check_sources(dockerfile, files, parts.texts)
    stage_components = {}
    for stage in parts.stages:
        stage_components.update(dict.fromkeys(STAGE_NAME.findall(stage.text), stage.component))
    return Rendering(
        dockerfile=dockerfile,
        files=files,
        stage_components={**stage_components, "image": "image"},
        texts=parts.texts,
    )


def _divide_into_layers(
    step: Step, recipe: Recipe, environment: Environment
) -> tuple[WheelLayer, ...]:
    """Return a component's layers of wheels: several if its recipe divides them."""
    if DIVIDED in _find_values_read(environment, recipe.name, recipe.text):
        return divide_wheels(step)
    return keep_one_layer(step)


def _render_archive_stages(
    step: Step, wheels: Iterable[WheelLayer], environment: Environment
) -> list[str]:
    """Return the stages that build a component's source archives."""
    make_stage = cast("Callable[[str, WheelLayer], object]", environment.globals[ARCHIVES])
    stages = []
    for layer in wheels:
        if layer.archives:
            stage = make_stage(step.component, layer)
            stages.append(str(stage).strip())
    return stages


@lru_cache(maxsize=1)
def _compile_templates(templates: tuple[tuple[str, str], ...]) -> Environment:
    """Return Jinja's environment of templates, with the macros.

    The cache lets all plans of a checkout share the environment and its compiled templates.

    Args:
        templates: Names and texts: ``("components/torch", "...")``.
    """
    environment = new_environment(templates)
    with name_template_in_errors(MACROS):
        macros = vars(environment.get_template(MACROS).module)
    public = {name: macro for name, macro in macros.items() if not name.startswith("_")}
    environment.globals.update(public)
    return environment


class _RecipeEnvironment(ImmutableSandboxedEnvironment):
    """Jinja without the operators that fill the memory: ``"%999999999d" % 1``."""

    intercepted_binops = frozenset({"%", "*", "**"})

    def call_binop(self, _context: Context, operator: str, _left: object, _right: object) -> object:
        """Refuse an operator that recipes do not need; raises ``SecurityError``."""
        raise SecurityError(f"recipes do not calculate with {operator}")


def new_environment(templates: Iterable[tuple[str, str]]) -> Environment:
    """Return Jinja's environment of templates, pairs of a name and a text.

    A recipe gets values and makes text of them: the sandbox refuses everything else that Python
    could do.
    """
    texts = dict(templates)

    def find(name: str) -> tuple[str, str, None] | None:
        if name not in texts:
            return None
        # The second value is the file's name in a traceback, from which an error gets its line.
        return texts[name], name, None

    environment = _RecipeEnvironment(
        loader=FunctionLoader(find),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = quote_value
    # A recipe repeats nothing but values: these two could go on for ever, or fill the memory.
    for name in ("range", "lipsum"):
        del environment.globals[name]
    environment.globals["image_time"] = IMAGE_TIME
    return environment


@lru_cache(maxsize=256)
def _find_values_read(environment: Environment, name: str, text: str) -> frozenset[str]:
    """Return the names that a recipe reads and does not define."""
    with name_template_in_errors(f"components/{name}.j2"):
        tree = environment.parse(text)
        foreign_nodes = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
        # One such node is enough for an error.
        for node in tree.find_all(foreign_nodes):
            raise TemplateSyntaxError(
                "a recipe takes nothing from other templates", node.lineno, name
            )
        return frozenset(meta.find_undeclared_variables(tree))


def quote_value(text: str) -> str:
    """Quote a value for ENV and LABEL; ``$`` would be expanded there.

    Raises:
        ValueError: It has a line break or another control character, which no quotes can hold.
    """
    if CONTROL.search(text):
        raise ValueError(f"{text!r} has a control character (a line break, a tab, an escape)")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'


def _make_artifacts_path(step: Step) -> str:
    """Return the path of a component's download list in the build context."""
    return f"artifacts/{step.component}.txt"


def _collect_values(
    step: Step, plan: ImagePlan, wheels: tuple[WheelLayer, ...]
) -> dict[str, object]:
    """Return the values that a recipe may read; some exist only where the step has any."""
    archives = [f"{state.suite} {state.date} {state.contents}" for state in plan.archives]
    own_python = any(other.component == OWN_PYTHON for other in plan.steps)
    companions = [artifact.name for artifact in step.artifacts[1:]]
    flags: tuple[str, ...] = ()
    artifacts_path = ""
    if step.artifacts:
        flags = step.artifacts[0].flags
        artifacts_path = _make_artifacts_path(step)
    values: dict[str, object] = {
        "component": step.component,
        "version": step.version,
        "framework": plan.target.framework,
        "suite": plan.base.suite,
        "architecture": plan.base.architecture,
        "base_reference": plan.image,
        "archives": tuple(archives),
        "builder_reference": plan.builder_image,
        "python": plan.interpreter,
        "python_version": plan.target.python,
        "own_python": own_python,
        "cuda_home": plan.cuda_home,
        "cuda_architectures": plan.cuda_architectures,
        "imports": plan.imports,
        "flags": flags,
        "artifacts": artifacts_path,
        "fetched": f"/opt/fetched/{step.component}",
        "builds_with": step.builds_with,
        "together": tuple(companions),
        "site_packages": f"/opt/venv/lib/python{plan.target.python}/site-packages",
    }
    if wheels:
        values["requirements"] = wheels[0]
        values[DIVIDED] = wheels
    if step.component == "system":
        values["packages"] = step.debian
    if step.component == BUILDER:
        values["packages"] = _choose_builder_packages(step, plan)
    if step.component == OWN_PYTHON:
        values["packages"] = step.build_packages
    return values


def _choose_builder_packages(step: Step, plan: ImagePlan) -> tuple[str, ...]:
    """Return the Debian packages of the builder's stage."""
    system = next(other for other in plan.steps if other.component == "system")
    if plan.builder_image:
        # That image does not contain `system`: parts need their run-time packages while they are
        # built, too.
        packages = [*system.debian, *step.build_packages]
    else:
        # The packages of `system` are there: apt would read its lists again for nothing.
        packages = [package for package in step.build_packages if package not in system.debian]
    return tuple(dict.fromkeys(packages))


def _check_signature(
    environment: Environment, recipe: Recipe, values: Mapping[str, object]
) -> None:
    """Refuse a recipe that reads a value which does not exist, or ignores packages and artifacts.

    ``values`` are those of ``_collect_values``.
    """
    name = f"components/{recipe.name}.j2"
    signature = _find_values_read(environment, recipe.name, recipe.text)
    missing = sorted(signature - values.keys() - environment.globals.keys())
    # A recipe that divides its wheels reads the same requirements as layers.
    read = set(signature)
    if DIVIDED in signature:
        read.add("requirements")
    unused = sorted(name for name in MUST_BE_READ - read if values.get(name))
    problems = [f"it reads `{name}`, which its component does not have" for name in missing]
    problems += [f"it ignores `{name}`, which its row gives" for name in unused]
    if problems:
        raise RecipeError(
            f"templates/{name}: {'; '.join(problems)}",
            hint=f"it may read: {', '.join(sorted(values))}",
        )


def _check_instructions(texts: Mapping[str, str]) -> None:
    """Refuse a recipe with an unknown instruction or an unfinished last line.

    An engine would refuse it too, minutes later.
    """
    beginnings = tuple(f"{name} " for name in INSTRUCTIONS)
    for component, text in texts.items():
        where = f"templates/components: the recipe of {component}"
        is_continued = False
        for line in text.splitlines():
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            word = line.split(maxsplit=1)[0]
            if not is_continued and word not in INSTRUCTIONS:
                known = sorted(INSTRUCTIONS)
                near = nearest(word, known)
                hint = f"known: {', '.join(known)}"
                if near:
                    hint = f"did you mean {near}?"
                raise RecipeError(
                    f"{where}: {word!r} is not an instruction that recipes use", hint=hint
                )
            if is_continued and line.startswith(beginnings):
                raise RecipeError(f"{where}: the line before {word} ends with a backslash")
            is_continued = line.endswith("\\")
        if is_continued:
            raise RecipeError(f"{where}: its last line ends with a backslash, and nothing follows")


def _check_sources(dockerfile: str, files: Iterable[SourceFile], texts: Mapping[str, str]) -> None:
    """Refuse a Dockerfile that copies or mounts files that its context does not have."""
    stages = {*STAGE_NAME.findall(dockerfile)}
    stages.update(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE))
    unknown = sorted(set(STAGE_SOURCE.findall(dockerfile)) - stages)
    if unknown:
        stage = unknown[0]
        names = [name for name, text in texts.items() if stage in STAGE_SOURCE.findall(text)]
        near = nearest(stage, sorted(stages))
        hint = "stages are named by `FROM IMAGE AS NAME`"
        if near:
            hint = f"did you mean {near}?"
        raise RecipeError(
            f"the recipe of {', '.join(names)} takes files"
            f" of the stage {stage!r}, which is missing",
            hint=hint,
        )

    sources = set(CONTEXT_MOUNT.findall(dockerfile))
    for paths_of_copy, _ in CONTEXT_COPY.findall(dockerfile):
        sources.update(paths_of_copy.split())
    paths = [f"{file.path}/" for file in files]
    problems = []
    for source in sorted(sources):
        if any(path.startswith(f"{source}/") for path in paths):
            continue
        names = [name for name, text in texts.items() if source in text]
        problems.append(f"the recipe of {', '.join(names)} takes {source}, which is missing")
    if problems:
        raise RecipeError(
            "; ".join(problems),
            hint=(
                "files of recipes are in templates/files,"
                " launcher and smdistributed of the checkout"
            ),
        )


def _render_blocks(
    environment: Environment, component: str, values: Mapping[str, object]
) -> dict[str, str]:
    """Render the blocks of a recipe, by name: ``{"stage": "FROM ...", "image": "COPY ..."}``."""
    file = f"components/{component}.j2"
    blocks = {}
    with name_template_in_errors(file):
        template = environment.get_template(f"components/{component}")
        context = template.new_context(dict(values))
        for name, block in template.blocks.items():
            blocks[name] = "".join(block(context)).strip("\n")
    unknown = sorted(blocks.keys() - BLOCKS)
    if unknown:
        raise RecipeError(
            f"templates/{file}: unknown block {unknown[0]!r}",
            hint=f"a recipe has: {', '.join(sorted(BLOCKS))}",
        )
    return blocks


@contextmanager
def name_template_in_errors(name: str) -> Iterator[None]:
    """Turn any error of a template into one that names its file and the line.

    Args:
        name: The file below ``templates`` that is rendered.
    """
    try:
        yield
    except (
        TemplateError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:
        places = list(dict.fromkeys(_find_places(error, name)))
        file, line = name, 0
        if places:
            file, line = places[0]
        at = ""
        if line:
            at = f" line {line}:"
        # A macro that a recipe calls may be the cause: both have a place.
        within = ""
        if len(places) > 1:
            inner_file, inner_line = places[-1]
            within = f" (in templates/{inner_file}, line {inner_line})"
        raise RecipeError(f"templates/{file}:{at} {_explain_error(error)}{within}") from error


def _explain_error(error: Exception) -> str:
    """Return the text of an error of a template."""
    if isinstance(error, (RecursionError, MemoryError)):
        return (
            "it calls or includes itself without an end, or makes more text than fits into memory"
        )
    if isinstance(error, TemplateNotFound):
        return f"template not found: {error.name!r}"
    if isinstance(error, TemplateSyntaxError):
        # Its whole text would repeat file and line, in Jinja's own words.
        return error.message or ""
    return str(error)


def _find_places(error: Exception, name: str) -> Iterator[tuple[str, int]]:
    """Yield the templates and lines in an error's traceback, the outermost first.

    For example ``("components/nccl.j2", 12)``.
    """
    if isinstance(error, TemplateSyntaxError):
        yield name, error.lineno
        return
    step = error.__traceback__
    while step is not None:
        names = step.tb_frame.f_globals
        template = names.get("__jinja_template__")
        if template is not None:
            yield (
                _name_template_file(template.name),
                template.get_corresponding_lineno(step.tb_lineno),
            )
        elif "__jinja_exception__" in names:
            # Jinja has rewritten the traceback: lines are the template's already.
            yield _name_template_file(names["__file__"]), step.tb_lineno
        step = step.tb_next


def _name_template_file(template: str) -> str:
    """Return the file of a template: ``components/nccl.j2`` of the recipe ``components/nccl``."""
    if template.endswith(".j2"):
        return template
    return f"{template}.j2"


def _collect_context_files(
    plan: ImagePlan, facts: Facts, dockerfile: str, wheels: Mapping[str, tuple[WheelLayer, ...]]
) -> tuple[SourceFile, ...]:
    """Return the files of the build context that a Dockerfile copies or mounts, sorted by path.

    Args:
        plan: The plan.
        facts: The files of the checkout.
        dockerfile: The text; files that it does not name are left out.
        wheels: The layers of wheels of each component.
    """
    generated = {
        "image.json": render_manifest(plan),
        CONSTRAINTS: render_constraints(plan),
        UV_SETTINGS: render_uv_settings(plan),
        "shells/profile.sh": render_profile(plan.environment),
        "shells/sshd.conf": render_sshd(plan.environment),
    }
    files = [_make_text_file(path, text) for path, text in generated.items() if path in dockerfile]
    for step in plan.steps:
        for layer in wheels[step.component]:
            files += _write_package_lists(layer)
        if step.python:
            # The folder must exist to be mounted; local copies of the step's
            # files are put there before a build.
            files.append(_make_text_file(f"wheels/{step.component}/.keep", ""))
        if step.artifacts:
            lines = [_write_artifact_line(artifact) for artifact in step.artifacts]
            files.append(_make_text_file(_make_artifacts_path(step), "".join(lines)))
            files.append(_make_text_file(f"artifacts/{step.component}/.keep", ""))
    for file in facts.files:
        top, name = file.path.split("/", 2)[:2]
        # A file is copied by its own path, or with its folder, or its folder is mounted.
        uses = (file.path, f"COPY {top}/{name} ", f"source={top}/{name},")
        if any(use in dockerfile for use in uses):
            files.append(file)
    return tuple(sorted(files, key=lambda file: file.path))


def _make_text_file(path: str, text: str) -> SourceFile:
    """Return a generated file of the build context."""
    return SourceFile(path=path, content=text.encode())


def _write_package_lists(layer: WheelLayer) -> list[SourceFile]:
    """Return the lists of a layer's wheels and source archives."""
    wheel_lines = []
    for package in layer.wheel_packages:
        wheel_lines.append(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    files = [_make_text_file(layer.requirements, "".join(wheel_lines))]
    if layer.archives:
        archive_lines = []
        for package in layer.archive_packages:
            words = (package.name, package.version, package.file, package.sha256)
            archive_lines.append(" ".join(words) + "\n")
        files.append(_make_text_file(layer.archives, "".join(archive_lines)))
    return files


def _write_artifact_line(artifact: Artifact) -> str:
    """Return one line of a component's download list; ``-`` stands for a value without a record.

    ``git NAME VERSION FILE REPOSITORY TAG COMMIT``, or ``file NAME VERSION FILE URL SHA256 SIZE``.
    """
    label = f"{artifact.name} {artifact.version} {artifact.file}"
    if artifact.git:
        return f"git {label} {artifact.git} {artifact.tag or '-'} {artifact.commit}\n"
    return f"file {label} {artifact.url} {artifact.sha256 or '-'} {artifact.size or '-'}\n"
