"""Registries as one command uses them: manifests, tags, attachments and copies.

What is read or written of a manifest goes over the registry's HTTP API. oras copies images with
what is attached to them, and an engine pushes its own: these programs get a private copy of the
logins that the command needs, the certificates to trust, and a proxy for plain HTTP that does not
exist. Whether one of them may succeed when repeated the registry decides, which is asked again,
never the program's words.
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
    AbsentError,
    Answer,
    Client,
    PassingError,
    Patience,
    RegistryUnreachableError,
    table,
    without_tls,
)

NOWHERE = urlunsplit(("http", "127.0.0.1:9", "", "", ""))
"""A proxy that is not there.

Go's programs use it for plain HTTP, except to addresses of this machine.
"""

TRIED = 2 << 20
"""Bytes that show whether a file may be sent: more than what proxies take at
most unless they are told otherwise.
"""

MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json,"
    " application/vnd.docker.distribution.manifest.v2+json,"
    " application/vnd.oci.artifact.manifest.v1+json,"
    " application/vnd.docker.distribution.manifest.list.v2+json, */*"
)
"""Every form of a manifest: a registry may call a tag unknown that has another
form than those that it is asked for.
"""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest as the registry has it: its bytes, their digest and media
    type, and its content.
    """

    digest: str
    kind: str
    content: bytes
    value: Mapping[str, Any]

    @property
    def descriptor(self) -> dict[str, Any]:
        """What points at it."""
        return {"mediaType": self.kind, "digest": self.digest, "size": len(self.content)}

    @property
    def configuration(self) -> str:
        """The digest of the image's configuration; ``""`` of an index."""
        config = self.value.get("config")
        return str(config.get("digest", "")) if isinstance(config, dict) else ""

    def is_of(self, identifier: str) -> bool:
        """Whether it is of this image. Its digest differs if another program compressed the layers.

        Args:
            identifier: As an engine has it: the configuration's digest; with containerd's store
                docker has that of the manifest.
        """
        return identifier in (self.configuration, self.digest)

    def listed(self, key: str) -> tuple[Mapping[str, Any], ...]:
        """Return the descriptors of ``layers`` or ``manifests``.

        Raises ``RegistryError`` if they are malformed.
        """
        return descriptors(self.value.get(key), f"the manifest {self.digest}")


