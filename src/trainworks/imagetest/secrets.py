"""Finds keys, credentials, the build host's proxy and CA, and package caches in an image.

Every layer is read, and not only the resulting file system: a file that a later step deletes is
still in its layer. Names are checked first; the content is read only of small text files.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import posixpath
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from packaging.utils import canonicalize_name

from trainworks.engine.protocol import BuiltImage, Engine, HistoryEntry, Layer

CONTENT_LIMIT = 1_000_000
"""Bytes; of larger files only the name is checked: no key and no setting is that large."""

MOST_FINDINGS = 20
"""The largest number of findings in a summary."""

_TEXT_SAMPLE = 8192
"""Bytes in which a NUL byte says that a file is not text."""

_LAYER_NAME_LENGTH = len("sha256:") + 12
_HOST_SETTING = "setting of the build host"


@dataclass(frozen=True, kw_only=True)
class SecretFinding:
    """Something that must not be in the image.

    Attributes:
        where: The layer, or the step of the history, the label, the variable.
        path: The file inside the layer; empty outside of layers.
        rule: The kind of secret.
        advice: How to keep the secret out of the image.
        deleted_in: Another layer that deletes the file; it is in the image all the same.
    """

    where: str
    path: str
    rule: str
    advice: str
    deleted_in: str = ""

    def __str__(self) -> str:
        """Return one line for a report; never the secret itself."""
        place = f"{self.where}: /{self.path}" if self.path else self.where
        deletion = ""
        if self.deleted_in:
            deletion = f" ({self.deleted_in} deletes it, but anyone can unpack this layer)"
        return f"{place}: {self.rule}{deletion}; {self.advice}"


_URL_CREDENTIALS = rb"(?i)[a-z][a-z0-9+]*://[^/\s:@'\"]+:[^/\s@'\"]+@"
_MOUNT = "give it to the step as a build secret (RUN --mount=type=secret)"
_CLEAN = "let the step use a cache mount, or delete it in the step that makes it"

_FILES: tuple[tuple[str, str, str, bytes | None], ...] = (
    (
        "ssh host key",
        r"etc/ssh/ssh_host_[^/]*_key",
        (
            "all containers would share it: delete it in the step that makes it, and make keys when"
            " the container starts"
        ),
        None,
    ),
    (
        "ssh key or authorization of a user",
        r"(?:.*/)?\.ssh/(?:id_[^/.]+|identity|authorized_keys2?)",
        "make keys when the container starts",
        None,
    ),
    ("credentials (.netrc)", r"(?:.*/)?[._]netrc", _MOUNT, None),
    ("AWS credentials", r"(?:.*/)?\.aws/credentials", _MOUNT, None),
    ("git credentials", r"(?:.*/)?\.git-credentials", _MOUNT, None),
    (
        "Google Cloud credentials",
        r"(?:.*/)?gcloud/(?:application_default_credentials\.json|credentials\.db)",
        _MOUNT,
        None,
    ),
    ("Hugging Face token", r"(?:.*/)?\.?(?:cache/)?huggingface/token", _MOUNT, None),
    ("Kubernetes credentials", r"(?:.*/)?\.kube/config", _MOUNT, None),
    ("apt credentials", r"etc/apt/auth\.conf(?:\.d/[^/]+)?", _MOUNT, None),
    ("file of a build secret", r"(?:var/)?run/secrets/.+", "do not copy secrets", None),
    (
        "registry credentials",
        r"(?:.*/)?(?:\.docker/config\.json|\.dockercfg|containers/auth\.json)",
        _MOUNT,
        rb'"(?:auth|identitytoken|password)"\s*:\s*"[^"]',
    ),
    (
        "package index credentials",
        r"(?:.*/)?(?:pip\.conf|pip\.ini|uv\.toml|\.condarc|\.gitconfig)|etc/apt/sources\.list(?:\.d/[^/]+)?",
        _MOUNT,
        _URL_CREDENTIALS,
    ),
    (
        "package index credentials",
        r"(?:.*/)?(?:\.pypirc|\.npmrc)",
        _MOUNT,
        rb"(?:_authToken|_password|_auth|password)\s*[=:]\s*\S",
    ),
    (
        "proxy of the build host",
        r"etc/(?:apt/apt\.conf(?:\.d/[^/]+)?|environment|pip\.conf|profile\.d/[^/]+|wgetrc)|(?:.*/)?\.(?:curlrc|wgetrc)",
        "pass the proxy as a predefined build argument, never write it to a file",
        rb"(?im)^\s*(?:Acquire::\S*::Proxy\s+\"\w|(?:export\s+)?(?:https?_|ftp_|all_)?proxy\s*=\s*[\"']?\w)",
    ),
    (
        "certificate authority of the build host",
        r"usr/local/share/ca-certificates/.+",
        "use the host's CA bundle as a build secret for the time of the step",
        None,
    ),
    (
        "package cache (apt)",
        r"var/cache/apt/(?:.*/)?[^/]+\.(?:bin|deb)|var/lib/apt/lists/.+",
        _CLEAN,
        None,
    ),
    (
        "package cache",
        r"(?:root|home/[^/]+)/\.cache/.+|(?:.*/)?(?:\.cache|var/cache)/(?:pip|uv)/.+",
        _CLEAN,
        None,
    ),
)
"""Rule, path, advice, and the content of a file that is not allowed; ``None`` for any content."""

ALLOWED_PATHS = (
    # A wheel's own tests: keys made to be public, the same in every copy of the
    # wheel on the package index.
    r".*/(?:site|dist)-packages/(?:.+/)?tests?/.+",
    # The certificates of CPython's own test suite, where an interpreter is installed with it.
    r".*/lib/python3[^/]*/test/.+",
    # Examples in manuals of Debian packages, public as well.
    r"usr/share/doc/.+",
)
"""Paths of files with private keys or key identifiers that are known to be public.

