"""Downloads to this machine, with its own trust: CA bundle, proxies, netrc. What runs inside a build is `fetch`."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import requests
import urllib3

from trainworks.engine.scratch import private_folder
from trainworks.errors import LockError, OutputError
from trainworks.host.settings import HostSettings

CHUNK = 1 << 20

TRANSIENT = frozenset({408, 425, 429})
"""HTTP statuses below 500 that another attempt may change."""


Watch = Callable[[str, int, int], None]
"""Told how far a download is: the file's name, bytes that are here, bytes altogether (0: its server does not say)."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a download is tried.

    Attributes:
        attempts: How often, where a server breaks off or is busy.
        pause: Seconds before the second attempt; doubled before each further one.
        minimum_speed: Bytes per second; a server that stays below it for the whole time-out is given up.
        timeout: Seconds; 0 stands for pip's own time-out on this machine, or 30.
    """

    attempts: int = 4
    pause: float = 2.0
    minimum_speed: int = 10_000
    timeout: float = 0


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a file was found to be: its hash, and its size in bytes."""

    sha256: str
    size: int

    def __str__(self) -> str:
        """Say both, for a message."""
        return f"sha256 {self.sha256}, {self.size} bytes"


class UnreachableError(LockError):
    """A server cannot be reached, does not have what is asked for, or breaks off; nothing is wrong with what it has."""