def descriptors(found: object, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return a list of descriptors, checked; ``None`` is an empty one. Raises ``RegistryError``."""
    rows = [] if found is None else found
    if not isinstance(rows, list) or not all(
        isinstance(row, dict)
        and re.fullmatch(r"sha256:[0-9a-f]{64}", str(row.get("digest")))
        and isinstance(row.get("annotations") or {}, dict)
        for row in rows
    ):
        raise RegistryError(f"{where} is malformed: it has descriptors without a digest")
    return tuple(rows)


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

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return the manifest of a tag or digest.

        ``None`` if the registry says that it does not have it.

        Raises:
            RegistryError: Every other answer, and none: whether the tag exists is not known then.
        """
        where = image_name(repository, reference)
        try:
            answer = self._client.ask(
                f"reading {where}",
                repository,
                f"manifests/{reference}",
                headers={"Accept": MANIFESTS},
            )
        except AbsentError as error:
            if error.certain or (":" not in reference and not self._lists(repository, reference)):
                return None
            raise
        digest = _digest(answer.content)
        if ":" in reference and digest != reference:
            raise RegistryError(
                f"{repository} sent a manifest with another digest than {reference}"
            )
        value = table(answer.content, f"the manifest {digest} of {repository}")
        kind = value.get("mediaType") or answer.headers.get("Content-Type", "").partition(";")[0]
        if "schemaVersion" not in value and "mediaType" not in value:
            raise RegistryError(f"what {repository} sends as {reference} is not a manifest")
        return Manifest(digest=digest, kind=str(kind), content=answer.content, value=value)

    def _lists(self, repository: str, tag: str) -> bool:
        """Whether a repository's list of tags has a tag, or cannot tell."""
        try:
            for answer in self._pages(f"reading the tags of {repository}", repository, "tags/list"):
                tags = table(answer.content, f"the list of tags of {repository}").get("tags") or []
                if not isinstance(tags, list) or tag in tags:
                    return True
        except AbsentError:
            pass
        return False

    def existing(self, repository: str, reference: str) -> Manifest:
        """Return the manifest of a tag or digest; raises ``RegistryError`` if there is none."""
        found = self.manifest(repository, reference)
        if found is None:
            raise RegistryError(f"{repository} has no {reference}", hint="check the tag or digest")
        return found

    def blob(self, repository: str, digest: str) -> bytes:
        """Return a small blob; raises ``RegistryError`` if it does not have the digest."""
        content = self._client.ask(
            f"reading {image_name(repository, digest)}", repository, f"blobs/{digest}"
        ).content
        if _digest(content) != digest:
            raise RegistryError(f"{repository} sent a blob with another digest than {digest}")
        return content

    def referrers(self, repository: str, digest: str) -> tuple[Mapping[str, Any], ...]:
        """Return descriptors of what is attached to a digest, of all pages.

        A registry without that list has an index under a tag in its place (the distribution
        protocol, "Referrers Tag Schema").
        """
        doing = f"reading what is attached to {image_name(repository, digest)}"
        where = f"the list of attachments of {repository}@{digest}"
        found: list[Mapping[str, Any]] = []
        for answer in self._pages(doing, repository, f"referrers/{digest}", absent=True):
            if answer.status == HTTPStatus.NOT_FOUND:
                index = self.manifest(repository, digest.replace(":", "-"))
                return descriptors(index.value.get("manifests"), where) if index else ()
            found += descriptors(table(answer.content, where).get("manifests"), where)
        return tuple(found)

    def _pages(
        self, doing: str, repository: str, path: str, *, absent: bool = False
    ) -> Iterator[Answer]:
        """Yield the answers for a list, page by page; ``absent`` as of ``Client.ask``."""
        beginning = path
        seen = set()
        while path and path not in seen:
            seen.add(path)
            answer = self._client.ask(doing, repository, path, absent=absent)
            yield answer
            links = parse_header_links(answer.headers.get("Link", ""))
            following = next((each["url"] for each in links if each.get("rel") == "next"), "")
            path = f"{beginning}?{urlsplit(following).query}" if following else ""

    def put(self, repository: str, tag: str, image: Manifest) -> None:
        """Put a tag on an image that the repository has."""
        self._put(f"tagging {repository}", repository, tag, image.content, image.kind)

    def remove(self, repository: str, digest: str) -> bool:
        """Remove a manifest and its tags; ``False`` if the registry does not do that."""
        doing = f"removing {image_name(repository, digest)}"
        with contextlib.suppress(RegistryError):
            self._client.ask(doing, repository, f"manifests/{digest}", method="DELETE", attempts=1)
            return True
        return False

    def copy(self, source: str, target: str, digest: str, *, tag: str = "", attached: bool) -> None:
        """Copy an image between repositories; within a registry nothing is sent.

        Args:
            tag: The tag of the copy; default: it has only its digest.
            attached: Whether everything that is attached is copied, too, with
                what is attached to that.
        """
        hosts = [each.partition("/")[0] for each in (source, target)]
        plain = [
            f"--{side}-plain-http"
            for side, host in zip(("from", "to"), hosts, strict=True)
            if self._client.plain(host)
        ]
        words = (
            "--no-tty",
            *(["--recursive"] if attached else []),
            *plain,
            image_name(source, digest),
        )
        named = f"{target}:{tag}" if tag else target
        argv = (oras(), "cp", *words, named)
        self._send(f"copying {words[-1]} to {named}", target, argv, source=(source, digest))

    def push(
        self,
        repository: str,
        argv: tuple[str, ...],
        *,
        show: Report,
        check_image: Callable[[], None],
    ) -> None:
        """Run an engine's push.

        Args:
            show: Receives each line that it prints, cleaned, as it comes.
            check_image: Called when it fails for the first time: raises ``EngineError`` if the
                image on this machine is damaged, so that no registry is blamed.
        """
        self._send(f"pushing to {repository}", repository, argv, show=show, check_image=check_image)

    def put_manifest(self, repository: str, value: Mapping[str, Any], *, tag: str) -> str:
        """Put a manifest into a repository under a tag; return its digest."""
        content = json.dumps(value, sort_keys=True).encode()
        self._put(f"sending to {repository}", repository, tag, content, str(value["mediaType"]))
        return _digest(content)

    def plain(self, host: str) -> bool:
        """Whether a registry speaks HTTP without TLS: only one on this machine may."""
        return self._client.plain(host)

    def _check_uploads(self, repository: str) -> None:
        """Begin an upload that is not continued: a registry that takes none
        says so before anything is sent.

        Raises:
            RegistryError: It takes no uploads from this user, or sends them
                from TLS to an address without it.
        """
        if repository not in self._checked:
            self._begin_upload(repository)
            self._checked.add(repository)

    def _begin_upload(self, repository: str) -> str:
        """Begin an upload, and return its address.

        ``NOWHERE`` keeps programs from an address without TLS on another
        machine, but not from one on this machine.
        """
        doing, host = f"sending to {repository}", repository.partition("/")[0]
        answer = self._client.ask(doing, repository, "blobs/uploads/", method="POST")
        address = answer.headers.get("Location", "")
        if urlsplit(address).scheme == "http" and not self.plain(host):
            raise without_tls(doing, host)
        return address

    def _try_upload(self, repository: str) -> None:
        """Send as much of a file as shows whether the registry, and the proxy before it, take one.

        Then cancel it.

        Raises:
            RegistryError: They do not, and say so with a status.
        """
        doing, host = f"sending to {repository}", repository.partition("/")[0]
        address = self._begin_upload(repository)
        if urlsplit(address).netloc not in ("", host):
            # Another machine takes the bytes of this registry. Its logins are not for that one.
            return
        headers = {"Content-Type": "application/octet-stream"}
        # An address that was used is not used again: a failure in the middle of
        # it is a failure of the whole try.
        answer = self._client.ask(
            doing,
            repository,
            address,
            method="PATCH",
            headers=headers,
            body=bytes(TRIED),
            attempts=1,
        )
        with contextlib.suppress(RegistryError):
            address = answer.headers.get("Location", "") or address
            self._client.ask(doing, repository, address, method="DELETE", attempts=1)

    def _put(self, doing: str, repository: str, reference: str, content: bytes, kind: str) -> None:
        headers = {"Content-Type": kind}
        self._client.ask(
            doing, repository, f"manifests/{reference}", method="PUT", headers=headers, body=content
        )

    def _send(
        self,
        doing: str,
        target: str,
        argv: tuple[str, ...],
        *,
        source: tuple[str, str] | None = None,
        show: Report = ignore,
        check_image: Callable[[], None] = lambda: None,
    ) -> None:
        """Run a program that sends an image to a repository, again after a failure that the
        registries do not explain.

        Args:
            source: The repository and the digest that it copies from.
            check_image: As of ``push``.

        Raises:
            EngineError: What ``check_image`` raises.
            RegistryUnreachableError: A registry cannot be resolved, or did not
                answer in any attempt.
            RegistryError: A registry refuses, or the program failed in each attempt.
        """
        self._check_uploads(target)
        hosts = [each.partition("/")[0] for each in ((source[0],) if source else ()) + (target,)]
        environment = self._environment(hosts)
        image_is_checked = False

        def attempt() -> None:
            nonlocal image_is_checked
            lines: list[str] = []

            def heard(line: str) -> None:
                if line := self._client.clean(line):
                    lines.append(line)
                    show(line)

            if subprocesses.stream(argv, heard, environment=environment):
                if not image_is_checked:
                    image_is_checked = True
                    check_image()
                if source:
                    self.existing(*source)
                try:
                    self._try_upload(target)
                except RegistryUnreachableError as error:
                    raise PassingError(error.message, error) from error
                raise self._failed(doing, argv, what_failed(lines))

        self._client.patiently(doing, hosts[-1], attempt)

    def _failed(self, doing: str, argv: tuple[str, ...], words: str) -> PassingError:
        said = self._client.clean(words)
        return PassingError(
            said,
            RegistryError(
                f"{doing}: {Path(argv[0]).name} failed, although the registry answers: {said}",
                hint="repeat the command; what the registry already has is not sent again",
            ),
        )

    def _environment(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return the environment of a program: logins, certificates, and no
        plain HTTP to another machine.
        """
        for host in hosts:
            self._client.login(host)
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
        trust = self._client.trust(hosts)
        if isinstance(trust, str):
            environment[BUNDLES[0]] = trust
        return environment


def what_failed(lines: Sequence[str]) -> str:
    """Return the line to show of a program's output: the first one of an error, else the last ones.

    Nothing is decided.

    Programs in Go print a stack of calls behind it.
    """
    errors = [
        line
        for line in lines
        if re.search(r"\berror\b|\bfatal\b|\bFATA\b|level=fatal", line, re.IGNORECASE)
    ]
    return errors[0] if errors else "\n".join(lines[-5:])


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def oras() -> str:
    """Return oras's path; raises ``HostError`` if it is not installed."""
    found = subprocesses.programs("oras", os.environ.get("PATH"))
    if not found:
        raise HostError(
            "there is no `oras` program on PATH, which talks to registries",
            hint=(
                "install the package oras (Debian 13: `apt-get install oras`; `brew install oras`);"
                " see docs/ship.md"
            ),
        )
    return found[0]
