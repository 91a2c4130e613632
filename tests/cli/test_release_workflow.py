"""`.github/workflows/release.yml`: what it runs is there and takes these words.

GitHub has not run it.
"""

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
    (listing,) = [
        command for command in commands(workflow["jobs"]["targets"]) if "tools/release" in command
    ]
    words = listing.partition("$(")[2].partition(")")[0].replace("$ONLY", "*")
    done = subprocess.run(
        [sys.executable, *shlex.split(words)[1:]],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    names = json.loads(done.stdout)
    assert len(names) == len(set(names)) > 10
    assert not any(name.endswith(("-vendor", "-arm64")) for name in names)


def test_the_day_moves_for_each_target_of_the_matrix_and_is_committed(
    workflow: Any, root: Path
) -> None:
    """Targets of vendors are left alone: where a base image of theirs cannot be
    reached, `lock` ends with an error.
    """
    (moves,) = [
        command
        for command in commands(workflow["jobs"]["targets"])
        if "lock --upgrade system" in command
    ]
    (line,) = [line for line in moves.splitlines() if "lock --upgrade" in line]
    names = [row["name"] for row in listed(root)]
    (pattern,) = shlex.split(line)[shlex.split(line).index("--only") + 1 :]
    assert {name for name in names if fnmatch(name, pattern)} == {
        name for name in names if "-vendor" not in name
    }
    for words in (
        "git add images",
        "git commit",
        'git push --force origin "$branch"',
        "gh pr create",
    ):
        assert words in moves
    assert "branch=main" not in moves


def listed(root: Path) -> list[dict[str, Any]]:
    words = (sys.executable, "build.py", "--list", "--format", "json")
    done = subprocess.run(words, cwd=root, check=True, capture_output=True, text=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_what_it_runs_takes_these_words(workflow: Any, root: Path) -> None:
    """Each goal of make is one, and the release's words are read: no target has
    the name that is asked for.
    """
    ran = commands(workflow["jobs"]["release"])
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    goals = [goal for command in ran if command.startswith("make ") for goal in command.split()[1:]]
    assert goals
    assert all(f"\n{goal}:" in makefile for goal in goals)
    (release,) = [command for command in ran if "tools/release" in command]
    words = shlex.split(
        release.replace("$REPOSITORY", "r.example/name").replace("$TARGET", "none of these")
    )
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=root, check=False, capture_output=True, text=True
    )
    assert done.stderr.startswith(
        "release: no target of packages for amd64 is named none of these"
    ), done.stderr


@pytest.mark.parametrize(
    ("repository", "said"),
    [
        ("", "a repository is HOST/NAME"),
        ("r.example/Upper", "is not a valid repository name"),
        ("no-slash", "HOST/NAME"),
    ],
)
def test_a_repository_that_is_none_is_refused_before_anything_is_built(
    root: Path, repository: str, said: str
) -> None:
    words = (sys.executable, str(root / "tools" / "release"), "--repository", repository)
    done = subprocess.run(words, cwd=root, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_each_job_needs_what_it_uses(workflow: Any) -> None:
    release = workflow["jobs"]["release"]
    assert release["needs"] in workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    # Only what a job writes: a pull request with the moved day; images, and a
    # signature with the job's identity.
    assert workflow["jobs"]["targets"]["permissions"] == {
        "contents": "write",
        "pull-requests": "write",
    }
    assert release["permissions"] == {"contents": "read", "packages": "write", "id-token": "write"}
    assert release["strategy"]["matrix"]["target"] == "${{ fromJSON(needs.targets.outputs.names) }}"


def test_what_is_pushed_is_signed(workflow: Any, root: Path) -> None:
    """The last command signs the results of the one before it.

    Tests/push/test_sign_released.py runs it.
    """
    release, sign = commands(workflow["jobs"]["release"])[-2:]
    words = shlex.split(sign)
    assert words == ["tools/sign-released", "--results", shlex.split(release)[-1]]
    done = subprocess.run(
        [root / words[0], *words[1:]], cwd=root, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("sign-released: ")


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_the_form_of_a_workflow_is_githubs(root: Path, name: str) -> None:
    """By the schema of workflows that check-jsonschema carries."""
    program = str(Path(sys.executable).with_name("check-jsonschema"))
    words = (program, "--builtin-schema", "vendor.github-workflows", f".github/workflows/{name}")
    done = subprocess.run(words, cwd=root, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_wrong_form_is_noticed(root: Path, tmp_path: Path) -> None:
    text = (root / ".github/workflows/release.yml").read_text(encoding="utf-8")
    path = tmp_path / "release.yml"
    path.write_text(text.replace("runs-on:", "run-on:"), encoding="utf-8")
    program = str(Path(sys.executable).with_name("check-jsonschema"))
    words = (program, "--builtin-schema", "vendor.github-workflows", str(path))
    assert subprocess.run(words, check=False, capture_output=True).returncode == 1
