"""Lists the inputs that decide the bytes of each part of an image, by name, for provenance. Pure.

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
    """Return the inputs of every part of an image, by the component's name.

    For example ``{"torch": {"recipe": "0123456789ab", "torch": "2.6 (0123456789ab)"}}``.
    """
    return {step.component: _collect_inputs(step, plan, rendering) for step in plan.steps}


def _collect_inputs(step: Step, plan: ImagePlan, rendering: Rendering) -> dict[str, str]:
    """Return the inputs of one component, name to a short value."""
    text = rendering.texts[step.component]
    words = set(WORD.findall(text))
    inputs = {"recipe": _shorten_digest(text.encode())}
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
        # These lists are in the context for packages and artifacts, which are inputs already.
        if file.path.startswith(("requirements/", "artifacts/", "wheels/")):
            continue
        if _copies_file(words, file.path):
            inputs[f"file {file.path}"] = _shorten_digest(file.content + f"{file.mode:o}".encode())
    return inputs


def _copies_file(words: Set[str], path: str) -> bool:
    """Return whether a part copies a file of the context, by its own path or with a folder above.

    Args:
        words: The words of the part's text.
        path: The file's path: ``files/nccl/nccl.conf``.
    """
    folders = path.split("/")
    # No recipe copies a whole topmost folder (`files`, `launcher`), but texts contain these words.
    depths = range(min(2, len(folders)), len(folders) + 1)
    return any("/".join(folders[:depth]) in words for depth in depths)


def _shorten_digest(content: bytes) -> str:
    """Return the first 12 digits of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:12]
