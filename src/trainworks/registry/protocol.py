"""Asks a registry over its HTTP API (the OCI distribution protocol).

An answer is a status, codes and bytes.

What a registry says decides, and what is absent: no program's words are read. A login goes to the
registry that it is for, or to the token service that this registry names, over TLS alone; only a
registry on this machine may be without.
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
from dataclasses import dataclass, replace
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
from trainworks.host.downloads import TRANSIENT, as_given, causes_of, reason_of
from trainworks.host.settings import HostSettings
from trainworks.registry.credentials import api_host, login_for

BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Variables that name a CA bundle. pip's own variable is not one of them: it is
for the package index.
"""

ENGINES_TRUST = tuple(
    map(
        Path,
        (
            "/etc/docker/certs.d",
            "/etc/containers/certs.d",
            "~/.config/containers/certs.d",
            "~/.docker/certs.d",
        ),
    )
)
"""Where docker and buildah keep the certificates of each registry, in a folder with its name."""

ABSENT = frozenset({"MANIFEST_UNKNOWN", "NAME_UNKNOWN"})
"""What a registry says, with HTTP 404, of a tag or a repository that it does not have."""

HARBORS = "NOT_FOUND"
"""What Harbor says instead, a code that the protocol does not have
(goharbor/harbor, pull request 23637).
"""

WRONG_NAMES = frozenset({62, 64})
"""OpenSSL's results of a verification: the certificate is for other names, or
for other addresses.
"""

LARGEST = 64 << 20
"""Bytes that are read of a manifest, a list or a proof."""

LONGEST_PAUSE = 32
"""How much longer than the first pause a later one is, at most."""

LONGEST_WAIT = 300.0
"""Seconds that a registry may ask us to wait (``Retry-After``).

One that asks for more has refused.
"""

SHOWN = 300
"""Characters of a registry's or a program's words in a message."""

_Result = TypeVar("_Result")


class RegistryUnreachableError(RegistryError):
    """A registry cannot be resolved, or did not answer in any attempt."""


class AbsentError(RegistryError):
    """The registry does not have it. If not ``certain``, its code is not one of the protocol's."""

    certain = True


