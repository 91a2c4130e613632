"""Test that ``build.py lock`` keeps locked versions: with uv, against a package index of the test's
own.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from lock.conftest import Repository
from lock.servers import Request, Server
from lock.trees import PACKAGES_TARGET, add_artifact, add_component, make_tree
from trainworks.cli import main
from trainworks.facts.load import load

LOCK = f"images/lock/{PACKAGES_TARGET}.toml"


def wheel(name: str, version: str, requires: tuple[str, ...] = ()) -> bytes:
    """Return a wheel without code."""
    stem = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = [f"Requires-Dist: {line}" for line in requires]
    files = {
        f"{stem}/METADATA": "\n".join(
            ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""]
        ),
        f"{stem}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        for path, text in files.items()
    ]
    files[f"{stem}/RECORD"] = "\n".join([*record, f"{stem}/RECORD,,", ""])
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return content.getvalue()


class Index:
    """A package index that gets new versions."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._links: dict[str, list[str]] = {}

    def add(self, name: str, version: str, *requires: str) -> None:
        file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        content = wheel(name, version, requires)
        address = self._server.serve(f"/files/{file}", content)
        links = self._links.setdefault(name, [])
        links.append(f'<a href="{address}#sha256={hashlib.sha256(content).hexdigest()}">{file}</a>')
        page = f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>"

        def answer(request: Request) -> None:
            request.send_response(200)
            request.send_header("Content-Type", "text/html")
            request.end_headers()
            request.wfile.write(page.encode())

        self._server.serve(f"/simple/{name}/", answer)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Give a checkout with one target that has `demo`, which requires `part`."""
    root = make_tree(tmp_path / "tree", sources="packages")
    add_component(
        root, "demo", "1.0", "RUN true", sources=["packages"], python=["demo"], required=True
    )
    return root


@pytest.fixture
def index(plain_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """Return an index that has the packages of the tree; a first lock is made of it."""
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "REQUESTS_CA_BUNDLE", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"{plain_server.url}/simple")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mine = Index(plain_server)
    for name, version, *requires in (
        ("uv", "0.13.8"),
        ("setuptools", "80.0"),
        ("wheel", "0.45"),
        ("part", "2.0"),
        ("other", "5.0"),
        ("demo", "1.0", "part"),
    ):
        mine.add(name, version, *requires)
    return mine


def versions(root: Path) -> dict[str, str]:
    return {
        package.name: package.version
        for package in load(root).locks[PACKAGES_TARGET].packages
        if not package.build
    }


def test_what_is_locked_stays_when_a_component_is_added(
    tree: Path, index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("lock",), tree) == 0
    assert versions(tree) == {"demo": "1.0", "part": "2.0"}
    assert "\n  part 2.0 is new\n" in capsys.readouterr().out
    text = (tree / LOCK).read_bytes()
    index.add("part", "3.0")
    assert main(("lock",), tree) == 0
    assert (tree / LOCK).read_bytes() == text
    assert capsys.readouterr().out.endswith(f"{LOCK}\n  nothing moves\n")
    add_component(
        tree, "extra", "5.0", "RUN true", sources=["packages"], python=["other"], required=True
    )
    assert main(("lock",), tree) == 0
    assert versions(tree) == {"demo": "1.0", "other": "5.0", "part": "2.0"}
    assert capsys.readouterr().out.endswith(f"{LOCK}\n  other 5.0 is new\n")


def test_upgrade_moves_it_and_a_dry_run_says_so_before(
    tree: Path, index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    main(("lock",), tree)
    index.add("part", "3.0")
    index.add("uv", "0.13.9")
    before = {path: path.read_bytes() for path in sorted(tree.rglob("*")) if path.is_file()}
    capsys.readouterr()
    assert main(("lock", "--upgrade", "--dry-run", "--format", "json"), tree) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == {
        "written": [],
        "moved": {PACKAGES_TARGET: ["part 2.0 -> 3.0"]},
        "problems": [],
    }
    assert {path: path.read_bytes() for path in sorted(tree.rglob("*")) if path.is_file()} == before
    assert main(("lock", "--upgrade"), tree) == 0
    assert versions(tree) == {"demo": "1.0", "part": "3.0"}


def test_a_version_that_the_rows_do_not_allow_moves(tree: Path, index: Index) -> None:
    main(("lock",), tree)
    index.add("part", "3.0")
    index.add("demo", "1.1", "part>=3")
    stacks = tree / "images" / "stacks.toml"
    stacks.write_text(
        stacks.read_text(encoding="utf-8").replace('demo = "1.0"', 'demo = "1.1"'), encoding="utf-8"
    )
    assert main(("lock",), tree) == 0
    assert versions(tree) == {"demo": "1.1", "part": "3.0"}


def test_newest_names_what_the_rows_hold_back_and_newer_tags(
    tree: Path,
    index: Index,
    repository: Repository,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main(("lock",), tree)
    index.add("demo", "2.0", "part", "other")
    index.add("uv", "0.13.9")
    git = str(repository.path)
    # Git asks a folder of this machine, and no server.
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{git}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://vendor.invalid/gklib.git")
    add_component(
        tree, "gklib", "1.0", "RUN true", sources=["packages"], artifact=True, required=True
    )
    add_artifact(
        tree,
        "gklib",
        "1.0",
        git="https://vendor.invalid/gklib.git",
        tag="v1.0",
        commit=repository.commit,
    )
    for tag in ("v0.9", "v1.12", "v1.2", "v2.0rc1", "nightly-3.0"):
        subprocess.run(("git", "-C", git, "tag", tag), check=True)
    before = (tree / LOCK).read_bytes()
    capsys.readouterr()
    assert main(("lock", "--newest"), tree) == 0
    captured = capsys.readouterr()
    assert (
        captured.out
        == f"{PACKAGES_TARGET}\n  demo 1.0 -> 2.0\n  other 5.0 is new\n  uv (to build) 0.13.8 ->"
        " 0.13.9\n"
    )
    assert "gklib 1.0: there is a newer tag, v1.12\n" in captured.err
    assert (tree / LOCK).read_bytes() == before


@pytest.mark.parametrize(
    "words", [("--upgrade", "--check"), ("--newest", "--dry-run"), ("--newest", "--upgrade")]
)
def test_words_that_do_not_go_together(
    tree: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("lock", *words), tree) == 2
    assert "do not go together" in capsys.readouterr().err
