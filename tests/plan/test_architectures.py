"""The architecture is part of a target: its base, its Python files, its name, its labels."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from trainworks.errors import UnknownNameError
from trainworks.facts.rows import MACHINES, Facts
from trainworks.plan.checks import CommandCheck
from trainworks.plan.model import Request
from trainworks.plan.resolve import base_reference, make_plan
from trainworks.plan.select import request_for, select_row
from trainworks.render.bake import render_bake_file
from trainworks.render.dockerfile import render
from trainworks.render.manifest import render_manifest

ARM = Request(framework="pytorch", cuda="cpu", architecture="arm64")


def test_amd64_is_the_default(facts: Facts) -> None:
    assert (
        facts.architecture_of(select_row(Request(framework="pytorch", cuda="cpu"), facts))
        == "amd64"
    )
    assert facts.name_of(select_row(ARM, facts)).endswith("-debian12-arm64")


def test_a_request_for_a_row_means_this_row(facts: Facts) -> None:
    for row in facts.targets:
        assert select_row(request_for(row, facts), facts) == row


def test_what_an_architecture_lacks_is_named(facts: Facts) -> None:
    with pytest.raises(UnknownNameError) as caught:
        select_row(Request(framework="pytorch", cuda="cu121", architecture="arm64"), facts)
    assert caught.value.message == "unknown --cuda for pytorch on arm64: 'cu121'"
    assert "cpu, cu130, cu132" in caught.value.hint
    with pytest.raises(UnknownNameError) as caught:
        select_row(Request(framework="tensorflow", cuda="cpu", architecture="arm64"), facts)
    assert "unknown --architecture for tensorflow: 'arm64'" in caught.value.message


def test_locked_wheels_run_on_the_targets_processors(facts: Facts) -> None:
    seen = set()
    for row in facts.targets:
        own = MACHINES[facts.architecture_of(row)]
        lock = facts.locks[facts.name_of(row)]
        for package in lock.packages:
            if package.file.endswith(".whl"):
                platforms = {tag.platform for tag in parse_wheel_filename(package.file)[3]}
                assert "any" in platforms or any(
                    platform.endswith(f"_{own}") for platform in platforms
                ), package.file
                seen.add((own, "any" in platforms))
    assert seen == {(machine, pure) for machine in MACHINES.values() for pure in (True, False)}


PLATFORM = "nvidia-cusparselt-cu13 0.8.1 is not supported on this platform"
MISSING = "torch 2.15.0 requires sympy, which is not installed."


@pytest.mark.parametrize(
    ("printed", "named"),
    [
        ("No broken requirements found.", ""),
        (PLATFORM, ""),
        (f"{PLATFORM}\n{MISSING}", MISSING),
        (PLATFORM.replace("nvidia", "other"), PLATFORM.replace("nvidia", "other")),
        # pip itself fails, and says so elsewhere.
        ("", None),
    ],
)
def test_of_pips_complaints_only_that_about_nvidias_word_for_the_platform_passes(
    facts: Facts, tmp_path: Path, printed: str, named: str | None
) -> None:
    (check,) = (
        check
        for check in make_plan(ARM, facts).checks
        if isinstance(check, CommandCheck) and "pip check" in str(check)
    )
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nprintf '%s' '{printed}'\nexit {int(not printed.startswith('No broken'))}\n"
    )
    python.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        check.command, env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (named == ""), done.stdout
    assert done.stdout.strip() == (named or "")


def test_bases_of_two_architectures_are_two_images(facts: Facts) -> None:
    ours, theirs = (facts.base_by_name[name] for name in ("debian12", "debian12-arm64"))
    assert base_reference(ours, facts) != base_reference(theirs, facts)
    assert base_reference(theirs, facts).startswith("trainworks/base:bookworm-arm64-")


def test_labels_manifest_and_bake_file_say_it(facts: Facts) -> None:
    plan = make_plan(ARM, facts)
    assert "com.amazonaws.ml.engines.sagemaker.dlc.arch.arm64" in plan.labels
    assert "com.amazonaws.ml.engines.sagemaker.dlc.arch.x86" not in plan.labels
    assert json.loads(render_manifest(plan))["target"]["architecture"] == "arm64"
    (target,) = json.loads(render_bake_file([(plan, render(plan, facts))]))["target"].values()
    assert target["platforms"] == ["linux/arm64"]
