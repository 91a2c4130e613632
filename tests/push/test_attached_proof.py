"""A proof that is attached to an image in a registry: found and verified there, by us and by cosign."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from proof.support import Proven, public_text, tiny_proof
from push.hostile import INDEX, Hostile, as_json, digest_of
from trainworks.cli import main
from trainworks.engine.protocol import BuiltImage
from trainworks.errors import ProofError, RegistryError
from trainworks.facts.rows import Facts
from trainworks.proof.attach import BUNDLE, OLD_BUNDLE, TYPES, PushedImage, attach, attached, check_same, find_pushed
from trainworks.proof.envelope import PrivateKey, key_identifier, sign
from trainworks.proof.verify import ATTESTATIONS_FILE, CYCLONEDX_FILE
from trainworks.registry.tools import Registries

pytestmark = pytest.mark.engine
"""They need the programs that `make engines` installs: oras, and a registry."""

KEY = ed25519.Ed25519PrivateKey.generate()


@pytest.fixture
def pushed(hostile: Hostile, registries: Registries) -> PushedImage:
    """Give an image in the registry."""
    hostile.put_image("team/image", b"a layer", tag="one")
    return find_pushed(f"{hostile.host}/team/image:one", registries)


@pytest.fixture
def proven(pushed: PushedImage, facts: Facts, tmp_path: Path) -> Proven:
    """Give its proof."""
    return tiny_proof(facts, tmp_path / "tree", pushed=(pushed.address, pushed.sha256))


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """Give the public key's file."""
    path = tmp_path / "public.pem"
    path.write_bytes(public_text(KEY))
    return path


def attach_signed(pushed: PushedImage, texts: dict[str, str], key: PrivateKey = KEY) -> dict[str, str]:
    return attach(pushed, texts, key=key_identifier(key.public_key()))


