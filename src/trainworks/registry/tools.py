"""Registries as one command uses them: manifests, tags, attachments and copies.

Manifests are read and written over the registry's HTTP API. oras copies images with their
attachments, and an engine pushes its own images. These programs get a private copy of the logins
that the command needs, the certificates to trust, and a proxy for plain HTTP that does not exist.
After a failure of a program, a request to the registry decides whether the program is run again;
the program's words do not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from requests.utils import parse_header_links

from trainworks.engine import subprocesses
from trainworks.engine.protocol import Report, ignore
from trainworks.engine.temporary_folders import private_folder
from trainworks.errors import HostError, RegistryError
from trainworks.host.settings import HostSettings
from trainworks.registry.credentials import config_key
from trainworks.registry.names import image_name
from trainworks.registry.protocol import (
    BUNDLES,
    Client,
    HttpRequest,
    NotFoundError,
    Patience,
    RegistryUnreachableError,
    Response,
    TransientError,
    make_plain_http_error,
    parse_json_object,
)

NOWHERE = urlunsplit(("http", "127.0.0.1:9", "", "", ""))
"""A proxy that does not exist.

Go's programs use this proxy for plain HTTP, except to addresses of this machine.
"""

TRIAL_BYTES = 2 << 20
"""Bytes of a trial upload: more than the default limit of proxies."""

MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json,"
    " application/vnd.docker.distribution.manifest.v2+json,"
    " application/vnd.oci.artifact.manifest.v1+json,"
    " application/vnd.docker.distribution.manifest.list.v2+json, */*"
)
"""Every form of a manifest, as a header ``Accept``: a registry may call a tag unknown if its
manifest has a form that the header lacks.
"""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest in a registry: digest, media type, bytes, and the parsed value."""

    digest: str
    kind: str
    content: bytes
    value: Mapping[str, Any]

    @property
    def descriptor(self) -> dict[str, Any]:
        """The descriptor that points to the manifest."""
        return {"mediaType": self.kind, "digest": self.digest, "size": len(self.content)}

    @property
    def configuration(self) -> str:
        """The digest of the image's configuration; ``""`` for an index."""
        config = self.value.get("config")
        if not isinstance(config, dict):
            return ""
        return str(config.get("digest", ""))

    def is_of(self, identifier: str) -> bool:
        """Return whether this is the manifest of an image.

        The manifest's digest alone does not tell: it differs if another program compressed the
        layers.

        Args:
            identifier: The engine's: the configuration's digest, or with containerd's store the
                manifest's.
        """
        return identifier in (self.configuration, self.digest)

    def read_descriptors(self, key: str) -> tuple[Mapping[str, Any], ...]:
        """Return the descriptors of ``layers`` or ``manifests``.

        Raises ``RegistryError`` if they are malformed.
        """
        return check_descriptors(self.value.get(key), f"the manifest {self.digest}")