They excuse a content, never a name.
"""

_RECORD = re.compile(
    r"(?P<folder>.+/(?:site|dist)-packages)/(?P<name>[^/]+?)-[^/-]+\.dist-info/RECORD"
)

_ALLOWED = re.compile("|".join(f"(?:{pattern})" for pattern in ALLOWED_PATHS))
_ANY_NAME = re.compile("|".join(f"(?:{path})" for _, path, *_ in _FILES))

# A whole block, with a body: programs that read keys have the first line alone in their text. A
# line end may be written as two characters, as in the JSON of a service account.
_PRIVATE_KEY = re.compile(
    rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:\s|\\[rn])+"
    rb"(?:[A-Za-z-]+: [^\r\n]*\s+)*(?:[A-Za-z0-9+/=]|\s|\\[rn]){64,}-----END "
)
# AWS's own example keys, which stand in its SDKs and manuals, end in EXAMPLE: they open nothing.
_AWS_KEY = re.compile(rb"(?<![A-Za-z0-9+/])(?:AKIA|ASIA)[0-9A-Z]{16}(?<!EXAMPLE)(?![A-Za-z0-9+/])")
_VARIABLE_PROXY = re.compile(rb"\b(?:https?|ftp|all)_proxy=[\"']?[A-Za-z0-9\[]", re.IGNORECASE)
_VARIABLE_SECRET = re.compile(
    rb"\b[A-Z0-9_]*(?:PASSWORD|SECRET_ACCESS_KEY|SESSION_TOKEN|_TOKEN|API_KEY)=[\"']?[^\s\"'$]{8,}"
)
_BINARY_NAME = re.compile(
    r".*\.(?:so|pyc|gz|xz|bz2|zst|zip|whl|deb|png|jpg|gif|mo|a|o|npy|npz|bin|cubin|fatbin|gpg)"
)


def scan(
    engine: Engine,
    image: BuiltImage,
    forbidden: tuple[str, ...] = (),
    published: Iterable[str] = (),
) -> tuple[SecretFinding, ...]:
    """Search every layer, the history, the labels and the environment of an image.

    Args:
        engine: The engine that has the image.
        image: The image.
        forbidden: Literal strings; a finding has the number of the string, never the string.
        published: Distributions that an index has (``plan.checks.SecretsCheck``).

    Returns:
        The findings; empty for a clean image.
    """
    with engine.layers(image.reference) as layers:
        findings = list(scan_layers(layers, forbidden, published))
    findings += scan_texts(_texts(image, engine.history(image.reference)), forbidden)
    return tuple(findings)


def added(
    findings: tuple[SecretFinding, ...], inherited: tuple[SecretFinding, ...]
) -> tuple[SecretFinding, ...]:
    """Return the findings that the base image does not have.

    They are compared by rule and path, or by rule and place outside of layers. The layer does not
    count: an engine may name one layer differently in two images.
    """
    inherited_keys = {(finding.path or finding.where, finding.rule) for finding in inherited}
    new_findings = []
    for finding in findings:
        key = (finding.path or finding.where, finding.rule)
        if key not in inherited_keys:
            new_findings.append(finding)
    return tuple(new_findings)


def scan_layers(
    layers: Iterable[Layer], forbidden: tuple[str, ...] = (), published: Iterable[str] = ()
) -> tuple[SecretFinding, ...]:
    """Search layers, each read once; their order does not matter.

    Arguments as of ``scan``.
    """
    scanner = _LayerScanner(forbidden=_numbered(forbidden), published=frozenset(published))
    for layer in layers:
        scanner.scan(layer)
    return scanner.finish()


def scan_texts(
    texts: Iterable[tuple[str, str]], forbidden: tuple[str, ...] = ()
) -> tuple[SecretFinding, ...]:
    """Search texts that are not files: pairs of a place and its text."""
    strings = _numbered(forbidden)
    findings: list[SecretFinding] = []
    for where, text in texts:
        data = text.encode()
        rules = list(_content_rules(data, strings, allowed=False))
        if _VARIABLE_PROXY.search(data):
            rules.append(("proxy of the build host", "pass it as a predefined build argument"))
        if _VARIABLE_SECRET.search(data):
            rules.append(("secret in a variable", _MOUNT))
        if re.search(_URL_CREDENTIALS, data):
            rules.append(("credentials in a URL", _MOUNT))
        for rule, advice in rules:
            findings.append(SecretFinding(where=where, path="", rule=rule, advice=advice))
    return tuple(findings)


def _texts(image: BuiltImage, history: tuple[HistoryEntry, ...]) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each step, label and variable: ``("label a", "a=b")``."""
    for number, entry in enumerate(history, start=1):
        yield f"step {number} of the history", entry.created_by
    for name, value in image.labels.items():
        yield f"label {name}", f"{name}={value}"
    for name, value in image.environment.items():
        yield f"environment variable {name}", f"{name}={value}"


