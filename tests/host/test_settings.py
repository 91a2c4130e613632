"""Test this machine as one value: its trusted authorities, the secrets that a build gets, and the
files that must not stay behind.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainworks.host.apt import AptSettings, AptSource
from trainworks.host.logins import find_hosts, select_logins
from trainworks.host.pip import PipSettings, find_default_index
from trainworks.host.settings import HostSettings, read_host_settings
from trainworks.host.trust import CA_VARIABLES, find_ca_bundle, find_proxy_arguments

NAMES = ["apt.conf", "ca.pem", "mirror", "netrc", "pip.conf", "sources.list", "timeout", "uv.toml"]

MACHINE = HostSettings(
    pip=PipSettings(
        index_url="https://user:word@mirror.example/simple",
        extra_index_urls=("https://more.example/simple",),
        find_links=("/srv/wheels",),
        timeout_seconds=2.5,
    ),
    apt=AptSettings(
        lines=('Acquire::Retries "3";',),
        sources=(
            AptSource(uri="http://mirror.example/debian", suite="bookworm", components="main"),
        ),
    ),
    suite="bookworm",
    ca=b"-----BEGIN CERTIFICATE-----\n",
    netrc=b"machine mirror.example login user password word\n",
    proxies={
        "HTTPS_PROXY": "http://proxy.example:3128",
        "NO_PROXY": "10.0.0.0/8,localhost",
        "no_proxy": "10.0.0.0/8,localhost",
    },
)


def test_all_secrets_are_there_even_on_a_machine_without_settings() -> None:
    """A step that mounts a secret which does not exist fails, or gets a folder:
    it depends on the engine.
    """
    secrets = HostSettings(pip=PipSettings()).secrets("bookworm", "")
    assert sorted(secrets) == NAMES
    assert (
        secrets["ca.pem"]
        == secrets["netrc"]
        == secrets["apt.conf"]
        == secrets["sources.list"]
        == b""
    )
    assert secrets["timeout"] == b"30\n"


def test_secrets_of_a_machine_with_settings() -> None:
    secrets = MACHINE.secrets("trixie", "https://vendor.example/whl")
    assert sorted(secrets) == NAMES
    assert secrets["ca.pem"] == MACHINE.ca
    assert secrets["netrc"] == MACHINE.netrc
    assert MACHINE.network == "default"
    assert secrets["sources.list"] == b"deb http://mirror.example/debian trixie main\n"
    assert b'CAInfo "/run/secrets/ca.pem"' in secrets["apt.conf"]
    assert b'SourceList "/run/secrets/sources.list"' in secrets["apt.conf"]
    assert b"vendor.example" not in secrets["uv.toml"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, b"30\n"), (0.2, b"1\n"), (2.5, b"3\n"), (2_000_000, b"2000000\n")]
)
def test_a_time_out_is_whole_seconds(seconds: float, text: bytes) -> None:
    """uv takes no fraction, and ``install-python-packages`` hands the text on."""
    assert (
        HostSettings(pip=PipSettings(timeout_seconds=seconds)).secrets("bookworm", "")["timeout"]
        == text
    )


def test_what_must_not_stay_in_an_image() -> None:
    assert MACHINE.forbidden_texts("") == (
        "/srv/wheels",
        "http://proxy.example:3128",
        "https://more.example/simple",
        "https://user:word@mirror.example/simple",
    )


@pytest.mark.parametrize(
    "settings",
    [
        PipSettings(),
        PipSettings(index_url=find_default_index()),
        PipSettings(
            index_url=f"{find_default_index()}/",
            extra_index_urls=("https://vendor.example/whl/cpu/",),
        ),
        PipSettings(find_links=("/w", "wheels", ".")),
    ],
)
def test_short_and_public_texts_are_not_looked_for(settings: PipSettings) -> None:
    """Leave out texts that occur in pip, in torch and in everything: an image would fail its tests
    for nothing.
    """
    machine = replace(
        HostSettings(pip=settings), proxies={"no_proxy": "10.0.0.0/8", "http_proxy": "p:80"}
    )
    assert machine.forbidden_texts("https://vendor.example/whl/cpu") == ()


def test_secrets_do_not_stand_in_the_text_of_the_settings() -> None:
    """Leave no credentials in the printed text of the settings."""
    assert "password word" not in repr(MACHINE)


def test_the_order_of_ca_bundles(tmp_path: Path) -> None:
    names = ["PIP_CERT", "pip's own setting", *CA_VARIABLES[1:]]
    paths = {name: tmp_path / f"{number}.pem" for number, name in enumerate(names)}
    for path in paths.values():
        path.write_text("certificate\n", encoding="utf-8")
    environment = {name: str(path) for name, path in paths.items() if name in CA_VARIABLES}
    setting = str(paths["pip's own setting"])
    for name in names:
        assert find_ca_bundle(environment, setting) == paths[name]
        # A variable that names a missing file is passed over, as is one that is not set.
        paths[name].unlink()
    assert find_ca_bundle(environment, setting) not in paths.values()


def test_proxies_keep_their_spelling() -> None:
    environment = {
        "http_proxy": "http://proxy.example:3128",
        "HTTPS_PROXY": " http://proxy.example:3128 ",
        "no_proxy": "",
        "PROXY": "http://other.example",
        "PATH": "/bin",
    }
    assert find_proxy_arguments(environment) == {
        "HTTPS_PROXY": "http://proxy.example:3128",
        "http_proxy": "http://proxy.example:3128",
    }


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    """Read this machine's own settings: they come as one value, and turn into all secrets."""
    (tmp_path / "netrc").write_text(
        "machine mirror.example login user password word\n", encoding="utf-8"
    )
    (tmp_path / "ca.pem").write_text("certificate\n", encoding="utf-8")
    environment = {
        "NETRC": str(tmp_path / "netrc"),
        "PIP_CERT": str(tmp_path / "ca.pem"),
        "https_proxy": "http://p:1",
    }
    settings = read_host_settings(environment)
    assert settings.netrc.startswith(b"machine mirror.example")
    assert settings.ca == b"certificate\n"
    assert settings.proxies == {"https_proxy": "http://p:1"}
    assert sorted(settings.secrets("bookworm", "")) == NAMES