def test_an_attached_proof_is_verified_from_the_registry(
    pushed: PushedImage, proven: Proven, public: Path, hostile: Hostile, capsys: pytest.CaptureFixture[str]
) -> None:
    first = attach_signed(pushed, proven.texts(KEY))
    there = dict(hostile.manifests)
    assert attach_signed(pushed, proven.texts(KEY)) == first
    assert hostile.manifests == there, "the same proof is attached once"
    kinds = [each["artifactType"] for each in hostile.referrers("team/image", f"sha256:{pushed.sha256}")]
    assert sorted(kinds) == sorted([*TYPES.values(), BUNDLE, BUNDLE])
    assert set(first) == {*proven.texts(KEY), "slsa.dev-provenance-v1.sigstore.json", "cyclonedx.org-bom.sigstore.json"}
    for name in (pushed.address, f"{pushed.repository}:one"):
        assert main(["verify", name, "--key", str(public), "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["sha256"] == pushed.sha256


def test_several_signed_sets_are_fine_and_each_is_found_by_its_key(
    pushed: PushedImage, proven: Proven, public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A corrected builder, a newer version, a second party: what is attached cannot be removed in many registries."""
    attach_signed(pushed, proven.texts(KEY))
    statement = proven.statement()
    statement["predicate"]["runDetails"]["builder"]["id"] = "https://other.example"
    corrected = {ATTESTATIONS_FILE: f"{sign(statement, KEY)}\n"}
    attach_signed(pushed, corrected)
    other = ec.generate_private_key(ec.SECP256R1())
    attach_signed(pushed, proven.texts(other), other)
    second = tmp_path / "second.pem"
    second.write_bytes(public_text(other))
    for key in (public, second):
        assert main(["verify", pushed.address, "--key", str(key)]) == 0
    capsys.readouterr()
    for builder in ("https://ci.example/builder", "https://other.example"):
        assert main(["verify", pushed.address, "--key", str(public), "--builder", builder, "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["builder"] == builder
    assert main(["verify", pushed.address, "--key", str(second), "--builder", "https://other.example"]) == 17


@pytest.mark.parametrize(
    ("media_type", "content"),
    [
        (OLD_BUNDLE, b"X"),
        (OLD_BUNDLE, b"[" * 200_000),
        (BUNDLE, b"X"),
        (BUNDLE, b'{"dsseEnvelope": {"payload": 5}}'),
        (BUNDLE, b"[" * 200_000),
        (BUNDLE, b"\xff\xfe"),
        (TYPES[CYCLONEDX_FILE], b'{"bomFormat": "CycloneDX"}'),
        (TYPES[CYCLONEDX_FILE], b"of somebody else"),
    ],
)
def test_what_others_attach_does_no_harm(
    pushed: PushedImage, proven: Proven, public: Path, hostile: Hostile, media_type: str, content: bytes
) -> None:
    subject = pushed.manifest.descriptor
    hostile.attach("team/image", subject, media_type, content)
    attach_signed(pushed, proven.texts(KEY))
    assert main(["verify", pushed.address, "--key", str(public)]) == 0


def test_a_proof_of_an_earlier_version_is_read(
    pushed: PushedImage, proven: Proven, public: Path, hostile: Hostile
) -> None:
    lines = proven.texts(KEY)[ATTESTATIONS_FILE].encode()
    hostile.attach("team/image", pushed.manifest.descriptor, OLD_BUNDLE, lines)
    assert main(["verify", pushed.address, "--key", str(public)]) == 0


def test_a_copy_of_the_files_is_verified_by_the_same_digest_without_the_registry(
    pushed: PushedImage, proven: Proven, public: Path, tmp_path: Path, hostile: Hostile
) -> None:
    folder = tmp_path / "proof"
    folder.mkdir()
    for name, text in proven.texts(KEY).items():
        (folder / name).write_text(text, encoding="utf-8")
    hostile.seen.clear()
    assert main(["verify", pushed.address, "--key", str(public), "--proof", str(folder)]) == 0
    assert hostile.seen == []


def test_an_image_without_a_proof_says_so(
    pushed: PushedImage, public: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", pushed.address, "--key", str(public)]) == ProofError.exit_status
    assert "no signed proof is attached to it" in capsys.readouterr().err


def test_a_proof_of_another_image_is_refused(
    pushed: PushedImage, proven: Proven, public: Path, hostile: Hostile, capsys: pytest.CaptureFixture[str]
) -> None:
    other = hostile.put_image("team/image", b"another layer", tag="two")["digest"]
    found = replace(pushed, manifest=pushed.registries.existing(pushed.repository, other))
    attach_signed(found, proven.texts(KEY))
    assert main(["verify", found.address, "--key", str(public)]) == ProofError.exit_status
    assert (
        f"it is about another image: sha256:{'a' * 64}, sha256:{pushed.sha256}, not {other}" in capsys.readouterr().err
    )


def test_only_the_same_image_gets_a_proof(pushed: PushedImage) -> None:
    image = BuiltImage(reference="one", identifier=pushed.manifest.configuration, size=0, labels={}, environment={})
    check_same(pushed, image)
    with pytest.raises(ProofError, match="is another image"):
        check_same(pushed, replace(image, identifier=f"sha256:{'0' * 64}"))


def test_what_is_not_in_the_registry_gets_no_proof(pushed: PushedImage, registries: Registries) -> None:
    with pytest.raises(RegistryError, match="has no another"):
        find_pushed(f"{pushed.repository}:another", registries)


@pytest.mark.parametrize(
    "answer", [b"[]", b"[" * 100_000, b"<html>", b'{"manifests": [7]}', b'{"manifests": [{"artifactType": "x"}]}']
)
def test_a_malformed_list_is_an_error_and_no_traceback(pushed: PushedImage, hostile: Hostile, answer: bytes) -> None:
    hostile.fault = lambda request: "/referrers/" in request.path and request.answer(200, answer, Content_Type=INDEX)
    with pytest.raises(RegistryError):
        attached(pushed)


@pytest.mark.parametrize("layers", [5, [7], [{"mediaType": BUNDLE}], [{"mediaType": BUNDLE, "digest": "../../etc"}]])
def test_a_malformed_attachment_is_an_error_and_no_traceback(
    pushed: PushedImage, hostile: Hostile, layers: object
) -> None:
    content = as_json({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": layers})
    kind = "application/vnd.oci.image.manifest.v1+json"
    row = {"mediaType": kind, "digest": digest_of(content), "size": len(content), "artifactType": BUNDLE}
    hostile.manifests["team/image", digest_of(content)] = kind, content
    index = as_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": [row]})
    hostile.fault = lambda request: "/referrers/" in request.path and request.answer(200, index, Content_Type=INDEX)
    with pytest.raises(RegistryError):
        attached(pushed)


# The field's own program.


def cosign(*words: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("cosign")
    if program is None:
        pytest.skip("NOT TESTED: no cosign (tools/set-up-engine all)")
    return subprocess.run((program, *words), capture_output=True, text=True, check=False, timeout=300)


COSIGN_TYPES = ("slsaprovenance1", "cyclonedx")


@pytest.fixture(params=["tag", "bundle"])
def accepts(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, Path], list[int]]:
    """Give what cosign says of both statements of an image, each from where the parameter says: 0 or 1."""
    more: list[str] = []
    if request.param == "bundle":
        # Without it cosign asks the public key service of sigstore, which a key does not need.
        root = tmp_path / "root.json"
        root.write_text('{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}', encoding="utf-8")
        more = ["--new-bundle-format", "--trusted-root", str(root)]

    def ask(address: str, key: Path) -> list[int]:
        words = ("verify-attestation", "--insecure-ignore-tlog", "--key", str(key), *more)
        return [cosign(*words, "--type", each, address).returncode for each in COSIGN_TYPES]

    return ask


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["Ed25519", "ECDSA P-256"])
def test_cosign_accepts_what_we_attached_and_nothing_that_was_changed(
    pushed: PushedImage,
    proven: Proven,
    hostile: Hostile,
    tmp_path: Path,
    kind: str,
    accepts: Callable[[str, Path], list[int]],
) -> None:
    key: PrivateKey = KEY if kind == "Ed25519" else ec.generate_private_key(ec.SECP256R1())
    public = tmp_path / "public.pem"
    public.write_bytes(public_text(key))
    other = tmp_path / "other.pem"
    other.write_bytes(public_text(ed25519.Ed25519PrivateKey.generate()))
    attach_signed(pushed, proven.texts(key), key)
    assert accepts(pushed.address, public) == [0, 0]
    assert accepts(pushed.address, other) == [1, 1]
    assert main(["verify", pushed.address, "--key", str(public)]) == 0
    chance = random.Random(2026)
    good = dict(hostile.blobs)
    for _ in range(4):
        hostile.blobs = spoiled(hostile, good, chance)
        assert 0 not in accepts(pushed.address, public)
        assert main(["verify", pushed.address, "--key", str(public)]) != 0


def spoiled(
    hostile: Hostile, blobs: dict[tuple[str, str], bytes], chance: random.Random
) -> dict[tuple[str, str], bytes]:
    """Return the blobs with one character of each signed statement or signature changed, and fitting manifests."""
    found = dict(blobs)
    for (name, reference), (kind, content) in list(hostile.manifests.items()):
        value = json.loads(content)
        for layer in value["layers"]:
            if b'"payload' not in blobs.get((name, layer["digest"]), b""):
                continue
            text = bytearray(blobs[name, layer["digest"]])
            start = text.index(b'"payload":"' if chance.random() < 0.5 else b'"sig":"')
            place = text.index(b'":"', start) + 3 + chance.randrange(40)
            text[place] = ord("B") if text[place] == ord("A") else ord("A")
            layer["digest"], layer["size"] = digest_of(bytes(text)), len(text)
            found[name, layer["digest"]] = bytes(text)
        changed = as_json(value)
        if changed != content and ":" not in reference and reference != "one":
            hostile.manifests[name, reference] = kind, changed
            hostile.manifests[name, digest_of(changed)] = kind, changed
        elif changed != content and value.get("subject"):
            del hostile.manifests[name, reference]
            hostile.manifests[name, digest_of(changed)] = kind, changed
    return found


@pytest.mark.engine
@pytest.mark.parametrize("form", [(), ("--new-bundle-format",)], ids=["tag", "bundle"])
def test_we_accept_what_cosign_attached(
    pushed: PushedImage,
    proven: Proven,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    attach_signed(pushed, proven.texts(KEY))
    assert cosign("generate-key-pair", f"--output-key-prefix={tmp_path}/cosign").returncode == 0
    (tmp_path / "bill").write_text(proven.texts()[CYCLONEDX_FILE], encoding="utf-8")
    (tmp_path / "provenance").write_text(json.dumps(proven.statement()["predicate"]), encoding="utf-8")
    for kind, name in zip(COSIGN_TYPES, ("provenance", "bill"), strict=True):
        signing = ("attest", "--yes", "--tlog-upload=false", *form, "--key", f"{tmp_path}/cosign.key", "--type", kind)
        done = cosign(*signing, "--predicate", str(tmp_path / name), pushed.address)
        assert done.returncode == 0, done.stderr
    words = ["verify", pushed.address, "--key", f"{tmp_path}/cosign.pub"]
    assert main([*words, "--builder", "https://ci.example/builder"]) == 0
    capsys.readouterr()
    assert main([*words, "--unchanged", "--commit", "1234567", "--builder", "https://me.example"]) == 17
    said = capsys.readouterr().err
    assert "built from a checkout with changes" in said
    assert "built from the commit 777" in said
    assert "the builder is https://ci.example/builder, not https://me.example" in said
    # Ours is still there.
    ours = tmp_path / "ours.pem"
    ours.write_bytes(public_text(KEY))
    assert main(["verify", pushed.address, "--key", str(ours)]) == 0
