"""Security updates of a distribution's archive: the real apt, against an archive on loopback."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lock.servers import Server, serving
from trainworks.cli.security_updates import security_updates
from trainworks.errors import HostError
from trainworks.facts.rows import Facts
from trainworks.host.apt import AptSettings, AptSource
from trainworks.host.pip import PipSettings
from trainworks.host.security import fixes_in, parse_index, security_pocket, security_sources
from trainworks.host.settings import HostSettings
from trainworks.vulnerabilities.advisory import Advisory
from trainworks.vulnerabilities.installed import Installed, read_purl

needs_apt = pytest.mark.skipif(
    not (shutil.which("apt-get") and shutil.which("dpkg-deb")), reason="NOT TESTED: no apt here to ask an archive with"
)

CHANGELOG = """\
foo (1.0-1+deb12u3) bookworm-security; urgency=high

  * Fix the fix of CVE-2000-0002.
  * CVE-2000-0003: another one. (Closes: #1000)

 -- A Person <person@example.org>  Fri, 20 Nov 2026 00:00:00 +0000

foo (1.0-1+deb12u2) bookworm-security; urgency=medium

  * Fix CVE-2000-0001 and CVE-2000-0002.

 -- A Person <person@example.org>  Thu, 19 Nov 2026 00:00:00 +0000

foo (1.0-1) unstable; urgency=low

  * Fix CVE-1999-0001.

 -- A Person <person@example.org>  Sat, 01 Jan 2000 00:00:00 +0000
"""


@dataclass(frozen=True)
class Archive:
    """An archive of security updates: its settings, and where its files lie."""

    settings: HostSettings
    server: Server

    def updates(self, facts: Facts, *purls: str) -> list[Advisory]:
        packages: list[Installed] = [read_purl(purl, purl, facts.databases) for purl in purls]
        lines = security_sources("bookworm", self.settings)
        names = {each.name for each in packages}
        with security_pocket("bookworm", "amd64", names, self.settings, lines) as pocket:
            return security_updates(packages, pocket)


def purl(name: str, version: str, source: str = "foo") -> str:
    return f"pkg:deb/debian/{name}@{version.replace('+', '%2B')}?arch=amd64&distro=debian-12&upstream={source}"


def make_package(folder: Path, name: str, version: str, changelog: str) -> bytes:
    """Return a Debian package of the source foo."""
    tree = folder / name
    (tree / "DEBIAN").mkdir(parents=True)
    control = (
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: A <a@example.org>\nDescription: a\n"
    )
    (tree / "DEBIAN" / "control").write_text(control, encoding="utf-8")
    if changelog:
        documents = tree / "usr/share/doc" / name
        documents.mkdir(parents=True)
        (documents / "changelog.Debian.gz").write_bytes(gzip.compress(changelog.encode(), mtime=0))
    target = folder / f"{name}.deb"
    subprocess.run(
        ("dpkg-deb", "--build", "--root-owner-group", str(tree), str(target)), check=True, capture_output=True
    )
    return target.read_bytes()


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    """Give an archive: libfoo1, foo-tools without a changelog of its own, and bar, whose changelog names no CVE."""
    with serving() as server:
        paragraphs = []
        for name, source, version, changelog in (
            ("libfoo1", "foo", "1.0-1+deb12u3", CHANGELOG),
            ("foo-tools", "foo", "1.0-1+deb12u3", ""),
            ("bar", "bar", "2.0-1+deb12u1", "bar (2.0-1+deb12u1) bookworm-security; urgency=high\n\n  * Safer.\n"),
        ):
            content = make_package(tmp_path, name, version, changelog)
            server.serve(f"/debian-security/pool/{name}.deb", content)
            paragraphs.append(
                f"Package: {name}\nSource: {source}\nVersion: {version}\nArchitecture: amd64\n"
                f"Filename: pool/{name}.deb\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n"
                f"Maintainer: A <a@example.org>\nDescription: a\n"
            )
        index = "\n".join(paragraphs).encode()
        place = "main/binary-amd64/Packages"
        release = (
            "Label: Debian-Security\nSuite: oldstable-security\nCodename: bookworm-security\n"
            "Date: Fri, 20 Nov 2026 00:12:41 UTC\nArchitectures: amd64\nComponents: main\n"
            f"SHA256:\n {hashlib.sha256(index).hexdigest()} {len(index)} {place}\n"
        )
        server.serve("/debian-security/dists/bookworm-security/Release", release.encode())
        server.serve(f"/debian-security/dists/bookworm-security/{place}", index)
        source_row = AptSource(
            uri=f"{server.url}/debian-security", suite="bookworm-security", components="main", trusted=True
        )
        # Whatever proxy this machine's apt has: loopback is reached without it.
        direct = ('Acquire::http::Proxy::127.0.0.1 "DIRECT";', 'Acquire::Retries "0";')
        apt = AptSettings(lines=direct, sources=(source_row,))
        yield Archive(HostSettings(pip=PipSettings(), apt=apt, suite="bookworm"), server)


@needs_apt
def test_an_update_is_known_by_the_cves_of_its_changelog(archive: Archive, facts: Facts) -> None:
    found = archive.updates(facts, purl("libfoo1", "1.0-1"), purl("foo-tools", "1.0-1"))
    fixed = {each.identifier: dict(each.affected[0].ranges[0])["fixed"] for each in found}
    # A fix that had to be corrected is good from its correction on; what was fixed before is not new.
    assert fixed == {
        "CVE-2000-0001": "1.0-1+deb12u2",
        "CVE-2000-0002": "1.0-1+deb12u3",
        "CVE-2000-0003": "1.0-1+deb12u3",
    }
    assert {(each.database, each.affected[0].name) for each in found} == {("bookworm-security", "foo")}


@needs_apt
def test_only_what_came_after_the_installed_version_is_new(archive: Archive, facts: Facts) -> None:
    found = archive.updates(facts, purl("libfoo1", "1.0-1+deb12u2"))
    assert [each.identifier for each in found] == ["CVE-2000-0002", "CVE-2000-0003"]
    assert archive.updates(facts, purl("libfoo1", "1.0-1+deb12u3"), purl("other", "1.0")) == []
    assert archive.updates(facts, purl("libfoo1", "1.1-1")) == []


@needs_apt
def test_an_update_that_names_no_cve_is_still_one(archive: Archive, facts: Facts) -> None:
    (found,) = archive.updates(facts, purl("bar", "2.0-1", "bar"))
    assert (found.identifier, found.summary) == (
        "bookworm-security:bar",
        "the security update bar 2.0-1+deb12u1, whose changelog names no CVE",
    )


@needs_apt
def test_a_package_with_other_bytes_than_the_index_says_is_not_read(archive: Archive, facts: Facts) -> None:
    archive.server.serve("/debian-security/pool/libfoo1.deb", b"something else")
    (found,) = archive.updates(facts, purl("libfoo1", "1.0-1"))
    assert found.identifier == "bookworm-security:foo"


@needs_apt
def test_an_archive_that_does_not_answer_is_an_error_in_apts_words(archive: Archive, facts: Facts) -> None:
    archive.server.answers.clear()
    with pytest.raises(HostError, match=r"the archive of bookworm-security cannot be read: .*404") as error:
        archive.updates(facts, purl("libfoo1", "1.0-1"))
    assert "127.0.0.1:" not in error.value.message.replace("[IP: 127.0.0.1", "")


def test_the_images_own_archives_serve_where_this_machine_has_none() -> None:
    settings = HostSettings(pip=PipSettings())
    own = AptSource(uri="http://archive.example/ubuntu", suite="jammy-security", components="main universe")
    assert security_sources("jammy", settings, (own,), debian=False) == (
        "deb http://archive.example/ubuntu jammy-security main",
    )
    assert security_sources("bookworm", settings, (own,)) == ()
    # Debian's archive has no suite of Ubuntu, whatever this machine calls its own.
    apt = AptSettings(sources=(replace(own, uri="http://archive.example/debian", suite="bookworm-security"),))
    debian = replace(settings, apt=apt, suite="bookworm")
    assert security_sources("trixie", debian) == ("deb http://archive.example/debian trixie-security main",)
    assert security_sources("jammy", debian, (own,), debian=False) == (
        "deb http://archive.example/ubuntu jammy-security main",
    )


def test_an_index_names_source_packages_where_they_have_other_names() -> None:
    first = "Package: libfoo1\nSource: foo (1.0-1)\nVersion: 1.0-1+b1\nFilename: a.deb\nSize: 7\n"
    text = f"{first}\nPackage: bar\nVersion: 2\n"
    one, two = parse_index(text, "http://archive.example/", {"libfoo1", "bar"})
    assert (one.source, one.source_version, one.version, one.size) == ("foo", "1.0-1", "1.0-1+b1", 7)
    assert one.address == "http://archive.example/a.deb"
    assert (two.source, two.source_version) == ("bar", "2")
    assert parse_index(text, "", {"foo"}) == []


def test_a_changelog_is_read_entry_by_entry() -> None:
    assert fixes_in(CHANGELOG) == [
        ("1.0-1+deb12u3", ("CVE-2000-0002", "CVE-2000-0003")),
        ("1.0-1+deb12u2", ("CVE-2000-0001", "CVE-2000-0002")),
        ("1.0-1", ("CVE-1999-0001",)),
    ]
    assert fixes_in("") == []
