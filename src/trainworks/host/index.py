"""Find locked Python files in the package indexes that this machine's pip uses (the simple API, PEP 503)."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import unquote, urldefrag, urljoin

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from trainworks.facts.rows import LockedPackage
from trainworks.host.downloads import Client, UnreachableError
from trainworks.host.pip import PipSettings, default_index, local_path

HREF = re.compile(r"""href\s*=\s*["']([^"']+)""", re.IGNORECASE)


def file_addresses(package: LockedPackage, settings: PipSettings, vendor_index: str, client: Client) -> Iterator[str]:
    """Yield the addresses of a locked file, in pip's order; an address with another hash is left out.

    Args:
        vendor_index: A framework vendor's own index; used only if the user configured no source of packages.

    Raises:
        UnreachableError: An index does not answer, and no other one has the file.
    """
    failures: list[UnreachableError] = []
    for page in _pages(package.name, settings, vendor_index):
        try:
            response = client.get(page, {"Accept": "text/html"})
        except UnreachableError as error:
            failures.append(error)
            continue
        if response.status_code != 200:
            continue
        for link in HREF.findall(response.text):
            address, fragment = urldefrag(html.unescape(link))
            algorithm, _, value = fragment.partition("=")
            other = algorithm == "sha256" and value != package.sha256
            if unquote(address.rsplit("/", 1)[-1]) == package.file and not other:
                yield urljoin(response.url, address)
    if failures:
        raise failures[0]


def archives_only(name: str, settings: PipSettings, client: Client) -> list[str]:
    """Return the versions of a distribution that the indexes have as source archives and not as wheels.

    Of pages that do not answer nothing is known.
    """
    wheels: set[Version] = set()
    archives: set[Version] = set()
    for page in _pages(name, settings, ""):
        with suppress(UnreachableError):
            response = client.get(page, {"Accept": "text/html"})
            for link in HREF.findall(response.text if response.ok else ""):
                file = unquote(urldefrag(html.unescape(link))[0].rsplit("/", 1)[-1])
                with suppress(InvalidWheelFilename, InvalidSdistFilename):
                    if file.endswith(".whl"):
                        wheels.add(parse_wheel_filename(file)[1])
                    else:
                        archives.add(parse_sdist_filename(file)[1])
    return [str(version) for version in sorted(archives - wheels)]


def _pages(name: str, settings: PipSettings, vendor_index: str) -> Iterator[str]:
    yield from (link for link in settings.find_links if local_path(link) is None)
    if settings.no_index:
        return
    indexes = [settings.index_url or default_index(), *settings.extra_index_urls]
    if vendor_index and not settings.names_a_source:
        indexes.insert(0, vendor_index)
    for index in indexes:
        if index and local_path(index) is None:
            yield f"{index.rstrip('/')}/{name}/"
