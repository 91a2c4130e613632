"""Writes the provenance of an image (SLSA provenance 1), the predicate that cosign attests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from trainworks.attestation.components import BillOfMaterials, artifacts_of, python_purl
from trainworks.engine.protocol import EngineInformation
from trainworks.extend.plan import ExtensionPlan
from trainworks.plan.model import ImagePlan, Request
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
"""The name of the input that is an extension's hash-locked requirements, with
every file that pip may choose.
"""


Documents = Sequence[Mapping[str, object]]
"""Files of a proof beside its provenance, as by-products of SLSA: name,
identifier and hash of each.
"""


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """The files that an image was built from.

    Attributes:
        commit: The git commit, 40 hexadecimal digits; ``""`` outside of git.
        changed: Whether files differ from that commit.
        files: Path to hash of those that are inputs by themselves: a target's
            locks, an extension's recipe.
    """

    commit: str
    changed: bool
    files: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Builder:
    """The builder: its URI, the version of this program, the engine."""

    identifier: str
    version: str
    engine: EngineInformation


def provenance(
    plan: ImagePlan,
    request: Request,
    rendering: Rendering,
    bill: BillOfMaterials,
    *,
    checkout: Checkout,
    builder: Builder,
    documents: Documents,
) -> dict[str, object]:
    """Return the predicate: how an image came to be.

    Args:
        checkout: The files of this repository that it was built from.
        builder: The builder that the document names.
        documents: The files beside this one, as by-products: name, identifier and hash.
    """
    dependencies = [
        *_own_inputs(checkout, rendering),
        _base(bill),
        *(_artifact(plan)),
        *(_python(plan)),
    ]
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": {"request": asdict(request)},
        "internalParameters": {
            "target": plan.target.name,
            "inputs": inputs_of(plan, rendering),
            **({"firstUse": list(plan.first_use)} if plan.first_use else {}),
        },
        "resolvedDependencies": dependencies,
    }
    return _predicate(definition, builder, documents)


def extension_provenance(
    plan: ExtensionPlan,
    rendering: Rendering,
    bill: BillOfMaterials,
    *,
    checkout: Checkout,
    builder: Builder,
    documents: Documents,
) -> dict[str, object]:
    """Return the predicate of an extension: of which image, with which requirements and code.

    Args:
        checkout: The files of this repository that it was built from.
        builder: The builder that the document names.
        documents: The files beside this one, as by-products: name, identifier and hash.
    """
    dependencies = [*_own_inputs(checkout, rendering), _base(bill)]
    if plan.lock.pins:
        dependencies.append(_named(LOCK, hashlib.sha256(plan.lock.pins.encode()).hexdigest()))
    commits = plan.lock.all_commits.items()
    dependencies += [{"name": name, "digest": {"gitCommit": commit}} for name, commit in commits]
    dependencies += [
        _named(each.name, each.sha256) for each in bill.components if each.kind == "file"
    ]
    definition = {
        "buildType": EXTEND_TYPE,
        "externalParameters": {
            "base": plan.base.reference,
            "entryPoint": plan.entry_point.name if plan.entry_point else "",
            "requirements": [f"{name}=={version}" for name, version in plan.lock.locked],
            **({"apt": list(plan.apt)} if plan.apt else {}),
        },
        "internalParameters": {
            "python": {"path": plan.base.python, "version": plan.base.version},
            "environment": dict(plan.environment),
        },
        "resolvedDependencies": dependencies,
    }
    return _predicate(definition, builder, documents)


def _predicate(
    definition: Mapping[str, object], builder: Builder, documents: Documents
) -> dict[str, object]:
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
            "byproducts": list(documents),
        },
    }


def _named(name: str, sha256: str) -> dict[str, object]:
    return {"name": name, "digest": {"sha256": sha256}}


def _own_inputs(checkout: Checkout, rendering: Rendering) -> list[dict[str, object]]:
    digests = {
        **dict(sorted(checkout.files.items())),
        "build context": rendering.digest.removeprefix("sha256:"),
    }
    return [_checkout(checkout), *(_named(name, digest) for name, digest in digests.items())]


def _checkout(checkout: Checkout) -> dict[str, object]:
    content: dict[str, object] = {"name": CHECKOUT}
    if checkout.commit:
        content["digest"] = {"gitCommit": checkout.commit}
    else:
        content["uri"] = "urn:trainworks:checkout:unversioned"
    content["annotations"] = {"changed": checkout.changed}
    return content


def _base(bill: BillOfMaterials) -> dict[str, object]:
    base = bill.components[0]
    content: dict[str, object] = {"name": "base image", "uri": base.purl}
    if base.sha256:
        content["digest"] = {"sha256": base.sha256}
    return content


def _artifact(plan: ImagePlan) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for each in artifacts_of(plan, installed=False):
        digest = {"gitCommit": each.commit} if each.commit else {"sha256": each.sha256}
        uri = f"git+{each.git}@{each.commit}" if each.git else each.url
        found.append({"name": f"{each.name} {each.version}", "uri": uri, "digest": digest})
    return found


def _python(plan: ImagePlan) -> list[dict[str, object]]:
    files = {file.file: file for step in plan.steps for file in step.python}
    return [
        {
            "name": file.file,
            "uri": python_purl(file.name, file.version),
            "digest": {"sha256": file.sha256},
        }
        for file in sorted(files.values(), key=lambda file: file.file)
    ]