NETRC = b"""\
# machine comment.example login c password c
machine mirror.example
  login user
  password "two words"
machine OTHER.example login other password o#1
macdef init
machine macro.example login m password m

machine files.example login f account a password f machine more.example login g password g
default login everybody password d
"""


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ((), ""),
        (("https://unknown.example/", "comment.example", "https://macro.example", "http://["), ""),
        (
            ("https://user@MIRROR.example:8443/simple",),
            'machine mirror.example login user password "two words"\n',
        ),
        (("git+https://other.example/a.git",), "machine OTHER.example login other password o#1\n"),
        (
            ("https://files.example/x.whl", "ssh://git@more.example/b"),
            (
                "machine files.example login f account a password f\n"
                "machine more.example login g password g\n"
            ),
        ),
    ],
)
def test_logins_go_to_named_hosts_alone(addresses: tuple[str, ...], expected: str) -> None:
    text = select_logins(find_hosts(addresses), NETRC)
    assert text.decode() == expected
    # The file can be read again, by the standard library too.
    assert select_logins(find_hosts(addresses), text) == text


def test_a_build_gets_the_logins_of_what_it_names() -> None:
    machine = replace(MACHINE, netrc=NETRC)
    assert b"OTHER" not in machine.secrets("bookworm", "")["netrc"]
    named = machine.secrets("bookworm", "", ("https://other.example/source.tar.gz",))["netrc"]
    assert b"OTHER" in named


APT_PROXY = 'Acquire::http::Proxy "http://127.1.1.1/";'
LOOPBACK = AptSource(uri="http://127.0.0.2:3142/debian", suite="bookworm", components="main")


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (HostSettings(pip=PipSettings()), "default"),
        (HostSettings(pip=PipSettings(index_url="http://localhost:3141/simple")), "host"),
        (HostSettings(pip=PipSettings(find_links=("http://[::1]/wheels",))), "host"),
        (HostSettings(pip=PipSettings(find_links=("/srv/localhost",))), "default"),
        (HostSettings(pip=PipSettings(), proxies={"http_proxy": "127.0.0.1:3128"}), "host"),
        (HostSettings(pip=PipSettings(), proxies={"no_proxy": "127.0.0.1"}), "default"),
        (HostSettings(pip=PipSettings(), apt=AptSettings(sources=(LOOPBACK,))), "host"),
        (
            HostSettings(
                pip=PipSettings(),
                apt=AptSettings(lines=('Acquire::http::Proxy "http://127.1.1.1/";',)),
            ),
            "host",
        ),
        (HostSettings(pip=PipSettings(), mirror="http://localhost/files"), "host"),
    ],
)
def test_the_network_of_this_machine_is_for_what_names_its_loopback(
    machine: HostSettings, expected: str
) -> None:
    assert machine.network == expected
