"""Runs oras, and the push of an engine, with this machine's logins and certificates; their failures become our errors.

oras speaks with registries (manifests, tags, referrers, copies); an engine pushes its own images. What these programs
get: a private copy of the logins that the command needs, the certificates to trust, and a proxy for plain HTTP that
does not exist. A registry with TLS that sends an upload to an address without it (``Location``) gets no answer then:
oras without the fix of GHSA-jxpm-75mh-9fp7, skopeo and buildah send the login to such an address.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import requests

from trainworks.engine import processes
from trainworks.engine.protocol import Report, ignore
from trainworks.engine.scratch import private_folder
from trainworks.errors import HostError, RegistryError
from trainworks.host.settings import HostSettings
from trainworks.registry.credentials import config_key, login_for
from trainworks.registry.names import image_name

BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Variables that name a CA bundle. pip's own variable is not one of them: it is for the package index."""

ENGINES_TRUST = tuple(
    map(Path, ("/etc/docker/certs.d", "/etc/containers/certs.d", "~/.config/containers/certs.d", "~/.docker/certs.d"))
)
"""Where docker and buildah keep the certificates of each registry, in a folder with its name."""

NOWHERE = urlunsplit(("http", "127.0.0.1:9", "", "", ""))
"""A proxy that is not there. Go's programs use it for plain HTTP, except to addresses of this machine."""

LARGEST = 64 << 20
"""Bytes that are read of a manifest, a list or a proof."""

ANSWER_SECONDS = 600.0
"""How long one read may take."""

TRANSIENT = re.compile(
    r"\b(?:408|425|429|5\d\d)\b|\bEOF\b|connection (?:refused|reset)|broken pipe|time[d-]? ?out|deadline exceeded"
    r"|temporary failure|toomanyrequests|BLOB_UPLOAD_|blob upload (?:unknown|invalid)|unavailable"
    r"|server closed|mismatch",
    re.IGNORECASE,
)
"""What the programs say about a failure that another attempt may not meet."""

SHOWN = 300
"""Characters of a program's words in a message: the last ones, which have the reason."""

_Result = TypeVar("_Result")


