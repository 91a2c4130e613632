"""Test the proof of an extended image: the packages of its base stay the base's, and the added ones
are the image's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from proof.support import (
    BUILDER,
    Proven,
    ask,
    cyclonedx_packages,
    cyclonedx_problems,
    make_tree,
    read_provenance,
)
from trainworks.attestation.components import (
    ListedComponent,
    list_package_components,
    make_extension_bill,
)
from trainworks.attestation.prove import make_documents
from trainworks.attestation.provenance import Checkout, RunDetails, make_extension_provenance
from trainworks.cli import main
from trainworks.engine.protocol import BuiltImage
from trainworks.extend.plan import EntryPoint, ExtensionPlan
from trainworks.extend.requirements import ExtendedBase, ExtensionLock
from trainworks.facts.rows import SourceFile
from trainworks.imagetest.probe import packages
from trainworks.render.dockerfile import Rendering

ADDED = {
    "six-1.17.0": "Name: six\nVersion: 1.17.0\nLicense: MIT\n",
    "greeting-1.0": "Name: greeting\nVersion: 1.0\n",
    "of_nobody-3": "Name: of-nobody\nVersion: 3\n",
}
LOCK = f"""\
greeting==1.0 \\
    --hash=sha256:{"9" * 64}
six==1.17.0 \\
    --hash=sha256:{"0" * 64} \\
    --hash=sha256:{"1" * 64}
"""
BASE = ExtendedBase(
    reference="host.example:5000/team/pytorch:tiny",
    identifier=f"sha256:{'a' * 64}",
    digest=f"host.example:5000/team/pytorch@sha256:{'d' * 64}",
    python="/opt/venv/bin/python",
    version="3.11",
    glibc="2.36",
    machine="x86_64",
    environment={},
    distributions=(),
)
PLAN = ExtensionPlan(
    tag="my/train:1",
    base=BASE,
    lock=ExtensionLock(pins=LOCK),
    files=(
        SourceFile(path="train.py", content=b"import six\n"),
        SourceFile(path="lib/one.py", content=b""),
    ),
    entry_point=EntryPoint(kind="script", name="train.py", file="train.py"),
)
IMAGE = BuiltImage(
    reference="my/train:1", identifier=f"sha256:{'e' * 64}", size=1, labels={}, environment={}
)


def extended(packages_answer: packages.PackagesAnswer, base: tuple[ListedComponent, ...]) -> Proven:
    bill = make_extension_bill(PLAN, IMAGE, packages_answer, base)
    rendering = Rendering(dockerfile="FROM base\n", files=(), stage_components={})
    checkout = Checkout(commit="7" * 40, changed=False, files={"templates/extend.j2": "8" * 64})

    def predicate(run: RunDetails) -> dict[str, object]:
        return make_extension_provenance(PLAN, rendering, bill, checkout=checkout, run=run)

    return Proven(bill=bill, write=lambda: make_documents(bill, predicate, builder=BUILDER, time=0))


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> packages.PackagesAnswer:
    """Return the extended image's answer about itself."""
    return ask(make_tree(tmp_path_factory.mktemp("extended"), ADDED))


@pytest.fixture(scope="module")
def extension(proven: Proven, answer: packages.PackagesAnswer) -> Proven:
    """Give its proof; its base is the tiny image of the other tests."""
    return extended(answer, proven.bill.components)


def test_golden_provenance_of_an_extension(
    extension: Proven, golden: Callable[[str, str], None]
) -> None:
    golden("proof/extension/provenance.json", extension.texts()["provenance.json"])


