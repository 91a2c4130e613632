"""The client and the commands that need no engine, against Debian's registry: faults, logins, copies, referrers."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import pytest

from lock.servers import Request, Server
from push.support import PASSWORD, USER, RegistryServer, docker_configuration
from trainworks.cli import main
from trainworks.errors import RegistryError
from trainworks.facts.rows import Facts
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.registry.client import (
    IMAGE_CONFIGURATION,
    IMAGE_LAYER,
    IMAGE_MANIFEST,
    Manifest,
    Registries,
    Repository,
    canonical,
    digest_of,
)
from trainworks.registry.compression import BLOCK, compress
from trainworks.registry.ecr import never_moves
from trainworks.registry.push import check_tags, split_source, tags_for

BASIC = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


class Interrupted(io.BytesIO):
    """Content that does something once, when so many bytes of it were sent."""

    def __init__(self, content: bytes, after: int, action: Callable[[], None]) -> None:
        super().__init__(content)
        self.after = after
        self.action: Callable[[], None] | None = action

    def read(self, size: int | None = -1) -> bytes:
        if self.action is not None and self.tell() >= self.after:
            action, self.action = self.action, None
            action()
        return super().read(size)


def put_image(repository: Repository, *layers: bytes, tag: str = "") -> Manifest:
    """Have a small image in a repository, and return its manifest."""
    configuration = canonical({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers"}})
    value = {
        "schemaVersion": 2,
        "mediaType": IMAGE_MANIFEST,
        "config": {
            "mediaType": IMAGE_CONFIGURATION,
            "digest": repository.put_bytes(configuration),
            "size": len(configuration),
        },
        "layers": [
            {"mediaType": IMAGE_LAYER, "digest": repository.put_bytes(layer), "size": len(layer)} for layer in layers
        ],
    }
    manifest = Manifest(content=canonical(value), media_type=IMAGE_MANIFEST)
    repository.put_manifest(manifest, tag=tag)
    return manifest


@pytest.mark.usefixtures("logged_in")
def test_a_registry_that_is_killed_in_mid_push_and_restarted(
    server: RegistryServer, registries: Registries, lines: list[str]
) -> None:
    repository = registries.repository(f"{server.host}/team/image")
    content = os.urandom(1 << 20) * 16
    digest = digest_of(content)

    def restart() -> None:
        server.kill()
        server.start()

    streams = iter([Interrupted(content, 8 << 20, restart), io.BytesIO(content)])
    opened: list[int] = []

    def opener() -> contextlib.AbstractContextManager[IO[bytes]]:
        opened.append(1)
        return contextlib.nullcontext(next(streams))

    assert repository.put_blob(digest, len(content), opener) == "sent"
    assert len(opened) == 2
    assert len(lines) == 1
    assert "attempt 2 of 3" in lines[0]
    with repository.open_blob(digest) as stream:
        assert hashlib.sha256(stream.read()).hexdigest() == digest.removeprefix("sha256:")
    before = len(server.requests("PATCH"))
    assert repository.put_blob(digest, len(content), opener) == "there"
    assert len(server.requests("PATCH")) == before
    assert len(opened) == 2
    sister = registries.repository(f"{server.host}/team/sister")
    assert sister.put_blob(digest, len(content), opener, sources=["team/image"]) == "mounted"
    assert len(server.requests("PATCH")) == before


@pytest.mark.usefixtures("logged_in")
def test_a_registry_that_stays_away(server: RegistryServer, registries: Registries, lines: list[str]) -> None:
    repository = registries.repository(f"{server.host}/team/image")
    assert not repository.has_blob(digest_of(b"nothing"))
    server.kill()
    with pytest.raises(RegistryError, match=r"failed 3 times: .*refused") as caught:
        repository.put_bytes(b"something")
    assert "repeat the command" in caught.value.hint
    assert len(lines) == 2


@pytest.mark.usefixtures("logged_in")
def test_what_is_attached_is_found(server: RegistryServer, registries: Registries) -> None:
    """By the tag that stands in for the referrers API: Debian's registry does not have it."""
    repository = registries.repository(f"{server.host}/team/image")
    subject = repository.descriptor(put_image(repository, b"a layer").digest)
    assert repository.referrers(subject["digest"]) == ()
    note = repository.attach(subject, "application/x-note", {"note.txt": b"hello"}, annotations={"made": "today"})
    bill = repository.attach(subject, "application/x-bill", {"bill.json": b"{}"})
    assert repository.attach(subject, "application/x-bill", {"bill.json": b"{}"}) == bill
    assert [each["digest"] for each in repository.referrers(subject["digest"])] == [note, bill]
    found = repository.referrers(subject["digest"])[0]
    assert found["annotations"] == {"made": "today"}
    manifest = repository.get_manifest(found["digest"])
    assert manifest is not None
    assert repository.get_bytes(manifest.value()["layers"][0]["digest"]) == b"hello"


