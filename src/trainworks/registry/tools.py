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
"""The address of a proxy that does not exist: port 9 of this machine, where nothing listens.

Programs in Go use this proxy for plain HTTP, except to addresses of this machine. So their
requests without TLS to other machines fail.
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
    """A manifest in a registry.

    Attributes:
        digest: ``sha256:...`` of the bytes.
        kind: The media type: ``application/vnd.oci.image.manifest.v1+json``.
        content: The bytes, as the registry sent them.
        value: The bytes, parsed from JSON.
    """

    digest: str
    kind: str
    content: bytes
    value: Mapping[str, Any]

    @property
    def descriptor(self) -> dict[str, Any]:
        """The descriptor that points to the manifest: its media type, digest and size in bytes."""
        return {"mediaType": self.kind, "digest": self.digest, "size": len(self.content)}

    @property
    def configuration(self) -> str:
        """The digest of the image's configuration; ``""`` for an index."""
        config = self.value.get("config")
        if not isinstance(config, dict):
            return ""
        return str(config.get("digest", ""))

    def is_of(self, identifier: str) -> bool:
        """Return whether this is the manifest of the image that an engine knows by an identifier.

        The digest of the configuration is compared too, because the manifest's own digest differs
        if another program compressed the layers.

        Args:
            identifier: The engine's identifier, ``sha256:...``: the digest of the configuration,
                or, with containerd's image store, of the manifest.
        """
        return identifier in (self.configuration, self.digest)

    def read_descriptors(self, key: str) -> tuple[Mapping[str, Any], ...]:
        """Return the descriptors under a key of the manifest; empty if the key is missing.

        Args:
            key: ``layers`` (of an image) or ``manifests`` (of an index).

        Raises:
            RegistryError: A descriptor is malformed.
        """
        return check_descriptors(self.value.get(key), f"the manifest {self.digest}")


