"""The locks that all targets share: hashes of what components download, and
digests of base images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from packaging.version import Version

from trainworks.engine.temporary_folders import private_folder
from trainworks.errors import HostError, LockError, RegistryError
from trainworks.facts import lockfile
from trainworks.facts.rows import (
    Artifact,
    Facts,
    LockedArchive,
    LockedArtifact,
    LockedBaseImage,
    TargetRow,
)
from trainworks.host.archives import LIMITS, todays_states
from trainworks.host.downloads import Client, Content, UnreachableError, content_of
from trainworks.host.git import moved, tag_commit, tags_of
from trainworks.host.settings import HostSettings
from trainworks.host.signatures import check_signature
from trainworks.plan.locks import lock_problems
from trainworks.plan.resolve import downloads_of, images_of
from trainworks.plan.target import context_of
from trainworks.registry.names import split_reference
from trainworks.registry.protocol import RegistryUnreachableError
from trainworks.registry.tools import Registries

Row = TypeVar("Row", LockedArtifact, LockedBaseImage, LockedArchive)

TAG_SECONDS = 60.0
"""How long a repository may take to list its tags."""

Report = Callable[[str], None]
"""Takes a line for people."""


def lock_artifacts(
    rows: Iterable[TargetRow],
    facts: Facts,
    client: Client,
    root: Path,
    *,
    mirror: Path | None,
    report: Report,
    missing: bool = False,
) -> list[str]:
    """Record hash and size of every file that targets download.

    What is recorded already stays as it is.

    Args:
        missing: Whether to look at nothing but the files without any hash.
        root: The checkout, whose ``images/lock/artifacts.toml`` is written.
        mirror: Folder whose files are taken instead of asking their servers, and where downloads
            are left; default: nothing is left.
        report: Told what is being done.

    Returns:
        What could not be recorded, or does not agree with what is published;
        one line each, with name and version.
    """
    locked = dict(facts.locked_artifact_by_url)
    problems: list[str] = []
    try:
        for artifact in _artifacts(rows, facts):
            what = f"{artifact.name} {artifact.version}"
            if missing and (artifact.git or artifact.sha256 or artifact.url in locked):
                continue
            try:
                if artifact.git:
                    _check_tag(artifact, client, report)
                elif artifact.url in locked:
                    problems += _disagreement(artifact, facts)
                else:
                    report(f"  {what}: {artifact.url}")
                    # A name that two files have says nothing about which of them lies there.
                    unique = all(
                        each.file != artifact.file or each.url == artifact.url
                        for each in facts.artifacts
                    )
                    content = _first_look(artifact, client, mirror if unique else None)
                    locked[artifact.url] = LockedArtifact(
                        url=artifact.url, sha256=content.sha256, size=content.size
                    )
            except LockError as error:
                problems.append(
                    f"{what}: {error.message}" + (f"; {error.hint}" if error.hint else "")
                )
    finally:
        # What an interrupt leaves undone does not undo what was downloaded.
        if locked != facts.locked_artifact_by_url:
            _write(root, lockfile.ARTIFACTS, LockedArtifact, _sorted(locked))
    return problems


def _artifacts(rows: Iterable[TargetRow], facts: Facts) -> tuple[Artifact, ...]:
    """Return what targets download, each once, as their own rows say: without
    what the lock adds.
    """
    own = {(row.url, row.git, row.commit): row for row in facts.artifacts}
    found = [
        own[artifact.url, artifact.git, artifact.commit]
        for row in rows
        for artifact in downloads_of(row, facts)
    ]
    return tuple({(each.url, each.git, each.commit): each for each in found}.values())


def _sorted(locked: Mapping[str, LockedArtifact]) -> Iterator[LockedArtifact]:
    return (locked[url] for url in sorted(locked))


def _check_tag(artifact: Artifact, client: Client, report: Report) -> None:
    """Check that a tag still points at the commit.

    The commit is the pin: a server that is away makes no difference.
    """
    if not artifact.tag:
        return
    try:
        there = tag_commit(artifact.git, artifact.tag, ca_path=client.ca_path)
    except UnreachableError as error:
        report(f"  {artifact.name} {artifact.version}: its tag was not looked at: {error.message}")
        return
    if there != artifact.commit:
        raise moved(artifact.git, artifact.tag, artifact.commit, there)


def newer_tags(rows: Iterable[TargetRow], facts: Facts, client: Client, *, report: Report) -> None:
    """Report the tags that are newer than those that targets take, of what they fetch by git."""
    for artifact in _artifacts(rows, facts):
        if artifact.tag:
            what = f"{artifact.name} {artifact.version}"
            try:
                tags = tags_of(artifact.git, ca_path=client.ca_path, seconds=TAG_SECONDS)
            except UnreachableError as error:
                report(f"  {what}: its tags are not known: {error.message}")
                continue
            if tag := _newest_tag(artifact, tags):
                report(f"  {what}: there is a newer tag, {tag}")


def _newest_tag(artifact: Artifact, tags: Iterable[str]) -> str:
    """Return the newest of the tags that are written as the artifact's own,
    ``""`` where none is newer.
    """
    before, _, after = artifact.tag.partition(artifact.version)
    form = re.compile(
        re.escape(before) + r"(\d+(?:\.\d+)+)" + re.sub(r"\d+", lambda _: r"\d+", re.escape(after))
    )
    versions = {found[1]: tag for tag in tags if (found := form.fullmatch(tag))}
    newest = max(versions, key=Version, default="")
    # A vendor's version may have more than numbers in it: "1.7-aws".
    own = re.search(r"\d+(\.\d+)*", artifact.version)
    return versions[newest] if own and newest and Version(newest) > Version(own[0]) else ""


def _first_look(artifact: Artifact, client: Client, mirror: Path | None) -> Content:
    """Return what a file is, once everything that is published about it holds."""
    with private_folder() as scratch:
        path = (mirror or scratch) / artifact.file
        if path.exists():
            content = content_of(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = client.download(artifact.url, path, sha256=artifact.sha256)
        if differences := _differences(artifact, content):
            raise LockError(
                f"{path if mirror else artifact.url} is not what is published: {differences}"
            )
        if artifact.signature:
            signature, key = scratch / "signature", scratch / "key"
            client.download(artifact.signature, signature)
            client.download(artifact.key, key)
            check_signature(path, signature, key, artifact.fingerprint)
    return content


def _differences(artifact: Artifact, content: Content) -> str:
    """Return how a file differs from what is published about it, ``""`` where it does not."""
    differs = (artifact.sha256 not in ("", content.sha256)) or (
        artifact.size not in (0, content.size)
    )
    if not differs:
        return ""
    expected = [f"sha256 {artifact.sha256}"] if artifact.sha256 else []
    expected += [f"{artifact.size} bytes"] if artifact.size else []
    return f"expected {', '.join(expected)}; found {content}"


def _disagreement(artifact: Artifact, facts: Facts) -> list[str]:
    """Return what is wrong where row and lock differ."""
    locked = facts.locked_artifact_by_url.get(artifact.url)
    differences = (
        _differences(artifact, Content(sha256=locked.sha256, size=locked.size)) if locked else ""
    )
    if not differences:
        return []
    where = f"images/lock/{lockfile.ARTIFACTS} and its row in images/artifacts.toml differ"
    return [
        f"{artifact.name} {artifact.version}: {where}: {differences}; remove the one that is wrong"
    ]


def lock_base_images(
    rows: Iterable[TargetRow],
    facts: Facts,
    registries: Registries,
    root: Path,
    *,
    report: Report,
    missing: bool = False,
    upgrade: bool = False,
    system: frozenset[str] | None = None,
) -> list[str]:
    """Record the digests that the tags of the targets' base images, and of the
    images of CI's tools, have.

    A tag moves with each security update of its image: ``upgrade`` replaces a recorded digest by
    today's, and reports it. For an image that is gone, the first of its row's ``alternatives`` that
    exists is recorded.

    Args:
        registries: Connections and logins. A registry that does not answer is not asked again.
        root: The checkout, whose ``images/lock/base-images.toml`` is written.
        report: Receives a line of text for each digest that changed.
        missing: Whether to look at nothing but the images without a digest.
        upgrade: Whether tags with a recorded digest are asked again.
        system: Where the package archives are what is locked, the suites that moved. A base image
            is then asked for only if its own suite is among them, because updates are installed on
            it, and a registry that does not answer is only a line.

    Returns:
        The tags that could not be recorded, one line each.
    """
    locked = {row.name: row for row in facts.locked_base_images}
    before = dict(locked)
    problems: list[str] = []
    silent: set[str] = set()
    targets = [context_of(row, facts) for row in rows]
    # Where no registry answers, these are made of their archives, and programs come from packages.
    on_archives = [each.base for each in targets if each.base.archives and not each.row.image]
    made = {base.image for base in on_archives}
    stays = {base.image for base in on_archives if system is not None and base.suite not in system}
    optional = made if missing else made | {tool.image for tool in facts.tool_images}
    more = {base.image: base.alternatives for base in facts.bases}
    wanted = [name for each in targets for name in images_of(each)] + (
        [] if missing else sorted(optional)
    )
    for name in dict.fromkeys(wanted):
        row = facts.base_image_by_name.get(name)
        alternatives = row.alternatives if row else more.get(name, ())
        known = _row_digest(name, facts)
        if (known and (missing or not alternatives)) or (
            name in locked and (not upgrade or name in stays)
        ):
            continue
        failures = []
        refused = False
        for reference in (name, *alternatives):
            host, path, tag = split_reference(reference)
            if host in silent:
                failures.append(f"base image {reference}: not tried, {host} does not answer")
                continue
            try:
                digest = registries.existing(
                    f"{host}/{path}", known if known and reference == name else tag
                ).digest
            except (HostError, RegistryError) as error:
                failures.append(f"base image {reference}: {error.message}")
                if isinstance(error, HostError | RegistryUnreachableError):
                    silent.add(host)
                else:
                    refused = True
                continue
            locked[name] = LockedBaseImage(
                name=name, digest=digest, reference=reference if reference != name else ""
            )
            break
        else:
            if name in made:
                report(f"  {failures[0]}: this base image is bootstrapped")
            elif name in optional or (system is not None and not refused):
                kept = known or (before[name].digest if name in before else "")
                report(
                    f"  {failures[0]}:"
                    f" {f'it stays {kept}' if kept else 'its digest is not recorded'}"
                )
            else:
                problems += failures
            continue
        if known and not locked[name].reference:
            del locked[name]
        elif locked[name].reference:
            report(f"  base image {name} cannot be had: {locked[name].reference} is taken")
        elif name in before and before[name] != locked[name]:
            report(f"  base image {name} moved from {before[name].digest} to {locked[name].digest}")
    if locked != before:
        _write(
            root, lockfile.BASE_IMAGES, LockedBaseImage, (locked[name] for name in sorted(locked))
        )
    return problems


def lock_archives(
    rows: Iterable[TargetRow],
    facts: Facts,
    settings: HostSettings,
    root: Path,
    *,
    report: Report,
    upgrade: bool,
) -> tuple[list[str], frozenset[str]]:
    """Record the states that the package archives of the targets' bases have.

    What is recorded stays.

    Args:
        settings: This machine's, whose archives are asked.
        root: The checkout, whose ``images/lock/archives.toml`` is written.
        report: Receives a line of text for each state that moved.
        upgrade: Whether states that are recorded move; those of the same packages stay.

    Returns:
        The archives that could not be asked, one line each; and the suites that moved.
    """
    locked = {row.suite: row for row in facts.locked_archives}
    problems: list[str] = []
    for base in {
        base.suite: base for base in (context_of(row, facts).base for row in rows) if base.archives
    }.values():
        if not upgrade and facts.archives_of(base):
            continue
        try:
            with Client(settings, limits=LIMITS) as client:
                states = todays_states(base, settings, client, facts.locked_archives)
        except (LockError, HostError) as error:
            problems.append(f"package archive of {base.suite}: {error.message}")
            continue
        for state in states:
            before = locked.get(state.suite)
            if before != state:
                report(
                    f"  {state.suite}"
                    f" {before.date + ' ->' if before else 'is locked as of'} {state.date}"
                )
            locked[state.suite] = state
    before_all = {row.suite: row for row in facts.locked_archives}
    if locked != before_all:
        _write(root, lockfile.ARCHIVES, LockedArchive, (locked[suite] for suite in sorted(locked)))
    return problems, frozenset(
        suite for suite, state in locked.items() if before_all.get(suite) != state
    )


def _row_digest(name: str, facts: Facts) -> str:
    """Return the digest that stands in an image's own row."""
    row = facts.base_image_by_name.get(name)
    if row is not None:
        return row.digest
    return next((base.digest for base in facts.bases if base.image == name), "")


