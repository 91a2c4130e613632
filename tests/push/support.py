"""A real registry on loopback, Debian's, with TLS and a login.

The registry can be killed, restarted and made read-only.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trainworks_testing.certificates import Authority
from trainworks_testing.ports import free_port

ROOT = Path(__file__).resolve().parents[2]

TOOLS = ROOT / ".cache/peers/registry-tools/usr/bin"
"""Where tools/set-up-engine puts oras and cosign."""

USER, PASSWORD = "deliverer", "pa55word-of-the-test-registry"
LOGINS = (
    f"{USER}:$2y$05$abcdefghijklmnopqrstuuqIc1PehSOOC0lHRicFlE4z.QzEUhjRK\n"
    "AWS:$2y$05$abcdefghijklmnopqrstuu/4ofrUS75HrKu6f.iuRo0I/XlrmpqlC\n"
)
"""The registry's file of users: this one's password, and the one that moto gives for ECR.

Bcrypt, made by htpasswd.
"""


def program() -> str:
    """Return docker-registry's program; skips where there is none."""
    program_path = shutil.which("docker-registry") or shutil.which(
        ROOT / ".cache/registry/usr/bin/docker-registry"
    )
    if program_path is None:
        pytest.skip("no docker-registry (tools/set-up-engine all): pushes are not tried")
    return program_path


def wait_until_it_answers(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until a registry on loopback listens; fails with its log if it ends first."""
    deadline = time.monotonic() + 30
    while True:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", port), 5),
        ):
            return
        # Another program's start has no event to wait for.
        time.sleep(0.005)
        assert process.poll() is None, f"the registry ended: {log.read_text(encoding='utf-8')}"
        assert time.monotonic() < deadline, "the registry does not answer"


@dataclass
class RegistryServer:
    """A registry with a folder of its own, which outlives the process."""

    folder: Path
    authority: Authority
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Return the registry's own log: each request with its status."""
        return (self.folder / "log").read_text(encoding="utf-8")

    def start(self, *, read_only: bool = False) -> None:
        (self.folder / "htpasswd").write_text(LOGINS, encoding="utf-8")
        configuration = {
            "version": 0.1,
            "log": {"level": "error", "accesslog": {"disabled": False}},
            "http": {
                "addr": self.host,
                "secret": "of the tests",
                "tls": {"certificate": str(self.authority.server), "key": str(self.authority.key)},
            },
            "auth": {"htpasswd": {"realm": "here", "path": str(self.folder / "htpasswd")}},
            "storage": {
                "filesystem": {"rootdirectory": str(self.folder / "storage")},
                "maintenance": {"readonly": {"enabled": read_only}},
            },
        }
        # JSON is YAML.
        path = self.folder / "registry.yml"
        path.write_text(json.dumps(configuration), encoding="utf-8")
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen((program(), "serve", str(path)), stdout=log, stderr=log)
        wait_until_it_answers(self.process, self.port, self.folder / "log")

    def kill(self) -> None:
        """End the registry without a chance to put anything in order."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None

    def requests(self, method: str, path: str = "") -> list[str]:
        """Return the lines of its log for requests of this kind."""
        return [line for line in self.log.splitlines() if f'"{method} ' in line and path in line]

    def received(self) -> int:
        """Return how many bytes of blobs it has, finished or not."""
        storage = self.folder / "storage"
        total = 0
        for path in storage.rglob("data") if storage.exists() else ():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total


@contextlib.contextmanager
def registry_server(folder: Path, authority: Authority) -> Iterator[RegistryServer]:
    """Run a registry for the time of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = RegistryServer(folder, authority)
    mine.start()
    try:
        yield mine
    finally:
        mine.kill()


def docker_configuration(folder: Path, logins: dict[str, tuple[str, str]]) -> Path:
    """Write the file that ``docker login`` would have written; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    auths = {
        host: {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}
        for host, (user, password) in logins.items()
    }
    (folder / "config.json").write_text(json.dumps({"auths": auths}), encoding="utf-8")
    return folder


class Tunnel:
    """An HTTP proxy that leads every host's port 443 to one address: a name of
    AWS is answered by our own registry.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.requested_hosts: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                more = client.recv(4096)
                if not more:
                    return
                head += more
            self.requested_hosts.append(head.split()[1].decode())
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                client.sendall(b"HTTP/1.1 200 here it is\r\n\r\n")
                back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
                back.start()
                self._pump(client, server)
                back.join(30)

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                target.sendall(content)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        # A thread that waits at a closed socket would take the connections of
        # the next one that gets its number.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
