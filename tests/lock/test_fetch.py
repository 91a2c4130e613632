"""``templates/files/builder/fetch`` itself, against real servers with every
fault: only pinned bytes get through.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from lock.conftest import Repository
from lock.servers import (
    Server,
    dropping,
    dropping_without_ranges,
    failing,
    git_repositories,
    redirecting,
    serving,
    silent,
    trickling,
    whole_file,
)
from trainworks_testing.certificates import Authority

FETCH = Path(__file__).resolve().parents[2] / "templates" / "files" / "builder" / "fetch"
NOISE = random.Random(4).randbytes(300_000)


def archive(*members: tuple[str, bytes], mode: str = "gz") -> bytes:
    """Return a tar archive with these files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=f"w:{mode}") as tar:  # type: ignore[call-overload]
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def zipped(*members: tuple[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, content in members:
            file.writestr(name, content)
    return stream.getvalue()


METIS = archive(
    ("metis-5.1.0/configure", b"#!/bin/sh\n"),
    ("metis-5.1.0/GKlib/noise", NOISE),
    ("metis-5.1.0/COPYING", b"as you like\n"),
)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    status: int
    output: str
    errors: str
    folder: Path

    def one_error(self) -> str:
        """Return the one line of the error; nothing was left behind then."""
        assert self.status == 1
        assert self.errors.count("\n") == 1, self.errors
        assert list(self.folder.iterdir()) == []
        return self.errors


class Stage:
    """A build stage as the script sees it: the files below /run, and the folder of results."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.run_folder = folder / "run"
        self.folder = folder / "fetched"
        (self.run_folder / "secrets").mkdir(parents=True)
        (self.run_folder / "artifacts").mkdir()
        self.secret("ca.pem", authority.bundle.read_text(encoding="utf-8"))
        self.secret("mirror", "")
        self.secret("netrc", "")

    def secret(self, name: str, content: str) -> None:
        (self.run_folder / "secrets" / name).write_text(content, encoding="utf-8")

    def local(self, name: str, content: bytes) -> None:
        (self.run_folder / "artifacts" / name).write_bytes(content)

    def fetch(self, *lines: str, environment: Mapping[str, str] | None = None) -> Outcome:
        listing = self.run_folder / "artifacts.txt"
        listing.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        settings = {
            "PATH": os.environ["PATH"],
            "FETCH_RUN": str(self.run_folder),
            "FETCH_ATTEMPTS": "3",
            "FETCH_PAUSE": "0",
            "FETCH_TIMEOUT": "5",
            **(environment or {}),
        }
        done = subprocess.run(
            ("sh", str(FETCH), str(listing), str(self.folder)),
            env=settings,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        return Outcome(
            status=done.returncode, output=done.stdout, errors=done.stderr, folder=self.folder
        )


@pytest.fixture
def stage(tmp_path: Path, authority: Authority) -> Stage:
    return Stage(tmp_path, authority)


def metis(url: str, content: bytes = METIS) -> str:
    """Return the list's line for these bytes at this address."""
    return f"file metis 5.1.0 {url.rsplit('/', 1)[-1]} {url} {sha256(content)} {len(content)}"


def unpacked(stage: Stage) -> bool:
    return (stage.folder / "metis" / "GKlib" / "noise").read_bytes() == NOISE


# Downloads that go well.


def test_an_archive_is_unpacked_without_its_top_folder(stage: Stage, server: Server) -> None:
    done = stage.fetch(metis(server.serve("/metis-5.1.0.tar.gz", METIS)))
    assert (done.status, done.errors) == (0, "")
    assert done.output == f"metis 5.1.0: {server.url}/metis-5.1.0.tar.gz, verified\n"
    assert unpacked(stage)
    assert os.access(stage.folder / "metis" / "configure", os.X_OK)
    assert sorted(path.name for path in stage.folder.iterdir()) == ["licenses", "metis"]
    assert (
        stage.folder / "licenses/metis/SOURCE"
    ).read_text() == f"metis 5.1.0 {server.url}/metis-5.1.0.tar.gz\n"
    assert (stage.folder / "licenses/metis/COPYING").read_bytes() == b"as you like\n"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("a.tar.gz", archive(("top/in/file", b"1"), mode="gz")),
        ("a.tgz", archive(("top/in/file", b"1"), mode="gz")),
        ("a.tar.xz", archive(("top/in/file", b"1"), mode="xz")),
        ("a.tar.bz2", archive(("top/in/file", b"1"), mode="bz2")),
        ("a.zip", zipped(("top/in/file", b"1"))),
    ],
    ids=["tar.gz", "tgz", "tar.xz", "tar.bz2", "zip"],
)
def test_kinds_of_archives(stage: Stage, server: Server, file: str, content: bytes) -> None:
    done = stage.fetch(metis(server.serve(f"/{file}", content), content))
    assert done.errors == ""
    assert (stage.folder / "metis" / "in" / "file").read_bytes() == b"1"


