"""Wheels of one build in the place of those of its row: ``--artifact smp=URL#sha256=...``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from trainworks.errors import UnknownNameError
from trainworks.facts.rows import Artifact, Facts, TargetRow
from trainworks.plan.target import TargetContext, artifact_rows, context_of

HOW = "write NAME=URL#sha256=HASH, where HASH is the wheel's, 64 hexadecimal digits"
WRITTEN = re.compile(r"(?P<name>[a-z0-9-]+)=(?P<url>[^#\s]+)#sha256=(?P<sha256>[0-9a-f]{64})")
WHEEL = re.compile(r"[^-]+-(?P<version>[^-]+)(?:-[^-]+)?-(?P<python>[^-]+)-[^-]+-[^-]+\.whl")
SOURCE = "--artifact of the build"


@dataclass(frozen=True)
class OwnArtifact:
    """A wheel that a user gives for one build.

    Attributes:
        name: The component that it is.
        url: Where it is.
        sha256: Its hash.
    """

    name: str
    url: str
    sha256: str

    @property
    def file(self) -> str:
        """The name of the wheel."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    def __str__(self) -> str:
        """Return it as the option has it."""
        return f"{self.name}={self.url}#sha256={self.sha256}"


def read_own_artifact(text: str) -> OwnArtifact:
    """Read what ``--artifact`` was given; raises ``ValueError`` for what is not one."""
    found = WRITTEN.fullmatch(text)
    if found is None or urlsplit(found["url"]).scheme != "https":
        raise ValueError(f"{text!r} is not a wheel with its hash: {HOW}")
    own = OwnArtifact(found["name"], found["url"], found["sha256"])
    if WHEEL.fullmatch(own.file) is None:
        raise ValueError(f"{own.file!r} is not the name of a wheel")
    return own


def with_own_artifacts(
    own: Iterable[OwnArtifact], row: TargetRow, facts: Facts
) -> tuple[TargetRow, Facts]:
    """Return a target's row, and facts, in which these wheels stand in the
    place of those of the row.

    Raises:
        UnknownNameError: The target downloads no such part by itself, or the
            wheel is for another Python.
    """
    for each in own:
        row, facts = _with_one(each, row, facts)
    return row, facts


def variant_of_artifacts(own: Iterable[OwnArtifact]) -> str:
    """Return what sets an image with these wheels apart from the target's usual
    one, for its tag.
    """
    return "".join(f"-{each.name}-{each.sha256[:8]}" for each in own)


def _with_one(own: OwnArtifact, row: TargetRow, facts: Facts) -> tuple[TargetRow, Facts]:
    target = context_of(row, facts)
    wheels = _wheels(target, facts)
    if own.name not in wheels:
        known = ", ".join(sorted(wheels)) or "none"
        raise UnknownNameError(
            f"--artifact {own.name}: {target.name} takes no wheel of that name from an address",
            hint=f"available: {known}",
        )
    parts = WHEEL.fullmatch(own.file)
    assert parts is not None, "read_own_artifact has looked"
    tag = f"cp{target.python.replace('.', '')}"
    if not {tag, "py3"} & set(parts["python"].split(".")):
        raise UnknownNameError(
            f"--artifact {own.name}: {own.file} is for {parts['python']}, and {target.name} has"
            f" Python {target.python}",
            hint=f"give a wheel for {tag}",
        )
    old = wheels[own.name]
    new = replace(
        old,
        version=parts["version"],
        url=own.url,
        sha256=own.sha256,
        size=0,
        source=SOURCE,
        provides={},
        together={},
    )
    changed = replace(row, versions={**row.versions, own.name: new.version})
    others = tuple(
        each for each in facts.artifacts if (each.name, each.version) != (new.name, new.version)
    )
    targets = tuple(changed if each == row else each for each in facts.targets)
    return changed, replace(facts, artifacts=(*others, new), targets=targets)


def _wheels(target: TargetContext, facts: Facts) -> dict[str, Artifact]:
    """Return the wheels that a target's own row names and that are downloaded
    by themselves, by component.

    The framework is not one of them: the lock is made for it.
    """
    found = {}
    for name in target.row.versions:
        component = target.components.get(name)
        if component is None or name == "torch":
            continue
        for artifact in artifact_rows(component, target, facts):
            if artifact.url.endswith(".whl"):
                found[name] = artifact
    return found