@pytest.mark.usefixtures("logged_in")
def test_promotion_copies_by_digest_with_what_is_attached(
    server: RegistryServer, other: RegistryServer, registries: Registries, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = registries.repository(f"{server.host}/team/image")
    manifest = put_image(origin, b"a layer", b"another", tag="1.0-cpu-debian12-20261121")
    note = origin.attach(origin.descriptor(manifest.digest), "application/x-note", {"note.txt": b"hello"})
    targets = [f"{other.host}/released/image", f"{server.host}/released/image"]
    words = ["promote", f"{origin}@{manifest.digest}", *targets, "--tag", "1.0", "--moving-tag", "stable"]
    assert main([*words, "--format", "json"]) == 0
    done = json.loads(capsys.readouterr().out)["promoted"]
    assert [each["image_uri"] for each in done] == [f"{target}@{manifest.digest}" for target in targets]
    assert [each["tags"] for each in done] == [["1.0", "stable"]] * 2
    assert done[0]["sent_bytes"] > 0
    assert done[1]["sent_bytes"] == 0, "within a registry nothing is sent"
    for target in targets:
        copy = registries.repository(target)
        assert [copy.get_manifest(tag) for tag in ("1.0", "stable", manifest.digest)] == [manifest] * 3
        assert [each["digest"] for each in copy.referrers(manifest.digest)] == [note]
    # Once more: nothing is sent, and nothing is an error.
    before = len(other.requests("PATCH")), len(other.requests("PUT"))
    assert main(words) == 0
    assert (len(other.requests("PATCH")), len(other.requests("PUT"))) == before
    assert (
        capsys.readouterr().out.splitlines()[0]
        == f"{targets[0]}@{manifest.digest} {targets[0]}:1.0 {targets[0]}:stable"
    )
    # By tag: the copy has the same one.
    assert main(["promote", f"{origin}:1.0-cpu-debian12-20261121", f"{other.host}/dated"]) == 0
    assert registries.repository(f"{other.host}/dated").get_manifest("1.0-cpu-debian12-20261121") == manifest


@pytest.mark.usefixtures("logged_in")
def test_a_tag_that_never_moves(
    server: RegistryServer, registries: Registries, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = registries.repository(f"{server.host}/team/image")
    first, second = put_image(origin, b"one", tag="1.0-20261121"), put_image(origin, b"two", tag="1.1")
    assert main(["promote", f"{origin}@{second.digest}", str(origin), "--tag", "1.0-20261121"]) == 15
    said = capsys.readouterr()
    assert f"{origin}:1.0-20261121 is another image ({first.digest}), and this tag never moves" in said.err
    assert said.out == ""
    assert origin.get_manifest("1.0-20261121") == first


def promote(server: RegistryServer, *more: str) -> int:
    return main(["promote", f"{server.host}/team/image:1.0", f"{server.host}/released", *more])


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("trouble", ["no login", "wrong password", "read-only"])
def test_refusals_are_one_clear_error_without_a_secret(
    server: RegistryServer,
    registries: Registries,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    trouble: str,
    form: str,
) -> None:
    docker_configuration(tmp_path / "docker", {server.host: (USER, PASSWORD)})
    put_image(registries.repository(f"{server.host}/team/image"), b"a layer", tag="1.0")
    wrong = "wr0ng-password"
    if trouble == "no login":
        docker_configuration(tmp_path / "docker", {})
    elif trouble == "wrong password":
        docker_configuration(tmp_path / "docker", {server.host: (USER, wrong)})
    else:
        server.kill()
        server.start(read_only=True)
    assert promote(server, "--format", form) == 15
    said = capsys.readouterr()
    expected = {
        "no login": (f"{server.host} requires a login, and this machine has none", f"docker login {server.host}"),
        "wrong password": (f"{server.host} rejects the user or password", f"docker login {server.host}"),
        "read-only": (f"{server.host} is read-only", "another repository"),
    }[trouble]
    for words in expected:
        assert words in said.err
    assert said.err.count("error:") == 1
    if form == "json":
        assert json.loads(said.out)["exit_status"] == 15
    encoded = base64.b64encode(f"{USER}:{wrong}".encode()).decode()
    for secret in (PASSWORD, wrong, BASIC, encoded):
        assert secret not in said.err + said.out + server.log


MANIFEST = canonical({"schemaVersion": 2, "mediaType": IMAGE_MANIFEST})


def serve_with_tokens(server: Server, *, good_for: int, refuse: bool = False) -> list[str]:
    """Serve a manifest to tokens that are each good for so many requests; return those given."""
    given: list[str] = []
    used: dict[str, int] = {}

    def token(request: Request) -> None:
        given.append(f"t0ken-number-{len(given)}")
        request.send_response(200)
        request.end_headers()
        request.wfile.write(json.dumps({"token": given[-1]}).encode())

    def manifest(request: Request) -> None:
        mine = request.headers.get("Authorization", "").removeprefix("Bearer ")
        used[mine] = used.get(mine, 0) + 1
        if refuse or mine not in given or used[mine] > good_for:
            request.send_response(401)
            request.send_header("WWW-Authenticate", f'Bearer realm="{server.url}/token",service="here"')
            request.end_headers()
            problem = {"code": "UNAUTHORIZED", "message": f"the token {mine} has expired"}
            request.wfile.write(json.dumps({"errors": [problem]}).encode())
            return
        request.send_response(200)
        request.send_header("Content-Type", IMAGE_MANIFEST)
        request.end_headers()
        request.wfile.write(MANIFEST)

    server.serve("/token", token)
    server.serve("/v2/team/image/manifests/1.0", manifest)
    return given


def test_a_token_that_expires_is_asked_for_again(plain_server: Server, registries: Registries) -> None:
    given = serve_with_tokens(plain_server, good_for=1)
    repository = registries.repository(f"{plain_server.url.removeprefix('http://')}/team/image")
    assert [repository.get_manifest("1.0") for _ in range(3)] == [
        Manifest(content=MANIFEST, media_type=IMAGE_MANIFEST)
    ] * 3
    assert len(given) == 3


def test_a_login_that_has_expired(
    plain_server: Server, registries: Registries, tmp_path: Path, lines: list[str]
) -> None:
    host = plain_server.url.removeprefix("http://")
    docker_configuration(tmp_path / "docker", {host: (USER, PASSWORD)})
    given = serve_with_tokens(plain_server, good_for=1, refuse=True)
    with pytest.raises(RegistryError, match=f"the login at {host} has expired") as caught:
        registries.repository(f"{host}/team/image").get_manifest("1.0")
    assert f"docker login {host}" in caught.value.hint
    assert "the token *** has expired" in caught.value.message
    for secret in (PASSWORD, *given):
        assert secret not in f"{caught.value} {lines}"


@pytest.mark.usefixtures("logged_in")
def test_a_certificate_that_is_not_trusted(
    server: RegistryServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    assert promote(server) == 15
    said = capsys.readouterr().err
    assert f"{server.host}: certificate not trusted (" in said
    assert "CERTIFICATE_VERIFY_FAILED" in said
    assert f"/etc/docker/certs.d/{server.host}/ca.crt" in said
    assert "Authorization" not in server.log


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("team/image:1", "'team' is not a host name"),
        ("registry.example/team/image", "names no image"),
        ("registry.example/team/image@sha256:12", "'sha256:12' is not a digest"),
        ("registry.example/Team:1", "'Team' is not a valid repository name"),
    ],
)
def test_sources_that_are_none(source: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["promote", source, "registry.example/other"]) == 15
    assert words in capsys.readouterr().err


def test_a_source_may_have_both_a_tag_and_a_digest() -> None:
    digest = digest_of(b"")
    assert split_source(f"host:5000/a/b:1.0@{digest}") == ("host:5000/a/b", digest)
    assert split_source("host:5000/a/b:1.0") == ("host:5000/a/b", "1.0")


def test_tags_follow_from_the_images_own() -> None:
    tags = tags_for("trainworks/pytorch-training:2.4.1-cu121-py311-debian12")
    assert (tags.fixed, tags.dated, tags.moving) == ((), "2.4.1-cu121-py311-debian12", ("2.4.1-cu121-debian12",))
    tags = tags_for("host:5000/mine", ["1.0"])
    assert (tags.fixed, tags.dated, tags.moving) == (("1.0",), "", ())
    with pytest.raises(RegistryError, match="has no tag to derive"):
        tags_for("host:5000/mine")
    with pytest.raises(RegistryError, match="cannot be a moving tag"):
        tags_for("mine:1", (), ["1-20261121"])
    with pytest.raises(RegistryError, match="is not a valid tag"):
        tags_for("mine:1", ["a b"])


@pytest.mark.parametrize("tag", ["nightly-2026.11", "2.4-ubuntu-20.04", "1-20261121", "1-20261121-0a1b2c3d"])
def test_a_moving_tag_that_ecr_would_freeze_is_rejected_before_a_push(tag: str) -> None:
    """ECR's filter and the check of moving tags are one: a tag that may move today may move tomorrow."""
    assert never_moves(tag)
    with pytest.raises(RegistryError, match=f"{re.escape(tag)} cannot be a moving tag"):
        check_tags((), [tag])
    with pytest.raises(RegistryError, match=f"{re.escape(tag)} cannot be a moving tag"):
        tags_for(f"my/train:{tag}")
    assert tags_for(f"my/train:{tag}", [], ["latest"]).moving == ("latest",)
    assert check_tags([tag], ["latest", "2026.11", "v20", "cu130-2"]).fixed == (tag,)


def test_no_two_targets_have_one_moving_tag_and_every_dated_one_is_kept_by_ecr(facts: Facts) -> None:
    moving: dict[tuple[str, tuple[str, ...]], str] = {}
    for row in facts.targets:
        image = make_plan(request_for(row, facts), facts).tags[0]
        tags = tags_for(image)
        assert moving.setdefault((row.framework, tags.moving), image) == image
        assert never_moves(f"{tags.dated}-{datetime(2026, 11, 21, tzinfo=UTC):%Y%m%d}")
        assert not any(map(never_moves, tags.moving))
    assert len(moving) == len(facts.targets)


@pytest.mark.parametrize("size", [0, 1, BLOCK, 2 * BLOCK + 17])
def test_compression_gives_the_same_bytes_and_gzip_reads_them(size: int) -> None:
    content = (os.urandom(1000) * (size // 1000 + 1))[:size]
    results: list[Any] = []
    for _ in range(2):
        target = io.BytesIO()
        done = compress(io.BytesIO(content), target)
        assert gzip.decompress(target.getvalue()) == content
        assert (done.digest, done.size) == (digest_of(target.getvalue()), len(target.getvalue()))
        assert (done.difference, done.original_size) == (digest_of(content), size)
        results.append(done)
    assert results[0] == results[1]


@pytest.mark.parametrize("origin", ["helper", "netrc"])
def test_where_a_login_comes_from(
    server: RegistryServer, registries: Registries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    if origin == "helper":
        program = tmp_path / "bin" / "docker-credential-of-the-tests"
        program.parent.mkdir()
        answer = json.dumps({"ServerURL": server.host, "Username": USER, "Secret": PASSWORD})
        program.write_text(f"#!/bin/sh\ncat >/dev/null\necho '{answer}'\n", encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        configuration = {"credHelpers": {server.host: "of-the-tests"}}
        (tmp_path / "docker" / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
    else:
        line = f"machine 127.0.0.1 login {USER} password {PASSWORD}\n"
        (tmp_path / "netrc").write_text(line, encoding="utf-8")
    repository = registries.repository(f"{server.host}/team/image")
    assert repository.get_manifest(put_image(repository, b"a layer").digest) is not None


def test_a_credential_helper_that_fails(
    server: RegistryServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configuration = {"credHelpers": {server.host: "that-nobody-installed"}}
    (tmp_path / "docker" / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
    assert promote(server) == 15
    said = capsys.readouterr().err
    assert f"docker's credential helper for {server.host} failed" in said
    assert "docker-credential-that-nobody-installed" in said