def check_descriptors(value: object, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return a JSON value as a tuple of descriptors; empty for ``None``.

    Args:
        value: The parsed value: a list of objects.
        where: The document that has the value, for the error: ``the manifest sha256:...``.

    Raises:
        RegistryError: The value is not a list, or a row of it is not a descriptor.
    """
    if value is None:
        return ()
    problem = f"{where} is malformed: it has descriptors without a digest"
    if not isinstance(value, list):
        raise RegistryError(problem)
    for row in value:
        if not _is_descriptor(row):
            raise RegistryError(problem)
    return tuple(value)


def _is_descriptor(row: object) -> bool:
    """Return whether a value is an object with a SHA-256 digest, and annotations in an object."""
    if not isinstance(row, dict):
        return False
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", str(row.get("digest"))):
        return False
    # ``null`` is a missing value, too.
    annotations = row.get("annotations") or {}
    return isinstance(annotations, dict)


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
        check_image: Called at the first failure, as of ``Registries.run_push``.
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

    Use it in a ``with`` block. The block has a private folder, in which programs find the logins
    and the certificates; its end deletes the folder and closes the connections.
    """

    def __init__(
        self, settings: HostSettings, *, report: Report = ignore, patience: Patience | None = None
    ) -> None:
        """Store the settings; nothing is sent or written yet.

        Args:
            settings: This machine's proxies and CAs.
            report: Receives a line of text before each retry.
            patience: Limits of retries and time-outs; default: those of ``Patience()``.
        """
        self._settings = settings
        self._report = report
        self.patience = patience or Patience()
        self._stack = ExitStack()
        self._folder = Path()
        self._checked_repositories: set[str] = set()

    def __enter__(self) -> Registries:
        """Create the private folder, and the client that keeps connections open."""
        self._folder = self._stack.enter_context(private_folder())
        self._client = Client(
            self._settings, self._folder, report=self._report, patience=self.patience
        )
        self._stack.callback(self._client.close)
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the connections, and delete the private folder."""
        self._stack.close()

    def find_manifest(self, repository: str, reference: str) -> Manifest | None:
        """Read the manifest of a tag or digest; return ``None`` if the registry has none.

        Args:
            repository: ``HOST/NAME``.
            reference: A tag, or ``sha256:...``.

        Raises:
            RegistryError: The registry gave another answer or none, so that it is not known
                whether the manifest exists; or its answer is not the manifest that was requested.
        """
        where = image_name(repository, reference)
        is_digest = ":" in reference
        try:
            request = HttpRequest(path=f"manifests/{reference}", headers={"Accept": MANIFESTS})
            response = self._client.send(f"reading {where}", repository, request)
        except NotFoundError as error:
            if error.certain:
                return None
            # The registry's code is not one of the protocol's: the list of tags decides. There is
            # no list of digests.
            if is_digest or self._may_have_tag(repository, reference):
                raise
            return None
        digest = _compute_digest(response.content)
        if is_digest and digest != reference:
            raise RegistryError(
                f"{repository} sent a manifest with another digest than {reference}"
            )
        value = parse_json_object(response.content, f"the manifest {digest} of {repository}")
        # A manifest has at least one of these keys; another JSON document may have neither.
        if "schemaVersion" not in value and "mediaType" not in value:
            raise RegistryError(f"what {repository} sends as {reference} is not a manifest")
        kind = value.get("mediaType")
        if not kind:
            # OCI's form may lack the key; the header stands in for it then.
            kind = response.headers.get("Content-Type", "").partition(";")[0]
        return Manifest(digest=digest, kind=str(kind), content=response.content, value=value)

    def _may_have_tag(self, repository: str, tag: str) -> bool:
        """Return whether a repository's list of tags has a tag, or cannot be understood.

        ``False`` if the list lacks the tag, or if the registry has no list of this repository.
        """
        action = f"reading the tags of {repository}"
        try:
            for page in self._read_pages(action, repository, "tags/list"):
                content = parse_json_object(page.content, f"the list of tags of {repository}")
                # A registry written in Go may send ``null`` for an empty list.
                tags = content.get("tags") or []
                if not isinstance(tags, list) or tag in tags:
                    return True
        except NotFoundError:
            pass
        return False

    def read_manifest(self, repository: str, reference: str) -> Manifest:
        """Read the manifest of a tag or digest.

        Raises:
            RegistryError: The registry has none, and in the cases of ``find_manifest``.
        """
        manifest = self.find_manifest(repository, reference)
        if manifest is None:
            raise RegistryError(f"{repository} has no {reference}", hint="check the tag or digest")
        return manifest

    def read_blob(self, repository: str, digest: str) -> bytes:
        """Read a blob into memory, such as an image's configuration, and return its bytes.

        Raises:
            RegistryError: The registry does not send it, it is larger than ``protocol.LARGEST``,
                or its bytes have another digest.
        """
        action = f"reading {image_name(repository, digest)}"
        request = HttpRequest(path=f"blobs/{digest}")
        content = self._client.send(action, repository, request).content
        if _compute_digest(content) != digest:
            raise RegistryError(f"{repository} sent a blob with another digest than {digest}")
        return content

    def read_referrers(self, repository: str, digest: str) -> tuple[Mapping[str, Any], ...]:
        """Read which attachments a manifest has: signatures, proofs, bills of materials.

        A registry without that list has an index under the tag ``sha256-DIGEST`` in its place (the
        distribution protocol, "Referrers Tag Schema").

        Args:
            repository: ``HOST/NAME``.
            digest: The manifest's digest, ``sha256:...``.

        Returns:
            The descriptors of the attachments, of all pages; empty without any.

        Raises:
            RegistryError: The registry does not answer, or its list is malformed.
        """
        action = f"reading what is attached to {image_name(repository, digest)}"
        where = f"the list of attachments of {repository}@{digest}"
        attachments: list[Mapping[str, Any]] = []
        for page in self._read_pages(action, repository, f"referrers/{digest}", absent=True):
            if page.status == HTTPStatus.NOT_FOUND:
                index = self.find_manifest(repository, digest.replace(":", "-"))
                if index is None:
                    return ()
                return check_descriptors(index.value.get("manifests"), where)
            attachments += check_descriptors(
                parse_json_object(page.content, where).get("manifests"), where
            )
        return tuple(attachments)

    def _read_pages(
        self, action: str, repository: str, path: str, *, absent: bool = False
    ) -> Iterator[Response]:
        """Yield the response for each page of a list.

        Args:
            action: The work, for messages.
            repository: ``HOST/NAME``.
            path: The list, below ``/v2/NAME/``: ``tags/list``.
            absent: Whether a response with the status 404 is yielded instead of raised.
        """
        first_path = path
        read_paths = set()
        # A registry that names a page again would never come to an end.
        while path and path not in read_paths:
            read_paths.add(path)
            request = HttpRequest(path=path)
            response = self._client.send(action, repository, request, absent=absent)
            yield response
            path = ""
            for link in parse_header_links(response.headers.get("Link", "")):
                if link.get("rel") == "next" and link["url"]:
                    # Only the query is taken: the page is of the same list at the same host.
                    path = f"{first_path}?{urlsplit(link['url']).query}"
                    break

    def put_tag(self, repository: str, tag: str, image: Manifest) -> None:
        """Put a tag on an image that the repository has; the tag moves if it exists.

        Raises:
            RegistryError: The registry refuses.
        """
        self._put(f"tagging {repository}", repository, tag, image.content, image.kind)

    def delete_manifest(self, repository: str, digest: str) -> bool:
        """Delete a manifest and its tags; return whether the registry has deleted them.

        ``False`` for every failure, because many registries do not delete anything.
        """
        action = f"removing {image_name(repository, digest)}"
        request = HttpRequest(path=f"manifests/{digest}", method="DELETE")
        with contextlib.suppress(RegistryError):
            self._client.send(action, repository, request, attempts=1)
            return True
        return False

    def copy_image(
        self, source: str, target: str, digest: str, *, tag: str = "", attached: bool
    ) -> None:
        """Copy an image between repositories by oras; within a registry no bytes are sent.

        Args:
            source: The repository with the original, ``HOST/NAME``.
            target: The repository that gets the copy, ``HOST/NAME``.
            digest: The original's digest, ``sha256:...``.
            tag: The tag of the copy; default: the copy has only its digest.
            attached: Whether attachments are copied, too, and attachments of those.

        Raises:
            HostError: oras is not installed.
            RegistryError: A registry refuses, or oras failed in each attempt.
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
        """Run an engine's push, again after a failure that the registry does not explain.

        Args:
            repository: The repository that gets the image, ``HOST/NAME``.
            argv: The engine's program and its arguments.
            show: Receives each line of the engine, cleaned, as it comes.
            check_image: Called when the push fails for the first time: raises ``EngineError`` if
                the image on this machine is damaged, so that no registry is blamed.

        Raises:
            EngineError: ``check_image`` raises it.
            RegistryError: The registry refuses, or the engine failed in each attempt.
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
        """Put a manifest into a repository under a tag; return its digest, ``sha256:...``.

        Args:
            repository: ``HOST/NAME``.
            value: The manifest as a JSON object, with its ``mediaType``.
            tag: The tag, which moves if it exists.

        Raises:
            RegistryError: The registry refuses.
        """
        # Sorted: equal manifests have equal bytes, and so one digest.
        content = json.dumps(value, sort_keys=True).encode()
        self._put(f"sending to {repository}", repository, tag, content, str(value["mediaType"]))
        return _compute_digest(content)

    def is_plain_http(self, host: str) -> bool:
        """Return whether a registry speaks HTTP without TLS: only one on this machine may.

        Args:
            host: The registry, ``localhost:5000``. The first call for a host sends a request.
        """
        return self._client.is_plain_http(host)

    def _check_uploads(self, repository: str) -> None:
        """Check that a repository takes uploads: begin one that is not continued.

        A refusal then comes before any bytes are sent. Each repository is checked once.

        Raises:
            RegistryError: The registry refuses uploads of this user, or redirects them from TLS to
                an address without TLS.
        """
        if repository in self._checked_repositories:
            return
        self._begin_upload(repository)
        self._checked_repositories.add(repository)

    def _begin_upload(self, repository: str) -> str:
        """Begin an upload, and return its address: a URL, a path, or ``""``.

        Raises:
            RegistryError: The registry refuses, or gives an address without TLS. ``NOWHERE`` keeps
                programs from such an address on another machine, but not from one on this machine.
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
            RegistryError: The registry or its proxy refuses with a status, or does not answer.
        """
        action = f"sending to {repository}"
        address = self._begin_upload(repository)
        if urlsplit(address).netloc not in ("", _host_of(repository)):
            # Another host, such as an object store, takes the bytes of this registry. The
            # registry's logins are not for that host.
            return
        request = HttpRequest(
            path=address,
            method="PATCH",
            headers={"Content-Type": "application/octet-stream"},
            body=bytes(TRIAL_BYTES),
        )
        # One attempt: an address of an upload cannot be used again after a failure.
        response = self._client.send(action, repository, request, attempts=1)
        # A registry that does not cancel an upload forgets it after some time.
        with contextlib.suppress(RegistryError):
            # Each answer may name another address for the next request of the upload.
            address = response.headers.get("Location", "") or address
            cancellation = HttpRequest(path=address, method="DELETE")
            self._client.send(action, repository, cancellation, attempts=1)

    def _put(self, action: str, repository: str, reference: str, content: bytes, kind: str) -> None:
        """Put the bytes of a manifest, of a media type ``kind``, under a tag or digest."""
        request = HttpRequest(
            path=f"manifests/{reference}",
            method="PUT",
            headers={"Content-Type": kind},
            body=content,
        )
        self._client.send(action, repository, request)

    def _send(self, transfer: _Transfer) -> None:
        """Run a program that sends an image to a repository.

        The program is run again after a failure that the registries do not explain. Before the
        first run, the private folder gets the logins and certificates for the program.

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
        environment = self._write_credentials(hosts)
        is_image_checked = False

        def attempt() -> None:
            nonlocal is_image_checked
            lines: list[str] = []

            def add_line(line: str) -> None:
                line = self._client.clean_text(line)
                if line:
                    lines.append(line)
                    transfer.show(line)

            status = subprocesses.stream(transfer.argv, add_line, environment=environment)
            if status == 0:
                return
            # A look at the image and requests to the registries may explain the failure: they
            # raise an error then, which ends the attempts. The look reads all layers, and is taken
            # once.
            if not is_image_checked:
                is_image_checked = True
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
        """Return the error for a program that failed without a reason at the registries.

        Args:
            transfer: The transfer that failed.
            words: What the program said about its failure.
        """
        reason = self._client.clean_text(words)
        program = Path(transfer.argv[0]).name
        last = RegistryError(
            f"{transfer.action}: {program} failed, although the registry answers: {reason}",
            hint="repeat the command; what the registry already has is not sent again",
        )
        return TransientError(reason, last)

    def _write_credentials(self, hosts: Sequence[str]) -> dict[str, str]:
        """Write logins and certificates for registries into the private folder.

        Returns:
            The environment in which a program finds them, and has no plain HTTP to other machines.
        """
        for host in hosts:
            self._client.find_login(host)
        auths = {}
        for host, login in self._client.logins.items():
            if login:
                auths[config_key(host)] = login
        configuration = self._folder / "config.json"
        configuration.write_text(json.dumps({"auths": auths}), encoding="utf-8")
        environment = {
            **subprocesses.own_environment(),
            "DOCKER_CONFIG": str(self._folder),
            "REGISTRY_AUTH_FILE": str(configuration),
            "HTTP_PROXY": NOWHERE,
            "http_proxy": NOWHERE,
        }
        bundle = self._client.write_ca_bundle(hosts)
        # ``True`` stands for the system's own CAs, which programs trust without a variable.
        if isinstance(bundle, str):
            environment[BUNDLES[0]] = bundle
        return environment


def find_error_line(lines: Sequence[str]) -> str:
    """Return the first line of a program's output with an error, else the last five lines.

    The first one, because programs in Go print a stack of calls after an error. The line is for
    people: nothing depends on its text.
    """
    for line in lines:
        if re.search(r"\berror\b|\bfatal\b|\bFATA\b|level=fatal", line, re.IGNORECASE):
            return line
    return "\n".join(lines[-5:])


def _host_of(repository: str) -> str:
    """Return the host of a repository ``HOST/NAME``."""
    return repository.partition("/")[0]


def _compute_digest(content: bytes) -> str:
    """Return the digest of bytes, ``sha256:`` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def find_oras() -> str:
    """Return the path of the program oras on PATH.

    Raises:
        HostError: oras is not installed.
    """
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
