"""Download files with this machine's CA bundle, proxies and netrc.

Inside a build, the script `fetch` does that.
"""

from __future__ import annotations

import hashlib
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import requests
import urllib3

from trainworks.engine.temporary_folders import private_folder
from trainworks.errors import LockError, OutputError
from trainworks.host.settings import HostSettings

CHUNK = 1 << 20
"""Bytes that are read from a connection at once."""

TRANSIENT = frozenset({408, 425, 429})
"""HTTP statuses below 500 after which another attempt may succeed."""


Watch = Callable[[str, int, int], None]
"""Receives the progress of a download: file name, bytes so far, total bytes (0: unknown)."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of attempts, speed and time of a download.

    Attributes:
        attempts: The number of attempts, if the connection breaks or the server is busy.
        pause: Seconds before the second attempt; doubles before each further one.
        minimum_speed: Bytes per second. A download that stays slower for the whole time-out fails.
        timeout: Seconds; 0 means pip's time-out on this machine, or 30.
    """

    attempts: int = 4
    pause: float = 2.0
    minimum_speed: int = 10_000
    timeout: float = 0


@dataclass(frozen=True, kw_only=True)
class Content:
    """The hash of a file, and its size in bytes."""

    sha256: str
    size: int

    def __str__(self) -> str:
        """Return both, for a message."""
        return f"sha256 {self.sha256}, {self.size} bytes"


class UnreachableError(LockError):
    """A server cannot be reached, does not have the file, or breaks off the download."""