def _write(root: Path, name: str, row_type: type[Row], rows: Iterable[Row]) -> None:
    lockfile.write(root / "images" / lockfile.LOCK / name, lockfile.as_toml(row_type, rows))


def check_locks(rows: Sequence[TargetRow], facts: Facts) -> tuple[list[str], list[str]]:
    """Compare every lock of targets with their rows; nothing is downloaded or written.

    Returns:
        What does not fit; and what is not recorded yet.
    """
    problems: list[str] = []
    unlocked: list[str] = []
    for row in rows:
        target = context_of(row, facts)
        name = target.name
        if target.lock is not None:
            problems += [
                f"images/lock/{name}.toml: {problem}" for problem in lock_problems(target, facts)
            ]
        else:
            unlocked.append(f"{name}: its Python files")
        unlocked += [
            f"{name}: base image {image}"
            for image in images_of(target)
            if not (_row_digest(image, facts) or facts.digest_by_image.get(image))
        ]
    for artifact in _artifacts(rows, facts):
        problems += _disagreement(artifact, facts)
        if (
            artifact.url
            and not artifact.sha256
            and artifact.url not in facts.locked_artifact_by_url
        ):
            unlocked.append(f"{artifact.name} {artifact.version}: {artifact.url}")
    urls = {row.url for row in facts.artifacts}
    images = {row.name for row in facts.base_images} | {base.image for base in facts.bases}
    images |= {tool.image for tool in facts.tool_images}
    suites = {suite for base in facts.bases for suite in base.archives}
    for where, leftovers in (
        (lockfile.ARTIFACTS, [row.url for row in facts.locked_artifacts if row.url not in urls]),
        (
            lockfile.ARCHIVES,
            [row.suite for row in facts.locked_archives if row.suite not in suites],
        ),
        (
            lockfile.BASE_IMAGES,
            [row.name for row in facts.locked_base_images if row.name not in images],
        ),
    ):
        problems += [
            f"images/lock/{where}: {leftover} stands in no row any more; remove it"
            for leftover in leftovers
        ]
    return problems, unlocked
