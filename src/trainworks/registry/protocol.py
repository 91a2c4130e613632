"""Client of a registry's HTTP API (the OCI distribution protocol).

A response is a status, error codes and bytes.

The registry's responses decide whether something exists or a request is refused: no program's
output is read. A login goes to the registry that it is for, or to the token service that this
registry names, over TLS alone; only a registry on this machine may be without TLS.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from http.client import responses
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit, urlunsplit
from urllib.request import parse_http_list, parse_keqv_list

import requests
import urllib3

from trainworks.engine import subprocesses
from trainworks.engine.protocol import Report
from trainworks.errors import RegistryError
from trainworks.host.downloads import TRANSIENT, find_reason, keep_request, list_causes
from trainworks.host.settings import HostSettings
from trainworks.registry.credentials import api_host, find_login

BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Variables that name a CA bundle; not pip's own variable, which is for the package index."""

ENGINE_CERTIFICATES = (
    Path("/etc/docker/certs.d"),
    Path("/etc/containers/certs.d"),
    Path("~/.config/containers/certs.d"),
    Path("~/.docker/certs.d"),
)
"""Folders of docker and buildah with the certificates of each registry, in ``HOST/*.crt``."""

ABSENT = frozenset({"MANIFEST_UNKNOWN", "NAME_UNKNOWN"})
"""Error codes, with HTTP 404, for a tag or a repository that does not exist."""

HARBOR_ABSENT = "NOT_FOUND"
"""Harbor's code instead, which the protocol does not have (goharbor/harbor, pull request 23637)."""

WRONG_NAMES = frozenset({62, 64})
"""OpenSSL's results of a verification: the certificate is for other names or other addresses."""

LARGEST = 64 << 20
"""Bytes of the largest response that is read: a manifest, a list or a proof."""

LONGEST_PAUSE = 32
"""The longest pause between two attempts, as a multiple of the first pause."""

LONGEST_WAIT = 300.0
"""Seconds that a registry may ask us to wait (``Retry-After``).

One that asks for more has refused.
"""

SHOWN = 300
"""Characters of a registry's or a program's words in a message."""

_Result = TypeVar("_Result")


class RegistryUnreachableError(RegistryError):
    """A registry cannot be resolved, or did not answer in any attempt."""


class NotFoundError(RegistryError):
    """The registry does not have an object.

    Attributes:
        certain: Whether every code of the answer is the protocol's own for an absent object; the
            list of tags has to confirm other codes.
    """

    certain = True


