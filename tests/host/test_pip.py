"""Test pip's settings, beside those that pip itself reads from the same files and variables.

And uv told the same.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trainworks.errors import HostError
from trainworks.facts.rows import LockedPackage
from trainworks.host.pip import (
    PipSettings,
    find_default_index,
    find_local_file,
    pip_configuration,
    read_pip_settings,
    uv_configuration,
)

MIRROR = "https://mirror.example/simple"
OTHER = "https://other.example/simple"


def read(tmp_path: Path, text: str = "", **variables: str) -> PipSettings:
    (tmp_path / "pip.conf").write_text(text, encoding="utf-8")
    kept_variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "XDG_"))
    }
    return read_pip_settings(
        {
            **kept_variables,
            "HOME": str(tmp_path),
            "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
            **variables,
        }
    )


@pytest.mark.parametrize(
    ("variables", "text", "message"),
    [
        ({}, "index-url = x\n", "pip cannot read its settings"),
        ({"PIP_TIMEOUT": "soon"}, "", "invalid floating-point value"),
        ({}, "[install]\ntimeout = soon\n", "timeout is 'soon', and not a number"),
    ],
)
def test_what_pip_refuses_is_refused(
    variables: dict[str, str], text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(HostError, match=message) as caught:
        read(tmp_path, text, **variables)
    assert "pip config debug" in caught.value.hint


def test_pip_is_asked_for_what_it_would_use(tmp_path: Path) -> None:
    """Files that say the same, sections, a second name of an option, and variables: pip decides."""
    files = {
        "xdg/pip/pip.conf": (
            f"[install]\nindex-url = {OTHER}\n[global]\ntimeout = 7\nextra-index-url = {OTHER}\n"
        ),
        ".pip/pip.conf": (
            "[global]\nindex-url = https://legacy.example/simple\nfind-links = /srv/one\n"
        ),
        ".config/pip/pip.conf": (
            f"[global]\nindex-url = {MIRROR}\nfind-links = /srv/two\n    https://h.example/w\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    kept_variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "XDG_"))
    }
    variables = {
        "XDG_CONFIG_DIRS": f"{tmp_path}/xdg",
        "PIP_TRUSTED_HOST": "h.example",
        "PIP_DEFAULT_TIMEOUT": "30",
    }
    assert read_pip_settings(
        {**kept_variables, "HOME": str(tmp_path), **variables, "PIP_CERT": "/srv/ca.pem"}
    ) == PipSettings(
        index_url=OTHER,
        extra_index_urls=(OTHER,),
        find_links=("/srv/two", "https://h.example/w"),
        trusted_hosts=("h.example",),
        certificate="/srv/ca.pem",
        timeout_seconds=30,
    )
    assert (
        read_pip_settings({**kept_variables, "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull})
        == PipSettings()
    )


def test_the_default_index_is_pips_own() -> None:
    """pip's help names the address, too: two programs of other makers say the same."""
    words = (sys.executable, "-I", "-m", "pip", "install", "--help")
    done = subprocess.run(
        words, env={**os.environ, "COLUMNS": "500"}, capture_output=True, text=True, check=True
    )
    assert find_default_index().startswith("https://")
    assert f"(default {find_default_index()})" in " ".join(done.stdout.split())


MANY = PipSettings(
    index_url=MIRROR,
    extra_index_urls=("https://one.example/simple", "file:///srv/index"),
    find_links=("/srv/wheels", "https://mirror.example/wheels"),
    trusted_hosts=("one.example", "two.example:8443"),
    timeout_seconds=2.5,
)

VENDOR = "https://vendor.example/whl/cpu"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param(
            MANY,
            {
                "index-strategy": "unsafe-best-match",
                "find-links": ["/run/wheels", "https://mirror.example/wheels"],
                "allow-insecure-host": ["one.example", "two.example:8443"],
                "index": [{"url": "https://one.example/simple"}, {"url": MIRROR, "default": True}],
            },
            id="what is on the network; folders of this machine are not there inside a build",
        ),
        pytest.param(
            PipSettings(),
            {
                "index-strategy": "unsafe-best-match",
                "find-links": ["/run/wheels"],
                "index": [{"url": VENDOR}],
            },
            id="a user without a source of packages gets the vendor's",
        ),
        pytest.param(
            PipSettings(index_url=f"{find_default_index()}/"),
            {
                "index-strategy": "unsafe-best-match",
                "find-links": ["/run/wheels"],
                "index": [{"url": VENDOR}, {"url": f"{find_default_index()}/", "default": True}],
            },
            id="so does one who names pip's default",
        ),
        pytest.param(
            PipSettings(no_index=True, index_url=MIRROR),
            {
                "index-strategy": "unsafe-best-match",
                "find-links": ["/run/wheels"],
                "no-index": True,
            },
            id="no index",
        ),
    ],
)
def test_uv_is_told_the_same(settings: PipSettings, expected: object) -> None:
    assert (
        tomllib.loads(uv_configuration(settings, vendor_index=VENDOR, folders=["/run/wheels"]))
        == expected
    )


