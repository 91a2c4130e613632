"""The inputs that decide the bytes of each part of an image, by name; provenance lists them. Pure.

A part's *inputs* are its text in the Dockerfile, its files, its packages, its artifacts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Set

from trainworks.plan.model import ImagePlan, Step
from trainworks.render.dockerfile import Rendering

WORD = re.compile(r"[\w./-]+")


def inputs_of(plan: ImagePlan, rendering: Rendering) -> dict[str, dict[str, str]]:
    """Return the inputs of every part of an image: name of the input to what it
    is, short enough to be shown.
    """
    return {step.component: _inputs(step, plan, rendering) for step in plan.steps}


def _inputs(step: Step, plan: ImagePlan, rendering: Rendering) -> dict[str, str]:
    text = rendering.texts[step.component]
    words = set(WORD.findall(text))
    found = {"recipe": _digest(text.encode())}
    if step.version:
        found["version"] = step.version
    if step.component == "system":
        found["base image"] = plan.image
        found |= {
            f"archive {each.suite}": f"{each.date} ({each.contents[:12]})" for each in plan.archives
        }
    for package in (*step.debian, *step.build_packages):
        if step.component in {"system", "builder"}:
            found[f"package {package}"] = "from the distribution"
    for python in step.python:
        found[f"{python.name}"] = f"{python.version} ({python.sha256[:12]})"
    for artifact in step.artifacts:
        pin = artifact.commit or artifact.sha256
        found[f"artifact {artifact.name}"] = f"{artifact.version} ({pin[:12] or 'unlocked'})"
    for file in rendering.files:
        if not file.path.startswith(("requirements/", "artifacts/", "wheels/")) and _copies(
            words, file.path
        ):
            found[f"file {file.path}"] = _digest(file.content + f"{file.mode:o}".encode())
    return found


def _copies(words: Set[str], path: str) -> bool:
    """Return whether a part copies a file of the context: by its own path, or
    by one of the folders above it.
    """
    folders = path.split("/")
    # No recipe copies a whole topmost folder (`files`, `launcher`), but texts contain these words.
    return any(
        "/".join(folders[:depth]) in words
        for depth in range(min(2, len(folders)), len(folders) + 1)
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
