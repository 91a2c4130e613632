"""``promote`` by oras, against registries that fail, page, lie and send
elsewhere: nothing lost, no login leaves.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

from cli.terminal import Terminal
from push.hostile import BASIC, INDEX, Hostile, Request, as_json, digest_of, hostile_registry
from push.support import PASSWORD, ROOT, USER, docker_configuration
from trainworks.cli import main
from trainworks.errors import RegistryError
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.registry import protocol
from trainworks.registry.names import Tags
from trainworks.registry.protocol import Patience, RegistryUnreachableError
from trainworks.registry.push import promote_image
from trainworks.registry.tags import claim_tag
from trainworks.registry.tools import Registries
from trainworks_testing.certificates import Authority
from trainworks_testing.clock import assert_within, start_clock

pytestmark = pytest.mark.engine
"""They need the programs that `make engines` installs: oras, and a registry."""


def promote(
    mine: Hostile, *more: str, source: str = "team/image:1.0", target: str = "released"
) -> int:
    return main(["promote", f"{mine.host}/{source}", f"{mine.host}/{target}", *more])


def test_a_copy_has_every_attachment_of_all_pages_and_levels(
    hostile: Hostile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A list of one entry a page; a signature of an attachment; an index of platforms.

    Cosign's own tags.
    """
    hostile.page = 1
    images = [hostile.put_image("team/image", content, tag="") for content in (b"amd64", b"arm64")]
    index = hostile.put_manifest(
        "team/image", {"schemaVersion": 2, "mediaType": INDEX, "manifests": images}, "1.0-20261121"
    )
    for subject in (index, images[1]):
        for kind in ("application/x-note", "application/x-bill", "application/x-more"):
            attached = hostile.attach("team/image", subject, kind, os.urandom(100))
        hostile.attach("team/image", attached, "application/x-signature", os.urandom(100))
    cosign = f"sha256-{images[0]['digest'].removeprefix('sha256:')}.att"
    hostile.put_image("team/image", b"attestations", tag=cosign)
    everything = hostile.digests("team/image")
    assert len(everything) == 12
    words = ["--tag", "1.0", "--moving-tag", "stable", "--format", "json"]
    assert promote(hostile, *words, source="team/image:1.0-20261121") == 0
    (done,) = json.loads(capsys.readouterr().out)["promoted"]
    assert done == {
        "repository": f"{hostile.host}/released",
        "image_uri": f"{hostile.host}/released@{index['digest']}",
        "digest": index["digest"],
        "tags": ["1.0", "stable"],
        "how": "copied",
    }
    assert hostile.digests("released") == everything
    tags = {tag for where, tag in hostile.manifests if where == "released" and ":" not in tag}
    assert tags == {"1.0", claim_tag("1.0"), "stable", cosign}
    assert not [path for method, path, _ in hostile.seen if method == "PATCH"], (
        "within a registry nothing is sent"
    )


def test_a_copy_to_another_registry(hostile: Hostile) -> None:
    image = hostile.put_image("team/image", os.urandom(1000))
    note = hostile.attach("team/image", image, "application/x-note", b"hello")
    with hostile_registry() as other:
        assert main(["promote", f"{hostile.host}/team/image:1.0", f"{other.host}/released"]) == 0
        assert other.digests("released") == {image["digest"], note["digest"]}
        assert ("released", "1.0") in other.manifests
        # Once more: nothing is sent.
        other.seen.clear()
        assert main(["promote", f"{hostile.host}/team/image:1.0", f"{other.host}/released"]) == 0
        assert not {method for method, _, _ in other.seen} & {"PATCH", "PUT"}