class TransientError(Exception):
    """A failed attempt that may succeed when repeated.

    Attributes:
        last: The error to raise if the attempt is not repeated.
        wait: Seconds that the registry asks us to wait; 0 without such a request.
    """

    def __init__(
        self, reason: str, last: RegistryError | None = None, *, wait: float = 0.0
    ) -> None:
        """Store the reason of the failure, in words for people."""
        super().__init__(reason)
        self.last = last
        self.wait = wait


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Limits for retries and time-outs of requests to a registry.

    Seven attempts wait for a minute in total, long enough for a registry to restart.

    Attributes:
        attempts: The number of attempts for each request.
        pause: Seconds before the second attempt; doubles after that, up to ``LONGEST_PAUSE`` times.
        seconds: Seconds that one response may take.
        silence: Seconds for which a registry may send nothing.
    """

    attempts: int = 7
    pause: float = 1.0
    seconds: float = 600.0
    silence: float = 60.0


@dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """A request to a registry, or to its token service.

    Attributes:
        path: The path after ``/v2/NAME/``, or an address that the registry gave.
        method: The HTTP method.
        headers: The headers, besides those of every request.
        body: The content.
    """

    path: str
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Response:
    """A registry's response.

    Attributes:
        status: The HTTP status.
        headers: The headers; their names have no case.
        content: The body.
        redirected_host: The other host that responded, after a redirect; ``""`` without one.
    """

    status: int
    headers: Mapping[str, str]
    content: bytes
    redirected_host: str = ""

    @property
    def errors(self) -> list[Mapping[str, Any]]:
        """The errors in the protocol's form.

        Empty if another program, such as a proxy, responded in the registry's place.
        """
        try:
            rows = json.loads(self.content)["errors"]
        except (ValueError, RecursionError, TypeError, LookupError):
            return []
        if not isinstance(rows, list):
            return []
        return [row for row in rows if isinstance(row, dict)]

    @property
    def codes(self) -> frozenset[str]:
        """The codes of the errors, such as ``MANIFEST_UNKNOWN``."""
        return frozenset(str(row.get("code")) for row in self.errors)

    @property
    def words(self) -> str:
        """The status and the errors: ``HTTP 404 Not Found; MANIFEST_UNKNOWN: manifest unknown``."""
        status = f"HTTP {self.status} {responses.get(self.status, '')}".strip()
        if self.redirected_host:
            status += f" from {self.redirected_host}"
        parts = [status]
        for row in self.errors:
            message = row.get("message") or row.get("detail") or ""
            parts.append(f"{row.get('code')}: {message}")
        return "; ".join(parts)


class Client:
    """Sends requests to registries, with this machine's logins, certificates and proxies."""

    def __init__(
        self, settings: HostSettings, folder: Path, *, report: Report, patience: Patience
    ) -> None:
        """Store the settings; no connection is made yet.

        Args:
            settings: This machine's proxies and CAs.
            folder: A private folder, which gets the CA bundles.
            report: Receives a line of text before each retry.
            patience: Limits of retries and time-outs.
        """
        self._settings = settings
        self._folder = folder
        self._report = report
        self._patience = patience
        self._session = _Session()
        self._is_plain_by_host: dict[str, bool] = {}
        self._bundle_by_hosts: dict[tuple[str, ...], bool | str] = {}
        # The header ``Authorization`` for a host and a scope, from the registry's last challenge.
        self._authorizations: dict[tuple[str, str], str] = {}
        self.logins: dict[str, dict[str, str]] = {}
        """The login of each registry of a request, as an entry of docker's ``auths``."""

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def send(
        self,
        action: str,
        repository: str,
        request: HttpRequest,
        *,
        attempts: int = 0,
        absent: bool = False,
    ) -> Response:
        """Send a request about a repository, again after a failure that may pass.

        A registry that asks for a login gets it, if this machine has one.

        Args:
            action: The work, for messages: ``reading HOST/NAME:TAG``.
            repository: The repository, ``HOST/NAME``.
            request: The request, without a login.
            attempts: The number of attempts; default: as patience has it.
            absent: Whether a response with the status 404 is returned, too: the
                registry does not know the path.

        Returns:
            A response with a status of 200 to 299, or 404 with ``absent``.

        Raises:
            NotFoundError: The registry does not have the object.
            RegistryUnreachableError: The registry cannot be resolved, or did
                not answer in any attempt.
            RegistryError: Every other response.
        """
        host, _, name = repository.partition("/")
        rights = "pull" if request.method == "GET" else "pull,push"
        # For a token service whose registry names no scope itself.
        scope = f"repository:{name}:{rights}"
        is_address = request.path.startswith("/") or "://" in request.path
        absolute_path = request.path if is_address else f"/v2/{name}/{request.path}"

        def send(url: str) -> Response:
            headers = dict(request.headers)
            authorization = self._authorizations.get((host, scope), "")
            if authorization:
                headers["Authorization"] = authorization
            return self._send(action, host, replace(request, path=url, headers=headers))

        def attempt() -> Response:
            url = urljoin(self._base_url(host), absolute_path)
            response = send(url)
            challenge = response.headers.get("WWW-Authenticate", "")
            if response.status == HTTPStatus.UNAUTHORIZED and challenge:
                authorization = self._authorization(action, host, challenge, scope)
                if authorization:
                    self._authorizations[host, scope] = authorization
                    response = send(url)
            if absent and response.status == HTTPStatus.NOT_FOUND:
                return response
            return self._check_status(action, host, response)

        return self.retry(action, host, attempt, attempts=attempts)

    def find_login(self, host: str) -> dict[str, str]:
        """Return this machine's login for a registry as an entry of docker's ``auths``.

        ``{}`` without one. The login is read once, and kept in ``logins``.

        Raises:
            RegistryError: A credential helper fails, or AWS refuses the login.
        """
        if host not in self.logins:
            self.logins[host] = find_login(host)
        return self.logins[host]

    def is_plain_http(self, host: str) -> bool:
        """Return whether a registry speaks HTTP without TLS: only one on this machine may.

        The first call for a registry on this machine sends a request; its answer is kept.
        """
        if host in self._is_plain_by_host:
            return self._is_plain_by_host[host]
        if not _is_loopback(host):
            self._is_plain_by_host[host] = False
            return False
        is_plain = self._try_tls(host)
        if is_plain is None:
            # Not kept: a registry that is still starting may answer later.
            return False
        self._is_plain_by_host[host] = is_plain
        return is_plain

    def _try_tls(self, host: str) -> bool | None:
        """Return whether the TLS handshake with a registry on this machine fails.

        ``None`` without an answer: the caller's own request reports that.
        """
        try:
            url = urlunsplit(("https", host, "/v2/", "", ""))
            self._open(HttpRequest(path=url), host).close()
        except (requests.RequestException, OSError) as error:
            causes = list_causes(error)
            # A certificate that is not trusted is TLS as well, and its error is an SSLError too.
            for cause in causes:
                if isinstance(cause, ssl.SSLCertVerificationError):
                    return False
            for cause in causes:
                if isinstance(cause, ssl.SSLError):
                    return True
            return None
        return False

    def write_ca_bundle(self, hosts: Sequence[str]) -> bool | str:
        """Write the CA bundle for registries into the private folder, and return its path.

        The bundle has this machine's CAs, and those that engines trust for these registries alone.
        Without any of them nothing is written.

        Args:
            hosts: The registries: ``localhost:5000``.

        Returns:
            As ``verify`` of requests: the path, or ``True`` for the system's own CAs.
        """
        key = tuple(hosts)
        if key in self._bundle_by_hosts:
            return self._bundle_by_hosts[key]
        files = []
        for variable in BUNDLES:
            value = os.environ.get(variable)
            if value:
                files.append(Path(value))
        engine_files: list[Path] = []
        for folder in ENGINE_CERTIFICATES:
            for host in hosts:
                engine_files += folder.expanduser().glob(f"{host}/*.crt")
        files += sorted(engine_files)
        certificates = [self._settings.ca]
        certificates += [path.read_bytes() for path in files if path.is_file()]
        # Without repetitions, in the order above.
        certificates = [content for content in dict.fromkeys(certificates) if content]
        bundle: bool | str = True
        if certificates:
            path = self._folder / f"ca{len(self._bundle_by_hosts)}.pem"
            path.write_bytes(b"\n".join(certificates))
            bundle = str(path)
        self._bundle_by_hosts[key] = bundle
        return bundle

    def retry(
        self, action: str, host: str, attempt: Callable[[], _Result], *, attempts: int = 0
    ) -> _Result:
        """Call a function until it does not raise ``TransientError``; return its result.

        Between two attempts it sleeps. A reason is reported when it first comes: six equal lines
        about a refused connection help no more than one.

        Args:
            action: The work, for messages: ``reading HOST/NAME:TAG``.
            host: The registry, for messages.
            attempt: The function.
            attempts: The number of attempts; default: as patience has it.

        Raises:
            RegistryError: The last attempt failed, or the registry asks for a wait of more than
                ``LONGEST_WAIT``. It is the failure's own error if it has one, otherwise a
                ``RegistryUnreachableError``.
        """
        last_reason = ""
        pause = self._patience.pause
        count = attempts or self._patience.attempts
        for number in range(1, count + 1):
            try:
                return attempt()
            except TransientError as error:
                if number == count or error.wait > LONGEST_WAIT:
                    if error.last is not None:
                        raise error.last from None
                    times = "time" if number == 1 else "times"
                    raise RegistryUnreachableError(
                        f"{action}: {host} failed {number} {times}: {error}",
                        hint="repeat the command; what the registry already has is not sent again",
                    ) from None
                # A shorter pause than the registry asks for begins some registries' window anew.
                wait = max(pause, error.wait)
                reason = str(error)
                if reason != last_reason:
                    last_reason = reason
                    self._report(
                        f"  {action}: {reason}; attempt {number + 1} of {count} in {wait:g} s"
                    )
                time.sleep(wait)
                pause = min(pause * 2, LONGEST_PAUSE * self._patience.pause)
        raise AssertionError("at least one attempt")

    def clean_text(self, text: str) -> str:
        """Return a program's or registry's words on one line, safe to print.

        Without terminal escapes, logins and the queries of addresses, and cut to ``SHOWN``
        characters.
        """
        characters = []
        for character in subprocesses.clean(text.encode()):
            is_shown = character.isprintable() or character == "\n"
            characters.append(character if is_shown else " ")
        text = "".join(characters)
        for login in self.logins.values():
            encoded = login.get("auth", "")
            # ``USER:PASSWORD`` in base64.
            _, _, password = base64.b64decode(encoded).decode().partition(":")
            for secret in (encoded, password, login.get("identitytoken", "")):
                if secret:
                    text = text.replace(secret, "***")
        # The query of an address may have a signature, which is a login, too.
        text = " ".join(re.sub(r"\?[^\s\"\\]*", "", text).split())
        if len(text) <= SHOWN:
            return text
        # The end is cut: the failure comes first, then the places in the program's own code.
        return f"{text[:SHOWN]} ..."

    def _make_refusal(self, action: str, host: str, response: Response) -> RegistryError:
        """Return the error for a response with an error status."""
        # The login is read even if no request needed it: a response may repeat the login of an
        # engine, and ``clean_text`` removes only logins that were read.
        self.find_login(host)
        words, codes = self.clean_text(response.words), response.codes
        is_absent = response.status == HTTPStatus.NOT_FOUND and codes <= ABSENT | {HARBOR_ABSENT}
        # Without codes a proxy may have answered, and another host does not know what the registry
        # has.
        if is_absent and codes and not response.redirected_host:
            absent = NotFoundError(
                f"{action}: not found at {host} ({words})",
                hint=(
                    "check the name; some registries need a"
                    " repository to be created before the first push"
                ),
            )
            absent.certain = codes <= ABSENT
            return absent
        problem, hint = self._explain_refusal(host, response)
        return RegistryError(f"{action}: {problem} ({words})", hint=hint)

    def _explain_refusal(self, host: str, response: Response) -> tuple[str, str]:
        """Return the problem behind an error status, and a hint; both are texts for people."""
        status = response.status
        if status == HTTPStatus.UNAUTHORIZED and not self.find_login(host):
            return (
                f"{host} requires a login, and this machine has none",
                f"`docker login {host}`; docs/ship.md lists the other sources of logins",
            )
        if status == HTTPStatus.UNAUTHORIZED:
            hint = (
                f"log in again (`docker login {host}`;"
                " for ECR see docs/ship.md), then repeat the command"
            )
            return f"{host} rejects the user or password", hint
        if status == HTTPStatus.FORBIDDEN:
            return (
                f"permission denied by {host}",
                "give the user the right to push, or log in again",
            )
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            return f"{host} is read-only", "try later, or use another repository"
        hint = ""
        if not response.codes:
            hint = (
                "no registry answers so: look at the address, and at the proxy before the registry"
            )
        return f"{host} refuses", hint

    def _base_url(self, host: str) -> str:
        """Return the address of a registry's API: its scheme and host."""
        scheme = "http" if self.is_plain_http(host) else "https"
        return urlunsplit((scheme, api_host(host), "", "", ""))

    def _check_status(self, action: str, host: str, response: Response) -> Response:
        """Return the response if its status is 200 to 299.

        Raises:
            TransientError: The status is of a failure that may pass, such as 503.
            NotFoundError: The registry does not have the object.
            RegistryError: Every other status.
        """
        if response.status in TRANSIENT or response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            wait = _parse_retry_after(response.headers.get("Retry-After", ""))
            note = f"; it asks to wait {wait:g} s" if wait else ""
            raise TransientError(f"{self.clean_text(response.words)}{note}", wait=wait)
        if response.status not in range(200, 300):
            raise self._make_refusal(action, host, response)
        return response

    def _authorization(self, action: str, host: str, challenge: str, scope: str) -> str:
        """Return the header ``Authorization`` that a registry's challenge asks for.

        A challenge ``Bearer`` names a token service, which is asked for a token; without a login
        it may give one that reads public images.

        Args:
            action: The work, for messages.
            host: The registry.
            challenge: The header ``WWW-Authenticate``: ``Bearer realm="...",service="..."``.
            scope: The rights to ask for, if the challenge names none: ``repository:NAME:pull``.

        Returns:
            ``Bearer TOKEN`` or ``Basic BASE64``; ``""`` for a challenge ``Basic`` if this machine
            has no login for the registry.

        Raises:
            TransientError: The token service fails for a moment.
            RegistryError: The token service has no TLS, refuses, or gives no token.
        """
        scheme, _, parameters = challenge.partition(" ")
        login = self.find_login(host)
        basic = f"Basic {login['auth']}" if login else ""
        if scheme.lower() != "bearer":
            return basic
        bearer = parse_keqv_list(parse_http_list(parameters))
        service = urlsplit(bearer.get("realm") or "")
        # The login goes to the service: without TLS, it must stay on this machine.
        if service.scheme != "https":
            stays_here = self.is_plain_http(host) and _is_loopback(service.netloc)
            if not stays_here:
                raise make_plain_http_error(action, host)
        values = {"service": bearer.get("service") or "", "scope": bearer.get("scope") or scope}
        request = _make_token_request(str(bearer["realm"]), values, login)
        response = self._send(action, host, request)
        # A missing token service does not mean that the repository is missing.
        response = replace(response, redirected_host=service.netloc)
        response = self._check_status(action, host, response)
        tokens = parse_json_object(
            response.content, f"the token that {service.netloc} gives for {host}"
        )
        # Two names for one key: the second one is of OAuth 2.
        token = tokens.get("token") or tokens.get("access_token")
        if not isinstance(token, str):
            raise RegistryError(f"{action}: {service.netloc} gives no token for {host}")
        return f"Bearer {token}"

    def _send(self, action: str, host: str, request: HttpRequest) -> Response:
        """Send a request whose path is an address, and read the whole response into memory.

        Raises:
            TransientError: The host did not answer, or not in ``Patience.seconds``.
            RegistryError: The response is larger than ``LARGEST``, or the connection failed for a
                reason that does not pass, such as a certificate that is not trusted.
        """
        url = request.path
        started = time.monotonic()
        parts = []
        size = 0
        try:
            with self._open(request, host) as response:
                for part in response.iter_content(1 << 16):
                    size += len(part)
                    if size > LARGEST:
                        raise RegistryError(f"{action}: {host} sends more than {LARGEST >> 20} MB")
                    if time.monotonic() - started > self._patience.seconds:
                        raise TransientError(f"no whole answer in {self._patience.seconds:g} s")
                    parts.append(part)
                responding_host = urlsplit(response.url).netloc
                is_redirected = responding_host != urlsplit(url).netloc
                return Response(
                    status=response.status_code,
                    headers=response.headers,
                    content=b"".join(parts),
                    redirected_host=responding_host if is_redirected else "",
                )
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._make_connection_error(action, host, url, error) from error

    def _open(self, request: HttpRequest, host: str) -> requests.Response:
        """Send a request whose path is an address; the response's body is still to be read.

        Args:
            request: The request.
            host: The registry whose CAs are trusted.

        Raises:
            requests.RequestException: The host did not answer, or redirects to plain HTTP.
        """
        address = urlsplit(request.path)
        proxies = {}
        if _is_loopback(address.netloc):
            # Go's programs use no proxy for loopback addresses either.
            proxies["no_proxy"] = address.hostname or ""
        return self._session.request(
            request.method,
            request.path,
            headers={"Accept-Encoding": "identity", **request.headers},
            data=request.body,
            auth=keep_request,
            allow_redirects=request.method == "GET",
            stream=True,
            timeout=min(self._patience.silence, self._patience.seconds),
            verify=self.write_ca_bundle([host]),
            proxies=proxies,
        )

    def _make_connection_error(
        self, action: str, host: str, url: str, error: Exception
    ) -> Exception:
        """Return the error to raise for a request without a response.

        A ``TransientError`` for a failure that may pass, otherwise a ``RegistryError``.

        Args:
            action: The work, for messages.
            host: The registry.
            url: The address of the request.
            error: The failure, as requests or the system raised it.
        """
        causes = list_causes(error)
        reason = self.clean_text(find_reason(error))
        if any(isinstance(cause, _WithoutTlsError) for cause in causes):
            return make_plain_http_error(action, host)
        for cause in causes:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return _make_untrusted_error(host, cause)
        for cause in causes:
            # The end of the connection may be a network failure, which may pass.
            if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
                hint = "only a registry on this machine may be without TLS"
                return RegistryError(f"{action}: {host} does not speak TLS ({reason})", hint=hint)
        unresolved = next((cause for cause in causes if isinstance(cause, socket.gaierror)), None)
        # With a proxy, the name that cannot be resolved may be the proxy's own.
        if unresolved is None or isinstance(error, requests.exceptions.ProxyError):
            return TransientError(reason)
        last = RegistryUnreachableError(
            f"cannot resolve {urlsplit(url).netloc} ({unresolved.strerror})",
            hint="check the registry's name, and this machine's DNS and proxy settings",
        )
        # The name server did not answer, which may pass.
        if unresolved.errno == socket.EAI_AGAIN:
            return TransientError(str(last.message), last)
        return last