@pytest.mark.parametrize(
    "names",
    [("one/file", "two/file"), ("file",), ("top/file", ".hidden"), (".hidden/file", "top/file")],
)
def test_only_a_single_top_folder_is_taken_off(
    stage: Stage, server: Server, names: tuple[str, ...]
) -> None:
    content = archive(*((name, b"1") for name in names))
    assert stage.fetch(metis(server.serve("/a.tar.gz", content), content)).errors == ""
    assert {
        str(path.relative_to(stage.folder / "metis")) for path in stage.folder.rglob("*file")
    } | {path.name for path in (stage.folder / "metis").glob(".hidden") if path.is_file()} == set(
        names
    )


def test_a_wheel_stays_a_file_under_its_own_name(stage: Stage, server: Server) -> None:
    name = "torch-1.10.0+cu113-cp38-cp38-linux_x86_64.whl"
    done = stage.fetch(
        f"file torch 1.10.0 {name} {server.serve(f'/{name}', b'wheel')} {sha256(b'wheel')} -"
    )
    assert done.errors == ""
    assert (stage.folder / "torch" / name).read_bytes() == b"wheel"


def test_a_second_run_replaces_the_first_ones_result(stage: Stage, server: Server) -> None:
    line = metis(server.serve("/metis-5.1.0.tar.gz", METIS))
    stage.fetch(line)
    (stage.folder / "metis" / "stale").touch()
    assert stage.fetch(line).status == 0
    assert not (stage.folder / "metis" / "stale").exists()


def test_a_local_copy_comes_first_and_asks_nobody(stage: Stage, server: Server) -> None:
    stage.local("metis-5.1.0.tar.gz", METIS)
    stage.secret("mirror", f"{server.url}/mirror\n")
    done = stage.fetch(metis(f"{server.url}/metis-5.1.0.tar.gz"))
    assert (done.status, done.output) == (
        0,
        "metis 5.1.0: the local copy metis-5.1.0.tar.gz, verified\n",
    )
    assert unpacked(stage)
    assert server.seen == []


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_mirror_is_asked_instead_of_the_origin(stage: Stage, server: Server, slash: str) -> None:
    server.serve("/mirror/metis-5.1.0.tar.gz", METIS)
    stage.secret("mirror", f"{server.url}/mirror{slash}\n")
    assert stage.fetch(metis("https://vendor.invalid/metis-5.1.0.tar.gz")).errors == ""
    assert unpacked(stage)


def test_a_plus_in_a_name_reaches_servers_that_take_it_for_a_space(
    stage: Stage, server: Server
) -> None:
    server.serve("/a+b.whl", b"wheel")
    stage.secret("mirror", server.url)
    assert (
        stage.fetch(
            f"file a 1 a+b.whl https://vendor.invalid/a%2Bb.whl {sha256(b'wheel')} 5"
        ).errors
        == ""
    )
    assert [request.path for request in server.seen] == ["/a%2Bb.whl"]


def test_a_dropped_connection_is_resumed(stage: Stage, server: Server) -> None:
    half = len(METIS) // 2 + 1
    done = stage.fetch(metis(server.serve("/metis-5.1.0.tar.gz", dropping(METIS, half))))
    assert done.errors == ""
    assert unpacked(stage)
    assert [request.range for request in server.seen] == ["", f"bytes={half}-"]