def _numbered(forbidden: tuple[str, ...]) -> tuple[tuple[int, bytes], ...]:
    """Return the forbidden strings as bytes, with their numbers.

    Each is searched for itself: CPython looks for a literal many times faster than for an
    alternative of literals.
    """
    strings = []
    for number, text in enumerate(forbidden, 1):
        if text.strip():
            strings.append((number, text.strip().encode()))
    return tuple(strings)


def _content_rules(
    data: bytes, forbidden: tuple[tuple[int, bytes], ...], *, allowed: bool
) -> Iterator[tuple[str, str]]:
    """Yield a rule and an advice for each secret in a content."""
    if not allowed:
        # The plain search first: the patterns would cost seconds over a whole image.
        if b"PRIVATE KEY" in data and _PRIVATE_KEY.search(data):
            yield (
                "private key",
                "delete it in the step that makes it, or make it when the container starts",
            )
        if (b"AKIA" in data or b"ASIA" in data) and _AWS_KEY.search(data):
            yield "AWS access key", _MOUNT
    for number, text in forbidden:
        if text in data:
            yield f"{_HOST_SETTING} (number {number} of the forbidden strings)", _MOUNT


@dataclass(kw_only=True)
class _LayerScanner:
    forbidden: tuple[tuple[int, bytes], ...]
    published: frozenset[str] = frozenset()
    findings: list[SecretFinding] = field(default_factory=list)
    keys: dict[SecretFinding, str] = field(default_factory=dict)
    records: set[tuple[str, str, str]] = field(default_factory=set)
    deleted: dict[str, str] = field(default_factory=dict)

    def scan(self, layer: Layer) -> None:
        """Search one layer; the findings are added to those of the layers before."""
        where = f"layer {layer.name[:_LAYER_NAME_LENGTH]}"
        for member in layer.archive:
            path = posixpath.normpath(member.name).lstrip("/")
            folder, name = posixpath.split(path)
            if name == ".wh..wh..opq":
                # An opaque folder hides everything of earlier layers in it.
                self.deleted[folder] = where
            elif name.startswith(".wh."):
                self.deleted[posixpath.join(folder, name[len(".wh.") :])] = where
            elif member.islnk():
                # A link's target is another file.
                self._check_name(where, path, None)
            elif member.isreg() and member.size > 0:
                # An empty file is a mount point that a mount leaves behind.
                self._check_file(where, path, member, layer)

    def _check_file(self, where: str, path: str, member: tarfile.TarInfo, layer: Layer) -> None:
        """Check the name of a file, and the content of a small text or of a wheel's list."""
        record = _RECORD.fullmatch(path)
        is_published = record is not None and canonicalize_name(record["name"]) in self.published
        is_small_text = member.size <= CONTENT_LIMIT and not _BINARY_NAME.fullmatch(path)
        data = None
        if is_published or is_small_text:
            stream = layer.archive.extractfile(member)
            if stream is not None:
                with stream:
                    data = stream.read()
        self._check_name(where, path, data)
        if data is None:
            return
        if b"\0" not in data[:_TEXT_SAMPLE]:
            self._check_content(where, path, data)
        if is_published and record is not None:
            for file, digest in _recorded(record["folder"], data):
                self.records.add((where, file, digest))

    def _check_name(self, layer: str, path: str, data: bytes | None) -> None:
        """Add a finding for each rule that forbids a path; ``data`` is its content, if read."""
        name = path.encode("utf-8", "surrogateescape")
        for number, text in self.forbidden:
            if text in name:
                rule = (
                    f"{_HOST_SETTING} (number {number} of the forbidden strings) in the file's name"
                )
                # The path has the string itself: name the folder only.
                self._add(layer, posixpath.dirname(path), rule, _CLEAN)
        if not _ANY_NAME.fullmatch(path):
            return
        for rule, pattern, advice, content in _FILES:
            if not re.fullmatch(pattern, path):
                continue
            has_content = content is None or (data is not None and re.search(content, data))
            if has_content:
                self._add(layer, path, rule, advice)

    def _check_content(self, layer: str, path: str, data: bytes) -> None:
        """Add a finding for each secret in a file's content, and note the hash of a key's file."""
        is_allowed = _ALLOWED.fullmatch(path) is not None
        for rule, advice in _content_rules(data, self.forbidden, allowed=is_allowed):
            self._add(layer, path, rule, advice)
            if not rule.startswith(_HOST_SETTING):
                self.keys[self.findings[-1]] = _digest(data)

    def _add(self, layer: str, path: str, rule: str, advice: str) -> None:
        """Add a finding, unless it is the same as the last one."""
        finding = SecretFinding(where=layer, path=path, rule=rule, advice=advice)
        if finding not in self.findings[-1:]:
            self.findings.append(finding)

    def _deleted_in(self, finding: SecretFinding) -> str:
        """Return another layer that deletes the file of a finding, or ``""``."""
        path = finding.path
        while path:
            # Not the layer itself: it empties a folder before it fills it. The order of the two
            # layers does not matter: an archive has layers in any order.
            if self.deleted.get(path, finding.where) != finding.where:
                return self.deleted[path]
            path = posixpath.dirname(path)
        return ""

    def finish(self) -> tuple[SecretFinding, ...]:
        """Return the findings, without keys that a published wheel lists as its own."""
        findings = []
        for finding in self.findings:
            digest = self.keys.get(finding)
            if (finding.where, finding.path, digest) not in self.records:
                findings.append(replace(finding, deleted_in=self._deleted_in(finding)))
        return tuple(findings)


