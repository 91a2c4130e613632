"""The locks that all targets share: hashes of components' downloads, digests of base images."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from trainworks.host.archives import LIMITS, read_todays_states
from trainworks.host.downloads import Client, Content, UnreachableError, hash_file
from trainworks.host.git import find_tag_commit, list_tags, make_moved_tag_error
from trainworks.host.settings import HostSettings
from trainworks.host.signatures import check_signature
from trainworks.plan.locks import find_lock_problems
from trainworks.plan.resolve import list_downloads, list_images
from trainworks.plan.target import context_of
from trainworks.registry.names import split_reference
from trainworks.registry.protocol import RegistryUnreachableError
from trainworks.registry.tools import Registries

Row = TypeVar("Row", LockedArtifact, LockedBaseImage, LockedArchive)

TAG_SECONDS = 60.0
"""Seconds that a repository may take to list its tags."""

Report = Callable[[str], None]
"""Takes a line for people."""


@dataclass(frozen=True, kw_only=True)
class LockRun:
    """A run that records hashes and digests for targets.

    Attributes:
        rows: The targets.
        facts: All rows and locks as they are before the run.
        root: The checkout; files of its ``images/lock`` are written.
        report: Receives a line of text for each download, and for each record that changed.
    """

    rows: Sequence[TargetRow]
    facts: Facts
    root: Path
    report: Report


def lock_artifacts(
    run: LockRun, client: Client, *, mirror: Path | None, missing: bool = False
) -> list[str]:
    """Record hash and size of every file that targets download.

    Records that exist already stay as they are.

    Args:
        run: The targets; ``images/lock/artifacts.toml`` is written.
        client: Downloads the files.
        mirror: Folder with files that are not downloaded, and for downloads; ``None``: downloads
            are not kept.
        missing: Whether to read only files without any hash.

    Returns:
        The problems: files that could not be recorded, or differ from the
        published ones; one line each, with name and version.
    """
    facts, report = run.facts, run.report
    locked = dict(facts.locked_artifact_by_url)
    problems: list[str] = []
    try:
        for artifact in _collect_artifacts(run.rows, facts):
            label = f"{artifact.name} {artifact.version}"
            is_pinned = bool(artifact.git or artifact.sha256 or artifact.url in locked)
            if missing and is_pinned:
                continue
            try:
                if artifact.git:
                    _check_tag(artifact, client, report)
                elif artifact.url in locked:
                    problems += _compare_row_and_lock(artifact, facts)
                else:
                    report(f"  {label}: {artifact.url}")
                    usable_mirror = None
                    if _has_unique_name(artifact, facts):
                        usable_mirror = mirror
                    content = _read_and_compare(artifact, client, usable_mirror)
                    locked[artifact.url] = LockedArtifact(
                        url=artifact.url, sha256=content.sha256, size=content.size
                    )
            except LockError as error:
                problem = f"{label}: {error.message}"
                if error.hint:
                    problem += f"; {error.hint}"
                problems.append(problem)
    finally:
        # Files that were read before an interrupt are recorded.
        if locked != facts.locked_artifact_by_url:
            _write_lock(run.root, lockfile.ARTIFACTS, LockedArtifact, _sort_by_url(locked))
    return problems


def _has_unique_name(artifact: Artifact, facts: Facts) -> bool:
    """Return whether no other artifact has a file of this name.

    A mirror has each file by its name alone: the file of that name might be the other artifact's.
    """
    for other in facts.artifacts:
        if other.file == artifact.file and other.url != artifact.url:
            return False
    return True


def _collect_artifacts(rows: Iterable[TargetRow], facts: Facts) -> tuple[Artifact, ...]:
    """Return the artifacts that targets download, once each: their rows, without the lock.

    The key of an artifact is its URL, or its git repository and commit.
    """
    row_by_key = {(row.url, row.git, row.commit): row for row in facts.artifacts}
    artifacts = {}
    for target_row in rows:
        for download in list_downloads(target_row, facts):
            key = (download.url, download.git, download.commit)
            artifacts[key] = row_by_key[key]
    return tuple(artifacts.values())


def _sort_by_url(locked: Mapping[str, LockedArtifact]) -> Iterator[LockedArtifact]:
    """Yield recorded artifacts in the order of the lock file."""
    return (locked[url] for url in sorted(locked))


def _check_tag(artifact: Artifact, client: Client, report: Report) -> None:
    """Refuse a tag that no longer points at the recorded commit; raises ``LockError``."""
    if not artifact.tag:
        return
    try:
        commit = find_tag_commit(artifact.git, artifact.tag, ca_path=client.ca_path)
    except UnreachableError as error:
        # The commit is the pin, and can be fetched without the tag.
        report(f"  {artifact.name} {artifact.version}: its tag was not looked at: {error.message}")
        return
    if commit != artifact.commit:
        raise make_moved_tag_error(artifact.git, artifact.tag, artifact.commit, commit)


def report_newer_tags(
    rows: Iterable[TargetRow], facts: Facts, client: Client, *, report: Report
) -> None:
    """Report tags of git repositories that are newer than those of the targets."""
    for artifact in _collect_artifacts(rows, facts):
        if not artifact.tag:
            continue
        label = f"{artifact.name} {artifact.version}"
        try:
            tags = list_tags(artifact.git, ca_path=client.ca_path, seconds=TAG_SECONDS)
        except UnreachableError as error:
            report(f"  {label}: its tags are not known: {error.message}")
            continue
        tag = _find_newer_tag(artifact, tags)
        if tag:
            report(f"  {label}: there is a newer tag, {tag}")


def _find_newer_tag(artifact: Artifact, tags: Iterable[str]) -> str:
    """Return the newest tag of the artifact's form, ``""`` if no tag is newer.

    For version 1.7 and the tag ``v1.7-aws1``, ``v1.8-aws2`` has the same form.
    """
    # The form has any version, and any number behind it: ``v1.7-aws1`` gives ``v(VERSION)-aws\d+``.
    before, _, after = artifact.tag.partition(artifact.version)
    any_digits = re.sub(r"\d+", lambda _: r"\d+", re.escape(after))
    form = re.compile(re.escape(before) + r"(\d+(?:\.\d+)+)" + any_digits)
    tag_by_version = {}
    for tag in tags:
        match = form.fullmatch(tag)
        if match:
            tag_by_version[match[1]] = tag
    # A vendor's version may have more than numbers in it: "1.7-aws".
    current = re.search(r"\d+(\.\d+)*", artifact.version)
    if current is None or not tag_by_version:
        return ""
    newest = max(tag_by_version, key=Version)
    if Version(newest) <= Version(current[0]):
        return ""
    return tag_by_version[newest]


def _read_and_compare(artifact: Artifact, client: Client, mirror: Path | None) -> Content:
    """Return hash and size of a file, after comparison with its published hash, size and signature.

    Raises ``LockError`` for a file that differs.
    """
    with private_folder() as scratch:
        path = (mirror or scratch) / artifact.file
        if path.exists():
            content = hash_file(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = client.download(artifact.url, path, sha256=artifact.sha256)
        differences = _describe_differences(artifact, content)
        if differences:
            origin = artifact.url
            if mirror is not None:
                origin = str(path)
            raise LockError(f"{origin} is not what is published: {differences}")
        if artifact.signature:
            signature, key = scratch / "signature", scratch / "key"
            client.download(artifact.signature, signature)
            client.download(artifact.key, key)
            check_signature(path, signature, key, artifact.fingerprint)
    return content


def _describe_differences(artifact: Artifact, content: Content) -> str:
    """Return the differences between a file and its published hash and size, or ``""``."""
    # A row may lack the hash (``""``) or the size (0): then anything fits.
    has_other_hash = artifact.sha256 not in ("", content.sha256)
    has_other_size = artifact.size not in (0, content.size)
    if not has_other_hash and not has_other_size:
        return ""
    expected = []
    if artifact.sha256:
        expected.append(f"sha256 {artifact.sha256}")
    if artifact.size:
        expected.append(f"{artifact.size} bytes")
    return f"expected {', '.join(expected)}; found {content}"


def _compare_row_and_lock(artifact: Artifact, facts: Facts) -> list[str]:
    """Return the problem of an artifact with a row and a lock that differ; ``[]`` for none."""
    locked = facts.locked_artifact_by_url.get(artifact.url)
    if locked is None:
        return []
    differences = _describe_differences(artifact, Content(sha256=locked.sha256, size=locked.size))
    if not differences:
        return []
    where = f"images/lock/{lockfile.ARTIFACTS} and its row in images/artifacts.toml differ"
    return [
        f"{artifact.name} {artifact.version}: {where}: {differences}; remove the one that is wrong"
    ]


def lock_base_images(
    run: LockRun,
    registries: Registries,
    *,
    missing: bool = False,
    upgrade: bool = False,
    system: frozenset[str] | None = None,
) -> list[str]:
    """Record the digests of the targets' base images, and of the images of CI's tools.

    A tag moves with each security update of its image: ``upgrade`` replaces a recorded digest by
    today's, and reports the change. For an image that is gone, the first of its row's
    ``alternatives`` that exists is recorded.

    Args:
        run: The targets; ``images/lock/base-images.toml`` is written.
        registries: Connections and logins. A registry that does not answer is not asked again.
        missing: Whether to look up only images without a digest.
        upgrade: Whether tags with a recorded digest are looked up again.
        system: If only the package archives are locked: the suites that moved. A base image is
            then looked up only if its own suite moved, because updates are installed on the image,
            and a registry that does not answer is only a line.

    Returns:
        The tags that could not be recorded, one line each.
    """
    facts, report = run.facts, run.report
    locked = {row.name: row for row in facts.locked_base_images}
    before = dict(locked)
    problems: list[str] = []
    targets = [context_of(row, facts) for row in run.rows]
    # Without a registry, these base images are made of their archives; CI's tools come from
    # packages.
    own_bases = [target.base for target in targets if not target.row.image]
    on_archives = [base for base in own_bases if base.archives]
    bootstrapped = {base.image for base in on_archives}
    unmoved: set[str] = set()
    if system is not None:
        unmoved = {base.image for base in on_archives if base.suite not in system}
    optional = set(bootstrapped)
    if not missing:
        optional |= {tool.image for tool in facts.tool_images}
    names: list[str] = []
    for target in targets:
        names += list_images(target)
    if not missing:
        names += sorted(optional)
    lookup = _ImageLookup(registries)
    for name in dict.fromkeys(names):
        alternatives = _find_alternatives(name, facts)
        row_digest = _find_row_digest(name, facts)
        # The row has the digest. Without alternatives there is nothing to look up.
        is_settled = row_digest and (missing or not alternatives)
        # The lock has the digest, and no update is wanted.
        is_locked = name in locked and (not upgrade or name in unmoved)
        if is_settled or is_locked:
            continue
        result = lookup.find(name, alternatives, row_digest)
        if result.image is None:
            failure = result.failures[0]
            if name in bootstrapped:
                report(f"  {failure}: this base image is bootstrapped")
            elif name in optional or (system is not None and not result.was_refused):
                digest = row_digest
                if not digest and name in before:
                    digest = before[name].digest
                consequence = "its digest is not recorded"
                if digest:
                    consequence = f"it stays {digest}"
                report(f"  {failure}: {consequence}")
            else:
                problems += result.failures
            continue
        image = result.image
        if row_digest and not image.reference:
            # The row itself has the digest of an image that is not an alternative.
            locked.pop(name, None)
            continue
        locked[name] = image
        if image.reference:
            report(f"  base image {name} is not available: {image.reference} is taken")
        elif name in before and before[name] != image:
            report(f"  base image {name} moved from {before[name].digest} to {image.digest}")
    if locked != before:
        images = [locked[name] for name in sorted(locked)]
        _write_lock(run.root, lockfile.BASE_IMAGES, LockedBaseImage, images)
    return problems


@dataclass(frozen=True, kw_only=True)
class _LookupResult:
    """The result of a lookup.

    Attributes:
        image: The image; ``None`` if neither the image nor an alternative exists.
        failures: A line for each reference that was not found.
        was_refused: Whether a registry answered with an error.
    """

    image: LockedBaseImage | None
    failures: list[str]
    was_refused: bool


class _ImageLookup:
    """Looks up base images; a registry that does not answer is asked once."""

    def __init__(self, registries: Registries) -> None:
        """Remember the connections, and no silent host yet."""
        self._registries = registries
        self._silent_hosts: set[str] = set()

    def find(self, name: str, alternatives: Sequence[str], row_digest: str) -> _LookupResult:
        """Look up an image, and its alternatives if the image does not exist.

        Args:
            name: The image, with its tag.
            alternatives: Images in its place.
            row_digest: The digest in the image's row; ``""``: the tag is looked up.
        """
        failures = []
        was_refused = False
        for reference in (name, *alternatives):
            host, path, tag = split_reference(reference)
            if host in self._silent_hosts:
                failures.append(f"base image {reference}: not tried, {host} does not answer")
                continue
            is_original = reference == name
            digest_or_tag = tag
            if is_original and row_digest:
                digest_or_tag = row_digest
            try:
                digest = self._registries.read_manifest(f"{host}/{path}", digest_or_tag).digest
            except (HostError, RegistryError) as error:
                failures.append(f"base image {reference}: {error.message}")
                if isinstance(error, HostError | RegistryUnreachableError):
                    self._silent_hosts.add(host)
                else:
                    was_refused = True
                continue
            alternative = ""
            if not is_original:
                alternative = reference
            image = LockedBaseImage(name=name, digest=digest, reference=alternative)
            return _LookupResult(image=image, failures=failures, was_refused=was_refused)
        return _LookupResult(image=None, failures=failures, was_refused=was_refused)


def _find_alternatives(name: str, facts: Facts) -> tuple[str, ...]:
    """Return the images that may take the place of a base image, the preferred one first."""
    row = facts.base_image_by_name.get(name)
    if row is not None:
        return row.alternatives
    for base in reversed(facts.bases):
        if base.image == name:
            return base.alternatives
    return ()


def lock_archives(
    run: LockRun, settings: HostSettings, *, upgrade: bool
) -> tuple[list[str], frozenset[str]]:
    """Record the states of the package archives of the targets' bases.

    Recorded states stay, unless ``upgrade``.

    Args:
        run: The targets; ``images/lock/archives.toml`` is written.
        settings: This machine's settings, with its archives.
        upgrade: Whether states that are recorded move; those of the same packages stay.

    Returns:
        The archives that could not be asked, one line each; and the suites that moved.
    """
    facts, report = run.facts, run.report
    locked = {row.suite: row for row in facts.locked_archives}
    problems: list[str] = []
    base_by_suite = {}
    for row in run.rows:
        base = context_of(row, facts).base
        if base.archives:
            base_by_suite[base.suite] = base
    for base in base_by_suite.values():
        if not upgrade and facts.archives_of(base):
            continue
        try:
            with Client(settings, limits=LIMITS) as client:
                states = read_todays_states(base, settings, client, facts.locked_archives)
        except (LockError, HostError) as error:
            problems.append(f"package archive of {base.suite}: {error.message}")
            continue
        for state in states:
            old_state = locked.get(state.suite)
            if old_state is None:
                report(f"  {state.suite} is locked as of {state.date}")
            elif old_state != state:
                report(f"  {state.suite} {old_state.date} -> {state.date}")
            locked[state.suite] = state
    before = {row.suite: row for row in facts.locked_archives}
    if locked != before:
        archives = [locked[suite] for suite in sorted(locked)]
        _write_lock(run.root, lockfile.ARCHIVES, LockedArchive, archives)
    moved_suites = [suite for suite, state in locked.items() if before.get(suite) != state]
    return problems, frozenset(moved_suites)


def _find_row_digest(name: str, facts: Facts) -> str:
    """Return the digest in an image's own row; ``""`` for a row without one."""
    row = facts.base_image_by_name.get(name)
    if row is not None:
        return row.digest
    for base in facts.bases:
        if base.image == name:
            return base.digest
    return ""


