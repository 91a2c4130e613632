"""A small client of the OCI distribution protocol: blobs, manifests, tags, referrers.

To attach a file to an image::

    with Registries(settings) as registries:
        repository = registries.repository("registry.example/team/image")
        subject = repository.descriptor("sha256:...")
        repository.attach(subject, "application/spdx+json", {"sbom.json": content})
        repository.referrers(subject["digest"])

Every method raises ``RegistryError``. Broken connections and busy servers are tried again, with pauses that double;
each retry is reported through ``report``. Messages never contain a password, a token or the query of an address.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import ipaddress
import json
import os
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast
from urllib.parse import urlencode, urljoin, urlsplit, urlunsplit

import requests
import urllib3

from trainworks.engine.scratch import private_folder
from trainworks.errors import RegistryError
from trainworks.host.downloads import TRANSIENT, as_given, reason_of
from trainworks.host.settings import HostSettings
from trainworks.registry.credentials import Credentials, credentials_for

DEFAULT_HOST = "docker.io"
"""The registry of names without a host, as in docker and buildah. Logins are stored under this name."""

DEFAULT_SERVER = "registry-1.docker.io"
"""The server that answers for ``DEFAULT_HOST``."""

CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
"""A parameter of a ``WWW-Authenticate`` header."""

IMAGE_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
IMAGE_INDEX = "application/vnd.oci.image.index.v1+json"
IMAGE_CONFIGURATION = "application/vnd.oci.image.config.v1+json"
IMAGE_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
MANIFESTS = (
    IMAGE_INDEX,
    "application/vnd.docker.distribution.manifest.list.v2+json",
    IMAGE_MANIFEST,
    "application/vnd.docker.distribution.manifest.v2+json",
)
"""Media types that a tag may point at: an index of several platforms before a single image, as engines ask for it."""

EMPTY = "application/vnd.oci.empty.v1+json"
"""Media type of the configuration of an artifact that is not an image: two bytes, ``{}``."""

BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Variables that name a CA bundle. pip's own variable is not one of them: it is for the package index."""

ENGINES_TRUST = tuple(
    map(Path, ("/etc/docker/certs.d", "/etc/containers/certs.d", "~/.config/containers/certs.d", "~/.docker/certs.d"))
)
"""Where docker and buildah keep the certificates of each registry, in a folder with its name."""

Descriptor = Mapping[str, Any]
"""A pointer to content: ``mediaType``, ``digest``, ``size``, and optionally ``artifactType`` and ``annotations``."""

Opener = Callable[[], AbstractContextManager[IO[bytes]]]
"""Opens the content of a blob from its first byte, once for each attempt."""

Report = Callable[[str], None]
"""Receives a line of text for the user."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often each request is tried; ``pause`` is the seconds before the second attempt, and doubles after that.

    Seven attempts wait for a minute in total, long enough for a registry to restart.
    """

    attempts: int = 7
    pause: float = 1.0
    connect_seconds: float = 20.0
    answer_seconds: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest as the registry has it, byte for byte."""

    content: bytes
    media_type: str

    @property
    def digest(self) -> str:
        """The hash that names it."""
        return digest_of(self.content)

    def value(self) -> dict[str, Any]:
        """Return the parsed manifest; raises ``RegistryError`` if it is not a JSON object."""
        try:
            found = json.loads(self.content)
        except ValueError as error:
            raise RegistryError(f"the manifest {self.digest} is not JSON ({error})") from error
        if not isinstance(found, dict):
            raise RegistryError(f"the manifest {self.digest} is not a JSON object")
        return found


def digest_of(content: bytes) -> str:
    """Return ``sha256:...`` of some bytes."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def canonical(value: object) -> bytes:
    """Return a value as canonical JSON: keys sorted, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class RegistryUnreachableError(RegistryError):
    """A registry cannot be resolved, or did not answer in any attempt."""


class _BrokenError(Exception):
    """A failed attempt that may succeed when repeated."""


class Registries:
    """The registries that one command talks to; a context manager that keeps CA bundles in a private folder."""

    def __init__(
        self, settings: HostSettings, *, report: Report | None = None, patience: Patience | None = None
    ) -> None:
        """Store this machine's settings.

        Args:
            settings: Has the CA to trust. Proxies come from the process's environment.
            report: Receives a line for each retry.
            patience: How often and how long to try.
        """
        self._settings = settings
        self._report: Report = report or (lambda _line: None)
        self._patience = patience or Patience()
        self._hosts: dict[str, Registry] = {}
        self._stack = ExitStack()
        self._folder = Path()

    def __enter__(self) -> Registries:
        """Create the folder for CA bundles."""
        self._folder = self._stack.enter_context(private_folder())
        return self

    def __exit__(self, *_error: object) -> None:
        """Close connections and remove the CA bundles."""
        self._stack.close()

    def repository(self, address: str, *, actions: str = "pull,push") -> Repository:
        """Return a repository; no request is sent yet.

        Args:
            address: ``HOST[:PORT]/NAME``, without a tag.
            actions: What a token is asked for; ``pull`` to read where pushing is not allowed.

        Raises:
            RegistryError: The address is malformed.
        """
        host, name = split_repository(address)
        if host not in self._hosts:
            self._hosts[host] = self._stack.enter_context(
                Registry(host, verify=self._trusted(host), patience=self._patience, report=self._report)
            )
        return Repository(self._hosts[host], name, actions=actions)

    def _trusted(self, host: str) -> bool | str:
        """Return the CA bundle for a registry: this machine's, and what engines trust for this registry alone."""
        files = [Path(value) for name in BUNDLES if (value := os.environ.get(name))]
        files += sorted(path for folder in ENGINES_TRUST for path in folder.expanduser().glob(f"{host}/*.crt"))
        parts = [self._settings.ca, *(path.read_bytes() for path in files if path.is_file())]
        bundle = b"\n".join(filter(None, dict.fromkeys(parts)))
        if not bundle:
            return True
        path = self._folder / f"{len(self._hosts)}.pem"
        path.write_bytes(bundle)
        return str(path)


