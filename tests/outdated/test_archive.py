"""Security updates of a distribution's archive: the real apt, against a signed archive on loopback."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from lock.servers import Server, serving
from trainworks.errors import HostError, UnknownNameError
from trainworks.facts.rows import Facts
from trainworks.host.apt import AptSettings, AptSource
from trainworks.host.pip import PipSettings
from trainworks.host.security import fixes_in, is_older, newest, parse_index, security_sources
from trainworks.host.settings import HostSettings
from trainworks.inspect.outdated import (
    MissingUpdate,
    NewlyLocked,
    OutdatedReport,
    compare_with_archive,
    days_since,
    newly_locked,
    suite_of,
)
from trainworks.inspect.system_packages import DebianPackage, SystemPackages
from trainworks.plan.model import IMAGE_TIME

needs_apt = pytest.mark.skipif(
    not (shutil.which("apt-get") and shutil.which("dpkg-deb") and shutil.which("gpg")),
    reason="NOT TESTED: apt, dpkg-deb and gpg are needed to make an archive and to ask it",
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


SUITE = "/debian-security/dists/bookworm-security"


@dataclass(frozen=True)
class Archive:
    """An archive of security updates: its settings, and where its files lie."""

    settings: HostSettings
    server: Server

    def compare(self, *packages: DebianPackage) -> OutdatedReport:
        return compare_with_archive(image_with(*packages), "bookworm", self.settings)

    def missing(self, *packages: DebianPackage) -> tuple[MissingUpdate, ...]:
        return self.compare(*packages).updates


def image_with(*packages: DebianPackage, distribution: str = "debian", release: str = "12") -> SystemPackages:
    return SystemPackages(
        name="an/image:1", identity="sha256:0", distribution=distribution, release=release, packages=packages
    )


def package(name: str, version: str, source_version: str = "") -> DebianPackage:
    return DebianPackage(name=name, version=version, source_version=source_version or version, architecture="amd64")


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


@pytest.fixture(scope="session")
def keys() -> Iterator[Path]:
    """Give a folder with a GnuPG home and `trusted.gpg`, its public key; apt reads it as another user."""
    # Short: the path of gpg-agent's socket has 108 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="keys-"))
    folder.chmod(0o755)
    (folder / "home").mkdir(mode=0o700)
    gpg(folder, "--passphrase", "", "--quick-generate-key", "archive@example.org", "ed25519", "sign", "never")
    gpg(folder, "--output", str(folder / "trusted.gpg"), "--export")
    yield folder
    subprocess.run(("gpgconf", "--homedir", str(folder / "home"), "--kill", "all"), check=False)
    shutil.rmtree(folder)


def gpg(folder: Path, *words: str) -> None:
    command = ("gpg", "--homedir", str(folder / "home"), "--batch", "--quiet", "--pinentry-mode", "loopback", *words)
    subprocess.run(command, check=True, capture_output=True)


def signed(folder: Path, text: str) -> bytes:
    """Return a text with a signature around it, as `InRelease` has it."""
    plain, target = folder / "Release", folder / "InRelease"
    plain.write_text(text, encoding="utf-8")
    gpg(folder, "--yes", "--output", str(target), "--clearsign", str(plain))
    return target.read_bytes()


@pytest.fixture
def archive(tmp_path: Path, keys: Path) -> Iterator[Archive]:
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
        server.serve(f"{SUITE}/InRelease", signed(keys, release))
        server.serve(f"{SUITE}/{place}", index)
        source_row = AptSource(uri=f"{server.url}/debian-security", suite="bookworm-security", components="main")
        lines = (
            # Whatever proxy this machine's apt has: loopback is reached without it.
            'Acquire::http::Proxy::127.0.0.1 "DIRECT";',
            'Acquire::Retries "0";',
            f'Dir::Etc::Trusted "{keys}/trusted.gpg";',
        )
        apt = AptSettings(lines=lines, sources=(source_row,))
        yield Archive(HostSettings(pip=PipSettings(), apt=apt, suite="bookworm"), server)


@needs_apt
def test_a_missing_update_names_what_was_fixed_since(archive: Archive) -> None:
    report = archive.compare(package("libfoo1", "1.0-1"), package("foo-tools", "1.0-1"), package("other", "1.0"))
    assert report.updates == (
        MissingUpdate(
            source="foo",
            installed="1.0-1",
            update="1.0-1+deb12u3",
            packages=("foo-tools", "libfoo1"),
            cves=("CVE-2000-0001", "CVE-2000-0002", "CVE-2000-0003"),
        ),
    )
    assert report.as_text() == (
        "an/image:1: 1 security update missing\n"
        "  foo (foo-tools, libfoo1) 1.0-1 -> 1.0-1+deb12u3\n"
        "    CVE-2000-0001, CVE-2000-0002, CVE-2000-0003\n"
        "compared: 3 packages with bookworm-security, signed 2026-11-20 00:12 UTC\n"
    )


@needs_apt
def test_only_what_came_after_the_installed_version_is_named(archive: Archive) -> None:
    (found,) = archive.missing(package("libfoo1", "1.0-1+deb12u2"))
    assert found.cves == ("CVE-2000-0002", "CVE-2000-0003")


@needs_apt
@pytest.mark.parametrize(
    ("name", "version"), [("libfoo1", "1.0-1+deb12u3"), ("libfoo1", "1.1-1"), ("libfoo1", "1:0.1-1"), ("other", "1.0")]
)
def test_what_is_as_new_as_the_archive_misses_nothing(archive: Archive, name: str, version: str) -> None:
    report = archive.compare(package(name, version))
    assert report.updates == ()
    assert report.as_text().startswith("an/image:1: no security updates missing\n")


@needs_apt
def test_cves_are_told_by_the_version_of_the_source_package(archive: Archive) -> None:
    """A package may have another version than its source: libstdc++6 has an epoch, and gcc has none."""
    (found,) = archive.missing(package("libfoo1", "0.9-1", "1.0-1+deb12u2"))
    assert (found.installed, found.cves) == ("1.0-1+deb12u2", ("CVE-2000-0002", "CVE-2000-0003"))


@needs_apt
def test_an_update_that_names_no_cve_is_still_missing(archive: Archive) -> None:
    report = archive.compare(package("bar", "2.0-1"))
    assert [(each.source, each.update, each.cves) for each in report.updates] == [("bar", "2.0-1+deb12u1", ())]
    assert "bar 2.0-1 -> 2.0-1+deb12u1\n    the changelog names no CVE\n" in report.as_text()


@needs_apt
def test_a_package_with_other_bytes_than_the_index_says_is_not_read(archive: Archive) -> None:
    archive.server.serve("/debian-security/pool/libfoo1.deb", b"something else")
    (found,) = archive.missing(package("libfoo1", "1.0-1"))
    assert found.cves == ()


@needs_apt
def test_an_archive_that_does_not_answer_is_an_error_in_apts_words(archive: Archive) -> None:
    archive.server.answers.clear()
    with pytest.raises(
        HostError, match="'\\(address\\) bookworm-security Release' does not have a Release file"
    ) as error:
        archive.missing(package("libfoo1", "1.0-1"))
    assert "127.0.0.1:" not in error.value.message.replace("[IP: 127.0.0.1", "")


@needs_apt
def test_an_unsigned_archive_is_an_error_even_where_this_machine_trusts_it(archive: Archive, keys: Path) -> None:
    answers = archive.server.answers
    del answers[f"{SUITE}/InRelease"]
    archive.server.serve(f"{SUITE}/Release", (keys / "Release").read_bytes())
    (source,) = archive.settings.apt.sources
    apt = replace(
        archive.settings.apt,
        sources=(replace(source, trusted=True),),
        lines=(*archive.settings.apt.lines, 'Acquire::AllowInsecureRepositories "true";'),
    )
    trusting = replace(archive, settings=replace(archive.settings, apt=apt))
    with pytest.raises(HostError, match="is not signed"):
        trusting.missing(package("libfoo1", "1.0-1"))


@needs_apt
def test_an_archive_that_another_key_signed_is_an_error(archive: Archive) -> None:
    lines = tuple(line for line in archive.settings.apt.lines if "Trusted" not in line)
    apt = replace(archive.settings.apt, lines=(*lines, 'Dir::Etc::Trusted "/dev/null";'))
    with pytest.raises(HostError, match="cannot read the archive of bookworm-security") as error:
        replace(archive, settings=replace(archive.settings, apt=apt)).missing(package("libfoo1", "1.0-1"))
    assert "NO_PUBKEY" in error.value.message or "not signed" in error.value.message


@needs_apt
def test_versions_are_ordered_as_dpkg_orders_them() -> None:
    assert is_older("1.0~rc1-1", "1.0-1")
    assert is_older("2.0-1", "1:0.1-1")
    assert not is_older("1.0-1", "1.0-1")
    assert newest(["1.0-1+deb12u2", "1.0-1+deb12u10", "1.0-1"]) == "1.0-1+deb12u10"
    with pytest.raises(HostError, match="cannot compare the versions"):
        is_older("not a version", "1.0")


def test_the_suite_follows_from_the_release(facts: Facts) -> None:
    one = package("libfoo1", "1.0-1")
    assert suite_of(image_with(one), facts) == "bookworm"
    assert suite_of(image_with(one, distribution="ubuntu", release="22.04"), facts) == "jammy"
    with pytest.raises(UnknownNameError, match=r"the archive of debian 99 is not known"):
        suite_of(image_with(one, release="99"), facts)


def test_the_images_own_archives_serve_where_this_machine_has_none() -> None:
    settings = HostSettings(pip=PipSettings())
    own = AptSource(uri="http://archive.example/ubuntu", suite="jammy-security", components="main universe")
    assert security_sources("jammy", settings, (own,), debian=False) == (
        "deb http://archive.example/ubuntu jammy-security main",
    )
    with pytest.raises(HostError, match="no archive of bookworm-security is configured"):
        security_sources("bookworm", settings, (own,))
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


def test_an_image_of_a_target_is_compared_with_todays_lock(facts: Facts) -> None:
    (name, lock) = next(iter(facts.locks.items()))
    installed = {each.name: each.version for each in lock.packages if not each.build}
    image = replace(image_with(), target=name, python=installed)
    assert newly_locked(image, facts) == ()
    changed = next(iter(installed))
    older = replace(image, python={**installed, changed: "0.1", "of-the-user": "1"})
    assert newly_locked(older, facts) == (NewlyLocked(name=changed, installed="0.1", locked=installed[changed]),)
    assert newly_locked(replace(older, target="my/train"), facts) == ()


def test_the_days_since_a_build_are_those_of_its_creation_time() -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1, hours=2)
    assert days_since(f"{yesterday:%Y-%m-%dT%H:%M:%S}.123456789Z") == 1
    assert days_since(f"{yesterday:%Y-%m-%dT%H:%M:%S}Z") == 1
    assert days_since("") is None
    constant = datetime.fromtimestamp(IMAGE_TIME, UTC)
    assert days_since(f"{constant:%Y-%m-%dT%H:%M:%S}Z") is None
