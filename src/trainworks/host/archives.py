"""Reads the states of a package archive's suites, and finds an archive with a locked state.

An archive signs the same packages again and again, so a state is identified by its list of
packages (``contents``), and dated by the time of the signature. apt checks the signatures when it
installs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from trainworks.errors import HostError, LockError
from trainworks.facts.rows import Base, LockedArchive
from trainworks.host.apt import AptSource, translate_suite
from trainworks.host.downloads import Client, Limits, UnreachableError, remove_credentials
from trainworks.host.settings import HostSettings

RECORD = "/usr/share/trainworks/archives"
"""File of an image with the states of its packages' archives: lines ``SUITE DATE CONTENTS``."""

LIMITS = Limits(attempts=1, timeout=20)
"""Limits of a request for a state: a build with another state is better than a long wait."""

DATE = "%Y-%m-%dT%H:%M:%SZ"
"""The form of a state's date, as ``strftime`` takes it: ``2026-11-21T10:00:00Z``."""

LATER = (0, 6, 12, 24, 48)
"""Hours after a signature at which a snapshot is searched: snapshots are made some time later."""


@dataclass(frozen=True, kw_only=True)
class ArchiveChoice:
    """An archive to build from.

    Attributes:
        settings: The settings of this machine, with that archive in the place of its own.
        differs: A sentence about each suite that is not in its locked state; empty
            if the archive is as locked.
    """

    settings: HostSettings
    differs: tuple[str, ...] = ()


def parse_release_file(text: str, states: Iterable[LockedArchive] = ()) -> LockedArchive:
    """Return the state that an ``InRelease`` file describes.

    Args:
        text: The text of the file.
        states: Known states. If one has the same packages, it is the result: the signature is
            newer, the state is not.

    Raises:
        HostError: The text is not that of an ``InRelease`` file.
    """
    head, _, lists = text.partition("\nSHA256:\n")
    fields = dict(re.findall(r"^([A-Za-z-]+): *(.+?)\s*$", head, re.MULTILINE))
    # The list ends at the first line that does not begin with a blank.
    indented = re.match(r"(?: .*\n)*", lists)
    sums = indented[0] if indented else ""
    # The sums of the other files, such as those of translations, change without the packages.
    packages = re.findall(r"^.*[ /]main/binary-[^/\n]*/Packages.*\n", sums, re.MULTILINE)
    try:
        signed = parsedate_to_datetime(fields["Date"]).astimezone(UTC)
        suite = fields["Codename"]
    except (KeyError, ValueError, OverflowError) as error:
        # OverflowError: a number in the date is too large.
        raise HostError(
            "not the InRelease file of a package archive: it has no Date or no Codename"
        ) from error
    state = LockedArchive(
        suite=suite,
        date=signed.strftime(DATE),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        contents=hashlib.sha256("".join(packages).encode()).hexdigest(),
    )
    for known_state in states:
        if (known_state.suite, known_state.contents) == (suite, state.contents):
            return known_state
    return state


def format_state(state: LockedArchive) -> str:
    """Return a state as a line of ``RECORD``.

    ``templates/files/system/install-packages`` writes the same.
    """
    return f"{state.suite} {state.date} {state.contents}\n"


def read_state(
    client: Client, uri: str, suite: str, states: Iterable[LockedArchive] = ()
) -> LockedArchive:
    """Read the state of a suite from an archive.

    Raises:
        UnreachableError: The archive does not answer, or does not have the suite.
        HostError: The answer is not an ``InRelease`` file.
    """
    address = f"{uri.rstrip('/')}/dists/{suite}/InRelease"
    response = client.get(address)
    if response.status_code != 200:
        raise UnreachableError(f"{remove_credentials(address)} answers HTTP {response.status_code}")
    return parse_release_file(response.content.decode(errors="replace"), states)


def read_todays_states(
    base: Base, settings: HostSettings, client: Client, states: Iterable[LockedArchive] = ()
) -> tuple[LockedArchive, ...]:
    """Read today's states of a base's archives: of this machine's own, else the newest snapshots.

    A suite that this machine's apt lacks is left out: nothing is installed from that suite.

    Args:
        base: The base with its suites.
        settings: This machine's archives.
        client: The client for the archives.
        states: Known states, as of ``parse_release_file``.

    Raises:
        UnreachableError, HostError: As ``read_state`` does.
    """
    source_by_suite = _own_sources(base, settings)
    now = datetime.now(UTC)
    todays = []
    for suite in base.archives:
        if suite in source_by_suite:
            todays.append(read_state(client, source_by_suite[suite].uri, suite, states))
        elif not source_by_suite:
            address = _make_snapshot_address(base, suite, now, settings)
            todays.append(read_state(client, address, suite, states))
    return tuple(todays)


