"""Ask pip for its settings on this machine, and write them for uv and for the pip of a build."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from trainworks.errors import HostError
from trainworks.facts.data import PACKAGED
from trainworks.facts.rows import LockedPackage
from trainworks.host.uv import find_uv

_PROGRAM = (
    PACKAGED / "launcher" / "trainworks_launcher" / "programs" / "installing" / "pip_files.py"
)
"""Reads pip's settings: for a job, and for the builder."""

_INDEX_OPTION = "--index-url "
"""The option of a requirements file that names the main index."""

HREF = re.compile(r"""href\s*=\s*["']([^"'#]+)""", re.IGNORECASE)
"""A link on a page of an index, without the hash behind it."""


@dataclass(frozen=True, kw_only=True)
class PipSettings:
    """Settings of the user's pip.

    Attributes:
        index_url: The main index; ``""`` for pip's default.
        extra_index_urls: Further indexes, web addresses or local ``file://`` ones.
        find_links: Folders or pages with files.
        trusted_hosts: Hosts whose certificate is not checked.
        certificate: CA bundle; ``""`` for the default.
        timeout_seconds: Time-out of a connection; 0 for the default.
        no_index: Whether only ``find_links`` are used.
    """

    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    certificate: str = ""
    timeout_seconds: float = 0
    no_index: bool = False

    @property
    def local_folders(self) -> tuple[Path, ...]:
        """Folders of ``find_links`` on this machine."""
        paths = [find_local_path(link) for link in self.find_links]
        return tuple(path for path in paths if path is not None and path.is_dir())

    @property
    def local_indexes(self) -> tuple[Path, ...]:
        """Root folders of indexes on this machine."""
        urls = (self.index_url, *self.extra_index_urls)
        return tuple(
            path for path in map(find_local_path, urls) if path is not None and path.is_dir()
        )

    @property
    def names_a_source(self) -> bool:
        """Whether the user configured another source of packages than pip's default index."""
        has_own_index = self.index_url.rstrip("/") not in ("", find_default_index())
        return bool(has_own_index or self.extra_index_urls or self.find_links or self.no_index)


@cache
def find_default_index() -> str:
    """Ask uv for the address of the index that pip and uv use without settings.

    Only the first call of a process runs uv.
    uv writes the address as an option of the requirements file that it compiles from an empty one.

    Raises:
        HostError: uv does not run.
    """
    words = [find_uv(), "pip", "compile", "-", "--emit-index-url", "--no-header"]
    words += ["--no-config", "--offline", "--python", sys.executable]
    # Without the user's own settings of uv.
    variables = os.environ.items()
    without_settings = {name: value for name, value in variables if not name.startswith("UV_")}
    result = subprocess.run(
        words,
        env=without_settings,
        input="",
        capture_output=True,
        text=True,
        check=False,
    )
    for line in result.stdout.splitlines():
        if line.startswith(_INDEX_OPTION):
            return line.removeprefix(_INDEX_OPTION).rstrip("/")
    raise HostError(f"uv names no index of its own: {result.stderr.strip()}")


def find_local_path(address: str) -> Path | None:
    """Return the path of a local address; ``None`` for an address on the network.

    A local address is one of the scheme ``file:``, or a path; ``~`` is the user's home folder.
    """
    parts = urlsplit(address)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    if not address or parts.scheme:
        return None
    return Path(address).expanduser()


