"""Test uv on this machine, for a base that is only described: the files that it reads, downloads,
and never runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path

import pytest

from image.indexes import USER, Index, sdist_of, serving, wheel_of
from trainworks.errors import LockError
from trainworks.extend.described import Environment
from trainworks.extend.requirements import BaseDistribution, ExtendedBase
from trainworks.extend.resolver import FetchedFile, Resolver, name_in
from trainworks.host.downloads import Client
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings

BASE = ExtendedBase(
    reference="some/image:1",
    identifier="sha256:" + "b" * 64,
    python="/opt/venv/bin/python",
    version="3.9",
    full_version="3.9.18",
    glibc="2.31",
    machine="aarch64",
    environment={},
    distributions=(
        BaseDistribution(name="Kept_One", version="1.0+build"),
        BaseDistribution(name="free", version="1.0"),
        BaseDistribution(name="../x", version="1"),
    ),
    kept={"kept-one": "1.0+build"},
    metadata={
        "Kept_One": (
            "Name: Kept_One\nVersion: 1.0+build\nRequires-Dist: other>=1; python_version < '3.10'\n"
        )
    },
)


@pytest.fixture
def index() -> Iterator[Index]:
    with serving(Index({})) as server:
        yield server


@pytest.fixture
def resolver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    folder = tmp_path / "resolver"
    folder.mkdir()
    with Client(HostSettings(pip=PipSettings())) as client:
        yield Resolver(BASE, folder, client, fresh=False)


def environment(index: Index) -> Mapping[str, str]:
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))
    }
    return {**plain, "UV_DEFAULT_INDEX": index.simple}


def described(resolver: Resolver) -> Environment:
    base_environment = Environment(resolver.folder / "base")
    base_environment.describe(BASE)
    return base_environment


def test_what_a_base_has_is_data(resolver: Resolver) -> None:
    """A name that would lead out of the folder is left out."""
    distribution, _ = described(resolver)
    assert (distribution.metadata["Name"], distribution.version) == ("Kept_One", "1.0+build")
    assert distribution.requires == ["other>=1; python_version < '3.10'"]


def test_no_code_of_a_source_archive_runs_and_no_older_release_is_taken(
    resolver: Resolver, index: Index, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    setup = f"open({str(ran)!r}, 'w').close()\nfrom setuptools import setup\nsetup()\n"
    name, content = sdist_of("needs_build", "2.0", setup)
    index.files |= {name: content}
    index.files |= dict([wheel_of("needs_build", "1.0", ""), wheel_of("other", "1.5", "")])
    seen: list[list[str]] = []

    def learn(folder: Path) -> Message:
        seen.append(sorted(path.name for path in folder.iterdir()))
        metadata = Message()
        metadata["Name"], metadata["Version"], metadata["Requires-Dist"] = (
            "needs_build",
            "2.0",
            "other",
        )
        # A text of others, in a file that uv reads.
        metadata["Requires-Dist"] = 'other; python_version != "\x7f\N{CAT FACE}"'
        return metadata

    resolver.learn = learn
    lock = resolver.lock(described(resolver), ("needs_build",), environment(index))
    assert lock is not None, resolver.log
    assert {row["name"]: row["version"] for row in lock.rows} == {
        "needs-build": "2.0",
        "other": "1.5",
    }
    assert seen == [["PKG-INFO", "setup.py"]]
    files = resolver.fetch(lock)
    assert {file.name: file.sha256 for file in files}["needs-build"] == hashlib.sha256(
        content
    ).hexdigest()
    assert not ran.exists()


def test_files_are_for_the_base_and_downloaded_once(resolver: Resolver, index: Index) -> None:
    plain, content = wheel_of("tagged", "1.0", "")
    for tag in (
        "cp39-cp39-manylinux_2_28_aarch64",
        "cp311-cp311-manylinux_2_28_x86_64",
        "cp39-cp39-manylinux_2_35_aarch64",
    ):
        index.files[plain.replace("py3-none-any", tag)] = content
    lock = resolver.lock(described(resolver), ("tagged",), environment(index))
    assert lock is not None, resolver.log
    (file,) = resolver.fetch(lock)
    assert file.file.name == "tagged-1.0-cp39-cp39-manylinux_2_28_aarch64.whl"
    request_count = len(index.requested_paths)
    assert resolver.fetch(lock) == [file]
    assert not [path for path in index.requested_paths[request_count:] if path.startswith("/file/")]
    assert resolver.known_file(file.sha256) == file.file


def test_what_is_there_stays_where_it_fits_and_moves_where_it_does_not(
    resolver: Resolver, index: Index
) -> None:
    """Show all cases in one resolution: an index has newer releases, and one that is not in any
    index is kept.
    """
    index.files |= dict([wheel_of("kept_one", version, "") for version in ("1.0+build", "2.0")])
    index.files |= dict(
        [wheel_of("free", "2.0", ""), wheel_of("mine", "1.0", "", "kept-one", "free", "other>=1")]
    )
    index.files |= dict([wheel_of("other", "1.5", ""), wheel_of("other", "1.0", "")])
    index.files |= dict([wheel_of("third", "1", "", "other>1")])
    # Such an index has to send a file to say its hash.
    index.says_hashes = False

    def locked(*words: str, **before: str) -> dict[str, str]:
        lock = resolver.lock(base_distributions, words, environment(index), before)
        assert lock is not None, resolver.log
        for wheel in resolver.fetch(lock):
            base_distributions.add(wheel.file)
        return {row["name"]: row["version"] for row in lock.rows}

    base_distributions = described(resolver)
    assert locked("mine", other="1.0") == {"mine": "1.0", "other": "1.0"}
    assert locked("mine") == {}
    assert locked("third") == {"third": "1", "other": "1.5"}
    assert locked("kept-one", "free", "--no-binary=:all:") == {}
    assert locked("free>1.0", "mine") == {"free": "2.0"}
    assert sorted(wheel.version for wheel in base_distributions) == [
        "1",
        "1.0",
        "1.0+build",
        "1.5",
        "2.0",
    ]
    assert resolver.lock(base_distributions, ("kept-one>1.0",), environment(index)) is None
    assert "kept-one" in resolver.log
    assert [path for path in index.requested_paths if "kept" in path] == []
    assert locked("mine", "--reinstall-package=mine") == {"mine": "1.0"}
    # As the build of a companion that another index has.
    index.files |= dict([wheel_of("free", "2.0+build", "")])
    assert locked("free", "--reinstall-package=free", "--refresh") == {"free": "2.0+build"}
    nothing = Environment(resolver.folder / "nothing")
    alone = resolver.lock(nothing, ("mine",), environment(index))
    assert alone is not None, resolver.log
    assert [row["name"] for row in alone.rows] == ["free", "kept-one", "mine", "other"]
    assert resolver.lock(base_distributions, ("absent",), environment(index)) is None
    assert "absent" in resolver.log


def test_all_lines_have_hashes_where_they_have_to(
    resolver: Resolver, index: Index, tmp_path: Path
) -> None:
    files = dict([wheel_of("hashed", "1.0", "", "bare"), wheel_of("bare", "1.0", "")])
    index.files |= files
    lines = tmp_path / "requirements.txt"
    digest = hashlib.sha256(files["hashed-1.0-py3-none-any.whl"]).hexdigest()
    lines.write_text(f"hashed==1.0 --hash=sha256:{digest}\n")
    words = ("-r", str(lines), "--require-hashes")
    base_distributions = described(resolver)
    assert resolver.lock(base_distributions, words, environment(index)) is None
    assert resolver.log == "error: --require-hashes: no line has a hash of bare"
    assert resolver.lock(base_distributions, (*words, "--no-deps"), environment(index)) is not None


def test_a_hash_of_the_users_own_is_what_counts(
    resolver: Resolver, index: Index, tmp_path: Path
) -> None:
    name, content = wheel_of("hashed", "1.0", "")
    index.files[name] = content
    lines = tmp_path / "requirements.txt"

    base_distributions = described(resolver)

    def fetched() -> list[FetchedFile]:
        lock = resolver.lock(base_distributions, ("-r", str(lines)), environment(index))
        assert lock is not None, resolver.log
        return resolver.fetch(lock)

    lines.write_text(f"hashed==1.0 --hash=sha256:{hashlib.sha256(content).hexdigest()}\n")
    assert fetched()
    lines.write_text(f"hashed==1.0 --hash=sha512:{hashlib.sha512(content).hexdigest()}\n")
    assert fetched()
    lines.write_text(f"hashed==1.0 --hash=sha512:{'0' * 128}\n")
    with pytest.raises(LockError, match="Hash mismatch for hashed"):
        fetched()
    lines.write_text(f"hashed==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(LockError, match="Hash mismatch for hashed"):
        fetched()


def test_the_keyring_has_the_password_of_an_index(
    resolver: Resolver, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.password = "from-the-keyring/1"
    program = tmp_path / "bin" / "keyring"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntest \"$3\" = {USER} && echo '{index.password}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    name, content = wheel_of("private", "1.0", "")
    index.files[name] = content
    address = index.simple.replace("://", f"://{USER}@")
    variables = {
        **environment(index),
        "UV_DEFAULT_INDEX": address,
        "UV_KEYRING_PROVIDER": "subprocess",
    }
    config = tmp_path / "uv.toml"
    config.write_text(f'[[index]]\nurl = "{address}"\ndefault = true\n')
    variables["UV_CONFIG_FILE"] = str(config)
    lock = resolver.lock(described(resolver), ("private",), variables)
    assert lock is not None, resolver.log
    (file,) = resolver.fetch(lock)
    assert file.file.read_bytes() == content


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("Some_Name[extra]>=1", "some-name"),
        ("some.name @ https://host.example/x-1.0.tar.gz", "some-name"),
        ("https://me:${TOKEN}@host.example/Some_Name-1.0-py3-none-any.whl#sha256=0", "some-name"),
        ("/folder/some-name-1.0.tar.gz", "some-name"),
        ("plain", "plain"),
        ("plain(==2.0)", "plain"),
        ("plain (>=2.0) ; python_version > '3'", "plain"),
    ],
)
def test_the_name_in_a_line(line: str, name: str) -> None:
    assert name_in(line) == name