def test_the_standards_readers_take_them(extension: Proven) -> None:
    texts = extension.texts()
    assert cyclonedx_problems(texts["sbom.cdx.json"]) is None
    assert cyclonedx_packages(texts["sbom.cdx.json"]) == {
        component.purl for component in extension.bill.components
    }
    definition = read_provenance(extension.provenance()).build_definition
    assert definition.build_type == "urn:trainworks:extend:1"
    digests = {
        resolved_dependency.name: dict(resolved_dependency.digest)
        for resolved_dependency in definition.resolved_dependencies
    }
    assert digests["base image"] == {"sha256": "d" * 64}
    assert digests["templates/extend.j2"] == {"sha256": "8" * 64}
    assert {"requirements", "build context", "checkout", "/opt/ml/code/train.py"} < set(digests)
    assert [name for name, digest in digests.items() if not digest] == []


def test_what_came_with_the_base_is_the_bases_with_its_hashes(
    extension: Proven, proven: Proven
) -> None:
    document = extension.documents()["sbom.cdx.json"]
    components = {component["bom-ref"]: component for component in document["components"]}
    depends = {
        dependency["ref"]: set(dependency["dependsOn"]) for dependency in document["dependencies"]
    }
    base = document["components"][0]["bom-ref"]
    assert base.startswith(
        f"pkg:oci/pytorch@sha256:{'d' * 64}?repository_url=host.example:5000/team/pytorch"
    )
    own = {
        components[reference]["name"]
        for reference in depends[document["metadata"]["component"]["bom-ref"]]
    }
    assert own == {
        "host.example:5000/team/pytorch",
        *("six", "greeting", "of-nobody"),
        *("/opt/ml/code/train.py", "/opt/ml/code/lib/one.py"),
    }
    assert {components[reference]["name"] for reference in depends[base]} == {
        component.name for component in proven.bill.components
    }
    torch = next(component for component in document["components"] if component["name"] == "torch")
    assert torch["hashes"] == [{"alg": "SHA-256", "content": "1" * 64}]
    assert torch["bom-ref"] in depends[base]
    (ancestor,) = document["metadata"]["component"]["pedigree"]["ancestors"]
    assert ancestor["hashes"] == [{"alg": "SHA-256", "content": "d" * 64}]


def test_what_the_lock_allows_is_said(extension: Proven) -> None:
    components_by_name = {
        component.name: component
        for component in extension.bill.components
        if component.kind == "python"
    }
    assert components_by_name["greeting"].sha256 == "9" * 64
    # pip chose one of two files, and no record says which.
    assert components_by_name["six"].sha256 == ""
    assert dict(components_by_name["six"].properties)["one-of-sha256"] == f"{'0' * 64} {'1' * 64}"
    assert (
        components_by_name["of-nobody"].sha256,
        "one-of-sha256" in dict(components_by_name["of-nobody"].properties),
    ) == (
        "",
        False,
    )


def test_the_packages_of_a_base_that_was_not_built_here_have_no_hashes(
    packages_answer: packages.PackagesAnswer, answer: packages.PackagesAnswer
) -> None:
    extension = extended(answer, list_package_components(BASE.reference, packages_answer, {}))
    torch = next(component for component in extension.bill.components if component.name == "torch")
    assert (torch.inherited, torch.sha256) == (True, "")
    assert cyclonedx_problems(extension.texts()["sbom.cdx.json"]) is None


def test_a_base_without_a_registry_is_known_by_its_configuration(
    packages_answer: packages.PackagesAnswer,
) -> None:
    plan = replace(PLAN, base=replace(BASE, reference="my/base", digest=""))
    base = make_extension_bill(plan, IMAGE, packages_answer, ()).components[0]
    assert (base.name, base.version, base.sha256) == ("my/base", BASE.identifier, "a" * 64)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (
            ("--requirements", "requirements.txt"),
            "--requirements is about an extended image: name its --base too",
        ),
        (
            ("--base", "my/base:1", "--without", "rmm"),
            "--without is about a target's image, and --base is given",
        ),
    ],
)
def test_a_target_or_an_extension(
    words: tuple[str, ...], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", "my/train:1", "--output", str(tmp_path / "out"), *words]) == 2
    assert option in capsys.readouterr().err
