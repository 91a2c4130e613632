"""Databases: files and folders, and servers with every fault a server can have."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lock.servers import Answer, Server, dropping, failing, serving, silent, trickling, whole
from trainworks.cli.advisories import FRESH_SECONDS, published, read_given
from trainworks.errors import LockError, OutputError
from trainworks.facts.rows import Database, Facts
from trainworks.host.downloads import Client, Limits
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from vulnerabilities.support import REAL, written, zipped

WANTED = frozenset({("PyPI", "torch"), ("PyPI", "requests"), ("Debian:12", "openssl")})
ZIP = zipped(REAL)
NOW = 2_000_000_000.0


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as mine:
        yield mine


@pytest.fixture
def client() -> Iterator[Client]:
    limits = Limits(attempts=2, pause=0, timeout=0.3)
    with Client(HostSettings(pip=PipSettings()), limits=limits) as mine:
        yield mine


@pytest.fixture
def row(facts: Facts, server: Server) -> Database:
    """Give the row of PyPI, as if it were published on the tests' server."""
    return replace(next(each for each in facts.databases if each.name == "PyPI"), url=f"{server.url}/PyPI/all.zip")


def as_zip(folder: Path) -> Path:
    path = folder / "all.zip"
    path.write_bytes(ZIP)
    return path


def as_file(folder: Path) -> Path:
    return written(folder / "one.json", REAL[0])


def as_folder(folder: Path) -> Path:
    (folder / "advisories" / "more").mkdir(parents=True)
    written(folder / "advisories" / "one.json", REAL[0])
    (folder / "advisories" / "more" / "all.zip").write_bytes(zipped(REAL[1:]))
    (folder / "advisories" / "README.md").write_text("not an advisory", encoding="utf-8")
    return folder / "advisories"


@pytest.mark.parametrize(("make", "number"), [(as_zip, 4), (as_file, 1), (as_folder, 4)])
def test_a_database_is_a_zip_a_file_or_a_folder(
    make: Callable[[Path], Path], number: int, client: Client, tmp_path: Path
) -> None:
    path = make(tmp_path)
    read = read_given(str(path), WANTED, client, tmp_path)
    assert (read.name, len(read.advisories), read.modified) == (path.name, number, "2026-02-03T04:05:06Z")
    assert read.counts == ({"PyPI": 1} if number == 1 else {"PyPI": 3, "Debian:12": 1})


def test_only_advisories_about_the_image_are_kept(client: Client, tmp_path: Path) -> None:
    read = read_given(str(as_zip(tmp_path)), {("PyPI", "torch")}, client, tmp_path)
    assert [each.identifier for each in read.advisories] == ["GHSA-53q9-r3pm-6pq6"]
    assert sum(read.counts.values()) == len(REAL)


def test_one_file_that_is_no_advisory_does_not_cost_the_others(client: Client, tmp_path: Path) -> None:
    odd = {"id": "A", "affected": [{"package": {"ecosystem": "PyPI", "name": "torch"}, "ranges": [{"events": 1}]}]}
    path = tmp_path / "all.zip"
    path.write_bytes(zipped([odd, *REAL]))
    read = read_given(str(path), WANTED, client, tmp_path)
    assert len(read.advisories) == len(REAL)
    assert read.unreadable.startswith("1 without an advisory in the OSV format, first all.zip: A.json: ")


def test_a_database_at_an_address(client: Client, server: Server, tmp_path: Path) -> None:
    address = server.serve("/all.zip", ZIP)
    assert len(read_given(address, WANTED, client, tmp_path).advisories) == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (ZIP[: len(ZIP) // 2], "is no whole zip"),
        (ZIP[:60] + b"\0\0\0\0" + ZIP[64:], "is no whole zip: (Bad CRC-32|Error|File name)"),
        (b"PK, and not a zip", "is no whole zip"),
        (b"<html>Sign in first</html>", "database: no JSON"),
        (b"[]", "database: not in the OSV format"),
        (b'{"id": "A"}', "there is no advisory in the OSV format in it"),
        (zipped([]), "there is no advisory in the OSV format in it"),
        (zipped([{"id": "A", "affected": [{"package": {"name": "a"}}]}]), r"A\.json: not in the OSV format"),
        (b'{"id": ' * 100_000, "database: no JSON"),
    ],
)
def test_what_is_no_database_is_said(content: bytes, words: str, client: Client, tmp_path: Path) -> None:
    path = tmp_path / "database"
    path.write_bytes(content)
    with pytest.raises(OutputError, match=words):
        read_given(str(path), WANTED, client, tmp_path)


