"""Reads apt's inputs from the files of an image, so that apt can run outside of the image.

No program of the image runs, and no file of the image may lead apt to a secret or to a program:
only the archives, their public keys and the pinning are read, and each is written anew.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from trainworks.engine.tree import ImageTree
from trainworks.host.apt import AptSource, make_source_lines, parse_deb822, parse_one_line
from trainworks.host.settings import HostSettings

FOLDER: Final = "/run/foreign"
"""The folder of these files in a step."""

STATUS: Final = "/var/lib/dpkg/status"

READ: Final = re.compile(
    r"(?:/usr/lib|/etc)/os-release|/var/lib/dpkg/(?:status|arch)|/etc/apt/(?:sources\.list|preferences|trusted\.gpg)"
    r"|/etc/apt/(?:sources\.list|preferences|trusted\.gpg|keyrings)\.?d?/[^/]+|/usr/share/keyrings/[^/]+|/.*\.(?:gpg|asc)"
)
"""The files that are read with their content."""

LARGEST_KEYRING: Final = 4 << 20
"""Bytes of the largest keyring that is taken."""

_URI: Final = re.compile(r"https?://[A-Za-z0-9.:@%/_~+=,\[\]-]+")
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9./_+~-]*|/|\./?")
_ARCHITECTURE: Final = re.compile(r"[a-z0-9][a-z0-9-]*")
_FINGERPRINT: Final = re.compile(r"[0-9A-Fa-f]{16,40}!?")
_NUMBERS: Final = re.compile(r"(?:0[xX][0-9a-fA-F]*|[0-9]*)(?:\.(?:0[xX][0-9a-fA-F]*|[0-9]*))*")
"""A host that resolvers read as an address, besides the usual form: ``0x7f.1`` is a loopback one
(inet_aton(3)).
"""


@dataclass(frozen=True, kw_only=True)
class ForeignDebian:
    """An image of Debian, Ubuntu or a distribution that is made of them.

    Attributes:
        release: The image's ``os-release``.
        files: The files that a step mounts at ``FOLDER``: name to content.
        packages: The number of installed packages.
        archives: The archives of the image that apt may ask.
        refused: A sentence for each archive of the image that is not used.
    """

    release: dict[str, str]
    files: dict[str, bytes] = field(repr=False)
    packages: int
    archives: tuple[AptSource, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def suite(self) -> str:
        """The code name of the image's Debian; ``""`` for another distribution."""
        if self.release.get("ID") != "debian":
            return ""
        return self.release.get("VERSION_CODENAME", "")


def read_release(tree: ImageTree) -> dict[str, str]:
    """Return the values of an image's ``os-release`` by name; empty if the image has none.

    For example ``{"ID": "debian", "VERSION_CODENAME": "bookworm"}``.
    """
    content = tree.read("/etc/os-release") or tree.read("/usr/lib/os-release") or b""
    values = {}
    for line in content.decode(errors="replace").splitlines():
        name, sign, value = line.partition("=")
        if sign:
            values[name] = value.strip("\"'")
    return values


_PREFERENCES_FOLDER = "/etc/apt/preferences.d"
_PREFERENCES = re.compile(rf"{_PREFERENCES_FOLDER}/(?:[\w-]+|[\w-][\w.-]*\.pref)", re.ASCII)
"""Files of that folder that apt reads; others, such as ``pin.bak``, are left out.

Source: apt_preferences(5): no ending or ``pref``, of letters, digits, hyphens, underscores and
periods.
"""


