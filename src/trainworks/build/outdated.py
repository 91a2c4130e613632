"""Compares an image's packages with today's archives, indexes and advisories.

The packages are read from the image's files; no program of the image runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainworks.build.apt_outside import upgrade_outside
from trainworks.engine import choose, image_in
from trainworks.engine.protocol import BuiltImage
from trainworks.engine.tree import ImageTree, read_tree
from trainworks.errors import (
    HostError,
    LockError,
    NotComparedError,
    OutdatedError,
    UnknownNameError,
)
from trainworks.facts.rows import Base, EndOfPatch, Facts, LockedPackage, TargetRow
from trainworks.host import foreign_apt
from trainworks.host.advisories import Advisory, find_advisories
from trainworks.host.archives import LIMITS, describe_newer_state, read_todays_states
from trainworks.host.downloads import Client, UnreachableError
from trainworks.host.foreign_apt import (
    describe_archives_not_asked,
    read_foreign,
    read_release,
)
from trainworks.host.index import find_newest_release
from trainworks.host.settings import HostSettings, read_host_settings
from trainworks.imagetest.interpreter import MANIFEST
from trainworks.imagetest.job_files import JobFiles
from trainworks.inspect.targets import find_image
from trainworks.plan.model import IMAGE_TIME
from trainworks.plan.resolve import make_plan
from trainworks.plan.variants import TITLE_LABEL, ImageName, image_named, request_of
from trainworks.terminal.output import say
from trainworks.terminal.progress import DISPLAY

OSV = "TRAINWORKS_OSV"
"""Variable: the address of a service with OSV's interface, in the place of the row's.

With an empty value no service is asked.
"""

FRAMEWORKS = {"pytorch": "torch", "tensorflow": "tensorflow", "mxnet": "mxnet"}
"""The distribution of each framework: in an image of another maker, its version
says how old the framework is.
"""

READ = re.compile(rf"{foreign_apt.READ.pattern}|/.*/pyvenv\.cfg|{re.escape(MANIFEST)}")
"""The files of an image whose content is asked for."""

_SYSTEM_PACKAGES = re.compile(
    rb"^include-system-site-packages *= *true", re.MULTILINE | re.IGNORECASE
)
"""The setting of an environment that also imports from the system's folders."""

_PYTHON = re.compile(r"(?P<prefix>.*)/bin/python(?P<version>\d+\.\d+)")
"""An interpreter's own file, to which all its links lead."""

_INFORMATION = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.]*)-(?P<version>[^-/]+)(?:-py[\d.]+)?\.(?:dist|egg)-info"
)
"""The folder, or the file, that says which distribution is installed."""

CHANGE = re.compile(
    r"^Inst (?P<name>\S+) (?:\[(?P<installed>\S+)\] )?\((?P<update>\S+) (?P<suites>.*)\)",
    re.MULTILINE,
)
"""A line of a simulated upgrade (apt-get(8)): the package, its versions, and
the suites that have the newer one.
"""


@dataclass(frozen=True, kw_only=True)
class Update:
    """A package in another version: that of an archive, of an index, or of the lock.

    Attributes:
        name: The package.
        installed: Its version in the image; ``""`` for a package that an update brings along.
        update: The other version.
    """

    name: str
    installed: str
    update: str


