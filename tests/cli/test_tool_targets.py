"""Test `tools/targets`, which builds, tests and records every target of packages: what it skips,
what a failure ends, and the record of the run. A program stands in for buildah; real builds are
those of `make targets`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.stand_in import write_stand_in
from trainworks.attestation.evidence import parse_record
from trainworks.build.record import record
from trainworks.facts.data import FOLDERS
from trainworks.facts.rows import Built, Facts
from trainworks.inputs.sources import sources_of
from trainworks.plan.resolve import plan_row
from trainworks.plan.select import rows_like
from trainworks.render.build_records import inputs_of_target

BUILT, *OTHERS = (
    "pytorch-2.13.0-cpu-py311-debian12",
    "pytorch-2.14.1-cu130-py311-debian12",
    "pytorch-2.15.0-cu132-py311-debian12",
)
ONLY = "pytorch-2.1[3-5].*-debian12"
IMAGE_ID = f"sha256:{'5' * 64}"


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A checkout with one commit, in which one target is recorded with the recipe of today."""

    folder: Path
    machine: Path

    def command(self, *words: str) -> tuple[str, ...]:
        program = str(self.folder / "tools" / "targets")
        mirror = str(self.machine / "mirror")
        options = ("--only", ONLY, "--engine", "buildah", "--mirror", mirror)
        return (sys.executable, program, *options, *words)

    def environment(self) -> dict[str, str]:
        """Return the variables of a machine with git and the stand-in for buildah."""
        here = {"PATH": str(self.machine), "TMPDIR": str(self.machine)}
        return {**os.environ, **here, "XDG_CACHE_HOME": str(self.machine / "cache")}

    def run(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            self.command(*words),
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def record(self) -> dict[str, Any]:
        """Return the one record of the checkout."""
        (path,) = (self.folder / "evidence").glob("*-make-targets.json")
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=test", "-c", "user.email=test@example.com")
        command = ("git", "-C", str(self.folder), *who, *words)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(root: Path, facts: Facts, tmp_path: Path) -> Checkout:
    machine = tmp_path / "machine"
    (machine / "mirror").mkdir(parents=True)
    write_stand_in(machine)
    git = shutil.which("git")
    assert git
    (machine / "git").symlink_to(git)
    for row in rows_like([ONLY], facts):
        for _, artifact in sources_of(plan_row(row, facts)):
            (machine / "mirror" / artifact.file).touch()

    folder = tmp_path / "checkout"
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(root / name, folder / name, ignore=skipped)
    (folder / "tools").mkdir()
    names = ("targets", "evidence.py", "tool_start.py", "make-room")
    for name in ("build.py", *(f"tools/{tool}" for tool in names)):
        shutil.copy(root / name, folder / name)
    (folder / ".gitignore").write_text("__pycache__/\n", encoding="utf-8")
    (folder / "images" / "built.toml").unlink()
    (row,) = rows_like([BUILT], facts)
    built = Built(
        target=BUILT,
        inputs=inputs_of_target(row, facts),
        engine="docker",
        date="2026-11-30",
        megabytes=1,
        commit="7" * 40,
        image=IMAGE_ID,
    )
    record(built, (BUILT, *OTHERS), folder, os.environ)
    checkout = Checkout(folder=folder, machine=machine)
    checkout.git("init", "--quiet")
    checkout.git("add", "--all")
    checkout.git("commit", "--quiet", "--message", "all")
    return checkout


def test_a_failure_ends_no_other_target_and_a_recorded_one_is_not_built_again(
    checkout: Checkout,
) -> None:
    (checkout.machine / "fails").write_text("trainworks", encoding="utf-8")
    status, printed = checkout.run()
    assert status == 1, printed
    record_of_run = checkout.record()
    parse_record(record_of_run)
    assert (record_of_run["suite"], record_of_run["changed"]) == ("make targets", False)
    assert record_of_run["commit"] == checkout.git("rev-parse", "HEAD")
    first, *others = record_of_run["parts"]
    assert first == {
        "name": BUILT,
        "result": "passed",
        "cause": "recorded on 2026-11-30, commit 77777777",
        "seconds": 0,
        "image": IMAGE_ID,
    }
    assert [(part["name"], part["result"], part["cause"]) for part in others] == [
        (name, "failed", f"building {name} failed") for name in OTHERS
    ]
    # Only the builds that passed are recorded.
    assert checkout.git("status", "--porcelain", "--", "images") == ""


def test_a_checkout_with_changes_is_refused(checkout: Checkout) -> None:
    with (checkout.folder / "images" / "pytorch.toml").open("a", encoding="utf-8") as file:
        file.write("# One more line.\n")
    refusal = "targets: files differ from the last commit: commit them first\n"
    assert checkout.run() == (1, refusal)
    checkout.git("commit", "--all", "--quiet", "--message", "more")
    message = "targets: no target of packages is named pytroch-*\n"
    assert checkout.run("--only", "pytroch-*") == (1, message)


def test_ctrl_c_leaves_a_record_of_what_was_done(checkout: Checkout) -> None:
    (checkout.machine / "waits").write_text("trainworks", encoding="utf-8")
    with subprocess.Popen(
        checkout.command(),
        env=checkout.environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stdout is not None
        assert f"{OTHERS[0]}: build and image tests\n" in run.stdout
        os.killpg(run.pid, signal.SIGINT)
        run.stdout.read()
    assert run.returncode == 130
    parts = checkout.record()["parts"]
    assert [part["result"] for part in parts] == ["passed", "not tested", "not tested"]