def test_a_server_that_cannot_resume_sends_everything_again(stage: Stage, server: Server) -> None:
    done = stage.fetch(
        metis(server.serve("/metis-5.1.0.tar.gz", dropping_without_ranges(METIS, 1000)))
    )
    assert done.errors == ""
    assert unpacked(stage)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(stage: Stage, server: Server, status: int) -> None:
    done = stage.fetch(
        metis(server.serve("/metis-5.1.0.tar.gz", failing(status, then=whole_file(METIS))))
    )
    assert done.errors == ""
    assert unpacked(stage)


def test_redirects_are_followed(stage: Stage, server: Server) -> None:
    server.serve("/elsewhere", METIS)
    done = stage.fetch(metis(server.serve("/metis-5.1.0.tar.gz", redirecting("/elsewhere"))))
    assert done.errors == ""
    assert unpacked(stage)


def test_credentials_come_from_netrc(stage: Stage, server: Server) -> None:
    stage.secret("netrc", "machine 127.0.0.1 login user password word\n")
    stage.fetch(metis(server.serve("/metis-5.1.0.tar.gz", METIS)))
    assert [request.user for request in server.seen] == ["Basic dXNlcjp3b3Jk"]


# Files that are refused: by name, before they are unpacked.


def wrong_bytes(error: str, content: bytes, received: bytes) -> bool:
    return (
        f"expected sha256 {sha256(content)}, {len(content)} bytes; found {sha256(received)},"
        f" {len(received)} bytes"
        in error
        and "is not what was pinned and was not unpacked" in error
    )


OTHER = archive(("metis-5.1.0/configure", b"#!/bin/sh\ncurl evil\n"))


def test_wrong_bytes_at_the_origin(stage: Stage, server: Server) -> None:
    url = server.serve("/metis-5.1.0.tar.gz", OTHER)
    error = stage.fetch(metis(url)).one_error()
    assert error.startswith(f"error: metis 5.1.0: {url} ")
    assert wrong_bytes(error, METIS, OTHER)
    assert "python build.py mirror DIR" in error


