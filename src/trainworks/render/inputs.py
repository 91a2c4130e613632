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
    """Return the inputs of every part of an image: name of the input to a short value."""
    return {step.component: _inputs(step, plan, rendering) for step in plan.steps}


def _inputs(step: Step, plan: ImagePlan, rendering: Rendering) -> dict[str, str]:
    text = rendering.texts[step.component]
    words = set(WORD.findall(text))
    inputs = {"recipe": _digest(text.encode())}
    if step.version:
        inputs["version"] = step.version
    if step.component == "system":
        inputs["base image"] = plan.image
        for state in plan.archives:
            inputs[f"archive {state.suite}"] = f"{state.date} ({state.contents[:12]})"
    if step.component in {"system", "builder"}:
        for package in (*step.debian, *step.build_packages):
            inputs[f"package {package}"] = "from the distribution"
    for wheel in step.python:
        inputs[f"{wheel.name}"] = f"{wheel.version} ({wheel.sha256[:12]})"
    for artifact in step.artifacts:
        pin = artifact.commit or artifact.sha256
        inputs[f"artifact {artifact.name}"] = f"{artifact.version} ({pin[:12] or 'unlocked'})"
    for file in rendering.files:
        if file.path.startswith(("requirements/", "artifacts/", "wheels/")):
            continue
        if _copies(words, file.path):
            inputs[f"file {file.path}"] = _digest(file.content + f"{file.mode:o}".encode())
    return inputs


def _copies(words: Set[str], path: str) -> bool:
    """Whether a part copies a file of the context: by its own path, or with a folder above it."""
    folders = path.split("/")
    # No recipe copies a whole topmost folder (`files`, `launcher`), but texts contain these words.
    depths = range(min(2, len(folders)), len(folders) + 1)
    return any("/".join(folders[:depth]) in words for depth in depths)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
