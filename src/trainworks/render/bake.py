"""The matrix as a file for `docker buildx bake`, for BuildKit builders on any machine.

One target for each image, on the context that `render` makes; groups by framework, CUDA and base.
Values of a registry are variables; settings of the machine that builds are secrets, by id and file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from trainworks.plan.model import IMAGE_TIME, ImagePlan
from trainworks.render.dockerfile import INPUTS_LABEL, Rendering

SECRET = re.compile(r"--mount=type=secret,id=(?P<id>[^,\s]+)")
"""Finds the identifiers of the secrets that a Dockerfile mounts."""

REPOSITORY = "REPOSITORY"
"""Variable: the text before the framework's name in every tag, such as ``HOST/FOLDER``."""

CACHE = "CACHE"
"""Variable: the repository of the layers' cache.

Without it the cache is in the images themselves.
"""


def render_bake_file(targets: Sequence[tuple[ImagePlan, Rendering]]) -> str:
    """Return the text of `docker-bake.json`.

    Args:
        targets: The plans and contexts. The context of each is expected in ``contexts/NAME``
            beside the file, its secrets in ``secrets/NAME``.
    """
    groups: dict[str, list[str]] = {"default": []}
    variables: dict[str, dict[str, str]] = {
        REPOSITORY: {"default": "trainworks"},
        CACHE: {"default": ""},
    }
    described: dict[str, Mapping[str, object]] = {}
    for plan, rendering in targets:
        name = bake_name(plan.target.name)
        target = plan.target
        for group in ("default", target.framework, target.cuda, bake_name(target.base)):
            groups.setdefault(group, []).append(name)
        described[name] = _describe_target(plan, rendering)
        if stands_on_local_base(plan):
            base = plan.base.image
            if plan.base.digest:
                base += f"@{plan.base.digest}"
            variables[base_variable(plan)] = {"default": base}
    group_rows = {name: {"targets": members} for name, members in groups.items()}
    content = {
        "variable": variables,
        "group": group_rows,
        "target": described,
    }
    return json.dumps(content, indent=2) + "\n"


def bake_name(name: str) -> str:
    """Return a name as bake allows it: letters, digits, ``_`` and ``-``."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def stands_on_local_base(plan: ImagePlan) -> bool:
    """Return whether the Dockerfile's base is an image that only this machine's engine has."""
    return bool(plan.origin)


def base_variable(plan: ImagePlan) -> str:
    """Return the name of the variable for the image of a base: ``BASE_DEBIAN12``."""
    return f"BASE_{re.sub(r'[^A-Z0-9]', '_', plan.base.name.upper())}"


def _describe_target(plan: ImagePlan, rendering: Rendering) -> dict[str, object]:
    """Return a target of the bake file as values for JSON.

    Conditions in the values are bake's own: ``${CACHE == "" ? "A" : "B"}``.
    """
    name = plan.target.name
    prefix, _, image_name = plan.tags[0].partition("/")
    cache = f'"type=registry,ref=${{{CACHE}}}:{name}"'
    # Without a repository for the cache, the image itself has the cache.
    own_cache = f'"type=registry,ref=${{{REPOSITORY}}}/{image_name}"'
    cache_from = f'${{{CACHE} == "" ? {own_cache} : {cache}}}'
    # The closing quote of the address comes after the mode.
    cache_to = f'${{{CACHE} == "" ? "type=inline" : {cache[:-1]},mode=max"}}'
    # The tags without the local prefix: `trainworks/` becomes `${REPOSITORY}/`.
    tags = [tag.replace(f"{prefix}/", f"${{{REPOSITORY}}}/", 1) for tag in plan.tags]
    # bake takes a tag in the place of a bootstrapped base. A tag moves, so such an image is
    # not the rendered one.
    labels: dict[str, str] = {}
    if plan.origin != "bootstrapped":
        labels[INPUTS_LABEL] = rendering.digest
    identifiers = dict.fromkeys(SECRET.findall(rendering.dockerfile))
    secrets = [f"id={identifier},src=secrets/{name}/{identifier}" for identifier in identifiers]
    content: dict[str, object] = {
        "context": f"contexts/{name}",
        "dockerfile": "Dockerfile",
        "tags": tags,
        "labels": labels,
        "platforms": [f"linux/{plan.target.architecture}"],
        # BuildKit 0.13 and newer set every time to this one. `--push` and
        # `--load` of bake change the output's kind.
        "args": {"SOURCE_DATE_EPOCH": str(IMAGE_TIME)},
        "output": ["type=image,rewrite-timestamp=true"],
        "secret": secrets,
        "cache-from": [cache_from],
        "cache-to": [cache_to],
    }
    if stands_on_local_base(plan):
        content["contexts"] = {plan.image: f"docker-image://${{{base_variable(plan)}}}"}
    return content
