"""Test the output of the benchmarks: tables, ratios, and the peer's content.

No figure is asserted here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trainworks.facts.load import load
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import measure  # noqa: E402 - the benchmarks are programs and no package: the path has to be set first
from peer import write_peer  # noqa: E402


def section(*figures: measure.Figure) -> measure.Section:
    return measure.Section(
        title="Something", machine={"cores": "2"}, figures=figures, peer="another way"
    )


def test_a_ratio_is_of_medians_and_a_broken_promise_is_said() -> None:
    figure = measure.Figure(
        name="build", unit="s", ours=(1.0, 2.0, 30.0), peer=(4.0, 8.0, 1.0), promise=1.5
    )
    text = measure.describe(section(figure))
    assert figure.ratio == 2
    assert "2.00 s (1.00..30.00)" in text
    assert "at most 1.5 s: BROKEN" in text


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    measure.write("one", section(measure.Figure(name="early", unit="s", ours=(1.0,))), tmp_path)
    measure.write("two", section(measure.Figure(name="other", unit="s", ours=(1.0,))), tmp_path)
    measure.write("one", section(measure.Figure(name="late", unit="s", ours=(1.0,))), tmp_path)
    assert sorted(json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))) == [
        "one",
        "two",
    ]
    report = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "late" in report
    assert "other" in report
    assert "early" not in report


def test_the_peer_has_every_file_of_the_image(tmp_path: Path) -> None:
    plan = make_plan(Request(framework="pytorch", cuda="cpu"), load(ROOT))
    settings = HostSettings(pip=PipSettings())
    peer = write_peer(plan, b"{}", ROOT / "launcher", settings, tmp_path, "peer:latest")
    dockerfile = (tmp_path / "Dockerfile").read_text(encoding="utf-8")
    requirements = (tmp_path / "requirements.txt").read_text(encoding="utf-8")
    for step in plan.steps:
        if step.component != "builder":
            assert all(
                f"{package.name}=={package.version} " in requirements for package in step.python
            )
            assert all(package in dockerfile for package in step.debian)
    assert peer.launcher.is_file()
    assert f"--extra-index-url {plan.wheel_index}" in dockerfile
    assert peer.request(no_cache=True).no_cache
