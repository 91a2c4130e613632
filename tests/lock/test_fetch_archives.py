"""``fetch-archives`` of the builder, against real indexes: archives are fetched
with a login, and none is run.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lock.servers import Answer, Request, Server, redirecting, serving, whole_file
from trainworks_testing.certificates import Authority

FETCH = Path(__file__).resolve().parents[2] / "templates" / "files" / "builder" / "fetch-archives"
USER, PASSWORD = "reader", "pa55word-of-the-index"
LOGIN = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
FILE = "canary_bird-1.0.tar.gz"


def source_archive(setup: str) -> bytes:
    """Return a source archive with this setup.py."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        info = tarfile.TarInfo("canary_bird-1.0/setup.py")
        info.size = len(setup.encode())
        tar.addfile(info, io.BytesIO(setup.encode()))
    return stream.getvalue()


SOURCE = source_archive(
    "import os, pathlib; pathlib.Path(os.environ['CANARY']).write_text('I was run')\n"
)


def private(answer: Answer) -> Answer:
    """Return an answer for requests with a login only."""

    def ask(request: Request) -> None:
        if request.headers.get("Authorization") == LOGIN:
            answer(request)
            return
        request.send_response(401)
        request.send_header("WWW-Authenticate", 'Basic realm="index"')
        request.end_headers()

    return ask


def fetch(
    folder: Path,
    settings: str,
    *,
    secrets: Mapping[str, str] | None = None,
    content: bytes = SOURCE,
) -> subprocess.CompletedProcess[str]:
    """Fetch the archive with these settings of pip; the result is in ``folder/result``."""
    (folder / "secrets").mkdir(exist_ok=True)
    (folder / "wheels").mkdir(exist_ok=True)
    for name, text in {
        "pip.conf": f"[global]\n{settings}\n",
        "timeout": "5\n",
        **(secrets or {}),
    }.items():
        (folder / "secrets" / name).write_text(text, encoding="utf-8")
    (folder / "list").write_text(
        f"canary-bird 1.0 {FILE} {hashlib.sha256(content).hexdigest()}\n", encoding="utf-8"
    )
    environment = {
        **os.environ,
        "FETCH_RUN": str(folder),
        "CANARY": str(folder / "canary"),
        "no_proxy": "127.0.0.1",
    }
    return subprocess.run(
        (sys.executable, FETCH, folder / "list", folder / "result"),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def index() -> Iterator[Server]:
    """Give a private index without TLS that has the archive."""
    with serving() as mine:
        page = (
            b'<a href="../../files/canary_bird-1.0-py3-none-any.whl">x</a> <a href="../../files/'
            + FILE.encode()
        )
        mine.answers["/simple/canary-bird/"] = private(whole_file(page + b'#sha256=0">y</a>'))
        mine.answers[f"/files/{FILE}"] = private(whole_file(SOURCE))
        yield mine


def test_a_login_of_netrc_and_nothing_of_the_archive_is_run(index: Server, tmp_path: Path) -> None:
    netrc = f"machine 127.0.0.1 login {USER} password {PASSWORD}\n"
    done = fetch(tmp_path, f"index-url = {index.url}/simple", secrets={"netrc": netrc})
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"canary-bird 1.0: {index.url}/files/{FILE}, verified\n"
    assert (tmp_path / "result" / FILE).read_bytes() == SOURCE
    assert not (tmp_path / "canary").exists()


def test_a_login_in_the_address_is_in_no_output(index: Server, tmp_path: Path) -> None:
    address = index.url.replace("://", f"://{USER}:{PASSWORD}@")
    done = fetch(tmp_path, f"index-url = {address}/simple")
    assert done.returncode == 0, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    del index.answers[f"/files/{FILE}"]
    done = fetch(tmp_path, f"index-url = {address}/simple")
    assert done.returncode == 1
    assert f"error: cannot download {FILE}: {index.url}/files/{FILE}: curl: (22)" in done.stderr
    assert PASSWORD not in done.stdout + done.stderr


def test_no_login_goes_along_to_another_host(index: Server, tmp_path: Path) -> None:
    with serving() as other:
        index.answers[f"/files/{FILE}"] = private(
            redirecting(f"{other.url}/blob".replace("127.0.0.1", "localhost"))
        )
        other.answers["/blob"] = whole_file(SOURCE)
        netrc = f"machine 127.0.0.1 login {USER} password {PASSWORD}\n"
        done = fetch(tmp_path, f"index-url = {index.url}/simple", secrets={"netrc": netrc})
        assert done.returncode == 0, done.stderr
        assert [seen.user for seen in other.seen] == [""]


def test_the_index_whose_file_has_the_hash_is_taken(index: Server, tmp_path: Path) -> None:
    with serving() as other:
        other.answers["/simple/canary-bird/"] = whole_file(f'<a href="{FILE}">another</a>'.encode())
        other.answers[f"/simple/canary-bird/{FILE}"] = whole_file(b"something else")
        address = index.url.replace("://", f"://{USER}:{PASSWORD}@")
        settings = (
            f"index-url = {other.url}/simple\nextra-index-url = {other.url}/absent {address}/simple"
        )
        done = fetch(tmp_path, settings)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "result" / FILE).read_bytes() == SOURCE
        done = fetch(
            tmp_path,
            f"index-url = {other.url}/simple\nfind-links = {other.url}/simple/canary-bird/",
        )
        assert done.returncode == 1
        assert "another sha256 than the lock's" in done.stderr


def test_a_local_copy_comes_first_if_it_has_the_hash(index: Server, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / FILE).write_bytes(SOURCE)
    done = fetch(tmp_path, f"index-url = {index.url}/simple")
    assert (done.returncode, done.stdout) == (0, "canary-bird 1.0: the local copy, verified\n")
    assert index.seen == []
    (tmp_path / "wheels" / FILE).write_bytes(b"spoiled")
    done = fetch(tmp_path, "no-index = true")
    assert f"cannot download {FILE}: no index has it" in done.stderr


def test_a_certificate_is_checked_with_the_build_s_own_bundle(
    authority: Authority, tmp_path: Path
) -> None:
    with serving(authority) as mine:
        mine.answers["/simple/canary-bird/"] = whole_file(f"<a href='/files/{FILE}'>x</a>".encode())
        mine.answers[f"/files/{FILE}"] = whole_file(SOURCE)
        settings = f"index-url = {mine.url}/simple"
        assert fetch(tmp_path, settings).returncode == 1
        bundle = authority.bundle.read_text(encoding="utf-8")
        assert fetch(tmp_path, settings, secrets={"ca.pem": bundle}).returncode == 0
        (tmp_path / "secrets" / "ca.pem").unlink()
        assert fetch(tmp_path, f"{settings}\ntrusted-host = 127.0.0.1").returncode == 0
