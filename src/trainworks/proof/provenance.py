"""Statements about an image: what it was built from, and what is in it (in-toto Statement 1, SLSA provenance 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from trainworks.engine.protocol import EngineInformation
from trainworks.plan.model import ImagePlan, Request
from trainworks.proof.components import Contents, artifacts_of, python_purl
from trainworks.render.dockerfile import Rendering
from trainworks.render.forecast import inputs_of

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
CYCLONEDX = "https://cyclonedx.org/bom"
SPDX = "https://spdx.dev/Document"

BUILD_TYPE = "urn:trainworks:build:1"
"""What the parameters mean: docs/proof.md."""

LOCAL_BUILDER = "urn:trainworks:builder:local"
"""A builder that nobody has named: somebody's own machine."""

CHECKOUT = "checkout"
"""Name of the input that is our own repository."""


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """The files that an image was built from.

    Attributes:
        commit: The git commit, 40 hexadecimal digits; ``""`` outside of git.
        changed: Whether files differ from that commit.
        locks: Path to hash of the lock files that the target uses.
    """

    commit: str
    changed: bool
    locks: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Who builds: the URI of who vouches for it, this program's version, the engine."""

    identifier: str
    version: str
    engine: EngineInformation


def statement(contents: Contents, predicate_type: str, predicate: Mapping[str, object]) -> dict[str, object]:
    """Return a statement about an image: its configuration, and its manifest where it was pushed."""
    subjects = [(contents.reference, contents.sha256), *([contents.pushed] if contents.pushed else [])]
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in subjects],
        "predicateType": predicate_type,
        "predicate": predicate,
    }


def provenance(
    plan: ImagePlan,
    request: Request,
    rendering: Rendering,
    contents: Contents,
    *,
    checkout: Checkout,
    builder: Builder,
    documents: Mapping[str, str],
) -> dict[str, object]:
    """Return the predicate: how an image came to be.

    Args:
        plan: What was built.
        request: What was asked for.
        rendering: The build context.
        contents: The image and what is in it.
        checkout: The files of ours that it was built from.
        builder: Who built it.
        documents: What was written beside this: name to hash.
    """
    dependencies = [
        _checkout(checkout),
        *({"name": path, "digest": {"sha256": digest}} for path, digest in sorted(checkout.locks.items())),
        {"name": "build context", "digest": {"sha256": rendering.digest.removeprefix("sha256:")}},
        _base(contents),
        *(_artifact(plan)),
        *(_python(plan)),
    ]
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {"request": asdict(request)},
            "internalParameters": {
                "target": plan.target.name,
                "inputs": inputs_of(plan, rendering),
            },
            "resolvedDependencies": dependencies,
        },
        "runDetails": {
            "builder": {
                "id": builder.identifier,
                "version": {"trainworks": builder.version, builder.engine.name: builder.engine.version},
            },
            "byproducts": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(documents.items())],
        },
    }


def _checkout(checkout: Checkout) -> dict[str, object]:
    content: dict[str, object] = {"name": CHECKOUT}
    if checkout.commit:
        content["digest"] = {"gitCommit": checkout.commit}
    else:
        content["uri"] = "urn:trainworks:checkout:unversioned"
    content["annotations"] = {"changed": checkout.changed}
    return content


def _base(contents: Contents) -> dict[str, object]:
    base = contents.components[0]
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
        {"name": file.file, "uri": python_purl(file.name, file.version), "digest": {"sha256": file.sha256}}
        for file in sorted(files.values(), key=lambda file: file.file)
    ]
