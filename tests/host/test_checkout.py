"""What git says of a checkout, asked of real repositories."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trainworks.host.checkout import CheckoutState, read_checkout_state

IDENTITY = ("-c", "user.name=test", "-c", "user.email=test@test.example")


def git(folder: Path, *words: str) -> str:
    command = ("git", "-C", str(folder), *IDENTITY, *words)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Give a repository with one commit of a file that decides images, and one that does not."""
    folder = tmp_path / "checkout"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "components.toml").write_text("", encoding="utf-8")
    (folder / "README.md").write_text("", encoding="utf-8")
    git(tmp_path, "init", "--quiet", str(folder))
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "Begin")
    return folder


def test_only_files_that_decide_images_count_as_changes(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    (checkout / "README.md").write_text("other", encoding="utf-8")
    (checkout / "images" / "built.toml").write_text("other", encoding="utf-8")
    assert read_checkout_state(checkout) == CheckoutState(commit=commit, changed=False)
    (checkout / "images" / "components.toml").write_text("other", encoding="utf-8")
    assert read_checkout_state(checkout) == CheckoutState(commit=commit, changed=True)


def test_a_folder_that_is_no_checkout_has_no_commit(checkout: Path, tmp_path: Path) -> None:
    no_checkout = CheckoutState(commit="", changed=False)
    assert read_checkout_state(tmp_path) == no_checkout
    assert read_checkout_state(checkout / "images") == no_checkout


def test_files_that_git_cannot_compare_count_as_changed(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    (checkout / ".git" / "index").write_bytes(b"not an index")
    assert read_checkout_state(checkout) == CheckoutState(commit=commit, changed=True)
