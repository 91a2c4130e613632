"""Test `.github/workflows/release.yml`: the programs that it runs are there and take these words.

GitHub has not run the workflow.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainworks.facts.rows import Facts


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
    assert "\ntools/propose archive " in moves


@pytest.fixture
def cloned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a clone of a small repository, and a `gh` that has no pull request and makes any."""
    clone, origin = tmp_path / "clone", tmp_path / "origin"
    for name in ("images", "docs", "tests", "src"):
        (origin / name).mkdir(parents=True)
        (origin / name / "file").write_text("first\n", encoding="utf-8")
    (origin / "README.md").write_text("first\n", encoding="utf-8")
    git(origin, "init", "--quiet", "--initial-branch", "main")
    git(origin, "add", ".")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    git(origin, *author, "commit", "--quiet", "--message", "First")
    git(tmp_path, "clone", "--quiet", str(origin), str(clone))
    program = tmp_path / "bin" / "gh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\necho 0\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return clone


def git(folder: Path, *words: str) -> str:
    command = ("git", "-C", str(folder), *words)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_what_moved_is_proposed_and_main_stays(root: Path, cloned: Path) -> None:
    propose = (str(root / "tools" / "propose"), "archive", "Move the day")
    (cloned / "src" / "file").write_text("not for a proposal\n", encoding="utf-8")
    subprocess.run(propose, cwd=cloned, check=True)
    assert not (cloned.parent / "asked").exists(), "nothing moved"

    (cloned / "images" / "file").write_text("moved\n", encoding="utf-8")
    (cloned / "README.md").write_text("built today\n", encoding="utf-8")
    subprocess.run(propose, cwd=cloned, check=True)
    origin = cloned.parent / "origin"
    branch = git(cloned, "branch", "--show-current").strip()
    assert branch.startswith("archive-20")
    assert git(origin, "show", "--format=%s", "--name-only", branch).split("\n\n") == [
        "Move the day",
        "README.md\nimages/file\n",
    ]
    assert git(origin, "show", "main:images/file") == "first\n"
    listing, create = (cloned.parent / "asked").read_text(encoding="utf-8").splitlines()
    assert listing.startswith(f"pr list --head {branch} ")
    assert create == f"pr create --fill --head {branch}"


