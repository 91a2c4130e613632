"""The image's own plan as the launcher reads it: ``/opt/trainworks/image.json``."""

from __future__ import annotations

import json
from dataclasses import asdict

from trainworks.plan.model import ImagePlan

SCHEMA = 1
"""Number of the manifest's shape; the launcher refuses one that it does not know."""

HOSTNAME_SHIM = "hostname-shim"


CONSTRAINTS = "constraints.txt"
"""Beside the manifest: what pip and uv keep in an image that is built on ours."""


UV_SETTINGS = "uv-settings.toml"
"""The same for uv, whose option ``-c`` takes the place of the variable that
names the constraints.
"""


def render_constraints(plan: ImagePlan) -> str:
    """Return what the image is built around, as constraints: what it keeps in
    jobs, and in images built on it.
    """
    head = (
        f"# {plan.target.name} is built around these:"
        " PIP_CONSTRAINT and UV_CONSTRAINT name this file.\n"
        "# To install others all the same:"
        " RUN PIP_CONSTRAINT= UV_CONSTRAINT= UV_NO_CONFIG=1 pip install ...\n"
    )
    return head + "".join(
        f"{name}=={version}\n" for name, version in sorted(plan.protected.items())
    )


def render_uv_settings(plan: ImagePlan) -> str:
    """Return the same constraints as settings of uv for a system, which each
    call of ``uv pip`` reads.
    """
    lines = [f'    "{name}=={version}",\n' for name, version in sorted(plan.protected.items())]
    return "".join(
        [
            (
                "# The constraints of /opt/trainworks/constraints.txt, for calls with constraints"
                " of their own (-c).\n"
            ),
            "constraint-dependencies = [\n",
            *lines,
            "]\n",
        ]
    )


def render_manifest(plan: ImagePlan) -> str:
    """Return the manifest's JSON text: target, versions, programs, what is
    missing, what jobs keep, instance types.
    """
    programs = {name: path for name, path in plan.programs.items() if name != HOSTNAME_SHIM}
    content = {
        "schema": SCHEMA,
        "name": plan.target.name,
        "target": asdict(plan.target),
        "components": {
            step.component: {"version": step.version}
            for step in plan.steps
            if step.version and step.in_image
        },
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
        # The others' name stands in the base image's own label, and their
        # content is this project's.
        **(
            {"base_images": list(dict.fromkeys(filter(None, (plan.image, plan.builder_image))))}
            if "@" in f"{plan.image}{plan.builder_image}"
            else {}
        ),
        **({"compiled_by": dict(plan.compiled_by)} if plan.compiled_by else {}),
        **({"needs": dict(plan.needs)} if plan.needs else {}),
        **({"built_whole": plan.built_whole} if plan.built_whole else {}),
        **({"first_use": plan.first_use} if plan.first_use else {}),
    }
    return json.dumps(content, indent=2) + "\n"
