"""Git repositories of vendors: where tags point, and bundles."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lock.conftest import Repository
from lock.servers import Server, git_repositories
from trainworks.errors import LockError
from trainworks.host.downloads import UnreachableError
from trainworks.host.git import find_tag_commit, is_bundle_of, make_bundle, make_source_archive
from trainworks_testing.certificates import Authority


@pytest.fixture
def url(server: Server, repository: Repository) -> str:
    server.answers["/git/"] = git_repositories(repository.path.parent, "/git/")
    return f"{server.url}/git/{repository.path.name}"


def test_where_a_tag_points(url: str, repository: Repository, authority: Authority) -> None:
    subprocess.run(
        ("git", "-C", str(repository.path), "tag", "light", repository.newer), check=True
    )
    for tag, commit in (("v1.0", repository.commit), ("light", repository.newer), ("v9", "")):
        assert find_tag_commit(url, tag, ca_path=str(authority.bundle)) == commit


@pytest.mark.parametrize("tag", ["v1.0", ""])
def test_a_bundle(
    url: str, repository: Repository, authority: Authority, tmp_path: Path, tag: str
) -> None:
    bundle = tmp_path / "gklib.bundle"
    make_bundle(url, tag, repository.commit, bundle, ca_path=str(authority.bundle))
    assert is_bundle_of(bundle, repository.commit)
    assert not is_bundle_of(bundle, repository.newer)
    content = bytearray(bundle.read_bytes())
    content[-60] ^= 1
    bundle.write_bytes(content)
    assert not is_bundle_of(bundle, repository.commit)


def test_a_tag_that_points_elsewhere(
    url: str, repository: Repository, authority: Authority, tmp_path: Path
) -> None:
    with pytest.raises(
        LockError, match=f"points at {repository.commit}, its row says {repository.newer}"
    ):
        make_bundle(
            url, "v1.0", repository.newer, tmp_path / "bundle", ca_path=str(authority.bundle)
        )
    assert not (tmp_path / "bundle").exists()


def test_a_reference_is_no_option_of_git(repository: Repository, tmp_path: Path) -> None:
    """A requirement names the reference: no program of its choice may run on this machine."""
    mark = tmp_path / "was-run"
    reference = f"--upload-pack=touch {mark}; git-upload-pack"
    with pytest.raises(UnreachableError):
        make_source_archive(repository.path.as_uri(), reference)
    assert not mark.exists()


def test_what_cannot_be_had(server: Server, authority: Authority, tmp_path: Path) -> None:
    address = f"{server.url.replace('://', '://user:word@')}/nothing.git"
    with pytest.raises(UnreachableError) as caught:
        find_tag_commit(address, "v1.0", ca_path=str(authority.bundle))
    assert str(caught.value).startswith(f"cannot fetch {server.url}/nothing.git: ")
    assert "word" not in str(caught.value)
    with pytest.raises(UnreachableError, match="cannot fetch "):
        make_bundle(
            f"{server.url}/nothing.git", "", "0" * 40, tmp_path / "bundle", ca_path="/nothing"
        )
