"""Find locked Python files in the package indexes that this machine's pip uses
(the simple API, PEP 503).
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import unquote, urldefrag, urljoin

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from trainworks.facts.rows import LockedPackage
from trainworks.host.downloads import Client, UnreachableError
from trainworks.host.pip import PipSettings, find_default_index, find_local_path

_ANCHOR = re.compile(r"<a\s[^>]*>", re.IGNORECASE)

_REQUIRES = re.compile(r"""data-requires-python\s*=\s*["']([^"']*)""", re.IGNORECASE)

HREF = re.compile(r"""href\s*=\s*["']([^"']+)""", re.IGNORECASE)


def find_file_addresses(
    package: LockedPackage, settings: PipSettings, vendor_index: str, client: Client
) -> Iterator[str]:
    """Yield the addresses of a locked file in the indexes, in pip's order.

    An address with another hash is left out.

    Args:
        package: The locked file.
        settings: pip's settings: the indexes and pages of links.
        client: The client for the indexes.
        vendor_index: A framework vendor's own index; used only if the user
            configured no source of packages.

    Raises:
        UnreachableError: An index does not answer, and no other one has the file.
    """
    failures: list[UnreachableError] = []
    for page in _find_pages(package.name, settings, vendor_index):
        try:
            response = client.get(page, {"Accept": "text/html"})
        except UnreachableError as error:
            failures.append(error)
            continue
        if response.status_code != 200:
            continue
        for link in HREF.findall(response.text):
            address, fragment = urldefrag(html.unescape(link))
            # ``#sha256=HASH``; an index may leave it out, or give another kind of hash.
            algorithm, _, value = fragment.partition("=")
            has_other_hash = algorithm == "sha256" and value != package.sha256
            if unquote(address.rsplit("/", 1)[-1]) == package.file and not has_other_hash:
                yield urljoin(response.url, address)
    if failures:
        raise failures[0]


def find_versions_without_wheels(name: str, settings: PipSettings, client: Client) -> list[str]:
    """Return the versions of a distribution that the indexes have only as source archives.

    They are sorted, the oldest first. Pages that do not answer are left out.

    Args:
        name: The normalised name of the distribution.
        settings: pip's settings: the indexes and pages of links.
        client: The client for the indexes.
    """
    wheels: set[Version] = set()
    archives: set[Version] = set()
    for page in _find_pages(name, settings, ""):
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


def find_newest_release(
    name: str, python: str, settings: PipSettings, vendor_index: str, client: Client
) -> Version | None:
    """Return the newest version of a distribution that a Python can install.

    ``None`` where no index has one.

    Withdrawn files do not count, and previews only where there is nothing else.

    Args:
        name: The normalised name of the distribution.
        python: The Python's version, ``MAJOR.MINOR``.
        settings: pip's settings: the indexes and pages of links.
        client: The client for the indexes.
        vendor_index: As of ``find_file_addresses``.

    Raises:
        UnreachableError: An index does not answer.
    """
    versions: set[Version] = set()
    for page in _find_pages(name, settings, vendor_index):
        response = client.get(page, {"Accept": "text/html"})
        for anchor in _ANCHOR.findall(response.text if response.ok else ""):
            versions |= _find_version(anchor, python)
    final = {each for each in versions if not each.is_prerelease}
    return max(final or versions, default=None)


def _find_version(anchor: str, python: str) -> set[Version]:
    """Return the version of a file in an index as a set of one.

    Empty for a file that is withdrawn, for other Pythons, or has a malformed name.

    Args:
        anchor: The file's element ``<a ...>`` on the page of the index.
        python: The Python's version, ``MAJOR.MINOR``.
    """
    link = HREF.search(anchor)
    if link is None or "data-yanked" in anchor:
        return set()
    needs = _REQUIRES.search(anchor)
    file = unquote(urldefrag(html.unescape(link[1]))[0].rsplit("/", 1)[-1])
    with suppress(InvalidWheelFilename, InvalidSdistFilename, InvalidSpecifier):
        if needs is not None and not SpecifierSet(html.unescape(needs[1])).contains(f"{python}.99"):
            return set()
        if file.endswith(".whl"):
            return {parse_wheel_filename(file)[1]}
        return {parse_sdist_filename(file)[1]}
    return set()


def _find_pages(name: str, settings: PipSettings, vendor_index: str) -> Iterator[str]:
    """Yield the addresses of pages with links to files of a distribution, in pip's order.

    Local pages are left out.
    """
    for link in settings.find_links:
        if find_local_path(link) is None:
            yield link
    if settings.no_index:
        return
    indexes = [settings.index_url or find_default_index(), *settings.extra_index_urls]
    if vendor_index and not settings.names_a_source:
        indexes.insert(0, vendor_index)
    for index in indexes:
        if index and find_local_path(index) is None:
            yield f"{index.rstrip('/')}/{name}/"
