"""Requests the sizes of package index files, which simple indexes do not list."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainworks.host.downloads import Client
from trainworks.host.settings import HostSettings

AT_ONCE = 8
"""Simultaneous requests; most go to one server."""


def request_file_sizes(urls: Iterable[str], settings: HostSettings) -> dict[str, int]:
    """Return the sizes of files in bytes, by URL; unknown sizes are left out.

    Sizes are for estimates only (``--until plan``), so errors are ignored.
    """
    addresses = list(dict.fromkeys(urls))
    with Client(settings) as client, ThreadPoolExecutor(AT_ONCE) as pool:

        def read_size(url: str) -> int:
            if url.startswith("file:"):
                with suppress(OSError):
                    return Path(unquote(urlsplit(url).path)).stat().st_size
            # The part behind ``#`` is the file's hash.
            address, _, _ = url.partition("#")
            return client.size(address)

        sizes = list(pool.map(read_size, addresses))
    return {url: size for url, size in zip(addresses, sizes, strict=True) if size}