@dataclass(frozen=True, kw_only=True)
class OutdatedReport:
    """The differences of an image to today's package archive, package index and lock.

    Attributes:
        name: The image.
        identity: Its identifier.
        packages: The number of packages of the distribution that were compared.
        updates: Packages that are newer in a suite of security updates.
        others: Packages that are newer in another suite, such as that of a point release.
        python: Python packages that are newer in the index.
        locked: Python packages in other versions than today's lock; empty for
            an image of no target.
        ended: The framework, where its project makes no more patches for its version.
        advisories: Published advisories about Python packages in their installed versions.
        parts: Components in other versions than today's rows; empty for an image of no target.
        archives: A sentence for each suite that has moved since it was locked: the next image has
            its updates.
        not_asked: A sentence for each archive of the image whose packages were not compared.
        unknown: A sentence for each failed comparison: the image may lack what was not compared.
        skipped: A sentence for each comparison that the user switched off.
        days: Whole days since the build; None for an image with a constant time.
    """

    name: str
    identity: str
    packages: int
    updates: tuple[Update, ...]
    others: tuple[Update, ...] = ()
    python: tuple[Update, ...] = ()
    locked: tuple[Update, ...] = ()
    ended: EndOfPatch | None = None
    advisories: tuple[Advisory, ...] = ()
    parts: tuple[Update, ...] = ()
    archives: tuple[str, ...] = ()
    not_asked: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    days: int | None = None

    def missing(self, *, allow_ended: bool = False) -> list[str]:
        """Return the reasons to replace the image, a part of a sentence each.

        Args:
            allow_ended: Whether a framework without patches is accepted, with
                the advisories about itself.
        """
        reasons = []
        if self.updates:
            names = ", ".join(update.name for update in self.updates)
            reasons.append(f"security updates are missing: {names}")

        accepted = ""
        if self.ended is not None:
            if allow_ended:
                accepted = FRAMEWORKS.get(self.ended.framework, "")
            else:
                reasons.append(_ended_words(self.ended))

        advisories = [row for row in self.advisories if row.name != accepted]
        if advisories:
            names = ", ".join(f"{row.name} ({row.identifier})" for row in advisories)
            reasons.append(f"advisories are published about {names}")
        return reasons

    def as_values(self) -> dict[str, object]:
        """Return the report as an object for JSON."""
        return asdict(self)

    def as_text(self) -> str:
        """Return the report for people: a line for each package."""
        number = len(self.updates)
        noun = "update" if number == 1 else "updates"
        count = str(number) if number else "no"
        first = [f"{count} security {noun} of the distribution missing"]
        if self.ended is not None:
            first.append(_ended_words(self.ended))
        if self.advisories:
            noun = "advisory" if len(self.advisories) == 1 else "advisories"
            first.append(f"{len(self.advisories)} published {noun} about Python packages")
        lines = [f"{self.name}: {'; '.join(first)}"]
        for advisory in self.advisories:
            fix = f"fixed in {advisory.fixed}" if advisory.fixed else "without a fix"
            line = f"  {advisory.name} {advisory.installed} {advisory.identifier}, {fix}"
            if advisory.summary:
                line += f": {advisory.summary}"
            lines.append(line)
        lines += _update_lines(self.updates, "")
        lines += _update_lines(self.others, " (no security update)")
        lines += _update_lines(self.parts, " (component)")
        lines += _update_lines(self.locked, " (locked)")
        lines += _update_lines(self.python, " (newest of the index)")
        lines += [
            f"{suite}: `build.py lock --upgrade system` moves the lock" for suite in self.archives
        ]
        lines += self.not_asked
        lines += self.unknown
        lines += self.skipped
        if self.days is not None:
            noun = "day" if self.days == 1 else "days"
            lines.append(f"built {self.days} {noun} ago")
        lines.append(f"compared: {self.packages} packages of the distribution")
        return "\n".join(lines) + "\n"


def _update_lines(updates: Iterable[Update], note: str) -> list[str]:
    """Return a line for each update, with a note at its end.

    For example ``  openssl 3.0 -> 3.1 (locked)``.
    """
    lines = []
    for row in updates:
        installed = row.installed or "absent"
        lines.append(f"  {row.name} {installed} -> {row.update}{note}")
    return lines


