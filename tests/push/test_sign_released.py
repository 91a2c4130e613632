"""Test `tools/sign-released`: cosign and `build.py verify` accept what it signed, and refuse what
was changed after, one thing at a time.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from documentation.blocks import Block
from lock.servers import Server
from proof.support import tiny_proof
from push.hostile import Hostile
from push.kms import serve_key
from push.signing import attestations, judge, make_key, sign_released, verify
from trainworks.attestation.verify import TYPES
from trainworks.errors import ProofError
from trainworks.facts.rows import Facts
from trainworks.registry.tools import Registries

pytestmark = pytest.mark.engine
"""They need the programs that `make engines` installs: oras, cosign, and a registry."""

IMAGE, TAG = "team/image", "one"
BUILDER = "https://ci.example/builder"
"""The builder that the documents of `results` name."""
DOCUMENTS = {"cyclonedx": "sbom.cdx.json", "slsaprovenance1": "provenance.json"}


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a private key of cosign; its public part lies beside it."""
    if shutil.which("cosign") is None:
        pytest.skip("NOT TESTED: no cosign (tools/set-up-engine all)")
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    return make_key(tmp_path / "release")


@pytest.fixture
def address(hostile: Hostile, registries: Registries) -> str:
    """Give an image in the registry."""
    hostile.put_image(IMAGE, b"a layer", tag=TAG)
    digest = registries.read_manifest(f"{hostile.host}/{IMAGE}", TAG).digest
    return f"{hostile.host}/{IMAGE}@{digest}"


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


@pytest.fixture
def signed(root: Path, results: Path, address: str, key: Path) -> str:
    """Give the address of the image, signed with its documents."""
    done = sign_released(root, results, "--key", str(key))
    assert (done.returncode, done.stdout) == (0, f"signed: {address}\n"), done.stderr
    return address


Change = Callable[[dict[str, Any]], None]


def change_attached(hostile: Hostile, address: str, suffix: str, change: Change) -> None:
    """Change the manifest of cosign's tag for an image; the registry serves it as a whole one."""
    tag = address.rpartition("@")[2].replace(":", "-") + f".{suffix}"
    manifest = json.loads(hostile.manifests[IMAGE, tag][1])
    change(manifest)
    hostile.put_manifest(IMAGE, manifest, tag)


def changed(text: str) -> str:
    """Return a text of base64 with another character in its middle."""
    place = len(text) // 2
    return text[:place] + ("B" if text[place] != "B" else "C") + text[place + 1 :]


def test_verify_accepts_what_was_signed(signed: str, key: Path, tmp_path: Path) -> None:
    public = key.with_suffix(".pub")
    assert verify("verify", signed, public)[0] == 0
    by_tag = f"{signed.partition('@')[0]}:{TAG}"
    assert verify("verify", by_tag, public)[0] == 0
    assert judge(tmp_path, signed, attestations(signed, public), BUILDER) == 0


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_document_that_was_changed_is_refused(
    signed: str,
    key: Path,
    tmp_path: Path,
    hostile: Hostile,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The image's signature and the other document are good still."""

    def change(manifest: dict[str, Any]) -> None:
        for layer in manifest["layers"]:
            envelope = json.loads(hostile.blobs[IMAGE, layer["digest"]])
            statement = json.loads(base64.b64decode(envelope["payload"]))
            if statement["predicateType"] == TYPES[kind]:
                statement["predicate"]["added"] = "a line"
                envelope["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
                layer |= hostile.put_blob(IMAGE, json.dumps(envelope).encode())

    change_attached(hostile, signed, "att", change)
    public = key.with_suffix(".pub")
    (other,) = set(DOCUMENTS) - {kind}
    assert verify("verify", signed, public)[0] == 0
    assert verify("verify-attestation", signed, public, "--type", other)[0] == 0
    status, output, reason = verify("verify-attestation", signed, public, "--type", kind)
    assert (status != 0, output) == (True, "")
    assert f"none of the attestations matched the predicate type: {kind}" in reason
    assert judge(tmp_path, signed, attestations(signed, public), BUILDER) == ProofError.exit_status
    assert f"no statement of the type {TYPES[kind]}" in capsys.readouterr().err


def test_a_signature_that_was_changed_is_refused(signed: str, key: Path, hostile: Hostile) -> None:
    def change(manifest: dict[str, Any]) -> None:
        (layer,) = manifest["layers"]
        annotations = layer["annotations"]
        name = "dev.cosignproject.cosign/signature"
        annotations[name] = changed(annotations[name])

    change_attached(hostile, signed, "sig", change)
    status, output, reason = verify("verify", signed, key.with_suffix(".pub"))
    assert (status != 0, output) == (True, "")
    assert "invalid signature when validating" in reason


def test_another_key_is_refused(
    signed: str, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_key(tmp_path / "other").with_suffix(".pub")
    assert other.read_bytes() != key.with_suffix(".pub").read_bytes()
    status, output, reason = verify("verify", signed, other)
    assert (status != 0, output) == (True, "")
    assert "invalid signature when validating" in reason
    assert judge(tmp_path, signed, attestations(signed, other), BUILDER) == ProofError.exit_status
    assert "no statement of the type" in capsys.readouterr().err


def test_another_image_under_the_tag_is_refused(
    signed: str, key: Path, tmp_path: Path, hostile: Hostile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signed one is good still, by its digest; its documents are not those of the other."""
    public = key.with_suffix(".pub")
    proven = attestations(signed, public)
    image = hostile.put_image(IMAGE, b"another layer", tag=TAG)
    repository = signed.partition("@")[0]
    status, output, reason = verify("verify", f"{repository}:{TAG}", public)
    assert (status != 0, output) == (True, "")
    assert "no signatures found" in reason
    other = f"{repository}@{image['digest']}"
    assert judge(tmp_path, other, proven, BUILDER) == ProofError.exit_status
    assert "it is about another image" in capsys.readouterr().err
    assert verify("verify", signed, public)[0] == 0


@pytest.mark.usefixtures("key")
def test_a_key_of_kms_signs(
    root: Path,
    results: Path,
    address: str,
    tmp_path: Path,
    plain_server: Server,
    page_blocks: list[Block],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As buildspec.yml calls it. The key never leaves KMS; its public part is enough to verify."""
    (block,) = page_blocks
    public = serve_key(plain_server, tmp_path, "alias/images")
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", plain_server.url)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-test")
    done = sign_released(root, results, "--key", "awskms:///alias/images")
    assert (done.returncode, done.stdout) == (0, f"signed: {address}\n"), done.stderr
    assert verify("verify", address, public)[0] == 0
    assert judge(tmp_path, address, attestations(address, public), BUILDER) == 0

    script = block.adapted(builder=BUILDER).replace("build.py", str(root / "build.py"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ("bash", "-euc", script),
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "image": address},
        check=True,
    )
    assert (tmp_path / "cosign.pub").read_bytes() == public.read_bytes()

    done = sign_released(root, results, "--key", "awskms:///alias/none")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no such key" in done.stderr


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
