"""Digests of base images: from a real registry where Debian's is installed, and from one that gives tokens."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from lock.servers import Request, Server, make_authority, serving
from trainworks.errors import RegistryError
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.registry.client import (
    DEFAULT_HOST,
    Patience,
    Registries,
    RegistryUnreachableError,
    image_digest,
    split_reference,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def registries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registries]:
    """Give a machine without logins."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with Registries(HostSettings(pip=PipSettings()), patience=Patience(attempts=1, connect_seconds=10)) as mine:
        yield mine


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("debian", (DEFAULT_HOST, "library/debian", "latest")),
        ("ubuntu:20.04", (DEFAULT_HOST, "library/ubuntu", "20.04")),
        ("nvidia/cuda:11.3.1-base", (DEFAULT_HOST, "nvidia/cuda", "11.3.1-base")),
        ("public.ecr.aws/amazonlinux/amazonlinux:2023", ("public.ecr.aws", "amazonlinux/amazonlinux", "2023")),
        ("127.0.0.1:5000/a/b", ("127.0.0.1:5000", "a/b", "latest")),
        ("localhost/a:1", ("localhost", "a", "1")),
    ],
)
def test_references(reference: str, parts: tuple[str, str, str]) -> None:
    assert split_reference(reference) == parts


MANIFEST = json.dumps({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []})
DIGEST = f"sha256:{hashlib.sha256(MANIFEST.encode()).hexdigest()}"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Run Debian's docker-registry on loopback; give its HOST:PORT."""
    program = shutil.which("docker-registry") or shutil.which(ROOT / ".cache/registry/usr/bin/docker-registry")
    if program is None:
        pytest.skip(
            "no docker-registry (tools/set-up-engine all): the protocol is tried with the test's own server only"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    configuration = tmp_path / "registry.yml"
    storage = tmp_path / "storage"
    configuration.write_text(
        f"version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '{address}'}}\n"
        f"storage: {{filesystem: {{rootdirectory: '{storage}'}}}}\n",
        encoding="utf-8",
    )
    process = subprocess.Popen((program, "serve", str(configuration)), stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                requests.get(f"http://{address}/v2/", timeout=5)
                break
            except requests.ConnectionError:
                assert process.poll() is None, "the registry ended"
                assert time.monotonic() < deadline, "the registry does not answer"
        yield address
    finally:
        process.terminate()
        process.wait(30)


def test_a_real_registry(registry: str, registries: Registries) -> None:
    kind = {"Content-Type": "application/vnd.oci.image.index.v1+json"}
    address = f"http://{registry}/v2/vendor/base/manifests/1.0"
    assert requests.put(address, data=MANIFEST, headers=kind, timeout=10).status_code == 201
    assert image_digest(f"{registry}/vendor/base:1.0", registries) == DIGEST
    with pytest.raises(RegistryError, match="/vendor/base has no 9"):
        image_digest(f"{registry}/vendor/base:9", registries)


def host_of(server: Server) -> str:
    return server.url.partition("://")[2]


def serve_manifest(server: Server, *, digest: str = DIGEST, token: str = "") -> None:
    def manifest(request: Request) -> None:
        if token and request.headers.get("Authorization") != f"Bearer {token}":
            realm = f'Bearer realm="{server.url}/token",service="here",scope="repository:vendor/base:pull"'
            request.send_response(401)
            request.send_header("WWW-Authenticate", realm)
            request.end_headers()
            return
        assert "application/vnd.oci.image.index.v1+json" in request.headers["Accept"]
        request.send_response(200)
        request.send_header("Docker-Content-Digest", digest)
        request.end_headers()
        request.wfile.write(MANIFEST.encode())

    def give_token(request: Request) -> None:
        assert request.path == "/token?service=here&scope=repository%3Avendor%2Fbase%3Apull"
        request.send_response(200)
        request.end_headers()
        request.wfile.write(json.dumps({"token": "secret"}).encode())

    server.serve("/v2/vendor/base/manifests/1.0", manifest)
    server.serve("/token", give_token)


def test_a_registry_that_gives_tokens(plain_server: Server, registries: Registries, tmp_path: Path) -> None:
    """A login for the same host is sent for the token only, which asks for the right to read and no more."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password word\n", encoding="utf-8")
    serve_manifest(plain_server, token="secret")
    assert image_digest(f"{host_of(plain_server)}/vendor/base:1.0", registries) == DIGEST
    assert [(request.path, request.user) for request in plain_server.seen] == [
        ("/v2/vendor/base/manifests/1.0", ""),
        ("/token", "Basic dXNlcjp3b3Jk"),
        ("/v2/vendor/base/manifests/1.0", "Bearer secret"),
    ]


def test_a_registry_that_sends_something_else_than_it_says(plain_server: Server, registries: Registries) -> None:
    said = f"sha256:{'0' * 64}"
    serve_manifest(plain_server, digest=said)
    with pytest.raises(RegistryError, match=f"announces {said} and sends {DIGEST}"):
        image_digest(f"{host_of(plain_server)}/vendor/base:1.0", registries)


def test_a_registry_whose_name_does_not_resolve(registries: Registries) -> None:
    with pytest.raises(RegistryUnreachableError, match=r"^cannot resolve registry\.invalid \("):
        image_digest("registry.invalid/vendor/base:1.0", registries)


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "not trusted"])
def test_a_registry_on_this_machine_with_a_certificate(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registries: Registries
) -> None:
    authority = make_authority(tmp_path)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.bundle))
    with serving(authority) as server:
        server.serve("/v2/vendor/base/manifests/1.0", MANIFEST.encode())
        reference = f"{host_of(server)}/vendor/base:1.0"
        if trusted:
            assert image_digest(reference, registries) == DIGEST
            return
        with pytest.raises(RegistryError, match=r"certificate not trusted .*CERTIFICATE_VERIFY_FAILED") as caught:
            image_digest(reference, registries)
        assert caught.value.message.startswith(f"{host_of(server)}: ")
        assert "/ca.crt" in caught.value.hint
