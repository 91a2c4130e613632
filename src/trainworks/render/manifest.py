"""The image's own plan as the launcher reads it: ``/opt/trainworks/image.json``."""

from __future__ import annotations

import json
from dataclasses import asdict

from trainworks.plan.model import ImagePlan

SCHEMA = 1
"""Number of the manifest's shape; the launcher refuses one that it does not know."""

HOSTNAME_SHIM = "hostname-shim"
"""The program that the manifest has under a key of its own, not among ``programs``."""

CONSTRAINTS = "constraints.txt"
"""File beside the manifest: the versions that pip and uv must not change."""

UV_SETTINGS = "uv-settings.toml"
"""The same constraints for uv: its option ``-c`` overrides the variable that names the file."""


def list_constraints(plan: ImagePlan) -> list[str]:
    """Return a constraint for each protected distribution, such as ``torch===VERSION``.

    ``==VERSION`` also allows ``VERSION+cpu`` (PyPA's version specifiers, "Version matching"): the
    same release of PyTorch for another CUDA. ``===`` compares the texts of versions.
    """
    return [f"{name}==={version}" for name, version in sorted(plan.protected.items())]


def render_constraints(plan: ImagePlan) -> str:
    """Return the protected distributions as constraints, for jobs and for images built on this."""
    head = (
        f"# {plan.target.name} is built around these:"
        " PIP_CONSTRAINT and UV_CONSTRAINT name this file.\n"
        "# To install others all the same:"
        " RUN PIP_CONSTRAINT= UV_CONSTRAINT= UV_NO_CONFIG=1 pip install ...\n"
    )
    lines = [f"{constraint}\n" for constraint in list_constraints(plan)]
    return head + "".join(lines)


def render_uv_settings(plan: ImagePlan) -> str:
    """Return the same constraints as settings of uv for a system.

    Each call of ``uv pip`` reads these settings.
    """
    head = (
        "# The constraints of /opt/trainworks/constraints.txt, for calls with constraints"
        " of their own (-c).\n"
    )
    lines = [f'    "{constraint}",\n' for constraint in list_constraints(plan)]
    return f"{head}constraint-dependencies = [\n{''.join(lines)}]\n"


def render_manifest(plan: ImagePlan) -> str:
    """Return the manifest's JSON text.

    It has the target, versions, programs, missing components, protected distributions and
    instance types.
    """
    programs = {name: path for name, path in plan.programs.items() if name != HOSTNAME_SHIM}
    components = {}
    # Components without a version, and those that only build, mean nothing to the launcher.
    for step in plan.steps:
        if step.version and step.in_image:
            components[step.component] = {"version": step.version}
    content = {
        "schema": SCHEMA,
        "name": plan.target.name,
        "target": asdict(plan.target),
        "components": components,
        "missing": [asdict(missing) for missing in plan.missing],
        "programs": programs,
        "hostname_shim": plan.programs.get(HOSTNAME_SHIM, ""),
        "fabric": [asdict(variable) for variable in plan.fabric],
        "protected": dict(plan.protected),
        "companions": dict(plan.companions),
        "libraries": plan.libraries,
        "minimum_driver": plan.minimum_driver,
        "wheel_index": plan.wheel_index,
        "instances": {name: vars(shape) for name, shape in plan.instances.items()},
        "families": plan.families,
    }
    # A base image that this project made has no digest in its name. Its name stands in its own
    # label, and its content is this project's.
    if "@" in f"{plan.image}{plan.builder_image}":
        names = [name for name in (plan.image, plan.builder_image) if name]
        content["base_images"] = list(dict.fromkeys(names))
    # The launcher reads a missing key as an empty value.
    if plan.compiled_by:
        content["compiled_by"] = dict(plan.compiled_by)
    if plan.needs:
        content["needs"] = dict(plan.needs)
    if plan.built_whole:
        content["built_whole"] = plan.built_whole
    if plan.first_use:
        content["first_use"] = plan.first_use
    return json.dumps(content, indent=2) + "\n"
