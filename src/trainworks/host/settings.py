"""This machine's settings for builds: read once, and passed to builds as secrets and arguments."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from trainworks.engine.protocol import Network
from trainworks.host.apt import (
    AptSettings,
    apt_configuration,
    make_source_lines,
    parse_suite,
    read_apt_settings,
)
from trainworks.host.logins import find_hosts, select_logins
from trainworks.host.pip import (
    PipSettings,
    find_default_index,
    pip_configuration,
    read_pip_settings,
    uv_configuration,
)
from trainworks.host.trust import find_ca_bundle, find_proxy_arguments

SECRETS_FOLDER = "/run/secrets"
"""The folder of a build step's secrets, with every engine."""


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """This machine's settings.

    Attributes:
        pip: Settings of pip.
        apt: Settings of apt.
        suite: Code name of the machine's Debian; ``""`` on another system.
        ca: Content of the CA bundle; empty if there is none.
        netrc: Content of ``~/.netrc`` (logins of private indexes); empty if there is none.
        proxies: Proxy variables as build arguments.
        mirror: Address of a mirror with the files of components; ``""``: they are downloaded from
            the addresses of their rows. It may contain a password.
        snapshot: Address of the package archive on an earlier day, with ``{archive}`` and
            ``{date}``; ``""``: the address in the base's row. It may contain a password.
        mirror_only: Whether the mirror is the only source of those files.
    """

    pip: PipSettings
    apt: AptSettings = field(default_factory=AptSettings)
    suite: str = ""
    ca: bytes = field(default=b"", repr=False)
    netrc: bytes = field(default=b"", repr=False)
    proxies: Mapping[str, str] = field(default_factory=dict)
    mirror: str = field(default="", repr=False)
    mirror_only: bool = False
    snapshot: str = field(default="", repr=False)

    def secrets(
        self, suite: str, vendor_index: str, addresses: Iterable[str] = ()
    ) -> dict[str, bytes]:
        """Return the secrets of a build: file name below ``/run/secrets`` to content.

        Each file is always there; one without a setting is empty.

        Args:
            suite: The base's release of Debian; ``""`` for another system.
            vendor_index: A framework vendor's own index; ``""`` for none.
            addresses: Further downloads of the build, besides packages of indexes.
                Logins go in for these hosts alone.
        """
        all_addresses = (*self.sources, find_default_index(), vendor_index, *addresses)
        uv_settings = uv_configuration(self.pip, vendor_index=vendor_index, folders=["/run/wheels"])
        mirror = ""
        if self.mirror:
            second_line = "only" if self.mirror_only else ""
            mirror = f"{self.mirror}\n{second_line}\n"
        timeout = ceil(self.pip.timeout_seconds) or 30
        return {
            **self.apt_secrets(suite),
            "ca.pem": self.ca,
            "netrc": select_logins(find_hosts(all_addresses), self.netrc),
            "pip.conf": pip_configuration(self.pip).encode(),
            "uv.toml": uv_settings.encode(),
            "mirror": mirror.encode(),
            "timeout": f"{timeout}\n".encode(),
        }

    def apt_secrets(self, suite: str) -> dict[str, bytes]:
        """Return the secrets of a build for apt: ``apt.conf`` and ``sources.list``.

        Args:
            suite: The base's release of Debian; ``""`` for another system.
        """
        sources = make_source_lines(suite, self.apt.sources, self.suite)
        configuration = apt_configuration(
            self.apt,
            sources_path=f"{SECRETS_FOLDER}/sources.list" if sources else "",
            ca_path=f"{SECRETS_FOLDER}/ca.pem" if self.ca else "",
        )
        source_lines = "".join(f"{line}\n" for line in sources)
        return {"apt.conf": configuration.encode(), "sources.list": source_lines.encode()}

    @property
    def sources(self) -> tuple[str, ...]:
        """Addresses in this machine's settings: indexes, pages of files, mirror, snapshot."""
        pip = self.pip
        return (pip.index_url, *pip.extra_index_urls, *pip.find_links, self.mirror, self.snapshot)

    @property
    def network(self) -> Network:
        """The network of a step that downloads.

        It is the host's own only if a setting names the host's loopback device.
        """
        addresses = [*self.sources]
        addresses += [source.uri for source in self.apt.sources]
        for line in self.apt.lines:
            addresses += re.findall(r'"(\w+://[^"]+)"', line)
        for name, value in self.proxies.items():
            if name.lower() != "no_proxy":
                # A proxy may be written without a scheme.
                addresses.append(value if "://" in value else f"//{value}")
        if any(map(_is_loopback, find_hosts(addresses))):
            return "host"
        return "default"

    def forbidden_texts(self, vendor_index: str) -> tuple[str, ...]:
        """Return texts that must not be in any image: this machine's proxies and private indexes.

        Public indexes are not secret: pip and torch name them too. ``no_proxy``
        has common network names.
        """
        pip = self.pip
        texts = {pip.index_url, *pip.extra_index_urls, *pip.find_links, self.mirror}
        for name, value in self.proxies.items():
            if name.lower() != "no_proxy":
                texts.add(value)
        public = {find_default_index(), vendor_index.rstrip("/")}
        private = [text for text in texts if text.rstrip("/") not in public]
        # A short text would be found by chance.
        return tuple(sorted(text for text in private if len(text) > 8 and "/" in text))


def _is_loopback(host: str) -> bool:
    """Return whether a host, a name or an address, is this machine itself."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_host_settings(environment: Mapping[str, str]) -> HostSettings:
    """Read this machine's settings: of pip and apt, its CA bundle, logins and proxies.

    Args:
        environment: The process's environment.

    Raises:
        HostError: pip rejects its configuration.
        OSError: A file cannot be read.
    """
    pip = read_pip_settings(environment)
    bundle = find_ca_bundle(environment, pip.certificate)
    ca = bundle.read_bytes() if bundle else b""
    named_netrc = environment.get("NETRC", "")
    netrc_file = Path(named_netrc) if named_netrc else Path.home() / ".netrc"
    netrc = netrc_file.read_bytes() if netrc_file.is_file() else b""
    release = Path("/etc/os-release")
    suite = parse_suite(release.read_text(encoding="utf-8")) if release.is_file() else ""
    return HostSettings(
        pip=pip,
        apt=read_apt_settings(),
        suite=suite,
        ca=ca,
        netrc=netrc,
        proxies=find_proxy_arguments(environment),
        snapshot=environment.get("TRAINWORKS_SNAPSHOT", ""),
    )