def read_foreign(tree: ImageTree, own: Iterable[AptSource] = ()) -> ForeignDebian | None:
    """Return apt's inputs from an image of another maker; ``None`` for one without dpkg's packages.

    Args:
        tree: The image's files, those whose paths match ``READ``.
        own: Archives of this machine: their hosts are asked also in a private network.

    Returns:
        The inputs as files. Archives that may not be asked are in ``refused``.
    """
    status = tree.read(STATUS)
    if status is None:
        return None
    own_hosts = {urlsplit(source.uri).hostname for source in own}
    keys: dict[str, bytes] = {}
    # Sets that keep their order.
    lines: dict[str, None] = {}
    archives: list[AptSource] = []
    refused: dict[str, None] = {}
    for source in _read_sources(tree):
        reason = _find_refusal(source, own_hosts)
        if reason:
            address = _remove_login(source.uri)
            refused.setdefault(f"{address} of the image is not asked: {reason}")
        else:
            lines.setdefault(_format_source(source, tree, keys))
            archives.append(source)
    keys |= _read_trusted_keys(tree)
    pinning = [path for path in tree.below(_PREFERENCES_FOLDER) if _PREFERENCES.fullmatch(path)]
    preferences = [tree.read(path) for path in ("/etc/apt/preferences", *sorted(pinning))]
    files = {
        "status": status,
        "sources.list": "".join(f"{line}\n" for line in lines).encode(),
        "preferences": b"\n\n".join(content for content in preferences if content),
        "apt.conf": _make_configuration(_read_architectures(tree, status)).encode(),
        # apt reads the folder, so it must exist.
        "trusted/.keep": b"",
        **keys,
    }
    installed = re.findall(rb"^Status: \S+ \S+ installed$", status, re.MULTILINE)
    return ForeignDebian(
        release=read_release(tree),
        files=files,
        packages=len(installed),
        archives=tuple(archives),
        refused=tuple(refused),
    )


def describe_archives_not_asked(image: ForeignDebian, settings: HostSettings) -> tuple[str, ...]:
    """Return a sentence for each archive of an image whose packages are not compared.

    On a Debian machine its own archives of Debian are asked, in the place of all those of the
    image. They have the packages of the image's archives of Debian, and not those of others.

    Args:
        image: apt's inputs from the image.
        settings: This machine's settings of apt.
    """
    sentences = list(image.refused)
    lines = make_source_lines(image.suite, settings.apt.sources, settings.suite)
    if not lines:
        # apt asks the archives of the image.
        return tuple(sentences)
    suites = {source.suite for source in parse_one_line("\n".join(lines))}
    for source in image.archives:
        if source.suite in suites and _is_of_debian(source):
            continue
        address = f"{_remove_login(source.uri)} {source.suite} {source.components}".rstrip()
        sentences.append(
            f"{address} of the image is not asked: this machine's own archives of Debian are, in"
            " its place"
        )
    return tuple(dict.fromkeys(sentences))


def _is_of_debian(source: AptSource) -> bool:
    """Return whether an archive has Debian's own packages: by the form of its address.

    For example ``.../debian-security bookworm-security main``.
    """
    if "main" not in source.components.split():
        return False
    parts = urlsplit(source.uri).path.split("/")
    return any(re.fullmatch(r"debian(-[a-z-]+)?", part) for part in parts)


def _read_trusted_keys(tree: ImageTree) -> dict[str, bytes]:
    """Return the keyrings for all archives of an image: ``trusted/0.gpg`` to content.

    The names are new, because the folder of a step must not have an image's own names.
    """
    paths = list(tree.below("/etc/apt/trusted.gpg.d"))
    keyrings = sorted(path for path in paths if path.endswith((".gpg", ".asc")))
    keys = {}
    for number, path in enumerate(["/etc/apt/trusted.gpg", *keyrings]):
        content = tree.read(path)
        if content is not None and len(content) <= LARGEST_KEYRING:
            keys[f"trusted/{number}.{_ending(path)}"] = content
    return keys


def _ending(path: str) -> str:
    """Return the ending by which apt knows the form of a keyring: ``asc`` or ``gpg``."""
    return "asc" if path.endswith(".asc") else "gpg"


def _read_sources(tree: ImageTree) -> Iterable[AptSource]:
    """Yield the archives in an image's files, in apt's order."""
    paths = list(tree.below("/etc/apt/sources.list.d"))
    parts = sorted(path for path in paths if path.endswith((".list", ".sources")))
    for path in ["/etc/apt/sources.list", *parts]:
        text = (tree.read(path) or b"").decode(errors="replace")
        if path.endswith(".sources"):
            yield from parse_deb822(text)
        else:
            yield from parse_one_line(text)


