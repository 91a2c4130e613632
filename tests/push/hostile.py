"""A registry in memory with the behaviour of a test: it fails, pages, slows down, sends elsewhere,
or lies.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from push.support import PASSWORD, USER
from trainworks_testing.certificates import Authority

IMAGE = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

Fault = Callable[["Request"], bool]
"""Answers a request itself, or returns ``False``."""


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def as_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


@dataclass
class Hostile:
    """A registry: its content, the requests to it, and its behaviour.

    Attributes:
        login: Whether the registry wants the login of the tests.
        deletes: Whether the registry removes manifests; Debian's does not, unless it is told to.
        page: How many referrers the registry lists at once; 0: all.
        fault: Comes first at each request.
        location: The address that an upload goes to, given that of its own.
        seen: Method, path and ``Authorization`` of each request.
    """

    url: str = ""
    login: bool = False
    deletes: bool = False
    page: int = 0
    fault: Fault = lambda _request: False
    location: Callable[[str], str] = lambda own: own
    blobs: dict[tuple[str, str], bytes] = field(default_factory=dict)
    manifests: dict[tuple[str, str], tuple[str, bytes]] = field(default_factory=dict)
    seen: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    def put_blob(self, name: str, content: bytes) -> dict[str, Any]:
        """Have a blob; return its descriptor without a type."""
        self.blobs[name, digest_of(content)] = content
        return {"digest": digest_of(content), "size": len(content)}

    def put_manifest(self, name: str, value: Mapping[str, Any], *tags: str) -> dict[str, Any]:
        """Have a manifest; return its descriptor."""
        content = as_json(value)
        kind = str(value["mediaType"])
        for reference in (digest_of(content), *tags):
            self.manifests[name, reference] = kind, content
        return {"mediaType": kind, "digest": digest_of(content), "size": len(content)}

    def put_image(self, name: str, *layers: bytes, tag: str = "1.0") -> dict[str, Any]:
        """Have a small image; return its descriptor."""
        kind = "application/vnd.oci.image.config.v1+json"
        configuration = as_json(
            {"rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]}}
        )
        rows = [
            {**self.put_blob(name, layer), "mediaType": "application/vnd.oci.image.layer.v1.tar"}
            for layer in layers
        ]
        config = {**self.put_blob(name, configuration), "mediaType": kind}
        value = {"schemaVersion": 2, "mediaType": IMAGE, "config": config, "layers": rows}
        return self.put_manifest(name, value, tag)

    def attach(
        self, name: str, subject: Mapping[str, Any], kind: str, content: bytes
    ) -> dict[str, Any]:
        """Attach a file to a manifest; return the descriptor of the attachment."""
        empty = {**self.put_blob(name, b"{}"), "mediaType": "application/vnd.oci.empty.v1+json"}
        value = {
            "schemaVersion": 2,
            "mediaType": IMAGE,
            "artifactType": kind,
            "config": empty,
            "subject": dict(subject),
            "layers": [{**self.put_blob(name, content), "mediaType": kind}],
        }
        return self.put_manifest(name, value)

    def referrers(self, name: str, digest: str) -> list[dict[str, Any]]:
        """Return the manifests that refer to a digest."""
        descriptors = {}
        for (where, _), (kind, content) in list(self.manifests.items()):
            value = json.loads(content)
            if where == name and (value.get("subject") or {}).get("digest") == digest:
                descriptors[digest_of(content)] = {
                    "mediaType": kind,
                    "digest": digest_of(content),
                    "size": len(content),
                    "artifactType": value.get("artifactType", ""),
                }
        return [descriptors[digest] for digest in sorted(descriptors)]

    def digests(self, name: str) -> set[str]:
        """Return the digests of all manifests of a repository but the claims of tags."""
        return {
            reference
            for (where, reference), (_, content) in self.manifests.items()
            if where == name and ":" in reference and b"trainworks.claim" not in content
        }


class Request(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"
    """A client that begins with TLS gets an answer that names HTTP, as from other servers."""

    server: Listener

    @property
    def mine(self) -> Hostile:
        return self.server.mine

    def answer(self, status: int, content: bytes = b"", **headers: str) -> bool:
        """Send a whole answer; return ``True``."""
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        return True

    def handle_one_request(self) -> None:
        # Who gives up on us closes the connection.
        try:
            super().handle_one_request()
        except (ConnectionError, ssl.SSLError):
            self.close_connection = True

    def do(self) -> None:
        """Answer as a registry."""
        mine = self.mine
        length = int(self.headers.get("Content-Length") or 0)
        parts = urlsplit(self.path)
        mine.seen.append((self.command, self.path, self.headers.get("Authorization", "")))
        # The bytes that a fault leaves unread of the body are in the way of the next request: its
        # answer says that this is the connection's last, or a client's next request may meet the
        # end of it.
        closes_after, self.close_connection = self.close_connection, True
        if mine.fault(self):
            return
        self.close_connection = closes_after
        body = self.rfile.read(length) if length else self._chunks()
        if mine.login and self.headers.get("Authorization") != BASIC:
            self.answer(401, WWW_Authenticate='Basic realm="here"')
            return
        if parts.path == "/v2/":
            self.answer(200, b"{}")
            return
        name, kind, reference = self._split(parts.path)
        if kind == "manifests" and self.command == "PUT":
            media = self.headers.get("Content-Type", "")
            for key in (reference, digest_of(body)):
                mine.manifests[name, key] = media, body
            more = (
                {"OCI_Subject": json.loads(body)["subject"]["digest"]}
                if b'"subject"' in body
                else {}
            )
            self.answer(201, Docker_Content_Digest=digest_of(body), **more)
        elif kind == "manifests" and self.command == "DELETE":
            self._delete(name, reference)
        elif kind == "manifests":
            entry = mine.manifests.get((name, reference))
            accepted = [
                media_type.strip() for media_type in (self.headers.get("Accept") or "").split(",")
            ]
            # As Debian's registry: a media type that a client does not accept by name is not sent.
            if entry is None or entry[0] not in accepted:
                self.answer(
                    404,
                    as_json(
                        {"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}
                    ),
                )
            else:
                self.answer(
                    200, entry[1], Content_Type=entry[0], Docker_Content_Digest=digest_of(entry[1])
                )
        elif kind == "referrers":
            self._referrers(name, reference, int(parse_qs(parts.query).get("from", ["0"])[0]))
        elif kind == "blobs" and self.command in ("GET", "HEAD"):
            content = mine.blobs.get((name, reference))
            if content is None:
                self.answer(404)
            else:
                self.answer(
                    200,
                    content,
                    Content_Type="application/octet-stream",
                    Docker_Content_Digest=reference,
                )
        elif kind == "uploads":
            self._upload(name, parse_qs(parts.query), body)
        else:
            self.answer(404)

    def _delete(self, name: str, digest: str) -> None:
        """Remove a manifest with its tags, if this registry does that.

        No registry of this kind removes a tag alone.
        """
        mine = self.mine
        remaining = {
            key: row
            for key, row in mine.manifests.items()
            if key[0] != name or digest_of(row[1]) != digest
        }
        if not mine.deletes or ":" not in digest:
            self.answer(
                405, as_json({"errors": [{"code": "UNSUPPORTED", "message": "no deletion"}]})
            )
        else:
            mine.manifests = remaining
            self.answer(202)

    def _chunks(self) -> bytes:
        body: list[bytes] = []
        while self.headers.get("Transfer-Encoding") == "chunked":
            size = int(self.rfile.readline(), 16)
            body.append(self.rfile.read(size))
            self.rfile.readline()
            if not size:
                break
        return b"".join(body)

    @staticmethod
    def _split(path: str) -> tuple[str, str, str]:
        """Return repository, kind and reference of ``/v2/NAME/KIND/REFERENCE``."""
        parts = path.removeprefix("/v2/").split("/")
        if "uploads" in parts:
            return "/".join(parts[: parts.index("uploads") - 1]), "uploads", parts[-1]
        return "/".join(parts[:-2]), parts[-2] if len(parts) > 1 else "", parts[-1]

    def _referrers(self, name: str, digest: str, start: int) -> None:
        mine = self.mine
        rows = mine.referrers(name, digest)
        end = start + mine.page if mine.page else len(rows)
        more = (
            {"Link": f'<{self.path.split("?")[0]}?from={end}>; rel="next"'}
            if end < len(rows)
            else {}
        )
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": rows[start:end]}
        self.answer(200, as_json(index), Content_Type=INDEX, **more)

    def _upload(self, name: str, query: Mapping[str, list[str]], body: bytes) -> None:
        mine = self.mine
        if self.command == "POST":
            source, digest = query.get("from", [""])[0], query.get("mount", [""])[0]
            if (source, digest) in mine.blobs:
                mine.blobs[name, digest] = mine.blobs[source, digest]
                self.answer(201, Docker_Content_Digest=digest)
                return
            with self.server.lock:
                self.server.uploads += 1
                number = self.server.uploads
            self.answer(202, Location=mine.location(f"{mine.url}/v2/{name}/blobs/uploads/{number}"))
            return
        path = urlsplit(self.path).path
        content = self.server.parts.get(path, b"") + body
        if self.command == "PATCH":
            self.server.parts[path] = content
            self.answer(
                202, Location=mine.location(f"{mine.url}{path}"), Range=f"0-{len(content) - 1}"
            )
            return
        if self.command == "DELETE":
            self.server.parts.pop(path, None)
            self.answer(204)
            return
        digest = query["digest"][0]
        if digest_of(content) != digest:
            self.answer(
                400, as_json({"errors": [{"code": "DIGEST_INVALID", "message": "another digest"}]})
            )
            return
        mine.blobs[name, digest] = content
        self.answer(201, Docker_Content_Digest=digest)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do  # noqa: N815 - the base class's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""


class Listener(ThreadingHTTPServer):
    """The socket and its threads."""

    daemon_threads = True

    def __init__(self, mine: Hostile, authority: Authority | None, address: str) -> None:
        self.mine = mine
        self.lock = threading.Lock()
        self.uploads = 0
        self.parts: dict[str, bytes] = {}
        super().__init__((address, 0), Request)
        if authority is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(authority.server, authority.key)
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    def handle_error(self, *_arguments: object) -> None:
        """Say nothing: clients may leave when they like."""


@contextlib.contextmanager
def hostile_registry(
    authority: Authority | None = None, *, name: str = "127.0.0.1"
) -> Iterator[Hostile]:
    """Run such a registry for the time of the block.

    Args:
        name: The registry's name for clients; the server listens on loopback.
    """
    mine = Hostile()
    listener = Listener(mine, authority, "127.0.0.1")
    mine.url = f"http{'s' if authority else ''}://{name}:{listener.server_address[1]}"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield mine
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
