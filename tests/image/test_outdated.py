"""Security updates that the real `cpu` image lacks, by the real archive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from image.support import ROOT, BuiltByCommand

pytestmark = pytest.mark.engine

UNREACHABLE = 10
"""The exit status where the archive does not answer."""


def call(*words: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, str(ROOT / "build.py"), *words)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_archive_is_asked_for_the_image(image: BuiltByCommand) -> None:
    done = call("outdated", image.report["name"], "--engine", image.engine.name, "--format", "json")
    if done.returncode == UNREACHABLE:
        pytest.skip(f"NOT TESTED: the archive of bookworm-security does not answer: {done.stderr}")
    content = json.loads(done.stdout)
    # An image that is older than the newest update lacks that one, and says so by its exit status.
    assert done.returncode == (18 if content["updates"] else 0), done.stderr
    assert (content["identity"], content["suite"]) == (image.report["identifier"], "bookworm-security")
    assert content["packages"] > 100


def test_an_old_package_is_found(tmp_path: Path) -> None:
    """DSA-5532-1: openssl 3.0.11-1~deb12u2 fixes CVE-2023-5363."""
    purl = "pkg:deb/debian/libssl3@3.0.11-1~deb12u1?arch=amd64&distro=debian-12&upstream=openssl"
    bill = {"bomFormat": "CycloneDX", "components": [{"purl": purl}]}
    path = tmp_path / "sbom.cdx.json"
    path.write_text(json.dumps(bill), encoding="utf-8")
    done = call("outdated", str(path), "--format", "json")
    if done.returncode == UNREACHABLE:
        pytest.skip(f"NOT TESTED: the archive of bookworm-security does not answer: {done.stderr}")
    assert done.returncode == 18, done.stderr
    (found,) = json.loads(done.stdout)["updates"]
    assert (found["source"], found["packages"]) == ("openssl", ["libssl3"])
    assert "CVE-2023-5363" in found["cves"]
