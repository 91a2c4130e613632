"""Test which settings of an image an apt outside of it takes, and which not."""

from __future__ import annotations

import re

import pytest

from trainworks.engine.tree import ImageTree, TreeMember
from trainworks.host.apt import AptSettings, AptSource
from trainworks.host.foreign_apt import (
    READ,
    ForeignDebian,
    describe_archives_not_asked,
    read_foreign,
)
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings

STATUS = """\
Package: dpkg
Status: install ok installed
Architecture: arm64
Version: 1.21

Package: gone
Status: deinstall ok config-files
Version: 1
"""


def image(**files: str) -> ImageTree:
    """Return the files of an image; a name has ``__`` for each slash."""
    tree = ImageTree()
    for name, text in {"var__lib__dpkg__status": STATUS, **files}.items():
        path = "/" + name.replace("__", "/")
        while path not in tree.members:
            kind = (
                "folder"
                if tree.members.get(path) is None and path != "/" + name.replace("__", "/")
                else "file"
            )
            tree.members[path] = TreeMember(kind=kind, mode=0o644, owner=0)
            if kind == "file":
                tree.contents[path] = text.encode()
            path = path.rpartition("/")[0] or path
    return tree


def read(sources: str, **more: str) -> ForeignDebian:
    foreign = read_foreign(image(etc__apt__sources_list=sources, **more))
    assert foreign is not None
    return foreign


def tree_with(sources: str, ending: str = "list") -> ImageTree:
    tree = image()
    for folder in ("/etc", "/etc/apt", "/etc/apt/sources.list.d"):
        tree.members[folder] = TreeMember(kind="folder", mode=0o755, owner=0)
    path = f"/etc/apt/sources.list.d/a.{ending}"
    tree.members[path] = TreeMember(kind="file", mode=0o644, owner=0)
    tree.contents[path] = sources.encode()
    return tree


@pytest.mark.parametrize(
    ("line", "expected_line"),
    [
        (
            "deb http://archive.example.org/debian bookworm main",
            "deb http://archive.example.org/debian bookworm main\n",
        ),
        (
            "deb [trusted=yes allow-insecure=yes] https://a.example/x y main",
            "deb https://a.example/x y main\n",
        ),
        (
            "deb https://nvidia.example/cuda/x86_64/ /",
            "deb https://nvidia.example/cuda/x86_64/ /\n",
        ),
        ("deb-src http://archive.example.org/debian bookworm main", ""),
        ("deb file:/etc/secret bookworm main", ""),
        ("deb copy:/run/secrets bookworm main", ""),
        ("deb ssh://a.example/x bookworm main", ""),
        ("deb mirror+file:/run/secrets/apt.conf bookworm main", ""),
        ("deb http://127.0.0.1:18999/debian bookworm main", ""),
        ("deb http://localhost/debian bookworm main", ""),
        ("deb http://x.localhost/debian bookworm main", ""),
        ("deb http://169.254.169.254/latest bookworm main", ""),
        ("deb http://[::1]/debian bookworm main", ""),
        ("deb http://2130706433/debian bookworm main", ""),
        ("deb http://0x7f000001/debian bookworm main", ""),
        ("deb http://0x7f.1/debian bookworm main", ""),
        ("deb http://0xa9.0xfe.0xa9.0xfe/latest bookworm main", ""),
        ("deb http://169.0xfe.43518/latest bookworm main", ""),
        ("deb http://localhost./debian bookworm main", ""),
        ("deb http://127.1./debian bookworm main", ""),
        ("deb http://0x7f.example/x y main", "deb http://0x7f.example/x y main\n"),
        ("deb http://a.example/x bookworm main;Dir::Bin::methods", ""),
        ('deb http://a.example/x bookworm "main"', ""),
    ],
)
def test_only_public_archives_of_an_image_are_taken(line: str, expected_line: str) -> None:
    foreign = read_foreign(tree_with(f"{line}\n"))
    assert foreign is not None
    assert foreign.files["sources.list"].decode() == expected_line
    assert bool(foreign.refused) == (not expected_line and not line.startswith("deb-src"))


def test_an_archive_of_this_machine_may_be_in_its_own_network() -> None:
    own = [AptSource(uri="http://10.0.0.1/debian", suite="bookworm", components="main")]
    foreign = read_foreign(tree_with("deb http://10.0.0.1/other bookworm main\n"), own)
    assert foreign is not None
    assert foreign.files["sources.list"] == b"deb http://10.0.0.1/other bookworm main\n"


def test_a_password_in_an_address_is_not_shown() -> None:
    foreign = read_foreign(tree_with("deb ssh://me:word@a.example/x bookworm main\n"))
    assert foreign is not None
    assert "word" not in "".join(foreign.refused)


