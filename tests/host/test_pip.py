"""pip's settings, beside what pip itself makes of the same files and variables; and uv told the same."""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from trainworks.errors import HostError
from trainworks.facts.rows import LockedPackage
from trainworks.host.pip import (
    PipSettings,
    default_index,
    find_local_file,
    pip_configuration,
    read_pip_settings,
    uv_configuration,
)

MIRROR = "https://mirror.example/simple"
OTHER = "https://other.example/simple"


def read(tmp_path: Path, environment: Mapping[str, str], *texts: str) -> PipSettings:
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.conf")
        files[-1].write_text(text, encoding="utf-8")
    return read_pip_settings(environment, files)


@pytest.mark.parametrize(
    ("environment", "texts", "expected"),
    [
        pytest.param({}, [], PipSettings(), id="nothing"),
        pytest.param({}, [f"[global]\nindex-url = {MIRROR}\n"], PipSettings(index_url=MIRROR), id="a file"),
        pytest.param({"PIP_INDEX_URL": MIRROR}, [], PipSettings(index_url=MIRROR), id="a variable"),
        pytest.param(
            {},
            [f"[global]\nindex-url = {OTHER}\n", f"[global]\nindex-url = {MIRROR}\n"],
            PipSettings(index_url=MIRROR),
            id="the specific file wins",
        ),
        pytest.param(
            {"PIP_INDEX_URL": MIRROR},
            [f"[install]\nindex-url = {OTHER}\n"],
            PipSettings(index_url=MIRROR),
            id="a variable wins over files",
        ),
        pytest.param(
            {},
            [f"[install]\nindex-url = {MIRROR}\n", f"[global]\nindex-url = {OTHER}\n"],
            PipSettings(index_url=MIRROR),
            id="[install] wins over [global], in whatever file",
        ),
        pytest.param(
            {},
            [f"[download]\nindex-url = {OTHER}\n[list]\ntimeout = 9\n"],
            PipSettings(),
            id="other commands' sections",
        ),
        pytest.param(
            {},
            ["[global]\nextra-index-url =\n    https://one.example/simple\n    file:///srv/index\n"],
            PipSettings(extra_index_urls=("https://one.example/simple", "file:///srv/index")),
            id="several lines",
        ),
        pytest.param(
            {"PIP_FIND_LINKS": "/srv/wheels https://mirror.example/wheels"},
            [],
            PipSettings(find_links=("/srv/wheels", "https://mirror.example/wheels")),
            id="several words",
        ),
        pytest.param({"PIP_DEFAULT_TIMEOUT": "90"}, [], PipSettings(timeout_seconds=90), id="the option's second name"),
        pytest.param(
            {"PIP_DEFAULT_TIMEOUT": "90"},
            ["[global]\ntimeout = 15\n"],
            PipSettings(timeout_seconds=90),
            id="both names are one option",
        ),
        pytest.param({}, ["[global]\ntimeout = 2.5\n"], PipSettings(timeout_seconds=2.5), id="half seconds"),
        pytest.param({"PIP_NO_INDEX": "y"}, [], PipSettings(no_index=True), id="no index"),
        pytest.param({"PIP_NO_INDEX": "off"}, ["[global]\nno-index = 1\n"], PipSettings(), id="an index after all"),
        pytest.param(
            {"PIP_INDEX_URL": ""},
            [f"[global]\nindex-url = {MIRROR}\n"],
            PipSettings(index_url=MIRROR),
            id="an empty variable says nothing",
        ),
        pytest.param(
            {},
            [f"[global]\nindex-url = {MIRROR}\n", "[global]\nindex-url =\n"],
            PipSettings(),
            id="an empty value takes back what a more general file says",
        ),
        pytest.param(
            {},
            ["[global]\ntrusted-host = one.example two.example:8443\ncert = /srv/ca.pem\n"],
            PipSettings(trusted_hosts=("one.example", "two.example:8443"), certificate="/srv/ca.pem"),
            id="trust",
        ),
        pytest.param(
            {},
            ["[global]\nindex_url = https://user:p%40ss@mirror.example/simple\n"],
            PipSettings(index_url="https://user:p%40ss@mirror.example/simple"),
            id="an underscore, and a per cent sign",
        ),
    ],
)
def test_settings(environment: Mapping[str, str], texts: list[str], expected: PipSettings, tmp_path: Path) -> None:
    assert read(tmp_path, environment, *texts) == expected


