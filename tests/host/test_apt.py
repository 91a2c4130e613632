"""Test apt's settings: archives of both file formats, and the settings that an apt of another suite
gets.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from trainworks.host.apt import (
    KEPT_SETTINGS,
    AptSettings,
    AptSource,
    apt_configuration,
    make_source_lines,
    parse_deb822,
    parse_one_line,
    parse_suite,
    read_apt_settings,
)

DEBIAN = "http://mirror.example/debian"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"deb {DEBIAN} bookworm main contrib",
            [AptSource(uri=DEBIAN, suite="bookworm", components="main contrib")],
        ),
        (
            f"  deb\t[arch=amd64 trusted=yes]  {DEBIAN}\tbookworm  main # ours\n",
            [AptSource(uri=DEBIAN, suite="bookworm", components="main", trusted=True)],
        ),
        (f"# deb {DEBIAN} bookworm main\ndeb-src {DEBIAN} bookworm main\n\n", []),
        (
            "deb [signed-by=/k.gpg] http://mirror.example/flat ./\n",
            [
                AptSource(
                    uri="http://mirror.example/flat", suite="./", components="", signed_by="/k.gpg"
                )
            ],
        ),
        (
            f"deb {DEBIAN} bookworm main\ndeb {DEBIAN} bookworm-updates main\n",
            [
                AptSource(uri=DEBIAN, suite=suite, components="main")
                for suite in ("bookworm", "bookworm-updates")
            ],
        ),
    ],
)
def test_one_line_format(text: str, expected: list[AptSource]) -> None:
    assert parse_one_line(text) == expected


DEB822 = f"""\
# Our mirror.
Types: deb deb-src
URIs: {DEBIAN}
  http://second.example/debian
Suites: bookworm bookworm-updates
# Comments may stand between fields.
Components: main
 contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb-src
URIs: {DEBIAN}
Suites: sources-only
Components: main


Types: deb
URIs: {DEBIAN}
Suites: switched-off
Components: main
Enabled: no