def check_descriptors(value: object, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return a checked list of descriptors; empty for ``None``. Raises ``RegistryError``."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(_is_descriptor(row) for row in value):
        raise RegistryError(f"{where} is malformed: it has descriptors without a digest")
    return tuple(value)


def _is_descriptor(row: object) -> bool:
    if not isinstance(row, dict):
        return False
    has_digest = re.fullmatch(r"sha256:[0-9a-f]{64}", str(row.get("digest"))) is not None
    return has_digest and isinstance(row.get("annotations") or {}, dict)


@dataclass(frozen=True, kw_only=True)
class _Transfer:
    """A transfer of an image to a repository, by a program.

    Attributes:
        action: The work, for messages: ``pushing to HOST/NAME``.
        target: The repository that gets the image.
        argv: The program and its arguments.
        source: The repository of a copy's original; ``""``: the image is not a copy.
        digest: The digest of a copy's original.
        show: Receives each line of the program, cleaned, as it comes.
        check_image: As of ``Registries.push``.
    """

    action: str
    target: str
    argv: tuple[str, ...]
    source: str = ""
    digest: str = ""
    show: Report = ignore
    check_image: Callable[[], None] = lambda: None


class Registries:
    """The registries that one command talks to.

    A context manager with a private folder for logins and certificates.
    """

    def __init__(
        self, settings: HostSettings, *, report: Report = ignore, patience: Patience | None = None
    ) -> None:
        """Store this machine's settings; ``report`` receives a line for each retry."""
        self._settings = settings
        self._report = report
        self.patience = patience or Patience()
        self._stack = ExitStack()
        self._folder = Path()
        self._checked: set[str] = set()

    def __enter__(self) -> Registries:
        """Create the private folder."""
        self._folder = self._stack.enter_context(private_folder())
        self._client = Client(
            self._settings, self._folder, report=self._report, patience=self.patience
        )
        self._stack.callback(self._client.close)
        return self

    def __exit__(self, *_error: object) -> None:
        """Remove the private folder."""
        self._stack.close()

    def find_manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return the manifest of a tag or digest.

        ``None`` if the registry reports that it has no such manifest.

        Raises:
            RegistryError: Every other response, and none: whether the tag exists is unknown then.
        """
        where = image_name(repository, reference)
        try:
            request = HttpRequest(path=f"manifests/{reference}", headers={"Accept": MANIFESTS})
            response = self._client.send(f"reading {where}", repository, request)
        except NotFoundError as error:
            if error.certain:
                return None
            is_tag = ":" not in reference
            if is_tag and not self._may_have_tag(repository, reference):
                return None
            raise
        digest = _digest(response.content)
        if ":" in reference and digest != reference:
            raise RegistryError(
                f"{repository} sent a manifest with another digest than {reference}"
            )
        value = parse_json_object(response.content, f"the manifest {digest} of {repository}")
        kind = value.get("mediaType") or response.headers.get("Content-Type", "").partition(";")[0]
        if "schemaVersion" not in value and "mediaType" not in value:
            raise RegistryError(f"what {repository} sends as {reference} is not a manifest")
        return Manifest(digest=digest, kind=str(kind), content=response.content, value=value)

    def _may_have_tag(self, repository: str, tag: str) -> bool:
        """Return whether a repository's list of tags has a tag, or is malformed."""
        action = f"reading the tags of {repository}"
        try:
            for page in self._pages(action, repository, "tags/list"):
                tags = (
                    parse_json_object(page.content, f"the list of tags of {repository}").get("tags")
                    or []
                )
                if not isinstance(tags, list) or tag in tags:
                    return True
        except NotFoundError:
            pass
        return False

    def read_manifest(self, repository: str, reference: str) -> Manifest:
        """Return the manifest of a tag or digest; raises ``RegistryError`` if there is none."""
        manifest = self.find_manifest(repository, reference)
        if manifest is None:
            raise RegistryError(f"{repository} has no {reference}", hint="check the tag or digest")
        return manifest

    def read_blob(self, repository: str, digest: str) -> bytes:
        """Return a small blob; raises ``RegistryError`` if its bytes have another digest."""
        action = f"reading {image_name(repository, digest)}"
        request = HttpRequest(path=f"blobs/{digest}")
        content = self._client.send(action, repository, request).content
        if _digest(content) != digest:
            raise RegistryError(f"{repository} sent a blob with another digest than {digest}")
        return content

    def read_referrers(self, repository: str, digest: str) -> tuple[Mapping[str, Any], ...]:
        """Return the descriptors of a digest's attachments, of all pages.

        A registry without that list has an index under a tag in its place (the distribution
        protocol, "Referrers Tag Schema").
        """
        action = f"reading what is attached to {image_name(repository, digest)}"
        where = f"the list of attachments of {repository}@{digest}"
        attachments: list[Mapping[str, Any]] = []
        for page in self._pages(action, repository, f"referrers/{digest}", absent=True):
            if page.status == HTTPStatus.NOT_FOUND:
                index = self.find_manifest(repository, digest.replace(":", "-"))
                if index is None:
                    return ()
                return check_descriptors(index.value.get("manifests"), where)
            attachments += check_descriptors(
                parse_json_object(page.content, where).get("manifests"), where
            )
        return tuple(attachments)

    def _pages(
        self, action: str, repository: str, path: str, *, absent: bool = False
    ) -> Iterator[Response]:
        """Yield the responses for a list, page by page; ``absent`` as of ``Client.send``."""
        first_path = path
        read_paths = set()
        while path and path not in read_paths:
            read_paths.add(path)
            request = HttpRequest(path=path)
            response = self._client.send(action, repository, request, absent=absent)
            yield response
            links = parse_header_links(response.headers.get("Link", ""))
            next_page = next((link["url"] for link in links if link.get("rel") == "next"), "")
            path = f"{first_path}?{urlsplit(next_page).query}" if next_page else ""

    def put_tag(self, repository: str, tag: str, image: Manifest) -> None:
        """Put a tag on an image that the repository has."""
        self._put(f"tagging {repository}", repository, tag, image.content, image.kind)

    def delete_manifest(self, repository: str, digest: str) -> bool:
        """Remove a manifest and its tags; return whether the registry has removed them."""
        action = f"removing {image_name(repository, digest)}"
        request = HttpRequest(path=f"manifests/{digest}", method="DELETE")
        with contextlib.suppress(RegistryError):
            self._client.send(action, repository, request, attempts=1)
            return True
        return False

    def copy_image(
        self, source: str, target: str, digest: str, *, tag: str = "", attached: bool
    ) -> None:
        """Copy an image between repositories; within a registry nothing is sent.

        Args:
            tag: The tag of the copy; default: the copy has only its digest.
            attached: Whether attachments are copied, too, and attachments of those.
        """
        options = ["--no-tty"]
        if attached:
            options.append("--recursive")
        if self._client.is_plain_http(_host_of(source)):
            options.append("--from-plain-http")
        if self._client.is_plain_http(_host_of(target)):
            options.append("--to-plain-http")
        original = image_name(source, digest)
        copy = f"{target}:{tag}" if tag else target
        argv = (find_oras(), "cp", *options, original, copy)
        transfer = _Transfer(
            action=f"copying {original} to {copy}",
            target=target,
            argv=argv,
            source=source,
            digest=digest,
        )
        self._send(transfer)

    def run_push(
        self,
        repository: str,
        argv: tuple[str, ...],
        *,
        show: Report,
        check_image: Callable[[], None],
    ) -> None:
        """Run an engine's push.

        Args:
            show: Receives each line of the engine, cleaned, as it comes.
            check_image: Called when the push fails for the first time: raises ``EngineError`` if
                the image on this machine is damaged, so that no registry is blamed.
        """
        transfer = _Transfer(
            action=f"pushing to {repository}",
            target=repository,
            argv=argv,
            show=show,
            check_image=check_image,
        )
        self._send(transfer)

    def put_manifest(self, repository: str, value: Mapping[str, Any], *, tag: str) -> str:
        """Put a manifest into a repository under a tag; return its digest."""
        content = json.dumps(value, sort_keys=True).encode()
        self._put(f"sending to {repository}", repository, tag, content, str(value["mediaType"]))
        return _digest(content)

    def is_plain_http(self, host: str) -> bool:
        """Whether a registry speaks HTTP without TLS: only one on this machine may."""
        return self._client.is_plain_http(host)

    def _check_uploads(self, repository: str) -> None:
        """Begin an upload that is not continued, so that a refusal comes before any bytes.

        Raises:
            RegistryError: The registry refuses uploads of this user, or redirects them from TLS to
                an address without TLS.
        """
        if repository not in self._checked:
            self._begin_upload(repository)
            self._checked.add(repository)

    def _begin_upload(self, repository: str) -> str:
        """Begin an upload, and return its address.

        An address without TLS is refused: ``NOWHERE`` keeps programs from such an address on
        another machine, but not from one on this machine.
        """
        action = f"sending to {repository}"
        host = _host_of(repository)
        request = HttpRequest(path="blobs/uploads/", method="POST")
        response = self._client.send(action, repository, request)
        address = response.headers.get("Location", "")
        if urlsplit(address).scheme == "http" and not self.is_plain_http(host):
            raise make_plain_http_error(action, host)
        return address

    def _try_upload(self, repository: str) -> None:
        """Send a part of a file, to learn whether the registry and its proxy accept uploads.

        The upload is cancelled at the end.

        Raises:
            RegistryError: They refuse with a status.
        """
        action = f"sending to {repository}"
        address = self._begin_upload(repository)
        if urlsplit(address).netloc not in ("", _host_of(repository)):
            # Another host takes the bytes of this registry. The registry's logins are not for that
            # host.
            return
        request = HttpRequest(
            path=address,
            method="PATCH",
            headers={"Content-Type": "application/octet-stream"},
            body=bytes(TRIAL_BYTES),
        )
        # One attempt: an address of an upload cannot be used again after a failure.
        response = self._client.send(action, repository, request, attempts=1)
        with contextlib.suppress(RegistryError):
            address = response.headers.get("Location", "") or address
            cancellation = HttpRequest(path=address, method="DELETE")
            self._client.send(action, repository, cancellation, attempts=1)

    def _put(self, action: str, repository: str, reference: str, content: bytes, kind: str) -> None:
        request = HttpRequest(
            path=f"manifests/{reference}",
            method="PUT",
            headers={"Content-Type": kind},
            body=content,
        )
        self._client.send(action, repository, request)

    def _send(self, transfer: _Transfer) -> None:
        """Run a program that sends an image to a repository.

        The program is run again after a failure that the registries do not explain.

        Raises:
            EngineError: ``transfer.check_image`` raises it.
            RegistryUnreachableError: A registry cannot be resolved, or did not
                answer in any attempt.
            RegistryError: A registry refuses, or the program failed in each attempt.
        """
        self._check_uploads(transfer.target)
        hosts = [_host_of(transfer.target)]
        if transfer.source:
            hosts.insert(0, _host_of(transfer.source))
        environment = self._environment(hosts)
        image_is_checked = False

        def attempt() -> None:
            nonlocal image_is_checked
            lines: list[str] = []

            def add_line(line: str) -> None:
                line = self._client.clean_text(line)
                if line:
                    lines.append(line)
                    transfer.show(line)

            status = subprocesses.stream(transfer.argv, add_line, environment=environment)
            if status == 0:
                return
            # Requests to the registries, and a look at the image, may explain the failure: they
            # raise an error then.
            if not image_is_checked:
                image_is_checked = True
                transfer.check_image()
            if transfer.source:
                self.read_manifest(transfer.source, transfer.digest)
            try:
                self._try_upload(transfer.target)
            except RegistryUnreachableError as error:
                raise TransientError(error.message, error) from error
            raise self._make_unexplained_error(transfer, find_error_line(lines))

        self._client.retry(transfer.action, hosts[-1], attempt)

    def _make_unexplained_error(self, transfer: _Transfer, words: str) -> TransientError:
        reason = self._client.clean_text(words)
        program = Path(transfer.argv[0]).name
        last = RegistryError(
            f"{transfer.action}: {program} failed, although the registry answers: {reason}",
            hint="repeat the command; what the registry already has is not sent again",
        )
        return TransientError(reason, last)

    def _environment(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return a program's environment: logins, certificates, no plain HTTP to other machines."""
        for host in hosts:
            self._client.find_login(host)
        auths = {config_key(host): login for host, login in self._client.logins.items() if login}
        configuration = self._folder / "config.json"
        configuration.write_text(json.dumps({"auths": auths}), encoding="utf-8")
        environment = {
            **subprocesses.own_environment(),
            "DOCKER_CONFIG": str(self._folder),
            "REGISTRY_AUTH_FILE": str(configuration),
            "HTTP_PROXY": NOWHERE,
            "http_proxy": NOWHERE,
        }
        trust = self._client.write_ca_bundle(hosts)
        if isinstance(trust, str):
            environment[BUNDLES[0]] = trust
        return environment


def find_error_line(lines: Sequence[str]) -> str:
    """Return the first line of a program's output with an error, else the last five lines.

    Programs in Go print a stack of calls behind an error. The line is for people: nothing depends
    on its text.
    """
    for line in lines:
        if re.search(r"\berror\b|\bfatal\b|\bFATA\b|level=fatal", line, re.IGNORECASE):
            return line
    return "\n".join(lines[-5:])


def _host_of(repository: str) -> str:
    """Return the host of a repository ``HOST/NAME``."""
    return repository.partition("/")[0]


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def find_oras() -> str:
    """Return oras's path; raises ``HostError`` if it is not installed."""
    programs = subprocesses.programs("oras", os.environ.get("PATH"))
    if not programs:
        raise HostError(
            "there is no `oras` program on PATH, which talks to registries",
            hint=(
                "install the package oras (Debian 13: `apt-get install oras`; `brew install oras`);"
                " see docs/ship.md"
            ),
        )
    return programs[0]
