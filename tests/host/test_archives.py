"""Test the state of a package archive, and the place of a locked one: an archive on loopback,
without signatures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from lock.servers import Server, serving
from lock.trees import make_tree
from trainworks.errors import HostError
from trainworks.facts.load import load
from trainworks.facts.rows import Base, LockedArchive
from trainworks.host.apt import AptSettings, AptSource, make_source_lines
from trainworks.host.archives import find_archive, parse_release_file
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.inputs.lock_artifacts import LockRun, lock_archives

DAY = datetime(2026, 11, 1, 6, tzinfo=UTC)
SUITES = ("tiny", "tiny-updates")


def in_release(suite: str, day: datetime, packages: str, *, more: str = "") -> str:
    """Return the file of a suite.

    ``packages`` stands for the packages in it, ``more`` for those that no image installs.
    """
    lines = {
        "main/binary-amd64/Packages": packages,
        "main/binary-arm64/Packages.xz": packages,
        "contrib/binary-amd64/Packages": more,
        "main/Contents-amd64": more,
    }
    listed = "".join(
        f" {hashlib.sha256(text.encode()).hexdigest()} 1 {path}\n" for path, text in lines.items()
    )
    return (
        "-----BEGIN PGP SIGNED MESSAGE-----\n"
        "Hash: SHA256\n"
        "\n"
        "Suite: stable\n"
        f"Codename: {suite}\n"
        f"Date: {format_datetime(day.astimezone(UTC), usegmt=True)}\n"
        "MD5Sum:\n"
        " 0 1 main/binary-amd64/Packages\n"
        "SHA256:\n"
        f"{listed}-----BEGIN PGP SIGNATURE-----\n"
        "\n"
        "abc\n"
    )


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as mine:
        yield mine


@pytest.fixture
def base() -> Base:
    return Base(
        name="tiny",
        suite="tiny",
        version="1",
        glibc="2.36",
        python="3.11",
        image="tiny:1",
        source="the tests",
        bootstrap=True,
        archives={"tiny": "main", "tiny-updates": "updates"},
    )


def serve(
    server: Server, place: str, day: datetime, packages: str, *, more: str = ""
) -> tuple[LockedArchive, ...]:
    texts = {suite: in_release(suite, day, packages, more=more) for suite in SUITES}
    for suite, text in texts.items():
        server.serve(f"{place}/dists/{suite}/InRelease", text.encode())
    return tuple(parse_release_file(text) for text in texts.values())


def machine(server: Server, suites: tuple[str, ...] = SUITES) -> HostSettings:
    sources = tuple(
        AptSource(uri=f"{server.url}/today", suite=suite, components="main") for suite in suites
    )
    apt = AptSettings(sources=sources)
    snapshot = f"{server.url}/archive/{{archive}}/{{date}}"
    return HostSettings(pip=PipSettings(), apt=apt, suite="tiny", snapshot=snapshot)


def test_a_state_is_its_packages_and_not_its_signature() -> None:
    first = parse_release_file(in_release("tiny", DAY, "demo 1"))
    assert (first.suite, first.date) == ("tiny", "2026-11-01T06:00:00Z")
    later = in_release("tiny", DAY + timedelta(days=7), "demo 1", more="a game")
    assert parse_release_file(later).contents == first.contents
    assert parse_release_file(later, (first,)) == first
    assert (
        parse_release_file(in_release("tiny", DAY, "demo 2"), (first,)).contents != first.contents
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>Not found</html>",
        "Codename: tiny\nDate: yesterday\nSHA256:\n",
        "Codename: tiny\nDate: Fri, 31 Dec 9999 23:59:59 -1000\nSHA256:\n",
        "Codename: tiny\nDate: Wed, 21 Oct 2026 07:28:00 +99999999999999999\nSHA256:\n",
    ],
)
def test_what_is_no_release_file(text: str) -> None:
    with pytest.raises(HostError, match="not the InRelease file"):
        parse_release_file(text)


def test_an_archive_in_the_locked_state_is_read_as_it_is(server: Server, base: Base) -> None:
    states = serve(server, "/today", DAY, "demo 1")
    settings = machine(server)
    archive = find_archive(base, states, settings)
    assert (archive.settings, archive.differs) == (settings, ())
    assert not [seen for seen in server.seen if "/archive/" in seen.path]


@pytest.mark.parametrize("hours", [0, 6, 24])
def test_the_snapshot_of_the_locked_day_is_read_where_the_archive_has_moved(
    server: Server, base: Base, hours: int
) -> None:
    """A snapshot is made some time after the signature."""
    states = serve(server, "/today", DAY, "demo 1")
    day = (DAY + timedelta(hours=hours)).strftime("%Y%m%dT%H%M%SZ")
    for name in ("main", "updates"):
        serve(server, f"/archive/{name}/{day}", DAY, "demo 1")
    serve(server, "/today", DAY + timedelta(days=7), "demo 2")
    archive = find_archive(base, states, machine(server))
    assert archive.differs == ()
    lines = make_source_lines("tiny", archive.settings.apt.sources, archive.settings.suite)
    assert lines == (
        f"deb [check-valid-until=no] {server.url}/archive/main/{day} tiny main",
        f"deb [check-valid-until=no] {server.url}/archive/updates/{day} tiny-updates main",
    )


def test_what_is_nowhere_is_said_for_each_suite(server: Server, base: Base) -> None:
    states = serve(server, "/today", DAY, "demo 1")
    later = DAY + timedelta(days=7)
    server.serve("/today/dists/tiny/InRelease", in_release("tiny", later, "demo 2").encode())
    settings = machine(server)
    archive = find_archive(base, states, settings)
    assert archive.settings == settings
    assert archive.differs == (
        "tiny is locked as of 2026-11-01T06:00:00Z, the archive has it of 2026-11-08T06:00:00Z",
    )
    (missing,) = find_archive(
        base, (replace(states[1], contents="0" * 64),), machine(server, ("tiny",))
    ).differs
    assert (
        missing
        == "tiny-updates is locked as of 2026-11-01T06:00:00Z, not in the archive of this machine"
    )


def test_a_machine_without_apt_reads_the_snapshot(server: Server, base: Base) -> None:
    states = tuple(parse_release_file(in_release(suite, DAY, "demo 1")) for suite in SUITES)
    for name in ("main", "updates"):
        serve(server, f"/archive/{name}/20261101T060000Z", DAY, "demo 1")
    archive = find_archive(base, states, replace(machine(server), apt=AptSettings(), suite=""))
    assert (archive.differs, len(archive.settings.apt.sources)) == ((), 2)


def test_a_machine_without_any_archive_says_why(base: Base) -> None:
    states = tuple(parse_release_file(in_release(suite, DAY, "demo 1")) for suite in SUITES)
    bare = HostSettings(pip=PipSettings())
    assert [line.partition(", ")[2] for line in find_archive(base, states, bare).differs] == [
        "no archive of tiny is configured, and no snapshot of it is known"
    ] * 2


def test_without_a_lock_nobody_is_asked(server: Server, base: Base) -> None:
    settings = machine(server)
    assert find_archive(base, (), settings).settings == settings
    assert server.seen == []


def test_lock_records_the_states_keeps_them_and_moves_them_when_asked(
    server: Server, tmp_path: Path
) -> None:
    root = make_tree(tmp_path / "tree", sources="packages")
    bases = root / "images" / "bases.toml"
    row = 'suite = "bookworm"\n'
    bases.write_text(
        bases.read_text(encoding="utf-8")
        .replace(row, f'{row}archives = {{ tiny = "main", tiny-updates = "updates" }}\n')
        .replace(row, 'suite = "tiny"\n'),
        encoding="utf-8",
    )
    messages: list[str] = []

    def lock(*, upgrade: bool = False) -> tuple[LockedArchive, ...]:
        facts = load(root)
        run = LockRun(rows=facts.targets, facts=facts, root=root, report=messages.append)
        problems, suites = lock_archives(run, machine(server), upgrade=upgrade)
        assert problems == []
        locked = load(root).locked_archives
        assert suites == {
            archive.suite for archive in locked if archive not in facts.locked_archives
        }
        return locked

    states = serve(server, "/today", DAY, "demo 1")
    assert lock() == states
    assert messages == [f"  {state.suite} is locked as of {state.date}" for state in states]
    later = DAY + timedelta(days=7)
    serve(server, "/today", later, "demo 1")
    assert lock(upgrade=True) == states, "the same packages, signed again"
    newer = serve(server, "/today", later, "demo 2")
    assert lock() == states
    del messages[:]
    assert lock(upgrade=True) == newer
    assert messages == [
        f"  {state.suite} 2026-11-01T06:00:00Z -> 2026-11-08T06:00:00Z" for state in states
    ]