def _digest(data: bytes) -> str:
    """Return a file's digest in RECORD's form."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _recorded(folder: str, record: bytes) -> Iterator[tuple[str, str]]:
    """Yield path and digest of each file of a RECORD that has one."""
    for row in csv.reader(record.decode("utf-8", "replace").splitlines()):
        if len(row) > 1 and row[1].startswith("sha256="):
            yield posixpath.normpath(posixpath.join(folder, row[0])), row[1].removeprefix("sha256=")


def summary(findings: tuple[SecretFinding, ...]) -> str:
    """Return the findings as lines, package caches last.

    The files of a cache in a layer are one line.
    """
    groups: dict[tuple[str, str, str, str], list[SecretFinding]] = {}
    for finding in findings:
        is_one_of_many = finding.rule.startswith(("package cache", _HOST_SETTING))
        path = "" if is_one_of_many else finding.path
        key = (finding.where, finding.rule, path, finding.deleted_in)
        groups.setdefault(key, []).append(finding)
    lines = []
    for group in sorted(groups.values(), key=_is_about_cache):
        line = str(group[0])
        if len(group) > 1:
            line += f" (and {len(group) - 1} more like it in this layer)"
        lines.append(line)
    if len(lines) > MOST_FINDINGS:
        lines = [*lines[:MOST_FINDINGS], f"... and {len(lines) - MOST_FINDINGS} more"]
    return "\n".join(lines)


def _is_about_cache(group: list[SecretFinding]) -> bool:
    return group[0].rule.startswith("package cache")