class Client:
    """Download files and pages. A host that did not answer once is not asked again.

    Use it as a context manager: it writes the CA bundle to a private folder.
    """

    def __init__(
        self,
        settings: HostSettings,
        *,
        limits: Limits | None = None,
        watch: Watch = lambda _name, _size, _total: None,
    ) -> None:
        """Store this machine's settings.

        Args:
            settings: Has the CA and the time-out. Proxies and netrc come from
                the process's environment.
            limits: Limits of attempts, speed and time.
            watch: Receives the progress of each download; the first call of a
                continued one is not at 0 bytes.
        """
        self._settings = settings
        self._limits = limits or Limits()
        self._watch = watch
        self._timeout = self._limits.timeout or settings.pip.timeout_seconds or 30.0
        self._session = _Session()
        self._verify: bool | str = True
        self._dead: dict[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Client:
        """Write the CA bundle to a private folder."""
        if self._settings.ca:
            path = self._stack.enter_context(private_folder()) / "ca.pem"
            path.write_bytes(self._settings.ca)
            self._verify = str(path)
        return self

    def __exit__(self, *_error: object) -> None:
        """Close connections and remove the private folder."""
        self._session.close()
        self._stack.close()

    @property
    def ca_path(self) -> str:
        """The CA bundle as a file, for other programs; ``""`` if this machine has none."""
        return self._verify if isinstance(self._verify, str) else ""

    def get(self, address: str, headers: Mapping[str, str] | None = None) -> requests.Response:
        """Send a GET request, and return the answer with any status.

        Raises:
            UnreachableError: The server does not answer.
        """
        try:
            return self._open(address, headers or {})
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._make_unreachable_error(address, error) from error

    def post(self, address: str, content: object) -> requests.Response:
        """Send a POST request with a JSON document, and return the answer with any status.

        Raises:
            UnreachableError: The server does not answer.
        """
        try:
            return self._open(address, {}, method="POST", content=content)
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._make_unreachable_error(address, error) from error

    def size(self, address: str) -> int:
        """Ask a server for the size of a file in bytes; 0 if the server does not say it."""
        try:
            response = self._open(address, {}, method="HEAD")
            if not response.ok:
                return 0
            return int(response.headers.get("Content-Length") or 0)
        except (
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            OSError,
            ValueError,
            UnreachableError,
        ):
            return 0

    def download(self, address: str, target: Path, *, sha256: str = "") -> Content:
        """Download a file. A broken download is continued; ``target`` appears when it is complete.

        Args:
            address: Its URL.
            target: The file to write; ``TARGET.part`` until it is complete.
            sha256: The expected hash, if known. Without it, a part of an earlier run is not
                continued: both halves might be of different files.

        Returns:
            Hash and size of the file.

        Raises:
            UnreachableError: It cannot be downloaded.
            LockError: Its hash is not ``sha256``; the file is removed.
            OutputError: It cannot be written.
        """
        part = target.with_name(f"{target.name}.part")
        if not sha256:
            part.unlink(missing_ok=True)
        while True:
            is_continued = part.exists()
            self._complete(address, part, trusted=bool(sha256))
            content = hash_file(part)
            if not sha256 or content.sha256 == sha256:
                break
            part.unlink()
            # The part of an earlier run may have been of another file: one more download decides.
            if not is_continued:
                raise LockError(
                    f"{remove_credentials(address)} is not what was pinned: "
                    f"expected sha256 {sha256}, found {content}; the file was removed"
                )
        part.replace(target)
        return content

    def _complete(self, address: str, part: Path, *, trusted: bool) -> None:
        """Download a file in several attempts until it is complete.

        Args:
            address: The URL.
            part: The file to write; what an earlier attempt has written is continued.
            trusted: Whether the file's hash is known, so that a wrong continuation is noticed.

        Raises:
            UnreachableError: The file cannot be downloaded.
            OutputError: The file cannot be written.
        """
        validator = ""
        pause = self._limits.pause
        for attempt in range(1, self._limits.attempts + 1):
            # Without a hash and a validator, the rest may be of another version of the file.
            if not trusted and not validator:
                part.unlink(missing_ok=True)
            try:
                validator = self._attempt(address, part, validator)
            except _BrokenError as error:
                validator = error.validator
                if attempt == self._limits.attempts:
                    raise self._make_unreachable_error(address, error, attempts=attempt) from error
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                if attempt == self._limits.attempts or _is_final(error):
                    raise self._make_unreachable_error(address, error) from error
            else:
                return
            time.sleep(pause)
            pause *= 2

    def _attempt(self, address: str, part: Path, validator: str) -> str:
        """Download a file, or the rest of it, once.

        Args:
            address: The URL.
            part: The file to write, or to continue if it has bytes.
            validator: The version of the file that was begun; ``""``: it is not known.

        Returns:
            The validator of the file's version: an entity tag or a time; ``""`` without one.

        Raises:
            _BrokenError: The attempt failed, and another one may succeed.
            UnreachableError: The server refuses.
            OutputError: The file cannot be written.
        """
        start = part.stat().st_size if part.exists() else 0
        headers = {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
            if validator:
                # A server with another version sends the whole file then, with status 200.
                headers["If-Range"] = validator
        with self._open(address, headers, stream=True) as response:
            status = response.status_code
            if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                part.unlink()
                message = "the part that was downloaded is longer than the file"
                raise _BrokenError(message)
            if status in TRANSIENT or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                message = f"HTTP {status}"
                raise _BrokenError(message)
            if status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                raise UnreachableError(f"{remove_credentials(address)} answers HTTP {status}")
            new_validator = _find_validator(response)
            if status == HTTPStatus.OK:
                start = 0
            length = response.headers.get("Content-Length", "")
            # ``None``: a server may leave the length out.
            expected = start + int(length) if length.isdecimal() else None
            try:
                size = self._write(response, part, start, expected or 0)
            except (urllib3.exceptions.HTTPError, requests.RequestException, TimeoutError) as error:
                raise _BrokenError(str(error), validator=new_validator) from error
            if expected is not None and size != expected:
                message = f"the connection ended after {size} of {expected} bytes"
                raise _BrokenError(message, validator=new_validator)
            return new_validator

    def _write(self, response: requests.Response, part: Path, start: int, total: int) -> int:
        """Write the body of a response to a file, and report the progress to ``watch``.

        Args:
            response: The response, whose body is not read yet.
            part: The file.
            start: Bytes that the file keeps; 0: it is written anew.
            total: Bytes of the whole file; 0 if they are not known.

        Returns:
            The size of the file in bytes.

        Raises:
            TimeoutError: For a whole time-out fewer bytes came than the lowest speed demands.
            OutputError: The file cannot be written.
        """
        # The time at which the measuring of the speed began, and the bytes since then.
        window, received = time.monotonic(), 0
        name = part.name.removesuffix(".part")
        self._watch(name, start, total)
        try:
            stream = part.open("ab" if start else "wb")
        except OSError as error:
            raise OutputError(f"cannot write {part} ({error.strerror})") from error
        with stream:
            # `read1` returns what has arrived; waiting for a whole chunk would hide a slow server.
            while chunk := response.raw.read1(CHUNK):
                try:
                    stream.write(chunk)
                except OSError as error:
                    raise OutputError(f"cannot write {part} ({error.strerror})") from error
                received += len(chunk)
                self._watch(name, stream.tell(), total)
                now = time.monotonic()
                if now - window >= self._timeout:
                    if received < self._limits.minimum_speed * self._timeout:
                        message = f"slower than {self._limits.minimum_speed} bytes per second"
                        raise TimeoutError(message)
                    window, received = now, 0
            return stream.tell()

    def _open(
        self,
        address: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        stream: bool = False,
        content: object = None,
    ) -> requests.Response:
        """Send a request, and return the answer with any status.

        Args:
            address: The URL.
            headers: The headers.
            method: The HTTP method.
            stream: Whether the body is still to be read.
            content: The value of a JSON body; ``None``: there is no body.

        Raises:
            UnreachableError: The host did not answer an earlier request.
            requests.RequestException: The host does not answer.
        """
        host = urlsplit(address).netloc
        if host in self._dead:
            raise UnreachableError(
                f"cannot download {remove_credentials(address)}: not tried, {self._dead[host]}"
            )
        trusted = urlsplit(address).hostname in self._settings.pip.trusted_hosts
        return self._session.request(
            method,
            address,
            headers=headers,
            json=content,
            # Without it, requests would replace a token in the headers by the
            # login that netrc has for the host.
            auth=keep_request if "Authorization" in headers else None,
            stream=stream,
            timeout=(self._timeout, self._timeout),
            verify=False if trusted else self._verify,
        )

    def _make_unreachable_error(
        self, address: str, error: Exception, *, attempts: int = 0
    ) -> UnreachableError:
        """Return the error for a failed request; note a host that does not answer as dead.

        Args:
            address: The URL.
            error: The failure, as requests or the system raised it.
            attempts: The number of attempts, for the message; 0: it is not told.
        """
        if isinstance(error, (requests.ConnectionError, requests.ConnectTimeout)):
            host = urlsplit(address).netloc
            self._dead[host] = f"{host.rpartition('@')[2]} does not answer"
        times = f" ({attempts} attempts)" if attempts else ""
        return UnreachableError(
            f"cannot download {remove_credentials(address)}{times}: {find_reason(error)}"
        )


class _BrokenError(Exception):
    """A failed attempt that may succeed when repeated.

    ``validator`` names the version of the file that was begun.
    """

    def __init__(self, message: str, validator: str = "") -> None:
        super().__init__(message)
        self.validator = validator


def keep_request(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Return a request unchanged.

    As ``auth`` of a request, this keeps requests from adding a login from netrc.
    """
    return request


def _find_validator(response: requests.Response) -> str:
    """Return the identifier of a file's version: a strong entity tag, or the modification time.

    ``""`` without either. A weak entity tag is not for parts of a file (RFC 9110, "If-Range").
    """
    tag = response.headers.get("ETag", "")
    is_strong = tag != "" and not tag.startswith("W/")
    if is_strong:
        return tag
    return response.headers.get("Last-Modified", "")


class _WithoutTlsError(requests.RequestException):
    """A server with TLS redirects to an address without TLS."""


class _Session(requests.Session):
    """Follows redirects, but never from TLS to plain HTTP, as the script `fetch` of a build."""

    def rebuild_auth(
        self, prepared_request: requests.PreparedRequest, response: requests.Response
    ) -> None:
        """Refuse a redirect to plain HTTP; called before a redirect is followed.

        Raises:
            _WithoutTlsError: The redirect leads out of TLS.
        """
        old = urlsplit(str(response.request.url))
        new = urlsplit(str(prepared_request.url))
        if old.scheme == "https" and new.scheme != "https":
            raise _WithoutTlsError("it redirects to an address without TLS")
        super().rebuild_auth(prepared_request, response)  # type: ignore[no-untyped-call]


_FINAL_ERRORS = (
    _WithoutTlsError,
    requests.exceptions.SSLError,
    requests.exceptions.InvalidURL,
    requests.TooManyRedirects,
)


def _is_final(error: Exception) -> bool:
    """Return whether another attempt would fail too.

    That is so for an untrusted certificate, an invalid address, a name that does not resolve.
    """
    if isinstance(error, _FINAL_ERRORS):
        return True
    causes = list_causes(error)
    return any(isinstance(cause, urllib3.exceptions.NameResolutionError) for cause in causes)


def list_causes(error: BaseException) -> list[BaseException]:
    """Return an error and all errors that it wraps.

    Requests and urllib3 wrap an error several times, each in its own way.
    """
    causes: list[BaseException] = []
    pending: list[object] = [error]
    while pending:
        item = pending.pop(0)
        if isinstance(item, BaseException) and item not in causes:
            causes.append(item)
            pending += (getattr(item, "reason", None), *item.args, item.__cause__, item.__context__)
    return causes


def find_reason(error: Exception) -> str:
    """Return the text of the innermost error that an error wraps, without credentials.

    For example ``[Errno 111] Connection refused``.
    """
    reason: object = error
    while True:
        wrapped = getattr(reason, "reason", None) or _find_error(getattr(reason, "args", ()))
        if not isinstance(wrapped, Exception):
            break
        reason = wrapped
    text = str(reason) or type(reason).__name__
    # "HTTPSConnection(host='…', port=443): " only repeats the address.
    text = re.sub(r"^<?[\w.]+\(.*?\)>?: ", "", text)
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in list_causes(error)):
        text = f"certificate not trusted ({text})"
    text = re.sub(r"^Failed to resolve '([^']*)' \(", r"cannot resolve \1 (", text)
    return remove_credentials(text)


def _find_error(values: Iterable[object]) -> Exception | None:
    """Return the first exception among values; ``None`` without one."""
    for value in values:
        if isinstance(value, Exception):
            return value
    return None


def remove_credentials(text: str) -> str:
    """Return a text without the users and passwords of addresses in it."""
    # A password may have an @ itself: the last one ends it.
    return re.sub(r"(://)[^/\s]*@", r"\1", text)


def hash_file(path: Path) -> Content:
    """Read a file, and return its hash and size.

    Raises:
        OutputError: The file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return Content(sha256=digest, size=stream.tell())
    except OSError as error:
        raise OutputError(f"cannot read {path} ({error.strerror})") from error
