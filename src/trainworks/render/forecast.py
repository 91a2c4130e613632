"""What a build would do: which parts are built again and why, how much is downloaded, how big the image gets.

A part's *inputs* are everything that decides its bytes, by name: its text in the Dockerfile, its files, its packages,
its artifacts. A part is built again when one of them is another than the last time, or when a stage is that it stands
on or copies from. Pure: what the last build's inputs were is given.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from statistics import linear_regression

from trainworks.facts.rows import Facts
from trainworks.plan.model import ImagePlan, Step
from trainworks.plan.resolve import plan_row
from trainworks.render.builds import current_builds
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
        unknown_sizes: How many files more there are, of sizes that nobody has recorded.
        image_megabytes: Estimated size of the image, uncompressed (1 MB = 1,000,000 bytes); 0 where nothing is known.
        basis: What the estimate rests on.
    """

    since: str
    rebuilds: tuple[Rebuild, ...]
    layers_from: str
    kept: tuple[str, ...]
    download_bytes: int
    unknown_sizes: int
    image_megabytes: int
    basis: str

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
    # The topmost folder alone (`files`, `launcher`) is copied by nobody, and is a word that texts have anyway.
    return any("/".join(folders[:depth]) in words for depth in range(min(2, len(folders)), len(folders) + 1))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _stands_on(component: str, rendering: Rendering) -> tuple[str, ...]:
    """Return the stages that a part's stage stands on or copies from, as its text says."""
    text = rendering.texts[component]
    names = [match["stand"] for match in STAGE.finditer(text)] + [match["name"] for match in COPIED.finditer(text)]
    return tuple(name for name in dict.fromkeys(names) if name in rendering.texts and name != component)


def stage_keys(plan: ImagePlan, rendering: Rendering) -> tuple[str, ...]:
    """Return a key for each stage that an image is built from, in order: two targets with the same key share the stage.

    A key says everything that decides the stage: its own inputs, and the keys of the stages that it stands on.
    """
    inputs = inputs_of(plan, rendering)
    keys: dict[str, str] = {}
    for step in plan.steps:
        if STAGE.search(rendering.texts[step.component]):
            below = [keys.get(name, name) for name in _stands_on(step.component, rendering)]
            keys[step.component] = _digest(repr((sorted(inputs[step.component].items()), below)).encode())
    return tuple(keys.values())


def forecast(plan: ImagePlan, rendering: Rendering, facts: Facts, last: Inputs | None, since: str = "") -> Forecast:
    """Return what a build would do.

    Args:
        plan: What is to be built.
        rendering: Its build context.
        facts: For the estimate of the image's size: what was really built.
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
    megabytes, basis = _estimate(plan, facts)
    return Forecast(
        since=since,
        rebuilds=tuple(Rebuild(component=name, reasons=reasons) for name, reasons in why.items()),
        layers_from=next((step.component for step in plan.steps if step.in_image and step.component in why), ""),
        kept=tuple(step.component for step in plan.steps if step.component not in why),
        download_bytes=sum(downloads),
        unknown_sizes=sum(not size for size in downloads),
        image_megabytes=megabytes,
        basis=basis,
    )


def kept_components(plan: ImagePlan, rendering: Rendering, last: Inputs) -> tuple[str, ...]:
    """Return the components whose stages an engine takes from its cache, if it still has them."""
    rebuilt = _rebuilds(plan, rendering, last)
    return tuple(step.component for step in plan.steps if step.component not in rebuilt)


def _rebuilds(plan: ImagePlan, rendering: Rendering, last: Inputs | None) -> dict[str, tuple[str, ...]]:
    """Return what is built again, and why."""
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


def _estimate(plan: ImagePlan, facts: Facts) -> tuple[int, str]:
    """Return the size that an image of so many downloaded bytes has: a line through what was really built.

    Builds of today's recipes are taken where there are enough of them, else those of older ones, and the basis says so.
    Over the targets that were built the line is right within 6 % (tests/render/test_forecast.py).
    """
    framework, sources = plan.target.framework, plan.target.sources
    alike = [row for row in facts.targets if row.framework == framework and facts.sources_of(row) == sources]
    for built, whence in ((current_builds(facts, alike), "today's"), (facts.built_by_target, "older")):
        points = [
            (_installed_bytes(plan_row(row, facts).steps), record.megabytes)
            for row in alike
            if (record := built.get(facts.name_of(row)))
        ]
        if len({size for size, _ in points}) >= MINIMUM_POINTS:
            slope, intercept = linear_regression([size for size, _ in points], [megabytes for _, megabytes in points])
            megabytes = round(intercept + slope * _installed_bytes(plan.steps))
            return megabytes, f"{len(points)} targets that were built from {whence} recipes"
    return 0, f"fewer than two {framework} targets with {sources} sources were ever built"


MINIMUM_POINTS = 2
"""A line needs two points."""


def _installed_bytes(steps: Sequence[Step]) -> int:
    return sum(file.size for step in steps if step.in_image for file in step.python)