def find_outdated(
    name: str, engine_name: str | None, facts: Facts, environment: Mapping[str, str]
) -> OutdatedReport:
    """Compare an image with its package archive, its package index, and today's lock of its target.

    The files of the image are read, and apt runs in a step on a base image of this project. Lines
    about the progress are printed.

    Args:
        name: A target, or an image of the engine.
        engine_name: The engine that has the image; ``None``: the first that answers.
        facts: The targets, and the distributions of bases.
        environment: The process's environment.

    Raises:
        UnknownNameError: The engine does not have the image, or it has no apt.
        BuildError: The engine cannot run a step.
        HostError: The archive or the index cannot be reached, or the archive is not signed.
    """
    engine = choose(engine_name, report=say)
    reference = find_image(name, engine, facts)
    image = image_in(engine, reference)
    image_name = image_named(image.labels.get(TITLE_LABEL, ""), facts)
    row = image_name.row if image_name else None
    settings = read_host_settings(environment)
    say(f"reading the files of {reference}")
    tree = read_tree(engine, reference, READ)
    foreign = read_foreign(tree, settings.apt.sources)
    if foreign is None:
        release = read_release(tree)
        raise UnknownNameError(
            f"{reference} has no apt: it is an image of"
            f" {release.get('PRETTY_NAME', 'an unknown distribution')}",
            hint="scan its bill of materials instead (docs/ship.md)",
        )
    updates = []
    others = []
    for change in CHANGE.finditer(upgrade_outside(foreign, settings, facts, engine)):
        if is_security(change):
            updates.append(_update(change))
        else:
            others.append(_update(change))
    release_name = foreign.release.get("ID", "") + foreign.release.get("VERSION_ID", "")
    base = facts.base_by_name.get(release_name)
    python, installed = installed_distributions(tree, image)
    lock = facts.locks.get(facts.name_of(row)) if row else None
    service = advisory_service(facts, environment)
    advisories: tuple[Advisory, ...] = ()
    unknown: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    if service:
        advisories, unknown = published_advisories(installed, service, settings)
    else:
        skipped = ("advisories about Python packages were not compared: no service is named",)
    wheel_index = row.wheel_index if row else ""
    return OutdatedReport(
        name=reference,
        identity=image.identifier,
        packages=foreign.packages,
        updates=tuple(updates),
        others=tuple(others),
        python=newest_distributions(python, installed, settings, wheel_index),
        locked=moved_distributions(installed, lock.packages if lock else ()),
        ended=ended_framework(row, installed, facts),
        advisories=advisories,
        parts=moved_components(tree.read(MANIFEST) or b"", image_name, facts),
        not_asked=describe_archives_not_asked(foreign, settings),
        unknown=unknown,
        skipped=skipped,
        archives=moved_archives(base, facts, settings) if base else (),
        days=days_since(image.created),
    )


def check_report(report: OutdatedReport, *, allow_ended: bool) -> None:
    """Refuse an image that lacks something, or that was not compared with everything.

    Args:
        report: The report, which the user has seen.
        allow_ended: Whether a framework without patches is accepted.

    Raises:
        OutdatedError: Something is missing.
        NotComparedError: Nothing is missing, but not everything could be compared.
    """
    missing = report.missing(allow_ended=allow_ended)
    if missing:
        raise OutdatedError(
            f"{report.name}: {'; '.join(missing)}",
            hint=(
                "`build.py lock --upgrade system` and a build bring updates of the distribution,"
                " `build.py lock --upgrade --only TARGET` those of Python packages; a framework"
                " without patches needs a newer target, or --allow-ended (docs/ship.md)"
            ),
            reported=True,
        )
    if report.unknown:
        raise NotComparedError(
            f"{report.name}: {'; '.join(report.unknown)}",
            hint=(
                f"repeat the command, or name another service with OSV's interface in {OSV};"
                " with an empty value none is asked"
            ),
            reported=True,
        )


def is_security(change: re.Match[str]) -> bool:
    """Return whether a suite of security updates has the newer version of a package.

    Args:
        change: A match of ``CHANGE``.
    """
    return "-security" in change["suites"].lower()


def moved_distributions(
    installed: Mapping[str, str], locked: Iterable[LockedPackage]
) -> tuple[Update, ...]:
    """Return the installed distributions that have another version in a lock.

    Packages that are only for builds are in no image.
    """
    updates = []
    for package in locked:
        version = installed.get(package.name)
        if version is not None and not package.build and version != package.version:
            updates.append(Update(name=package.name, installed=version, update=package.version))
    return tuple(updates)


