"""What apt has to know of an image to answer for it outside of it, read from the image's files.

Nothing of the image runs for that, and nothing in it may lead apt to a secret or to a program: of
its settings only the archives, their public keys and its pinning are taken. Each of them is written
anew.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from trainworks.engine.tree import ImageTree
from trainworks.host.apt import AptSource, parse_deb822, parse_one_line

FOLDER: Final = "/run/foreign"
"""Where a step finds these files."""

STATUS: Final = "/var/lib/dpkg/status"

READ: Final = re.compile(
    r"(?:/usr/lib|/etc)/os-release|/var/lib/dpkg/(?:status|arch)|/etc/apt/(?:sources\.list|preferences|trusted\.gpg)"
    r"|/etc/apt/(?:sources\.list|preferences|trusted\.gpg|keyrings)\.?d?/[^/]+|/usr/share/keyrings/[^/]+|/.*\.(?:gpg|asc)"
)
"""The files whose content is asked for."""

LARGEST_KEYRING: Final = 4 << 20

_URI: Final = re.compile(r"https?://[A-Za-z0-9.:@%/_~+=,\[\]-]+")
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9./_+~-]*|/|\./?")
_ARCHITECTURE: Final = re.compile(r"[a-z0-9][a-z0-9-]*")
_FINGERPRINT: Final = re.compile(r"[0-9A-Fa-f]{16,40}!?")


@dataclass(frozen=True, kw_only=True)
class ForeignDebian:
    """An image of Debian, Ubuntu or one that is made of them.

    Attributes:
        release: Its ``os-release``.
        files: What a step mounts at ``FOLDER``: name to content.
        packages: How many packages are installed.
        refused: The archives of the image that are not asked, a sentence each.
    """

    release: dict[str, str]
    files: dict[str, bytes] = field(repr=False)
    packages: int
    refused: tuple[str, ...] = ()

    @property
    def suite(self) -> str:
        """Code name of its Debian; ``""`` of another distribution."""
        return (
            self.release.get("VERSION_CODENAME", "") if self.release.get("ID") == "debian" else ""
        )


def release_of(tree: ImageTree) -> dict[str, str]:
    """Return the ``os-release`` of an image; empty where it has none."""
    text = (tree.read("/etc/os-release") or tree.read("/usr/lib/os-release") or b"").decode(
        errors="replace"
    )
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value.strip("\"'") for name, sign, value in pairs if sign}


def read_foreign(tree: ImageTree, own: Iterable[AptSource] = ()) -> ForeignDebian | None:
    """Return what apt has to know of an image; ``None`` of one without dpkg's packages.

    Args:
        tree: Its files, read with ``READ``.
        own: This machine's archives, whose hosts may be in a network of its own.
    """
    status = tree.read(STATUS)
    if status is None:
        return None
    hosts = {urlsplit(each.uri).hostname for each in own}
    keys: dict[str, bytes] = {}
    lines: dict[str, None] = {}
    refused: dict[str, None] = {}
    for source in _sources(tree):
        reason = _wrong(source, hosts)
        if reason:
            refused.setdefault(f"{_shown(source.uri)} of the image is not asked: {reason}")
        else:
            lines.setdefault(_line(source, tree, keys))
    trusted = [
        path for path in tree.below("/etc/apt/trusted.gpg.d") if path.endswith((".gpg", ".asc"))
    ]
    for number, path in enumerate(["/etc/apt/trusted.gpg", *sorted(trusted)]):
        content = tree.read(path)
        if content is not None and len(content) <= LARGEST_KEYRING:
            keys[f"trusted/{number}.{'asc' if path.endswith('.asc') else 'gpg'}"] = content
    pinning = ["/etc/apt/preferences", *sorted(tree.below("/etc/apt/preferences.d"))]
    preferences = b"\n\n".join(filter(None, map(tree.read, pinning)))
    files = {
        "status": status,
        "sources.list": "".join(f"{line}\n" for line in lines).encode(),
        "preferences": preferences,
        "apt.conf": _configuration(_architectures(tree, status)).encode(),
        # A folder must be there to be read.
        "trusted/.keep": b"",
        **keys,
    }
    installed = re.findall(rb"^Status: \S+ \S+ installed$", status, re.MULTILINE)
    return ForeignDebian(
        release=release_of(tree), files=files, packages=len(installed), refused=tuple(refused)
    )


def _sources(tree: ImageTree) -> Iterable[AptSource]:
    parts = sorted(
        path
        for path in tree.below("/etc/apt/sources.list.d")
        if path.endswith((".list", ".sources"))
    )
    for path in ["/etc/apt/sources.list", *parts]:
        text = (tree.read(path) or b"").decode(errors="replace")
        yield from parse_deb822(text) if path.endswith(".sources") else parse_one_line(text)


def _wrong(source: AptSource, hosts: set[str | None]) -> str:
    """Return why an archive of an image is not asked; ``""`` where it may be."""
    if not _URI.fullmatch(source.uri):
        return "only http and https archives are"
    if not all(_WORD.fullmatch(word) for word in (source.suite, *source.components.split())):
        return "its suite or component is malformed"
    try:
        host = urlsplit(source.uri).hostname or ""
    except ValueError:
        return "its address is malformed"
    if host in hosts:
        return ""
    if host == "localhost" or host.endswith(".localhost"):
        return "it is an address of this machine"
    try:
        public = ipaddress.ip_address(host).is_global
    except ValueError:
        # A name. Digits alone are an address too, for what resolves it.
        public = re.fullmatch(r"[0-9.]+|0x[0-9a-fA-F]+", host) is None and host != ""
    return "" if public else "it is an address of a private network"


def _line(source: AptSource, tree: ImageTree, keys: dict[str, bytes]) -> str:
    """Return an archive's line, and add its keys."""
    signed = _signed_by(source.signed_by, tree, keys)
    options = f"[signed-by={signed}] " if signed else ""
    return f"deb {options}{source.uri} {source.suite} {source.components}".rstrip()