def _make_token_request(
    url: str, values: Mapping[str, str], login: Mapping[str, str]
) -> HttpRequest:
    """Return the request for a token to a token service.

    Args:
        url: The address of the service.
        values: The parameters ``service`` and ``scope``.
        login: An entry of docker's ``auths``; ``{}`` without a login.
    """
    identity = login.get("identitytoken", "")
    if identity:
        # OAuth 2: the token of ``docker login`` is exchanged for one of this scope.
        oauth_values = {
            **values,
            "grant_type": "refresh_token",
            "client_id": "trainworks",
            "refresh_token": identity,
        }
        prepared = requests.Request("POST", url, data=oauth_values).prepare()
        headers = dict(prepared.headers)
    else:
        prepared = requests.Request("GET", url, params=values).prepare()
        headers = {"Authorization": f"Basic {login['auth']}"} if login else {}
    return HttpRequest(
        path=str(prepared.url),
        method=str(prepared.method),
        headers=headers,
        body=str(prepared.body or "").encode(),
    )


def _make_untrusted_error(host: str, error: ssl.SSLCertVerificationError) -> RegistryError:
    """Return the error for a certificate that is not trusted."""
    hint = (
        f"put its CA into {ENGINE_CERTIFICATES[0]}/{host}/ca.crt,"
        f" as for docker, or set {BUNDLES[0]}"
    )
    if error.verify_code in WRONG_NAMES:
        hint = "use a host name that the registry's certificate has"
    return RegistryError(f"{host}: certificate not trusted ({error.verify_message})", hint=hint)


