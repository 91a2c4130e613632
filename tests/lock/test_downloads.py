"""Downloads to this machine, against real servers with every fault."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lock.servers import (
    Request,
    Server,
    dropping,
    dropping_without_ranges,
    failing,
    redirecting,
    serving,
    silent,
    trickling,
    whole_file,
)
from trainworks.errors import LockError
from trainworks.host.downloads import Client, Content, Limits, UnreachableError, remove_credentials
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.inputs.sizes import request_file_sizes
from trainworks_testing.certificates import Authority

NOISE = random.Random(7).randbytes(500_000)
OTHER = random.Random(8).randbytes(500_000)
WANTED = hashlib.sha256(NOISE).hexdigest()
HALF = 250_000


@pytest.fixture
def client(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    # The CA must come from the settings, not from this machine's variables.
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    settings = HostSettings(pip=PipSettings(), ca=authority.bundle.read_bytes())
    with Client(settings, limits=Limits(attempts=3, pause=0, timeout=5)) as mine:
        yield mine


def impatient(authority: Authority) -> Client:
    settings = HostSettings(pip=PipSettings(), ca=authority.bundle.read_bytes())
    return Client(settings, limits=Limits(attempts=2, pause=0, timeout=0.3))


@pytest.mark.parametrize("sha256", ["", WANTED])
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(whole_file(NOISE), id="none"),
        pytest.param(dropping(NOISE, HALF), id="dropped"),
        pytest.param(dropping_without_ranges(NOISE, HALF), id="dropped, no ranges"),
        pytest.param(failing(503, then=whole_file(NOISE)), id="busy"),
        pytest.param(failing(429, then=whole_file(NOISE)), id="too many"),
    ],
)
def test_what_goes_well_in_the_end(
    client: Client, server: Server, tmp_path: Path, fault: Callable[[Request], None], sha256: str
) -> None:
    target = tmp_path / "file"
    content = client.download(server.serve("/file", fault), target, sha256=sha256)
    assert content == Content(sha256=WANTED, size=len(NOISE))
    assert target.read_bytes() == NOISE
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_redirects_are_followed(client: Client, server: Server, tmp_path: Path) -> None:
    server.serve("/there", NOISE)
    client.download(server.serve("/file", redirecting("/there")), tmp_path / "file", sha256=WANTED)


def test_no_redirect_leads_out_of_tls(
    client: Client, server: Server, plain_server: Server, tmp_path: Path
) -> None:
    address = plain_server.serve("/file", NOISE)
    with pytest.raises(UnreachableError, match="redirects to an address without TLS"):
        client.download(server.serve("/file", redirecting(address)), tmp_path / "file")
    assert plain_server.seen == []
    assert len(server.seen) == 1


def test_a_part_of_an_earlier_run_is_continued_where_the_hash_is_known(
    client: Client, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "file.part").write_bytes(NOISE[:HALF])
    client.download(server.serve("/file", NOISE), tmp_path / "file", sha256=WANTED)
    assert [request.range for request in server.seen] == [f"bytes={HALF}-"]


def test_a_part_of_an_earlier_run_is_not_trusted_where_no_hash_is_known(
    client: Client, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "file.part").write_bytes(OTHER[:HALF])
    assert client.download(server.serve("/file", NOISE), tmp_path / "file").sha256 == WANTED
    assert [request.range for request in server.seen] == [""]


@pytest.mark.parametrize("length", [HALF, len(OTHER), len(OTHER) + 5])
def test_a_part_of_another_file_costs_a_second_download_only(
    client: Client, server: Server, tmp_path: Path, length: int
) -> None:
    (tmp_path / "file.part").write_bytes((OTHER + b"12345")[:length])
    client.download(server.serve("/file", NOISE), tmp_path / "file", sha256=WANTED)
    assert (tmp_path / "file").read_bytes() == NOISE


def test_two_halves_of_two_files_are_never_joined(
    client: Client, server: Server, tmp_path: Path
) -> None:
    """The server breaks off, its file is replaced, and it would give the rest of the new one."""
    times = iter((1,))

    def replaced(request: Request) -> None:
        content, tag = (NOISE, '"old"') if next(times, None) else (OTHER, '"new"')
        same = request.headers.get("If-Range", tag) == tag
        range_header = request.headers.get("Range", "") if same else ""
        start = int(range_header.removeprefix("bytes=").split("-")[0]) if range_header else 0
        status = 206 if range_header else 200
        request.send_response(status)
        request.send_header("ETag", tag)
        request.send_header("Content-Length", str(len(content) - start))
        request.end_headers()
        rest = content[start : start + HALF] if tag == '"old"' else content[start:]
        request.wfile.write(rest)

    content = client.download(server.serve("/file", replaced), tmp_path / "file")
    assert content.sha256 == hashlib.sha256(OTHER).hexdigest()


def test_a_server_that_names_no_version_of_its_file_is_asked_for_all_of_it(
    client: Client, server: Server, tmp_path: Path
) -> None:
    def nameless(request: Request) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(NOISE)))
        request.end_headers()
        request.wfile.write(NOISE[:HALF])

    with pytest.raises(UnreachableError, match=r"3 attempts.*250000 "):
        client.download(server.serve("/file", nameless), tmp_path / "file")
    assert [request.range for request in server.seen] == ["", "", ""]


def test_wrong_bytes_are_not_kept(client: Client, server: Server, tmp_path: Path) -> None:
    with pytest.raises(LockError, match=f"expected sha256 {WANTED}, found sha256 .*, 500000 bytes"):
        client.download(server.serve("/file", OTHER), tmp_path / "file", sha256=WANTED)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_is_asked_for_once(
    client: Client, server: Server, tmp_path: Path
) -> None:
    with pytest.raises(UnreachableError, match="answers HTTP 404"):
        client.download(f"{server.url}/file", tmp_path / "file")
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    "fault", [silent, lambda server: trickling(server, NOISE)], ids=["silent", "slow"]
)
def test_a_server_that_is_dead_or_too_slow(
    authority: Authority,
    server: Server,
    tmp_path: Path,
    fault: Callable[[Server], Callable[[Request], None]],
) -> None:
    with (
        impatient(authority) as client,
        pytest.raises(UnreachableError, match=r"timed out|slower than 10000 bytes per second"),
    ):
        client.download(server.serve("/file", fault(server)), tmp_path / "file", sha256=WANTED)
    assert len(server.seen) == 2


def test_a_host_that_does_not_answer_is_not_asked_again(client: Client, tmp_path: Path) -> None:
    with serving() as gone:
        pass
    with pytest.raises(UnreachableError, match=r"cannot download .*: .*[Rr]efused"):
        client.download(f"{gone.url}/one", tmp_path / "one")
    with pytest.raises(UnreachableError, match=r"not tried, 127\.0\.0\.1:\d+ does not answer"):
        client.download(f"{gone.url}/two", tmp_path / "two")


def test_a_name_that_does_not_exist(client: Client, tmp_path: Path) -> None:
    with pytest.raises(
        UnreachableError, match=r"vendor\.invalid/file.*: cannot resolve vendor\.invalid \("
    ):
        client.download("https://vendor.invalid/file", tmp_path / "file")


def test_a_certificate_that_nobody_trusts(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    with (
        Client(HostSettings(pip=PipSettings()), limits=Limits(pause=0)) as client,
        pytest.raises(UnreachableError, match="certificate verify failed"),
    ):
        client.download(server.serve("/file", NOISE), tmp_path / "file")
    assert server.seen == []


def test_a_password_is_never_shown(client: Client, plain_server: Server, tmp_path: Path) -> None:
    address = plain_server.url.replace("://", "://user:word@")
    with pytest.raises(UnreachableError) as caught:
        client.download(f"{address}/file", tmp_path / "file")
    assert "word" not in str(caught.value)
    plain_server.serve("/file", NOISE)
    client.download(f"{address}/file", tmp_path / "file")
    assert plain_server.seen[-1].user == "Basic dXNlcjp3b3Jk"
    assert remove_credentials(f"x {address} y") == f"x {plain_server.url} y"


def test_credentials_come_from_netrc(
    client: Client, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password word\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(netrc))
    client.download(server.serve("/file", NOISE), tmp_path / "file")
    assert server.seen[0].user == "Basic dXNlcjp3b3Jk"


def test_sizes_as_servers_say_them_and_none_where_they_do_not(
    authority: Authority, tmp_path: Path
) -> None:
    local = tmp_path / "torch-1.whl"
    local.write_bytes(OTHER)
    settings = HostSettings(pip=PipSettings(), ca=authority.bundle.read_bytes())
    with serving(authority) as server:
        present = server.serve("/there.whl", NOISE)
        missing = f"{server.url}/missing.whl"
        sizes = request_file_sizes(
            [present, f"{present}#sha256={WANTED}", missing, local.as_uri()], settings
        )
        assert server.seen == [], "nothing was downloaded"
    assert sizes == {
        present: len(NOISE),
        f"{present}#sha256={WANTED}": len(NOISE),
        local.as_uri(): len(OTHER),
    }
