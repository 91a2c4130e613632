"""Test a proof that cosign signs, attaches and verifies, and the policy over cosign's answer."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from proof.support import Proven, tiny_proof
from proof.test_evidence import gpu_record
from push.hostile import Hostile, as_json, digest_of
from trainworks.attestation.evidence import EVIDENCE, EVIDENCE_FILE, make_statement
from trainworks.attestation.prove import CYCLONEDX_FILE, PROVENANCE_FILE, find_pushed_address
from trainworks.attestation.verify import TYPES
from trainworks.cli import main
from trainworks.engine.protocol import BuiltImage
from trainworks.errors import ProofError, RegistryError
from trainworks.facts.rows import Facts
from trainworks.registry.tools import Registries

pytestmark = pytest.mark.engine
"""They need the programs that `make engines` installs: oras, cosign, and a registry."""

FILES = {"slsaprovenance1": PROVENANCE_FILE, "cyclonedx": CYCLONEDX_FILE}


def cosign(*words: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("cosign")
    if program is None:
        pytest.skip("NOT TESTED: no cosign (tools/set-up-engine all)")
    return subprocess.run(
        (program, *words), capture_output=True, text=True, check=False, timeout=300
    )


@dataclass(frozen=True)
class Signer:
    """A key of cosign's, and the form in which it attaches."""

    key: str
    attesting: Sequence[str]
    verifying: Sequence[str]

    def attest(self, address: str, folder: Path, files: Mapping[str, str] = FILES) -> None:
        """Sign the documents of a folder, and attach them."""
        for kind, name in files.items():
            words = (
                "attest",
                "--yes",
                "--tlog-upload=false",
                *self.attesting,
                "--key",
                f"{self.key}.key",
            )
            done = cosign(*words, "--type", kind, "--predicate", str(folder / name), address)
            assert done.returncode == 0, done.stderr

    def verified(self, address: str, kinds: Sequence[str] = tuple(TYPES)) -> tuple[list[int], str]:
        """Return the exit statuses of cosign for each type, and all that it prints."""
        words = (
            "verify-attestation",
            "--insecure-ignore-tlog",
            *self.verifying,
            "--key",
            f"{self.key}.pub",
        )
        done = [cosign(*words, "--type", kind, address) for kind in kinds]
        return [process.returncode for process in done], "".join(process.stdout for process in done)


@pytest.fixture(params=["tag", "bundle"])
def signer(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Signer]:
    """Give a function that makes a key, for cosign's tag or for sigstore's bundles."""
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    # Without it cosign asks the public key service of sigstore, which a key does not need.
    root = tmp_path / "root.json"
    root.write_text(
        '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}',
        encoding="utf-8",
    )
    attesting = ("--new-bundle-format",) if request.param == "bundle" else ()

    def make(name: str) -> Signer:
        assert cosign("generate-key-pair", f"--output-key-prefix={tmp_path / name}").returncode == 0
        verifying = (*attesting, "--trusted-root", str(root)) if attesting else ()
        return Signer(str(tmp_path / name), attesting, verifying)

    return make


@pytest.fixture
def address(hostile: Hostile, registries: Registries) -> str:
    """Give an image in the registry."""
    hostile.put_image("team/image", b"a layer", tag="one")
    digest = registries.read_manifest(f"{hostile.host}/team/image", "one").digest
    return f"{hostile.host}/team/image@{digest}"


@pytest.fixture
def folder(facts: Facts, address: str, tmp_path: Path) -> Path:
    """Give a folder with the documents."""
    proven: Proven = tiny_proof(facts, tmp_path / "tree", address)
    path = tmp_path / "proof"
    path.mkdir()
    for name, text in proven.texts().items():
        (path / name).write_text(text, encoding="utf-8")
    return path


def check(folder: Path, output: str, address: str, *words: str) -> int:
    path = folder / "proven.jsonl"
    path.write_text(output, encoding="utf-8")
    return main(["verify", address, str(path), *words])


