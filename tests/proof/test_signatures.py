"""Signatures: what was signed is believed, and nothing that was changed, left out, or signed by somebody else."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from proof.support import Proven, private_text, public_text, read_envelope
from trainworks.cli import main
from trainworks.errors import ProofError
from trainworks.proof.envelope import PrivateKey, key_identifier, private_key, public_key, sign
from trainworks.proof.verify import ATTESTATIONS_FILE, verify

IMAGE = "a" * 64


@pytest.fixture
def folder(tmp_path: Path, proven: Proven, key: PrivateKey) -> Path:
    """Give a folder with a good proof, and the public key."""
    for name, text in proven.texts(key).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "public.pem").write_bytes(public_text(key))
    return tmp_path


def check(folder: Path, *words: str, image: str = f"sha256:{IMAGE}") -> int:
    return main(["verify", image, "--proof", str(folder), "--key", str(folder / "public.pem"), *words])


def test_a_good_proof_is_verified_without_an_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, "--format", "json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["sha256"] == IMAGE
    assert content["commit"] == "7" * 40
    assert content["changed"] is True
    assert content["builder"] == "https://ci.example/builder"
    assert content["components"] == 15


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "a link, and not a plain file"),
        (os.mkfifo, "not a plain file"),
        (Path.mkdir, "Is a directory"),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 256_000_001), "has more than 256 MB"),
        (lambda _path: None, "No such file or directory"),
    ],
    ids=["link to a device", "pipe", "folder", "too large", "missing"],
)
@pytest.mark.parametrize("name", ["sbom.cdx.json", ATTESTATIONS_FILE])
def test_files_of_a_proof_are_plain_and_of_a_size_to_be_read(
    name: str, make: Callable[[Path], object], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).unlink()
    make(folder / name)
    assert check(folder) == ProofError.exit_status
    assert f"{name}: {said}" in capsys.readouterr().err


def test_another_implementation_verifies_the_envelopes(proven: Proven, key: PrivateKey) -> None:
    lines = proven.texts(key)[ATTESTATIONS_FILE].splitlines()
    statements = [read_envelope(line, key.public_key()) for line in lines]
    documents = proven.documents()
    assert statements[0] == documents["provenance.json"]
    assert [each["predicate"] for each in statements[1:]] == [documents["sbom.cdx.json"]]


def test_another_implementation_refuses_another_key(proven: Proven, key: PrivateKey) -> None:
    line = sign(proven.statement(), key)
    other = ed25519.Ed25519PrivateKey.generate()
    with pytest.raises(Exception, match="Accepted signatures do not match threshold"):
        read_envelope(line, other.public_key())


def test_signing_twice_gives_the_same_bytes(proven: Proven, key: PrivateKey) -> None:
    assert proven.texts(key) == proven.texts(key)


def test_lines_of_others_are_passed_over(folder: Path, proven: Proven, key: PrivateKey) -> None:
    path = folder / ATTESTATIONS_FILE
    statement = {**proven.statement(), "predicateType": "https://tests.example/result"}
    about_another = {**proven.statement(), "subject": [{"digest": {"sha256": "b" * 64}}]}
    lines = [
        sign(proven.statement(), ed25519.Ed25519PrivateKey.generate()),
        sign(statement, key),
        sign(about_another, key),
        "no envelope",
    ]
    path.write_text("\n".join([*lines, path.read_text(encoding="utf-8")]), encoding="utf-8")
    assert check(folder) == 0


def other_key(folder: Path) -> None:
    (folder / "public.pem").write_bytes(public_text(ed25519.Ed25519PrivateKey.generate()))


def changed_payload(folder: Path) -> None:
    path = folder / ATTESTATIONS_FILE
    lines = path.read_text(encoding="utf-8").splitlines()
    content = json.loads(lines[0])
    payload = base64.b64decode(content["payload"]).replace(b"https://ci.example", b"https://me.example")
    content["payload"] = base64.b64encode(payload).decode()
    path.write_text("\n".join([json.dumps(content), *lines[1:]]), encoding="utf-8")


def changed_type(folder: Path) -> None:
    path = folder / ATTESTATIONS_FILE
    path.write_text(path.read_text(encoding="utf-8").replace("in-toto+json", "else+json"), encoding="utf-8")


def left_out(folder: Path) -> None:
    path = folder / ATTESTATIONS_FILE
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")


def changed(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    return change


def missing(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (other_key, "line 1: not signed by the key"),
        (changed_payload, "line 1: not signed by the key"),
        (changed_type, "its payload is application/vnd.else+json"),
        (left_out, "no such statement of the type https://cyclonedx.org/bom (sbom.cdx.json)"),
        (changed("sbom.cdx.json", "libssl3", "libssl4"), "sbom.cdx.json: differs from what was signed"),
        (changed("provenance.json", "ci.example", "me.example"), "provenance.json: differs from what was signed"),
        (changed("sbom.cdx.json", "{", "["), "sbom.cdx.json: not valid JSON"),
        # Two parsers would read these differently: which of two keys counts, and whether 1 is true.
        (
            changed("sbom.cdx.json", '"components": [', '"components": [{"name": "other"}], "components": ['),
            "sbom.cdx.json: not valid JSON: the key 'components' stands twice in one object",
        ),
        (
            changed("provenance.json", '"changed": true', '"changed": 1'),
            "provenance.json: differs from what was signed",
        ),
        (
            changed("sbom.cdx.json", "{", '{"deep": ' + "[" * 200_000),
            "sbom.cdx.json: not valid JSON: nested too deeply",
        ),
        (changed(ATTESTATIONS_FILE, "{", "[" * 200_000 + "{"), "line 1: not a DSSE envelope"),
        (
            changed(ATTESTATIONS_FILE, '{"payloadType":', '{"payloadType":"other","payloadType":'),
            "line 1: not a DSSE envelope",
        ),
        (changed(ATTESTATIONS_FILE, '"payload":', '"load":'), "line 1: not a DSSE envelope"),
        (missing("sbom.cdx.json"), "sbom.cdx.json: No such file"),
        (missing(ATTESTATIONS_FILE), f"{ATTESTATIONS_FILE}: No such file"),
        (missing("public.pem"), "public.pem: No such file"),
    ],
)
def test_what_was_tampered_with_is_named(
    spoil: Callable[[Path], None], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(folder)
    assert check(folder) == ProofError.exit_status
    output, errors = capsys.readouterr()
    assert output == ""
    assert words in errors


def test_several_signed_sets_of_one_key_stand_side_by_side(
    folder: Path, proven: Proven, key: PrivateKey, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files beside them say which one is meant."""
    path = folder / ATTESTATIONS_FILE
    good = path.read_text(encoding="utf-8")
    other = proven.statement()
    other["predicate"]["runDetails"]["builder"]["id"] = "https://other.example"
    path.write_text(f"{good}{good}{sign(other, key)}\n", encoding="utf-8")
    assert check(folder) == 0
    assert "https://ci.example/builder" in capsys.readouterr().out
    (folder / "provenance.json").write_text(json.dumps(other), encoding="utf-8")
    assert check(folder) == 0
    assert "https://other.example" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--builder", "https://ci.example/builder", "--commit", "7" * 40], ""),
        (["--commit", "7777777"], ""),
        (["--builder", "https://ci.example"], "the builder is https://ci.example/builder, not https://ci.example"),
        (["--commit", "1234567"], "built from the commit 7777"),
        (["--unchanged"], "built from a checkout with changes that are in no commit"),
    ],
)
def test_a_policy_is_demanded_of_a_good_proof(
    folder: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(folder, *words) == (ProofError.exit_status if problem else 0)
    assert problem in capsys.readouterr().err


def test_a_commit_that_is_none_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, "--commit", "7") == 2
    assert "not a git commit" in capsys.readouterr().err