def ended_framework(
    row: TargetRow | None, installed: Mapping[str, str], facts: Facts
) -> EndOfPatch | None:
    """Return the end of patches for the image's framework; ``None`` if patches still come.

    Args:
        row: The target of the image, whose framework it is; ``None``: the framework is the one
            that is installed.
        installed: The installed distributions: name to version.
        facts: The ends of patches.
    """
    if row is not None:
        return facts.end_of_patch(row)
    minor_by_framework = {}
    for framework, distribution in FRAMEWORKS.items():
        if distribution in installed:
            minor = ".".join(installed[distribution].split(".")[:2])
            minor_by_framework[framework] = minor
    for end in facts.ends:
        if minor_by_framework.get(end.framework) == end.version:
            return end
    return None


def _ended_words(end: EndOfPatch) -> str:
    """Return a part of a sentence: since when a framework has had no patches."""
    successor = f", take {end.successor} or newer" if end.successor else ""
    return f"{end.framework} {end.version} has had no patches since {end.date}{successor}"


def moved_components(manifest: bytes, named: ImageName | None, facts: Facts) -> tuple[Update, ...]:
    """Return the components with other versions in the image's manifest than in today's rows.

    Sorted by name; empty for an image without a manifest, or without a target.

    Args:
        manifest: The bytes of the manifest; ``b""`` without one.
        named: The target of the image, and the variant; ``None``: the image is of no target.
        facts: Today's rows.
    """
    versions = {}
    try:
        for name, row in json.loads(manifest)["components"].items():
            versions[str(name)] = str(row["version"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()
    request = request_of(named.row, named.variant, facts) if named else None
    if request is None:
        return ()
    today = {step.component: step.version for step in make_plan(request, facts).steps}
    updates = []
    for name, version in sorted(versions.items()):
        # A component that the target no longer has is not compared.
        todays_version = today.get(name, version)
        if todays_version != version:
            updates.append(Update(name=name, installed=version, update=todays_version))
    return tuple(updates)


def advisory_service(facts: Facts, environment: Mapping[str, str]) -> str:
    """Return the address of the service to ask; ``""``: none, because the environment says so.

    Args:
        facts: The service, if the environment names none.
        environment: The process's environment: ``OSV``.
    """
    address = facts.advisories[0].url if facts.advisories else ""
    return environment.get(OSV, address).rstrip("/")


def published_advisories(
    installed: Mapping[str, str], address: str, settings: HostSettings
) -> tuple[tuple[Advisory, ...], tuple[str, ...]]:
    """Ask a service for the advisories about distributions.

    Args:
        installed: Normalised name to version.
        address: The service.
        settings: This machine's proxies and CAs.

    Returns:
        The advisories, and no sentence; or no advisories, and a sentence why the service did not
        answer.
    """
    with Client(settings, limits=LIMITS) as client:
        try:
            return find_advisories(installed, address, client), ()
        except UnreachableError as error:
            return (), (f"advisories about Python packages were not compared: {error.message}",)


def installed_distributions(tree: ImageTree, image: BuiltImage) -> tuple[str, dict[str, str]]:
    """Return the version of the first Python on PATH, and its distributions: name to version.

    Both are read from the names of files. An image without Python has ``""`` and ``{}``.

    Args:
        tree: The files of the image.
        image: The image, whose environment has PATH.
    """
    files = JobFiles(tree=tree, image=image)
    program = files.program("python") or files.program("python3")
    python = _PYTHON.fullmatch(tree.real(program)) if program else None
    if python is None:
        return "", {}
    versions: dict[str, str] = {}
    for folder in _package_folders(tree, program, python["prefix"], python["version"]):
        for path in tree.below(folder):
            information = _INFORMATION.fullmatch(path.removeprefix(f"{tree.real(folder)}/"))
            if information is not None and _is_version(information["version"]):
                # Python imports from the first folder.
                name = canonicalize_name(information["name"])
                versions.setdefault(name, information["version"])
    return python["version"], versions


def _package_folders(tree: ImageTree, program: str, prefix: str, version: str) -> list[str]:
    """Return the folders that an interpreter imports distributions from, in its order.

    Args:
        tree: The files of the image.
        program: The path of the interpreter on PATH, which may be a link.
        prefix: The folder above ``bin`` of the interpreter's own file.
        version: ``MAJOR.MINOR``.
    """
    folders = []
    environment = program.rpartition("/bin/")[0]
    settings = tree.read(f"{environment}/pyvenv.cfg")
    if settings is not None:
        folders.append(f"{environment}/lib/python{version}/site-packages")
        if not _SYSTEM_PACKAGES.search(settings):
            return folders
    prefixes = ("/usr/local", "/usr") if prefix == "/usr" else (prefix,)
    for library in [f"{prefix}/lib" for prefix in prefixes]:
        folders.append(f"{library}/python{version}/site-packages")
        folders.append(f"{library}/python{version}/dist-packages")
        folders.append(f"{library}/python3/dist-packages")
    return folders


def _is_version(text: str) -> bool:
    """Return whether a text is a version of Python's form (PEP 440)."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def newest_distributions(
    python: str, installed: Mapping[str, str], settings: HostSettings, wheel_index: str
) -> tuple[Update, ...]:
    """Return the distributions of which an index has a newer release for this Python.

    Each distribution is one request; the progress is shown.

    Args:
        python: The Python's version, ``MAJOR.MINOR``.
        installed: Name to version.
        settings: This machine's indexes.
        wheel_index: The package index of the image's framework, where this machine names none.

    Raises:
        HostError: An index cannot be reached.
    """
    if not installed:
        return ()
    newer = []
    showing = DISPLAY.task("asking indexes", len(installed), "distributions", log=False)
    with showing as task, Client(settings, limits=LIMITS) as client:
        for name, version in sorted(installed.items()):
            try:
                newest = find_newest_release(name, python, settings.pip, wheel_index, client)
            except UnreachableError as error:
                raise HostError(
                    f"the package index of the image was not compared: {error.message}",
                    hint=(
                        "indexes are asked with this machine's settings of pip,"
                        " proxies and certificates"
                    ),
                ) from error
            if newest is not None and newest > Version(version):
                newer.append(Update(name=name, installed=version, update=str(newest)))
            task.advance()
    return tuple(newer)


def _update(change: re.Match[str]) -> Update:
    """Return the package and versions of a match of ``CHANGE``."""
    return Update(name=change["name"], installed=change["installed"] or "", update=change["update"])


def moved_archives(base: Base, facts: Facts, settings: HostSettings) -> tuple[str, ...]:
    """Return a sentence for each suite of a base with other packages than when it was locked.

    One sentence says why, if the archive could not be compared.
    """
    locked = facts.archives_of(base)
    if not locked:
        return ()
    with Client(settings, limits=LIMITS) as client:
        try:
            states = read_todays_states(base, settings, client, locked)
        except (LockError, HostError) as error:
            return (f"the lock of the archive was not compared: {error.message}",)
        today = {state.suite: state for state in states}
    moved = [state for state in locked if today.get(state.suite, state) != state]
    return tuple(describe_newer_state(state, today[state.suite]) for state in moved)


def days_since(created: str) -> int | None:
    """Return the whole days since an image's creation time.

    Args:
        created: ``2026-11-21T10:00:00.123456789Z``, or ``""``.

    Returns:
        The days; ``None`` without a time, and for the constant time of our own builds.
    """
    if not created:
        return None
    # The daemon writes nanoseconds, which Python does not read.
    then = datetime.fromisoformat(f"{created[:19]}+00:00")
    if then.timestamp() <= IMAGE_TIME:
        return None
    return max((datetime.now(UTC) - then).days, 0)
