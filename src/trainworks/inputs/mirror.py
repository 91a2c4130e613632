"""``build.py mirror`` downloads everything that targets need into a folder; ``--mirror`` builds from it.

A mirror is a flat folder: each file under its own name, a git commit as ``NAME-COMMIT.bundle``, and two listings:
``SHA256SUMS`` for ``sha256sum --check``, and ``index.html`` for pip and uv. Any web server can serve it.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

from trainworks.errors import LockError, OutputError
from trainworks.facts.rows import Artifact, Facts, LockedPackage, TargetRow
from trainworks.host.downloads import Client, UnreachableError, content_of
from trainworks.host.git import bundle_holds
from trainworks.host.index import file_addresses
from trainworks.host.pip import PipSettings, find_local_file
from trainworks.host.settings import HostSettings
from trainworks.inputs.lock_artifacts import Report
from trainworks.inputs.sources import Places, archives_of, cache_folder, fetch_source
from trainworks.plan.model import ImagePlan
from trainworks.plan.resolve import downloads_of
from trainworks.terminal.fetching import Fetching
from trainworks.terminal.progress import BYTES, DISPLAY
from trainworks.terminal.words import megabytes

SUMS = "SHA256SUMS"
INDEX = "index.html"
PYTHON_SUFFIXES = (".whl", ".tar.gz", ".zip")


# Build from a mirror.


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """The mirror of ``--mirror``: a folder or an address, never both. ``offline``: nothing else is contacted."""

    folder: Path | None = None
    address: str = ""
    offline: bool = False

    def folders(self, cache: Path) -> tuple[Path, ...]:
        """Return the folders to search for the sources of components, in order; ``cache`` is this user's."""
        mirror = (self.folder,) if self.folder else ()
        return mirror if mirror and self.offline else (*mirror, cache)

    def places(self, facts: Facts, settings: HostSettings, environment: Mapping[str, str]) -> Places:
        """Return where to look for the sources of components."""
        return Places(
            folders=self.folders(cache_folder(environment)),
            address=self.address,
            offline=self.offline,
            archives=archives_of(facts.bases, settings.apt, settings.suite),
        )

    def settings(self, settings: HostSettings) -> HostSettings:
        """Return this machine's settings with the mirror as the first, or only, source of files."""
        if not (self.address or self.folder):
            return settings
        link = f"{self.address}/{INDEX}" if self.address else str(self.folder)
        parts = urlsplit(self.address)
        # pip contacts servers without TLS only if they are trusted hosts. Each file's hash is checked anyway.
        trusted = (*settings.pip.trusted_hosts, *([parts.netloc.rpartition("@")[2]] if parts.scheme == "http" else []))
        pip = replace(settings.pip, find_links=(link, *settings.pip.find_links), trusted_hosts=trusted)
        if self.offline:
            pip = replace(pip, index_url="", extra_index_urls=(), find_links=(link,), no_index=True)
        return replace(settings, pip=pip, mirror=self.address, mirror_only=self.offline)


def read_mirror(value: str | None, *, offline: bool = False) -> Mirror:
    """Return the mirror of ``--mirror`` and ``--offline``; raises ``OutputError`` if the folder does not exist."""
    if not value:
        return Mirror()
    if urlsplit(value).scheme in ("http", "https"):
        return Mirror(address=value.rstrip("/"), offline=offline)
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise OutputError(f"--mirror {value}: no such folder", hint=f"`python build.py mirror {value}` fills one")
    return Mirror(folder=folder, offline=offline)


def check_mirror(plan: ImagePlan, folder: Path, *, complete: bool) -> None:
    """Check a mirror's folder before the engine is started.

    Only the presence of components' downloads is checked; the build checks their hashes before it unpacks them.

    Args:
        plan: The plan to build.
        folder: The mirror.
        complete: Whether it must have every file.

    Raises:
        LockError: Lists every Python file with another hash and, if it must be complete, every missing file.
    """
    problems: list[str] = []
    packages = [package for step in plan.steps for package in step.python]
    for step in plan.steps:
        problems += [
            f"{artifact.name} {artifact.version}: {artifact.file} is missing"
            for artifact in step.artifacts
            if complete and not (folder / artifact.file).is_file()
        ]
    with DISPLAY.task("hashing", sum(package.size for package in packages), BYTES) as task:
        for package in packages:
            path = folder / package.file
            if not path.is_file():
                if complete:
                    problems.append(f"{package.name} {package.version}: {package.file} is missing")
            elif (content := content_of(path)).sha256 != package.sha256:
                problems.append(
                    f"{package.name} {package.version}: {package.file} is not what was pinned: "
                    f"expected sha256 {package.sha256}, found {content}"
                )
            task.advance(package.size)
    if problems:
        raise LockError(
            f"{folder} does not have {'all' if complete else 'the right files'} of {plan.target.name}:\n  "
            + "\n  ".join(problems),
            hint=f"`python build.py mirror {folder} --only {plan.target.name}` fills it",
        )


def refuse_unlocked(plan: ImagePlan) -> None:
    """Raise ``LockError`` for a plan with inputs that have no recorded hash: they could not be checked."""
    if plan.unlocked:
        raise LockError(
            f"{plan.target.name} has inputs that are not locked (no recorded hash):\n  " + "\n  ".join(plan.unlocked),
            hint=f"run `python build.py lock --only {plan.target.name}` on a machine that reaches their servers",
        )