def test_a_tag_of_the_source_does_not_move(
    hostile: Hostile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keep in the copy a tag that was pushed as one that never moves, although its name looks
    different.
    """
    first = hostile.put_image("one", b"one", tag="release1")
    second = hostile.put_image("two", b"two", tag="release1")
    assert promote(hostile, source="one:release1") == 0
    assert promote(hostile, source="two:release1") == RegistryError.exit_status
    captured = capsys.readouterr()
    assert (
        f"released:release1 is another image ({first['digest']}), and this tag never moves"
        in captured.err
    )
    assert "--moving-tag" in captured.err
    assert hostile.manifests["released", "release1"] == hostile.manifests["one", "release1"]
    # With the option the tag moves.
    assert promote(hostile, "--moving-tag", "release1", source="two:release1") == 0
    assert digest_of(hostile.manifests["released", "release1"][1]) == second["digest"]


def test_a_fixed_tag_that_another_one_set_meanwhile_is_an_error(
    hostile: Hostile, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile.put_image("team/image", b"mine")
    other = hostile.put_image("released", b"of somebody else", tag="")

    def race(request: Request) -> bool:
        if request.command == "PUT" and "/released/manifests/sha256" in request.path:
            hostile.manifests["released", "1.0"] = hostile.manifests["released", other["digest"]]
        return False

    hostile.fault = race
    assert promote(hostile) == RegistryError.exit_status
    assert f"released:1.0 is another image ({other['digest']})" in capsys.readouterr().err
    assert digest_of(hostile.manifests["released", "1.0"][1]) == other["digest"]


def test_a_registry_that_fails_at_30_percent_of_requests(hostile: Hostile) -> None:
    """Too busy for some, broken for others: 429 and 500 in turn."""
    chance = random.Random(2026)
    image = hostile.put_image("team/image", os.urandom(1000))
    note = hostile.attach("team/image", image, "application/x-note", b"hello")

    def fails(request: Request) -> bool:
        return chance.random() < 0.3 and request.answer(chance.choice([429, 500]), Retry_After="0")

    patient = Registries(
        HostSettings(pip=PipSettings()), patience=Patience(attempts=60, pause=0.001)
    )
    with hostile_registry() as other, patient as registries:
        hostile.fault = other.fault = fails
        promote_image(
            f"{hostile.host}/team/image:1.0", [f"{other.host}/released"], Tags(), registries
        )
        assert other.digests("released") == {image["digest"], note["digest"]}


def test_a_registry_that_dies_and_comes_back(hostile: Hostile, registries: Registries) -> None:
    """The registry breaks the connection in mid-answer, some times."""
    image = hostile.put_image("team/image", os.urandom(1 << 20))
    broken = itertools.count()

    def breaks(request: Request) -> bool:
        if request.command != "GET" or "/blobs/" not in request.path or next(broken) > 1:
            return False
        request.send_response(200)
        request.send_header("Content-Length", str(1 << 20))
        request.end_headers()
        request.wfile.write(b"half of it")
        return True

    hostile.fault = breaks
    with hostile_registry() as other:
        promote_image(
            f"{hostile.host}/team/image:1.0", [f"{other.host}/released"], Tags(), registries
        )
        assert other.digests("released") == {image["digest"]}
    assert next(broken) > 2


def test_a_registry_that_stays_away(
    registries: Registries, lines: list[str], hostile: Hostile
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        host = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
        RegistryUnreachableError, match=r"failed 3 times: .*Connection refused"
    ) as caught:
        promote_image(f"{host}/team/image:1.0", [f"{hostile.host}/a"], Tags(), registries)
    assert "repeat the command" in caught.value.hint
    (line,) = lines
    assert "attempt 2 of 3" in line


def test_a_registry_that_is_silent_is_given_up(
    hostile: Hostile,
) -> None:
    patience = Patience(attempts=3, pause=0.01, silence=0.5)

    def silent(request: Request) -> bool:
        return request.path != "/v2/" and not request.rfile.read(1)

    hostile.fault = silent
    begun = start_clock()
    with (
        Registries(HostSettings(pip=PipSettings()), patience=patience) as registries,
        pytest.raises(RegistryUnreachableError, match=r"failed 3 times: .*timed out"),
    ):
        registries.find_manifest(f"{hostile.host}/team/image", "1.0")
    assert_within(60, begun, time.monotonic())


ESCAPES = "\x1b[2J\x1b]0;owned\x07"


@pytest.mark.parametrize(
    ("status", "code", "words", "hint"),
    [
        (401, "UNAUTHORIZED", "rejects the user or password", "docker login"),
        (403, "DENIED", "permission denied by", "the right to push"),
        (405, "UNSUPPORTED", "is read-only", "another repository"),
        (404, "NAME_UNKNOWN", "not found at", "check the name"),
        (401, "token EXPIRED", "rejects the user or password", "log in again"),
    ],
)
def test_a_refusal_is_one_clear_error_without_a_secret_or_an_escape(
    hostile: Hostile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    status: int,
    code: str,
    words: str,
    hint: str,
) -> None:
    docker_configuration(tmp_path / "docker", {hostile.host: (USER, PASSWORD)})
    hostile.put_image("team/image", b"a layer")
    problem = as_json(
        {"errors": [{"code": code, "message": f"{ESCAPES} no, {PASSWORD} and {BASIC}"}]}
    )

    def refuse(request: Request) -> bool:
        if request.command in ("POST", "PUT"):
            return request.answer(
                status, problem, Content_Type="application/json", WWW_Authenticate='Basic realm="x"'
            )
        return False

    hostile.fault = refuse
    assert promote(hostile, "--format", "json") == 15
    captured = capsys.readouterr()
    assert words in captured.err
    assert hint in captured.err
    assert captured.err.count("error:") == 1
    assert "\x1b" not in captured.err + captured.out
    assert "\x07" not in captured.err + captured.out
    assert json.loads(captured.out)["exit_status"] == 15
    for secret in (PASSWORD, BASIC.partition(" ")[2]):
        assert secret not in captured.err + captured.out


def test_a_registry_that_wants_a_login(
    hostile: Hostile, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hostile.put_image("team/image", b"a layer")
    hostile.login = True
    assert promote(hostile) == 15
    assert f"{hostile.host} requires a login, and this machine has none" in capsys.readouterr().err
    docker_configuration(tmp_path / "docker", {hostile.host: (USER, "another word")})
    assert promote(hostile) == 15
    assert "rejects the user or password" in capsys.readouterr().err
    docker_configuration(tmp_path / "docker", {hostile.host: (USER, PASSWORD)})
    assert promote(hostile) == 0


@pytest.mark.parametrize("origin", ["helper", "netrc"])
def test_where_a_login_comes_from(
    hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    if origin == "helper":
        program = tmp_path / "bin" / "docker-credential-of-the-tests"
        program.parent.mkdir()
        answer = json.dumps({"ServerURL": hostile.host, "Username": USER, "Secret": PASSWORD})
        program.write_text(f"#!/bin/sh\ncat >/dev/null\necho '{answer}'\n", encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        configuration = {"credHelpers": {hostile.host: "of-the-tests"}}
        (tmp_path / "docker" / "config.json").write_text(
            json.dumps(configuration), encoding="utf-8"
        )
    else:
        line = f"machine 127.0.0.1 login {USER} password {PASSWORD}\n"
        (tmp_path / "netrc").write_text(line, encoding="utf-8")
    hostile.login = True
    hostile.put_image("team/image", b"a layer")
    assert promote(hostile) == 0


def test_a_credential_helper_that_fails(
    hostile: Hostile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configuration = {"credHelpers": {hostile.host: "that-nobody-installed"}}
    (tmp_path / "docker" / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
    hostile.put_image("team/image", b"a layer")
    hostile.login = True
    assert promote(hostile) == 15
    output = capsys.readouterr().err
    assert f"docker's credential helper for {hostile.host} failed" in output
    assert "docker-credential-that-nobody-installed" in output


@pytest.mark.parametrize("place", ["a name", "loopback"])
def test_no_login_and_no_layer_goes_to_an_address_without_tls(
    place: str,
    hostile: Hostile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """A registry behind a proxy that ends TLS announces ``http:`` addresses for its uploads.

    Go's programs use no proxy for loopback addresses, so the registry is asked first.
    """
    fixture_name = "named" if place == "a name" else "authority"
    fixture = request.getfixturevalue(fixture_name)
    name, authority = fixture if place == "a name" else ("127.0.0.1", fixture)
    image = hostile.put_image("team/image", os.urandom(1000))
    with hostile_registry(name=name) as clear, hostile_registry(authority, name=name) as other:
        docker_configuration(
            tmp_path / "docker", {other.host: (USER, PASSWORD), clear.host: (USER, PASSWORD)}
        )
        other.login = True
        assert main(["promote", f"{hostile.host}/team/image:1.0", f"{other.host}/good"]) == 0
        assert image["digest"] in other.digests("good")
        other.location = lambda own: own.replace(other.url, clear.url)
        assert main(["promote", f"{hostile.host}/team/image:1.0", f"{other.host}/released"]) == 15
        assert clear.seen == []
        output = capsys.readouterr().err
        assert f"{other.host} sends us to an address without TLS; nothing was sent there" in output
        assert "X-Forwarded-Proto" in output


def test_no_login_goes_to_a_token_service_without_tls(
    named: tuple[str, Authority], hostile: Hostile, tmp_path: Path
) -> None:
    name, authority = named
    with hostile_registry(name=name) as clear, hostile_registry(authority, name=name) as other:
        docker_configuration(tmp_path / "docker", {other.host: (USER, PASSWORD)})
        challenge = f'Bearer realm="{clear.url}/token",service="here"'
        other.fault = lambda request: request.answer(401, WWW_Authenticate=challenge)
        assert main(["promote", f"{other.host}/team/image:1.0", f"{hostile.host}/released"]) == 15
        assert clear.seen == []


def test_a_certificate_that_is_not_trusted(
    hostile: Hostile,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with hostile_registry(authority) as other:
        docker_configuration(tmp_path / "docker", {other.host: (USER, PASSWORD)})
        assert main(["promote", f"{other.host}/team/image:1.0", f"{hostile.host}/released"]) == 15
        output = capsys.readouterr().err
        assert f"{other.host}: certificate not trusted (" in output
        assert f"/etc/docker/certs.d/{other.host}/ca.crt" in output
        assert other.seen == []


DEEP = b"[" * 200_000


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("manifests", b"[[[["),
        ("manifests", DEEP),
        ("manifests", b"<html>"),
        ("manifests", b'{"layers": 5, "manifests": 7}'),
        ("manifests", b'{"manifests": [{"digest": "1.0"}]}'),
        ("referrers", b"[]"),
        ("referrers", DEEP),
        ("referrers", b"<html>"),
        ("referrers", b'{"manifests": [7]}'),
        ("referrers", b'{"manifests": [{"artifactType": "application/x-note"}]}'),
        (
            "referrers",
            (
                b'{"manifests": [{"mediaType": "x", "size": 5, "digest":'
                b' "sha256:../../../etc/passwd"}]}'
            ),
        ),
    ],
)
def test_a_malformed_answer_is_an_error_and_no_traceback(
    hostile: Hostile, capsys: pytest.CaptureFixture[str], path: str, content: bytes
) -> None:
    hostile.put_image("team/image", b"a layer")

    def lie(request: Request) -> bool:
        is_lie = f"/{path}/" in request.path and "team/image" in request.path
        kind = {"referrers": INDEX, "manifests": "application/vnd.oci.image.manifest.v1+json"}[path]
        return is_lie and request.answer(
            200, content, Content_Type=kind, Docker_Content_Digest=digest_of(content)
        )

    hostile.fault = lie
    assert promote(hostile) == 15
    output = capsys.readouterr().err
    assert output.count("error:") == 1
    assert "Traceback" not in output
    assert ("released", "1.0") not in hostile.manifests


@pytest.mark.parametrize("length", [True, False], ids=["announced", "endless"])
def test_an_answer_without_end_is_given_up(
    hostile: Hostile, registries: Registries, monkeypatch: pytest.MonkeyPatch, length: bool
) -> None:
    monkeypatch.setattr(protocol, "LARGEST", 1 << 20)
    digest = digest_of(b"")
    sent = 0

    def endless(request: Request) -> bool:
        nonlocal sent
        if "/blobs/" not in request.path and "/manifests/" not in request.path:
            return False
        request.send_response(200)
        request.send_header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
        request.send_header("Docker-Content-Digest", digest)
        if length:
            request.send_header("Content-Length", str(1 << 40))
        request.end_headers()
        while request.command == "GET" and sent < 1 << 30:
            sent += request.wfile.write(b" " * (1 << 16))
        return True

    hostile.fault = endless
    for ask in (
        lambda: registries.read_manifest(f"{hostile.host}/a", "1"),
        lambda: registries.read_blob(f"{hostile.host}/a", digest),
    ):
        with pytest.raises(RegistryError):
            ask()
    assert sent < 1 << 30


def test_without_oras_the_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["promote", "registry.example/a:1", "registry.example/b"]) == 10
    output = capsys.readouterr().err
    assert "there is no `oras` program on PATH" in output
    assert "apt-get install oras" in output


def test_ctrl_c_in_the_middle_of_a_copy(hostile: Hostile) -> None:
    hostile.put_image("team/image", os.urandom(1000))
    source = f"{hostile.host}/team/image:1.0"

    typed: list[int] = []

    def wait(request: Request) -> bool:
        if "/blobs/" in request.path and request.command == "GET":
            typed.append(1)
            if len(typed) == 1:
                mine.type("\x03")
            request.rfile.read(1)
        return False

    with hostile_registry() as other:
        hostile.fault = wait
        command = (
            sys.executable,
            str(ROOT / "build.py"),
            "promote",
            source,
            f"{other.host}/released",
        )
        with Terminal(command, echo=True) as mine:
            assert mine.finish() == 130
            assert mine.shown[-1] == "interrupted: everything that was started has been stopped"
            assert not mine.cursor_is_hidden()
        assert ("released", "1.0") not in other.manifests


def test_a_token_that_expires_is_asked_for_again_and_the_login_is_sent_for_tokens_only(
    hostile: Hostile, registries: Registries, tmp_path: Path
) -> None:
    docker_configuration(tmp_path / "docker", {hostile.host: (USER, PASSWORD)})
    image = hostile.put_image("team/image", b"a layer")
    tokens_given: list[str] = []

    def tokens(request: Request) -> bool:
        if request.path.startswith("/token"):
            tokens_given.append(f"t0ken-number-{len(tokens_given)}")
            return request.answer(200, as_json({"token": tokens_given[-1]}))
        if request.headers.get("Authorization") in [f"Bearer {token}" for token in tokens_given]:
            return False
        return request.answer(
            401, WWW_Authenticate=f'Bearer realm="{hostile.url}/token",service="here"'
        )

    hostile.fault = tokens
    repository = f"{hostile.host}/team/image"
    assert registries.read_manifest(repository, "1.0").digest == image["digest"]
    assert [login for _, path, login in hostile.seen if path.startswith("/token")] == [BASIC]
    assert BASIC not in [login for _, path, login in hostile.seen if not path.startswith("/token")]
    tokens_given.clear()
    assert registries.read_manifest(repository, "1.0").digest == image["digest"]


def test_a_registry_that_sends_another_manifest_than_it_says(
    hostile: Hostile, registries: Registries
) -> None:
    image = hostile.put_image("team/image", b"a layer")
    kind, content = hostile.manifests["team/image", image["digest"]]
    hostile.manifests["team/image", image["digest"]] = kind, content + b" "
    with pytest.raises(RegistryError):
        registries.find_manifest(f"{hostile.host}/team/image", image["digest"])


def test_a_registry_whose_name_does_not_resolve(registries: Registries) -> None:
    if shutil.which("oras") is None:
        pytest.skip("NOT TESTED: no oras (tools/set-up-engine all)")
    with pytest.raises(RegistryUnreachableError, match=r"^cannot resolve registry\.invalid \("):
        registries.find_manifest("registry.invalid/vendor/base", "1.0")
