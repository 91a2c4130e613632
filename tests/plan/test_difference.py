"""What differs between two plans of the real rows: what an upgrade would change."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from trainworks.cli.main import main
from trainworks.errors import UnknownNameError
from trainworks.facts.load import load
from trainworks.facts.rows import Facts
from trainworks.inspect.targets import plan_of_target
from trainworks.plan.difference import Change, PlanDifference, plan_difference
from trainworks.plan.model import ImagePlan

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = "pytorch-2.4.1-cu121-py311-debian12", "pytorch-2.6.0-cu124-py311-debian12"
LISTS = ("base", "components", "python", "packages", "artifacts", "environment", "labels")


@pytest.fixture(scope="module")
def facts() -> Facts:
    """Give the real rows."""
    return load(ROOT)


def plan(name: str, facts: Facts) -> ImagePlan:
    """Return the plan of a target that exists."""
    found = plan_of_target(name, facts)
    assert found is not None
    return found


def rows(found: PlanDifference) -> dict[str, tuple[Change, ...]]:
    """Return every list of a difference by its name."""
    return {name: getattr(found, name) for name in LISTS}


def test_two_versions_of_pytorch(facts: Facts) -> None:
    found = plan_difference(plan(OLD, facts), plan(NEW, facts))
    assert found.components == (
        Change(name="cuda", before="12.1.105", after="12.4.127"),
        Change(name="nccl", before="2.20.5", after="2.21.5"),
        Change(name="torch", before="2.4.1", after="2.6.0"),
        Change(name="torchaudio", before="2.4.1", after="2.6.0"),
        Change(name="torchvision", before="0.19.1", after="0.21.0"),
    )
    assert Change(name="nvidia-cusparselt-cu12", before=None, after="0.6.2") in found.python
    assert Change(name="triton", before="3.0.0", after="3.2.0") in found.python
    # mpi4py, NumPy, the launcher: what both have is no news.
    assert {change.name for change in found.python}.isdisjoint({"mpi4py", "numpy", "pip"})
    assert found.packages == ()


def test_a_vendors_target_names_what_it_downloads(facts: Facts) -> None:
    old = plan("pytorch-2.0.1-cu118-py310-ubuntu20.04-vendor", facts)
    found = plan_difference(old, plan("pytorch-2.12.1-cu130-py312-amzn2023-vendor", facts))
    assert {"efa-installer", "nccl"} <= {change.name for change in found.artifacts}
    assert Change(name="Python", before="3.10", after="3.12") in found.base


def test_there_and_back_again_says_the_same_and_nothing_differs_from_itself(facts: Facts) -> None:
    plans = [found for row in facts.targets if (found := plan_of_target(facts.name_of(row), facts)) is not None]
    assert len(plans) == len(facts.targets)
    for before, after in pairwise(plans):
        assert not any(rows(plan_difference(before, before)).values())
        there, back = rows(plan_difference(before, after)), rows(plan_difference(after, before))
        for name in LISTS:
            assert there[name] == tuple(Change(name=row.name, before=row.after, after=row.before) for row in back[name])


def test_the_command_needs_no_engine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    assert main(["diff", "--planned", OLD, NEW], ROOT) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{OLD}\n  -> {NEW}, as planned\n")
    assert "\n  ~ torch 2.4.1 -> 2.6.0\n" in out
    assert main(["diff", "--planned", OLD, OLD], ROOT) == 0
    assert capsys.readouterr().out.endswith("\n\nno differences\n")


def test_an_image_that_is_no_target_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--planned", OLD, "pytorch-2.6.0-cu124-py311-debian"], ROOT) == UnknownNameError.exit_status
    error = capsys.readouterr().err
    assert "unknown target 'pytorch-2.6.0-cu124-py311-debian'" in error
    assert f"did you mean {NEW}?" in error
    assert len(error) < 800
