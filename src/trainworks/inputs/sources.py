"""Finds or downloads the source code of compiled components of a ``packages`` target.

Files come from a mirror folder, from this user's cache, or from the addresses of their rows, in
this order. The build checks hash or commit before it unpacks them. Build steps do not contact code
hosts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from trainworks.errors import HostError, LockError, OutputError
from trainworks.facts.rows import Artifact, Base
from trainworks.host.apt import AptSettings
from trainworks.host.cache import cache_folder
from trainworks.plan.model import ImagePlan

if TYPE_CHECKING:
    from trainworks.host.downloads import Client

PROBE_SECONDS = 20.0
"""Time-out of a git server's first answer.

Git itself waits much longer for a server that drops packets.
"""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The places to look for sources.

    Attributes:
        folders: Folders that may have a file already; the first one that has it
            wins. Downloads go to the last one.
        address: Address of a mirror, tried before a file's own address; ``""`` for none.
        offline: Whether ``address`` is the only server to download from.
        archives: Address prefix to the addresses of its mirrors: this machine's mirrors of Debian.
    """

    folders: tuple[Path, ...]
    address: str = ""
    offline: bool = False
    archives: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def find(self, artifact: Artifact) -> Path | None:
        """Return the file of an artifact on this machine, or ``None``.

        The build checks the content of the file.
        """
        for folder in self.folders:
            path = folder / artifact.file
            if path.is_file():
                return path
        return None

    def origins(self, artifact: Artifact) -> tuple[str, ...]:
        """Return the addresses that a file can be downloaded from, the nearest first.

        A file of Debian's archive can come from this machine's mirrors of that archive.
        """
        for prefix, mirrors in self.archives.items():
            if artifact.url.startswith(f"{prefix}/"):
                path = artifact.url.removeprefix(prefix)
                addresses = [f"{mirror}{path}" for mirror in mirrors]
                addresses.append(artifact.url)
                return tuple(dict.fromkeys(addresses))
        return (artifact.url,)


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """A component whose source is not on this machine and cannot be downloaded.

    Attributes:
        component: The component's name.
        file: The missing file, by its name in a mirror.
        reason: The error of the download, in the program's own words.
        implied: Whether the component would be left out anyway, because it needs another one that
            is left out.
    """

    component: str
    file: str
    reason: str
    implied: bool = False


