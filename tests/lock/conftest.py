"""Share an authority, servers, and a git repository among the tests of downloads."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lock.servers import Server, serving
from trainworks_testing.certificates import Authority, make_authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return a certificate authority that only these tests trust."""
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def server(authority: Authority) -> Iterator[Server]:
    """Give a server that speaks TLS."""
    with serving(authority) as mine:
        yield mine


@pytest.fixture
def plain_server() -> Iterator[Server]:
    """Give a server without TLS."""
    with serving() as mine:
        yield mine


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A bare git repository with a tag ``v1.0`` at ``commit``, and a later
    commit ``newer`` on its branch.
    """

    path: Path
    commit: str
    newer: str


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Give a git repository: three commits, an annotated tag at the second one."""
    work, bare = tmp_path / "work", tmp_path / "repositories" / "gklib.git"
    identity = (
        "-c",
        "user.name=A Person",
        "-c",
        "user.email=person@example.org",
        "-c",
        "commit.gpgsign=false",
    )

    def git(*words: str) -> str:
        done = subprocess.run(
            ("git", "-C", str(work), *identity, *words), check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    work.mkdir()
    git("init", "--quiet", "--initial-branch=main")
    commits = []
    for number in (1, 2, 3):
        (work / "Makefile").write_text(f"all: # {number}\n", encoding="utf-8")
        (work / "configure").write_text("#!/bin/sh\n", encoding="utf-8")
        (work / "configure").chmod(0o755)
        git("add", ".")
        git("commit", "--quiet", "--message", f"Commit {number}")
        commits.append(git("rev-parse", "HEAD"))
    git("tag", "--annotate", "--message", "Version 1.0", "v1.0", commits[1])
    bare.parent.mkdir()
    git("clone", "--quiet", "--bare", str(work), str(bare))
    return Repository(path=bare, commit=commits[1], newer=commits[2])
