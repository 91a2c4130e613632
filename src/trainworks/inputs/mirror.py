"""``--mirror``: builds take their downloads from a folder, or from the address of a web server.

A mirror is a flat folder: each file under its own name, a git commit as ``NAME-COMMIT.bundle``, and
two listings: ``SHA256SUMS`` for ``sha256sum --check``, and ``index.html`` that pip and uv find
packages by. ``inputs.fill_mirror`` makes one; any web server may serve it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from trainworks.errors import LockError, OutputError
from trainworks.facts.rows import Facts
from trainworks.host.settings import HostSettings
from trainworks.inputs.sources import Places, archives_of, sources_folder
from trainworks.plan.model import ImagePlan
from trainworks.terminal.progress import BYTES, DISPLAY

INDEX = "index.html"
"""The list of links to Python files, which pip and uv read (``--find-links``)."""


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """The mirror of ``--mirror``: a folder or an address, never both.

    ``offline``: nothing else is contacted.
    """

    folder: Path | None = None
    address: str = ""
    offline: bool = False

    def folders(self, cache: Path) -> tuple[Path, ...]:
        """Return the folders to search for the sources of components, in order.

        ``cache`` is this user's.
        """
        if self.folder is None:
            return (cache,)
        if self.offline:
            return (self.folder,)
        return (self.folder, cache)

    def places(
        self, facts: Facts, settings: HostSettings, environment: Mapping[str, str]
    ) -> Places:
        """Return the places to look for the sources of components."""
        return Places(
            folders=self.folders(sources_folder(environment)),
            address=self.address,
            offline=self.offline,
            archives=archives_of(facts.bases, settings.apt, settings.suite),
        )

    def settings(self, settings: HostSettings) -> HostSettings:
        """Return this machine's settings with the mirror as the first, or only, source of files."""
        if not (self.address or self.folder):
            return settings
        link = str(self.folder)
        if self.address:
            link = f"{self.address}/{INDEX}"
        parts = urlsplit(self.address)
        # pip contacts servers without TLS only if they are trusted hosts. Each
        # file's hash is checked anyway.
        trusted = list(settings.pip.trusted_hosts)
        if parts.scheme == "http":
            # A name and password may stand before the host.
            _, _, host = parts.netloc.rpartition("@")
            trusted.append(host)
        find_links = (link, *settings.pip.find_links)
        pip = replace(settings.pip, find_links=find_links, trusted_hosts=tuple(trusted))
        if self.offline:
            pip = replace(pip, index_url="", extra_index_urls=(), find_links=(link,), no_index=True)
        return replace(settings, pip=pip, mirror=self.address, mirror_only=self.offline)


def read_mirror(value: str | None, *, offline: bool = False) -> Mirror:
    """Return the mirror of ``--mirror`` and ``--offline``.

    Raises ``OutputError`` if the folder does not exist.
    """
    if not value:
        return Mirror()
    if urlsplit(value).scheme in ("http", "https"):
        return Mirror(address=value.rstrip("/"), offline=offline)
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise OutputError(
            f"--mirror {value}: no such folder", hint=f"`python build.py mirror {value}` fills one"
        )
    return Mirror(folder=folder, offline=offline)


def check_mirror(plan: ImagePlan, folder: Path, *, complete: bool) -> None:
    """Check a mirror's folder before the engine is started.

    Only the presence of components' downloads is checked; the build checks
    their hashes before it unpacks them.

    Args:
        plan: The plan of the image.
        folder: The mirror.
        complete: Whether the mirror must have every file.

    Raises:
        LockError: Lists every Python file with another hash and, if it must be
            complete, every missing file.
    """
    # Imported late: a plan reads a mirror too, and loads no HTTP client.
    from trainworks.host.downloads import hash_file

    problems: list[str] = []
    packages = [package for step in plan.steps for package in step.python]
    for step in plan.steps:
        for artifact in step.artifacts:
            if complete and not (folder / artifact.file).is_file():
                label = f"{artifact.name} {artifact.version}"
                problems.append(f"{label}: {artifact.file} is missing")
    with DISPLAY.task("hashing", sum(package.size for package in packages), BYTES) as task:
        for package in packages:
            label = f"{package.name} {package.version}"
            path = folder / package.file
            if path.is_file():
                content = hash_file(path)
                if content.sha256 != package.sha256:
                    problems.append(
                        f"{label}: {package.file} is not what was pinned: "
                        f"expected sha256 {package.sha256}, found {content}"
                    )
            elif complete:
                problems.append(f"{label}: {package.file} is missing")
            task.advance(package.size)
    if problems:
        files = "the right files"
        if complete:
            files = "all"
        raise LockError(
            f"{folder} does not have {files} of {plan.target.name}:\n  " + "\n  ".join(problems),
            hint=f"`python build.py mirror {folder} --only {plan.target.name}` fills it",
        )
