"""Wheels of git repositories, each at a commit, and of the user's project: they are built in the base image."""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import replace

from trainworks.assemble.image import ImageSpec, run_build
from trainworks.assemble.order import BuildOptions
from trainworks.engine.protocol import Engine
from trainworks.errors import BuildError, LockError
from trainworks.extend.plan import WheelSource
from trainworks.extend.reading.wheel import read_wheel
from trainworks.extend.requirements import ExtendedBase, GitRequirement, Wheel
from trainworks.extend.resolving.releases import Archive
from trainworks.facts.rows import SourceFile
from trainworks.host.bootstrap import EPOCH
from trainworks.host.cache import cache_folder
from trainworks.host.git import source_archive
from trainworks.terminal.build_progress import BuildProgress
from trainworks.terminal.output import say


def find_sources(
    wanted: Iterable[GitRequirement], known: Mapping[str, str], environment: Mapping[str, str], *, resolving: bool
) -> tuple[list[WheelSource], dict[str, str]]:
    """Return the files of git repositories and their commits, by requirement.

    Args:
        wanted: The requirements.
        known: Commits that a lock has; the others are asked for.
        environment: The process's environment, which says where caches lie.
        resolving: Whether a commit that is not known may be asked for.

    Raises:
        LockError: Git is not installed, or a repository does not answer or does not have the reference or commit.
    """
    sources: list[WheelSource] = []
    commits: dict[str, str] = {}
    for requirement in wanted:
        pinned = commits.get(str(requirement)) or known.get(str(requirement), "")
        if not pinned and not resolving:
            raise LockError(
                f"{requirement} has no commit in the lock", hint="`build.py extend` with the same choice writes it"
            )
        commit, archive = _archive(requirement, pinned, environment)
        commits[str(requirement)] = commit
        sources.append(
            WheelSource(
                archive=archive,
                origin=str(requirement),
                subdirectory=requirement.subdirectory,
                name=requirement.name,
                extras=requirement.extras,
            )
        )
    return sources, commits


def _archive(requirement: GitRequirement, commit: str, environment: Mapping[str, str]) -> tuple[str, bytes]:
    """Return the commit and its files, from the cache where the commit is known: no network is needed then."""
    folder = cache_folder(environment, "git")
    stem = hashlib.sha256(requirement.url.encode()).hexdigest()[:16]
    with contextlib.suppress(OSError):
        if commit:
            return commit, (folder / f"{stem}-{commit}.tar").read_bytes()
    say(f"  cloning {requirement}")
    commit, archive = source_archive(requirement.url, commit or requirement.reference)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = folder / f"{stem}-{commit}.part"
        part.write_bytes(archive)
        part.replace(folder / f"{stem}-{commit}.tar")
    return commit, archive


def project_source(
    files: Iterable[SourceFile], *, origin: str = "--source", name: str = "", extras: str = ""
) -> WheelSource:
    """Return files of this machine as what a wheel is built from; the arguments are those of ``WheelSource``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in files:
            member = tarfile.TarInfo(f"source/{file.path}")
            member.size, member.mode, member.mtime = len(file.content), file.mode, EPOCH
            archive.addfile(member, io.BytesIO(file.content))
    return WheelSource(archive=buffer.getvalue(), origin=origin, name=name, extras=extras)


def archive_source(archive: Archive) -> WheelSource:
    """Return a source archive as what a wheel is built from: pip downloads it inside the build, by its hash."""
    pin = f"{archive.name}=={archive.version} --hash=sha256:{archive.sha256}"
    return WheelSource(pin=pin, origin=str(archive), name=archive.name)


def build_wheels(
    sources: tuple[WheelSource, ...], spec: ImageSpec, base: ExtendedBase, engine: Engine, options: BuildOptions
) -> tuple[Wheel, ...]:
    """Build the wheels inside the base image, and return them in the order of their sources.

    Args:
        sources: What they are built from.
        spec: The image that has them, and that is removed again.
        base: The base image.
        engine: What builds.
        options: How; the folder of ``output`` is for the extended image alone.

    Raises:
        BuildError: One cannot be built, or is of another distribution than its requirement says.
    """
    name = spec.tags[0]
    say(f"  building wheels in {base.reference}: {', '.join(source.origin for source in sources)}")
    try:
        run_build(spec, engine, replace(options, output=None), BuildProgress(verbose=options.verbose))
    except BuildError as error:
        raise BuildError(error.message, hint=_advice(base) or error.hint) from error
    files: dict[str, tuple[str, bytes]] = {}
    try:
        with engine.layers(name) as layers:
            for layer in layers:
                for member in layer.archive:
                    content = layer.archive.extractfile(member) if member.name.endswith(".whl") else None
                    if content is not None:
                        place, file = member.name.rsplit("/", 1)
                        files[f"/{place.lstrip('/')}"] = (file, content.read())
    finally:
        engine.remove(name)
    wheels = []
    for source in sources:
        file, content_of_file = files[source.folder]
        wheel = read_wheel(file, content_of_file, extras=source.extras, built=True)
        if source.name and wheel.name != source.name:
            found = f"{wheel.name} {wheel.version}"
            raise BuildError(f"{source.origin} is {found}, but the requirement names {source.name}")
        wheels.append(wheel)
    return tuple(wheels)


def _advice(base: ExtendedBase) -> str:
    if base.compiler:
        return ""
    how = "add --apt g++ --apt python3-dev" if base.apt else "use a base that has one"
    return f"{base.reference} has no C compiler. If the build needs one: {how}"
