"""Test `tools/sign-released`: `build.py verify` accepts a signed document, and refuses one that was
changed after.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from proof.support import tiny_proof
from push.hostile import Hostile
from trainworks.attestation.verify import TYPES
from trainworks.cli import main
from trainworks.errors import ProofError
from trainworks.facts.rows import Facts
from trainworks.registry.tools import Registries

pytestmark = pytest.mark.engine
"""They need the programs that `make engines` installs: oras, cosign, and a registry."""


def sign_released(root: Path, results: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = (
        sys.executable,
        str(root / "tools" / "sign-released"),
        "--results",
        str(results),
        *words,
    )
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a private key of cosign; its public part lies beside it."""
    if shutil.which("cosign") is None:
        pytest.skip("NOT TESTED: no cosign (tools/set-up-engine all)")
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    prefix = tmp_path / "release"
    subprocess.run(
        ("cosign", "generate-key-pair", f"--output-key-prefix={prefix}"),
        check=True,
        capture_output=True,
    )
    return prefix.with_suffix(".key")


@pytest.fixture
def address(hostile: Hostile, registries: Registries) -> str:
    """Give an image in the registry."""
    hostile.put_image("team/image", b"a layer", tag="one")
    digest = registries.read_manifest(f"{hostile.host}/team/image", "one").digest
    return f"{hostile.host}/team/image@{digest}"


@pytest.fixture
def results(facts: Facts, address: str, tmp_path: Path) -> Path:
    """Give a folder as `tools/release` leaves it."""
    folder = tmp_path / "results" / "pytorch-tiny"
    folder.mkdir(parents=True)
    for name, text in tiny_proof(facts, tmp_path / "tree", address).texts().items():
        (folder / name).write_text(text, encoding="utf-8")
    pushed = {"pushed": [{"image_uri": address, "digest": address.rpartition("@")[2]}]}
    (folder / "push.json").write_text(json.dumps(pushed), encoding="utf-8")
    return folder.parent


def attestations(address: str, key: Path) -> str:
    """Return cosign's output about the attestations that it accepts."""
    words = (
        "cosign",
        "verify-attestation",
        "--insecure-ignore-tlog",
        "--key",
        str(key.with_suffix(".pub")),
    )
    printed = ""
    for kind in TYPES:
        done = subprocess.run(
            (*words, "--type", kind, address), capture_output=True, text=True, check=False
        )
        printed += done.stdout
    return printed


def test_verify_accepts_what_was_signed_and_refuses_what_was_changed(
    root: Path, results: Path, address: str, key: Path, tmp_path: Path, hostile: Hostile
) -> None:
    done = sign_released(root, results, "--key", str(key))
    assert (done.returncode, done.stdout) == (0, f"signed: {address}\n"), done.stderr
    signature = (
        "cosign",
        "verify",
        "--insecure-ignore-tlog",
        "--key",
        str(key.with_suffix(".pub")),
        address,
    )
    assert subprocess.run(signature, capture_output=True, check=False).returncode == 0
    proven = tmp_path / "proven.jsonl"
    proven.write_text(attestations(address, key), encoding="utf-8")
    assert main(["verify", address, str(proven), "--builder", "https://ci.example/builder"]) == 0
    # The same documents, after a byte of each blob in the registry was changed:
    # cosign accepts none of them.
    hostile.blobs = {
        digest: blob[:-1] + bytes([blob[-1] ^ 1]) for digest, blob in hostile.blobs.items()
    }
    proven.write_text(attestations(address, key), encoding="utf-8")
    assert main(["verify", address, str(proven)]) == ProofError.exit_status


def test_an_image_without_its_documents_is_not_signed(
    root: Path, results: Path, key: Path, hostile: Hostile
) -> None:
    (results / "pytorch-tiny" / "provenance.json").unlink()
    before = set(hostile.blobs)
    done = sign_released(root, results, "--key", str(key))
    assert done.returncode == 1
    assert "has no provenance.json: `build.py prove` writes them" in done.stderr
    assert set(hostile.blobs) == before


@pytest.mark.parametrize("text", ["{", "{}", '{"pushed": [{}]}', "[]"])
def test_what_push_did_not_write_is_named(root: Path, results: Path, key: Path, text: str) -> None:
    (results / "pytorch-tiny" / "push.json").write_text(text, encoding="utf-8")
    done = sign_released(root, results, "--key", str(key))
    assert (done.returncode, done.stdout) == (1, "")
    assert "push.json is not what `build.py push` prints" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_release_that_pushed_nothing_is_an_error(root: Path, tmp_path: Path, key: Path) -> None:
    done = sign_released(root, tmp_path, "--key", str(key))
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing was pushed" in done.stderr


def test_without_cosign_that_is_said(root: Path, results: Path) -> None:
    command = (sys.executable, str(root / "tools" / "sign-released"), "--results", str(results))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": "/nonexistent"},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("sign-released: cosign is not installed")