# Fill a mirror.


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A file of the mirror. ``sha256`` is ``""`` for a bundle, ``size`` is 0 if unknown, ``get`` downloads it."""

    file: str
    what: str
    sha256: str
    size: int
    get: Callable[[Path], None]
    fits: Callable[[Path], bool]


def fill_mirror(
    rows: Iterable[TargetRow],
    facts: Facts,
    folder: Path,
    client: Client,
    settings: HostSettings,
    *,
    report: Report,
    fetching: Fetching,
) -> None:
    """Download everything that targets need into a folder. Correct files stay; broken downloads are continued.

    Args:
        rows: The targets. Optional components are included.
        facts: All facts.
        folder: The mirror; created if it does not exist.
        client: Downloads files.
        settings: Say where this machine's pip looks for Python files.
        report: Receives a line of text for each file.
        fetching: Shows the downloads of ``client``.

    Raises:
        LockError: Lists every file that could not be downloaded; all others are in the folder.
        OutputError: The folder cannot be written.
    """
    problems: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = _all_wanted(rows, facts, client, settings, problems)
        with fetching.shown("mirroring", sum(wanted.size for wanted in files)) as task:
            task.about = not all(wanted.size for wanted in files)
            for wanted in files:
                path, before = folder / wanted.file, task.done
                try:
                    if path.exists() and wanted.fits(path):
                        task.skip(wanted.size)
                        continue
                    wanted.get(path)
                    report(f"  {wanted.file}  {megabytes(path.stat().st_size)}")
                except LockError as error:
                    problems.append(f"{wanted.what}: {error.message}" + (f"; {error.hint}" if error.hint else ""))
                task.reach(before + wanted.size)
        _write_listings(folder)
    except OSError as error:
        raise OutputError(f"cannot write {error.filename or folder} ({error.strerror})") from error
    if problems:
        count = f"{len(problems)} file{'s are' if len(problems) > 1 else ' is'}"
        raise LockError(
            f"{count} not in {folder}:\n  " + "\n  ".join(problems),
            hint="all others are; repeat the command to continue",
        )


def _all_wanted(
    rows: Iterable[TargetRow], facts: Facts, client: Client, settings: HostSettings, problems: list[str]
) -> tuple[_Wanted, ...]:
    found: dict[str, _Wanted] = {}
    places = Places(folders=(), archives=archives_of(facts.bases, settings.apt, settings.suite))
    for row in rows:
        name = facts.name_of(row)
        wanted = [_artifact(artifact, places, client, problems) for artifact in downloads_of(row, facts)]
        if name in facts.locks:
            wanted += [_package(package, row, client, settings.pip) for package in facts.locks[name].packages]
        else:
            problems.append(f"{name}: its Python files are not locked; `python build.py lock --only {name}`")
        for each in wanted:
            if each is None:
                continue
            other = found.setdefault(each.file, each)
            if other.sha256 != each.sha256:
                problems.append(f"{each.what}: {each.file} is also {other.what}, another file; use a folder for each")
    return tuple(found.values())


def _artifact(artifact: Artifact, places: Places, client: Client, problems: list[str]) -> _Wanted | None:
    what = f"{artifact.name} {artifact.version}"
    if artifact.git:
        return _Wanted(
            file=artifact.file,
            what=what,
            sha256="",
            size=0,
            get=lambda path: fetch_source(artifact, path, places, client),
            fits=lambda path: bundle_holds(path, artifact.commit),
        )
    if not artifact.sha256:
        problem = f"{what}: no sha256 of {artifact.url} is recorded; `python build.py lock` records it"
        if problem not in problems:
            problems.append(problem)
        return None
    return _Wanted(
        file=artifact.file,
        what=what,
        sha256=artifact.sha256,
        size=artifact.size,
        get=lambda path: fetch_source(artifact, path, places, client),
        fits=lambda path: content_of(path).sha256 == artifact.sha256,
    )


def _package(package: LockedPackage, row: TargetRow, client: Client, settings: PipSettings) -> _Wanted:
    def get(path: Path) -> None:
        local = find_local_file(package, settings)
        if local is not None:
            part = path.with_name(f"{path.name}.part")
            part.write_bytes(local.read_bytes())
            part.replace(path)
            return
        for address in file_addresses(package, settings, row.wheel_index, client):
            with suppress(UnreachableError):
                client.download(address, path, sha256=package.sha256)
                return
        raise UnreachableError(f"no index of this machine's pip has {package.file} with sha256 {package.sha256}")

    return _Wanted(
        file=package.file,
        what=f"{package.name} {package.version}",
        sha256=package.sha256,
        size=package.size,
        get=get,
        fits=lambda path: content_of(path).sha256 == package.sha256,
    )


def _write_listings(folder: Path) -> None:
    files = sorted(_files(folder))
    sums = ""
    with DISPLAY.task("hashing", sum((folder / name).stat().st_size for name in files), BYTES) as task:
        for name in files:
            content = content_of(folder / name)
            sums += f"{content.sha256}  {name}\n"
            task.advance(content.size)
    (folder / SUMS).write_text(sums, encoding="utf-8")
    links = "".join(
        f'<a href="{quote(name)}">{html.escape(name)}</a><br>\n' for name in files if name.endswith(PYTHON_SUFFIXES)
    )
    (folder / INDEX).write_text(f"<!DOCTYPE html>\n<title>packages</title>\n{links}", encoding="utf-8")


def _files(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
        if path.is_file() and path.name not in (SUMS, INDEX) and path.suffix != ".part":
            yield path.name
