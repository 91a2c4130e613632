"""Where a build context lies: at one place for each target, and never shared by two builds at once."""

from __future__ import annotations

from pathlib import Path

from trainworks.build.context import context_folder


def test_builds_of_a_target_have_the_same_folder_and_leave_it_empty(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    with context_folder("cell", environment) as first:
        first.mkdir()
        (first / "Dockerfile").write_text("FROM scratch\n", encoding="utf-8")
    assert not first.exists()
    with context_folder("cell", environment) as second:
        assert second == first
    with context_folder("other", environment) as third:
        assert third != first


def test_a_second_build_at_the_same_time_has_a_folder_of_its_own(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    with context_folder("cell", environment) as first, context_folder("cell", environment) as second:
        assert second != first
        assert second.is_dir()
        assert tmp_path not in second.parents
    assert not second.exists()


def test_what_an_interrupted_build_left_is_not_built_again(tmp_path: Path) -> None:
    left = tmp_path / "trainworks" / "context" / "cell"
    left.mkdir(parents=True)
    (left / "stray").touch()
    with context_folder("cell", {"XDG_CACHE_HOME": str(tmp_path)}) as folder:
        assert folder == left
        assert not folder.exists() or not any(folder.iterdir())


def test_no_place_for_a_cache_costs_only_speed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with context_folder("cell", {"XDG_CACHE_HOME": str(tmp_path / "file")}) as folder:
        assert folder.is_dir()
