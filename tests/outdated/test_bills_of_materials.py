"""Bills of materials as the input of `build.py outdated`: ours, those of syft and trivy, and files that are neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainworks.cli import main
from trainworks.errors import OutputError
from trainworks.inspect.system_packages import DebianPackage, read_bill_of_materials

OURS = "pkg:deb/debian/libssl3@3.0.11-1~deb12u1?arch=amd64&distro=debian-12&upstream=openssl"
DEEP = '{"bomFormat": "CycloneDX", "components": [' + '{"components": [' * 20_000 + "]}" * 20_000 + "]}"


def bill(*purls: str, **more: Any) -> str:
    return json.dumps(
        {
            "bomFormat": "CycloneDX",
            "serialNumber": "urn:uuid:3e671687-395b-41f5-a30f-a58921a69b79",
            "metadata": {"component": {"name": "an/image", "version": "1"}},
            "components": [{"purl": purl} for purl in purls],
            **more,
        }
    )


def written(folder: Path, text: str) -> Path:
    path = folder / "bill.cdx.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_our_own_is_read(root: Path) -> None:
    found = read_bill_of_materials(root / "tests" / "golden" / "proof" / "sbom.cdx.json")
    assert (found.name, found.distribution, found.release) == ("trainworks/pytorch-training:tiny", "debian", "12")
    assert found.packages == (
        DebianPackage(
            name="libssl3", version="3.0.17-1~deb12u2", source_version="3.0.17-1~deb12u2", architecture="amd64"
        ),
        DebianPackage(
            name="libstdc++6",
            version="2:12.2.0-14+deb12u1+b1",
            source_version="12.2.0-14+deb12u1",
            architecture="amd64",
        ),
    )
    assert found.architecture == "amd64"


def test_a_point_release_and_an_epoch_as_trivy_writes_them(tmp_path: Path) -> None:
    purl = "pkg:deb/debian/zlib1g@1.2.13.dfsg-1?arch=arm64&distro=debian-12.5&epoch=1"
    found = read_bill_of_materials(written(tmp_path, bill(purl, "pkg:pypi/torch@2.5.1")))
    assert (found.distribution, found.release, found.architecture) == ("debian", "12", "arm64")
    assert [each.version for each in found.packages] == ["1:1.2.13.dfsg-1"]


def test_parts_of_components_are_read(tmp_path: Path) -> None:
    nested = [{"name": "layer", "components": [{"purl": OURS}]}]
    assert len(read_bill_of_materials(written(tmp_path, bill(components=nested))).packages) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            bill("pkg:deb/debian/libssl3@3.0?arch=amd64"),
            "1 of 1 Debian packages do not name their release; named: none",
        ),
        (bill(OURS, OURS.replace("12", "13")), "0 of 2 Debian packages .* named: debian 12, debian 13"),
        (bill(OURS, "pkg:deb/debian/libc6@2.36"), "1 of 2 Debian packages do not name their release; named: debian 12"),
        (bill("pkg:rpm/amzn/openssl@3.0?distro=amzn-2023"), "lists no Debian packages"),
        (bill(), "lists no Debian packages"),
        ('{"spdxVersion": "SPDX-2.3"}', "not a bill of materials in CycloneDX JSON: 'bomFormat'"),
        ("[]", "not a bill of materials in CycloneDX JSON"),
        ("<html>", "not a bill of materials in CycloneDX JSON"),
        ('{"bomFormat": "CycloneDX", "components": [7]}', "not a bill of materials in CycloneDX JSON"),
        (bill("pkg:deb/"), "not a bill of materials in CycloneDX JSON"),
        ("[" * 200_000, "not a bill of materials in CycloneDX JSON: nested too deeply"),
        (DEEP, "not a bill of materials in CycloneDX JSON: nested too deeply"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_compared_is_an_error_and_never_passes(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(OutputError, match=said):
        read_bill_of_materials(path)
    assert main(["outdated", str(path)]) == 9
    assert capsys.readouterr().out == ""


def test_a_release_without_an_archive_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, bill(OURS.replace("debian-12", "debian-99")))
    assert main(["outdated", str(path)]) == 4
    assert "the archive of debian 99 is not known" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["outdated", "absent.json"]) == 9
    assert "absent.json: no such file" in capsys.readouterr().err