def test_keys_are_written_anew() -> None:
    block = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n -----END PGP PUBLIC KEY BLOCK-----"
    tree = tree_with(
        "Types: deb\n"
        "URIs: https://a.example/x\n"
        "Suites: y\n"
        "Components: main\n"
        "Signed-By:\n"
        f" {block}\n"
        "\n"
        "Types: deb\n"
        "URIs: https://b.example/x\n"
        "Suites: y\n"
        "Components: main\n"
        "Signed-By: /etc/apt/sources.list.d/a.sources\n",
        "sources",
    )
    foreign = read_foreign(tree)
    assert foreign is not None
    first, second = foreign.files["sources.list"].decode().splitlines()
    assert first.startswith("deb [signed-by=/run/foreign/keys/")
    assert first.endswith(".asc] https://a.example/x y main")
    assert second.startswith("deb [signed-by=/run/foreign/keys/")
    (armoured,) = (text for name, text in foreign.files.items() if name.endswith(".asc"))
    assert (
        armoured.decode()
        == "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nabc\n-----END PGP PUBLIC KEY BLOCK-----\n"
    )


def test_settings_of_an_image_are_not_taken() -> None:
    tree = tree_with("deb https://a.example/x y main\n")
    assert not READ.fullmatch("/etc/apt/apt.conf")
    assert not READ.fullmatch("/etc/apt/apt.conf.d/99evil")
    assert not READ.fullmatch("/etc/apt/auth.conf.d/login")
    foreign = read_foreign(tree)
    assert foreign is not None
    assert foreign.packages == 1
    assert 'APT::Architecture "arm64";' in foreign.files["apt.conf"].decode()


@pytest.mark.parametrize("architecture", ['x";Dir::Bin::methods::http "/evil', "..", "all", ""])
def test_an_architecture_cannot_be_a_setting(architecture: str) -> None:
    tree = image()
    tree.contents["/var/lib/dpkg/status"] = (
        f"Package: dpkg\nArchitecture: {architecture}\n".encode()
    )
    foreign = read_foreign(tree)
    assert foreign is not None
    assert re.search(
        r'^APT::Architecture "amd64";$', foreign.files["apt.conf"].decode(), re.MULTILINE
    )


@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        ("pin", True),
        ("debian-pin_2", True),
        ("cuda.repository.pref", True),
        ("pin.bak", False),
        ("cuda.pref.dpkg-old", False),
        (".hidden.pref", False),
        ("pin~", False),
    ],
)
def test_preferences_are_read_as_apt_reads_them(name: str, is_read: bool) -> None:
    pin = "Package: *\nPin: release a=stable\nPin-Priority: 900\n"
    foreign = read_foreign(image(**{f"etc__apt__preferences.d__{name}": pin}))
    assert foreign is not None
    assert (pin.encode() in foreign.files["preferences"]) is is_read


def test_an_image_without_dpkg_is_none() -> None:
    assert read_foreign(ImageTree()) is None


ARCHIVES = """\
deb http://deb.example/debian bookworm main
deb http://mirror.example/debian-security bookworm-security main
deb http://deb.example/debian bookworm-backports main
deb https://me:word@packages.example/linux/debian bookworm stable
deb https://cuda.example/repos/debian12 /
deb http://10.0.0.1/own bookworm main
"""
NOT_ASKED = [
    "http://10.0.0.1/own of the image is not asked: it is an address of a private network",
    "http://deb.example/debian bookworm-backports main",
    "https://packages.example/linux/debian bookworm stable",
    "https://cuda.example/repos/debian12 /",
]


@pytest.mark.parametrize(
    ("machine_suite", "image_suite", "expected"),
    [
        ("bookworm", "bookworm", NOT_ASKED),
        ("trixie", "bookworm", NOT_ASKED),
        # apt asks the image's own archives: another distribution, and no Debian machine.
        ("bookworm", "", NOT_ASKED[:1]),
        ("", "bookworm", NOT_ASKED[:1]),
    ],
)
def test_archives_that_are_not_compared_are_named(
    machine_suite: str, image_suite: str, expected: list[str]
) -> None:
    release = f"ID=debian\nVERSION_CODENAME={image_suite}\n" if image_suite else "ID=ubuntu\n"
    tree = tree_with(ARCHIVES)
    tree.members["/etc/os-release"] = TreeMember(kind="file", mode=0o644, owner=0)
    tree.contents["/etc/os-release"] = release.encode()
    foreign = read_foreign(tree)
    assert foreign is not None
    own = tuple(
        AptSource(uri="http://own.example/debian", suite=suite, components="main")
        for suite in (machine_suite, f"{machine_suite}-security")
    )
    settings = HostSettings(pip=PipSettings(), apt=AptSettings(sources=own), suite=machine_suite)
    sentences = describe_archives_not_asked(foreign, settings)
    for sentence, begin in zip(sentences, expected, strict=True):
        assert sentence.startswith(begin)
        assert "word" not in sentence
