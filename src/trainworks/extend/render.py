"""From an extension to its build contexts: the image, its Debian packages, and
questions to its base. Pure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainworks.extend.cuda_compiler import Workbench
from trainworks.extend.plan import CODE_FOLDER, COMPONENT, INSTALLED_FILE, ExtensionPlan
from trainworks.facts.rows import SourceFile
from trainworks.plan.model import IMAGE_TIME
from trainworks.render.dockerfile import MACROS, Rendering, blaming, new_environment

IMAGE, STEP, PACKAGES = "extend.j2", "extend-step.j2", "extend-packages.j2"
INSTALL_FETCHED = "files/system/install-fetched"
INSTALLER = "trainworks_launcher/programs/install.py"

RECIPES = (IMAGE, STEP, PACKAGES, "extend-macros.j2", MACROS, INSTALL_FETCHED)
"""Files below ``templates`` that an extension is rendered from."""

LOCK = "extension.lock"
"""Its name among the inputs, and in the image, below ``/opt/trainworks``."""


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """What contexts are rendered from beside a plan.

    Attributes:
        texts: The texts of ``RECIPES``.
        programs: Name to text: ``inside.py``, and ``imports.py`` of the image tests.
        uv: The builder's own uv, for a base that has none; ``b""`` for one that has.
    """

    texts: Mapping[str, str]
    programs: Mapping[str, bytes] = field(repr=False)
    uv: bytes = field(default=b"", repr=False)

    def render(self, template: str, **values: object) -> str:
        """Return a Dockerfile. Raises ``RecipeError``."""
        with blaming(template):
            found = new_environment(self.texts.items()).get_template(template)
            return found.render(epoch=IMAGE_TIME, code_folder=CODE_FOLDER, **values)

    @property
    def installer(self) -> list[SourceFile]:
        """The files that each step mounts."""
        found = [
            SourceFile(path=f"installer/{name}", content=text)
            for name, text in self.programs.items()
        ]
        if self.uv:
            found.append(SourceFile(path="installer/uv", content=self.uv, mode=0o755))
        return found


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to a base, whose answer is files.

    Attributes:
        origin: What it is about, for messages.
        files: What the step mounts.
        bench: What wheels are built with.
        tools: Whether a compiler is installed first.
        modules: What is imported beside what is installed; empty where a wheel is built.
        isolated: Name of what is built without the base's packages in sight;
            ``""`` for anything else.
    """

    origin: str
    files: Sequence[SourceFile] = ()
    bench: Workbench
    tools: bool = False
    modules: Sequence[str] = ()
    isolated: str = ""


def packages_image(plan: ExtensionPlan, recipes: Recipes) -> str:
    """Return the name of the image with the Debian packages.

    The base's own where there are none.
    """
    if not plan.apt:
        return plan.base.source
    decides = (plan.base.identifier, render_packages(plan, recipes).digest)
    return f"trainworks/packages:{hashlib.sha256(repr(decides).encode()).hexdigest()[:12]}"


def render_packages(plan: ExtensionPlan, recipes: Recipes) -> Rendering:
    """Return the build context of the base with the Debian packages."""
    dockerfile = recipes.render(PACKAGES, plan=plan, base=plan.base)
    script = SourceFile(path=INSTALL_FETCHED, content=recipes.texts[INSTALL_FETCHED].encode())
    # The packages are put there before a build.
    return _rendering(dockerfile, [script, SourceFile(path="packages/.keep", content=b"")])


def render_question(plan: ExtensionPlan, recipes: Recipes, question: Question) -> Rendering:
    """Return the build context of a question to the base."""
    dockerfile = recipes.render(
        STEP,
        base=plan.base,
        start=packages_image(plan, recipes),
        bench=question.bench,
        tools=question.tools,
        modules=question.modules,
        origin=re.sub(r"[^ -~]", "?", question.origin),
    )
    # Folders must exist to be mounted; downloads are put there before a build.
    folders = [
        SourceFile(path=f"{name}/.keep", content=b"") for name in ("links", "wheels", "compiler")
    ]
    return _rendering(dockerfile, [*recipes.installer, *folders, *question.files])


def render_extension(plan: ExtensionPlan, recipes: Recipes) -> Rendering:
    """Return the build context of an extension: same plan and recipes, same bytes.

    Raises ``RecipeError``.

    Wheels are not in it: the lock has their hashes, and they are put there before a build.
    """
    installs = bool(plan.lock.locked)
    start = packages_image(plan, recipes)
    dockerfile = recipes.render(IMAGE, plan=plan, base=plan.base, start=start, installs=installs)
    files = [
        SourceFile(path=f"code/{file.path}", content=file.content, mode=file.mode)
        for file in plan.files
    ]
    if plan.installed:
        files.append(SourceFile(path=f"code/{INSTALLED_FILE}", content=_marker(plan)))
    if installs:
        made_of = {
            source.origin: hashlib.sha256(source.archive).hexdigest() for source in plan.sources
        }
        made_of |= {file.path: hashlib.sha256(file.content).hexdigest() for file in plan.inputs}
        files.append(SourceFile(path=f"inputs/{LOCK}", content=plan.lock.text.encode()))
        files.append(SourceFile(path="inputs/made-of.json", content=_json(made_of)))
        files.append(SourceFile(path="wheels/.keep", content=b""))
        files += recipes.installer
    if plan.apt:
        packages = render_packages(plan, recipes)
        files.append(
            SourceFile(path="files/packages/Dockerfile", content=packages.dockerfile.encode())
        )
        files += packages.files
    return _rendering(dockerfile, files)


def _rendering(dockerfile: str, files: Sequence[SourceFile]) -> Rendering:
    return Rendering(
        dockerfile=dockerfile,
        files=tuple(
            sorted({file.path: file for file in files}.values(), key=lambda file: file.path)
        ),
        stage_components=dict.fromkeys(
            re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE), COMPONENT
        ),
    )


def _marker(plan: ExtensionPlan) -> bytes:
    """Return what tells the launcher that these files were installed, as long
    as the code is as it is now.
    """
    files = {file.path: hashlib.sha256(file.content).hexdigest() for file in plan.files}
    return _json({"installed": list(plan.installed), "files": files})


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()
