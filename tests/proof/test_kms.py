"""Keys in AWS KMS: moto's server has them, and nothing here but their public halves. AWS itself is never asked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from aws import SECRET, moto_server, refusing
from lock.servers import Server, serving
from proof.support import Proven, read_envelope
from trainworks.cli import main
from trainworks.errors import ProofError
from trainworks.proof.envelope import PrivateKey
from trainworks.proof.keys import signing_key
from trainworks.proof.verify import ATTESTATIONS_FILE

REGION = "eu-west-1"
ALIAS = "alias/images/release"
NAME = f"awskms:///{ALIAS}"
IMAGE = f"sha256:{'a' * 64}"
TARGET = "pytorch-2.13.0-cpu-py311-debian12"

pytestmark = pytest.mark.usefixtures("aws")


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """Give the address of KMS's API."""
    with moto_server(str(Path(__file__).with_name("kms_server.py"))) as address:
        yield address


@pytest.fixture
def kms(moto: str, aws: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give a client of KMS; the key of the alias is there."""
    assert aws is None
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", moto)
    monkeypatch.setenv("AWS_REGION", REGION)
    client = boto3.client("kms", region_name=REGION)
    if ALIAS not in {each["AliasName"] for each in client.list_aliases()["Aliases"]}:
        client.create_alias(AliasName=ALIAS, TargetKeyId=make_key(client)["KeyId"])
    yield client
    client.close()


def make_key(client: Any, usage: str = "SIGN_VERIFY", kind: str = "ECC_NIST_P256") -> dict[str, str]:
    made: dict[str, str] = client.create_key(KeyUsage=usage, KeySpec=kind)["KeyMetadata"]
    return made


@pytest.fixture
def service(aws: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Give a server in KMS's place that answers as a test says."""
    assert aws is None
    with serving() as mine:
        monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", mine.url)
        monkeypatch.setenv("AWS_REGION", REGION)
        yield mine


def test_what_kms_has_signed_is_verified_with_the_public_file_alone(
    kms: Any, proven: Proven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = signing_key(NAME, os.environ)
    texts = proven.texts(key)
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    public = tmp_path / "public.der"
    public.write_bytes(kms.get_public_key(KeyId=ALIAS)["PublicKey"])
    for line in texts[ATTESTATIONS_FILE].splitlines():
        read_envelope(line, key.public_key())
    words = ["verify", IMAGE, "--proof", str(tmp_path), "--format", "json", "--key"]
    assert main([*words, NAME]) == 0
    asked = capsys.readouterr()
    # Nobody answers there any more.
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://127.0.0.1:9")
    assert main([*words, str(public)]) == 0
    assert capsys.readouterr().out == asked.out
    assert SECRET not in asked.err + "".join(texts.values())


@pytest.mark.usefixtures("kms")
def test_the_envelopes_are_those_of_a_key_in_a_file_but_for_who_signed(proven: Proven, key: PrivateKey) -> None:
    remote, local = (proven.texts(each)[ATTESTATIONS_FILE] for each in (signing_key(NAME, os.environ), key))
    for one, two in zip(remote.splitlines(), local.splitlines(), strict=True):
        first, second = json.loads(one), json.loads(two)
        assert list(first) == list(second)
        assert [list(each) for each in first.pop("signatures")] == [list(each) for each in second.pop("signatures")]
        assert first == second


@pytest.mark.usefixtures("kms")
def test_signed_again_it_is_another_signature_and_still_one_proof(
    proven: Proven, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (proven.texts(signing_key(NAME, os.environ)) for _ in range(2))
    assert one[ATTESTATIONS_FILE] != two[ATTESTATIONS_FILE]
    for name, text in one.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    # What a registry has after both were attached.
    both = one[ATTESTATIONS_FILE] + two[ATTESTATIONS_FILE]
    (tmp_path / ATTESTATIONS_FILE).write_text(both, encoding="utf-8")
    assert main(["verify", IMAGE, "--proof", str(tmp_path), "--key", NAME]) == 0, capsys.readouterr().err


def test_a_key_is_named_by_its_number_or_its_arn(kms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_key(kms)
    key = signing_key(f"awskms:///{made['KeyId']}", os.environ).public_key()
    # The ARN says the region, too.
    monkeypatch.delenv("AWS_REGION")
    assert signing_key(f"awskms:///{made['Arn']}", os.environ).public_key() == key


def refused(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    """Return what ``prove`` says to a key, having written nothing; ``verify`` has to say the same."""
    output = tmp_path / "out"
    assert main(["prove", TARGET, "--output", str(output), "--key", name]) == ProofError.exit_status
    said = capsys.readouterr()
    assert (said.out, output.exists()) == ("", False)
    assert main(["verify", IMAGE, "--proof", str(tmp_path), "--key", name]) == ProofError.exit_status
    assert capsys.readouterr() == said
    assert SECRET not in said.err
    return said.err


@pytest.mark.parametrize(
    ("usage", "kind"),
    [
        ("SIGN_VERIFY", "RSA_2048"),
        ("ENCRYPT_DECRYPT", "RSA_2048"),
        ("SIGN_VERIFY", "ECC_NIST_P384"),
    ],
)
def test_a_key_of_another_kind(
    kms: Any, usage: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"awskms:///{make_key(kms, usage, kind)['KeyId']}"
    said = refused(name, capsys, tmp_path)
    assert f"--key {name} is a key of another kind: {kind} for {usage}" in said
    assert "--key-spec ECC_NIST_P256" in said


def test_another_curve_with_the_same_algorithm(kms: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"awskms:///{make_key(kms, kind='ECC_SECG_P256K1')['KeyId']}"
    assert f"unsupported public key: --key {name}" in refused(name, capsys, tmp_path)


@pytest.mark.usefixtures("kms")
def test_an_unknown_alias(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused("awskms:///alias/none", capsys, tmp_path)
    assert f"AWS KMS in {REGION} has no key alias/none" in said
    assert "aws kms list-aliases" in said


@pytest.mark.usefixtures("kms")
def test_no_region(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("AWS_REGION")
    said = refused(NAME, capsys, tmp_path)
    assert "AWS's region is not known" in said
    assert "set AWS_REGION" in said


@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        ("AccessDeniedException", "User is not authorized", "the IAM identity needs kms:GetPublicKey"),
        ("UnsupportedOperationException", "", "--key-spec ECC_NIST_P256"),
        ("DisabledException", "it is disabled", "aws kms describe-key"),
        ("ExpiredTokenException", "The security token included in the request is expired", "aws sso login"),
    ],
)
def test_what_aws_refuses_is_one_clear_error(
    service: Server, code: str, message: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.serve("/", refusing(code, message))
    said = refused(NAME, capsys, tmp_path)
    assert f"AWS KMS in {REGION}, key {ALIAS}, refuses GetPublicKey: {code}: {message}" in said
    assert hint in said


@pytest.mark.usefixtures("kms")
def test_whoever_may_not_sign_is_told_so(proven: Proven, monkeypatch: pytest.MonkeyPatch) -> None:
    key = signing_key(NAME, os.environ)
    with serving() as server:
        server.serve("/", refusing("AccessDeniedException", "User is not authorized"))
        monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", server.url)
        with pytest.raises(ProofError, match="refuses Sign: AccessDeniedException") as error:
            proven.texts(key)
    assert "the IAM identity needs kms:Sign" in error.value.hint


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("awskms://alias/release", "it is written awskms:///alias/NAME"),
        ("awskms:///release", "it is written awskms:///alias/NAME"),
        (f"awskms://kms.example.org/{ALIAS}", "another endpoint is named by AWS_ENDPOINT_URL_KMS"),
        (f"arn:aws:kms:{REGION}:123456789012:{ALIAS}", f"named awskms:///arn:aws:kms:{REGION}:123456789012:{ALIAS}"),
    ],
)
def test_names_that_are_none(name: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hint in refused(name, capsys, tmp_path)