class RegistryUnreachableError(RegistryError):
    """A registry cannot be resolved, or did not answer in any attempt."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often each command is tried; ``pause`` is the seconds before the second attempt, and doubles after that.

    Seven attempts wait for a minute in total, long enough for a registry to restart. Each attempt of oras repeats
    single requests by itself.
    """

    attempts: int = 7
    pause: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest as the registry has it: digest and size of its bytes, and its content."""

    digest: str
    size: int
    value: Mapping[str, Any]

    @property
    def descriptor(self) -> dict[str, Any]:
        """What points at it."""
        return {"mediaType": str(self.value.get("mediaType", "")), "digest": self.digest, "size": self.size}

    @property
    def configuration(self) -> str:
        """The digest of the image's configuration; ``""`` of an index."""
        config = self.value.get("config")
        return str(config.get("digest", "")) if isinstance(config, dict) else ""

    def is_of(self, identifier: str) -> bool:
        """Whether it is of this image. Its digest differs if another program compressed the layers.

        Args:
            identifier: As an engine has it: the configuration's digest; with containerd's store docker has that of the
                manifest.
        """
        return identifier in (self.configuration, self.digest)

    def listed(self, key: str) -> tuple[Mapping[str, Any], ...]:
        """Return the descriptors of ``layers`` or ``manifests``; raises ``RegistryError`` if they are malformed."""
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
    """The registries that one command talks to; a context manager with a private folder for logins and certificates."""

    def __init__(self, settings: HostSettings, *, report: Report = ignore, patience: Patience | None = None) -> None:
        """Store this machine's settings; ``report`` receives a line for each retry."""
        self._settings = settings
        self._report = report
        self._patience = patience or Patience()
        self._stack = ExitStack()
        self._folder = Path()
        self._logins: dict[str, dict[str, str]] = {}
        self._plain: dict[str, bool] = {}
        self._checked: set[str] = set()

    def __enter__(self) -> Registries:
        """Create the private folder."""
        self._folder = self._stack.enter_context(private_folder())
        return self

    def __exit__(self, *_error: object) -> None:
        """Remove the private folder."""
        self._stack.close()

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return the manifest of a tag or digest; ``None`` if there is none."""
        try:
            content = self._read(repository, "manifest", "fetch", image_name(repository, reference))
        except NotInRegistryError:
            return None
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if ":" in reference and digest != reference:
            raise RegistryError(f"{repository} sent a manifest with another digest than {reference}")
        return Manifest(
            digest=digest, size=len(content), value=_table(content, f"the manifest {digest} of {repository}")
        )

    def existing(self, repository: str, reference: str) -> Manifest:
        """Return the manifest of a tag or digest; raises ``RegistryError`` if there is none."""
        found = self.manifest(repository, reference)
        if found is None:
            raise RegistryError(f"{repository} has no {reference}", hint="check the tag or digest")
        return found

    def blob(self, repository: str, digest: str) -> bytes:
        """Return a small blob; raises ``RegistryError`` if it does not have the digest."""
        content = self._read(repository, "blob", "fetch", "--output", "-", image_name(repository, digest))
        if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
            raise RegistryError(f"{repository} sent a blob with another digest than {digest}")
        return content

    def referrers(self, repository: str, digest: str) -> tuple[Mapping[str, Any], ...]:
        """Return descriptors of what is attached to a digest, of all pages."""
        where = f"the list of attachments of {repository}@{digest}"
        content = self._read(repository, "discover", "--format", "json", image_name(repository, digest))
        return descriptors(_table(content, where).get("manifests"), where)

    def tag(self, repository: str, digest: str, tags: Sequence[str]) -> None:
        """Put tags on an image that the repository has."""
        if tags:
            self._oras(f"tagging {repository}", repository, "tag", image_name(repository, digest), *tags)

    def copy(self, source: str, target: str, digest: str, *, tag: str = "", attached: bool) -> None:
        """Copy an image between repositories; within a registry nothing is sent.

        Args:
            tag: The tag of the copy; default: it has only its digest.
            attached: Whether everything that is attached is copied, too, with what is attached to that.
        """
        self.check_uploads(target)
        hosts = [each.partition("/")[0] for each in (source, target)]
        plain = [f"--{side}-plain-http" for side, host in zip(("from", "to"), hosts, strict=True) if self.plain(host)]
        words = ("--no-tty", *(["--recursive"] if attached else []), *plain, image_name(source, digest))
        target = f"{target}:{tag}" if tag else target
        doing = f"copying {words[-1]} to {target}"
        # oras 1.2 crashes where two of its copies fail in different ways; one at a time it mostly says how.
        for more in ((), *[("--concurrency=1",)] * (self._patience.attempts - 1)):
            try:
                self.run(doing, hosts, (oras(), "cp", *more, *words, target))
                return
            except ProgramCrashedError as error:
                crash = error
        raise crash

    def put_manifest(self, repository: str, value: Mapping[str, Any], *, tag: str = "") -> str:
        """Put a manifest into a repository, by its digest or under a tag; return its digest."""
        self.check_uploads(repository)
        content = json.dumps(value, sort_keys=True).encode()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        path = self._folder / "content"
        path.write_bytes(content)
        name = image_name(repository, tag or digest)
        self._oras(f"sending to {repository}", repository, "manifest", "push", name, str(path))
        return digest

    def plain(self, host: str) -> bool:
        """Whether a registry speaks HTTP without TLS: only one on this machine may."""
        if host not in self._plain:
            self._plain[host] = False
            if _is_loopback(host):
                try:
                    requests.get(urlunsplit(("https", host, "/v2/", "", "")), timeout=20, verify=self._trust([host]))
                except requests.exceptions.SSLError as error:
                    self._plain[host] = "CERTIFICATE_VERIFY_FAILED" not in str(error)
                except (requests.RequestException, OSError):
                    # No answer, or not yet: the program reports that.
                    del self._plain[host]
                    return False
        return self._plain[host]

    def check_uploads(self, repository: str) -> None:
        """Check that a registry on this machine does not send uploads from TLS to an address without it.

        For other machines ``NOWHERE`` sees to that; Go's programs use no proxy for this one.

        Raises:
            RegistryError: It does; nothing was sent there.
        """
        host, _, name = repository.partition("/")
        if repository in self._checked or not _is_loopback(host) or self.plain(host):
            return
        self._environment([host])
        encoded = self._logins[host].get("auth", "")
        if not encoded:
            return
        try:
            answer = requests.post(
                urlunsplit(("https", host, f"/v2/{name}/blobs/uploads/", "", "")),
                headers={"Authorization": f"Basic {encoded}"},
                timeout=20,
                verify=self._trust([host]),
                allow_redirects=False,
            )
        except (requests.RequestException, OSError):
            # The program will report it.
            return
        if urlsplit(answer.headers.get("Location", "")).scheme == "http":
            raise _without_tls(f"sending to {repository}", host)
        self._checked.add(repository)

    def run(self, doing: str, hosts: Sequence[str], argv: tuple[str, ...], *, show: Report = ignore) -> bytes:
        """Run a program that talks to registries, again after a broken connection; return what it printed.

        Args:
            doing: What it does, for messages.
            hosts: The registries; it gets their logins.
            show: Receives each line that it prints, cleaned, as it comes.

        Raises:
            RegistryUnreachableError: The registry cannot be resolved, or did not answer in any attempt.
            RegistryError: The registry refuses.
        """
        environment = self._environment(hosts)
        lines: list[str] = []

        def attempt() -> bytes:
            lines.clear()

            def heard(line: str) -> None:
                if line := self._clean(line):
                    lines.append(line)
                    show(line)

            if processes.stream(argv, heard, environment=environment):
                raise self._failure(doing, hosts[-1], "\n".join(lines[-40:]))
            return "\n".join(lines).encode()

        return self._patiently(doing, hosts[-1], attempt)

    def _oras(self, doing: str, repository: str, *words: str) -> bytes:
        host = repository.partition("/")[0]
        # A command of two words takes its options after both.
        two = words[0] in ("manifest", "blob")
        plain = ("--plain-http",) if self.plain(host) else ()
        return self.run(doing, [host], (oras(), *words[: 1 + two], *plain, *words[1 + two :]))

    def _read(self, repository: str, *words: str) -> bytes:
        """Return what oras prints on stdout, at most ``LARGEST`` bytes."""
        host = repository.partition("/")[0]
        plain = ("--plain-http",) if self.plain(host) else ()
        environment = self._environment([host])
        doing = f"reading {words[-1]}"

        def attempt() -> bytes:
            done = processes.run(
                (oras(), *words[:-1], *plain, words[-1]), timeout=ANSWER_SECONDS, environment=environment, limit=LARGEST
            )
            if len(done.output) > LARGEST:
                raise RegistryError(f"{doing}: {host} sends more than {LARGEST >> 20} MB")
            if done.status:
                raise self._failure(doing, host, "time-out" if done.timed_out else self._clean(done.words))
            return done.output

        return self._patiently(doing, host, attempt)

    def _patiently(self, doing: str, host: str, attempt: Callable[[], _Result]) -> _Result:
        """Return the result of an attempt; repeat it after a failure that may pass."""
        pause, count = self._patience.pause, self._patience.attempts
        for number in range(1, count + 1):
            try:
                return attempt()
            except _PassingError as error:
                if number == count:
                    raise RegistryUnreachableError(
                        f"{doing}: {host} failed {count} times: {error}",
                        hint="repeat the command; what the registry already has is not sent again",
                    ) from None
                self._report(f"  {doing}: {error}; attempt {number + 1} of {count} in {pause:g} s")
                time.sleep(pause)
                pause *= 2
        raise AssertionError("at least one attempt")

    def _failure(self, doing: str, host: str, words: str) -> Exception:
        """Return the error for what a program said: one to try again after, or one with what to do."""
        if re.search(r"^panic: ", words, re.MULTILINE):
            return ProgramCrashedError(
                f"{doing}: the program crashed", hint="install a newer one: `oras version` shows it"
            )
        whole = _essence(words)
        lower = whole.lower()
        said = whole if len(whole) <= SHOWN else f"... {whole[-SHOWN:]}"
        place = f"{doing}: {said}"
        again = f"log in again (`docker login {host}`; for ECR see docs/push.md), then repeat the command"
        if f"{NOWHERE.rpartition('/')[2]}: connect" in whole:
            return _without_tls(doing, host)
        if "x509" in lower or "certificate" in lower:
            trust = f"put its CA into {ENGINES_TRUST[0]}/{host}/ca.crt, as for docker, or set {BUNDLES[0]}"
            other = "use a host name that the registry's certificate has"
            return RegistryError(
                f"{host}: certificate not trusted ({said})",
                hint=other if "not valid for" in lower or "valid for" in lower else trust,
            )
        if "no such host" in lower:
            return RegistryUnreachableError(
                f"cannot resolve {host} ({said})",
                hint="check the registry's name, and this machine's DNS and proxy settings",
            )
        if "expired" in lower:
            return RegistryError(f"{doing}: the login at {host} has expired ({said})", hint=again)
        if re.search(r"read-?only|\b405\b|unsupported", lower):
            return RegistryError(f"{doing}: {host} is read-only ({said})", hint="try later, or use another repository")
        if re.search(
            r"\b401\b|unauthorized|authentication required|no basic auth|invalid username|basic credential", lower
        ):
            if not self._logins.get(host):
                return RegistryError(
                    f"{doing}: {host} requires a login, and this machine has none",
                    hint=f"`docker login {host}`; docs/push.md lists the other sources of logins",
                )
            return RegistryError(f"{doing}: {host} rejects the user or password ({said})", hint=again)
        if re.search(r"\b403\b|denied|forbidden", lower):
            hint = "the user needs the right to push (for ECR: an IAM policy)"
            return RegistryError(f"{doing}: permission denied by {host} ({said})", hint=hint)
        if "no space left" in lower:
            return RegistryError(place, hint="free some space, or set TMPDIR to a folder with room for the image")
        if TRANSIENT.search(whole):
            return _PassingError(said)
        if re.search(r"\b404\b|not found|unknown", lower):
            hint = "check the name; some registries need a repository to be created before the first push"
            return NotInRegistryError(f"{doing}: not found at {host} ({said})", hint=hint)
        return RegistryError(place)

    def _environment(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return the environment of a program: logins, certificates, and no plain HTTP to another machine."""
        for host in hosts:
            if host not in self._logins:
                self._logins[host] = login_for(host)
        auths = {config_key(host): login for host, login in self._logins.items() if login}
        configuration = self._folder / "config.json"
        configuration.write_text(json.dumps({"auths": auths}), encoding="utf-8")
        environment = {
            **processes.own_environment(),
            "DOCKER_CONFIG": str(self._folder),
            "REGISTRY_AUTH_FILE": str(configuration),
            "HTTP_PROXY": NOWHERE,
            "http_proxy": NOWHERE,
        }
        trust = self._trust(hosts)
        if isinstance(trust, str):
            environment[BUNDLES[0]] = trust
        return environment

    def _trust(self, hosts: Sequence[str]) -> bool | str:
        """Return the CA bundle for registries: this machine's, and what engines trust for these registries alone."""
        files = [Path(value) for name in BUNDLES if (value := os.environ.get(name))]
        files += sorted(
            path for folder in ENGINES_TRUST for host in hosts for path in folder.expanduser().glob(f"{host}/*.crt")
        )
        parts = [self._settings.ca, *(path.read_bytes() for path in files if path.is_file())]
        bundle = b"\n".join(filter(None, dict.fromkeys(parts)))
        if not bundle:
            return True
        path = self._folder / "ca.pem"
        path.write_bytes(bundle)
        return str(path)

    def _clean(self, text: str) -> str:
        """Return text of a program without terminal escapes, logins and the queries of addresses."""
        text = "".join(each if each.isprintable() or each == "\n" else " " for each in processes.clean(text.encode()))
        for login in self._logins.values():
            encoded = login.get("auth", "")
            password = base64.b64decode(encoded).decode().partition(":")[2]
            for secret in filter(None, (encoded, password, login.get("identitytoken", ""))):
                text = text.replace(secret, "***")
        # The query of an address may have a signature.
        return re.sub(r"\?[^\s\"\\]*", "", text)