class PassingError(Exception):
    """A failed attempt that may succeed when repeated.

    Attributes:
        last: The error if it is not repeated.
        wait: Seconds that the registry asks us to wait; 0 where it says nothing.
    """

    def __init__(self, said: str, last: RegistryError | None = None, *, wait: float = 0.0) -> None:
        """Store what failed, in words."""
        super().__init__(said)
        self.last = last
        self.wait = wait


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often and how long a registry is asked.

    Seven attempts wait for a minute in total, long enough for a registry to restart.

    Attributes:
        attempts: How often each command is tried.
        pause: Seconds before the second attempt; doubles after that, up to ``LONGEST_PAUSE`` times.
        seconds: How long one answer may take.
        silence: Seconds for which a registry may send nothing.
    """

    attempts: int = 7
    pause: float = 1.0
    seconds: float = 600.0
    silence: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a registry answered."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    elsewhere: str = ""
    """The other host that answered, after a redirect."""

    @property
    def errors(self) -> list[Mapping[str, Any]]:
        """The errors that it names in the protocol's form.

        None if something else answered in its place.
        """
        try:
            rows = json.loads(self.content)["errors"]
        except (ValueError, RecursionError, TypeError, LookupError):
            return []
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    @property
    def codes(self) -> frozenset[str]:
        """The codes of its errors."""
        return frozenset(str(row.get("code")) for row in self.errors)

    @property
    def words(self) -> str:
        """The status, and what the registry says to it."""
        status = f"HTTP {self.status} {responses.get(self.status, '')}".strip()
        said = (
            f"{row.get('code')}: {row.get('message') or row.get('detail') or ''}"
            for row in self.errors
        )
        return "; ".join((f"{status} from {self.elsewhere}" if self.elsewhere else status, *said))


class Client:
    """Asks registries, with this machine's logins, certificates and proxies."""

    def __init__(
        self, settings: HostSettings, folder: Path, *, report: Report, patience: Patience
    ) -> None:
        """Store this machine's settings.

        ``folder`` is private, ``report`` receives a line for each retry.
        """
        self._settings = settings
        self._folder = folder
        self._report = report
        self._patience = patience
        self._session = _Session()
        self._plain: dict[str, bool] = {}
        self._bundles: dict[tuple[str, ...], bool | str] = {}
        self._authorized: dict[tuple[str, str], str] = {}
        self.logins: dict[str, dict[str, str]] = {}
        """The login of each registry that was asked, as an entry of docker's ``auths``."""

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def ask(
        self,
        doing: str,
        repository: str,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        attempts: int = 0,
        absent: bool = False,
    ) -> Answer:
        """Send a request about a repository, again after a failure that may pass.

        Args:
            doing: What it is for, for messages.
            path: What follows ``/v2/NAME/``, or an address that the registry gave.
            attempts: How often it is sent; default: as patience has it.
            absent: Whether an answer with the status 404 is one, too: the
                registry does not know the path.

        Returns:
            An answer with a status of 200 to 299.

        Raises:
            AbsentError: The registry does not have it.
            RegistryUnreachableError: The registry cannot be resolved, or did
                not answer in any attempt.
            RegistryError: Every other answer.
        """
        host, _, name = repository.partition("/")
        scope = f"repository:{name}:{'pull' if method == 'GET' else 'pull,push'}"

        def attempt() -> Answer:
            given = path.startswith("/") or "://" in path
            url = urljoin(self._base(host), path if given else f"/v2/{name}/{path}")
            for again in (True, False):
                known = self._authorized.get((host, scope))
                mine = {**(headers or {}), **({"Authorization": known} if known else {})}
                answer = self._send(doing, host, method, url, mine, body)
                challenge = answer.headers.get("WWW-Authenticate", "")
                if not (again and answer.status == HTTPStatus.UNAUTHORIZED and challenge):
                    break
                authorization = self._authorization(doing, host, challenge, scope)
                if not authorization:
                    break
                self._authorized[host, scope] = authorization
            if absent and answer.status == HTTPStatus.NOT_FOUND:
                return answer
            return self._good(doing, host, answer)

        return self.patiently(doing, host, attempt, attempts=attempts)

    def login(self, host: str) -> dict[str, str]:
        """Return this machine's login for a registry; ``{}`` without one."""
        if host not in self.logins:
            self.logins[host] = login_for(host)
        return self.logins[host]

    def plain(self, host: str) -> bool:
        """Whether a registry speaks HTTP without TLS: only one on this machine may."""
        if host not in self._plain:
            self._plain[host] = False
            if _is_loopback(host):
                try:
                    self._request("GET", urlunsplit(("https", host, "/v2/", "", "")), host).close()
                except (requests.RequestException, OSError) as error:
                    causes = causes_of(error)
                    if not any(isinstance(each, ssl.SSLError) for each in causes):
                        # No answer, or not yet: whoever asks reports that.
                        del self._plain[host]
                        return False
                    self._plain[host] = not any(
                        isinstance(each, ssl.SSLCertVerificationError) for each in causes
                    )
        return self._plain[host]

    def trust(self, hosts: Sequence[str]) -> bool | str:
        """Return the CA bundle for registries: this machine's, and what engines
        trust for these registries alone.
        """
        key = tuple(hosts)
        if key not in self._bundles:
            files = [Path(value) for name in BUNDLES if (value := os.environ.get(name))]
            files += sorted(
                path
                for folder in ENGINES_TRUST
                for host in hosts
                for path in folder.expanduser().glob(f"{host}/*.crt")
            )
            parts = [self._settings.ca, *(path.read_bytes() for path in files if path.is_file())]
            bundle = b"\n".join(filter(None, dict.fromkeys(parts)))
            path = self._folder / f"ca{len(self._bundles)}.pem"
            if bundle:
                path.write_bytes(bundle)
            self._bundles[key] = str(path) if bundle else True
        return self._bundles[key]

    def patiently(
        self, doing: str, host: str, attempt: Callable[[], _Result], *, attempts: int = 0
    ) -> _Result:
        """Return the result of an attempt.

        Repeat it after a ``PassingError``, as often as patience has it.

        A reason is printed when it first comes: six lines of one refused
        connection say no more than one.
        """
        said = ""
        pause, count = self._patience.pause, attempts or self._patience.attempts
        for number in range(1, count + 1):
            try:
                return attempt()
            except PassingError as error:
                # Requests within that time begin some registries' window anew.
                wait = max(pause, error.wait)
                if number == count or error.wait > LONGEST_WAIT:
                    raise error.last or RegistryUnreachableError(
                        f"{doing}: {host} failed {number} time{'s' if number > 1 else ''}: {error}",
                        hint="repeat the command; what the registry already has is not sent again",
                    ) from None
                if str(error) != said:
                    said = str(error)
                    self._report(
                        f"  {doing}: {said}; attempt {number + 1} of {count} in {wait:g} s"
                    )
                time.sleep(wait)
                pause = min(pause * 2, LONGEST_PAUSE * self._patience.pause)
        raise AssertionError("at least one attempt")

    def clean(self, text: str) -> str:
        """Return others' words without terminal escapes, logins and the queries of addresses."""
        text = "".join(
            each if each.isprintable() or each == "\n" else " "
            for each in subprocesses.clean(text.encode())
        )
        for login in self.logins.values():
            encoded = login.get("auth", "")
            password = base64.b64decode(encoded).decode().partition(":")[2]
            for secret in filter(None, (encoded, password, login.get("identitytoken", ""))):
                text = text.replace(secret, "***")
        # The query of an address may have a signature.
        text = " ".join(re.sub(r"\?[^\s\"\\]*", "", text).split())
        # What failed stands first; what comes after it are programs' own places in their code.
        return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."

    def _refusal(self, doing: str, host: str, answer: Answer) -> RegistryError:
        """Return the error for an answer that is not a good one."""
        # Also where nothing asked for it yet: an answer may repeat what an
        # engine has logged in with.
        self.login(host)
        said, codes = self.clean(answer.words), answer.codes
        if (
            answer.status == HTTPStatus.NOT_FOUND
            and codes
            and codes <= ABSENT | {HARBORS}
            and not answer.elsewhere
        ):
            hint = (
                "check the name; some registries need a"
                " repository to be created before the first push"
            )
            absent = AbsentError(f"{doing}: not found at {host} ({said})", hint=hint)
            absent.certain = codes <= ABSENT
            return absent
        again = (
            f"log in again (`docker login {host}`;"
            " for ECR see docs/ship.md), then repeat the command"
        )
        known = {
            401: (f"{host} rejects the user or password", again),
            403: (
                f"permission denied by {host}",
                "give the user the right to push, or log in again",
            ),
            405: (f"{host} is read-only", "try later, or use another repository"),
        }
        stranger = (
            ""
            if codes
            else "no registry answers so: look at the address, and at the proxy before the registry"
        )
        what, hint = known.get(answer.status, (f"{host} refuses", stranger))
        if answer.status == HTTPStatus.UNAUTHORIZED and not self.login(host):
            what = f"{host} requires a login, and this machine has none"
            hint = f"`docker login {host}`; docs/ship.md lists the other sources of logins"
        return RegistryError(f"{doing}: {what} ({said})", hint=hint)

    def _base(self, host: str) -> str:
        return urlunsplit(("http" if self.plain(host) else "https", api_host(host), "", "", ""))

    def _good(self, doing: str, host: str, answer: Answer) -> Answer:
        if answer.status in TRANSIENT or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            wait = _seconds_of(answer.headers.get("Retry-After", ""))
            asked = f"; it asks to wait {wait:g} s" if wait else ""
            raise PassingError(f"{self.clean(answer.words)}{asked}", wait=wait)
        if answer.status not in range(200, 300):
            raise self._refusal(doing, host, answer)
        return answer

    def _authorization(self, doing: str, host: str, challenge: str, scope: str) -> str:
        """Return what a registry wants to read, by its challenge.

        ``""`` if this machine has no login for it.
        """
        scheme, _, rest = challenge.partition(" ")
        login = self.login(host)
        basic = f"Basic {login['auth']}" if login else ""
        if scheme.lower() != "bearer":
            return basic
        asked = parse_keqv_list(parse_http_list(rest))
        service = urlsplit(asked.get("realm") or "")
        if service.scheme != "https" and not (self.plain(host) and _is_loopback(service.netloc)):
            raise without_tls(doing, host)
        url = str(asked["realm"])
        values = {"service": asked.get("service") or "", "scope": asked.get("scope") or scope}
        identity = login.get("identitytoken", "")
        if identity:
            values |= {
                "grant_type": "refresh_token",
                "client_id": "trainworks",
                "refresh_token": identity,
            }
        request = requests.Request(
            "POST" if identity else "GET", url, **{"data" if identity else "params": values}
        )
        prepared = request.prepare()
        headers = dict(prepared.headers) if identity else {"Authorization": basic} if basic else {}
        body = str(prepared.body or "").encode()
        answer = self._send(doing, host, str(prepared.method), str(prepared.url), headers, body)
        # What it lacks says nothing about the repository.
        answer = self._good(doing, host, replace(answer, elsewhere=service.netloc))
        found = table(answer.content, f"the token that {service.netloc} gives for {host}")
        token = found.get("token") or found.get("access_token")
        if not isinstance(token, str):
            raise RegistryError(f"{doing}: {service.netloc} gives no token for {host}")
        return f"Bearer {token}"

    def _send(
        self,
        doing: str,
        host: str,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes = b"",
    ) -> Answer:
        begun, parts, size = time.monotonic(), [], 0
        try:
            with self._request(method, url, host, headers, body) as response:
                for part in response.iter_content(1 << 16):
                    size += len(part)
                    if size > LARGEST:
                        raise RegistryError(f"{doing}: {host} sends more than {LARGEST >> 20} MB")
                    if time.monotonic() - begun > self._patience.seconds:
                        raise PassingError(f"no whole answer in {self._patience.seconds:g} s")
                    parts.append(part)
                there, asked = (urlsplit(each).netloc for each in (response.url, url))
                return Answer(
                    status=response.status_code,
                    headers=response.headers,
                    content=b"".join(parts),
                    elsewhere=there if there != asked else "",
                )
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._no_answer(doing, host, url, error) from error

    def _request(
        self,
        method: str,
        url: str,
        host: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> requests.Response:
        # Go's programs use no proxy for loopback addresses either.
        direct = (
            {"no_proxy": urlsplit(url).hostname or ""} if _is_loopback(urlsplit(url).netloc) else {}
        )
        return self._session.request(
            method,
            url,
            headers={"Accept-Encoding": "identity", **(headers or {})},
            data=body,
            auth=as_given,
            allow_redirects=method == "GET",
            stream=True,
            timeout=min(self._patience.silence, self._patience.seconds),
            verify=self.trust([host]),
            proxies=direct,
        )

    def _no_answer(self, doing: str, host: str, url: str, error: Exception) -> Exception:
        """Return the error for a request without an answer."""
        causes = causes_of(error)
        said = self.clean(reason_of(error))
        if any(isinstance(each, _WithoutTlsError) for each in causes):
            return without_tls(doing, host)
        for each in causes:
            if isinstance(each, ssl.SSLCertVerificationError):
                trust = (
                    f"put its CA into {ENGINES_TRUST[0]}/{host}/ca.crt,"
                    f" as for docker, or set {BUNDLES[0]}"
                )
                other = "use a host name that the registry's certificate has"
                hint = other if each.verify_code in WRONG_NAMES else trust
                return RegistryError(
                    f"{host}: certificate not trusted ({each.verify_message})", hint=hint
                )
        if any(
            isinstance(each, ssl.SSLError) and not isinstance(each, ssl.SSLEOFError)
            for each in causes
        ):
            hint = "only a registry on this machine may be without TLS"
            return RegistryError(f"{doing}: {host} does not speak TLS ({said})", hint=hint)
        unresolved = next((each for each in causes if isinstance(each, socket.gaierror)), None)
        if unresolved is not None and not isinstance(error, requests.exceptions.ProxyError):
            last = RegistryUnreachableError(
                f"cannot resolve {urlsplit(url).netloc} ({unresolved.strerror})",
                hint="check the registry's name, and this machine's DNS and proxy settings",
            )
            return (
                PassingError(str(last.message), last)
                if unresolved.errno == socket.EAI_AGAIN
                else last
            )
        return PassingError(said)


class _WithoutTlsError(requests.RequestException):
    """A registry with TLS sends us to an address without it."""


class _Session(requests.Session):
    """Follows a registry to where its blobs are, never from TLS to an address
    without it, and no login goes along.
    """

    def rebuild_auth(
        self, prepared_request: requests.PreparedRequest, response: requests.Response
    ) -> None:
        """Keep the login from another host; called before a redirect is followed."""
        old, new = str(response.request.url), str(prepared_request.url)
        if urlsplit(new).scheme != "https" and not (
            urlsplit(old).scheme == "http" and _is_loopback(urlsplit(new).netloc)
        ):
            raise _WithoutTlsError
        if urlsplit(new).netloc != urlsplit(old).netloc:
            prepared_request.headers.pop("Authorization", None)


def without_tls(doing: str, host: str) -> RegistryError:
    """Return the error for a registry that would have us send something without TLS."""
    return RegistryError(
        f"{doing}: {host} sends us to an address without TLS; nothing was sent there",
        hint=(
            "the registry, or the proxy before it, announces http:"
            " addresses: set X-Forwarded-Proto there"
        ),
    )


def table(content: bytes, where: str) -> Mapping[str, Any]:
    """Return a JSON object; raises ``RegistryError`` if it is something else."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RegistryError(f"{where} is not a JSON object")
    return found


def _seconds_of(text: str) -> float:
    """Return the seconds that a ``Retry-After`` asks for, which is a number or a time.

    0 where it says neither.
    """
    if re.fullmatch(r"\d{1,9}", text.strip()):
        return float(text)
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    return max(0.0, (until - datetime.now(UTC)).total_seconds()) if until.tzinfo else 0.0


def _is_loopback(host: str) -> bool:
    machine = host.rpartition(":")[0] if ":" in host else host
    try:
        return ipaddress.ip_address(machine.strip("[]")).is_loopback
    except ValueError:
        return machine == "localhost"
