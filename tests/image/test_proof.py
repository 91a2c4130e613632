"""The proof of the real `cpu` image: made, read by the standards' own readers,
and not for another image.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from image.support import ROOT, BuiltByCommand
from proof.support import cyclonedx_packages, cyclonedx_problems, read_provenance
from trainworks.facts.load import load

pytestmark = pytest.mark.engine


def call(*words: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, str(ROOT / "build.py"), *words)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_image_is_proven(image: BuiltByCommand, tmp_path: Path) -> None:
    target, engine = image.report["name"], image.engine.name
    proofs = [tmp_path / "one", tmp_path / "two"]
    for folder in proofs:
        done = call("prove", target, "--engine", engine, "--output", str(folder), "--licenses")
        assert done.returncode == 0, done.stderr
    texts = {path.name: path.read_text(encoding="utf-8") for path in proofs[0].iterdir()}
    assert texts == {path.name: path.read_text(encoding="utf-8") for path in proofs[1].iterdir()}, (
        "not reproducible"
    )

    assert cyclonedx_problems(texts["sbom.cdx.json"]) is None
    provenance = read_provenance(json.loads(texts["provenance.json"]))
    assert provenance.build_definition.internal_parameters["target"] == target

    licenses = texts["licenses.txt"].split("\n==== ")
    assert {"trainworks-smdistributed", "torch", "libc6"} <= {
        license_row.split(" ")[0] for license_row in licenses
    }
    without = [
        license_row.split(" ")[0]
        for license_row in licenses
        if "it has no file with the text" in license_row
    ]
    assert without == ["tensorboard-data-server"], "its wheel has none"
    assert [
        license_row.split(" ")[0]
        for license_row in licenses
        if "\nsource: not named" in license_row
    ] == ["trainworks-smdistributed"]

    # The package manager itself, and the lock, say the same as the bill of materials.
    with image.engine.container(image.reference) as container:
        listing = container.run(
            ("dpkg-query", "--show", "--showformat", r"${db:Status-Abbrev}${Package}\n")
        ).output
    installed = {line.split()[1] for line in listing.splitlines() if line.startswith("ii")}
    components = json.loads(texts["sbom.cdx.json"])["components"]
    assert {
        component["name"] for component in components if component["purl"].startswith("pkg:deb/")
    } == installed
    hashes = {
        component["name"].lower(): component["hashes"][0]["content"]
        for component in components
        if component.get("hashes")
    }
    torch = next(row for row in load(ROOT).locks[target].packages if row.name == "torch")
    assert hashes["torch"] == torch.sha256
    assert cyclonedx_packages(texts["sbom.cdx.json"]) == {
        component["purl"] for component in components
    }


def test_no_proof_is_given_of_what_was_built_from_something_else(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    for name in ("images", "templates", "launcher"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    changed = tmp_path / "launcher" / "trainworks_launcher" / "contract" / "names.py"
    changed.write_text(
        changed.read_text(encoding="utf-8") + "\n# changed after the build\n", encoding="utf-8"
    )
    words = ("--engine", "docker", "--output", str(tmp_path / "out"), "--root", str(tmp_path))
    done = call("prove", docker_image.report["name"], *words)
    assert done.returncode == 17, done.stderr
    assert "was not built from this checkout as it is now" in done.stderr
    assert not (tmp_path / "out").exists()
