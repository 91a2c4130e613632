"""Finds what a rebuild of an image would bring: security updates of its distribution, and newer locked versions."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from trainworks.errors import HostError, LockError, UnknownNameError
from trainworks.facts.rows import Facts
from trainworks.host.archives import LIMITS, newer_than, todays_states
from trainworks.host.downloads import Client
from trainworks.host.security import (
    Candidate,
    SecurityPocket,
    fixes_in,
    is_older,
    newest,
    security_pocket,
    security_sources,
)
from trainworks.host.settings import HostSettings, read_host_settings
from trainworks.inspect.system_packages import DebianPackage, SystemPackages, read_system_packages
from trainworks.plan.model import IMAGE_TIME
from trainworks.plan.variants import image_named
from trainworks.terminal.output import say

WIDTH = 100
"""Columns of the report for people."""

INDENT = " " * 4


@dataclass(frozen=True, kw_only=True)
class MissingUpdate:
    """One security update that an image lacks.

    Attributes:
        source: The source package.
        installed: The installed version of the source package.
        update: Its version in the archive.
        packages: The installed packages that are older than the archive's.
        cves: What the changelog says was fixed since; empty where it names nothing or cannot be read.
    """

    source: str
    installed: str
    update: str
    packages: tuple[str, ...]
    cves: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NewlyLocked:
    """A Python package that the lock of the image's target has in another version today."""

    name: str
    installed: str
    locked: str


@dataclass(frozen=True, kw_only=True)
class OutdatedReport:
    """How an image compares with the security updates of its distribution, and with today's lock of its target.

    Attributes:
        name: The image, or what the bill of materials is about.
        identity: The image's identifier, or the serial number of the bill of materials.
        suite: The archive's suite, such as ``bookworm-security``.
        signed: When the distribution signed the suite's index.
        packages: How many packages were compared.
        updates: What is missing, by source package.
        days: Whole days since the build; None for a bill of materials, and for an image with a constant time.
        locked: Packages in other versions than today's lock; empty for an image of no target.
        archives: Each suite that has moved since it was locked, in words: what the next image brings.
    """

    name: str
    identity: str
    suite: str
    signed: datetime
    packages: int
    updates: tuple[MissingUpdate, ...]
    days: int | None = None
    locked: tuple[NewlyLocked, ...] = ()
    archives: tuple[str, ...] = ()

    def as_values(self) -> dict[str, object]:
        """Return the report for programs."""
        return {**asdict(self), "signed": self.signed.isoformat()}

    def as_text(self) -> str:
        """Return the report for people: a line for each missing update."""
        number = len(self.updates)
        found = f"{number or 'no'} security update{'' if number == 1 else 's'} missing"
        lines = [f"{self.name}: {found}"]
        for each in self.updates:
            others = ", ".join(name for name in each.packages if name != each.source)
            packages = f" ({others})" if others else ""
            fixes = ", ".join(each.cves) or "the changelog names no CVE"
            lines.append(f"  {each.source}{packages} {each.installed} -> {each.update}")
            lines += textwrap.wrap(
                fixes, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
            )
        lines += [f"  {each.name} {each.installed} -> {each.locked} (locked)" for each in self.locked]
        lines += [f"{each}: `build.py lock --upgrade system` moves the lock" for each in self.archives]
        if self.days is not None:
            lines.append(f"built {self.days} day{'' if self.days == 1 else 's'} ago")
        compared = f"{self.packages} package{'' if self.packages == 1 else 's'}"
        lines.append(f"compared: {compared} with {self.suite}, signed {self.signed:%Y-%m-%d %H:%M} UTC")
        return "\n".join(lines) + "\n"


def find_outdated(name: str, engine_name: str | None, facts: Facts, environment: Mapping[str, str]) -> OutdatedReport:
    """Compare an image with the security updates of its distribution, and with today's lock of its target.

    Args:
        name: A target, an image of the engine, or a CycloneDX file.
        engine_name: Which engine has the image; ``None``: the first that answers.
        facts: The targets, and the distributions that bases stand on.

    Raises:
        UnknownNameError: The image does not exist, or its distribution is not known.
        HostError: The archive cannot be reached or is not signed, or apt is not installed.
        ImageTestError, OutputError: The packages cannot be listed.
    """
    installed = read_system_packages(name, engine_name, facts)
    settings = read_host_settings(environment)
    suite = suite_of(installed, facts)
    report = compare_with_archive(installed, suite, settings)
    return replace(
        report,
        days=days_since(installed.created),
        locked=newly_locked(installed, facts),
        archives=moved_archives(suite, facts, settings),
    )