def _find_refusal(source: AptSource, own_hosts: set[str | None]) -> str:
    """Return the reason why an archive of an image is not used; ``""`` if it is used.

    Args:
        source: The archive.
        own_hosts: The hosts of this machine's archives, which are used also in a private network.
    """
    if not _URI.fullmatch(source.uri):
        return "only http and https archives are"
    if not all(_WORD.fullmatch(word) for word in (source.suite, *source.components.split())):
        return "its suite or component is malformed"
    try:
        host = urlsplit(source.uri).hostname or ""
    except ValueError:
        return "its address is malformed"
    if host in own_hosts:
        return ""
    # A name may end with a dot.
    name = host.removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return "it is an address of this machine"
    try:
        is_public = ipaddress.ip_address(host).is_global
    except ValueError:
        is_public = name != "" and not _NUMBERS.fullmatch(name)
    if not is_public:
        return "it is an address of a private network"
    return ""


def _format_source(source: AptSource, tree: ImageTree, keys: dict[str, bytes]) -> str:
    """Return an archive's line of ``sources.list``, and add its keyrings to ``keys``.

    Args:
        source: The archive.
        tree: The image's files.
        keys: The keyrings so far: name to content.
    """
    signers = _write_signers(source.signed_by, tree, keys)
    options = f"[signed-by={signers}] " if signers else ""
    return f"deb {options}{source.uri} {source.suite} {source.components}".rstrip()


def _write_signers(value: str, tree: ImageTree, keys: dict[str, bytes]) -> str:
    """Add the keyrings of an archive to ``keys``; return the value of ``signed-by`` for them.

    ``""`` without keyrings.

    Args:
        value: The value in the image: paths, fingerprints, or a key itself.
        tree: The image's files.
        keys: The keyrings so far: name to content.
    """
    if "BEGIN PGP" in value:
        # In a paragraph a line with a dot is an empty one.
        lines = ["" if line == "." else line for line in value.strip().splitlines()]
        return _add_key("\n".join([*lines, ""]).encode(), "asc", keys)
    signers = []
    for word in re.split(r"[\s,]+", value):
        if _FINGERPRINT.fullmatch(word):
            signers.append(word)
        elif word.startswith("/"):
            content = tree.read(word)
            if content is None or len(content) > LARGEST_KEYRING:
                # With an empty keyring apt reports that a key is missing.
                content = b""
            signers.append(_add_key(content, _ending(word), keys))
    return ",".join(signers)


def _add_key(content: bytes, ending: str, keys: dict[str, bytes]) -> str:
    """Add a keyring to ``keys``, unless one with the same content is there.

    Returns:
        The path of the keyring in a step: ``/run/foreign/keys/0.gpg``.
    """
    for name, key in keys.items():
        if key == content and name.endswith(ending):
            return f"{FOLDER}/{name}"
    name = f"keys/{len(keys)}.{ending}"
    keys[name] = content
    return f"{FOLDER}/{name}"


def _read_architectures(tree: ImageTree, status: bytes) -> list[str]:
    """Return the architectures of an image's packages, first that of its own dpkg.

    ``["amd64"]`` if the image names none that is well-formed.
    """
    names: list[str] = []
    for paragraph in status.decode(errors="replace").split("\n\n"):
        if re.match(r"Package: dpkg$", paragraph, re.MULTILINE):
            names += re.findall(r"^Architecture: (\S+)$", paragraph, re.MULTILINE)
            break
    names += (tree.read("/var/lib/dpkg/arch") or b"").decode(errors="replace").split()
    valid_names = [name for name in names if _ARCHITECTURE.fullmatch(name) and name != "all"]
    return list(dict.fromkeys(valid_names)) or ["amd64"]


def _make_configuration(architectures: list[str]) -> str:
    """Return an ``apt.conf`` that leads apt to the files in ``FOLDER`` and to no others."""
    names = " ".join(f'"{name}";' for name in architectures)
    return f"""\
APT::Architecture "{architectures[0]}";
APT::Architectures {{ {names} }};
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


def _remove_login(uri: str) -> str:
    """Return an address without the login in it."""
    return re.sub(r"//[^/\s@]*@", "//", uri)
