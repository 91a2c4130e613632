"""Reads which state the suites of a package archive are in, and finds an
archive that has a locked state.

An archive signs the same packages again and again, so a state is known by its list of packages
(``contents``), and the time of the signature says how old it is. Signatures are checked by apt,
when it installs.
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
from trainworks.host.apt import AptSource
from trainworks.host.downloads import Client, Limits, UnreachableError, without_credentials
from trainworks.host.settings import HostSettings

RECORD = "/usr/share/trainworks/archives"
"""File of an image: a line ``SUITE DATE CONTENTS`` for each state of an archive
that its packages came from.
"""

LIMITS = Limits(attempts=1, timeout=20)

DATE = "%Y-%m-%dT%H:%M:%SZ"

LATER = (0, 6, 12, 24, 48)
"""Hours after its signature at which a state is looked for: a snapshot of it is
made some time later.
"""


@dataclass(frozen=True, kw_only=True)
class Found:
    """An archive to build from.

    Attributes:
        settings: The settings of this machine, with that archive in the place of its own.
        differs: Each suite that is not in its locked state, in words; empty
            where the archive is as locked.
    """

    settings: HostSettings
    differs: tuple[str, ...] = ()


def state_of(text: str, states: Iterable[LockedArchive] = ()) -> LockedArchive:
    """Return the state that an ``InRelease`` file describes.

    Raises ``HostError`` for a text that is none.

    Args:
        text: The file.
        states: Known states; the one with the same packages is returned in the
            place of a newer signature of them.
    """
    head, _, lists = text.partition("\nSHA256:\n")
    fields = dict(re.findall(r"^([A-Za-z-]+): *(.+?)\s*$", head, re.MULTILINE))
    listed = re.match(r"(?: .*\n)*", lists)
    packages = re.findall(
        r"^.*[ /]main/binary-[^/\n]*/Packages.*\n", listed[0] if listed else "", re.MULTILINE
    )
    try:
        signed = parsedate_to_datetime(fields["Date"])
        suite = fields["Codename"]
    except (KeyError, ValueError) as error:
        raise HostError(
            "not the InRelease file of a package archive: it has no Date or no Codename"
        ) from error
    state = LockedArchive(
        suite=suite,
        date=signed.astimezone(UTC).strftime(DATE),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        contents=hashlib.sha256("".join(packages).encode()).hexdigest(),
    )
    return next(
        (each for each in states if (each.suite, each.contents) == (suite, state.contents)), state
    )


def line_of(state: LockedArchive) -> str:
    """Return a state as an image has it in ``RECORD``.

    ``templates/files/system/install-packages`` writes the same.
    """
    return f"{state.suite} {state.date} {state.contents}\n"


def read_state(
    client: Client, uri: str, suite: str, states: Iterable[LockedArchive] = ()
) -> LockedArchive:
    """Ask an archive for the state of a suite.

    Raises:
        UnreachableError: It does not answer, or does not have the suite.
        HostError: Its answer is not an ``InRelease`` file.
    """
    address = f"{uri.rstrip('/')}/dists/{suite}/InRelease"
    answer = client.get(address)
    if answer.status_code != 200:
        raise UnreachableError(f"{without_credentials(address)} answers HTTP {answer.status_code}")
    return state_of(answer.content.decode(errors="replace"), states)


def todays_states(
    base: Base, settings: HostSettings, client: Client, states: Iterable[LockedArchive] = ()
) -> tuple[LockedArchive, ...]:
    """Return the states in which the archives of a base are today: this
    machine's own, else the snapshot's newest.

    A suite that this machine's apt does not have is left out: nothing is installed from it.

    Raises:
        UnreachableError, HostError: As ``read_state`` does.
    """
    own = _own(base, settings)
    if own:
        return tuple(
            read_state(client, own[suite].uri, suite, states)
            for suite in base.archives
            if suite in own
        )
    now = datetime.now(UTC)
    return tuple(
        read_state(client, _snapshot(base, suite, now, settings), suite, states)
        for suite in base.archives
    )


def find_archive(base: Base, states: tuple[LockedArchive, ...], settings: HostSettings) -> Found:
    """Return the archive that a build reads: one in the locked states where one
    answers, else today's.

    Args:
        states: The locked states of the base's suites; with none of them this
            machine's own archives are read.
    """
    if not states:
        return Found(settings=settings)
    with Client(settings, limits=LIMITS) as client:
        try:
            today = {state.suite: state for state in todays_states(base, settings, client, states)}
        except (LockError, HostError) as error:
            today = {}
            missing: str = error.message
        else:
            missing = "not in the archive of this machine"
        other = [state for state in states if today.get(state.suite) != state]
        if not other:
            return Found(settings=settings)
        dated = _dated(base, states, settings, client)
    if dated is not None:
        return Found(settings=dated)
    return Found(
        settings=settings,
        differs=tuple(
            newer_than(each, today[each.suite])
            if each.suite in today
            else f"{_locked(each)}, {missing}"
            for each in other
        ),
    )


def newer_than(locked: LockedArchive, today: LockedArchive) -> str:
    """Return the sentence that an archive has moved since it was locked."""
    return f"{_locked(locked)}, the archive has it of {today.date}"


def _locked(state: LockedArchive) -> str:
    return f"{state.suite} is locked as of {state.date}"


def _own(base: Base, settings: HostSettings) -> Mapping[str, AptSource]:
    """Return this machine's archive of each suite of a base."""
    found: dict[str, AptSource] = {}
    for source in settings.apt.sources:
        if settings.suite and (
            source.suite == settings.suite or source.suite.startswith(f"{settings.suite}-")
        ):
            found.setdefault(base.suite + source.suite[len(settings.suite) :], source)
    return found


def snapshot_address(base: Base, suite: str, settings: HostSettings) -> str:
    """Return where the newest snapshot of a suite is.

    Raises ``UnreachableError`` where none is known.
    """
    return _snapshot(base, suite, datetime.now(UTC), settings)


def _snapshot(base: Base, suite: str, day: datetime, settings: HostSettings) -> str:
    pattern = settings.snapshot or base.snapshot
    if not pattern:
        raise UnreachableError(
            f"no archive of {suite} is configured, and no snapshot of it is known"
        )
    return pattern.replace("{archive}", base.archives[suite]).replace(
        "{date}", day.strftime("%Y%m%dT%H%M%SZ")
    )


def _dated(
    base: Base, states: tuple[LockedArchive, ...], settings: HostSettings, client: Client
) -> HostSettings | None:
    """Return settings with the archives of the locked states, ``None`` where
    one of them is nowhere.
    """
    sources = []
    trusted = {suite: source.trusted for suite, source in _own(base, settings).items()}
    for state in states:
        signed = datetime.strptime(state.date, DATE).replace(tzinfo=UTC)
        for hours in LATER:
            try:
                uri = _snapshot(base, state.suite, signed + timedelta(hours=hours), settings)
                found = read_state(client, uri, state.suite, states)
            except (LockError, HostError):
                continue
            if found == state:
                source = AptSource(uri=uri, suite=state.suite, components="main", old=True)
                sources.append(replace(source, trusted=trusted.get(state.suite, False)))
                break
        else:
            return None
    return replace(settings, apt=replace(settings.apt, sources=tuple(sources)), suite=base.suite)
