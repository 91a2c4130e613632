"""A proof that is attached to an image in a real registry: found there, verified from there, and for no other image."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from lock.servers import serving
from proof.support import public_text, tiny_proof
from push.support import RegistryServer
from trainworks.cli import main
from trainworks.engine.protocol import BuiltImage
from trainworks.errors import ProofError, RegistryError
from trainworks.facts.rows import Facts
from trainworks.proof.attach import TYPES, PushedImage, attach, attached, check_same, find_pushed
from trainworks.proof.verify import ATTESTATIONS_FILE
from trainworks.registry.client import IMAGE_CONFIGURATION, IMAGE_MANIFEST, Manifest, Registries, canonical

KEY = ed25519.Ed25519PrivateKey.generate()


@pytest.fixture
def pushed(server: RegistryServer, registries: Registries, logged_in: None) -> PushedImage:
    """Give an image without layers in the registry."""
    assert logged_in is None
    repository = registries.repository(f"{server.host}/team/image")
    digest = repository.put_bytes(b'{"architecture":"amd64"}')
    config = {"mediaType": IMAGE_CONFIGURATION, "digest": digest, "size": 24}
    value = {"schemaVersion": 2, "mediaType": IMAGE_MANIFEST, "config": config, "layers": []}
    repository.put_manifest(Manifest(content=canonical(value), media_type=IMAGE_MANIFEST), tag="one")
    return find_pushed(f"{server.host}/team/image:one", registries)


@pytest.fixture
def texts(pushed: PushedImage, facts: Facts, tmp_path: Path) -> dict[str, str]:
    """Give the files of its proof."""
    return tiny_proof(facts, tmp_path / "tree", pushed=(pushed.address, pushed.sha256)).texts(KEY)


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """Give the public key's file."""
    path = tmp_path / "public.pem"
    path.write_bytes(public_text(KEY))
    return path


def test_an_attached_proof_is_verified_from_the_registry(
    pushed: PushedImage, texts: dict[str, str], public: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = attach(pushed, texts)
    assert attach(pushed, texts) == first
    assert len(pushed.repository.referrers(f"sha256:{pushed.sha256}")) == len(texts) == 4
    assert attached(pushed) == {name: text.encode() for name, text in texts.items()}
    for name in (pushed.address, f"{pushed.repository}:one"):
        assert main(["verify", name, "--key", str(public), "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["sha256"] == pushed.sha256


def test_another_document_of_the_same_type_is_no_part_of_the_proof(
    pushed: PushedImage, texts: dict[str, str], public: Path
) -> None:
    attach(pushed, texts)
    # As a scanner's VEX is attached: with the type of our own bill of materials.
    content = {"vex.cdx.json": b'{"bomFormat": "CycloneDX"}'}
    digest = pushed.repository.attach(pushed.descriptor, TYPES["sbom.cdx.json"], content)
    assert digest in {each["digest"] for each in pushed.repository.referrers(f"sha256:{pushed.sha256}")}
    assert attached(pushed) == {name: text.encode() for name, text in texts.items()}
    assert main(["verify", pushed.address, "--key", str(public)]) == 0


def test_a_copy_of_the_files_is_verified_by_the_same_digest_without_the_registry(
    pushed: PushedImage, texts: dict[str, str], public: Path, tmp_path: Path, server: RegistryServer
) -> None:
    server.kill()
    folder = tmp_path / "proof"
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    assert main(["verify", pushed.address, "--key", str(public), "--proof", str(folder)]) == 0


def test_an_image_without_a_proof_says_so(
    pushed: PushedImage, public: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", pushed.address, "--key", str(public)]) == ProofError.exit_status
    assert "no signed proof is attached to it" in capsys.readouterr().err


def test_a_proof_of_another_image_is_refused(
    pushed: PushedImage, texts: dict[str, str], public: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = pushed.repository.get_manifest("one")
    assert manifest is not None
    value = {**manifest.value(), "annotations": {"other": "image"}}
    pushed.repository.put_manifest(Manifest(content=canonical(value), media_type=IMAGE_MANIFEST), tag="two")
    other = replace(pushed, descriptor=pushed.repository.descriptor("two"))
    attach(other, texts)
    assert main(["verify", other.address, "--key", str(public)]) == ProofError.exit_status
    errors = capsys.readouterr().err
    assert f"not sha256:{other.sha256}" in errors


def test_a_changed_bill_of_materials_beside_a_good_one_is_refused(
    pushed: PushedImage, texts: dict[str, str], public: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attach(pushed, texts)
    attach(pushed, {"sbom.cdx.json": texts["sbom.cdx.json"].replace("libssl3", "libssl4")})
    assert main(["verify", pushed.address, "--key", str(public)]) == ProofError.exit_status
    assert "sbom.cdx.json is attached twice, with different contents" in capsys.readouterr().err


def test_only_the_same_image_gets_a_proof(pushed: PushedImage) -> None:
    manifest = pushed.repository.get_manifest("one")
    assert manifest is not None
    configuration = str(manifest.value()["config"]["digest"])
    image = BuiltImage(reference="one", identifier=configuration, size=0, labels={}, environment={})
    check_same(pushed, image)
    with pytest.raises(ProofError, match="is another image"):
        check_same(pushed, replace(image, identifier=f"sha256:{'0' * 64}"))


def test_what_is_not_in_the_registry_gets_no_proof(pushed: PushedImage, registries: Registries) -> None:
    with pytest.raises(RegistryError, match="has no another"):
        find_pushed(f"{pushed.repository}:another", registries)


def test_a_bundle_without_a_last_newline_does_not_swallow_the_next(
    pushed: PushedImage, texts: dict[str, str], public: Path
) -> None:
    pushed.repository.attach(pushed.descriptor, TYPES[ATTESTATIONS_FILE], {ATTESTATIONS_FILE: b"of somebody else"})
    attach(pushed, texts)
    assert main(["verify", pushed.address, "--key", str(public)]) == 0


DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("referrers", "manifest"),
    [
        (b"[]", b"{}"),
        (b"[" * 100_000, b"{}"),
        (b"<html>", b"{}"),
        (b'{"manifests": [7]}', b"{}"),
        (b'{"manifests": [{"artifactType": "application/vnd.in-toto.bundle"}]}', b"{}"),
        (b'{"manifests": [{"artifactType": "application/vnd.in-toto.bundle", "digest": "%s"}]}', b'{"layers": 5}'),
        (b'{"manifests": [{"artifactType": "application/vnd.in-toto.bundle", "digest": "%s"}]}', b'{"layers": [7]}'),
    ],
    ids=["a list", "deep", "a page", "a number", "no digest", "layers 5", "layer 7"],
)
def test_a_malformed_answer_is_an_error_and_no_traceback(
    referrers: bytes, manifest: bytes, registries: Registries
) -> None:
    with serving() as server:
        digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
        server.serve("/v2/", b"{}")
        server.serve(f"/v2/team/image/referrers/{DIGEST}", referrers.replace(b"%s", digest.encode()))
        server.serve(f"/v2/team/image/manifests/{digest}", manifest)
        repository = registries.repository(f"{urlsplit(server.url).netloc}/team/image")
        pushed = PushedImage(repository=repository, descriptor={"digest": DIGEST})
        with pytest.raises(RegistryError):
            attached(pushed)
