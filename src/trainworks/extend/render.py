"""From an extension to its build contexts: one that resolves, and one that is the image. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainworks.extend.plan import CODE_FOLDER, COMPONENT, INSTALLED_FILE, ExtensionPlan, WheelSource
from trainworks.extend.requirements import ExtendedBase
from trainworks.extend.toolkit import BARE, Workbench
from trainworks.facts.rows import SourceFile
from trainworks.render.dockerfile import MACROS, Rendering, blaming, new_environment

TEMPLATE = "extend.j2"
INSTALL_PACKAGES = "files/system/install-packages"
INSTALLER = "trainworks_launcher/programs/install.py"

RECIPES = (TEMPLATE, MACROS, INSTALL_PACKAGES)
"""Files below ``templates`` that an extension is rendered from."""

BYTECODE_EPOCH = 1_577_836_800
"""Any fixed moment: it is only looked at whether there is one. A wheel is a ZIP, which knows no time before 1980."""


@dataclass(frozen=True, kw_only=True)
class Installer:
    """What installs in a build stage.

    Attributes:
        program: The text of the launcher's ``install.py``.
        stage: The text of ``inside.py``.
        manifest: What it reads of an image: what is kept, and what goes with that.
        uv: The builder's own uv, for a base that has none; ``b""`` for one that has.
        bench: What wheels are built with.
    """

    program: bytes = field(repr=False)
    stage: bytes = field(repr=False)
    manifest: Mapping[str, object]
    uv: bytes = field(default=b"", repr=False)
    bench: Workbench = BARE

    def files(self, wanted: Iterable[SourceFile]) -> list[SourceFile]:
        """Return the files of a context that every stage mounts, with those that requirements name."""
        manifest = json.dumps(self.manifest, indent=1).encode()
        found = [
            SourceFile(path="installer/install.py", content=self.program),
            SourceFile(path="installer/inside.py", content=self.stage),
            SourceFile(path="installer/manifest.json", content=manifest),
            # Folders must exist to be mounted; this machine's own files are put there before a build.
            SourceFile(path="inputs/.keep", content=b""),
            SourceFile(path="wheels/.keep", content=b""),
            *(replace(file, path=f"inputs/{file.path}") for file in wanted),
        ]
        if self.uv:
            found.append(SourceFile(path="installer/uv", content=self.uv, mode=0o755))
        if self.bench.requirements:
            found.append(SourceFile(path="compiler.txt", content=self.bench.requirements.encode()))
        return found


def render_resolution(
    base: ExtendedBase,
    installer: Installer,
    recipes: Mapping[str, str],
    *,
    apt: Sequence[str],
    sources: Sequence[WheelSource],
    wanted: Iterable[SourceFile],
    moment: str,
    **values: object,
) -> Rendering:
    """Return the context of a build whose image has nothing but ``/out``: what was installed, or why it was not.

    Args:
        base: The image that is extended.
        installer: What installs.
        recipes: The texts of ``RECIPES``.
        apt: Debian packages of the extension.
        sources: What wheels are built from.
        wanted: Files of requirements, and what they name.
        moment: Another one for each build: what an index has is asked anew.
        values: For the template: ``words`` of the installation; ``separate``: wheels of sources are installed by
            themselves, because the requirements have hashes; ``strict``: other builds of the framework are refused.
    """
    files = [*installer.files(wanted), SourceFile(path="inputs/moment", content=moment.encode())]
    return _rendering(base, apt, files, recipes, installer, sources, name="requirements", plan=None, **values)


def render_extension(plan: ExtensionPlan, recipes: Mapping[str, str], installer: Installer) -> Rendering:
    """Return the build context of an extension: same plan and recipes, same bytes. Raises ``RecipeError``."""
    files = [SourceFile(path=f"code/{file.path}", content=file.content, mode=file.mode) for file in plan.files]
    if plan.installed:
        files.append(SourceFile(path=f"code/{INSTALLED_FILE}", content=_marker(plan)))
    lines = installer.bench.lines
    installer = replace(installer, bench=installer.bench if plan.sources or plan.lock.built else BARE)
    if plan.lock.locked:
        pins = SourceFile(path="requirements.txt", content=plan.lock.pins.encode())
        files += installer.files([*plan.inputs, *([pins] if plan.lock.pins else [])])
    values = {"name": plan.tag, "plan": plan, "lines": lines}
    return _rendering(plan.base, plan.apt, files, recipes, installer, plan.sources, **values)


def _marker(plan: ExtensionPlan) -> bytes:
    """Return what tells the launcher that these files were installed, as long as the code is as it is now."""
    files = {file.path: hashlib.sha256(file.content).hexdigest() for file in plan.files}
    return json.dumps({"installed": list(plan.installed), "files": files}, indent=1).encode()


def _rendering(
    base: ExtendedBase,
    apt: Sequence[str],
    files: Iterable[SourceFile],
    recipes: Mapping[str, str],
    installer: Installer,
    sources: Sequence[WheelSource],
    **values: Any,
) -> Rendering:
    bench = installer.bench
    # A wheel that was compiled beside one torch is not another's: each base and compiler has a cache of its own.
    lines = values.pop("lines", bench.lines)
    mark = hashlib.sha256("\n".join((base.identifier, *lines)).encode()).hexdigest()[:12]
    with blaming(TEMPLATE):
        dockerfile = (
            new_environment(recipes.items())
            .get_template(TEMPLATE)
            .render(
                base=base,
                packages=apt,
                code_folder=CODE_FOLDER,
                epoch=BYTECODE_EPOCH,
                bench=bench,
                sources=sources,
                cache=f"trainworks-extend-{mark}",
                **values,
            )
        )
    files = [*files, *(SourceFile(path=f"sources/{each.file}", content=each.archive) for each in sources)]
    if apt:
        files.append(SourceFile(path=INSTALL_PACKAGES, content=recipes[INSTALL_PACKAGES].encode()))
    return Rendering(
        dockerfile=dockerfile,
        files=tuple(sorted({file.path: file for file in files}.values(), key=lambda file: file.path)),
        stage_components=dict.fromkeys(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE), COMPONENT),
    )