def test_a_document_that_does_not_say_that_nothing_was_changed_says_that_it_was(
    folder: Path, proven: Proven, key: PrivateKey
) -> None:
    statement = proven.statement()
    inputs = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    next(each for each in inputs if each["name"] == "checkout")["annotations"]["changed"] = 0
    bill = proven.texts(key)[ATTESTATIONS_FILE].splitlines()[1]
    (folder / ATTESTATIONS_FILE).write_text(f"{sign(statement, key)}\n{bill}\n", encoding="utf-8")
    (folder / "provenance.json").write_text(json.dumps(statement), encoding="utf-8")
    assert check(folder) == 0
    assert check(folder, "--unchanged") == ProofError.exit_status


def test_the_proof_of_another_image_names_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, image=f"sha256:{'b' * 64}") == ProofError.exit_status
    assert f"it is about another image: sha256:{'a' * 64}, not sha256:{'b' * 64}" in capsys.readouterr().err


def test_every_problem_is_said_at_once(folder: Path, key: PrivateKey) -> None:
    changed("provenance.json", "ci.example", "me.example")(folder)
    left_out(folder)
    lines = [*(folder / ATTESTATIONS_FILE).read_text(encoding="utf-8").splitlines(), "{}"]
    documents = {"provenance.json": json.loads((folder / "provenance.json").read_text(encoding="utf-8"))}
    with pytest.raises(ProofError) as error:
        verify(lines, key.public_key(), IMAGE, documents)
    assert len(error.value.problems) == 3


def test_keys_are_read_with_their_password_only(key: PrivateKey) -> None:
    text = private_text(key, b"word")
    read = private_key(text, "key.pem", b"word")
    assert key_identifier(read.public_key()) == key_identifier(key.public_key())
    for password in (None, b"another"):
        with pytest.raises(ProofError, match=r"cannot read a private key: key\.pem"):
            private_key(text, "key.pem", password)


def test_keys_of_other_kinds_are_refused() -> None:
    for other in (rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())):
        text = other.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with pytest.raises(ProofError, match="unsupported private key"):
            private_key(text, "key.pem", None)
        public = other.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        with pytest.raises(ProofError, match="unsupported public key"):
            public_key(public, "public.pem")


def test_what_is_no_key_is_not_shown(capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_text("-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n", encoding="utf-8")
    words = ["prove", "pytorch-2.13.0-cpu-py311-debian12", "--output", str(tmp_path / "out"), "--key", str(path)]
    assert main(words, root) == ProofError.exit_status
    errors = capsys.readouterr().err
    assert "cannot read a private key" in errors
    assert "c2VjcmV0" not in errors
    assert not (tmp_path / "out").exists()