@pytest.mark.parametrize(
    ("environment", "text", "said"),
    [
        ({}, "index-url = x\n", "cannot read"),
        ({}, "[global]\ntimeout = 1\ntimeout = 2\n", "cannot read"),
        ({"PIP_TIMEOUT": "soon"}, "", "pip's time-out must be a number of seconds, got 'soon'"),
        ({}, "[global]\ntimeout = 1 minute\n", "pip's time-out must be a number of seconds, got '1 minute'"),
    ],
)
def test_what_pip_refuses_is_refused(environment: Mapping[str, str], text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(HostError, match=said) as caught:
        read(tmp_path, environment, text)
    assert "pip config debug" in caught.value.hint


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_bytes(b"[global]\nindex-url = \xff\n")
    with pytest.raises(HostError, match=r"cannot read .*pip\.conf \("):
        read_pip_settings({}, [tmp_path / "pip.conf"])


PIP_SAYS = """
import json
from pip._internal.commands.install import InstallCommand

options, _ = InstallCommand("install", "").parse_args([])
print(json.dumps({
    "index_url": options.index_url,
    "extra_index_urls": options.extra_index_urls,
    "find_links": options.find_links,
    "trusted_hosts": options.trusted_hosts,
    "certificate": options.cert or "",
    "timeout_seconds": options.timeout,
    "no_index": options.no_index,
}))
"""

WE_SAY = """
import json, os
from dataclasses import asdict
from trainworks.host.pip import default_index, read_pip_settings

settings = asdict(read_pip_settings(os.environ))
settings["index_url"] = settings["index_url"] or default_index()
settings["timeout_seconds"] = settings["timeout_seconds"] or 15
print(json.dumps(settings))
"""


def in_a_child(program: str, home: Path, variables: Mapping[str, str]) -> object:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "XDG_"))}
    environment = {**kept, "HOME": str(home), "PYTHONWARNINGS": "ignore", **variables}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("files", "variables"),
    [
        pytest.param(
            {
                "xdg/pip/pip.conf": f"[install]\nindex-url = {OTHER}\n[global]\ntimeout = 7\n",
                ".pip/pip.conf": "[global]\nindex-url = https://legacy.example/simple\nfind-links = /srv/one\n",
                ".config/pip/pip.conf": f"[global]\nindex-url = {MIRROR}\nfind-links = /srv/two\n",
            },
            {"XDG_CONFIG_DIRS": "HOME/xdg", "PIP_TRUSTED_HOST": "mirror.example", "PIP_DEFAULT_TIMEOUT": "30"},
            id="a machine's file, a user's old and new one, and variables",
        ),
        pytest.param(
            {".config/pip/pip.conf": f"[global]\nindex-url = {MIRROR}\n", "own.conf": "[global]\nno-index = yes\n"},
            {"PIP_CONFIG_FILE": "HOME/own.conf"},
            id="a file named by a variable stands in for the user's",
        ),
        pytest.param(
            {".config/pip/pip.conf": f"[global]\nindex-url = {MIRROR}\n"},
            {"PIP_CONFIG_FILE": "HOME/missing.conf"},
            id="a named file that is not there",
        ),
        pytest.param(
            {
                ".config/pip/pip.conf": f"[global]\nindex-url = {MIRROR}\n",
                "xdg/pip/pip.conf": "[global]\ntimeout = 5\n",
            },
            {"XDG_CONFIG_DIRS": "HOME/xdg", "PIP_CONFIG_FILE": "/dev/null"},
            id="no file at all",
        ),
    ],
)
def test_pip_reads_the_same_settings(files: Mapping[str, str], variables: Mapping[str, str], tmp_path: Path) -> None:
    """The peer in the same run: whatever files this machine has besides, both read them."""
    pytest.importorskip("pip", reason="this environment has no pip to compare with")
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    filled = {name: value.replace("HOME", str(tmp_path)) for name, value in variables.items()}
    assert in_a_child(WE_SAY, tmp_path, filled) == in_a_child(PIP_SAYS, tmp_path, filled)


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
            {"index-strategy": "unsafe-best-match", "find-links": ["/run/wheels"], "index": [{"url": VENDOR}]},
            id="a user without a source of packages gets the vendor's",
        ),
        pytest.param(
            PipSettings(index_url=f"{default_index()}/"),
            {
                "index-strategy": "unsafe-best-match",
                "find-links": ["/run/wheels"],
                "index": [{"url": VENDOR}, {"url": f"{default_index()}/", "default": True}],
            },
            id="so does one who names pip's default",
        ),
        pytest.param(
            PipSettings(no_index=True, index_url=MIRROR),
            {"index-strategy": "unsafe-best-match", "find-links": ["/run/wheels"], "no-index": True},
            id="no index",
        ),
    ],
)
def test_uv_is_told_the_same(settings: PipSettings, expected: object) -> None:
    assert tomllib.loads(uv_configuration(settings, vendor_index=VENDOR, folders=["/run/wheels"])) == expected


