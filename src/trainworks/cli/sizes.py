"""How large files of package indexes are: asked of the servers, because simple indexes do not say it."""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainworks.host.settings import HostSettings

AT_ONCE = 8
"""Questions asked side by side: one server answers most of them."""


def file_sizes(urls: Iterable[str], settings: HostSettings) -> dict[str, int]:
    """Return the sizes of files in bytes, by URL; a file whose server does not say it is left out.

    Sizes are for estimates only (``--until plan``), so nothing fails here.
    """
    context = ssl.create_default_context(cadata=settings.ca.decode() if settings.ca else None)
    timeout = settings.pip.timeout_seconds or 30
    addresses = list(dict.fromkeys(urls))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        sizes = list(pool.map(partial(_size, context=context, timeout=timeout), addresses))
    return {url: size for url, size in zip(addresses, sizes, strict=True) if size}


def _size(url: str, *, context: ssl.SSLContext, timeout: float) -> int:
    try:
        if url.startswith("file:"):
            return Path(unquote(urlsplit(url).path)).stat().st_size
        request = urllib.request.Request(url.split("#", 1)[0], method="HEAD")
        with urllib.request.urlopen(request, timeout=timeout, context=context) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError):
        return 0