def test_one_flipped_bit(stage: Stage, server: Server) -> None:
    flipped = bytearray(METIS)
    flipped[len(flipped) // 2] ^= 1
    assert wrong_bytes(
        stage.fetch(metis(server.serve("/metis-5.1.0.tar.gz", bytes(flipped)))).one_error(),
        METIS,
        bytes(flipped),
    )


def test_wrong_bytes_of_a_mirror_are_not_fetched_elsewhere_instead(
    stage: Stage, server: Server
) -> None:
    origin = server.serve("/metis-5.1.0.tar.gz", METIS)
    server.serve("/mirror/metis-5.1.0.tar.gz", OTHER)
    stage.secret("mirror", f"{server.url}/mirror")
    error = stage.fetch(metis(origin)).one_error()
    assert wrong_bytes(error, METIS, OTHER)
    assert f"{server.url}/mirror/metis-5.1.0.tar.gz" in error
    assert "python build.py mirror DIR --only TARGET" in error
    assert {request.path for request in server.seen} == {"/mirror/metis-5.1.0.tar.gz"}


def test_wrong_bytes_of_a_local_copy_are_not_fetched_elsewhere_instead(
    stage: Stage, server: Server
) -> None:
    stage.local("metis-5.1.0.tar.gz", METIS[:-1])
    error = stage.fetch(metis(server.serve("/metis-5.1.0.tar.gz", METIS))).one_error()
    assert wrong_bytes(error, METIS, METIS[:-1])
    assert "the local copy metis-5.1.0.tar.gz" in error
    assert server.seen == []


def test_a_file_that_is_shorter_on_the_server(stage: Stage, server: Server) -> None:
    url = server.serve("/metis-5.1.0.tar.gz", METIS[:1000])
    assert wrong_bytes(stage.fetch(metis(url)).one_error(), METIS, METIS[:1000])


def test_a_connection_that_always_breaks(stage: Stage, server: Server) -> None:
    error = stage.fetch(
        metis(server.serve("/metis-5.1.0.tar.gz", dropping(METIS, 1000)))
    ).one_error()
    assert "(3 attempts): curl: (18)" in error
    assert [request.range for request in server.seen] == ["", "bytes=1000-", "bytes=2000-"]


def test_what_is_not_there_is_not_asked_for_again(stage: Stage, server: Server) -> None:
    error = stage.fetch(metis(f"{server.url}/metis-5.1.0.tar.gz")).one_error()
    assert error.startswith(
        f"error: metis 5.1.0: {server.url}/metis-5.1.0.tar.gz answers HTTP 404; "
    )
    assert len(server.seen) == 1


def test_what_a_mirror_lacks(stage: Stage, server: Server) -> None:
    origin = server.serve("/metis-5.1.0.tar.gz", METIS)
    stage.secret("mirror", f"{server.url}/mirror\nonly\n")
    error = stage.fetch(metis(origin)).one_error()
    assert f"{server.url}/mirror/metis-5.1.0.tar.gz answers HTTP 404; fill the mirror" in error
    assert [request.path for request in server.seen] == ["/mirror/metis-5.1.0.tar.gz"]


def test_what_a_mirror_lacks_comes_from_its_origin(stage: Stage, server: Server) -> None:
    origin = server.serve("/metis-5.1.0.tar.gz", METIS)
    stage.secret("mirror", f"{server.url}/mirror\n\n")
    done = stage.fetch(metis(origin))
    assert (done.status, done.output, done.errors) == (0, f"metis 5.1.0: {origin}, verified\n", "")
    assert [request.path for request in server.seen] == [
        "/mirror/metis-5.1.0.tar.gz",
        "/metis-5.1.0.tar.gz",
    ]
    assert unpacked(stage)


@pytest.mark.parametrize(
    "fault", [silent, lambda server: trickling(server, METIS)], ids=["silent", "slow"]
)
def test_a_server_that_is_dead_or_too_slow(
    stage: Stage, server: Server, fault: Callable[[Server], Callable[..., None]]
) -> None:
    url = server.serve("/metis-5.1.0.tar.gz", fault(server))
    done = stage.fetch(metis(url), environment={"FETCH_TIMEOUT": "1", "FETCH_ATTEMPTS": "2"})
    assert "(2 attempts): curl: (28) Operation too slow" in done.one_error()
    assert len(server.seen) == 2


def test_a_server_that_is_not_there(stage: Stage) -> None:
    with serving() as gone:
        pass
    error = stage.fetch(metis(f"{gone.url}/metis-5.1.0.tar.gz")).one_error()
    assert "(3 attempts): curl: (7)" in error


def test_the_time_out_of_this_machine_holds(stage: Stage, server: Server) -> None:
    stage.secret("timeout", "1\n")
    url = server.serve("/metis-5.1.0.tar.gz", silent(server))
    done = stage.fetch(metis(url), environment={"FETCH_TIMEOUT": "", "FETCH_ATTEMPTS": "1"})
    assert (
        "(28) Operation too slow. Less than 10000 bytes/sec transferred the last 1 seconds"
        in done.one_error()
    )


def test_a_certificate_that_nobody_trusts(stage: Stage, server: Server) -> None:
    stage.secret("ca.pem", "")
    error = stage.fetch(metis(server.serve("/metis-5.1.0.tar.gz", METIS))).one_error()
    assert "curl: (60)" in error
    assert server.seen == []


def test_no_redirect_leads_out_of_tls(stage: Stage, server: Server, plain_server: Server) -> None:
    address = plain_server.serve("/metis-5.1.0.tar.gz", METIS)
    error = stage.fetch(
        metis(server.serve("/metis-5.1.0.tar.gz", redirecting(address)))
    ).one_error()
    assert "cannot download " in error
    assert plain_server.seen == []


def test_the_password_of_a_mirror_is_never_shown(stage: Stage, plain_server: Server) -> None:
    address = plain_server.url.replace("://", "://user:word@")
    stage.secret("mirror", f"{address}\nonly\n")
    done = stage.fetch(metis("https://vendor.invalid/metis-5.1.0.tar.gz"))
    assert plain_server.url in done.one_error()
    plain_server.serve("/metis-5.1.0.tar.gz", METIS)
    good = stage.fetch(metis("https://vendor.invalid/metis-5.1.0.tar.gz"))
    assert good.status == 0
    assert "word" not in done.errors + done.output + good.output
    assert [request.user for request in plain_server.seen] == ["Basic dXNlcjp3b3Jk"] * 2


def test_the_whole_list_is_looked_at_before_anything_is_downloaded(
    stage: Stage, server: Server
) -> None:
    done = stage.fetch(
        metis(server.serve("/metis-5.1.0.tar.gz", METIS)),
        "file smp 1.15.0 smp.whl https://vendor.invalid/smp.whl - -",
        "file ../smp 1.15.0 smp.whl https://vendor.invalid/smp.whl - -",
        f"file smp 1 ../../etc/passwd https://vendor.invalid/smp.whl {'0' * 64} -",
        f"file smp 1 .netrc https://vendor.invalid/smp.whl {'0' * 64} -",
        "file smp 1 smp.whl https://vendor.invalid/smp.whl 123 -",
        "git gklib 1 gklib.bundle https://vendor.invalid/gklib v1 -",
        f"git gklib 1 gklib.bundle https://vendor.invalid/gklib v1 {'A' * 40}",
        f"hg gklib 1 gklib.bundle https://vendor.invalid/gklib v1 {'0' * 40}",
    )
    listing = f"{stage.run_folder}/artifacts.txt"
    assert done.status == 1
    assert re.sub(r"^error: ", "", done.errors, flags=re.MULTILINE).splitlines() == [
        (
            "smp 1.15.0: no sha256 is recorded for https://vendor.invalid/smp.whl, and unverified"
            " files are refused; record it: python build.py lock --only TARGET"
        ),
        f"../smp 1.15.0: {listing}: '../smp' is not a file name",
        f"smp 1: {listing}: '../../etc/passwd' is not a file name",
        f"smp 1: {listing}: '.netrc' is not a file name",
        f"smp 1: {listing}: '123' is not a hash",
        f"gklib 1: {listing}: '-' is not a hash",
        f"gklib 1: {listing}: '{'A' * 40}' is not a hash",
        f"gklib 1: {listing}: a line begins with hg, which is neither file nor git",
    ]
    assert server.seen == []


def test_all_that_cannot_be_had_is_said_at_once(stage: Stage, server: Server) -> None:
    good = server.serve("/good.tar.gz", METIS)
    done = stage.fetch(
        metis(f"{server.url}/first.tar.gz"),
        metis(good),
        metis(f"{server.url}/last.tar.gz").replace("metis 5.1.0", "gklib 1"),
    )
    assert done.status == 1
    assert [line.split(";")[0] for line in done.errors.splitlines()] == [
        f"error: metis 5.1.0: {server.url}/first.tar.gz answers HTTP 404",
        f"error: gklib 1: {server.url}/last.tar.gz answers HTTP 404",
    ]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("a.tar.gz", archive(("top/file", b"1"), ("top/../../outside", b"1"))),
        ("a.tar.gz", archive(("/outside", b"1"))),
        ("a.zip", zipped(("top/file", b"1"), ("../outside", b"1"))),
    ],
    ids=["above", "absolute", "above, zip"],
)
def test_an_archive_that_would_write_elsewhere(
    stage: Stage, server: Server, file: str, content: bytes
) -> None:
    error = stage.fetch(metis(server.serve(f"/{file}", content), content)).one_error()
    assert "is refused: it would write to" in error
    assert not list(stage.folder.parent.rglob("outside"))