def find_archive(
    base: Base, states: tuple[LockedArchive, ...], settings: HostSettings
) -> ArchiveChoice:
    """Return the archive that a build reads: one in the locked states, else today's.

    First this machine's own archives are compared, then snapshots.

    Args:
        base: The base with its suites.
        states: The locked states of the base's suites; with none of them this
            machine's own archives are read, and no archive is asked.
        settings: This machine's archives.
    """
    if not states:
        return ArchiveChoice(settings=settings)
    with Client(settings, limits=LIMITS) as client:
        today: dict[str, LockedArchive] = {}
        missing_reason = "not in the archive of this machine"
        try:
            for todays_state in read_todays_states(base, settings, client, states):
                today[todays_state.suite] = todays_state
        except (LockError, HostError) as error:
            missing_reason = error.message
        moved_states = [state for state in states if today.get(state.suite) != state]
        if not moved_states:
            return ArchiveChoice(settings=settings)
        dated = _find_snapshots(base, states, settings, client)
    if dated is not None:
        return ArchiveChoice(settings=dated)
    differs = []
    for state in moved_states:
        if state.suite in today:
            differs.append(describe_newer_state(state, today[state.suite]))
        else:
            differs.append(f"{_describe_lock(state)}, {missing_reason}")
    return ArchiveChoice(settings=settings, differs=tuple(differs))


def describe_newer_state(locked: LockedArchive, today: LockedArchive) -> str:
    """Return a sentence: the archive of a suite has moved since it was locked.

    For example ``bookworm is locked as of DATE, the archive has it of DATE``.
    """
    return f"{_describe_lock(locked)}, the archive has it of {today.date}"


def _describe_lock(state: LockedArchive) -> str:
    """Return the first half of a sentence about a locked state."""
    return f"{state.suite} is locked as of {state.date}"


def _own_sources(base: Base, settings: HostSettings) -> Mapping[str, AptSource]:
    """Return this machine's archive of each suite of a base, by the base's names of suites.

    Empty on a machine that is not a Debian.
    """
    source_by_suite: dict[str, AptSource] = {}
    for source in settings.apt.sources:
        suite = translate_suite(source.suite, settings.suite, base.suite)
        if suite:
            source_by_suite.setdefault(suite, source)
    return source_by_suite


def find_snapshot_address(base: Base, suite: str, settings: HostSettings) -> str:
    """Return the address of the newest snapshot of a suite; nothing is asked.

    Raises:
        UnreachableError: The base and the settings have no address of snapshots.
    """
    return _make_snapshot_address(base, suite, datetime.now(UTC), settings)


def _make_snapshot_address(base: Base, suite: str, day: datetime, settings: HostSettings) -> str:
    """Return the address of a suite's snapshot at a time; raises as ``find_snapshot_address``."""
    pattern = settings.snapshot or base.snapshot
    if not pattern:
        raise UnreachableError(
            f"no archive of {suite} is configured, and no snapshot of it is known"
        )
    address = pattern.replace("{archive}", base.archives[suite])
    return address.replace("{date}", day.strftime("%Y%m%dT%H%M%SZ"))


def _find_snapshots(
    base: Base, states: tuple[LockedArchive, ...], settings: HostSettings, client: Client
) -> HostSettings | None:
    """Return settings with snapshots of the locked states as the archives.

    ``None`` if the state of a suite is in no snapshot.
    """
    sources = []
    trusted = {suite: source.trusted for suite, source in _own_sources(base, settings).items()}
    for state in states:
        signed = datetime.strptime(state.date, DATE).replace(tzinfo=UTC)
        for hours in LATER:
            try:
                uri = _make_snapshot_address(
                    base, state.suite, signed + timedelta(hours=hours), settings
                )
                snapshot_state = read_state(client, uri, state.suite, states)
            except (LockError, HostError):
                # There may be no snapshot of this hour.
                continue
            if snapshot_state == state:
                source = AptSource(uri=uri, suite=state.suite, components="main", old=True)
                sources.append(replace(source, trusted=trusted.get(state.suite, False)))
                break
        else:
            return None
    return replace(settings, apt=replace(settings.apt, sources=tuple(sources)), suite=base.suite)