def _write_lock(root: Path, name: str, row_type: type[Row], rows: Iterable[Row]) -> None:
    """Write a shared lock file: ``images/lock/NAME``."""
    lockfile.write(root / "images" / lockfile.LOCK / name, lockfile.as_toml(row_type, rows))


def check_locks(rows: Sequence[TargetRow], facts: Facts) -> tuple[list[str], list[str]]:
    """Compare every lock of targets with their rows; nothing is downloaded or written.

    Returns:
        The problems; and the files, images and packages without a record.
    """
    problems: list[str] = []
    unlocked: list[str] = []
    for row in rows:
        target = context_of(row, facts)
        name = target.name
        if target.lock is not None:
            for problem in find_lock_problems(target, facts):
                problems.append(f"images/lock/{name}.toml: {problem}")
        else:
            unlocked.append(f"{name}: its Python files")
        for image in list_images(target):
            has_digest = _find_row_digest(image, facts) or facts.digest_by_image.get(image)
            if not has_digest:
                unlocked.append(f"{name}: base image {image}")
    for artifact in _collect_artifacts(rows, facts):
        problems += _compare_row_and_lock(artifact, facts)
        is_recorded = artifact.sha256 or artifact.url in facts.locked_artifact_by_url
        if artifact.url and not is_recorded:
            unlocked.append(f"{artifact.name} {artifact.version}: {artifact.url}")
    problems += _find_leftovers(facts)
    return problems, unlocked


def _find_leftovers(facts: Facts) -> Iterator[str]:
    """Yield a problem for each locked file, suite and image without a row."""
    urls = {row.url for row in facts.artifacts}
    suites: set[str] = set()
    images = {row.name for row in facts.base_images}
    images |= {tool.image for tool in facts.tool_images}
    for base in facts.bases:
        suites.update(base.archives)
        images.add(base.image)
    advice = "stands in no row any more; remove it"
    for artifact in facts.locked_artifacts:
        if artifact.url not in urls:
            yield f"images/lock/{lockfile.ARTIFACTS}: {artifact.url} {advice}"
    for archive in facts.locked_archives:
        if archive.suite not in suites:
            yield f"images/lock/{lockfile.ARCHIVES}: {archive.suite} {advice}"
    for image in facts.locked_base_images:
        if image.name not in images:
            yield f"images/lock/{lockfile.BASE_IMAGES}: {image.name} {advice}"