def test_a_folder_that_is_not_there(client: Client, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="--database nowhere: no such file or folder") as error:
        read_given("nowhere", WANTED, client, tmp_path)
    assert "OSV format" in error.value.hint


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda _: failing(404), "HTTP 404"),
        (lambda _: failing(503), "HTTP 503"),
        (lambda _: dropping(ZIP, 100), r"\(2 attempts\): "),
        (silent, "Read timed out"),
        (lambda server: trickling(server, ZIP), "slower than"),
    ],
)
def test_a_server_that_does_not_give_it(
    fault: Callable[[Server], Answer], words: str, client: Client, server: Server, tmp_path: Path
) -> None:
    answer = fault(server)
    with pytest.raises(OutputError, match=words):
        read_given(server.serve("/all.zip", answer), WANTED, client, tmp_path)


def test_the_published_one_is_kept_for_a_day(row: Database, client: Client, server: Server, tmp_path: Path) -> None:
    said: list[str] = []
    server.serve("/PyPI/all.zip", ZIP)

    def ask(now: float) -> str:
        read, age = published(row, WANTED, client, tmp_path / "cache", now, said.append)
        assert len(read.advisories) == 4
        return age

    ask(time.time())
    (copy,) = (tmp_path / "cache").iterdir()
    os.utime(copy, (NOW, NOW))
    assert ask(NOW + 59) == "downloaded just now"
    assert ask(NOW + 3 * 3600) == "downloaded 3 hours ago"
    assert (len(server.seen), said) == (1, ["  downloading the advisories of PyPI"])
    ask(NOW + FRESH_SECONDS + 1)
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (failing(404), "HTTP 404"),
        (whole(b"<html>Sign in first</html>"), "gives no advisories: PyPI: no JSON"),
        (whole(ZIP[:-30]), "gives no advisories: pypi-"),
        (whole(zipped([])), "gives a zip without an advisory"),
        (dropping(ZIP, 100), "(2 attempts): "),
    ],
)
def test_an_old_copy_is_better_than_none_and_its_age_is_said(
    answer: Answer, words: str, row: Database, client: Client, server: Server, tmp_path: Path
) -> None:
    server.serve("/PyPI/all.zip", ZIP)
    published(row, WANTED, client, tmp_path, NOW, lambda _: None)
    (copy,) = tmp_path.iterdir()
    os.utime(copy, (NOW, NOW))
    server.serve("/PyPI/all.zip", answer)
    read, age = published(row, WANTED, client, tmp_path, NOW + 9 * 86400, lambda _: None)
    assert len(read.advisories) == 4
    assert age.startswith("downloaded 9 days ago; a newer one cannot be had: ")
    assert words in age
    assert copy.read_bytes() == ZIP


def test_without_a_copy_it_cannot_be_had(row: Database, client: Client, server: Server, tmp_path: Path) -> None:
    server.serve("/PyPI/all.zip", failing(404))
    with pytest.raises(LockError, match="HTTP 404"):
        published(row, WANTED, client, tmp_path, NOW, lambda _: None)


def test_a_password_in_an_address_is_in_no_report(client: Client, server: Server, tmp_path: Path) -> None:
    server.serve("/all.zip", ZIP)
    address = server.url.replace("//", "//me:secret@") + "/all.zip"
    assert "secret" not in json.dumps(read_given(address, WANTED, client, tmp_path).name)
    with pytest.raises(OutputError) as error:
        read_given(address.replace("all", "none"), WANTED, client, tmp_path)
    assert "secret" not in str(error.value)