types: deb
uris: http://security.example/debian-security
suites: bookworm-security
components: main
trusted: yes
"""


def test_deb822_format() -> None:
    pairs = [
        (uri, suite)
        for uri in (DEBIAN, "http://second.example/debian")
        for suite in ("", "-updates")
    ]
    assert parse_deb822(DEB822) == [
        *(
            AptSource(
                uri=uri,
                suite=f"bookworm{suite}",
                components="main contrib",
                signed_by="/usr/share/keyrings/debian-archive-keyring.gpg",
            )
            for uri, suite in pairs
        ),
        AptSource(
            uri="http://security.example/debian-security",
            suite="bookworm-security",
            components="main",
            trusted=True,
        ),
    ]


def test_both_formats_are_read_from_their_places(tmp_path: Path) -> None:
    folder = tmp_path / "etc" / "apt" / "sources.list.d"
    folder.mkdir(parents=True)
    (tmp_path / "etc" / "apt" / "sources.list").write_text(
        f"deb {DEBIAN} bookworm main\n", encoding="utf-8"
    )
    (folder / "more.list").write_text(f"deb {DEBIAN} bookworm-backports main\n", encoding="utf-8")
    (folder / "new.sources").write_text(DEB822, encoding="utf-8")
    suites = [source.suite for source in read_apt_settings(tmp_path).sources]
    assert suites[:3] == ["bookworm", "bookworm-backports", "bookworm"]
    assert suites[-1] == "bookworm-security"
    assert read_apt_settings(tmp_path / "nowhere").sources == ()


@pytest.mark.parametrize(
    ("suite", "own", "expected"),
    [
        (
            "trixie",
            "bookworm",
            (
                f"deb {DEBIAN} trixie main",
                f"deb {DEBIAN} trixie-updates main",
                f"deb {DEBIAN} trixie-backports main",
                "deb [trusted=yes] http://security.example/debian-security trixie-security main",
            ),
        ),
        ("bookworm", "", ()),
        ("bookworm", "noble", ()),
    ],
)
def test_archives_of_the_machine_serve_another_suite(
    suite: str, own: str, expected: tuple[str, ...]
) -> None:
    sources = (
        AptSource(uri=DEBIAN, suite="bookworm", components="main contrib"),
        AptSource(uri=DEBIAN, suite="bookworm", components="main"),
        AptSource(uri=DEBIAN, suite="bookworm-updates", components="main"),
        AptSource(uri=DEBIAN, suite="bookworm-backports", components="contrib"),
        AptSource(uri=DEBIAN, suite="bookworm-backports", components="main contrib"),
        AptSource(uri="http://vendor.example/apt", suite="stable", components="main"),
        AptSource(uri="http://vendor.example/bookwormish", suite="bookwormish", components="main"),
        AptSource(uri="http://vendor.example/apt", suite="bookworm-vendor", components="main"),
        AptSource(
            uri="http://security.example/debian-security",
            suite="bookworm-security",
            components="main",
            trusted=True,
        ),
    )
    assert make_source_lines(suite, sources, own) == expected


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("Acquire::http::Proxy", True),
        ("Acquire::http::Proxy::mirror.example", True),
        ("Acquire::https::Timeout", True),
        ("Acquire::https::mirror.example::Verify-Peer", True),
        ("Acquire::Retries", True),
        ("Acquire::http::proxy", True),
        ("Acquire::HTTP::Proxy", True),
        ("acquire::retries", True),
        ("Acquire::http::proxy-auto-detect", False),
        ("Acquire::http::Proxy-Auto-Detect", False),
        ("Acquire::https::CAInfo", False),
        ("APT::Update::Post-Invoke", False),
        ("Dir::State", False),
        ("DPkg::Post-Invoke", False),
    ],
)
def test_only_settings_that_say_how_to_reach_an_archive_are_kept(name: str, is_kept: bool) -> None:
    assert (KEPT_SETTINGS.fullmatch(name) is not None) is is_kept


def test_a_configuration_for_inside_the_build() -> None:
    settings = AptSettings(
        lines=('Acquire::http::Proxy "http://proxy.example:3128";', 'Acquire::Retries "3";')
    )
    assert apt_configuration(AptSettings()) == ""
    assert apt_configuration(
        settings, sources_path="/run/secrets/sources.list", ca_path="/run/secrets/ca.pem"
    ) == (
        'Acquire::http::Proxy "http://proxy.example:3128";\n'
        'Acquire::Retries "3";\n'
        'Dir::Etc::SourceList "/run/secrets/sources.list";\n'
        'Dir::Etc::SourceParts "-";\n'
        'Acquire::https::CAInfo "/run/secrets/ca.pem";\n'
    )


@pytest.mark.skipif(shutil.which("apt-config") is None, reason="this machine has no apt")
def test_settings_are_kept_in_each_case_that_apt_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        'Acquire { hTTp { pRoxy "http://proxy.example:3128/"; proxy-auto-detect "/bin/true"; };'
        ' retries "7"; };\n'
    )
    (tmp_path / "apt.conf").write_text(text, encoding="utf-8")
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    lines = [line.lower() for line in read_apt_settings(tmp_path).lines]
    assert 'acquire::http::proxy "http://proxy.example:3128/";' in lines
    assert 'acquire::retries "7";' in lines
    assert not any("auto-detect" in line for line in lines)


@pytest.mark.skipif(shutil.which("apt-config") is None, reason="this machine has no apt")
def test_apt_itself_understands_the_configuration(tmp_path: Path) -> None:
    settings = AptSettings(lines=('Acquire::http::Proxy::mirror.example "DIRECT";',))
    (tmp_path / "apt.conf").write_text(
        apt_configuration(settings, sources_path="/run/x", ca_path="/run/y")
    )
    argv = ["apt-config", "-c", str(tmp_path / "apt.conf"), "dump"]
    dump = subprocess.run(
        argv, capture_output=True, text=True, check=True, timeout=300
    ).stdout.splitlines()
    assert {
        'Acquire::http::Proxy::mirror.example "DIRECT";',
        'Dir::Etc::sourcelist "/run/x";',
        'Acquire::https::CAInfo "/run/y";',
    } <= set(dump)


@pytest.mark.parametrize(
    ("release", "suite"),
    [
        (
            'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_CODENAME=bookworm\nID=debian\n',
            "bookworm",
        ),
        ('ID="debian"\nVERSION_CODENAME="trixie"\n', "trixie"),
        ("ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\n", ""),
        ("ID=debian\n", ""),
        ("", ""),
    ],
)
def test_suite_of_this_machine(release: str, suite: str) -> None:
    assert parse_suite(release) == suite