def _signed_by(value: str, tree: ImageTree, keys: dict[str, bytes]) -> str:
    """Return the value of ``signed-by`` for keys that are written anew.

    ``""`` where the image names none.
    """
    if "BEGIN PGP" in value:
        # In a paragraph a line with a dot is an empty one.
        lines = ["" if line == "." else line for line in value.strip().splitlines()]
        return _add_key("\n".join([*lines, ""]).encode(), "asc", keys)
    named = []
    for word in re.split(r"[\s,]+", value):
        if _FINGERPRINT.fullmatch(word):
            named.append(word)
        elif word.startswith("/"):
            content = tree.read(word)
            # apt says that a key is missing, where the image lacks it.
            content = b"" if content is None or len(content) > LARGEST_KEYRING else content
            named.append(_add_key(content, "asc" if word.endswith(".asc") else "gpg", keys))
    return ",".join(named)


def _add_key(content: bytes, ending: str, keys: dict[str, bytes]) -> str:
    name = next(
        (name for name, known in keys.items() if known == content and name.endswith(ending)), ""
    )
    name = name or f"keys/{len(keys)}.{ending}"
    keys[name] = content
    return f"{FOLDER}/{name}"


def _architectures(tree: ImageTree, status: bytes) -> list[str]:
    """Return the architecture of the image's own dpkg, then those that it may
    have packages of besides.
    """
    paragraphs = status.decode(errors="replace").split("\n\n")
    own = next((each for each in paragraphs if re.match(r"Package: dpkg$", each, re.MULTILINE)), "")
    found = re.findall(r"^Architecture: (\S+)$", own, re.MULTILINE)
    found += (tree.read("/var/lib/dpkg/arch") or b"").decode(errors="replace").split()
    sound = [each for each in found if _ARCHITECTURE.fullmatch(each) and each != "all"]
    return list(dict.fromkeys(sound)) or ["amd64"]


def _configuration(architectures: list[str]) -> str:
    listed = " ".join(f'"{each}";' for each in architectures)
    return f"""\
APT::Architecture "{architectures[0]}";
APT::Architectures {{ {listed} }};
APT::Get::Always-Include-Phased-Updates "true";
Acquire::Languages "none";
Acquire::https::CAInfo "{FOLDER}/ca.pem";
Dir::State::status "{FOLDER}/status";
Dir::Etc::SourceList "{FOLDER}/sources.list";
Dir::Etc::SourceParts "-";
Dir::Etc::trusted "{FOLDER}/trusted.gpg";
Dir::Etc::trustedparts "{FOLDER}/trusted";
Dir::Etc::preferences "{FOLDER}/preferences";
Dir::Etc::preferencesparts "-";
"""


def _shown(uri: str) -> str:
    """Return an address without the login in it."""
    return re.sub(r"//[^/\s@]*@", "//", uri)
