"""Finds what an image lacks, by its files and what archives, indexes and advisories say today.

No program of the image runs.
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
from trainworks.errors import HostError, LockError, UnknownNameError
from trainworks.facts.rows import Base, EndOfPatch, Facts, LockedPackage, TargetRow
from trainworks.host import foreign_apt
from trainworks.host.advisories import Advisory, advisories_of
from trainworks.host.archives import LIMITS, newer_than, todays_states
from trainworks.host.downloads import Client, UnreachableError
from trainworks.host.foreign_apt import read_foreign, release_of
from trainworks.host.index import newest_release
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

An empty one asks none.
"""

FRAMEWORKS = {"pytorch": "torch", "tensorflow": "tensorflow", "mxnet": "mxnet"}
"""The distribution of each framework: in an image of another maker, its version
says how old the framework is.
"""

READ = re.compile(rf"{foreign_apt.READ.pattern}|/.*/pyvenv\.cfg|{re.escape(MANIFEST)}")
"""The files of an image whose content is asked for."""

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
    """How an image compares with what its package archive, its package index
    and the lock of its target have today.

    Attributes:
        name: The image.
        identity: Its identifier.
        packages: How many packages of the distribution were compared.
        updates: What a suite of security updates has newer.
        others: What the other suites have newer, such as those of a point release.
        python: Python packages of which the index has a newer release.
        locked: Python packages in other versions than today's lock; empty for
            an image of no target.
        ended: The framework, where its project makes no more patches for its version.
        advisories: Published advisories about Python packages in their installed versions.
        parts: Components in other versions than today's rows; empty for an image of no target.
        archives: Each suite that has moved since it was locked, in words: what
            the next image brings.
        unknown: What could not be compared, a sentence each, and is no reason to fail.
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
    unknown: tuple[str, ...] = ()
    days: int | None = None

    def missing(self, *, allow_ended: bool = False) -> list[str]:
        """Return what makes the image one to replace, a part of a sentence each.

        Args:
            allow_ended: Whether a framework without patches is accepted, with
                the advisories about itself.
        """
        found = []
        if self.updates:
            found.append(
                f"security updates are missing: {', '.join(each.name for each in self.updates)}"
            )
        if self.ended is not None and not allow_ended:
            found.append(_ended_words(self.ended))
        accepted = FRAMEWORKS.get(self.ended.framework, "") if self.ended and allow_ended else ""
        told = [
            f"{each.name} ({each.identifier})" for each in self.advisories if each.name != accepted
        ]
        if told:
            found.append(f"advisories are published about {', '.join(told)}")
        return found

    def as_values(self) -> dict[str, object]:
        """Return the report for programs."""
        return asdict(self)

    def as_text(self) -> str:
        """Return the report for people: a line for each package."""
        number = len(self.updates)
        first = [
            (
                f"{number or 'no'} security update{'' if number == 1 else 's'}"
                " of the distribution missing"
            )
        ]
        if self.ended is not None:
            first.append(_ended_words(self.ended))
        if self.advisories:
            count = len(self.advisories)
            first.append(
                f"{count} published advisor{'y' if count == 1 else 'ies'} about Python packages"
            )
        lines = [f"{self.name}: {'; '.join(first)}"]
        for advisory in self.advisories:
            fix = f"fixed in {advisory.fixed}" if advisory.fixed else "without a fix"
            words = f": {advisory.summary}" if advisory.summary else ""
            lines.append(
                f"  {advisory.name} {advisory.installed} {advisory.identifier}, {fix}{words}"
            )
        for rows, end in (
            (self.updates, ""),
            (self.others, " (no security update)"),
            (self.parts, " (component)"),
            (self.locked, " (locked)"),
            (self.python, " (newest of the index)"),
        ):
            lines += [
                f"  {each.name} {each.installed or 'absent'} -> {each.update}{end}" for each in rows
            ]
        lines += [
            f"{each}: `build.py lock --upgrade system` moves the lock" for each in self.archives
        ]
        lines += self.unknown
        if self.days is not None:
            lines.append(f"built {self.days} day{'' if self.days == 1 else 's'} ago")
        lines.append(f"compared: {self.packages} packages of the distribution")
        return "\n".join(lines) + "\n"


def find_outdated(
    name: str, engine_name: str | None, facts: Facts, environment: Mapping[str, str]
) -> OutdatedReport:
    """Compare an image with its package archive, its package index, and today's lock of its target.

    Args:
        name: A target, or an image of the engine.
        engine_name: Which engine has the image; ``None``: the first that answers.
        facts: The targets, and the distributions that bases stand on.

    Raises:
        UnknownNameError: The engine does not have the image, or it has no apt.
        BuildError: The engine cannot run a step.
        HostError: The archive or the index cannot be reached, or the archive is not signed.
    """
    engine = choose(engine_name, report=say)
    reference = find_image(name, engine, facts)
    image = image_in(engine, reference)
    named = image_named(image.labels.get(TITLE_LABEL, ""), facts)
    settings = read_host_settings(environment)
    say(f"reading the files of {reference}")
    tree = read_tree(engine, reference, READ)
    foreign = read_foreign(tree, settings.apt.sources)
    if foreign is None:
        release = release_of(tree)
        raise UnknownNameError(
            f"{reference} has no apt: it is an image of"
            f" {release.get('PRETTY_NAME', 'an unknown distribution')}",
            hint="scan its bill of materials instead (docs/ship.md)",
        )
    for sentence in foreign.refused:
        say(sentence)
    release_name = foreign.release.get("ID", "") + foreign.release.get("VERSION_ID", "")
    base = next((each for each in facts.bases if each.name == release_name), None)
    changes = [*CHANGE.finditer(upgrade_outside(foreign, settings, facts, engine))]
    python, installed = installed_distributions(tree, image)
    lock = facts.locks.get(facts.name_of(named.row)) if named else None
    advisories, unknown = published_advisories(installed, facts, settings, environment)
    return OutdatedReport(
        name=reference,
        identity=image.identifier,
        packages=foreign.packages,
        updates=tuple(_update(each) for each in changes if is_security(each)),
        others=tuple(_update(each) for each in changes if not is_security(each)),
        python=newest_distributions(
            python, installed, settings, named.row.wheel_index if named else ""
        ),
        locked=moved_distributions(installed, lock.packages if lock else ()),
        ended=ended_framework(named.row if named else None, installed, facts),
        advisories=advisories,
        parts=moved_components(tree.read(MANIFEST) or b"", named, facts),
        unknown=unknown,
        archives=moved_archives(base, facts, settings) if base else (),
        days=days_since(image.created),
    )


def is_security(change: re.Match[str]) -> bool:
    """Return whether a suite of security updates has the newer version."""
    return "-security" in change["suites"].lower()


def moved_distributions(
    installed: Mapping[str, str], locked: Iterable[LockedPackage]
) -> tuple[Update, ...]:
    """Return the installed distributions of which a lock has another version.

    What only builds is in no image.
    """
    return tuple(
        Update(name=each.name, installed=installed[each.name], update=each.version)
        for each in locked
        if not each.build and each.name in installed and installed[each.name] != each.version
    )


def ended_framework(
    row: TargetRow | None, installed: Mapping[str, str], facts: Facts
) -> EndOfPatch | None:
    """Return since when the image's framework gets no patches: that of its
    target, else the one that is installed.
    """
    if row is not None:
        return facts.end_of_patch(row)
    minors = {}
    for framework, distribution in FRAMEWORKS.items():
        if distribution in installed:
            minors[framework] = ".".join(installed[distribution].split(".")[:2])
    return next((end for end in facts.ends if minors.get(end.framework) == end.version), None)


def _ended_words(end: EndOfPatch) -> str:
    successor = f", take {end.successor} or newer" if end.successor else ""
    return f"{end.framework} {end.version} has had no patches since {end.date}{successor}"


def moved_components(manifest: bytes, named: ImageName | None, facts: Facts) -> tuple[Update, ...]:
    """Return the components that the image's manifest has in other versions
    than today's rows, by their names.
    """
    try:
        there = {
            str(name): str(each["version"])
            for name, each in json.loads(manifest)["components"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()
    request = request_of(named.row, named.variant, facts) if named else None
    if request is None:
        return ()
    today = {step.component: step.version for step in make_plan(request, facts).steps}
    return tuple(
        Update(name=name, installed=version, update=today[name])
        for name, version in sorted(there.items())
        if today.get(name, version) != version
    )


def published_advisories(
    installed: Mapping[str, str],
    facts: Facts,
    settings: HostSettings,
    environment: Mapping[str, str],
) -> tuple[tuple[Advisory, ...], tuple[str, ...]]:
    """Return the advisories about distributions, and why there are none where
    no service could be asked.
    """
    rows = [service.url for service in facts.advisories]
    address = environment.get(OSV, rows[0] if rows else "").rstrip("/")
    if not address:
        return (), ("advisories about Python packages were not compared: no service is named",)
    with Client(settings, limits=LIMITS) as client:
        try:
            return advisories_of(installed, address, client), ()
        except UnreachableError as error:
            sentence = f"advisories about Python packages were not compared: {error.message}"
            return (), (f"{sentence}; {OSV} names another service with OSV's interface",)


def installed_distributions(tree: ImageTree, image: BuiltImage) -> tuple[str, dict[str, str]]:
    """Return the version of the Python that is first on PATH, and what is
    installed for it: name to version.

    Both are read from the names of files. An image without Python has ``""`` and nothing.
    """
    files = JobFiles(tree=tree, image=image)
    program = files.program("python") or files.program("python3")
    named = _PYTHON.fullmatch(tree.real(program)) if program else None
    if named is None:
        return "", {}
    found: dict[str, str] = {}
    for folder in _package_folders(tree, program, named["prefix"], named["version"]):
        for path in tree.below(folder):
            each = _INFORMATION.fullmatch(path.removeprefix(f"{tree.real(folder)}/"))
            if each is not None and _is_version(each["version"]):
                # The first folder is the one that is imported from.
                found.setdefault(canonicalize_name(each["name"]), each["version"])
    return named["version"], found


def _package_folders(tree: ImageTree, program: str, prefix: str, version: str) -> list[str]:
    """Return the folders that an interpreter imports distributions from, first one first."""
    folders = []
    environment = program.rpartition("/bin/")[0]
    settings = tree.read(f"{environment}/pyvenv.cfg")
    if settings is not None:
        folders.append(f"{environment}/lib/python{version}/site-packages")
        if not re.search(
            rb"^include-system-site-packages *= *true", settings, re.MULTILINE | re.IGNORECASE
        ):
            return folders
    prefixes = ("/usr/local", "/usr") if prefix == "/usr" else (prefix,)
    for each in prefixes:
        folders += [
            f"{each}/lib/python{version}/site-packages",
            f"{each}/lib/python{version}/dist-packages",
        ]
        folders.append(f"{each}/lib/python3/dist-packages")
    return folders


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def newest_distributions(
    python: str, installed: Mapping[str, str], settings: HostSettings, wheel_index: str
) -> tuple[Update, ...]:
    """Return the distributions of which an index has a newer release for this Python.

    Args:
        python: The Python's version, ``MAJOR.MINOR``.
        installed: Name to version.
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
                newest = newest_release(name, python, settings.pip, wheel_index, client)
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
    return Update(name=change["name"], installed=change["installed"] or "", update=change["update"])


def moved_archives(base: Base, facts: Facts, settings: HostSettings) -> tuple[str, ...]:
    """Return the suites of a base whose packages are others than when they were
    locked, a sentence each.
    """
    locked = facts.archives_of(base)
    if not locked:
        return ()
    with Client(settings, limits=LIMITS) as client:
        try:
            today = {each.suite: each for each in todays_states(base, settings, client, locked)}
        except (LockError, HostError) as error:
            return (f"the lock of the archive was not compared: {error.message}",)
    return tuple(
        newer_than(each, today[each.suite])
        for each in locked
        if today.get(each.suite, each) != each
    )


def days_since(created: str) -> int | None:
    """Return the whole days since an image's creation time.

    None without one, and for the constant of rebuilds.
    """
    if not created:
        return None
    # The daemon writes nanoseconds, which Python does not read.
    then = datetime.fromisoformat(f"{created[:19]}+00:00")
    return None if then.timestamp() <= IMAGE_TIME else max((datetime.now(UTC) - then).days, 0)
