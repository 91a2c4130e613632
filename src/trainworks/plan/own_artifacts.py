"""Replaces wheels of a row for one build: ``--artifact smp=URL#sha256=...``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from trainworks.errors import UnknownNameError
from trainworks.facts.rows import Artifact, Facts, TargetRow
from trainworks.plan.target import TargetContext, context_of, find_artifact_rows

HOW = "write NAME=URL#sha256=HASH, where HASH is the wheel's, 64 hexadecimal digits"
WRITTEN = re.compile(r"(?P<name>[a-z0-9-]+)=(?P<url>[^#\s]+)#sha256=(?P<sha256>[0-9a-f]{64})")
WHEEL = re.compile(r"[^-]+-(?P<version>[^-]+)(?:-[^-]+)?-(?P<python>[^-]+)-[^-]+-[^-]+\.whl")
SOURCE = "--artifact of the build"


@dataclass(frozen=True)
class OwnArtifact:
    """A wheel that a user gives for one build.

    Attributes:
        name: The component.
        url: The wheel's address.
        sha256: The wheel's hash.
    """

    name: str
    url: str
    sha256: str

    @property
    def file(self) -> str:
        """The name of the wheel."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    def __str__(self) -> str:
        """Return the value of the option."""
        return f"{self.name}={self.url}#sha256={self.sha256}"


def read_own_artifact(text: str) -> OwnArtifact:
    """Read a value of ``--artifact``; raises ``ValueError`` for an invalid one."""
    match = WRITTEN.fullmatch(text)
    if match is None or urlsplit(match["url"]).scheme != "https":
        raise ValueError(f"{text!r} is not a wheel with its hash: {HOW}")
    own = OwnArtifact(match["name"], match["url"], match["sha256"])
    if WHEEL.fullmatch(own.file) is None:
        raise ValueError(f"{own.file!r} is not the name of a wheel")
    return own


def with_own_artifacts(
    own: Iterable[OwnArtifact], row: TargetRow, facts: Facts
) -> tuple[TargetRow, Facts]:
    """Return a target's row and the facts, with these wheels instead of the row's.

    Raises:
        UnknownNameError: The target downloads no such part by itself, or the
            wheel is for another Python.
    """
    for artifact in own:
        row, facts = _replace_wheel(artifact, row, facts)
    return row, facts


def variant_of_artifacts(own: Iterable[OwnArtifact]) -> str:
    """Return the part of an image's tag for these wheels: ``-smp-01234567``."""
    words = [f"-{artifact.name}-{artifact.sha256[:8]}" for artifact in own]
    return "".join(words)


def _replace_wheel(own: OwnArtifact, row: TargetRow, facts: Facts) -> tuple[TargetRow, Facts]:
    """Return a target's row and the facts, with one wheel instead of the row's.

    Raises as ``with_own_artifacts``.
    """
    target = context_of(row, facts)
    wheels = _find_replaceable_wheels(target, facts)
    if own.name not in wheels:
        known = ", ".join(sorted(wheels)) or "none"
        raise UnknownNameError(
            f"--artifact {own.name}: {target.name} takes no wheel of that name from an address",
            hint=f"available: {known}",
        )
    parts = WHEEL.fullmatch(own.file)
    assert parts is not None, "read_own_artifact has matched the name"
    tag = f"cp{target.python.replace('.', '')}"
    # The name may have several tags: ``py2.py3``.
    if not {tag, "py3"} & set(parts["python"].split(".")):
        raise UnknownNameError(
            f"--artifact {own.name}: {own.file} is for {parts['python']}, and {target.name} has"
            f" Python {target.python}",
            hint=f"give a wheel for {tag}",
        )
    new = replace(
        wheels[own.name],
        version=parts["version"],
        url=own.url,
        sha256=own.sha256,
        size=0,
        source=SOURCE,
        provides={},
        together={},
    )
    changed_row = replace(row, versions={**row.versions, own.name: new.version})
    artifacts = []
    for artifact in facts.artifacts:
        if (artifact.name, artifact.version) != (new.name, new.version):
            artifacts.append(artifact)
    targets = []
    for target_row in facts.targets:
        if target_row == row:
            targets.append(changed_row)
        else:
            targets.append(target_row)
    changed_facts = replace(facts, artifacts=(*artifacts, new), targets=tuple(targets))
    return changed_row, changed_facts


def _find_replaceable_wheels(target: TargetContext, facts: Facts) -> dict[str, Artifact]:
    """Return the wheels in a target's own row that are downloaded by themselves, by component.

    The framework is not one of them: the lock is made for it.
    """
    wheels = {}
    for name in target.row.versions:
        component = target.components.get(name)
        if component is None or name == "torch":
            continue
        for artifact in find_artifact_rows(component, target, facts):
            if artifact.url.endswith(".whl"):
                wheels[name] = artifact
    return wheels