def test_what_the_jobs_pushed_becomes_the_page(workflow: Any) -> None:
    """The last job reads the files that the others left.

    tests/reports/test_released.py runs its first line.
    """
    page = workflow["jobs"]["page"]
    assert set(page["needs"]) == {"targets", "release"}
    collect = next(command for command in commands(page) if "--collect" in command)
    release = next(
        command for command in commands(workflow["jobs"]["release"]) if "tools/release" in command
    )
    results = shlex.split(release)[-1]
    (download,) = [step for step in page["steps"] if "download-artifact" in step.get("uses", "")]
    assert download["with"] == {"path": results, "merge-multiple": True}
    assert f"tools/release --collect --results {results}\n" in collect
    assert "\ntools/propose images " in collect


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
    ("repository", "message"),
    [
        ("", "a repository is HOST/NAME"),
        ("r.example/Upper", "is not a valid repository name"),
        ("no-slash", "HOST/NAME"),
    ],
)
def test_a_repository_that_is_none_is_refused_before_anything_is_built(
    root: Path, repository: str, message: str
) -> None:
    words = (sys.executable, str(root / "tools" / "release"), "--repository", repository)
    done = subprocess.run(words, cwd=root, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_each_job_needs_what_it_uses(workflow: Any) -> None:
    release = workflow["jobs"]["release"]
    assert release["needs"] in workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    # Only the permissions that a job needs to write: pull requests with the moved day and with
    # digests; images, and a signature with the job's identity.
    proposes = {"contents": "write", "pull-requests": "write"}
    assert workflow["jobs"]["targets"]["permissions"] == proposes
    assert workflow["jobs"]["page"]["permissions"] == proposes
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


INSTALLS = {"oras-project/setup-oras": "version", "sigstore/cosign-installer": "cosign-release"}
"""Actions that install a program, and their input for its version.

By default they take the newest program that they know.
"""


def versions_of(root: Path) -> dict[str, set[str]]:
    """Return the version that each use of such an action asks for, in all workflows."""
    versions: dict[str, set[str]] = {action: set() for action in INSTALLS}
    for path in (root / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
        for step in [step for job in jobs for step in job["steps"]]:
            action = step.get("uses", "").partition("@")[0]
            if action in INSTALLS:
                version = step.get("with", {}).get(INSTALLS[action], "the newest")
                versions[action].add(version.removeprefix("v"))
    return versions


def test_actions_install_the_versions_of_the_rows(root: Path, facts: Facts) -> None:
    tags = {tool.name: tool.image.rpartition(":v")[2] for tool in facts.tool_images}
    assert versions_of(root) == {
        "oras-project/setup-oras": {tags["oras"]},
        "sigstore/cosign-installer": {tags["cosign"]},
    }


@pytest.mark.parametrize("program", ["oras", "cosign"])
def test_the_versions_of_the_rows_are_those_that_the_suite_runs(
    root: Path, facts: Facts, program: str
) -> None:
    """The suite's are Debian's, whose changelog comes with the program: cosign cannot say it."""
    changelog = root / ".cache/peers/registry-tools/usr/share/doc" / program
    files = sorted(changelog.glob("changelog.Debian*.gz"))
    if not files:
        pytest.skip(f"NOT TESTED: no {program} of Debian here (tools/set-up-engine all)")
    with gzip.open(files[0], "rt", encoding="utf-8") as text:
        version = text.readline().partition("(")[2].partition("-")[0]
    (tag,) = [tool.image.rpartition(":v")[2] for tool in facts.tool_images if tool.name == program]
    assert tag.rpartition(".")[0] == version.rpartition(".")[0]


TERM = re.compile(r"(!?)(startsWith|contains)\(env\.(\w+), '([^']+)'\)|env\.(\w+) (==|!=) '(.*)'")
"""A term of the conditions of the login steps, in GitHub's language of expressions."""


def is_run(step: Any, variables: dict[str, str]) -> bool:
    """Return whether a step runs with these variables: whether each term of its condition holds."""
    for term in step.get("if", "").split(" && "):
        match = TERM.fullmatch(term)
        assert match, term
        negation, function, name, text, compared, operator, value = match.groups()
        if function == "startsWith":
            holds = variables[name].lower().startswith(text.lower())
        elif function == "contains":
            holds = text.lower() in variables[name].lower()
        else:
            holds = (variables[compared].lower() == value.lower()) == (operator == "==")
        if holds == bool(negation):
            return False
    return True


def login_steps(workflow: Any, repository: str, role: str = "") -> tuple[list[Any], list[Any]]:
    """Return the steps that log in at a repository, and those that take a role of AWS."""
    variables = {"REPOSITORY": repository, "AWS_ROLE": role}
    steps = workflow["jobs"]["release"]["steps"]
    logins = [step for step in steps if step.get("run", "").startswith("tools/log-in ")]
    roles = [step for step in steps if "configure-aws-credentials" in step.get("uses", "")]
    assert len(logins) > 1
    assert len(roles) == 1
    return (
        [step for step in logins if is_run(step, variables)],
        [step for step in roles if is_run(step, variables)],
    )


ROLE = "arn:aws:iam::123456789012:role/releases"


@pytest.mark.parametrize(
    ("repository", "role", "takes_role", "login"),
    [
        ("ghcr.io/team/project", "", False, "${{ github.token }}"),
        ("GHCR.io/Team/project", "", False, "${{ github.token }}"),
        ("ghcr.io/team/project", ROLE, False, "${{ github.token }}"),
        ("123456789012.dkr.ecr.eu-west-1.amazonaws.com/training", ROLE, True, "ecr"),
        ("123456789012.dkr-ecr.eu-west-1.on.aws/training", ROLE, True, "ecr"),
        # A runner of one's own may have a role already.
        ("123456789012.dkr.ecr.eu-west-1.amazonaws.com/training", "", False, "ecr"),
        ("registry.example/team", "", False, "${{ secrets.RELEASE_REGISTRY_PASSWORD }}"),
        ("ghcr.io.example/team", "", False, "${{ secrets.RELEASE_REGISTRY_PASSWORD }}"),
    ],
)
def test_exactly_one_login_runs_for_each_kind_of_registry(
    workflow: Any, repository: str, role: str, takes_role: bool, login: str
) -> None:
    logins, roles = login_steps(workflow, repository, role)
    assert len(roles) == int(takes_role)
    (step,) = logins
    assert step["run"] == 'tools/log-in "$REPOSITORY"'
    variables = step["env"]
    assert variables.get("REGISTRY_PASSWORD", variables["LOGIN"]) == login
    assert variables["LOGIN"] == ("ecr" if login == "ecr" else "password")


def test_the_role_is_taken_before_the_login_and_both_before_the_build(workflow: Any) -> None:
    steps = workflow["jobs"]["release"]["steps"]
    roles = login_steps(workflow, "1.dkr.ecr.x.amazonaws.com/x", ROLE)[1]
    logins = [step for step in steps if step.get("run", "").startswith("tools/log-in ")]
    (build,) = [step for step in steps if "tools/release " in step.get("run", "")]
    (sign,) = [step for step in steps if "tools/sign-released " in step.get("run", "")]
    ecr = next(step for step in logins if step["env"]["LOGIN"] == "ecr")
    assert steps.index(roles[0]) < steps.index(ecr)
    assert max(map(steps.index, logins)) < steps.index(build) < steps.index(sign)
    assert roles[0]["with"] == {
        "role-to-assume": "${{ env.AWS_ROLE }}",
        "aws-region": "${{ env.AWS_REGION }}",
    }
    # Without it GitHub gives the job no token, by which AWS and cosign know it.
    assert workflow["jobs"]["release"]["permissions"]["id-token"] == "write"


def test_the_provenance_names_the_builder_as_the_signatures_certificate_does(
    workflow: Any,
) -> None:
    """Fulcio's certificate names the file of the workflow, with the ref that it ran from."""
    (release,) = [
        command for command in commands(workflow["jobs"]["release"]) if "tools/release " in command
    ]
    words = shlex.split(release)
    builder = words[words.index("--builder") + 1]
    variables = {
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_WORKFLOW_REF": "OWNER/NAME/.github/workflows/release.yml@refs/heads/main",
    }
    command = ("bash", "-euc", f'printf %s "{builder}"')
    done = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
    assert done.stdout == "https://github.com/" + variables["GITHUB_WORKFLOW_REF"]


def test_what_is_set_by_hand_wins_over_the_variables_of_the_repository(workflow: Any) -> None:
    """A default of an input would win over the variable, too.

    YAML reads the key `on` as a boolean.
    """
    inputs = workflow[True]["workflow_dispatch"]["inputs"]
    for name, key in (
        ("REPOSITORY", "repository"),
        ("AWS_ROLE", "aws-role"),
        ("AWS_REGION", "aws-region"),
    ):
        first, second = workflow["env"][name].removeprefix("${{ ").split(" ")[:3:2]
        assert (first, second) == (f"inputs.{key}", f"vars.RELEASE_{name}")
        assert inputs[key]["default"] == ""


def test_the_form_of_the_workflows_is_githubs(root: Path) -> None:
    """Check the workflows by the schema that check-jsonschema carries."""
    program = str(Path(sys.executable).with_name("check-jsonschema"))
    workflows = list(map(str, (root / ".github" / "workflows").glob("*.yml")))
    assert len(workflows) > 1
    words = (program, "--builtin-schema", "vendor.github-workflows", *workflows)
    done = subprocess.run(words, cwd=root, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_wrong_form_is_noticed(root: Path, tmp_path: Path) -> None:
    text = (root / ".github/workflows/release.yml").read_text(encoding="utf-8")
    path = tmp_path / "release.yml"
    path.write_text(text.replace("runs-on:", "run-on:"), encoding="utf-8")
    program = str(Path(sys.executable).with_name("check-jsonschema"))
    words = (program, "--builtin-schema", "vendor.github-workflows", str(path))
    assert subprocess.run(words, check=False, capture_output=True).returncode == 1


def test_the_pages_of_a_release_are_written_after_its_record(root: Path, tmp_path: Path) -> None:
    """Also when a target failed: the status is that of the release."""
    shutil.copy(root / "Makefile", tmp_path / "Makefile")
    for name, status in (("tools/evidence.py", 3), (".venv/bin/python", 0)):
        program = tmp_path / name
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\necho "{name} $1" >>asked\nexit {status}\n', "utf-8")
        program.chmod(0o755)
    words = ("make", "--old-file", "setup", "--old-file", "engines", "release", "REPOSITORY=h/x")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Error 3" in done.stderr
    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert asked == ["tools/evidence.py run", ".venv/bin/python tools/generate.py"]
