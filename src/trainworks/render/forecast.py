"""What a build would do: which parts are built again and why, and how much is downloaded.

A part's *inputs* are everything that decides its bytes, by name: its text in the Dockerfile, its files, its packages,
its artifacts. A part is built again when one of them differs from the last build, or when a stage that it stands on or
copies from is built again. Pure: the inputs of the last build are given.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass

from trainworks.facts.rows import Facts
from trainworks.plan.model import ImagePlan, Step
from trainworks.render.dockerfile import Rendering

Inputs = Mapping[str, Mapping[str, str]]
"""Component to the inputs of its part: name of the input to what it is, short enough to be shown."""

STAGE = re.compile(r"^FROM (?P<stand>\S+) AS (?P<name>\S+)$", re.MULTILINE)
WORD = re.compile(r"[\w./-]+")
COPIED = re.compile(r"from=(?P<name>[\w.-]+)")


@dataclass(frozen=True, kw_only=True)
class Rebuild:
    """A part that is built again, and why: what changed of its own, then what it stands on."""

    component: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a build of a plan would do.

    Attributes:
        since: When the last build of this image was, as it was recorded; ``""``: none is known on this machine.
        rebuilds: What is built again, in the order of the layers.
        layers_from: The first part whose layers of the image are written again; those of all later parts are too.
        kept: What the engine takes from its cache, if it still has it.
        download_bytes: Files of known size that the parts which are built again take from indexes and vendors. What
            lies in a cache of this machine is not downloaded again.
        unknown_sizes: How many more files there are, whose sizes are not recorded.
        recorded_megabytes: Size of the image when a build of the target was last recorded (1 MB = 1,000,000
            bytes); 0: none is recorded.
    """

    since: str
    rebuilds: tuple[Rebuild, ...]
    layers_from: str
    kept: tuple[str, ...]
    download_bytes: int
    unknown_sizes: int
    recorded_megabytes: int

    def as_values(self) -> dict[str, object]:
        """Return it as values for JSON."""
        return asdict(self)


def inputs_of(plan: ImagePlan, rendering: Rendering) -> dict[str, dict[str, str]]:
    """Return the inputs of every part of an image."""
    return {step.component: _inputs(step, plan, rendering) for step in plan.steps}


def _inputs(step: Step, plan: ImagePlan, rendering: Rendering) -> dict[str, str]:
    text = rendering.texts[step.component]
    words = set(WORD.findall(text))
    found = {"recipe": _digest(text.encode())}
    if step.version:
        found["version"] = step.version
    if step.component == "system":
        found["base image"] = plan.image
    for package in (*step.debian, *step.build_packages):
        if step.component in {"system", "builder"}:
            found[f"package {package}"] = "from the distribution"
    for python in step.python:
        found[f"{python.name}"] = f"{python.version} ({python.sha256[:12]})"
    for artifact in step.artifacts:
        pin = artifact.commit or artifact.sha256
        found[f"artifact {artifact.name}"] = f"{artifact.version} ({pin[:12] or 'unlocked'})"
    for file in rendering.files:
        if not file.path.startswith(("requirements/", "artifacts/", "wheels/")) and _copies(words, file.path):
            found[f"file {file.path}"] = _digest(file.content + f"{file.mode:o}".encode())
    return found


def _copies(words: Set[str], path: str) -> bool:
    """Return whether a part copies a file of the context: by its own path, or by one of the folders above it."""
    folders = path.split("/")
    # The topmost folder alone (`files`, `launcher`) is copied by no step, and is a word that texts have anyway.
    return any("/".join(folders[:depth]) in words for depth in range(min(2, len(folders)), len(folders) + 1))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _stands_on(component: str, rendering: Rendering) -> tuple[str, ...]:
    """Return the stages that a part's stage stands on or copies from, as its text says."""
    text = rendering.texts[component]
    names = [match["stand"] for match in STAGE.finditer(text)] + [match["name"] for match in COPIED.finditer(text)]
    return tuple(name for name in dict.fromkeys(names) if name in rendering.texts and name != component)


def forecast(plan: ImagePlan, rendering: Rendering, facts: Facts, last: Inputs | None, since: str = "") -> Forecast:
    """Return what a build would do.

    Args:
        plan: What is to be built.
        rendering: Its build context.
        facts: The recorded builds.
        last: The inputs of the last build of this image, ``None`` where none is known.
        since: When that was.
    """
    why = _rebuilds(plan, rendering, last)
    downloads = [
        size
        for step in plan.steps
        if step.component in why
        for size in (*(file.size for file in step.python), *(file.size for file in step.artifacts))
    ]
    recorded = facts.built_by_target.get(plan.target.name)
    return Forecast(
        since=since,
        rebuilds=tuple(Rebuild(component=name, reasons=reasons) for name, reasons in why.items()),
        layers_from=next((step.component for step in plan.steps if step.in_image and step.component in why), ""),
        kept=tuple(step.component for step in plan.steps if step.component not in why),
        download_bytes=sum(downloads),
        unknown_sizes=sum(not size for size in downloads),
        recorded_megabytes=recorded.megabytes if recorded is not None else 0,
    )


def _rebuilds(plan: ImagePlan, rendering: Rendering, last: Inputs | None) -> dict[str, tuple[str, ...]]:
    """Return the parts that are built again, and why."""
    now = inputs_of(plan, rendering)
    why: dict[str, tuple[str, ...]] = {}
    for step in plan.steps:
        name = step.component
        reasons = _differences(last.get(name), now[name]) if last is not None else ("never built on this machine",)
        below = [f"{other} is built again" for other in _stands_on(name, rendering) if other in why]
        if reasons or below:
            why[name] = (*reasons, *below)
    return why


def _differences(last: Mapping[str, str] | None, now: Mapping[str, str]) -> tuple[str, ...]:
    if last is None:
        return ("new in this image",)
    found = []
    for name in (*now, *(name for name in last if name not in now)):
        before, after = last.get(name), now.get(name)
        if before == after:
            continue
        if before is None:
            found.append(f"{name} is new")
        elif after is None:
            found.append(f"{name} is gone")
        elif name == "recipe" or name.startswith("file "):
            found.append(f"{name} changed")
        else:
            found.append(f"{name}: {before} -> {after}")
    return tuple(found)
