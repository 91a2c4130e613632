"""What is in an image or a bill of materials, as far as advisories are concerned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainworks.engine import choose
from trainworks.engine.protocol import BuiltImage
from trainworks.errors import CompatibilityError, LockError, OutputError, UnknownNameError
from trainworks.facts.rows import Facts
from trainworks.host.apt import AptSource, parse_deb822, parse_one_line
from trainworks.imagetest.questions import list_packages
from trainworks.inspect.targets import plan_of_target, reference_of
from trainworks.plan.model import ImagePlan
from trainworks.proof.components import (
    Component,
    Contents,
    artifact_component,
    artifacts_of,
    base_component,
    in_order,
    package_components,
)
from trainworks.proof.cyclonedx import references_of
from trainworks.terminal.output import say
from trainworks.terminal.progress import DISPLAY
from trainworks.vulnerabilities.installed import Installed, read_purl
from trainworks.vulnerabilities.vex import Subject

TITLE = "org.opencontainers.image.title"
"""The label in which our images have their target's name."""

SOURCES_OF_IMAGE = (
    "cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null; echo; echo '#:'; "
    'for file in /etc/apt/sources.list.d/*.sources; do cat "$file" 2>/dev/null; echo; done'
)
"""Prints an image's archives: those of one line each, a mark, those of the newer form."""


@dataclass(frozen=True, kw_only=True)
class Looked:
    """An image, as far as advisories are concerned.

    Attributes:
        subject: What documents call it.
        image: The engine's image; nothing of a bill of materials.
        identity: Its identifier, or the bill of materials' serial number.
        packages: What is in it.
        plan: What it was built from, where it is one of ours.
        sources: Its own package archives, where it could be asked.
    """

    subject: Subject
    image: BuiltImage | None
    identity: str
    packages: tuple[Installed, ...]
    plan: ImagePlan | None
    sources: tuple[AptSource, ...] = ()


def look(name: str, engine_name: str | None, facts: Facts) -> Looked:
    """Return what is in an image of the engine's, a target's image, or what a bill of materials lists."""
    path = Path(name)
    if path.is_file():
        return read_bill(path, facts)
    if name.endswith(".json"):
        raise OutputError(f"{name}: no such file", hint="`build.py prove TARGET --output DIR` writes sbom.cdx.json")
    engine = choose(engine_name)
    reference = reference_of(name, facts)
    image = engine.inspect(reference)
    if image is None:
        raise UnknownNameError(
            f"{engine.name} has no image {reference}",
            hint=f"`{engine.name} images` lists what there is; one of a registry has to be pulled first",
        )
    say(f"asking {reference} what is in it")
    with DISPLAY.task("reading", log=False), engine.container(image.reference) as container:
        found = list_packages(container)
        archives = container.run(("/bin/sh", "-c", SOURCES_OF_IMAGE)).output
    plan = _plan(image.labels.get(TITLE, ""), facts)
    components: tuple[Component, ...] = package_components(reference, found, {})
    if plan is not None:
        components += tuple(artifact_component(each) for each in artifacts_of(plan, installed=True))
    components = in_order(components)
    if plan is not None:
        base = engine.inspect(plan.image)
        components = (base_component(plan, base.identifier if base else ""), *components)
    purls = dict(zip(references_of(components), (each.purl for each in components), strict=True))
    repository, tag = split_reference(reference)
    sha256 = image.identifier.removeprefix("sha256:")
    own = Contents(reference=f"{repository}:{tag}", sha256=sha256, components=()).purl if tag else ""
    one_line, _, newer = archives.partition("#:\n")
    return Looked(
        subject=Subject(name=repository, version=tag, reference=own, bill=None, purls=purls),
        image=image,
        identity=image.identifier,
        packages=_packages(purls, facts),
        plan=plan,
        sources=(*parse_one_line(one_line), *parse_deb822(newer)),
    )


def split_reference(reference: str) -> tuple[str, str]:
    """Return an image's name and tag; an identifier has no tag, and a name without one means ``latest``."""
    if reference.startswith("sha256:") or "@" in reference:
        return reference, ""
    name, colon, tag = reference.rpartition(":")
    return (name, tag) if colon and "/" not in tag else (reference, "latest")


def read_bill(path: Path, facts: Facts) -> Looked:
    """Read a bill of materials, ours or any other in CycloneDX's JSON; raises ``OutputError`` where it is none."""
    try:
        document: Any = json.loads(read_text(path))
        if document["bomFormat"] != "CycloneDX":
            raise OutputError(f"{path}: it is no CycloneDX document but {document['bomFormat']!r:.60}")
        purls = {
            str(each.get("bom-ref") or each["purl"]): str(each["purl"])
            for each in _nested(document.get("components") or ())
            if each.get("purl")
        }
        image = (document.get("metadata") or {}).get("component") or {}
        name, version = str(image.get("name") or path.name), str(image.get("version") or "")
        serial, number = str(document.get("serialNumber") or ""), int(document.get("version") or 1)
        reference = str(image.get("bom-ref") or "")
        packages = _packages(purls, facts)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OutputError(
            f"{path}: it is no bill of materials in CycloneDX's JSON: {error}",
            hint="`build.py prove TARGET --output DIR` writes one, sbom.cdx.json; so do syft and trivy",
        ) from None
    if not packages:
        raise OutputError(f"{path}: it lists no package with a package URL")
    target = next((each for each in map(facts.name_of, facts.targets) if each.partition("-")[2] == version), "")
    return Looked(
        subject=Subject(
            name=name,
            version=version,
            reference=reference,
            bill=(serial, number) if serial.startswith("urn:uuid:") else None,
            purls=purls,
        ),
        image=None,
        identity=serial or path.name,
        packages=packages,
        plan=_plan(target, facts),
    )


def _nested(components: Iterable[Any]) -> Iterable[Any]:
    """Yield components, and those that are parts of others."""
    for each in components:
        yield each
        yield from _nested(each.get("components") or ())


def _packages(purls: Mapping[str, str], facts: Facts) -> tuple[Installed, ...]:
    return tuple(read_purl(purl, reference, facts.databases) for reference, purl in purls.items())


def _plan(name: str, facts: Facts) -> ImagePlan | None:
    """Return what a target is built from now, only to say which component brings a package."""
    with suppress(LockError, CompatibilityError):
        return plan_of_target(name, facts) if name else None
    return None


def read_text(path: Path) -> str:
    """Return what is in a text file; raises ``OutputError`` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise OutputError(f"{path}: it is no text") from None