class _WithoutTlsError(requests.RequestException):
    """A registry with TLS redirects to an address without TLS."""


class _Session(requests.Session):
    """Follows redirects to a registry's blobs, without a login and never from TLS to plain HTTP."""

    def rebuild_auth(
        self, prepared_request: requests.PreparedRequest, response: requests.Response
    ) -> None:
        """Remove the login from a request to another host; called before a redirect is followed."""
        old = urlsplit(str(response.request.url))
        new = urlsplit(str(prepared_request.url))
        stays_plain = old.scheme == "http" and _is_loopback(new.netloc)
        if new.scheme != "https" and not stays_plain:
            raise _WithoutTlsError
        if new.netloc != old.netloc:
            prepared_request.headers.pop("Authorization", None)


def make_plain_http_error(action: str, host: str) -> RegistryError:
    """Return the error for a registry that names an address without TLS."""
    return RegistryError(
        f"{action}: {host} sends us to an address without TLS; nothing was sent there",
        hint=(
            "the registry, or the proxy before it, announces http:"
            " addresses: set X-Forwarded-Proto there"
        ),
    )


def parse_json_object(content: bytes, where: str) -> Mapping[str, Any]:
    """Parse a JSON object.

    Args:
        content: The bytes of the document.
        where: The document, for the error: ``the manifest sha256:...``.

    Raises:
        RegistryError: The document is not a JSON object.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RegistryError(f"{where} is not a JSON object")
    return value


def _parse_retry_after(text: str) -> float:
    """Return the seconds from now that a header ``Retry-After`` names; 0 for other texts.

    The header has seconds, ``120``, or an HTTP date, ``Wed, 21 Oct 2026 07:28:00 GMT``.
    """
    if re.fullmatch(r"\d{1,9}", text.strip()):
        return float(text)
    try:
        until = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # a number of seventeen digits in the date
        return 0.0
    if not until.tzinfo:
        return 0.0
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


def _is_loopback(host: str) -> bool:
    """Return whether a host, ``NAME:PORT`` or ``NAME``, is this machine."""
    machine = host.rpartition(":")[0] if ":" in host else host
    try:
        return ipaddress.ip_address(machine.strip("[]")).is_loopback
    except ValueError:
        return machine == "localhost"
