"""Test the fields that scanners read from our bills of materials, as their public sources read
them.

None of them can be installed from a package index, so none is run. The sources are named in
`attestation/components.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
from packageurl import PackageURL

from proof.support import Proven, prove
from trainworks.facts.rows import Facts
from trainworks.imagetest.probe import packages
from trainworks.imagetest.probe.packages import rpm_listing

TRIVY = "aquasecurity:trivy:"


@pytest.fixture(scope="module")
def components(proven: Proven) -> list[dict[str, Any]]:
    """Give the components of the CycloneDX document."""
    bom_components: list[dict[str, Any]] = proven.documents()["sbom.cdx.json"]["components"]
    return bom_components


@pytest.fixture(scope="module")
def amazon(facts: Facts, packages_answer: packages.PackagesAnswer) -> list[dict[str, Any]]:
    """Give the components of an image of Amazon Linux."""
    rows = rpm_listing(
        "openssl-libs\t1:3.0.8-1.amzn2023.0.18\tx86_64\topenssl-3.0.8-1.amzn2023.0.18.src.rpm\tASL"
        " 2.0\n"
    )
    answer: packages.PackagesAnswer = {
        **packages_answer,
        "kind": "rpm",
        "distribution": "amzn",
        "version": "2023",
        "system": rows,
    }
    components: list[dict[str, Any]] = prove(facts, answer).documents()["sbom.cdx.json"][
        "components"
    ]
    return components


def named(components: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (component,) = [row for row in components if row["name"] == name]
    return component


def properties(component: dict[str, Any], prefix: str) -> dict[str, str]:
    rows = component.get("properties", ())
    return {
        row["name"].removeprefix(prefix): row["value"]
        for row in rows
        if row["name"].startswith(prefix)
    }


def qualifiers(component: dict[str, Any]) -> dict[str, str]:
    return dict(PackageURL.from_string(component["purl"]).qualifiers or {})


def test_the_only_operating_system_is_the_distribution(components: list[dict[str, Any]]) -> None:
    """syft and trivy take the first component of this type, and no other, for the distribution."""
    (system,) = [component for component in components if component["type"] == "operating-system"]
    assert (system["name"], system["version"]) == ("debian", "12")
    assert properties(system, "syft:") == {"distro:id": "debian", "distro:versionID": "12"}
    assert properties(system, TRIVY) == {"Class": "os-pkgs", "Type": "debian"}
    assert named(components, "nvidia/cuda")["type"] == "container"


def test_the_document_is_about_a_container(proven: Proven) -> None:
    image = proven.documents()["sbom.cdx.json"]["metadata"]["component"]
    assert image["type"] == "container"
    assert properties(image, TRIVY) == {
        "ImageID": f"sha256:{'c' * 64}",
        "RepoTag": "trainworks/pytorch-training:tiny",
    }


def test_grype_and_osv_scanner_read_package_urls(components: list[dict[str, Any]]) -> None:
    package = named(components, "libstdc++6")
    assert package["purl"].startswith("pkg:deb/debian/libstdc%2B%2B6@2:12.2.0-14%2Bdeb12u1%2Bb1?")
    assert qualifiers(package) == {
        "arch": "amd64",
        "distro": "debian-12",
        "upstream": "gcc-12@12.2.0-14+deb12u1",
    }
    assert named(components, "torch")["purl"] == "pkg:pypi/torch@2.13.0%2Bcpu"


def test_trivy_reads_its_properties(components: list[dict[str, Any]]) -> None:
    """The source package has no epoch, although the package has one."""
    assert properties(named(components, "libstdc++6"), TRIVY) == {
        "PkgID": "libstdc++6@2:12.2.0-14+deb12u1+b1",
        "PkgType": "debian",
        "SrcName": "gcc-12",
        "SrcVersion": "12.2.0",
        "SrcRelease": "14+deb12u1",
    }
    assert properties(named(components, "libssl3"), TRIVY)["SrcName"] == "openssl"
    assert properties(named(components, "torch"), TRIVY) == {
        "PkgType": "python-pkg",
        "FilePath": "opt/venv/lib/python3.11/site-packages/torch-2.13.0+cpu.dist-info/METADATA",
    }


@pytest.mark.parametrize(
    ("version", "parts"),
    [
        ("1:1.2.13.dfsg-1", {"SrcEpoch": "1", "SrcVersion": "1.2.13.dfsg", "SrcRelease": "1"}),
        ("0:1.0-0", {"SrcVersion": "1.0", "SrcRelease": "0"}),
        ("20230311", {"SrcVersion": "20230311"}),
        ("1.0-rc1-2", {"SrcVersion": "1.0-rc1", "SrcRelease": "2"}),
    ],
)
def test_trivy_reads_a_version_in_three_parts(
    version: str, parts: dict[str, str], facts: Facts, packages_answer: packages.PackagesAnswer
) -> None:
    row: packages.SystemPackage = {**packages_answer["system"][0], "source_version": version}
    document = prove(facts, {**packages_answer, "system": [row]}).documents()["sbom.cdx.json"]
    read = properties(named(document["components"], row["name"]), TRIVY)
    assert {
        name: value
        for name, value in read.items()
        if name in ("SrcEpoch", "SrcVersion", "SrcRelease")
    } == parts


def test_amazon_linux_is_named_as_each_scanner_names_it(amazon: list[dict[str, Any]]) -> None:
    (system,) = [component for component in amazon if component["type"] == "operating-system"]
    assert (system["name"], system["version"]) == ("amazon", "2023")
    assert properties(system, "syft:") == {"distro:id": "amzn", "distro:versionID": "2023"}
    package = named(amazon, "openssl-libs")
    assert package["purl"].startswith("pkg:rpm/amzn/openssl-libs@3.0.8-1.amzn2023.0.18?")
    assert qualifiers(package) == {
        "arch": "x86_64",
        "distro": "amzn-2023",
        "epoch": "1",
        "upstream": "openssl-3.0.8-1.amzn2023.0.18.src.rpm",
    }
    assert properties(package, TRIVY) == {
        "PkgID": "openssl-libs@1:3.0.8-1.amzn2023.0.18",
        "PkgType": "amazon",
        "SrcName": "openssl",
        "SrcVersion": "3.0.8",
        "SrcRelease": "1.amzn2023.0.18",
        "SrcEpoch": "1",
    }


def test_copies_inside_other_packages_are_listed(components: list[dict[str, Any]]) -> None:
    own, copy = sorted(
        (component for component in components if component["name"] == "Jinja2"),
        key=lambda component: "inside" in str(component),
    )
    assert (own["version"], copy["version"]) == ("3.1.6", "3.0.0")
    assert copy["purl"] == "pkg:pypi/jinja2@3.0.0"
    assert properties(copy, "trainworks:")["inside"] == "setuptools"
    assert "inside" not in properties(own, "trainworks:")


def test_a_copy_of_the_same_version_is_another_component_and_no_dependency(
    facts: Facts, packages_answer: packages.PackagesAnswer
) -> None:
    rows = []
    for row in packages_answer["python"]:
        rows.append({**row, "version": "3.1.6"} if row["inside"] else row)
    answer: packages.PackagesAnswer = {**packages_answer, "python": rows}
    document = prove(facts, answer).documents()["sbom.cdx.json"]
    own, copy = (component for component in document["components"] if component["name"] == "Jinja2")
    assert (
        "inside" in properties(own, "trainworks:"),
        "inside" in properties(copy, "trainworks:"),
    ) == (False, True)
    assert (own["bom-ref"], copy["bom-ref"]) == ("pkg:pypi/jinja2@3.1.6", "pkg:pypi/jinja2@3.1.6#2")
    torch = named(document["components"], "torch")["bom-ref"]
    (depends,) = [
        dependency["dependsOn"]
        for dependency in document["dependencies"]
        if dependency["ref"] == torch
    ]
    assert depends == ["pkg:pypi/jinja2@3.1.6"]


def test_the_bill_of_materials_of_a_wheel_is_pointed_to(components: list[dict[str, Any]]) -> None:
    rows = named(components, "filelock")["properties"]
    assert [
        row["value"].rpartition("/")[2] for row in rows if row["name"] == "trainworks:sbom"
    ] == [
        "filelock.cdx.json",
        "filelock.spdx.json",
    ]
