"""Test bills of materials and provenance: golden files, and the answers of the standards' own
readers.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from proof.support import BUILDER, Proven, cyclonedx_packages, cyclonedx_problems, read_provenance
from trainworks.attestation.components import (
    BillOfMaterials,
    LauncherRelease,
    TargetBuild,
    make_target_bill,
)
from trainworks.attestation.cyclonedx import make_cyclonedx
from trainworks.attestation.licenses import python_licenses, spdx_expression
from trainworks.attestation.prove import _write
from trainworks.attestation.subject_image import read_launcher_release
from trainworks.build.image import find_installed_states
from trainworks.engine.protocol import BuiltImage
from trainworks.errors import OutputError, ProofError
from trainworks.facts.rows import Facts, LockedArchive
from trainworks.imagetest.probe import packages
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks.render.dockerfile import ARCHIVES_LABEL, Rendering

GOLDEN = ("sbom.cdx.json", "provenance.json")


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_documents_of_a_tiny_image(
    name: str, proven: Proven, golden: Callable[[str, str], None]
) -> None:
    golden(f"proof/{name}", proven.texts()[name])


def test_cyclonedx_is_valid_and_its_library_reads_every_package(proven: Proven) -> None:
    text = proven.texts()["sbom.cdx.json"]
    assert cyclonedx_problems(text) is None
    assert cyclonedx_packages(text) == {component.purl for component in proven.bill.components}


def test_the_validator_of_cyclonedx_refuses_a_field_that_the_format_has_not(proven: Proven) -> None:
    assert (
        cyclonedx_problems(json.dumps({**proven.documents()["sbom.cdx.json"], "licence": "MIT"}))
        is not None
    )


def test_provenance_is_a_predicate_of_slsa(proven: Proven) -> None:
    provenance = read_provenance(proven.documents()["provenance.json"])
    assert provenance.run_details.builder.id == "https://ci.example/builder"
    inputs = {
        resolved_dependency.name: dict(resolved_dependency.digest)
        for resolved_dependency in provenance.build_definition.resolved_dependencies
    }
    assert inputs["checkout"] == {"gitCommit": "7" * 40}
    assert inputs["base image"] == {"sha256": "5" * 64}
    assert inputs["open-mpi 4.1.7"] == {"sha256": "3" * 64}
    # A package that only served the build is no part of the image, and yet an input.
    assert inputs["gdrcopy 2.4"] == {"gitCommit": "4" * 40}
    assert "pkg:generic/gdrcopy@2.4" not in {
        component.purl.partition("?")[0] for component in proven.bill.components
    }


def test_every_input_has_a_digest(proven: Proven) -> None:
    definition = proven.documents()["provenance.json"]["buildDefinition"]
    assert [
        dependency["name"]
        for dependency in definition["resolvedDependencies"]
        if not dependency.get("digest")
    ] == []


def test_only_the_file_of_the_installed_version_lends_its_hash(bill: BillOfMaterials) -> None:
    hashes = {
        component.name: component.sha256
        for component in bill.components
        if component.kind == "python"
    }
    assert hashes == {"torch": "1" * 64, "Jinja2": "", "filelock": ""}


def test_debian_packages_are_those_that_are_installed(bill: BillOfMaterials) -> None:
    debian = {component.name: component for component in bill.components if component.kind == "deb"}
    assert set(debian) == {"libssl3", "libstdc++6"}
    assert debian["libssl3"].licenses == ("Apache-2.0", "GPL-2+ or Artistic")
    assert debian["libstdc++6"].licenses == ()
    assert debian["libstdc++6"].purl == (
        "pkg:deb/debian/libstdc%2B%2B6@2:12.2.0-14%2Bdeb12u1%2Bb1"
        "?arch=amd64&distro=debian-12&upstream=gcc-12%4012.2.0-14%2Bdeb12u1"
    )


def test_copies_of_distributions_inside_others_are_listed(bill: BillOfMaterials) -> None:
    copies = [
        (component.name, component.version)
        for component in bill.components
        if dict(component.properties).get("inside") == "setuptools"
    ]
    assert copies == [("Jinja2", "3.0.0")]


def test_an_image_in_no_registry_has_no_manifest_to_be_named_by(bill: BillOfMaterials) -> None:
    assert bill.purl == f"pkg:oci/image@sha256:{'a' * 64}?repository_url=r.example.org/team/image"
    assert replace(bill, address="").purl == "pkg:oci/pytorch-training?tag=tiny"


def test_the_document_says_who_wrote_it_and_who_supplied_what(proven: Proven) -> None:
    document = proven.documents()["sbom.cdx.json"]
    assert document["metadata"]["authors"] == [{"name": "https://ci.example/builder"}]
    suppliers = {
        component["name"]: component.get("supplier", {}).get("name", "")
        for component in document["components"]
    }
    assert suppliers["libssl3"] == "Debian OpenSSL Team <team@example.org>"
    assert suppliers["torch"] == "The PyTorch Team"


def test_a_change_of_the_contents_changes_the_documents_number(bill: BillOfMaterials) -> None:
    other = replace(bill, components=bill.components[:-1])
    first, again, changed = (
        make_cyclonedx(document_bill, builder=BUILDER, time=0)
        for document_bill in (bill, bill, other)
    )
    assert first == again
    assert first["serialNumber"] != changed["serialNumber"]


def test_an_image_that_says_no_package_is_refused(
    facts: Facts, packages_answer: packages.PackagesAnswer
) -> None:
    request = Request(framework="pytorch", cuda="cpu")
    plan = make_plan(request, facts)
    rendering = Rendering(dockerfile="", files=(), stage_components={})
    build = TargetBuild(request=request, plan=plan, rendering=rendering)
    launcher = LauncherRelease(version="1", license="MIT")
    image = BuiltImage(
        reference=plan.tags[0], identifier="sha256:1", size=1, labels={}, environment={}
    )
    silent: packages.PackagesAnswer = {**packages_answer, "system": []}
    with pytest.raises(ProofError, match="cannot list its packages"):
        make_target_bill(build, image, silent, base_identifier="", launcher=launcher)


def test_packages_of_rpm() -> None:
    listing = (
        "glibc\t2.34-52.amzn2023.0.11\tx86_64\tglibc-2.34-52.amzn2023.0.11.src.rpm\tLGPLv2+\n"
        "openssl\t1:3.2.2-1.amzn2023\tx86_64\topenssl-3.2.2-1.amzn2023.src.rpm\tASL 2.0\n"
        "gpg-pubkey\td832c631-6515c85e\t(none)\t(none)\tpubkey\n"
    )
    assert [
        (row["name"], row["version"], row["source"], row["source_version"])
        for row in packages.rpm_listing(listing)
    ] == [
        ("glibc", "2.34-52.amzn2023.0.11", "glibc", "2.34-52.amzn2023.0.11"),
        ("openssl", "1:3.2.2-1.amzn2023", "openssl", "3.2.2-1.amzn2023"),
    ]


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("GPL-2+", "GPL-2.0-or-later"),
        ("LGPL-2.1", "LGPL-2.1-only"),
        ("GPL-3+ or BSD-3-clause", "GPL-3.0-or-later OR BSD-3-Clause"),
        ("Expat", "MIT"),
        ("MIT License", "MIT"),
        ("Apache-2.0 WITH LLVM-exception", "Apache-2.0 WITH LLVM-exception"),
        # The name has two meanings, so no package is named.
        ("BSD", ""),
        ("public-domain", ""),
        ("GPL-3+ with Bison exception", ""),
        ("GPL-2+, and MIT or BSD-3-clause", ""),
        ("", ""),
    ],
)
def test_a_name_is_an_expression_only_where_it_is_certain(name: str, expression: str) -> None:
    assert spdx_expression(name) == expression


@pytest.mark.parametrize(
    ("fields", "licenses"),
    [
        (("MIT", "old", ["BSD License"]), ("MIT",)),
        (("", "BSD", ["BSD License"]), ("BSD",)),
        (("", "A license\nwith its whole text", ["BSD License"]), ("BSD License",)),
        (("", "UNKNOWN", []), ()),
    ],
)
def test_the_newest_field_of_a_python_distribution_wins(
    fields: tuple[str, str, list[str]], licenses: tuple[str, ...]
) -> None:
    assert python_licenses(*fields) == licenses


def test_the_launcher_is_the_packages_own_where_a_root_has_none(tmp_path: Path, root: Path) -> None:
    (tmp_path / "images").mkdir()
    assert read_launcher_release(tmp_path) == read_launcher_release(root)


def test_a_write_that_fails_names_the_folder(tmp_path: Path) -> None:
    """The system names no file in an error of a write, as on a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(OutputError) as caught:
            _write(tmp_path, {"sbom.cdx.json": "{}"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.message.startswith(f"{tmp_path}: ")
    assert list(tmp_path.iterdir()) == []


def test_the_provenance_has_the_days_that_packages_came_from() -> None:
    """They are in the image's label, and may be later than the locked ones."""
    locked = [
        LockedArchive(suite=suite, date="2026-11-25T02:22:30Z", sha256="1" * 64, contents="2" * 64)
        for suite in ("bookworm", "bookworm-security")
    ]
    label = "bookworm-security 2026-11-29T00:53:13Z 683ae4943d5c"
    (installed,) = find_installed_states(locked, {ARCHIVES_LABEL: label})
    assert installed.suite == "bookworm-security"
    assert installed.date == "2026-11-29T00:53:13Z"
    assert installed.contents == "683ae4943d5c"
    assert find_installed_states(locked, {}) == ()