class Client:
    """Downloads files and pages; a host that did not answer once is not asked again.

    Use as a context manager: its CA bundle lies in a private folder meanwhile.
    """

    def __init__(
        self,
        settings: HostSettings,
        *,
        limits: Limits | None = None,
        watch: Watch = lambda _name, _size, _total: None,
    ) -> None:
        """Take this machine's settings.

        Args:
            settings: Whose CA and time-out hold; proxies and netrc come from the process's environment.
            limits: How long a download is tried.
            watch: Told how far each download is, first where it begins: one that goes on does not begin at 0.
        """
        self._settings = settings
        self._limits = limits or Limits()
        self._watch = watch
        self._timeout = self._limits.timeout or settings.pip.timeout_seconds or 30.0
        self._session = requests.Session()
        self._verify: bool | str = True
        self._dead: dict[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Client:
        """Write the CA bundle to where the library can read it."""
        if self._settings.ca:
            path = self._stack.enter_context(private_folder()) / "ca.pem"
            path.write_bytes(self._settings.ca)
            self._verify = str(path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close connections and remove the private folder."""
        self._session.close()
        self._stack.close()

    @property
    def ca_path(self) -> str:
        """The CA bundle as a file, for other programs; ``""`` where this machine has none."""
        return self._verify if isinstance(self._verify, str) else ""

    def get(self, address: str, headers: Mapping[str, str] | None = None) -> requests.Response:
        """Return the whole answer to a small question, whatever its status; raises ``UnreachableError``."""
        host = urlsplit(address).netloc
        try:
            return self._open(address, headers or {}, host)
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._unreachable(address, error) from error

    def size(self, address: str) -> int:
        """Return the size of a file in bytes as its server says it; 0 where it does not, or cannot be asked."""
        try:
            answer = self._open(address, {}, urlsplit(address).netloc, method="HEAD")
            return int(answer.headers.get("Content-Length") or 0) if answer.ok else 0
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError, UnreachableError):
            return 0

    def download(self, address: str, target: Path, *, sha256: str = "") -> Content:
        """Download a file; what a broken connection left is continued, and ``target`` appears when it is complete.

        Args:
            address: Where it is.
            target: The file to write; ``TARGET.part`` while it is not complete.
            sha256: What it must be, where that is known. Only then is a part from an earlier run continued: without it
                nobody could say that both halves are of one file.

        Returns:
            What came.

        Raises:
            UnreachableError: It cannot be had.
            LockError: It is not what ``sha256`` says; nothing is left of it then.
            OutputError: It cannot be written.
        """
        part = target.with_name(f"{target.name}.part")
        if not sha256:
            part.unlink(missing_ok=True)
        while True:
            continued = part.exists()
            self._complete(address, part, trusted=bool(sha256))
            content = content_of(part)
            if not sha256 or content.sha256 == sha256:
                break
            part.unlink()
            if not continued:
                raise LockError(
                    f"{without_credentials(address)} is not what was pinned: "
                    f"expected sha256 {sha256}, found {content}; nothing was kept"
                )
        part.replace(target)
        return content

    def _complete(self, address: str, part: Path, *, trusted: bool) -> None:
        """Fill a part until the server says that it is all there."""
        validator = ""
        pause = self._limits.pause
        for attempt in range(1, self._limits.attempts + 1):
            if not (trusted or validator):
                part.unlink(missing_ok=True)
            try:
                validator = self._attempt(address, part, validator)
            except _BrokenError as error:
                validator = error.validator
                if attempt == self._limits.attempts:
                    raise self._unreachable(address, error, attempts=attempt) from error
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                if attempt == self._limits.attempts or _is_final(error):
                    raise self._unreachable(address, error) from error
            else:
                return
            time.sleep(pause)
            pause *= 2

    def _attempt(self, address: str, part: Path, validator: str) -> str:
        start = part.stat().st_size if part.exists() else 0
        headers = {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
            if validator:
                headers["If-Range"] = validator
        with self._open(address, headers, urlsplit(address).netloc, stream=True) as response:
            status = response.status_code
            if status == 416:
                part.unlink()
                message = "what is here already is longer than the file"
                raise _BrokenError(message)
            if status in TRANSIENT or status >= 500:
                message = f"HTTP {status}"
                raise _BrokenError(message)
            if status not in (200, 206):
                raise UnreachableError(f"{without_credentials(address)} answers HTTP {status}")
            found = _validator(response)
            if status == 200:
                start = 0
            length = response.headers.get("Content-Length", "")
            expected = start + int(length) if length.isdecimal() else -1
            try:
                size = self._write(response, part, start, max(0, expected))
            except (urllib3.exceptions.HTTPError, requests.RequestException, TimeoutError) as error:
                raise _BrokenError(str(error), validator=found) from error
            if expected not in (-1, size):
                message = f"the connection ended after {size} of {expected} bytes"
                raise _BrokenError(message, validator=found)
            return found

    def _write(self, response: requests.Response, part: Path, start: int, total: int) -> int:
        window, received = time.monotonic(), 0
        name = part.name.removesuffix(".part")
        self._watch(name, start, total)
        try:
            stream = part.open("ab" if start else "wb")
        except OSError as error:
            raise OutputError(f"{part} cannot be written: {error.strerror}") from error
        with stream:
            # `read1` gives what is there; waiting for a whole chunk would hide how slow a server is.
            while chunk := response.raw.read1(CHUNK):
                try:
                    stream.write(chunk)
                except OSError as error:
                    raise OutputError(f"{part} cannot be written: {error.strerror}") from error
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
        self, address: str, headers: Mapping[str, str], host: str, *, method: str = "GET", stream: bool = False
    ) -> requests.Response:
        if host in self._dead:
            raise UnreachableError(f"{without_credentials(address)}: not tried, {self._dead[host]}")
        trusted = urlsplit(address).hostname in self._settings.pip.trusted_hosts
        return self._session.request(
            method,
            address,
            headers=headers,
            # A token that stands in the headers would else be replaced by what netrc has for the host.
            auth=as_given if "Authorization" in headers else None,
            stream=stream,
            timeout=(self._timeout, self._timeout),
            verify=False if trusted else self._verify,
        )

    def _unreachable(self, address: str, error: Exception, *, attempts: int = 0) -> UnreachableError:
        if isinstance(error, (requests.ConnectionError, requests.ConnectTimeout)):
            host = urlsplit(address).netloc
            self._dead[host] = f"{host.rpartition('@')[2]} does not answer"
        times = f", {attempts} attempts" if attempts else ""
        return UnreachableError(f"{without_credentials(address)} cannot be had{times}: {reason_of(error)}")


class _BrokenError(Exception):
    """An attempt that another one may better; ``validator`` names the version of the file that was begun."""

    def __init__(self, message: str, validator: str = "") -> None:
        super().__init__(message)
        self.validator = validator


def as_given(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Leave a request as it is, as its ``auth``: no login from netrc takes the place of a chosen one."""
    return request


def _validator(response: requests.Response) -> str:
    """Return what tells this version of a file from another one: a strong entity tag, or its time."""
    tag = response.headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified", "")


def _is_final(error: Exception) -> bool:
    """Whether another attempt would end the same way: a bad certificate or address, a name that does not exist."""
    if isinstance(error, (requests.exceptions.SSLError, requests.exceptions.InvalidURL, requests.TooManyRedirects)):
        return True
    return "NameResolutionError" in repr(error)


def reason_of(error: Exception) -> str:
    """Return the innermost reason of an error: the library wraps it several times."""
    reason: object = error
    while True:
        deeper = getattr(reason, "reason", None) or next(
            (each for each in getattr(reason, "args", ()) if isinstance(each, Exception)), None
        )
        if not isinstance(deeper, Exception):
            break
        reason = deeper
    text = str(reason) or type(reason).__name__
    # "HTTPSConnection(host='…', port=443): " says nothing that the address does not.
    return without_credentials(re.sub(r"^<?[\w.]+\(.*?\)>?: ", "", text))


def without_credentials(text: str) -> str:
    """Return a text without the user and password that addresses in it may have."""
    return re.sub(r"(://)[^/@\s]*@", r"\1", text)


def content_of(path: Path) -> Content:
    """Return what a file is; raises ``OutputError`` when it cannot be read."""
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return Content(sha256=digest, size=stream.tell())
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from error
