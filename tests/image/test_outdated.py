"""Test the changes that a rebuild would bring: apt on our own base, for the real `cpu` image.

Its own archives, and one on loopback.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from image.support import ROOT, BuiltByCommand
from lock.servers import Server, serving
from trainworks.build.apt_outside import upgrade_outside
from trainworks.build.outdated import CHANGE
from trainworks.engine.protocol import Engine
from trainworks.engine.tree import read_tree
from trainworks.errors import HostError
from trainworks.facts.load import load
from trainworks.host.apt import AptSettings, AptSource
from trainworks.host.foreign_apt import READ, read_foreign
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings

pytestmark = pytest.mark.engine

UNREACHABLE = 10
"""The exit status where the archive does not answer."""

PLACE = "main/binary-amd64/Packages"


def test_the_archives_and_the_index_are_asked_for_the_image(image: BuiltByCommand) -> None:
    words = ("outdated", image.report["name"], "--engine", image.engine.name, "--format", "json")
    command = (sys.executable, str(ROOT / "build.py"), *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode == UNREACHABLE:
        pytest.skip(f"NOT TESTED: the archive of bookworm-security does not answer: {done.stderr}")
    content = json.loads(done.stdout)
    # An image that is older than the newest update lacks that one, and says so by its exit status.
    lacks = content["updates"] or content["ended"] or content["advisories"]
    assert done.returncode == (18 if lacks else 0), done.stderr
    assert content["identity"] == image.report["identifier"]
    assert content["packages"] > 100


def gpg(home: Path, *words: str) -> None:
    command = (
        "gpg",
        "--homedir",
        str(home),
        "--batch",
        "--quiet",
        "--pinentry-mode",
        "loopback",
        *words,
    )
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def home() -> Iterator[Path]:
    """Give a GnuPG home with a key; the path of its agent's socket has 108 bytes at most."""
    folder = Path(tempfile.mkdtemp(prefix="keys-"))
    gpg(
        folder,
        "--passphrase",
        "",
        "--quick-generate-key",
        "archive@example.org",
        "ed25519",
        "sign",
        "never",
    )
    yield folder
    subprocess.run(("gpgconf", "--homedir", str(folder), "--kill", "all"), check=False)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def archive(home: Path) -> Iterator[Server]:
    """Give an archive of two suites: hostname 99 is a security update, gzip 99 is not."""
    with serving() as server:
        for suite, label, package in (
            ("bookworm-security", "Debian-Security", "hostname"),
            ("bookworm", "Debian", "gzip"),
        ):
            text = (
                f"Package: {package}\n"
                "Version: 99\n"
                "Architecture: amd64\n"
                f"Filename: pool/{package}.deb\n"
                "Size: 1\n"
                f"SHA256: {'0' * 64}\n"
                "Maintainer: A <a@example.org>\n"
                "Description: a\n"
            ).encode()
            release = home / "Release"
            release.write_text(
                f"Origin: Debian\nLabel: {label}\nSuite: old{suite}\nCodename: {suite}\n"
                "Date: Fri, 20 Nov 2026 00:12:41 UTC\nArchitectures: amd64\nComponents: main\n"
                f"SHA256:\n {hashlib.sha256(text).hexdigest()} {len(text)} {PLACE}\n"
            )
            gpg(home, "--yes", "--output", str(home / "InRelease"), "--clearsign", str(release))
            server.serve(f"/debian/dists/{suite}/InRelease", (home / "InRelease").read_bytes())
            server.serve(f"/debian/dists/{suite}/{PLACE}", text)
        yield server


@pytest.fixture
def trusting(docker_image: BuiltByCommand, home: Path, tmp_path: Path) -> Iterator[str]:
    """Give an image that has the archive's key."""
    gpg(home, "--output", str(tmp_path / "key.gpg"), "--export")
    (tmp_path / "Dockerfile").write_text(
        f"FROM {docker_image.reference}\nCOPY key.gpg /etc/apt/trusted.gpg.d/test.gpg\nUSER 65534\n"
    )
    (tmp_path / "key.gpg").chmod(0o644)
    tag = f"trainworks/test-outdated:{uuid.uuid4().hex[:8]}"
    subprocess.run(
        ("docker", "build", "--quiet", "--tag", tag, str(tmp_path)), check=True, capture_output=True
    )
    yield tag
    docker_image.engine.remove(tag)


def settings(server: Server, *, trusted: bool = False) -> HostSettings:
    """Return a machine that has the archive and no package index."""
    uri = f"{server.url}/debian"
    suites = ("trixie", "trixie-security")
    sources = tuple(
        AptSource(uri=uri, suite=suite, components="main", trusted=trusted) for suite in suites
    )
    lines = ('Acquire::http::Proxy::127.0.0.1 "DIRECT";', 'Acquire::Retries "0";')
    return HostSettings(
        pip=PipSettings(no_index=True),
        apt=AptSettings(lines=lines, sources=sources),
        suite="trixie",
    )


def ask(reference: str, suite: str, machine: HostSettings, engine: Engine) -> str:
    """Ask apt for an image, as one of another suite."""
    foreign = read_foreign(read_tree(engine, reference, READ), machine.apt.sources)
    assert foreign is not None
    foreign.release["VERSION_CODENAME"] = suite
    return upgrade_outside(foreign, machine, load(ROOT), engine)


def test_a_security_update_and_another_one_are_found(
    docker_image: BuiltByCommand, trusting: str, archive: Server
) -> None:
    changes_text = CHANGE.finditer(
        ask(trusting, "bookworm", settings(archive), docker_image.engine)
    )
    changes = {
        change["name"]: (change["update"], "-security" in change["suites"])
        for change in changes_text
    }
    assert changes == {"hostname": ("99", True), "gzip": ("99", False)}


def test_an_archive_that_a_stranger_signed_is_not_believed(
    docker_image: BuiltByCommand, archive: Server
) -> None:
    tag = docker_image.reference
    with pytest.raises(
        HostError, match="the package archive of the image was not compared: apt said"
    ):
        ask(tag, "bookworm", settings(archive, trusted=True), docker_image.engine)


def test_an_archive_that_has_a_suite_no_more_is_an_error(
    docker_image: BuiltByCommand, trusting: str, archive: Server
) -> None:
    with pytest.raises(HostError, match="apt said"):
        ask(trusting, "sid", settings(archive), docker_image.engine)
