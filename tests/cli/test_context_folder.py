"""Test the place of a build context: one folder for each target, and never shared by two builds at
once.
"""

from __future__ import annotations

from pathlib import Path

from trainworks.build.context import add_local_artifacts, context_folder, write_context
from trainworks.facts.rows import Facts
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.render.dockerfile import render


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
    with (
        context_folder("cell", environment) as first,
        context_folder("cell", environment) as second,
    ):
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


def test_what_this_machine_adds_leaves_no_time_of_its_own(facts: Facts, tmp_path: Path) -> None:
    """A step that mounts the context would run again each time: newer versions of buildah have
    times in their cache's keys.
    """
    row = next(row for row in facts.targets if row.cuda == "cu113")
    plan = make_plan(request_for(row, facts), facts)
    write_context(render(plan, facts), tmp_path / "context")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "context").rglob("*")}
    sources = tmp_path / "sources"
    sources.mkdir()
    for artifact in (artifact for step in plan.steps for artifact in step.artifacts):
        (tmp_path / artifact.file).write_text(artifact.file)
        (sources / artifact.file).symlink_to(tmp_path / artifact.file)
    assert add_local_artifacts(plan, [sources], tmp_path / "context")
    assert not [path for path in (tmp_path / "context").rglob("*") if path.is_symlink()]
    assert times == {path: path.stat().st_mtime_ns for path in times}
