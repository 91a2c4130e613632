"""Share a registry with TLS and a login, and this machine's own login there, among the tests of
pushes.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lock.servers import Server, serving
from push.hostile import Hostile, hostile_registry
from push.support import (
    PASSWORD,
    TOOLS,
    USER,
    RegistryServer,
    docker_configuration,
    registry_server,
)
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.registry.protocol import Patience
from trainworks.registry.tools import Registries
from trainworks_testing.certificates import Authority, make_authority

QUICK = Patience(attempts=3, pause=0.01)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return a certificate authority that only these tests trust.

    Its server may be a registry of ECR too.
    """
    return make_authority(tmp_path_factory.mktemp("authority"), "*.dkr.ecr.eu-west-1.amazonaws.com")


@pytest.fixture
def plain_server() -> Iterator[Server]:
    """Give a server without TLS that answers as a test says."""
    with serving() as mine:
        yield mine


@pytest.fixture
def server(tmp_path: Path, authority: Authority) -> Iterator[RegistryServer]:
    """Give a registry of its own to a test."""
    with registry_server(tmp_path / "registry", authority) as mine:
        yield mine


@pytest.fixture
def other(tmp_path: Path, authority: Authority) -> Iterator[RegistryServer]:
    """Give another registry."""
    with registry_server(tmp_path / "other", authority) as mine:
        yield mine


@pytest.fixture
def hostile(machine: None) -> Iterator[Hostile]:  # noqa: ARG001 - oras is looked for on its PATH
    """Give a registry in memory, without TLS, that a test can spoil; skips without oras."""
    if shutil.which("oras") is None:
        pytest.skip("NOT TESTED: no oras (tools/set-up-engine all)")
    with hostile_registry() as mine:
        yield mine


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a machine that trusts the registries, keeps its caches here, and has no login."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.bundle))
    monkeypatch.setenv("DOCKER_CONFIG", str(docker_configuration(tmp_path / "docker", {})))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("PATH", f"{TOOLS}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def logged_in(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Have docker's login at each registry of the test."""
    names = [name for name in ("server", "other") if name in request.fixturenames]
    hosts = [request.getfixturevalue(name).host for name in names]
    docker_configuration(tmp_path / "docker", dict.fromkeys(hosts, (USER, PASSWORD)))


@pytest.fixture
def lines() -> list[str]:
    """Return the lines that ``registries`` report."""
    return []


@pytest.fixture
def registries(lines: list[str]) -> Iterator[Registries]:
    """Give this machine's way to registries, with little patience."""
    with Registries(HostSettings(pip=PipSettings()), report=lines.append, patience=QUICK) as mine:
        yield mine


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Authority]:
    """Give a name of this machine that is no loopback address in itself, and its certificate."""
    host_name = next(
        (name for name in (socket.gethostname(), "localhost.localdomain") if _is_here(name)), None
    )
    if host_name is None:
        pytest.skip("NOT TESTED: this machine has no name for a loopback address beside localhost")
    folder = tmp_path / "authority"
    folder.mkdir()
    authority = make_authority(folder, host_name)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.bundle))
    return host_name, authority


def _is_here(name: str) -> bool:
    try:
        return socket.gethostbyname(name).startswith("127.")
    except OSError:
        return False
