"""Real servers on loopback for downloads: files with every fault a server can
have, git repositories, TLS.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from trainworks_testing.certificates import Authority

Answer = Callable[["Request"], None]
"""Function that answers a request for one path."""


class Request(BaseHTTPRequestHandler):
    """One request; ``server`` is the ``Server`` it came to."""

    server: Listener
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        """Run the answer that belongs to the path."""
        mine = self.server.mine
        path = self.path.split("?")[0]
        mine.seen.append(
            Seen(
                path=path,
                range=self.headers.get("Range", ""),
                user=self.headers.get("Authorization", ""),
            )
        )
        answer = mine.answers.get(unquote(path)) or next(
            (
                answer
                for prefix, answer in mine.answers.items()
                if prefix.endswith("/") and path.startswith(prefix)
            ),
            None,
        )
        if answer is None:
            self.send_error(404)
            return
        # Who gives up on us closes the connection.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
            answer(self)

    def do_HEAD(self) -> None:
        """Say how large a file is; only those that are served as bytes have a size."""
        size = self.server.mine.sizes.get(self.path)
        status = 404 if size is None else 200
        self.send_response(status)
        if size is not None:
            self.send_header("Content-Length", str(size))
        self.end_headers()

    def do_POST(self) -> None:
        """Do as for GET: only git's protocol posts."""
        self.do_GET()

    def start_of(self, content: bytes) -> int:
        """Send the head of an answer for these bytes, or for those that a Range asks for.

        Return where the content begins.
        """
        range_header = self.headers.get("Range", "")
        start = int(range_header.removeprefix("bytes=").split("-")[0]) if range_header else 0
        if start >= len(content) and range_header:
            self.send_error(416)
            return len(content)
        status = 206 if range_header else 200
        self.send_response(status)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        if range_header:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        return start

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A request that came."""

    path: str
    range: str
    user: str


class Listener(ThreadingHTTPServer):
    """The socket and its threads."""

    daemon_threads = True

    def __init__(self, mine: Server, authority: Authority | None) -> None:
        self.mine = mine
        self._context: ssl.SSLContext | None = None
        if authority:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(authority.server, authority.key)
        super().__init__(("127.0.0.1", 0), Request)

    def finish_request(self, request: object, client_address: object) -> None:
        """Shake hands in the request's own thread.

        A client that does not trust us just goes away.
        """
        if self._context is None:
            super().finish_request(request, client_address)  # type: ignore[arg-type]
            return
        with (
            contextlib.suppress(ssl.SSLError, ConnectionResetError),
            self._context.wrap_socket(request, server_side=True) as wrapped,  # type: ignore[arg-type]
        ):
            super().finish_request(wrapped, client_address)
            with contextlib.suppress(OSError):
                wrapped.unwrap()

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep the reports of broken connections out of the tests' output.

        A failing answer fails its client.
        """


@dataclass
class Server:
    """Requests and answers of a server, as a test sees them."""

    url: str = ""
    answers: dict[str, Answer] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def serve(self, path: str, answer: Answer | bytes) -> str:
        """Serve bytes, or the answer of a function ``answer``, at a path; return the address."""
        if isinstance(answer, bytes):
            self.sizes[path] = len(answer)
        self.answers[path] = whole_file(answer) if isinstance(answer, bytes) else answer
        return self.url + path


@contextlib.contextmanager
def serving(authority: Authority | None = None) -> Iterator[Server]:
    """Run a server for the time of the block."""
    mine = Server()
    with Listener(mine, authority) as listener:
        mine.url = f"http{'s' if authority else ''}://127.0.0.1:{listener.server_address[1]}"
        thread = threading.Thread(
            target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        thread.start()
        try:
            yield mine
        finally:
            mine.over.set()
            listener.shutdown()
            thread.join(10)


def whole_file(content: bytes) -> Answer:
    """Answer as a good server does: with all bytes, or with the range of the request."""

    def answer(request: Request) -> None:
        start = request.start_of(content)
        request.wfile.write(content[start:])

    return answer


def files_of(folder: Path) -> Answer:
    """Answer with the folder's file of the requested name, or that it is not there.

    To be served at ``/``.
    """

    def answer(request: Request) -> None:
        path = folder / (unquote(request.path).strip("/") or "index.html")
        if not path.is_file():
            request.send_error(404)
            return
        request.send_response(200)
        # pip reads no list of links without it.
        content_type = "text/html" if path.suffix == ".html" else "application/octet-stream"
        request.send_header("Content-Type", content_type)
        request.send_header("Content-Length", str(path.stat().st_size))
        request.end_headers()
        with path.open("rb") as file:
            shutil.copyfileobj(file, request.wfile)

    return answer


def dropping(content: bytes, after: int) -> Answer:
    """Promise everything, send ``after`` bytes of the requested range, and close the connection."""

    def answer(request: Request) -> None:
        start = request.start_of(content)
        request.wfile.write(content[start : start + after])

    return answer


def dropping_without_ranges(content: bytes, after: int) -> Answer:
    """Break the first answer off; then send everything again, even for a request of a range."""
    times = iter((after,))

    def answer(request: Request) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content[: next(times, len(content))])

    return answer


def failing(status: int, then: Answer | None = None) -> Answer:
    """Answer with this status: always, or only the first time."""
    times = iter((status,))

    def answer(request: Request) -> None:
        if then is not None and next(times, None) is None:
            then(request)
        else:
            request.send_error(status)

    return answer


def silent(server: Server) -> Answer:
    """Take the request and never answer."""

    def answer(_request: Request) -> None:
        server.over.wait()

    return answer


def trickling(server: Server, content: bytes) -> Answer:
    """Send a byte now and then: a connection that lives and is of no use."""

    def answer(request: Request) -> None:
        start = request.start_of(content)
        for byte in content[start:]:
            request.wfile.write(bytes([byte]))
            request.wfile.flush()
            if server.over.wait(0.2):
                return

    return answer


def redirecting(address: str) -> Answer:
    """Send the client elsewhere."""

    def answer(request: Request) -> None:
        request.send_response(302)
        request.send_header("Location", address)
        request.end_headers()

    return answer


def git_repositories(folder: Path, prefix: str) -> Answer:
    """Serve the repositories of a folder with git's own server program."""
    program = Path(
        subprocess.run(
            ("git", "--exec-path"), check=True, capture_output=True, text=True
        ).stdout.strip()
    )

    def answer(request: Request) -> None:
        path, _, query = request.path.partition("?")
        body = request.rfile.read(int(request.headers.get("Content-Length", "0")))
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(folder),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": "/" + path.removeprefix(prefix),
            "QUERY_STRING": query,
            "REQUEST_METHOD": request.command,
            "CONTENT_TYPE": request.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "GIT_PROTOCOL": request.headers.get("Git-Protocol", ""),
            "REMOTE_ADDR": "127.0.0.1",
        }
        done = subprocess.run(
            (str(program / "git-http-backend"),),
            input=body,
            env=environment,
            capture_output=True,
            check=True,
        )
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().splitlines())
        request.send_response(int(headers.pop("Status", "200").split()[0]))
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(content)

    return answer
