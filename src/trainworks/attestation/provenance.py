"""Writes the provenance of an image (SLSA provenance 1), the predicate that cosign attests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from trainworks.attestation.components import (
    BillOfMaterials,
    TargetBuild,
    list_artifacts,
    make_python_purl,
)
from trainworks.engine.protocol import EngineInformation
from trainworks.extend.plan import ExtensionPlan
from trainworks.plan.model import ImagePlan
from trainworks.render.dockerfile import Rendering
from trainworks.render.inputs import inputs_of

PROVENANCE = "https://slsa.dev/provenance/v1"
CYCLONEDX = "https://cyclonedx.org/bom"

BUILD_TYPE = "urn:trainworks:build:1"
EXTEND_TYPE = "urn:trainworks:extend:1"
"""The types of builds; docs/ship.md describes their parameters."""

LOCAL_BUILDER = "urn:trainworks:builder:local"
"""The builder if none is named: this machine."""

CHECKOUT = "checkout"
"""The name of the input that is this repository."""

LOCK = "requirements"
"""The name of the input that is an extension's hash-locked requirements.

The lock has every file that pip may choose.
"""


Documents = Sequence[Mapping[str, object]]
"""Files of a proof beside its provenance, as by-products of SLSA: name, identifier and hash."""


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """The files that an image was built from.

    Attributes:
        commit: The git commit, 40 hexadecimal digits; ``""`` outside of git.
        changed: Whether files differ from that commit.
        files: Path to hash of the files that are inputs by themselves: a target's
            locks, an extension's recipe.
    """

    commit: str
    changed: bool
    files: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Builder:
    """The builder of an image.

    Attributes:
        identifier: The builder's URI.
        version: The version of trainworks.
        engine: The name and the version of the engine.
    """

    identifier: str
    version: str
    engine: EngineInformation


@dataclass(frozen=True, kw_only=True)
class RunDetails:
    """The part of a provenance that SLSA calls ``runDetails``.

    Attributes:
        builder: The builder that the document names.
        documents: The files beside the provenance, as by-products: name, identifier and hash.
    """

    builder: Builder
    documents: Documents


def make_provenance(
    build: TargetBuild, bill: BillOfMaterials, *, checkout: Checkout, run: RunDetails
) -> dict[str, object]:
    """Return the predicate of a target's image: the request, the inputs and the builder.

    Args:
        build: The build of the image.
        bill: The image and its components.
        checkout: The files of this repository that the image was built from.
        run: The builder, and the files beside the document.
    """
    plan, rendering = build.plan, build.rendering
    dependencies = [*_list_own_inputs(checkout, rendering), _describe_base(bill)]
    dependencies += _describe_artifacts(plan)
    dependencies += _describe_python_files(plan)
    parameters: dict[str, object] = {
        "target": plan.target.name,
        "inputs": inputs_of(plan, rendering),
    }
    if plan.first_use:
        parameters["firstUse"] = list(plan.first_use)
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": {"request": asdict(build.request)},
        "internalParameters": parameters,
        "resolvedDependencies": dependencies,
    }
    return _make_predicate(definition, run)


def make_extension_provenance(
    plan: ExtensionPlan,
    rendering: Rendering,
    bill: BillOfMaterials,
    *,
    checkout: Checkout,
    run: RunDetails,
) -> dict[str, object]:
    """Return the predicate of an extension: its base image, requirements and code.

    Args:
        plan: The plan of the extension.
        rendering: The context that the image was built from.
        bill: The image and its components.
        checkout: The files of this repository that the image was built from.
        run: The builder, and the files beside the document.
    """
    dependencies = [*_list_own_inputs(checkout, rendering), _describe_base(bill)]
    if plan.lock.pins:
        digest = hashlib.sha256(plan.lock.pins.encode()).hexdigest()
        dependencies.append(_make_descriptor(LOCK, digest))
    for name, commit in plan.lock.all_commits.items():
        dependencies.append({"name": name, "digest": {"gitCommit": commit}})
    files = [component for component in bill.components if component.kind == "file"]
    dependencies += [_make_descriptor(file.name, file.sha256) for file in files]
    parameters: dict[str, object] = {
        "base": plan.base.reference,
        "entryPoint": plan.entry_point.name if plan.entry_point else "",
        "requirements": [f"{name}=={version}" for name, version in plan.lock.locked],
    }
    if plan.apt:
        parameters["apt"] = list(plan.apt)
    definition = {
        "buildType": EXTEND_TYPE,
        "externalParameters": parameters,
        "internalParameters": {
            "python": {"path": plan.base.python, "version": plan.base.version},
            "environment": dict(plan.environment),
        },
        "resolvedDependencies": dependencies,
    }
    return _make_predicate(definition, run)


def _make_predicate(definition: Mapping[str, object], run: RunDetails) -> dict[str, object]:
    """Return SLSA's predicate: the definition of a build, and the builder that ran it."""
    builder = run.builder
    return {
        "buildDefinition": definition,
        "runDetails": {
            "builder": {
                "id": builder.identifier,
                "version": {
                    "trainworks": builder.version,
                    builder.engine.name: builder.engine.version,
                },
            },
            "byproducts": list(run.documents),
        },
    }