def moved_archives(suite: str, facts: Facts, settings: HostSettings) -> tuple[str, ...]:
    """Return the suites of a release whose packages are others than when they were locked, a sentence each."""
    base = next(base for base in facts.bases if base.suite == suite)
    locked = facts.archives_of(base)
    if not locked:
        return ()
    with Client(settings, limits=LIMITS) as client:
        try:
            today = {each.suite: each for each in todays_states(base, settings, client, locked)}
        except (LockError, HostError) as error:
            return (f"the lock of the archive was not compared: {error.message}",)
    return tuple(newer_than(each, today[each.suite]) for each in locked if today.get(each.suite, each) != each)


def days_since(created: str) -> int | None:
    """Return the whole days since an image's creation time; None without one, and for the constant of rebuilds."""
    if not created:
        return None
    # The daemon writes nanoseconds, which Python does not read.
    then = datetime.fromisoformat(f"{created[:19]}+00:00")
    return None if then.timestamp() <= IMAGE_TIME else max((datetime.now(UTC) - then).days, 0)


def newly_locked(installed: SystemPackages, facts: Facts) -> tuple[NewlyLocked, ...]:
    """Return the installed Python packages of which the target's lock has another version."""
    named = image_named(installed.target, facts)
    lock = facts.locks.get(facts.name_of(named.row)) if named else None
    return tuple(
        NewlyLocked(name=each.name, installed=installed.python[each.name], locked=each.version)
        for each in (lock.packages if lock else ())
        if not each.build and installed.python.get(each.name, each.version) != each.version
    )


def compare_with_archive(installed: SystemPackages, suite: str, settings: HostSettings) -> OutdatedReport:
    """Compare packages with the security updates of a suite.

    Raises:
        HostError: The archive cannot be reached or is not signed, or apt is not installed.
    """
    lines = security_sources(suite, settings, installed.sources, debian=installed.distribution == "debian")
    say(f"asking the archive of {suite} for security updates")
    names = {each.name for each in installed.packages}
    with security_pocket(suite, installed.architecture, names, settings, lines) as pocket:
        return OutdatedReport(
            name=installed.name,
            identity=installed.identity,
            suite=pocket.suite,
            signed=pocket.signed,
            packages=len(installed.packages),
            updates=missing_updates(installed.packages, pocket),
        )


def suite_of(installed: SystemPackages, facts: Facts) -> str:
    """Return the code name of a distribution's release, from the row of the base with its name and version.

    Raises:
        UnknownNameError: No base is of this release.
    """
    wanted = f"{installed.distribution}{installed.release}"
    suite = next((base.suite for base in facts.bases if base.name == wanted), "")
    if not suite:
        known = ", ".join(base.name for base in facts.bases if base.suite)
        raise UnknownNameError(
            f"{installed.name}: the archive of {installed.distribution} {installed.release} is not known",
            hint=f"images/bases.toml knows {known}",
        )
    return suite


def missing_updates(installed: Sequence[DebianPackage], pocket: SecurityPocket) -> tuple[MissingUpdate, ...]:
    """Return the updates of the archive that are newer than what is installed, by source package.

    Raises:
        HostError: A version cannot be read.
    """
    offered: dict[str, list[Candidate]] = {}
    for candidate in pocket.candidates:
        offered.setdefault(candidate.name, []).append(candidate)
    behind: dict[tuple[str, str], list[tuple[DebianPackage, Candidate]]] = {}
    for package in installed:
        of_name = {each.version: each for each in offered.get(package.name, ())}
        if not of_name:
            continue
        best = of_name[newest(tuple(of_name))]
        if is_older(package.version, best.version):
            behind.setdefault((best.source, package.source_version), []).append((package, best))
    return tuple(_missing(source, version, pairs, pocket) for (source, version), pairs in sorted(behind.items()))


def _missing(
    source: str, version: str, pairs: Sequence[tuple[DebianPackage, Candidate]], pocket: SecurityPocket
) -> MissingUpdate:
    # Packages of one source share a changelog; some have a link to another's. The smallest is the cheapest to read.
    candidates = sorted((each for _, each in pairs), key=lambda each: (each.size, each.name))
    changelog = next(filter(None, (pocket.changelog(each) for each in candidates)), "")
    cves = {name for fixed, names in fixes_in(changelog) if is_older(version, fixed) for name in names}
    return MissingUpdate(
        source=source,
        installed=version,
        update=newest([each.source_version for each in candidates]),
        packages=tuple(sorted({each.name for each, _ in pairs})),
        cves=tuple(sorted(cves, key=_cve_order)),
    )


def _cve_order(name: str) -> tuple[int, int]:
    _, year, number = name.split("-")
    return int(year), int(number)
