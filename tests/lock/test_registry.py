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

from lock.servers import Request, Server
from trainworks.errors import LockError
from trainworks.host.downloads import Client, Limits, UnreachableError
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.registry.digest import DEFAULT_REGISTRY, image_digest, split_reference

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(HostSettings(pip=PipSettings()), limits=Limits(attempts=1, pause=0, timeout=10)) as mine:
        yield mine


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("debian", (DEFAULT_REGISTRY, "library/debian", "latest")),
        ("ubuntu:20.04", (DEFAULT_REGISTRY, "library/ubuntu", "20.04")),
        ("nvidia/cuda:11.3.1-base", (DEFAULT_REGISTRY, "nvidia/cuda", "11.3.1-base")),
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


def test_a_real_registry(registry: str, client: Client) -> None:
    kind = {"Content-Type": "application/vnd.oci.image.index.v1+json"}
    address = f"http://{registry}/v2/vendor/base/manifests/1.0"
    assert requests.put(address, data=MANIFEST, headers=kind, timeout=10).status_code == 201
    assert image_digest(f"{registry}/vendor/base:1.0", client) == DIGEST
    with pytest.raises(UnreachableError, match=r"/v2/vendor/base/manifests/9 answers HTTP 404"):
        image_digest(f"{registry}/vendor/base:9", client)


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


def test_a_registry_that_gives_tokens(
    plain_server: Server, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password for the same host is for asking for the token, and does not replace it."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password word\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(netrc))
    serve_manifest(plain_server, token="secret")
    assert image_digest(f"{host_of(plain_server)}/vendor/base:1.0", client) == DIGEST
    assert [request.user for request in plain_server.seen] == [
        "Basic dXNlcjp3b3Jk",
        "Basic dXNlcjp3b3Jk",
        "Bearer secret",
    ]


def test_a_registry_that_sends_something_else_than_it_says(plain_server: Server, client: Client) -> None:
    said = f"sha256:{'0' * 64}"
    serve_manifest(plain_server, digest=said)
    with pytest.raises(LockError, match=f"says that it sends {said}, and sent {DIGEST}"):
        image_digest(f"{host_of(plain_server)}/vendor/base:1.0", client)


def test_a_registry_that_is_not_there(client: Client) -> None:
    with pytest.raises(UnreachableError, match="cannot be had"):
        image_digest("registry.invalid/vendor/base:1.0", client)
