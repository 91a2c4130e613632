"""`build.py --only ... -j 2` for real, with each engine: small targets, one of
which cannot be built.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from documented import promised
from image.support import engine_that_answers
from trainworks.build.base import ensure_base
from trainworks.engine import ENGINES
from trainworks.engine.protocol import Engine
from trainworks.errors import BuildError
from trainworks.facts.load import load
from trainworks.host.settings import read_host_settings
from trainworks.plan.model import Request
from trainworks.plan.own_base import own_base
from trainworks.plan.resolve import base_reference, make_plan
from trainworks.terminal.build_progress import BuildProgress

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from builds import freeze  # noqa: E402 - the benchmarks are programs and no package: the path has to be set first
from image.plain_targets import build, tags, write_targets  # noqa: E402

pytestmark = pytest.mark.engine

BASES = {
    "good": "touch /etc/issue",
    "broken": "rm /usr/bin/apt-get",
    "fine": "touch /etc/issue.net",
}
"""Base images by their difference from the real one.

Nothing can be installed in the second one.
"""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A copy of the checkout with a target on each base."""

    root: Path
    engine: Engine
    pattern: str
    tags: tuple[str, ...]

    def build(self) -> tuple[dict[str, Any], str]:
        """Run the command; return its report and its messages."""
        words = (
            "--only",
            self.pattern,
            "-j",
            "2",
            "--until",
            "build",
            "--engine",
            self.engine.name,
        )
        done = subprocess.run(
            (sys.executable, str(self.root / "build.py"), *words, "--format", "json"),
            cwd=self.root,
            env={**os.environ, "XDG_CACHE_HOME": str(self.root / "cache")},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        report: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == report["exit_status"]
        assert set(report) == promised("build --all, --only")
        return report, done.stderr


@pytest.fixture(params=list(ENGINES))
def matrix(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Matrix]:
    """Give the targets with their base images; everything is removed afterwards."""
    engine = engine_that_answers(request.param)
    root = tmp_path / "checkout"
    root.mkdir()
    freeze(root, own_caches=False)
    # The content of the images does not matter: no compiler, no MPI, no numpy.
    components = root / "images" / "components.toml"
    components.write_text(
        components.read_text(encoding="utf-8").replace("default = true", "default = false")
    )
    facts = load(root)
    plan = make_plan(Request(framework="pytorch", cuda="cpu"), facts)
    base = own_base(plan)
    assert base is not None
    ensure_base(base, engine, read_host_settings(os.environ), BuildProgress())
    suffix = write_targets(root, facts, tuple(BASES))
    bases = [
        base_reference(base, load(root)) for base in load(root).bases if base.name.endswith(suffix)
    ]
    mine = Matrix(root=root, engine=engine, pattern=f"*{suffix}", tags=tuple(tags(root, suffix)))
    try:
        for name, line in zip(bases, BASES.values(), strict=True):
            folder = tmp_path / "base"
            folder.mkdir(exist_ok=True)
            build(engine, folder, plan.image, f"RUN {line}", name)
        yield mine
    finally:
        for reference in (*mine.tags, *bases):
            engine.remove(reference)


def test_one_that_fails_takes_no_other_with_it_and_the_next_run_goes_on_where_this_one_ended(
    matrix: Matrix,
) -> None:
    report, output = matrix.build()
    assert report["at_once"] == 2
    assert [target["outcome"] for target in report["targets"]] == ["done", "failed", "done"]
    assert [bool(matrix.engine.inspect(tag)) for tag in matrix.tags] == [True, False, True]
    good, broken, fine = report["targets"]
    assert report["exit_status"] == broken["exit_status"] == BuildError.exit_status
    assert broken["target"] in broken["cause"]
    assert f"{broken['target']}: failed: {broken['cause']}" in output
    assert "apt-get: not found" in output
    assert f"{good['target']}: done" in output

    again, output = matrix.build()
    assert [target["outcome"] for target in again["targets"]] == [
        "unchanged",
        "failed",
        "unchanged",
    ]
    assert [
        target["report"]["identifier"] for target in (again["targets"][0], again["targets"][2])
    ] == [
        good["report"]["identifier"],
        fine["report"]["identifier"],
    ]
    assert again["exit_status"] == BuildError.exit_status
    assert again["seconds"] < report["seconds"]
