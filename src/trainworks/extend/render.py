"""Renders the build contexts of an extension and of steps in its base image. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainworks.extend.cuda_compiler import Workbench
from trainworks.extend.plan import CODE_FOLDER, COMPONENT, INSTALLED_FILE, ExtensionPlan
from trainworks.facts.rows import SourceFile
from trainworks.plan.model import IMAGE_TIME
from trainworks.render.dockerfile import MACROS, Rendering, name_template_in_errors, new_environment

IMAGE, STEP, PACKAGES = "extend.j2", "extend-step.j2", "extend-packages.j2"
INSTALL_FETCHED = "files/system/install-fetched"
INSTALLER = "trainworks_launcher/programs/install.py"

RECIPES = (IMAGE, STEP, PACKAGES, "extend-macros.j2", MACROS, INSTALL_FETCHED)
"""Files below ``templates`` that an extension is rendered from."""

LOCK = "extension.lock"
"""The lock's name among the inputs, and in the image, below ``/opt/trainworks``."""


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """Templates and programs of build contexts.

    Attributes:
        texts: The texts of ``RECIPES``.
        programs: Name to text: ``build_stage.py``, and ``imports.py`` of the image tests.
        uv: The builder's own uv, for a base that has none; ``b""`` for one that has.
    """

    texts: Mapping[str, str]
    programs: Mapping[str, bytes] = field(repr=False)
    uv: bytes = field(default=b"", repr=False)

    def render(self, template: str, **values: object) -> str:
        """Return a Dockerfile. Raises ``RecipeError``."""
        with name_template_in_errors(template):
            environment = new_environment(self.texts.items())
            recipe = environment.get_template(template)
            return recipe.render(epoch=IMAGE_TIME, code_folder=CODE_FOLDER, **values)

    @property
    def installer(self) -> list[SourceFile]:
        """The files that each step mounts."""
        files = []
        for name, text in self.programs.items():
            files.append(SourceFile(path=f"installer/{name}", content=text))
        if self.uv:
            files.append(SourceFile(path="installer/uv", content=self.uv, mode=0o755))
        return files


@dataclass(frozen=True, kw_only=True)
class SandboxStep:
    """A step in the base image that writes files for the builder.

    Attributes:
        origin: The source of the wheel, for messages.
        files: The files that the step mounts.
        bench: The compiler, and the environment of builds.
        tools: Whether a compiler is installed first.
        modules: The modules that are imported; empty where a wheel is built.
        isolated: The name of a project that is built without the base's packages;
            ``""`` for another step.
    """

    origin: str
    files: Sequence[SourceFile] = ()
    bench: Workbench
    tools: bool = False
    modules: Sequence[str] = ()
    isolated: str = ""


def packages_image(plan: ExtensionPlan, recipes: Recipes) -> str:
    """Return the name of the image with the Debian packages.

    The base's own name for an extension without Debian packages.
    """
    if not plan.apt:
        return plan.base.source
    parts = (plan.base.identifier, render_packages(plan, recipes).digest)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return f"trainworks/packages:{digest[:12]}"


def render_packages(plan: ExtensionPlan, recipes: Recipes) -> Rendering:
    """Return the build context of the base with the Debian packages."""
    dockerfile = recipes.render(PACKAGES, plan=plan, base=plan.base)
    script = SourceFile(path=INSTALL_FETCHED, content=recipes.texts[INSTALL_FETCHED].encode())
    # The packages are put there before a build.
    return _rendering(dockerfile, [script, SourceFile(path="packages/.keep", content=b"")])


def render_sandbox_step(plan: ExtensionPlan, recipes: Recipes, step: SandboxStep) -> Rendering:
    """Return the build context of a step in the base image."""
    dockerfile = recipes.render(
        STEP,
        base=plan.base,
        start=packages_image(plan, recipes),
        bench=step.bench,
        tools=step.tools,
        modules=step.modules,
        origin=re.sub(r"[^ -~]", "?", step.origin),
    )
    # Folders must exist to be mounted; downloads are put there before a build.
    mounted = ("links", "wheels", "compiler")
    folders = [SourceFile(path=f"{name}/.keep", content=b"") for name in mounted]
    return _rendering(dockerfile, [*recipes.installer, *folders, *step.files])


def render_extension(plan: ExtensionPlan, recipes: Recipes) -> Rendering:
    """Return the build context of an extension: same plan and recipes, same bytes.

    Wheels are not in the context: the lock has their hashes, and they are added before a build.

    Raises ``RecipeError``.
    """
    installs = bool(plan.lock.locked)
    start = packages_image(plan, recipes)
    dockerfile = recipes.render(IMAGE, plan=plan, base=plan.base, start=start, installs=installs)
    files = [replace(file, path=f"code/{file.path}") for file in plan.files]
    if plan.installed:
        files.append(SourceFile(path=f"code/{INSTALLED_FILE}", content=_marker(plan)))
    if installs:
        files.append(SourceFile(path=f"inputs/{LOCK}", content=plan.lock.text.encode()))
        files.append(SourceFile(path="inputs/made-of.json", content=_made_of(plan)))
        files.append(SourceFile(path="wheels/.keep", content=b""))
        files += recipes.installer
    if plan.apt:
        packages = render_packages(plan, recipes)
        content = packages.dockerfile.encode()
        files.append(SourceFile(path="files/packages/Dockerfile", content=content))
        files += packages.files
    return _rendering(dockerfile, files)


def _made_of(plan: ExtensionPlan) -> bytes:
    """Return the hashes of the plan's own sources and files, by origin or path, as JSON."""
    hashes = {}
    for source in plan.sources:
        hashes[source.origin] = hashlib.sha256(source.archive).hexdigest()
    for file in plan.inputs:
        hashes[file.path] = hashlib.sha256(file.content).hexdigest()
    return _json(hashes)


def _rendering(dockerfile: str, files: Sequence[SourceFile]) -> Rendering:
    """Return a Dockerfile and its files as a rendering; each path is there once, sorted."""
    file_by_path = {file.path: file for file in files}
    stages = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE)
    return Rendering(
        dockerfile=dockerfile,
        files=tuple(file_by_path[path] for path in sorted(file_by_path)),
        stage_components=dict.fromkeys(stages, COMPONENT),
    )


def _marker(plan: ExtensionPlan) -> bytes:
    """Return the file that tells the launcher what was installed.

    The launcher believes the file only while the code has these hashes.
    """
    files = {file.path: hashlib.sha256(file.content).hexdigest() for file in plan.files}
    return _json({"installed": list(plan.installed), "files": files})


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()
