"""Known vulnerabilities of the real `cpu` image: what is in it is found, by the names of its bill of materials."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from image.support import ROOT, BuiltByCommand
from proof.support import cyclonedx_problems
from vulnerabilities.support import advisory, affected, zipped

pytestmark = pytest.mark.engine


def call(*words: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, str(ROOT / "build.py"), *words)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_image_is_looked_into(image: BuiltByCommand, tmp_path: Path) -> None:
    target, engine = image.report["name"], image.engine.name
    advisories = (
        advisory("TEST-torch", affected("PyPI", "torch", "introduced=0", "fixed=99")),
        advisory("TEST-old", affected("PyPI", "torch", "introduced=0", "fixed=2.0")),
        advisory("TEST-openssl", affected("Debian:12", "openssl", "introduced=0")),
        advisory("TEST-elsewhere", affected("Debian:11", "openssl", "introduced=0")),
    )
    database = tmp_path / "all.zip"
    database.write_bytes(zipped(advisories))
    words = (target, "--engine", engine, "--database", str(database), "--no-archive")
    done = call("vulnerabilities", *words, "--format", "json", "--fail-on", "unknown")
    assert done.returncode == 18, done.stderr
    content = json.loads(done.stdout)
    assert content["identity"] == image.report["identifier"]
    found = {each["id"]: each for each in content["findings"]}
    assert found.keys() == {"TEST-torch", "TEST-openssl"}
    assert [each["component"] for each in found["TEST-torch"]["installed"]] == ["torch"]
    assert "libssl3" in {each["name"] for each in found["TEST-openssl"]["installed"]}

    # The document speaks of packages by the names that the bill of materials of the same image has.
    assert call("prove", target, "--engine", engine, "--output", str(tmp_path)).returncode == 0
    bill = json.loads((tmp_path / "sbom.cdx.json").read_text(encoding="utf-8"))
    names = {each["bom-ref"] for each in bill["components"]}
    text = call("vulnerabilities", *words, "--format", "cyclonedx").stdout
    assert cyclonedx_problems(text) is None
    used = {one["ref"] for each in json.loads(text)["vulnerabilities"] for one in each["affects"]}
    assert used
    assert used <= names

    # And the bill of materials alone says the same as the image.
    alone = call("vulnerabilities", str(tmp_path / "sbom.cdx.json"), *words[3:], "--format", "json")
    assert [each["id"] for each in json.loads(alone.stdout)["findings"]] == [*found]


def test_the_archive_is_asked_for_the_image(docker_image: BuiltByCommand, tmp_path: Path) -> None:
    """An old package is put into the bill of materials: a fresh image lacks no update."""
    target = docker_image.report["name"]
    assert call("prove", target, "--engine", "docker", "--output", str(tmp_path)).returncode == 0
    path = tmp_path / "sbom.cdx.json"
    bill = json.loads(path.read_text(encoding="utf-8"))
    row = next(each for each in bill["components"] if each["name"] == "libssl3")
    new, old = row["version"], "3.0.11-1~deb12u1"
    row["purl"] = row["purl"].replace(new, old)
    path.write_text(json.dumps(bill), encoding="utf-8")
    database = tmp_path / "all.zip"
    database.write_bytes(zipped([advisory("TEST-none", affected("PyPI", "torch", "introduced=0", "fixed=0.1"))]))
    done = call("vulnerabilities", str(path), "--database", str(database), "--format", "json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    debian = next(each for each in content["compared"] if each["ecosystem"] == "Debian:12")
    if not debian["with"]:
        pytest.skip(f"NOT TESTED: the archive of bookworm-security cannot be asked from here: {debian['without']}")
    # DSA-5532-1.
    found = {each["id"]: each["fixed"] for each in content["findings"] if each["package"] == "openssl"}
    assert found["CVE-2023-5363"] == "3.0.11-1~deb12u2"
