"""`.github/workflows/release.yml`: what it runs is there and takes these words. GitHub has not run it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def workflow(root: Path) -> Any:
    return yaml.safe_load((root / ".github/workflows/release.yml").read_text(encoding="utf-8"))


def commands(job: Any) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_its_matrix_is_every_target_of_packages(workflow: Any, root: Path) -> None:
    (listing,) = [command for command in commands(workflow["jobs"]["targets"]) if "tools/release" in command]
    words = listing.partition("$(")[2].partition(")")[0].replace("$ONLY", "*")
    done = subprocess.run(
        [sys.executable, *shlex.split(words)[1:]], cwd=root, check=True, capture_output=True, text=True
    )
    names = json.loads(done.stdout)
    assert len(names) == len(set(names)) > 10
    assert not any(name.endswith(("-vendor", "-arm64")) for name in names)


def test_the_day_moves_for_each_target_of_the_matrix_and_is_committed(workflow: Any, root: Path) -> None:
    """Targets of vendors are left alone: where a base image of theirs cannot be reached, `lock` ends with an error."""
    (moves,) = [command for command in commands(workflow["jobs"]["targets"]) if "lock --upgrade system" in command]
    (line,) = [line for line in moves.splitlines() if "lock --upgrade" in line]
    names = [row["name"] for row in listed(root)]
    (pattern,) = shlex.split(line)[shlex.split(line).index("--only") + 1 :]
    assert {name for name in names if fnmatch(name, pattern)} == {name for name in names if "-vendor" not in name}
    for words in ("git add images", "git commit", "git push"):
        assert words in moves


def listed(root: Path) -> list[dict[str, Any]]:
    words = (sys.executable, "build.py", "--list", "--format", "json")
    done = subprocess.run(words, cwd=root, check=True, capture_output=True, text=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_what_it_runs_takes_these_words(workflow: Any, root: Path) -> None:
    """Each goal of make is one, and the release's words are read: no target has the name that is asked for."""
    ran = commands(workflow["jobs"]["release"])
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    goals = [goal for command in ran if command.startswith("make ") for goal in command.split()[1:]]
    assert goals
    assert all(f"\n{goal}:" in makefile for goal in goals)
    (release,) = [command for command in ran if "tools/release" in command]
    words = shlex.split(release.replace("$REPOSITORY", "r.example/name").replace("$TARGET", "none of these"))
    done = subprocess.run([sys.executable, *words[1:]], cwd=root, check=False, capture_output=True, text=True)
    assert done.stderr.startswith("release: no target of packages for amd64 is named none of these"), done.stderr


@pytest.mark.parametrize(
    ("repository", "said"),
    [
        ("", "a repository is HOST/NAME"),
        ("r.example/Upper", "is not a valid repository name"),
        ("no-slash", "HOST/NAME"),
    ],
)
def test_a_repository_that_is_none_is_refused_before_anything_is_built(root: Path, repository: str, said: str) -> None:
    words = (sys.executable, str(root / "tools" / "release"), "--repository", repository)
    done = subprocess.run(words, cwd=root, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_each_job_needs_what_it_uses(workflow: Any) -> None:
    release = workflow["jobs"]["release"]
    assert release["needs"] in workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read", "packages": "write"}
    assert release["strategy"]["matrix"]["target"] == "${{ fromJSON(needs.targets.outputs.names) }}"
