"""The matrix as a file for `docker buildx bake`: any BuildKit builder builds
it: local, remote or in Kubernetes.

One target for each image, on the context that `render` makes; groups by framework, CUDA and base.
What belongs to a registry is a variable; what belongs to the machine that builds is a secret, by
its id and its file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from trainworks.plan.model import IMAGE_TIME, ImagePlan
from trainworks.render.dockerfile import INPUTS_LABEL, Rendering

SECRET = re.compile(r"--mount=type=secret,id=(?P<id>[^,\s]+)")

REPOSITORY = "REPOSITORY"
"""Variable: what stands before the framework's name in every tag, such as a
registry's host and a folder.
"""

CACHE = "CACHE"
"""Variable: the repository of the layers' cache.

Without it the cache is in the images themselves.
"""


def bake(targets: Sequence[tuple[ImagePlan, Rendering]]) -> str:
    """Return the text of `docker-bake.json`.

    Args:
        targets: What to build. The context of each is expected in ``contexts/NAME`` beside the
            file, its secrets in ``secrets/NAME``.
    """
    groups: dict[str, list[str]] = {"default": []}
    variables: dict[str, dict[str, str]] = {
        REPOSITORY: {"default": "trainworks"},
        CACHE: {"default": ""},
    }
    described: dict[str, Mapping[str, object]] = {}
    for plan, rendering in targets:
        name = bake_name(plan.target.name)
        for group in (
            "default",
            plan.target.framework,
            plan.target.cuda,
            bake_name(plan.target.base),
        ):
            groups.setdefault(group, []).append(name)
        described[name] = _target(plan, rendering)
        if stands_on_local_base(plan):
            variables[base_variable(plan)] = {
                "default": "@".join(filter(None, (plan.base.image, plan.base.digest)))
            }
    content = {
        "variable": variables,
        "group": {name: {"targets": members} for name, members in groups.items()},
        "target": described,
    }
    return json.dumps(content, indent=2) + "\n"


def bake_name(name: str) -> str:
    """Return a name as bake allows it: letters, digits, ``_`` and ``-``."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def stands_on_local_base(plan: ImagePlan) -> bool:
    """Return whether the Dockerfile names its base as this machine's engine
    does, which no registry knows.
    """
    return bool(plan.origin)


def base_variable(plan: ImagePlan) -> str:
    """Return the name of the variable that says what a base is pulled from."""
    return f"BASE_{re.sub(r'[^A-Z0-9]', '_', plan.base.name.upper())}"


def _target(plan: ImagePlan, rendering: Rendering) -> dict[str, object]:
    name = plan.target.name
    prefix, _, rest = plan.tags[0].partition("/")
    cached = f'"type=registry,ref=${{{CACHE}}}:{name}"'
    content: dict[str, object] = {
        "context": f"contexts/{name}",
        "dockerfile": "Dockerfile",
        "tags": [tag.replace(f"{prefix}/", f"${{{REPOSITORY}}}/", 1) for tag in plan.tags],
        # What stands on a tag that moves is not what was rendered.
        "labels": {INPUTS_LABEL: rendering.digest} if plan.origin != "bootstrapped" else {},
        "platforms": [f"linux/{plan.target.architecture}"],
        # BuildKit 0.13 and newer set every time to this one. `--push` and
        # `--load` of bake change the output's kind.
        "args": {"SOURCE_DATE_EPOCH": str(IMAGE_TIME)},
        "output": ["type=image,rewrite-timestamp=true"],
        "secret": [
            f"id={identifier},src=secrets/{name}/{identifier}"
            for identifier in dict.fromkeys(SECRET.findall(rendering.dockerfile))
        ],
        "cache-from": [
            f'${{{CACHE} == "" ? "type=registry,ref=${{{REPOSITORY}}}/{rest}" : {cached}}}'
        ],
        "cache-to": [f'${{{CACHE} == "" ? "type=inline" : {cached[:-1]},mode=max"}}'],
    }
    if stands_on_local_base(plan):
        content["contexts"] = {plan.image: f"docker-image://${{{base_variable(plan)}}}"}
    return content
