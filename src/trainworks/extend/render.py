"""From the plan of an extension to its build context: a Dockerfile, the locked requirements, the code. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from trainworks.extend.plan import CODE_FOLDER, COMPONENT, INSTALLED_FILE, ExtensionPlan, WheelSource
from trainworks.extend.requirements import ExtendedBase
from trainworks.extend.toolkit import BARE, Workbench
from trainworks.facts.rows import SourceFile
from trainworks.render.dockerfile import MACROS, Rendering, blaming, new_environment

TEMPLATE = "extend.j2"
INSTALL_PACKAGES = "files/system/install-packages"

RECIPES = (TEMPLATE, MACROS, INSTALL_PACKAGES)
"""Files below ``templates`` that an extension is rendered from."""

BYTECODE_EPOCH = 1_577_836_800
"""Any fixed moment: it is only looked at whether there is one. A wheel is a ZIP, which knows no time before 1980."""


def render_extension(plan: ExtensionPlan, recipes: Mapping[str, str]) -> Rendering:
    """Return the build context of an extension: same plan and recipes, same bytes.

    Args:
        plan: What to render.
        recipes: The texts of ``RECIPES``, by name.

    Raises:
        RecipeError: The template is malformed.
    """
    files = [SourceFile(path=f"code/{file.path}", content=file.content, mode=file.mode) for file in plan.files]
    if plan.installed:
        files.append(SourceFile(path=f"code/{INSTALLED_FILE}", content=_marker(plan)))
    if plan.requirements:
        files.append(SourceFile(path="requirements.txt", content=plan.requirements.encode()))
        # The folder must exist to be mounted; this machine's own copies of locked files are put there before a build.
        files.append(SourceFile(path="wheels/.keep", content=b""))
        files += [SourceFile(path=f"wheels/{wheel.file}", content=wheel.content) for wheel in plan.wheels]
        # pip takes a file of an index for one of a folder unless it knows the hash of both before it downloads.
        links = "".join(f'<a href="{wheel.file}#sha256={wheel.sha256}">{wheel.file}</a>\n' for wheel in plan.wheels)
        files += [SourceFile(path="wheels/index.html", content=links.encode())] if links else []
    return _rendering(plan.base, plan.apt, files, recipes, name=plan.tag, plan=plan, sources=(), bench=BARE)


def render_wheels(
    sources: tuple[WheelSource, ...],
    base: ExtendedBase,
    apt: tuple[str, ...],
    recipes: Mapping[str, str],
    bench: Workbench = BARE,
) -> Rendering:
    """Return the build context of an image that has nothing but wheels: ``SOURCE.folder/FILE.whl`` for each source.

    They are built in the base image with the extension's Debian packages and the compiler of ``bench``, each in a stage
    of its own: what an engine built once is not built again for another set. Raises ``RecipeError``.
    """
    # The folder must exist to be mounted; this machine's own copies of source archives are put there before a build.
    files = [SourceFile(path="archives/.keep", content=b"")] if any(each.pin for each in sources) else []
    files += [
        SourceFile(path=f"sources/{each.file}", content=each.archive or f"{each.pin}\n".encode()) for each in sources
    ]
    if bench.requirements:
        files.append(SourceFile(path="compiler.txt", content=bench.requirements.encode()))
    rendering = _rendering(base, apt, files, recipes, name="wheels", plan=None, sources=sources, bench=bench)
    # A build that fails names the package.
    stages = {f"wheel-{number}": each.origin for number, each in enumerate(sources)}
    return replace(rendering, stage_components={**rendering.stage_components, **stages})


def _marker(plan: ExtensionPlan) -> bytes:
    """Return what tells the launcher that these files were installed, as long as the code is as it is now."""
    files = {file.path: hashlib.sha256(file.content).hexdigest() for file in plan.files}
    return json.dumps({"installed": list(plan.installed), "files": files}, indent=1).encode()


def _rendering(
    base: ExtendedBase,
    apt: tuple[str, ...],
    files: Iterable[SourceFile],
    recipes: Mapping[str, str],
    **values: object,
) -> Rendering:
    with blaming(TEMPLATE):
        dockerfile = (
            new_environment(recipes.items())
            .get_template(TEMPLATE)
            .render(base=base, packages=apt, code_folder=CODE_FOLDER, epoch=BYTECODE_EPOCH, **values)
        )
    if apt:
        program = SourceFile(path=INSTALL_PACKAGES, content=recipes[INSTALL_PACKAGES].encode())
        files = [*files, program]
    return Rendering(
        dockerfile=dockerfile,
        files=tuple(sorted(files, key=lambda file: file.path)),
        stage_components=dict.fromkeys(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE), COMPONENT),
    )