def test_a_link_leads_no_member_outside(stage: Stage, server: Server, tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        link = tarfile.TarInfo("top/link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)
        member = tarfile.TarInfo("top/link/outside")
        tar.addfile(member, io.BytesIO())
    content = stream.getvalue()
    error = stage.fetch(metis(server.serve("/a.tar.gz", content), content)).one_error()
    assert "cannot be unpacked" in error
    assert not (tmp_path / "outside").exists()


def test_something_that_is_no_archive(stage: Stage, server: Server) -> None:
    error = stage.fetch(metis(server.serve("/a.tar.gz", b"<html>"), b"<html>")).one_error()
    assert "has the pinned bytes and cannot be unpacked: tar: " in error


# Git: the commit is the pin.


def gklib(url: str, commit: str, tag: str = "v1.0") -> str:
    return f"git gklib 1.0 gklib-{commit}.bundle {url} {tag} {commit}"


def bundle(repository: Repository, *revisions: str) -> bytes:
    command = ("git", "-C", str(repository.path), "bundle", "create", "--quiet", "-", *revisions)
    return subprocess.run(command, check=True, capture_output=True).stdout


def holds_the_commit(stage: Stage) -> bool:
    tree = stage.folder / "gklib"
    return (
        sorted(path.name for path in tree.iterdir()) == ["Makefile", "configure"]
        and (tree / "Makefile").read_text(encoding="utf-8") == "all: # 2\n"
        and os.access(tree / "configure", os.X_OK)
    )


@pytest.fixture
def git_url(server: Server, repository: Repository) -> str:
    server.answers["/git/"] = git_repositories(repository.path.parent, "/git/")
    return f"{server.url}/git/{repository.path.name}"


@pytest.mark.parametrize("tag", ["v1.0", "-"])
def test_a_commit_from_its_repository(
    stage: Stage, git_url: str, repository: Repository, tag: str
) -> None:
    done = stage.fetch(gklib(git_url, repository.commit, tag))
    assert (done.status, done.errors) == (0, "")
    assert done.output == f"gklib 1.0: {git_url}, verified\n"
    assert holds_the_commit(stage)


def test_a_commit_from_a_local_bundle(stage: Stage, repository: Repository) -> None:
    stage.local(f"gklib-{repository.commit}.bundle", bundle(repository, "refs/tags/v1.0"))
    assert stage.fetch(gklib("https://vendor.invalid/gklib", repository.commit)).errors == ""
    assert holds_the_commit(stage)


def test_a_commit_from_a_mirrors_bundle(
    stage: Stage, server: Server, repository: Repository
) -> None:
    server.serve(f"/mirror/gklib-{repository.commit}.bundle", bundle(repository, "refs/tags/v1.0"))
    stage.secret("mirror", f"{server.url}/mirror")
    assert stage.fetch(gklib("https://vendor.invalid/gklib", repository.commit)).errors == ""
    assert holds_the_commit(stage)


def test_a_tag_that_was_moved(stage: Stage, git_url: str, repository: Repository) -> None:
    error = stage.fetch(gklib(git_url, repository.newer)).one_error()
    assert f"expected commit {repository.newer}, found {repository.commit}" in error


def test_a_tag_that_is_gone(stage: Stage, git_url: str, repository: Repository) -> None:
    error = stage.fetch(gklib(git_url, repository.commit, "v9")).one_error()
    assert "cannot fetch refs/tags/v9 from " in error
    assert "fatal: couldn't find remote ref refs/tags/v9" in error


def test_a_bundle_without_the_commit(stage: Stage, repository: Repository) -> None:
    stage.local(f"gklib-{repository.newer}.bundle", bundle(repository, "refs/tags/v1.0"))
    error = stage.fetch(gklib("https://vendor.invalid/gklib", repository.newer)).one_error()
    assert (
        f"the local copy gklib-{repository.newer}.bundle has no commit {repository.newer}" in error
    )


@pytest.mark.parametrize("fault", ["truncated", "flipped", "rubbish"])
def test_a_bundle_that_is_broken(stage: Stage, repository: Repository, fault: str) -> None:
    good = bundle(repository, "refs/tags/v1.0")
    flipped = bytearray(good)
    flipped[-60] ^= 1
    content = {
        "truncated": good[:-30],
        "flipped": bytes(flipped),
        "rubbish": b"# v2 git rubbish\n",
    }[fault]
    stage.local(f"gklib-{repository.commit}.bundle", content)
    error = stage.fetch(gklib("https://vendor.invalid/gklib", repository.commit)).one_error()
    assert f"cannot read the local copy gklib-{repository.commit}.bundle: " in error


def test_a_repository_that_is_not_there(
    stage: Stage, server: Server, repository: Repository
) -> None:
    error = stage.fetch(gklib(f"{server.url}/git/nothing", repository.commit)).one_error()
    assert f"cannot fetch refs/tags/v1.0 from {server.url}/git/nothing: " in error
    assert "404" in error or "not found" in error


# The script itself.


def test_shellcheck_finds_nothing() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        (str(shellcheck), str(FETCH)), capture_output=True, text=True, check=False
    )
    assert done.stdout + done.stderr == ""


def test_called_wrongly(tmp_path: Path) -> None:
    for words in ((), ("list",), (str(tmp_path / "missing"), str(tmp_path))):
        done = subprocess.run(
            ("sh", str(FETCH), *words), capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (2, "usage: fetch LIST FOLDER\n")