def sources_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of downloaded sources: ``trainworks/sources`` in the user's cache folder.

    Raises:
        HostError: The user has no home and ``XDG_CACHE_HOME`` is not set.
    """
    try:
        return cache_folder(environment, "sources")
    except RuntimeError as error:
        raise HostError(
            "no folder for downloads: the user has no home folder", hint="set XDG_CACHE_HOME"
        ) from error


def archives_of(bases: Iterable[Base], apt: AptSettings, suite: str) -> dict[str, tuple[str, ...]]:
    """Return this machine's mirrors of distributions' archives, by the archive's address.

    Args:
        bases: Rows of ``images/bases.toml``.
        suite: Code name of the machine's Debian; ``""`` on another system,
            which has no such mirror.
    """
    mirrors: dict[str, None] = {}
    for source in apt.sources:
        if suite and source.suite == suite:
            mirrors[source.uri.rstrip("/")] = None
    return {base.archive: tuple(mirrors) for base in bases if base.archive}


def sources_of(plan: ImagePlan) -> Iterator[tuple[str, Artifact]]:
    """Yield each component of a ``packages`` plan with each of its sources."""
    if plan.target.sources == "packages":
        for step in plan.steps:
            for artifact in step.artifacts:
                yield step.component, artifact


def remove_spoiled_sources(plan: ImagePlan, places: Places) -> None:
    """Remove sources with a wrong hash or commit from the cache, so that they are downloaded again.

    Files of a mirror are the user's and stay: the build rejects a wrong one by its name.
    """
    # Offline a removed file cannot be downloaded again.
    if places.offline:
        return
    for _, artifact in sources_of(plan):
        path = places.folders[-1] / artifact.file
        if places.find(artifact) == path and not has_locked_content(artifact, path):
            path.unlink(missing_ok=True)


def has_locked_content(artifact: Artifact, path: Path) -> bool:
    """Return whether a file has the hash of its artifact, or a git bundle the commit."""
    from trainworks.host.downloads import hash_file
    from trainworks.host.git import is_bundle_of

    if artifact.git:
        return is_bundle_of(path, artifact.commit)
    return hash_file(path).sha256 == artifact.sha256


def find_missing_sources(plan: ImagePlan, places: Places) -> tuple[tuple[str, Artifact], ...]:
    """Return the sources of a plan that are not on this machine, each with its component."""
    missing = []
    for component, artifact in sources_of(plan):
        if places.find(artifact) is None:
            missing.append((component, artifact))
    return tuple(missing)


def download_sources(
    missing: Sequence[tuple[str, Artifact]],
    places: Places,
    client: Client,
    report: Callable[[str], None],
) -> tuple[Unreachable, ...]:
    """Download sources into the last folder of ``places``; return those that cannot be downloaded.

    Args:
        missing: See ``find_missing_sources``.
        places: The places to look for them.
        report: Receives a line of text for each file.

    Raises:
        LockError: A file does not have the hash of its row, or a tag points at another commit.
        OutputError: The folder cannot be written.
    """
    from trainworks.host.downloads import UnreachableError

    unreachable: list[Unreachable] = []
    # A host that did not answer is not tried again: host to the file of the first attempt.
    failed_hosts: dict[str, str] = {}
    for component, artifact in missing:
        host = urlsplit(artifact.git or artifact.url).netloc
        try:
            if host in failed_hosts:
                raise UnreachableError(f"not tried: {host} did not give {failed_hosts[host]}")
            target = _make_folder(places.folders[-1]) / artifact.file
            if places.find(artifact) is None:
                report(f"  downloading {artifact.file}")
                fetch_source(artifact, target, places, client)
        except UnreachableError as error:
            failed_hosts.setdefault(host, artifact.file)
            source = Unreachable(component=component, file=artifact.file, reason=error.message)
            unreachable.append(source)
    return tuple(unreachable)


def fetch_source(artifact: Artifact, target: Path, places: Places, client: Client) -> None:
    """Download one artifact to ``target``: a file by its hash, or a git bundle of a commit.

    Raises:
        UnreachableError: No address gives the artifact.
        LockError: The file does not have the hash of its row, or a tag points at another commit.
    """
    from trainworks.host.downloads import UnreachableError
    from trainworks.host.git import find_tag_commit, is_bundle_of, make_bundle

    if places.address:
        try:
            client.download(
                f"{places.address}/{quote(artifact.file, safe='')}", target, sha256=artifact.sha256
            )
        except UnreachableError:
            if places.offline:
                raise
        else:
            # A bundle has no published hash: its commit is checked.
            if artifact.git and not is_bundle_of(target, artifact.commit):
                target.unlink()
                raise LockError(
                    f"{artifact.file} of the mirror does not have commit {artifact.commit}"
                )
            return
    if places.offline:
        raise UnreachableError(f"{places.folders[0]} has no {artifact.file}")
    if artifact.git:
        # A quick request first: fetching a whole history has a long time-out.
        find_tag_commit(artifact.git, artifact.tag, ca_path=client.ca_path, seconds=PROBE_SECONDS)
        make_bundle(artifact.git, artifact.tag, artifact.commit, target, ca_path=client.ca_path)
        return
    # The error of the last address, which is the row's own, is the one that a user gets.
    *nearer, last = places.origins(artifact)
    for address in nearer:
        with suppress(UnreachableError):
            client.download(address, target, sha256=artifact.sha256)
            return
    client.download(last, target, sha256=artifact.sha256)


def _make_folder(folder: Path) -> Path:
    """Create a folder that only this user may read; raises ``OutputError``."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        raise OutputError(f"cannot create {folder} ({reason})") from error
    return folder
