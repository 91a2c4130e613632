"""Package indexes on loopback, with and without a login, and the distributions that they have."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USER = "somebody"


def wheel_of(name: str, version: str, text: str, *requires: str) -> tuple[str, bytes]:
    """Return name and content of a wheel of one module."""
    information = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": text,
        f"{information}/METADATA": metadata
        + "".join(f"Requires-Dist: {requirement}\n" for requirement in requires),
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{information}/RECORD"] = "".join(
        f"{path},,\n" for path in [*files, f"{information}/RECORD"]
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return f"{name}-{version}-py3-none-any.whl", buffer.getvalue()


def sdist_of(name: str, version: str, setup: str, **files: str) -> tuple[str, bytes]:
    """Return name and content of a source archive that tells its requirements only when its
    setup.py runs.
    """
    stem = f"{name}-{version}"
    metadata = f"Metadata-Version: 1.0\nName: {name}\nVersion: {version}\n"
    texts = {
        "PKG-INFO": metadata,
        "setup.py": setup,
        **{f"{file}.py": text for file, text in files.items()},
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, text in texts.items():
            member = tarfile.TarInfo(f"{stem}/{path}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return f"{stem}.tar.gz", buffer.getvalue()


class Index(ThreadingHTTPServer):
    """A package index on loopback; with a password, for those who have it.

    ``requested_paths`` has the paths of all requests.

    ``says_hashes``: whether its pages say them. Folders of files, and small servers, do not.
    """

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes], password: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.password = dict(files), password
        self.requested_paths: list[str] = []
        self.says_hashes = True

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def simple(self) -> str:
        return f"http://{self.host}/simple/"

    def page(self, names: Iterator[str]) -> str:
        links = []
        for name in names:
            digest = hashlib.sha256(self.files[name]).hexdigest()
            fragment = f"#sha256={digest}" if self.says_hashes else ""
            links.append(f'<a href="/file/{name}{fragment}">{name}</a>')
        return "<!DOCTYPE html><html><body>" + "\n".join(links) + "</body></html>"


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        index = self.server
        index.requested_paths.append(self.path)
        expected = base64.b64encode(f"{USER}:{index.password}".encode()).decode()
        if index.password and self.headers.get("Authorization") != f"Basic {expected}":
            self.answer(401, b"who are you?")
            return
        parts = self.path.strip("/").split("/")
        if parts[0] == "file" and parts[-1] in index.files:
            self.answer(200, index.files[parts[-1]])
        elif parts[0] == "links":
            self.answer(200, index.page(iter(sorted(index.files))).encode())
        else:
            names = [
                name
                for name in sorted(index.files)
                if name.split("-")[0].replace("_", "-") == parts[-1]
            ]
            status = 200 if names else 404
            self.answer(status, index.page(iter(names)).encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="index"')
        kind = "text/html" if body[:1] == b"<" else "application/octet-stream"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving(index: Index) -> Iterator[Index]:
    """Serve until the end."""
    thread = threading.Thread(target=index.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield index
    finally:
        index.shutdown()
        thread.join()
        index.server_close()
