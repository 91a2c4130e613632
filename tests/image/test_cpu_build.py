"""The `cpu` image, for real, with every engine: its promises, a second build,
and a change of the launcher only.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from documented import promised
from image.support import ROOT, BuiltByCommand, build_command, copied_checkout
from trainworks.build.image import build_image
from trainworks.build.options import BuildOptions
from trainworks.build.session import BuildSession
from trainworks.build.target import image_spec
from trainworks.engine.protocol import StepEvent
from trainworks.facts.load import load
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks.render.build_records import find_current_builds
from trainworks.render.dockerfile import render
from trainworks.terminal.build_progress import BuildProgress

pytestmark = pytest.mark.engine

REQUEST = Request(framework="pytorch", cuda="cpu")


class Recorder(BuildProgress):
    """Follows a build as a person's terminal would, and keeps its events."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.events: list[StepEvent] = []

    def __call__(self, event: StepEvent) -> None:
        self.events.append(event)
        super().__call__(event)

    def steps(self, state: str) -> list[StepEvent]:
        """Return the steps that ended in this state; taking over a base is none."""
        return [
            event
            for event in self.events
            if event.state == state and event.step.startswith(("RUN", "COPY"))
        ]


def test_every_promise_is_kept_and_counted(image: BuiltByCommand) -> None:
    plan = make_plan(REQUEST, load(ROOT))
    checks = image.report["checks"]
    assert [check["title"] for check in checks if not check["passed"]] == []
    assert len(checks) == len(set(plan.checks))
    assert f"{len(checks)} checks passed, 0 failed" in image.progress
    assert not any(line.startswith("ok  ") for line in image.progress.splitlines())
    assert image.report["size"] <= plan.budget_megabytes * 1_000_000


def test_the_result_has_the_documented_keys(image: BuiltByCommand) -> None:
    assert set(image.report) == promised("build", "pushed")


def test_a_green_build_is_recorded_and_counts_until_something_changes(
    image: BuiltByCommand, tmp_path: Path
) -> None:
    facts, name = load(image.root), str(image.report["name"])
    built = facts.built_by_target[name]
    assert (built.engine, built.megabytes) == (
        image.engine.name,
        round(image.report["size"] / 1_000_000),
    )
    assert bool(built.seconds) is not image.report["unchanged"]
    assert find_current_builds(facts)[name] == built
    shutil.copytree(image.root, tmp_path / "changed")
    recipe = tmp_path / "changed" / "templates" / "components" / "mpi4py.j2"
    recipe.write_text(
        recipe.read_text(encoding="utf-8").replace("COPY ", "RUN true\nCOPY ", 1), encoding="utf-8"
    )
    assert name not in find_current_builds(load(tmp_path / "changed"))


def test_a_second_build_runs_no_step(image: BuiltByCommand) -> None:
    command = build_command(image.engine.name, "--until", "build")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(done.stdout)["identifier"] == image.report["identifier"]


def test_checks_that_an_unchanged_image_has_passed_are_not_asked_again(
    image: BuiltByCommand,
) -> None:
    done = subprocess.run(
        build_command(image.engine.name), capture_output=True, text=True, check=True, timeout=300
    )
    again = json.loads(done.stdout)
    assert (again["identifier"], again["checks"], again["tested"]) == (
        image.report["identifier"],
        image.report["checks"],
        image.report["tested"],
    )
    assert (
        f"known by its identifier: {len(again['checks'])} checks passed on {again['tested']}"
        in done.stderr
    )
    assert not any(line.startswith("ok  ") for line in done.stderr.splitlines())


def test_a_change_of_the_launcher_rebuilds_only_the_last_layers(
    image: BuiltByCommand, tmp_path: Path
) -> None:
    copied_checkout(tmp_path)
    changed = tmp_path / "launcher" / "trainworks_launcher" / "contract" / "names.py"
    # An engine may have forgotten other steps, though it has the image: after
    # the first build it has them again.
    for _ in range(2):
        # A line that no earlier run of this test has built already.
        changed.write_text(
            f"{changed.read_text(encoding='utf-8')}\n# {uuid.uuid4().hex}\n", encoding="utf-8"
        )
        facts = load(tmp_path)
        plan = replace(make_plan(REQUEST, facts), tags=("trainworks-test/launcher-change:latest",))
        recorder = Recorder()
        spec = image_spec(plan, render(plan, facts), BuildSession(root=tmp_path, facts=facts))
        result = build_image(spec, image.engine, BuildOptions(until="build"), recorder)
        rebuilt = [
            event
            for event in recorder.steps("done")
            if event.component not in ("launcher", "image")
        ]
        if not rebuilt:
            break
    before, after = (
        [entry.size for entry in image.engine.history(name) if entry.size]
        for name in (image.reference, plan.tags[0])
    )
    image.engine.remove(plan.tags[0])
    assert result.image.identifier != image.report["identifier"]
    assert rebuilt == [], "a component was rebuilt that did not change"
    assert "launcher" in {event.component for event in recorder.steps("done")}
    # The launcher's layer and five of the image's own.
    assert before[:-6] == after[:-6]
