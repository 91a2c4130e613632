"""From the plan of an extension to its build context: a Dockerfile, the locked requirements, the code. Pure."""

from __future__ import annotations

from jinja2 import Environment, StrictUndefined, TemplateError

from trainworks.errors import RecipeError
from trainworks.facts.rows import SourceFile
from trainworks.plan.extend import CODE_FOLDER, COMPONENT, ExtensionPlan
from trainworks.render.dockerfile import Rendering, quoted

TEMPLATE = "extend.j2"

BYTECODE_EPOCH = 1_577_836_800
"""Any fixed moment: it is only looked at whether there is one."""


def render_extension(plan: ExtensionPlan, template: str) -> Rendering:
    """Return the build context of an extension: same plan and template, same bytes.

    Args:
        plan: What to render.
        template: The text of ``templates/extend.j2``.

    Raises:
        RecipeError: The template is malformed.
    """
    environment = Environment(
        undefined=StrictUndefined, autoescape=False, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quoted"] = quoted
    try:
        dockerfile = environment.from_string(template).render(plan=plan, code_folder=CODE_FOLDER, epoch=BYTECODE_EPOCH)
    except (TemplateError, LookupError, TypeError, ValueError) as error:
        raise RecipeError(f"templates/{TEMPLATE}: {error}") from error
    files = [SourceFile(path=f"code/{file.path}", content=file.content, mode=file.mode) for file in plan.files]
    if plan.requirements:
        files.append(SourceFile(path="requirements.txt", content=plan.requirements.encode()))
        # The folder must exist to be mounted; this machine's own copies of locked files are put there before a build.
        files.append(SourceFile(path="wheels/.keep", content=b""))
    return Rendering(
        dockerfile=dockerfile,
        files=tuple(sorted(files, key=lambda file: file.path)),
        stage_components={"image": COMPONENT},
    )