def image_digest(reference: str, registries: Registries) -> str:
    """Return the digest, ``sha256:...``, of the image that ``[HOST/]NAME[:TAG]`` is now; nothing is pulled.

    Raises:
        RegistryUnreachableError: The registry cannot be resolved, or does not answer.
        RegistryError: The registry has no such image, or refuses to send it.
    """
    host, name, tag = split_reference(reference)
    return str(registries.repository(f"{host}/{name}", actions="pull").descriptor(tag)["digest"])


def split_reference(reference: str) -> tuple[str, str, str]:
    """Return host, name and tag of a reference: ``debian`` is (``docker.io``, ``library/debian``, ``latest``)."""
    path, _, tag = reference.rpartition(":") if ":" in reference.rpartition("/")[2] else (reference, "", "latest")
    host, slash, name = path.partition("/")
    if slash and ("." in host or ":" in host or host == "localhost"):
        return host, name, tag
    return DEFAULT_HOST, path if slash else f"library/{path}", tag


def split_repository(address: str) -> tuple[str, str]:
    """Return host and name of a repository; raises ``RegistryError`` if the address is malformed."""
    host, slash, name = address.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        raise RegistryError(
            f"{address}: a repository is HOST/NAME, and {host!r} is not a host name",
            hint=f"for example {DEFAULT_HOST}/{address}, or ACCOUNT.dkr.ecr.REGION.amazonaws.com/{address}",
        )
    if "@" in host:
        raise RegistryError("the repository must not contain a user or password", hint="`docker login` stores them")
    if not re.fullmatch(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*", name):
        hint = "give the tag with --tag" if ":" in name else "use lowercase letters, digits, . _ - and /"
        raise RegistryError(f"{address}: {name!r} is not a valid repository name", hint=hint)
    return host, name


class Registry:
    """One registry: a connection and a login."""

    def __init__(self, host: str, *, verify: bool | str = True, patience: Patience, report: Report) -> None:
        """Store how to connect. The login is read when the registry asks for one, and again when it has expired."""
        self.host = host
        self.patience = patience
        self.report = report
        self._verify = verify
        self._session = requests.Session()
        self._base = ""
        self._basic = ""
        self._tokens: dict[str, str] = {}
        self._secrets: set[str] = set()

    def __enter__(self) -> Registry:
        """Return itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the connection."""
        self._session.close()

    def address(self, path: str) -> str:
        """Return the address of a path: https, or http for a registry on this machine that does not speak TLS."""
        if not self._base:
            host = DEFAULT_SERVER if self.host == DEFAULT_HOST else self.host
            self._base = urlunsplit(("https", host, "", "", ""))
            if _is_loopback(self.host):
                try:
                    self._session.get(f"{self._base}/v2/", timeout=self.patience.connect_seconds, verify=self._verify)
                except requests.exceptions.SSLError as error:
                    if "CERTIFICATE_VERIFY_FAILED" not in str(error):
                        self._base = urlunsplit(("http", host, "", "", ""))
                except requests.RequestException:
                    # No answer, or not yet: the request itself reports that.
                    base, self._base = self._base, ""
                    return base + path
        return self._base + path

    def patiently(self, doing: str, attempt: Callable[[], _Result]) -> _Result:
        """Return the result of an attempt; repeat it after a broken connection or a busy server."""
        pause = self.patience.pause
        for number in range(1, self.patience.attempts + 1):
            try:
                return attempt()
            except _BrokenError as error:
                if number == self.patience.attempts:
                    raise RegistryUnreachableError(
                        f"{doing}: {self.host} failed {number} times: {error}",
                        hint="repeat the command; what the registry already has is not sent again",
                    ) from error
                self.report(f"  {doing}: {error}; attempt {number + 1} of {self.patience.attempts} in {pause:g} s")
                time.sleep(pause)
                pause *= 2
        raise AssertionError("at least one attempt")

    def once(
        self,
        method: str,
        address: str,
        scope: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: Opener | bytes | None = None,
        size: int = 0,
        stream: bool = False,
    ) -> requests.Response:
        """Send a request and return the answer, whatever its status below 500; an expired login is renewed once.

        With ``stream`` the caller reads the content and closes the response.

        Raises:
            _BrokenError: Another attempt may succeed.
            RegistryError: Another attempt would fail too: the host cannot be resolved, its certificate is not trusted.
        """
        response = self._send(method, address, scope, headers, content, size, stream=stream)
        # ECR answers 403 when a login expires, after 12 hours.
        status = response.status_code
        void = status == 401 or (status == 403 and "expired" in self._said(response).lower())
        if void and self._renew(response, scope):
            response.close()
            response = self._send(method, address, scope, headers, content, size, stream=stream)
        status = response.status_code
        if status in TRANSIENT or status >= 500:
            raise _BrokenError(f"HTTP {status}{self._said(response)}")
        return response

    def refusal(self, response: requests.Response, doing: str) -> RegistryError:
        """Return the error for an answer that another attempt would not change."""
        status, said = response.status_code, self._said(response)
        words = said.lower()
        again = f"log in again (`docker login {self.host}`; for ECR see docs/push.md), then repeat the command"
        if "expired" in words:
            return RegistryError(f"{doing}: the login at {self.host} has expired{said}", hint=again)
        if status == 401:
            if not self._secrets:
                return RegistryError(
                    f"{doing}: {self.host} requires a login, and this machine has none",
                    hint=f"`docker login {self.host}`; docs/push.md lists the other sources of logins",
                )
            return RegistryError(f"{doing}: {self.host} rejects the user or password{said}", hint=again)
        if status == 405 or "read-only" in words or "readonly" in words:
            return RegistryError(
                f"{doing}: {self.host} is read-only{said}",
                hint="try later, or use another repository",
            )
        if status == 403:
            return RegistryError(
                f"{doing}: permission denied by {self.host}{said}",
                hint="the user needs the right to push (for ECR: an IAM policy)",
            )
        if status == 404:
            return RegistryError(
                f"{doing}: not found at {self.host}{said}",
                hint="check the name; some registries need a repository to be created before the first push",
            )
        return RegistryError(f"{doing}: {self.host} answers HTTP {status}{said}")

    def _send(
        self,
        method: str,
        address: str,
        scope: str,
        headers: Mapping[str, str] | None,
        content: Opener | bytes | None,
        size: int,
        *,
        stream: bool,
    ) -> requests.Response:
        sent = dict(headers or {})
        # A registry may redirect an upload to another server, which must not get the login.
        ours = urlsplit(self._base).netloc or self.host
        if urlsplit(address).netloc == ours and (known := self._tokens.get(scope) or self._basic):
            sent["Authorization"] = known
        with ExitStack() as stack:
            body: Any = content
            if callable(content):
                body = _Body(stack.enter_context(content()), size)
            try:
                return self._session.request(
                    method,
                    address,
                    headers=sent,
                    data=body,
                    # Without it, requests would use a login from netrc instead.
                    auth=as_given,
                    stream=stream,
                    timeout=(self.patience.connect_seconds, self.patience.answer_seconds),
                    verify=self._verify,
                )
            except requests.exceptions.SSLError as error:
                reason = self._clean(reason_of(error))
                if "CERTIFICATE_VERIFY_FAILED" in reason:
                    trust = f"put its CA into {ENGINES_TRUST[0]}/{self.host}/ca.crt, as for docker, or set {BUNDLES[0]}"
                    other = "use a host name that the registry's certificate has"
                    wrong_name = "mismatch" in reason.lower()
                    raise RegistryError(f"{self.host}: {reason}", hint=other if wrong_name else trust) from error
                raise _BrokenError(reason) from error
            except requests.exceptions.InvalidURL as error:
                raise RegistryError(f"{self.host} is not a valid address ({error})") from error
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                reason = self._clean(reason_of(error))
                if "NameResolutionError" in repr(error):
                    raise RegistryUnreachableError(
                        reason, hint="check the registry's name, and this machine's DNS and proxy settings"
                    ) from error
                raise _BrokenError(reason) from error

    def _renew(self, response: requests.Response, scope: str) -> bool:
        """Log in as the registry asks; return whether there is a new login to try."""
        challenge = response.headers.get("WWW-Authenticate", "Basic")
        kind = challenge.partition(" ")[0].lower()
        login = credentials_for(self.host)
        if login is not None:
            self._secrets.add(login.password)
        if kind == "bearer":
            self._tokens[scope] = f"Bearer {self._token(dict(CHALLENGE.findall(challenge)), scope, login)}"
            return True
        if login is None:
            return False
        basic = b64encode(f"{login.user}:{login.password}".encode()).decode()
        self._secrets.add(basic)
        before, self._basic = self._basic, f"Basic {basic}"
        return before != self._basic

    def _token(self, said: Mapping[str, str], scope: str, login: Credentials | None) -> str:
        realm = said.get("realm", "")
        if urlsplit(realm).scheme != "https" and not _is_loopback(urlsplit(realm).netloc):
            raise RegistryError(f"{self.host} asks for the password at {realm}, which has no TLS; it was not sent")
        query = [("service", said["service"])] if "service" in said else []
        query += [("scope", each) for each in scope.split(" ")]
        try:
            response = self._session.get(
                f"{realm}?{urlencode(query)}",
                auth=(login.user, login.password) if login else as_given,
                timeout=self.patience.connect_seconds,
                verify=self._verify,
            )
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise _BrokenError(self._clean(reason_of(error))) from error
        if response.status_code in TRANSIENT or response.status_code >= 500:
            raise _BrokenError(f"{urlsplit(realm).netloc} answers HTTP {response.status_code}")
        if response.status_code != 200:
            response.status_code = 401
            raise self.refusal(response, "logging in")
        content = response.json()
        token = str(content.get("token") or content.get("access_token") or "")
        self._secrets.add(token)
        return token

    def _said(self, response: requests.Response) -> str:
        """Return the registry's own error text, shortened."""
        try:
            errors = response.json()["errors"]
            words = "; ".join(f"{each.get('code', '')}: {each.get('message', '')}" for each in errors)
        except (ValueError, LookupError, TypeError, AttributeError, requests.RequestException):
            return ""
        return f" ({self._clean(words)[:300]})"

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***") if secret else text
        # The query of an address may have a signature.
        return re.sub(r"\?\S*", "", text)


class Repository:
    """One repository of a registry."""

    def __init__(self, registry: Registry, name: str, *, actions: str = "pull,push") -> None:
        """Store the registry's connection, and the actions that tokens are asked for."""
        self.registry = registry
        self.name = name
        self._scope = f"repository:{name}:{actions}"

    def __str__(self) -> str:
        """Return its address: host and name."""
        return f"{self.registry.host}/{self.name}"

    def has_blob(self, digest: str) -> bool:
        """Whether a blob is there."""
        return self.registry.patiently(f"looking for {_short(digest)}", lambda: self._has_blob(digest))

    def put_blob(self, digest: str, size: int, content: Opener, *, sources: Sequence[str] = ()) -> str:
        """Put a blob into the repository, if it is not there already.

        Args:
            digest: ``sha256:...`` of the content; the registry checks it.
            size: Bytes.
            content: Opens the blob, once for each attempt.
            sources: Names of repositories of the same registry that may have it; if one does, it is mounted.

        Returns:
            ``there`` (already), ``mounted`` (from another repository) or ``sent``.
        """
        return self.registry.patiently(
            f"sending {_short(digest)} to {self}", lambda: self._put_blob(digest, size, content, sources)
        )

    def put_bytes(self, content: bytes) -> str:
        """Put a small blob into the repository; return its digest."""
        digest = digest_of(content)
        self.put_blob(digest, len(content), lambda: contextlib.nullcontext(io.BytesIO(content)))
        return digest

    @contextlib.contextmanager
    def open_blob(self, digest: str) -> Iterator[IO[bytes]]:
        """Stream a blob. The reader has to check its hash, and to handle a broken connection."""
        response = self._get(f"blobs/{digest}", stream=True)
        with response:
            if response.status_code != 200:
                raise self.registry.refusal(response, f"reading {_short(digest)} of {self}")
            yield cast("IO[bytes]", response.raw)

    def get_bytes(self, digest: str) -> bytes:
        """Return a small blob; raises ``RegistryError`` if it does not have the digest."""

        def attempt() -> bytes:
            with self.open_blob(digest) as stream:
                try:
                    return stream.read()
                except urllib3.exceptions.HTTPError as error:
                    raise _BrokenError(str(error)) from error

        content = self.registry.patiently(f"reading {_short(digest)}", attempt)
        if digest_of(content) != digest:
            raise RegistryError(f"{self} sent a blob with another digest than {digest}")
        return content

    def get_manifest(self, reference: str) -> Manifest | None:
        """Return the manifest of a tag or digest; ``None`` if there is none."""

        def attempt() -> Manifest | None:
            with self._get(f"manifests/{reference}", {"Accept": ", ".join(MANIFESTS)}) as response:
                if response.status_code == 404:
                    return None
                if response.status_code != 200:
                    raise self.registry.refusal(response, f"reading {self}")
                kind = response.headers.get("Content-Type", "").partition(";")[0]
                manifest = Manifest(content=response.content, media_type=kind)
                announced = response.headers.get("Docker-Content-Digest", manifest.digest)
                if announced.startswith("sha256:") and announced != manifest.digest:
                    raise RegistryError(f"{self} announces {announced} and sends {manifest.digest}")
                return manifest

        found = self.registry.patiently(f"reading {self}", attempt)
        if found and reference.startswith("sha256:") and found.digest != reference:
            raise RegistryError(f"{self} sent a manifest with another digest than {reference}")
        return found

    def put_manifest(self, manifest: Manifest, *, tag: str = "") -> str:
        """Put a manifest under a tag, or by its digest alone; return the digest.

        ``referrers`` finds a manifest with a ``subject`` afterwards, also in registries without the referrers API.
        """

        def attempt() -> bool:
            address = self.registry.address(f"/v2/{self.name}/manifests/{tag or manifest.digest}")
            kind = {"Content-Type": manifest.media_type}
            with self.registry.once("PUT", address, self._scope, headers=kind, content=manifest.content) as response:
                if response.status_code not in (200, 201):
                    raise self.registry.refusal(response, f"putting {tag or _short(manifest.digest)} into {self}")
                return "OCI-Subject" in response.headers

        known = self.registry.patiently(f"putting {tag or _short(manifest.digest)} into {self}", attempt)
        subject = manifest.value().get("subject")
        if subject and not known:
            self._note_referrer(str(subject["digest"]), manifest)
        return manifest.digest

    def descriptor(self, reference: str) -> Descriptor:
        """Return the descriptor of a tag or digest; raises ``RegistryError`` if there is none."""
        found = self.get_manifest(reference)
        if found is None:
            raise RegistryError(f"{self} has no {reference}", hint="check the tag or digest")
        return {"mediaType": found.media_type, "digest": found.digest, "size": len(found.content)}

    def attach(
        self,
        subject: Descriptor,
        artifact_type: str,
        files: Mapping[str, bytes],
        *,
        annotations: Mapping[str, str] | None = None,
    ) -> str:
        """Attach files to an image; return the digest of the manifest that lists them.

        Args:
            artifact_type: Media type of the attachment and of each file.
            files: Name to content; the name becomes the layer's title.
            annotations: Of the manifest, for example its creation time.
        """
        layers = [
            {
                "mediaType": artifact_type,
                "digest": self.put_bytes(content),
                "size": len(content),
                "annotations": {"org.opencontainers.image.title": name},
            }
            for name, content in files.items()
        ]
        value = {
            "schemaVersion": 2,
            "mediaType": IMAGE_MANIFEST,
            "artifactType": artifact_type,
            "config": {"mediaType": EMPTY, "digest": self.put_bytes(b"{}"), "size": 2},
            "layers": layers,
            "subject": {key: subject[key] for key in ("mediaType", "digest", "size")},
            **({"annotations": dict(annotations)} if annotations else {}),
        }
        return self.put_manifest(Manifest(content=canonical(value), media_type=IMAGE_MANIFEST))

    def referrers(self, digest: str) -> tuple[Descriptor, ...]:
        """Return descriptors of the attachments of a digest.

        A registry without the referrers API has them in an index under the tag ``sha256-...`` (OCI distribution 1.1).
        """

        def attempt() -> Any:
            with self._get(f"referrers/{digest}", {"Accept": IMAGE_INDEX}) as response:
                if response.status_code == 200:
                    return response.json()
                if response.status_code in (401, 403):
                    raise self.registry.refusal(response, f"reading {self}")
                return None

        index = self.registry.patiently(f"reading {self}", attempt)
        if index is None:
            found = self.get_manifest(_referrers_tag(digest))
            index = found.value() if found else {}
        return tuple(index.get("manifests") or ())

    def _note_referrer(self, subject: str, manifest: Manifest) -> None:
        """Add a manifest to the index under the subject's tag: for registries without the referrers API."""
        value = manifest.value()
        entry = {
            "mediaType": manifest.media_type,
            "digest": manifest.digest,
            "size": len(manifest.content),
            "artifactType": value.get("artifactType") or value["config"]["mediaType"],
            **({"annotations": value["annotations"]} if "annotations" in value else {}),
        }
        found = self.get_manifest(_referrers_tag(subject))
        entries = list(found.value().get("manifests") or ()) if found else []
        if any(each.get("digest") == manifest.digest for each in entries):
            return
        index = {"schemaVersion": 2, "mediaType": IMAGE_INDEX, "manifests": [*entries, entry]}
        self.put_manifest(Manifest(content=canonical(index), media_type=IMAGE_INDEX), tag=_referrers_tag(subject))

    def _get(self, path: str, headers: Mapping[str, str] | None = None, *, stream: bool = False) -> requests.Response:
        address = self.registry.address(f"/v2/{self.name}/{path}")
        sent = {"Accept-Encoding": "identity", **(headers or {})}
        return self.registry.once("GET", address, self._scope, headers=sent, stream=stream)

    def _has_blob(self, digest: str) -> bool:
        address = self.registry.address(f"/v2/{self.name}/blobs/{digest}")
        with self.registry.once("HEAD", address, self._scope) as response:
            if response.status_code in (401, 403):
                raise self.registry.refusal(response, f"pushing to {self}")
            return response.status_code == 200

    def _put_blob(self, digest: str, size: int, content: Opener, sources: Sequence[str]) -> str:
        if self._has_blob(digest):
            return "there"
        for query in [*({"mount": digest, "from": source} for source in sources if source != self.name), {}]:
            scope = " ".join([self._scope, *([f"repository:{query['from']}:pull"] if query else [])])
            path = f"/v2/{self.name}/blobs/uploads/{'?' + urlencode(query) if query else ''}"
            address = self.registry.address(path)
            with self.registry.once("POST", address, scope, headers={"Content-Length": "0"}) as response:
                if response.status_code == 201:
                    return "mounted"
                if response.status_code == 202:
                    place = urljoin(address, response.headers["Location"])
                    break
                if not query:
                    raise self.registry.refusal(response, f"pushing to {self}")
        kind = {"Content-Type": "application/octet-stream"}
        with self.registry.once("PATCH", place, self._scope, headers=kind, content=content, size=size) as response:
            if response.status_code not in (202, 204):
                raise self.registry.refusal(response, f"sending {_short(digest)} to {self}")
            place = urljoin(place, response.headers["Location"])
        parts = urlsplit(place)
        query_text = "&".join(filter(None, (parts.query, urlencode({"digest": digest}))))
        place = urlunsplit((parts.scheme, parts.netloc, parts.path, query_text, ""))
        with self.registry.once("PUT", place, self._scope, headers={"Content-Length": "0"}) as response:
            if response.status_code == 404:
                raise _BrokenError("the registry no longer knows the upload")
            if response.status_code not in (201, 204):
                raise self.registry.refusal(response, f"sending {_short(digest)} to {self}")
        return "sent"


class _Body:
    """The content of a request, read while it is sent; its length is known."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        self._stream = stream
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self.read(1 << 20):
            yield chunk

    def read(self, size: int = -1) -> bytes:
        return self._stream.read(size)


def _is_loopback(host: str) -> bool:
    machine = host.rpartition(":")[0] if ":" in host else host
    try:
        return ipaddress.ip_address(machine).is_loopback
    except ValueError:
        return machine == "localhost"


def _referrers_tag(digest: str) -> str:
    return digest.replace(":", "-")


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]