def test_what_cosign_signed_and_verified_is_held_to_the_policy(
    address: str, folder: Path, signer: Callable[[str], Signer], capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = signer("mine"), signer("other")
    mine.attest(address, folder)
    statuses, output = mine.verified(address)
    assert statuses == [0, 0]
    assert (
        check(
            folder,
            output,
            address,
            "--builder",
            "https://ci.example/builder",
            "--commit",
            "7777777",
        )
        == 0
    )
    capsys.readouterr()
    words = ("--unchanged", "--commit", "1234567", "--builder", "https://me.example")
    assert check(folder, output, address, *words) == ProofError.exit_status
    captured_output = capsys.readouterr().err
    for part in (
        "a checkout with changes",
        "the commit 777",
        "the builder is https://ci.example/builder, not https://me",
    ):
        assert part in captured_output
    # Another key: cosign prints nothing, and nothing is a refusal.
    statuses, output = other.verified(address)
    assert 0 not in statuses
    assert check(folder, output, address) == ProofError.exit_status


def test_nothing_that_was_changed_comes_through(
    address: str, folder: Path, hostile: Hostile, signer: Callable[[str], Signer]
) -> None:
    mine = signer("mine")
    mine.attest(address, folder)
    chance = random.Random(2026)
    good = dict(hostile.blobs)
    for _ in range(4):
        hostile.blobs = spoiled(hostile, good, chance)
        statuses, output = mine.verified(address)
        assert 0 not in statuses
        assert check(folder, output, address) == ProofError.exit_status


def test_evidence_is_signed_and_demanded_like_the_rest(
    address: str, folder: Path, signer: Callable[[str], Signer], capsys: pytest.CaptureFixture[str]
) -> None:
    record = gpu_record()
    statement = make_statement(record, record["image"].removeprefix("sha256:"), address)
    (folder / EVIDENCE_FILE).write_text(json.dumps(statement), encoding="utf-8")
    mine, other = signer("mine"), signer("other")
    mine.attest(address, folder)
    other.attest(address, folder, {EVIDENCE: EVIDENCE_FILE})
    assert (
        check(folder, mine.verified(address)[1], address, "--gpu", "H100") == ProofError.exit_status
    )
    mine.attest(address, folder, {EVIDENCE: EVIDENCE_FILE})
    statuses, output = mine.verified(address, (*TYPES, EVIDENCE))
    assert statuses == [0, 0, 0]
    assert check(folder, output, address, "--gpu", "H100") == 0
    assert "tested    make gpu, 2026-11-26, NVIDIA H100 80GB HBM3" in capsys.readouterr().out


def spoiled(
    hostile: Hostile, blobs: dict[tuple[str, str], bytes], chance: random.Random
) -> dict[tuple[str, str], bytes]:
    """Return the blobs with one character of each signed statement or signature
    changed, and fitting manifests.
    """
    spoiled_blobs = dict(blobs)
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
            spoiled_blobs[name, layer["digest"]] = bytes(text)
        changed = as_json(value)
        if changed != content and ":" not in reference and reference != "one":
            hostile.manifests[name, reference] = kind, changed
            hostile.manifests[name, digest_of(changed)] = kind, changed
        elif changed != content and value.get("subject"):
            del hostile.manifests[name, reference]
            hostile.manifests[name, digest_of(changed)] = kind, changed
    return spoiled_blobs


def test_only_an_image_that_the_registry_has_is_proven_as_pushed(
    address: str, hostile: Hostile, registries: Registries
) -> None:
    place = f"{hostile.host}/team/image"
    identifier = registries.read_manifest(place, "one").configuration
    image = BuiltImage(reference="one", identifier=identifier, size=0, labels={}, environment={})
    assert find_pushed_address(f"{place}:one", image, registries) == address
    assert find_pushed_address(address, image, registries) == address
    other = BuiltImage(
        reference="one", identifier=f"sha256:{'0' * 64}", size=0, labels={}, environment={}
    )
    with pytest.raises(ProofError, match="is another image"):
        find_pushed_address(address, other, registries)
    with pytest.raises(RegistryError, match="has no another"):
        find_pushed_address(f"{place}:another", image, registries)