def read_pip_settings(environment: Mapping[str, str]) -> PipSettings:
    """Ask pip for the settings of ``pip install``: its files, then ``PIP_*``.

    They are as in ``pip config list``. With a Python without pip only the variables count.

    Args:
        environment: The environment in which pip runs.

    Raises:
        HostError: pip rejects a file or a variable.
    """
    # A child: the environment may differ from this process's own.
    result = subprocess.run(
        (sys.executable, "-I", str(_PROGRAM)),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines()
        reason = f"the program that asks pip ended with {result.returncode}"
        if lines:
            reason = lines[-1]
        raise HostError(reason, hint="`pip config debug` shows pip's view of its settings")
    values = json.loads(result.stdout)
    return PipSettings(
        index_url=values["index_url"],
        extra_index_urls=tuple(values["extra_index_urls"]),
        find_links=tuple(values["find_links"]),
        trusted_hosts=tuple(values["trusted_hosts"]),
        certificate=values["cert"],
        timeout_seconds=float(values["timeout"] or 0),
        no_index=values["no_index"],
    )


def _quote(text: str) -> str:
    """Return a text as a string of TOML."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def uv_configuration(
    settings: PipSettings, *, vendor_index: str = "", folders: Iterable[str] = ()
) -> str:
    """Return a ``uv.toml`` with the sources of the user's pip.

    All indexes are asked, as pip does (uv's name for that is ``unsafe-best-match``). That is safe:
    files are checked against their locked hashes.

    Args:
        settings: pip's settings. Local addresses are left out: they do not exist inside a build.
        vendor_index: A framework vendor's own index; used only if the user
            configured no source of packages.
        folders: Folders with files, as paths inside the build.
    """
    lines = ['index-strategy = "unsafe-best-match"']
    links = list(folders)
    links += [link for link in settings.find_links if find_local_path(link) is None]
    if links:
        lines.append(f"find-links = [{', '.join(map(_quote, links))}]")
    if settings.no_index:
        lines.append("no-index = true")
    if settings.trusted_hosts:
        lines.append(f"allow-insecure-host = [{', '.join(map(_quote, settings.trusted_hosts))}]")
    # Addresses, each with whether it is the default index, which uv asks last.
    indexes = [(url, False) for url in settings.extra_index_urls if find_local_path(url) is None]
    if vendor_index and not settings.names_a_source:
        indexes.append((vendor_index, False))
    if settings.index_url and find_local_path(settings.index_url) is None:
        indexes.append((settings.index_url, True))
    if not settings.no_index:
        for url, is_default in indexes:
            lines += ["", "[[index]]", f"url = {_quote(url)}"]
            if is_default:
                lines.append("default = true")
    return "\n".join(lines) + "\n"


def pip_configuration(settings: PipSettings) -> str:
    """Return a ``pip.conf`` with the settings that apply inside a build.

    Local addresses are left out: they do not exist inside a build.
    """
    lines = ["[global]"]
    is_remote = bool(settings.index_url) and find_local_path(settings.index_url) is None
    # The default is written, too: a program of a build that is not pip does not know it.
    index = settings.index_url if is_remote else find_default_index()
    if index:
        lines.append(f"index-url = {index}")
    extra = [url for url in settings.extra_index_urls if find_local_path(url) is None]
    if extra:
        lines.append(f"extra-index-url = {' '.join(extra)}")
    links = [link for link in settings.find_links if find_local_path(link) is None]
    if links:
        lines.append(f"find-links = {' '.join(links)}")
    if settings.trusted_hosts:
        lines.append(f"trusted-host = {' '.join(settings.trusted_hosts)}")
    if settings.timeout_seconds:
        lines.append(f"timeout = {settings.timeout_seconds:g}")
    if settings.no_index:
        lines.append("no-index = true")
    return "\n".join(lines) + "\n"


def find_local_file(package: LockedPackage, settings: PipSettings) -> Path | None:
    """Find a copy of a locked file in the user's local folders and indexes.

    Returns:
        The path of a file with the same name and hash; ``None`` without one.
    """
    candidates = [folder / package.file for folder in settings.local_folders]
    for index in settings.local_indexes:
        page = index / package.name / "index.html"
        if not page.is_file():
            continue
        for link in HREF.findall(page.read_text(encoding="utf-8", errors="replace")):
            if unquote(link).rsplit("/", 1)[-1] == package.file:
                file = find_local_path(urljoin(page.as_uri(), link))
                if file is not None:
                    candidates.append(file)
    for path in candidates:
        if path.is_file():
            status = path.stat()
            if _hash_file(path, status.st_size, status.st_mtime_ns) == package.sha256:
                return path
    return None


@cache
def _hash_file(path: Path, _size: int, _changed: int) -> str:
    """Return a file's SHA-256; of many targets with the same wheel, the first one reads it.

    Args:
        path: The file.
        _size: Its size in bytes, and ``_changed`` the time of its last change in nanoseconds: a
            file that has changed is read again.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