def _without_tls(doing: str, host: str) -> RegistryError:
    return RegistryError(
        f"{doing}: {host} sends us to an address without TLS; nothing was sent there",
        hint="the registry, or the proxy before it, announces http: addresses: set X-Forwarded-Proto there",
    )


class _PassingError(Exception):
    """A failed attempt that may succeed when repeated."""


class ProgramCrashedError(RegistryError):
    """The program itself failed."""


class NotInRegistryError(RegistryError):
    """The registry has no such thing."""


def oras() -> str:
    """Return oras's path; raises ``HostError`` if it is not installed."""
    found = processes.programs("oras", os.environ.get("PATH"))
    if not found:
        raise HostError(
            "there is no `oras` program on PATH, which talks to registries",
            hint="install the package oras (Debian 13: `apt-get install oras`; `brew install oras`); see docs/push.md",
        )
    return found[0]


def _essence(words: str) -> str:
    """Return the reason in what oras, skopeo, buildah or docker print, as one line."""
    logged = re.findall(r'level=(?:fatal|error) msg="((?:[^"\\]|\\.)*)"', words)
    marked = re.findall(r"^(?:Error(?: response from registry)?|error):\s*(.*(?:\n.*)*)", words, re.MULTILINE)
    last = (logged or marked or words.strip().splitlines()[-1:] or ["it failed without a word"])[-1]
    return " ".join(last.replace('\\"', '"').split())


def _table(content: bytes, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RegistryError(f"{where} is not a JSON object")
    return found


def _is_loopback(host: str) -> bool:
    machine = host.rpartition(":")[0] if ":" in host else host
    try:
        return ipaddress.ip_address(machine.strip("[]")).is_loopback
    except ValueError:
        return machine == "localhost"
