"""From an extension to its build context. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from trainworks.extend.plan import CODE_FOLDER, COMPONENT, INSTALLED_FILE, PROJECT_SOURCE, ExtensionPlan, WheelSource
from trainworks.extend.toolkit import BARE, Workbench
from trainworks.facts.rows import SourceFile
from trainworks.plan.model import IMAGE_TIME
from trainworks.render.dockerfile import MACROS, Rendering, blaming, new_environment

TEMPLATE = "extend.j2"
INSTALL_FETCHED = "files/system/install-fetched"
INSTALLER = "trainworks_launcher/programs/install.py"

RECIPES = (TEMPLATE, MACROS, INSTALL_FETCHED)
"""Files below ``templates`` that an extension is rendered from."""

LOCK = "extension.lock"
"""Its name among the inputs, and in the image, below ``/opt/trainworks``."""


@dataclass(frozen=True, kw_only=True)
class Installer:
    """What installs in a build stage.

    Attributes:
        programs: Name to text: ``install.py`` of the launcher, ``inside.py``, ``imports.py`` of the image tests.
        manifest: What they read of an image: what is kept, and what goes with that.
        order: What is asked for beside the files of requirements: ``words`` of the installation, ``options`` of the
            lock; whether lines have hashes, and whether other builds of the framework are refused.
        uv: The builder's own uv, for a base that has none; ``b""`` for one that has.
        bench: What wheels are built with.
    """

    programs: Mapping[str, bytes] = field(repr=False)
    manifest: Mapping[str, object]
    order: Mapping[str, object]
    uv: bytes = field(default=b"", repr=False)
    bench: Workbench = BARE

    def files(self, wanted: Iterable[SourceFile], sources: Iterable[WheelSource]) -> list[SourceFile]:
        """Return the files of a context that every stage mounts, with those that requirements name."""
        rows = [
            {"folder": each.folder.rpartition("/")[2], "extras": each.extras, "project": each.origin == PROJECT_SOURCE}
            for each in sources
        ]
        found = [
            *(SourceFile(path=f"installer/{name}", content=text) for name, text in self.programs.items()),
            SourceFile(
                path="installer/manifest.json",
                content=_json({**self.manifest, "build_environment": dict(self.bench.variables)}),
            ),
            SourceFile(path="inputs/order.json", content=_json({**self.order, "sources": rows})),
            # Folders must exist to be mounted; this machine's own files are put there before a build.
            SourceFile(path="wheels/.keep", content=b""),
            *(replace(file, path=f"inputs/{file.path}") for file in wanted),
        ]
        if self.uv:
            found.append(SourceFile(path="installer/uv", content=self.uv, mode=0o755))
        if self.bench.requirements:
            found.append(SourceFile(path="compiler.txt", content=self.bench.requirements.encode()))
        return found


def render_extension(
    plan: ExtensionPlan, recipes: Mapping[str, str], installer: Installer, wanted: Iterable[SourceFile] = ()
) -> Rendering:
    """Return the build context of an extension: same plan and recipes, same bytes. Raises ``RecipeError``.

    Args:
        plan: The extension.
        recipes: The texts of ``RECIPES``.
        installer: What installs.
        wanted: Files of requirements that nothing has resolved yet: they are installed, and the image has their lock.
    """
    inputs = [SourceFile(path=LOCK, content=plan.lock.text.encode())] if plan.lock.locked else [*wanted]
    # A wheel that was compiled beside one torch is not another's: each base and compiler has a cache of its own.
    bench = installer.bench if inputs else BARE
    mark = hashlib.sha256("\n".join((plan.base.identifier, *bench.lines)).encode()).hexdigest()[:12]
    with blaming(TEMPLATE):
        dockerfile = (
            new_environment(recipes.items())
            .get_template(TEMPLATE)
            .render(
                plan=plan,
                base=plan.base,
                code_folder=CODE_FOLDER,
                epoch=IMAGE_TIME,
                bench=bench,
                sources=plan.sources if inputs else (),
                installs=bool(inputs),
                cache=f"trainworks-extend-{mark}",
            )
        )
    files = [SourceFile(path=f"code/{file.path}", content=file.content, mode=file.mode) for file in plan.files]
    if plan.installed:
        files.append(SourceFile(path=f"code/{INSTALLED_FILE}", content=_marker(plan)))
    if inputs:
        files += [SourceFile(path=f"sources/{each.file}", content=each.archive) for each in plan.sources]
        files += installer.files((*plan.inputs, *inputs), plan.sources)
    if plan.apt:
        files.append(SourceFile(path=INSTALL_FETCHED, content=recipes[INSTALL_FETCHED].encode()))
        # The packages are put there before a build.
        files.append(SourceFile(path="packages/.keep", content=b""))
    return Rendering(
        dockerfile=dockerfile,
        files=tuple(sorted({file.path: file for file in files}.values(), key=lambda file: file.path)),
        stage_components=dict.fromkeys(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE), COMPONENT),
    )


def _marker(plan: ExtensionPlan) -> bytes:
    """Return what tells the launcher that these files were installed, as long as the code is as it is now."""
    files = {file.path: hashlib.sha256(file.content).hexdigest() for file in plan.files}
    return _json({"installed": list(plan.installed), "files": files})


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()