def test_uv_accepts_what_it_is_told(tmp_path: Path) -> None:
    """The real program, with every setting at once: it refuses unknown keys and malformed values."""
    (tmp_path / "uv.toml").write_text(uv_configuration(MANY, folders=[str(tmp_path)]), encoding="utf-8")
    uv = str(Path(sys.executable).parent / "uv")
    argv = [uv, "pip", "list", "--config-file", str(tmp_path / "uv.toml"), "--python", sys.executable]
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
    assert read(tmp_path, {}, pip_configuration(MANY)).timeout_seconds == 2.5
    assert read(tmp_path, {}, pip_configuration(PipSettings(no_index=True))).no_index


# Files that lie on this machine.

CONTENT = b"not really a wheel"
FILE = "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
PACKAGE = LockedPackage(
    name="torch", version="2.13.0+cpu", file=FILE, sha256=hashlib.sha256(CONTENT).hexdigest(), requires=()
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / FILE).write_bytes(CONTENT)
    return tmp_path / "wheels"


@pytest.mark.parametrize("form", ["{path}", "{uri}", "{uri}/"])
def test_a_file_in_a_folder_is_found(form: str, folder: Path) -> None:
    address = form.format(path=folder, uri=folder.as_uri())
    assert find_local_file(PACKAGE, PipSettings(find_links=("https://mirror.example/w", address))) == folder / FILE


@pytest.mark.parametrize(
    "href",
    [
        "../../../wheels/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl",
        f"../../../wheels/{FILE}#sha256={PACKAGE.sha256}",
        "URI/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl",
    ],
)
@pytest.mark.parametrize("kind", ["index-url", "extra-index-url"])
def test_a_file_in_an_index_on_this_machine_is_found(href: str, kind: str, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "index" / "simple" / "torch" / "index.html"
    page.parent.mkdir(parents=True)
    link = href.replace("URI", folder.as_uri())
    page.write_text(f"<a HREF='https://mirror.example/{FILE}'>x</a><a href=\"{link}\">{FILE}</a>", encoding="utf-8")
    settings = read(tmp_path, {}, f"[global]\n{kind} = {(tmp_path / 'index' / 'simple').as_uri()}/\n")
    found = find_local_file(PACKAGE, settings)
    assert found is not None
    assert found.resolve() == folder / FILE


def test_a_file_with_another_hash_is_ignored(folder: Path, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    (good / FILE).write_bytes(CONTENT)
    (folder / FILE).write_bytes(CONTENT + b", and changed")
    assert find_local_file(PACKAGE, PipSettings(find_links=(str(folder),))) is None
    assert find_local_file(PACKAGE, PipSettings(find_links=(str(folder), str(good)))) == good / FILE


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert find_local_file(PACKAGE, PipSettings(find_links=(str(tmp_path / "missing"), MIRROR))) is None