def test_uv_accepts_what_it_is_told(tmp_path: Path) -> None:
    """The real program, with every setting at once: it refuses unknown keys and
    malformed values.
    """
    (tmp_path / "uv.toml").write_text(
        uv_configuration(MANY, folders=[str(tmp_path)]), encoding="utf-8"
    )
    uv = str(Path(sys.executable).parent / "uv")
    argv = [
        uv,
        "pip",
        "list",
        "--config-file",
        str(tmp_path / "uv.toml"),
        "--python",
        sys.executable,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "trainworks" in done.stdout
    (tmp_path / "uv.toml").write_text("colour = 1\n", encoding="utf-8")
    assert subprocess.run(argv, capture_output=True, check=False, timeout=300).returncode != 0


def test_a_pip_inside_the_build_is_told_the_same(tmp_path: Path) -> None:
    parser = configparser.RawConfigParser()
    parser.read_string(pip_configuration(MANY))
    assert dict(parser["global"]) == {
        "index-url": MIRROR,
        "extra-index-url": "https://one.example/simple",
        "find-links": "https://mirror.example/wheels",
        "trusted-host": "one.example two.example:8443",
        "timeout": "2.5",
    }
    assert read(tmp_path, pip_configuration(MANY)).timeout_seconds == 2.5
    assert read(tmp_path, pip_configuration(PipSettings(no_index=True))).no_index
    for settings in (PipSettings(), PipSettings(index_url="file:///srv/index")):
        assert pip_configuration(settings) == f"[global]\nindex-url = {find_default_index()}\n"


# Files that lie on this machine.

CONTENT = b"not really a wheel"
FILE = "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
PACKAGE = LockedPackage(
    name="torch",
    version="2.13.0+cpu",
    file=FILE,
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    requires=(),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / FILE).write_bytes(CONTENT)
    return tmp_path / "wheels"


@pytest.mark.parametrize("form", ["{path}", "{uri}", "{uri}/"])
def test_a_file_in_a_folder_is_found(form: str, folder: Path) -> None:
    address = form.format(path=folder, uri=folder.as_uri())
    assert (
        find_local_file(PACKAGE, PipSettings(find_links=("https://mirror.example/w", address)))
        == folder / FILE
    )


@pytest.mark.parametrize(
    "href",
    [
        "../../../wheels/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl",
        f"../../../wheels/{FILE}#sha256={PACKAGE.sha256}",
        "URI/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl",
    ],
)
@pytest.mark.parametrize("kind", ["index-url", "extra-index-url"])
def test_a_file_in_an_index_on_this_machine_is_found(
    href: str, kind: str, folder: Path, tmp_path: Path
) -> None:
    page = tmp_path / "index" / "simple" / "torch" / "index.html"
    page.parent.mkdir(parents=True)
    link = href.replace("URI", folder.as_uri())
    page.write_text(
        f"<a HREF='https://mirror.example/{FILE}'>x</a><a href=\"{link}\">{FILE}</a>",
        encoding="utf-8",
    )
    settings = read(tmp_path, f"[global]\n{kind} = {(tmp_path / 'index' / 'simple').as_uri()}/\n")
    local_file = find_local_file(PACKAGE, settings)
    assert local_file is not None
    assert local_file.resolve() == folder / FILE


def test_a_file_with_another_hash_is_ignored(folder: Path, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    (good / FILE).write_bytes(CONTENT)
    (folder / FILE).write_bytes(CONTENT + b", and changed")
    assert find_local_file(PACKAGE, PipSettings(find_links=(str(folder),))) is None
    assert find_local_file(PACKAGE, PipSettings(find_links=(str(folder), str(good)))) == good / FILE


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert (
        find_local_file(PACKAGE, PipSettings(find_links=(str(tmp_path / "missing"), MIRROR)))
        is None
    )