def _make_descriptor(name: str, sha256: str) -> dict[str, object]:
    """Return an input of a build as SLSA's descriptor, by its name and hash."""
    return {"name": name, "digest": {"sha256": sha256}}


def _list_own_inputs(checkout: Checkout, rendering: Rendering) -> list[dict[str, object]]:
    """Return the inputs of this repository: the checkout, its files, and the build context."""
    inputs = [_describe_checkout(checkout)]
    for name, digest in sorted(checkout.files.items()):
        inputs.append(_make_descriptor(name, digest))
    inputs.append(_make_descriptor("build context", rendering.digest.removeprefix("sha256:")))
    return inputs


def _describe_checkout(checkout: Checkout) -> dict[str, object]:
    """Return the checkout as SLSA's descriptor: its commit, and whether it has changes."""
    content: dict[str, object] = {"name": CHECKOUT}
    if checkout.commit:
        content["digest"] = {"gitCommit": checkout.commit}
    else:
        content["uri"] = "urn:trainworks:checkout:unversioned"
    content["annotations"] = {"changed": checkout.changed}
    return content


def _describe_base(bill: BillOfMaterials) -> dict[str, object]:
    """Return the base image, the first component of a bill, as SLSA's descriptor."""
    base = bill.components[0]
    content: dict[str, object] = {"name": "base image", "uri": base.purl}
    if base.sha256:
        content["digest"] = {"sha256": base.sha256}
    return content


def _describe_artifacts(plan: ImagePlan) -> list[dict[str, object]]:
    """Return the downloads of a plan as SLSA's descriptors; also those for the build alone."""
    inputs: list[dict[str, object]] = []
    for artifact in list_artifacts(plan, installed=False):
        digest = {"sha256": artifact.sha256}
        if artifact.commit:
            digest = {"gitCommit": artifact.commit}
        uri = artifact.url
        if artifact.git:
            uri = f"git+{artifact.git}@{artifact.commit}"
        name = f"{artifact.name} {artifact.version}"
        inputs.append({"name": name, "uri": uri, "digest": digest})
    return inputs


def _describe_python_files(plan: ImagePlan) -> list[dict[str, object]]:
    """Return the Python files of a plan as SLSA's descriptors, each once, by file name."""
    package_by_file = {}
    for step in plan.steps:
        for package in step.python:
            package_by_file[package.file] = package
    inputs: list[dict[str, object]] = []
    for name, package in sorted(package_by_file.items()):
        uri = make_python_purl(package.name, package.version)
        inputs.append({"name": name, "uri": uri, "digest": {"sha256": package.sha256}})
    return inputs
